"""Whole models for CUDA: compiled to an artifact whose code is the emitted text, run through the launch plan on a device played by the host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tcomp.errors import ArtifactError, DeviceError, InputError, TargetError
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.runtime import Artifact, cuda
from tcomp.runtime.cuda import CudaModule, CupyDevice, best_code
from tcomp.runtime.plan import KernelCode, Plan
from tcomp.target import CudaTarget, Target
from tests.codegen.cuda import cuda_host
from tests.gpu.emulation import HostDevice, decoded, text_as_code

pytestmark = pytest.mark.skipif(cuda_host.compiler() is None, reason="there is no C++ compiler")
rng = np.random.default_rng(0)


def model(nodes: Sequence[Any], inputs: dict[str, Any], outputs: dict[str, Any], weights: dict[str, np.ndarray] | None = None) -> bytes:
    """An ONNX model; inputs and outputs are name -> (type, dims)."""

    def info(name: str, spec: tuple[str, Any]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(spec[0])), spec[1])

    graph = helper.make_graph(
        list(nodes), "g", [info(*i) for i in inputs.items()], [info(*o) for o in outputs.items()],
        [numpy_helper.from_array(a, n) for n, a in (weights or {}).items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, **attrs)


def floats(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def reference(data: bytes, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(onnx.load_from_string(data)).run(None, inputs)


def compiled(data: bytes, target: str = "cuda", **options: Any) -> Artifact:
    with text_as_code():
        return compile_model(data, CompileOptions(target, **options))[0]


def check(data: bytes, inputs: dict[str, np.ndarray], module: CudaModule | None = None, **options: Any) -> CudaModule:
    module = module or CudaModule(compiled(data, **options), HostDevice())
    for got, want in zip(module.run(inputs).values(), reference(data, inputs), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    return module


NET = model(
    [
        node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]), node("Relu", ["c1"], ["r1"]),
        node("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["p1", "w2"], ["c2"], group=8), node("GlobalAveragePool", ["c2"], ["g"]), node("Flatten", ["g"], ["f"]),
        node("Gemm", ["f", "w3", "b3"], ["d"], transB=1), node("Softmax", ["d"], ["y"]),
    ],
    {"x": ("float32", ["n", 3, 14, 14])}, {"y": ("float32", ["n", 40])},
    {"w1": floats(8, 3, 3, 3), "b1": floats(8), "w2": floats(8, 1, 3, 3), "w3": floats(40, 8), "b3": floats(40)},
)  # fmt: skip


def test_a_convolutional_net_is_captured_for_each_size_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory and graphs are kept for the sizes used last."""
    monkeypatch.setattr(cuda, "MAX_SESSIONS", 2)
    module = CudaModule(compiled(NET), HostDevice())
    assert isinstance(module._device, HostDevice)
    for size, captured in ((2, 0), (5, 0), (2, 1), (5, 2), (2, 2), (1, 2), (2, 2), (5, 2), (5, 3)):
        check(NET, {"x": floats(size, 3, 14, 14)}, module)
        assert module._device.captured == captured


MIXED = model(
    [
        node("Conv", ["x", "w1"], ["c1"], pads=[1, 1, 1, 1]), node("Relu", ["c1"], ["r1"]), node("GlobalAveragePool", ["r1"], ["g"]),
        node("Flatten", ["g"], ["f"]), node("MatMul", ["f", "w2"], ["d"]), node("LayerNormalization", ["d", "s", "b"], ["y"], axis=-1),
    ],
    {"x": ("float32", [20, 18, 9, 9])}, {"y": ("float32", [20, 33])},
    {"w1": floats(24, 18, 3, 3), "w2": floats(24, 33), "s": floats(33), "b": floats(33)},
)  # fmt: skip


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_products_of_a_model_in_less_than_float32(precision: str) -> None:
    artifact = compiled(MIXED, f"cuda -precision={precision}")
    texts = [decoded(entry) for entry in json.loads(bytes(artifact.code))["kernels"].values()]
    assert sum("mma.sync" in text for text in texts) == 2  # the convolution, and the product of matrices
    x = floats(20, 18, 9, 9)
    (got,), (want,) = CudaModule(artifact, HostDevice()).run({"x": x}).values(), reference(MIXED, {"x": x})
    assert np.abs(got - want).max() < 0.1 * np.abs(want).max() and not np.allclose(got, want, rtol=1e-6)
    assert f"precision={precision}" in artifact.notes["target"]


def test_attention_and_normalisation_in_either_order_of_threads() -> None:
    nodes = [
        node("LayerNormalization", ["x", "s", "b"], ["h"], axis=-1), node("MatMul", ["h", "wq"], ["q"]), node("MatMul", ["h", "wk"], ["k"]),
        node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]), node("MatMul", ["q", "kt"], ["a"]), node("Softmax", ["a"], ["p"], axis=-1),
        node("MatMul", ["p", "h"], ["o"]), node("Gelu", ["o"], ["e"]), node("Add", ["e", "x"], ["y"]),
    ]  # fmt: skip
    data = model(
        nodes, {"x": ("float32", [2, 40, 64])}, {"y": ("float32", [2, 40, 64])},
        {"s": floats(64), "b": floats(64), "wq": floats(64, 32) / 8, "wk": floats(64, 32) / 8},
    )  # fmt: skip
    artifact = compiled(data)
    x = floats(2, 40, 64)
    ascending = check(data, {"x": x}, CudaModule(artifact, HostDevice()))
    descending = CudaModule(artifact, HostDevice(descending=True))
    np.testing.assert_array_equal(ascending.run({"x": x})["y"], descending.run({"x": x})["y"])


def test_a_recurrence_is_unrolled_into_one_graph() -> None:
    data = model(
        [node("LSTM", ["x", "w", "r"], ["y", "h", "c"], hidden_size=6)],
        {"x": ("float32", [7, 2, 5])}, {"y": ("float32", [7, 1, 2, 6]), "h": ("float32", [1, 2, 6]), "c": ("float32", [1, 2, 6])},
        {"w": floats(1, 24, 5), "r": floats(1, 24, 6)},
    )  # fmt: skip
    module = check(data, {"x": floats(7, 2, 5)})
    assert isinstance(module._device, HostDevice) and module._device.captured == 1
    texts = [decoded(k) for k in json.loads(module.artifact.code)["kernels"].values()]
    assert not any("Vector<" in t for t in texts), "slices of 40 bytes are not aligned for vectors"


def test_a_step_of_a_recurrence_is_few_launches() -> None:
    """The product and both states, which lie where the next step reads them; one is copied to what is stacked, and nobody asks for the
    time."""
    data = model(
        [node("LSTM", ["x", "w", "r"], ["y", "h", "c"], hidden_size=64)],
        {"x": ("float32", [5, 1, 9])}, {"y": ("float32", [5, 1, 1, 64]), "h": ("float32", [1, 1, 64]), "c": ("float32", [1, 1, 64])},
        {"w": floats(1, 256, 9), "r": floats(1, 256, 64) / 8},
    )  # fmt: skip
    module = check(data, {"x": floats(5, 1, 9)})
    code = json.loads(module.artifact.code)
    (inside,) = (s["body"] for s in code["steps"] if "repeat" in s)
    launches = [len(code["kernels"][s["call"]]["launches"]) for s in inside if "call" in s]
    assert launches == [1, 1, 1] and [s["bytes"] for s in inside if "copy" in s] == [256]
    assert not any("index" in s for s in inside) and "tcomp_set_index" not in code["kernels"]


def branching() -> bytes:
    """exp(x) or -x, by the sign of the sum of x."""

    def side(op: str, name: str) -> onnx.GraphProto:
        return helper.make_graph([node(op, ["x"], [name])], name, [], [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 5])])

    return model(
        [node("ReduceSum", ["x"], ["s"], keepdims=0), node("Greater", ["s", "zero"], ["c"]),
         node("If", ["c"], ["y"], then_branch=side("Neg", "a"), else_branch=side("Exp", "b"))],
        {"x": ("float32", [4, 5])}, {"y": ("float32", [4, 5])}, {"zero": np.float32(0)},
    )  # fmt: skip


def test_branches_follow_the_data() -> None:
    data = branching()
    module = check(data, {"x": np.full((4, 5), 0.5, np.float32)})
    check(data, {"x": np.full((4, 5), -0.5, np.float32)}, module)
    assert isinstance(module._device, HostDevice) and module._device.captured == 0
    names = [name for name, _ in module.profile({"x": np.ones((4, 5), np.float32)}, runs=1)]
    assert len(names) == len(set(names)) >= 3


def stopping() -> bytes:
    """x doubled until its sum is 100 or more."""
    inner = helper.make_graph(
        [node("Add", ["v", "v"], ["v2"]), node("ReduceSum", ["v2"], ["t"], keepdims=0), node("Less", ["t", "limit"], ["go"])], "body",
        [helper.make_tensor_value_info("i", onnx.TensorProto.INT64, []), helper.make_tensor_value_info("g", onnx.TensorProto.BOOL, []),
         helper.make_tensor_value_info("v", onnx.TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("go", onnx.TensorProto.BOOL, []), helper.make_tensor_value_info("v2", onnx.TensorProto.FLOAT, [3])],
        [numpy_helper.from_array(np.float32(100), "limit")],
    )  # fmt: skip
    return model(
        [node("Loop", ["trips", "yes", "x"], ["y"], body=inner)], {"x": ("float32", [3])}, {"y": ("float32", [3])},
        {"trips": np.array(50), "yes": np.array(True)},
    )  # fmt: skip


def test_a_loop_ends_when_its_condition_says_so() -> None:
    data = stopping()
    module = check(data, {"x": np.array([1, 2, 3], np.float32)})
    check(data, {"x": np.array([9, 9, 9], np.float32)}, module)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "int8"])
def test_element_types(dtype: str) -> None:
    data = model(
        [node("Mul", ["x", "x"], ["s"]), node("Add", ["s", "b"], ["y"])], {"x": (dtype, [3, 64])}, {"y": (dtype, [3, 64])},
        {"b": np.arange(64).astype(dtype) % 7},
    )  # fmt: skip
    check(data, {"x": rng.integers(-5, 5, (3, 64)).astype(dtype)})


def test_inputs_are_checked_as_on_a_cpu() -> None:
    module = CudaModule(compiled(NET), HostDevice())
    with pytest.raises(InputError, match="missing x"):
        module.run({})
    with pytest.raises(InputError, match="float32"):
        module.run({"x": np.zeros((1, 3, 14, 14))})
    with pytest.raises(InputError, match="14"):
        module.run({"x": floats(1, 3, 13, 14)})


# ---------------------------------------------------------------- artifacts


def code() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(compiled(NET).code)
    return found


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c["steps"].append({"call": "nothing"}),
        lambda c: c["steps"][0]["buffers"].pop(),
        lambda c: c["steps"][0]["buffers"].__setitem__(0, ["input", 7, 0]),
        lambda c: c["steps"][0]["buffers"].__setitem__(0, ["input", 0, ["dim", 9]]),
        lambda c: c["steps"][0]["buffers"].__setitem__(0, ["stack", 0, 0]),
        lambda c: c.__setitem__("workspace", ["exec", 1, 2]),
        lambda c: c.__setitem__("workspace", ["add", 1]),
        lambda c: c.__setitem__("outputs", []),
        lambda c: c.pop("kernels"),
        lambda c: next(iter(c["kernels"].values())).__setitem__("ptx", "%"),
        lambda c: next(iter(c["kernels"].values()))["launches"][0].__setitem__("block", [256, 1]),
        lambda c: c.__setitem__("steps", [{"repeat": "i", "trips": 3, "body": [{"noise": 1}]}]),
    ],
)
def test_a_malformed_plan_is_refused(damage: Any) -> None:
    content = code()
    Plan(json.dumps(content).encode(), 1, 1, 1)
    damage(content)
    with pytest.raises(ArtifactError):
        Plan(json.dumps(content).encode(), 1, 1, 1)


def test_the_code_that_fits_a_gpu() -> None:
    ptx = b".version 9.0\n.target sm_80\n"
    kernel = KernelCode((), {"sm_80": b"80", "sm_90": b"90", "sm_90a": b"90a"}, ptx)
    assert best_code(kernel, 80) == b"80" and best_code(kernel, 86) == b"80"
    assert best_code(kernel, 90) == b"90a"
    assert best_code(kernel, 100) == ptx + b"\0"
    with pytest.raises(DeviceError, match="sm_75"):
        best_code(kernel, 75)
    own = KernelCode((), {"sm_90a": b"90a"}, ptx.replace(b"sm_80", b"sm_90a"))
    assert best_code(own, 90) == b"90a"
    with pytest.raises(DeviceError, match=r"sm_100(?s:.)*compiled for sm_90a"):
        best_code(own, 100)


@pytest.mark.parametrize(
    ("target", "arch", "has"),
    [
        ("cuda", "sm_80", True), ("cuda", "sm_90a", False), ("cuda -arch=sm_90a", "sm_90a", True), ("cuda -arch=sm_90a", "sm_90", True),
        ("cuda -arch=sm_90", "sm_90a", False), ("cuda -arch=sm_100a", "sm_90a", False), ("cuda -arch=sm_75,sm_90a", "sm_80", False),
    ],
)  # fmt: skip
def test_what_all_architectures_of_a_target_have(target: str, arch: str, has: bool) -> None:
    assert CudaTarget.parse(target).executes(arch) is has


def test_targets_by_name() -> None:
    assert str(CudaTarget.parse("cuda")) == "cuda -arch=sm_80,sm_90a"
    assert CudaTarget.parse("cuda -arch=sm_90a") == CudaTarget(("sm_90a",))
    with pytest.raises(TargetError, match="is not a CudaTarget"):
        CudaTarget.parse("cpu -mcpu=haswell")
    assert CudaTarget.parse(str(CudaTarget.parse("cuda -arch=sm_86 -scalar"))).vector_access is False
    for wrong in ("cuda -arch=sm_1", "cuda -fast"):
        with pytest.raises(TargetError):
            Target.parse(wrong)


def test_a_gpu_that_is_not_there_is_an_error() -> None:
    try:
        CupyDevice()
    except DeviceError as problem:
        assert problem.hint
    else:
        pytest.skip("there is a GPU")
