"""Products of bytes and of bfloat16 numbers by default schedules: the instruction for them where there is one, whatever the sizes."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from tcomp.backends import backend_of
from tcomp.backends.kernel import build_loops, operand_layouts
from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import assembly
from tcomp.ir.expr import dim
from tcomp.ir.graph import GraphBuilder
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.layout import Layout
from tcomp.ir.loops import Accumulate, Call, hoist_temporaries, walk
from tcomp.ops.matmul import MATMUL
from tcomp.ops.nn import CONV
from tcomp.passes.layout import with_layouts
from tcomp.schedules import Schedule
from tcomp.schedules.cost.cpu import estimate
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST, compile_kernel, spill_count

BFLOATS = CpuTarget.parse("cpu -mcpu=cooperlake")
VNNI, WITHOUT = CpuTarget.parse("cpu -mcpu=cascadelake"), CpuTarget.parse("cpu -mcpu=skylake-avx512")
CLIENT, HASWELL, ARM = (CpuTarget.parse(f"cpu {t}") for t in ("-mcpu=alderlake", "-mcpu=haswell", "-march=aarch64 -mcpu=neoverse-n1"))
RNG = np.random.default_rng(0)
BF, NUMBER = ("bfloat16", "bfloat16"), np.dtype(ml_dtypes.bfloat16)


def matmul(rows, depth, columns, dtypes=("uint8", "int8"), **attrs):
    b = GraphBuilder("k")
    x, w = b.input("x", dtypes[0], (rows, depth)), b.input("w", dtypes[1], (depth, columns))
    return b.build(b.add(MATMUL, [x, w], attrs, "y")), [None, None]


def conv(channels, outputs, size, kernel, stride=1, dtypes=("uint8", "int8")):
    b = GraphBuilder("k")
    x, w = b.input("x", dtypes[0], (1, channels, size, size)), b.input("w", dtypes[1], (outputs, channels, kernel, kernel))
    last = Layout.permuted((0, 2, 3, 1))
    y = b.add(CONV, [x, w], {"strides": (stride, stride), "dilations": (1, 1), "group": 1}, "y")
    return with_layouts(b.build(y), {0: last}, {0: last}), [last, None]


def scheduled(made, target):
    """The default schedule, its weights packed as it wants them."""
    graph, layouts = made
    wanted = operand_layouts(graph, frozenset({1}), backend_of(target))
    return build_loops(with_layouts(graph, {0: layouts[0], 1: wanted.get(1)}), "kernel", backend_of(target)), wanted.get(1)


def calls(schedule):
    return [x.instruction.name for x in walk(schedule.kernel.body) if isinstance(x, Call)]


def code(schedule, target):
    return assembly(emit_kernel(hoist_temporaries(schedule.kernel)[0], target), target)


CASES = {
    "row": (matmul(1, 64, 1000), ["vpdpbusd(1, 8, 1, 512)"] * 2),
    "rows left over": (matmul(128, 64, 96), None),
    "columns left over": (matmul(30, 16, 40), None),
    "few columns": (matmul(9, 32, 10), ["vpdpbusd(9, 1, 1, 512)"]),
    "window": (conv(16, 32, 12, 3), ["vpdpbusd(10, 2, 1, 512)"]),
    "strided window": (conv(4, 48, 21, 7, 2), None),
    "pixels": (conv(64, 64, 7, 1), None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_instruction_is_used_and_sums_are_exact(name):
    made, expected = CASES[name]
    s, layout = scheduled(made, VNNI)
    found = calls(s)
    assert found if expected is None else found == expected
    text = code(s, VNNI)
    assert ("vpdpbusd" in text) == bool(found)
    x, _, y = s.kernel.buffers
    values = [RNG.integers(0, 256, x.shape, np.uint8), RNG.integers(-128, 128, made[0].inputs[1].shape, np.int8)]
    packed = values[1] if layout is None else layout.to_physical(values[1])
    plain = build_loops(made[0], "plain", backend_of(HASWELL)).source  # as lowered, weights row-major
    want, got = np.zeros([int(n) for n in plain.buffers[2].shape], np.int32), np.full(y.shape, -1, np.int32)
    run_kernel(plain, dict(zip(plain.buffers, [values[0].reshape([int(n) for n in plain.buffers[0].shape]), values[1], want], strict=True)))
    assert Schedule.from_json(s.to_json()).kernel is not None  # every step is proved again
    if VNNI.runs_on(HOST):
        compile_kernel(s.kernel, VNNI)(values[0], packed, got)
        np.testing.assert_array_equal(got, want.reshape(got.shape))


BFLOAT_CASES = {
    "row": matmul(1, 64, 1000, BF), "rows left over": matmul(128, 64, 96, BF), "columns left over": matmul(30, 6, 40, BF),
    "few columns": matmul(9, 32, 10, BF), "window": conv(16, 32, 12, 3, 1, BF), "strided window": conv(2, 48, 21, 7, 2, BF),
    "pixels": conv(64, 64, 7, 1, 1, BF),
}  # fmt: skip


@pytest.mark.parametrize("name", BFLOAT_CASES)
def test_bfloat16_is_multiplied_by_its_instruction(name):
    """Small integers, so that sums are exact in any order."""
    made = BFLOAT_CASES[name]
    s, layout = scheduled(made, BFLOATS)
    assert calls(s) and "vdpbf16ps" in code(s, BFLOATS) and layout.pieces[-1].mod == 2
    x, _, y = s.kernel.buffers
    values = [RNG.integers(-8, 9, shape).astype(NUMBER) for shape in (x.shape, made[0].inputs[1].shape)]
    plain = build_loops(made[0], "plain", backend_of(HASWELL)).source  # as lowered, weights row-major
    want, got = np.zeros([int(n) for n in plain.buffers[2].shape], NUMBER), np.full(y.shape, -1, NUMBER)
    run_kernel(plain, dict(zip(plain.buffers, [values[0].reshape([int(n) for n in plain.buffers[0].shape]), values[1], want], strict=True)))
    assert Schedule.from_json(s.to_json()).kernel is not None  # every step is proved again
    if BFLOATS.runs_on(HOST):
        compile_kernel(s.kernel, BFLOATS)(values[0], layout.to_physical(values[1]), got)
        np.testing.assert_array_equal(got, want.reshape(got.shape))


@pytest.mark.parametrize("columns", ("int8", "int16"))
@pytest.mark.parametrize("sizes", ((1, 64, 1000), (128, 64, 96), (30, 6, 80)), ids=("row", "rows left over", "columns left over"))
@pytest.mark.parametrize("target", (HASWELL, WITHOUT), ids=str)
def test_integers_of_16_bits(sizes, columns, target):
    """Products of activations of 16 bits by weights of 8 or 16: one instruction, whose result has a register of its own."""
    rows, depth, outputs = sizes
    made = matmul(rows, depth, outputs, ("int16", columns), dtype="int32")
    s, layout = scheduled(made, target)
    text = code(s, target)
    assert calls(s) and "vpmaddwd" in text and "vpmulld" not in text and spill_count(text) == 0 and layout.pieces[-1].mod == 2
    assert Schedule.from_json(s.to_json()).kernel is not None  # every step is proved again
    if target.runs_on(HOST):
        x, w = RNG.integers(-1000, 1000, (rows, depth), np.int16), RNG.integers(-128, 128, (depth, outputs), columns)
        given, _, result = ([int(n) for n in b.shape] for b in s.kernel.buffers)
        got = np.full(result, -1, np.int32)
        compile_kernel(s.kernel, target)(x.reshape(given), layout.to_physical(w), got)
        np.testing.assert_array_equal(got.reshape(rows, outputs), x.astype(int) @ w)


AMX = CpuTarget.parse("cpu -mcpu=sapphirerapids")
TILE_CASES = {
    "rows left over": matmul(100, 64, 96), "columns left over": matmul(48, 80, 43), "few columns": matmul(40, 128, 10), "odd depth": matmul(64, 84, 32),
    "window": conv(32, 48, 18, 3), "strided window": conv(4, 48, 39, 7, 2), "pixels": conv(64, 64, 14, 1),
    "bfloat16": matmul(70, 96, 90, BF), "bfloat16 window": conv(16, 40, 30, 3, 2, BF),
}  # fmt: skip


@pytest.mark.parametrize("cores", (1, 2))
@pytest.mark.parametrize("name", TILE_CASES)
def test_tile_registers_add_up_whole_reductions(name, cores):
    made, target = TILE_CASES[name], dataclasses.replace(AMX, cores=cores)
    s, layout = scheduled(made, target)
    assert calls(s) and all(name.startswith("tdp") for name in calls(s))
    assert sum(isinstance(x, Accumulate) for x in walk(s.kernel.body)) == len(calls(s))
    assert Schedule.from_json(s.to_json()).kernel is not None  # every step is proved again
    text = emit_kernel(hoist_temporaries(s.kernel)[0], target)
    assert "vpdpbusd" not in text and "tilerelease" in assembly(text, target)
    assert ("llvm.x86.tilezero" in text) == (any(b.shape[-1] % 16 == 0 for b in sums_on_the_stack(s.kernel)))
    if not target.runs_on(HOST):
        pytest.skip("this machine has no AMX")
    x, _, y = s.kernel.buffers
    bytes_ = x.dtype == "uint8"
    values = [
        RNG.integers(*ends, shape)
        for ends, shape in zip(((0, 256), (-128, 128)) if bytes_ else ((-8, 9),) * 2, (x.shape, made[0].inputs[1].shape), strict=True)
    ]
    values = [v.astype(t) for v, t in zip(values, (np.uint8, np.int8) if bytes_ else (NUMBER, NUMBER), strict=True)]
    plain = build_loops(made[0], "plain", backend_of(HASWELL)).source  # as lowered, weights row-major
    dtype = np.int32 if bytes_ else NUMBER
    want, got = np.zeros([int(n) for n in plain.buffers[2].shape], dtype), np.full(y.shape, -1, dtype)
    run_kernel(plain, dict(zip(plain.buffers, [values[0].reshape([int(n) for n in plain.buffers[0].shape]), values[1], want], strict=True)))
    run_hoisted(s.kernel, target, values[0], layout.to_physical(values[1]), got)
    np.testing.assert_array_equal(got, want.reshape(got.shape))


def sums_on_the_stack(kernel):
    return [x.buffer for x in walk(kernel.body) if isinstance(x, Accumulate)]


def run_hoisted(kernel, target, *arrays, sizes=()):
    hoisted, temporaries = hoist_temporaries(kernel)
    assert all(isinstance(n, int) for b in temporaries for n in b.shape)
    compile_kernel(hoisted, target)(*arrays, *(np.empty(b.shape, b.dtype) for b in temporaries), *sizes)


@pytest.mark.parametrize(
    ("target", "dtypes"),
    [
        (AMX, ("uint8", "int8")),
        (AMX, BF),
        (VNNI, ("uint8", "int8")),
        (VNNI, ("int16", "int8")),
        (BFLOATS, BF),
        (HASWELL, ("int16", "int8")),
    ],
    ids=lambda x: getattr(x, "cpu", str(x)),
)
def test_rows_that_a_run_counts_are_multiplied_by_instructions_to_the_last(target, dtypes):
    """Not one by one in scalars, which takes a hundred times as long."""
    floats = dtypes == BF
    made = matmul(dim("n", 1, 512), 64, 72, dtypes, **({} if dtypes[0] != "int16" else {"dtype": "int32"}))
    s, layout = scheduled(made, target)
    assert sum(isinstance(x, Accumulate) for x in walk(s.kernel.body)) == sum(isinstance(x, Call) for x in walk(s.kernel.body)) > 1
    assert Schedule.from_json(s.to_json()).kernel is not None  # every step is proved again
    if not target.runs_on(HOST):
        pytest.skip(f"this machine is not a {target.cpu}")
    for rows in (1, 3, 15, 16, 17, 31, 32, 47, 64, 101, 511):
        (x, w) = (RNG.integers(-8, 9, shape).astype(NUMBER) for shape in ((rows, 64), (64, 72)))
        if not floats:
            x, w = RNG.integers(0, 256, (rows, 64)).astype(dtypes[0]), RNG.integers(-128, 128, (64, 72), np.int8)
        got = np.full((rows, 72), -1, NUMBER if floats else np.int32)
        run_hoisted(s.kernel, target, x, layout.to_physical(w), got, sizes=(rows,))
        np.testing.assert_array_equal(got, (x.astype(float) @ w.astype(float)).astype(got.dtype))


@pytest.mark.parametrize(
    "made",
    (conv(16, 32, dim("h", 8, 512), 3), conv(64, 64, dim("h", 8, 512), 1), conv(16, 40, dim("h", 8, 512), 3, 2)),
    ids=("window", "pixels", "stride"),
)
@pytest.mark.parametrize("target", (AMX, VNNI), ids=lambda x: x.cpu)
def test_images_of_any_size_are_multiplied_by_instructions(made, target):
    s, _ = scheduled(made, target)
    assert sum(isinstance(x, Accumulate) for x in walk(s.kernel.body)) == len(calls(s))


def test_the_model_knows_what_products_of_bytes_take():
    made = matmul(784, 768, 768)
    tiles, lanes, floats = (estimate(scheduled(made, target)[0].kernel, target) for target in (AMX, VNNI, WITHOUT))
    assert 4 < lanes.seconds["arithmetic"] / tiles.seconds["arithmetic"] < 12 and lanes.time < floats.time
    assert lanes.bound <= lanes.time < 2 * lanes.bound and tiles.bound <= tiles.time < lanes.time


@pytest.mark.parametrize("made", (matmul(1, 64, 1000), matmul(2, 256, 64), conv(4, 32, 12, 1)), ids=("a row", "two rows", "a step"))
def test_little_work_stays_in_vector_lanes(made):
    assert all(name.startswith("vpdpbusd") for name in calls(scheduled(made, AMX)[0]))


def test_accumulators_stay_in_registers():
    text = code(scheduled(conv(64, 64, 16, 3), VNNI)[0], VNNI)
    assert spill_count(text) == 0 and text.count("vpdpbusd") == 28


def test_avx_vnni_has_narrower_vectors():
    s, _ = scheduled(conv(16, 32, 12, 3), CLIENT)
    assert calls(s) and all(name.endswith("256)") for name in calls(s)) and "vpdpbusd" in code(s, CLIENT)


@pytest.mark.parametrize("target", [WITHOUT, HASWELL, ARM], ids=str)
def test_other_machines_multiply_in_plain_lanes(target):
    s, layout = scheduled(conv(16, 32, 12, 3), target)
    assert calls(s) == [] and all(p.div != 4 for p in layout.pieces)
    assert "vectorized" in str(s.kernel) and code(s, target)


def test_floats_and_other_integers_are_packed_as_before():
    b = GraphBuilder("k")
    x, w = b.input("x", "int8", (8, 64)), b.input("w", "int8", (64, 32))
    graph = b.build(b.add(MATMUL, [x, w], {}, "y"))
    assert operand_layouts(graph, frozenset({1}), backend_of(VNNI)) == operand_layouts(graph, frozenset({1}), backend_of(WITHOUT))
