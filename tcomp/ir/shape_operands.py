"""Symbolic sizes that are given by values: of elements of inputs, and computed from these before a run.

A shape operand may be an input of the model: Reshape's shape, the axes of a sum. Each of its elements that matters is then a variable, and
what follows from it (extents, starts, how many rows a loop has) is again one, with a range that the run's memory and code rely on. Their
`Source` says how they are computed; all of it is known once the inputs are, before the run and its plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tcomp.ir import te
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import INDEX, Dim, Expr, Source, as_expr, bounds, const, rewrite, select, substitute, var, variables, with_sources
from tcomp.ir.graph import Graph
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.simplify import as_dim, simplify
from tcomp.runtime.loaded_model import misfit


def element(name: str, position: int, number: int, dtype: str) -> Expr:
    """Element `number` of input `position`, called `name`: an int64, or a float of its own type."""
    source = Source(None, position, number, dtype, f"element {number}")
    return var(f"{name}.{number}", dtype=dtype if is_float(dtype) else INDEX, source=source)


def depends_on_values(e: Dim) -> bool:
    """Whether an expression depends on values of inputs."""
    return isinstance(e, Expr) and any(v.attr.source is not None for v in variables(e))


def derived(name: str, value: Dim, lo: int, hi: int | None, what: str, valid: Expr | None = None) -> Dim:
    """A size with its range, computed before a run, which is refused where the size is outside of the range or not `valid`. A size that
    does not depend on values of inputs is returned as it is."""
    value, condition = _folded(simplify(_unchecked(value))), None if valid is None else _folded(simplify(_unchecked(valid)))
    least, most = bounds(value)
    low = lo if least is None else max(least, lo)
    high = hi if most is None else most if hi is None else min(most, hi)
    if condition is not None and not (condition.op == "const" and condition.attr):
        value = select(condition, value, low - 1)  # just outside
    if not variables(value) or (value.op == "var" and (least, most) == (low, high)):
        return as_dim(value)
    return var(name, low, high, source=Source(value, what=what))


def _folded(e: Expr) -> Expr:
    """The constant that an expression without variables is: floats are not simplified."""
    if e.op == "const" or variables(e):
        return e
    (found,) = evaluate([te.compute((), lambda: e, "size")], {})
    return const(found.item(), e.dtype)


def _unchecked(e: Dim) -> Expr:
    """Without the checks that a kernel would report; what they guard is never divided by."""
    return rewrite(as_expr(e), lambda node: node.args[0] if node.op == "checked" else node)


def sizes_in(graph: Graph) -> dict[Expr, None]:
    """The symbolic sizes of a graph and of all bodies in it, those in attributes included, in order of first use."""
    found = dict.fromkeys(graph.dims())
    for node in graph.nodes:
        for value in node.attrs.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                found.update(dict.fromkeys(variables(part)) if isinstance(part, Expr) else {})
        for body in node.bodies:
            found.update(sizes_in(body))
    return found


def bind_values(graph: Graph, inputs: Sequence[np.ndarray[Any, Any]], dims: Mapping[Expr, int]) -> dict[Expr, int]:
    """`dims`, with the sizes of a graph that are given by the values of its inputs. Raises `InputError` where one is out of its range."""
    known: dict[Expr, Any] = dict(dims)
    wanted = {**sizes_in(graph), **dict.fromkeys(variables(*graph.checks))}
    for v in with_sources((v for v in wanted if v.attr.source is not None), dict(dims)):
        if (source := v.attr.source) is None:
            continue
        if source.value is None:
            known[v] = inputs[source.input].reshape(-1)[source.element].item()
            continue
        value = substitute(source.value, {d: const(n, d.dtype) for d, n in known.items()})
        (result,) = evaluate([te.compute((), lambda value=value: as_expr(value), v.name)], {})
        known[v] = int(result)
        check_value(v, known[v], [value.name for value in graph.inputs])
    return {v: int(n) for v, n in known.items() if v.dtype == INDEX}


def elements_of(v: Expr) -> list[int]:
    """The numbers of the inputs whose values decide on a size."""
    return sorted({u.attr.source.input for u in with_sources([v]) if u.attr.source is not None and u.attr.source.value is None})


def check_value(v: Expr, value: int, names: Sequence[str]) -> None:
    """Raises `InputError` where the size `v` would be out of its range; `names` are those of the inputs."""
    lo, hi = v.attr.lo, v.attr.hi
    if (lo is None or value >= lo) and (hi is None or value <= hi):
        return
    raise misfit([names[n] for n in elements_of(v)], v.attr.source.what, value, lo, hi)
