"""ATen operators of linear algebra, by the factors of `ops/matmul.py`. Those of singular values and eigenvalues stay in PyTorch."""

from __future__ import annotations

import numpy as np
import torch

from tcomp.frontends.torch.context import Context, Table
from tcomp.frontends.torch.handlers.movement import cut, permute
from tcomp.ir.broadcasting import broadcast_shape
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew, movement
from tcomp.ops.matmul import CHOLESKY, LU, MATMUL, ROW_ORDER, TRIANGULAR_SOLVE
from tcomp.ops.reduction import REDUCE_MIN, REDUCE_PROD, REDUCE_SUM

aten = torch.ops.aten


def _turned(ctx: Context, x: Value) -> Value:
    """Matrices, transposed."""
    rank = len(x.shape)
    return permute(ctx, x, [*range(rank - 2), rank - 1, rank - 2])


def _unit(ctx: Context, n: Dim, x: Value) -> Value:
    """The unit matrix of n rows for each matrix of `x`."""
    if not isinstance(n, int):
        raise ctx.unsupported("a matrix has a symbolic size")
    return ctx.add(movement.EXPAND, ctx.constant(np.eye(n), x.dtype), shape=(*x.shape[:-2], n, n))


def _diagonal(ctx: Context, x: Value) -> Value:
    n = min(int(x.shape[-1]), int(x.shape[-2]))
    places = ctx.constant(np.stack([np.arange(n)] * 2, -1), "int64")
    rank = len(x.shape)
    found = ctx.add(movement.GATHER_ND, permute(ctx, x, [rank - 2, rank - 1, *range(rank - 2)]), places, batch_dims=0)
    return permute(ctx, found, [*range(1, rank - 1), 0])


def _triangle(ctx: Context, x: Value, upper: bool) -> Value:
    return ctx.add(movement.TRILU, x, None, diagonal=0, upper=upper)


def _first_zero(ctx: Context, diagonal: Value) -> Value:
    """Where on a diagonal the first zero is (int32, from 1 on), 0 if there is none."""
    n = int(diagonal.shape[-1])
    if n == 0:
        return ctx.add(ew.FULL, shape=diagonal.shape[:-1], value=0, dtype="int32")
    zero = ctx.add(ew.EQUAL, diagonal, ctx.constant(0, diagonal.dtype))
    places = ctx.add(ew.WHERE, zero, ctx.constant(np.arange(1, n + 1), "int32"), ctx.constant(n + 1, "int32"))
    return ctx.add(ew.MOD, ctx.add(REDUCE_MIN, places, axes=(len(diagonal.shape) - 1,), keepdims=False), ctx.constant(n + 1, "int32"))


def _lu_factors(ctx: Context, x: Value, pivot: bool = True, check_errors: bool = False) -> tuple[Value, Value, Value]:
    """(factors, pivots, where the first one is zero)"""
    if not pivot:
        raise ctx.unsupported("rows are not exchanged")
    factors, pivots = ctx.results(LU, x)
    return factors, pivots, _first_zero(ctx, _diagonal(ctx, factors))


def _unpacked(
    ctx: Context, factors: Value, pivots: Value, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Value, Value, Value]:
    """(P, L, U) with x = P L U; what is not wanted is empty."""
    m, n = int(factors.shape[-2]), int(factors.shape[-1])
    k, rank = min(m, n), len(factors.shape)
    left, right = cut(ctx, factors, rank - 1, 0, k), cut(ctx, factors, rank - 2, 0, k)
    places = np.arange(m)[:, None] == np.arange(k)
    lower = ctx.add(ew.WHERE, ctx.constant(places, "bool"), ctx.constant(1, left.dtype), _triangle(ctx, left, False))
    rows = ctx.add(ROW_ORDER, pivots, rows=m)
    columns = ctx.add(movement.RESHAPE, rows, shape=(*rows.shape[:-1], 1, m))
    wanted = ctx.constant(np.arange(m)[:, None], "int64")
    order, empty = ctx.cast(ctx.add(ew.EQUAL, columns, wanted), factors.dtype), ctx.constant(0, factors.dtype, (0,))
    return order if unpack_pivots else empty, *((lower, _triangle(ctx, right, True)) if unpack_data else (empty, empty))


def _triangular(ctx: Context, a: Value, b: Value, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Value:
    if not left:  # x a = b, transposed
        return _turned(ctx, _triangular(ctx, _turned(ctx, a), _turned(ctx, b), upper=not upper, unitriangular=unitriangular))
    batch = broadcast_shape(a.shape[:-2], b.shape[:-2])
    a, b = (ctx.add(movement.EXPAND, x, shape=(*batch, *x.shape[-2:])) for x in (a, b))
    return ctx.add(TRIANGULAR_SOLVE, a, b, upper=upper, unit=unitriangular)


def _lu_solve(ctx: Context, factors: Value, pivots: Value, b: Value, *, left: bool = True, adjoint: bool = False) -> Value:
    """a x = b with a = P L U; x a = b is the transposed system."""
    if not left:
        return _turned(ctx, _lu_solve(ctx, factors, pivots, _turned(ctx, b), adjoint=not adjoint))
    order, lower, upper = _unpacked(ctx, factors, pivots)
    if adjoint:
        x = _triangular(ctx, _turned(ctx, upper), b, upper=False)
        return ctx.add(MATMUL, order, _triangular(ctx, _turned(ctx, lower), x, upper=True, unitriangular=True))
    x = _triangular(ctx, lower, ctx.add(MATMUL, _turned(ctx, order), b), upper=False, unitriangular=True)
    return _triangular(ctx, upper, x, upper=True)


def _solve(ctx: Context, a: Value, b: Value, *, left: bool = True, check_errors: bool = False) -> tuple[Value, ...]:
    """(x, factors, pivots, where the first pivot is zero)"""
    factors, pivots, place = _lu_factors(ctx, a)
    vector = len(b.shape) == 1 or (len(a.shape) - 1 == len(b.shape) and b.shape == a.shape[:-1])
    columns = ctx.add(movement.RESHAPE, b, shape=(*b.shape, 1)) if vector else b
    x = _lu_solve(ctx, factors, pivots, columns, left=left)
    return ctx.add(movement.RESHAPE, x, shape=x.shape[:-1]) if vector else x, factors, pivots, place


def _inverse(ctx: Context, x: Value, *, check_errors: bool = False) -> tuple[Value, Value]:
    found, _, _, place = _solve(ctx, x, _unit(ctx, x.shape[-1], x))
    return found, place


def _sign_of(ctx: Context, pivots: Value, dtype: str) -> Value:
    """The determinant of an exchange of rows."""
    n = int(pivots.shape[-1])
    same = ctx.add(ew.EQUAL, pivots, ctx.constant(np.arange(1, n + 1), "int32"))
    signs = ctx.add(ew.WHERE, same, ctx.constant(1, dtype), ctx.constant(-1, dtype))
    return ctx.add(REDUCE_PROD, signs, axes=(len(pivots.shape) - 1,), keepdims=False)


def _factored(ctx: Context, x: Value) -> tuple[Value, ...]:
    """Factors for a determinant: PyTorch takes those of the transposed matrix where that lies in order in memory. Its derivatives, which
    solve systems with the factors, rely on that."""
    return ctx.results(LU, _turned(ctx, x) if ctx.node.args[0].meta["val"].is_contiguous() else x)


def _det(ctx: Context, x: Value) -> tuple[Value, ...]:
    factors, pivots = _factored(ctx, x)
    product = ctx.add(REDUCE_PROD, _diagonal(ctx, factors), axes=(len(x.shape) - 2,), keepdims=False)
    return ctx.add(ew.MUL, product, _sign_of(ctx, pivots, x.dtype)), factors, pivots


def _slogdet(ctx: Context, x: Value) -> tuple[Value, ...]:
    factors, pivots = _factored(ctx, x)
    diagonal, axes = _diagonal(ctx, factors), (len(x.shape) - 2,)
    signs = ctx.add(REDUCE_PROD, ctx.add(ew.SIGN, diagonal), axes=axes, keepdims=False)
    size = ctx.add(REDUCE_SUM, ctx.add(ew.LOG, ctx.add(ew.ABS, diagonal)), axes=axes, keepdims=False)
    return ctx.add(ew.MUL, signs, _sign_of(ctx, pivots, x.dtype)), size, factors, pivots


def _cholesky_solve(ctx: Context, b: Value, factor: Value, upper: bool = False) -> Value:
    other = _turned(ctx, factor)
    first, second = (other, factor) if upper else (factor, other)
    return _triangular(ctx, second, _triangular(ctx, first, b, upper=False), upper=True)


TABLE: Table = {
    aten.linalg_cholesky_ex: lambda ctx, x, *, upper=False, check_errors=False: ctx.results(CHOLESKY, x, upper=upper),
    aten.cholesky: lambda ctx, x, upper=False: ctx.add(CHOLESKY, x, upper=upper),
    aten.cholesky_solve: _cholesky_solve,
    aten.cholesky_inverse: lambda ctx, x, upper=False: _cholesky_solve(ctx, _unit(ctx, x.shape[-1], x), x, upper),
    aten.linalg_solve_triangular: _triangular, aten._linalg_solve_ex: _solve, aten.linalg_inv_ex: _inverse,
    aten.linalg_lu_factor_ex: _lu_factors, aten.linalg_lu_solve: _lu_solve, aten.lu_unpack: _unpacked,
    aten.linalg_lu: lambda ctx, x, *, pivot=True: _unpacked(ctx, *_lu_factors(ctx, x, pivot)[:2]),
    aten._linalg_det: _det, aten._linalg_slogdet: _slogdet,
}  # fmt: skip
