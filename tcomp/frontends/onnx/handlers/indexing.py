"""ONNX operators: gather, scatter, one-hot, top-k, and those whose result size depends on data."""

from __future__ import annotations

import numpy as np

from tcomp.frontends.onnx.context import Context, Table, attribute, axis_of, forward
from tcomp.frontends.onnx.handlers.movement import cut, reshaped
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Value
from tcomp.ops import indexing as ops
from tcomp.ops.movement import product


def _gather(ctx: Context) -> Value:
    """A constant scalar index is a slice, which costs nothing."""
    x, axis = ctx.value(0), ctx.axis(ctx.attrs["axis"])
    known, extent = ctx.known(1), x.shape[axis]
    if known is None or known.ndim or not isinstance(extent, int):
        return ctx.add(ops.GATHER, [x, ctx.value(1)], axis=axis)
    index = int(known)
    if not -extent <= index < extent:
        raise ctx.invalid(f"index {index} into an axis of extent {extent}")
    return reshaped(ctx, cut(ctx, x, axis, index % extent, 1), (*x.shape[:axis], *x.shape[axis + 1 :]))


def _one_hot(ctx: Context) -> Value:
    indices, whole = ctx.value(0), is_float(ctx.value(1).dtype)
    depth: Dim = int(ctx.require_known(1, "the depth").item()) if whole else ctx.require_dims(1, "the depth")[0]
    return ctx.add(ops.ONE_HOT, [indices, ctx.value(2)], depth=depth, axis=ctx.axis(ctx.attrs["axis"], len(indices.shape) + 1))


def _top_k(ctx: Context) -> tuple[Value, ...]:
    x, axis = ctx.value(0), ctx.axis(ctx.attrs["axis"])
    k: Dim = ctx.attrs["k"] if ctx.opset < 10 else ctx.require_dims(1, "k")[0]
    extent = x.shape[axis]
    if isinstance(k, int) and (k < 0 or (isinstance(extent, int) and k > extent)):
        raise ctx.invalid(f"k is {k}, the axis has {extent} elements")
    return ctx.add_several(ops.TOP_K, [x], k=k, axis=axis, largest=bool(ctx.attrs.get("largest", 1)))


def _compress(ctx: Context) -> Value:
    if (condition := ctx.known(1)) is None:
        return _data_dependent(ctx)
    x, axis = ctx.value(0), ctx.attrs.get("axis")
    if axis is None:
        x, axis = reshaped(ctx, x, (product(x.shape),)), 0
    positions = ctx.constant(np.flatnonzero(condition).astype(np.int64))
    return ctx.add(ops.GATHER, [x, positions], axis=ctx.axis(axis, len(x.shape)))


def _non_zero(ctx: Context) -> Value:
    known = ctx.known(0)
    return _data_dependent(ctx) if known is None else ctx.constant(np.stack(np.nonzero(np.atleast_1d(known))).astype(np.int64))


def _data_dependent(ctx: Context) -> Value:
    raise ctx.unsupported("the size of its result depends on the values of its inputs", "cut the model before this node")


def _random(ctx: Context) -> Value:
    raise ctx.unsupported("its result is random", "export the model for inference, or pass the random tensor as an input")


TABLE: Table = {
    "Gather": _gather, "OneHot": _one_hot, "TopK": _top_k, "Compress": _compress, "NonZero": _non_zero,
    "GatherElements": forward(ops.GATHER_ELEMENTS, axis=axis_of()),
    "GatherND": forward(ops.GATHER_ND, batch_dims=attribute("batch_dims", 0)),
    **dict.fromkeys(
        ("Scatter", "ScatterElements"), forward(ops.SCATTER_ELEMENTS, axis=axis_of(), reduction=attribute("reduction", "none"))
    ),
    "ScatterND": forward(ops.SCATTER_ND, reduction=attribute("reduction", "none")),
    "TensorScatter": forward(ops.TENSOR_SCATTER, inputs=3, axis=axis_of(), circular=lambda ctx: ctx.attrs["mode"] == "circular"),
    **dict.fromkeys(("Unique", "NonMaxSuppression"), _data_dependent),
    **dict.fromkeys(("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), _random),
}  # fmt: skip
