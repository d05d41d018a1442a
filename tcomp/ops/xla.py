"""Operators as XLA defines them (its Operation Semantics), where ONNX has narrower or other ones: gather, scatter, slices at positions that
a run knows, windows over all axes, sorts by several keys, quotients and shifts of any integers. An index from data is kept inside whatever
it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import inf, nan, prod
from operator import and_, mul, or_
from typing import TypeVar

from tcomp.errors import IRError
from tcomp.ir import loops as L, te
from tcomp.ir.broadcasting import broadcast_shape, require_same, widened
from tcomp.ir.dtypes import BITS, NARROW, integer_range, is_float, is_integer, lowest
from tcomp.ir.expr import Dim, Expr, as_expr, bitcast, cast, checked, const, maximum, minimum, row_major, select, unary
from tcomp.ir.graph import Operator
from tcomp.ir.simplify import as_dim
from tcomp.ir.te import Tensor, rounded
from tcomp.ops.elementwise import divide, pick, pointwise
from tcomp.ops.movement import COMBINE, Place, clamped, merge_sort, scattered
from tcomp.ops.nn import window_count
from tcomp.ops.reduction import Reducer

Ints = Sequence[int]
Index = tuple[Expr, ...]
Number = bool | int | float
T = TypeVar("T")
MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}  # bits


def _start(index: Expr) -> Expr:
    """An index of any integer type as int64; what is too large for that stays large."""
    return cast(minimum(index, const((1 << 63) - 1, "uint64")) if index.dtype == "uint64" else index, "int64")


def _inside(index: Expr, extent: Dim) -> Expr:
    return (as_expr(0) <= index) & (index < as_expr(extent))


def _starts(extent: Dim, size: Dim) -> Dim:
    """Of a window of this size inside of the extent."""
    return as_dim(as_expr(extent) - size + 1)


def _element(
    i: Index, indices: Tensor | L.Buffer, shape: Sequence[Dim], sizes: Sequence[Dim], along: Mapping[int, int], batches: Mapping[int, int],
    index_map: Ints,
) -> tuple[Index, list[Expr]]:  # fmt: skip
    """Where element `i` of windows of `sizes` lies in an array of `shape`, the windows being moved inside, and whether each already was,
    along each axis of `index_map`. `along`: the axis of `i` that runs along each axis of a window; `batches`: the axis of `indices` that
    runs along each batching axis."""
    outer = [n for axis, n in enumerate(i) if axis not in along.values()]
    at = [i[along[d]] if d in along else outer[batches[d]] if d in batches else as_expr(0) for d in range(len(shape))]
    inside = []
    for k, d in enumerate(index_map):
        start, count = _start(indices[(*outer, k)]), _starts(shape[d], sizes[d])
        inside.append(_inside(start, count))
        at[d] = at[d] + clamped(start, count)
    return tuple(at), inside


def gather_windows(
    x: Tensor, indices: Tensor, offset_dims: Ints, collapsed: Ints, batching: Ints, index_batching: Ints, index_map: Ints,
    sizes: Sequence[Dim], fill: Number | None,
) -> Tensor:  # fmt: skip
    """Windows of `x`, of `sizes`, at the index tuples along the last axis of `indices`, whose element k is for axis `index_map[k]`.

    Axes `offset_dims` of the result run through the windows, without the `collapsed` axes of `x` and the `batching` ones, for which the
    index is that of axis `index_batching` of `indices`. A window that is not inside is moved inside, or is `fill` if that is given.
    """
    window = [d for d in range(x.ndim) if d not in collapsed and d not in batching]
    along, batches = dict(zip(window, offset_dims, strict=True)), dict(zip(batching, index_batching, strict=True))
    outer_sizes, window_sizes = iter(indices.shape[:-1]), iter(sizes[d] for d in window)
    rank = indices.ndim - 1 + len(offset_dims)
    shape = [next(window_sizes) if n in offset_dims else next(outer_sizes) for n in range(rank)]

    def element(*i: Expr) -> Expr:
        at, inside = _element(i, indices, x.shape, sizes, along, batches, index_map)
        return x[at] if fill is None else select(te.all_of(inside), x[at], const(fill, x.dtype))

    return te.compute(shape, element, "gather_windows")


_COMBINE: dict[str, Callable[[Expr, Expr], Expr]] = COMBINE | {"sub": lambda old, new: old - new, "and": and_, "or": or_}


def scatter_windows(
    x: Tensor, indices: Tensor, updates: Tensor, window_dims: Ints, inserted: Ints, batching: Ints, index_batching: Ints, index_map: Ints,
    reduction: str, clip: bool,
) -> Tensor:  # fmt: skip
    """A copy of `x` with windows of `updates` stored at (combined into) the places that `gather_windows` reads, in row-major order of
    `updates`. Axes `window_dims` of `updates` run through a window; axes `inserted` of `x` have windows of extent 1. A window that is not
    inside is moved inside if `clip`, else left out."""
    window = [d for d in range(x.ndim) if d not in inserted and d not in batching]
    along, batches = dict(zip(window, window_dims, strict=True)), dict(zip(batching, index_batching, strict=True))
    sizes = [int(updates.shape[along[d]]) if d in along else 1 for d in range(x.ndim)]
    if not batching and all(d == 1 for d in indices.shape[:-1]):
        return _one_window(x, indices, updates, sizes, along, index_map, reduction, clip)

    def place(index: L.Buffer, i: Index) -> Place:
        at, inside = _element(i, index, x.shape, sizes, along, batches, index_map)
        return at, () if clip else inside

    return scattered(x, indices, updates, _COMBINE[reduction], "scatter_windows", updates.shape, place)


def _one_window(
    x: Tensor, indices: Tensor, updates: Tensor, sizes: Ints, along: Mapping[int, int], index_map: Ints, reduction: str, clip: bool
) -> Tensor:
    """`scatter_windows` of a single one, element by element; `along`: the axis of `updates` that runs along each axis of a window."""

    def element(*i: Expr) -> Expr:
        at, place, inside = [as_expr(0)] * updates.ndim, list(i), list[Expr]()
        for k, d in enumerate(index_map):
            start, count = _start(indices[*[0] * (indices.ndim - 1), k]), int(x.shape[d]) - sizes[d] + 1
            inside += [] if clip else [_inside(start, count)]
            place[d] = i[d] - clamped(start, count)
            inside += [_inside(place[d], sizes[d])]
        for d, n in along.items():
            at[n] = place[d]
        old, new = widened(x[i]), widened(updates[tuple(at)])
        return select(te.all_of(inside), cast(_COMBINE[reduction](old, new), x.dtype), x[i])

    return te.compute(x.shape, element, "scatter_windows")


def slice_at(x: Tensor, *starts: Tensor, shape: Sequence[Dim]) -> Tensor:
    """The window of `x` of this shape at `starts`, scalars, one for each axis; it is moved inside."""
    first = [clamped(_start(s[()]), _starts(d, n)) for s, d, n in zip(starts, x.shape, shape, strict=True)]
    return te.compute(shape, lambda *i: x[tuple(n + s for n, s in zip(i, first, strict=True))], "slice_at")


def store_at(x: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
    """`x` with `update` in the place of the window that `slice_at` reads."""
    first = [clamped(_start(s[()]), _starts(d, n)) for s, d, n in zip(starts, x.shape, update.shape, strict=True)]
    whole = [d == n for d, n in zip(x.shape, update.shape, strict=True)]

    def element(*i: Expr) -> Expr:
        at = [n if w else n - s for n, s, w in zip(i, first, whole, strict=True)]
        inside = [_inside(n, d) for n, d, w in zip(at, update.shape, whole, strict=True) if not w]
        return select(te.all_of(inside), update[tuple(at)], x[i])

    return te.compute(x.shape, element, "store_at")


def dilate(x: Tensor, value: Tensor, steps: Ints) -> Tensor:
    """The elements of `x`, `steps` apart along each axis, with `value` (a scalar) between them."""

    def element(*i: Expr) -> Expr:
        hits = [te.equal(n % s, 0) for n, s in zip(i, steps, strict=True) if s > 1]
        return select(te.all_of(hits), x[tuple(n // s if s > 1 else n for n, s in zip(i, steps, strict=True))], value[()])

    return te.compute([max((int(d) - 1) * s + 1, 0) for d, s in zip(x.shape, steps, strict=True)], element, "dilate")


_REDUCERS: dict[str, Reducer] = {"sum": te.sum, "prod": te.prod, "max": te.max, "min": te.min, "all": te.all, "any": te.any}


def _axes(extents: Ints, name: str) -> tuple[list[Expr], Index]:
    """(a position along each axis, 0 for an axis of extent 1; those of them that are axes to reduce over)."""
    places = [te.reduce_axis(n, f"{name}{d}") if n > 1 else const(0) for d, n in enumerate(extents)]
    return places, tuple(p for p, n in zip(places, extents, strict=True) if n > 1)


def _window_counts(shape: Sequence[Dim], kernel: Ints, strides: Ints, dilations: Ints) -> list[Dim]:
    counts = (as_dim(as_expr(window_count(d, k, s, r))) for d, k, s, r in zip(shape, kernel, strides, dilations, strict=True))
    return [max(n, 0) if isinstance(n, int) else n for n in counts]


def reduce_windows(x: Tensor, kernel: Ints, strides: Ints, dilations: Ints, reduction: str) -> Tensor:
    """The sum, prod, max, min, all or any of each window over all axes, inside of `x`."""
    offsets, over = _axes(kernel, "rk")

    def element(*i: Expr) -> Expr:
        value = widened(x[tuple(n * s + o * r for n, s, o, r in zip(i, strides, offsets, dilations, strict=True))])
        return _REDUCERS[reduction](value, over) if over else value

    shape = _window_counts(x.shape, kernel, strides, dilations)
    return rounded(te.compute(shape, element, "reduce_windows"), x.dtype)


def window_argmax(x: Tensor, kernel: Ints, strides: Ints, dilations: Ints, before: Ints, after: Ints) -> Tensor:
    """The row-major position inside each window of its largest element, the first of equal ones; -1 where there is none. Windows may reach
    `before` and `after` elements out of `x`; what is there does not count."""
    reached = [as_dim(as_expr(d) + b + a) for d, b, a in zip(x.shape, before, after, strict=True)]
    shape = _window_counts(reached, kernel, strides, dilations)

    def found(reducer: Reducer, value: Callable[[Index, Expr, Expr], Expr], otherwise: Expr) -> Callable[..., Expr]:
        offsets, over = _axes(kernel, "rk")

        def element(*i: Expr) -> Expr:
            at = [n * s + o * r - b for n, s, o, r, b in zip(i, strides, offsets, dilations, before, strict=True)]
            inside = [_inside(n, d) for n, d, b, a in zip(at, x.shape, before, after, strict=True) if a or b]
            term = select(te.all_of(inside), value(i, x[tuple(at)], row_major(offsets, kernel)), otherwise)
            return reducer(term, over) if over else term

        return element

    floor = const(lowest(x.dtype), x.dtype)
    top = te.compute(shape, found(te.max, lambda i, v, p: v, floor), "top")
    last = const(prod(kernel))
    best = found(te.min, lambda i, v, p: select(te.equal(v, top[i]), p, last), last)
    place = te.compute(shape, best, "place")
    return te.compute(shape, lambda *i: select(place[i] < last, place[i], const(-1)), "window_argmax")


def scatter_to_argmax(place: Tensor, source: Tensor, shape: Ints, kernel: Ints, strides: Ints, before: Ints) -> Tensor:
    """Zeros of `shape`, to which source[w] is added at position place[w] of each window w (see `window_argmax`): as a gather from the
    windows that an element lies in."""
    windows, over = _axes([-(-k // s) for k, s in zip(kernel, strides, strict=True)], "rw")

    def element(*i: Expr) -> Expr:
        reach = [n + b for n, b in zip(i, before, strict=True)]
        at = [n // s - w for n, s, w in zip(reach, strides, windows, strict=True)]
        offset = [n - p * s for n, p, s in zip(reach, at, strides, strict=True)]
        valid = [
            c
            for p, o, d, k in zip(at, offset, source.shape, kernel, strict=True)
            for c in (as_expr(0) <= p, p < as_expr(d), o < as_expr(k))
        ]
        safe = tuple(clamped(p, max(int(d), 1)) for p, d in zip(at, source.shape, strict=True))
        hit = te.all_of([*valid, te.equal(place[safe], row_major(offset, kernel))])
        term = select(hit, widened(source[safe]), 0)
        return te.sum(term, over) if over else term

    return rounded(te.compute(shape, element, "scatter_to_argmax"), source.dtype)


def gather_argmax(place: Tensor, x: Tensor, kernel: Ints, strides: Ints, dilations: Ints, before: Ints) -> Tensor:
    """The element of `x` at position place[w] of each window w (see `window_argmax`); 0 where there is none."""

    def element(*i: Expr) -> Expr:
        rest, at = maximum(place[i], 0), list[Expr]()
        for k in reversed(kernel):
            at.insert(0, rest % k)
            rest = rest // k
        where = [n * s + o * r - b for n, s, o, r, b in zip(i, strides, at, dilations, before, strict=True)]
        safe = tuple(clamped(p, d) for p, d in zip(where, x.shape, strict=True))
        return select(as_expr(0) <= place[i], x[safe], const(0, x.dtype))

    return te.compute(place.shape, element, "gather_argmax")


def _less(a: Expr, b: Expr) -> Expr:
    """The order of a sort: NaN is above all, and -0 equals 0."""
    if a.dtype == "bool":
        return ~a & b
    return a < b if not is_float(a.dtype) else (a < b) | (te.isnan(b) & ~te.isnan(a))


def sort_by(*xs: Tensor, axis: int, keys: int) -> tuple[Tensor, ...]:
    """Tensors of one shape, sorted together along `axis`, stably, by the first `keys` of them, the first one first. A bottom-up merge sort
    of the positions of each lane, O(n log n)."""
    shape = xs[0].shape
    n = as_expr(shape[axis])

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        order, merged = L.Buffer("order", "int64", (n,)), L.Buffer("merged", "int64", (n,))

        def lane(outer: Index) -> L.Stmt:
            def at(place: Expr) -> Index:
                return (*outer[:axis], place, *outer[axis:])

            def in_order(p: Expr, q: Expr) -> Expr:
                after: Expr = const(False, "bool")  # whether q has to come before p
                for key in reversed(inputs[:keys]):
                    a, b = widened(key[at(p)]), widened(key[at(q)])
                    after = _less(b, a) | (~_less(a, b) & after)
                return ~after

            def take(rank: Expr) -> L.Stmt:
                return L.block(*(L.store(target, at(rank), x[at(order[rank])]) for x, target in zip(inputs, outputs, strict=True)))

            unsorted = L.loop("p", n, lambda p: L.store(order, (p,), p))
            return L.allocated((order, merged), L.block(unsorted, merge_sort(order, merged, n, in_order), L.loop("rank", n, take)))

        return L.over([d for m, d in enumerate(shape) if m != axis], lane)

    return te.externs([(x.shape, x.dtype) for x in xs], list(xs), program, "sort_by")


def stop(*, shape: Ints, dtype: str) -> Tensor:
    """Zeros; a run that computes them ends with an error."""
    return te.compute(shape, lambda *i: cast(checked(const(1), 1) - 1, dtype), "stop")


def _quotient(x: Expr, y: Expr) -> Expr:
    """x / y, truncated; -1 (all bits) where y is 0."""
    if not is_integer(x.dtype):
        return divide(x, y)
    zero = te.equal(y, 0)
    found = te.truncdiv(x, select(zero, const(1, y.dtype), y))
    if (low := integer_range(x.dtype)[0]) < 0:  # the least number divided by -1 stays as it is
        found = select(te.equal(y, -1), -x, te.truncdiv(x, select(zero | te.equal(y, -1), const(1, y.dtype), y)))
    return select(zero, const(-1 if low < 0 else integer_range(x.dtype)[1], x.dtype), found)


def _remainder(x: Expr, y: Expr) -> Expr:
    """What is left of x / y, with the sign of x; x where an integer y is 0."""
    if not is_integer(x.dtype):
        return te.truncmod(x, y)
    idle = te.equal(y, 0)
    unit = idle | te.equal(y, -1) if integer_range(x.dtype)[0] < 0 else idle
    return select(idle, x, select(unit, const(0, x.dtype), te.truncmod(x, select(unit, const(1, y.dtype), y))))


def _shift(left: bool, x: Expr, y: Expr) -> Expr:
    """x shifted by y bits, those that come in being copies of the sign, or 0; also by more bits than there are."""
    bits = BITS[x.dtype]
    unsigned = f"uint{bits}"
    wide = bitcast(y, unsigned)
    over = const(bits - 1, unsigned) < wide
    amount = bitcast(select(over, const(bits - 1, unsigned), wide), x.dtype)
    if left or integer_range(x.dtype)[0] == 0:
        return select(over, const(0, x.dtype), x << amount if left else x >> amount)
    return x >> amount


def _shift_right_logical(x: Expr, y: Expr) -> Expr:
    """x shifted to the right by y bits, those that come in being 0."""
    unsigned = f"uint{BITS[x.dtype]}"
    return bitcast(_shift(False, bitcast(x, unsigned), bitcast(y, unsigned)), x.dtype)


def _high_product(x: Expr, y: Expr) -> Expr:
    """The upper half of the bits of a product. Raises `IRError` for integers of 64 bits."""
    if (bits := BITS[x.dtype]) == 64:
        raise IRError("products of 128 bits")
    wide = f"{'int' if integer_range(x.dtype)[0] else 'uint'}{2 * bits}"
    return cast((cast(x, wide) * cast(y, wide)) >> bits, x.dtype)


def _leading_zeros(x: Expr) -> Expr:
    """How many bits in front of the first one are 0."""
    found, shift = bitcast(x, f"uint{BITS[x.dtype]}"), 1
    while shift < BITS[x.dtype]:
        found, shift = found | (found >> shift), shift * 2
    return cast(unary("popcount", ~found), x.dtype)


def integer_power(multiply: Callable[[T, T], T], x: T, n: int) -> T:
    """x to the power of n > 0, by repeated squaring."""
    factors = []
    while n:
        if n & 1:
            factors.append(x)
        n >>= 1
        x = multiply(x, x) if n else x
    return reduce(multiply, factors)


def _integer_pow(x: Expr, exponent: int) -> Expr:
    found = integer_power(mul, x, abs(exponent)) if exponent else const(1, x.dtype)
    return 1.0 / found if exponent < 0 else found


def _cbrt(x: Expr) -> Expr:
    """The cube root: of exp(log(x) / 3), with a step of Newton's method."""
    a = te.abs(x)
    same = te.equal(a, 0.0) | te.isinf(a) | te.isnan(a)
    safe = select(same, 1.0, a)
    y = te.exp(te.log(safe) / 3.0)
    y = y - (y - safe / (y * y)) / 3.0  # the cube of y may overflow
    return select(same, x, select(x < 0, -y, y))


def _round_away(x: Expr) -> Expr:
    """The nearest whole number, of two the one further from 0."""
    whole = te.trunc(x)
    return select(te.abs(x - whole) >= 0.5, whole + select(x < 0, const(-1.0, x.dtype), 1.0), whole)


def _next_after(x: Expr, y: Expr) -> Expr:
    """The next number of the type from x on in the direction of y."""
    kind = f"int{BITS[x.dtype]}"
    bits, a, b = bitcast(x, kind), widened(x), widened(y)
    stepped = bits + select(te.equal(a < b, bits >= 0), const(1, kind), const(-1, kind))  # by its size, away from zero or towards it
    least = select(bitcast(y, kind) < 0, const(integer_range(kind)[0] + 1, kind), 1)
    found = select(te.equal(a, b), bitcast(y, kind), select(te.equal(a, 0.0), least, stepped))
    return select(te.isnan(a) | te.isnan(b), const(nan, x.dtype), bitcast(found, x.dtype))


def _reduce_precision(x: Expr, exponent_bits: int, mantissa_bits: int) -> Expr:
    """With fewer bits: rounded to the nearest, of two to the even one; what is too large is infinite, what is too small is 0."""
    width, mantissa = BITS[x.dtype], MANTISSA[x.dtype]
    kind, exponent = f"uint{width}", width - 1 - mantissa
    infinite = ((1 << exponent) - 1) << mantissa

    def bits(n: int) -> Expr:
        return const(n, kind)

    found, drop = bitcast(x, kind), mantissa - mantissa_bits
    if drop > 0:
        odd = (found >> bits(drop)) & bits(1)
        found = (found + odd + bits((1 << (drop - 1)) - 1)) & bits(((1 << width) - 1) ^ ((1 << drop) - 1))
    if exponent_bits < exponent:
        bias, least = (1 << (exponent - 1)) - 1, (1 << (exponent_bits - 1)) - 1
        size, sign = found & bits(infinite), found & bits(1 << (width - 1))
        found = select(bits((bias + least) << mantissa) < size, sign | bits(infinite), found)
        found = select(size <= bits((bias - least) << mantissa), sign, found)
    return select(te.isnan(widened(x)), x, bitcast(found, x.dtype))


def total_order(x: Expr) -> Expr:
    """Integers in the order of floats that IEEE 754 calls total: -NaN, -inf, ..., -0, 0, ..., inf, NaN. Others stay as they are."""
    if not is_float(x.dtype):
        return x
    kind = f"int{BITS[x.dtype]}"
    bits = bitcast(x, kind)
    return bits ^ ((bits >> (BITS[x.dtype] - 1)) & const(integer_range(kind)[1], kind))


def bitcast_parts(x: Tensor, dtype: str) -> Tensor:
    """The bits of `x` in a type of another width: its last axis holds the parts of wider elements, or a new one those of each element, the
    lowest bits first. Raises `IRError` for bools and for narrow types, or where the last axis has another extent."""
    few, many = sorted((BITS[x.dtype], BITS[dtype]))
    if {x.dtype, dtype} & {"bool", *NARROW}:
        raise IRError(f"bits of {x.dtype} as {dtype}")
    count, part, whole = many // few, f"uint{few}", f"uint{many}"
    if BITS[x.dtype] > few:
        cut = te.compute((*x.shape, count), lambda *i: cast(bitcast(x[i[:-1]], whole) >> cast(i[-1] * few, whole), part), "parts")
        return te.compute(cut.shape, lambda *i: bitcast(cut[i], dtype), "bitcast_parts")

    require_same(x.shape[-1], count, f"the last axis, and the parts of {dtype}")

    def joined(*i: Expr) -> Expr:
        parts = (cast(bitcast(x[(*i, n)], part), whole) << const(n * few, whole) for n in range(count))
        return bitcast(reduce(or_, parts), dtype)

    return te.compute(x.shape[:-1], joined, "bitcast_parts")


def _of_bits(name: str, function: Callable[..., Expr]) -> Operator:
    """A scalar definition that sees floats of 16 bits as they are."""

    def apply(*tensors: Tensor, **attrs: int) -> Tensor:
        shape = broadcast_shape(*(t.shape for t in tensors))
        return te.compute(shape, lambda *i: function(*(te.broadcast_read(t, i) for t in tensors), **attrs), name)

    return Operator(name, apply)


QUOTIENT, REMAINDER = pointwise("quotient", _quotient), pointwise("remainder", _remainder)
SHIFT_BITS_LEFT = pointwise("shift_bits_left", lambda x, y: _shift(True, x, y))
SHIFT_BITS_RIGHT = pointwise("shift_bits_right", lambda x, y: _shift(False, x, y))
SHIFT_RIGHT_LOGICAL, HIGH_PRODUCT = pointwise("shift_right_logical", _shift_right_logical), pointwise("high_product", _high_product)
POPCOUNT, LEADING_ZEROS = pointwise("popcount", lambda x: unary("popcount", x)), pointwise("leading_zeros", _leading_zeros)
INTEGER_POW, CBRT, ROUND_AWAY = pointwise("integer_pow", _integer_pow), pointwise("cbrt", _cbrt), pointwise("round_away", _round_away)
IS_FINITE, SELECT_N = pointwise("is_finite", lambda x: te.abs(x) < inf), pointwise("select_n", lambda which, *cases: pick(which, cases))
NEXT_AFTER, TOTAL_ORDER = _of_bits("next_after", _next_after), _of_bits("total_order", total_order)
BITCAST_PARTS, REDUCE_PRECISION = Operator("bitcast_parts", bitcast_parts), _of_bits("reduce_precision", _reduce_precision)
GATHER_WINDOWS, SCATTER_WINDOWS = Operator("gather_windows", gather_windows), Operator("scatter_windows", scatter_windows)
SLICE_AT, STORE_AT, DILATE = Operator("slice_at", slice_at), Operator("store_at", store_at), Operator("dilate", dilate)
REDUCE_WINDOWS, WINDOW_ARGMAX = Operator("reduce_windows", reduce_windows), Operator("window_argmax", window_argmax)
SCATTER_TO_ARGMAX, GATHER_ARGMAX = Operator("scatter_to_argmax", scatter_to_argmax), Operator("gather_argmax", gather_argmax)
SORT_BY, STOP = Operator("sort_by", sort_by), Operator("stop", stop)
