"""Networks with the structure of real ones, at several sizes: against the reference interpreters and, where installed, ONNX Runtime."""

from __future__ import annotations

import importlib.util

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import tcomp
from tcomp.frontends.onnx import import_model
from tcomp.ir.interpreters.graph import evaluate_graph
from tests.models import nets

RNG = np.random.default_rng(1)


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def tokens(batch: int, length: int) -> dict[str, np.ndarray]:
    mask = np.ones((batch, length), np.float32)
    mask[-1, length // 2 + 1 :] = 0
    return {"tokens": RNG.integers(0, 50, (batch, length)), "mask": mask}


CASES: dict[str, tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]] = {
    "residual": (nets.residual_net(), [{"image": random(n, 3, 33, 33)} for n in (1, 3)]),
    "separable": (nets.separable_net(), [{"image": random(1, 3, h, w)} for h, w in ((32, 32), (17, 41))]),
    "transformer": (nets.transformer(), [tokens(1, 1), tokens(2, 7), tokens(1, 20)]),
    "lstm": (nets.recurrent("LSTM"), [{"x": random(n, 2, 6)} for n in (1, 9)]),
    "gru": (nets.recurrent("GRU"), [{"x": random(n, 2, 6)} for n in (1, 9)]),
    "rnn": (nets.recurrent("RNN"), [{"x": random(n, 2, 6)} for n in (1, 9)]),
    "unet": (nets.unet(), [{"image": random(1, 2, 20, 28)}]),
    "pixel_shuffler": (nets.pixel_shuffler(), [{"image": random(*s)} for s in ((1, 3, 8, 8), (2, 3, 5, 13))]),
    "quantized": (nets.quantized(), [{"x": random(2, 4, 9, 9)}]),
    "detector": (nets.detector(), [{"image": random(1, 3, 16, 16)}, {"image": -random(1, 3, 16, 16)}]),
}
LOOSE = {"quantized": 0.05}  # one step of the quantisation of a value that lies on its edge


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, tcomp.Module]:
    return request.param, tcomp.compile(CASES[request.param][0])


def same(name: str, got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert got[key].dtype == value.dtype and got[key].shape == value.shape
        np.testing.assert_allclose(got[key], value, rtol=2e-4, atol=LOOSE.get(name, 2e-5), err_msg=f"{name}: {key}")


def test_against_the_reference_of_tcomp(case: tuple[str, tcomp.Module]) -> None:
    name, module = case
    proto, inputs = CASES[name]
    graph = import_model(proto)
    for arrays in inputs:
        same(name, module.run(arrays), evaluate_graph(graph, arrays))


def test_against_the_reference_of_onnx(case: tuple[str, tcomp.Module]) -> None:
    name, module = case
    proto, inputs = CASES[name]
    reference = ReferenceEvaluator(proto)
    for arrays in inputs:
        wanted = reference.run(None, arrays)
        same(name, module.run(arrays), dict(zip(reference.output_names, wanted, strict=True)))


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="ONNX Runtime is not installed")
def test_against_onnx_runtime(case: tuple[str, tcomp.Module]) -> None:
    import onnxruntime

    name, module = case
    proto, inputs = CASES[name]
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for arrays in inputs:
        wanted = session.run(None, arrays)
        same(name, module.run(arrays), {o.name: w for o, w in zip(session.get_outputs(), wanted, strict=True)})


def test_threads_change_no_bit(case: tuple[str, tcomp.Module]) -> None:
    name, module = case
    for arrays in CASES[name][1]:
        results = [tcomp.Module.load(module.artifact, threads=n).run(arrays) for n in (1, 3)]
        for key, value in results[0].items():
            assert value.tobytes() == results[1][key].tobytes()
