"""Small models of the kinds that are shipped."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tcomp
from tcomp.runtime import LoadedModel

RNG = np.random.default_rng(0)
TYPES = {"f": TensorProto.FLOAT, "i": TensorProto.INT64}


def model(nodes: list[tuple[Any, ...]], inputs: dict[str, Any], outputs: dict[str, Any], weights: dict[str, np.ndarray]) -> bytes:
    """Inputs and outputs: name -> (type, shape), a shape without a type of float32."""
    ends = [
        [helper.make_tensor_value_info(n, *(s if isinstance(s, tuple) else (TensorProto.FLOAT, s))) for n, s in group.items()]
        for group in (inputs, outputs)
    ]
    graph = helper.make_graph(
        [helper.make_node(n[0], n[1], n[2], n[2][0], **(n[3] if len(n) > 3 else {})) for n in nodes],
        "net", ends[0], ends[1], [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32) * np.float32(0.3)


@cache
def residual() -> bytes:
    """A network like ResNet: convolutions, a shortcut, pooling, a classifier. The names are not names in C."""
    nodes = [
        ("Conv", ["in put/0", "w0"], ["a"], {"pads": [1, 1, 1, 1]}), ("Relu", ["a"], ["b"]), ("MaxPool", ["b"], ["c"], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Conv", ["c", "w1"], ["d"], {"pads": [1, 1, 1, 1]}), ("Relu", ["d"], ["e"]), ("Conv", ["e", "w1"], ["f"], {"pads": [1, 1, 1, 1]}),
        ("Add", ["f", "c"], ["g"]), ("Relu", ["g"], ["h"]), ("GlobalAveragePool", ["h"], ["i"]), ("Flatten", ["i"], ["j"]),
        ("Gemm", ["j", "w2"], ["k"]), ("Softmax", ["k"], ["float"]),
    ]  # fmt: skip
    weights = {"w0": normal(8, 3, 3, 3), "w1": normal(8, 8, 3, 3), "w2": normal(8, 10)}
    return model(nodes, {"in put/0": [1, 3, 16, 16]}, {"float": [1, 10]}, weights)


@cache
def recurrent() -> bytes:
    """An LSTM over a sequence of any length, with its state as further inputs and outputs."""
    nodes = [("LSTM", ["x", "w", "r", "", "", "h", "c"], ["y", "h1", "c1"], {"hidden_size": 4})]
    weights = {"w": normal(1, 16, 3), "r": normal(1, 16, 4)}
    state = [1, 2, 4]
    return model(nodes, {"x": ["time", 2, 3], "h": state, "c": state}, {"y": ["time", 1, 2, 4], "h1": state, "c1": state}, weights)


@cache
def convolutional() -> bytes:
    """A convolution over images of free sizes whose sides must be even: half of each is reshaped to an axis."""
    nodes = [("Conv", ["x", "w"], ["a"], {"pads": [1, 1, 1, 1], "strides": [2, 2]}), ("Relu", ["a"], ["y"])]
    return model(nodes, {"x": ["n", 3, "h", "w"]}, {"y": ["n", 4, None, None]}, {"w": normal(4, 3, 3, 3)})


def detector() -> bytes:
    """Boxes and their scores -> those that non-maximum suppression leaves, of which only the run tells how many there are."""
    nodes = [
        ("Sigmoid", ["logits"], ["scores"]), ("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["kept"]),
        ("Gather", ["kept", "two"], ["number"], {"axis": 1}), ("Gather", ["boxes", "number"], ["chosen"], {"axis": 1}),
    ]  # fmt: skip
    weights = {"most": np.array([5]), "overlap": np.array([0.5], np.float32), "least": np.array([0.3], np.float32), "two": np.array(2)}
    outputs = {"kept": (TensorProto.INT64, [None, 3]), "chosen": [1, None, 4]}
    return model(nodes, {"boxes": [1, 12, 4], "logits": [1, 2, 12]}, outputs, weights)


def boxes() -> dict[str, np.ndarray]:
    corners = np.sort(RNG.random((1, 12, 2, 2), np.float32), axis=2).reshape(1, 12, 4)
    return {"boxes": corners, "logits": RNG.standard_normal((1, 2, 12), np.float32)}


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LoadedModel, dict[str, np.ndarray]]]:
    """Compiled models by name, with inputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        x = RNG.standard_normal((1, 3, 16, 16), np.float32)
        inputs = {"x": RNG.standard_normal((5, 2, 3), np.float32), "h": normal(1, 2, 4), "c": normal(1, 2, 4)}
        lookup = model([("Gather", ["table", "ids"], ["y"])], {"ids": (TensorProto.INT64, [3])}, {"y": [3, 2]}, {"table": normal(7, 2)})
        return {
            "residual": (tcomp.compile(residual()), {"in put/0": x}),
            "recurrent": (tcomp.compile(recurrent(), dims={"time": (1, 64)}), inputs),
            "convolutional": (tcomp.compile(convolutional(), dims={"n": (1, 4)}), {"x": RNG.standard_normal((2, 3, 10, 7), np.float32)}),
            "detector": (tcomp.compile(detector()), boxes()),
            "lookup": (tcomp.compile(lookup), {"ids": np.array([1, 6, 0])}),
        }


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a language model of words w0, w1, ...: the artifact small.tcomp, and its tokenizer and template of chats."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'tcomp[generate]'")
    pytest.importorskip("jinja2", reason="pip install 'tcomp[generate]'")
    from tests.language_models.reference import write_folder
    from tests.language_models.test_generation import CONFIG, WEIGHTS, small_model

    folder = tmp_path_factory.mktemp("text") / "Small-0.1B"
    folder.mkdir()
    write_folder(folder, CONFIG, WEIGHTS)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(256)}, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    small_model().save(folder / "small.tcomp")
    return folder


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    path = tmp_path / "my net.onnx"
    onnx.save_model(onnx.load_model_from_string(residual()), path)
    return path
