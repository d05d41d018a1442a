"""Linear algebra by factors of matrices and substitution. What needs singular values and eigenvalues stays in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """x a = b is the transposed system."""
    if left:
        return NotImplemented
    return torch.linalg.solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT


def _lu_unpack(factors: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    """(P, L, U) with x = P L U; what is not wanted is empty."""
    if not unpack_data:
        return NotImplemented  # a permutation alone
    m, n = factors.shape[-2:]
    k = min(m, n)
    lower = factors[..., :k].tril(-1) + torch.eye(m, k, dtype=factors.dtype)
    order = torch.lu_unpack(factors, pivots, unpack_data=False)[0] if unpack_pivots else factors.new_empty(0)
    return order, lower, factors[..., :k, :].triu()


def _lu_solve(factors: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False) -> Tensor:
    """a x = b with a = P L U; x a = b is the transposed system."""
    if not left:
        return _lu_solve(factors, pivots, b.mT, adjoint=not adjoint).mT
    solve, order = torch.linalg.solve_triangular, torch.lu_unpack(factors, pivots, unpack_data=False)[0]
    if adjoint:
        return order @ solve(factors.mT, solve(factors.mT, b, upper=False), upper=True, unitriangular=True)
    return solve(factors, solve(factors, order.mT @ b, upper=False, unitriangular=True), upper=True)


def _solve_ex(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False) -> tuple[Tensor, ...]:
    """(x, factors, pivots, where the first pivot is zero)"""
    factors, pivots, place = torch.linalg.lu_factor_ex(a)
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    x = _lu_solve(factors, pivots, b.unsqueeze(-1) if vector else b, left=left)
    return x.squeeze(-1) if vector else x, factors, pivots, place


def _inv_ex(a: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    found, _, _, place = _solve_ex(a, torch.eye(a.shape[-1], dtype=a.dtype).expand(a.shape))
    return found, place


def _factored(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(factors, pivots, their diagonal, the determinant of the exchange of rows) for a determinant: PyTorch takes the factors of the
    transposed matrix where that lies in order in memory. Its derivatives, which solve systems with the factors, rely on that."""
    factors, pivots, _ = torch.linalg.lu_factor_ex(a.mT if a.is_contiguous() else a)
    exchanged = pivots != torch.arange(1, pivots.shape[-1] + 1)
    return factors, pivots, factors.diagonal(dim1=-2, dim2=-1), (1 - 2 * exchanged.to(a.dtype)).prod(-1)


def _det(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    factors, pivots, diagonal, sign = _factored(a)
    return diagonal.prod(-1) * sign, factors, pivots


def _slogdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    factors, pivots, diagonal, sign = _factored(a)
    return diagonal.sign().prod(-1) * sign, diagonal.abs().log().sum(-1), factors, pivots


def _cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    first, second = (factor.mT, factor) if upper else (factor, factor.mT)
    inner = torch.linalg.solve_triangular(first, b, upper=False)
    return torch.linalg.solve_triangular(second, inner, upper=True)


TABLE: dict[Any, Any] = {
    aten.linalg_solve_triangular: _solve_triangular, aten.lu_unpack: _lu_unpack, aten.linalg_lu_solve: _lu_solve,
    aten._linalg_solve_ex: _solve_ex, aten.linalg_inv_ex: _inv_ex, aten._linalg_det: _det, aten._linalg_slogdet: _slogdet,
    aten.linalg_lu: lambda a, *, pivot=True: torch.lu_unpack(*torch.linalg.lu_factor_ex(a, pivot=pivot)[:2]),
    aten.cholesky_solve: _cholesky_solve,
    aten.cholesky_inverse: lambda a, upper=False: _cholesky_solve(torch.eye(a.shape[-1], dtype=a.dtype).expand(a.shape), a, upper),
}  # fmt: skip
if hasattr(aten, "cholesky"):  # PyTorch 2.14 has no such operator any more
    TABLE[aten.cholesky] = lambda a, upper=False: torch.linalg.cholesky_ex(a, upper=upper)[0]
