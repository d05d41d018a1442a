"""What the tests of graph passes share."""

import numpy as np
import pytest

from tcomp.ir.dtypes import is_float, to_numpy
from tcomp.ir.expr import evaluate_int, variables
from tcomp.ir.graph import IF, LOOP
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.verify.graph import verify_graph


def random_inputs(graph, dims=None, seed=0):
    """Arrays for the inputs of a graph; symbolic dims are 5 unless given."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for v in graph.inputs:
        shape = [evaluate_int(d, {x: (dims or {}).get(x, 5) for x in variables(d)}) if not isinstance(d, int) else d for d in v.shape]
        values = rng.normal(size=shape) if is_float(v.dtype) else rng.integers(0, 2, shape)
        arrays[v.name] = np.asarray(values).astype(to_numpy(v.dtype))
    return arrays


@pytest.fixture
def unchanged():
    """Checks that a rewritten graph is well-formed and computes what the first one does; returns the rewritten one."""

    def check(before, after, *, rtol=0.0, dims=None):
        names = [v.name for v in before.outputs]
        assert [v.name for v in after.outputs] == names
        verify_graph(after)
        well_formed(after)
        for seed in range(2):
            inputs = random_inputs(before, dims, seed)
            expected, found = evaluate_graph(before, inputs), evaluate_graph(after, inputs)
            for name in names:
                assert expected[name].dtype == found[name].dtype and expected[name].shape == found[name].shape
                np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=rtol)
        return after

    return check


def well_formed(graph):
    """Values are computed before they are read; outputs are computed by nodes, each once; names are unique."""
    known = {*graph.inputs, *graph.constants}
    for node in graph.nodes:
        assert {v for v in node.inputs if v is not None} <= known
        assert known.isdisjoint(node.outputs)
        known.update(node.outputs)
        for body in node.bodies if node.op in (IF, LOOP) else ():
            well_formed(body)
        if not node.bodies:
            types = node.tensors([None if v is None else v.placeholder() for v in node.inputs])
            assert [(t.dtype, t.shape) for t in types] == [(v.dtype, v.shape) for v in node.outputs]
    computed = [v for node in graph.nodes for v in node.outputs]
    assert set(graph.outputs) <= set(computed) and len(set(graph.outputs)) == len(graph.outputs)
    names = [v.name for v in graph.values()]
    assert len(set(names)) == len(names)
