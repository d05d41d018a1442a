"""Products of matrices in tf32, fp16 and bf16: only where asked for, only of matrices, on tensor cores, and as exact as they are."""

from __future__ import annotations

import numpy as np
import pytest

from tcomp.cli.options import ModelOptions
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.errors import InputError, TargetError
from tcomp.ir import te
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Kernel, hoist_temporaries
from tcomp.schedules.gpu.default import schedule
from tcomp.schedules.gpu.precision import with_precision
from tcomp.schedules.lowering import lower
from tcomp.target import CudaTarget
from tests.codegen.cuda import cuda_host
from tests.schedules.gpu.test_default import image, lowered, needs_compiler, product
from tests.schedules.programs import Program

BITS = {"tf32": 10, "fp16": 10, "bf16": 7}


def variance(rows: int, length: int) -> Kernel:
    x, k = te.placeholder((rows, length), "float32", "x"), te.reduce_axis(length, "k")
    return lower("variance", [x], [te.compute((rows,), lambda r: te.sum((x[r, k] - 1) * (x[r, k] - 1), k), "v")])


def depthwise(channels: int, size: int) -> Kernel:
    x, w, k = te.placeholder((channels, size), "float32", "x"), te.placeholder((channels, 3), "float32", "w"), te.reduce_axis(3, "k")
    return lower("depthwise", [x, w], [te.compute((channels, size - 2), lambda c, i: te.sum(x[c, i + k] * w[c, k], k), "y")])


def test_float32_stays_float32_unless_asked_and_where_there_are_no_matrices() -> None:
    kernel = lowered(product(20, 30, 40))
    assert with_precision(kernel, "fp32") is kernel
    for other in (variance(8, 20), depthwise(4, 9)):
        assert str(with_precision(other, "tf32")) == str(other)
    for precision in BITS:
        assert str(with_precision(kernel, precision)) != str(kernel)


@needs_compiler
@pytest.mark.parametrize("precision", BITS)
@pytest.mark.parametrize("program", [product(35, 45, 33), image(1, 16, 5, 17, 2, pad=1)], ids=["product", "image"])
def test_on_tensor_cores(program: Program, precision: str) -> None:
    target = CudaTarget.parse(f"cuda -precision={precision}")
    plain = lowered(program)
    kernel = with_precision(plain, target.precision)
    s = schedule(kernel, target)
    assert "tensorize" in {step.primitive for step in s.trace} and not s.kernel.notes
    text, launches = emit_kernel(hoist_temporaries(s.kernel)[0], target)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([int(n) for n in b.shape]).astype(np.float32) for b in kernel.buffers]
    want = [a.copy() for a in arrays]
    run_kernel(kernel, dict(zip(kernel.buffers, want, strict=True)))
    exact = [a.copy() for a in arrays]
    run_kernel(plain, dict(zip(plain.buffers, exact, strict=True)))
    for launch in launches:
        cuda_host.launch(
            text, launch.function, [int(n) for n in launch.grid], launch.block, [arrays[n].ctypes.data for n in launch.buffers]
        )
    np.testing.assert_allclose(arrays[-1], want[-1], rtol=1e-4, atol=1e-4)  # the same, but for the order of the sum
    error = np.linalg.norm(arrays[-1] - exact[-1]) / np.linalg.norm(exact[-1])
    assert 1e-6 < error < 2.0 ** -BITS[precision]


def test_the_option() -> None:
    assert str(ModelOptions(target="cuda", arch="sm_90a", precision="tf32").machine) == "cuda -arch=sm_90a -precision=tf32"
    assert ModelOptions(target="cuda").machine.precision == ModelOptions(target="cuda", precision="fp32").machine.precision == "fp32"
    assert CudaTarget.parse("cuda -precision=bf16").precision == "bf16"
    with pytest.raises(InputError, match="add --target cuda"):
        _ = ModelOptions(target="cpu", precision="tf32").machine
    with pytest.raises(TargetError, match="precision=fp8"):
        _ = ModelOptions(target="cuda", precision="fp8").machine
    with pytest.raises(TargetError, match="before sm_80"):
        _ = ModelOptions(target="cuda", arch="sm_75", precision="tf32").machine
