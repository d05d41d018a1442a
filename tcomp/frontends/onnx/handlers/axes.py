"""Axes of ONNX nodes: negative ones count from the end."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.frontends.onnx.context import Context
from tcomp.ir.expr import Dim


def axis_of(ctx: Context, axis: Dim, rank: int, beyond: int = 0) -> int:
    """`axis` as 0 <= result < rank + beyond. Raises `ImportModelError` if it is outside."""
    if not isinstance(axis, int):
        raise ctx.unsupported("an axis depends on a symbolic size")
    if not -rank <= axis < rank + beyond:
        raise ctx.invalid(f"axis {axis} of a tensor of rank {rank}")
    return axis + rank if axis < 0 else axis


def axes_of(ctx: Context, axes: Sequence[Dim], rank: int) -> tuple[int, ...]:
    """Axes, each valid and given once, in the order given."""
    result = tuple(axis_of(ctx, axis, rank) for axis in axes)
    if len(set(result)) != len(result):
        raise ctx.invalid(f"axes {list(map(str, axes))} name one axis twice")
    return result


def given_axes(ctx: Context, position: int) -> tuple[Dim, ...] | None:
    """The attribute `axes` (old opsets) or the integer input at `position`; None where neither is given."""
    if ctx.attrs.get("axes") is not None:
        return tuple(ctx.attrs["axes"])
    return None if ctx.input(position) is None else ctx.require_dims(position, "the axes")
