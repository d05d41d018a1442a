"""Moments and normalisation by them, extremes, distributions, sums of products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _round(x: Tensor, decimals: int) -> Tensor:
    if decimals == 0 or not x.is_floating_point():
        return x.round()
    factor = 10.0 ** abs(decimals)
    return (x * factor).round() / factor if decimals > 0 else (x / factor).round() * factor


def _var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    wide = x if x.dtype == torch.float64 else x.float()
    mean = wide.mean(dim, keepdim=True)
    total = (wide - mean).square().sum(dim, keepdim=keepdim)
    count, less = math.prod(x.shape[n] for n in dim) if dim else x.numel(), 1 if correction is None else correction
    divisor = max(0, count - less) if isinstance(count, int) else wide.new_full((), count) - less
    return (total / divisor).to(x.dtype), mean.reshape(total.shape).to(x.dtype)


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None, training: bool, momentum: float,
    epsilon: float,
) -> Any:  # fmt: skip
    """(y, mean, 1 / deviation, the running mean, the running variance)"""
    normalized = aten._native_batch_norm_legit_no_training
    if not training:
        return *normalized(x, weight, bias, mean, variance, momentum, epsilon), mean, variance
    own_variance, own = torch.var_mean(x if x.dtype == torch.float64 else x.float(), [0, *range(2, x.ndim)], correction=0)
    y = normalized(x, weight, bias, own, own_variance, momentum, epsilon)[0]
    found = y, own, (own_variance + epsilon).rsqrt()
    if mean is None or variance is None:
        return *found, mean, variance
    if not isinstance(count := x.numel() // x.shape[1], int):
        return NotImplemented
    unbiased = own_variance * (count / max(1, count - 1))
    return *found, *(old * (1 - momentum) + new * momentum for old, new in ((mean, own), (variance, unbiased)))


def _addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """With the sum of a batch of products, which is one product."""
    return torch.addmm(x, a.transpose(0, 1).flatten(1), b.flatten(0, 1), beta=beta, alpha=alpha)


def _drawn(draw: Callable[[Tensor], Tensor], distribution: Callable[..., Tensor], x: Tensor, *numbers: float, generator: Any = None) -> Any:
    """Random numbers, made of standard ones."""
    return distribution(draw(x), *numbers) if generator is None else NotImplemented


TABLE: dict[Any, Any] = {
    aten.round.decimals: lambda x, *, decimals: _round(x, decimals), aten.addbmm: _addbmm, aten.var_mean.correction: _var_mean,
    aten.var.correction: lambda x, dim=None, **settings: _var_mean(x, dim, **settings)[0],
    aten._native_batch_norm_legit_functional: _batch_norm,
    aten._native_batch_norm_legit.no_stats: lambda x, weight, bias, *settings: _batch_norm(x, weight, bias, None, None, *settings)[:3],
    aten.max.default: lambda x: x.amax(), aten.min.default: lambda x: x.amin(),
    aten.max.dim: lambda x, dim, keepdim=False: (x.amax(dim, keepdim), x.argmax(dim, keepdim)),
    aten.min.dim: lambda x, dim, keepdim=False: (x.amin(dim, keepdim), x.argmin(dim, keepdim)),
    aten.normal_functional: partial(_drawn, torch.randn_like, lambda z, mean=0.0, std=1.0: z * std + mean),
    aten.uniform: partial(_drawn, torch.rand_like, lambda z, low=0.0, high=1.0: z * (high - low) + low),
}  # fmt: skip
