"""What the handlers of `com.microsoft` share: wider arithmetic, other layouts, heads of attention, the standard's handlers under other
names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tcomp.frontends.onnx.context import Context, Handler, Table, in_force
from tcomp.frontends.onnx.handlers.movement import cut, moved, reshaped
from tcomp.ir.broadcasting import HALF
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Value
from tcomp.ops.elementwise import ADD, CAST, MUL, SUB
from tcomp.ops.movement import CONCAT, TRANSPOSE
from tcomp.ops.quantization import DEQUANTIZE, QUANTIZE
from tcomp.ops.recurrent import STACK


def cast(ctx: Context, x: Value, dtype: str) -> Value:
    """`x` in another type."""
    return x if x.dtype == dtype else ctx.add(CAST, [x], dtype=dtype)


def wide(ctx: Context, x: Value) -> Value:
    """`x`, 16-bit floats as float32."""
    return cast(ctx, x, "float32") if x.dtype in HALF else x


def widened(handler: Handler) -> Handler:
    """A handler that computes in float32 (or float64), so that what is composed of several operators is rounded once; floats among its
    results have the type of the first one among its inputs."""

    def rounded(ctx: Context) -> tuple[Value | None, ...]:
        dtype = next(v.dtype for v in ctx.inputs if v is not None and is_float(v.dtype))
        precise = "float64" if dtype == "float64" else "float32"
        inputs = [cast(ctx, v, precise) if v is not None and is_float(v.dtype) else v for v in ctx.inputs]
        results = handler(replace(ctx, inputs=inputs))
        results = results if isinstance(results, tuple) else (results,)
        return tuple(cast(ctx, v, dtype) if v is not None and is_float(v.dtype) else v for v in results)

    return rounded


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
    second, step = (1, 2) if interleaved else (size // 2, 1)
    return cut(ctx, x, axis, 0, size // 2, step), cut(ctx, x, axis, second, size // 2, step)


def complex_product(ctx: Context, x: Value, real: Value, imaginary: Value, interleaved: bool = False) -> Value:
    """x, whose last axis holds real parts, then imaginary ones (or both in turn if `interleaved`), times other complex numbers."""
    a, b = halves(ctx, x, interleaved)
    products = [[ctx.add(MUL, [p, q]) for q in (real, imaginary)] for p in (a, b)]
    parts = [ctx.add(SUB, [products[0][0], products[1][1]]), ctx.add(ADD, [products[0][1], products[1][0]])]
    if not interleaved:
        return ctx.add(CONCAT, parts, axis=len(x.shape) - 1)
    return reshaped(ctx, ctx.add(STACK, parts, axis=len(x.shape)), (*parts[0].shape[:-1], x.shape[-1]))


def channels_last(handler: Handler, *positions: int) -> Handler:
    """A handler of inputs (those at `positions`) and a first output with channels last, unless the attribute `channels_last` is 0."""

    def transposed(ctx: Context) -> Value | tuple[Value | None, ...]:
        if not ctx.attrs.get("channels_last", 1):
            return handler(ctx)
        y = applied(ctx, handler, [v and moved(ctx, v, -1, 1) if n in positions else v for n, v in enumerate(ctx.inputs)])
        return moved(ctx, y, 1, -1)

    return transposed


def split_heads(ctx: Context, x: Value, heads: int) -> Value:
    """[batch, positions, heads * size] -> [batch, heads, positions, size]."""
    if len(x.shape) != 3 or known(ctx, x.shape[2], "the hidden axis") % heads:
        raise ctx.invalid(f"{x} does not divide into {heads} heads")
    return ctx.add(TRANSPOSE, [reshaped(ctx, x, (*x.shape[:2], heads, int(x.shape[2]) // heads))], perm=(0, 2, 1, 3))


def merge_heads(ctx: Context, x: Value) -> Value:
    """The inverse of `split_heads`."""
    y = ctx.add(TRANSPOSE, [x], perm=(0, 2, 1, 3))
    return reshaped(ctx, y, (*y.shape[:2], int(y.shape[2]) * int(y.shape[3])))


def operand(ctx: Context, i: int, scale: int = 1, zero: int = 2) -> Value:
    """Input `i`, dequantised by the inputs `scale` and `zero` positions behind it, of one element each."""
    factor = ctx.value(i + scale)
    return ctx.add(DEQUANTIZE, [ctx.value(i), factor, ctx.input(i + zero)], axis=0, block=0, dtype=factor.dtype)


def quantized(ctx: Context, y: Value, scale: int, dtype: str) -> Value:
    """`y` quantised by inputs `scale` and `scale + 1`, of which the zero point may be left out."""
    return ctx.add(QUANTIZE, [y, ctx.value(scale), ctx.input(scale + 1)], axis=1, block=0, dtype=dtype, precision="float32")


def applied(ctx: Context, handler: Handler, inputs: Sequence[Value | None], **attrs: object) -> Value:
    """The first output of a handler for other inputs and further attributes."""
    result = handler(replace(ctx, inputs=tuple(inputs), attrs={**ctx.attrs, **attrs}, outputs=ctx.outputs[:1]))
    first = result[0] if isinstance(result, tuple) else result
    assert first is not None
    return first


def standard(table: Table, name: str, opset: int, **attrs: object) -> Handler:
    """The handler of a standard operator at an opset, for one with the same inputs and attributes (but for `attrs`)."""
    handler = in_force(table[name], opset)
    assert handler is not None
    return lambda ctx: handler(replace(ctx, opset=opset, attrs={**attrs, **ctx.attrs}))
