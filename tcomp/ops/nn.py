"""Windows over spatial axes: convolution, its transpose, pooling; biases of channels, dense layers of experts, masks of attention.

Activations are (batch, channels, spatial...), weights (out channels, in channels / groups, kernel...). Padding is an operator of
its own, so that every read here is in range. 16-bit floats are accumulated in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from operator import add, and_

from tcomp.errors import IRError
from tcomp.ir import loops as L, te
from tcomp.ir.broadcasting import broadcast_shape, product_dtype, require_same, require_same_shape, term, widened
from tcomp.ir.dtypes import integer_range
from tcomp.ir.expr import Dim, Expr, as_expr, cast, const, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ir.simplify import as_dim, simplify
from tcomp.ir.te import Tensor, rounded
from tcomp.ops import reduction
from tcomp.ops.movement import clamped, valid_index

Ints = Sequence[int]
Index = tuple[Expr, ...]

HIDDEN = -1e30  # the score of a hidden key where a query may see no key at all: softmax of -inf alone would be NaN


def window_count(extent: Dim, kernel: Dim, stride: int, dilation: int) -> Dim:
    """How many windows of `kernel` elements, `dilation` apart, fit into `extent` at steps of `stride`."""
    return as_dim((as_expr(extent) - ((as_expr(kernel) - 1) * dilation + 1)) // stride + 1)


def sizes(shape: Sequence[Dim], what: str) -> tuple[int, ...]:
    """Extents that must be known at compile time. Raises `IRError`."""
    known = tuple(d for d in shape if isinstance(d, int))
    if len(known) != len(shape):
        raise IRError(f"{what} must have constant sizes", where=f"[{', '.join(map(str, shape))}]")
    return known


def _check(x: Tensor, w: Tensor, group: int, *per_axis: Ints) -> None:
    if x.ndim < 3 or w.ndim != x.ndim:
        raise IRError(f"convolution of a {x.ndim}-dimensional input with {w.ndim}-dimensional weights", hint="both have at least 3")
    if any(len(values) != x.ndim - 2 or any(v < 1 for v in values) for values in per_axis) or group < 1:
        raise IRError(f"strides, dilations {per_axis} and group {group} must be positive, one for each spatial axis")


def _per_group(channels: Dim, group: int, what: str) -> Expr:
    """Channels of a group; the caller guarantees that a symbolic number of them divides."""
    if isinstance(channels, int) and channels % group:
        raise IRError(f"{channels} {what} channels do not divide into {group} groups")
    return simplify(as_expr(channels) // group)


def conv(x: Tensor, w: Tensor, strides: Ints, dilations: Ints, group: int, dtype: str | None = None) -> Tensor:
    """Cross-correlation: y[n, o, p...] = sum over c, k of x[n, g*C/G + c, p*stride + k*dilation] * w[o, c, k...].

    Any number of spatial axes; `group` divides channels in `group` independent convolutions (depthwise where it equals them).
    Integers wrap around in their own type, except that 8-bit ones, which may differ in sign, give int32. `dtype` is that of the result;
    integers that it holds more of are summed in it.
    """
    _check(x, w, group, strides, dilations)
    out_channels, in_channels, *kernel = w.shape
    channels = as_dim(as_expr(in_channels) * group)
    require_same(x.shape[1], channels, f"channels of a convolution with weights {list(w.shape)} in {group} groups")
    per_group = _per_group(out_channels, group, "output")
    spatial = [window_count(d, k, s, r) for d, k, s, r in zip(x.shape[2:], kernel, strides, dilations, strict=True)]
    channel = te.reduce_axis(in_channels, "rc")
    offsets = [te.reduce_axis(k, f"rk{n}") for n, k in enumerate(kernel)]
    reduced = [axis for axis, extent in zip([channel, *offsets], [in_channels, *kernel], strict=True) if extent != 1]
    inner, *window = [axis if axis in reduced else const(0) for axis in (channel, *offsets)]

    def element(n: Expr, o: Expr, *p: Expr) -> Expr:
        source = inner if group == 1 else o // per_group * as_expr(in_channels) + inner
        at = [i * s + k * r for i, s, k, r in zip(p, strides, window, dilations, strict=True)]
        return cast(te.sum(term(x[(n, source, *at)], w[(o, inner, *window)], dtype), reduced), dtype or product_dtype(x.dtype))

    return te.compute((x.shape[0], out_channels, *spatial), element, "conv")


def conv_transpose(x: Tensor, w: Tensor, strides: Ints, dilations: Ints, group: int, before: Sequence[Dim], shape: Sequence[Dim]) -> Tensor:
    """The adjoint of `conv` with weights (in channels, out channels / groups, kernel...), as a gather.

    y[n, o, q] = sum over c, k with (q + before - k*dilation) divisible by the stride of x[n, c, that / stride] * w[c, o, k].
    `shape` is the spatial output shape; `before` is cut off in front of it. Without dilation only every stride-th k has a term, and
    the sum is over these: k = (q + before) % stride + j * stride. Where the kernel is no longer than the stride, there is one.
    """
    _check(x, w, group, strides, dilations)
    in_channels, out_channels, *kernel = w.shape
    require_same(x.shape[1], in_channels, f"channels of a transposed convolution with weights {list(w.shape)}")
    depth = _per_group(in_channels, group, "input")
    channel = te.reduce_axis(as_dim(depth), "rc")
    counts = [k if r > 1 else as_dim((as_expr(k) + (s - 1)) // s) for k, s, r in zip(kernel, strides, dilations, strict=True)]
    offsets = [None if count == 1 else te.reduce_axis(count, f"rk{n}") for n, count in enumerate(counts)]

    def element(n: Expr, o: Expr, *q: Expr) -> Expr:
        source = channel if group == 1 else o // as_expr(out_channels) * depth + channel
        valid, at, weights = const(True, "bool"), [], []
        for index, offset, cut, stride, r, extent, k in zip(q, offsets, before, strides, dilations, x.shape[2:], kernel, strict=True):
            full, step = index + cut, const(0) if offset is None else offset
            if r == 1:
                at.append(full // stride - step)
                weights.append(full % stride + step * stride)
                if not isinstance(k, int) or k % stride:
                    valid = valid & (weights[-1] < k)
            else:
                if stride != 1:
                    valid = valid & te.equal((full - step * r) % stride, 0)
                at.append((full - step * r) // stride)
                weights.append(step)
            valid = valid & (at[-1] >= 0) & (at[-1] < extent)
        term = widened(x[(n, source, *at)]) * widened(w[(source, o if group == 1 else o % as_expr(out_channels), *weights)])
        return cast(te.sum(select(valid, term, 0), [channel, *(k for k in offsets if k is not None)]), x.dtype)

    return te.compute((x.shape[0], as_dim(as_expr(out_channels) * group), *shape), element, "conv_transpose")


def deform_conv(
    x: Tensor, w: Tensor, offset: Tensor, mask: Tensor | None, strides: Ints, dilations: Ints, before: Ints, group: int, offset_group: int
) -> Tensor:
    """Deformable convolution (Dai et al. 2017; with `mask`, Zhu et al. 2019) over two spatial axes.

    Element k of the window of output p reads x at p*stride - before + k*dilation + offset, bilinearly, zero outside. `offset` is
    (batch, offset groups * kernel size * 2, out...), `mask` (batch, offset groups * kernel size, out...).
    """
    _check(x, w, group, strides, dilations)
    if x.ndim != 4:
        raise IRError(f"deformable convolution of a {x.ndim}-dimensional input", why="two spatial axes are supported")
    out_channels, in_channels, *kernel = sizes(w.shape, "weights of a convolution")
    (height, width), channels = x.shape[2:], in_channels * group
    require_same(x.shape[1], channels, "channels of a deformable convolution")
    channel = te.reduce_axis(in_channels, "rc")
    offsets = [te.reduce_axis(k, f"rk{n}") for n, k in enumerate(kernel)]

    def pixel(n: Expr, c: Expr, row: Expr, column: Expr) -> Expr:
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        return select(inside, x[n, c, clamped(row, height), clamped(column, width)], 0)

    def element(n: Expr, o: Expr, p: Expr, q: Expr) -> Expr:
        source = o // (out_channels // group) * in_channels + channel
        place = (source // (channels // offset_group) * kernel[0] + offsets[0]) * kernel[1] + offsets[1]
        at = [
            cast(i * s + k * r - b, x.dtype) + offset[(n, place * 2 + axis, p, q)]
            for axis, (i, s, k, r, b) in enumerate(zip((p, q), strides, offsets, dilations, before, strict=True))
        ]
        row, column = (cast(te.floor(v), "int64") for v in at)
        down, right = (v - te.floor(v) for v in at)
        corners = product(((row, 1.0 - down), (row + 1, down)), ((column, 1.0 - right), (column + 1, right)))
        value = reduce(add, (pixel(n, source, i, j) * of_row * of_column for (i, of_row), (j, of_column) in corners))
        return te.sum((value if mask is None else value * mask[n, place, p, q]) * w[o, channel, *offsets], [channel, *offsets])

    return te.compute((x.shape[0], out_channels, *offset.shape[2:]), element, "deform_conv")


def add_channels(x: Tensor, bias: Tensor) -> Tensor:
    """x + bias[channel], the channel being axis 1."""
    require_same(x.shape[1], bias.shape[0], "a bias for each channel")
    return te.compute(x.shape, lambda *i: x[i] + bias[i[1]], "bias")


def expert_dense(x: Tensor, w: Tensor, choice: Tensor) -> Tensor:
    """y[t, s, o] = sum over k of x[t, s, k] * w[choice[t, s], o, k]: each row by the weights [experts, out, in] of its own expert."""
    require_same(x.shape[-1], w.shape[2], "features of an expert")
    broadcast_shape(x.shape[:2], choice.shape)
    k = te.reduce_axis(w.shape[2], "rk")

    def element(t: Expr, s: Expr, o: Expr) -> Expr:
        expert = valid_index(choice[t, s], w.shape[0])
        return cast(te.sum(widened(x[t, 0 if x.shape[1] == 1 else s, k]) * widened(w[expert, o, k]), k), x.dtype)

    return te.compute((*choice.shape, w.shape[1]), element, "expert_dense")


def _pooled(x: Tensor, kernel: Ints, strides: Ints, dilations: Ints, name: str, element: Callable[[Index, Index, Index], Expr]) -> Tensor:
    """`element(indices, offsets, position)`: the value at output `indices`, `position` being what the window reads at `offsets` in it."""
    if not len(kernel) == len(strides) == len(dilations) == x.ndim - 2 or any(v < 1 for v in (*kernel, *strides, *dilations)):
        raise IRError(f"pooling of {x} with kernel {kernel}, strides {strides}, dilations {dilations}")
    shape = [window_count(d, k, s, r) for d, k, s, r in zip(x.shape[2:], kernel, strides, dilations, strict=True)]
    offsets = tuple(te.reduce_axis(k, f"rk{n}") for n, k in enumerate(kernel))

    def body(*i: Expr) -> Expr:
        at = (p * s + k * r for p, s, k, r in zip(i[2:], strides, offsets, dilations, strict=True))
        return element(i, offsets, (*i[:2], *at))

    return te.compute((*x.shape[:2], *shape), body, name)


def max_pool(x: Tensor, kernel: Ints, strides: Ints, dilations: Ints) -> Tensor:
    """The largest element of each window; NaN if the window has one."""
    return _pooled(x, kernel, strides, dilations, "max_pool", lambda i, offsets, at: te.max(x[at], offsets))


def max_pool_indices(
    x: Tensor, kernel: Ints, strides: Ints, dilations: Ints, before: Sequence[Dim], shape: Sequence[Dim], column_major: bool
) -> Tensor:
    """The position of the largest element of each window (the first of equals): flat index into the unpadded tensor of `shape`. `x` is
    padded by `before` in front of each spatial axis. `column_major` counts the spatial axes in reverse order."""
    largest = max_pool(x, kernel, strides, dilations)

    def element(i: Index, offsets: Index, at: Index) -> Expr:
        axes = [(p - b, extent) for p, b, extent in zip(at[2:], before, shape[2:], strict=True)]
        inside, spatial, volume = const(True, "bool"), const(0), const(1)
        for p, extent in axes if column_major else reversed(axes):
            inside = inside & (p >= 0) & (p < extent)
            spatial, volume = spatial + p * volume, volume * extent
        flat = (i[0] * shape[1] + i[1]) * volume + spatial
        return te.min(select(inside & te.equal(x[at], largest[i]), flat, integer_range("int64")[1]), offsets)

    return _pooled(x, kernel, strides, dilations, "max_pool_indices", element)


def average_pool(x: Tensor, kernel: Ints, strides: Ints, dilations: Ints, counted: Sequence[Sequence[Dim] | None]) -> Tensor:
    """The mean of each window over its elements inside `counted`, a (begin, end) for each spatial axis, None where all of them count.
    Elements that do not count must read as zero."""

    def element(i: Index, offsets: Index, at: Index) -> Expr:
        count: Expr = const(1)
        for p, k, s, r, ends in zip(i[2:], kernel, strides, dilations, counted, strict=True):
            before = [minimum(maximum((as_expr(end) - p * s + (r - 1)) // r, 0), k) for end in ends or ()]  # elements before begin and end
            count = count * (before[1] - before[0] if before else k)
        total = te.sum(widened(x[at]), offsets)
        return cast(total / cast(simplify(count), total.dtype), x.dtype)

    return _pooled(x, kernel, strides, dilations, "average_pool", element)


def lp_pool(x: Tensor, kernel: Ints, strides: Ints, dilations: Ints, p: float) -> Tensor:
    """(sum of |x|^p)^(1/p) of each window."""
    power, root = reduction.p_norm(p)
    return _pooled(x, kernel, strides, dilations, "lp_pool", lambda _, k, at: cast(root(te.sum(power(widened(x[at])), k)), x.dtype))


def global_lp_pool(x: Tensor, p: float) -> Tensor:
    """(sum of |x|^p)^(1/p) over all spatial axes, kept with extent 1."""
    return rounded(reduction.reduce(x, range(2, x.ndim), True, te.sum, "lp_pool", *reduction.p_norm(p)), x.dtype)


def max_unpool(x: Tensor, indices: Tensor, shape: Sequence[Dim], source: Sequence[Dim]) -> Tensor:
    """Zeros of `shape` with the elements of `x` at the flat `indices` into a tensor of shape `source` (see `max_pool_indices`). Indices
    outside `source` or `shape` are ignored."""
    require_same_shape(x.shape, indices.shape, "elements and their places")

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        values, places, result = *inputs, *outputs

        def scatter(i: Index) -> L.Stmt:
            rest, at = places[i], list[Expr]()
            for extent in reversed(source):
                at.insert(0, rest % extent)
                rest = rest // extent
            inside = (places[i] >= 0) & te.equal(rest, 0)
            return L.If(reduce(and_, (p < d for p, d in zip(at, shape, strict=True)), inside), L.store(result, at, values[i]))

        return L.block(L.over(shape, lambda i: L.store(result, i, 0), "z{}".format), L.over(x.shape, scatter))

    return te.extern((shape, x.dtype), [x, indices], program, "max_unpool")


def causal_mask(scores: Tensor, places: Tensor, starts: Tensor | None, window: int = 0) -> Tensor:
    """Scores [..., queries, keys], with a very low number in the place of those of hidden keys. Query q stands at row `places[q]` of the
    keys, and sees the keys up to that row: the last `window` of them, or all if that is 0. `starts` [scores.shape[0]] is the first row
    that a sequence has. Hidden scores are -inf, or `HIDDEN` where there are `starts`: queries before them see nothing."""
    hidden = float("-inf") if starts is None else HIDDEN

    def element(*i: Expr) -> Expr:
        query, key = i[-2:]
        seen = key <= places[query]
        if window:
            seen = seen & (places[query] - window < key)
        if starts is not None:
            seen = seen & (starts[i[0]] <= key)
        return select(seen, scores[i], const(hidden, scores.dtype))

    return te.compute(scores.shape, element, "causal_mask")


CONV, CONV_TRANSPOSE, DEFORM_CONV = Operator("conv", conv), Operator("conv_transpose", conv_transpose), Operator("deform_conv", deform_conv)
ADD_CHANNELS = Operator("add_channels", add_channels)
EXPERT_DENSE, CAUSAL_MASK = Operator("expert_dense", expert_dense), Operator("causal_mask", causal_mask)
MAX_POOL, MAX_POOL_INDICES = Operator("max_pool", max_pool), Operator("max_pool_indices", max_pool_indices)
AVERAGE_POOL, MAX_UNPOOL = Operator("average_pool", average_pool), Operator("max_unpool", max_unpool)
LP_POOL, GLOBAL_LP_POOL = Operator("lp_pool", lp_pool), Operator("global_lp_pool", global_lp_pool)
