"""ONNX operators: LSTM, GRU and RNN, as a loop over time whose input projections are one matrix product outside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tcomp.frontends.onnx.context import Context, Handler, Table
from tcomp.frontends.onnx.handlers.movement import cut
from tcomp.ir.graph import LOOP, GraphBuilder, Operator, Value, loop_attrs
from tcomp.ops.elementwise import ADD, FULL
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import CONCAT, TRANSPOSE
from tcomp.ops.recurrent import ACTIVATIONS, GRU_CELL, GRU_RESET, LSTM_CELL, PART, RNN_CELL, STACK, WITHIN, Activation

Add = Callable[..., tuple[Value, ...]]  # add(op, inputs, **attrs), into the graph or into a loop body
Values = Sequence[Value]
# step(add, projected input [batch, gates], states, further values) -> new states
Step = Callable[[Add, Value, Values, Values], tuple[Value, ...]]

_ALPHA = {"affine": 1.0, "leakyrelu": 0.01, "thresholdedrelu": 1.0, "scaledtanh": 1.0, "hardsigmoid": 0.2, "elu": 1.0}
_BETA = {"affine": 0.0, "scaledtanh": 1.0, "hardsigmoid": 0.5}


def _activations(ctx: Context, defaults: Sequence[str], directions: int) -> list[tuple[Activation, ...]]:
    """The non-linearities of each direction; alpha and beta lists are consumed in order by the functions that have them."""
    count = len(defaults)
    names = [n.lower() for n in ctx.attrs.get("activations") or list(defaults) * directions]
    if len(names) < count * directions:
        raise ctx.invalid(f"{len(names)} activations for {directions} directions")
    alphas, betas = iter(ctx.attrs.get("activation_alpha") or []), iter(ctx.attrs.get("activation_beta") or [])
    made: list[Activation] = []
    for name in names[: count * directions]:  # the schema's default for RNN lists one for each of two directions
        if name not in ACTIVATIONS:
            raise ctx.unsupported(f"unknown activation `{name}`")
        alpha = next(alphas, _ALPHA[name]) if name in _ALPHA else 0.0
        beta = next(betas, _BETA[name]) if name in _BETA else 0.0
        made.append((name, float(alpha), float(beta)))
    return [tuple(made[d * count : (d + 1) * count]) for d in range(directions)]


class _Cell:
    """What the three operators share: directions, layout, weights by direction, sequence lengths, initial states."""

    def __init__(self, ctx: Context, gates: int, functions: Sequence[str]) -> None:
        self.ctx, self.gates = ctx, gates
        direction = ctx.attrs.get("direction", "forward")
        self.reverse = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}.get(direction, [])
        if not self.reverse:
            raise ctx.invalid(f"direction `{direction}`")
        self.batch_first = bool(ctx.attrs.get("layout", 0))
        x, r, directions = ctx.value(0), ctx.value(2), len(self.reverse)
        hidden = ctx.attrs.get("hidden_size", r.shape[-1] if r.shape else None)
        if len(x.shape) != 3 or not isinstance(hidden, int):
            raise ctx.invalid(f"the input is {x}, and `hidden_size` is {hidden}")
        self.hidden, self.x, self.lengths = hidden, self.swapped(x), ctx.input(4)
        batch = x.shape[0 if self.batch_first else 1]
        state = (batch, directions, hidden) if self.batch_first else (directions, batch, hidden)
        rows = directions, gates * hidden
        shapes = ((*rows, x.shape[2]), (*rows, hidden), (directions, 2 * gates * hidden), (batch,), state, state, (directions, 3 * hidden))
        for number, (value, shape) in enumerate(zip(ctx.inputs[1:], shapes, strict=False), 1):
            if value is not None and not ctx.can_be(value.shape, shape):
                said = f"direction `{direction}` and `hidden_size` {hidden}"
                raise ctx.invalid(f"input {number} is {value}; with {said} it has the shape [{', '.join(map(str, shape))}]")
        self.steps, self.batch = self.x.shape[:2]
        self.functions = _activations(ctx, functions, len(self.reverse))
        self.clip = float(ctx.attrs["clip"]) if "clip" in ctx.attrs else None

    def swapped(self, value: Value) -> Value:
        """`value` between the node's layout and [steps or directions, batch, ...]."""
        return self.ctx.add(TRANSPOSE, [value], perm=(1, 0, 2)) if self.batch_first else value

    def part(self, value: Value, d: int) -> Value:
        """Direction `d` of a value; a constant is cut without a copy."""
        known = self.ctx.scope.known(value)
        return self.ctx.add(PART, [value], index=d) if known is None else self.ctx.constant(known[d], value.dtype)

    def rows(self, value: Value, first: int, count: int) -> Value:
        """Gates `first` ... `first + count` of a weight or bias; a constant is cut without a copy."""
        known, begin, size = self.ctx.scope.known(value), first * self.hidden, count * self.hidden
        return cut(self.ctx, value, 0, begin, size) if known is None else self.ctx.constant(known[begin : begin + size], value.dtype)

    def biases(self, d: int) -> tuple[Value, Value] | None:
        """(input's, state's) bias vectors."""
        if self.ctx.input(3) is None:
            return None
        both = self.part(self.ctx.value(3), d)
        return self.rows(both, 0, self.gates), self.rows(both, self.gates, self.gates)

    def initial(self, i: int, d: int) -> Value:
        """The state before the first step, zero where input `i` is left out."""
        if (state := self.ctx.input(i)) is not None:
            return self.part(self.swapped(state), d)
        return self.ctx.add(FULL, [], shape=(self.batch, self.hidden), value=0.0, dtype=self.x.dtype)

    def projected(self, d: int, biases: Values | None) -> Value:
        """The input's part of the gates for all steps, with the sum of these biases: [steps, batch, gates * hidden]."""
        y = self.ctx.add(MATMUL, [self.x, self.part(self.ctx.value(1), d)], transpose_b=True)
        return y if biases is None else self.ctx.add(ADD, [y, self.ctx.add(ADD, biases)])

    def run(self, d: int, x: Value, states: Values, captured: Values, step: Step) -> tuple[Value, ...]:
        """(hidden states of all steps, final states...) of one direction, by the projected input of all steps, the states before the first
        (the hidden one is first), and further values that the step uses."""
        backwards, captured = self.reverse[d], [*captured, *([] if self.lengths is None else [self.lengths])]

        def body(add: Add, number: Value | None, now: Value, old: Values, given: Values) -> list[Value]:
            new = step(add, now, old, given)
            if self.lengths is None or number is None:
                return [*new, new[0]]
            count = self.steps if backwards else None
            pairs = [*zip(new, old, strict=True), (new[0], None)]
            return [result for n, o in pairs for result in add(WITHIN, [n, o, given[-1], number], count=count)]

        if self.steps == 1 and self.lengths is None:
            *final, hidden = body(self.ctx.add_several, None, self.ctx.add(PART, [x], index=0), states, captured)
            return self.ctx.add(STACK, [hidden], axis=0), *final
        builder = GraphBuilder(f"{self.ctx.name}.step")

        def add(op: Operator, inputs: Sequence[Value | None], **attrs: Any) -> tuple[Value, ...]:
            return builder.add(op, inputs, attrs, op.name)

        number = builder.input("step", "int64", ())
        olds = [builder.input(f"state{n}", s.dtype, s.shape) for n, s in enumerate(states)]
        now = builder.input("x", x.dtype, x.shape[1:])
        given = [builder.input(v.name, v.dtype, v.shape) for v in captured]
        graph = builder.build(body(add, number, now, olds, given))
        attrs = loop_attrs(self.steps, len(states), [backwards], [backwards])
        results = [*((s.dtype, s.shape) for s in states), (self.x.dtype, (self.steps, self.batch, self.hidden))]
        *final, hidden = self.ctx.scope.append(LOOP, [*states, x, *captured], results, attrs, self.ctx.name, [graph])
        return hidden, *final


def _recurrent(gates: int, functions: Sequence[str], direction: Callable[[_Cell, int], tuple[Value, ...]]) -> Handler:
    """The handler of a cell; Y and the final states are in the node's layout, directions stacked."""

    def handler(ctx: Context) -> tuple[Value, ...]:
        cell = _Cell(ctx, gates, functions)
        hiddens, *finals = zip(*(direction(cell, d) for d in range(len(cell.reverse))), strict=True)
        axis = 1 if cell.batch_first else 0
        y = ctx.add(STACK, [cell.swapped(hidden) for hidden in hiddens], axis=axis + 1)
        return y, *(ctx.add(STACK, final, axis=axis) for final in finals)

    return handler


def _lstm(cell: _Cell, d: int) -> tuple[Value, ...]:
    ctx, x = cell.ctx, cell.projected(d, cell.biases(d))
    captured = [cell.part(v, d) for v in (ctx.value(2), ctx.input(7)) if v is not None]
    attrs = {"activations": cell.functions[d], "clip": cell.clip, "input_forget": bool(ctx.attrs.get("input_forget", 0))}

    def step(add: Add, x: Value, old: Values, given: Values) -> tuple[Value, ...]:
        return add(
            LSTM_CELL, [x, *add(MATMUL, [old[0], given[0]], transpose_b=True), old[1], given[1] if len(captured) > 1 else None], **attrs
        )

    return cell.run(d, x, [cell.initial(5, d), cell.initial(6, d)], captured, step)


def _gru(cell: _Cell, d: int) -> tuple[Value, ...]:
    ctx, biases, weights = cell.ctx, cell.biases(d), cell.part(cell.ctx.value(2), d)
    attrs = {"activations": cell.functions[d], "clip": cell.clip}
    linear, of_input, captured = bool(ctx.attrs.get("linear_before_reset", 0)), biases, [cell.rows(weights, 0, 2), cell.rows(weights, 2, 1)]
    if linear:  # the reset gate damps the product instead of the state
        captured = [weights]
        if biases is not None:  # the state's bias counts there for the gates update and reset alone
            zero = ctx.add(FULL, [], shape=(cell.hidden,), value=0.0, dtype=cell.x.dtype)
            of_input = biases[0], ctx.add(CONCAT, [cell.rows(biases[1], 0, 2), zero], axis=0)
            captured.append(cell.rows(biases[1], 2, 1))

    def step(add: Add, x: Value, old: Values, given: Values) -> tuple[Value, ...]:
        (h,) = add(MATMUL, [old[0], given[0]], transpose_b=True)
        if linear:
            return add(GRU_CELL, [x, h, None, given[1] if biases else None, old[0]], **attrs)
        (damped,) = add(GRU_RESET, [x, h, old[0]], activation=cell.functions[d][0], clip=cell.clip)
        return add(GRU_CELL, [x, h, *add(MATMUL, [damped, given[1]], transpose_b=True), None, old[0]], **attrs)

    return cell.run(d, cell.projected(d, of_input), [cell.initial(5, d)], captured, step)


def _rnn(cell: _Cell, d: int) -> tuple[Value, ...]:
    def step(add: Add, x: Value, old: Values, given: Values) -> tuple[Value, ...]:
        return add(RNN_CELL, [x, *add(MATMUL, [old[0], given[0]], transpose_b=True)], activation=cell.functions[d][0], clip=cell.clip)

    x = cell.projected(d, cell.biases(d))
    return cell.run(d, x, [cell.initial(5, d)], [cell.part(cell.ctx.value(2), d)], step)


TABLE: Table = {
    "GRU": _recurrent(3, ("Sigmoid", "Tanh"), _gru),
    "LSTM": _recurrent(4, ("Sigmoid", "Tanh", "Tanh"), _lstm),
    "RNN": _recurrent(1, ("Tanh",), _rnn),
}
