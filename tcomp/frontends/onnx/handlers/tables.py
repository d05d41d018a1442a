"""The handlers of all ONNX operators that are supported, by domain, operator and opset."""

from __future__ import annotations

from collections.abc import Mapping

from tcomp.frontends.onnx.context import Handler, Table, in_force
from tcomp.frontends.onnx.handlers import (
    arithmetic,
    control,
    counting,
    image,
    ml,
    movement,
    nn,
    random,
    recurrent,
    sequences,
    signal,
    svm,
    text,
    training,
    trees,
)
from tcomp.frontends.onnx.handlers.microsoft import attention, experts, fused, misc, quantized

FAMILIES: Mapping[str, tuple[Table, ...]] = {  # by domain; the standard one is ""
    "": tuple(family.TABLE for family in (arithmetic, control, counting, image, movement, nn, random, recurrent, sequences, signal, text)),
    "ai.onnx.ml": (ml.TABLE, svm.TABLE, trees.TABLE),
    "com.microsoft": tuple(family.TABLE for family in (fused, attention, quantized, experts, misc)),
    "ai.onnx.preview.training": (training.TABLE,),
}
HANDLERS: Mapping[str, Table] = {
    domain: {op: versions for table in tables for op, versions in table.items()} for domain, tables in FAMILIES.items()
}


def find_handler(domain: str, op_type: str, opset: int) -> Handler | None:
    """The handler in force at an opset; None where there is none. The standard domain is ""."""
    return in_force(HANDLERS.get(domain, {}).get(op_type, ()), opset)
