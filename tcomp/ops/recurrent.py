"""The elementwise parts of recurrent cells. Matrix products stand outside, so that schedules see them as such.

Gate pre-activations are (batch, gates * hidden): the input's part `x` (biases included) and the state's part `h`. `activations` lists
(name, alpha, beta), one for each non-linearity of the cell, in ONNX's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, as_expr, cast, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor
from tcomp.ops.elementwise import elu, hard_sigmoid, leaky_relu, pick, softplus

Activation = tuple[str, float, float]

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


def _activate(x: Expr, activation: Activation) -> Expr:
    name, alpha, beta = activation
    return ACTIVATIONS[name](x, alpha, beta)


def _clipped(x: Expr, clip: float | None) -> Expr:
    return x if clip is None else minimum(maximum(x, -clip), clip)


def _hidden(x: Tensor, gates: int) -> int:
    width = x.shape[-1]
    if not isinstance(width, int) or width % gates:
        raise IRError(f"{width} pre-activations do not divide into {gates} gates")
    return width // gates


def lstm_cell(
    x: Tensor, h: Tensor, c: Tensor, peephole: Tensor | None, activations: Sequence[Activation], clip: float | None, input_forget: bool
) -> tuple[Tensor, Tensor]:
    """(hidden, cell) after one step; gates in the order input, output, forget, cell. `peephole` is (3 * hidden) in order i, o, f."""
    size = _hidden(x, 4)
    f, g, last = activations

    def gate(b: Expr, j: Expr, number: int, state: Expr | None, peep: int) -> Expr:
        value = x[b, j + number * size] + h[b, j + number * size]
        if peephole is not None and state is not None:
            value = value + peephole[j + peep * size] * state
        return _clipped(value, clip)

    def cell(b: Expr, j: Expr) -> Expr:
        entry = _activate(gate(b, j, 0, c[b, j], 0), f)
        forget = 1.0 - entry if input_forget else _activate(gate(b, j, 2, c[b, j], 2), f)
        return forget * c[b, j] + entry * _activate(gate(b, j, 3, None, 0), g)

    new = te.compute(c.shape, cell, "lstm_cell")

    def hidden(b: Expr, j: Expr) -> Expr:
        return _activate(gate(b, j, 1, new[b, j], 1), f) * _activate(new[b, j], last)

    return te.compute(c.shape, hidden, "lstm_hidden"), new


def gru_reset(x: Tensor, h: Tensor, state: Tensor, activation: Activation, clip: float | None) -> Tensor:
    """The state damped by the reset gate, r * state; `h` holds the state's part of gates update and reset."""
    size = _hidden(x, 3)
    return te.compute(
        state.shape, lambda b, j: _activate(_clipped(x[b, j + size] + h[b, j + size], clip), activation) * state[b, j], "gru_reset"
    )


def gru_cell(
    x: Tensor,
    h: Tensor,
    candidate: Tensor | None,
    bias: Tensor | None,
    state: Tensor,
    activations: Sequence[Activation],
    clip: float | None,
) -> Tensor:
    """The state after one step; gates in the order update, reset, candidate.

    With `candidate` (the damped state times the candidate's weights) `h` holds two gates. Without it the reset gate damps the
    product instead of the state: `h` holds three gates, and `bias` (or None) belongs to the product of the candidate.
    """
    size = _hidden(x, 3)
    f, g = activations

    def element(b: Expr, j: Expr) -> Expr:
        update = _activate(_clipped(x[b, j] + h[b, j], clip), f)
        if candidate is not None:
            inner = candidate[b, j]
        else:
            inner = h[b, j + 2 * size] if bias is None else h[b, j + 2 * size] + bias[j]
            inner = _activate(_clipped(x[b, j + size] + h[b, j + size], clip), f) * inner
        new = _activate(_clipped(x[b, j + 2 * size] + inner, clip), g)
        return (1.0 - update) * new + update * state[b, j]

    return te.compute(state.shape, element, "gru_cell")


def rnn_cell(x: Tensor, h: Tensor, activation: Activation, clip: float | None) -> Tensor:
    """f(x + h)."""
    return te.compute(x.shape, lambda b, j: _activate(_clipped(x[b, j] + h[b, j], clip), activation), "rnn_cell")


def within(new: Tensor, old: Tensor | None, lengths: Tensor, step: Tensor, count: Dim | None) -> Tensor:
    """`new` for the sequences of the batch that reach this step, else `old` (zero if None).

    `step` is the iteration number; with `count`, iterations run backwards from position count - 1.
    """

    def element(b: Expr, j: Expr) -> Expr:
        position = cast(step[()], "int64") if count is None else as_expr(count) - 1 - cast(step[()], "int64")
        return select(position < cast(lengths[b], "int64"), new[b, j], 0.0 if old is None else old[b, j])

    return te.compute(new.shape, element, "within")


def stack(*parts: Tensor, axis: int) -> Tensor:
    """Tensors of one shape along a new axis."""
    shape = parts[0].shape
    return te.compute(
        (*shape[:axis], len(parts), *shape[axis:]), lambda *i: pick(i[axis], [p[(*i[:axis], *i[axis + 1 :])] for p in parts]), "stack"
    )


def part(x: Tensor, index: int) -> Tensor:
    """x[index] along the first axis."""
    return te.compute(x.shape[1:], lambda *i: x[(index, *i)], "part")


def gates(x: Tensor, first: int, count: int, size: int) -> Tensor:
    """Rows first * size ... (first + count) * size of the first axis."""
    return te.compute((count * size, *x.shape[1:]), lambda *i: x[(i[0] + first * size, *i[1:])], "gates")


LSTM_CELL, GRU_CELL, RNN_CELL = Operator("lstm_cell", lstm_cell), Operator("gru_cell", gru_cell), Operator("rnn_cell", rnn_cell)
GRU_RESET, WITHIN = Operator("gru_reset", gru_reset), Operator("within", within)
STACK, PART, GATES = Operator("stack", stack), Operator("part", part), Operator("gates", gates)
