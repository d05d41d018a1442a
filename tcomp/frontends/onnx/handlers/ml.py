"""Operators of the domain `ai.onnx.ml`: classical machine learning."""

from __future__ import annotations

from tcomp.errors import ImportModelError
from tcomp.frontends.onnx.context import Context, Table
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew


def _scaler(ctx: Context) -> Value:
    """(x - offset) * scale, in float32."""
    x = ctx.add(ew.CAST, [ctx.value(0)], dtype="float32")
    width = x.shape[-1] if x.shape else 1
    for name, op in (("offset", ew.SUB), ("scale", ew.MUL)):
        if (values := ctx.attrs.get(name)) is not None:
            if len(values) not in (1, width):
                raise ImportModelError(
                    f"attribute `{name}` has {len(values)} elements", where=ctx.where, why=f"the input has {width} columns"
                )
            x = ctx.add(op, [x, ctx.constant(values, "float32")])
    return x


TABLE: Table = {"Scaler": _scaler}
