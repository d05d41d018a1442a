"""Operators that read or write at positions given by data: gather, scatter, one-hot, top-k.

Every index from data is made safe: negative ones count from the end, and what is still outside is moved to the border, so that
no input can make generated code leave its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tcomp.errors import IRError
from tcomp.ir import loops as L
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, ExprLike, as_expr, cast, const, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor
from tcomp.ops.broadcast import widened

Index = tuple[Expr, ...]


def valid_index(index: Expr, extent: Dim) -> Expr:
    """`index` (any integer type) wrapped if negative and kept within 0 <= result < extent."""
    size = as_expr(extent)
    index = cast(index, "int64")
    return maximum(minimum(select(index < 0, index + size, index), size - 1), 0)


def _require_elements(x: Tensor, *axes: int) -> None:
    for axis in axes:
        if x.shape[axis] == 0:
            raise IRError(f"elements of {x!r} are gathered along axis {axis}, which is empty")


def _tuple_width(indices: Tensor) -> int:
    """The length of the index tuples along the last axis."""
    width = indices.shape[-1]
    if not isinstance(width, int):
        raise IRError(f"the last axis of {indices!r} holds index tuples and must have a fixed size")
    return width


def gather(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Slices of `x` along `axis` at `indices` (any shape), whose axes take the place of that axis."""
    _require_elements(x, axis)

    def element(*i: Expr) -> Expr:
        at = valid_index(indices[i[axis : axis + indices.ndim]], x.shape[axis])
        return x[(*i[:axis], at, *i[axis + indices.ndim :])]

    return te.compute((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), element, "gather")


def gather_elements(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """out[i] = x[i with `axis` replaced by indices[i]]."""
    _require_elements(x, axis)
    extent = x.shape[axis]
    return te.compute(indices.shape, lambda *i: x[(*i[:axis], valid_index(indices[i], extent), *i[axis + 1 :])], "gather_elements")


def gather_nd(x: Tensor, indices: Tensor, batch_dims: int) -> Tensor:
    """Slices of `x` at index tuples, which stand along the last axis of `indices`, after `batch_dims` shared leading axes."""
    width = _tuple_width(indices)
    indexed = range(batch_dims, batch_dims + width)
    _require_elements(x, *indexed)

    def element(*i: Expr) -> Expr:
        outer, inner = i[: indices.ndim - 1], i[indices.ndim - 1 :]
        at = [valid_index(indices[(*outer, n)], x.shape[axis]) for n, axis in enumerate(indexed)]
        return x[(*i[:batch_dims], *at, *inner)]

    return te.compute((*indices.shape[:-1], *x.shape[batch_dims + width :]), element, "gather_nd")


_COMBINE: dict[str, Callable[[Expr, Expr], Expr]] = {
    "none": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": maximum,
    "min": minimum,
}


def _scattered(
    x: Tensor, indices: Tensor, updates: Tensor, reduction: str, name: str, shape: Sequence[Dim], place: Callable[[L.Buffer, Index], Index]
) -> Tensor:
    """A copy of `x` with updates[i] stored at (combined into) place(indices, i), for the indices i of `shape` in row-major order."""

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        (source, index, update), (target,) = inputs, outputs

        def one(i: Index) -> L.Stmt:
            at = place(index, i)
            return L.store(target, at, cast(_COMBINE[reduction](widened(target[at]), widened(update[i])), target.dtype))

        copy = L.over(source.shape, lambda i: L.store(target, i, source[i]), "c{}".format)
        return L.block(copy, L.over(shape, one))

    return te.extern((x.shape, x.dtype), [x, indices, updates], program, name)


def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, axis: int, reduction: str) -> Tensor:
    """A copy of `x` with updates[i] stored at (combined into) i with `axis` replaced by indices[i], in row-major order of i."""
    _require_elements(x, axis)

    def place(index: L.Buffer, i: Index) -> Index:
        return *i[:axis], valid_index(index[i], x.shape[axis]), *i[axis + 1 :]

    return _scattered(x, indices, updates, reduction, "scatter_elements", indices.shape, place)


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, reduction: str) -> Tensor:
    """A copy of `x` with slices of `updates` stored at (combined into) the index tuples along the last axis of `indices`."""
    width, count = _tuple_width(indices), indices.ndim - 1
    _require_elements(x, *range(width))

    def place(index: L.Buffer, i: Index) -> Index:
        return *(valid_index(index[(*i[:count], n)], x.shape[n]) for n in range(width)), *i[count:]

    return _scattered(x, indices, updates, reduction, "scatter_nd", [*indices.shape[:-1], *x.shape[width:]], place)


def tensor_scatter(past: Tensor, update: Tensor, starts: Tensor | None, axis: int, circular: bool) -> Tensor:
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


def one_hot(indices: Tensor, values: Tensor, depth: Dim, axis: int) -> Tensor:
    """values[1] where the new axis (of size `depth`) equals the index, negative ones counted from the end; else values[0]."""
    size = as_expr(depth)

    def element(*i: Expr) -> Expr:
        index = cast(indices[(*i[:axis], *i[axis + 1 :])], "int64")
        return select(te.equal(select(index < 0, index + size, index), i[axis]), values[1], values[0])

    return te.compute((*indices.shape[:axis], depth, *indices.shape[axis:]), element, "one_hot")


def top_k(x: Tensor, k: Dim, axis: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The k extreme elements along `axis`, sorted, and their positions (int64); of equal ones the first comes first.

    A stable bottom-up merge sort of the positions of each lane, O(n log n).
    """
    n = as_expr(x.shape[axis])
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        (source,), (values, positions) = inputs, outputs
        order, merged = L.Buffer("order", "int64", (n,)), L.Buffer("merged", "int64", (n,))

        def lane(outer: Index) -> L.Stmt:
            def at(place: ExprLike) -> tuple[ExprLike, ...]:
                return (*outer[:axis], place, *outer[axis:])

            def in_order(p: Expr, q: Expr) -> Expr:
                """Whether the element at position p may stay in front of the one at q."""
                a, b = source[at(p)], source[at(q)]
                return b <= a if largest else a <= b

            def take(rank: Expr) -> L.Stmt:
                return L.block(L.store(values, at(rank), source[at(order[rank])]), L.store(positions, at(rank), order[rank]))

            start = L.loop("p", n, lambda p: L.store(order, (p,), p))
            body = L.block(start, _merge_sort(order, merged, n, in_order), L.loop("rank", k, take))
            return L.Allocate(order, L.Allocate(merged, body)) if n.op == "const" else body

        lanes = L.over([d for m, d in enumerate(x.shape) if m != axis], lane)
        return lanes if n.op == "const" else L.Allocate(order, L.Allocate(merged, lanes))

    values, positions = te.externs([(shape, x.dtype), (shape, "int64")], [x], program, "top_k")
    return values, positions


def _merge_sort(order: L.Buffer, merged: L.Buffer, n: Expr, in_order: Callable[[Expr, Expr], Expr]) -> L.Stmt:
    """Sorts order[0:n] with `merged` as scratch; `in_order(p, q)` says whether p may stay in front of q."""
    width, left, right = (L.Buffer(name, "int64", (1,), "register") for name in ("width", "left", "right"))

    def advance(slot: Expr) -> L.Stmt:
        # `left` and `right` walk through the two runs that are merged into order[base : base + 2 * width].
        base = slot // (width[0] * 2) * (width[0] * 2)
        middle, end = minimum(base + width[0], n), minimum(base + width[0] * 2, n)
        one, other = left[0], right[0]
        last = n - 1  # reads of exhausted runs are not used, but must stay inside
        from_left = (one < middle) & ((end <= other) | in_order(order[minimum(one, last)], order[minimum(other, last)]))
        return L.block(
            L.If(te.equal(slot, base), L.block(L.store(left, (0,), base), L.store(right, (0,), middle))),
            L.If(
                from_left,
                L.block(L.store(merged, (slot,), order[one]), L.store(left, (0,), one + 1)),
                L.block(L.store(merged, (slot,), order[other]), L.store(right, (0,), other + 1)),
            ),
        )

    copy = L.loop("copy", n, lambda p: L.store(order, (p,), merged[p]))
    step = L.block(L.loop("slot", n, advance), copy, L.store(width, (0,), width[0] * 2))
    body = L.block(L.store(width, (0,), 1), L.While(width[0] < n, step))
    return L.Allocate(width, L.Allocate(left, L.Allocate(right, body)))


GATHER, GATHER_ELEMENTS = Operator("gather", gather), Operator("gather_elements", gather_elements)
GATHER_ND, TENSOR_SCATTER = Operator("gather_nd", gather_nd), Operator("tensor_scatter", tensor_scatter)
SCATTER_ELEMENTS, SCATTER_ND = Operator("scatter_elements", scatter_elements), Operator("scatter_nd", scatter_nd)
ONE_HOT, TOP_K = Operator("one_hot", one_hot), Operator("top_k", top_k)
