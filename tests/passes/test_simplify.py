"""Affine chains and constant operands."""

import numpy as np
import pytest

from tcomp.ir.graph import GraphBuilder
from tcomp.ops.elementwise import ADD, DIV, MUL, NEG, RELU, SUB
from tcomp.ops.matmul import MATMUL
from tcomp.ops.nn import ADD_CHANNELS, CONV, CONV_TRANSPOSE
from tcomp.ops.reduction import BATCH_SCALE, BATCH_SHIFT, SCALE_SHIFT
from tcomp.passes.fold import fold_constants
from tcomp.passes.rewrite import Notes
from tcomp.passes.simplify import simplify

RNG = np.random.default_rng(1)
CONV2D = {"strides": (1, 1), "dilations": (1, 1), "group": 1}


def array(*shape):
    return RNG.uniform(0.5, 2, shape).astype(np.float32)


def operators(graph):
    return [node.op.name for node in graph.nodes]


def chain(shape, *steps):
    """x -> step -> step -> ...; a step is (operator, constants, attributes)."""
    b = GraphBuilder()
    x = b.input("x", "float32", shape)
    for op, constants, attrs in steps:
        (x,) = b.add(op, [x, *map(b.constant, constants)], attrs, op.name)
    return b.build([x])


LINEAR = {
    "conv": ((2, 3, 5, 5), (CONV, [array(4, 3, 3, 3)], CONV2D)),
    "depthwise": ((2, 4, 5, 5), (CONV, [array(4, 1, 3, 3)], {**CONV2D, "group": 4})),
    "transposed": ((2, 3, 5, 5), (CONV_TRANSPOSE, [array(3, 4, 3, 3)], {**CONV2D, "strides": (2, 2), "before": (1, 1), "shape": (9, 9)})),
    "1d": ((2, 3, 9), (CONV, [array(4, 3, 3)], {"strides": (2,), "dilations": (2,), "group": 1})),
}


@pytest.mark.parametrize("shape, step", LINEAR.values(), ids=LINEAR)
def test_batch_normalisation_moves_into_weights(unchanged, shape, step):
    b = GraphBuilder()
    x = b.input("x", "float32", shape)
    (y,) = b.add(step[0], [x, b.constant(step[1][0])], step[2])
    gamma, beta, mean, variance = (b.constant(array(4)) for _ in range(4))
    (scale,) = b.add(BATCH_SCALE, [gamma, variance], {"epsilon": 1e-5})
    (shift,) = b.add(BATCH_SHIFT, [beta, mean, scale])
    before = b.build(b.add(RELU, b.add(SCALE_SHIFT, [y, scale, shift])))
    after = unchanged(before, simplify(fold_constants(before)), rtol=2e-5)
    assert operators(after) == [step[0].name, "add", "relu"]


def test_a_bias_on_the_way_is_scaled(unchanged):
    step = LINEAR["conv"][1]
    before = chain(LINEAR["conv"][0], step, (ADD_CHANNELS, [array(4)], {}), (SCALE_SHIFT, [array(4), array(4)], {}))
    assert operators(unchanged(before, simplify(before), rtol=2e-5)) == ["conv", "add"]


@pytest.mark.parametrize(
    "steps, expected",
    [
        ([(MATMUL, [array(6, 4)], {}), (MUL, [array(4)], {})], ["matmul"]),
        ([(MATMUL, [array(6, 4)], {}), (ADD, [array(4)], {}), (MUL, [np.float32(0.125)], {})], ["matmul", "add"]),
        ([(MATMUL, [array(4, 6)], {"transpose_b": True}), (DIV, [array(1, 4)], {}), (SUB, [array(4)], {})], ["matmul", "sub"]),
        ([(MUL, [array(6)], {}), (MUL, [array(6)], {}), (DIV, [np.float32(3)], {})], ["mul"]),
        ([(ADD, [array(6)], {}), (NEG, [], {}), (ADD, [array(6)], {})], ["mul", "add"]),
        ([(ADD, [array(6)], {}), (ADD, [np.float32(2)], {})], ["add"]),
        ([(MUL, [array(5, 1)], {}), (MUL, [array(6)], {})], ["mul", "mul"]),
    ],
)
def test_chains(unchanged, steps, expected):
    before = chain((3, 5, 6), *steps)
    assert operators(unchanged(before, simplify(before), rtol=1e-5)) == expected


def test_rounding_by_a_large_number_stays(unchanged):
    magic = np.float32(1.5 * 2**23)
    before = chain((3, 5), (ADD, [magic], {}), (SUB, [magic], {}))
    assert operators(unchanged(before, simplify(before))) == ["add", "sub"]


@pytest.mark.parametrize("factor", [np.inf, np.nan, 1e30])
def test_overflow_is_left_to_the_run(unchanged, factor):
    before = chain((3, 5), (MUL, [np.float32(factor)], {}), (MUL, [np.float32(1e-30)], {}))
    after = simplify(before)
    assert all(np.isfinite(c).all() for c in after.constants.values()) or operators(after) == ["mul", "mul"]


def test_reasons():
    notes = Notes()
    b = GraphBuilder()
    x, y = b.input("x", "float32", (3, 6)), b.input("y", "float32", (6, 4))
    s = b.constant(array(4))
    (p,) = b.add(MATMUL, [x, y], {}, "free")
    (q,) = b.add(MATMUL, [x, b.constant(array(6, 4))], {}, "twice")
    outputs = [b.add(MUL, [p, s], {}, "first")[0], b.add(MUL, [q, s], {}, "second")[0], b.add(NEG, [q])[0]]
    graph = b.build(outputs)
    assert operators(simplify(graph, notes)) == operators(graph)
    assert notes.lines["first"] == ["affine_chain: `free` has no constant operand that the factor could move into"]
    assert notes.lines["second"] == ["affine_chain: the result of `twice` is needed without the factor as well"]


def test_a_large_shared_operand_is_not_copied(unchanged):
    notes = Notes()
    b = GraphBuilder()
    x, w = b.input("x", "float32", (2, 200)), b.constant(array(200, 200), "w")
    (p,), (q,) = b.add(MATMUL, [x, w], {}, "p"), b.add(MATMUL, [x, w], {"transpose_b": True}, "q")
    before = b.build(b.add(ADD, b.add(MUL, [p, b.constant(array(200))], {}, "m") + (q,)))
    assert operators(unchanged(before, simplify(before, notes))) == ["matmul", "matmul", "mul", "add"]
    assert notes.lines["m"] == ["affine_chain: `w`, the operand of `p`, is used by other nodes too"]
