"""Graphs: the tensor expression of a node, made once for all nodes of its kind."""

import numpy as np
import pytest

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.graph import GraphBuilder, LazyConstant, Operator, Value, application, attributes_key, infer, materialised
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.text.parser import parse_graph
from tcomp.ir.verify.graph import verify_graph


def scaled(x, y, by):
    return te.compute(x.shape, lambda i: x[i] * by + y[i], "scaled")


SCALED = Operator("scaled", scaled)
X, Y = Value("x", "float32", (4,)), Value("y", "float32", (4,))


def test_an_application_depends_on_types_and_attributes_only():
    first = application(SCALED, [X, Y], {"by": 2.0})
    assert application(SCALED, [Y, X], {"by": 2.0}) is first
    assert first.inputs == first.outputs[0].inputs and len(set(first.inputs)) == 2
    longer = Value("z", "float32", (5,))
    assert application(SCALED, [longer, longer], {"by": 2.0}).outputs[0].shape == (5,)


def test_equal_inputs_are_one_placeholder():
    made = application(SCALED, [X, X], {"by": 2.0})
    assert made.inputs[0] is made.inputs[1] and made.outputs[0].inputs == made.inputs[:1]


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1, True), (1, 1.0), ((1, 2), (1, 2.0)), ("a", ("a",))])
def test_attributes_are_told_apart_by_type_and_bits(a, b):
    assert attributes_key({"by": a}) != attributes_key({"by": b})


def test_a_refusal_names_the_node_that_asked():
    with pytest.raises(IRError, match="wrong"):
        infer(Operator("picky", lambda x: refuse()), [X], {}, "wrong")


def refuse():
    raise IRError("no")


def test_a_deferred_constant_is_made_for_each_who_asks():
    calls = []

    def spread(source, times):
        calls.append(times)
        return np.outer(np.arange(times, dtype=source.dtype), source)

    b = GraphBuilder("g")
    x, source = b.input("x", "float32", (4,)), np.array([1, 2], np.float32)
    c = b.constant(LazyConstant((4,), spread, source, (2,)), "c")
    graph = b.build(b.add(SCALED, [x, c], {"by": 2.0}, "y"))
    verify_graph(graph)
    assert calls == [] and c.dtype == "float32" and c.shape == (4,) and graph.constants[c].nbytes == 16
    assert materialised(graph.constants[c]) is None and materialised(source) is source and materialised(None) is None
    (y,) = evaluate_graph(graph, {"x": np.array([1, 1, 1, 1], np.float32)}).values()
    assert y.tolist() == [2, 2, 3, 4] and calls == [2]
    assert [a.tolist() for a in parse_graph(str(graph), {"scaled": SCALED}).constants.values()] == [[0, 0, 1, 2]] and calls == [2, 2]


def test_deferred_constants_are_equal_where_they_are_made_alike():
    source = np.ones(3)
    first, *others = (LazyConstant((3,), make, source, (n,)) for make, n in ((np.roll, 1), (np.roll, 1), (np.roll, 2), (np.repeat, 1)))
    assert [first.key == other.key for other in others] == [True, False, False]
    assert first.key != LazyConstant((3,), np.roll, source.copy(), (1,)).key
