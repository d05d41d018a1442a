"""Other operators: the standard's under older names and with other attributes, transforms of complex numbers, crops, inverses."""

from __future__ import annotations

from tcomp.frontends.onnx.context import Context, Table, forward
from tcomp.frontends.onnx.handlers import counting, image, movement, signal
from tcomp.frontends.onnx.handlers.microsoft.common import applied, cast, complex_product, halves, known, standard
from tcomp.frontends.onnx.handlers.movement import reshaped
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew
from tcomp.ops.image import CROP_AND_RESIZE
from tcomp.ops.matmul import INVERSE
from tcomp.ops.ml import SQUARED_DISTANCES


def _complex_product(ctx: Context) -> Value:
    """Products of complex numbers [..., 2], of which ComplexMulConj conjugates the second one."""
    if any(v is None or not v.shape or v.shape[-1] != 2 for v in ctx.inputs):
        raise ctx.invalid("the last axis must hold a real and an imaginary part")
    real, imaginary = halves(ctx, ctx.value(1))
    imaginary = ctx.add(ew.NEG, [imaginary]) if ctx.op_type == "ComplexMulConj" else imaginary
    return complex_product(ctx, ctx.value(0), real, imaginary)


def _range(ctx: Context) -> Value:
    """The step is 1 where it is left out."""
    step = ctx.input(2) or ctx.constant(1, ctx.value(0).dtype)
    scalars = [reshaped(ctx, v, ()) for v in (ctx.value(0), ctx.value(1), step)]
    return applied(ctx, standard(movement.TABLE, "Range", 11), scalars)


def _distances(ctx: Context) -> Value:
    """(Squared) Euclidean distances of the rows of two matrices [m, n], [k, n] -> [m, k]."""
    if (metric := ctx.attrs["metric"]) not in ("sqeuclidean", "euclidean"):
        raise ctx.unsupported(f"the metric `{metric}`; ONNX Runtime has sqeuclidean and euclidean")
    y = ctx.add(SQUARED_DISTANCES, ctx.inputs)
    return y if metric == "sqeuclidean" else ctx.add(ew.SQRT, [y])


def _crop_and_resize(ctx: Context) -> Value:
    height, width = (known(ctx, d, "a crop") for d in ctx.require_dims(3, "the size"))
    if (mode := ctx.attrs["mode"]) not in ("bilinear", "nearest"):
        raise ctx.invalid(f"unknown mode `{mode}`")
    attrs = {"size": (height, width), "mode": mode, "outside": float(ctx.attrs["extrapolation_value"])}
    return ctx.add(CROP_AND_RESIZE, [ctx.value(i) for i in range(3)], **attrs)


def _fourier(ctx: Context) -> Value:
    """Transforms over the last `signal_ndim` axes: of real numbers to half of the spectrum [..., 2], and (Irfft) back."""
    x, count, inverse = ctx.value(0), ctx.attrs["signal_ndim"], ctx.op_type == "Irfft"
    if not ctx.attrs["onesided"] or ctx.attrs["normalized"]:
        raise ctx.unsupported("only one-sided transforms without normalisation are known, as in ONNX Runtime")
    if not 1 <= count <= len(x.shape) - inverse or (inverse and x.shape[-1] != 2):
        raise ctx.invalid(f"a transform over {count} axes of {x}")
    y = cast(ctx, x if inverse else reshaped(ctx, x, (*x.shape, 1)), "float64" if x.dtype == "float64" else "float32")
    last = len(y.shape) - 2
    others = range(last - count + 1, last)
    for axis in (*others, last) if inverse else (last, *others):
        size, half = known(ctx, y.shape[axis], "a transformed axis"), axis == last
        y = signal.transform(ctx, y, axis, 2 * (size - 1) if inverse and half else size, inverse, half)
    return cast(ctx, reshaped(ctx, y, y.shape[:-1]) if inverse else y, x.dtype)


def _unique(ctx: Context) -> tuple[Value | None, ...]:
    """(different elements in the order in which they come, the number of each of all, how often each stands there)."""
    result = standard(counting.TABLE, "Unique", 11, sorted=0)(ctx)
    assert isinstance(result, tuple)
    return result[0], result[2], result[3]


TABLE: Table = {
    "Trilu": standard(movement.TABLE, "Trilu", 14), "Pad": standard(movement.TABLE, "Pad", 13),
    "GatherND": standard(movement.TABLE, "GatherND", 13), "GridSample": standard(image.TABLE, "GridSample", 16),
    "Unique": _unique,
    "ExpandDims": standard(movement.TABLE, "Unsqueeze", 13), "Range": _range, "CDist": _distances, "CropAndResize": _crop_and_resize,
    **dict.fromkeys(("ComplexMul", "ComplexMulConj"), _complex_product), **dict.fromkeys(("Rfft", "Irfft"), _fourier),
    "Inverse": forward(INVERSE),
}  # fmt: skip
