"""Random numbers by a counter-based generator, as tensor expressions: an element depends on its position alone, never on other elements,
so that any schedule and any number of threads gives the same numbers.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011). Its counter is the
row-major position of the element; its `key`, two words (uint32), selects one of 2^64 independent sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.broadcasting import HALF, widened
from tcomp.ir.expr import Dim, Expr, as_expr, cast, const, minimum, row_major, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # what is added to the key from one round to the next: golden ratio, and square root of 3, minus 1
WORD = 0xFFFFFFFF


def philox(counter: Sequence[Expr], key: Sequence[Expr]) -> tuple[Expr, ...]:
    """Four random words (uint32) of a counter of four words and a key of two."""
    a, b, c, d = counter
    for n in range(ROUNDS):
        first, second = (cast(w, "uint64") * const(m, "uint64") for w, m in zip((a, c), MULTIPLIERS, strict=True))
        bumped = [k + const(n * w & WORD, "uint32") for k, w in zip(key, WEYL, strict=True)]
        a, c = _high(second) ^ b ^ bumped[0], _high(first) ^ d ^ bumped[1]
        b, d = (cast(p & WORD, "uint32") for p in (second, first))
    return a, b, c, d


def _high(product: Expr) -> Expr:
    return cast(product >> 32, "uint32")


def words(index: Sequence[Expr], shape: Sequence[Dim], key: Tensor) -> tuple[Expr, ...]:
    """The four words that belong to the element at `index` of a tensor."""
    position = cast(row_major(index, shape), "uint64")
    zero = const(0, "uint32")
    return philox((cast(position & WORD, "uint32"), _high(position), zero, zero), (key[0], key[1]))


def fraction(high: Expr, low: Expr, dtype: str) -> Expr:
    """Uniform in [0, 1): a multiple of 2^-53 for float64, of 2^-24 for float32."""
    if dtype == "float64":
        return (cast(high >> 5, dtype) * float(1 << 26) + cast(low >> 6, dtype)) * 2.0**-53
    return cast(high >> 8, dtype) * 2.0**-24


def drawn(index: Sequence[Expr], shape: Sequence[Dim], key: Tensor, dtype: str) -> Expr:
    """The fraction that belongs to the element at `index` of a tensor."""
    high, low, _, _ = words(index, shape, key)
    return fraction(high, low, dtype)


def _computed(dtype: str) -> str:
    """The type in which numbers are drawn for a result of this type."""
    if dtype not in ("float32", "float64", *HALF):
        raise IRError(f"random numbers of type {dtype}", hint="they are floats")
    return "float32" if dtype in HALF else dtype


def uniform(key: Tensor, shape: Sequence[Dim], low: float, high: float, dtype: str) -> Tensor:
    """Uniform between `low` and `high`."""
    kind = _computed(dtype)

    def element(*i: Expr) -> Expr:
        return cast(minimum(drawn(i, shape, key, kind) * (high - low) + low, high), dtype)

    return te.compute(shape, element, "random_uniform")


def normal(key: Tensor, shape: Sequence[Dim], mean: float, scale: float, dtype: str) -> Tensor:
    """Normally distributed with mean and standard deviation `scale` (Box and Muller 1958: one of the pair of each element)."""
    kind = _computed(dtype)

    def element(*i: Expr) -> Expr:
        a, b, c, d = words(i, shape, key)
        above_zero = 1.0 - fraction(a, b, kind) if kind == "float64" else (cast(a, kind) + 1.0) * 2.0**-32
        radius = te.sqrt(-2.0 * te.log(above_zero))
        return cast(radius * te.cos(fraction(c, d, kind) * (2 * math.pi)) * scale + mean, dtype)

    return te.compute(shape, element, "random_normal")


def bernoulli(key: Tensor, x: Tensor, dtype: str) -> Tensor:
    """1 with the probability that `x` holds, else 0."""
    kind = _computed(x.dtype)
    return te.compute(x.shape, lambda *i: cast(drawn(i, x.shape, key, kind) < widened(x[i]), dtype), "bernoulli")


def multinomial(key: Tensor, cumulative: Tensor, count: int, dtype: str) -> Tensor:
    """[rows, count] classes, drawn with the weights whose sums up to each class are `cumulative` [rows, classes] (float64)."""
    rows, classes = cumulative.shape
    shape, k = (rows, count), te.reduce_axis(classes, "k")

    def sought(b: Expr, s: Expr) -> Expr:
        return drawn((b, s), shape, key, "float64") * cumulative[b, _last(classes)]

    at = te.compute(shape, sought, "sought")
    below = te.compute(shape, lambda b, s: te.sum(cast(cumulative[b, k] <= at[b, s], dtype), k), "below")
    return te.compute(shape, lambda b, s: minimum(below[b, s], cast(_last(classes), dtype)), "multinomial")


def _last(extent: Dim) -> Expr:
    return as_expr(extent) - 1


def dropout(key: Tensor, x: Tensor, ratio: Tensor | None, training: Tensor | None, probability: float) -> tuple[Tensor, Tensor]:
    """(x, its elements set to 0 with probability `ratio` and the others divided by 1 - ratio; which are kept). `ratio`, of one element,
    is `probability` where it is left out. Where `training`, a scalar, is given and false, x."""

    def scalar(t: Tensor) -> Expr:
        return widened(t[(0,) * t.ndim])

    share = const(probability, "float32") if ratio is None else scalar(ratio)
    kind = share.dtype
    idle = const(False, "bool") if training is None else ~scalar(training)

    def kept(*i: Expr) -> Expr:
        return idle | (drawn(i, x.shape, key, kind) >= share)

    mask = te.compute(x.shape, kept, "dropout.mask")

    def element(*i: Expr) -> Expr:
        scaled = widened(x[i]) * cast(1.0 / (1.0 - select(idle, 0.0, share)), widened(x[i]).dtype)
        return cast(select(mask[i], scaled, 0), x.dtype)

    return te.compute(x.shape, element, "dropout"), mask


RANDOM_UNIFORM, RANDOM_NORMAL = Operator("random_uniform", uniform), Operator("random_normal", normal)
BERNOULLI, MULTINOMIAL, DROPOUT = Operator("bernoulli", bernoulli), Operator("multinomial", multinomial), Operator("dropout", dropout)
