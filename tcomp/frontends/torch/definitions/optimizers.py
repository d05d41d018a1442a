"""What optimisers apply to lists of tensors (`foreach`, `fused`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Tensors = Sequence[Tensor]
FOREACH = (
    "abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "copy", "div", "exp", "lerp", "log", "maximum", "minimum", "mul", "neg",
    "pow", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt", "sub", "tanh",
)  # fmt: skip
"""Names of operators on a tensor, which are `_foreach_...` on lists of them."""


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


TABLE: dict[Any, Any] = {
    **{getattr(aten, f"_foreach_{name}"): partial(_foreach, getattr(aten, name)) for name in FOREACH},
    aten._fused_adam: partial(_adam, False), aten._fused_adamw: partial(_adam, True), aten._fused_sgd: _sgd,
}  # fmt: skip
