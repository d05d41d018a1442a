"""The choice of algorithms: what is rewritten, when, and that it computes the same."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import tcomp
from tcomp.backends import backend_of
from tcomp.backends.kernel import build_loops
from tcomp.frontends.onnx import import_model
from tcomp.ir import te
from tcomp.ir.expr import as_expr
from tcomp.ir.graph import GraphBuilder
from tcomp.ir.simplify import as_dim
from tcomp.ir.te import print_te
from tcomp.ops.elementwise import RELU
from tcomp.ops.movement import PAD
from tcomp.ops.nn import ADD_CHANNELS, CONV, CONV_TRANSPOSE
from tcomp.options import CompileOptions, Report
from tcomp.passes import algorithm_costs, algorithms
from tcomp.passes.algorithm_costs import Convolution, fastest
from tcomp.passes.algorithms import choose_algorithms
from tcomp.passes.partition import partition
from tcomp.passes.runner import run_passes
from tcomp.pipeline import compile_model, graph_passes
from tcomp.target import CpuTarget, CudaTarget

RNG = np.random.default_rng(7)
PLAIN = {"strides": (1, 1), "dilations": (1, 1), "group": 1}
TARGET, ZEN5 = CpuTarget.parse("cpu -mcpu=skylake-avx512"), CpuTarget.parse("cpu -mcpu=znver5")


def array(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def operators(graph):
    return [node.op.name for node in graph.nodes]


def graph_of(shape, weights, attrs=PLAIN, pads=(1, 1), constant=True, dtype="float32"):
    b = GraphBuilder()
    x = b.input("x", dtype, shape)
    w = b.constant(weights) if constant else b.input("w", dtype, weights.shape)
    if pads is not None:
        (x,) = b.add(PAD, [x, None], {"before": (0, 0, *pads), "after": (0, 0, *pads)})
    (y,) = b.add(CONV, [x, w], attrs)
    (y,) = b.add(ADD_CHANNELS, [y, b.constant(array(weights.shape[0]).astype(dtype))])
    return b.build(b.add(RELU, [y]))


WINOGRAD = ["pad", "winograd_input", "winograd_product", "winograd_output", "add_channels", "relu"]


@pytest.mark.parametrize("tile", (2, 4))
@pytest.mark.parametrize(
    "shape, pads", [((1, 5, 8, 8), (1, 1)), ((2, 3, 7, 10), (1, 1)), ((1, 4, 9, 5), (0, 2)), ((1, 3, 6, 6), None)], ids=str
)
def test_the_rewrite_keeps_the_result(unchanged, monkeypatch, tile, shape, pads):
    monkeypatch.setattr(algorithms, "fastest", lambda sizes, target: tile)
    before = graph_of(shape, array(6, shape[1], 3, 3), pads=pads)
    after = unchanged(before, choose_algorithms(before, TARGET), rtol=1e-4)
    needs_pad = pads is not None or any((d - 2) % tile for d in shape[2:])
    assert operators(after) == (WINOGRAD if needs_pad else WINOGRAD[1:])  # one pad at most: that of the model is widened


@pytest.mark.parametrize("stride", (1, 2))
def test_groups_of_channels(unchanged, monkeypatch, stride):
    monkeypatch.setattr(algorithms, "fastest", lambda sizes, target: 4)
    before = graph_of((2, 6, 8, 8), array(9, 2, 3, 3), {**PLAIN, "strides": (stride, stride), "group": 3}, pads=(1, 1))
    after = operators(unchanged(before, choose_algorithms(before, TARGET), rtol=1e-4))
    assert after[after.index("winograd_input") :] == WINOGRAD[1:]


def test_processors_without_multiply_adds(unchanged, monkeypatch):
    monkeypatch.setattr(algorithms, "fastest", lambda sizes, target: 4)
    before = graph_of((1, 3, 10, 10), array(2, 3, 3, 3), pads=(1, 1))
    for name, fused in ("x86-64-v2", False), ("x86-64-v3", True):
        after = unchanged(before, choose_algorithms(before, CpuTarget.parse(f"cpu -march=x86_64 -mcpu={name}")), rtol=1e-4)
        transforms = [n for n in after.nodes if n.op.name in ("winograd_input", "winograd_output")]
        texts = [print_te(n.tensors([v and v.placeholder() for v in n.inputs])) for n in transforms]
        assert len(texts) == 2 and all(("fma(" in text) == fused for text in texts)


@pytest.mark.parametrize("tile", (2, 4))
@pytest.mark.parametrize(
    "shape, pads", [((1, 5, 16, 16), (1, 1)), ((2, 3, 7, 10), (1, 1)), ((1, 4, 9, 5), (0, 2)), ((1, 3, 10, 9), None)], ids=str
)
def test_a_stride_of_two(unchanged, monkeypatch, tile, shape, pads):
    monkeypatch.setattr(algorithms, "fastest", lambda sizes, target: tile)
    before = graph_of(shape, array(6, shape[1], 3, 3), {**PLAIN, "strides": (2, 2)}, pads=pads)
    after = operators(unchanged(before, choose_algorithms(before, TARGET), rtol=1e-4))
    assert after[after.index("winograd_input") :] == WINOGRAD[1:] and after.count("pad") <= 1


@pytest.mark.parametrize("weights, strides, spread", [
    ((5, 1, 2, 2), (2, 2), 1), ((3, 4, 3, 2), (3, 2), 1), ((6, 2, 4), (4,), 1),
    ((5, TARGET.lanes(32) + 1, 2, 2), (2, 2), 0), ((5, 1, 9, 2), (16, 16), 0),
], ids=str)  # fmt: skip
def test_transposed_convolutions_side_by_side(unchanged, weights, strides, spread):
    n, w = te.var("n"), te.var("w", 1, 50)
    size = (3, w)[: len(strides)]
    b = GraphBuilder("n")
    x = b.input("x", "float32", (n, weights[0], *size))
    shape = tuple(as_dim((as_expr(d) - 1) * s + k) for d, s, k in zip(size, strides, weights[2:], strict=True))
    attrs = {"strides": strides, "dilations": (1,) * len(strides), "group": 1, "before": (0,) * len(strides), "shape": shape}
    before = b.build(b.add(CONV_TRANSPOSE, [x, b.constant(array(*weights))], attrs, "y"))
    for direct in (True, False):
        after = unchanged(before, choose_algorithms(before, TARGET, direct=direct))
        assert operators(after) == (["conv", "reshape", "transpose", "reshape"] if spread else ["conv_transpose"])


@st.composite
def transposed_convolutions(draw):
    """(shape of x, shape of the filter, attributes, whether the filter is constant) with any cut of the edges, and elements behind the last
    window; dilated where no stride is."""
    rank = draw(st.integers(1, 2))
    group, each, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 17]))
    window, strides, size = ([draw(st.integers(1, top)) for _ in range(rank)] for top in (5, 4, 5))
    dilations = [draw(st.integers(1, 2)) if max(strides) == 1 else 1 for _ in range(rank)]
    before = [draw(st.integers(0, (k - 1) * d)) for k, d in zip(window, dilations, strict=True)]
    shape = []
    for n, k, d, s, cut in zip(size, window, dilations, strides, before, strict=True):
        whole = (n - 1) * s + (k - 1) * d + 1 - cut
        shape.append(draw(st.integers(max(1, whole - (k - 1) * d), whole + s - 1)))
    attrs = {"strides": tuple(strides), "dilations": tuple(dilations), "group": group, "before": tuple(before), "shape": tuple(shape)}
    return (draw(st.integers(1, 2)), group * each, *size), (group * each, outputs, *window), attrs, draw(st.booleans())


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(transposed_convolutions())
def test_phases_of_transposed_convolutions(unchanged, case):
    shape, weights, attrs, known = case
    b = GraphBuilder("n")
    w = b.constant(array(*weights)) if known else b.input("w", "float32", weights)
    before = b.build(b.add(CONV_TRANSPOSE, [b.input("x", "float32", shape), w], attrs, "y"))
    unchanged(before, choose_algorithms(before, TARGET, direct=True), rtol=1e-5)


@pytest.mark.parametrize("weights, strides, cut, size", [
    ((4, 3, 4, 4), (2, 2), 1, (16, 16)), ((4, 20, 4, 4), (2, 2), 1, (16, 16)), ((4, 3, 3, 3), (1, 1), 1, (8, 8)), ((4, 1, 16), (8,), 0, (72,)),
], ids=str)  # fmt: skip
def test_transposed_convolutions_are_convolutions(unchanged, weights, strides, cut, size):
    n, rank = te.var("n"), len(strides)
    b = GraphBuilder("n")
    x = b.input("x", "float32", (n, 4, *(8,) * rank))
    attrs = {"strides": strides, "dilations": (1,) * rank, "group": 1, "before": (cut,) * rank, "shape": size}
    before = b.build(b.add(CONV_TRANSPOSE, [x, b.constant(array(*weights))], attrs, "y"))
    found = operators(unchanged(before, choose_algorithms(before, TARGET, direct=True), rtol=1e-5))
    expected = [
        "pad",
        "conv",
        *(["reshape", "transpose", "reshape"] if strides[0] > 1 else []),
        *(["slice"] if strides[0] > 1 and cut else []),
    ]
    assert found == expected


@pytest.mark.parametrize("channels, expected", [
    (20, ["transpose", "reshape", "reshape", "matmul", "reshape", "transpose", "col2im"]),
    (4, ["pad", "pad", "reshape", "slice", "transpose", "reshape", "conv", "reshape", "transpose", "reshape", "slice"]),
])  # fmt: skip
def test_derivatives_of_convolutions(unchanged, channels, expected):
    """By filters that are not constants: a product for few pixels, else a convolution."""
    b = GraphBuilder("n")
    x, w = b.input("x", "float32", (2, channels, 3, 3)), b.input("w", "float32", (channels, 3, 3, 3))
    attrs = {"strides": (2, 2), "dilations": (1, 1), "group": 1, "before": (1, 1), "shape": (6, 6)}
    before = b.build(b.add(CONV_TRANSPOSE, [x, w], attrs, "y"))
    assert operators(unchanged(before, choose_algorithms(before, TARGET), rtol=1e-5)) == expected


def test_a_symbolic_batch(unchanged):
    before = graph_of((te.var("n"), 64, 8, 12), array(64, 64, 3, 3))
    assert operators(unchanged(before, choose_algorithms(before, CpuTarget.parse("cpu -mcpu=haswell")), rtol=1e-3)) == WINOGRAD


@pytest.mark.parametrize("tile", (2, 4))
@pytest.mark.parametrize("h, w", [(1, 1), (2, 5), (4, 3), (8, 7)])
def test_symbolic_height_and_width(unchanged, monkeypatch, tile, h, w):
    monkeypatch.setattr(algorithms, "fastest", lambda sizes, target: tile)
    sizes = te.var("h", 1), te.var("w", 1)
    before = graph_of((2, 5, *sizes), array(6, 5, 3, 3))
    assert (
        operators(unchanged(before, choose_algorithms(before, TARGET), rtol=1e-4, dims=dict(zip(sizes, (h, w), strict=True)))) == WINOGRAD
    )


def test_a_stride_of_two_over_a_symbolic_size(unchanged, monkeypatch):
    """Where it is not known what lies under the last tiles, the sum stays direct."""
    monkeypatch.setattr(algorithms, "fastest", lambda sizes, target: 2)
    h, attrs = te.var("h", 1), {**PLAIN, "strides": (2, 2)}
    even, any_size = (graph_of((1, 5, size, 8), array(6, 5, 3, 3), attrs) for size in (as_dim(as_expr(h) * 2), h))
    assert "winograd_input" in operators(unchanged(even, choose_algorithms(even, TARGET), rtol=1e-4, dims={h: 3}))
    for size in (1, 2, 3, 6, 7):
        unchanged(any_size, choose_algorithms(any_size, TARGET), rtol=1e-4, dims={h: size})


@pytest.mark.parametrize("tile", (2, 4))
def test_a_result_that_may_be_empty(unchanged, monkeypatch, tile):
    monkeypatch.setattr(algorithms, "fastest", lambda sizes, target: tile)
    h = te.var("h", 1)
    before = graph_of((1, 5, h, 8), array(6, 5, 3, 3), pads=None)
    after = choose_algorithms(before, TARGET)
    assert "winograd_input" in operators(after)
    for size in (2, 3, 4, 7, 9):
        unchanged(before, after, rtol=1e-4, dims={h: size})


def test_tails_of_what_may_be_empty_are_cut():
    """A window without padding behind one that rounds up: (h + 1) // 2 - 2 rows, of which whole tiles of four are told from the rest."""
    h, w = te.var("h", 1), te.var("w", 1)
    rows = (as_dim((as_expr(h) + 1) // 2), as_dim(as_expr(w) * 16 - 3))
    graph = choose_algorithms(graph_of((te.var("n", 1), 64, *rows), array(64, 64, 3, 3), pads=None), CpuTarget.parse("cpu -mcpu=haswell"))
    assert "winograd_output" in operators(graph)
    backend = backend_of("cpu -mcpu=haswell")
    for node in partition(graph).nodes:
        schedule = build_loops(node.bodies[0], "kernel", backend)
        assert not [note for note in schedule.kernel.notes if "left as lowered" in str(note)]


def test_the_likely_size_of_an_image_decides():
    sample = algorithm_costs.typical_dims(graph_of((te.var("n"), 64, as_dim(as_expr(h := te.var("h", 1)) * 32), 56), array(64, 64, 3, 3)))
    assert sample[h] == 8 and algorithm_costs.typical_size(as_expr(h) * 4, sample) == 32
    rest = te.var("rest", -31, 0)  # as `ir.equations` writes a size that was rounded up to a multiple
    assert algorithm_costs.typical_dims(graph_of((1, 64, as_dim(as_expr(h) * 32 + rest), 56), array(64, 64, 3, 3)))[h] == 8
    small = graph_of((1, 64, te.var("h", 1, 2), 3), array(64, 64, 3, 3))
    assert "conv" in operators(choose_algorithms(small, TARGET))


@pytest.mark.parametrize(
    "weights, options",
    [
        ((64, 64, 3, 3), {"attrs": {**PLAIN, "strides": (3, 3)}}),
        ((64, 64, 3, 3), {"attrs": {**PLAIN, "strides": (1, 2)}}),
        ((64, 64, 3, 1), {"attrs": {**PLAIN, "strides": (2, 2)}}),
        ((64, 64, 3, 3), {"attrs": {**PLAIN, "dilations": (2, 2)}}),
        ((64, 8, 3, 3), {"attrs": {**PLAIN, "group": 8}}),
        ((64, 64, 1, 1), {}),
        ((64, 64, 7, 7), {}),
        ((64, 64, 5, 4), {}),
        ((64, 64, 3, 3), {"constant": False}),
        ((64, 64, 3, 3), {"dtype": "float64"}),
        ((64, 64, 3, 3), {"dtype": "float16"}),
    ],
    ids=str,
)
def test_what_is_left_alone(weights, options):
    graph = graph_of((1, 64, 56, 56), array(*weights).astype(options.get("dtype", "float32")), **options)
    assert operators(choose_algorithms(graph, TARGET)) == operators(graph)


@pytest.mark.parametrize(
    "channels, outputs, size, tile",
    [
        (64, 64, 224, 4), (128, 128, 112, 4), (256, 256, 56, 4), (512, 512, 28, 4), (64, 64, 56, 4), (128, 128, 28, 4),
        (256, 256, 14, 2), (512, 512, 14, 2),  # four times the weights would have to be read for few tiles
        (512, 512, 7, 0), (3, 64, 224, 0), (8, 8, 112, 0), (16, 16, 56, 4), (64, 3, 224, 0), (3, 64, 28, 0),
    ],
)  # fmt: skip
def test_the_rule(channels, outputs, size, tile):
    assert fastest(Convolution(1, channels, outputs, (size, size)), TARGET) == tile


def test_cores_to_which_weights_come_faster_take_more_of_them():
    sizes = [Convolution(1, channels, channels, (size, size)) for channels, size in ((512, 7), (512, 14), (256, 14), (128, 28))]
    for cpu, tiles in (("emeraldrapids", [0, 2, 2, 4]), ("znver5", [2, 4, 4, 4])):
        assert [fastest(x, CpuTarget.parse(f"cpu -mcpu={cpu}")) for x in sizes] == tiles


def test_the_rule_for_a_stride_of_two():
    cases = ((128, 28), (256, 14), (512, 7), (32, 80))
    sizes = [Convolution(1, channels, channels, (size, size), stride=2) for channels, size in cases]
    assert [fastest(x, ZEN5) for x in sizes] == [4, 2, 0, 0]
    assert str(sizes[0]) == "3x3 convolution of stride 2 1x128 -> 128x28x28"


def test_the_rule_for_groups():
    sizes = [Convolution(1, 512 // n, 512 // n, (14, 14), groups=n) for n in (2, 8, 64)]
    assert [fastest(x, TARGET) for x in sizes] == [2, 2, 0] and str(sizes[1]) == "3x3 convolution in 8 groups 1x64 -> 64x14x14"
    narrow = CpuTarget.parse("cpu -march=aarch64 -mcpu=neoverse-n1")  # four lanes
    assert [fastest(Convolution(1, n, n, (56, 56), groups=8), narrow) for n in (4, 8, 16, 64)] == [0, 0, 4, 4]


def test_many_images_share_their_weights():
    assert [fastest(Convolution(batch, 512, 512, (7, 7)), TARGET) for batch in (1, 32)] == [0, 4]


def test_only_for_cpus():
    assert "algorithms" in dict(graph_passes(CompileOptions(CpuTarget.parse("cpu")), Report()))
    assert "algorithms" not in dict(graph_passes(CompileOptions(CudaTarget.parse("cuda -arch=sm_80")), Report()))


def model(shape, channels, outputs, pads):
    """relu(conv3x3(relu(conv1x1(x))) + bias + conv1x1(x)), of which the 3x3 convolution stands in the middle; then its maxima."""

    def conv(source, name, result, w, **attributes):
        constants.append(numpy_helper.from_array((array(*w) / np.sqrt(np.prod(w[1:]))).astype(np.float32), name))
        return helper.make_node("Conv", [source, name, *attributes.pop("more", [])], [result], **attributes)

    constants = [numpy_helper.from_array(array(outputs), "bias")]
    grow = sum(pads[::2]) - 2, sum(pads[1::2]) - 2
    nodes = [
        conv("x", "w0", "a", (channels, shape[1], 1, 1)),
        helper.make_node("Relu", ["a"], ["b"]),
        conv("b", "w1", "c", (outputs, channels, 3, 3), pads=pads, more=["bias"]),
        conv("x", "w2", "r", (outputs, shape[1], 1, 1)) if grow == (0, 0) else helper.make_node("Identity", ["c"], ["r"]),
        helper.make_node("Add", ["c", "r"], ["s"]),
        helper.make_node("Relu", ["s"], ["t"]),
        helper.make_node("MaxPool", ["t"], ["y"], kernel_shape=[2, 2]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", None)))
    graph = helper.make_graph(nodes, "g", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("tile", (2, 4))
@pytest.mark.parametrize(
    "shape, channels, outputs, pads",
    [
        ([1, 3, 12, 16], 16, 32, [1, 1, 1, 1]),
        ([2, 3, 7, 9], 19, 21, [1, 1, 1, 1]),
        ([1, 2, 11, 6], 7, 3, [0, 1, 2, 1]),
        ([1, 2, 11, 6], 16, 40, [0, 0, 0, 0]),
        (["n", 3, 6, 7], 18, 33, [1, 1, 1, 1]),
    ],
    ids=str,
)
def test_native_code_agrees_with_onnx(monkeypatch, tile, shape, channels, outputs, pads):
    monkeypatch.setattr(algorithms, "fastest", lambda sizes, target: tile if sizes.extents != (1, 1) else 0)
    proto = model(shape, channels, outputs, pads)
    artifact, report = compile_model(proto, CompileOptions(emit=("graph",)))
    assert "winograd_product" in report.stages["graph"] and "note" not in report.stages["graph"]
    for batch in (1, 3) if shape[0] == "n" else shape[:1]:
        x = array(batch, *shape[1:])
        (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
        for threads in (1, 2):
            found = tcomp.Module.load(artifact, threads=threads).run({"x": x})["y"]
            assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    "shape, taps, tile", [((1, 16, 30, 1), (5, 1), 4), ((2, 17, 1, 21), (1, 3), 2), ((1, 18, 19), (7,), 2), ((1, 16, 9, 11), (5, 5), 2)], ids=str
)  # fmt: skip
@pytest.mark.parametrize("folded", (False, True), ids=["stored", "folded"])
def test_filters_of_other_shapes(monkeypatch, shape, taps, tile, folded):
    """Along one axis alone, or wide; what reads the result folds it, or stores it. Folded with the transform inside, tiles came apart."""
    monkeypatch.setattr(algorithms, "fastest", lambda sizes, target: tile)
    pads = [n // 2 for n in taps] * 2
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=pads), helper.make_node("Tanh", ["c"], ["t"])]
    nodes += (
        [helper.make_node("ReduceMax", ["t"], ["y"], axes=[*range(2, len(shape))])]
        if folded
        else [helper.make_node("Identity", ["t"], ["y"])]
    )
    constants = [
        numpy_helper.from_array(a, n) for n, a in (("w", array(20, *shape[1:2], *taps) / np.float32(np.prod(taps) * 4)), ("b", array(20)))
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", None)))
    proto = helper.make_model(helper.make_graph(nodes, "g", [x], [y], constants), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    artifact, report = compile_model(proto, CompileOptions(emit=("graph",)))
    kernels = [line for line in report.stages["graph"].splitlines() if "    graph winograd_output" in line]
    assert kernels and all("tanh" in line and "reduce_max" not in line for line in kernels)
    data = array(*shape)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": data})
    assert np.abs(tcomp.Module.load(artifact).run({"x": data})["y"] - expected).max() < 2e-5


def test_the_rule_for_other_filters():
    cases = [
        ((508, 1), (5, 1), 4),
        ((508,), (5,), 4),
        ((1, 508), (1, 4), 0),
        ((28, 28), (5, 5), 2),
        ((28, 28), (7, 7), 0),
        ((9, 9, 9), (3, 3, 3), 0),
    ]
    assert [fastest(Convolution(1, 256, 512, extents, taps), TARGET) for extents, taps, _ in cases] == [tile for *_, tile in cases]


@pytest.mark.parametrize("direct", (True, False))
def test_the_switch(direct):
    proto = model([1, 3, 20, 20], 64, 64, [1, 1, 1, 1])
    artifact, report = compile_model(proto, CompileOptions(emit=("graph",), direct=direct))
    assert ("winograd_product" in report.stages["graph"]) is not direct
    x = array(1, 3, 20, 20)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    assert np.abs(tcomp.Module.load(artifact).run({"x": x})["y"] - expected).max() < (2e-6 if direct else 2e-5) * np.abs(expected).max()


def test_a_written_out_sum_is_no_epilogue():
    """relu(winograd + conv1x1): the tiles of one are not those of the other, so that one of the two is stored first."""
    graph, _ = run_passes(
        import_model(model([1, 3, 20, 20], 64, 64, [1, 1, 1, 1])), graph_passes(CompileOptions(CpuTarget.parse("cpu")), Report())
    )
    inside = [[n.op.name for n in node.bodies[0].nodes] for node in graph.nodes]
    assert ["winograd_output", "add_channels"] in inside and ["conv", "add", "relu"] in inside
