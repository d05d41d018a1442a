"""The nine networks that the onnx package ships (weights are placeholders; inputs and expected outputs are those of its backend tests)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import tcomp
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tests.models.slow_loops import slow_folds

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = sorted(p.stem for p in FOLDER.glob("light_*.onnx"))


def test_all_are_there() -> None:
    assert len(NAMES) >= 9


@pytest.mark.parametrize("name", NAMES)
def test_light_model(name: str) -> None:
    artifact, report = compile_model(FOLDER / f"{name}.onnx", CompileOptions(emit=("loops",)))
    assert not slow_folds(report.stages["loops"])
    module = tcomp.Module.load(artifact)
    shape = module.inputs[0].shape
    ramp = (np.arange(np.prod(shape), dtype=np.float64).reshape(shape) / np.prod(shape)).astype(np.float32)
    expected = numpy_helper.to_array(onnx.TensorProto.FromString((FOLDER / f"{name}_output_0.pb").read_bytes()))
    (result,) = module.run({module.inputs[0].name: ramp}).values()
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=0)
