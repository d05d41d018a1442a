"""Operators of the domain com.microsoft: nodes with and without their optional inputs, against ONNX Runtime."""

import importlib.util
import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from onnx import compose, helper, numpy_helper

import tcomp
from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import import_model
from tcomp.ir.interpreters.graph import evaluate_graph

needs_oracle = pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="ONNX Runtime is not installed")
RNG = np.random.default_rng(7)


def floats(*shape, dtype=np.float32, scale=1.0):
    return (RNG.standard_normal(shape) * scale).astype(dtype)


def bytes_(*shape, dtype=np.uint8):
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


def of(value, dtype=np.float32):
    return np.array(value, dtype)


def model_of(op, inputs, attrs, outputs, constants=(), domain="com.microsoft", dims=None):
    """A model of one node; inputs are arrays or None, those at positions `constants` initializers; `outputs` are dtypes or None."""
    names = ["" if a is None else f"i{n}" for n, a in enumerate(inputs)]
    infos = [
        helper.make_tensor_value_info(f"i{n}", helper.np_dtype_to_tensor_dtype(a.dtype), (dims or {}).get(n, a.shape))
        for n, a in enumerate(inputs)
        if a is not None and n not in constants
    ]
    weights = [numpy_helper.from_array(inputs[n], f"i{n}") for n in constants]
    results = ["" if t is None else f"y{n}" for n, t in enumerate(outputs)]
    made = [
        helper.make_tensor_value_info(f"y{n}", helper.np_dtype_to_tensor_dtype(np.dtype(t)), None)
        for n, t in enumerate(outputs)
        if t is not None
    ]
    node = helper.make_node(op, names, results, domain=domain, **attrs)
    graph = helper.make_graph([node], "g", infos, made, weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def reference(model, feeds):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def compare(op, inputs, attrs=None, outputs=("float32",), constants=(), tolerance=2e-5, domain="com.microsoft", dims=None, valid=None):
    """The node by the graph interpreter and by ONNX Runtime; integers may differ by the tolerance if it is 1 or more. `valid` selects what
    the operator specifies of an output."""
    inputs = [np.asarray(a) if a is not None else None for a in inputs]
    model = model_of(op, inputs, attrs or {}, outputs, constants, domain, dims)
    feeds = {f"i{n}": a for n, a in enumerate(inputs) if a is not None and n not in constants}
    wanted = reference(model, feeds)
    got = evaluate_graph(import_model(model), feeds)
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        ours = got[name]
        assert ours.dtype == array.dtype and ours.shape == array.shape, f"{name}: {ours.dtype}{ours.shape}, {array.dtype}{array.shape}"
        if valid is not None and name in valid:
            ours, array = valid[name](ours), valid[name](array)
        if array.dtype.kind in "iub":
            assert np.abs(ours.astype(np.int64) - array.astype(np.int64)).max(initial=0) <= (tolerance if tolerance >= 1 else 0)
        else:
            ours, array = ours.astype(np.float64), array.astype(np.float64)
            np.testing.assert_allclose(ours, array, rtol=tolerance, atol=tolerance * max(1, np.abs(array).max(initial=0)))


X = floats(2, 5, 8)
SIMPLE = {
    "gelu": ("Gelu", [X * 3], {}),
    "fast_gelu": ("FastGelu", [X * 3], {}),
    "fast_gelu_bias": ("FastGelu", [X, floats(8)], {}),
    "bias_gelu": ("BiasGelu", [X, floats(8)], {}),
    "quick_gelu": ("QuickGelu", [X], {}),
    "quick_gelu_alpha": ("QuickGelu", [X], {"alpha": 0.7}),
    "fused_matmul": ("FusedMatMul", [floats(2, 3, 4), floats(2, 4, 5)], {"alpha": 0.5}),
    "fused_matmul_a": ("FusedMatMul", [floats(2, 4, 3), floats(4, 5)], {"transA": 1}),
    "fused_matmul_b": ("FusedMatMul", [floats(3, 4), floats(2, 5, 4)], {"transB": 1, "alpha": 2.0}),
    "fused_matmul_batch_a": ("FusedMatMul", [floats(3, 2, 4), floats(2, 4, 5)], {"transBatchA": 1}),
    "fused_matmul_batch_a_t": ("FusedMatMul", [floats(4, 2, 3), floats(2, 4, 5)], {"transBatchA": 1, "transA": 1}),
    "fused_matmul_batch_b_t": ("FusedMatMul", [floats(2, 3, 4), floats(5, 2, 4)], {"transBatchB": 1, "transB": 1}),
    "fused_matmul_4d": ("FusedMatMul", [floats(3, 2, 6, 4), floats(2, 6, 4, 5)], {"transBatchA": 1}),
    "fused_matmul_vector": ("FusedMatMul", [floats(4), floats(4, 5)], {"transA": 1}),
    "transpose_matmul": ("TransposeMatMul", [floats(4, 3), floats(4, 5)], {"transA": 1}),
    "skip_layer_norm": ("SkipLayerNormalization", [X, floats(2, 5, 8), floats(8), floats(8), floats(8)], {"epsilon": 1e-5}),
    "skip_layer_norm_plain": ("SkipLayerNormalization", [X, floats(2, 5, 8), floats(8)], {}),
    "skip_layer_norm_broadcast": ("SkipLayerNormalization", [X, floats(1, 5, 8), floats(8), floats(8)], {}),
    "skip_layer_norm_matrix": ("SkipLayerNormalization", [X, floats(5, 8), floats(8), None, floats(8)], {}),
    "skip_rms_norm": ("SkipSimplifiedLayerNormalization", [X, floats(2, 5, 8), floats(8)], {"epsilon": 1e-5}),
    "skip_rms_norm_bias": ("SkipSimplifiedLayerNormalization", [X, floats(2, 5, 8), floats(8), floats(8)], {}),
    "complex": ("CDist", [floats(3, 4), floats(5, 4)], {}),
    "euclidean": ("CDist", [floats(3, 4), floats(5, 4)], {"metric": "euclidean"}),
    "grid_sample": ("GridSample", [floats(1, 2, 4, 5), floats(1, 3, 2, 2)], {"align_corners": 1}),
    "grid_sample_border": ("GridSample", [floats(1, 2, 4, 5), floats(1, 3, 2, 2)], {"padding_mode": "border", "mode": "nearest"}),
    "inverse": ("Inverse", [floats(3, 4, 4) + 3 * np.eye(4, dtype=np.float32)], {}),
    "inverse_permutation": ("Inverse", [np.eye(5, dtype=np.float32)[[3, 0, 4, 1, 2]] * 2], {}),
    "trilu": ("Trilu", [floats(3, 4)], {}),
    "trilu_lower": ("Trilu", [floats(2, 3, 4), of(1, np.int64)], {"upper": 0}),
    "expand_dims": ("ExpandDims", [floats(3, 4), of(-2, np.int32)], {}, [1]),
    "pad": ("Pad", [floats(3, 4), of([1, 0, 2, 3], np.int64), of(2.5)], {}, [1]),
    "pad_reflect": ("Pad", [floats(3, 4), of([1, 0, 2, 3], np.int64)], {"mode": "reflect"}, [1]),
    "range": ("Range", [of(1.0), of(4.0), of(0.5)], {}, [0, 1, 2]),
    "range_of_ones": ("Range", [of(1.0), of(4.0)], {}, [0, 1]),
    "gather_nd": ("GatherND", [floats(3, 4), of([[0, 1], [2, 3]], np.int64)], {}),
    "crop": ("CropAndResize", [floats(2, 3, 5, 6), RNG.uniform(-0.2, 1.2, (4, 4)).astype(np.float32), of([0, 1, 1, 0], np.int32), of([3, 4], np.int32)],
             {"extrapolation_value": 0.5}, [3]),
    "crop_nearest": ("CropAndResize", [floats(2, 3, 5, 6), RNG.uniform(0, 1, (4, 4)).astype(np.float32), of([0, 1, 1, 0], np.int32),
                                       of([1, 4], np.int32)], {"mode": "nearest"}, [3]),
    "fused_gemm": ("FusedGemm", [floats(3, 4), floats(4, 5), floats(5)], {"activation": "Relu", "alpha": 0.5, "beta": 2.0}),
    "fused_gemm_leaky": ("FusedGemm", [floats(4, 3), floats(5, 4)], {"activation": "LeakyRelu", "activation_alpha": 0.2, "transA": 1, "transB": 1}),
    "simplified_layer_norm": ("SimplifiedLayerNormalization", [X, floats(8)], {"axis": -1}, [], ""),
}  # fmt: skip


@needs_oracle
@pytest.mark.parametrize("name", SIMPLE)
def test_simple_operators(name):
    op, inputs, attrs, constants, domain = (*SIMPLE[name], *([], "com.microsoft")[len(SIMPLE[name]) - 3 :])
    compare(op, inputs, attrs, constants=constants, domain=domain)


@needs_oracle
def test_unique():
    compare("Unique", [of([3, 1, 3, 2, 1, 3])], outputs=("float32", "int64", "int64"))


CONV = [floats(1, 4, 7, 6), floats(6, 2, 3, 3), floats(6), floats(1, 6, 7, 6)]


@needs_oracle
@pytest.mark.parametrize(
    ("activation", "parameters"),
    [("Relu", []), ("Tanh", []), ("Sigmoid", []), ("LeakyRelu", [0.2]), ("Clip", [-0.5, 0.7]), ("HardSigmoid", [0.3, 0.4])],
)
@pytest.mark.parametrize("inputs", [2, 3, 4])
def test_fused_convolutions(activation, parameters, inputs):
    attrs = {"group": 2, "pads": [1, 1, 1, 1], "activation": activation} | ({"activation_params": parameters} if parameters else {})
    compare("FusedConv", CONV[:inputs], attrs, constants=[n for n in (1, 2) if n < inputs])


@needs_oracle
def test_sums_before_normalisation_are_outputs():
    for op, extra in (("SkipLayerNormalization", [floats(8), floats(8)]), ("SkipSimplifiedLayerNormalization", [floats(8)])):
        compare(op, [X, floats(2, 5, 8), floats(8), *extra], outputs=("float32", None, None, "float32"))
    compare("SimplifiedLayerNormalization", [X, floats(8)], outputs=("float32", "float32"), domain="")


@needs_oracle
@pytest.mark.parametrize("op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
def test_half_precision_sums_are_rounded_once(op):
    half = [floats(2, 5, 8, dtype=np.float16) for _ in range(2)] + [floats(8, dtype=np.float16)]
    compare(op, half, outputs=("float16", None, None, "float16"), tolerance=2e-3)


@needs_oracle
@pytest.mark.parametrize(("segments", "mask", "positions"), list(itertools.product([False, True], repeat=3)))
def test_embeddings(segments, mask, positions):
    ids = RNG.integers(0, 11, (2, 6)).astype(np.int32)
    inputs = [ids, RNG.integers(0, 2, (2, 6)).astype(np.int32) if segments else None, floats(11, 8), floats(9, 8),
              floats(2, 8) if segments else None, floats(8), floats(8), of([[1, 1, 1, 0, 0, 0], [1] * 6], np.int32) if mask else None,
              RNG.integers(0, 9, (2, 6)).astype(np.int32) if positions else None]  # fmt: skip
    compare("EmbedLayerNormalization", inputs, outputs=("float32", "int32", "float32"))


# attention


MASKS = {
    "none": None,
    "rows": of([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32),
    "cube": RNG.integers(0, 2, (2, 5, 5)).astype(np.int32) | np.eye(5, dtype=np.int32),
    "ends": of([3, 5], np.int32),
    "ends_and_starts": of([4, 5, 1, 0], np.int32),
}


@needs_oracle
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [0, 1])
def test_merged_attention(mask, causal):
    x, w, b = floats(2, 5, 6), floats(6, 24), floats(24)
    compare("Attention", [x, w, b, MASKS[mask]], {"num_heads": 2, "unidirectional": causal})


@needs_oracle
def test_merged_attention_with_more():
    x, w, b = floats(2, 5, 6), floats(6, 24), floats(24)
    compare("Attention", [x, w, None, None, None, floats(1, 2, 5, 5)], {"num_heads": 2, "scale": 0.3})
    compare("Attention", [x, w, b, None, None, floats(2, 1, 5, 5)], {"num_heads": 2})
    compare("Attention", [x, floats(6, 28), floats(28)], {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 12]})
    compare("Attention", [x, w, b, None, floats(2, 2, 2, 3, 4)], {"num_heads": 2, "unidirectional": 1}, ("float32", "float32"))
    compare("Attention", [x, w, b, of([[0, 1, 1, 1, 1, 1, 1, 0], [1] * 8], np.int32), floats(2, 2, 2, 3, 4)],
            {"num_heads": 2, "mask_filter_value": -50.0}, ("float32", "float32"))  # fmt: skip


@needs_oracle
@pytest.mark.parametrize("causal", [0, 1])
def test_multi_head_attention(causal):
    q, k, v = floats(2, 5, 8), floats(2, 5, 8), floats(2, 5, 12)
    a = {"num_heads": 2, "unidirectional": causal}
    compare("MultiHeadAttention", [q, k, v], a)
    compare("MultiHeadAttention", [q, k, v, floats(28)], a)
    compare("MultiHeadAttention", [q, k, v, None, MASKS["rows"]], a)
    compare("MultiHeadAttention", [q, k, v, None, None, floats(1, 1, 5, 5)], a)


@needs_oracle
def test_multi_head_attention_across():
    q, a = floats(2, 3, 8), {"num_heads": 2, "scale": 0.4}
    compare("MultiHeadAttention", [q, floats(2, 5, 8), floats(2, 5, 8), floats(24)], a)
    compare("MultiHeadAttention", [q, floats(2, 5, 8), floats(2, 5, 8), None, of([[1, 1, 1, 0, 0], [1] * 5], np.int32)], a)
    compare("MultiHeadAttention", [q, floats(2, 2, 5, 4), floats(2, 2, 5, 4)], a)
    new = [q, floats(2, 3, 8), floats(2, 3, 8), floats(24)]
    compare("MultiHeadAttention", [*new, None, None, floats(2, 2, 4, 4), floats(2, 2, 4, 4)], a, ("float32",) * 3)
    compare("MultiHeadAttention", [*new, None, floats(2, 2, 3, 7), floats(2, 2, 4, 4), floats(2, 2, 4, 4)], a, ("float32",) * 3)


def rotary_tables(size, length=16):
    angle = np.arange(length)[:, None] / 100 ** (np.arange(size // 2) / (size // 2))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@needs_oracle
@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding(interleaved):
    cos, sin = rotary_tables(4)
    places = RNG.integers(0, 16, (2, 5)).astype(np.int64)
    compare("RotaryEmbedding", [floats(2, 5, 8), places, cos, sin], {"interleaved": interleaved})
    compare("RotaryEmbedding", [floats(2, 5, 8), of([3], np.int64), cos, sin], {"interleaved": interleaved})
    compare("RotaryEmbedding", [floats(2, 3, 5, 4), places, cos, sin], {"interleaved": interleaved})
    part = {"interleaved": interleaved, "num_heads": 2, "rotary_embedding_dim": 4}
    compare("RotaryEmbedding", [floats(2, 5, 12), places, cos, sin], part)
    half = [a.astype(np.float16) for a in (floats(2, 5, 8), cos, sin)]
    compare("RotaryEmbedding", [half[0], places, *half[1:]], {"interleaved": interleaved}, ("float16",), tolerance=2e-3)


GROUPED = {"num_heads": 4, "kv_num_heads": 2}


def grouped(rows, past=0, capacity=None, lengths=None, total=None, packed=False, rotary=False, extra=(), **attrs):
    """A GroupQueryAttention node of two sequences with heads of 16 elements (ONNX Runtime wants multiples of 8 or 16)."""
    q, k, v = floats(2, rows, 64), floats(2, rows, 32), floats(2, rows, 32)
    qkv = [np.concatenate([q, k, v], axis=2), None, None] if packed else [q, k, v]
    cache = [floats(2, 2, capacity or past, 16) for _ in range(2)] if past or capacity else [None, None]
    lengths = [past + rows] * 2 if lengths is None else lengths
    tables = rotary_tables(16, 32) if rotary else (None, None)
    inputs = [*qkv, *cache, of(lengths, np.int32) - 1, of(total or max(lengths), np.int32), *tables, *extra]
    shared = {**GROUPED, "do_rotary": int(rotary), **attrs}

    def rows_of(y):
        return np.concatenate([y[b, : min(rows, n)] for b, n in enumerate(lengths)])

    def cached(y):
        return np.concatenate([y[b, :, :n].reshape(-1) for b, n in enumerate(lengths)])

    valid = {"y0": rows_of, "y1": cached, "y2": cached}
    for constants in ((6,), ()):  # the total length is also a size that a run gives
        compare("GroupQueryAttention", inputs, shared, ("float32",) * 3, constants=constants, valid=valid)
    free = {0: ("b", "s", 64), **{n: ("b", "s", 32) for n in (1, 2)}, **{n: ("b", 2, "p", 16) for n in (3, 4)}, 5: ("b",)}
    compare("GroupQueryAttention", inputs, shared, ("float32",) * 3, valid=valid, dims=None if packed or extra else free)


@needs_oracle
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_grouped_attention(rotary, packed):
    grouped(5, rotary=rotary, packed=packed)
    grouped(1, past=6, rotary=rotary, packed=packed)
    grouped(5, lengths=[3, 5], rotary=rotary, packed=packed)  # padding on the right
    grouped(1, capacity=9, lengths=[4, 7], rotary=rotary, packed=packed)  # one cache for past and present
    grouped(1, past=6, lengths=[4, 7], total=7, rotary=rotary, packed=packed)


@needs_oracle
def test_grouped_attention_with_more():
    grouped(5, local_window_size=2)
    grouped(1, past=6, local_window_size=3)
    grouped(5, softcap=5.0)
    grouped(5, smooth_softmax=1)
    grouped(5, scale=0.1, rotary=True, rotary_interleaved=1)
    grouped(5, extra=(None, floats(1, 4, 5, 5)))
    grouped(5, extra=(None, None, floats(4)))
    grouped(1, past=3, extra=(of([[3], [3]], np.int64),), rotary=True)


# quantised operators


def triple(x_dtype, *shape, scale=0.05):
    return [bytes_(*shape, dtype=x_dtype), of(scale), bytes_(dtype=x_dtype)]


BYTES = [np.uint8, np.int8]


@needs_oracle
@pytest.mark.parametrize("dtype", BYTES)
def test_elementwise_operators_on_bytes(dtype):
    y, name = [of(0.11), bytes_(dtype=dtype)], np.dtype(dtype).name
    a, b = triple(dtype, 3, 4, 5), triple(dtype, 4, 1, scale=0.07)
    for op in ("QLinearAdd", "QLinearMul"):
        compare(op, [*a, *b, *y], outputs=(name,), tolerance=1)
        compare(op, [*a, *b, y[0]], outputs=(name,), tolerance=1)
    compare("QLinearSigmoid", [*a, of(0.004), y[1]], outputs=(name,), tolerance=1, constants=(1, 2, 3, 4))
    compare("QLinearLeakyRelu", [*a, *y], {"alpha": 0.2}, outputs=(name,), tolerance=1, constants=(1, 2, 3, 4))
    compare("QLinearSoftmax", [*a, of(0.004), y[1]], {"axis": 1, "opset": 13}, outputs=(name,), tolerance=1, constants=(1, 2, 3, 4))
    compare("QLinearSoftmax", [*a, of(0.004), y[1]], {"axis": 1, "opset": 12}, outputs=(name,), tolerance=1, constants=(1, 2, 3, 4))
    compare(
        "QLinearConcat",
        [*y, *a, *triple(dtype, 3, 2, 5, scale=0.2)],
        {"axis": 1},
        outputs=(name,),
        tolerance=1,
        constants=(0, 1, 3, 4, 6, 7),
    )
    where = [RNG.random((3, 4, 5)) < 0.5, *a, *triple(dtype, 3, 4, 5), *y]
    compare("QLinearWhere", where, outputs=(name,), tolerance=1, constants=(2, 3, 5, 6, 7, 8))


@needs_oracle
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("dtype", BYTES)
def test_poolings_of_bytes(dtype, last):
    x = triple(dtype, 2, 6, 7, 3) if last else triple(dtype, 2, 3, 6, 7)
    y, name = [of(0.04), bytes_(dtype=dtype)], np.dtype(dtype).name
    compare("QLinearGlobalAveragePool", [*x, *y], {"channels_last": last}, outputs=(name,), tolerance=1)
    for attrs in ({}, {"pads": [1, 0, 1, 1], "count_include_pad": 1}, {"strides": [2, 2], "pads": [1, 1, 1, 1]}):
        compare("QLinearAveragePool", [*x, *y], {"kernel_shape": [2, 3], "channels_last": last, **attrs}, outputs=(name,), tolerance=1,
                constants=(1, 2, 3, 4))  # fmt: skip


@needs_oracle
@pytest.mark.parametrize(("a", "b"), [(np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8)])
def test_products_of_bytes(a, b):
    x, w, name = bytes_(3, 6, dtype=a), bytes_(6, 4, dtype=b), np.dtype(a).name
    c = RNG.integers(-500, 500, 4).astype(np.int32)
    rows, column = [of(0.02), bytes_(dtype=a)], [of(0.03), bytes_(dtype=b)]
    columns = [RNG.uniform(0.01, 0.1, 4).astype(np.float32), bytes_(4, dtype=b)]
    compare("QGemm", [x, *rows, w, *column, c], {"alpha": 0.5})
    compare("QGemm", [x, *rows, w, *columns])
    compare("QGemm", [x, *rows, w.T.copy(), *columns, c, of(0.2), bytes_(dtype=a)], {"transB": 1}, (name,), tolerance=1)
    compare("MatMulIntegerToFloat", [x, w, rows[0], column[0], rows[1], column[1]])
    compare("MatMulIntegerToFloat", [x, w, rows[0], columns[0], None, columns[1], floats(4)])
    if a is np.uint8:
        compare("DynamicQuantizeMatMul", [floats(3, 6), w, *column], tolerance=1e-4)
        compare("DynamicQuantizeMatMul", [floats(2, 3, 6), w, columns[0], None, floats(4)], tolerance=1e-4)


@needs_oracle
@pytest.mark.parametrize("b", BYTES)
def test_attention_on_bytes(b):
    w, scales = bytes_(6, 24, dtype=b), RNG.uniform(0.01, 0.02, 24).astype(np.float32)
    x = [bytes_(2, 5, 6), w, floats(24), of(0.01)]
    a = {"num_heads": 2}
    compare("QAttention", [*x, of(0.02), MASKS["ends"], bytes_(), bytes_(dtype=b)], a, tolerance=1e-4)
    compare("QAttention", [*x, scales, None, bytes_(), np.zeros(24, b)], a | {"unidirectional": 1}, tolerance=1e-4)
    compare("QAttention", [*x, of(0.02), None, bytes_(), bytes_(dtype=b), floats(2, 2, 2, 3, 4)], a | {"unidirectional": 1},
            ("float32", "float32"), tolerance=1e-4)  # fmt: skip


@needs_oracle
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
def test_quantisation_of_all_widths(dtype):
    name, x = np.dtype(dtype).name, floats(3, 4, 5, scale=30)
    compare("QuantizeLinear", [x, of(0.3), bytes_(dtype=dtype)], outputs=(name,))
    compare("QuantizeLinear", [x, RNG.uniform(0.1, 1, 4).astype(np.float32), bytes_(4, dtype=dtype)], {"axis": 1}, (name,))
    q = bytes_(3, 4, 5, dtype=dtype)
    compare("DequantizeLinear", [q, of(0.3), bytes_(dtype=dtype)])
    compare("DequantizeLinear", [q, RNG.uniform(0.1, 1, 5).astype(np.float32), bytes_(5, dtype=dtype)], {"axis": 2})


@needs_oracle
@pytest.mark.parametrize("mask", [False, True])
def test_quantised_embeddings(mask):
    ids = RNG.integers(0, 11, (2, 6)).astype(np.int32)
    tables = [bytes_(*shape) for shape in ((11, 8), (9, 8), (2, 8), (8,), (8,))]
    scales, zeros = [of(s) for s in RNG.uniform(0.01, 0.1, 5)], [bytes_() for _ in range(5)]
    inputs = [ids, RNG.integers(0, 2, (2, 6)).astype(np.int32), *tables, of([[1, 1, 1, 0, 0, 0], [1] * 6], np.int32) if mask else None]
    compare("QEmbedLayerNormalization", [*inputs, *scales, *zeros], outputs=("float32", "int32"))


@needs_oracle
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [None, "packed", "floats"])
@pytest.mark.parametrize(("k", "block"), [(32, 16), (40, 16), (64, 32)])
def test_products_with_few_bits(bits, zeros, k, block):
    if bits == 8 and zeros == "floats":
        pytest.skip("ONNX Runtime has no zero points in floats for 8 bits")
    n, blocks = 5, -(-k // block)
    w, scales = bytes_(n, blocks, block * bits // 8), RNG.uniform(0.01, 0.1, (n, blocks)).astype(np.float32)
    zero = {None: None, "packed": bytes_(n, -(-blocks * bits // 8)), "floats": RNG.uniform(0, 1 << bits, (n, blocks)).astype(np.float32)}
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block}
    compare(
        "MatMulNBits", [floats(2, 3, k), w, scales, zero[zeros]], attrs, constants=[c for c in (1, 2, 3) if c < 3 or zeros], tolerance=1e-3
    )
    compare("MatMulNBits", [floats(40, k), w, scales, zero[zeros], None, floats(n)], attrs, constants=[c for c in (1, 2, 3) if c < 3 or zeros],
            tolerance=1e-3)  # fmt: skip


@needs_oracle
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_rows_of_quantised_tables(bits, zeros):
    table, scales = bytes_(7, 32 * bits // 8), RNG.uniform(0.01, 0.1, (7, 2)).astype(np.float32)
    zero = bytes_(7, -(-2 * bits // 8)) if zeros else None
    indices = of([[0, 6, -1], [3, -7, 2]], np.int64)
    attrs = {"bits": bits, "block_size": 16, "quantize_axis": 1, "gather_axis": 0}
    compare("GatherBlockQuantized", [table, indices, scales, zero], attrs, constants=(0, 2, *([3] if zeros else [])))
    compare("GatherBlockQuantized", [table, of([0, 9, -8], np.int64), scales, zero], attrs, constants=(0, 2, *([3] if zeros else [])))


def test_scales_of_too_few_rows_are_refused():
    table, scales = bytes_(3, 33, 4), RNG.uniform(0.01, 0.1, (3, 2, 4)).astype(np.float32)
    attrs = {"block_size": 16, "quantize_axis": 1, "gather_axis": 0, "bits": 8}
    model = model_of("GatherBlockQuantized", [table, of([0, 1], np.int64), scales], attrs, ["float32"], (0, 2))
    with pytest.raises((ImportModelError, UnsupportedError), match="scales and blocks: 2 and 3"):
        import_model(model)


# experts


@needs_oracle
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity"])
@pytest.mark.parametrize("normalize", [0, 1])
def test_mixtures_of_experts(k, activation, normalize):
    x, router = floats(2, 3, 8), floats(6, 4)
    attrs = {"k": k, "activation_type": activation, "normalize_routing_weights": normalize}
    compare("MoE", [x, router, floats(4, 12, 8), floats(4, 12), floats(4, 8, 12), floats(4, 8)], attrs)
    compare("MoE", [x.reshape(6, 8), router, floats(4, 12, 8), None, floats(4, 8, 12)], attrs)


@needs_oracle
@pytest.mark.parametrize("limit", [None, 0.8])
def test_gated_experts(limit):
    attrs = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.7, "activation_beta": 1.0}
    attrs |= {} if limit is None else {"swiglu_limit": limit}
    compare("MoE", [floats(6, 8), floats(6, 4), floats(4, 24, 8), floats(4, 24), floats(4, 8, 12), floats(4, 8)], attrs)


@needs_oracle
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("zeros", [False, True])
def test_quantised_experts(bits, block, zeros):
    experts, hidden, inner = 3, 32, 16

    def layer(rows, size):
        blocks = size // block if block else 1
        shape = (experts, rows, blocks) if block else (experts, rows)
        packed = (experts, rows, -(-blocks * bits // 8)) if block else (experts, -(-rows * bits // 8))
        return bytes_(experts, rows, size * bits // 8), RNG.uniform(0.001, 0.01, shape).astype(np.float32), bytes_(*packed)

    (w1, s1, z1), (w2, s2, z2) = layer(inner * 2, hidden), layer(hidden, inner)
    inputs = [floats(5, hidden), floats(5, experts), w1, s1, floats(experts, inner * 2), w2, s2, floats(experts, hidden)]
    attrs = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1, "expert_weight_bits": bits}
    attrs |= {"block_size": block} if block else {}
    used = [*inputs, None, None, None, *((z1, z2) if zeros else ())]
    compare("QMoE", used, attrs, constants=[2, 3, 5, 6, *([11, 12] if zeros else [])], tolerance=3e-2 if bits == 8 else 1e-3)


@needs_oracle
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("dtype", BYTES)
def test_recurrence_with_quantised_weights(direction, dtype):
    d, hidden, size = (1 if direction == "forward" else 2), 4, 6
    w, r = bytes_(d, size, 4 * hidden, dtype=dtype), bytes_(d, hidden, 4 * hidden, dtype=dtype)
    scales, zeros = [RNG.uniform(0.002, 0.004, d).astype(np.float32) for _ in range(2)], [bytes_(d, dtype=dtype) for _ in range(2)]
    inputs = [floats(5, 2, size), w, r, floats(d, 8 * hidden), None, floats(d, 2, hidden), floats(d, 2, hidden), None]
    inputs += [scales[0], zeros[0], scales[1], zeros[1]]
    attrs = {"hidden_size": hidden, "direction": direction}
    compare("DynamicQuantizeLSTM", inputs, attrs, ("float32",) * 3, constants=(1, 2, 3, 8, 9, 10, 11), tolerance=2e-2)


CORNERS = {
    "few_bits_half": ("MatMulNBits", [floats(3, 32, dtype=np.float16), bytes_(5, 2, 8), floats(5, 2, dtype=np.float16)],
                      {"K": 32, "N": 5, "block_size": 16}, (1, 2)),
    "few_bits_no_rows": ("MatMulNBits", [floats(0, 32), bytes_(5, 2, 8), floats(5, 2)], {"K": 32, "N": 5, "block_size": 16}, (1, 2)),
    "no_batch": ("Attention", [floats(0, 5, 6), floats(6, 24), floats(24)], {"num_heads": 2}, ()),
    "no_positions": ("MultiHeadAttention", [floats(2, 0, 8)] * 3, {"num_heads": 2}, ()),
    "no_tokens": ("MoE", [floats(0, 8), floats(0, 4), floats(4, 6, 8), None, floats(4, 8, 6)], {"k": 2}, ()),
    "all_masked": ("MultiHeadAttention", [floats(2, 5, 8)] * 3 + [None, of([[0] * 5, [1] * 5], np.int32)], {"num_heads": 2}, ()),
    "all_masked_causal": ("Attention", [floats(2, 5, 6), floats(6, 24), None, of([[0] * 5, [1] * 5], np.int32)],
                          {"num_heads": 2, "unidirectional": 1}, ()),
    "lengths": ("MultiHeadAttention", [floats(2, 3, 8), floats(2, 5, 8), floats(2, 5, 8), None, of([2, 5], np.int32)], {"num_heads": 2}, ()),
    "zeros": ("DynamicQuantizeMatMul", [floats(2, 6) * 0, bytes_(6, 4), of(0.1), bytes_()], {}, ()),
    "one_axis": ("FusedConv", [floats(1, 4, 9), floats(6, 4, 3), floats(6)], {"activation": "Tanh"}, ()),
    "wide": ("FusedMatMul", [floats(2, 3, 4, dtype=np.float64), floats(2, 4, 5, dtype=np.float64)], {"alpha": 0.3}, ()),
    **{f"nibbles_{dtype.__name__}": ("GatherBlockQuantized", [RNG.integers(0, 8, (3, 32, 4)).astype(dtype), of([[0, 6, -1]], np.int64),
                                                             floats(3, 2, 4)], {"block_size": 16, "gather_axis": 2}, (0, 2))
       for dtype in (ml_dtypes.int4, ml_dtypes.uint4)},
}  # fmt: skip


@needs_oracle
@pytest.mark.parametrize("name", CORNERS)
def test_corners(name):
    op, inputs, attrs, constants = CORNERS[name]
    dtype = inputs[0].dtype if inputs[0].dtype in (np.float16, np.float64) else np.dtype(np.float32)
    compare(op, inputs, attrs, (dtype.name,), constants, tolerance=5e-3 if dtype == np.float16 else 2e-5)


# operators that ONNX Runtime has for GPUs alone, and some of the others where it is not installed


def run(op, inputs, attrs=None, outputs=("float32",), constants=(), domain="com.microsoft"):
    inputs = [np.asarray(a) if a is not None else None for a in inputs]
    model = model_of(op, inputs, attrs or {}, outputs, constants, domain)
    got = evaluate_graph(import_model(model), {f"i{n}": a for n, a in enumerate(inputs) if a is not None and n not in constants})
    return got["y0"] if len(got) == 1 else [got[k] for k in sorted(got)]


def close(got, wanted, tolerance=2e-5):
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def normal(x, axes, epsilon):
    return (x - x.mean(axis=axes, keepdims=True)) / np.sqrt(x.var(axis=axes, keepdims=True) + epsilon)


def attended(q, k, v, heads, terms=0.0):
    def split(x):
        return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)

    q, k, v = map(split, (q, k, v))
    y = softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1]) + terms) @ v
    return y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1)


def test_formulas_of_fused_operators():
    bias, skip = floats(8), floats(2, 5, 8)
    close(run("BiasGelu", [X, bias]), gelu(X + bias))
    close(run("QuickGelu", [X], {"alpha": 1.5}), X / (1 + np.exp(-1.5 * X)))
    close(run("BiasAdd", [X, bias, skip]), X + bias + skip)
    close(run("BiasSplitGelu", [X, bias]), (X + bias)[..., :4] * gelu((X + bias)[..., 4:]))
    close(run("SkipLayerNormalization", [X, skip, bias, bias], {"epsilon": 1e-5}), normal(X + skip, -1, 1e-5) * bias + bias)
    w = floats(8, 3)
    t = X @ w
    close(run("GemmFastGelu", [X, w]), 0.5 * t * (1 + np.tanh(np.sqrt(2 / np.pi) * (t + 0.044715 * t**3))))
    close(run("FusedMatMul", [X, skip], {"alpha": 0.5, "transB": 1}), 0.5 * X @ skip.transpose(0, 2, 1))


def test_formulas_of_attention():
    w, b = floats(8, 24), floats(24)
    qkv = X @ w + b
    close(run("Attention", [X, w, b], {"num_heads": 2}), attended(*np.split(qkv, 3, axis=2), heads=2))
    packed = floats(2, 5, 2, 3, 4)
    parts = [packed[:, :, :, n].reshape(2, 5, 8) for n in range(3)]
    close(run("MultiHeadAttention", [packed], {"num_heads": 2}), attended(*parts, heads=2))
    close(run("MultiHeadAttention", [parts[0], packed[:, :, :, 1:]], {"num_heads": 2}), attended(*parts, heads=2))
    q, k, v = floats(2, 5, 8), floats(2, 5, 4), floats(2, 5, 4)
    wide = [np.repeat(x.reshape(2, 5, 1, 4), 2, axis=2).reshape(2, 5, 8) for x in (k, v)]
    future = np.triu(np.full((5, 5), -1e9), 1)
    attrs = {"num_heads": 2, "kv_num_heads": 1}
    lengths = of([4, 4], np.int32), of(5, np.int32)
    close(run("GroupQueryAttention", [q, k, v, None, None, *lengths], attrs), attended(q, *wide, heads=2, terms=future))
    scales = floats(4), floats(4)
    normed = [
        (x.reshape(2, 5, -1, 4) / np.sqrt((x.reshape(2, 5, -1, 4) ** 2).mean(-1, keepdims=True) + 1e-6) * s)
        for x, s in zip((q, k), scales, strict=True)
    ]
    shared = np.repeat(normed[1], 2, axis=2).reshape(2, 5, 8)
    got = run("GroupQueryAttention", [q, k, v, None, None, *lengths, *[None] * 7, *scales], attrs)
    close(got, attended(normed[0].reshape(2, 5, 8), shared, wide[1], 2, future))
    # a chunk of which the first sequence has two rows, behind three and four positions
    caches, valid = [floats(2, 1, 9, 4) for _ in range(2)], (2, 5)
    inputs = [q, k, v, *caches, of([3 + 2 - 1, 4 + 5 - 1], np.int32), of(9, np.int32), *[None] * 9, of(valid, np.int32)]
    got, *_ = run("GroupQueryAttention", inputs, attrs, ("float32",) * 3, constants=(6,))
    for b, (past, rows) in enumerate(zip((3, 4), valid, strict=True)):
        keys, values = (np.concatenate([c[b, 0, :past], x[b, :rows]]) for c, x in zip(caches, (k, v), strict=True))
        repeated = [np.repeat(x[None, :, None], 2, axis=2).reshape(1, past + rows, 8) for x in (keys, values)]
        later = np.triu(np.full((rows, past + rows), -1e9), past + 1)
        close(got[b, :rows], attended(q[b : b + 1, :rows], *repeated, heads=2, terms=later)[0])


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("activation", [0, 1])
def test_formulas_of_group_normalisation(last, activation):
    x, gamma, beta = floats(2, 6, 3, 4), floats(6), floats(6)
    y = normal(x.reshape(2, 3, -1), -1, 1e-5).reshape(x.shape) * gamma[:, None, None] + beta[:, None, None]
    y = silu(y) if activation else y
    attrs = {"groups": 3, "activation": activation, "channels_last": last}

    def given(a):
        return a.transpose(0, 2, 3, 1) if last else a

    close(run("GroupNorm", [given(x), gamma, beta], attrs), given(y))
    if last:
        skip, bias = floats(2, 6), floats(6)
        got, total = run("SkipGroupNorm", [given(x) - skip[:, None, None] - bias, gamma, beta, skip, bias], attrs, ("float32", "float32"))
        close(total, given(x), 1e-4)
        close(got, given(y), 1e-4)


def test_formulas_of_transforms():
    x, c = floats(3, 8, 6), floats(3, 4, 2)
    z = c[..., 0] + 1j * c[..., 1]

    def parts(a):
        return np.stack([a.real, a.imag], axis=-1)

    close(run("Rfft", [x]), parts(np.fft.rfft(x)), 1e-4)
    close(run("Rfft", [x], {"signal_ndim": 2}), parts(np.fft.rfft2(x)), 1e-4)
    close(run("Irfft", [parts(np.fft.rfft(x)).astype(np.float32)], {"signal_ndim": 1}), x, 1e-4)
    close(run("Irfft", [parts(np.fft.rfft2(x)).astype(np.float32)], {"signal_ndim": 2}), x, 1e-4)
    close(run("ComplexMul", [c, c]), parts(z * z))
    close(run("ComplexMulConj", [c, c]), parts(z * z.conj()))


def test_formulas_of_channels_last():
    x, w, b = floats(1, 5, 6, 4), floats(3, 2, 2, 4), floats(3)
    windows = np.lib.stride_tricks.sliding_window_view(x, (2, 2), (1, 2))
    close(run("NhwcConv", [x, w, b]), np.einsum("nhwcij,oijc->nhwo", windows, w) + b, 1e-4)
    q = bytes_(1, 5, 6, 4)
    wanted = np.lib.stride_tricks.sliding_window_view(q, (2, 2), (1, 2)).max(axis=(-1, -2))
    np.testing.assert_array_equal(run("NhwcMaxPool", [q], {"kernel_shape": [2, 2]}, ("uint8",)), wanted)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_formulas_of_few_bits(bits):
    n, k, block, each = 3, 40, 16, 8 // bits
    packed, scales = bytes_(n, 3, block * bits // 8), RNG.uniform(0.01, 0.1, (n, 3)).astype(np.float32)
    numbers = (packed[..., None] >> (np.arange(each) * bits).astype(np.uint8) & ((1 << bits) - 1)).reshape(n, 3, block)
    w = ((numbers - float(1 << (bits - 1))) * scales[..., None]).reshape(n, -1)[:, :k]
    x, attrs = floats(2, k), {"K": k, "N": n, "bits": bits, "block_size": block}
    close(run("MatMulNBits", [x, packed, scales], attrs, constants=(1, 2)), x @ w.T, 1e-4)
    groups = RNG.integers(0, 3, k).astype(np.int32)
    w = (numbers.reshape(n, -1)[:, :k] - float(1 << (bits - 1))) * scales[:, groups]
    close(run("MatMulNBits", [x, packed, scales, None, groups], attrs, constants=(1, 2)), x @ w.T, 1e-4)
    real = lambda q, s, z: (q.astype(np.float32) - z) * s
    a, b = bytes_(3, 4), bytes_(3, 4)
    got = run("QLinearAdd", [a, of(0.1), of(3, np.uint8), b, of(0.2), of(7, np.uint8), of(0.4), of(100, np.uint8)], outputs=("uint8",))
    wanted = np.clip(np.round((real(a, 0.1, 3) + real(b, 0.2, 7)) / 0.4) + 100, 0, 255)
    assert np.abs(got.astype(int) - wanted.astype(int)).max() <= 1
    mean = run("QLinearReduceMean", [a, of(0.1), of(3, np.uint8), of(0.2), of(9, np.uint8)], {"axes": [1], "keepdims": 0}, ("uint8",))
    assert np.abs(mean.astype(int) - (np.round(real(a, 0.1, 3).mean(axis=1) / 0.2) + 9).astype(int)).max() <= 1


def test_formulas_of_experts():
    x, router = floats(5, 8), floats(5, 4)
    w1, w2, w3 = floats(4, 6, 8), floats(4, 8, 6), floats(4, 6, 8)
    got = run("MoE", [x, router, w1, None, w2, None, w3], {"k": 2, "activation_type": "swiglu"})
    shares = softmax(router)
    wanted = np.zeros_like(x)
    for t, scores in enumerate(router):
        for e in np.argsort(-scores)[:2]:
            wanted[t] += shares[t, e] * (silu(w1[e] @ x[t]) * (w3[e] @ x[t])) @ w2[e].T
    close(got, wanted, 1e-4)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "outputs", "why"),
    [
        ("GroupQueryAttention", [X, None, None, None, None, of([4, 4], np.int32), of(5, np.int32)],
         {"num_heads": 2, "kv_num_heads": 1, "k_quant_type": "PER_TENSOR"}, ("float32",), "quantised"),
        ("SkipLayerNormalization", [X, X, floats(8)], {}, ("float32", "float32"), "training"),
        ("MatMulNBits", [X, bytes_(3, 1, 8), floats(3, 1)], {"K": 8, "N": 3, "bits": 3, "block_size": 16}, ("float32",), "3 bits"),
        ("MatMulNBits", [X, bytes_(3, 1, 8), floats(3, 1)], {"K": 8, "N": 3, "block_size": 16, "weight_prepacked": 1}, ("float32",), "CUDA"),
        ("Attention", [X, floats(8, 24)], {"num_heads": 2, "do_rotary": 1}, ("float32",), "do_rotary"),
        ("FusedGemm", [floats(2, 3), floats(3, 4)], {"activation": "Softplus"}, ("float32",), "activation"),
        ("BeamSearch", [X], {}, ("float32",), "unknown operator"),
    ],
)  # fmt: skip
def test_what_is_refused(op, inputs, attrs, outputs, why):
    with pytest.raises(UnsupportedError, match=why):
        run(op, inputs, attrs, outputs)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("Gelu", [bytes_(3)], {}), ("Gelu", [X], {"alpha": 1.0}), ("BiasGelu", [X], {}), ("BiasGelu", [X, floats(8).astype(np.float64)], {}),
        ("Attention", [X, floats(8, 24)], {}), ("Attention", [X, floats(8, 24)], {"num_heads": 3}),
        ("MatMulNBits", [X, bytes_(3, 2, 8), floats(3, 1)], {"K": 8, "N": 3, "block_size": 16}),
        ("SkipLayerNormalization", [X, floats(2, 4, 8), floats(8)], {}),
        ("MoE", [floats(5, 8), floats(5, 4), floats(4, 6, 8), None, floats(4, 8, 6)], {"k": 5}),
    ],
)  # fmt: skip
def test_what_is_not_valid(op, inputs, attrs):
    with pytest.raises(ImportModelError):
        run(op, inputs, attrs)


def test_layouts_of_one_processor_are_named():
    model = model_of("Conv", [floats(1, 8, 4, 4), floats(8, 8, 1, 1)], {}, ("float32",), domain="com.microsoft.nchwc")
    model.opset_import.append(helper.make_opsetid("com.microsoft.nchwc", 1))
    with pytest.raises(UnsupportedError, match="ORT_ENABLE_EXTENDED"):
        import_model(model)


def test_machine_code_is_what_the_interpreter_says():
    """The operators of which something is new, in one model."""
    tables = rotary_tables(4)
    nodes = {
        "few_bits": ("MatMulNBits", [floats(3, 40), bytes_(5, 3, 8), floats(5, 3)], {"K": 40, "N": 5, "block_size": 16}, (1, 2)),
        "few_bits_of_many": ("MatMulNBits", [floats(40, 40), bytes_(5, 3, 8), floats(5, 3)], {"K": 40, "N": 5, "block_size": 16}, (1, 2)),
        "quantised_experts": ("QMoE", [floats(5, 32), floats(5, 3), bytes_(3, 16, 16), floats(3, 16, 2), None, bytes_(3, 32, 8), floats(3, 32, 1)],
                              {"k": 2, "normalize_routing_weights": 1, "block_size": 16}, (2, 3, 5, 6)),
        "few_bits_free": ("MatMulNBits", [floats(3, 40), bytes_(5, 3, 8), floats(5, 3)], {"K": 40, "N": 5, "block_size": 16}, ()),
        "rows": ("GatherBlockQuantized", [bytes_(7, 16), of([0, 9, -2], np.int64), floats(7, 2)], {"block_size": 16}, (0, 2)),
        "experts": ("MoE", [floats(5, 8), floats(5, 4), floats(4, 6, 8), floats(4, 6), floats(4, 8, 6)], {"k": 2}, ()),
        "inverse": ("Inverse", [floats(2, 5, 5)], {}, ()),
        "crop": ("CropAndResize", [floats(2, 3, 5, 6), RNG.uniform(-0.2, 1.2, (4, 4)).astype(np.float32), of([0, 1, 1, 0], np.int32),
                                   of([3, 4], np.int32)], {}, (3,)),
        "grouped": ("GroupQueryAttention", [floats(2, 1, 8), floats(2, 1, 4), floats(2, 1, 4), floats(2, 1, 6, 4), floats(2, 1, 6, 4),
                                            of([3, 5], np.int32), of(6, np.int32), *tables],
                    {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1, "local_window_size": 3}, (6,)),
        "sink": ("GroupQueryAttention", [floats(1, 3, 8), floats(1, 3, 4), floats(1, 3, 4), None, None, of([2], np.int32), of(3, np.int32),
                                         *[None] * 4, floats(2)], {"num_heads": 2, "kv_num_heads": 1}, (6,)),
        "half": ("SkipSimplifiedLayerNormalization", [floats(2, 8, dtype=np.float16)] * 2 + [floats(8, dtype=np.float16)], {}, ()),
    }  # fmt: skip
    models = {name: model_of(op, inputs, attrs, (inputs[0].dtype if inputs[0].dtype != np.uint8 else "float32",), constants)
              for name, (op, inputs, attrs, constants) in nodes.items()}  # fmt: skip
    whole, *others = [compose.add_prefix(model, f"{name}.") for name, model in models.items()]
    for other in others:
        for field in ("node", "input", "output", "initializer"):
            getattr(whole.graph, field).extend(getattr(other.graph, field))
    feeds = {f"{name}.i{n}": np.asarray(a) for name, (_, inputs, _, constants) in nodes.items() for n, a in enumerate(inputs)
             if a is not None and n not in constants}  # fmt: skip
    wanted = evaluate_graph(import_model(whole), feeds)
    got = tcomp.compile(whole).run(feeds)
    for name, array in wanted.items():
        close(got[name].astype(np.float64), array.astype(np.float64), 1e-3 if array.dtype == np.float16 else 2e-4)


def test_signatures_are_those_of_the_runtime():
    state = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
    from tcomp.frontends.onnx.microsoft_schemas import MICROSOFT, STANDARD, find_signature

    theirs = {(s.name, s.domain): s for s in state.get_all_operator_schema()}
    for domain, table in (("", STANDARD), ("com.microsoft", MICROSOFT)):
        for name in table:
            ours, other = find_signature(name, domain), theirs[name, domain]
            assert (ours.min_input, ours.max_input, ours.max_output) == (other.min_input, other.max_input, other.max_output), name
            for attr, made in ours.attributes.items():
                assert (made.type.name, made.required) == (other.attributes[attr].type.name, other.attributes[attr].required), (name, attr)
            assert ours.attributes.keys() == other.attributes.keys(), name
