"""ONNX operators: constants and sizes, and what moves elements: reshape, slice, concat, pad, gather, scatter, top-k and the like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add, and_

import numpy as np

from tcomp.frontends.onnx.context import Context, Handler, Table, attribute, axis_of, forward
from tcomp.frontends.onnx.handlers.runtime_axes import TRUE, chosen_axes, every, sized
from tcomp.frontends.onnx.signature import LARGEST
from tcomp.frontends.onnx.symbolic import MAX_SIZES
from tcomp.ir import te
from tcomp.ir.dtypes import SCALE, is_float
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, cast, const, maximum, minimum, select, variables
from tcomp.ir.graph import Operator, Value
from tcomp.ir.shape_operands import depends_on_values
from tcomp.ir.simplify import as_dim, same_dim, simplify
from tcomp.ops import movement as ops
from tcomp.ops.elementwise import FULL
from tcomp.ops.movement import product

END = 1 << 31  # slice ends at or beyond this mean "to the end"
MANY = 1 << 33  # elements: more than any value has that a run may meet, and times the largest extent still an int64
LARGE = 1 << 60  # sums of such integers are integers of 64 bits


def _constant(ctx: Context) -> Value:
    for name, dtype in (("value", None), ("sparse_value", None), ("value_int", "int64"), ("value_ints", "int64"),
                        ("value_float", "float32"), ("value_floats", "float32")):  # fmt: skip
        if name in ctx.attrs:
            return ctx.constant(np.asarray(ctx.attrs[name], dtype))
    if ctx.attrs:
        raise ctx.unsupported(f"constants of strings are not supported (attribute `{next(iter(ctx.attrs))}`)")
    raise ctx.invalid("it has no value")


def _constant_of_shape(ctx: Context) -> Value:
    shape, filling = sized(ctx, ctx.given_dims(0, "the shape"), "the result"), np.asarray(ctx.attrs.get("value", np.zeros(1, np.float32)))
    if len(ctx.value(0).shape) != 1:
        raise ctx.invalid("the shape is not a vector")
    if filling.size != 1:
        raise ctx.invalid(f"attribute `value` has {filling.size} elements")
    value = float(filling.item()) if is_float(filling.dtype.name) else filling.item()
    return ctx.add(FULL, [], shape=shape, value=value, dtype=filling.dtype.name)


def _range_of_numbers(ctx: Context) -> Value:
    """By index arithmetic where start and step are integers that are known when the model is compiled, or sizes."""
    names = ("the start", "the limit", "the step")
    whole = [ctx.dims(n) for n in range(3)]
    numbers = [as_expr(w[0]) for w in whole if w]
    if len(numbers) < 3:
        numbers = [ctx.given_numbers(n, what)[0] for n, what in enumerate(names)]
    first, end, step = numbers
    if step.op == "const" and step.attr == 0:
        raise ctx.invalid("the step is 0")
    if is_float(step.dtype):
        quotient = (cast(end, "float64") - cast(first, "float64")) / cast(step, "float64")
        count, valid = cast(te.ceil(quotient), INDEX), te.not_equal(cast(step, "float64"), const(0.0, "float64")) & ~te.isnan(quotient)
    else:
        count, valid = _count(first, end, step), te.not_equal(step, 0)
        for e in numbers:  # what follows does not wrap around
            valid = valid & (const(-LARGE) < e) & (e < const(LARGE))
    length = ctx.size(maximum(count, 0), "the length", valid=valid)
    if step.op == "const" and not is_float(step.dtype):
        return ctx.add(ops.ARANGE, [], start=as_dim(first), step=step.attr, count=length, dtype=ctx.value(0).dtype)
    return ctx.add(ops.ARANGE_FROM, [ctx.value(0), ctx.value(2)], count=length)


def _count(first: Expr, end: Expr, step: Expr) -> Expr:
    """How many numbers range(first, end, step) has; nothing of use for a step of 0."""
    distance, width = select(const(0) < step, end - first, first - end), maximum(step, 0 - step)
    return maximum((simplify(distance) + (width - 1)) // maximum(width, 1), 0)


def _eye_like(ctx: Context) -> Value:
    x = ctx.value(0)
    if len(x.shape) != 2:
        raise ctx.invalid("the input must be a matrix")
    return ctx.add(
        ops.EYE, [], shape=x.shape, diagonal=ctx.attrs["k"], dtype=x.dtype if ctx.attrs.get("dtype") is None else ctx.dtype("dtype")
    )


def reshaped(ctx: Context, x: Value, shape: Sequence[Dim]) -> Value:
    """`x` under a shape of the same size."""
    return x if tuple(shape) == x.shape else ctx.add(ops.RESHAPE, [x], shape=tuple(shape))


def repeated(ctx: Context, x: Value, axis: int, times: int) -> Value:
    """Each slice along an axis of fixed size `times` times, next to each other."""
    if times == 1:
        return x
    before, (extent, *after) = x.shape[:axis], x.shape[axis:]
    wide = ctx.add(ops.EXPAND, [reshaped(ctx, x, (*before, extent, 1, *after))], shape=(*before, extent, times, *after))
    return reshaped(ctx, wide, (*before, int(extent) * times, *after))


def moved(ctx: Context, x: Value, source: int, target: int) -> Value:
    """`x` with one axis at another place."""
    perm = list(range(rank := len(x.shape)))
    perm.insert(ctx.axis(target, rank), perm.pop(ctx.axis(source, rank)))
    return x if perm == list(range(rank)) else ctx.add(ops.TRANSPOSE, [x], perm=tuple(perm))


def _reshape(ctx: Context) -> Value:
    """0 copies the input's extent (unless `allowzero`), -1 is what is left."""
    x = ctx.value(0)
    wanted = list(ctx.attrs["shape"] if ctx.opset < 5 else ctx.given_dims(1, "the shape"))
    if any(map(depends_on_values, wanted)):
        return _given_reshape(ctx, x, wanted)
    if not ctx.attrs.get("allowzero"):
        if any(d == 0 and n >= len(x.shape) for n, d in enumerate(wanted)):
            raise ctx.invalid(f"a 0 in the shape {_text(wanted)} copies an axis that the input does not have")
        wanted = [x.shape[n] if d == 0 else d for n, d in enumerate(wanted)]
    wanted = [as_dim(maximum(d, 0)) if isinstance(d, Expr) else d for d in wanted]  # as others have it that are slices or windows
    if wanted.count(-1) > 1 or any(isinstance(d, int) and d < -1 for d in wanted):
        raise ctx.invalid(f"the shape {_text(wanted)} has more than one -1, or a negative extent")
    if -1 in wanted:
        rest, total = product([d for d in wanted if d != -1]), product(x.shape)
        if rest == 0:
            raise ctx.invalid(f"-1 in the shape {_text(wanted)} is not determined, as another extent is 0")
        if isinstance(total, int) and isinstance(rest, int) and total % rest:
            raise ctx.invalid(f"{total} elements do not fill the shape {_text(wanted)}")
        wanted[wanted.index(-1)] = _rest(x.shape, [d for d in wanted if d != -1])
    return reshaped(ctx, x, wanted)


def _rest(shape: Sequence[Dim], others: Sequence[Dim]) -> Dim:
    """The extent that is left for one axis where the other ones are given; what both shapes have cancels, as it is not 0 where there is a
    rest."""
    left, given = [*shape], list[Dim]()
    for d in others:
        at = next((n for n, e in enumerate(left) if same_dim(e, d)), None)
        given.append(d) if at is None else left.pop(at)
    return as_dim(as_expr(product(left)) // as_expr(product(given)))


def _given_reshape(ctx: Context, x: Value, wanted: Sequence[Dim]) -> Value:
    """The same where the shape is known before a run."""
    extents, total, minus, rest = [], as_expr(product(x.shape)), const(0), const(1)
    for n, d in enumerate(wanted):
        copied = x.shape[n] if n < len(x.shape) else -2
        own = as_expr(d) if ctx.attrs.get("allowzero") else select(te.equal(as_expr(d), 0), as_expr(copied), as_expr(d))
        extents.append(as_expr(ctx.size(own, f"element {n} of the shape", least=-1)))
        minus = minus + select(te.equal(extents[-1], -1), 1, 0)
        rest = minimum(rest * select(te.equal(extents[-1], -1), 1, extents[-1]), MANY)
    # A -1 is what is left, which must be determined.
    left = (const(0) < rest) & te.equal(total % maximum(rest, 1), 0)
    valid = (te.equal(minus, 0) & te.equal(rest, total)) | (te.equal(minus, 1) & left)
    shape = sized(ctx, [select(te.equal(e, -1), total // maximum(rest, 1), e) for e in extents], "the result", valid)
    return ctx.add(ops.VIEW, [x], shape=shape)


def _flatten(ctx: Context) -> Value:
    x, axis = ctx.value(0), ctx.axis(ctx.attrs["axis"], end=True)
    return reshaped(ctx, x, (product(x.shape[:axis]), product(x.shape[axis:])))


def _squeeze(ctx: Context) -> Value:
    x, given = ctx.value(0), ctx.given_axes(1)
    if (chosen := chosen_axes(ctx, given, len(x.shape))) is not None:
        ones = [~hit | te.equal(as_expr(d), 1) for hit, d in zip(chosen.hits, x.shape, strict=True)]
        return ctx.add(ops.VIEW, [x], shape=sized(ctx, chosen.kept(x.shape), "the result", every(and_, ones, chosen.valid) & chosen.valid))
    if given is None:
        for d in x.shape:  # the rank of the result depends on which sizes are 1
            if isinstance(d, Expr):
                ctx.require(te.not_equal(d, 1))
    axes = ctx.axes([n for n, d in enumerate(x.shape) if d == 1] if given is None else given)
    if wide := [n for n in axes if isinstance(x.shape[n], int) and x.shape[n] != 1]:
        raise ctx.invalid(f"axis {wide[0]} has extent {x.shape[wide[0]]} and cannot be squeezed")
    return reshaped(ctx, x, [d for n, d in enumerate(x.shape) if n not in axes])


def _unsqueeze(ctx: Context) -> Value:
    x = ctx.value(0)
    if (given := ctx.given_axes(1)) is None:
        raise ctx.invalid("the axes are missing")
    if (chosen := chosen_axes(ctx, given, len(x.shape) + len(given))) is not None:
        return ctx.add(ops.VIEW, [x], shape=sized(ctx, chosen.spread(x.shape, 1), "the result", chosen.valid))
    axes, rest = ctx.axes(given, len(x.shape) + len(given)), iter(x.shape)
    return reshaped(ctx, x, [1 if n in axes else next(rest) for n in range(len(x.shape) + len(axes))])


def _text(dims: Iterable[Dim]) -> str:
    return f"[{', '.join(map(str, dims))}]"


def sliced(ctx: Context, x: Value, starts: Sequence[Dim], steps: Sequence[Dim], shape: Sequence[Dim]) -> Value:
    """x[starts + i * steps]; nothing is added where that is all of `x`."""
    if tuple(shape) == x.shape and all(s == 1 for s in steps) and all(s == 0 for s in starts):
        return x
    return ctx.add(ops.SLICE, [x], starts=tuple(starts), steps=tuple(steps), shape=tuple(shape))


def cut(ctx: Context, x: Value, axis: int, start: Dim, size: Dim, step: int = 1) -> Value:
    """`size` elements along one axis, from `start` on."""
    before, after = axis, len(x.shape) - axis - 1
    steps, shape = (*[1] * before, step, *[1] * after), (*x.shape[:axis], size, *x.shape[axis + 1 :])
    return sliced(ctx, x, (*[0] * before, start, *[0] * after), steps, shape)


def _slice(ctx: Context) -> Value:
    """start:end:step along every axis, clamped as NumPy does."""
    x = ctx.value(0)
    starts: Sequence[Dim]
    ends: Sequence[Dim]
    if ctx.opset < 10:
        starts, ends = tuple(ctx.attrs["starts"]), tuple(ctx.attrs["ends"])
    else:
        starts, ends = (_counted_ends(ctx, i) or ctx.given_dims(i, what) for i, what in ((1, "the starts"), (2, "the ends")))
    given = ctx.given_axes(3)
    steps: Sequence[Dim] = [1] * len(starts) if ctx.input(4) is None else ctx.given_dims(4, "the steps")
    chosen, valid = chosen_axes(ctx, given, len(x.shape)), TRUE
    if chosen is not None and len(starts) == len(ends) == chosen.count == len(steps):
        every_axis = range(len(x.shape))
        starts, ends, steps = (
            [as_dim(chosen.at(n, values, otherwise)) for n in every_axis] for values, otherwise in ((starts, 0), (ends, END), (steps, 1))
        )
        given, valid = tuple(every_axis), chosen.valid
    axes = ctx.axes(range(len(starts)) if given is None else given)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ctx.invalid("starts, ends, axes and steps differ in length")
    first: list[Dim] = [0] * len(x.shape)
    stride: list[Dim] = [1] * len(x.shape)
    shape = list(x.shape)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step == 0 or (isinstance(step, Expr) and not depends_on_values(step)):
            raise ctx.invalid("a step is 0") if step == 0 else ctx.unsupported("a step depends on a symbolic size")
        first[axis], stride[axis], shape[axis] = _range_along(ctx, axis, as_expr(start), as_expr(end), as_expr(step), valid)
    return sliced(ctx, x, first, stride, shape)


def _counted_ends(ctx: Context, i: int) -> list[Dim] | None:
    """The starts or ends of a slice, clamped, where only a run tells them; None where they are known before, or a step is not 1."""
    value, steps = ctx.value(i), ctx.input(4)
    if ctx.scope.given_elements(value) is not None or value.dtype not in ("int32", "int64") or not isinstance(value.shape[0], int):
        return None
    if steps is not None and ((known := ctx.known(4)) is None or np.any(known != 1)):
        return None
    given = ctx.given_axes(3)
    axes = ctx.axes(range(value.shape[0]) if given is None else given)
    limits = [ctx.value(0).shape[axis] for axis in axes]
    ends = ctx.add(ops.ENDS, [value, ctx.dims_value(limits)])
    return [ctx.counted(reshaped(ctx, cut(ctx, ends, 0, n, 1), ()), limit) for n, limit in enumerate(limits)]


def _range_along(ctx: Context, axis: int, start: Expr, end: Expr, step: Expr, valid: Expr) -> tuple[Dim, Dim, Dim]:
    """The first index, step and length of start:end:step along an axis."""
    size, upwards = as_expr(ctx.value(0).shape[axis]), const(0) < step
    low, high = select(upwards, 0, -1), select(upwards, size, size - 1)
    stride = ctx.size(minimum(maximum(step, -END), END), f"the step along axis {axis}", -END, END, te.not_equal(step, 0))
    begin, stop = (simplify(minimum(maximum(select(e < 0, e + size, e), low), high)) for e in (start, end))
    count = _count(begin, stop, as_expr(stride))
    length = ctx.size(count, f"extent {axis} of the result", valid=valid)
    # An empty slice may start anywhere; inside is where nothing can go wrong.
    inside = select(te.equal(count, 0), 0, begin) if length == 0 or depends_on_values(length) else begin
    return ctx.size(inside, f"the start along axis {axis}", most=None), stride, length


def _split(ctx: Context) -> tuple[Value, ...]:
    x, axis = ctx.value(0), ctx.axis(ctx.attrs["axis"])
    extent = x.shape[axis]
    sizes: Sequence[Dim] | None = ctx.attrs.get("split") if ctx.input(1) is None else ctx.given_dims(1, "the split")
    if sizes is None:
        count = ctx.attrs.get("num_outputs") or len(ctx.outputs)
        if count != len(ctx.outputs):
            raise ctx.invalid(f"attribute `num_outputs` is {count}, the node has {len(ctx.outputs)} outputs")
        if isinstance(extent, Expr) and ctx.opset < 18:  # into equal parts
            ctx.require_same(extent // count * count, extent)
        chunk = simplify((as_expr(extent) + (count - 1)) // count)
        rest = [simplify(extent - chunk * n) for n in range(count)]
        sizes = [as_dim(minimum(chunk, maximum(left, 0)) if n < count - 1 else maximum(left, 0)) for n, left in enumerate(rest)]
    return parts(ctx, x, axis, sizes)


def parts(ctx: Context, x: Value, axis: int, sizes: Sequence[Dim]) -> tuple[Value, ...]:
    """A value cut along an axis into parts of these sizes."""
    extent, total = x.shape[axis], as_dim(every(add, [*map(as_expr, sizes)], const(0)))
    if any(map(depends_on_values, sizes)):
        inside = [(as_expr(0) <= d) & (as_expr(d) <= extent) for d in sizes]
        valid = every(and_, inside, TRUE) & te.equal(as_expr(total), as_expr(extent))
        sizes = [ctx.size(d, f"part {n}", valid=valid) for n, d in enumerate(sizes)]
    elif isinstance(extent, int) and isinstance(total, int) and total != extent:
        raise ctx.invalid(f"parts of {_text(sizes)} do not add up to {extent}")
    else:
        ctx.require_same(total, extent)
    starts = accumulate(map(as_expr, sizes), initial=as_expr(0))
    return tuple(cut(ctx, x, axis, ctx.size(s, "a start", most=None), d) for s, d in zip(starts, sizes, strict=False))


def _concat(ctx: Context) -> Value:
    axis = ctx.axis(ctx.attrs.get("axis", 1))
    sizes = variables(*(d for v in ctx.inputs if v is not None for d in v.shape[axis : axis + 1] if isinstance(d, Expr)))
    if len(sizes) > MAX_SIZES:
        why = f"the sizes of its parts depend on {len(sizes)} symbolic sizes, at most {MAX_SIZES} are accepted"
        raise ctx.unsupported(why, hint="fix symbolic sizes with --dim")
    return ctx.value(0) if len(ctx.inputs) == 1 else ctx.add(ops.CONCAT, ctx.inputs, axis=axis)


def _pad(ctx: Context) -> Value:
    x = ctx.value(0)
    if ctx.opset < 11:
        pads = tuple(ctx.attrs["paddings" if ctx.opset < 2 else "pads"])
        filling = ctx.constant(ctx.attrs["value"], x.dtype) if ctx.attrs["value"] else None
    else:
        pads, filling = ctx.given_dims(1, "the pads"), ctx.input(2)
    given = ctx.given_axes(3)
    if (chosen := chosen_axes(ctx, given, len(x.shape))) is not None and len(pads) == 2 * chosen.count:
        sides = pads[: chosen.count], pads[chosen.count :]
        pads = tuple(as_dim(select(chosen.valid, chosen.at(n, side, 0), LARGE)) for side in sides for n in range(len(x.shape)))
        given = None
    pads = tuple(ctx.size(p, f"pad {n}", least=-LARGEST) for n, p in enumerate(pads))
    axes = ctx.axes(given)
    if len(pads) != 2 * len(axes):
        raise ctx.invalid(f"{len(pads)} pads for {len(axes)} axes")
    before, after = (dict(zip(axes, side, strict=True)) for side in (pads[: len(axes)], pads[len(axes) :]))
    rank = range(len(x.shape))
    return padded(ctx, x, [before.get(n, 0) for n in rank], [after.get(n, 0) for n in rank], ctx.attrs["mode"], filling)


def padded(
    ctx: Context, x: Value, before: Sequence[Dim], after: Sequence[Dim], mode: str = "constant", filling: Value | None = None
) -> Value:
    """`x` with elements added around it."""
    if all(d == 0 for d in (*before, *after)):
        return x
    if mode not in ops.PAD_MODES:
        raise ctx.invalid(f"unknown mode `{mode}`")
    if mode == "constant" and filling is None and x.dtype == SCALE:
        raise ctx.unsupported(f"{x.dtype} has no 0 to pad with", "give the constant value")
    if mode != "constant" and any(d == 0 and (b, a) != (0, 0) for d, b, a in zip(x.shape, before, after, strict=True)):
        raise ctx.invalid("an empty axis cannot be padded from its own elements")
    return ctx.add(ops.PAD, [x, filling], before=tuple(before), after=tuple(after), mode=mode)


def _expand(ctx: Context) -> Value:
    x, wanted = ctx.value(0), ctx.given_dims(1, "the shape")
    if not any(map(depends_on_values, wanted)):
        return ctx.add(ops.EXPAND, [x], shape=wanted)
    rank = max(len(wanted), len(x.shape))
    shape: list[Dim] = []
    for n, (d, s) in enumerate(zip((*[1] * (rank - len(x.shape)), *x.shape), (*[1] * (rank - len(wanted)), *wanted), strict=True)):
        own, other = as_expr(d), as_expr(s)
        common = other if d == 1 else select(te.equal(other, 1), own, select(te.equal(own, 1), other, own))
        shape.append(ctx.size(common, f"extent {n} of the result", valid=te.equal(other, 1) | te.equal(own, 1) | te.equal(own, other)))
    return ctx.add(ops.BROADCAST_TO, [x], shape=tuple(shape))


def _tile(ctx: Context) -> Value:
    x, repeats = ctx.value(0), ctx.given_dims(1, "the number of tiles")
    if ctx.opset < 6:  # along one axis
        place = ctx.axis(ctx.given_dims(2, "the axis")[0])
        repeats = tuple(repeats[0] if n == place else 1 for n in range(len(x.shape)))
    if len(repeats) != len(x.shape):
        raise ctx.invalid(f"{len(repeats)} repeats for rank {len(x.shape)}")
    times = tuple(ctx.size(r, f"repeat {n}") for n, r in enumerate(repeats))
    return x if all(r == 1 for r in times) else ctx.add(ops.TILE, [x], repeats=times)


def _trilu(ctx: Context) -> Value:
    x, k, upper = ctx.value(0), ctx.dims(1), bool(ctx.attrs["upper"])
    if k is not None and isinstance(k[0], int):
        return ctx.add(ops.TRILU, [x, None], diagonal=k[0], upper=upper)
    return ctx.add(ops.TRILU, [x, ctx.input(1)], diagonal=0, upper=upper)


def _blocks(ctx: Context, op: Operator) -> Value:
    x, block = ctx.value(0), ctx.attrs["blocksize"]
    if len(x.shape) != 4 or block < 1:
        raise ctx.invalid(f"rank {len(x.shape)}, block size {block}; rank 4 and a positive block size are needed")
    if op is ops.DEPTH_TO_SPACE and isinstance(x.shape[1], int) and x.shape[1] % (block * block):
        raise ctx.invalid(f"{x.shape[1]} channels are not a multiple of {block * block}")
    if op is ops.SPACE_TO_DEPTH and any(isinstance(d, int) and d % block for d in x.shape[2:]):
        raise ctx.invalid(f"the image {_text(x.shape[2:])} is not a multiple of the block size {block}")
    return ctx.add(op, [x], block=block, channels_first=ctx.attrs.get("mode") == "CRD")


def _with_tuples(apply: Handler) -> Handler:
    """By tuples of indices, whose length decides the rank of the result: it must be known, or can be 1 only."""

    def handler(ctx: Context) -> Value | tuple[Value | None, ...]:
        width, rank = ctx.value(1).shape[-1:], len(ctx.value(0).shape) - ctx.attrs.get("batch_dims", 0)
        if width and not isinstance(width[0], int):
            if rank != 1:
                why = f"the rank of its result depends on {width[0]}, how long its index tuples are"
                raise ctx.unsupported(why, hint=" ".join(f"--dim {v.name}=N" for v in variables(width[0])))
            ctx.require_same(width[0], 1)
        return apply(ctx)

    return handler


def _elements(apply: Handler) -> Handler:
    """By an index for each element, at the element's own place but for one axis."""

    def handler(ctx: Context) -> Value | tuple[Value | None, ...]:
        ranks = [len(ctx.value(n).shape) for n in (0, 1)]
        if ranks[0] != ranks[1]:
            raise ctx.invalid(f"indices of rank {ranks[1]} for elements of rank {ranks[0]}")
        return apply(ctx)

    return handler


def _gather(ctx: Context) -> Value:
    """A constant scalar index is a slice, which costs nothing."""
    x, axis = ctx.value(0), ctx.axis(ctx.attrs["axis"])
    known, extent = ctx.known(1), x.shape[axis]
    if known is None or known.ndim or not isinstance(extent, int):
        return ctx.add(ops.GATHER, [x, ctx.value(1)], axis=axis)
    index = int(known)
    if not -extent <= index < extent:
        raise ctx.invalid(f"index {index} into an axis of extent {extent}")
    return reshaped(ctx, cut(ctx, x, axis, index % extent, 1), (*x.shape[:axis], *x.shape[axis + 1 :]))


def _one_hot(ctx: Context) -> Value:
    indices, what = ctx.value(0), "the depth"
    known = ctx.known(1)
    depth = int(known.item()) if known is not None else ctx.size(cast(ctx.given_numbers(1, what)[0], INDEX), what)
    return ctx.add(ops.ONE_HOT, [indices, ctx.value(2)], depth=depth, axis=ctx.axis(ctx.attrs["axis"], len(indices.shape) + 1))


def _top_k(ctx: Context) -> tuple[Value, ...]:
    x, axis = ctx.value(0), ctx.axis(ctx.attrs["axis"])
    extent = x.shape[axis]
    if ctx.opset < 10:
        k: Dim = ctx.attrs["k"]
    elif ctx.scope.given_elements(ctx.value(1)) is None:  # only a run tells it
        k = ctx.counted(ctx.add(ops.AT_MOST, [ctx.value(1)], most=extent), extent)
    else:
        k = ctx.given_dims(1, "k")[0]
    k = ctx.size(k, "k", valid=as_expr(k) <= extent) if depends_on_values(k) else k
    if isinstance(k, int) and (k < 0 or (isinstance(extent, int) and k > extent)):
        raise ctx.invalid(f"k is {k}, the axis has {extent} elements")
    return ctx.add_several(ops.TOP_K, [x], k=k, axis=axis, largest=bool(ctx.attrs.get("largest", 1)))


TABLE: Table = {
    "Constant": _constant, "ConstantOfShape": _constant_of_shape, "Range": _range_of_numbers, "EyeLike": _eye_like,
    "Identity": lambda ctx: ctx.value(0),
    "Shape": lambda ctx: ctx.dims_value(ctx.value(0).shape[slice(ctx.attrs.get("start", 0), ctx.attrs.get("end"))]),
    "Size": lambda ctx: ctx.dims_value([product(ctx.value(0).shape)], shape=()),
    "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Slice": _slice, "Split": _split,
    "Concat": _concat, "Pad": _pad, "Tile": _tile, "Trilu": _trilu,
    "Transpose": forward(ops.TRANSPOSE, perm=lambda ctx: ctx.axes(ctx.attrs.get("perm", range(len(ctx.value(0).shape))[::-1]))),
    "Expand": _expand,
    "DepthToSpace": lambda ctx: _blocks(ctx, ops.DEPTH_TO_SPACE), "SpaceToDepth": lambda ctx: _blocks(ctx, ops.SPACE_TO_DEPTH),
    "ReverseSequence": forward(ops.REVERSE_SEQUENCE, batch_axis=axis_of("batch_axis"), time_axis=axis_of("time_axis")),
    "Gather": _gather, "OneHot": _one_hot, "TopK": _top_k,
    "GatherElements": _elements(forward(ops.GATHER_ELEMENTS, axis=axis_of())),
    "GatherND": _with_tuples(forward(ops.GATHER_ND, batch_dims=attribute("batch_dims", 0))),
    "Scatter": _elements(forward(ops.SCATTER_ELEMENTS, axis=axis_of(), reduction=lambda ctx: "none")),
    "ScatterElements": _elements(forward(ops.SCATTER_ELEMENTS, axis=axis_of(), reduction=attribute("reduction", "none"))),
    "ScatterND": _with_tuples(forward(ops.SCATTER_ND, reduction=attribute("reduction", "none"))),
    "TensorScatter": forward(ops.TENSOR_SCATTER, inputs=3, axis=axis_of(), circular=lambda ctx: ctx.attrs["mode"] == "circular"),
}  # fmt: skip
