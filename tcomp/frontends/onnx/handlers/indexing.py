"""ONNX handlers of gather, scatter, one-hot and top-k, and of operators whose result size depends on data."""

from __future__ import annotations

import numpy as np

from tcomp.frontends.onnx.context import Context, Handler, Versions
from tcomp.frontends.onnx.handlers.axes import axis_of
from tcomp.frontends.onnx.handlers.movement import reshaped, sliced
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Value
from tcomp.ops import indexing as ops
from tcomp.ops.movement import product


def _gather(ctx: Context) -> Value:
    """A constant scalar index is a slice, which costs nothing."""
    x, indices = ctx.value(0), ctx.value(1)
    axis = axis_of(ctx, ctx.attrs["axis"], len(x.shape))
    known, extent = ctx.known(1), x.shape[axis]
    if known is not None and known.ndim == 0 and isinstance(extent, int):
        index = int(known)
        if not -extent <= index < extent:
            raise ctx.invalid(f"index {index} into an axis of extent {extent}")
        starts: list[Dim] = [0] * len(x.shape)
        starts[axis] = index % extent
        shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        part = sliced(ctx, x, starts, [1] * len(x.shape), shape)
        return reshaped(ctx, part, (*x.shape[:axis], *x.shape[axis + 1 :]))
    return ctx.add(ops.GATHER, [x, indices], axis=axis)


def _gather_elements(ctx: Context) -> Value:
    x = ctx.value(0)
    return ctx.add(ops.GATHER_ELEMENTS, [x, ctx.value(1)], axis=axis_of(ctx, ctx.attrs["axis"], len(x.shape)))


def _gather_nd(ctx: Context) -> Value:
    return ctx.add(ops.GATHER_ND, [ctx.value(0), ctx.value(1)], batch_dims=ctx.attrs.get("batch_dims", 0))


def _scatter_elements(ctx: Context) -> Value:
    x = ctx.value(0)
    axis = axis_of(ctx, ctx.attrs.get("axis", 0), len(x.shape))
    reduction = ctx.attrs.get("reduction", "none")
    return ctx.add(ops.SCATTER_ELEMENTS, [x, ctx.value(1), ctx.value(2)], axis=axis, reduction=reduction)


def _scatter_nd(ctx: Context) -> Value:
    reduction = ctx.attrs.get("reduction", "none")
    return ctx.add(ops.SCATTER_ND, [ctx.value(0), ctx.value(1), ctx.value(2)], reduction=reduction)


def _tensor_scatter(ctx: Context) -> Value:
    past = ctx.value(0)
    axis, circular = axis_of(ctx, ctx.attrs["axis"], len(past.shape)), ctx.attrs["mode"] == "circular"
    return ctx.add(ops.TENSOR_SCATTER, [past, ctx.value(1), ctx.input(2)], axis=axis, circular=circular)


def _one_hot(ctx: Context) -> Value:
    indices = ctx.value(0)
    if is_float(ctx.value(1).dtype):
        depth: Dim = int(ctx.require_known(1, "the depth").reshape(()))
    else:
        (depth,) = ctx.require_dims(1, "the depth")
    axis = axis_of(ctx, ctx.attrs["axis"], len(indices.shape) + 1)
    return ctx.add(ops.ONE_HOT, [indices, ctx.value(2)], depth=depth, axis=axis)


def _top_k(ctx: Context) -> tuple[Value, ...]:
    x = ctx.value(0)
    axis = axis_of(ctx, ctx.attrs["axis"], len(x.shape))
    k: Dim = ctx.attrs["k"] if ctx.opset < 10 else ctx.require_dims(1, "k")[0]
    extent = x.shape[axis]
    if isinstance(k, int) and (k < 0 or (isinstance(extent, int) and k > extent)):
        raise ctx.invalid(f"k is {k}, the axis has {extent} elements")
    return ctx.add_several(ops.TOP_K, [x], k=k, axis=axis, largest=bool(ctx.attrs.get("largest", 1)))


# ---------------------------------------------------------------- results whose size depends on data


def _compress(ctx: Context) -> Value:
    condition = ctx.known(1)
    if condition is None:
        raise _data_dependent(ctx)
    x = ctx.value(0)
    axis = ctx.attrs.get("axis")
    if axis is None:
        x, axis = reshaped(ctx, x, (product(x.shape),)), 0
    positions = ctx.constant(np.flatnonzero(condition).astype(np.int64))
    return ctx.add(ops.GATHER, [x, positions], axis=axis_of(ctx, axis, len(x.shape)))


def _non_zero(ctx: Context) -> Value:
    known = ctx.known(0)
    if known is None:
        raise _data_dependent(ctx)
    return ctx.constant(np.stack(np.nonzero(np.atleast_1d(known))).astype(np.int64))


def _refused(ctx: Context) -> Value:
    raise _data_dependent(ctx)


def _random(ctx: Context) -> Value:
    raise ctx.unsupported("its result is random", "export the model for inference, or pass the random tensor as an input")


def _data_dependent(ctx: Context) -> Exception:
    return ctx.unsupported("the size of its result depends on the values of its inputs", "cut the model before this node")


def _all(handler: Handler, *names: str) -> dict[str, Versions]:
    return {name: ((1, handler),) for name in names}


TABLE: dict[str, Versions] = {
    "Gather": ((1, _gather),),
    "GatherElements": ((11, _gather_elements),),
    "GatherND": ((11, _gather_nd),),
    "Scatter": ((9, _scatter_elements),),
    "ScatterElements": ((11, _scatter_elements),),
    "ScatterND": ((11, _scatter_nd),),
    "TensorScatter": ((24, _tensor_scatter),),
    "OneHot": ((9, _one_hot),),
    "TopK": ((1, _top_k),),
    "Compress": ((9, _compress),),
    "NonZero": ((9, _non_zero),),
    **_all(_refused, "Unique", "NonMaxSuppression"),
    **_all(_random, "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
}
