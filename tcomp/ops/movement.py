"""Operators that only move elements: index maps between input and output, simplified where sizes allow.

Shapes, starts and pads may be symbolic (`Dim`). Nothing here computes on values, so fusion absorbs all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, cast, const, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ir.simplify import prove, same_dim, simplify
from tcomp.ops.broadcast import broadcast_shape, read, require_same


def transpose(x: te.Tensor, perm: Sequence[int]) -> te.Tensor:
    """Output axis d is input axis `perm[d]`."""
    if sorted(perm) != list(range(x.ndim)):
        raise IRError(f"transpose by {tuple(perm)} of a tensor of rank {x.ndim}", hint="name every axis once")
    place = {axis: d for d, axis in enumerate(perm)}
    shape = tuple(x.shape[axis] for axis in perm)
    return te.compute(shape, lambda *i: x[tuple(i[place[n]] for n in range(x.ndim))], "transpose")


# ---------------------------------------------------------------- reshape


def product(dims: Sequence[Dim]) -> Dim:
    """Number of elements, simplified."""
    total: Expr = const(1)
    for d in dims:
        total = total * as_expr(d)
    return as_dim(total)


def reshape(x: te.Tensor, shape: Sequence[Dim]) -> te.Tensor:
    """The same elements in row-major order under another shape.

    Input and output axes are cut into the smallest groups of equal size; each group has an index map of its own, so that axes
    which are merely kept, merged or split stay visible as such.
    """
    shape = tuple(as_dim(d) for d in shape)
    require_same(product(x.shape), product(shape), f"reshape of [{_text(x.shape)}] to [{_text(shape)}]")
    if 0 in shape:
        return te.compute(shape, lambda *i: const(0, x.dtype), "reshape")
    groups = _groups(x.shape, shape)

    def element(*i: Expr) -> Expr:
        at: list[Expr] = []
        for inputs, outputs in groups:
            at += _regroup([x.shape[n] for n in inputs], [shape[n] for n in outputs], [i[n] for n in outputs])
        return x[tuple(at)]

    return te.compute(shape, element, "reshape")


def _groups(source: Sequence[Dim], target: Sequence[Dim]) -> list[tuple[range, range]]:
    """The finest cut of both axis lists into consecutive groups of equal size."""
    before = [product(source[:n]) for n in range(len(source) + 1)]
    after = [product(target[:n]) for n in range(len(target) + 1)]
    groups, i, j = [], 0, 0
    for n in range(1, len(source) + 1):
        match = next((m for m in range(j, len(target) + 1) if same_dim(before[n], after[m])), None)
        if match is not None:
            groups.append((range(i, n), range(j, match)))
            i, j = n, match
    if i < len(source) or j < len(target):
        groups.append((range(i, len(source)), range(j, len(target))))
    return groups


def _regroup(source: Sequence[Dim], target: Sequence[Dim], index: Sequence[Expr]) -> list[Expr]:
    """Indices of `source` for an index of `target`; both have the same number of elements."""
    position: Expr = const(0)
    for d, i in zip(target, index, strict=True):
        if d != 1:
            position = position * as_expr(d) + i
    result: list[Expr] = []
    outermost = True
    for n, d in enumerate(source):
        if d == 1:
            result.append(const(0))
            continue
        quotient = position // as_expr(product(source[n + 1 :]))
        result.append(simplify(quotient if outermost else quotient % as_expr(d)))
        outermost = False
    return result


def _text(dims: Sequence[Dim]) -> str:
    return ", ".join(map(str, dims))


# ---------------------------------------------------------------- repeat and cut


def expand(x: te.Tensor, shape: Sequence[Dim]) -> te.Tensor:
    """Broadcast to the common shape of `x` and `shape`."""
    return te.compute(broadcast_shape(x.shape, shape), lambda *i: read(x, i), "expand")


def tile(x: te.Tensor, repeats: Sequence[Dim]) -> te.Tensor:
    """Each axis repeated as a whole."""
    shape = tuple(as_dim(as_expr(d) * as_expr(r)) for d, r in zip(x.shape, repeats, strict=True))

    def element(*i: Expr) -> Expr:
        return x[tuple(n if r == 1 else n % as_expr(d) for n, d, r in zip(i, x.shape, repeats, strict=True))]

    return te.compute(shape, element, "tile")


def slice_(x: te.Tensor, starts: Sequence[Dim], steps: Sequence[int], shape: Sequence[Dim]) -> te.Tensor:
    """out[i] = x[starts + i * steps] along every axis; the caller guarantees that this stays inside."""

    def element(*i: Expr) -> Expr:
        return x[tuple(as_expr(s) + n * step for n, s, step in zip(i, starts, steps, strict=True))]

    return te.compute(shape, element, "slice")


def concat(*parts: te.Tensor, axis: int) -> te.Tensor:
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
        result: Expr | None = None
        for t, offset in reversed(pieces):
            value = t[(*i[:axis], i[axis] - as_expr(offset), *i[axis + 1 :])]
            end = as_expr(offset) + as_expr(t.shape[axis])
            result = value if result is None else select(i[axis] < end, value, result)
        assert result is not None
        return result

    return te.compute((*first.shape[:axis], offsets[-1], *first.shape[axis + 1 :]), element, "concat")


def pad(x: te.Tensor, value: te.Tensor | None, before: Sequence[Dim], after: Sequence[Dim], mode: str = "constant") -> te.Tensor:
    """`before` and `after` elements added along every axis (negative: cut off).

    Modes: constant (`value`, a scalar; 0 where left out), edge (repeats the border), reflect (mirrors without repeating the
    border), wrap (periodic).
    """
    shape = tuple(as_dim(as_expr(d) + as_expr(b) + as_expr(a)) for d, b, a in zip(x.shape, before, after, strict=True))
    filling = const(0, x.dtype) if value is None else value[(0,) * value.ndim]

    def element(*i: Expr) -> Expr:
        at = [n - as_expr(b) for n, b in zip(i, before, strict=True)]
        if mode == "constant":
            inside = [condition for n, d, b, a in zip(at, x.shape, before, after, strict=True) for condition in _bounds(n, d, b, a)]
            return select(te.all_of(inside), x[tuple(at)], filling)
        changed = [
            n if b == 0 and a == 0 else _PAD_INDEX[mode](n, as_expr(d)) for n, d, b, a in zip(at, x.shape, before, after, strict=True)
        ]
        return x[tuple(changed)]

    return te.compute(shape, element, "pad")


def _bounds(index: Expr, extent: Dim, before: Dim, after: Dim) -> list[Expr]:
    """The conditions under which `index` is inside, as far as they are not certain."""
    conditions = []
    if not prove(as_expr(before) <= 0):
        conditions.append(as_expr(0) <= index)
    if not prove(as_expr(after) <= 0):
        conditions.append(index < as_expr(extent))
    return conditions


def _reflected(index: Expr, extent: Expr) -> Expr:
    period = maximum(extent * 2 - 2, 1)
    folded = index % period
    return select(folded < extent, folded, period - folded)


_PAD_INDEX: dict[str, Callable[[Expr, Expr], Expr]] = {
    "edge": lambda index, extent: maximum(minimum(index, extent - 1), 0),
    "reflect": _reflected,
    "wrap": lambda index, extent: index % extent,
}
PAD_MODES = ("constant", *_PAD_INDEX)


# ---------------------------------------------------------------- blocks of space and depth


def depth_to_space(x: te.Tensor, block: int, channels_first: bool) -> te.Tensor:
    """[n, c * b * b, h, w] -> [n, c, h * b, w * b]; `channels_first` (CRD) orders the channels (c, b, b), else (b, b, c)."""
    n, depth, h, w = x.shape
    c = as_dim(as_expr(depth) // (block * block))

    def element(b: Expr, k: Expr, i: Expr, j: Expr) -> Expr:
        inside = (i % block) * block + j % block
        channel = k * (block * block) + inside if channels_first else inside * as_expr(c) + k
        return x[b, channel, i // block, j // block]

    shape = (n, c, as_dim(as_expr(h) * block), as_dim(as_expr(w) * block))
    return te.compute(shape, element, "depth_to_space")


def space_to_depth(x: te.Tensor, block: int, channels_first: bool) -> te.Tensor:
    """[n, c, h * b, w * b] -> [n, c * b * b, h, w], the inverse of `depth_to_space`."""
    n, c, height, width = x.shape

    def element(b: Expr, k: Expr, i: Expr, j: Expr) -> Expr:
        channel, inside = (k // (block * block), k % (block * block)) if channels_first else (k % as_expr(c), k // as_expr(c))
        return x[b, channel, i * block + inside // block, j * block + inside % block]

    shape = (n, as_dim(as_expr(c) * (block * block)), as_dim(as_expr(height) // block), as_dim(as_expr(width) // block))
    return te.compute(shape, element, "space_to_depth")


# ---------------------------------------------------------------- along one axis, by position


def reverse_sequence(x: te.Tensor, lengths: te.Tensor, batch_axis: int, time_axis: int) -> te.Tensor:
    """For every batch b, the first lengths[b] elements along `time_axis` in reverse; the rest stays."""

    def element(*i: Expr) -> Expr:
        t = i[time_axis]
        length = minimum(cast(lengths[i[batch_axis]], "int64"), as_expr(x.shape[time_axis]))
        at = list(i)
        at[time_axis] = select(t < length, length - 1 - t, t)
        return x[tuple(at)]

    return te.compute(x.shape, element, "reverse_sequence")


def trilu(x: te.Tensor, k: te.Tensor | None, diagonal: int, upper: bool) -> te.Tensor:
    """The triangle of the last two axes at and above (`upper`) or below diagonal number k (or `diagonal`), else 0."""

    def element(*i: Expr) -> Expr:
        offset = as_expr(diagonal) if k is None else cast(k[(0,) * k.ndim], "int64")
        distance = i[-1] - i[-2]
        return select(offset <= distance if upper else distance <= offset, x[i], const(0, x.dtype))

    return te.compute(x.shape, element, "trilu")


def eye(shape: Sequence[Dim], diagonal: int, dtype: str) -> te.Tensor:
    """Ones on diagonal number `diagonal`, zeros elsewhere."""
    return te.compute(shape, lambda i, j: cast(te.equal(j - i, diagonal), dtype), "eye")


def arange(start: Dim, step: Dim, count: Dim, dtype: str) -> te.Tensor:
    """start, start + step, ...: `count` elements."""
    return te.compute((count,), lambda i: cast(as_expr(start) + i * as_expr(step), dtype), "arange")


TRANSPOSE, RESHAPE = Operator("transpose", transpose), Operator("reshape", reshape)
EXPAND, TILE = Operator("expand", expand), Operator("tile", tile)
SLICE, CONCAT, PAD = Operator("slice", slice_), Operator("concat", concat), Operator("pad", pad)
DEPTH_TO_SPACE, SPACE_TO_DEPTH = Operator("depth_to_space", depth_to_space), Operator("space_to_depth", space_to_depth)
REVERSE_SEQUENCE, TRILU = Operator("reverse_sequence", reverse_sequence), Operator("trilu", trilu)
EYE, ARANGE = Operator("eye", eye), Operator("arange", arange)
