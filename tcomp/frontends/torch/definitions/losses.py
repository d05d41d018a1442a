"""Losses and distances, and their derivatives, element by element or as PyTorch documents them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _nll_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int, total: Tensor
) -> Tensor:
    """Element by element, where PyTorch scatters: so it is one loop with what is computed of it."""
    axis, mean = min(1, x.dim() - 1), 1
    factor, target = -grad / total if reduction == mean else -grad, target.unsqueeze(axis)
    factor = factor.unsqueeze(axis) if factor.dim() == x.dim() - 1 > 0 else factor
    shape = (-1, *[1] * (x.dim() - 1 - axis))
    factor = factor if weight is None else factor * weight.reshape(shape)
    classes = torch.arange(x.shape[axis], device=x.device).reshape(shape)
    return torch.where((classes == target) & (target != ignored), factor, 0.0).to(x.dtype)


def _cdist_backward(grad: Tensor, x: Tensor, y: Tensor, p: float, distances: Tensor) -> Tensor:
    """By `x`; 0 where a distance is 0, which has no derivative there."""
    apart, grad, distances = x.unsqueeze(-2) - y.unsqueeze(-3), grad.unsqueeze(-1), distances.unsqueeze(-1)
    size, least = apart.abs(), (distances == 0) | ((apart == 0) & (p < 1))
    if p == 0:
        return torch.zeros_like(x)
    if p == 1:
        return (grad * apart.sign()).sum(-2)
    if p == float("inf"):
        return torch.where(size == distances, grad * apart.sign(), 0.0).sum(-2)
    slope = apart if p == 2 else apart.sign() * size ** (p - 1)
    return torch.where(least, 0.0, grad * slope / (distances if p == 2 else distances ** (p - 1))).sum(-2)


def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Labels end at the first -1. PyTorch's own decomposition, as of 2.13, sums margins of what lies behind it as well."""
    rows, labels = (torch.atleast_2d(v).flatten(0, -2) for v in (x, target))
    counts = (labels == -1).long().cumsum(-1) == 0
    labels, places = torch.where(counts, labels, 0), torch.arange(rows.shape[-1], device=x.device)
    hit = ((labels.unsqueeze(-1) == places) & counts.unsqueeze(-1)).any(-2)
    margins = (1 - rows.gather(-1, labels).unsqueeze(-1) + rows.unsqueeze(-2)).relu()
    loss = torch.where(counts.unsqueeze(-1) & ~hit.unsqueeze(-2), margins, 0.0).sum((-1, -2)) / rows.shape[-1]
    loss = loss.reshape(x.shape[:-1]) if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()
    return loss, hit.to(x.dtype).reshape(target.shape)


TABLE: dict[Any, Any] = {
    aten.nll_loss_backward: _nll_loss_backward, aten._cdist_backward: _cdist_backward,
    aten._cdist_forward: lambda x, y, p, mode=None: torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1),
    aten.multilabel_margin_loss_forward: multilabel_margin_loss,
}  # fmt: skip
