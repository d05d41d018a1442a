"""Which handler imports which ONNX operator: the families' tables, put together."""

from __future__ import annotations

from tcomp.frontends.onnx.context import Handler, Table
from tcomp.frontends.onnx.handlers import control, elementwise, image, indexing, movement, nn, quantization, recurrent, reduction, signal

FAMILIES: tuple[Table, ...] = tuple(
    f.TABLE for f in (control, elementwise, image, indexing, movement, nn, quantization, recurrent, reduction, signal)
)
HANDLERS: Table = {op: versions for family in FAMILIES for op, versions in family.items()}


def find(domain: str, op_type: str, opset: int) -> Handler | None:
    """The handler in force at an opset; None where there is none. The standard domain is ""."""
    versions = HANDLERS.get(op_type, ()) if domain == "" else ()
    if callable(versions):
        return versions
    return next((handler for since, handler in reversed(versions) if since <= opset), None)
