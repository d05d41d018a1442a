"""Machine instructions: what each means, run by the interpreter, against the code that is emitted for it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcomp.codegen.cuda import kernel as cuda, nvrtc
from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import assembly, compile_ir
from tcomp.errors import CodegenError
from tcomp.ir import expr as E, te
from tcomp.ir.dtypes import is_float, to_numpy
from tcomp.ir.expr import Expr, as_expr, cast, checked, substitute
from tcomp.ir.instruction import Instruction, match
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import PARALLEL, Accumulate, Allocate, Buffer, Call, For, If, Kernel, Stmt, block, loop, store, walk
from tcomp.ir.verify.loops import verify_kernel
from tcomp.schedules.instructions import fma_tile, mma, sdot, tdpbf16ps, tdpbsud, tdpbusd, vdpbf16ps, vpdpbusd, vpmaddwd, vpmaddwd_bytes
from tcomp.schedules.primitives.editing import rebuild, renamed
from tcomp.target import CpuTarget, CudaTarget, Target
from tests.codegen.cuda import cuda_host
from tests.codegen.cuda.warp_products import product
from tests.codegen.jit import HOST, ISA, compile_kernel, spill_count

GPU = CudaTarget.parse("cuda")
ARM = CpuTarget.parse("cpu -march=aarch64 -mcpu=neoverse-n1")
needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="NVRTC (the extra `cuda`) is not installed")
needs_compiler = pytest.mark.skipif(cuda_host.compiler() is None, reason="there is no C++ compiler")
X86 = [
    (fma_tile(6, 4), "skylake-avx512"), (fma_tile(1, 1), "skylake-avx512"), (fma_tile(3, 2, 4, "avx512", "float64"), "skylake-avx512"),
    (fma_tile(4, 2, 3, "avx2"), "haswell"), (fma_tile(2, 3, 1, "avx2", "float64"), "haswell"),
    (vpdpbusd(1, 1), "cascadelake"), (vpdpbusd(6, 4), "cascadelake"), (vpdpbusd(3, 2, 5), "cascadelake"), (vpdpbusd(2, 2, 2, 256), "cascadelake"),
    (vpmaddwd(1, 1, 1, 256), "haswell"), (vpmaddwd(3, 2, 4, 256), "haswell"), (vpmaddwd(6, 4), "skylake-avx512"),
    (vpmaddwd_bytes(5, 2, 1, 256), "haswell"), (vpmaddwd_bytes(2, 3, 2), "skylake-avx512"),
    (vdpbf16ps(1, 1), "cooperlake"), (vdpbf16ps(6, 4), "cooperlake"), (vdpbf16ps(3, 2, 5, 256), "cooperlake"),
]  # fmt: skip
AMX = CpuTarget.parse("cpu -mcpu=sapphirerapids")
TILES = [
    tdpbusd(1, 1, 1), tdpbusd(16, 16, 16), tdpbusd(32, 32, 48), tdpbusd(17, 20, 24), tdpbusd(30, 8, 5), tdpbusd(48, 10, 2), tdpbusd(32, 32, 16, 3, 2),
    tdpbsud(33, 10, 12), tdpbsud(9, 9, 9, 1, 3), tdpbf16ps(32, 32, 32), tdpbf16ps(5, 40, 7, 1, 3), tdpbf16ps(16, 48, 33, 2),
]  # fmt: skip
EXTRA = Buffer("extra", "int32", (64,))
NEON = [fma_tile(4, 4, 2, "neon"), fma_tile(3, 1, 1, "neon", "float64"), sdot(1, 1), sdot(4, 3, 2)]


def called(i: Instruction) -> Kernel:
    """The instruction alone, on its operands."""
    return replace(i.meaning, name="k", body=Call(i, i.meaning.body))


def operands(kernel: Kernel, seed: int, most: int = 9) -> list[np.ndarray]:
    """Integers from all over their range and the ends of it; floats small enough that sums are exact, a few special."""
    rng = np.random.default_rng(seed)
    found = []
    for b in kernel.buffers:
        dtype, shape = to_numpy(b.dtype), [int(n) for n in b.shape]
        if is_float(b.dtype):
            found.append(rng.integers(-most, most, shape, endpoint=True).astype(dtype))
        else:
            ends = np.iinfo(dtype)
            a = rng.integers(ends.min, ends.max, shape, dtype, endpoint=True)
            a[rng.random(shape) < 0.4] = ends.max
            a[rng.random(shape) < 0.2] = ends.min
            found.append(a)
    return found


def meant(kernel: Kernel, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    copies = [a.copy() for a in arrays]
    run_kernel(kernel, dict(zip(kernel.buffers, copies, strict=True)))
    return copies


@pytest.mark.parametrize(("i", "cpu"), X86, ids=lambda x: getattr(x, "name", x))
def test_instructions_of_x86(i: Instruction, cpu: str) -> None:
    target = CpuTarget.parse(f"cpu -mcpu={cpu}")
    kernel = called(i)
    verify_kernel(kernel)
    asm = assembly(emit_kernel(kernel, target), target)
    mnemonic = next((name for name in ("vpdpbusd", "vpmaddwd", "vdpbf16ps") if name in i.name), "vfmadd")
    loops = {x.var.name: int(x.extent) for x in i.loops}
    assert asm.count(mnemonic) == loops["k"] * loops["r"] * loops["j"] // i.emission.lanes
    assert spill_count(asm) == 0 and "call" not in asm
    if not target.runs_on(HOST):
        pytest.skip(f"this machine is not a {cpu}")
    run = compile_kernel(kernel, target)
    for seed in range(3):
        arrays = operands(kernel, seed)
        want = meant(kernel, arrays)
        run(*arrays)
        for got, expected in zip(arrays, want, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("i", TILES, ids=lambda i: i.name)
def test_tile_registers(i: Instruction) -> None:
    """Added to what is there; and, where that has just been cleared, without loading it. Configured once for a loop."""
    kernel = called(i)
    zero = loop("row", i.result.shape[0], lambda r: loop("column", i.result.shape[1], lambda j: store(i.result, (r, j), 0)))
    cleared = replace(kernel, body=loop("twice", 2, lambda n: block(zero, kernel.body)))
    verify_kernel(cleared)
    (rows, columns), code = i.result.shape, emit_kernel(kernel, AMX)
    tiles = -(-int(rows) // 16) * -(-int(columns) // 16)
    assert code.count("call void @llvm.x86.tdp") == tiles == assembly(code, AMX).count("\ttdp")
    assert (emit_kernel(cleared, AMX).count("call void @llvm.x86.tilezero"), code.count("@llvm.x86.tilezero")) == (tiles, 0)
    assert emit_kernel(cleared, AMX).index("call void @llvm.x86.ldtilecfg") < emit_kernel(cleared, AMX).index("loop")
    if not AMX.runs_on(HOST):
        pytest.skip("this machine has no AMX")
    for program in (kernel, cleared):
        arrays = operands(program, 0)
        want = meant(program, arrays)
        compile_kernel(program, AMX)(*arrays)
        for got, expected in zip(arrays, want, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_products_of_different_shapes_configure_their_own_tiles() -> None:
    first, second = tdpbusd(16, 16, 4), tdpbusd(3, 5, 2)
    body = loop(
        "n", 3, lambda n: block(Call(first, first.meaning.body), Call(second, renamed(second.meaning.body, lambda name: f"{name}2")))
    )
    kernel = Kernel("k", (*first.meaning.buffers, *second.meaning.buffers), (first.result, second.result), (), body)
    assert emit_kernel(kernel, AMX).count("call void @llvm.x86.ldtilecfg") == 2
    if not AMX.runs_on(HOST):
        pytest.skip("this machine has no AMX")
    arrays = operands(kernel, 0)
    want = meant(kernel, arrays)
    compile_kernel(kernel, AMX)(*arrays)
    for got, expected in zip(arrays, want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_tiles_stay_configured_around_threads_and_functions() -> None:
    """Loops over threads, and code that is a function of its own because it is rarely executed, have products as well."""
    i = tdpbusd(16, 16, 4)
    often, seldom, together, last = (Call(i, renamed(i.meaning.body, f"{{}}{n}".format)) for n in range(4))
    at, out = Buffer("at", "int64", (1,)), Buffer("out", "int32", (8,))
    rare = block(store(out, (E.minimum(E.maximum(checked(at[0], 8), 0), 7),), 1), seldom)
    body = loop("n", 3, lambda n: block(If(at[0] < n, often, rare), loop("t", 2, lambda t: together, PARALLEL), last))
    inner = loop("n", 3, lambda n: block(If(at[0] < n, often, rare), last))
    for kernel in (Kernel("k", (*i.meaning.buffers, at, out), (i.result, out), (), x) for x in (body, inner)):
        verify_kernel(kernel)
        text = emit_kernel(kernel, AMX)
        assert "cold" in text
        if AMX.runs_on(HOST):
            arrays = [*operands(i.meaning, 0), np.array([1], np.int64), np.zeros(8, np.int32)]
            want = meant(kernel, arrays)
            compile_kernel(kernel, AMX)(*arrays)
            for got, expected in zip(arrays, want, strict=True):
                np.testing.assert_array_equal(got, expected)


def test_sums_of_bytes_wrap_around_and_do_not_saturate() -> None:
    """255 * -128 * 4 is beyond 16 bits, in which older instructions saturate; the sum wraps around at 32."""
    i = vpdpbusd(1, 1)
    kernel = called(i)
    target = CpuTarget.parse("cpu -mcpu=cascadelake")
    arrays = [np.full((1, 16), -(2**31) + 5, np.int32), np.full((1, 1, 4), 255, np.uint8), np.full((1, 16, 4), -128, np.int8)]
    (want, _, _) = meant(kernel, arrays)
    assert want[0, 0] == 2**31 + 5 - 4 * 255 * 128
    if not target.runs_on(HOST):
        pytest.skip("this machine has no AVX-512 VNNI")
    compile_kernel(kernel, target)(*arrays)
    np.testing.assert_array_equal(arrays[0], want)


def test_specials_pass_through_a_tile() -> None:
    i = fma_tile(2, 1, 2, ISA)
    kernel = called(i)
    arrays = operands(kernel, 0)
    arrays[1][0, 0], arrays[1][1, 1], arrays[2][0, 3], arrays[0][0, 1] = np.inf, np.nan, 1e-40, -0.0
    with np.errstate(all="ignore"):
        want = meant(kernel, arrays)
    compile_kernel(kernel)(*arrays)
    np.testing.assert_array_equal(arrays[0], want[0])


@pytest.mark.parametrize("i", NEON, ids=lambda i: i.name)
def test_instructions_of_neon(i: Instruction) -> None:
    kernel = called(i)
    verify_kernel(kernel)
    asm = assembly(emit_kernel(kernel, ARM), ARM)
    loops = {x.var.name: int(x.extent) for x in i.loops}
    mnemonics = [line.split()[0] for line in asm.splitlines() if line.startswith("\t") and line.split()]
    assert mnemonics.count("sdot" if "sdot" in i.name else "fmla") == loops["k"] * loops["r"] * loops["j"] // i.emission.lanes
    assert spill_count(asm) == 0


MAIN = r"""
#include <stdio.h>
#include <stdlib.h>
void k(void *, void *, void *, void *);
int main(int n, char **sizes) {
  void *b[3];
  for (int i = 0; i < 3; ++i) {
    b[i] = malloc(atoi(sizes[i + 1]));
    if (fread(b[i], 1, atoi(sizes[i + 1]), stdin) != (size_t)atoi(sizes[i + 1])) return 1;
  }
  k(0, b[0], b[1], b[2]);
  return fwrite(b[0], 1, atoi(sizes[1]), stdout) != (size_t)atoi(sizes[1]);
}
"""


@pytest.mark.parametrize("i", NEON, ids=lambda i: i.name)
def test_instructions_of_neon_under_emulation(i: Instruction, tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if not compiler or not emulator:
        pytest.skip("needs qemu-aarch64 and aarch64-linux-gnu-gcc")
    kernel = called(i)
    (tmp_path / "k.o").write_bytes(compile_ir(emit_kernel(kernel, ARM), ARM))
    (tmp_path / "main.c").write_text(MAIN)
    program = str(tmp_path / "main")
    subprocess.run([compiler, "-O1", "-static", "-o", program, str(tmp_path / "main.c"), str(tmp_path / "k.o")], check=True)
    arrays = operands(kernel, 0)
    command = [emulator, "-cpu", "max", program, *(str(a.nbytes) for a in arrays)]
    done = subprocess.run(command, input=b"".join(a.tobytes() for a in arrays), capture_output=True, check=True)
    want = meant(kernel, arrays)[0]
    np.testing.assert_array_equal(np.frombuffer(done.stdout, want.dtype).reshape(want.shape), want)


@pytest.mark.parametrize(
    ("i", "target", "needed"),
    [
        (vpdpbusd(1, 1), "cpu -mcpu=skylake-avx512", "avx512vnni"),
        (vpdpbusd(1, 1, 1, 256), "cpu -mcpu=haswell", "avx512vnni or avxvnni"),
        (vpmaddwd(1, 1), "cpu -mcpu=haswell", "avx512bw"),
        (fma_tile(1, 1), "cpu -mcpu=haswell", "avx512f"),
        (fma_tile(1, 1, 1, "avx2"), "cpu -mcpu=sandybridge", "fma"),
        (sdot(1, 1), "cpu -march=aarch64 -mcpu=cortex-a72", "dotprod"),
        (fma_tile(1, 1, 1, "neon"), "cpu -mcpu=haswell", "neon"),
        (mma("float16"), "cpu -mcpu=haswell", "sm_80"),
    ],
    ids=str,
)
def test_a_target_without_the_instruction(i: Instruction, target: str, needed: str) -> None:
    with pytest.raises(CodegenError, match=f"has no instruction .*(?s:.)*it needs {needed}"):
        emit_kernel(called(i), Target.parse(target))


@pytest.mark.parametrize(
    ("i", "target"), [(mma("float16"), "cuda -arch=sm_75"), (mma("int8"), "cuda -arch=sm_75,sm_90"), (fma_tile(1, 1), "cuda")]
)
def test_a_gpu_without_the_instruction(i: Instruction, target: str) -> None:
    with pytest.raises(CodegenError, match="has no instruction"):
        cuda.emit_kernel(called(i), Target.parse(target))


# ---------------------------------------------------------------- tensor cores


def run_on_host(kernel: Kernel, arrays: Sequence[np.ndarray], target: Target = GPU, descending: bool = False) -> str:
    text, launches = cuda.emit_kernel(kernel, target)
    for launch in launches:
        args = [arrays[n].ctypes.data for n in launch.buffers]
        cuda_host.launch(text, launch.function, [int(n) for n in launch.grid], launch.block, args, descending)
    return text


MMA = ["float16", "bfloat16", "float32", "int8"]
ALL_MMA = [*MMA, "uint8"]


@needs_compiler
@pytest.mark.parametrize("dtype", ALL_MMA)
def test_mma_on_memory(dtype: str) -> None:
    kernel = called(mma(dtype))
    arrays = operands(kernel, 0, 30)
    want = meant(kernel, arrays)
    text = run_on_host(kernel, arrays)
    assert mma(dtype).emission.code in text
    np.testing.assert_array_equal(arrays[0], want[0])


@needs_compiler
def test_tf32_cuts_the_fraction() -> None:
    kernel = called(mma("float32"))
    rng = np.random.default_rng(0)
    arrays = [np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32), np.zeros((8, 8), np.float32)]
    arrays[1][:, 3], arrays[2][3, :] = rng.standard_normal(16), rng.standard_normal(8)  # one product each: the order does not matter
    want = meant(kernel, arrays)
    cut = [(a.view(np.uint32) & 0xFFFFE000).view(np.float32) for a in arrays]
    np.testing.assert_array_equal(want[0], cut[1] @ cut[2])
    run_on_host(kernel, arrays)
    np.testing.assert_array_equal(arrays[0], want[0])


@needs_compiler
@pytest.mark.parametrize("dtype", MMA)
@pytest.mark.parametrize("along", [True, False])
def test_a_product_by_warps(dtype: str, along: bool) -> None:
    kernel = product(dtype, 64, 48, 64, along).kernel
    verify_kernel(kernel)
    arrays = operands(kernel, 1)
    a, b, c = arrays
    want = a.astype(c.dtype) @ (b.T if along else b).astype(c.dtype)
    for descending in (False, True):
        c.fill(77)
        text = run_on_host(kernel, arrays, descending=descending)
        np.testing.assert_array_equal(c, want)
    whole = "*reinterpret_cast<const unsigned int*>(B" in text
    assert whole == (along and dtype != "float32")  # registers whose elements lie side by side are loaded at once


def test_unaligned_buffers_are_loaded_by_element() -> None:
    text, _ = cuda.emit_kernel(product("float16", 32, 16, 16).kernel, CudaTarget.parse("cuda -scalar"))
    assert "reinterpret_cast" not in text


@needs_nvrtc
@pytest.mark.parametrize("dtype", MMA)
def test_mma_compiles(dtype: str) -> None:
    text, _ = cuda.emit_kernel(product(dtype, 64, 48, 64).kernel, GPU)
    for arch in ("sm_80", "sm_90a"):
        binary = nvrtc.compile_text(text, arch)
        (usage,) = binary.usage.values()
        assert usage.spilled == usage.stack == 0  # fragments live in registers
        assert mma(dtype).emission.code in binary.ptx.decode()


def staged(kind: str) -> Kernel:
    """Operands staged by the threads in shared memory, the result in shared memory, and copied by the threads. `kind`: of the loops over rows."""
    a, b, out = Buffer("a", "int8", (16, 32)), Buffer("b", "int8", (32, 8)), Buffer("out", "int32", (16, 8))
    near, far, acc = (
        Buffer("near", "int8", (16, 32), "shared"),
        Buffer("far", "int8", (32, 8), "shared"),
        Buffer("acc", "int32", (16, 8), "shared"),
    )
    i = mma("int8")
    assert isinstance(i.leaf, Accumulate)
    sums = i.leaf.reducer

    def term(x: Expr, y: Expr, z: Expr) -> Stmt:
        return Accumulate(acc, (x, y), cast(near[x, z], "int32") * cast(far[z, y], "int32"), sums)

    tile = loop("x", 16, lambda x: loop("y", 8, lambda y: loop("z", 32, lambda z: term(x, y, z))))

    def copied(name: str, to: Buffer, source: Buffer) -> Stmt:
        rows, columns = (int(n) for n in to.shape)
        return loop(name, columns, lambda t: loop(f"{name}r", rows, lambda r: store(to, (r, t), source[r, t]), kind), "thread.x")

    clear = loop("z0", 8, lambda t: loop("z1", 16, lambda r: store(acc, (r, t), 0)), "thread.x")
    body: Stmt = block(copied("p", near, a), copied("q", far, b), clear, Call(i, tile), copied("s", out, acc))
    for buffer in (near, far, acc):
        body = Allocate(buffer, body)
    return Kernel("k", (a, b, out), (out,), (), body)


def test_an_instruction_of_one_warp_among_rows_of_threads() -> None:
    """It is executed by the first row alone, as its sums are taken once. (The host runs barriers of whole blocks only, so the text is asked.)"""
    kernel = staged("thread.y")
    verify_kernel(kernel)
    text, (launch,) = cuda.emit_kernel(kernel, GPU)
    assert launch.block == (32, 32, 1)
    before, _, _ = text.partition(mma("int8").emission.code)
    assert before.rindex("if (threadIdx.y == 0)") > before.rindex("__syncthreads();")


@needs_compiler
def test_barriers_between_instructions_and_threads() -> None:
    kernel = staged("serial")
    verify_kernel(kernel)
    arrays = operands(kernel, 3)
    want = meant(kernel, arrays)
    for descending in (False, True):
        arrays[2].fill(0)
        text = run_on_host(kernel, arrays, descending=descending)
        np.testing.assert_array_equal(arrays[2], want[2])
    assert text.count("__syncthreads();") == 2


def test_what_a_thread_of_a_warp_holds_it_may_touch_itself() -> None:
    """In the order of the fragments; who clears elements that others hold is told so."""
    kernel = product("float16", 32, 16, 16).kernel

    def cleared(row: Callable[[Expr, Expr], Expr], column: Callable[[Expr, Expr], Expr]) -> Kernel:
        def edit(s: Stmt) -> Stmt | None:
            if not (isinstance(s, Call) and "fill" in s.instruction.name):
                return None
            acc, indices = match(s.instruction, s.body).accesses[s.instruction.result]
            inside = {x.var: as_expr(0) for x in walk(s.body) if isinstance(x, For)}
            base = [substitute(i, inside) for i in indices]

            def store_all(t: Expr) -> Stmt:
                return loop("high", 2, lambda h: loop("low", 2, lambda e: store(acc, (base[0] + row(t, h), base[1] + column(t, e)), 0)))

            return loop("t", 32, store_all, "thread.x")

        return kernel.with_body(rebuild(kernel.body, edit))

    good = cleared(lambda t, h: t // 4 + h * 8, lambda t, e: t % 4 * 2 + e)
    text, _ = cuda.emit_kernel(good, GPU)
    assert "threadIdx.x" in text
    for wrong in (
        cleared(lambda t, h: t // 4 * 2 + h, lambda t, e: t % 4 * 2 + e),
        cleared(lambda t, h: t // 4 + h * 8, lambda t, e: t % 4 + e * 4),
        cleared(lambda t, h: t % 8 + h * 8, lambda t, e: t // 8 * 2 + e),
    ):
        with pytest.raises(CodegenError, match="is not certainly held by the thread that touches it"):
            cuda.emit_kernel(wrong, GPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: loop("t", 32, lambda _: body, "thread.x"), "stands in loop `t`, bound to thread.x"),
        (
            lambda body: loop("t", 2, lambda t: block(body, store(EXTRA, (t,), 1)), "thread.y"),
            "plain store into `extra` is in one phase with",
        ),
        (lambda body: block(loop("t", 48, lambda t: store(EXTRA, (t,), 1), "thread.x"), body), "a block is 48 threads wide"),
    ],
)
def test_where_an_instruction_of_a_warp_cannot_stand(change: Any, message: str) -> None:
    assert callable(change)
    kernel = called(mma("int8"))
    kernel = replace(kernel, buffers=(*kernel.buffers, EXTRA), outputs=(*kernel.outputs, EXTRA), body=change(kernel.body))
    with pytest.raises(CodegenError, match=message):
        cuda.emit_kernel(kernel, GPU)


def test_an_instruction_inside_of_lanes() -> None:
    kernel = called(fma_tile(1, 1, 1, ISA))
    with pytest.raises(CodegenError, match="inside of the vectorized loop `v`"):
        emit_kernel(replace(kernel, body=For(te.reduce_axis(4, "v"), 4, kernel.body, "vectorized")), HOST)


def test_a_tile_of_too_many_operations() -> None:
    with pytest.raises(CodegenError, match="would be 10000 operations"):
        emit_kernel(called(fma_tile(100, 100)), CpuTarget.parse("cpu -mcpu=skylake-avx512"))
