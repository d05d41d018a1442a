"""The elementwise parts of recurrent cells. Matrix products stand outside, so that schedules see them as such.

Gate pre-activations are (batch, gates * hidden): the input's part `x` (biases included) and the state's part `h`. `activations` lists
(name, alpha, beta), one for each non-linearity of the cell, in ONNX's order.
"""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, cast, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ops.elementwise import elu, hard_sigmoid, leaky_relu, relu, softplus

Activation = tuple[str, float, float]


def activate(x: Expr, activation: Activation) -> Expr:
    """A non-linearity of the recurrent operators, by its ONNX name in lower case."""
    name, alpha, beta = activation
    match name:
        case "sigmoid":
            return te.sigmoid(x)
        case "tanh":
            return te.tanh(x)
        case "relu":
            return relu(x)
        case "affine":
            return x * alpha + beta
        case "leakyrelu":
            return leaky_relu(x, alpha)
        case "thresholdedrelu":
            return select(x >= alpha, x, 0)
        case "scaledtanh":
            return te.tanh(x * beta) * alpha
        case "hardsigmoid":
            return hard_sigmoid(x, alpha, beta)
        case "elu":
            return elu(x, alpha)
        case "softsign":
            return x / (1.0 + te.abs(x))
        case "softplus":
            return softplus(x)
    raise IRError(f"unknown activation `{name}` of a recurrent cell")


def _clipped(x: Expr, clip: float | None) -> Expr:
    return x if clip is None else minimum(maximum(x, -clip), clip)


def _hidden(x: te.Tensor, gates: int) -> int:
    width = x.shape[-1]
    if not isinstance(width, int) or width % gates:
        raise IRError(f"{width} pre-activations do not divide into {gates} gates")
    return width // gates


def lstm_cell(
    x: te.Tensor,
    h: te.Tensor,
    c: te.Tensor,
    peephole: te.Tensor | None,
    activations: Sequence[Activation],
    clip: float | None,
    input_forget: bool,
) -> tuple[te.Tensor, te.Tensor]:
    """(hidden, cell) after one step; gates in the order input, output, forget, cell. `peephole` is (3 * hidden) in order i, o, f."""
    size = _hidden(x, 4)
    f, g, last = activations

    def gate(b: Expr, j: Expr, number: int, state: Expr | None, peep: int) -> Expr:
        value = x[b, j + number * size] + h[b, j + number * size]
        if peephole is not None and state is not None:
            value = value + peephole[j + peep * size] * state
        return _clipped(value, clip)

    def cell(b: Expr, j: Expr) -> Expr:
        entry = activate(gate(b, j, 0, c[b, j], 0), f)
        forget = 1.0 - entry if input_forget else activate(gate(b, j, 2, c[b, j], 2), f)
        return forget * c[b, j] + entry * activate(gate(b, j, 3, None, 0), g)

    new = te.compute(c.shape, cell, "lstm_cell")

    def hidden(b: Expr, j: Expr) -> Expr:
        return activate(gate(b, j, 1, new[b, j], 1), f) * activate(new[b, j], last)

    return te.compute(c.shape, hidden, "lstm_hidden"), new


def gru_reset(x: te.Tensor, h: te.Tensor, state: te.Tensor, activation: Activation, clip: float | None) -> te.Tensor:
    """The state damped by the reset gate, r * state; `h` holds the state's part of gates update and reset."""
    size = _hidden(x, 3)

    def element(b: Expr, j: Expr) -> Expr:
        return activate(_clipped(x[b, j + size] + h[b, j + size], clip), activation) * state[b, j]

    return te.compute(state.shape, element, "gru_reset")


def gru_cell(
    x: te.Tensor,
    h: te.Tensor,
    candidate: te.Tensor | None,
    bias: te.Tensor | None,
    state: te.Tensor,
    activations: Sequence[Activation],
    clip: float | None,
) -> te.Tensor:
    """The state after one step; gates in the order update, reset, candidate.

    With `candidate` (the damped state times the candidate's weights) `h` holds two gates. Without it the reset gate damps the
    product instead of the state: `h` holds three gates, and `bias` (or None) belongs to the product of the candidate.
    """
    size = _hidden(x, 3)
    f, g = activations

    def element(b: Expr, j: Expr) -> Expr:
        update = activate(_clipped(x[b, j] + h[b, j], clip), f)
        if candidate is not None:
            inner = candidate[b, j]
        else:
            inner = h[b, j + 2 * size] if bias is None else h[b, j + 2 * size] + bias[j]
            inner = activate(_clipped(x[b, j + size] + h[b, j + size], clip), f) * inner
        new = activate(_clipped(x[b, j + 2 * size] + inner, clip), g)
        return (1.0 - update) * new + update * state[b, j]

    return te.compute(state.shape, element, "gru_cell")


def rnn_cell(x: te.Tensor, h: te.Tensor, activation: Activation, clip: float | None) -> te.Tensor:
    """f(x + h)."""

    def element(b: Expr, j: Expr) -> Expr:
        return activate(_clipped(x[b, j] + h[b, j], clip), activation)

    return te.compute(x.shape, element, "rnn_cell")


def within(new: te.Tensor, old: te.Tensor | None, lengths: te.Tensor, step: te.Tensor, count: Dim | None) -> te.Tensor:
    """`new` for the sequences of the batch that reach this step, else `old` (zero if None).

    `step` is the iteration number; with `count`, iterations run backwards from position count - 1.
    """

    def element(b: Expr, j: Expr) -> Expr:
        position = cast(step[()], "int64") if count is None else as_expr(count) - 1 - cast(step[()], "int64")
        rest = 0.0 if old is None else old[b, j]
        return select(position < cast(lengths[b], "int64"), new[b, j], rest)

    return te.compute(new.shape, element, "within")


def stack(*parts: te.Tensor, axis: int) -> te.Tensor:
    """Tensors of one shape along a new axis."""
    shape = parts[0].shape

    def element(*i: Expr) -> Expr:
        at = (*i[:axis], *i[axis + 1 :])
        result = parts[-1][at]
        for number in range(len(parts) - 2, -1, -1):
            result = select(te.equal(i[axis], number), parts[number][at], result)
        return result

    return te.compute((*shape[:axis], len(parts), *shape[axis:]), element, "stack")


def part(x: te.Tensor, index: int) -> te.Tensor:
    """x[index] along the first axis."""
    return te.compute(x.shape[1:], lambda *i: x[(index, *i)], "part")


def gates(x: te.Tensor, first: int, count: int, size: int) -> te.Tensor:
    """Rows first * size ... (first + count) * size of the first axis."""
    shape = (as_dim(count * size), *x.shape[1:])
    return te.compute(shape, lambda *i: x[(i[0] + first * size, *i[1:])], "gates")


LSTM_CELL, GRU_CELL, RNN_CELL = Operator("lstm_cell", lstm_cell), Operator("gru_cell", gru_cell), Operator("rnn_cell", rnn_cell)
GRU_RESET, WITHIN = Operator("gru_reset", gru_reset), Operator("within", within)
STACK, PART, GATES = Operator("stack", stack), Operator("part", part), Operator("gates", gates)
