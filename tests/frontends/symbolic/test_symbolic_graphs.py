"""Random graphs with symbolic inputs, each compiled once and run at three sizes, against the reference evaluator of `onnx`."""

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import tcomp
from tests.frontends.symbolic.random_graphs import random_model

GRAPHS = 60


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_compiled_graphs_equal_the_reference(seed):
    model, runs = random_model(seed)
    compiled, reference = tcomp.compile(model), ReferenceEvaluator(model)
    for inputs in runs:
        for got, want in zip(compiled.run(inputs).values(), reference.run(None, inputs), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * max(1.0, float(np.abs(want).max(initial=0))))
