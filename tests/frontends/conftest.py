"""What the tests of the ONNX front end share: models made of a few nodes, imported and evaluated by the graph interpreter."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import helper

from tcomp.frontends.onnx import import_model
from tcomp.ir.interpreters.graph import evaluate_graph


def value_info(name, array_or_type):
    """A typed name: from an array, or from (dtype, dims)."""
    dtype, dims = (array_or_type.dtype.name, array_or_type.shape) if isinstance(array_or_type, np.ndarray) else array_or_type
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dims)


@pytest.fixture(scope="session")
def make_model():
    """make_model(nodes, inputs, outputs, opset=21, constants={}): inputs map names to arrays or (dtype, dims); outputs to dtypes."""

    def make(
        nodes: Sequence[onnx.NodeProto],
        inputs: Mapping[str, object],
        outputs: Mapping[str, str],
        opset: int = 21,
        constants: Mapping[str, np.ndarray] | None = None,
        **extra,
    ) -> onnx.ModelProto:
        infos = [helper.make_empty_tensor_value_info(n) for n in outputs]
        for info, dtype in zip(infos, outputs.values(), strict=True):
            info.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        initializers = [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()]
        graph = helper.make_graph(list(nodes), "g", [value_info(n, a) for n, a in inputs.items()], infos, initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10, **extra)

    return make


@pytest.fixture(scope="session")
def run_model():
    """run_model(model, inputs, **import_options): outputs by name."""

    def run(model, inputs, **options):
        return evaluate_graph(import_model(model, **options), inputs)

    return run
