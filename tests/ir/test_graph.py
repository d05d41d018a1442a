"""Graphs: the tensor expression of a node, made once for all nodes of its kind."""

import pytest

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.graph import Operator, Value, application, attributes_key, infer


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
