"""Parts of tensors, read in windows or replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._decomp.decompositions import slice_scatter

aten = torch.ops.aten


def _slice_scatter(x: Tensor, part: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    """`x` with elements along an axis replaced: what is before, the part, and what is behind."""
    if step != 1:
        found: Tensor = slice_scatter(x, part, dim, start, end, step)
        return found
    size, count = x.shape[dim], part.shape[dim]
    first = torch.sym_max(torch.sym_min((start or 0) + (size if isinstance(start, int) and start < 0 else 0), size), 0)
    pieces = [
        (x.narrow(dim, 0, first), first),
        (part.to(x.dtype), count),
        (x.narrow(dim, first + count, size - first - count), size - first - count),
    ]
    return torch.cat([piece for piece, length in pieces if not isinstance(length, int) or length], dim)


def _select_scatter(x: Tensor, part: Tensor, dim: int, index: Any) -> Tensor:
    return _slice_scatter(x, part.unsqueeze(dim), dim, index)


def _unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Windows of `size` elements, `step` apart along an axis, behind all axes."""
    if not x.ndim:
        return x.reshape(1)
    places = torch.arange((x.shape[dim] - size) // step + 1).unsqueeze(-1) * step + torch.arange(size)
    return x.movedim(dim, -1)[..., places].movedim(-2, dim % x.ndim)


TABLE: dict[Any, Any] = {aten.slice_scatter: _slice_scatter, aten.select_scatter: _select_scatter, aten.unfold: _unfold}
