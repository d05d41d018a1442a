"""Modules: inputs admitted and refused, dims, outputs, threads, processes."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tcomp.codegen.elf.linker import link
from tcomp.errors import ArtifactError, InputError
from tcomp.runtime import Module, TensorSpec, host, numpy_dtype, read_artifact
from tcomp.runtime.arrays import admit
from tcomp.runtime.manifest import from_saved, to_saved
from tests.runtime import native_models as models
from tests.runtime.alone import alone

W = models.W


def reference(x: np.ndarray, s: float) -> np.ndarray:
    return np.float32(s) * x + W


def random(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 4), np.float32)


@pytest.fixture(params=[1, 2, 3])
def module(affine: bytes, request: pytest.FixtureRequest) -> Module:
    return Module.load(affine, threads=request.param)


# ---- inputs and outputs -----------------------------------------------------------------------


def test_names_and_positions(module: Module) -> None:
    x = random(5)
    named = module.run({"s": np.float32(3), "x": x})
    assert list(named) == ["y"] and np.array_equal(named["y"], reference(x, 3))
    assert np.array_equal(module(x, np.float32(3)), named["y"])
    plural = "s" if module.threads > 1 else ""
    signature = "(x: float32[n, 4], s: float32[]) -> (y: float32[n, 4])"
    assert str(module) == f"<tcomp.Module {signature}, {module.threads} thread{plural}>"


def test_outputs_are_fresh_aligned_and_survive_the_module(affine: bytes) -> None:
    module = Module.load(affine, threads=2)
    x = random(1000)
    first, second = module(x, np.float32(1)), module(x, np.float32(2))
    del module
    gc.collect()
    assert first.ctypes.data % 64 == 0 and first.flags.writeable and first.flags.c_contiguous
    assert not np.shares_memory(first, second)
    assert np.array_equal(first, reference(x, 1)) and np.array_equal(second, reference(x, 2))


def test_dims_may_change_from_call_to_call(module: Module) -> None:
    for rows in (1, 1000, 0, 3, 300000, 7, 1000):  # 300000: a workspace in huge pages
        x = random(rows, rows)
        assert np.array_equal(module(x, np.float32(-2)), reference(x, -2))


def test_strided_unaligned_and_read_only_inputs(module: Module) -> None:
    x = random(6)
    expected = reference(x, 3)
    unaligned = np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(6, 4)
    read_only = x.copy()
    read_only.flags.writeable = False
    for variant in (np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2], unaligned, read_only, x[::-1][::-1]):
        assert np.array_equal(module(variant, np.array(3, np.float32)), expected)


class DLPack:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class Protocol:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array


class Elsewhere(DLPack):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("the tensor is on another device")


def test_arrays_of_other_libraries(module: Module) -> None:
    x = random(3)
    for wrapper in (DLPack, Protocol):
        assert np.array_equal(module(wrapper(x), np.float32(1)), reference(x, 1))
    with pytest.raises(InputError, match=r"'x' is not an array(.|\n)*Elsewhere(.|\n)*another device"):
        module(Elsewhere(x), np.float32(1))
    spec = TensorSpec("x", "float32", (3, 4))
    assert np.shares_memory(admit(DLPack(x), spec, x.dtype), x)


def test_python_values(module: Module) -> None:
    assert np.array_equal(module([[1, 2, 3, 4]], 2), reference(np.array([[1, 2, 3, 4]], np.float32), 2))
    assert np.array_equal(module([[0.1, 0.2, 0.3, float("inf")]], True), reference(np.array([[0.1, 0.2, 0.3, np.inf]], np.float32), 1))


@pytest.mark.parametrize(
    ("value", "dtype", "accepted"),
    [
        (7, "uint8", True),
        (256, "uint8", False),
        (-1, "uint8", False),
        (-1, "int8", True),
        (2**63, "uint64", True),
        (2**63, "int64", False),
        (-1, "uint64", False),
        (2**70, "float64", False),
        (1.0, "int64", False),
        (1.5, "float16", True),
        (1e6, "float16", False),
        (2**24 + 1, "float32", False),
        (2**24, "float32", True),
        (True, "bool", True),
        (1, "bool", False),
        (True, "int32", True),
        (1j, "float32", False),
        (1j, "complex64", True),
        (float("nan"), "float32", True),
        ([], "int64", True),
        ([[], []], "float32", True),
        ([1, [2]], "float32", False),
        ("1", "float32", False),
        (["1"], "float32", False),
        (None, "float32", False),
        ([None], "float32", False),
        (1.5, "bfloat16", True),
        (3, "bfloat16", True),
        (257, "bfloat16", False),
        (1.5, "float8_e4m3fn", True),
        (1.51, "float8_e4m3fn", False),  # of few bits: exactly, or not at all
        (1000, "float8_e4m3fn", False),
        (float("inf"), "float8_e5m2", True),
        (7, "int4", True),
        (8, "int4", False),
        (1.5, "int4", False),
        (float("nan"), "int4", False),
        (-1, "uint2", False),
    ],
)
def test_conversion_of_python_values(value: Any, dtype: str, accepted: bool) -> None:
    spec = TensorSpec("x", dtype, ())
    if not accepted:
        with pytest.raises(InputError, match="'x'"):
            admit(value, spec, numpy_dtype(dtype))
    else:
        array = admit(value, spec, numpy_dtype(dtype))
        assert array.dtype == numpy_dtype(dtype) and np.array_equal(array, np.asarray(value, array.dtype), equal_nan=dtype == "float32")


def test_element_types_that_numpy_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    spec = TensorSpec("x", "bfloat16", (2,))
    bits = np.array([1, 2], np.uint16)
    with pytest.raises(InputError, match="expected bfloat16, got uint16"):
        admit(bits, spec, numpy_dtype("bfloat16"))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    numpy_dtype.cache_clear()
    assert numpy_dtype("bfloat16") == np.uint16 and numpy_dtype("float8_e4m3fn") == np.uint8 == numpy_dtype("int4")
    assert admit(bits, spec, numpy_dtype("bfloat16")) is bits
    with pytest.raises(InputError):
        admit([1, 2], spec, numpy_dtype("bfloat16"))  # numbers are not bits
    numpy_dtype.cache_clear()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float4_e2m1fn", "int4"])
def test_types_that_numpy_lacks_are_saved_and_read_back(tmp_path: Path, dtype: str) -> None:
    array = np.array([[1, 0, 1]]).astype(numpy_dtype(dtype))
    np.save(tmp_path / "a.npy", to_saved(array), allow_pickle=False)
    again = from_saved(np.load(tmp_path / "a.npy", allow_pickle=False), dtype)
    assert again.dtype == array.dtype and again.tobytes() == array.tobytes()
    assert from_saved(array, dtype) is array and to_saved(np.zeros(2)).dtype == np.float64


def test_refusals_name_the_input_and_both_sides(module: Module) -> None:
    x, s = random(3), np.float32(1)
    for arguments, message in (
        ((x.astype(np.float64), s), r"'x' has the wrong element type(.|\n)*expected float32, got float64"),
        ((x.astype(">f4"), s), r"expected float32, got >f4"),
        ((x[0], s), r"'x' has the wrong shape: expected \(n, 4\), got \(4,\)(.|\n)*1 axes instead of 2"),
        ((x[:, :3], s), r"expected \(n, 4\), got \(3, 3\)(.|\n)*axis 1 has 3 elements instead of 4"),
        ((x, x), r"'s' has the wrong shape: expected \(\)"),
        ((x,), r"expected 2 inputs \(x, s\), got 1"),
        ((object(), s), r"'x' is not an array"),
        (({"x": x}, s), r"'x' is not an array(.|\n)*model\.run\({...}\)"),
        ((np.lib.stride_tricks.as_strided(x, (4000001, 4), (0, 4)), s), "n is 4000001, outside its range of 0 to 4000000"),
    ):
        with pytest.raises(InputError, match=message):
            module(*arguments)
    for inputs, message in (({"x": x}, r"missing s"), ({"x": x, "s": s, "t": s}, "unknown t"), ({"x": x, "S": s}, "missing s; unknown S")):
        for call in (module.run, module.facts):
            with pytest.raises(InputError, match=message):
                call(inputs)
    assert np.array_equal(module(x, s), reference(x, 1))  # refusals leave the module usable


def test_a_dim_must_agree_between_inputs(affine_code: bytes) -> None:
    manifest = copy.deepcopy(models.AFFINE_MANIFEST)
    manifest["inputs"][1]["shape"] = ["n"]
    module = Module.load(models.packed(affine_code, manifest, [("w", W)]))
    with pytest.raises(InputError, match="'s'(.|\n)*n is 2 here, but 3 in input 'x'"):
        module(random(3), np.ones(2, np.float32))


def test_data_dependent_extents_and_errors_of_the_model(filtering: bytes) -> None:
    module = Module.load(filtering)
    for _ in range(2):
        for values in ([1, -2, 3], [-1], [4, 5], [-1, -2, -3, 7]):
            positive = [value for value in values if value > 0]
            result = module(np.array(values, np.float32))
            assert result.shape == (2, len(positive)) and result.tolist() == [positive, [-value for value in positive]]
    with pytest.raises(InputError, match="the model stopped: NaN in x"):
        module([1.0, float("nan")])
    assert module([2.0]).tolist() == [[2.0], [-2.0]]
    with pytest.raises(InputError, match="n is 0, outside its range of 1 to no limit"):
        module(np.zeros(0, np.float32))


def test_code_that_contradicts_its_manifest_is_refused(affine_code: bytes) -> None:
    wrong = copy.deepcopy(models.AFFINE_MANIFEST)
    wrong["outputs"][0]["shape"] = ["n", 5]
    with pytest.raises(ArtifactError, match=r"the shape \(3, 4\)"):
        Module.load(models.packed(affine_code, wrong, [("w", W)]))(random(3), np.float32(1))
    insane = models.FILTER.replace("store i64 0, ptr %sizes", "store i64 -8, ptr %sizes")
    code = link([models.compile_ir(insane)], ["tcomp_run", "tcomp_plan"])
    with pytest.raises(ArtifactError, match="-8 bytes of workspace"):
        Module.load(models.packed(code, models.FILTER_MANIFEST, []))([1.0])
    huge = models.FILTER.replace("store i64 0, ptr %sizes", f"store i64 {1 << 45}, ptr %sizes")
    code = link([models.compile_ir(huge)], ["tcomp_run", "tcomp_plan"])
    with pytest.raises(InputError, match="no memory for a workspace"):
        Module.load(models.packed(code, models.FILTER_MANIFEST, []))([1.0])


def test_code_must_be_a_shared_object_with_the_interface() -> None:
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        Module.load(models.packed(b"not ELF", models.FILTER_MANIFEST, []))
    code = link([models.compile_ir(models.FILTER)], ["tcomp_run"])
    with pytest.raises(ArtifactError, match="lacks the function tcomp_plan"):
        Module.load(models.packed(code, models.FILTER_MANIFEST, []))


# ---- loading ----------------------------------------------------------------------------------


def test_save_and_load(module: Module, tmp_path: Path) -> None:
    path = tmp_path / "model.tcomp"
    module.save(path)
    x = random(3)
    again = Module.load(path, verify=True)
    assert again.threads == 2  # the manifest's
    assert np.array_equal(again(x, np.float32(2)), module(x, np.float32(2)))
    assert np.array_equal(Module.load(read_artifact(path))(x, np.float32(2)), module(x, np.float32(2)))


def test_a_hundred_megabytes_are_mapped(affine_code: bytes, tmp_path: Path) -> None:
    path = tmp_path / "big.tcomp"
    path.write_bytes(models.packed(affine_code, models.AFFINE_MANIFEST, [("w", W), ("big", bytes(100 << 20))]))
    module = Module.load(path)
    assert np.array_equal(module(random(2), np.float32(1)), reference(random(2), 1))


def test_modules_loaded_one_after_the_other_are_not_confused(affine: bytes, filtering: bytes) -> None:
    """The loader identifies libraries by path: that of a memory file is reused once its descriptor is closed."""
    kept = []
    for _ in range(3):
        one, other = Module.load(affine), Module.load(filtering)
        assert np.array_equal(one(random(2), np.float32(1)), reference(random(2), 1))
        assert other([1.0]).tolist() == [[1.0], [-1.0]]
        kept.append(other)
        del one
        gc.collect()
    assert all(module([2.0]).tolist() == [[2.0], [-2.0]] for module in kept)


@alone
def test_unloading_frees_descriptors_threads_and_mappings(affine: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.tcomp"
    path.write_bytes(affine)

    def resources() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps.count("tcomp-model") + maps.count(str(path)))

    Module.load(path)  # the first one of a process makes what answers interrupts
    before = resources()
    module = Module.load(path, threads=3)
    module(random(2), np.float32(1))
    during = resources()
    assert during[0] == before[0] and during[1] == before[1] + 2 and during[2] > before[2]
    del module
    assert resources() == before


def test_other_machines_are_refused_before_loading(affine_code: bytes) -> None:
    for target, message in (
        ({"triple": "sparc64-unknown-linux-gnu", "cpu": "", "features": []}, "compiled for sparc64(.|\n)*runs code for Linux"),
        ({"triple": models.TRIPLE, "cpu": "future", "features": ["teleport"]}, "lacks instructions that the artifact uses: teleport"),
    ):
        with pytest.raises(ArtifactError, match=message):
            Module.load(models.packed(affine_code, models.AFFINE_MANIFEST, [("w", W)], **target))


def test_thread_counts(affine: bytes, filtering: bytes) -> None:
    assert Module.load(filtering).threads == 1
    with pytest.raises(InputError, match="compiled for one"):
        Module.load(filtering, threads=2)
    for bad in (0, -1, 5000, 1.5):
        with pytest.raises(InputError, match="threads"):
            Module.load(affine, threads=bad)


# ---- threads and processes --------------------------------------------------------------------


def test_results_do_not_depend_on_the_number_of_threads(affine: bytes) -> None:
    x = random(9973)
    results = [Module.load(affine, threads=threads)(x, np.float32(1.7)).tobytes() for threads in (1, 2, 3, 7, 16)]
    assert len(set(results)) == 1


def test_one_thread_starts_none(affine: bytes) -> None:
    before = len(os.listdir("/proc/self/task"))
    module = Module.load(affine, threads=1)
    module(random(100), np.float32(1))
    assert len(os.listdir("/proc/self/task")) == before


def test_concurrent_callers(module: Module) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(40):
                x = random(1 + (seed * 37 + turn * 11) % 500, seed)
                assert np.array_equal(module(x, np.float32(seed)), reference(x, seed))
        except BaseException as failure:  # noqa: BLE001  whatever it is, the test reports it
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_forked_children_run_the_module(module: Module) -> None:
    """Also while another thread of the parent is in a call and holds the lock at the moment of the fork."""
    x = random(20000)
    expected = reference(x, 2)
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            module(x, np.float32(2))

    busy = threading.Thread(target=keep_busy)
    busy.start()
    context = multiprocessing.get_context("fork")

    def child() -> None:
        os._exit(0 if all(np.array_equal(module(x, np.float32(2)), expected) for _ in range(3)) else 1)

    try:
        children = [context.Process(target=child) for _ in range(4)]
        for process in children:
            process.start()
        for process in children:
            process.join(30)
        assert [process.exitcode for process in children] == [0] * 4
    finally:
        stop.set()
        busy.join()
    assert np.array_equal(module(x, np.float32(2)), expected)


ALONE = """
import json, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("llvmlite", "onnx", "xgboost", "islpy", "ml_dtypes", "scipy"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
import numpy as np
import tcomp.runtime
module = tcomp.runtime.load(sys.argv[1])
print(module([[1, 2, 3, 4]], 2).tolist())
print(json.dumps([name for name in sys.modules if name == "tcomp" or name.startswith("tcomp.")]))
"""


def printed(script: str, path: Path) -> str:
    """What a new process prints that runs the script with one argument; it must end well."""
    done = subprocess.run(
        [sys.executable, "-c", script, path],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(host.__file__).parents[2])},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_runtime_needs_nothing_but_numpy(affine: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.tcomp"
    path.write_bytes(affine)
    values, imported = printed(ALONE, path).splitlines()
    assert values == str([[2.5, 3.0, 8.0, 12.0]])
    assert all(name in ("tcomp", "tcomp.errors") or name.startswith("tcomp.runtime") for name in json.loads(imported))


def test_a_process_may_end_while_calls_are_running(affine: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.tcomp"
    path.write_bytes(affine)
    script = """
import sys, threading, time
import numpy as np, tcomp.runtime
module = tcomp.runtime.load(sys.argv[1], threads=3)
x = np.ones((50000, 4), np.float32)
def forever():
    while True:
        module(x, np.float32(1))
for _ in range(2):
    threading.Thread(target=forever, daemon=True).start()
time.sleep(0.2)
"""
    printed(script, path)
