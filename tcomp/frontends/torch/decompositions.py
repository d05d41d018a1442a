"""Operators of PyTorch by others: its own table, and what optimisers apply to lists of tensors (`foreach`, `fused`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from tcomp.frontends.torch.importer import HANDLERS

aten = torch.ops.aten
Tensors = Sequence[Tensor]
FOREACH = (
    "abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "copy", "div", "exp", "lerp", "log", "maximum", "minimum", "mul", "neg",
    "pow", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt", "sub", "tanh",
)  # fmt: skip
"""Names of operators on a tensor, which are `_foreach_...` on lists of them."""


@cache
def decompositions() -> dict[Any, Any]:
    """How operators are written by those of core ATen, and a few more, but for those that are imported as they are."""
    table = dict(torch._decomp.core_aten_decompositions())
    resized = (aten.upsample_nearest2d, aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten.upsample_trilinear3d)
    pooled, indices = (aten.adaptive_max_pool2d, aten.adaptive_max_pool3d), (aten.tril_indices, aten.triu_indices)
    more = (aten.as_strided_copy, aten.bucketize, aten.dist, aten.narrow_copy, aten.unbind_copy, aten._batch_norm_with_update_functional)
    table |= torch._decomp.get_decompositions([*resized, *pooled, *indices, *more])
    lists = {getattr(aten, f"_foreach_{name}"): partial(_foreach, getattr(aten, name)) for name in FOREACH}
    lists |= {aten._fused_adam: partial(_adam, False), aten._fused_adamw: partial(_adam, True), aten._fused_sgd: _sgd}
    table |= {getattr(packet, name): function for packet, function in lists.items() for name in packet.overloads() if "out" not in name}
    table[aten.nll_loss_backward.default] = _nll_loss_backward
    table[aten._cdist_backward.default] = _cdist_backward
    table[aten.multilabel_margin_loss_forward.default] = _multilabel_margin_loss
    return {op: f for op, f in table.items() if getattr(op, "overloadpacket", None) not in HANDLERS}


def _foreach(op: Callable[..., Tensor], first: Any, *rest: Any, **settings: Any) -> list[Tensor]:
    """Of each of several lists an element, or what there is but one of; numbers of `addcmul` and the like have a name."""
    count = len(first if isinstance(first, list | tuple) else rest[0])

    def part(x: Any, n: int) -> Any:
        return x[n] if isinstance(x, list | tuple) else x

    if op in (aten.addcmul, aten.addcdiv) and len(rest) > 2:
        value, rest = rest[-1], rest[:-1]
        settings["value"] = [v.item() for v in value] if isinstance(value, Tensor) else value
    return [op(part(first, n), *(part(x, n) for x in rest), **{k: part(v, n) for k, v in settings.items()}) for n in range(count)]


def _adam(
    decoupled: bool, parameters: Tensors, grads: Tensors, means: Tensors, squares: Tensors, largest: Tensors, steps: Tensors, *, lr: Any,
    beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool, maximize: bool, grad_scale: Any = None,
    found_inf: Any = None,
) -> Any:  # fmt: skip
    """Adam, with weights that decay by themselves if `decoupled` (Loshchilov and Hutter, 2019)."""
    if grad_scale is not None or found_inf is not None:
        return NotImplemented
    found = list[list[Tensor]]()
    for n, (p, g, mean, square, step) in enumerate(zip(parameters, grads, means, squares, steps, strict=True)):
        slope = -g if maximize else g
        if weight_decay:
            p, slope = (p * (1 - lr * weight_decay), slope) if decoupled else (p, slope + p * weight_decay)
        mean, square = mean + (slope - mean) * (1 - beta1), square * beta2 + slope * slope * (1 - beta2)
        top = torch.maximum(largest[n], square) if amsgrad else square
        deviation = top.sqrt() / (1 - beta2**step).sqrt() + eps
        found.append([p - mean / deviation * (lr / (1 - beta1**step)), g, mean, square, *([top] if amsgrad else [])])
    columns = [*map(list, zip(*found, strict=True))]
    return tuple(columns if amsgrad else [*columns, list(largest)])


def _sgd(
    parameters: Tensors, grads: Tensors, momenta: Tensors, *, weight_decay: float, momentum: float, lr: Any, dampening: float,
    nesterov: bool, maximize: bool, is_first_step: bool, grad_scale: Any = None, found_inf: Any = None,
) -> Any:  # fmt: skip
    if grad_scale is not None or found_inf is not None:
        return NotImplemented
    found, kept = list[Tensor](), list[Tensor]()
    for n, (p, g) in enumerate(zip(parameters, grads, strict=True)):
        slope = -g if maximize else g
        slope = slope + p * weight_decay if weight_decay else slope
        if momentum:
            kept.append(slope if is_first_step else momenta[n] * momentum + slope * (1 - dampening))
            slope = slope + kept[n] * momentum if nesterov else kept[n]
        found.append(p - slope * lr)
    return found, list(grads), kept if momentum else list(momenta)


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


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Labels end at the first -1. PyTorch's own decomposition, as of 2.13, sums margins of what lies behind it as well."""
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1, x.shape[-1])
    counts = (labels == -1).long().cumsum(-1) == 0
    labels, places = torch.where(counts, labels, 0), torch.arange(rows.shape[-1], device=x.device)
    hit = ((labels.unsqueeze(-1) == places) & counts.unsqueeze(-1)).any(-2)
    margins = (1 - rows.gather(-1, labels).unsqueeze(-1) + rows.unsqueeze(-2)).relu()
    loss = torch.where(counts.unsqueeze(-1) & ~hit.unsqueeze(-2), margins, 0.0).sum((-1, -2)) / rows.shape[-1]
    loss = loss.reshape(x.shape[:-1]) if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()
    return loss, hit.to(x.dtype).reshape(target.shape)


def _multilabel_margin_loss_of(
    x: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
) -> Tensor:
    legacy = functional._Reduction.legacy_get_enum(size_average, reduce) if (size_average, reduce) != (None, None) else None
    return _multilabel_margin_loss(x, target, functional._Reduction.get_enum(reduction) if legacy is None else legacy)[0]


def corrected(module: GraphModule) -> GraphModule:
    """The graph of Dynamo, with functions of our own for what PyTorch decomposes wrongly before it asks."""
    for node in module.graph.nodes:
        if node.target is functional.multilabel_margin_loss:
            node.target = _multilabel_margin_loss_of
    return module
