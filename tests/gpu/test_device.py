"""On a real GPU: numerics of every family, device arrays in and out, errors. Skipped, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tcomp
from tcomp.autotune.database.store import Database
from tcomp.autotune.measurement.measurer import Measurer
from tcomp.autotune.measurement.results import Limits
from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.errors import DeviceError, TargetError
from tcomp.ir import te
from tcomp.ir.dtypes import to_numpy
from tcomp.ir.loops import Kernel
from tcomp.runtime.cuda import CupyDevice
from tcomp.runtime.plan import KernelCode, Launch
from tcomp.schedules.gpu.default import schedule
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.lowering import lower
from tcomp.target import CudaTarget
from tests.codegen.cuda import warp_products
from tests.gpu import gpu_faults
from tests.gpu.test_gpu_operators import CASES, near
from tests.gpu.test_models import MIXED, NET, branching, reference, stopping


def missing() -> str:
    try:
        nvrtc.version()
        CupyDevice()
    except (DeviceError, TargetError) as problem:
        return f"{problem.what}: {problem.why}"
    return ""


REASON = missing()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=REASON)]
rng = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def product(rows: int, depth: int, columns: int) -> Any:
    a, b = te.placeholder((rows, depth), "float32", "a"), te.placeholder((depth, columns), "float32", "b")
    k = te.reduce_axis(depth, "k")
    return tcomp.build([a, b, te.compute((rows, columns), lambda i, j: te.sum(a[i, k] * b[k, j], k), "c")], "cuda")


@pytest.mark.parametrize("shape", [(256, 96, 384), (67, 45, 301), (1, 1000, 512), (7, 301, 1003), (2048, 2048, 2048)], ids=str)
def test_products(shape: tuple[int, int, int]) -> None:
    rows, depth, columns = shape
    a, b = floats(rows, depth), floats(depth, columns)
    want = a.astype(np.float64) @ b.astype(np.float64)
    got = product(*shape)(a, b)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-5
    np.testing.assert_array_equal(product(*shape)(a, b), got, err_msg="two runs differ")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(256, 96, 384), (67, 45, 301), (100, 3000, 80), (2048, 512, 1024)], ids=str)
def test_products_on_tensor_cores_by_default(shape: tuple[int, int, int], dtype: str) -> None:
    """Small integers, whose sums are exact in any order."""
    rows, depth, columns = shape
    total = "int32" if dtype == "int8" else "float32"
    a, b, k = te.placeholder((rows, depth), dtype, "a"), te.placeholder((columns, depth), dtype, "b"), te.reduce_axis(depth, "k")
    c = te.compute((rows, columns), lambda i, j: te.sum(te.cast(a[i, k], total) * te.cast(b[j, k], total), k), "c")
    x, y = (rng.integers(-9, 10, size).astype(to_numpy(dtype)) for size in ((rows, depth), (columns, depth)))
    np.testing.assert_array_equal(tcomp.build([a, b, c], "cuda")(x, y), x.astype(total) @ y.astype(total).T)


def test_images() -> None:
    """A padded convolution of channels first, odd sizes."""
    x, w = te.placeholder((2, 20, 15, 15), "float32", "x"), te.placeholder((72, 20, 3, 3), "float32", "w")
    c, p, q = te.reduce_axis(20, "c"), te.reduce_axis(3, "p"), te.reduce_axis(3, "q")

    def at(n: te.Expr, i: te.Expr, j: te.Expr) -> te.Expr:
        return te.select((i >= 0) & (i < 15) & (j >= 0) & (j < 15), x[n, c, i, j], 0)

    y = te.compute((2, 72, 15, 15), lambda n, o, i, j: te.sum(at(n, i + p - 1, j + q - 1) * w[o, c, p, q], [c, p, q]), "y")
    image, filters = (rng.integers(-9, 10, t.shape).astype(np.float32) for t in (x, w))
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(image, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), (2, 3))
    np.testing.assert_array_equal(tcomp.build([x, w, y], "cuda")(image, filters), np.einsum("ncijpq,ocpq->noij", windows, filters))


@pytest.mark.parametrize(("rows", "length"), [(300, 7), (37, 197), (3, 5000), (4096, 1024)])
def test_softmax(rows: int, length: int) -> None:
    x = te.placeholder((rows, length), "float32", "x")
    k, j = te.reduce_axis(length, "k"), te.reduce_axis(length, "j")
    top = te.compute((rows,), lambda r: te.max(x[r, k], k), "top")
    e = te.compute((rows, length), lambda r, i: te.exp(x[r, i] - top[r]), "e")
    total = te.compute((rows,), lambda r: te.sum(e[r, j], j), "total")
    f = tcomp.build([x, te.compute((rows, length), lambda r, i: e[r, i] / total[r], "y")], "cuda")
    given = floats(rows, length)
    want = np.exp(given.astype(np.float64) - given.max(1, keepdims=True))
    np.testing.assert_allclose(f(given), want / want.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize(("rows", "length"), [(1, 768), (1, 5000), (3, 768)])
def test_normalisation(rows: int, length: int) -> None:
    """Of one row the threads of a block exchange the mean through global memory."""
    x, scale = te.placeholder((rows, length), "float32", "x"), te.placeholder((length,), "float32", "scale")
    k, j = te.reduce_axis(length, "k"), te.reduce_axis(length, "j")
    mean = te.compute((rows,), lambda r: te.sum(x[r, k], k) / float(length), "mean")
    spread = te.compute((rows,), lambda r: te.sum((x[r, j] - mean[r]) * (x[r, j] - mean[r]), j) / float(length), "spread")
    y = te.compute((rows, length), lambda r, i: (x[r, i] - mean[r]) / te.sqrt(spread[r] + 1e-5) * scale[i], "y")
    f = tcomp.build([x, scale, y], "cuda")
    for _ in range(3):
        given, scales = floats(rows, length) + 3, floats(length)
        wide = given.astype(np.float64)
        want = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5) * scales
        np.testing.assert_allclose(f(given, scales), want, atol=1e-5)


@pytest.mark.parametrize("length", [1, 1000, 10_000_019])
def test_total(length: int) -> None:
    x, k = te.placeholder((length,), "float32", "x"), te.reduce_axis(length, "k")
    f = tcomp.build([x, te.compute((), lambda: te.sum(x[k], k), "y")], "cuda")
    given = floats(length) + 1
    np.testing.assert_allclose(f(given), given.sum(dtype=np.float64), rtol=1e-5)


@pytest.mark.parametrize(("rows", "count"), [(131_072, 1024), (1001, 129), (300, 7)])
def test_column_sums(rows: int, count: int) -> None:
    x, k = te.placeholder((rows, count), "float32", "x"), te.reduce_axis(rows, "k")
    f = tcomp.build([x, te.compute((count,), lambda j: te.sum(x[k, j], k), "y")], "cuda")
    given = floats(rows, count) + 1
    np.testing.assert_allclose(f(given), given.sum(0, dtype=np.float64), rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_operators(name: str) -> None:
    """Launched, and replayed as a graph."""
    case = CASES[name]
    module = tcomp.compile(case.data, "cuda")
    for _ in range(3):
        arrays = case.arrays()
        near(module.run(arrays), reference(case.data, arrays))


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_products_of_a_model_in_less_than_float32(precision: str) -> None:
    x = floats(20, 18, 9, 9)
    (got,), (want,) = tcomp.compile(MIXED, f"cuda -precision={precision}").run({"x": x}).values(), reference(MIXED, {"x": x})
    assert np.abs(got - want).max() < 0.1 * np.abs(want).max() and not np.allclose(got, want, rtol=1e-6)


def test_control_flow_and_profiles() -> None:
    either, until = tcomp.compile(branching(), "cuda"), tcomp.compile(stopping(), "cuda")
    for x in (np.full((4, 5), 0.5, np.float32), np.full((4, 5), -0.5, np.float32)):
        near(either.run({"x": x}), reference(branching(), {"x": x}))
    for x in (np.array([1, 2, 3], np.float32), np.array([9, 9, 9], np.float32)):
        near(until.run({"x": x}), reference(stopping(), {"x": x}))
    seconds = [seconds for _, seconds in either.profile({"x": x.repeat(7)[:20].reshape(4, 5)})]  # none for the branch that is not taken
    assert all(0 <= s < 1 for s in seconds) and sum(seconds) > 0


def test_sizes_change_and_come_back() -> None:
    module = tcomp.compile(NET, "cuda")
    for size in (1, 5, 2, 5, 5, 1, 2):
        x = floats(size, 3, 14, 14)
        near(module.run({"x": x}), reference(NET, {"x": x}))


def test_several_modules_in_several_threads() -> None:
    import threading

    modules, x, found = [tcomp.compile(NET, "cuda") for _ in range(2)], floats(4, 3, 14, 14), []
    work = [threading.Thread(target=lambda m=m: found.extend(m.run({"x": x})["y"] for _ in range(20))) for m in modules * 2]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(found) == 80 and all(np.array_equal(found[0], y) for y in found)
    near({"y": found[0]}, reference(NET, {"x": x}))


def test_arrays_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch cannot use the GPU")
    module, x = tcomp.compile(NET, "cuda"), floats(4, 3, 14, 14)
    result = module.run({"x": torch.from_numpy(x).cuda()})["y"]
    near({"y": torch.from_dlpack(result).cpu().numpy()}, reference(NET, {"x": x}))


def test_arrays_on_the_device_stay_there() -> None:
    import cupy

    x = te.placeholder((1000,), "float32", "x")
    f = tcomp.build([x, te.compute((1000,), lambda i: x[i] * 2.0, "y")], "cuda")
    given = floats(1000)
    result = f(cupy.asarray(given))
    assert isinstance(result, cupy.ndarray)
    np.testing.assert_array_equal(result.get(), given * 2)
    assert isinstance(f(given), np.ndarray)


def run_on_device(kernel: Kernel, arrays: list[np.ndarray], arch: str) -> None:
    """A kernel of one launch, without temporaries, in place."""
    import cupy

    device = CupyDevice()
    text, (launch,) = emit_kernel(kernel, CudaTarget.parse(f"cuda -arch={arch}"))
    with device.guarded():
        x, y, z = (int(n) for n in launch.grid)
        code = KernelCode(
            (Launch(launch.function, (x, y, z), launch.block, launch.buffers, (), launch.shared),),
            {arch: nvrtc.compile_text(text, arch).cubin},
            b"",
        )
        memory = [cupy.asarray(m.reshape(-1).view(np.uint8)) for m in arrays]
        cupy.cuda.get_current_stream().synchronize()
        device.launch(device.load(code)[launch.function], (x, y, z), launch.block, [memory[n].data.ptr for n in launch.buffers])
        device.synchronize()
    for array, found in zip(arrays, memory, strict=True):
        array[...] = found.get().view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
@pytest.mark.parametrize("along", [True, False])
def test_tensor_cores(dtype: str, along: bool) -> None:
    """Small integers, whose sums are exact in any order."""
    a, b = (rng.integers(-9, 10, shape).astype(to_numpy(dtype)) for shape in ((64, 64), (48, 64) if along else (64, 48)))
    c = np.full((64, 48), 77, np.int32 if dtype == "int8" else np.float32)
    run_on_device(warp_products.product(dtype, 64, 48, 64, along).kernel, [a, b, c], f"sm_{CupyDevice().capability}")
    np.testing.assert_array_equal(c, a.astype(c.dtype) @ (b.T if along else b).astype(c.dtype))


needs_hopper = pytest.mark.skipif(not REASON and CupyDevice().capability != 90, reason="wgmma is of sm_90a alone")


@needs_hopper
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "uint8"])
@pytest.mark.parametrize(
    ("m", "n", "depth", "width", "stages"), [(256, 128, 256, 64, 3), (150, 70, 75, 16, 2), (300, 500, 1000, 256, 2), (128, 24, 64, 24, 1)]
)
def test_warpgroups(dtype: str, m: int, n: int, depth: int, width: int, stages: int) -> None:
    a, b = (rng.integers(0 if dtype == "uint8" else -9, 10, shape).astype(to_numpy(dtype)) for shape in ((m, depth), (n, depth)))
    b = b.astype(np.int8) if dtype == "uint8" else b
    c = np.full((m, n), 77, np.int32 if dtype.endswith("int8") else np.float32)
    run_on_device(warp_products.product_of_groups(dtype, m, n, depth, width, 2, stages).kernel, [a, b, c], "sm_90a")
    np.testing.assert_array_equal(c, a.astype(c.dtype) @ b.T.astype(c.dtype))


@needs_hopper
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(256, 96, 384), (67, 45, 301), (2048, 512, 1024)])
def test_products_by_warpgroups(shape: tuple[int, int, int], dtype: str) -> None:
    """Every tile of `wgmma` that a decision may choose."""
    rows, depth, columns = shape
    total = "int32" if dtype == "int8" else "float32"
    a, b, k = te.placeholder((rows, depth), dtype, "a"), te.placeholder((columns, depth), dtype, "b"), te.reduce_axis(depth, "k")
    c = te.compute((rows, columns), lambda i, j: te.sum(te.cast(a[i, k], total) * te.cast(b[j, k], total), k), "c")
    kernel, target, knobs = lower("kernel", [a, b], [c]), CudaTarget.parse("cuda -arch=sm_90a"), Knobs()
    schedule(kernel, target, knobs)
    ((name, answer),) = ((name, answer) for name, answer in knobs.asked.items() if name.endswith(".tile"))
    x, y = (rng.integers(-9, 10, size).astype(to_numpy(dtype)) for size in ((rows, depth), (columns, depth)))
    grouped = [o for o in answer.options if isinstance(o, tuple) and o[-1] == "wgmma"]
    assert grouped
    for option in grouped:
        got = np.full((rows, columns), 77, total)
        run_on_device(schedule(kernel, target, Knobs({name: option})).kernel, [x, y, got], "sm_90a")
        np.testing.assert_array_equal(got, x.astype(total) @ y.astype(total).T, err_msg=str(option))


def test_a_model_is_tuned(tmp_path: Path) -> None:
    """Compiled, measured and confirmed; a compilation follows what was found."""
    target, path = f"cuda -arch=sm_{CupyDevice().capability}", tmp_path / "net.onnx"
    path.write_bytes(MIXED)
    result = tcomp.tune(path, target=target, trials=6, database=tmp_path / "t.db")
    assert result.trials == 6 and not any(t.stopped.startswith("not tuned") for t in result.tasks)
    with Database(tmp_path / "t.db") as database:
        records = [r for t in database.tasks() for r in database.records(t.key)]
    assert all(r.measurement.status == "ok" and 0 < (r.cost or 0) < 0.1 for r in records), records
    x = floats(20, 18, 9, 9)
    near(tcomp.compile(MIXED, target, database=tmp_path / "t.db").run({"x": x}), reference(MIXED, {"x": x}))


def test_candidates_that_fail_are_records_and_the_next_one_is_measured() -> None:
    expected = {"none": "ok", "segfault": "crash", "straying": "wrong", "endless": "timeout", "one_thread": "ok"}
    with Measurer(1, Limits(building=120, running=20, rounds=10)) as measurer:
        found = measurer.measure(gpu_faults.task(f"sm_{CupyDevice().capability}"), [{"fault": name} for name in expected])
    assert {name: got.status for name, got in zip(expected, found, strict=True)} == expected, found
    assert found[-1].ratio > 2 * found[0].ratio


def test_an_illegal_access_is_a_named_error_and_the_process_survives() -> None:
    """In a process of its own: CUDA refuses all further work of a process after it."""
    import subprocess
    import sys

    program = """
from tcomp.errors import DeviceError
from tcomp.runtime.cuda import CupyDevice
from tcomp.runtime.plan import KernelCode, Launch
from tcomp.target import CudaTarget
from tcomp.runtime.plan import KernelCode, Launch
from tcomp.codegen.cuda.nvrtc import compile_text
device = CupyDevice()
text = 'extern "C" __global__ void __launch_bounds__(1) k(long long* p) { *p = 1; }'
arch = f"sm_{device.capability}"
with device.guarded():
    k = device.load(KernelCode((Launch("k", (1, 1, 1), (1, 1, 1), (0,), ()),), {arch: compile_text(text, arch).cubin}, b""))["k"]
try:
    with device.guarded():
        device.launch(k, (1, 1, 1), (1, 1, 1), [8])
        device.synchronize()
except DeviceError as problem:
    print("survived:", problem.what)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "survived: the GPU reports an error" in done.stdout, done.stdout + done.stderr
