"""The elementwise parts of recurrent cells. Matrix products stand outside, so that schedules see them as such.

Gate pre-activations are (batch, gates * hidden): the input's part `x` (biases included) and the state's part `h`. `activations` lists
(name, alpha, beta), one for each non-linearity of the cell, in ONNX's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, as_expr, cast, maximum, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor
from tcomp.ops.elementwise import clip as clip_to, elu, hard_sigmoid, leaky_relu, pick, softplus

Activation = tuple[str, float, float]
Activations = Sequence[Activation]

ACTIVATIONS: dict[str, Callable[[Expr, float, float], Expr]] = {  # by the ONNX name in lower case: function(x, alpha, beta)
    "sigmoid": lambda x, alpha, beta: te.sigmoid(x),
    "tanh": lambda x, alpha, beta: te.tanh(x),
    "relu": lambda x, alpha, beta: maximum(x, 0),
    "affine": lambda x, alpha, beta: x * alpha + beta,
    "leakyrelu": lambda x, alpha, beta: leaky_relu(x, alpha),
    "thresholdedrelu": lambda x, alpha, beta: select(x >= alpha, x, 0),
    "scaledtanh": lambda x, alpha, beta: te.tanh(x * beta) * alpha,
    "hardsigmoid": hard_sigmoid,
    "elu": lambda x, alpha, beta: elu(x, alpha),
    "softsign": lambda x, alpha, beta: x / (1.0 + te.abs(x)),
    "softplus": lambda x, alpha, beta: softplus(x),
}


def _activate(x: Expr, activation: Activation, limit: float | None = None) -> Expr:
    """A non-linearity of x within [-limit, limit]."""
    name, alpha, beta = activation
    return ACTIVATIONS[name](x if limit is None else clip_to(x, -limit, limit), alpha, beta)


def _hidden(x: Tensor, gates: int) -> int:
    width = x.shape[-1]
    if not isinstance(width, int) or width % gates:
        raise IRError(f"{width} pre-activations do not divide into {gates} gates")
    return width // gates


def lstm_cell(
    x: Tensor, h: Tensor, c: Tensor, peephole: Tensor | None, activations: Activations, clip: float | None, input_forget: bool
) -> tuple[Tensor, Tensor]:
    """(hidden, cell) after one step; gates in the order input, output, forget, cell. `peephole` is (3 * hidden) in order i, o, f."""
    size = _hidden(x, 4)
    f, g, last = activations

    def gate(b: Expr, j: Expr, number: int, function: Activation, state: Expr | None = None) -> Expr:
        value = x[b, j + number * size] + h[b, j + number * size]
        if peephole is not None and state is not None:
            value = value + peephole[j + number * size] * state
        return _activate(value, function, clip)

    def cell(b: Expr, j: Expr) -> Expr:
        entry = gate(b, j, 0, f, c[b, j])
        forget = 1.0 - entry if input_forget else gate(b, j, 2, f, c[b, j])
        return forget * c[b, j] + entry * gate(b, j, 3, g)

    new = te.compute(c.shape, cell, "lstm_cell")
    return te.compute(c.shape, lambda b, j: gate(b, j, 1, f, new[b, j]) * _activate(new[b, j], last), "lstm_hidden"), new


def gru_reset(x: Tensor, h: Tensor, state: Tensor, activation: Activation, clip: float | None) -> Tensor:
    """The state damped by the reset gate, r * state; `h` holds the state's part of gates update and reset."""
    size = _hidden(x, 3)
    return te.compute(state.shape, lambda b, j: _activate(x[b, j + size] + h[b, j + size], activation, clip) * state[b, j], "gru_reset")


def gru_cell(
    x: Tensor, h: Tensor, candidate: Tensor | None, bias: Tensor | None, state: Tensor, activations: Activations, clip: float | None
) -> Tensor:
    """The state after one step; gates in the order update, reset, candidate.

    With `candidate` (the damped state times the candidate's weights) `h` holds two gates. Without it the reset gate damps the
    product instead of the state: `h` holds three gates, and `bias` (or None) belongs to the product of the candidate.
    """
    size = _hidden(x, 3)
    f, g = activations

    def element(b: Expr, j: Expr) -> Expr:
        update = _activate(x[b, j] + h[b, j], f, clip)
        if candidate is not None:
            inner = candidate[b, j]
        else:
            product = h[b, j + 2 * size] if bias is None else h[b, j + 2 * size] + bias[j]
            inner = _activate(x[b, j + size] + h[b, j + size], f, clip) * product
        return (1.0 - update) * _activate(x[b, j + 2 * size] + inner, g, clip) + update * state[b, j]

    return te.compute(state.shape, element, "gru_cell")


def rnn_cell(x: Tensor, h: Tensor, activation: Activation, clip: float | None) -> Tensor:
    """f(x + h)."""
    return te.compute(x.shape, lambda b, j: _activate(x[b, j] + h[b, j], activation, clip), "rnn_cell")


def within(new: Tensor, old: Tensor | None, lengths: Tensor, step: Tensor, count: Dim | None) -> Tensor:
    """`new` for the sequences of the batch that reach this step, else `old` (zero if None). `step` is the iteration number; with `count`,
    iterations run backwards from position count - 1."""

    def element(b: Expr, j: Expr) -> Expr:
        number = cast(step[()], "int64")
        position = number if count is None else as_expr(count) - 1 - number
        return select(position < cast(lengths[b], "int64"), new[b, j], 0.0 if old is None else old[b, j])

    return te.compute(new.shape, element, "within")


def stack(*parts: Tensor, axis: int) -> Tensor:
    """Tensors of one shape along a new axis."""
    shape = (*parts[0].shape[:axis], len(parts), *parts[0].shape[axis:])
    return te.compute(shape, lambda *i: pick(i[axis], [p[(*i[:axis], *i[axis + 1 :])] for p in parts]), "stack")


def part(x: Tensor, index: int) -> Tensor:
    """x[index] along the first axis."""
    return te.compute(x.shape[1:], lambda *i: x[(index, *i)], "part")


LSTM_CELL, GRU_CELL, RNN_CELL = Operator("lstm_cell", lstm_cell), Operator("gru_cell", gru_cell), Operator("rnn_cell", rnn_cell)
GRU_RESET, WITHIN = Operator("gru_reset", gru_reset), Operator("within", within)
STACK, PART = Operator("stack", stack), Operator("part", part)
