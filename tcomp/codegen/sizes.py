"""Sizes over the dims of a model as JSON, for the runtime to compute (see `tcomp.runtime.plan`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tcomp.errors import CodegenError
from tcomp.ir.expr import Dim, Expr, as_expr

_OPERATORS = ("add", "sub", "mul", "floordiv", "mod", "truncdiv", "truncmod", "min", "max")


def size_data(d: Dim, names: Mapping[Expr, Any], where: str) -> Any:
    """A size as JSON: a number, what `names` says of a variable, or [operator, size, size]. Raises `CodegenError` for any other."""
    e = as_expr(d)
    if e in names:
        return names[e]
    if e.op == "const":
        return int(e.attr)
    if e.op in _OPERATORS:
        return [e.op, *(size_data(a, names, where) for a in e.args)]
    raise CodegenError(f"the size {e} cannot be computed on the host", where=where)
