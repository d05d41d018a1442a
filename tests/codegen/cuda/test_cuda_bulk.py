"""Bulk copies into shared memory: text, run by a host that counts the bytes at barrier objects; machine code; and where they are refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.barriers import MAX_TRACKED
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.errors import CodegenError, ScheduleError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, as_expr, evaluate_int
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Accumulate, Allocate, Buffer, Call, If, Kernel, Stmt, block, loop, store
from tcomp.schedules import Schedule
from tcomp.schedules.instructions import bulk_copy
from tcomp.target import CudaTarget
from tests.codegen.cuda import cuda_host
from tests.codegen.cuda.block_tiles import tile
from tests.codegen.cuda.test_cuda import needs_nvrtc
from tests.codegen.cuda.warp_products import pack, product_of_groups
from tests.codegen.test_instructions import needs_compiler, operands, run_on_host

HOPPER = CudaTarget.parse("cuda -arch=sm_90a")


def product(m: Dim, n: int, k: int, depth: int, stages: int, bulk: str = "ab", dtype: str = "float32") -> Schedule:
    """Tiles of 8 x 8 results, a thread each, of slices of which those of `bulk` are copied in bulk, and by threads over an edge."""
    a, b, r = te.placeholder((m, k), dtype, "A"), te.placeholder((k, n), dtype, "B"), te.reduce_axis(k, "k")
    s = Schedule([a, b, te.compute((m, n), lambda i, j: te.sum(te.cast(a[i, r], "float32") * te.cast(b[r, j], "float32"), r), "C")])
    ko = tile(s, depth)
    s.cache_read("A", ko, "a", "shared")
    s.cache_read("B", ko, "b", "shared")
    for name in "ab":
        by_threads = name
        if name in bulk:
            by_threads = "" if "if" not in str(s.loops[f"{name}.0"]) else s.specialize(f"{name}.0").removesuffix(".0.e")
            s.tensorize(f"{name}.1", bulk_copy(dtype, s.loops[f"{name}.1"].extent))
            s.bind(f"{name}.0", "thread.x")
        if by_threads:
            edge = ".e" * (name in bulk)
            s.bind(f"{name}.0{edge}", "thread.y")
            s.bind(f"{name}.1{edge}", "thread.x")
    if stages > 1:
        s.pipeline(ko, stages, "a", "b")
    s.clean()
    return s


def checked(kernel: Kernel, dims: dict[Expr, int] | None = None, text: str | None = None) -> str:
    """The text, after the host has computed what the interpreter has."""
    emitted, (launch,) = emit_kernel(kernel, HOPPER)
    shapes = {b: tuple(evaluate_int(as_expr(d), dims or {}) for d in b.shape) for b in kernel.buffers}
    given = operands(Kernel(kernel.name, tuple(Buffer(b.name, b.dtype, shapes[b]) for b in kernel.buffers), (), (), block()), 0)
    want = [a.copy() for a in given]
    run_kernel(kernel, dict(zip(kernel.buffers, want, strict=True)), dims or {}, shuffle=1, garbage=True)
    grid = [evaluate_int(as_expr(n), dims or {}) for n in launch.grid]
    for descending in (False, True):
        arrays = [a.copy() for a in given]
        args = [arrays[n].ctypes.data for n in launch.buffers] + [(dims or {})[kernel.scalars[n]] for n in launch.scalars]
        cuda_host.launch(text or emitted, launch.function, grid, launch.block, args, descending)
        for b, got, meant in zip(kernel.buffers, arrays, want, strict=True):
            np.testing.assert_array_equal(got, meant, err_msg=b.name)
    return emitted


@needs_compiler
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(2, 25), st.integers(1, 6), st.integers(2, 9), st.sampled_from([4, 8, 12]), st.integers(1, 5), st.sampled_from(["a", "b", "ab"]),
    st.booleans(),
)  # fmt: skip
def test_any_sizes_and_stages(m: int, n: int, k: int, depth: int, stages: int, bulk: str, symbolic: bool) -> None:
    """Rows of 16 bytes and more; tiles that hang over an edge are copied by threads."""
    size = te.var("m", 1, None) if symbolic else m
    try:
        kernel = product(size, 4 * n, 4 * k, depth, stages, bulk).kernel
    except ScheduleError as refused:  # no tile is full
        assert "asks nothing" in str(refused) or "inside the loops is not one store" in str(refused)
        return
    assert "cp.async.bulk" in checked(kernel, {size: m} if symbolic else {})


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "float64"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_groups_are_a_ring_of_phases(dtype: str, stages: int) -> None:
    """Objects are made once; each thread that copies arrives once a group, bytes are announced where they are copied, and waits go through
    the ring."""
    size = {"float16": 2, "int8": 1, "float64": 8}.get(dtype, 4)
    text = checked(product(16, 32, 160, 16, stages, "ab" if size > 1 else "a", dtype).kernel).split("__global__")[1]
    groups = stages - 1 if stages > 1 else 2 if size > 1 else 1
    ring = 1 << (groups - 1).bit_length()
    assert re.search(rf"if \(threadIdx\.x < 1 && threadIdx\.y < 1\) prepare_groups<{ring}>\(arrived, (8|16)\);\n  __syncthreads\(\);", text)
    assert text.count("prepare_groups") == 1
    assert set(re.findall(r"announce\(arrived \+ started % (\d+), (\d+)\)", text)) <= {
        (str(ring), str(16 * size)),
        (str(ring), str(8 * size)),
    }
    assert text.count("arrive(") == text.count("++started") > 0
    newest = f" + {stages - 2}" if stages > 2 else ""
    assert f"for (; waited{newest} < started; ++waited) {{\n" in text
    assert f"wait_for_group(arrived + waited % {ring}, waited / {ring} % 2);" in text
    assert text.count("publish();") == text.count("__syncthreads();") - 1


def steady() -> Kernel:
    return product(16, 16, 96, 16, 3).kernel


@needs_compiler
@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        ((r"wait_for_group\(arrived.*\);", ";"), "anew too early"),
        ((r"arrive\(arrived.*\);", ";"), "does not end"),
        ((r"waited / 2 % 2", "waited / 2 % 2 ^ 1"), "does not end"),
        ((r"waited \+ 1 < started", "waited + 2 < started"), "Arrays are not equal|anew too early"),
        ((r"started % 2, 64", "started % 2, 48"), "does not end"),
        ((r"prepare_groups<2>\(arrived, 16\)", "prepare_groups<2>(arrived, 17)"), "does not end"),
        ((r"to_global\(A", "to_global(A + 1"), "not aligned"),
    ],
)
def test_the_host_sees_mistakes(mistake: tuple[str, str], found: str) -> None:
    text, _ = emit_kernel(steady(), HOPPER)
    head, body = text.split("__global__")
    wrong = re.sub(*mistake, body)
    assert wrong != body
    with pytest.raises(AssertionError, match=found):
        checked(steady(), text=f"{head}__global__{wrong}")


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_machine_code(stages: int, arch: str) -> None:
    for kernel in (product(64, 64, 256, 16, stages).kernel, product(61, 68, 252, 16, stages).kernel):
        text, _ = emit_kernel(kernel, CudaTarget.parse(f"cuda -arch={arch}"))
        binary = nvrtc.compile_text(text, arch)
        ptx = binary.ptx.decode()
        assert ptx.count("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes") == ptx.count("mbarrier.expect_tx") > 0
        assert ptx.count("mbarrier.init.shared::cta") == int(re.search(r"prepare_groups<(\d+)>\(a", text)[1])
        assert "mbarrier.arrive.shared::cta" in ptx and "mbarrier.try_wait.parity.shared::cta" in ptx
        assert ptx.count("fence.mbarrier_init.release.cluster") == 1 and ptx.count("fence.proxy.async.shared::cta") == ptx.count("bar.sync")
        (usage,) = binary.usage.values()
        assert usage.spilled == usage.stack == 0


@needs_compiler
@pytest.mark.parametrize(("dtype", "stages"), [("float16", 1), ("float16", 3), ("float32", 2), ("int8", 4)])
def test_packed_slices_for_warpgroups(dtype: str, stages: int) -> None:
    """A whole slice is one run, read by `wgmma`; those of the other factor are copied by threads in the same groups."""
    kernel = product_of_groups(dtype, 150, 64, 256, 32, 2, stages, packed=True).kernel
    a, _, c = operands(kernel, 1)
    b = np.random.default_rng(2).integers(-9, 10, (64, 256)).astype(a.dtype)
    arrays = [a, pack(b, 32, 2), c]
    for descending in (False, True):
        c.fill(77)
        text = run_on_host(kernel, arrays, HOPPER, descending)
        np.testing.assert_array_equal(c, a.astype(c.dtype) @ b.T.astype(c.dtype))
    body = text.split("__global__")[1]
    assert "if (threadIdx.x < 1 && threadIdx.y < 1) arrive(" in body and "start_copy<16>" in body and "finish_products" in body
    assert "prepare_groups<" in body and re.search(rf"announce\(.*, {32 * 64}\)", body)


@needs_nvrtc
def test_machine_code_of_packed_slices() -> None:
    text, _ = emit_kernel(product_of_groups("float16", 512, 512, 512, 128, 4, 3, packed=True).kernel, HOPPER)
    binary = nvrtc.compile_text(text, "sm_90a")
    (usage,), ptx = binary.usage.values(), binary.ptx.decode()
    assert usage.spilled == usage.stack == 0
    assert "wgmma.mma_async" in ptx and "cp.async.cg" in ptx and "cp.async.bulk" in ptx and "st.shared" not in ptx


# ---------------------------------------------------------------- where it cannot stand


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_80,sm_90a", "sm_89"])
def test_older_architectures_refuse(arch: str) -> None:
    with pytest.raises(CodegenError, match=r"has no instruction `bulk_copy\(float32, \d+\)`(?s:.)*it needs sm_90"):
        emit_kernel(steady(), CudaTarget.parse(f"cuda -arch={arch}"))
    with pytest.raises(CodegenError, match="buffers need not be aligned to 16 bytes"):
        emit_kernel(steady(), CudaTarget.parse("cuda -arch=sm_90a -scalar"))


@pytest.mark.parametrize(
    ("dtype", "count"), [("float32", 3), ("int8", 8), ("float16", 0), ("float32", 1 << 18), ("complex64", 4), ("float32", "x")]
)
def test_runs_that_there_are_not(dtype: str, count: int) -> None:
    with pytest.raises(ScheduleError, match=f"bulk_copy of {count} elements of {dtype}"):
        bulk_copy(dtype, count)


def test_guards_inside_of_a_run_are_refused() -> None:
    """A row that ends inside of a tile."""
    s = Schedule(te.compute((10,), lambda i: te.placeholder((10,), name="A")[i] * 2, "B"))
    outer, _ = s.split("B.i", 4)
    s.bind(outer, "block.x")
    s.cache_read("A", outer, "P", "shared")
    with pytest.raises(ScheduleError, match="inside the loops is not one store but `if"):
        s.tensorize("P.0", bulk_copy("float32", 4))


X, OUT = Buffer("x", "float32", (64, 4)), Buffer("out", "float32", (4,))
SUM = te.sum(te.placeholder((4,), "float32")[0], te.reduce_axis(4)).attr[0]


def run(ring: Buffer, slot: Expr | int, row: Expr | int, name: str = "i", skip: int = 0) -> Stmt:
    return Call(bulk_copy("float32", 4), loop(name, 4, lambda i: store(ring, (slot, i + skip), X[as_expr(row), i])))


def use(ring: Buffer, slot: Expr | int, name: str = "t") -> Stmt:
    return loop(name, 4, lambda t: Accumulate(OUT, (t,), ring[as_expr(slot), (t + 1) % 4], SUM), "thread.x")


def kernel(ring: Buffer, *body: Stmt) -> Kernel:
    return Kernel("k", (X, OUT), (X, OUT), (), Allocate(ring, block(*body)))


@needs_compiler
def test_by_one_thread_in_loops_and_under_conditions() -> None:
    """Groups of no bytes are waited for as well; names of the program are not those of helpers."""
    ring = Buffer("ring", "float32", (2, 4), "shared")

    def step(k: Expr) -> Stmt:
        return block(If(k < 9, run(ring, k % 2, k)), use(ring, k % 2))

    text = checked(kernel(ring, loop("arrive", 11, step)))
    assert "if (threadIdx.x < 1) arrive" in text and "prepare_groups<1>(arrived, 1)" in text


def test_what_stands_around() -> None:
    ring = Buffer("ring", "float32", (1, 8), "shared")
    for skip in (0, 4):
        emit_kernel(kernel(ring, run(ring, 0, 0, skip=skip)), HOPPER)
    with pytest.raises(CodegenError, match=r"`ring` cannot be copied by `bulk_copy(?s:.)*begins at element 2"):
        emit_kernel(kernel(ring, run(ring, 0, 0, skip=2)), HOPPER)
    beside = loop("t", 2, lambda t: block(run(ring, 0, t), store(OUT, (t,), 1.0)), "thread.x")
    with pytest.raises(CodegenError, match="a bulk copy is in one phase with statements that are not copies into shared memory"):
        emit_kernel(kernel(ring, beside), HOPPER)
    with pytest.raises(CodegenError, match="`x` is written in a function that copies it in bulk"):
        emit_kernel(kernel(ring, run(ring, 0, 0), store(X, (1, 1), 1.0)), HOPPER)
    again = loop("t", 2, lambda t: loop("r", 3, lambda r: run(ring, 0, r, skip=4)), "thread.x")
    twice = loop("t", 1, lambda t: block(run(ring, 0, 1), run(ring, 0, 2, "j")), "thread.x")
    for body in (again, twice):
        with pytest.raises(CodegenError, match="elements of `ring` may be copied to more than once between two barriers"):
            emit_kernel(kernel(ring, body), HOPPER)
    emit_kernel(kernel(ring, loop("t", 2, lambda t: run(ring, 0, t, skip=t * 4), "thread.x")), HOPPER)
    mine = Buffer("mine", "int64", (1,), "register")
    body = Allocate(
        mine,
        block(
            loop("t", 4, lambda t: store(mine, (0,), t), "thread.x"), If(mine[0] < 1, loop("u", 1, lambda u: run(ring, 0, u), "thread.x"))
        ),
    )
    with pytest.raises(CodegenError, match="is not proved"):
        emit_kernel(kernel(ring, body), HOPPER)


def test_more_groups_than_are_followed() -> None:
    rings = Buffer("ring", "float32", (MAX_TRACKED + 1, 4), "shared")
    many = [block(run(rings, n, n, f"i{n}"), use(X, n, f"t{n}")) for n in range(MAX_TRACKED + 1)]
    with pytest.raises(CodegenError, match=f"more than {MAX_TRACKED} groups of copies may be under way"):
        emit_kernel(kernel(rings, *many), HOPPER)
