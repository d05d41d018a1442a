"""Cases of the ONNX backend suite, compiled for another platform and run there, compared as the suite says."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

import tcomp
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tests.conformance.report import TOLERANCES, read_exclusions
from tests.conformance.suite import REFUSED, WRONG, Result, Suite
from tests.targets.platforms import PLATFORMS

COUNT = 200
_LARGE = ("test_resnet", "test_vgg", "test_densenet", "test_inception", "test_bvlc", "test_zfnet")


def subset(suite: Suite, count: int = COUNT) -> list[str]:
    """So many cases of one or few nodes that are not refused on this machine, nor need Python for texts and encoded images, evenly from
    the whole alphabet."""
    excluded, left_out = read_exclusions(), (*_LARGE, "test_image_decoder", "test_string", "test_strnorm", "test_regex")
    names = sorted(n for n in suite.cases if n not in excluded and not n.startswith(left_out) and not n.endswith("_cuda"))
    return [names[len(names) * k // count] for k in range(count)]


def execute(platform: str, model: ModelProto, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The whole pipeline for a platform (a key of PLATFORMS). Extents that only a run tells are those of native code, whose outputs have
    to have as many elements."""
    native = tcomp.compile(model, **options).run(dict(inputs))  # first, as it refuses what the suite then gives otherwise
    emulated, given = PLATFORMS[platform], {n: np.asarray(x, order="C") for n, x in inputs.items()}
    artifact = compile_model(model, CompileOptions(target=emulated.target, **options))[0]
    with tempfile.TemporaryDirectory() as folder:
        found = emulated.run(artifact, given, Path(folder))
    return {name: x.reshape(native[name].shape) for name, x in found.items()}


def run_case(suite: Suite, name: str, platform: str) -> Result:
    """What became of a case: that it is refused, though it is not on this machine, is wrong."""
    result = suite.run(name, partial(execute, platform), TOLERANCES.get(name, (0.0, 0.0)))
    return Result(result.case, WRONG, f"refused: {result.detail}", result.seconds) if result.outcome == REFUSED else result
