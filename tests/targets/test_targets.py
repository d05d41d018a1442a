"""A few cases on each platform whose programs run here; `python -m tests.targets PLATFORM` runs 200."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tcomp
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tests.shipping import conftest as models
from tests.targets.platforms import PLATFORMS


@pytest.mark.parametrize("platform", PLATFORMS)
def test_models_compute_what_native_code_does(platform: str, tmp_path: Path) -> None:
    """Convolutions, pooling and a product; and an index that only a run finds."""
    if missing := PLATFORMS[platform].missing:
        pytest.skip(f"not installed: {missing}")
    x = np.random.default_rng(0).standard_normal((1, 3, 16, 16), np.float32)
    for name, model, inputs in (("residual", models.residual(), {"in put/0": x}), ("detector", models.detector(), models.boxes())):
        artifact = compile_model(model, CompileOptions(target=PLATFORMS[platform].target))[0]
        (tmp_path / name).mkdir()
        found, expected = PLATFORMS[platform].run(artifact, inputs, tmp_path / name), tcomp.compile(model).run(inputs)
        for output, values in expected.items():
            np.testing.assert_allclose(found[output].reshape(values.shape), values, rtol=1e-5, atol=1e-6)
