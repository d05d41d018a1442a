"""ONNX handlers of matrix products and Einstein sums."""

from __future__ import annotations

from tcomp.frontends.onnx.context import Context, Versions
from tcomp.ir.graph import Value
from tcomp.ops.elementwise import ADD, SCALE
from tcomp.ops.matmul import EINSUM, MATMUL


def _matmul(ctx: Context) -> Value:
    return ctx.add(MATMUL, [ctx.value(0), ctx.value(1)])


def _gemm(ctx: Context) -> Value:
    """alpha * A' B' + beta * C; scaling and bias are nodes of their own, which fuse with what follows."""
    a, b, c = ctx.value(0), ctx.value(1), ctx.input(2)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ctx.invalid("A and B must be matrices")
    y = ctx.add(MATMUL, [a, b], transpose_a=bool(ctx.attrs["transA"]), transpose_b=bool(ctx.attrs["transB"]))
    y = _scaled(ctx, y, ctx.attrs["alpha"])
    if c is None or ctx.attrs["beta"] == 0.0:
        return y
    return ctx.add(ADD, [y, _scaled(ctx, c, ctx.attrs["beta"])])


def _scaled(ctx: Context, x: Value, factor: float) -> Value:
    return x if factor == 1.0 else ctx.add(SCALE, [x], factor=factor)


def _einsum(ctx: Context) -> Value:
    return ctx.add(EINSUM, ctx.inputs, equation=ctx.attrs["equation"])


TABLE: dict[str, Versions] = {"MatMul": ((1, _matmul),), "Gemm": ((1, _gemm),), "Einsum": ((12, _einsum),)}
