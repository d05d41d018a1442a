"""Operators, written once: functions from TE tensors to TE tensors, one family a file."""

from tcomp.ir.graph import STRUCTURAL, Operator
from tcomp.ops import (
    bilinear,
    counting,
    elementwise,
    expression,
    image,
    matmul,
    ml,
    movement,
    nn,
    quantization,
    random,
    recurrent,
    reduction,
    signal,
    special,
    stored_weights,
    text,
    training,
    trees,
    xla,
)

_FAMILIES = (
    bilinear, counting, elementwise, expression, image, matmul, ml, movement, nn,
    quantization, random, recurrent, reduction, signal, special, stored_weights, text, training, trees, xla,
)  # fmt: skip

OPERATORS: dict[str, Operator] = {
    op.name: op for op in (*STRUCTURAL, *(op for family in _FAMILIES for op in vars(family).values() if isinstance(op, Operator)))
}
"""Every operator by name: what printed graphs refer to."""
