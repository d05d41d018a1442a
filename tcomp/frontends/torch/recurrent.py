"""LSTM, GRU and RNN of PyTorch as scans over time. The products of all inputs, and the derivatives of all weights, are one product each,
outside of the loop: PyTorch's own decomposition writes every step one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.functional import dropout as dropped, linear

Cell = Callable[..., tuple[Tensor, ...]]  # (part of the input, part of the state, *states) -> the new states, the hidden one first
scan = torch.ops.higher_order.scan


def _lstm_cell(x: Tensor, h: Tensor, _: Tensor, cell: Tensor) -> tuple[Tensor, ...]:
    entry, forget, new, out = (x + h).chunk(4, -1)
    cell = forget.sigmoid() * cell + entry.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def _gru_cell(x: Tensor, h: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    (x_reset, x_update, x_new), (h_reset, h_update, h_new) = x.chunk(3, -1), h.chunk(3, -1)
    new = (x_new + (x_reset + h_reset).sigmoid() * h_new).tanh()
    return (new + (x_update + h_update).sigmoid() * (hidden - new),)


def _rnn_cell(function: Callable[[Tensor], Tensor], x: Tensor, h: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return (function(x + h),)


class _Layer(torch.autograd.Function):
    """The states [steps, batch, hidden] after each step. `x` [steps, batch, gates * hidden] is the part of the input, `states` [batch,
    hidden] are those before the first step."""

    @staticmethod
    def forward(ctx: Any, cell: Cell, x: Tensor, weight: Tensor, bias: Tensor | None, *states: Tensor) -> tuple[Tensor, ...]:
        count, saved = len(states), any(ctx.needs_input_grad)

        def step(*given: Tensor) -> list[Tensor]:
            before, (x, weight, *bias) = given[:count], given[count:]
            part = linear(before[0], weight, *bias)
            after = cell(x, part, *before)
            return [*after, *(s.clone() for s in after), *([part.clone()] if saved else [])]

        found = scan(step, list(states), [x], [weight] if bias is None else [weight, bias])[count:]
        if saved:
            ctx.cell, ctx.biased = cell, bias is not None
            ctx.save_for_backward(x, weight, *found[count:], *states, *found[:count])
            ctx.set_materialize_grads(False)
        return tuple(found[:count])

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        (x, weight, parts, *states), cell, count = ctx.saved_tensors, ctx.cell, len(given)
        first, after = states[:count], states[count:]
        before = [torch.cat([s[None], a[:-1]]) for s, a in zip(first, after, strict=True)]
        changed = [n for n, g in enumerate(given) if g is not None]

        def step(*given: Tensor) -> list[Tensor]:
            carried, (x, part, *rest), weight = [*given[:count]], given[count:-1], given[-1]
            before, changes = rest[:count], rest[count:]
            for n, change in zip(changed, changes, strict=True):
                carried[n] = carried[n] + change
            _, pull = torch.func.vjp(cell, x, part, *before)
            to_x, to_part, *to_states = pull(tuple(carried))
            to_states[0] = to_states[0] + to_part @ weight
            return [*to_states, to_x.clone(), to_part.clone()]

        zeros = [torch.zeros_like(s) for s in first]
        xs = [t.flip(0) for t in (x, parts, *before, *(g for g in given if g is not None))]
        *to_first, to_x, to_parts = scan(step, zeros, xs, [weight])
        to_x, to_parts = to_x.flip(0), to_parts.flip(0)
        to_weight = to_parts.flatten(0, 1).T @ before[0].flatten(0, 1)
        return None, to_x, to_weight, to_parts.sum((0, 1)) if ctx.biased else None, *to_first


def _recurrence(
    cell: Cell, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], biased: bool, layers: int, dropout: float, training: bool,
    both: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(the hidden state of the last layer after each step, the last states [layers * directions, batch, hidden])"""
    x, given = x.transpose(0, 1) if batch_first else x, iter(weights)
    last: list[list[Tensor]] = []
    for layer in range(layers):
        found = []
        for direction in range(1 + both):
            to_x, to_h, *bias = (next(given) for _ in range(4 if biased else 2))
            part = linear(x.flip(0) if direction else x, to_x, *bias[:1])
            own = [s[len(last)] for s in states]
            after = _Layer.apply(cell, part, to_h, bias[1] if biased else None, *own)
            last.append([s[-1] for s in after])
            found.append(after[0].flip(0) if direction else after[0])
        x = torch.cat(found, -1) if both else found[0]
        x = dropped(x, dropout, training) if dropout and layer + 1 < layers else x
    return x.transpose(0, 1) if batch_first else x, *(torch.stack(s) for s in zip(*last, strict=True))


def _lstm(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *settings: Any) -> tuple[Tensor, ...]:
    if states[0].shape != states[1].shape:  # the hidden state is projected
        return torch.lstm(x, states, weights, *settings)
    return _recurrence(_lstm_cell, x, states, weights, *settings)


def _of_one_state(cell: Cell, x: Tensor, hidden: Tensor, weights: Sequence[Tensor], *settings: Any) -> tuple[Tensor, ...]:
    return _recurrence(cell, x, [hidden], weights, *settings)


RECURRENCES: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    torch.lstm: _lstm,
    torch.gru: partial(_of_one_state, _gru_cell),
    torch.rnn_tanh: partial(_of_one_state, partial(_rnn_cell, torch.tanh)),
    torch.rnn_relu: partial(_of_one_state, partial(_rnn_cell, torch.relu)),
}


def with_scans(module: GraphModule) -> GraphModule:
    """The graph of Dynamo with recurrences as scans, but for those of packed sequences."""
    for node in module.graph.nodes:
        if node.target in RECURRENCES and isinstance(node.args[3], bool):
            node.target = RECURRENCES[node.target]
    module.recompile()
    return module
