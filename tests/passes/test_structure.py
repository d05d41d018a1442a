"""What a node computes is read off its tensor expression: operators of one's own are recognised, and near misses are not."""

import numpy as np
import pytest

from tcomp.ir import te
from tcomp.ir.graph import GraphBuilder, Operator, Value
from tcomp.ir.interpreters.te import evaluate
from tcomp.ops.elementwise import MUL
from tcomp.ops.matmul import EINSUM, MATMUL
from tcomp.ops.nn import CONV, CONV_TRANSPOSE
from tcomp.ops.reduction import SOFTMAX
from tcomp.passes.structure import (
    Body,
    Convolution,
    MatrixProduct,
    adjacent_windows,
    affine,
    body_of,
    convolution,
    inlined,
    matrix_product,
    scales_with,
    softmax_axis,
)
from tests.schedules.dice import Dice, Seeded

ROWS, COLUMNS, TERMS = 3, 4, 5
RNG = np.random.default_rng(0)


def node(op, *shapes, dtype="float32", **attrs):
    b = GraphBuilder()
    b.add(op, [b.input(f"x{n}", dtype, shape) for n, shape in enumerate(shapes)], attrs)
    return b.nodes[-1]


def _own_product(a, b):
    inner = te.reduce_axis(a.shape[1], "inner")
    return te.compute((a.shape[0], b.shape[1]), lambda row, column: te.sum(a[row, inner] * b[inner, column], inner), "mine")


def _own_softmax(x):
    r = te.reduce_axis(x.shape[1], "column")
    top = te.compute((x.shape[0], 1), lambda i, j: te.max(x[i, r], r), "largest")
    power = te.compute(x.shape, lambda i, j: te.exp(x[i, j] - top[i, 0]), "power")
    total = te.compute((x.shape[0], 1), lambda i, j: te.sum(power[i, r], r), "total")
    inverse = te.compute(total.shape, lambda i, j: 1.0 / total[i, j], "inverse")
    return te.compute(x.shape, lambda i, j: power[i, j] * inverse[i, 0], "mine")


OWN_PRODUCT, OWN_SOFTMAX = Operator("own_product", _own_product), Operator("own_softmax", _own_softmax)
SAME = Operator("same", lambda a, b: te.compute(a.shape, lambda i, j: a[i, j] * b[j, i], "same"))


@pytest.mark.parametrize(
    "made, expected",
    [
        (node(MATMUL, (2, 3, 4), (4, 5)), (False, False)),
        (node(MATMUL, (3, 1), (1, 1), dtype="float16"), (False, False)),
        (node(MATMUL, (4, 3), (5, 4), transpose_a=True, transpose_b=True), (True, True)),
        (node(MATMUL, (2, 3, 4), (5, 4), transpose_b=True), (False, True)),
        (node(EINSUM, (3, 4), (4, 5), equation="ij,jk->ik"), (False, False)),
        (node(EINSUM, (1, 4), (4, 5), equation="ij,jk->ik"), (False, False)),
        (node(EINSUM, (1, 2, 4), (1, 5, 4), equation="bij,bkj->bik"), (False, True)),
        (node(OWN_PRODUCT, (3, 4), (4, 5)), (False, False)),
        (node(EINSUM, (3, 4), (4, 5), equation="ij,jk->ki"), None),
        (node(EINSUM, (3, 3), (3, 3), equation="ii,ij->ij"), None),
        (node(CONV, (1, 4, 6, 6), (8, 4, 1, 1), strides=(1, 1), dilations=(1, 1), group=1), None),
        (node(SAME, (3, 4), (4, 3)), None),
        (node(MUL, (4, 4), (4, 4)), None),
    ],
    ids=lambda p: None if p is None or isinstance(p, tuple) else p.op.name,
)
def test_matrix_products(made, expected):
    assert matrix_product(made) == (None if expected is None else MatrixProduct(*expected))


@pytest.mark.parametrize("strides, dilations, group", [((1, 1), (1, 1), 1), ((2, 1), (1, 3), 1), ((2, 2), (1, 1), 2), ((3, 1), (2, 1), 4)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_convolutions(strides, dilations, group, dtype):
    made = node(CONV, (2, 4, 9, 9), (8, 4 // group, 3, 2), dtype=dtype, strides=strides, dilations=dilations, group=group)
    assert convolution(made) == Convolution(strides, dilations, group)
    assert matrix_product(made) is None and not adjacent_windows(made)


def test_a_window_of_one_element_has_no_dilation():
    made = node(CONV, (2, 4, 9, 9), (8, 4, 3, 1), strides=(1, 2), dilations=(2, 2), group=1)
    assert convolution(made) == Convolution((1, 2), (2, 1), 1)


def test_other_sums_are_no_convolutions():
    assert convolution(node(MATMUL, (2, 3, 4), (2, 4, 5))) is None
    assert convolution(node(MUL, (1, 4, 6, 6), (1, 4, 1, 1))) is None


@pytest.mark.parametrize("kernel, stride, before, shape, expected", [
    ((2, 3), (2, 3), (0, 0), (10, 18), True),
    ((2, 3), (2, 2), (0, 0), (10, 13), False),  # they overlap
    ((2, 2), (3, 3), (0, 0), (14, 17), False),  # there are gaps
    ((2, 2), (2, 2), (1, 0), (8, 12), False),  # something is cut off
])  # fmt: skip
def test_adjacent_windows(kernel, stride, before, shape, expected):
    attrs = {"strides": stride, "dilations": (1, 1), "group": 1, "before": before, "shape": shape}
    assert adjacent_windows(node(CONV_TRANSPOSE, (1, 4, 5, 6), (4, 3, *kernel), **attrs)) is expected


def test_softmax():
    assert softmax_axis(node(SOFTMAX, (2, 3, 4), axes=(2,))) == 2
    assert softmax_axis(node(SOFTMAX, (2, 3, 4), dtype="float16", axes=(1,))) == 1
    assert softmax_axis(node(OWN_SOFTMAX, (3, 4))) == 1
    assert softmax_axis(node(SOFTMAX, (2, 3, 4), axes=(1, 2))) is None
    assert softmax_axis(node(MUL, (2, 3), (2, 3))) is None and softmax_axis(None) is None


def element(dice: Dice, leaves, i, j, terms, depth):
    """A random element of row i: of reads in that row, at columns that are loop variables or data."""
    if depth == 0 or dice.one_in(6):
        column = dice.pick(j, *terms, te.cast(leaves[-1][i, 0] * 0.0, "int64"))
        return dice.pick(*leaves)[i, column] if dice.number(0, 4) else te.const(dice.pick(0.0, 0.5, 2.0), "float64")
    a, b = (element(dice, leaves, i, j, terms, depth - 1) for _ in range(2))
    match dice.number(0, 9):
        case 0 | 1:
            return a + b
        case 2:
            return a - b
        case 3 | 4:
            return a * b
        case 5:
            return a / (b + 3.0) if dice.flip() else a / dice.pick(*leaves)[i, j]
        case 6:
            return te.select(dice.pick(leaves[0][i, j] > 1.0, j > 1), a, b)
        case 7:
            return dice.pick(te.maximum(a, b), te.exp(-te.abs(a)), -a)
        case 8 if not terms:
            k = te.reduce_axis(TERMS, "k")
            return dice.pick(te.sum, te.sum, te.max)(element(dice, leaves, i, j, [k], depth - 1), [k])
    return -a


def test_factors_of_operands_are_factors_of_the_output():
    """Random expressions, all choices of operands: where it says so, a factor for each row of theirs is one for each row of the output."""
    scaling = 0
    for number in range(400):
        dice = Seeded(f"scales {number}")
        values = [Value(name, "float64", (ROWS, max(COLUMNS, TERMS))) for name in "xyz"]
        leaves = [v.placeholder() for v in values]
        tensor = te.compute((ROWS, COLUMNS), lambda i, j, d=dice, of=leaves: element(d, of, i, j, [], d.number(1, 4)), "out")
        body = Body(tensor, inlined(tensor), dict(zip(values, leaves, strict=True)))
        arrays = [RNG.uniform(0.5, 2, v.shape) for v in values]
        factors = RNG.uniform(-3, 3, (ROWS, 1))
        (before,) = evaluate([tensor], dict(zip(leaves, arrays, strict=True)))
        for chosen in range(1, 8):
            if scales_with(body, [v for n, v in enumerate(values) if chosen >> n & 1]):
                scaled = [a * factors if chosen >> n & 1 else a for n, a in enumerate(arrays)]
                (after,) = evaluate([tensor], dict(zip(leaves, scaled, strict=True)))
                np.testing.assert_allclose(after, before * factors, rtol=1e-9, atol=1e-12, err_msg=str(body.expr))
                scaling += 1
    assert scaling > 200


def test_parts_that_are_shared_are_looked_at_once():
    """Clenshaw's recurrence reads each value twice: as a tree, it has as many nodes as the 60th number of Fibonacci."""

    def series(x):
        low, high = te.const(0.0, "float32"), te.const(1.0, "float32")
        for n in range(60):
            low, high = high, x * high - low + 1.0 / (n + 1)
        return high

    n = node(Operator("series", lambda x: te.elementwise("series", series, x)), (7,))
    assert affine(body_of(n), n.inputs[0]) is None

    half = node(Operator("half", lambda x, y: te.elementwise("half", lambda a, b: (a + b) * 0.5 - a * b, x, y)), (7,), (7,))
    assert affine(body_of(half), half.inputs[0]) is not None
