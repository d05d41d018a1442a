"""pipeline on GPU programs: tiles are copied ahead into a ring in shared memory, in the background, and waited for as late as possible."""

from __future__ import annotations

import re
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.barriers import phases, place
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.ir import loops as L, te
from tcomp.ir.expr import Dim, cast, evaluate_int
from tcomp.ir.loops import Kernel, Stmt, hoist_temporaries, walk
from tcomp.schedules.gpu.default import schedule
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.schedule import Schedule
from tcomp.target import CudaTarget
from tests.codegen.cuda import cuda_host
from tests.codegen.cuda.block_races import Block
from tests.codegen.cuda.block_tiles import tile
from tests.codegen.cuda.test_cuda import needs_nvrtc
from tests.schedules.gpu.test_default import FAMILIES, agree, batched, emulated, image, lowered, product
from tests.schedules.programs import Program
from tests.schedules.running import expected, interpreted

TARGET = CudaTarget.parse("cuda")
needs_compiler = pytest.mark.skipif(cuda_host.compiler() is None, reason="there is no C++ compiler")


def tiled(m: int, n: int, k: int | te.Expr, dtype: str = "float32") -> Program:
    a, b = te.placeholder((m, k), dtype, "A"), te.placeholder((k, n), dtype, "B")
    total = {"float16": "float32", "int8": "int32"}.get(dtype, dtype)
    r = te.reduce_axis(k, "k")
    c = te.compute((m, n), lambda i, j: te.sum(cast(a[i, r], total) * cast(b[r, j], total), r), "C")
    return Program((a, b), (c,), {})


def pipelined(program: Program, depth: int, stages: int, lanes: int = 1, turned: bool = False) -> Schedule:
    """Tiles of 8 x 8 results, a thread each; `depth` elements of the fold are staged at a time, `stages` of them at once."""
    s = Schedule(lowered(program))
    ko = tile(s, depth)
    s.cache_read("A", ko, "a", "shared", layout="(b,a)" if turned else None)
    s.cache_read("B", ko, "b", "shared")
    for name in "ab":
        last = f"{name}.1"
        if lanes > 1 and s.loops[last].extent % lanes == 0:
            last, lane = s.split(last, lanes)
            s.vectorize(lane)
        for axis, loop in (("thread.y", f"{name}.0"), ("thread.x", last)):
            s.bind(loop, axis)
    if stages > 1:
        s.pipeline(ko, stages, "a", "b")
    s.clean()
    return s


def background(kernel: Kernel) -> list[Stmt]:
    """The phases that copy from global to shared memory and do nothing else."""

    def copies(s: Stmt) -> bool:
        stores = [x for x in walk(s) if isinstance(x, L.Store | L.Accumulate)]
        sources = [x.value.args[1] if x.value.op == "select" else x.value for x in stores]
        there = all(x.buffer.scope == "shared" for x in stores)
        return bool(stores) and there and all(x.op == "read" and x.attr.scope == "global" for x in sources)

    return [s for s in phases(kernel.body) if copies(s)]


def races(kernel: Kernel, dims: dict[te.Expr, int]) -> set[str]:
    copies = background(kernel)
    block = Block(place(kernel.body, copies), copies, dims)
    for s in walk(kernel.body):
        if isinstance(s, L.For) and s.kind.startswith("block"):
            block.values[s.var] = 0
    block.run(_first_block(kernel.body))
    return block.races


def _first_block(s: Stmt) -> Stmt:
    """The program of one block: it does not meet the others."""
    while isinstance(s, L.For) and s.kind.startswith("block"):
        s = s.body
    return s


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.integers(1, 11), st.integers(1, 11), st.integers(1, 23), st.sampled_from([1, 2, 4, 8]), st.integers(2, 5),
    st.sampled_from([1, 2, 4]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_any_sizes_by_the_interpreter_and_thread_by_thread(
    m: int, n: int, k: int, depth: int, stages: int, lanes: int, turned: bool, symbolic: bool
) -> None:
    size: Dim = te.var("n", 1, None) if symbolic else k
    program = tiled(m, n, size)
    if symbolic:
        program = Program(program.inputs, program.outputs, {size: k})
    kernel = pipelined(program, depth, stages, lanes, turned).kernel
    agree(program, interpreted(program, kernel, shuffle=1))
    assert not races(kernel, dict(program.dims))


@needs_compiler
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(
    ("m", "n", "k", "depth", "lanes", "dtype", "turned"),
    [
        (16, 24, 40, 8, 4, "float32", False),
        (13, 21, 37, 8, 4, "float32", False),
        (9, 7, 5, 8, 1, "float32", True),
        (16, 16, 48, 8, 8, "float16", False),
        (16, 16, 48, 8, 4, "int8", False),
        (11, 16, 30, 4, 2, "float64", True),
    ],
)
def test_emitted_text_on_the_host(stages: int, m: int, n: int, k: int, depth: int, lanes: int, dtype: str, turned: bool) -> None:
    program = tiled(m, n, k, dtype)
    kernel = pipelined(program, depth, stages, lanes, turned).kernel
    for descending in (False, True):
        agree(program, emulated(program, kernel, descending))


@needs_compiler
@pytest.mark.parametrize("k", [1, 8, 9, 40])
def test_a_fold_of_unknown_length_on_the_host(k: int) -> None:
    size = te.var("n", 1, None)
    sized = tiled(9, 16, size)
    program = Program(sized.inputs, sized.outputs, {size: k})
    agree(program, emulated(program, pipelined(program, 8, 3, 4).kernel))


def steady(text: str) -> str:
    """The loop over steps, from its head to the first thread's work."""
    return text[text.index("for (int C_k_o = 0") :]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_one_barrier_a_step_after_a_wait_for_all_but_the_newest(stages: int) -> None:
    text, _ = emit_kernel(pipelined(tiled(16, 16, 256), 8, stages, 4).kernel, TARGET)
    body = [line.strip() for line in steady(text).splitlines()]
    assert body[1:3] == [f"wait_for_copies<{stages - 2}>();", "__syncthreads();"]
    assert text.count("__syncthreads();") == 1 and text.count("complete_group();") == 2
    assert re.search(rf"a\[{stages * 64}\];", text) and f"% {stages}" in text
    plain, _ = emit_kernel(pipelined(tiled(16, 16, 256), 8, 1, 4).kernel, TARGET)
    assert plain.count("__syncthreads();") == 2 and "wait_for_copies<0>" in plain


def test_without_copies_in_the_background_a_ring_saves_a_barrier() -> None:
    text, _ = emit_kernel(pipelined(tiled(16, 16, 256), 8, 2, 4).kernel, CudaTarget.parse("cuda -arch=sm_75"))
    assert "start_copy" not in text and text.count("__syncthreads();") == 1


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_machine_code(stages: int, arch: str) -> None:
    text, _ = emit_kernel(pipelined(tiled(16, 16, 256), 8, stages, 4).kernel, TARGET)
    binary = nvrtc.compile_text(text, arch)
    ptx = binary.ptx.decode()
    assert "cp.async.cg.shared.global" in ptx and ptx.count(f"cp.async.wait_group {stages - 2};") == ptx.count("bar.sync") > 0
    (usage,) = binary.usage.values()
    assert usage.spilled == usage.stack == 0 and usage.shared == stages * 2 * 64 * 4


# ---------------------------------------------------------------- default schedules

STAGED = [name for name in FAMILIES if name.startswith("product-staged")]


def stages_of(s: Schedule) -> list[int]:
    return [step.arguments[1] for step in s.trace if step.primitive == "pipeline"]


@pytest.mark.parametrize("name", STAGED)
def test_products_are_pipelined_from_sm_80_on(name: str) -> None:
    kernel = lowered(FAMILIES[name])
    s = schedule(kernel, TARGET)
    (stages,) = stages_of(s)
    assert 2 <= stages <= 4
    text, _ = emit_kernel(hoist_temporaries(s.kernel)[0], TARGET)
    assert ("start_copy<4>" if "odd" in name else "start_copy<16>") in text
    assert not stages_of(schedule(kernel, CudaTarget.parse("cuda -arch=sm_75")))
    assert not stages_of(schedule(kernel, CudaTarget.parse("cuda -arch=sm_75,sm_90")))


def test_stages_fit_beside_the_other_blocks_of_a_multiprocessor() -> None:
    """More shared memory, more stages: tiles of 128 x 128 take 8 KiB each, and two blocks run side by side."""
    kernel = lowered(product(4096, 4096, 4096))
    for arch, least in (("sm_80", 4), ("sm_86", 4), ("sm_90a", 4)):
        assert stages_of(schedule(kernel, CudaTarget.parse(f"cuda -arch={arch}"))) == [least]
    small = lowered(product(512, 512, 512))
    found = [stages_of(schedule(small, CudaTarget.parse(f"cuda -arch={arch}")))[0] for arch in ("sm_86", "sm_90a")]
    assert found[0] <= found[1]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_tuner_may_take_any_number_of_stages(stages: int) -> None:
    program = FAMILIES["product-staged"]
    kernel, knobs = lowered(program), Knobs()
    schedule(kernel, TARGET, knobs)
    (name,) = [n for n in knobs.asked if n.endswith(".stages")]
    assert stages in knobs.asked[name].options
    s = schedule(kernel, TARGET, Knobs({name: stages}))
    assert stages_of(s) == ([stages] if stages > 1 else [])
    assert len(s.kernel.buffers) == len(kernel.buffers)


SMALL = {"odd": product(19, 33, 18), "image": image(1, 16, 5, 17, 2, pad=1), "batched": batched(2, 17, 17, 16, True)}


@pytest.mark.parametrize("name", SMALL)
def test_default_schedules_of_odd_sizes_have_no_races(name: str) -> None:
    """Thread by thread, in the first block; and by the interpreter, which finds what is read before it is written."""
    s = schedule(lowered(SMALL[name]), TARGET)
    agree(SMALL[name], interpreted(SMALL[name], s.kernel, shuffle=1))
    assert stages_of(s) and not races(s.kernel, {})


@needs_compiler
@pytest.mark.parametrize("name", STAGED)
def test_a_missing_wait_would_be_found(name: str) -> None:
    program = FAMILIES[name]
    kernel = hoist_temporaries(schedule(lowered(program), TARGET).kernel)[0]
    text, (launch,) = emit_kernel(kernel, TARGET)
    bare = re.sub(r"wait_for_copies<\d+>\(\);", "", text)
    assert bare != text
    shapes = [[evaluate_int(d, {}) for d in b.shape] for b in kernel.buffers]
    arrays = [np.zeros(shape, np.float32) for shape in shapes]
    for t, room in zip(program.inputs, arrays, strict=False):
        room[...] = program.arrays()[t]
    grid = [evaluate_int(n, {}) for n in launch.grid]
    cuda_host.launch(bare, launch.function, grid, launch.block, [arrays[n].ctypes.data for n in launch.buffers])
    assert not np.array_equal(arrays[-1], expected(program)[0])


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_large_product_fits(arch: str) -> None:
    s = schedule(lowered(product(4096, 4096, 4096)), TARGET)
    text, (launch,) = emit_kernel(hoist_temporaries(s.kernel)[0], TARGET)
    binary = nvrtc.compile_text(text, arch)
    usage = binary.usage[launch.function]
    assert usage.spilled == 0 and 2 * (usage.shared + launch.shared) <= 164 << 10 and 2 * usage.registers * prod(launch.block) <= 1 << 16
    assert "cp.async.cg.shared.global" in binary.ptx.decode() and "cp.async.wait_group 2;" in binary.ptx.decode()
