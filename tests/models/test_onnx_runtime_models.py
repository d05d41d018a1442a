"""Models as ONNX Runtime's tools make them: quantised, optimised for transformers, saved by a session. Compared with ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tcomp
from tcomp.frontends.onnx import import_model
from tcomp.ir.interpreters.graph import evaluate_graph

ort = pytest.importorskip("onnxruntime")
quantization = pytest.importorskip("onnxruntime.quantization")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter
RNG = np.random.default_rng(0)


def weight(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array((RNG.standard_normal(shape) * 0.3).astype(np.float32), name)


def saved(path: Path, nodes: list, weights: list, inputs: dict, output: list) -> Path:
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("y", TensorProto.FLOAT, output)], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def cnn(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A network with what the quantiser knows: convolutions, a sum, a concatenation, poolings, activations, a dense layer."""
    n = helper.make_node
    nodes = [
        n("Conv", ["x", "w1", "b1"], ["c1"], pads=[1] * 4), n("Relu", ["c1"], ["r1"]),
        n("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        n("Conv", ["p1", "w2", "b2"], ["c2"], pads=[1] * 4, group=8), n("Add", ["c2", "p1"], ["a2"]),
        n("Conv", ["a2", "w3"], ["c3"]), n("LeakyRelu", ["c3"], ["l3"], alpha=0.1),
        n("Conv", ["a2", "w4"], ["c4"]), n("Sigmoid", ["c4"], ["s4"]), n("Concat", ["l3", "s4"], ["cc"], axis=1),
        n("AveragePool", ["cc"], ["ap"], kernel_shape=[2, 2], strides=[2, 2]), n("GlobalAveragePool", ["ap"], ["g"]),
        n("Flatten", ["g"], ["f"]), n("Gemm", ["f", "w5", "b5"], ["gm"], transB=1), n("Softmax", ["gm"], ["y"], axis=-1),
    ]  # fmt: skip
    weights = [weight("w1", 8, 3, 3, 3), weight("b1", 8), weight("w2", 8, 1, 3, 3), weight("b2", 8), weight("w3", 12, 8, 1, 1),
               weight("w4", 4, 8, 1, 1), weight("w5", 10, 16), weight("b5", 10)]  # fmt: skip
    path = saved(folder / "cnn.onnx", nodes, weights, {"x": ["n", 3, 16, 16]}, ["n", 10])
    return path, {"x": RNG.standard_normal((2, 3, 16, 16)).astype(np.float32)}


def lstm(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    nodes = [helper.make_node("LSTM", ["x", "w", "r", "b"], ["h"], hidden_size=8), helper.make_node("Squeeze", ["h", "one"], ["s"]),
             helper.make_node("MatMul", ["s", "v"], ["y"])]  # fmt: skip
    weights = [
        weight("w", 1, 32, 6),
        weight("r", 1, 32, 8),
        weight("b", 1, 64),
        weight("v", 8, 5),
        numpy_helper.from_array(np.array([1]), "one"),
    ]
    path = saved(folder / "lstm.onnx", nodes, weights, {"x": [7, 2, 6]}, [7, 2, 5])
    return path, {"x": RNG.standard_normal((7, 2, 6)).astype(np.float32)}


def bert(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
                                     max_position_embeddings=16, attn_implementation="eager")  # fmt: skip
    model = transformers.BertModel(config).eval()

    module: Any = torch.nn.Module

    class Wrapped(module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, mask, segments):
            return self.model(input_ids=ids, attention_mask=mask, token_type_ids=segments, return_dict=False)[0]

    names, path = ["input_ids", "attention_mask", "token_type_ids"], folder / "bert.onnx"
    feeds = [RNG.integers(0, 50, (2, 9)), np.array([[1] * 6 + [0] * 3, [1] * 9]), np.zeros((2, 9), np.int64)]
    axes = {name: {0: "batch", 1: "seq"} for name in names}
    torch.onnx.export(Wrapped(), tuple(map(torch.tensor, feeds)), path, input_names=names, output_names=["y"], dynamic_axes=axes,
                      opset_version=17, dynamo=False)  # fmt: skip
    return path, dict(zip(names, feeds, strict=True))


def by_session(source: Path, target: Path, level: str) -> None:
    """The model as a session saves it after its optimisations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath, options.log_severity_level = str(target), 4
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def check(path: Path, feeds: dict[str, np.ndarray], tolerance: float, native: bool = False) -> set[str]:
    """The largest difference to ONNX Runtime is within the tolerance, of the largest number; returns which operators of the domain
    com.microsoft the model has."""
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL, 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    types = {"tensor(int32)": np.int32, "tensor(float16)": np.float16}
    feeds = {i.name: feeds[i.name].astype(types.get(i.type, feeds[i.name].dtype)) for i in session.get_inputs()}
    wanted = session.run(["y"], feeds)[0].astype(np.float64)
    got = tcomp.compile(path).run(feeds)["y"] if native else evaluate_graph(import_model(path), feeds)["y"]
    assert np.abs(got.astype(np.float64) - wanted).max() <= tolerance * np.abs(wanted).max()
    return {n.op_type for n in onnx.load(path).graph.node if n.domain == "com.microsoft"}


Reader: Any = quantization.CalibrationDataReader


class Calibration(Reader):
    def __init__(self, feeds: dict[str, np.ndarray]) -> None:
        self.rows = iter([feeds])

    def get_next(self):
        return next(self.rows, None)


STATIC = {
    "qdq": {"quant_format": quantization.QuantFormat.QDQ},
    "qdq_int8": {"quant_format": quantization.QuantFormat.QDQ, "activation_type": quantization.QuantType.QInt8},
    "operators": {"quant_format": quantization.QuantFormat.QOperator, "per_channel": True},
    "operators_uint8": {"quant_format": quantization.QuantFormat.QOperator, "activation_type": quantization.QuantType.QUInt8},
    "qdq_uint16": {"activation_type": quantization.QuantType.QUInt16, "extra_options": {"UseQDQContribOps": True}},
}
STEP = 1 / 64  # what one step of an 8-bit result may make: sums in another order are rounded to the one beside it


@pytest.mark.parametrize("way", STATIC)
def test_statically_quantised(tmp_path, way):
    path, feeds = cnn(tmp_path)
    quantization.quantize_static(path, target := tmp_path / "q.onnx", Calibration(feeds), **STATIC[way])
    check(target, feeds, STEP)
    by_session(target, optimised := tmp_path / "o.onnx", "EXTENDED")
    operators = check(optimised, feeds, STEP, native=way == "operators")
    assert way == "qdq_uint16" or {"QLinearConcat", "QGemm", "QLinearGlobalAveragePool"} <= operators


@pytest.mark.parametrize("make", [cnn, lstm])
def test_dynamically_quantised(tmp_path, make):
    path, feeds = make(tmp_path)
    quantization.quantize_dynamic(path, target := tmp_path / "q.onnx")
    check(target, feeds, STEP)
    by_session(target, optimised := tmp_path / "o.onnx", "EXTENDED")
    assert check(optimised, feeds, STEP) & {"DynamicQuantizeMatMul", "DynamicQuantizeLSTM"}


def test_saved_by_a_session(tmp_path):
    path, feeds = cnn(tmp_path)
    by_session(path, optimised := tmp_path / "o.onnx", "EXTENDED")
    assert "FusedConv" in check(optimised, feeds, 1e-5)


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    return bert(tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize("multi_head", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_optimised_for_transformers(tmp_path, transformer, multi_head, half):
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    from onnxruntime.transformers.fusion_options import FusionOptions

    path, feeds = transformer
    options = FusionOptions("bert")
    options.use_multi_head_attention = multi_head
    made = optimizer.optimize_model(str(path), "bert", num_heads=4, hidden_size=32, optimization_options=options, opt_level=0)
    if half:
        made.convert_float_to_float16()
    made.save_model_to_file(str(target := tmp_path / "o.onnx"))
    found = check(target, feeds, 5e-3 if half else 1e-5, native=half != multi_head)
    assert {"BiasGelu", "SkipLayerNormalization", "MultiHeadAttention" if multi_head else "Attention"} <= found


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_in_blocks(tmp_path, transformer, symmetric, bits):
    quantizer = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    path, feeds = transformer
    made = quantizer.MatMulNBitsQuantizer(onnx.load(path), block_size=16, is_symmetric=symmetric, bits=bits)
    made.process()
    made.model.save_model_to_file(str(target := tmp_path / "q.onnx"))
    assert check(target, feeds, 1e-4, native=symmetric and bits == 4) == {"MatMulNBits"}


def test_quantised_transformers(tmp_path, transformer):
    path, feeds = transformer
    quantization.quantize_dynamic(path, dynamic := tmp_path / "d.onnx")
    quantization.quantize_static(path, static := tmp_path / "s.onnx", Calibration(feeds), quant_format=quantization.QuantFormat.QOperator)
    for n, source in enumerate((path, dynamic, static)):
        by_session(source, optimised := tmp_path / f"o{n}.onnx", "EXTENDED")
        check(optimised, feeds, 2 * STEP)


def decoder(folder: Path) -> Path:
    """A decoder as generation builders write it: RMS norms, a cache, rotary positions, weights of 4 bits; all sizes are free."""
    n, ms = helper.make_node, "com.microsoft"
    block = {"K": 64, "block_size": 32, "domain": ms}
    nodes = [
        n("Gather", ["table", "input_ids"], ["x"]),
        n("ReduceSum", ["attention_mask", "one"], ["sum"], keepdims=0), n("Sub", ["sum", "one"], ["less"]),
        n("Cast", ["less"], ["lengths"], to=TensorProto.INT32),
        n("Shape", ["attention_mask"], ["shape"]), n("Gather", ["shape", "index"], ["size"]), n("Cast", ["size"], ["total"], to=TensorProto.INT32),
        n("SimplifiedLayerNormalization", ["x", "g1"], ["n1"], epsilon=1e-5, axis=-1),
        n("MatMulNBits", ["n1", "wqkv", "sqkv"], ["qkv"], N=128, **block),
        n("GroupQueryAttention", ["qkv", "", "", "past_k", "past_v", "lengths", "total", "cos", "sin"], ["a", "present_k", "present_v"],
          num_heads=4, kv_num_heads=2, do_rotary=1, domain=ms),
        n("MatMulNBits", ["a", "wo", "so"], ["o"], N=64, **block),
        n("SkipSimplifiedLayerNormalization", ["x", "o", "g2"], ["n2", "", "", "r"], epsilon=1e-5, domain=ms),
        n("MatMulNBits", ["n2", "wu", "su"], ["u"], N=64, **block), n("QuickGelu", ["u"], ["act"], alpha=1.0, domain=ms),
        n("Add", ["act", "r"], ["y"]),
    ]  # fmt: skip
    angles = np.arange(32)[:, None] / 100 ** (np.arange(8) / 8)
    arrays = {"one": np.array([1]), "index": np.array(1), "cos": np.cos(angles), "sin": np.sin(angles)}
    weights = [numpy_helper.from_array(a.astype(np.float32 if a.dtype == np.float64 else a.dtype), name) for name, a in arrays.items()]
    weights += [
        weight("table", 50, 64),
        weight("g1", 64),
        weight("g2", 64),
        weight("sqkv", 128, 2),
        weight("so", 64, 2),
        weight("su", 64, 2),
    ]
    weights += [numpy_helper.from_array(RNG.integers(0, 256, (rows, 2, 16)).astype(np.uint8), name)
                for name, rows in (("wqkv", 128), ("wo", 64), ("wu", 64))]  # fmt: skip
    cache = [TensorProto.FLOAT, ["batch", 2, "past", 16]]
    inputs = [helper.make_tensor_value_info(name, *t) for name, t in {
        "input_ids": [TensorProto.INT64, ["batch", "seq"]], "attention_mask": [TensorProto.INT64, ["batch", "total"]],
        "past_k": cache, "past_v": cache}.items()]  # fmt: skip
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "present_k", "present_v")]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ms, 1)]
    onnx.save(
        helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, weights), opset_imports=opsets, ir_version=9), folder / "d.onnx"
    )
    return folder / "d.onnx"


def test_decoder_with_a_cache(tmp_path):
    path = decoder(tmp_path)
    module = tcomp.compile(path, dims={"past": (0, 64)})
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    ids, cache = RNG.integers(0, 50, (2, 5)), {name: np.zeros((2, 2, 0, 16), np.float32) for name in ("past_k", "past_v")}
    for step in range(4):  # a prompt, then one token after the other
        mask = np.ones((2, 5 + step), np.int64)
        feeds = {"input_ids": ids, "attention_mask": mask, **cache}
        got, wanted = module.run(feeds), dict(zip(names, session.run(None, feeds), strict=True))
        for name, array in wanted.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-3, atol=1e-3 * np.abs(array).max())
        ids, cache = RNG.integers(0, 50, (2, 1)), {f"past_{c}": wanted[f"present_{c}"] for c in "kv"}
