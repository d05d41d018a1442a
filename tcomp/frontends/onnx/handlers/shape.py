"""ONNX operators: constants, and sizes as values."""

from __future__ import annotations

import numpy as np

from tcomp.frontends.onnx.context import Context, Versions
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import as_dim, as_expr
from tcomp.ir.graph import Value
from tcomp.ops.elementwise import FULL


def constant(ctx: Context) -> Value:
    """ONNX Constant."""
    for name, dtype in (("value", None), ("sparse_value", None), ("value_int", "int64"), ("value_ints", "int64"),
                        ("value_float", "float32"), ("value_floats", "float32")):  # fmt: skip
        if name in ctx.attrs:
            return ctx.constant(np.asarray(ctx.attrs[name], dtype))
    if ctx.attrs:
        raise ctx.unsupported(f"constants of strings are not supported (attribute `{next(iter(ctx.attrs))}`)")
    raise ctx.invalid("it has no value")


def constant_of_shape(ctx: Context) -> Value:
    """ONNX ConstantOfShape."""
    shape = ctx.require_dims(0, "the shape")
    if len(ctx.value(0).shape) != 1:
        raise ctx.invalid("the shape is not a vector")
    filling = np.asarray(ctx.attrs.get("value", np.zeros(1, np.float32)))
    if filling.size != 1:
        raise ctx.invalid(f"attribute `value` has {filling.size} elements")
    dtype = filling.dtype.name
    value = float(filling.reshape(())) if is_float(dtype) else filling.reshape(()).item()
    return ctx.add(FULL, [], shape=shape, value=value, dtype=dtype)


def shape(ctx: Context) -> Value:
    """ONNX Shape."""
    dims = ctx.value(0).shape
    return ctx.dims_value(dims[slice(ctx.attrs.get("start", 0), ctx.attrs.get("end"))])


def size(ctx: Context) -> Value:
    """ONNX Size."""
    total = as_expr(1)
    for d in ctx.value(0).shape:
        total = total * d
    return ctx.dims_value([as_dim(total)], shape=())


def identity(ctx: Context) -> Value:
    """ONNX Identity."""
    return ctx.value(0)


TABLE: dict[str, Versions] = {
    "Constant": ((1, constant),),
    "ConstantOfShape": ((9, constant_of_shape),),
    "Identity": ((1, identity),),
    "Shape": ((1, shape),),
    "Size": ((1, size),),
}
