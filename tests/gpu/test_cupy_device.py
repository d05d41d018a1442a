"""The device of CuPy as it is, on a CuPy that the host plays; and that CuPy's own functions take what is given to them."""

from __future__ import annotations

import re
import sys
import threading

import numpy as np
import pytest

from tcomp.errors import DeviceError, InputError
from tcomp.runtime import cuda
from tcomp.runtime.cuda import CudaModule, CupyDevice
from tests.codegen.cuda import cuda_host
from tests.gpu.fake_cupy import SIGNATURES, Array, CUDARuntimeError, FakeCupy
from tests.gpu.test_models import NET, compiled, floats, model, node, reference

needs_compiler = pytest.mark.skipif(cuda_host.compiler() is None, reason="there is no C++ compiler")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


PLAIN = model([node("Mul", ["x", "x"], ["y"])], {"x": ("float32", [3, 70])}, {"y": ("float32", [3, 70])})


@needs_compiler
def test_numpy_arrays_through_a_staging_buffer_that_is_too_small(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_PINNED", 1000)
    module = CudaModule(compiled(NET))
    for size in (2, 5, 2, 2):
        x = floats(size, 3, 14, 14)
        np.testing.assert_allclose(module.run({"x": x})["y"], reference(NET, {"x": x})[0], rtol=1e-4, atol=1e-5)
    assert [line.split()[0] for line in cupy.log if "copy" not in line] == ["capture", "graph", "graph"]


@needs_compiler
def test_a_model_without_weights(cupy: FakeCupy) -> None:
    x = floats(3, 70)
    module = CudaModule(compiled(PLAIN))
    np.testing.assert_array_equal(module.run({"x": x})["y"], x * x)
    assert cupy.log == ["copy 1", "capture 1", "graph", "copy 2"]


@needs_compiler
def test_arrays_on_the_device_stay_there(cupy: FakeCupy) -> None:
    module, x = CudaModule(compiled(PLAIN)), Array((3, 70), np.float32)
    x.host[:] = floats(3, 70)
    y = module.run({"x": x})["y"]
    assert isinstance(y, Array) and cupy.log == ["copy 3", "capture 1", "graph", "copy 3"]
    np.testing.assert_array_equal(y.host, x.host * x.host)
    with pytest.raises(InputError, match="another GPU"):
        module.run({"x": Array((3, 70), np.float32, device=1)})
    with pytest.raises(InputError, match="expected float32, got float64"):
        module.run({"x": Array((3, 70), np.float64)})


@needs_compiler
def test_another_thread_and_several_modules(cupy: FakeCupy) -> None:
    modules, x, found = [CudaModule(compiled(d)) for d in (PLAIN, NET)], floats(3, 70), []
    worker = threading.Thread(target=lambda: found.append(modules[0].run({"x": x})["y"]))
    worker.start()
    image = floats(1, 3, 14, 14)
    np.testing.assert_allclose(modules[1].run({"x": image})["y"], reference(NET, {"x": image})[0], rtol=1e-4, atol=1e-5)
    worker.join()
    np.testing.assert_array_equal(found[0], x * x)


@needs_compiler
def test_errors_of_the_device_are_named_and_do_not_last(cupy: FakeCupy) -> None:
    module, x = CudaModule(compiled(PLAIN)), floats(3, 70)
    cupy.broken = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources requested for launch"
    with pytest.raises(DeviceError, match="OUT_OF_RESOURCES"):
        module.run({"x": x})
    cupy.broken = ""
    np.testing.assert_array_equal(module.run({"x": x})["y"], x * x)
    module, image = CudaModule(compiled(NET)), floats(2, 3, 14, 14)
    cupy.room = 100
    with pytest.raises(DeviceError, match="not enough memory"):
        module.run({"x": image})
    cupy.room = 1 << 30
    assert module.run({"x": image})["y"].shape == (2, 40)


@needs_compiler
def test_times_are_those_of_the_stream(cupy: FakeCupy) -> None:
    module, x = CudaModule(compiled(NET)), floats(2, 3, 14, 14)
    names = [name for name, _ in module.profile({"x": x}, runs=2)]
    assert len(names) > 3 and all(seconds > 0 for _, seconds in module.profile({"x": x}, runs=2))
    assert len(module.replays({"x": x}, runs=3)) == 3 and "graph" in cupy.log


def test_no_driver_and_no_gpu(cupy: FakeCupy) -> None:
    def fails() -> int:
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    cupy.cuda.runtime.getDeviceCount = fails
    with pytest.raises(DeviceError, match="no GPU can be used"):
        CupyDevice()
    cupy.cuda.runtime.getDeviceCount = lambda: 0
    with pytest.raises(DeviceError, match="has no GPU"):
        CupyDevice()


def test_a_missing_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"tcomp\[cuda\]"):
        CupyDevice()


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions_of_cupy_take_what_is_given_to_them(name: str) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    found = cupy.cuda
    for part in ("graph", *name.split(".")) if name.startswith("Graph") else name.split("."):
        found = getattr(found, part)
    head = re.search(rf"\b{name.split('.')[-1]}\(([^)]*)\)", found.__doc__ or "")
    assert head is not None, f"{name} has no signature"
    assert tuple(p.split("=")[0].split()[-1] for p in head[1].split(",") if p.strip()) == SIGNATURES[name]
