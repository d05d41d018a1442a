"""ONNX handlers of operators that move elements: reshape, transpose, slice, concat, pad and their kin."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from tcomp.frontends.onnx.context import Context, Versions
from tcomp.frontends.onnx.handlers.axes import axes_of, axis_of, given_axes
from tcomp.frontends.onnx.reader import dtype_name
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, bounds, maximum, minimum, select
from tcomp.ir.graph import Value
from tcomp.ir.simplify import prove, simplify
from tcomp.ops import movement as ops
from tcomp.ops.movement import product

FAR = 1 << 31  # slice ends at or beyond this mean "to the end"


def _transpose(ctx: Context) -> Value:
    x = ctx.value(0)
    perm = ctx.attrs.get("perm")
    order = tuple(reversed(range(len(x.shape)))) if perm is None else axes_of(ctx, perm, len(x.shape))
    return ctx.add(ops.TRANSPOSE, [x], perm=order)


# ---------------------------------------------------------------- reshape


def reshaped(ctx: Context, x: Value, shape: Sequence[Dim]) -> Value:
    """`x` under a shape of the same size."""
    return x if tuple(shape) == x.shape else ctx.add(ops.RESHAPE, [x], shape=tuple(shape))


def _reshape(ctx: Context) -> Value:
    """0 copies the input's extent (unless `allowzero`), -1 is what is left."""
    x = ctx.value(0)
    wanted = list(ctx.attrs["shape"] if ctx.opset < 5 else ctx.require_dims(1, "the shape"))
    if not ctx.attrs.get("allowzero"):
        if any(d == 0 and n >= len(x.shape) for n, d in enumerate(wanted)):
            raise ctx.invalid(f"a 0 in the shape {_text(wanted)} copies an axis that the input does not have")
        wanted = [x.shape[n] if d == 0 else d for n, d in enumerate(wanted)]
    if wanted.count(-1) > 1 or any(isinstance(d, int) and d < -1 for d in wanted):
        raise ctx.invalid(f"the shape {_text(wanted)} has more than one -1, or a negative extent")
    if -1 in wanted:
        place = wanted.index(-1)
        rest = product([d for d in wanted if d != -1])
        if rest == 0:
            raise ctx.invalid(f"-1 in the shape {_text(wanted)} is not determined, as another extent is 0")
        total = product(x.shape)
        if isinstance(total, int) and isinstance(rest, int) and total % rest:
            raise ctx.invalid(f"{total} elements do not fill the shape {_text(wanted)}")
        wanted[place] = as_dim(as_expr(total) // as_expr(rest))
    return reshaped(ctx, x, wanted)


def _flatten(ctx: Context) -> Value:
    x = ctx.value(0)
    axis = axis_of(ctx, ctx.attrs["axis"], len(x.shape), 1)
    return reshaped(ctx, x, (product(x.shape[:axis]), product(x.shape[axis:])))


def _squeeze(ctx: Context) -> Value:
    x = ctx.value(0)
    given = given_axes(ctx, 1)
    axes = [n for n, d in enumerate(x.shape) if d == 1] if given is None else axes_of(ctx, given, len(x.shape))
    for n in axes:
        if isinstance(x.shape[n], int) and x.shape[n] != 1:
            raise ctx.invalid(f"axis {n} has extent {x.shape[n]} and cannot be squeezed")
    return reshaped(ctx, x, [d for n, d in enumerate(x.shape) if n not in axes])


def _unsqueeze(ctx: Context) -> Value:
    x = ctx.value(0)
    given = given_axes(ctx, 1)
    if given is None:
        raise ctx.invalid("the axes are missing")
    axes = axes_of(ctx, given, len(x.shape) + len(given))
    rest = iter(x.shape)
    return reshaped(ctx, x, [1 if n in axes else next(rest) for n in range(len(x.shape) + len(axes))])


def _text(dims: Sequence[Dim]) -> str:
    return f"[{', '.join(map(str, dims))}]"


# ---------------------------------------------------------------- slice and split


def _slice(ctx: Context) -> Value:
    x = ctx.value(0)
    rank = len(x.shape)
    steps: Sequence[Dim]
    if ctx.opset < 10:
        starts, ends = tuple(ctx.attrs["starts"]), tuple(ctx.attrs["ends"])
        given, steps = ctx.attrs.get("axes"), [1] * len(starts)
    else:
        starts, ends = ctx.require_dims(1, "the starts"), ctx.require_dims(2, "the ends")
        given = None if ctx.input(3) is None else ctx.require_dims(3, "the axes")
        steps = [1] * len(starts) if ctx.input(4) is None else ctx.require_dims(4, "the steps")
    axes = axes_of(ctx, range(len(starts)) if given is None else given, rank)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ctx.invalid("starts, ends, axes and steps differ in length")
    first: list[Dim] = [0] * rank
    stride, shape = [1] * rank, list(x.shape)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if not isinstance(step, int):
            raise ctx.unsupported("a step depends on a symbolic size")
        if step == 0:
            raise ctx.invalid("a step is 0")
        first[axis], shape[axis] = _range(start, end, step, x.shape[axis])
        stride[axis] = step
    return sliced(ctx, x, first, stride, shape)


def sliced(ctx: Context, x: Value, starts: Sequence[Dim], steps: Sequence[int], shape: Sequence[Dim]) -> Value:
    """x[starts + i * steps]; nothing is added where that is all of `x`."""
    if tuple(shape) == x.shape and all(s == 1 for s in steps) and all(s == 0 for s in starts):
        return x
    return ctx.add(ops.SLICE, [x], starts=tuple(starts), steps=tuple(steps), shape=tuple(shape))


def _range(start: Dim, end: Dim, step: int, extent: Dim) -> tuple[Dim, Dim]:
    """(first index, number of elements) of start:end:step as NumPy clamps it."""
    size = as_expr(extent)
    low, high = (0, size) if step > 0 else (-1, size - 1)
    first = _clamped(start, size, as_expr(0) if step > 0 else as_expr(low), as_expr(high))
    last = _clamped(end, size, as_expr(low), as_expr(high))
    span = last - first if step > 0 else first - last
    count = as_dim(maximum((simplify(span) + (abs(step) - 1)) // abs(step), 0))
    # An empty slice may start anywhere; inside is where nothing can go wrong.
    return (0 if count == 0 else as_dim(first)), count


def _clamped(index: Dim, size: Expr, low: Expr, high: Expr) -> Expr:
    if isinstance(index, int) and index >= FAR - 1:
        return high
    if isinstance(index, int) and index <= -FAR + 1:
        return low
    lo, hi = bounds(index)
    value = as_expr(index)
    if hi is not None and hi < 0:
        value = value + size
    elif lo is None or lo < 0:
        value = select(value < 0, value + size, value)
    return simplify(maximum(minimum(value, high), low))


def _split(ctx: Context) -> tuple[Value, ...]:
    x = ctx.value(0)
    axis = axis_of(ctx, ctx.attrs["axis"], len(x.shape))
    extent = x.shape[axis]
    sizes: Sequence[Dim] | None = ctx.attrs.get("split")
    if ctx.input(1) is not None:
        sizes = ctx.require_dims(1, "the split")
    if sizes is None:
        count = ctx.attrs.get("num_outputs") or ctx.num_outputs
        if count != ctx.num_outputs:
            raise ctx.invalid(f"attribute `num_outputs` is {count}, the node has {ctx.num_outputs} outputs")
        if not isinstance(extent, int):
            chunk = as_dim(as_expr(extent) // count)
            if not prove(as_expr(chunk) * count <= as_expr(extent)) or as_dim(as_expr(chunk) * count) != extent:
                raise ctx.unsupported(f"an axis of symbolic size {extent} is split into {count}", "fix that size")
            sizes = [chunk] * count
        else:
            chunk = ceil(extent / count)
            sizes = [max(0, min(chunk, extent - n * chunk)) for n in range(count)]
    if as_dim(sum((as_expr(s) for s in sizes), as_expr(0))) != extent:
        raise ctx.invalid(f"parts of {_text(list(sizes))} do not add up to {extent}")
    parts, offset = [], as_expr(0)
    for size in sizes:
        starts: list[Dim] = [0] * len(x.shape)
        starts[axis] = as_dim(offset)
        parts.append(sliced(ctx, x, starts, [1] * len(x.shape), (*x.shape[:axis], size, *x.shape[axis + 1 :])))
        offset = offset + as_expr(size)
    return tuple(parts)


# ---------------------------------------------------------------- concat, pad, repeat


def _concat(ctx: Context) -> Value:
    x = ctx.value(0)
    axis = axis_of(ctx, ctx.attrs.get("axis", 1), len(x.shape))
    return x if len(ctx.inputs) == 1 else ctx.add(ops.CONCAT, ctx.inputs, axis=axis)


def _pad(ctx: Context) -> Value:
    x = ctx.value(0)
    rank = len(x.shape)
    filling: Value | None = None
    if ctx.opset < 11:
        pads = tuple(ctx.attrs["paddings" if ctx.opset < 2 else "pads"])
        filling = ctx.constant(ctx.attrs["value"], x.dtype) if ctx.attrs["value"] else None
    else:
        pads = ctx.require_dims(1, "the pads")
        filling = ctx.input(2)
    given = None if ctx.input(3) is None else ctx.require_dims(3, "the axes")
    axes = tuple(range(rank)) if given is None else axes_of(ctx, given, rank)
    if len(pads) != 2 * len(axes):
        raise ctx.invalid(f"{len(pads)} pads for {len(axes)} axes")
    before: list[Dim] = [0] * rank
    after: list[Dim] = [0] * rank
    for n, axis in enumerate(axes):
        before[axis], after[axis] = pads[n], pads[len(axes) + n]
    return padded(ctx, x, before, after, ctx.attrs["mode"], filling)


def padded(
    ctx: Context, x: Value, before: Sequence[Dim], after: Sequence[Dim], mode: str = "constant", filling: Value | None = None
) -> Value:
    """`x` with elements added around it."""
    if all(d == 0 for d in (*before, *after)):
        return x
    if mode not in ops.PAD_MODES:
        raise ctx.invalid(f"unknown mode `{mode}`")
    if mode != "constant" and any(d == 0 and (b, a) != (0, 0) for d, b, a in zip(x.shape, before, after, strict=True)):
        raise ctx.invalid("an empty axis cannot be padded from its own elements")
    return ctx.add(ops.PAD, [x, filling], before=tuple(before), after=tuple(after), mode=mode)


def _center_crop_pad(ctx: Context) -> Value:
    x = ctx.value(0)
    axes = ctx.attrs.get("axes")
    axes = tuple(range(len(x.shape))) if axes is None else axes_of(ctx, axes, len(x.shape))
    wanted = ctx.require_dims(1, "the shape")
    starts, shape = [0] * len(x.shape), list(x.shape)
    before, after = [0] * len(x.shape), [0] * len(x.shape)
    for axis, size in zip(axes, wanted, strict=True):
        extent = x.shape[axis]
        if not isinstance(extent, int) or not isinstance(size, int):
            raise ctx.unsupported("a size is symbolic")
        if size < extent:
            starts[axis], shape[axis] = (extent - size) // 2, size
        before[axis] = max(size - extent, 0) // 2
        after[axis] = max(size - extent, 0) - before[axis]
    return padded(ctx, sliced(ctx, x, starts, [1] * len(x.shape), shape), before, after)


def _expand(ctx: Context) -> Value:
    return ctx.add(ops.EXPAND, [ctx.value(0)], shape=ctx.require_dims(1, "the shape"))


def _tile(ctx: Context) -> Value:
    x = ctx.value(0)
    if ctx.opset < 6:
        times, axis = (int(ctx.require_known(n, what).reshape(())) for n, what in ((1, "the number of tiles"), (2, "the axis")))
        repeats: list[Dim] = [1] * len(x.shape)
        repeats[axis_of(ctx, axis, len(x.shape))] = times
    else:
        repeats = list(ctx.require_dims(1, "the repeats"))
    if len(repeats) != len(x.shape):
        raise ctx.invalid(f"{len(repeats)} repeats for rank {len(x.shape)}")
    return x if all(r == 1 for r in repeats) else ctx.add(ops.TILE, [x], repeats=tuple(repeats))


# ---------------------------------------------------------------- made from nothing, triangles, blocks


def _range_of_numbers(ctx: Context) -> Value:
    dtype = ctx.value(0).dtype
    if is_float(dtype) and not all(ctx.dims(n) for n in range(3)):
        start, limit, delta = (ctx.require_known(n, what).reshape(()) for n, what in enumerate(("the start", "the limit", "the step")))
        if delta == 0:
            raise ctx.invalid("the step is 0")
        exact = [float(v) for v in (start, limit, delta)]
        count = max(0, ceil((exact[1] - exact[0]) / exact[2]))
        wide = np.dtype("float64" if dtype == "float64" else "float32")
        return ctx.constant(wide.type(exact[0]) + np.arange(count, dtype=wide) * wide.type(exact[2]), dtype)
    (first,), (end,), (step,) = (ctx.require_dims(n, what) for n, what in enumerate(("the start", "the limit", "the step")))
    if not isinstance(step, int):
        raise ctx.unsupported("the step depends on a symbolic size")
    if step == 0:
        raise ctx.invalid("the step is 0")
    span = as_expr(end) - as_expr(first) if step > 0 else as_expr(first) - as_expr(end)
    size = as_dim(maximum((simplify(span) + (abs(step) - 1)) // abs(step), 0))
    return ctx.add(ops.ARANGE, [], start=first, step=step, count=size, dtype=dtype)


def _eye_like(ctx: Context) -> Value:
    x = ctx.value(0)
    dtype = x.dtype if ctx.attrs.get("dtype") is None else dtype_name(ctx.attrs["dtype"], ctx.where)
    if len(x.shape) != 2:
        raise ctx.invalid("the input must be a matrix")
    return ctx.add(ops.EYE, [], shape=x.shape, diagonal=ctx.attrs["k"], dtype=dtype)


def _trilu(ctx: Context) -> Value:
    x, k, upper = ctx.value(0), ctx.dims(1), bool(ctx.attrs["upper"])
    if ctx.input(1) is not None and (k is None or not isinstance(k[0], int)):
        return ctx.add(ops.TRILU, [x, ctx.value(1)], diagonal=0, upper=upper)
    return ctx.add(ops.TRILU, [x, None], diagonal=0 if k is None else k[0], upper=upper)


def _depth_to_space(ctx: Context) -> Value:
    x, block = _blocks(ctx)
    if isinstance(x.shape[1], int) and x.shape[1] % (block * block):
        raise ctx.invalid(f"{x.shape[1]} channels are not a multiple of {block * block}")
    return ctx.add(ops.DEPTH_TO_SPACE, [x], block=block, channels_first=ctx.attrs.get("mode") == "CRD")


def _space_to_depth(ctx: Context) -> Value:
    x, block = _blocks(ctx)
    if any(isinstance(d, int) and d % block for d in x.shape[2:]):
        raise ctx.invalid(f"the image {_text(x.shape[2:])} is not a multiple of the block size {block}")
    return ctx.add(ops.SPACE_TO_DEPTH, [x], block=block, channels_first=ctx.attrs.get("mode") == "CRD")


def _blocks(ctx: Context) -> tuple[Value, int]:
    x, block = ctx.value(0), ctx.attrs["blocksize"]
    if len(x.shape) != 4 or block < 1:
        raise ctx.invalid(f"rank {len(x.shape)}, block size {block}; rank 4 and a positive block size are needed")
    return x, block


def _reverse_sequence(ctx: Context) -> Value:
    x = ctx.value(0)
    batch, time = (axis_of(ctx, ctx.attrs[name], len(x.shape)) for name in ("batch_axis", "time_axis"))
    return ctx.add(ops.REVERSE_SEQUENCE, [x, ctx.value(1)], batch_axis=batch, time_axis=time)


TABLE: dict[str, Versions] = {
    "Transpose": ((1, _transpose),),
    "Reshape": ((1, _reshape),),
    "Flatten": ((1, _flatten),),
    "Squeeze": ((1, _squeeze),),
    "Unsqueeze": ((1, _unsqueeze),),
    "Slice": ((1, _slice),),
    "Split": ((1, _split),),
    "Concat": ((1, _concat),),
    "Pad": ((1, _pad),),
    "CenterCropPad": ((18, _center_crop_pad),),
    "Expand": ((8, _expand),),
    "Tile": ((1, _tile),),
    "Range": ((11, _range_of_numbers),),
    "EyeLike": ((9, _eye_like),),
    "Trilu": ((14, _trilu),),
    "DepthToSpace": ((1, _depth_to_space),),
    "SpaceToDepth": ((1, _space_to_depth),),
    "ReverseSequence": ((10, _reverse_sequence),),
}
