"""Elements at positions that data tells, in order, or counted."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

aten = torch.ops.aten


def _empty(*tensors: Tensor) -> bool:
    """Whether any of them is known to have no elements."""
    return any(guard_or_false(d == 0) for x in tensors for d in x.shape)


def _scatter_reduce(x: Tensor, dim: int, indices: Tensor, source: Tensor, reduce: str, include_self: bool = True) -> Any:
    """Without themselves, elements that something is scattered to begin with what changes no result; means are sums by counts."""
    if include_self and reduce != "mean":
        return NotImplemented
    if not x.ndim:
        return _scatter_reduce(x.reshape(1), 0, indices.reshape(1), source.reshape(1), reduce, include_self).reshape(())
    if _empty(indices):
        return x.clone()
    if not include_self:
        info = torch.iinfo(torch.uint8 if x.dtype == torch.bool else x.dtype) if not x.is_floating_point() else None
        low, high = (-math.inf, math.inf) if info is None else (info.min, info.max)
        x = x.scatter(dim, indices, {"prod": 1, "amax": low, "amin": high}.get(reduce, 0))
    if reduce != "mean":
        return x.scatter_reduce(dim, indices, source, reduce)
    counts = torch.full_like(x, int(include_self)).scatter_add(dim, indices, torch.ones_like(indices, dtype=x.dtype))
    return torch.div(x.scatter_add(dim, indices, source), counts.clamp(min=1), rounding_mode=None if x.is_floating_point() else "floor")


def _index_reduce(x: Tensor, dim: int, indices: Tensor, source: Tensor, reduce: str, include_self: bool = True) -> Tensor:
    if not x.ndim:
        return _index_reduce(x.reshape(1), 0, indices, source.reshape(1), reduce, include_self).reshape(())
    spread = indices.reshape([-1 if n == dim % x.ndim else 1 for n in range(x.ndim)]).expand(source.shape)
    return x.scatter_reduce(dim, spread, source, reduce, include_self=include_self)


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Any:
    """The elements of the source, one after the other, where the mask is true."""
    mask, x = torch.broadcast_tensors(mask, x)
    if _empty(x, source):
        return NotImplemented
    place = (mask.flatten().cumsum(0) - 1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.flatten()[place].reshape(x.shape), x)


def _median(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower of two medians; NaN, where the first one is, if there is one."""
    if _empty(x):
        return NotImplemented
    if dim is None:
        return _median(x.flatten(), 0)[0] if x.ndim else x.clone()
    value, place = x.kthvalue((x.shape[dim] + 1) // 2 if x.ndim else 1, dim, keepdim)
    if not x.is_floating_point() or not x.ndim:
        return value, place
    unknown = x.isnan()
    some = unknown.any(dim, keepdim)
    return torch.where(some, math.nan, value), torch.where(some, unknown.int().argmax(dim, keepdim), place)


def _searchsorted(
    edges: Tensor, x: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Tensor | None = None
) -> Any:
    """How many edges are below: more comparisons than needed, but these are vectorized."""
    if sorter is not None or not isinstance(x, Tensor) or edges.dtype != x.dtype:
        return NotImplemented
    rows, last = edges if edges.ndim == 1 else edges.unsqueeze(-2), x.unsqueeze(-1)
    below = rows <= last if right or side == "right" else rows < last
    return (below | last.isnan()).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)  # NaN is above all


def _embedding_backward(grad: Tensor, indices: Tensor, count: int, padding: int, by_frequency: bool) -> Any:
    if by_frequency:
        return NotImplemented
    grad = torch.where((indices != padding).unsqueeze(-1), grad, 0.0) if padding >= 0 else grad
    return grad.new_zeros(count, grad.shape[-1]).index_put((indices,), grad, accumulate=True)


def _histogram(x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Any:
    """How many elements are in each of equal parts of a range, by default that of the elements; its end is in the last part."""
    if low == high and _empty(x):
        return NotImplemented
    x = x.flatten()
    first, last = (x.new_full((), low), x.new_full((), high)) if low != high else x.aminmax()
    if low == high:
        first, last = torch.where(first == last, first - 1, first), torch.where(first == last, last + 1, last)
    inside = (first <= x) & (x <= last)
    place = torch.where(inside, (x - first) * bins / (last - first), 0).long().clamp(max=bins - 1)
    return x.new_zeros(bins).index_put((place,), inside.to(x.dtype), accumulate=True)


TABLE: dict[Any, Any] = {
    aten.scatter_reduce: _scatter_reduce, aten.index_reduce: _index_reduce, aten.masked_scatter: _masked_scatter, aten.median: _median,
    aten.searchsorted: _searchsorted, aten.embedding_dense_backward: _embedding_backward, aten.histc: _histogram,
}  # fmt: skip
