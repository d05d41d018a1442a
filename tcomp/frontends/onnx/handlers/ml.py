"""ONNX operators of `ai.onnx.ml` but tree ensembles and support vectors: features, encoders, linear models; and what classifiers share.

What ONNX leaves open is as in ONNX Runtime, with which converters are tested. Maps do not exist here: ZipMap gives the tensor of scores,
one column for each class in the order of its labels, which is what skl2onnx makes with `options={"zipmap": False}`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tcomp.errors import UnsupportedError
from tcomp.frontends.onnx.context import Context, Table
from tcomp.frontends.onnx.handlers.movement import padded, reshaped
from tcomp.ir.dtypes import is_float, to_numpy
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise as ew, ml as ops, movement as mv, reduction as red
from tcomp.ops.matmul import MATMUL

TRANSFORMS: Mapping[str, tuple[Operator | None, Mapping[str, object]]] = {  # in the order of their numbers in TreeEnsemble
    "NONE": (None, {}), "SOFTMAX": (red.SOFTMAX, {"axes": (1,)}), "LOGISTIC": (ew.SIGMOID, {}),
    "SOFTMAX_ZERO": (ops.SOFTMAX_ZERO, {}), "PROBIT": (ops.PROBIT, {}),
}  # fmt: skip
STRINGS = "train or convert it with integers instead: sklearn.preprocessing.LabelEncoder maps labels"


def no_strings(ctx: Context, what: str) -> UnsupportedError:
    """The error to raise for what maps to or from strings."""
    return ctx.unsupported(f"{what} are strings, which machine code has not", STRINGS)


def matrix(ctx: Context, dtype: str = "float32", i: int = 0) -> Value:
    """Input `i` as rows of features; a vector is one row."""
    x = ctx.value(i)
    if len(x.shape) not in (1, 2):
        raise ctx.invalid(f"the input has {len(x.shape)} dimensions, not rows of features")
    x = reshaped(ctx, x, (1, *x.shape)) if len(x.shape) == 1 else x
    return x if x.dtype == dtype else ctx.add(ew.CAST, [x], dtype=dtype)


def array(ctx: Context, name: str, dtype: str, *shape: int) -> Value:
    """An attribute as a constant of this shape, in which -1 is what is left."""
    values = np.asarray(ctx.attrs.get(name, ()), to_numpy(dtype))
    rest = -int(np.prod(shape))
    if rest <= 0 and values.size != -rest or rest > 0 and (values.size == 0 or values.size % rest):
        raise ctx.invalid(f"attribute `{name}` has {values.size} elements, which do not fill the shape {list(shape)}")
    return ctx.constant(values.reshape(shape))


def transformed(ctx: Context, scores: Value, name: str | None = None) -> Value:
    """Scores under the `post_transform`."""
    name = ctx.attrs["post_transform"] if name is None else name
    if name not in TRANSFORMS:
        raise ctx.invalid(f"unknown post_transform `{name}`")
    op, attrs = TRANSFORMS[name]
    return scores if op is None else ctx.add(op, [scores], **attrs)


def both_classes(ctx: Context, score: Value, complement: bool) -> Value:
    """The scores of two classes from that of the second one, s: -s under LOGISTIC and if not `complement`, else 1 - s, and s."""
    transform = ctx.attrs["post_transform"]
    one = float(complement and transform != "LOGISTIC")
    other = ctx.add(ew.SUB, [ctx.constant(one, score.dtype), score])
    both = ctx.add(mv.CONCAT, [other, score], axis=1)
    return transformed(ctx, both) if transform in ("LOGISTIC", "PROBIT") else both


def class_count(ctx: Context) -> int:
    """The number of classes that a classifier names."""
    return max((len(labels) for name, labels in ctx.attrs.items() if name.startswith("classlabels_")), default=0)


def labelled(ctx: Context, index: Value) -> Value:
    """The labels of classes [rows], given their numbers."""
    if ctx.attrs.get("classlabels_strings"):
        raise no_strings(ctx, "the labels of the classes")
    labels = ctx.attrs.get("classlabels_ints") or ctx.attrs["classlabels_int64s"]
    return ctx.add(mv.GATHER, [ctx.constant(np.asarray(labels, np.int64)), index], axis=0)


def largest(ctx: Context, scores: Value) -> Value:
    """The number of the class with the largest score, the first one of several."""
    return ctx.add(red.ARG_MAX, [scores], axis=1, keepdims=False, last=False)


def decided(ctx: Context, scores: Value, threshold: float = 0.0, complement: bool = True) -> tuple[Value, Value]:
    """(labels, transformed scores). A single score is that of the second class of two, which is taken where it is above the threshold."""
    if scores.shape[1] != 1:
        return labelled(ctx, largest(ctx, scores)), transformed(ctx, scores)
    above = ctx.add(ew.GREATER, [reshaped(ctx, scores, scores.shape[:1]), ctx.constant(threshold, scores.dtype)])
    number = ctx.add(ew.CAST, [above], dtype="int64")
    if class_count(ctx) != 2:
        return number, transformed(ctx, scores)
    return labelled(ctx, number), both_classes(ctx, scores, complement)


# ---------------------------------------------------------------- features


def _scaler(ctx: Context) -> Value:
    """(x - offset) * scale, in float32."""
    x = ctx.add(ew.CAST, [ctx.value(0)], dtype="float32")
    for name, op in (("offset", ew.SUB), ("scale", ew.MUL)):
        if name in ctx.attrs:
            x = ctx.add(op, [x, _by_column(ctx, x, name)])
    return x


def _by_column(ctx: Context, x: Value, name: str) -> Value:
    """An attribute of one value for all columns of `x`, or one for each."""
    values = np.asarray(ctx.attrs[name])
    width = x.shape[-1] if x.shape else 1
    if values.size not in (1, width):
        raise ctx.invalid(f"attribute `{name}` has {values.size} elements, the input {width} columns")
    return ctx.constant(values, x.dtype)


def _normalizer(ctx: Context) -> Value:
    """Rows divided by their maximum, the sum of absolute values, or the root of the sum of squares; rows of which that is 0 stay."""
    x = ctx.add(ew.CAST, [ctx.value(0)], dtype="float32")
    norms = {"MAX": red.REDUCE_MAX, "L1": red.REDUCE_L1, "L2": red.REDUCE_L2}
    if ctx.attrs["norm"] not in norms or not x.shape:
        raise ctx.invalid(f"norm `{ctx.attrs['norm']}` of a tensor of rank {len(x.shape)}")
    norm = ctx.add(norms[ctx.attrs["norm"]], [x], axes=(min(1, len(x.shape) - 1),), keepdims=True)
    none = ctx.add(ew.EQUAL, [norm, ctx.constant(0.0, "float32")])
    return ctx.add(ew.DIV, [x, ctx.add(ew.WHERE, [none, ctx.constant(1.0, "float32"), norm])])


def _binarizer(ctx: Context) -> Value:
    x = ctx.value(0)
    wide = x if is_float(x.dtype) else ctx.add(ew.CAST, [x], dtype="float64")
    return ctx.add(ew.CAST, [ctx.add(ew.GREATER, [wide, ctx.constant(ctx.attrs["threshold"], wide.dtype)])], dtype=x.dtype)


def _imputer(ctx: Context) -> Value:
    x = ctx.value(0)
    kind = ("imputed_value_floats", "replaced_value_float") if is_float(x.dtype) else ("imputed_value_int64s", "replaced_value_int64")
    if kind[0] not in ctx.attrs:
        raise ctx.invalid(f"attribute `{kind[0]}` is missing for an input of {x.dtype}")
    replaced = ctx.attrs[kind[1]]
    found = ctx.add(ew.ISNAN, [x]) if np.isnan(replaced) else ctx.add(ew.EQUAL, [x, ctx.constant(replaced, x.dtype)])
    return ctx.add(ew.WHERE, [found, _by_column(ctx, x, kind[0]), x])


def _array_feature_extractor(ctx: Context) -> Value:
    """Columns; those of a vector are a row."""
    x, y = ctx.value(0), ctx.value(1)
    x = reshaped(ctx, x, (1, *x.shape)) if len(x.shape) == 1 else x
    return ctx.add(mv.GATHER, [x, reshaped(ctx, y, (mv.product(y.shape),))], axis=len(x.shape) - 1)


def _feature_vectorizer(ctx: Context) -> Value:
    """Inputs side by side as float32, each cut, or filled up by zeros, to its declared width."""
    widths = ctx.attrs.get("inputdimensions", ())
    if len(widths) != len(ctx.inputs):
        raise ctx.invalid(f"{len(widths)} widths are given for {len(ctx.inputs)} inputs")
    parts = [matrix(ctx, "float32", n) for n in range(len(widths))]
    if symbolic := [n for n, x in enumerate(parts) if not isinstance(x.shape[1], int)]:
        raise ctx.unsupported(f"input {symbolic[0]} is not a matrix of known width")
    parts = [padded(ctx, x, (0, 0), (0, width - int(x.shape[1]))) for x, width in zip(parts, widths, strict=True)]
    return ctx.add(mv.CONCAT, parts, axis=1)


# ---------------------------------------------------------------- encoders


def _one_hot_encoder(ctx: Context) -> Value:
    if not ctx.attrs.get("cats_int64s"):
        raise no_strings(ctx, "its categories") if ctx.attrs.get("cats_strings") else ctx.invalid("it has no categories")
    keys, first = np.asarray(ctx.attrs["cats_int64s"], np.int64), ctx.add(ew.CAST, [ctx.value(0)], dtype="int64")
    return ctx.add(ops.ONE_HOT_OF, [first, ctx.constant(keys)], required=not ctx.attrs["zeros"])


def _label_encoder(ctx: Context) -> Value:
    """The value of the first key that equals an element, or the default."""
    x, found = ctx.value(0), {}
    kinds = {"tensor": None, "int64s": np.int64, "floats": np.float32, "strings": None}
    for side in ("keys", "values"):
        given = [kind for kind in kinds if f"{side}_{kind}" in ctx.attrs]
        if len(given) != 1:
            raise ctx.invalid(f"{len(given)} attributes give its {side}")
        if given == ["strings"]:
            raise no_strings(ctx, f"its {side}")
        found[side] = np.asarray(ctx.attrs[f"{side}_{given[0]}"], kinds[given[0]]).ravel()
    keys, values = found["keys"], found["values"]
    if not keys.size or keys.size != values.size or keys.dtype.name != x.dtype:
        raise ctx.invalid(f"{keys.size} keys ({keys.dtype}) and {values.size} values are given for an input of {x.dtype}")
    default = ctx.attrs.get("default_tensor", ctx.attrs["default_float" if is_float(values.dtype.name) else "default_int64"])
    keys, at = np.unique(keys, return_index=True)  # the first of equal ones; NaN is last
    missing = values[at[-1]] if np.isnan(keys[-1]) else default
    count = max(keys.size - int(np.isnan(keys[-1])), 1)
    scalars = [ctx.constant(np.asarray(s).reshape(-1)[0], values.dtype.name) for s in (default, missing)]
    return ctx.add(ops.LOOK_UP, [x, ctx.constant(keys[:count]), ctx.constant(values[at[:count]]), *scalars])


def _of_strings(ctx: Context) -> Value:
    raise no_strings(ctx, "its keys or values")


# ---------------------------------------------------------------- linear models


def affine(ctx: Context, x: Value, weights: Value, bias: Value) -> Value:
    """x weights^T + bias."""
    if x.shape[1] != weights.shape[1]:
        raise ctx.invalid(f"the input has {x.shape[1]} features, the model {weights.shape[1]}")
    return ctx.add(ew.ADD, [ctx.add(MATMUL, [x, weights], transpose_b=True), bias])


def _linear(ctx: Context, count: int) -> Value:
    """`count` scores: x coefficients^T + intercepts."""
    intercepts = array(ctx, "intercepts", "float32", count) if ctx.attrs.get("intercepts") else ctx.constant(0.0, "float32")
    return affine(ctx, matrix(ctx), array(ctx, "coefficients", "float32", count, -1), intercepts)


TABLE: Table = {
    "Scaler": _scaler, "Normalizer": _normalizer, "Binarizer": _binarizer, "Imputer": _imputer,
    "ArrayFeatureExtractor": _array_feature_extractor, "FeatureVectorizer": _feature_vectorizer,
    "OneHotEncoder": _one_hot_encoder, "LabelEncoder": ((1, _of_strings), (2, _label_encoder)), "CategoryMapper": _of_strings,
    "ZipMap": lambda ctx: ctx.value(0),
    "LinearRegressor": lambda ctx: transformed(ctx, _linear(ctx, ctx.attrs["targets"])),
    "LinearClassifier": lambda ctx: decided(ctx, _linear(ctx, len(ctx.attrs.get("intercepts", ())) or max(class_count(ctx), 1))),
}  # fmt: skip
