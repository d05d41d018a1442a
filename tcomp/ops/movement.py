"""Operators that only move elements, or write sizes down: by index maps, simplified where sizes allow, or to and from positions in data.

Shapes, starts and pads may be symbolic (`Dim`). An index from data is made safe: negative ones count from the end, and what is still
outside is moved to the border, so that no input can make generated code leave its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from operator import add, mod, mul

from tcomp.errors import IRError
from tcomp.ir import loops as L, te
from tcomp.ir.broadcasting import broadcast_shape, require_same, require_same_shape, widened
from tcomp.ir.expr import Dim, Expr, ExprLike, as_expr, cast, checked, const, maximum, minimum, row_major, select
from tcomp.ir.graph import Operator
from tcomp.ir.simplify import as_dim, prove, same_dim, simplify
from tcomp.ir.te import Tensor, broadcast_read
from tcomp.ops.elementwise import pick, piecewise


def transpose(x: Tensor, perm: Sequence[int]) -> Tensor:
    """Output axis d is input axis `perm[d]`."""
    if sorted(perm) != list(range(x.ndim)):
        raise IRError(f"transpose by {tuple(perm)} of a tensor of rank {x.ndim}", hint="name every axis once")
    return te.compute([x.shape[axis] for axis in perm], lambda *i: x[tuple(i[perm.index(n)] for n in range(x.ndim))], "transpose")


def product(dims: Sequence[Dim]) -> Dim:
    """Number of elements, simplified."""
    return as_dim(prod(map(as_expr, dims), start=const(1)))


def reshape(x: Tensor, shape: Sequence[Dim]) -> Tensor:
    """The same elements in row-major order under another shape. Input and output axes are cut into the smallest groups of equal size; each
    group has an index map of its own, so that axes which are merely kept, merged or split stay visible as such."""
    shape = tuple(as_dim(d) for d in shape)
    before, after = (", ".join(map(str, s)) for s in (x.shape, shape))
    require_same(product(x.shape), product(shape), f"reshape of [{before}] to [{after}]")
    return view(x, shape)


def view(x: Tensor, shape: Sequence[Dim]) -> Tensor:
    """`reshape` where the caller guarantees that the sizes agree, which depend on values that are known before a run."""
    shape = tuple(as_dim(d) for d in shape)
    if 0 in shape:
        return te.compute(shape, lambda *i: const(0, x.dtype), "reshape")
    groups = _groups(x.shape, shape)
    return te.compute(shape, lambda *i: x[tuple(n for a, b in groups for n in _regroup(x.shape[a], shape[b], i[b]))], "reshape")


def _groups(source: Sequence[Dim], target: Sequence[Dim]) -> list[tuple[slice, slice]]:
    """The finest cut of both axis lists into consecutive groups of equal size."""
    before = [product(source[:n]) for n in range(len(source) + 1)]
    after = [product(target[:n]) for n in range(len(target) + 1)]
    groups, i, j = [], 0, 0
    for n in range(1, len(source) + 1):
        if (match := next((m for m in range(j, len(target) + 1) if same_dim(before[n], after[m])), None)) is not None:
            groups.append((slice(i, n), slice(j, match)))
            i, j = n, match
    return [*groups, (slice(i, None), slice(j, None))]


def _regroup(source: Sequence[Dim], target: Sequence[Dim], index: Sequence[Expr]) -> list[Expr]:
    """Indices of `source` for an index of `target`; both have the same number of elements."""
    wide = [(i, d) for d, i in zip(target, index, strict=True) if d != 1]
    position = row_major([i for i, _ in wide], [d for _, d in wide])
    first = next((n for n, d in enumerate(source) if d != 1), None)

    def along(n: int, extent: Dim) -> Expr:
        quotient = position // as_expr(product(source[n + 1 :]))
        return simplify(quotient if n == first else quotient % as_expr(extent))

    return [const(0) if d == 1 else along(n, d) for n, d in enumerate(source)]


def with_shape(x: Tensor, shape: Sequence[Dim], condition: Expr | None = None) -> Tensor:
    """`x`, whose extents are those of `shape` in every run, though not for sure: where `condition` holds, if one is given. A run for which
    it does not hold ends here."""

    def element(*i: Expr) -> Expr:
        if condition is None:
            return x[i]
        limit = select(condition, as_expr(shape[0]) if shape else const(1), 0)
        first = checked(i[0] if i else const(0), limit, const(0))
        return x[tuple(clamped(n, d) for n, d in zip((first, *i[1:]), x.shape, strict=False))]

    return te.compute(shape, element, "with_shape")


def expand(x: Tensor, shape: Sequence[Dim]) -> Tensor:
    """Broadcast to the common shape of `x` and `shape`."""
    return te.compute(broadcast_shape(x.shape, shape), lambda *i: broadcast_read(x, i), "expand")


def broadcast_to(x: Tensor, shape: Sequence[Dim]) -> Tensor:
    """Broadcast to `shape`; the caller guarantees that each extent of `x` is 1 or that of `shape`, which may be known before a run only."""

    def place(i: Expr, extent: Dim, result: Dim) -> Expr:
        return const(0) if extent == 1 else i if isinstance(extent, int) or same_dim(extent, result) else minimum(i, extent - 1)

    own = len(shape) - x.ndim
    return te.compute(shape, lambda *i: x[tuple(map(place, i[own:], x.shape, shape[own:]))], "broadcast_to")


def tile(x: Tensor, repeats: Sequence[Dim]) -> Tensor:
    """Each axis repeated as a whole."""
    shape = tuple(as_dim(as_expr(d) * r) for d, r in zip(x.shape, repeats, strict=True))
    return te.compute(shape, lambda *i: x[tuple(n if r == 1 else n % d for n, d, r in zip(i, x.shape, repeats, strict=True))], "tile")


def slice_(x: Tensor, starts: Sequence[Dim], steps: Sequence[int], shape: Sequence[Dim]) -> Tensor:
    """out[i] = x[starts + i * steps] along every axis; the caller guarantees that this stays inside."""
    return te.compute(shape, lambda *i: x[tuple(s + n * step for n, s, step in zip(i, starts, steps, strict=True))], "slice")


def concat(*parts: Tensor, axis: int) -> Tensor:
    """Tensors one behind the other along `axis`; all other extents agree."""
    first = parts[0]
    offsets: list[Dim] = [0]
    for t in parts:
        if t.ndim != first.ndim or t.dtype != first.dtype:
            raise IRError(f"concat of {first!r} and {t!r}: rank and dtype must agree")
        for n, (d, e) in enumerate(zip(t.shape, first.shape, strict=True)):
            if n != axis:
                require_same(d, e, f"concat of {first!r} and {t!r} along axis {axis}")
        offsets.append(as_dim(as_expr(offsets[-1]) + as_expr(t.shape[axis])))
    pieces = [(t, offset) for t, offset in zip(parts, offsets, strict=False) if t.shape[axis] != 0] or [(first, 0)]

    def element(*i: Expr) -> Expr:
        values = [t[(*i[:axis], i[axis] - as_expr(offset), *i[axis + 1 :])] for t, offset in pieces]
        return piecewise(i[axis], [as_expr(offset) + t.shape[axis] for t, offset in pieces], values)

    return te.compute((*first.shape[:axis], offsets[-1], *first.shape[axis + 1 :]), element, "concat")


def pad(x: Tensor, value: Tensor | None, before: Sequence[Dim], after: Sequence[Dim], mode: str = "constant") -> Tensor:
    """`before` and `after` elements added along every axis (negative: cut off). Modes: constant (`value`, a scalar; 0 where left out), edge
    (repeats the border), reflect (mirrors without repeating the border), wrap (periodic)."""
    sides = list(zip(x.shape, before, after, strict=True))
    filling = const(0, x.dtype) if value is None else value[(0,) * value.ndim]

    def element(*i: Expr) -> Expr:
        at = tuple(n - as_expr(b) for n, b in zip(i, before, strict=True))
        if mode != "constant":
            return x[tuple(n if b == 0 and a == 0 else _PAD_INDEX[mode](n, as_expr(d)) for n, (d, b, a) in zip(at, sides, strict=True))]
        inside = []  # the conditions under which an element is one of x, as far as they are not certain
        for n, (d, b, a) in zip(at, sides, strict=True):
            inside += [] if prove(as_expr(b) <= 0) else [as_expr(0) <= n]
            inside += [] if prove(as_expr(a) <= 0) else [n < as_expr(d)]
        return select(te.all_of(inside), x[at], filling)

    return te.compute(tuple(as_dim(as_expr(d) + b + a) for d, b, a in sides), element, "pad")


def clamped(index: Expr, extent: Dim) -> Expr:
    """`index`, or the border nearest to it: 0 <= result < extent."""
    return maximum(minimum(index, as_expr(extent) - 1), 0)


def reflected(index: Expr, extent: Expr, at_centres: bool = True) -> Expr:
    """`index` mirrored at the centres of the elements at the border, or at their outer edges."""
    period = maximum(extent * 2 - 2, 1) if at_centres else extent * 2
    place = index % period
    return select(place < extent, place, period - place if at_centres else period - 1 - place)


_PAD_INDEX: dict[str, Callable[[Expr, Expr], Expr]] = {"edge": clamped, "reflect": reflected, "wrap": mod}
PAD_MODES = ("constant", *_PAD_INDEX)


def depth_to_space(x: Tensor, block: int, channels_first: bool) -> Tensor:
    """[n, c * b * b, h, w] -> [n, c, h * b, w * b]; `channels_first` (CRD) orders the channels (c, b, b), else (b, b, c)."""
    n, depth, h, w = map(as_expr, x.shape)
    c = as_expr(as_dim(depth // (block * block)))

    def element(b: Expr, k: Expr, i: Expr, j: Expr) -> Expr:
        inside = (i % block) * block + j % block
        return x[b, k * (block * block) + inside if channels_first else inside * c + k, i // block, j // block]

    return te.compute([as_dim(d) for d in (n, c, h * block, w * block)], element, "depth_to_space")


def space_to_depth(x: Tensor, block: int, channels_first: bool) -> Tensor:
    """[n, c, h * b, w * b] -> [n, c * b * b, h, w], the inverse of `depth_to_space`."""
    n, c, h, w = map(as_expr, x.shape)

    def element(b: Expr, k: Expr, i: Expr, j: Expr) -> Expr:
        channel, inside = (k // (block * block), k % (block * block)) if channels_first else (k % c, k // c)
        return x[b, channel, i * block + inside // block, j * block + inside % block]

    return te.compute([as_dim(d) for d in (n, c * (block * block), h // block, w // block)], element, "space_to_depth")


def reverse_sequence(x: Tensor, lengths: Tensor, batch_axis: int, time_axis: int) -> Tensor:
    """For every batch b, the first lengths[b] elements along `time_axis` in reverse; the rest stays."""
    require_same(x.shape[batch_axis], lengths.shape[0], "sequences and their lengths")

    def element(*i: Expr) -> Expr:
        t = i[time_axis]
        length = minimum(cast(lengths[i[batch_axis]], "int64"), as_expr(x.shape[time_axis]))
        return x[(*i[:time_axis], select(t < length, length - 1 - t, t), *i[time_axis + 1 :])]

    return te.compute(x.shape, element, "reverse_sequence")


def trilu(x: Tensor, k: Tensor | None, diagonal: int, upper: bool) -> Tensor:
    """The triangle of the last two axes at and above (`upper`) or below diagonal number k (or `diagonal`), else 0."""

    def element(*i: Expr) -> Expr:
        offset, distance = as_expr(diagonal) if k is None else cast(k[(0,) * k.ndim], "int64"), i[-1] - i[-2]
        return select(offset <= distance if upper else distance <= offset, x[i], const(0, x.dtype))

    return te.compute(x.shape, element, "trilu")


def eye(shape: Sequence[Dim], diagonal: int, dtype: str) -> Tensor:
    """Ones on diagonal number `diagonal`, zeros elsewhere."""
    return te.compute(shape, lambda i, j: cast(te.equal(j - i, diagonal), dtype), "eye")


def arange(start: Dim, step: Dim, count: Dim, dtype: str) -> Tensor:
    """start, start + step, ...: `count` elements."""
    return te.compute((count,), lambda i: cast(as_expr(start) + i * as_expr(step), dtype), "arange")


def arange_from(start: Tensor, step: Tensor, *, count: Dim) -> Tensor:
    """start, start + step, ...: `count` elements, of scalars that only a run knows."""
    first, distance = widened(start[(0,) * start.ndim]), widened(step[(0,) * step.ndim])
    return te.compute((count,), lambda i: cast(first + cast(i, first.dtype) * distance, start.dtype), "arange_from")


def dims(*, dims: Sequence[Dim], shape: Sequence[int], dtype: str = "int64") -> Tensor:
    """A tensor of `shape` whose elements, in row-major order, are the given sizes (or other scalar expressions)."""
    values = [cast(d, dtype) if isinstance(d, Expr) else const(d, dtype) for d in dims] or [const(0, dtype)]
    return te.compute(tuple(shape), lambda *index: pick(row_major(index, shape), values), name="dims")


Index = tuple[Expr, ...]


def valid_index(index: Expr, extent: Dim) -> Expr:
    """`index` (any integer type) wrapped if negative, then kept within 0 <= result < extent: where it lies outside, the run reports it."""
    return clamped(checked(_from_end(index, extent), extent, cast(index, "int64")), extent)


def _from_end(index: Expr, extent: Dim) -> Expr:
    return select((index := cast(index, "int64")) < 0, index + as_expr(extent), index)


def _require_elements(x: Tensor, *axes: int) -> None:
    if empty := [axis for axis in axes if x.shape[axis] == 0]:
        raise IRError(f"elements of {x!r} are gathered along axis {empty[0]}, which is empty")


def _tuple_width(indices: Tensor) -> int:
    """The length of the index tuples along the last axis."""
    if not isinstance(width := indices.shape[-1], int):
        raise IRError(f"the last axis of {indices!r} holds index tuples and must have a fixed size")
    return width


def gather(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Slices of `x` along `axis` at `indices` (any shape), whose axes take the place of that axis."""
    _require_elements(x, axis)
    end = axis + indices.ndim  # of the axes of `indices` in the result
    shape = *x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]
    return te.compute(shape, lambda *i: x[*i[:axis], valid_index(indices[i[axis:end]], x.shape[axis]), *i[end:]], "gather")


def gather_elements(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """out[i] = x[i with `axis` replaced by indices[i]]."""
    _require_elements(x, axis)
    return te.compute(indices.shape, lambda *i: x[_along(x, indices, axis, i, indices[i])], "gather_elements")


def _along(x: Tensor, indices: Tensor, axis: int, i: Index, index: Expr) -> Index:
    """The place i of `indices` as one of `x`, at `index` along `axis`; along the others `indices` is as long as `x`, or shorter."""

    def place(n: int) -> Expr:
        own, extent = indices.shape[n], x.shape[n]
        known = (isinstance(own, int) and isinstance(extent, int)) or prove(as_expr(own) <= extent)
        return i[n] if known else valid_index(i[n], extent)

    return tuple(valid_index(index, x.shape[n]) if n == axis else place(n) for n in range(x.ndim))


def gather_nd(x: Tensor, indices: Tensor, batch_dims: int) -> Tensor:
    """Slices of `x` at the index tuples along the last axis of `indices`, after `batch_dims` shared leading axes."""
    width = _tuple_width(indices)
    indexed = range(batch_dims, batch_dims + width)
    require_same_shape(x.shape[:batch_dims], indices.shape[:batch_dims], "batches of elements and of indices")
    _require_elements(x, *indexed)

    def element(*i: Expr) -> Expr:
        at = [valid_index(indices[*i[: indices.ndim - 1], n], x.shape[axis]) for n, axis in enumerate(indexed)]
        return x[*i[:batch_dims], *at, *i[indices.ndim - 1 :]]

    return te.compute((*indices.shape[:-1], *x.shape[batch_dims + width :]), element, "gather_nd")


COMBINE: dict[str, Callable[[Expr, Expr], Expr]] = {"none": lambda old, new: new, "add": add, "mul": mul, "max": maximum, "min": minimum}


Place = tuple[Index, Sequence[Expr]]  # an index, and the conditions under which it is written


def scattered(
    x: Tensor,
    indices: Tensor,
    updates: Tensor,
    combine: Callable[[Expr, Expr], Expr],
    name: str,
    shape: Sequence[Dim],
    place: Callable[[L.Buffer, Index], Place],
) -> Tensor:
    """A copy of `x` with updates[i] stored at (combined into) place(indices, i), for the indices i of `shape` in row-major order."""

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        (source, index, update), (target,) = inputs, outputs

        def one(i: Index) -> L.Stmt:
            at, conditions = place(index, i)
            write = L.store(target, at, cast(combine(widened(target[at]), widened(update[i])), target.dtype))
            return L.If(te.all_of(conditions), write) if conditions else write

        return L.block(L.over(source.shape, lambda i: L.store(target, i, source[i]), "c{}".format), L.over(shape, one))

    return te.extern((x.shape, x.dtype), [x, indices, updates], program, name)


def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, axis: int, reduction: str) -> Tensor:
    """A copy of `x` with updates[i] stored at (combined into) i with `axis` replaced by indices[i], in row-major order of i."""
    _require_elements(x, axis)
    require_same_shape(indices.shape, updates.shape, "indices and updates")

    def place(index: L.Buffer, i: Index) -> Place:
        return _along(x, indices, axis, i, index[i]), ()

    return scattered(x, indices, updates, COMBINE[reduction], "scatter_elements", indices.shape, place)


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, reduction: str) -> Tensor:
    """A copy of `x` with slices of `updates` stored at (combined into) the index tuples along the last axis of `indices`."""
    width, count = _tuple_width(indices), indices.ndim - 1
    shape = [*indices.shape[:-1], *x.shape[width:]]
    _require_elements(x, *range(width))
    require_same_shape(shape, updates.shape, "places and updates")

    def place(index: L.Buffer, i: Index) -> Place:
        return (*(valid_index(index[(*i[:count], n)], x.shape[n]) for n in range(width)), *i[count:]), ()

    return scattered(x, indices, updates, COMBINE[reduction], "scatter_nd", shape, place)


def tensor_scatter(past: Tensor, update: Tensor, starts: Tensor | None, axis: int, circular: bool) -> Tensor:
    """A cache [batch, ..., capacity at `axis`, ...] with `update` written from position starts[b] on (0 if left out). `circular` wraps
    around at the end of the cache."""
    shared = [n for n in range(past.ndim) if n != axis]
    require_same_shape([past.shape[n] for n in shared], [update.shape[n] for n in shared], "a cache and its update")
    if starts is not None:
        require_same(past.shape[0], starts.shape[0], "sequences and their starts")
    capacity, length = as_expr(past.shape[axis]), as_expr(update.shape[axis])

    def element(*i: Expr) -> Expr:
        offset = i[axis] - (const(0) if starts is None else cast(starts[i[0]], "int64"))
        offset = offset % capacity if circular else offset
        return select(te.all_of([offset >= 0, offset < length]), update[(*i[:axis], offset, *i[axis + 1 :])], past[i])

    return te.compute(past.shape, element, "tensor_scatter")


def ends(x: Tensor, limits: Tensor) -> Tensor:
    """Places in axes of the extents `limits` (int64), those below 0 counted from the end; what is outside is moved to the border."""
    return te.compute(x.shape, lambda n: maximum(minimum(_from_end(x[n], limits[n]), limits[n]), 0), "ends")


def at_most(x: Tensor, most: Dim) -> Tensor:
    """The element of a tensor that has one, as an int64 scalar; a run in which it is below 0 or above `most` ends with an error."""
    element, size = x[(0,) * x.ndim], as_expr(most) + 1
    return te.compute((), lambda: clamped(checked(cast(element, "int64"), size, cast(element, "int64")), size), "at_most")


def one_hot(indices: Tensor, values: Tensor, depth: Dim, axis: int) -> Tensor:
    """values[1] where the new axis (of size `depth`) equals the index, negative ones counted from the end; else values[0]."""

    def element(*i: Expr) -> Expr:
        return select(te.equal(_from_end(indices[(*i[:axis], *i[axis + 1 :])], depth), i[axis]), values[1], values[0])

    return te.compute((*indices.shape[:axis], depth, *indices.shape[axis:]), element, "one_hot")


MAX_KEPT = 32  # elements that are kept in order while others pass; each may have to move all of them


def top_k(x: Tensor, k: Dim, axis: int, largest: bool) -> tuple[Tensor, ...]:
    """The k extreme elements along `axis`, sorted, and their positions (int64); of equal ones the first comes first. A stable bottom-up
    merge sort of the positions of each lane, O(n log n); few of many elements are kept in order while the others pass, O(n) mostly."""
    n = as_expr(x.shape[axis])
    few = isinstance(k, int) and 0 < k <= MAX_KEPT and isinstance(x.shape[axis], int) and k < x.shape[axis]
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        (source,), (values, positions) = inputs, outputs
        order, merged = L.Buffer("order", "int64", (k if few else n,)), L.Buffer("merged", "int64", (n,))
        scratch = (order,) if few else (order, merged)

        def lane(outer: Index) -> L.Stmt:
            def at(place: ExprLike) -> tuple[ExprLike, ...]:
                return (*outer[:axis], place, *outer[axis:])

            def in_order(p: Expr, q: Expr) -> Expr:
                a, b = source[at(p)], source[at(q)]
                return b <= a if largest else a <= b

            def before(p: Expr, q: Expr) -> Expr:
                a, b = source[at(p)], source[at(q)]
                return (b < a if largest else a < b) | te.not_equal(b, b)  # whatever comes goes before NaN

            def take(rank: Expr) -> L.Stmt:
                return L.block(L.store(values, at(rank), source[at(order[rank])]), L.store(positions, at(rank), order[rank]))

            unsorted = L.loop("p", n, lambda p: L.store(order, (p,), p))
            ordered = _keep_first(order, as_expr(k), n, before) if few else L.block(unsorted, merge_sort(order, merged, n, in_order))
            body = L.block(ordered, L.loop("rank", k, take))
            return L.allocated(scratch, body) if n.op == "const" else body

        lanes = L.over([d for m, d in enumerate(x.shape) if m != axis], lane)
        return lanes if n.op == "const" else L.allocated(scratch, lanes)

    return te.externs([(shape, x.dtype), (shape, "int64")], [x], program, "top_k")


def _keep_first(order: L.Buffer, k: Expr, n: Expr, before: Callable[[Expr, Expr], Expr]) -> L.Stmt:
    """Writes to `order` which k of n elements come first, in order, as `before(p, q)` says of two positions."""

    def insert(p: Expr, last: Expr, name: str) -> L.Stmt:
        """Element p, where it belongs among those kept; the one at `last` makes room. `name`: of the loop over them."""

        def step(j: Expr) -> L.Stmt:
            place = last - j
            own, previous = order[place], order[maximum(place - 1, 0)]
            goes_up, here = (place > 0) & before(p, previous), te.equal(j, 0) | before(p, own)
            return L.store(order, (place,), select(goes_up, previous, select(here, p, own)))

        return L.loop(name, last + 1, step)

    first = L.loop("first", k, lambda i: L.store(order, (i,), i))
    head = L.loop("head", k - 1, lambda i: insert(i + 1, i + 1, "earlier"))
    return L.block(first, head, L.loop("p", n - k, lambda i: L.If(before(i + k, order[k - 1]), insert(i + k, k - 1, "later"))))


def merge_sort(
    order: L.Buffer,
    merged: L.Buffer,
    n: Expr,
    in_order: Callable[[Expr, Expr], Expr],
    compare: Callable[[Expr, Expr], L.Stmt] | None = None,
) -> L.Stmt:
    """Sorts order[0:n] with `merged` as scratch; `in_order(p, q)` says whether p may stay in front of q, after `compare(p, q)` ran."""
    width, left, right = (L.Buffer(name, "int64", (1,), "register") for name in ("width", "left", "right"))

    def advance(slot: Expr) -> L.Stmt:
        # `left` and `right` walk through the two runs that are merged into order[base : base + 2 * width].
        base = slot // (width[0] * 2) * (width[0] * 2)
        middle, end = minimum(base + width[0], n), minimum(base + width[0] * 2, n)
        one, other = left[0], right[0]
        last = n - 1  # reads of exhausted runs are not used, but must stay inside
        p, q = order[minimum(one, last)], order[minimum(other, last)]
        from_left = (one < middle) & ((end <= other) | in_order(p, q))
        return L.block(
            L.If(te.equal(slot, base), L.block(L.store(left, (0,), base), L.store(right, (0,), middle))),
            *([] if compare is None else [compare(p, q)]),
            L.If(
                from_left,
                L.block(L.store(merged, (slot,), order[one]), L.store(left, (0,), one + 1)),
                L.block(L.store(merged, (slot,), order[other]), L.store(right, (0,), other + 1)),
            ),
        )

    copy = L.loop("copy", n, lambda p: L.store(order, (p,), merged[p]))
    step = L.block(L.loop("slot", n, advance), copy, L.store(width, (0,), width[0] * 2))
    body = L.block(L.store(width, (0,), 1), L.While(width[0] < n, step))
    return L.allocated((width, left, right), body)


TRANSPOSE, RESHAPE, VIEW = Operator("transpose", transpose), Operator("reshape", reshape), Operator("view", view)
WITH_SHAPE, BROADCAST_TO = Operator("with_shape", with_shape), Operator("broadcast_to", broadcast_to)
EXPAND, TILE, SLICE = Operator("expand", expand), Operator("tile", tile), Operator("slice", slice_)
CONCAT, PAD, TRILU = Operator("concat", concat), Operator("pad", pad), Operator("trilu", trilu)
DEPTH_TO_SPACE, SPACE_TO_DEPTH = Operator("depth_to_space", depth_to_space), Operator("space_to_depth", space_to_depth)
REVERSE_SEQUENCE, EYE, ARANGE = Operator("reverse_sequence", reverse_sequence), Operator("eye", eye), Operator("arange", arange)
IDENTITY = Operator("identity", lambda x: te.compute(x.shape, lambda *i: x[i], name="identity"))
GATHER, GATHER_ELEMENTS = Operator("gather", gather), Operator("gather_elements", gather_elements)
GATHER_ND, ARANGE_FROM = Operator("gather_nd", gather_nd), Operator("arange_from", arange_from)
SCATTER_ELEMENTS, SCATTER_ND = Operator("scatter_elements", scatter_elements), Operator("scatter_nd", scatter_nd)
ENDS, AT_MOST, TENSOR_SCATTER = Operator("ends", ends), Operator("at_most", at_most), Operator("tensor_scatter", tensor_scatter)
ONE_HOT, TOP_K, DIMS = Operator("one_hot", one_hot), Operator("top_k", top_k), Operator("dims", dims)
