"""ATen operators of linear algebra that `ops/matmul.py` has; those in `definitions/linalg.py` are made of them."""

from __future__ import annotations

import numpy as np
import torch

from tcomp.frontends.torch.context import Context, Table
from tcomp.ir.broadcasting import broadcast_shape
from tcomp.ir.graph import Value
from tcomp.ops.elementwise import EQUAL
from tcomp.ops.matmul import CHOLESKY, LU, MATMUL, ROW_ORDER, TRIANGULAR_SOLVE

aten = torch.ops.aten


def _lu_factors(ctx: Context, x: Value, pivot: bool = True, check_errors: bool = False) -> tuple[Value, ...]:
    """(factors, pivots, where the first one is zero)"""
    if not pivot:
        raise ctx.unsupported("rows are not exchanged")
    return ctx.results(LU, x)


def _permutation(ctx: Context, factors: Value, pivots: Value, *wanted: bool) -> tuple[Value, ...]:
    """The matrix P of x = P L U alone."""
    m = int(factors.shape[-2])
    rows = ctx.add(ROW_ORDER, pivots, rows=m)
    order = ctx.add(EQUAL, ctx.reshape(rows, (*rows.shape[:-1], 1, m)), ctx.number(np.arange(m)[:, None], "int64"))
    return ctx.cast(order, factors.dtype), *[ctx.number(0, factors.dtype, (0,))] * 2


def _triangular(ctx: Context, a: Value, b: Value, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Value:
    batch = broadcast_shape(a.shape[:-2], b.shape[:-2])
    a, b = (ctx.expand(x, (*batch, *x.shape[-2:])) for x in (a, b))
    return ctx.add(TRIANGULAR_SOLVE, a, b, upper=upper, unit=unitriangular)


TABLE: Table = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot), lambda ctx, a, b: ctx.add(MATMUL, a, b)),
    aten.linalg_cholesky_ex: lambda ctx, x, *, upper=False, check_errors=False: ctx.results(CHOLESKY, x, upper=upper),
    aten.linalg_lu_factor_ex: _lu_factors, aten.lu_unpack: _permutation, aten.linalg_solve_triangular: _triangular,
}  # fmt: skip
