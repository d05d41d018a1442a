"""Operators that read or write at positions given by data: gather, scatter, one-hot, top-k.

Every index from data is made safe: negative ones count from the end, and what is still outside is moved to the border, so that
no input can make generated code leave its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, ExprLike, as_expr, cast, const, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ir.loops import Allocate, Buffer, If, Stmt, While, block, loop, over, store
from tcomp.ops.broadcast import widened


def valid_index(index: Expr, extent: Dim) -> Expr:
    """`index` (any integer type) wrapped if negative and kept within 0 <= result < extent."""
    size = as_expr(extent)
    index = cast(index, "int64")
    return maximum(minimum(select(index < 0, index + size, index), size - 1), 0)


def _not_empty(x: te.Tensor, axis: int) -> None:
    if x.shape[axis] == 0:
        raise IRError(f"elements of {x!r} are gathered along axis {axis}, which is empty")


# ---------------------------------------------------------------- gather


def gather(x: te.Tensor, indices: te.Tensor, axis: int) -> te.Tensor:
    """Slices of `x` along `axis` at `indices` (any shape), whose axes take the place of that axis."""
    _not_empty(x, axis)

    def element(*i: Expr) -> Expr:
        at = valid_index(indices[i[axis : axis + indices.ndim]], x.shape[axis])
        return x[(*i[:axis], at, *i[axis + indices.ndim :])]

    return te.compute((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), element, "gather")


def gather_elements(x: te.Tensor, indices: te.Tensor, axis: int) -> te.Tensor:
    """out[i] = x[i with `axis` replaced by indices[i]]."""
    _not_empty(x, axis)

    def element(*i: Expr) -> Expr:
        return x[(*i[:axis], valid_index(indices[i], x.shape[axis]), *i[axis + 1 :])]

    return te.compute(indices.shape, element, "gather_elements")


def gather_nd(x: te.Tensor, indices: te.Tensor, batch_dims: int) -> te.Tensor:
    """Slices of `x` at index tuples, which stand along the last axis of `indices`, after `batch_dims` shared leading axes."""
    width = _tuple_width(indices)
    indexed = range(batch_dims, batch_dims + width)
    for axis in indexed:
        _not_empty(x, axis)

    def element(*i: Expr) -> Expr:
        outer, inner = i[: indices.ndim - 1], i[indices.ndim - 1 :]
        at = [valid_index(indices[(*outer, n)], x.shape[axis]) for n, axis in enumerate(indexed)]
        return x[(*i[:batch_dims], *at, *inner)]

    return te.compute((*indices.shape[:-1], *x.shape[batch_dims + width :]), element, "gather_nd")


def _tuple_width(indices: te.Tensor) -> int:
    width = indices.shape[-1]
    if not isinstance(width, int):
        raise IRError(f"the last axis of {indices!r} holds index tuples and must have a fixed size")
    return width


# ---------------------------------------------------------------- scatter

_COMBINE: dict[str, Callable[[Expr, Expr], Expr]] = {
    "none": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": maximum,
    "min": minimum,
}


def _copied(source: Buffer, target: Buffer) -> Stmt:
    return over(source.shape, lambda i: store(target, i, source[i]), "c{}".format)


def _combined(target: Buffer, at: Sequence[Expr], value: Expr, reduction: str) -> Stmt:
    old = target[tuple(at)]
    return store(target, at, cast(_COMBINE[reduction](widened(old), widened(value)), target.dtype))


def scatter_elements(x: te.Tensor, indices: te.Tensor, updates: te.Tensor, axis: int, reduction: str) -> te.Tensor:
    """A copy of `x` with updates[i] stored at (combined into) i with `axis` replaced by indices[i], in row-major order of i."""
    _not_empty(x, axis)

    def program(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        (source, index, update), (target,) = inputs, outputs

        def one(i: tuple[Expr, ...]) -> Stmt:
            at = [*i[:axis], valid_index(index[tuple(i)], x.shape[axis]), *i[axis + 1 :]]
            return _combined(target, at, update[i], reduction)

        return block(_copied(source, target), over(indices.shape, one))

    return te.extern((x.shape, x.dtype), [x, indices, updates], program, "scatter_elements")


def scatter_nd(x: te.Tensor, indices: te.Tensor, updates: te.Tensor, reduction: str) -> te.Tensor:
    """A copy of `x` with slices of `updates` stored at (combined into) the index tuples along the last axis of `indices`."""
    width = _tuple_width(indices)
    for axis in range(width):
        _not_empty(x, axis)

    def program(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        (source, index, update), (target,) = inputs, outputs
        count = indices.ndim - 1

        def one(i: tuple[Expr, ...]) -> Stmt:
            at = [valid_index(index[(*i[:count], n)], x.shape[n]) for n in range(width)]
            return _combined(target, [*at, *i[count:]], update[i], reduction)

        return block(_copied(source, target), over([*indices.shape[:-1], *x.shape[width:]], one))

    return te.extern((x.shape, x.dtype), [x, indices, updates], program, "scatter_nd")


def tensor_scatter(past: te.Tensor, update: te.Tensor, starts: te.Tensor | None, axis: int, circular: bool) -> te.Tensor:
    """A cache [batch, ..., capacity at `axis`, ...] with `update` written from position starts[b] on (0 if left out).

    `circular` wraps around at the end of the cache.
    """
    capacity, length = as_expr(past.shape[axis]), as_expr(update.shape[axis])

    def element(*i: Expr) -> Expr:
        start = const(0) if starts is None else cast(starts[i[0]], "int64")
        offset = i[axis] - start
        if circular:
            offset = offset % capacity
        inside = te.all_of([offset >= 0, offset < length])
        return select(inside, update[(*i[:axis], offset, *i[axis + 1 :])], past[i])

    return te.compute(past.shape, element, "tensor_scatter")


# ---------------------------------------------------------------- one-hot


def one_hot(indices: te.Tensor, values: te.Tensor, depth: Dim, axis: int) -> te.Tensor:
    """values[1] where the new axis (of size `depth`) equals the index, negative ones counted from the end; else values[0]."""
    size = as_expr(depth)

    def element(*i: Expr) -> Expr:
        index = cast(indices[(*i[:axis], *i[axis + 1 :])], "int64")
        return select(te.equal(select(index < 0, index + size, index), i[axis]), values[1], values[0])

    return te.compute((*indices.shape[:axis], depth, *indices.shape[axis:]), element, "one_hot")


# ---------------------------------------------------------------- top-k


def top_k(x: te.Tensor, k: Dim, axis: int, largest: bool) -> tuple[te.Tensor, te.Tensor]:
    """The k extreme elements along `axis`, sorted, and their positions (int64); of equal ones the first comes first.

    A stable bottom-up merge sort of the positions of each lane, O(n log n).
    """
    n = as_expr(x.shape[axis])
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])

    def program(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        (source,), (values, positions) = inputs, outputs
        order, merged = Buffer("order", "int64", (n,)), Buffer("merged", "int64", (n,))

        def lane(outer: tuple[Expr, ...]) -> Stmt:
            def at(place: ExprLike) -> tuple[ExprLike, ...]:
                return (*outer[:axis], place, *outer[axis:])

            def before(p: Expr, q: Expr) -> Expr:
                """Whether the element at position q must not come before the one at p."""
                a, b = source[at(p)], source[at(q)]
                return b <= a if largest else a <= b

            def take(rank: Expr) -> Stmt:
                return block(store(values, at(rank), source[at(order[rank])]), store(positions, at(rank), order[rank]))

            start = loop("p", n, lambda p: store(order, (p,), p))
            sorted_ = block(start, _merge_sort(order, merged, n, before), loop("rank", k, take))
            return Allocate(order, Allocate(merged, sorted_)) if n.op == "const" else sorted_

        lanes = over([d for m, d in enumerate(x.shape) if m != axis], lane)
        return lanes if n.op == "const" else Allocate(order, Allocate(merged, lanes))

    values, positions = te.externs([(shape, x.dtype), (shape, "int64")], [x], program, "top_k")
    return values, positions


def _merge_sort(order: Buffer, merged: Buffer, n: Expr, before: Callable[[Expr, Expr], Expr]) -> Stmt:
    """Sorts order[0:n] with `merged` as scratch; `before(p, q)` says whether p may stay in front of q."""
    width, left, right = (Buffer(name, "int64", (1,), "register") for name in ("width", "left", "right"))

    def advance(slot: Expr) -> Stmt:
        # `left` and `right` walk through the two runs that are merged into order[base : base + 2 * width].
        base = slot // (width[0] * 2) * (width[0] * 2)
        middle, end = minimum(base + width[0], n), minimum(base + width[0] * 2, n)
        restart = If(te.equal(slot, base), block(store(left, (0,), base), store(right, (0,), middle)))
        one, other = left[0], right[0]
        last = n - 1  # reads of exhausted runs are not used, but must stay inside
        in_order = before(order[minimum(one, last)], order[minimum(other, last)])
        from_left = (one < middle) & ((end <= other) | in_order)
        return block(
            restart,
            If(
                from_left,
                block(store(merged, (slot,), order[one]), store(left, (0,), one + 1)),
                block(store(merged, (slot,), order[other]), store(right, (0,), other + 1)),
            ),
        )

    step = block(loop("slot", n, advance), loop("copy", n, lambda p: store(order, (p,), merged[p])), store(width, (0,), width[0] * 2))
    body = block(store(width, (0,), 1), While(width[0] < n, step))
    return Allocate(width, Allocate(left, Allocate(right, body)))


GATHER, GATHER_ELEMENTS, GATHER_ND = (
    Operator("gather", gather), Operator("gather_elements", gather_elements), Operator("gather_nd", gather_nd)
)  # fmt: skip
SCATTER_ELEMENTS, SCATTER_ND = Operator("scatter_elements", scatter_elements), Operator("scatter_nd", scatter_nd)
TENSOR_SCATTER = Operator("tensor_scatter", tensor_scatter)
ONE_HOT, TOP_K = Operator("one_hot", one_hot), Operator("top_k", top_k)
