"""Which handler imports which ONNX operator: the families' tables, put together."""

from __future__ import annotations

from tcomp.frontends.onnx.context import Handler, Versions
from tcomp.frontends.onnx.handlers import (
    control,
    elementwise,
    image,
    indexing,
    loss,
    matmul,
    movement,
    nn,
    quantization,
    recurrent,
    reduction,
    shape,
    signal,
)

FAMILIES: tuple[dict[str, Versions], ...] = (
    control.TABLE, elementwise.TABLE, image.TABLE, indexing.TABLE, loss.TABLE, matmul.TABLE, movement.TABLE, nn.TABLE,
    quantization.TABLE, recurrent.TABLE, reduction.TABLE, shape.TABLE, signal.TABLE,
)  # fmt: skip

HANDLERS: dict[str, dict[str, Versions]] = {"": {op: versions for family in FAMILIES for op, versions in family.items()}}


def find(domain: str, op_type: str, opset: int) -> Handler | None:
    """The handler in force at an opset; None where there is none. The standard domain is ""."""
    found = None
    for since, handler in HANDLERS.get(domain, {}).get(op_type, ()):
        if since <= opset:
            found = handler
    return found
