"""The nine networks that the `onnx` package ships."""

from pathlib import Path

import onnx.backend.test
import pytest

from tcomp.frontends.onnx import check_model, import_model

LIGHT = sorted((Path(onnx.backend.test.__file__).parent / "data" / "light").glob("*.onnx"))


@pytest.mark.parametrize("path", LIGHT, ids=lambda p: p.stem)
def test_light_models(path):
    graph = import_model(path)
    (output,) = graph.outputs
    assert output.dtype == "float32" and output.shape[:2] == (1, 1000)
    assert {r.status for r in check_model(path)} == {"supported"}


def test_there_are_nine():
    assert len(LIGHT) == 9


@pytest.mark.parametrize("name", ["light_squeezenet", "light_densenet121"])
def test_any_batch_and_size(name):
    """Fully convolutional networks take any image."""
    (path,) = (p for p in LIGHT if p.stem == name)
    (value,) = import_model(path).inputs
    (output,) = import_model(path, shapes={value.name: ["n", 3, 224, 224]}).outputs
    assert [str(d) for d in output.shape] == ["n", "1000", "1", "1"]
    (output,) = import_model(path, shapes={value.name: ["n", 3, "32*h", "32*w"]}).outputs
    assert [str(d) for d in output.shape[:2]] == ["n", "1000"]
