"""What the handlers of `com.microsoft` share: wider arithmetic, biases, heads of attention, the standard's handlers under other names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tcomp.frontends.onnx.context import Context, Handler, Table, in_force
from tcomp.frontends.onnx.handlers.movement import cut, reshaped
from tcomp.ir.broadcasting import HALF
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Operator, Value
from tcomp.ops.elementwise import ADD, CAST
from tcomp.ops.movement import TRANSPOSE
from tcomp.ops.quantization import DEQUANTIZE, QUANTIZE

CHANNELS_LAST, CHANNELS_FIRST = 1, -1


def cast(ctx: Context, x: Value, dtype: str) -> Value:
    """`x` in another type."""
    return x if x.dtype == dtype else ctx.add(CAST, [x], dtype=dtype)


def wide(ctx: Context, x: Value) -> Value:
    """`x`, 16-bit floats as float32: so that what is composed of several operators is rounded once."""
    return cast(ctx, x, "float32") if x.dtype in HALF else x


def total(ctx: Context, *terms: Value | None) -> Value:
    """The sum of those that are given."""
    first, *rest = [t for t in terms if t is not None]
    for term in rest:
        first = ctx.add(ADD, [first, term])
    return first


def known(ctx: Context, dim: Dim, what: str) -> int:
    """A size that must be fixed."""
    if not isinstance(dim, int):
        raise ctx.unsupported(f"{what} is of symbolic size {dim}", "fix it with --dim")
    return dim


def halves(ctx: Context, x: Value, interleaved: bool = False) -> tuple[Value, Value]:
    """The two halves of the last axis; its elements in turn if `interleaved`."""
    axis, size = len(x.shape) - 1, known(ctx, x.shape[-1], "an axis that is halved")
    if size % 2:
        raise ctx.invalid(f"an axis of {size} elements cannot be halved")
    half = size // 2
    return (cut(ctx, x, axis, 0, half, 2), cut(ctx, x, axis, 1, half, 2)) if interleaved else (
        cut(ctx, x, axis, 0, half), cut(ctx, x, axis, half, half))  # fmt: skip


def transposed(ctx: Context, x: Value, to: int) -> Value:
    """`x` with its channels moved to the end (CHANNELS_LAST), or from there to axis 1 (CHANNELS_FIRST)."""
    rest = range(2, len(x.shape))
    perm = (0, *rest, 1) if to == CHANNELS_LAST else (0, len(x.shape) - 1, *(n - 1 for n in rest))
    return ctx.add(TRANSPOSE, [x], perm=perm)


def split_heads(ctx: Context, x: Value, heads: int) -> Value:
    """[batch, positions, heads * size] -> [batch, heads, positions, size]."""
    if len(x.shape) != 3 or known(ctx, x.shape[2], "the hidden axis") % heads:
        raise ctx.invalid(f"{x} does not divide into {heads} heads")
    return ctx.add(TRANSPOSE, [reshaped(ctx, x, (*x.shape[:2], heads, int(x.shape[2]) // heads))], perm=(0, 2, 1, 3))


def merge_heads(ctx: Context, x: Value) -> Value:
    """The inverse of `split_heads`."""
    y = ctx.add(TRANSPOSE, [x], perm=(0, 2, 1, 3))
    return reshaped(ctx, y, (*y.shape[:2], int(y.shape[2]) * int(y.shape[3])))


def dequantized(ctx: Context, x: Value, scale: Value, zero: Value | None) -> Value:
    """(x - zero) * scale; scale and zero point have one element."""
    return ctx.add(DEQUANTIZE, [x, scale, zero], axis=0, block=0, dtype=scale.dtype)


def quantized(ctx: Context, y: Value, scale: int, dtype: str) -> Value:
    """`y` quantised by inputs `scale` and `scale + 1`, of which the zero point may be left out."""
    attrs = {"axis": 1, "block": 0, "dtype": dtype, "precision": "float32"}
    return ctx.add(QUANTIZE, [y, ctx.value(scale), ctx.input(scale + 1)], **attrs)


def operand(ctx: Context, i: int) -> Value:
    """Input `i`, dequantised by the two inputs after it."""
    return dequantized(ctx, ctx.value(i), ctx.value(i + 1), ctx.input(i + 2))


def applied(ctx: Context, handler: Handler, inputs: Sequence[Value | None], opset: int = 22, **attrs: Any) -> Value:
    """The first output of a handler of the standard domain, at an opset, with other inputs and further attributes."""
    result = handler(replace(ctx, inputs=tuple(inputs), opset=opset, attrs={**ctx.attrs, **attrs}, outputs=ctx.outputs[:1]))
    first = result[0] if isinstance(result, tuple) else result
    assert first is not None
    return first


def given(ctx: Context, *inputs: Value | None) -> Context:
    """The node with other inputs."""
    return replace(ctx, inputs=inputs)


def standard(table: Table, name: str, opset: int, **attrs: Any) -> Handler:
    """The handler of a standard operator at an opset, for one with the same inputs and attributes (but for `attrs`)."""
    handler = in_force(table[name], opset)
    assert handler is not None
    return lambda ctx: handler(replace(ctx, opset=opset, attrs={**attrs, **ctx.attrs}))


def with_bias(op: Operator, **attrs: Any) -> Handler:
    """`op` of the sum of the first two inputs, of which the second may be left out; 16-bit floats are rounded once."""

    def handler(ctx: Context) -> Value:
        x = ctx.value(0)
        if ctx.input(1) is None:
            return ctx.add(op, [x], **attrs)
        return cast(ctx, ctx.add(op, [total(ctx, wide(ctx, x), wide(ctx, ctx.value(1)))], **attrs), x.dtype)

    return handler
