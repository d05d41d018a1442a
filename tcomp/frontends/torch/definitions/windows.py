"""Derivatives of convolutions and pooling, and pooling to a given size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

aten = torch.ops.aten
Ints = Sequence[int]


def per_axis(given: Ints | int, rank: int) -> list[int]:
    """A number for each spatial axis; one stands for all."""
    several = [given] if isinstance(given, int) else list(given)
    return several * rank if len(several) == 1 else several


def _adjoint(grad: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int) -> Tensor:
    """The transposed convolution whose result has the spatial `size`."""
    reached = [
        (n - 1) * s - 2 * p + (k - 1) * d + 1 for n, s, p, k, d in zip(grad.shape[2:], stride, padding, w.shape[2:], dilation, strict=True)
    ]
    extra = [n - r for n, r in zip(size, reached, strict=True)]
    return aten.convolution(grad, w, None, stride, padding, dilation, True, extra, groups)


def _convolution_backward(
    grad: Tensor, x: Tensor, w: Tensor, bias: Any, stride: Ints, padding: Ints, dilation: Ints, transposed: bool, extra: Ints,
    groups: int, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """The adjoint of a convolution is the transposed one; that of the weights correlates the inputs with the gradients, batches summed."""
    rank = w.ndim - 2
    if transposed:
        return NotImplemented
    stride, padding, dilation = (per_axis(v, rank) for v in (stride, padding, dilation))
    to_x = _adjoint(grad, w, x.shape[2:], stride, padding, dilation, groups) if wanted[0] else None
    to_bias = grad.sum((0, *range(2, 2 + rank))) if wanted[2] else None
    if not wanted[1]:
        return to_x, None, to_bias
    inside = pad(x, [p for p in reversed(padding) for _ in range(2)]) if any(padding) else x
    for axis, (n, k, s, d) in enumerate(zip(grad.shape[2:], w.shape[2:], stride, dilation, strict=True), 2):
        inside = inside.narrow(axis, 0, (n - 1) * s + (k - 1) * d + 1)  # what the windows read; with a stride, there may be more
    per_group = x.shape[1] // groups
    turned = inside.unflatten(1, (groups, per_group)).movedim(2, 0).transpose(1, 2).reshape(per_group, -1, *inside.shape[2:])
    to_w = aten.convolution(turned, grad.transpose(0, 1), None, dilation, [0] * rank, stride, False, [0] * rank, groups)
    return to_x, to_w.transpose(0, 1), to_bias


def _max_pool_backward(
    rank: int, grad: Tensor, x: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool, indices: Tensor
) -> Tensor:
    zeros = torch.zeros_like(x).flatten(-rank)
    return zeros.scatter_add(-1, indices.flatten(-rank), grad.flatten(-rank)).reshape(x.shape)


def _avg_pool_backward(
    rank: int, grad: Tensor, x: Tensor, kernel: Ints, stride: Ints, padding: Ints, ceil_mode: bool, counted: bool, divisor: int | None
) -> Any:
    k, pads = per_axis(kernel, rank), per_axis(padding, rank)
    if ceil_mode or (any(pads) and not counted):
        return NotImplemented
    if x.ndim == rank + 1:
        grad, x = grad.unsqueeze(0), x.unsqueeze(0)
        return _avg_pool_backward(rank, grad, x, kernel, stride, padding, ceil_mode, counted, divisor).squeeze(0)
    weights = grad.new_full((x.shape[1], 1, *k), 1 / (divisor or prod(k)))
    return _adjoint(grad, weights, x.shape[2:], per_axis(stride, rank) if stride else k, pads, [1] * rank, x.shape[1])


def _adaptive_avg_pool(x: Tensor, size: Ints) -> Any:
    """By products with matrices, one axis after the other, where windows are of different sizes."""
    rank = len(size)
    spatial = x.shape[-rank:]
    if not all(isinstance(n, int) for n in spatial):
        return NotImplemented
    if all(n % k == 0 for n, k in zip(spatial, size, strict=True)):
        k = [n // m for n, m in zip(spatial, size, strict=True)]
        return (aten.avg_pool2d if rank == 2 else aten.avg_pool3d)(x, k, k)
    y = x.double() if x.dtype == torch.float64 else x.float()
    for axis, (n, count) in enumerate(zip(spatial, size, strict=True)):
        y = (y.movedim(axis - rank, -1) @ _window_means(n, count).to(y.dtype)).movedim(-1, axis - rank)
    return y.to(x.dtype)


def _window_means(size: int, count: int) -> Tensor:
    """A matrix [size, count] whose product with a row is the means of `count` windows that cover it, as adaptive pooling has them."""
    places, windows = torch.arange(size).unsqueeze(-1), torch.arange(count)
    first, end = windows * size // count, ((windows + 1) * size + count - 1) // count
    return ((places >= first) & (places < end)) / (end - first)


def _of_one_image(op: Any, rank: int, x: Tensor, *settings: Any) -> Any:
    """As of a batch of one."""
    if x.ndim > rank:
        return NotImplemented
    found = op(x.unsqueeze(0), *settings)
    return tuple(t.squeeze(0) for t in found) if isinstance(found, tuple) else found.squeeze(0)


TABLE: dict[Any, Any] = {
    aten.convolution_backward: _convolution_backward, aten.avg_pool2d_backward: partial(_avg_pool_backward, 2),
    aten.max_pool2d_with_indices_backward: partial(_max_pool_backward, 2),
    aten.max_pool3d_with_indices_backward: partial(_max_pool_backward, 3), aten.avg_pool3d_backward: partial(_avg_pool_backward, 3),
    **{op: partial(_of_one_image, op, 3) for op in (aten.max_pool2d_with_indices, aten.avg_pool2d)},
    **{op: partial(_of_one_image, op, 4) for op in (aten.max_pool3d_with_indices, aten.avg_pool3d)},
    **dict.fromkeys((aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d), _adaptive_avg_pool),
}  # fmt: skip
