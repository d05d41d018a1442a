"""Canonical form."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.ir import te
from tcomp.ir.expr import dim
from tcomp.ir.graph import GraphBuilder, Operator
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ops.elementwise import ADD, CAST, CLIP, DIV, MAX, MUL, NEG, POW, SUB
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import DEPTH_TO_SPACE, EXPAND, IDENTITY, PAD, RESHAPE, SLICE, SPACE_TO_DEPTH, TRANSPOSE
from tcomp.ops.reduction import INSTANCE_NORM
from tcomp.passes.canonicalize import canonicalize
from tcomp.passes.rewrite import Notes

N = dim("n")


def operators(graph):
    return [node.op.name for node in graph.nodes]


def chain(shape, *steps, dtype="float32"):
    """x -> step -> step -> ... -> neg; a step is (operator, constant inputs, attributes)."""
    b = GraphBuilder()
    x = b.input("x", dtype, shape)
    for op, constants, attrs in steps:
        (x,) = b.add(op, [x, *(None if c is None else b.constant(np.asarray(c)) for c in constants)], attrs)
    return b.build(b.add(NEG, [x]))


f32 = np.float32


@pytest.mark.parametrize(
    "step",
    [
        (ADD, [f32(0)], {}),
        (ADD, [np.zeros((3, 1), f32)], {}),
        (SUB, [f32(0)], {}),
        (MUL, [np.ones(4, f32)], {}),
        (DIV, [f32(1)], {}),
        (POW, [f32(1)], {}),
        (POW, [np.int64(1)], {}),
        (MAX, [f32(-np.inf)], {}),
        (IDENTITY, [], {}),
        (CLIP, [None, None], {}),
        (CLIP, [f32(-np.inf), f32(np.inf)], {}),
        (CAST, [], {"dtype": "float32"}),
        (TRANSPOSE, [], {"perm": (0, 1, 2)}),
        (RESHAPE, [], {"shape": (N, 3, 4)}),
        (EXPAND, [], {"shape": (N, 1, 4)}),
        (SLICE, [], {"starts": (0, 0, 0), "steps": (1, 1, 1), "shape": (N, 3, 4)}),
        (PAD, [None], {"before": (0, 0, 0), "after": (0, 0, 0)}),
    ],
    ids=lambda step: step[0].name,
)
def test_what_changes_nothing_goes(unchanged, step):
    before = chain((N, 3, 4), step)
    assert operators(unchanged(before, canonicalize(before))) == ["neg"]


def test_half_precision_arithmetic_is_seen_through(unchanged):
    before = chain((3,), (MUL, [np.float16(1)], {}), dtype="float16")
    assert operators(unchanged(before, canonicalize(before))) == ["neg"]


@pytest.mark.parametrize(
    "step",
    [
        (ADD, [np.zeros((2, 1, 1), f32)], {}),  # broadcasts
        (MUL, [np.array([1, 1, 1, 2], f32)], {}),
        (SLICE, [], {"starts": (0, 0, 3), "steps": (1, 1, -1), "shape": (1, 3, 4)}),
        (MAX, [f32(0)], {}),
    ],
)
def test_what_changes_something_stays(unchanged, step):
    before = chain((1, 3, 4), step)
    assert operators(unchanged(before, canonicalize(before))) == [step[0].name, "neg"]


@pytest.mark.parametrize("is_output", [False, True])
def test_one_of_several_results_is_an_input(unchanged, is_output):
    """The node stays for the other one, and the rules come to an end."""
    pair = Operator("pair", lambda x: (te.compute(x.shape, lambda i: x[i], "same"), te.compute(x.shape, lambda i: x[i] * 2.0, "double")))
    b = GraphBuilder()
    x = b.input("x", "float32", (4,))
    same, double = b.add(pair, [x])
    (s,), (d,) = b.add(NEG, [same]), b.add(NEG, [double])
    after = unchanged(before := b.build([s, d, *([same] if is_output else [])]), canonicalize(before))
    assert operators(after) == ["pair", "neg", "neg"]
    assert (after.nodes[1].inputs[0] is x) != is_output


def test_outputs_keep_their_names_and_storage(unchanged):
    b = GraphBuilder()
    x, zero = b.input("x", "float32", (3,)), b.constant(f32(0))
    (p,) = b.add(ADD, [x, zero], name="p")
    (q,) = b.add(NEG, [x], name="q")
    (r,) = b.add(ADD, [q, zero], name="r")
    (s,) = b.add(MUL, [r, r], name="s")
    before = b.build([p, r, s])
    after = unchanged(before, canonicalize(before))
    assert operators(after) == ["neg", "mul", "identity"] and after.outputs == (p, r, s)
    assert operators(unchanged(after, canonicalize(after))) == ["neg", "mul", "identity"]


MOVES = {
    "two transposes": ((2, 3, 4), [(TRANSPOSE, {"perm": (1, 2, 0)}), (TRANSPOSE, {"perm": (1, 2, 0)})], ["transpose"]),
    "there and back": ((2, 3, 4), [(TRANSPOSE, {"perm": (1, 2, 0)}), (TRANSPOSE, {"perm": (2, 0, 1)})], []),
    "two reshapes": ((N, 12), [(RESHAPE, {"shape": (N, 3, 4)}), (RESHAPE, {"shape": (N * 3, 4)})], ["reshape"]),
    "reshape back": ((N, 12), [(RESHAPE, {"shape": (N * 3, 4)}), (RESHAPE, {"shape": (N, 12)})], []),
    "transpose of ones": ((N, 1, 4), [(TRANSPOSE, {"perm": (1, 0, 2)})], ["reshape"]),
    "three": (
        (2, 3, 4),
        [(RESHAPE, {"shape": (2, 1, 3, 4)}), (TRANSPOSE, {"perm": (0, 2, 1, 3)}), (RESHAPE, {"shape": (6, 4)})],
        ["reshape"],
    ),
    "blocks": (
        (1, 8, 2, 2),
        [(DEPTH_TO_SPACE, {"block": 2, "channels_first": True}), (SPACE_TO_DEPTH, {"block": 2, "channels_first": True})],
        [],
    ),
    "no single operator": (
        (N, 12),
        [(RESHAPE, {"shape": (N, 3, 4)}), (TRANSPOSE, {"perm": (0, 2, 1)}), (RESHAPE, {"shape": (N, 12)})],
        ["reshape", "transpose", "reshape"],
    ),
}


@pytest.mark.parametrize("shape, steps, expected", MOVES.values(), ids=MOVES)
def test_movements_become_one(unchanged, shape, steps, expected):
    before = chain(shape, *((op, [], attrs) for op, attrs in steps))
    assert operators(unchanged(before, canonicalize(before))) == [*expected, "neg"]


@given(st.data())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_any_chain_of_movements_keeps_its_meaning(data):
    shape, steps = (2, 3, 1, 4), []
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            steps.append((TRANSPOSE, [], {"perm": tuple(data.draw(st.permutations(range(len(shape)))))}))
            shape = tuple(shape[axis] for axis in steps[-1][2]["perm"])
        else:
            shape = data.draw(st.sampled_from([(24,), (2, 12), (6, 4), (4, 6), (2, 3, 1, 4), (3, 2, 2, 2), (1, 24, 1)]))
            steps.append((RESHAPE, [], {"shape": shape}))
    before = chain((2, 3, 1, 4), *steps)
    after = canonicalize(before)
    x = {"x": np.arange(24, dtype=f32).reshape(2, 3, 1, 4)}
    assert len(after.nodes) <= len(before.nodes)
    np.testing.assert_array_equal(*(evaluate_graph(g, x)[before.outputs[0].name] for g in (before, after)))


def pad(before, after, filling=None, mode="constant"):
    return PAD, [filling], {"before": before, "after": after, "mode": mode}


def test_pads_add_up(unchanged):
    before = chain((2, 3), pad((1, 0), (0, 2)), pad((1, 1), (3, 0), f32(0)))
    after = unchanged(before, canonicalize(before))
    assert operators(after) == ["pad", "neg"] and after.nodes[0].attrs["before"] == (2, 1) and after.nodes[0].attrs["after"] == (3, 2)


@pytest.mark.parametrize(
    "second, reason",
    [
        (pad((1, 0), (0, 0), f32(1)), "different fillings"),
        (pad((-1, 0), (0, 0)), "may cut off"),
        (pad((1, 0), (0, 0), mode="edge"), "mirrors or repeats"),
    ],
)
def test_other_pads_stay_and_say_why(unchanged, second, reason):
    notes = Notes()
    before = chain((2, 3), pad((1, 0), (0, 2)), second)
    after = unchanged(before, canonicalize(before, notes))
    assert operators(after) == ["pad", "pad", "neg"]
    assert any(reason in line for lines in notes.lines.values() for line in lines)


@pytest.mark.parametrize(
    "source, middle, target, left",
    [
        ("float32", "float64", "float32", 0),
        ("float16", "float32", "int32", 1),
        ("int8", "float16", "int32", 1),
        ("uint8", "int16", "float32", 1),
        ("float32", "float16", "float32", 2),
        ("int32", "float32", "int32", 2),
        ("int8", "uint8", "int32", 2),
        ("int8", "float32", "uint8", 2),  # by way of a float it saturates
        ("int8", "float32", "int16", 1),
        ("float32", "int64", "float32", 2),
    ],
)
def test_casts_that_lose_nothing_merge(unchanged, source, middle, target, left):
    before = chain((50,), (CAST, [], {"dtype": middle}), (CAST, [], {"dtype": target}), dtype=source)
    assert operators(unchanged(before, canonicalize(before))) == ["cast"] * left + ["neg"]


def test_small_powers_are_products(unchanged):
    for exponent, expected in [
        (2, ["mul"]),
        (3, ["mul", "mul"]),
        (-1, ["reciprocal"]),
        (0.5, ["sqrt"]),
        (-0.5, ["sqrt", "reciprocal"]),
        (1.5, ["pow"]),
    ]:
        before = chain((50,), (MAX, [f32(0.1)], {}), (POW, [f32(exponent)], {}))
        assert operators(unchanged(before, canonicalize(before), rtol=1e-6)) == ["max", *expected, "neg"]


def test_division_by_powers_of_two_is_exact(unchanged):
    before = chain((3,), (DIV, [np.array([8, -0.25, 1], f32)], {}))
    assert operators(unchanged(before, canonicalize(before))) == ["mul", "neg"]
    for divisor in (3, 0, np.inf, 2.0**-128, 2.0**127):
        before = chain((3,), (DIV, [f32(divisor)], {}))
        assert operators(unchanged(before, canonicalize(before))) == ["div", "neg"]


def flattened_norm(shape, inner, back, uses=1):
    """x -> reshape -> instance norm -> reshape, the first of several readers of the norm."""
    b = GraphBuilder()
    x = b.input("x", "float32", shape)
    (flat,) = b.add(RESHAPE, [x], {"shape": inner})
    scale, bias = (b.constant(np.linspace(0.5, 2.0, inner[1], dtype=np.float32) + n) for n in range(2))
    (norm,) = b.add(INSTANCE_NORM, [flat, scale, bias], {"epsilon": 1e-5})
    results = [*b.add(NEG, b.add(RESHAPE, [norm], {"shape": back})), *(b.add(NEG, [norm])[0] for _ in range(uses - 1))]
    return b.build(results)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("shape", [(2, 6, 5, 3), (1, 6, 7), (N, 6, 3, 2)], ids=str)
def test_norms_of_reshaped_channels_are_norms_of_groups(unchanged, shape, groups):
    inner = (shape[0], groups, 6 // groups * int(np.prod(shape[2:])))
    before = flattened_norm(shape, inner, shape)
    found = operators(unchanged(before, canonicalize(before), rtol=2e-6))
    assert found == ["instance_norm" if groups == 6 else "group_norm", "neg"]


@pytest.mark.parametrize(
    ("shape", "inner", "back"),
    [
        ((2, 6, 5), (1, 2, 30), (2, 6, 5)),  # both instances together
        ((2, 6, 5), (2, 5, 6), (2, 6, 5)),  # groups that cut channels
        ((2, 6, 5), (2, 2, 15), (2, 5, 6)),
        ((2, 6), (2, 2, 3), (2, 6)),
    ],
    ids=str,
)
def test_other_norms_of_reshaped_values_stay(unchanged, shape, inner, back):
    before = flattened_norm(shape, inner, back)
    assert "group_norm" not in operators(unchanged(before, canonicalize(before)))


def test_heads_of_a_product_stay_an_axis(unchanged):
    b = GraphBuilder()
    x, y = b.input("x", "float32", (2, 3, 4, 5)), b.input("y", "float32", (6, 7, 5))
    (left,), (right,) = b.add(RESHAPE, [x], {"shape": (6, 4, 5)}), b.add(TRANSPOSE, [y], {"perm": (0, 2, 1)})
    graph = b.build(b.add(RESHAPE, b.add(MATMUL, [left, right]), {"shape": (2, 3, 4, 7)}))
    after = canonicalize(graph)
    unchanged(graph, after, rtol=1e-5)
    assert next(n for n in after.nodes if n.op is MATMUL).outputs[0].shape == (2, 3, 4, 7)


@pytest.mark.parametrize("other", [(2, 3, 4), (4,), (), (3, 4)])
def test_what_is_computed_of_a_reshaped_product_is_reshaped_last(unchanged, other):
    b = GraphBuilder()
    (y,) = b.add(MATMUL, [b.input("x", "float32", (6, 5)), b.input("w", "float32", (5, 4))])
    (y,) = b.add(RESHAPE, [y], {"shape": (2, 3, 4)})
    (y,) = b.add(ADD, [y, b.input("b", "float32", other)])
    graph = b.build(b.add(NEG, [y]))
    after = canonicalize(graph)
    unchanged(graph, after, rtol=1e-5)
    found = [name for name in operators(after) if name != "reshape" or other != (2, 3, 4)]
    assert found == (["matmul", "reshape", "add", "neg"] if other == (3, 4) else ["matmul", "add", "neg"] + ["reshape"] * (len(other) < 3))


@pytest.mark.parametrize("shape", [(2, 1, 3, 4), (1, 6, 4)])
def test_a_reshaped_product_that_is_stretched_stays(unchanged, shape):
    """As rows of a product that are added to those of each image."""
    b = GraphBuilder()
    (y,) = b.add(MATMUL, [b.input("x", "float32", (6, 5)), b.input("w", "float32", (5, 4))])
    (y,) = b.add(RESHAPE, [y], {"shape": shape})
    graph = b.build(b.add(ADD, [b.input("b", "float32", tuple(5 if n == 1 else n for n in shape)), y]))
    assert operators(unchanged(graph, canonicalize(graph), rtol=1e-5)) == ["matmul", "reshape", "add"]
