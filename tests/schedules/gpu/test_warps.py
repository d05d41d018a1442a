"""Default schedules of products on tensor cores: any sizes, as the loops say, as the emitted text does on the host, and as machine code."""

from __future__ import annotations

from math import prod

import pytest

from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.ir import te
from tcomp.ir.expr import Expr, cast, select
from tcomp.ir.loops import hoist_temporaries
from tcomp.schedules.gpu.default import schedule
from tcomp.schedules.instructions import tf32
from tcomp.schedules.schedule import Schedule
from tcomp.target import CudaTarget
from tests.codegen.cuda import cuda_host
from tests.codegen.cuda.test_cuda import needs_nvrtc
from tests.schedules.gpu.test_default import agree, emulated, lowered
from tests.schedules.gpu.test_pipeline import races, stages_of
from tests.schedules.programs import Program
from tests.schedules.running import interpreted

TARGET = CudaTarget.parse("cuda")
needs_compiler = pytest.mark.skipif(cuda_host.compiler() is None, reason="there is no C++ compiler")


def wide(x: Expr) -> Expr:
    """As the sum takes it: float32 is cut to tf32."""
    return tf32(x) if x.dtype == "float32" else cast(x, "int32" if x.dtype.endswith("int8") else "float32")


def product(rows: int, depth: int, columns: int, dtype: str, transposed: bool = False, out: str = "float32") -> Program:
    a = te.placeholder((rows, depth), dtype, "a")
    b = te.placeholder((columns, depth) if transposed else (depth, columns), "int8" if dtype == "uint8" else dtype, "b")
    bias, k = te.placeholder((columns,), "float32", "bias"), te.reduce_axis(depth, "k")
    c = te.compute((rows, columns), lambda i, j: te.sum(wide(a[i, k]) * wide(b[j, k] if transposed else b[k, j]), k), "c")
    result = te.compute((rows, columns), lambda i, j: cast(te.maximum(cast(c[i, j], "float32") + bias[j], 0), out), "out")
    return Program((a, b, bias), (result,), {})


def image(channels: int, size: int, features: int, kernel: int, pad: int, dtype: str) -> Program:
    x, w = te.placeholder((channels, size, size), dtype, "x"), te.placeholder((features, channels, kernel, kernel), dtype, "w")
    side = size + 2 * pad - kernel + 1
    c, p, q = te.reduce_axis(channels, "c"), te.reduce_axis(kernel, "p"), te.reduce_axis(kernel, "q")

    def at(i: Expr, j: Expr) -> Expr:
        return select((i >= 0) & (i < size) & (j >= 0) & (j < size), x[c, i, j], 0)

    y = te.compute((features, side, side), lambda o, i, j: te.sum(wide(at(i + p - pad, j + q - pad)) * wide(w[o, c, p, q]), [c, p, q]), "y")
    return Program((x, w), (te.compute((features, side, side), lambda *i: cast(y[i], dtype), "out"),), {})


FAMILIES = {
    "half": product(96, 64, 80, "float16", True),
    "half-odd": product(67, 45, 101, "float16", out="float16"),
    "bfloat": product(70, 50, 90, "bfloat16", True, "bfloat16"),
    "tf32": product(67, 45, 101, "float32"),
    "tf32-transposed": product(64, 64, 96, "float32", True),
    "bytes": product(67, 70, 100, "int8", True),
    "bytes-unsigned": product(40, 70, 50, "uint8", True),
    "half-image": image(20, 14, 40, 3, 1, "float16"),
    "tf32-image": image(18, 9, 33, 3, 1, "float32"),
    "half-divided": product(40, 2000, 48, "float16", True),
}


@needs_compiler
@pytest.mark.parametrize("name", FAMILIES)
def test_families_on_the_host(name: str) -> None:
    program = FAMILIES[name]
    kernel = lowered(program)
    s = schedule(kernel, TARGET)
    assert not s.kernel.notes and {"tensorize", "cache_factors", "pipeline"} <= {step.primitive for step in s.trace}
    assert str(Schedule(kernel).replay(s.trace)) == str(s.kernel)
    for descending in (False, True):
        agree(program, emulated(program, s.kernel, descending))


def test_by_the_interpreter_and_thread_by_thread() -> None:
    program = product(17, 70, 18, "float16", True)
    s = schedule(lowered(program), TARGET)
    agree(program, interpreted(program, s.kernel, shuffle=1))
    assert stages_of(s) and not races(s.kernel, {})


def test_few_small_blocks_are_pipelined_too() -> None:
    """What counts is how many blocks an SM gets, not how many it has registers for."""
    assert stages_of(schedule(lowered(product(64, 512, 64, "float16", True)), TARGET))[0] >= 3


def test_true_float32_and_old_gpus_do_without_tensor_cores() -> None:
    from tests.schedules.gpu.test_default import product as exact

    assert "tensorize" not in {step.primitive for step in schedule(lowered(exact(256, 64, 256)), TARGET).trace}
    old = CudaTarget.parse("cuda -arch=sm_75")
    assert "tensorize" not in {step.primitive for step in schedule(lowered(FAMILIES["half"]), old).trace}


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "uint8"])
def test_a_large_product_fits(dtype: str, arch: str) -> None:
    """Fragments are loaded once for all the instructions of a warp that take them; sums stay in registers; one barrier a slice."""
    text, (launch,) = emit_kernel(hoist_temporaries(schedule(lowered(product(4096, 4096, 4096, dtype, True)), TARGET).kernel)[0], TARGET)
    binary = nvrtc.compile_text(text, arch)
    usage, ptx = binary.usage[launch.function], binary.ptx.decode()
    assert usage.spilled == usage.stack == 0 and usage.registers * prod(launch.block) <= 1 << 16
    assert usage.shared + launch.shared <= TARGET.shared_per_block
    assert 32 <= ptx.count("mma.sync") and ptx.count("ld.shared") <= 2 * ptx.count("mma.sync")
    assert ptx.count("bar.sync") == 1 and "cp.async.cg" in ptx and "st.shared" not in ptx
