"""Every family of operators for GPUs: default schedules of odd and symbolic sizes on a device played by the host, and the machine code of all
of them, and of a whole network, within the limits of a multiprocessor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.cuda.kernels import figures
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.runtime import Artifact
from tcomp.runtime.cuda import CudaModule
from tcomp.target import CudaTarget
from tests.codegen.cuda.test_cuda import needs_compiler, needs_nvrtc
from tests.gpu.emulation import HostDevice
from tests.gpu.test_models import compiled, floats, model, node, reference

rng = np.random.default_rng(0)
TARGET = CudaTarget.parse("cuda -arch=sm_80,sm_90a")
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


@dataclass
class Case:
    """Operators in sequence on inputs, which may have symbolic sizes (`dims`: by their names). `serial`: no loop of theirs is parallel."""

    nodes: list[Any]
    inputs: dict[str, tuple[str, list[Any]]]
    outputs: dict[str, tuple[str, list[Any]]]
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    serial: bool = False

    @property
    def data(self) -> bytes:
        return model(self.nodes, self.inputs, self.outputs, self.weights)

    def arrays(self) -> dict[str, np.ndarray]:
        found = {}
        for name, (dtype, shape) in self.inputs.items():
            size = [self.dims.get(n, n) for n in shape]
            whole = np.dtype(dtype).kind in "iu"
            found[name] = rng.integers(0, 5, size).astype(dtype) if whole else rng.standard_normal(size).astype(dtype)
        return found


def one(op: str, shape: list[Any], out: list[Any], dims: Mapping[str, int] | None = None, weights: Mapping[str, np.ndarray] | None = None,
        dtypes: tuple[str, str] = ("float32", "float32"), serial: bool = False, **attrs: Any) -> Case:  # fmt: skip
    weights = dict(weights or {})
    nodes = [node(op, ["x", *weights], ["y"], **attrs)]
    return Case(nodes, {"x": (dtypes[0], shape)}, {"y": (dtypes[1], out)}, weights, dims or {}, serial)


ODD = {"n": 3, "m": 37}
BYTES = {
    "xs": np.float32(0.02), "xz": np.uint8(120), "w": rng.integers(-99, 99, (33, 45)).astype(np.int8), "ws": np.float32(0.01), "wz": np.int8(0),
    "ys": np.float32(0.05), "yz": np.uint8(130),
}  # fmt: skip
CASES = {
    "elementwise": one("Erf", ["n", "m", 5], ["n", "m", 5], ODD),
    "transpose": one("Transpose", [7, 33, 45], [45, 7, 33], perm=[2, 0, 1]),
    "transpose-symbolic": one("Transpose", ["n", "m", 5], [5, "m", "n"], ODD, perm=[2, 1, 0]),
    "gather": Case([node("Gather", ["t", "x"], ["y"])], {"x": ("int64", ["n", 7])}, {"y": ("float32", ["n", 7, 19])}, {"t": floats(5, 19)}, ODD),
    "gather-elements": Case([node("GatherElements", ["t", "x"], ["y"], axis=1)], {"t": ("float32", [7, 9]), "x": ("int64", [7, 4])},
                            {"y": ("float32", [7, 4])}),
    "pad-slice-concat": Case(
        [node("Pad", ["x", "p"], ["a"]), node("Slice", ["a", "s", "e", "ax", "st"], ["b"]), node("Concat", ["a", "b"], ["y"], axis=0)],
        {"x": ("float32", [5, 19])}, {"y": ("float32", [10, 21])},
        {"p": np.array([1, 0, 1, 2]), "s": np.array([4]), "e": np.array([-9]), "ax": np.array([0]), "st": np.array([-2])},
    ),
    "resize": one("Resize", [1, 3, 7, 9], [1, 3, 14, 18], weights={"": np.zeros(0, np.float32), "scales": np.array([1, 1, 2, 2], np.float32)}, mode="linear"),
    "max-pool": one("MaxPool", [2, 5, 15, 13], [2, 5, 8, 7], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    "average-pool": one("AveragePool", ["n", 5, 15, 13], ["n", 5, 13, 11], ODD, kernel_shape=[3, 3]),
    "global-pool": one("GlobalAveragePool", ["n", 19, 9, 9], ["n", 19, 1, 1], ODD),
    "depthwise": one("Conv", [2, 9, 15, 13], [2, 9, 15, 13], weights={"w": floats(9, 1, 3, 3)}, group=9, pads=[1, 1, 1, 1]),
    "convolution": one("Conv", ["n", 18, 11, 11], ["n", 35, 11, 11], ODD, {"w": floats(35, 18, 3, 3), "b": floats(35)}, pads=[1, 1, 1, 1]),
    "grouped": one("Conv", [1, 8, 11, 11], [1, 12, 6, 6], weights={"w": floats(12, 4, 3, 3)}, group=2, pads=[1, 1, 1, 1], strides=[2, 2]),
    "transposed-convolution": one("ConvTranspose", [1, 7, 5, 6], [1, 9, 10, 12], weights={"w": floats(7, 9, 2, 2)}, strides=[2, 2]),
    "product": one("MatMul", ["m", 45], ["m", 33], ODD, {"w": floats(45, 33)}),
    "product-of-one-row": one("MatMul", [1, 301], [1, 203], weights={"w": floats(301, 203)}),
    "softmax": one("Softmax", ["n", "m"], ["n", "m"], ODD, axis=-1),
    "softmax-short": one("Softmax", [301, 7], [301, 7], axis=-1),
    "normalised": one("LayerNormalization", ["m", 77], ["m", 77], ODD, {"s": floats(77), "b": floats(77)}, axis=-1),
    "row-sums": one("ReduceSum", [37, 301], [37], weights={"axes": np.array([1])}, keepdims=0),
    "column-sums": one("ReduceMean", ["m", 45], [45], ODD, {"axes": np.array([0])}, keepdims=0),
    "total": one("ReduceL2", [123_457], [1]),
    "argmax": one("ArgMax", [7, 301], [7], dtypes=("float32", "int64"), axis=1, keepdims=0),
    "top-k": Case([node("TopK", ["x", "k"], ["v", "i"])], {"x": ("float32", ["n", 37])}, {"v": ("float32", ["n", 5]), "i": ("int64", ["n", 5])},
                  {"k": np.array([5])}, ODD),
    "prefix-sums": one("CumSum", [5, 37, 3], [5, 37, 3], weights={"a": np.array(1)}),
    "prefix-sum-of-one-row": one("CumSum", [301], [301], weights={"a": np.array(0)}, serial=True),
    "scatter": Case([node("ScatterElements", ["d", "x", "u"], ["y"], axis=1)], {"x": ("int64", [7, 4]), "u": ("float32", [7, 4])},
                    {"y": ("float32", [7, 9])}, {"d": floats(7, 9)}),
    "quantized-product": Case(
        [node("QLinearMatMul", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"])], {"x": ("uint8", [37, 33])}, {"y": ("uint8", [37, 45])}, BYTES
    ),
    "quantized": Case(
        [node("QuantizeLinear", ["x", "xs", "xz"], ["q"]), node("DequantizeLinear", ["q", "xs", "xz"], ["y"])], {"x": ("float32", ["n", "m"])},
        {"y": ("float32", ["n", "m"])}, BYTES, ODD,
    ),
    "lstm": Case(
        [node("LSTM", ["x", "w", "r"], ["y"], hidden_size=33)], {"x": ("float32", ["n", 2, 5])}, {"y": ("float32", ["n", 1, 2, 33])},
        {"w": floats(1, 132, 5), "r": floats(1, 132, 33) / 6}, ODD,
    ),
    "gru": Case(
        [node("GRU", ["x", "w", "r"], ["y"], hidden_size=40, direction="bidirectional")], {"x": ("float32", [4, 1, 9])},
        {"y": ("float32", [4, 2, 1, 40])}, {"w": floats(2, 120, 9), "r": floats(2, 120, 40) / 6},
    ),
}  # fmt: skip
for case in CASES.values():  # weights that no node reads
    case.weights = {name: w for name, w in case.weights.items() if name and any(name in n.input for n in case.nodes)}


def near(found: Mapping[str, np.ndarray], wanted: list[np.ndarray]) -> None:
    """Bytes may be rounded the other way."""
    for got, want in zip(found.values(), wanted, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        off = np.abs(got.astype(np.float64) - want.astype(np.float64))
        assert (off <= (1 if got.dtype == np.uint8 else 1e-4 * (1 + np.abs(want)))).all()


def one_thread(artifact: Artifact) -> list[str]:
    steps = [s for entry in artifact.notes["schedules"] for s in entry["schedule"]["steps"]]
    return [s[1][0] for s in steps if s[0] == "note"]


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_operators_on_the_host(name: str) -> None:
    case = CASES[name]
    artifact, arrays = compiled(case.data), case.arrays()
    assert bool(one_thread(artifact)) == case.serial, one_thread(artifact)
    wanted = reference(case.data, arrays)
    for descending in (False, True):
        near(CudaModule(artifact, HostDevice(descending)).run(arrays), wanted)


@needs_nvrtc
@pytest.mark.parametrize("name", CASES)
def test_operators_as_machine_code(name: str) -> None:
    """Registers, shared memory and spills within the limits on both architectures; nothing of any size on one thread."""
    found = figures(compile_model(CASES[name].data, CompileOptions(TARGET))[0], TARGET)
    assert not found.beyond and found.spilled == 0 and found.registers <= 168
    assert found.single <= CASES[name].serial


@needs_nvrtc
def test_a_whole_network_as_machine_code() -> None:
    found = figures(compile_model(LIGHT / "light_squeezenet.onnx", CompileOptions(TARGET))[0], TARGET)
    assert found.kernels > 20 and found.launches >= found.kernels and found.barriers > 0
    assert not found.beyond and found.single == 0 and found.notes == (0, 0)
