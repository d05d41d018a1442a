"""What a node computes is read off its tensor expression: operators of one's own are recognised, and near misses are not."""

import pytest

from tcomp.ir import te
from tcomp.ir.graph import GraphBuilder, Operator
from tcomp.ops.elementwise import MUL
from tcomp.ops.matmul import EINSUM, MATMUL
from tcomp.ops.nn import CONV, CONV_TRANSPOSE, DENSE
from tcomp.ops.reduction import SOFTMAX
from tcomp.passes.structure import Convolution, MatrixProduct, adjacent_windows, convolution, matrix_product, softmax_axis


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
        (node(DENSE, (2, 3, 4), (5, 4)), (False, True)),
        (node(EINSUM, (3, 4), (4, 5), equation="ij,jk->ik"), (False, False)),
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
