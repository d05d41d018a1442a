"""Products with packed weights by default schedules: the instruction for bytes in every tile, and the sums of the interpreter."""

import re

import numpy as np
import pytest

from tcomp.backends import backend_of
from tcomp.backends.kernel import build_loops, operand_layouts
from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import assembly
from tcomp.ir.expr import dim
from tcomp.ir.graph import GraphBuilder
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Call, Prefetch, hoist_temporaries, walk
from tcomp.ops.elementwise import ADD
from tcomp.ops.stored_weights import BYTE_BLOCK_PRODUCT, BYTE_BLOCKS, LARGEST
from tcomp.passes.layout import with_layouts
from tcomp.schedules import Schedule
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST, compile_kernel, spill_count

VNNI, CLIENT = CpuTarget.parse("cpu -mcpu=icelake-server"), CpuTarget.parse("cpu -mcpu=alderlake")
WITHOUT = CpuTarget.parse("cpu -mcpu=haswell")
ARM = CpuTarget.parse("cpu -march=aarch64 -mcpu=cortex-a72")
RNG = np.random.default_rng(0)


def product(rows, columns, blocks, bits=4, block=32, zeros=False, scales="float32", residual=False, parts=1, words=False):
    b, each = GraphBuilder("k"), 8 // bits
    own = block // each
    given = [
        b.input("x", "int16" if words else "int8", (rows, blocks, parts, each, own)),
        b.input("sx", "float32", (rows, blocks)),
        b.input("sums", "float32", (rows, blocks)),
    ]
    given += [b.input("w", "uint8", (columns, blocks, own)), b.input("s", scales, (columns, blocks))]
    point = b.input("z", "uint8", (columns, blocks)) if zeros else None
    values = b.add(BYTE_BLOCK_PRODUCT, [*given, point], {"bits": bits, "dtype": "float32"}, "y")
    if residual:
        values = b.add(ADD, [*values, b.input("r", "float32", (rows, columns))], {}, "total")
    return b.build(values)


def scheduled(graph, target):
    """The default schedule, weights packed as it wants them, and their layouts."""
    constants = frozenset(n for n, v in enumerate(graph.inputs) if v.name in "wsz" and v.name != "sums")
    wanted = operand_layouts(graph, constants, backend_of(target))
    return build_loops(with_layouts(graph, wanted), "kernel", backend_of(target)), wanted


def random(value, size):
    shape = [d if isinstance(d, int) else size for d in value.shape]
    if value.dtype in ("int8", "int16"):
        most = LARGEST[8 if value.dtype == "int8" else 16]
        return RNG.integers(-most, most, shape, value.dtype, endpoint=True)
    if value.name == "sums":
        return RNG.integers(-999, 999, shape).astype(np.float32)
    return RNG.integers(0, 256, shape, np.uint8) if value.dtype == "uint8" else RNG.random(shape).astype(value.dtype)


def calls(schedule):
    return [x.instruction.name for x in walk(schedule.kernel.body) if isinstance(x, Call)]


CASES = {
    "row": ({"rows": 1, "columns": 128, "blocks": 3}, ["vpdpbusd_unsigned(1, 4, 1, 512)"]),
    "bytes": ({"rows": 2, "columns": 64, "blocks": 2, "bits": 8, "zeros": True}, ["vpdpbusd_unsigned(2, 4, 1, 512)"]),
    "two bits": ({"rows": 1, "columns": 64, "blocks": 2, "bits": 2, "block": 64}, ["vpdpbusd_unsigned(1, 4, 1, 512)"]),
    "rows left over": ({"rows": 7, "columns": 64, "blocks": 2, "zeros": True, "residual": True}, None),
    "few columns": ({"rows": 3, "columns": 48, "blocks": 2, "scales": "float16"}, None),
    "integers of 16 bits": ({"rows": 1, "columns": 64, "blocks": 3, "parts": 2}, ["vpdpbusd_unsigned(2, 4, 1, 512)"]),
    "rows of 16 bits": ({"rows": 5, "columns": 64, "blocks": 2, "parts": 2, "bits": 8, "zeros": True}, None),
    "long blocks": ({"rows": 4, "columns": 64, "blocks": 2, "block": 128}, None),
}
WORDS = {
    "row": ({"rows": 1, "columns": 64, "blocks": 3}, ["vpmaddwd(1, 4, 1, 256)"]),
    "bytes": ({"rows": 2, "columns": 32, "blocks": 2, "bits": 8, "zeros": True}, ["vpmaddwd(2, 2, 1, 256)"]),
    "rows left over": ({"rows": 7, "columns": 32, "blocks": 2, "bits": 2, "block": 64, "zeros": True, "residual": True}, None),
    "few columns": ({"rows": 3, "columns": 16, "blocks": 2, "scales": "float16"}, None),
}


@pytest.mark.parametrize(("name", "cpu"), [(name, cpu) for name in WORDS for cpu in ("haswell", "skylake-avx512")])
def test_integers_of_16_bits_are_multiplied_where_bytes_are_not(name, cpu):
    sizes, expected = WORDS[name]
    target, graph = CpuTarget.parse(f"cpu -mcpu={cpu}"), product(**sizes, words=True)
    s, layouts = scheduled(graph, target)
    if cpu == "haswell":
        assert calls(s) == expected if expected else len(calls(s)) >= 1
        assert "c/2" in str(layouts[3])  # of the group that a lane adds up
    text = assembly(emit_kernel(hoist_temporaries(s.kernel)[0], target), target)
    assert ("vpmaddwd" in text) == bool(calls(s)) and "vpmulld" not in text and not s.fallbacks
    assert Schedule.from_json(s.to_json()).kernel is not None
    values = [random(v, 5) for v in graph.inputs]
    plain = build_loops(graph, "plain", backend_of(ARM)).source
    want, got = (np.full((sizes["rows"], sizes["columns"]), np.nan, np.float32) for _ in range(2))
    run_kernel(plain, dict(zip(plain.buffers, [*values, want], strict=True)))
    if target.runs_on(HOST):
        packed = [layouts[n].to_physical(v) if n in layouts else v for n, v in enumerate(values)]
        compile_kernel(s.kernel, target)(*packed, got)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1)


@pytest.mark.parametrize("name", CASES)
def test_the_instruction_is_used_and_sums_are_those_of_the_interpreter(name):
    sizes, expected = CASES[name]
    graph = product(**sizes)
    s, layouts = scheduled(graph, VNNI)
    assert calls(s) == expected if expected else len(calls(s)) >= 1
    assert not s.fallbacks
    text = assembly(emit_kernel(hoist_temporaries(s.kernel)[0], VNNI), VNNI)
    assert "vpdpbusd" in text and not any(line.strip().startswith(("vpmulld", "vpmaddwd")) for line in text.splitlines())
    assert Schedule.from_json(s.to_json()).kernel is not None  # every step is proved again
    values = [random(v, 5) for v in graph.inputs]
    plain = build_loops(graph, "plain", backend_of(WITHOUT)).source  # as lowered, weights row-major
    want, got = (np.full((sizes["rows"], sizes["columns"]), np.nan, np.float32) for _ in range(2))
    run_kernel(plain, dict(zip(plain.buffers, [*values, want], strict=True)))
    if VNNI.runs_on(HOST):
        packed = [layouts[n].to_physical(v) if n in layouts else v for n, v in enumerate(values)]
        compile_kernel(s.kernel, VNNI)(*packed, got)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-2)


def test_sums_stay_in_registers():
    text = assembly(emit_kernel(hoist_temporaries(scheduled(product(1, 256, 8), VNNI)[0].kernel)[0], VNNI), VNNI)
    assert spill_count(text) == 0


def test_narrower_vectors_and_free_rows():
    s, layouts = scheduled(product(2, 64, 2), CLIENT)
    assert calls(s) and all(name.endswith("256)") for name in calls(s))
    assert str(layouts[3]) == "(a/32,b,c/4,a%32,c%4)"
    assert calls(scheduled(product(dim("n"), 64, 2), VNNI)[0])


def test_what_no_instruction_fits_is_computed_all_the_same():
    s, layouts = scheduled(product(2, 64, 2), WITHOUT)
    assert calls(s) == [] and all(p.div != 4 for layout in layouts.values() for p in layout.pieces)
    odd, _ = scheduled(product(2, 40, 2), VNNI)  # columns that fill no panels
    assert calls(odd) == []


def test_activations_of_16_bits_may_stay_whole():
    x = (RNG.normal(size=(2, 16)) * 5).astype(np.float32)
    b = GraphBuilder("k")
    attrs = {"block": 8, "each": 2, "bits": 16}
    given = b.input("x", "float32", x.shape)
    graph = b.build([*b.add(BYTE_BLOCKS, [given], attrs, "q"), *b.add(BYTE_BLOCKS, [given], {**attrs, "whole": True}, "w")])
    halves, scales, sums, whole, *others = evaluate_graph(graph, {"x": x}).values()
    assert (whole.dtype, whole.shape) == (np.dtype(np.int16), (2, 2, 1, 2, 4))
    np.testing.assert_array_equal(whole[:, :, 0], halves[:, :, 0].astype(np.int32) * 256 + halves[:, :, 1])
    for array, other in zip((scales, sums), others, strict=True):
        np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("bits", [8, 16])
def test_activations_are_rounded_block_by_block(bits):
    x = np.concatenate([np.zeros((1, 8)), RNG.normal(size=(1, 8)) * 5], 1).astype(np.float32)
    b = GraphBuilder("k")
    graph = b.build(list(b.add(BYTE_BLOCKS, [b.input("x", "float32", x.shape)], {"block": 8, "each": 2, "bits": bits, "zero": 8}, "q")))
    s = build_loops(graph, "kernel", backend_of(VNNI))
    bytes_, scales, sums = np.zeros((1, 2, bits // 8, 2, 4), np.int8), np.zeros((1, 2), np.float32), np.zeros((1, 2), np.float32)
    arrays: list[np.ndarray] = [x, bytes_, scales, sums]
    run_kernel(s.kernel, {b: a.reshape([int(n) for n in b.shape]) for b, a in zip(s.kernel.buffers, arrays, strict=True)})
    integers = bytes_[:, :, 0].astype(np.int32) if bits == 8 else bytes_[:, :, 0].astype(np.int32) * 256 + bytes_[:, :, 1]
    numbers = integers.transpose(0, 1, 3, 2).reshape(1, 2, 8)
    assert not numbers[0, 0].any() and np.abs(numbers[0, 1]).max() == LARGEST[bits]
    np.testing.assert_allclose(numbers * scales[..., None], x.reshape(1, 2, 8), atol=scales.max() / 2 * 1.001)
    np.testing.assert_allclose(sums, numbers.sum(-1) * scales * 8, rtol=1e-6)


def test_weights_are_loaded_in_the_order_in_which_they_lie():
    s, _ = scheduled(product(1, 128, 3), VNNI)
    text = assembly(emit_kernel(hoist_temporaries(s.kernel)[0], VNNI), VNNI)
    loop = text[: text.index("vpdpbusd")].rpartition("\n.LBB")[2] + text[text.index("vpdpbusd") :].partition("\n\tj")[0]
    places = [int(found[1] or 0) for found in re.finditer(r"\b(?:vmovdq\w+|vmovap\w)\t(-?\d*)\(\S+\), %zmm", loop)]
    assert len(places) == 4 and places == sorted(places)  # those of one step of a block


def test_a_few_rows_of_unknown_number_are_whole_tiles():
    """Of up to 16 rows, 4 are none of which each row is tested; bytes of many are in the tile that is best for all."""
    few, many = (scheduled(product(dim("rows", 1, most), 128, 2, parts=parts), VNNI)[0] for most, parts in ((16, 2), (4096, 1)))
    assert "alloc total: int32[4, 2, 32, 1] register" in str(few.kernel)
    assert calls(many)[0] == "vpdpbusd_unsigned(6, 2, 1, 512)"


@pytest.mark.parametrize(("given", "ahead"), [({"parts": 2}, 3), ({"parts": 1}, 0), ({"parts": 2, "bits": 8}, 0), ({"rows": 4}, 0)])
def test_weights_of_a_row_are_prefetched_where_much_is_computed_with_them(given, ahead):
    schedule, _ = scheduled(product(**{"rows": 1, "columns": 128, "blocks": 9, "parts": 2, **given}), VNNI)
    hints = [x for x in walk(schedule.kernel.body) if isinstance(x, Prefetch)]
    assert bool(hints) == bool(ahead)
    for hint in hints:
        assert hint.buffer.name == "w" and hint.indices[1].op == "add" and hint.indices[1].args[1].attr == ahead


@pytest.mark.parametrize("columns", [96, 80, 16])
def test_panels_are_as_wide_as_columns_allow(columns):
    schedule, wanted = scheduled(product(1, columns, 2, parts=2), VNNI)
    assert calls(schedule) == [f"vpdpbusd_unsigned(2, {2 if columns == 96 else 1}, 1, 512)"] and wanted
