"""Partition: which operators become one kernel, why others do not, and that nothing changes in value."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tcomp.ir.expr import dim
from tcomp.ir.fallback import FallbackKind
from tcomp.ir.graph import IF, KERNEL, GraphBuilder, Node, Value
from tcomp.ops import elementwise as ew, movement as mv
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import GATHER, TOP_K
from tcomp.ops.nn import ADD_CHANNELS, CAUSAL_MASK, CONV, MAX_POOL
from tcomp.ops.reduction import REDUCE_MEAN, REDUCE_SUM, SOFTMAX
from tcomp.passes.dce import eliminate_dead
from tcomp.passes.partition import INLINE_ELEMENTS, MAX_OPERATORS, partition

RNG = np.random.default_rng(0)


def random(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def kernels(graph):
    """The operators of each kernel, in order."""
    assert all(n.op is KERNEL for n in graph.nodes)
    return [[m.op.name for m in n.bodies[0].nodes] for n in graph.nodes]


def lines(unfused):
    """The edges that are not fused, as they are printed; each is of that kind."""
    assert all(f.kind is FallbackKind.NOT_FUSED for _, f in unfused)
    return [f"%{value}: {f}" for value, f in unfused]


@pytest.fixture
def parts(unchanged):
    """The kernels of a graph, after checking that its values are unchanged; and the notes."""

    def run(graph, rtol=1e-5):
        unfused = []
        after = partition(graph, unfused)
        unchanged(graph, after, rtol=rtol)
        return kernels(after), lines(unfused)

    return run


def convolution(b, x, channels, kernel=1, name=""):
    (y,) = b.add(
        CONV, [x, b.constant(random(channels, int(x.shape[1]), kernel, kernel))], {"strides": (1, 1), "dilations": (1, 1), "group": 1}, name
    )
    return b.add(ADD_CHANNELS, [y, b.constant(random(channels))])[0]


def residual_block():
    b = GraphBuilder("block")
    x = b.input("x", "float32", (1, 4, 6, 6))
    (y,) = b.add(ew.RELU, [convolution(b, x, 8, name="first")])
    (y,) = b.add(mv.PAD, [y, None], {"before": (0, 0, 1, 1), "after": (0, 0, 1, 1), "mode": "constant"})
    y = convolution(b, y, 4, 3, "second")
    (y,) = b.add(ew.ADD, [y, x])
    return b.build(b.add(ew.RELU, [y], name="out"))


def test_convolutions_take_their_epilogues_along(parts):
    graph = residual_block()
    (first, *_, last), _ = parts(graph)
    assert first[:3] == ["conv", "add_channels", "relu"]
    assert last[-4:] == ["conv", "add_channels", "add", "relu"]
    assert partition(graph).nodes[-1].name == "out"


def test_printed(golden):
    b = GraphBuilder("head")
    x = b.input("x", "float32", (2, 6))
    y = b.add(MATMUL, [x, b.constant(np.arange(24, dtype=np.float32).reshape(6, 4), "w")], name="logits")
    y = b.add(ew.ADD, [*y, b.constant(np.array([0.5], np.float32), "bias")], name="shifted")
    golden("partitioned_graph.txt", str(partition(b.build(b.add(SOFTMAX, y, {"axes": (1,)}, "softmax")))))


def test_elementwise_chains_and_diamonds_are_one_kernel(parts):
    b = GraphBuilder()
    x, y = b.input("x", "float32", (3, 5)), b.input("y", "float32", (5,))
    (s,) = b.add(ew.SIGMOID, [x])
    (t,) = b.add(ew.MUL, [x, s])
    (u,) = b.add(ew.ADD, [t, y])
    (v,) = b.add(ew.TANH, [t])
    assert parts(b.build(b.add(ew.SUB, [u, v]))) == ([["sigmoid", "mul", "add", "tanh", "sub"]], [])


def test_one_contraction_with_prologue_and_epilogue(parts):
    b = GraphBuilder()
    x = b.input("x", "float32", (4, 3))
    (t,) = b.add(mv.TRANSPOSE, [x], {"perm": (1, 0)})
    (y,) = b.add(MATMUL, [t, b.input("w", "float32", (4, 5))])
    (y,) = b.add(ew.ADD, [y, b.input("bias", "float32", (5,))])
    assert parts(b.build(b.add(ew.RELU, [y]))) == ([["transpose", "matmul", "add", "relu"]], [])


def test_two_reductions_are_two_kernels(parts):
    b = GraphBuilder()
    (y,) = b.add(MATMUL, [b.input("x", "float32", (4, 6)), b.input("w", "float32", (6, 5))], name="product")
    found, notes = parts(b.build(b.add(SOFTMAX, [y], {"axes": (1,)}, "soft")))
    assert found == [["matmul"], ["softmax"]]
    assert notes == ["%product: matmul -> softmax (soft) not fused: both sides reduce"]


def test_dear_work_is_not_repeated_by_a_contraction(parts):
    b = GraphBuilder()
    (y,) = b.add(ew.TANH, [b.input("x", "float32", (4, 6))], name="t")
    (y,) = b.add(MATMUL, [y, b.input("w", "float32", (6, 50))], name="p")
    found, (note,) = parts(b.build([y]))
    assert found == [["tanh"], ["matmul"]]
    assert note == "%t: tanh -> matmul (p) not fused: the reader uses each element many times, it would be computed again each time"


def test_a_value_with_readers_in_several_kernels_is_stored(parts):
    b = GraphBuilder()
    (e,) = b.add(ew.EXP, [b.input("x", "float32", (4, 4))], name="e")
    outputs = b.add(MATMUL, [e, e], name="square") + b.add(REDUCE_SUM, [e], {"axes": (0,), "keepdims": False}, "sum")
    found, notes = parts(b.build(outputs))
    assert found == [["exp"], ["matmul"], ["reduce_sum"]]
    assert [n.split("not fused: ")[1] for n in notes] == ["the value has several readers, in different kernels"] * 2


def test_each_reader_takes_a_view_along(parts):
    b = GraphBuilder()
    x, w = b.input("x", "float32", (8, 6)), b.input("w", "float32", (8, 5))
    (turned,) = b.add(mv.TRANSPOSE, [x], {"perm": (1, 0)})
    found, _ = parts(b.build([*b.add(MATMUL, [turned, w]), *b.add(MATMUL, [b.input("v", "float32", (4, 6)), turned])]))
    assert found == [["transpose", "matmul"], ["transpose", "matmul"]]


def test_one_of_two_readers_takes_a_view_along(parts):
    b = GraphBuilder()
    (turned,) = b.add(mv.TRANSPOSE, [b.input("x", "float32", (8, 6, 5))], {"perm": (1, 0, 2)})
    (product,) = b.add(MATMUL, [b.input("v", "float32", (6, 4, 8)), turned])
    found, _ = parts(b.build([product, b.add(TOP_K, [turned], {"k": 2, "axis": 2, "largest": True})[0]]))
    assert sorted(found) == [["top_k"], ["transpose"], ["transpose", "matmul"]]


@pytest.mark.parametrize("contracted", [False, True])
def test_what_few_elements_make_is_computed_by_each_reader(parts, contracted):
    b = GraphBuilder()
    x, m, n = b.input("x", "float32", (16, 12)), b.input("m", "float32", (16, 1)), b.input("n", "float32", (12,))
    (mask,) = b.add(ew.ADD, [m, n])
    (total,) = (
        b.add(MATMUL, [mask, x], {"transpose_b": True}) if contracted else b.add(REDUCE_SUM, [mask], {"axes": (1,), "keepdims": False})
    )
    found, _ = parts(b.build([*b.add(ew.MUL, [x, mask]), total]))
    if contracted:  # what is read many times is stored, and then for all
        assert sorted(found) == [["add"], ["matmul"], ["mul"]]
    else:
        assert sorted(found) == [["add", "mul"], ["add", "reduce_sum"]]


def test_positions_are_computed_by_each_reader(parts):
    """Also behind products, where each is read again and again; unless that takes many operations."""
    b = GraphBuilder("positions")
    x = b.input("x", "float32", (6, 8))
    (places,) = b.add(mv.ARANGE, [], {"start": 2, "step": 1, "count": 6, "dtype": "int64"})
    (far,) = b.add(ew.CAST, b.add(ew.SIN, b.add(ew.CAST, [places], {"dtype": "float32"})), {"dtype": "int64"})
    scores = [b.add(MATMUL, [x, b.constant(random(8, 9))], {"transpose_a": False, "transpose_b": False})[0] for _ in range(2)]
    found, _ = parts(b.build([b.add(CAUSAL_MASK, [y, row, None], {"window": 0})[0] for y, row in zip(scores, (places, far), strict=True)]))
    assert sorted(found) == [["arange", "cast", "sin", "cast"], ["arange", "matmul", "causal_mask"], ["matmul", "causal_mask"]]


def test_reshapes_of_what_is_stored_take_no_kernel(unchanged):
    b = GraphBuilder()
    x, w = b.input("x", "float32", (4, 6, 8)), b.input("w", "float32", (8, 5))
    (rows,) = b.add(mv.RESHAPE, [x], {"shape": (24, 8)})
    (turned,), (y,) = b.add(mv.TRANSPOSE, [rows], {"perm": (1, 0)}), b.add(MATMUL, [rows, w])
    (again,) = b.add(mv.RESHAPE, [y], {"shape": (4, 6, 5)})
    graph = b.build([*b.add(SOFTMAX, [again], {"axes": (1,)}), *b.add(MATMUL, [turned, y]), *b.add(mv.RESHAPE, [y], {"shape": (120,)})])
    after = partition(graph)
    unchanged(graph, after, rtol=1e-5)
    assert [[m.op.name for m in n.bodies[0].nodes] for n in after.nodes if n.op is KERNEL] == [
        ["matmul"], ["softmax"], ["transpose", "matmul"],
    ]  # fmt: skip


def test_outputs_of_the_graph_are_stored(parts):
    b = GraphBuilder()
    (e,) = b.add(ew.EXP, [b.input("x", "float32", (4,))], name="e")
    found, (note,) = parts(b.build([e, *b.add(ew.NEG, [e], name="n")]))
    assert found == [["exp"], ["neg"]] and note.endswith("the value is an output of the graph")


def test_imperative_operators_stay_alone(parts):
    b = GraphBuilder()
    (x,) = b.add(ew.NEG, [b.input("x", "float32", (3, 8))], name="n")
    values, indices = b.add(TOP_K, [x], {"k": 3, "axis": 1, "largest": True}, "top")
    found, notes = parts(b.build([*b.add(ew.RELU, [values]), indices]))
    assert found == [["neg"], ["top_k"], ["relu"]]
    assert len(notes) == 2 and all("kernels of their own" in n for n in notes)


def test_unused_outputs_vanish(unchanged):
    b = GraphBuilder()
    values, _ = b.add(TOP_K, [b.input("x", "float32", (3, 8))], {"k": 3, "axis": 1, "largest": True}, "top")
    graph = b.build([values])
    after = unchanged(graph, partition(graph))
    assert after.nodes[0].outputs == (values,) and after.nodes[0].bodies[0].outputs[0].name == values.name


def test_tiny_constants_become_literals(unchanged):
    b = GraphBuilder()
    x = b.input("x", "float32", (4,))
    (y,) = b.add(ew.MUL, [x, b.constant(np.float32(2), "two")])
    (y,) = b.add(ew.ADD, [y, b.constant(np.arange(4, dtype=np.float32), "ramp")])
    graph = b.build([y])
    after = unchanged(graph, partition(graph))
    (node,) = after.nodes
    assert [v.name for v in node.inputs] == ["x", "ramp"] and [v.name for v in after.constants] == ["ramp"]
    assert all(a.size <= INLINE_ELEMENTS for a in node.bodies[0].constants.values())


def test_kernels_stay_small_enough_to_compile(parts):
    b = GraphBuilder()
    x = b.input("x", "float32", (2,))
    for _ in range(MAX_OPERATORS + 7):
        (x,) = b.add(ew.TANH, [x])
    found, notes = parts(b.build([x]))
    assert [len(k) for k in found] == [MAX_OPERATORS, 7] and f"at most {MAX_OPERATORS} operators" in notes[0]


def test_bodies_of_control_flow_are_partitioned(unchanged):
    def branch(op):
        g = GraphBuilder("branch")
        x = g.input("x", "float32", (3,))
        return g.build(g.add(ew.NEG, g.add(op, [x])))

    b = GraphBuilder()
    c, x = b.input("c", "bool", ()), b.input("x", "float32", (3,))
    (x,) = b.add(ew.EXP, [x])
    y = Value("y", "float32", (3,))
    b.append(Node(IF, (c, x), (y,), {}, "if", (branch(ew.RELU), branch(ew.TANH))))
    graph = b.build(b.add(ew.NEG, [y]))
    unfused = []
    after = unchanged(graph, partition(graph, unfused), rtol=1e-6)
    notes = lines(unfused)
    assert [n.op.name for n in after.nodes] == ["kernel", "if", "kernel"]
    assert [kernels(body) for body in after.nodes[1].bodies] == [[["relu", "neg"]], [["tanh", "neg"]]]
    assert len(notes) == 2 and all("control flow" in n for n in notes)


# ---------------------------------------------------------------- random graphs


@st.composite
def graphs(draw):
    """Random dataflow of elementwise operators, moves, reductions and contractions; several outputs, symbolic batch."""
    b = GraphBuilder("random")
    n = draw(st.sampled_from([3, dim("n", 1, 100)]))
    values = [b.input("x", "float32", (n, 4)), b.input("y", "float32", (n, 4)), b.input("z", "float32", (4,))]
    square = b.constant(random(4, 4), "w")
    for _ in range(draw(st.integers(2, 10))):
        v = draw(st.sampled_from(values))
        match draw(st.sampled_from(["unary", "unary", "binary", "binary", "sum", "matmul", "softmax", "slice", "gather", "mean"])):
            case "unary":
                (v,) = b.add(draw(st.sampled_from([ew.RELU, ew.TANH, ew.NEG, ew.SIGMOID])), [v])
            case "binary":
                (v,) = b.add(draw(st.sampled_from([ew.ADD, ew.MUL, ew.MAX])), [v, draw(st.sampled_from(values))])
            case "sum":
                (v,) = b.add(
                    REDUCE_SUM,
                    [v],
                    {"axes": (len(v.shape) - 2,), "keepdims": True} if len(v.shape) > 1 else {"axes": (0,), "keepdims": True},
                )
            case "mean":
                (v,) = b.add(REDUCE_MEAN, [v], {"axes": (len(v.shape) - 1,), "keepdims": True})
            case "matmul" if v.shape[-1] == 4:
                (v,) = b.add(MATMUL, [v, square])
            case "softmax":
                (v,) = b.add(SOFTMAX, [v], {"axes": (len(v.shape) - 1,)})
            case "slice" if v.shape[-1] == 4:
                axis = len(v.shape) - 1
                (v,) = b.add(mv.SLICE, [v], {"starts": (*[0] * axis, 3), "steps": (*[1] * axis, -1), "shape": v.shape})
            case "gather" if v.shape[-1] == 4:
                (v,) = b.add(GATHER, [v, b.constant(np.array([3, 0, 0, 2], np.int64))], {"axis": len(v.shape) - 1})
        if v not in values:
            values.append(v)
    computed = [v for node in b.nodes for v in node.outputs]
    outputs = draw(st.lists(st.sampled_from(computed), min_size=1, max_size=3, unique=True)) if computed else b.add(ew.NEG, values[:1])
    return eliminate_dead(b.build(outputs))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs())
def test_random_graphs_keep_their_values(unchanged, graph):
    unfused = []
    after = unchanged(graph, partition(graph, unfused), rtol=1e-5)
    notes = lines(unfused)
    assert sum(map(len, kernels(after))) == len(graph.nodes)
    assert all(" not fused: " in note for note in notes)


def test_max_pool_takes_no_convolution_along(parts):
    b = GraphBuilder()
    y = convolution(b, b.input("x", "float32", (1, 3, 6, 6)), 4, 3)
    (y,) = b.add(ew.RELU, [y], name="relu")
    found, (note,) = parts(b.build(b.add(MAX_POOL, [y], {"kernel": (2, 2), "strides": (2, 2), "dilations": (1, 1)}, "pool")))
    assert found == [["conv", "add_channels", "relu"], ["max_pool"]]
    assert note == "%relu: relu -> max_pool (pool) not fused: both sides reduce"


@pytest.mark.parametrize(
    ("group", "size", "expected"), [(4, 5, [["pad", "conv"]]), (4, 7, [["pad"], ["conv"]]), (1, 3, [["pad"], ["conv"]])]
)
def test_what_folds_few_elements_pads_what_it_reads(parts, group, size, expected):
    b, around = GraphBuilder(), (0, 0, size // 2, size // 2)
    (padded,) = b.add(mv.PAD, [b.input("x", "float32", (1, 4, 7, 6)), None], {"before": around, "after": around})
    weights = b.constant(random(4, 4 // group, size, size))
    found, _ = parts(b.build(b.add(CONV, [padded, weights], {"strides": (1, 1), "dilations": (1, 1), "group": group})))
    assert found == expected
