"""Layouts of intermediate values and of weights: what is chosen, what stays row-major, and that nothing changes in value."""

from functools import partial

import numpy as np
import pytest

from tcomp.backends import backend_of
from tcomp.backends.kernel import operand_layouts, predicted_seconds
from tcomp.ir.expr import dim
from tcomp.ir.graph import IF, KERNEL, GraphBuilder, Node, Value
from tcomp.ir.layout import Layout
from tcomp.ops import elementwise as ew, movement as mv
from tcomp.ops.bilinear import WINOGRAD_INPUT
from tcomp.ops.image import RESAMPLE
from tcomp.ops.matmul import MATMUL
from tcomp.ops.nn import ADD_CHANNELS, CONV, MAX_POOL
from tcomp.passes.layout import choose_layouts
from tcomp.passes.partition import partition
from tcomp.target import CpuTarget, Target

RNG = np.random.default_rng(0)
CHANNELS_LAST = Layout.permuted((0, 2, 3, 1))


def random(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def row_major(body, constants):
    """No wishes for weights."""
    return {}


def conv(b, x, channels, kernel=3, name="conv"):
    w = b.constant(random(channels, int(x.shape[1]), kernel, kernel), f"{name}.w")
    return b.add(CONV, [x, w], {"strides": (1, 1), "dilations": (1, 1), "group": 1}, name)[0]


def small_net(batch=1, size=12):
    b = GraphBuilder("net")
    x = b.input("x", "float32", (batch, 3, size, size))
    (y,) = b.add(ADD_CHANNELS, [conv(b, x, 8, 3, "first"), b.constant(random(8), "first.bias")])
    (y,) = b.add(ew.RELU, [y], name="active")
    (p,) = b.add(MAX_POOL, [y], {"kernel": (2, 2), "strides": (2, 2), "dilations": (1, 1)}, "pooled")
    (y,) = b.add(ew.ADD, [conv(b, p, 8, 1, "second"), p], name="joined")
    y = conv(b, y, 4, 1, "third")
    (y,) = b.add(mv.RESHAPE, [y], {"shape": (batch, int(np.prod(y.shape[1:])))}, "flat")
    return b.build(b.add(MATMUL, [y, b.constant(random(int(y.shape[1]), 5), "classes")], name="logits"))


def layouts(graph):
    """The layouts of all values that kernels compute, by name."""
    return {v.name: v.layout for n in graph.nodes for v in n.outputs}


def chosen(unchanged, graph, operand_layouts=row_major, seconds=None):
    graph = partition(graph)
    after = unchanged(graph, choose_layouts(graph, operand_layouts, seconds=seconds))
    for node in after.nodes:  # a kernel's body agrees with the outside
        if node.op is KERNEL:
            inside = [*node.bodies[0].inputs, *node.bodies[0].outputs]
            assert [v.layout for v in inside] == [v.layout for v in (*node.inputs, *node.outputs)]
    return after


def test_convolutions_and_what_follows_them_are_channels_last(unchanged):
    found = layouts(chosen(unchanged, small_net()))
    assert found["active"] == found["pooled"] == found["joined"] == CHANNELS_LAST
    assert found["logits"] is None  # outputs of the graph are row-major


@pytest.mark.parametrize("series, kept", [(7, None), (16, Layout.permuted((0, 2, 3, 1)))])
def test_products_of_rows_that_fill_vectors_are_no_rows_of_few_neighbours(unchanged, series, kept):
    """Time series lie side by side: what is made of patches follows them, but not products whose lanes would be few series."""
    b = GraphBuilder()
    (t,) = b.add(mv.TRANSPOSE, [b.input("x", "float32", (1, 48, series))], {"perm": (0, 2, 1)})
    (t,) = b.add(ew.RELU, b.add(mv.RESHAPE, [t], {"shape": (1, series, 3, 16)}), name="patches")
    for name in ("first", "second"):
        (t,) = b.add(ew.TANH, b.add(MATMUL, [t, b.constant(random(16, 16), f"{name}.w")]), name=name)
    found = layouts(chosen(unchanged, b.build([t])))
    assert found["patches"] == Layout.permuted((0, 2, 3, 1)) and found["first"] == kept


def seconds(body):
    """A model for which convolutions take less time channels last, and all else takes little."""
    if not any(n.op is CONV for n in body.nodes):
        return 1
    return 2 if body.outputs[0].layout == CHANNELS_LAST else 4


@pytest.mark.parametrize(("channels", "expected"), [(16, {"z.last": CHANNELS_LAST, "z": None}), (4, {"z": None})])
def test_outputs_are_turned_by_a_kernel_of_their_own_where_that_is_faster(unchanged, channels, expected):
    """Few channels fill no lanes; nothing is asked about what folds nothing."""
    b = GraphBuilder("n")
    y = conv(b, b.input("x", "float32", (1, 3, 12, 12)), channels, name="z")
    (active,) = b.add(ew.RELU, [y], name="active")
    before = b.build([y, active])
    after = layouts(chosen(unchanged, before, seconds=seconds))
    assert {name: layout for name, layout in after.items() if name.startswith("z")} == expected
    assert "active.last" not in after
    assert layouts(chosen(unchanged, before, seconds=lambda body: 1))["z"] is None
    assert "z.last" not in layouts(chosen(unchanged, before))


def test_what_is_renamed_is_turned_likewise(unchanged):
    """A convolution of single pixels whose result is reshaped in place: queries, keys and values of pixels."""
    b = GraphBuilder("n")
    y = conv(b, b.input("x", "float32", (1, 3, 12, 12)), 16, 1, name="z")
    (t,) = b.add(mv.TRANSPOSE, b.add(mv.RESHAPE, [y], {"shape": (1, 16, 144)}), {"perm": (0, 2, 1)}, "t")
    after = layouts(chosen(unchanged, b.build([t]), seconds=seconds))
    assert after["z.last"] == CHANNELS_LAST and after["z"] is None


@pytest.mark.parametrize(
    ("shape", "channels", "kernel", "stride", "turned"),
    [
        ((1, 64, 58, 58), 64, 3, 2, True),  # lanes along the rows would gather
        ((1, 64, 30, 30), 64, 3, 1, True),  # 28 are not whole vectors
        ((1, 3, 130, 130), 32, 3, 1, False),  # too little work for each element to pay for turning it
        ((1, 64, 64, 64), 64, 1, 1, False),  # rows may be joined
    ],
    ids=str,
)
def test_convolutions_alone_as_the_model_of_the_machine_sees_them(unchanged, shape, channels, kernel, stride, turned):
    target = CpuTarget.parse("cpu -mcpu=skylake-avx512")
    b = GraphBuilder("n")
    w = b.constant(random(channels, shape[1], kernel, kernel), "w")
    attrs = {"strides": (stride, stride), "dilations": (1, 1), "group": 1}
    before = b.build(b.add(CONV, [b.input("x", "float32", shape), w], attrs, "z"))
    wanted = partial(operand_layouts, backend=backend_of(target))
    assert ("z.last" in layouts(chosen(unchanged, before, wanted, partial(predicted_seconds, backend=backend_of(target))))) == turned


@pytest.mark.parametrize("behind", (False, True), ids=("results", "in between"))
def test_few_outputs_read_rows_of_images_that_are_turned_first(unchanged, behind):
    """Both read the same copy, which has zeros around it; lanes would gather from pixels whose channels lie side by side."""

    def seconds(body):
        return 4 if any(n.op is CONV for n in body.nodes) and body.inputs[0].layout == around else 1

    b = GraphBuilder("n")
    y = conv(b, b.input("x", "float32", (1, 3, 12, 12)), 8, name="first")
    pad = {"before": (0, 0, 1, 1), "after": (0, 0, 1, 1)}
    z, q = (conv(b, b.add(mv.PAD, [y, None], pad)[0], channels, name=name) for name, channels in (("z", 1), ("q", 2)))
    if behind:  # the same for what is not a result of the graph
        q = b.add(MAX_POOL, [q], {"kernel": (3, 3), "strides": (3, 3), "dilations": (1, 1)}, "pooled")[0]
    before = b.build([z, q])
    halo = {2: (1, 1), 3: (1, 1)}
    around, rows = CHANNELS_LAST.with_halo(halo), Layout.identity(4).with_halo(halo)
    after = chosen(unchanged, before, seconds=seconds)
    expected = {"first": around, "first.rows": rows, "z": None, "q": None} | ({"pooled": None} if behind else {})
    assert layouts(after) == expected
    assert "first.rows" not in layouts(chosen(unchanged, before, seconds=lambda body: 1))


@pytest.mark.parametrize("active", (False, True), ids=("an input", "made"))
def test_what_is_read_at_several_places_across_its_rows_is_turned_first(unchanged, active):
    b = GraphBuilder("n")
    x = b.input("x", "float32", (1, 8, 10, 10))
    (y,) = b.add(MAX_POOL, [x], {"kernel": (1, 1), "strides": (1, 1), "dilations": (1, 1)}, "made") if active else (x,)
    (tiles,) = b.add(WINOGRAD_INPUT, [y], {"tile": 2, "taps": (3, 3)}, "tiles")
    after = chosen(unchanged, b.build([tiles, *b.add(ew.ADD, [x, x], name="twice")]))
    assert layouts(after)["made" if active else "x.last"] == CHANNELS_LAST
    assert ("x.last" in layouts(after)) != active
    assert after.inputs[0].layout is None and layouts(after)["twice"] is None


def test_lanes_run_along_channels_where_rows_of_pixels_are_short(unchanged):
    """Of products with matrices that are not constants."""
    for size, layout in ((2, CHANNELS_LAST), (8, None)):
        b = GraphBuilder("n")
        x, w = b.input("x", "float32", (3, 5, size, size)), b.input("w", "float32", (32, 5, 1, 1))
        for name in ("y", "z"):
            (x,) = b.add(CONV, [x, w], {"strides": (1, 1), "dilations": (1, 1), "group": 1}, name)
            w = b.input("v", "float32", (32, 32, 1, 1))
        assert layouts(chosen(partial(unchanged, rtol=1e-4), b.build([x])))["y"] == layout


@pytest.mark.parametrize("window, turned", [(3, True), (1, False), (9, False)])
def test_weights_that_the_caller_gives_are_turned_where_their_rows_are_short(unchanged, window, turned):
    """Longer ones, and those of a single pixel, kernels turn themselves."""
    b = GraphBuilder("n")
    x, w = b.input("x", "float32", (1, 16, 20, 20)), b.input("w", "float32", (32, 16, window, window))
    (y,) = b.add(CONV, [x, w], {"strides": (1, 1), "dilations": (1, 1), "group": 1}, "y")
    (z,) = b.add(ew.RELU, [conv(b, y, 8)], name="z")
    after = chosen(partial(unchanged, rtol=1e-4), b.build([z]), seconds=lambda body: 1)
    assert layouts(after).get("w.rows") == (Layout.permuted((1, 2, 3, 0)) if turned else None)


@pytest.mark.parametrize("rows, columns, turned", [(64, 8, True), (8, 64, False)])
def test_products_follow_the_larger_matrix(unchanged, rows, columns, turned):
    """Of `x`, which is transposed in memory, and `w`, which is not."""
    b = GraphBuilder("n")
    x, w = b.input("x", "float32", (rows, 5), Layout.permuted((1, 0))), b.input("w", "float32", (columns, 5))
    (y,) = b.add(MATMUL, [x, w], {"transpose_b": True}, "y")
    (z,) = b.add(MATMUL, [y, w], {}, "z")
    found = layouts(chosen(partial(unchanged, rtol=1e-5), b.build([z])))["y"]
    assert (found is not None) == turned


def test_inputs_of_the_graph_stay_row_major(unchanged):
    after = chosen(unchanged, small_net())
    assert after.inputs[0].layout is None and after.nodes[0].inputs[0] is after.inputs[0]


def test_weights_get_the_panels_that_their_readers_ask_for(unchanged):
    def wish(body, constants):
        return {n: Layout.blocked((0, 2, 3, 1), 0, 4) for n in constants if len(body.inputs[n].shape) == 4}

    after = chosen(unchanged, small_net(), wish)
    packed = {v.name: v for v in after.constants if v.layout is not None}
    assert set(packed) == {"first.w.packed", "second.w.packed", "third.w.packed"}
    assert packed["first.w.packed"].physical_shape == (2, 3, 3, 3, 4)
    assert not any(v.name.endswith(".w") for v in after.constants)  # the row-major copy is not kept


def test_one_copy_for_each_layout_of_a_shared_weight(unchanged):
    b = GraphBuilder()
    x, y = b.input("x", "float32", (2, 6)), b.input("y", "float32", (9, 6))
    w = b.constant(random(6, 4), "w")
    outputs = [b.add(MATMUL, [v, w], name=name)[0] for v, name in ((x, "p"), (y, "q"), (x, "r"))]
    graph = b.build(outputs)
    after = chosen(unchanged, graph, lambda body, constants: {1: Layout.blocked((1, 0), 1, 2 if body.inputs[0].shape[0] == 2 else 4)})
    assert sorted(str(v.layout) for v in after.constants) == ["(b/2,a,b%2)", "(b/4,a,b%4)"]
    first, second = after.constants.values()
    np.testing.assert_array_equal(first, second)  # constants are logical: layouts are applied when they are stored


def test_kernels_that_compute_the_same_are_asked_about_once(unchanged):
    b, asked = GraphBuilder(), []
    y = b.input("x", "float32", (2, 4))
    for number in range(3):
        (y,) = b.add(MATMUL, [y, b.constant(random(4, 4), f"w{number}")], name=f"y{number}")

    def wish(body, constants):
        asked.append(body)
        return {1: Layout.blocked((1, 0), 1, 2)}

    after = chosen(unchanged, b.build([y]), wish)
    assert len(asked) == 1 and [str(v.layout) for v in after.constants] == ["(b/2,a,b%2)"] * 3


def test_elementwise_kernels_follow_through_transposes(unchanged):
    b = GraphBuilder()
    y = conv(b, b.input("x", "float32", (1, 3, 8, 8)), 8)
    (t,) = b.add(mv.TRANSPOSE, [y], {"perm": (0, 3, 2, 1)}, "moved")
    graph = b.build([*b.add(ew.NEG, [t], name="u"), *b.add(ew.EXP, [t], name="v")])
    assert layouts(chosen(unchanged, graph))["moved"] == Layout.permuted((0, 2, 1, 3))  # the transpose costs nothing in memory


@pytest.mark.parametrize(("shape", "perm", "expected"), [((1, 9, 9, 16), (0, 3, 1, 2), CHANNELS_LAST), ((1, 16, 9, 9), (0, 1, 3, 2), None)])
def test_channels_that_lie_last_stay_there_for_who_sums_them_up(unchanged, shape, perm, expected):
    """Images of models that have their channels last otherwise."""
    b = GraphBuilder()
    (y,) = b.add(ew.EXP, [b.input("x", "float32", shape)], name="y")
    (t,) = b.add(mv.TRANSPOSE, [y], {"perm": perm}, "planes")
    graph = b.build([*b.add(ew.NEG, [conv(b, t, 8)], name="u")])
    assert layouts(chosen(unchanged, graph))["planes"] == expected


def test_channels_that_lie_last_stay_there_for_windows_of_each(unchanged):
    """A depthwise convolution of what has been normalised over its last axis (ConvNeXt, MambaOut)."""
    b = GraphBuilder()
    (y,) = b.add(ew.EXP, [b.input("x", "float32", (1, 9, 9, 16))], name="y")
    (t,) = b.add(mv.TRANSPOSE, [y], {"perm": (0, 3, 1, 2)}, "planes")
    w = b.constant(random(16, 1, 7, 7), "w")
    (c,) = b.add(CONV, [t, w], {"strides": (1, 1), "dilations": (1, 1), "group": 16}, "conv")
    graph = b.build([*b.add(ew.NEG, [c], name="u")])
    assert layouts(chosen(unchanged, graph))["planes"] == CHANNELS_LAST


def test_symbolic_sizes(unchanged):
    b = GraphBuilder()
    n, h = dim("n", 1, 8), dim("h", 4, 64)
    y = conv(b, b.input("x", "float32", (n, 3, h, h)), 8, name="first")
    y = conv(b, y, 4, name="second")
    found = layouts(chosen(unchanged, b.build(b.add(ew.NEG, [y], name="out"))))
    assert found["first"] == CHANNELS_LAST and found["out"] is None


def test_control_flow_keeps_row_major_boundaries(unchanged):
    def branch(name):
        g = GraphBuilder(name)
        x = g.input("x", "float32", (1, 4, 8, 8))
        return g.build(g.add(ew.NEG, [conv(g, conv(g, x, 8, name="inner"), 4, 1, "last")]))

    b = GraphBuilder()
    c, x = b.input("c", "bool", ()), b.input("x", "float32", (1, 3, 10, 10))
    before = conv(b, x, 4, name="before")
    y = Value("y", "float32", (1, 4, 6, 6))
    b.append(Node(IF, (c, before), (y,), {}, "if", (branch("then"), branch("else"))))
    after = chosen(unchanged, b.build(b.add(ew.NEG, [y], name="out")))
    assert layouts(after)["before"] is None and layouts(after)["y"] is None
    for body in after.nodes[1].bodies:
        assert layouts(body)["inner"] == CHANNELS_LAST
        assert all(v.layout is None for v in (*body.inputs, *body.outputs))


def test_printed(golden):
    b = GraphBuilder("net")
    x = b.input("x", "float32", (1, 2, 5, 5))
    w = b.constant(np.arange(36, dtype=np.float32).reshape(2, 2, 3, 3), "w")
    (y,) = b.add(CONV, [x, w], {"strides": (1, 1), "dilations": (1, 1), "group": 1}, "conv")
    (y,) = b.add(MAX_POOL, [y], {"kernel": (2, 2), "strides": (1, 1), "dilations": (1, 1)}, "pool")
    graph = choose_layouts(partition(b.build([y])), lambda body, constants: {n: Layout.blocked((0, 2, 3, 1), 0, 2) for n in constants})
    golden("layout_graph.txt", str(graph))


@pytest.mark.parametrize("line", ["cpu -mcpu=haswell", "cpu -mcpu=cascadelake", "cpu -march=aarch64 -mcpu=neoverse-n1"])
def test_the_panels_of_the_default_schedules(unchanged, line):
    """Whatever the schedules of a machine ask for, values stay; contractions with constants do ask."""
    target = Target.parse(line)
    after = chosen(unchanged, small_net(), lambda body, constants: operand_layouts(body, constants, backend_of(target)))
    assert [v for v in after.constants if v.layout is not None]


@pytest.mark.parametrize("heads", [3, 8, 16])
def test_lanes_do_not_run_across_products_of_matrices(unchanged, heads):
    """A convolution mixes the heads of attention, and wants them last; the product of each head with its values does not."""
    b = GraphBuilder("heads")
    scores, values = b.input("scores", "float32", (1, heads, 5, 7)), b.input("values", "float32", (1, heads, 7, 9))
    mixed = conv(b, scores, heads, 1, "mixed")
    (product,) = b.add(MATMUL, [mixed, values], name="product")
    (y,) = b.add(mv.TRANSPOSE, [product], {"perm": (0, 2, 1, 3)}, "y")
    found = layouts(chosen(unchanged, b.build(b.add(ew.NEG, [*b.add(mv.RESHAPE, [y], {"shape": (1, 5, heads * 9)}, "joined")]))))
    assert found["mixed"] == CHANNELS_LAST
    assert all(layout is None or layout.pieces[-1].axis != 1 for name, layout in found.items() if name.startswith("product"))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("groups", [2, 4, 16])
def test_channels_of_grouped_convolutions_are_last_at_any_batch(unchanged, batch, groups):
    b = GraphBuilder("grouped")
    x, w = b.input("x", "float32", (batch, 16, 8, 8)), b.constant(random(16, 16 // groups, 3, 3), "w")
    (y,) = b.add(CONV, [x, w], {"strides": (1, 1), "dilations": (1, 1), "group": groups}, "y")
    found = layouts(chosen(unchanged, b.build([conv(b, y, 8, 1, "z")])))
    assert found["y"] == CHANNELS_LAST


def test_tokens_that_become_an_image_have_channels_last(unchanged):
    b = GraphBuilder("net")
    t = b.input("t", "float32", (1, 36, 16))
    (y,) = b.add(ew.RELU, [t], name="tokens")
    (y,) = b.add(mv.TRANSPOSE, [y], {"perm": (0, 2, 1)}, "turned")
    (y,) = b.add(mv.RESHAPE, [y], {"shape": (1, 16, 6, 6)}, "image")
    (y,) = b.add(mv.PAD, [y, None], {"before": (0, 0, 1, 1), "after": (0, 0, 1, 1)}, "padded")
    w = b.constant(random(16, 1, 3, 3), "w")
    (y,) = b.add(CONV, [y, w], {"strides": (1, 1), "dilations": (1, 1), "group": 16}, "window")
    found = layouts(chosen(unchanged, b.build(b.add(ew.NEG, [y]))))
    assert found["padded"] == CHANNELS_LAST


def test_a_bias_has_no_say_in_the_order_of_an_image(unchanged):
    b = GraphBuilder("net")
    (x,) = b.add(ew.EXP, [b.input("x", "float32", (1, 16, 6, 6))])
    (y,) = b.add(ADD_CHANNELS, [x, b.input("bias", "float32", (16,))], name="sum")
    z = [b.add(op, [y], name=op.name)[0] for op in (ew.EXP, ew.NEG)]
    assert layouts(chosen(unchanged, b.build(z)))["sum"] is None


def test_positions_of_tokens_have_no_say_in_the_order_of_a_mask(unchanged):
    """Rows of one token each: lanes along the tokens would be empty for a new one."""
    rows, b = dim("rows", 1, 64), GraphBuilder("net")
    (p,) = b.add(mv.RESHAPE, [b.input("places", "float32", (rows,))], {"shape": (rows, 1)}, "column")
    (k,) = b.add(mv.ARANGE, [], {"start": 0, "step": 1, "count": 48, "dtype": "float32"}, "keys")
    (y,) = b.add(ew.SUB, [k, p], name="mask")
    z = [b.add(op, [y], name=op.name)[0] for op in (ew.EXP, ew.NEG)]
    assert layouts(chosen(unchanged, b.build(z)))["mask"] is None


def test_channels_stay_last_through_a_resize(unchanged):
    """Its rows and columns are windows too, looked up in a table."""
    b = GraphBuilder("resized")
    y = conv(b, b.input("x", "float32", (1, 3, 6, 6)), 16, 3, "first")
    for axis in (2, 3):
        table, weights = np.repeat(np.arange(4), 2)[:, None] + np.arange(2), random(8, 2)
        (y,) = b.add(
            RESAMPLE, [y, b.constant(table, f"table{axis}"), b.constant(weights, f"weights{axis}")], {"axis": axis}, f"resized{axis}"
        )
    found = layouts(chosen(unchanged, b.build([conv(b, y, 8, 1, "second")])))
    assert {found[name] for name in ("first", "resized2", "resized3")} == {CHANNELS_LAST}
