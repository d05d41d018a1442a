"""ONNX operators: TfIdfVectorizer on integers."""

from __future__ import annotations

import numpy as np

from tcomp.frontends.onnx.context import Context, Table
from tcomp.frontends.onnx.handlers.ml import matrix
from tcomp.frontends.onnx.handlers.movement import reshaped
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew
from tcomp.ops.text import COUNT_GRAMS


def _pool(ctx: Context) -> tuple[np.ndarray, np.ndarray]:
    """(grams [columns, words], lengths [columns]) by column of the result; those of other lengths than the wanted ones have length 0."""
    pool, starts, columns = ctx.attrs["pool_int64s"], ctx.attrs["ngram_counts"], ctx.attrs["ngram_indexes"]
    ends = [*starts[1:], len(pool)]
    if any(not 0 <= a <= b or (b - a) % n for n, (a, b) in enumerate(zip(starts, ends, strict=True), 1)):
        raise ctx.invalid(f"attribute `ngram_counts` {starts} does not cut a pool of {len(pool)} words into grams")
    grams = [pool[i : i + n] for n, (a, b) in enumerate(zip(starts, ends, strict=True), 1) for i in range(a, b, n)]
    if len(grams) != len(columns) or not columns or min(columns) < 0:
        raise ctx.invalid(f"attribute `ngram_indexes` has {len(columns)} entries for {len(grams)} grams, or negative ones")
    if len(set(columns)) < len(columns):
        raise ctx.unsupported("several grams are counted in one column")
    table = np.zeros((max(columns) + 1, len(starts)), np.int64)
    lengths = np.zeros(len(table), np.int64)
    for gram, column in zip(grams, columns, strict=True):
        if ctx.attrs["min_gram_length"] <= len(gram) <= ctx.attrs["max_gram_length"]:
            table[column, : len(gram)], lengths[column] = gram, len(gram)
    return table, lengths


def _tf_idf(ctx: Context) -> Value:
    if "pool_int64s" not in ctx.attrs:
        raise ctx.unsupported("its pool is of strings", "number the words before the model")
    if (mode := ctx.attrs["mode"]) not in ("TF", "IDF", "TFIDF"):
        raise ctx.invalid(f"mode {mode!r}; it takes TF, IDF or TFIDF")
    table, lengths = _pool(ctx)
    rows = matrix(ctx, "int64")
    counts = ctx.add(COUNT_GRAMS, [rows, ctx.constant(table), ctx.constant(lengths)], skips=ctx.attrs["max_skip_count"])
    if mode == "IDF":
        counts = ctx.add(ew.CLIP_CONST, [counts], low=None, high=1.0)
    if mode != "TF" and "weights" in ctx.attrs:
        if len(given := ctx.attrs["weights"]) != len(columns := ctx.attrs["ngram_indexes"]):
            raise ctx.invalid(f"{len(given)} weights for {len(columns)} grams")
        weights = np.zeros(len(table), np.float32)
        weights[columns] = given
        counts = ctx.add(ew.MUL, [counts, ctx.constant(weights)])
    return reshaped(ctx, counts, (*ctx.value(0).shape[:-1], len(table)))


TABLE: Table = {"TfIdfVectorizer": _tf_idf}
