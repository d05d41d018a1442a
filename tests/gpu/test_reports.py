"""What GPU kernels report: indices out of range and divisions by zero, by the text of the kernels on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.errors import InputError, OutOfRangeError
from tcomp.ir.loops import BLOCK_AXES, THREAD_AXES, Kernel, Stmt, block, loop, store
from tcomp.runtime import RunRecord
from tcomp.runtime.cuda import CudaModule
from tcomp.target import CudaTarget
from tests.codegen.cuda import cuda_host
from tests.codegen.cuda.test_cuda import needs_nvrtc
from tests.codegen.test_checked import COUNT, HALF, INDEX, KERNELS, ONE_PLACE, OUT, QUOTIENT, N, X, picked
from tests.gpu.emulation import HostDevice
from tests.gpu.test_models import compiled

pytestmark = pytest.mark.skipif(cuda_host.compiler() is None, reason="there is no C++ compiler")
TARGET = CudaTarget.parse("cuda")
THREADS = loop("b", 2, lambda b: loop("t", 16, lambda t: store(OUT, (b * 16 + t,), picked(b * 16 + t)), THREAD_AXES[0]), BLOCK_AXES[0])
CALL = 7  # the number of the kernel's call


def run(body: Stmt, index: np.ndarray, descending: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(what is reported, the results) of a kernel."""
    text, (launch,) = emit_kernel(Kernel("k", (X, INDEX, OUT), (OUT,), (), body), TARGET)
    assert launch.reports
    arrays, report = (np.arange(N, dtype=np.float32), index, np.zeros(COUNT, np.float32)), np.zeros(3, np.int64)
    places = [arrays[n].ctypes.data for n in launch.buffers]
    cuda_host.launch(text, launch.function, [int(n) for n in launch.grid], launch.block, [*places, report.ctypes.data, CALL], descending)
    return report, arrays[2]


@pytest.mark.parametrize("wrong", [N, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("body", [KERNELS["serial"], THREADS], ids=["one thread", "threads"])
def test_the_index_is_reported(body: Stmt, wrong: int) -> None:
    index = np.arange(COUNT, dtype=np.int32) % N
    report, out = run(body, index)
    assert not report.any()
    np.testing.assert_array_equal(out, index)
    index[13] = wrong
    assert run(body, index)[0].tolist() == [CALL + 1, wrong, N]


def test_the_first_of_several_stays() -> None:
    index = np.full(COUNT, N, np.int32) + np.arange(COUNT, dtype=np.int32)
    assert [run(THREADS, index, descending)[0].tolist() for descending in (False, True)] == [[CALL + 1, N, N], [CALL + 1, N + 15, N]]


@pytest.mark.parametrize("name", ["a branch", "a selection"])
def test_what_is_not_wanted_is_not_reported(name: str) -> None:
    index = np.where(np.arange(COUNT) < 16, np.arange(COUNT) % N, 99).astype(np.int32)
    report, out = run(HALF[name], index)
    assert not report.any()
    np.testing.assert_array_equal(out[:16], index[:16])
    index[:] = 99
    assert run(HALF[name], index)[0].any()


def module_of(text: str, target: str = "cuda") -> CudaModule:
    data = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17]> g {text}').SerializeToString()
    return CudaModule(compiled(data, target), HostDevice())


@pytest.mark.parametrize("text", ONE_PLACE)
def test_models_say_where_and_which(text: str) -> None:
    module = module_of(text)
    given: dict[str, Any] = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in module.inputs}
    before = module.run(given)
    for wrong in (1, -2):
        with pytest.raises(OutOfRangeError, match=f"the index is {wrong}, and there are 1 elements"):
            module.run(given | {"i": np.full_like(given["i"], wrong)})
    for name, array in module.run(given).items():  # what was reported before does not last
        np.testing.assert_array_equal(array, before[name])


def test_unchecked_code_takes_the_nearest() -> None:
    module = module_of(ONE_PLACE[0], "cuda -unchecked")
    table = np.ones((1, 4), np.float32)
    np.testing.assert_array_equal(module.run({"t": table, "i": np.array([0, 3, -9])})["y"], np.ones((3, 4)))


@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_a_division_by_zero_is_reported(op: str) -> None:
    module = CudaModule(compiled(onnx.parser.parse_model(QUOTIENT.format(op=op)).SerializeToString()), HostDevice())
    x, w, records = np.arange(-5, 32, dtype=np.int32), np.arange(1, 38, dtype=np.int32), list[RunRecord]()
    module.hook = records.append
    right = {"Div": np.trunc(2 * x / w), "Mod": np.mod(2 * x, w)}[op].astype(np.int32) ** 2
    np.testing.assert_array_equal(module.run({"x": x, "w": w})["y"], right)
    w[18] = 0
    with pytest.raises(InputError, match="out of range in half(.|\\n)*divided by zero") as caught:
        module.bind({"x": x, "w": w}).run()
    assert not isinstance(caught.value, OutOfRangeError) and [bool(r.status) for r in records] == [False, True]


def test_the_call_is_named_in_branches_and_loops() -> None:
    """Calls are numbered as the messages are."""
    text = """(float[4] t, int64[2] i, bool c) => (float[2] y) {
        y = If (c) <then_branch = a () => (float[2] p) { p = Gather(t, i) },
                    else_branch = b () => (float[2] q) { r = Relu(t) [late] q = Gather(r, i) }>
    }"""
    module, t = module_of(text), np.arange(4, dtype=np.float32)
    for c, where in ((True, "p"), (False, "late")):
        np.testing.assert_array_equal(module.run({"t": t, "i": np.array([3, -1]), "c": np.array(c)})["y"], [3, 3])
        with pytest.raises(OutOfRangeError, match=f"out of range in .*{where}(.|\\n)*the index is 4, and there are 4 elements"):
            module.run({"t": t, "i": np.array([0, 4]), "c": np.array(c)})


@needs_nvrtc
def test_the_compiler_of_cuda_takes_the_text() -> None:
    text, _ = emit_kernel(Kernel("k", (X, INDEX, OUT), (OUT,), (), block(THREADS, HALF["a selection"])), TARGET)
    assert nvrtc.compile_text(text, "sm_80", "k").cubin
