"""ONNX operators: LSTM, GRU and RNN, as a loop over time whose input projections are one matrix product outside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tcomp.frontends.onnx.context import Context, Versions
from tcomp.ir.graph import LOOP, GraphBuilder, Operator, Value, loop_attrs
from tcomp.ops.elementwise import ADD, FULL
from tcomp.ops.movement import CONCAT, TRANSPOSE
from tcomp.ops.nn import DENSE
from tcomp.ops.recurrent import GATES, GRU_CELL, GRU_RESET, LSTM_CELL, PART, RNN_CELL, STACK, WITHIN, Activation

Add = Callable[..., tuple[Value, ...]]  # add(op, inputs, **attrs), into the graph or into a loop body
Step = Callable[[Add, Value, Sequence[Value], Sequence[Value]], tuple[Value, ...]]
# step(add, projected input [batch, gates], carried states, captured values) -> new states

_ALPHA = {"affine": 1.0, "leakyrelu": 0.01, "thresholdedrelu": 1.0, "scaledtanh": 1.0, "hardsigmoid": 0.2, "elu": 1.0}
_BETA = {"affine": 0.0, "scaledtanh": 1.0, "hardsigmoid": 0.5}
_PARAMETERLESS = ("sigmoid", "tanh", "relu", "softsign", "softplus")


def activations(ctx: Context, defaults: Sequence[str], directions: int) -> list[tuple[Activation, ...]]:
    """The non-linearities of each direction; alpha and beta lists are consumed in order by the functions that have them."""
    names = [n.lower() for n in ctx.attrs.get("activations") or list(defaults) * directions]
    if len(names) < len(defaults) * directions:
        raise ctx.invalid(f"{len(names)} activations for {directions} directions")
    names = names[: len(defaults) * directions]  # the schema's default for RNN lists one for each of two directions
    alphas, betas = list(ctx.attrs.get("activation_alpha") or []), list(ctx.attrs.get("activation_beta") or [])
    made: list[Activation] = []
    for name in names:
        if name not in _ALPHA and name not in _PARAMETERLESS:
            raise ctx.unsupported(f"unknown activation `{name}`")
        alpha = (alphas.pop(0) if alphas else _ALPHA[name]) if name in _ALPHA else 0.0
        beta = (betas.pop(0) if betas else _BETA[name]) if name in _BETA else 0.0
        made.append((name, float(alpha), float(beta)))
    count = len(defaults)
    return [tuple(made[d * count : (d + 1) * count]) for d in range(directions)]


class Cell:
    """What the three operators share: directions, layout, weights by direction, sequence lengths, initial states."""

    def __init__(self, ctx: Context, gates: int, functions: Sequence[str]) -> None:
        self.ctx, self.gates = ctx, gates
        direction = ctx.attrs.get("direction", "forward")
        if direction not in ("forward", "reverse", "bidirectional"):
            raise ctx.invalid(f"direction `{direction}`")
        self.reverse = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
        self.batch_first = bool(ctx.attrs.get("layout", 0))
        x, w, r = ctx.value(0), ctx.value(1), ctx.value(2)
        if len(x.shape) != 3 or len(w.shape) != 3 or len(r.shape) != 3 or w.shape[0] != len(self.reverse):
            raise ctx.invalid(f"inputs {x}, {w}, {r} do not fit direction `{direction}`")
        hidden = r.shape[2]
        if not isinstance(hidden, int) or ctx.attrs.get("hidden_size", hidden) != hidden:
            raise ctx.invalid(f"attribute `hidden_size` is {ctx.attrs.get('hidden_size')}, the weights have {hidden}")
        if w.shape[1] != gates * hidden or r.shape[1] != gates * hidden:
            raise ctx.invalid(f"weights {w} and {r} do not hold {gates} gates of {hidden}")
        self.hidden: int = hidden
        self.x: Value = ctx.add(TRANSPOSE, [x], perm=(1, 0, 2)) if self.batch_first else x
        self.steps, self.batch = self.x.shape[0], self.x.shape[1]
        self.lengths = ctx.input(4)
        self.functions = activations(ctx, functions, len(self.reverse))
        self.clip = float(ctx.attrs["clip"]) if "clip" in ctx.attrs else None

    def part(self, i: int, d: int) -> Value:
        """Direction `d` of input `i`; a constant is cut without a copy."""
        return self.of(self.ctx.value(i), d)

    def of(self, value: Value, d: int) -> Value:
        """The cell of a node and one of its directions."""
        known = self.ctx.scope.known(value)
        return self.ctx.add(PART, [value], index=d) if known is None else self.ctx.constant(known[d], value.dtype)

    def rows(self, value: Value, first: int, count: int) -> Value:
        """Gates `first` ... `first + count` of a weight or bias."""
        known = self.ctx.scope.known(value)
        if known is not None:
            return self.ctx.constant(known[first * self.hidden : (first + count) * self.hidden], value.dtype)
        return self.ctx.add(GATES, [value], first=first, count=count, size=self.hidden)

    def biases(self, d: int) -> tuple[Value, Value] | None:
        """(input's, state's) bias vectors."""
        if self.ctx.input(3) is None:
            return None
        both = self.part(3, d)
        return self.rows(both, 0, self.gates), self.rows(both, self.gates, self.gates)

    def initial(self, i: int, d: int) -> Value:
        """The state before the first step, zero where input `i` is left out."""
        state = self.ctx.input(i)
        if state is None:
            return self.ctx.add(FULL, [], shape=(self.batch, self.hidden), value=0.0, dtype=self.x.dtype)
        if self.batch_first:
            state = self.ctx.add(TRANSPOSE, [state], perm=(1, 0, 2))
        return self.of(state, d)

    def projected(self, d: int, bias: Value | None) -> Value:
        """The input's part of the gates for all steps, [steps, batch, gates * hidden]."""
        y: Value = self.ctx.add(DENSE, [self.x, self.part(1, d)])
        return y if bias is None else self.ctx.add(ADD, [y, bias])

    def run(self, d: int, x: Value, states: Sequence[Value], captured: Sequence[Value], step: Step) -> tuple[Value, tuple[Value, ...]]:
        """(hidden states of all steps, final states). The hidden state is the first one."""
        backwards = self.reverse[d]
        captured = list(captured) if self.lengths is None else [*captured, self.lengths]

        def body(add: Add, number: Value | None, now: Value, old: Sequence[Value], given: Sequence[Value]) -> list[Value]:
            new = step(add, now, old, given)
            if self.lengths is None or number is None:
                return [*new, new[0]]
            count = self.steps if backwards else None
            pairs = [*zip(new, old, strict=True), (new[0], None)]
            return [kept for n, o in pairs for kept in add(WITHIN, [n, o, given[-1], number], count=count)]

        if self.steps == 1 and self.lengths is None:
            *final, hidden = body(self.ctx.add_several, None, self.ctx.add(PART, [x], index=0), states, captured)
            return self.ctx.add(STACK, [hidden], axis=0), tuple(final)

        builder = GraphBuilder(f"{self.ctx.name}.step")

        def add(op: Operator, inputs: Sequence[Value | None], **attrs: Any) -> tuple[Value, ...]:
            return builder.add(op, inputs, attrs, op.name)

        number = builder.input("step", "int64", ())
        olds = [builder.input(f"state{n}", s.dtype, s.shape) for n, s in enumerate(states)]
        now = builder.input("x", x.dtype, x.shape[1:])
        given = [builder.input(v.name, v.dtype, v.shape) for v in captured]
        graph = builder.build(body(add, number, now, olds, given))
        attrs = loop_attrs(self.steps, len(states), [backwards], [backwards])
        stacked = (self.x.dtype, (self.steps, self.batch, self.hidden))
        results = [(s.dtype, s.shape) for s in states] + [stacked]
        *final, hidden = self.ctx.scope.structural(LOOP, [*states, x, *captured], results, attrs, [graph], self.ctx.name)
        return hidden, tuple(final)

    def outputs(self, runs: Sequence[tuple[Value, tuple[Value, ...]]]) -> tuple[Value, ...]:
        """Y and the final states in the node's layout, directions stacked."""
        axis = 2 if self.batch_first else 1
        hiddens = [hidden for hidden, _ in runs]
        if self.batch_first:
            hiddens = [self.ctx.add(TRANSPOSE, [hidden], perm=(1, 0, 2)) for hidden in hiddens]
        finals = zip(*(final for _, final in runs), strict=True)
        state_axis = 1 if self.batch_first else 0
        return self.ctx.add(STACK, hiddens, axis=axis), *(self.ctx.add(STACK, list(f), axis=state_axis) for f in finals)


def _sum(ctx: Context, biases: tuple[Value, Value] | None) -> Value | None:
    return None if biases is None else ctx.add(ADD, list(biases))


def lstm(ctx: Context) -> tuple[Value, ...]:
    """ONNX LSTM."""
    cell = Cell(ctx, 4, ("Sigmoid", "Tanh", "Tanh"))
    runs = []
    for d in range(len(cell.reverse)):
        x = cell.projected(d, _sum(ctx, cell.biases(d)))
        captured = [cell.part(2, d)] + ([cell.part(7, d)] if ctx.input(7) is not None else [])
        attrs = {"activations": cell.functions[d], "clip": cell.clip, "input_forget": bool(ctx.attrs.get("input_forget", 0))}
        peephole = ctx.input(7) is not None

        def step(
            add: Add, x: Value, old: Sequence[Value], given: Sequence[Value], attrs: Any = attrs, peephole: bool = peephole
        ) -> tuple[Value, ...]:
            h, c = old
            return add(LSTM_CELL, [x, *add(DENSE, [h, given[0]]), c, given[1] if peephole else None], **attrs)

        runs.append(cell.run(d, x, [cell.initial(5, d), cell.initial(6, d)], captured, step))
    return cell.outputs(runs)


def gru(ctx: Context) -> tuple[Value, ...]:
    """ONNX GRU."""
    cell = Cell(ctx, 3, ("Sigmoid", "Tanh"))
    biased = ctx.input(3) is not None
    damped_product = bool(ctx.attrs.get("linear_before_reset", 0))
    runs = []
    for d in range(len(cell.reverse)):
        biases, weights = cell.biases(d), cell.part(2, d)
        attrs = {"activations": cell.functions[d], "clip": cell.clip}
        if damped_product:
            x = cell.projected(d, _without_last(cell, biases))
            captured = [weights] + ([] if biases is None else [cell.rows(biases[1], 2, 1)])

            def step(add: Add, x: Value, old: Sequence[Value], given: Sequence[Value], attrs: Any = attrs) -> tuple[Value, ...]:
                (h,) = add(DENSE, [old[0], given[0]])
                return add(GRU_CELL, [x, h, None, given[1] if biased else None, old[0]], **attrs)
        else:
            x = cell.projected(d, _sum(ctx, biases))
            captured = [cell.rows(weights, 0, 2), cell.rows(weights, 2, 1)]

            def step(add: Add, x: Value, old: Sequence[Value], given: Sequence[Value], attrs: Any = attrs) -> tuple[Value, ...]:
                (h,) = add(DENSE, [old[0], given[0]])
                (damped,) = add(GRU_RESET, [x, h, old[0]], activation=attrs["activations"][0], clip=attrs["clip"])
                return add(GRU_CELL, [x, h, *add(DENSE, [damped, given[1]]), None, old[0]], **attrs)

        runs.append(cell.run(d, x, [cell.initial(5, d)], captured, step))
    return cell.outputs(runs)


def _without_last(cell: Cell, biases: tuple[Value, Value] | None) -> Value | None:
    """Input bias plus state bias, the latter only for the gates update and reset."""
    if biases is None:
        return None
    ctx = cell.ctx
    zero = ctx.add(FULL, [], shape=(cell.hidden,), value=0.0, dtype=cell.x.dtype)
    two = ctx.add(CONCAT, [cell.rows(biases[1], 0, 2), zero], axis=0)
    return ctx.add(ADD, [biases[0], two])


def rnn(ctx: Context) -> tuple[Value, ...]:
    """ONNX RNN."""
    cell = Cell(ctx, 1, ("Tanh",))
    runs = []
    for d in range(len(cell.reverse)):
        attrs = {"activation": cell.functions[d][0], "clip": cell.clip}

        def step(add: Add, x: Value, old: Sequence[Value], given: Sequence[Value], attrs: Any = attrs) -> tuple[Value, ...]:
            return add(RNN_CELL, [x, *add(DENSE, [old[0], given[0]])], **attrs)

        x = cell.projected(d, _sum(ctx, cell.biases(d)))
        runs.append(cell.run(d, x, [cell.initial(5, d)], [cell.part(2, d)], step))
    return cell.outputs(runs)


TABLE: dict[str, Versions] = {"GRU": ((1, gru),), "LSTM": ((1, lstm),), "RNN": ((1, rnn),)}
