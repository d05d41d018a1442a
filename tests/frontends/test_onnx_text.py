"""TfIdfVectorizer on integers, against a transcription of its specification; FlexAttention whose sub-graphs read outer values."""

import numpy as np
import pytest
from onnx import TensorProto, helper

import tcomp
from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import import_model

POOL = {"ngram_counts": [0, 3, 7], "ngram_indexes": [4, 0, 6, 1, 2, 3], "pool_int64s": [2, 3, 9, 5, 6, 2, 2, 2, 5, 6]}
GRAMS = [(2,), (3,), (9,), (5, 6), (2, 2), (2, 5, 6)]


def tf_idf(rows, low, high, skips, mode, weights):
    y = np.zeros((len(rows), 7), np.float32)
    for row, out in zip(rows, y, strict=True):
        for gram, column, weight in zip(GRAMS, POOL["ngram_indexes"], weights, strict=True):
            n = len(gram)
            steps = range(1, 2 if n == 1 else skips + 2)
            if low <= n <= high:
                found = sum(tuple(row[i : i + (n - 1) * s + 1 : s]) == gram for s in steps for i in range(len(row) - (n - 1) * s))
                out[column] = {"TF": found, "IDF": min(found, 1) * weight, "TFIDF": found * weight}[mode]
    return y


def node_of(**attrs):
    return helper.make_node("TfIdfVectorizer", ["x"], ["y"], **{**POOL, **attrs})


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize("low, high, skips", [(1, 1, 0), (1, 3, 0), (2, 3, 5), (2, 2, 1)])
def test_tf_idf(make_model, run_model, mode, low, high, skips):
    weights = [0.5, 2.0, 1.0, 3.0, 0.25, 7.0]
    node = node_of(min_gram_length=low, max_gram_length=high, max_skip_count=skips, mode=mode, weights=weights)
    model = make_model([node], {"x": ("int32", ["n", "words"])}, {"y": "float32"})
    x = np.random.default_rng(0).choice(np.array([2, 3, 5, 6, 8], np.int32), (4, 23))
    expected = tf_idf(x.tolist(), low, high, skips, mode, weights)
    assert expected.any()
    np.testing.assert_allclose(run_model(model, {"x": x})["y"], expected)
    np.testing.assert_allclose(tcomp.compile(model).run({"x": x})["y"], expected)
    flat = make_model([node], {"x": ("int64", [23])}, {"y": "float32"})
    np.testing.assert_allclose(run_model(flat, {"x": x[1].astype(np.int64)})["y"], expected[1])
    empty = make_model([node], {"x": ("int64", [0])}, {"y": "float32"})
    assert not run_model(empty, {"x": np.zeros(0, np.int64)})["y"].any()


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"ngram_indexes": [0, 0, 1, 2, 3, 4]}, UnsupportedError, "in one column"),
        ({"ngram_indexes": [0, 1]}, ImportModelError, "2 entries for 6 grams"),
        ({"ngram_counts": [0, 3, 6]}, ImportModelError, "does not cut"),
        ({"weights": [1.0]}, ImportModelError, "1 weights for 6 grams"),
    ],
)
def test_pools_that_are_refused(make_model, changes, error, message):
    node = node_of(**{"min_gram_length": 1, "max_gram_length": 3, "max_skip_count": 0, "mode": "TFIDF", **changes})
    with pytest.raises(error, match=message):
        import_model(make_model([node], {"x": ("int64", [5])}, {"y": "float32"}))


def test_a_score_modifier_reads_values_of_the_graph_around_it(make_model, run_model):
    scores, out = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["b", "h", "l", "s"]) for n in ("scores", "out"))
    body = helper.make_graph([helper.make_node("Add", ["scores", "bias"], ["out"])], "mod", [scores], [out])
    node = helper.make_node("FlexAttention", ["q", "k", "v"], ["y"], domain="ai.onnx.preview", score_mod=body)
    shapes = {"q": [2, 4, 5, 8], "k": [2, 2, 6, 8], "v": [2, 2, 6, 3], "bias": [4, 1, 6]}
    model = make_model([node], {n: ("float32", s) for n, s in shapes.items()}, {"y": "float32"})
    model.opset_import.append(helper.make_opsetid("ai.onnx.preview", 1))
    rng = np.random.default_rng(0)
    q, k, v, bias = (rng.standard_normal(s).astype(np.float32) for s in shapes.values())
    k2, v2 = k.repeat(2, axis=1), v.repeat(2, axis=1)
    p = np.exp(q @ k2.swapaxes(2, 3) / np.sqrt(8) + bias)
    expected = p / p.sum(-1, keepdims=True) @ v2
    inputs = {"q": q, "k": k, "v": v, "bias": bias}
    for found in (run_model(model, inputs), tcomp.compile(model).run(inputs)):
        np.testing.assert_allclose(found["y"], expected, rtol=1e-4, atol=1e-5)
