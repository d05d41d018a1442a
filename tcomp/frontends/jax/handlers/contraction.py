"""Products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

from tcomp.frontends.jax.context import Context, Table, part_types
from tcomp.frontends.jax.handlers.movement import padded
from tcomp.ir.dtypes import NARROW
from tcomp.ir.graph import Value
from tcomp.ops.matmul import EINSUM
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
    rank = len(a.shape)
    left, right = list(ascii_letters[:rank]), list(ascii_letters[rank : rank + len(b.shape)])
    for n, m in zip((*batch_a, *over_a), (*batch_b, *over_b), strict=True):
        right[m] = left[n]
    free_a = [c for n, c in enumerate(left) if n not in batch_a + over_a]
    result = [*(left[n] for n in batch_a), *free_a, *(c for m, c in enumerate(right) if m not in batch_b + over_b)]
    return product(ctx, a, b, *map("".join, (left, right, result)))


def product(ctx: Context, a: Value, b: Value, left: str, right: str, result: str) -> Value:
    """An Einstein sum of two operands, in the order in which it may be a product of matrices: rows are those of the left one."""
    if result and result[-1] not in right:
        return product(ctx, b, a, right, left, result)
    found = ctx.add(EINSUM, a, b, equation=f"{left},{right}->{result}")
    ctx.products[found] = a, b, left, right, result
    return found


def transpose(ctx: Context, x: Value, permutation: Sequence[int]) -> Value:
    """Axes in another order; a product that nothing else uses is computed in that order."""
    if x not in ctx.products or ctx.uses[0] > 1:
        return ctx.transpose(x, permutation)
    a, b, left, right, result = ctx.products[x]
    return product(ctx, a, b, left, right, "".join(result[n] for n in permutation))


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
        x = ctx.reshape(x, (groups, own, *x.shape[1:]))
        x = ctx.reshape(ctx.transpose(x, (1, 0, *range(2, rank + 3))), (own, groups * c, *x.shape[3:]))
    if rank == 0:
        x, w = ctx.reshape(x, (*x.shape, 1)), ctx.reshape(w, (*w.shape, 1))
        strides, spread, apart, padding = (1,), (1,), (1,), ((0, 0),)
    sizes = [int(d) for d in w.shape[2:]]
    pads = [(int(a), int(b)) for a, b in padding]
    if max(spread, default=1) > 1 and max(strides) == 1 and 0 not in sizes and 0 not in x.shape:
        y = _transposed(ctx, x, w, spread, apart, pads, groups)
    else:
        around = [(0, 0, 0), (0, 0, 0), *((a, b, s - 1) for (a, b), s in zip(pads, spread, strict=True))]
        y = ctx.add(CONV, padded(ctx, x, ctx.number(0, dtype), around), w, strides=strides, dilations=apart, group=groups)
    if rank == 0:
        y = ctx.reshape(y, y.shape[:2])
    return ctx.transpose(y, [list(out).index(n) for n in range(len(out))])


def _transposed(ctx: Context, x: Value, w: Value, spread: Ints, apart: Ints, pads: Sequence[tuple[int, int]], groups: int) -> Value:
    """A convolution of spread elements is the adjoint of one with strides, whose weights are mirrored and have channels exchanged."""
    outputs, inputs, *kernel = (int(d) for d in w.shape)
    mirrored = ctx.reversed(w, range(2, len(w.shape)))
    split = ctx.reshape(mirrored, (groups, outputs // groups, inputs, *kernel))
    turned = ctx.reshape(ctx.transpose(split, (0, 2, 1, *range(3, 3 + len(kernel)))), (groups * inputs, outputs // groups, *kernel))
    reach = [(k - 1) * d for k, d in zip(kernel, apart, strict=True)]
    before = tuple(r - low for r, (low, _) in zip(reach, pads, strict=True))
    shape = tuple(max((int(n) - 1) * s + 1 + a + b - r, 0) for n, s, (a, b), r in zip(x.shape[2:], spread, pads, reach, strict=True))
    return ctx.add(CONV_TRANSPOSE, x, turned, strides=tuple(spread), dilations=tuple(apart), group=groups, before=before, shape=shape)


TABLE: Table = {"dot_general": _dot_general, "transpose": transpose, "conv_general_dilated": _convolution}
