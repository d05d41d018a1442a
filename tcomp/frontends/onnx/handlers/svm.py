"""ONNX operators of `ai.onnx.ml`: support vector machines, as libsvm and ONNX Runtime define them."""

from __future__ import annotations

import numpy as np

from tcomp.frontends.onnx.context import Context, Table
from tcomp.frontends.onnx.handlers.ml import affine, array, both_classes, class_count, decided, labelled, largest, matrix, transformed
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew, ml as ops
from tcomp.ops.matmul import MATMUL


def _kernel(ctx: Context, x: Value, vectors: int) -> Value:
    """[rows, vectors]: the kernel of each row and each support vector."""
    support = array(ctx, "support_vectors", "float32", vectors, -1)
    kind, (gamma, offset, degree) = ctx.attrs["kernel_type"], (*ctx.attrs.get("kernel_params", ()), 0.0, 0.0, 0.0)[:3]
    if x.shape[1] != support.shape[1]:
        raise ctx.invalid(f"the input has {x.shape[1]} features, the support vectors {support.shape[1]}")
    if kind == "RBF":
        distance = ctx.add(ops.SQUARED_DISTANCES, [x, support])
        return ctx.add(ew.EXP, [ctx.add(ew.SCALE, [distance], factor=-gamma)])
    dots = ctx.add(MATMUL, [x, support], transpose_b=True)
    if kind == "LINEAR":
        return dots
    inner = ctx.add(ew.ADD, [ctx.add(ew.SCALE, [dots], factor=gamma), ctx.constant(offset, "float32")])
    if kind == "POLY":
        return ctx.add(ew.POW, [inner, ctx.constant(degree, "float32")])
    if kind == "SIGMOID":
        return ctx.add(ew.TANH, [inner])
    raise ctx.invalid(f"unknown kernel `{kind}`")


def _rho(ctx: Context, count: int) -> Value:
    if len(ctx.attrs.get("rho", ())) < count:
        raise ctx.invalid(f"attribute `rho` has less than {count} elements")
    return ctx.constant(ctx.attrs["rho"][:count], "float32")


def _regressor(ctx: Context) -> Value:
    x, vectors = matrix(ctx), ctx.attrs["n_supports"]
    rows = _kernel(ctx, x, vectors) if vectors else x
    y = affine(ctx, rows, array(ctx, "coefficients", "float32", 1, -1), _rho(ctx, 1))
    if ctx.attrs["one_class"]:
        above = ctx.add(ew.GREATER, [y, ctx.constant(0.0, "float32")])
        y = ctx.add(ew.WHERE, [above, ctx.constant(1.0, "float32"), ctx.constant(-1.0, "float32")])
    return transformed(ctx, y)


def _classifier(ctx: Context) -> tuple[Value, Value]:
    """(labels, scores). The label is the class with most votes, of which each two classes give one."""
    x, classes, counts = matrix(ctx), class_count(ctx), list(ctx.attrs.get("vectors_per_class", ()))
    if not sum(counts):
        return decided(ctx, affine(ctx, x, array(ctx, "coefficients", "float32", classes, -1), _rho(ctx, 1)))
    if len(counts) != classes or classes < 2:
        raise ctx.invalid(f"support vectors are given for {len(counts)} classes, labels for {classes}")
    coefficients = np.asarray(ctx.attrs["coefficients"], np.float32)[: (classes - 1) * sum(counts)].reshape(classes - 1, sum(counts))
    owner, one, (i, j) = np.repeat(np.arange(classes), counts), np.eye(classes, dtype=np.float32), np.triu_indices(classes, 1)
    weights = np.where(owner == i[:, None], coefficients[j - 1], np.where(owner == j[:, None], coefficients[i], 0))
    scores = affine(ctx, _kernel(ctx, x, len(owner)), ctx.constant(weights), _rho(ctx, len(i)))
    first = ctx.add(ew.CAST, [ctx.add(ew.GREATER, [scores, ctx.constant(0.0, "float32")])], dtype="float32")
    votes = ctx.add(ew.ADD, [ctx.add(MATMUL, [first, ctx.constant(one[i] - one[j])]), ctx.constant(one[j].sum(axis=0))])
    label = labelled(ctx, largest(ctx, votes))
    if ctx.attrs.get("prob_a"):  # Platt's sigmoid for each two classes
        a, b = (array(ctx, name, "float32", len(i)) for name in ("prob_a", "prob_b"))
        sure = ctx.add(ew.SIGMOID, [ctx.add(ew.NEG, [ctx.add(ew.ADD, [ctx.add(ew.MUL, [scores, a]), b])])])
        return label, transformed(ctx, ctx.add(ops.COUPLE, [sure], classes=classes))
    if classes > 2:
        return label, transformed(ctx, scores)
    return label, both_classes(ctx, scores, ctx.attrs["post_transform"] != "NONE")


TABLE: Table = {"SVMRegressor": _regressor, "SVMClassifier": _classifier}
