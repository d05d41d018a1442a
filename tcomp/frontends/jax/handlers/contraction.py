"""Products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

from tcomp.frontends.jax.context import Context, Parts, Table, part_types
from tcomp.frontends.jax.handlers.movement import padded, reverse
from tcomp.ir.dtypes import NARROW
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew
from tcomp.ops.matmul import EINSUM, MATMUL
from tcomp.ops.nn import CONV, CONV_TRANSPOSE

Ints = Sequence[int]


def _operands(ctx: Context, a: Value, b: Value, wanted: Any) -> tuple[Value, Value, str]:
    """The operands in the type of the sums."""
    to = ctx.dtype if wanted is None else part_types(wanted)[0]
    if a.dtype == "bool" or to in NARROW:
        to = "int32" if a.dtype == "bool" or "int" in to else "float32"
    elif a.dtype in NARROW and to == a.dtype:
        to = "float32"
    return ctx.cast(a, to), ctx.cast(b, to), to


def _dot_general(ctx: Context, a: Value, b: Value, dimension_numbers: Any, preferred_element_type: Any = None, **params: Any) -> Value:
    (over_a, over_b), (batch_a, batch_b) = (tuple(tuple(map(int, d)) for d in pair) for pair in dimension_numbers)
    a, b, _ = _operands(ctx, a, b, preferred_element_type)
    rank, count = len(a.shape), len(batch_a)
    free_a = [n for n in range(rank) if n not in over_a and n not in batch_a]
    free_b = [n for n in range(len(b.shape)) if n not in over_b and n not in batch_b]
    plain = (
        len(over_a) == len(free_a) == len(free_b) == 1 and batch_a == batch_b == tuple(range(count)) and a.dtype not in ("int8", "uint8")
    )
    if plain and over_a == (rank - 1,):
        swapped = over_b == (rank - 1,)
        return ctx.add(MATMUL, a, b, transpose_a=False, transpose_b=True) if swapped else ctx.add(MATMUL, a, b)
    if plain and over_a == (rank - 2,) and over_b == (rank - 2,):
        return ctx.add(MATMUL, a, b, transpose_a=True, transpose_b=False)
    letters = iter(ascii_letters)
    left, right = [""] * rank, [""] * len(b.shape)
    for n, m in (*zip(batch_a, batch_b, strict=True), *zip(over_a, over_b, strict=True)):
        left[n] = right[m] = next(letters)
    for side, free in ((left, free_a), (right, free_b)):
        for n in free:
            side[n] = next(letters)
    result = [*(left[n] for n in batch_a), *(left[n] for n in free_a), *(right[n] for n in free_b)]
    return ctx.add(EINSUM, a, b, equation=f"{''.join(left)},{''.join(right)}->{''.join(result)}")


def _convolution(
    ctx: Context, x: Value, w: Value, window_strides: Ints, padding: Sequence[tuple[int, int]], lhs_dilation: Ints, rhs_dilation: Ints,
    dimension_numbers: Any, feature_group_count: int, batch_group_count: int, preferred_element_type: Any = None, **params: Any,
) -> Value:  # fmt: skip
    x, w, dtype = _operands(ctx, x, w, preferred_element_type)
    x, w = ctx.transpose(x, dimension_numbers.lhs_spec), ctx.transpose(w, dimension_numbers.rhs_spec)
    rank, out, groups = len(x.shape) - 2, dimension_numbers.out_spec, int(feature_group_count)
    strides, spread, apart = (tuple(map(int, v)) for v in (window_strides, lhs_dilation, rhs_dilation))
    if batch_group_count > 1:  # batches of a group become its channels
        n, c = int(x.shape[0]), int(x.shape[1])
        groups, own = int(batch_group_count), n // int(batch_group_count)
        x = ctx.reshape(x, (groups, own, *x.shape[1:]))  # type: ignore[arg-type]
        x = ctx.reshape(ctx.transpose(x, (1, 0, *range(2, rank + 3))), (own, groups * c, *x.shape[3:]))  # type: ignore[arg-type]
    if rank == 0:
        x, w = ctx.reshape(x, (*x.shape, 1)), ctx.reshape(w, (*w.shape, 1))  # type: ignore[arg-type]
        strides, spread, apart, padding = (1,), (1,), (1,), ((0, 0),)
    sizes = [int(d) for d in w.shape[2:]]
    pads = [(int(a), int(b)) for a, b in padding]
    if max(spread, default=1) > 1 and max(strides) == 1 and 0 not in sizes and 0 not in x.shape:
        y = _transposed(ctx, x, w, spread, apart, pads, groups)
    else:
        around = [(0, 0, 0), (0, 0, 0), *((a, b, s - 1) for (a, b), s in zip(pads, spread, strict=True))]
        y = ctx.add(CONV, padded(ctx, x, ctx.number(0, dtype), around), w, strides=strides, dilations=apart, group=groups)
    if rank == 0:
        y = ctx.reshape(y, y.shape[:2])  # type: ignore[arg-type]
    return ctx.transpose(y, [list(out).index(n) for n in range(len(out))])


def _transposed(ctx: Context, x: Value, w: Value, spread: Ints, apart: Ints, pads: Sequence[tuple[int, int]], groups: int) -> Value:
    """A convolution of spread elements is the adjoint of one with strides, whose weights are mirrored and have channels exchanged."""
    outputs, inputs, *kernel = (int(d) for d in w.shape)
    mirrored = reverse(ctx, w, range(2, len(w.shape)))
    split = ctx.reshape(mirrored, (groups, outputs // groups, inputs, *kernel))
    turned = ctx.reshape(ctx.transpose(split, (0, 2, 1, *range(3, 3 + len(kernel)))), (groups * inputs, outputs // groups, *kernel))
    reach = [(k - 1) * d for k, d in zip(kernel, apart, strict=True)]
    before = tuple(r - low for r, (low, _) in zip(reach, pads, strict=True))
    shape = tuple(max((int(n) - 1) * s + 1 + a + b - r, 0) for n, s, (a, b), r in zip(x.shape[2:], spread, pads, reach, strict=True))
    return ctx.add(CONV_TRANSPOSE, x, turned, strides=tuple(spread), dilations=tuple(apart), group=groups, before=before, shape=shape)


def bilinear(ctx: Context, handler: Any, a: Any, b: Any, dtype: Any, **params: Any) -> Parts:
    """A product of complex operands, by four of real ones."""
    (ar, ai), (br, bi) = a.values, b.values
    real = ctx.add(ew.SUB, handler(ctx, ar, br, **params), handler(ctx, ai, bi, **params))
    imag = ctx.add(ew.ADD, handler(ctx, ar, bi, **params), handler(ctx, ai, br, **params))
    return Parts((real, imag), dtype)


TABLE: Table = {"dot_general": _dot_general, "conv_general_dilated": _convolution}
