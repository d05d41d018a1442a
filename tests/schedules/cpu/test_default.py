"""Lowering and the default schedules: reference == loops as lowered == loops as scheduled == machine code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import compile_ir
from tcomp.ir import expr as E, te
from tcomp.ir.access import stride
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.layout import Layout
from tcomp.ir.loops import PARALLEL, VECTORIZED, Accumulate, Buffer, For, If, Kernel, expressions, hoist_temporaries, loop, walk
from tcomp.ir.verify.loops import verify_kernel
from tcomp.ops.image import grid_sample
from tcomp.ops.movement import pad
from tcomp.ops.nn import conv
from tcomp.schedules.cost.cpu import estimate
from tcomp.schedules.cpu.default import operand_layouts, schedule
from tcomp.schedules.lowering import lower
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST
from tests.schedules.programs import Program, layouts, programs
from tests.schedules.running import expected, interpreted, native

HASWELL = CpuTarget.parse("cpu -march=x86_64 -mcpu=haswell")
ARM = CpuTarget.parse("cpu -march=aarch64 -mcpu=neoverse-n1")
SMALL = programs()
MEDIUM = programs(largest=40, volume=3000)
LARGE = programs(largest=150, volume=100_000)


def lowered(program: Program) -> Kernel:
    return lower("program", program.inputs, program.outputs)


def agree(program: Program, found: list, reference: list) -> None:
    for got, want in zip(found, reference, strict=True):
        program.same(got, want)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SMALL)
def test_lowering_keeps_the_meaning(program: Program) -> None:
    agree(program, interpreted(program, lowered(program)), expected(program))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SMALL, st.data())
def test_lowering_through_layouts(program: Program, data: st.DataObject) -> None:
    chosen = [data.draw(layouts(t.ndim)) for t in (*program.inputs, *program.outputs)]
    tensors = (*program.inputs, *program.outputs)
    kernel = lower("program", program.inputs, program.outputs, dict(zip(tensors, chosen, strict=True)))
    agree(program, interpreted(program, kernel, chosen), expected(program))
    scheduled = schedule(kernel, HASWELL).kernel
    agree(program, interpreted(program, scheduled, chosen), expected(program))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(MEDIUM, st.sampled_from([HOST, HASWELL, ARM]))
def test_default_schedules_keep_the_meaning(program: Program, target: CpuTarget) -> None:
    """The interpreter checks bounds, undefined reads, and (by shuffling parallel iterations) races."""
    kernel = lowered(program)
    s = schedule(kernel, target)
    agree(program, interpreted(program, s.kernel, shuffle=1), expected(program))
    assert str(Schedule(kernel).replay(s.trace)) == str(s.kernel)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(LARGE, st.booleans())
def test_machine_code_equals_the_reference(program: Program, threads: bool) -> None:
    agree(program, native(program, schedule(lowered(program), HOST).kernel, threads=threads), expected(program))


@pytest.mark.skipif(not HASWELL.runs_on(HOST), reason="needs an x86 processor with AVX2")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(LARGE)
def test_machine_code_for_narrower_vectors(program: Program) -> None:
    agree(program, native(program, schedule(lowered(program), HASWELL).kernel, target=HASWELL), expected(program))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(LARGE, st.sampled_from([HASWELL, ARM]))
def test_other_machines_get_code_as_well(program: Program, target: CpuTarget) -> None:
    kernel = schedule(lowered(program), target).kernel
    verify_kernel(kernel)
    assert compile_ir(emit_kernel(hoist_temporaries(kernel)[0], target), target).startswith(b"\x7fELF")


@st.composite
def cases(draw: st.DrawFn) -> Program:
    """Elements told apart by their indices, or by remainders or quotients of these, which constants may divide or not."""
    shape = [draw(st.integers(1, 24)) for _ in range(draw(st.integers(1, 3)))] + [draw(st.integers(1, 70))]
    unknown = draw(st.integers(0, 4))
    dims = {te.var("n"): shape[unknown]} if unknown < len(shape) else {}
    x = te.placeholder([next(iter(dims)) if n == unknown else d for n, d in enumerate(shape)], name="x")
    told = []
    for _ in range(draw(st.integers(1, 3))):
        by = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32]))
        told.append((draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from("=%/")), by, draw(st.integers(2, 7))))

    def element(*index: te.Expr) -> te.Expr:
        value = x[index]
        for number, (axis, kind, by, count) in enumerate(told, 1):
            which = {"=": index[axis], "%": index[axis] % by, "/": index[axis] // by}[kind]
            other = value
            for case in reversed(range(count)):
                other = te.select(te.equal(which, case), value * float(case + 1) - float(number), other)
            value = other
        return value

    return Program((x,), (te.compute(x.shape, element, "y"),), dims)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases(), st.booleans())
def test_cases_keep_the_meaning(program: Program, threads: bool) -> None:
    s = schedule(lowered(program), HOST)
    agree(program, interpreted(program, s.kernel, shuffle=1), expected(program))
    agree(program, native(program, s.kernel, threads=threads), expected(program))


@pytest.mark.parametrize(("groups", "channels", "results"), [(4, 12, 20), (2, 6, 96), (3, 9, 9), (5, 5, 5)])
def test_grouped_convolutions_have_no_quotients_in_lanes(groups: int, channels: int, results: int) -> None:
    """Channels of a group are a loop of their own: what all of them read is one element, not one for each lane."""
    x, w = te.placeholder((1, channels, 5, 6), name="x"), te.placeholder((results, channels // groups, 2, 2), name="w")
    y = conv(x, w, (1, 1), (1, 1), groups)
    b = te.placeholder((results,), name="b")
    z = te.compute(y.shape, lambda n, c, h, w: y[n, c, h, w] + b[c], name="z")
    last = Layout.permuted((0, 2, 3, 1))
    target = CpuTarget.parse("cpu -mcpu=skylake-avx512")
    weights = operand_layouts(lower("k", [x, w, b], [z], {x: last, z: last}), frozenset({1}), target)
    s = schedule(lower("k", [x, w, b], [z], {x: last, z: last, w: weights.get(1, Layout.identity(4))}), target)
    lanes = [v for v, loop in s.loops.items() if loop.kind == VECTORIZED]
    quotients = {q for st in walk(s.kernel.body) for e in E.walk(*expressions(st)) if e.op in ("floordiv", "mod") for q in E.variables(e)}
    assert lanes and not {q.name for q in quotients} & set(lanes)
    program = Program((x, w, b), (z,), {})
    arrangement = [last, weights.get(1), None, last]
    agree(program, interpreted(program, s.kernel, arrangement), expected(program))
    agree(program, native(program, s.kernel, arrangement), expected(program))


@pytest.mark.parametrize(
    ("groups", "channels", "results", "window", "stride"),
    [(8, 32, 32, 3, 1), (16, 32, 32, 1, 1), (17, 34, 34, 3, 1), (9, 18, 36, 2, 2), (4, 16, 32, 3, 2), (6, 12, 24, 3, 1)],
)
def test_groups_of_few_channels_share_a_vector(groups: int, channels: int, results: int, window: int, stride: int) -> None:
    """Lanes run across groups; what a group shares is picked from the vector that holds it for all of them."""
    x, w = te.placeholder((1, channels, 9, 10), name="x"), te.placeholder((results, channels // groups, window, window), name="w")
    y = conv(x, w, (stride, stride), (1, 1), groups)
    b = te.placeholder((results,), name="b")
    z = te.compute(y.shape, lambda n, c, h, w: te.maximum(y[n, c, h, w] + b[c], 0.0), name="z")
    last = Layout.permuted((0, 2, 3, 1))
    for target, lanes in ((CpuTarget.parse("cpu -mcpu=skylake-avx512"), 16), (HASWELL, 8)):
        weights = operand_layouts(lower("k", [x, w, b], [z], {x: last, z: last}), frozenset({1}), target)
        s = schedule(lower("k", [x, w, b], [z], {x: last, z: last, w: weights.get(1, Layout.identity(4))}), target)
        vectors = [x.extent for x in s.loops.values() if x.kind == VECTORIZED]
        assert not s.kernel.notes and max(vectors) == lanes
        assert estimate(s.kernel, target).counts["loads.gather"] == 0
        program, arrangement = Program((x, w, b), (z,), {}), [last, weights.get(1), None, last]
        agree(program, interpreted(program, s.kernel, arrangement), expected(program))
        agree(program, native(program, s.kernel, arrangement), expected(program))


@pytest.mark.parametrize(
    ("processor", "channels", "lanes"),
    [("skylake-avx512", 24, 8), ("skylake-avx512", 40, 16), ("znver4", 40, 8), ("znver4", 32, 16), ("znver4", 20, 16), ("haswell", 12, 4)],
)
def test_groups_of_an_odd_number_of_half_vectors_take_half_vectors(processor: str, channels: int, lanes: int) -> None:
    """Rows of one and a half vectors would be masked at every step; of more, only where half of a vector takes half of the time."""
    x, w = te.placeholder((1, 3 * channels, 5, 6), name="x"), te.placeholder((3 * channels, channels, 2, 2), name="w")
    y = conv(x, w, (1, 1), (1, 1), 3)
    z = te.compute(y.shape, lambda n, c, h, w: te.maximum(y[n, c, h, w], 0.0), name="z")
    last, target = Layout.permuted((0, 2, 3, 1)), CpuTarget.parse(f"cpu -mcpu={processor}")
    weights = operand_layouts(lower("k", [x, w], [z], {x: last, z: last}), frozenset({1}), target)
    s = schedule(lower("k", [x, w], [z], {x: last, z: last, w: weights[1]}), target)
    vectors = [x for x in s.loops.values() if x.kind == VECTORIZED]
    assert not s.kernel.notes and {x.extent for x in vectors} == {lanes}
    assert channels != lanes * 3 or not any(isinstance(x.body, If) for x in vectors)
    program, arrangement = Program((x, w), (z,), {}), [last, weights[1], last]
    agree(program, interpreted(program, s.kernel, arrangement), expected(program))
    agree(program, native(program, s.kernel, arrangement), expected(program))


def test_sums_that_go_on_from_what_was_there_are_no_tensor_expression() -> None:
    """Structural schedules clear an element before they accumulate into it."""
    n = 40
    a, x = Buffer("A", "float64", (n, n)), Buffer("x", "float64", (n,))
    add = te.sum(te.placeholder((1,), "float64")[0], te.reduce_axis(1)).attr[0]
    body = loop("i", n, lambda i: loop("j", n, lambda j: Accumulate(x, (i,), a[i, j], add)))
    s = schedule(Kernel("k", (a, x), (x,), (), body), HOST)
    values = np.arange(n * n, dtype="float64").reshape(n, n)
    sums = np.ones(n)
    run_kernel(s.kernel, {b: v for b, v in zip(s.kernel.buffers, (values.reshape(s.kernel.buffers[0].shape), sums), strict=True)}, {})
    np.testing.assert_array_equal(sums, 1 + values.sum(1))


def test_rows_that_never_fill_a_vector() -> None:
    """The pass over their full vectors has no iterations."""
    n = E.dim("n", 1, 7)
    x, k, j = te.placeholder((2, n), "float64", name="x"), te.reduce_axis(n, "k"), te.reduce_axis(n, "j")
    largest = te.compute((2,), lambda i: te.max(x[i, k], k), name="largest")
    total = te.compute((2,), lambda i: te.sum(te.exp(x[i, j] - largest[i]), j), name="total")
    y = te.compute((2, n), lambda i, j: te.exp(x[i, j] - largest[i]) / total[i], name="y")
    program = Program((x,), (y,), {n: 3}, exact=False)
    for target in (HASWELL, HOST):
        kernel = schedule(lowered(program), target).kernel
        assert not kernel.notes
        agree(program, native(program, kernel), expected(program))


@pytest.mark.parametrize("target", [HOST, HASWELL], ids=["host", "haswell"])
@pytest.mark.parametrize("shape", [(70, 2), (64, 8), (3, 65, 5), (129, 1), (64, 64)])
def test_lanes_run_across_short_rows(shape: tuple[int, ...], target: CpuTarget) -> None:
    x, k, j = te.placeholder(shape, name="x"), te.reduce_axis(shape[-1], "k"), te.reduce_axis(shape[-1], "j")
    largest = te.compute(shape[:-1], lambda *i: te.max(x[(*i, k)], k), name="largest")
    total = te.compute(shape[:-1], lambda *i: te.sum(te.exp(x[(*i, j)] - largest[i]), j), name="total")
    y = te.compute(shape, lambda *i: te.exp(x[i] - largest[i[:-1]]) / total[i[:-1]], name="y")
    program = Program((x,), (y,), {}, exact=False)
    kernel = schedule(lowered(program), target).kernel
    assert not kernel.notes
    np.testing.assert_allclose(native(program, kernel, target=target)[0], expected(program)[0], rtol=1e-6)
    lanes = [x for x in walk(kernel.body) if isinstance(x, For) and x.kind == VECTORIZED]
    assert any(x.extent == target.vector_bits // 32 for x in lanes) or shape[-1] > 8


@pytest.mark.parametrize(("rows", "depth"), [(1, 9000), (5, 4096), (40, 5000)])
def test_long_sums_are_summed_up_in_blocks(rows: int, depth: int) -> None:
    """The error of one sum after the other grows like the square root of its length, at least."""
    a, b, k = te.placeholder((rows, depth), name="A"), te.placeholder((depth, 48), name="B"), te.reduce_axis(depth, "k")
    p = Program((a, b), (te.compute((rows, 48), lambda i, j: te.sum(a[i, k] * 0.1 * b[k, j], k), name="C"),), {}, exact=False)
    (got,) = native(p, schedule(lower("p", p.inputs, p.outputs), HOST).kernel)
    x, y = (p.arrays(0)[t] for t in (a, b))
    terms = (x * np.float32(0.1))[:, :, None].astype(np.float64) * y[None]
    exact, one_by_one = terms.sum(1), np.add.accumulate(terms.astype(np.float32), axis=1)[:, -1]
    assert np.abs(got - exact).max() < np.abs(one_by_one - exact).max() / 2


def lanes_of(kernel: Kernel) -> list[tuple[For, list[E.Expr]]]:
    """The loops over lanes, with what is read in them."""
    vectors = [x for x in walk(kernel.body) if isinstance(x, For) and x.kind == VECTORIZED]
    return [(x, [r for s in walk(x.body) for r in E.reads(*expressions(s))]) for x in vectors]


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_lanes_of_a_padding_read_neighbours(mode: str) -> None:
    x = te.placeholder((3, 5, 40), name="x")
    program = Program((x,), (pad(x, None, (0, 2, 3), (0, 1, 4), mode),), {})
    kernel = schedule(lowered(program), HOST).kernel
    assert {stride(r, v.var) for v, reads in lanes_of(kernel) for r in reads} <= {0, 1, -1}
    agree(program, interpreted(program, kernel), expected(program))
    agree(program, native(program, kernel), expected(program))


def test_lanes_of_a_concatenation_of_many_read_one_of_them() -> None:
    """Dense blocks concatenate what all of their layers compute: no lane chooses among operands."""
    parts = [te.placeholder((3, 32), name=f"p{n}") for n in range(30)]

    def element(i: E.Expr, j: E.Expr) -> E.Expr:
        found = parts[-1][i, j - 32 * 29]
        for n in reversed(range(29)):
            found = te.select(j < 32 * (n + 1), parts[n][i, j - 32 * n], found)
        return found

    program = Program(tuple(parts), (te.compute((3, 960), element, name="C"),), {})
    s = schedule(lower("p", program.inputs, program.outputs), HOST)
    assert not any(e.op == "select" for x in walk(s.kernel.body) for e in E.walk(*expressions(x)))
    agree(program, native(program, s.kernel), expected(program))


def test_what_a_reduction_reads_at_other_places_is_stored_whole() -> None:
    """Positions, two for each pixel, which all channels ask for: the sum runs in vectors, not as lowered."""
    x, at = te.placeholder((1, 4, 5, 6), name="x"), te.placeholder((1, 3, 16, 2), name="at")
    program = Program((x, at), (grid_sample(x, at, "linear", "zeros", False),), {})
    s = schedule(lowered(program), HOST)
    assert not s.fallbacks and any(isinstance(x, Accumulate) for v, _ in lanes_of(s.kernel) for x in walk(v.body))
    agree(program, native(program, s.kernel), expected(program))


@pytest.mark.parametrize("rows, on_threads", [(28, False), (4096, True)])
def test_threads_share_rows_if_these_are_many(rows: int, on_threads: bool) -> None:
    """The largest element of each block of 32: of a token's activations, which take less time than waking a thread, or of many."""
    x, k = te.placeholder((rows, 32), "float32", "x"), te.reduce_axis(32, "k")
    peak = te.compute((rows,), lambda i: te.max(te.abs(x[i, k]), k), "peak")
    s = schedule(lower("p", [x], [peak]), CpuTarget.parse("cpu -march=x86_64 -mcpu=skylake-avx512 -cores=2"))
    assert any(isinstance(loop, For) and loop.kind == PARALLEL for loop in walk(s.kernel.body)) == on_threads
