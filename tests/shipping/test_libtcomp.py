"""libtcomp, the C library that loads artifacts: the bits of Python under sanitizers, its refusals, damaged files, threads."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tcomp
from tcomp.errors import InputError
from tcomp.runtime import LoadedModel
from tests.fuzz import libtcomp as fuzz
from tests.runtime import native_models
from tests.shipping import conftest as models

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
SOURCE, HEADER = fuzz.INCLUDE / "libtcomp.c", fuzz.INCLUDE / "libtcomp.h"
STOPPED, BAD_ARGUMENT, BAD_SHAPE, OUT_OF_RANGE = 1, 8, 9, 10
MESSAGE, VERIFY = 512, 1


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runner")
    return fuzz.build(folder, Path(__file__).with_name("libtcomp_runner.c"), SOURCE)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("library") / "libtcomp.so"
    command = ["cc", "-std=c99", "-O1", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-pedantic", "-shared", "-fPIC"]
    subprocess.run([*command, str(SOURCE), "-o", str(made), "-ldl", "-lpthread"], check=True, timeout=60)
    loaded = ctypes.CDLL(str(made))
    pointers = ["model_name", "model_type", "model_extent_name", "session_output", "session_shape", "session_message"]
    for name in pointers:
        getattr(loaded, f"tcomp_{name}").restype = ctypes.c_char_p if name[:5] == "model" or name.endswith("message") else ctypes.c_void_p
    loaded.tcomp_model_extent.restype = ctypes.c_int64
    loaded.tcomp_model_element_bytes.restype = loaded.tcomp_session_output_bytes.restype = ctypes.c_size_t
    return loaded


def run(
    runner: Path, model: LoadedModel, inputs: dict[str, np.ndarray], folder: Path, threads: int = 1, repeats: int = 2
) -> str | list[np.ndarray]:
    """The outputs, or what the runner says of an error."""
    model.save(folder / "net.tcomp")
    arguments: list[object] = [folder / "net.tcomp", threads, repeats, VERIFY]
    for n, spec in enumerate(model.inputs):
        inputs[spec.name].tofile(folder / f"in{n}.bin")
        arguments += [f"={folder}/in{n}.bin", *inputs[spec.name].shape]
    done = subprocess.run([str(runner), *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1) and not done.stderr, done.stdout + done.stderr
    if done.returncode:
        return done.stdout.strip()
    lines = [line.rsplit(" ", 1 + len(spec.shape)) for line, spec in zip(done.stdout.splitlines(), model.outputs, strict=True)]
    assert [line[:2] for line in lines] == [[spec.name, spec.dtype] for spec in model.outputs]
    return [np.fromfile(folder / f"out{n}.bin", line[1]).reshape([int(e) for e in line[2:]]) for n, line in enumerate(lines)]


def outputs(found: str | list[np.ndarray]) -> list[np.ndarray]:
    assert not isinstance(found, str), found
    return found


def test_it_is_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in (SOURCE, HEADER)) <= 900
    included = set(re.findall(r'#include "(.*)"', SOURCE.read_text() + HEADER.read_text()))
    assert included == {"libtcomp.h", "tcomp.h"}


def test_its_header_is_one_of_cpp_as_well() -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    subprocess.run(["c++", "-x", "c++", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", str(HEADER)], check=True, timeout=60)


@pytest.mark.parametrize("name", ["residual", "recurrent", "convolutional", "detector", "lookup"])
def test_it_computes_the_bits_of_python(name: str, runner: Path, modules, tmp_path: Path) -> None:
    module, inputs = modules[name]
    for threads in (1, 2):
        found = outputs(run(runner, module, inputs, tmp_path, threads))
        for array, wanted in zip(found, module.run(inputs).values(), strict=True):
            assert array.shape == wanted.shape and array.tobytes() == wanted.tobytes()


def test_large_workspaces(runner: Path, modules, tmp_path: Path) -> None:
    module, x = modules["convolutional"][0], models.normal(1, 3, 900, 901)
    (found,) = outputs(run(runner, module, {"x": x}, tmp_path))
    assert found.tobytes() == module(x).tobytes()


def test_sizes_that_do_not_fit(runner: Path, modules, tmp_path: Path) -> None:
    module, inputs = modules["convolutional"]
    x = inputs["x"]
    for changed, said in (
        (np.ones((5, 3, 8, 8), np.float32), f"{BAD_SHAPE} n is 5, not from 1 to 4"),
        (np.ones((1, 4, 8, 8), np.float32), f"{BAD_SHAPE} extent 1 of input x cannot be 4"),
        (np.ones((1, 3, 8), np.float32), f"{BAD_SHAPE} input x has 4 axes, not 3"),
    ):
        assert run(runner, module, {"x": changed}, tmp_path) == said
    (empty,) = outputs(run(runner, module, {"x": x[:0]}, tmp_path))
    assert empty.shape == module(x[:0]).shape
    recurrent, given = modules["recurrent"]
    assert "time is 65" in run(runner, recurrent, {**given, "x": np.ones((65, 2, 3), np.float32)}, tmp_path)


def test_indices_out_of_range(runner: Path, modules, tmp_path: Path) -> None:
    module, _ = modules["lookup"]
    said = run(runner, module, {"ids": np.array([1, 9, 0])}, tmp_path)
    assert said == f"{OUT_OF_RANGE} the model stopped: a value is out of range in y: the index is 9, and there are 7 elements"


def test_values_of_inputs_that_give_sizes(runner: Path, tmp_path: Path) -> None:
    module = tcomp.compile(models.model([("Reshape", ["x", "s"], ["y"])], {"x": [6], "s": (7, [2])}, {"y": [None, None]}, {}))
    x = np.arange(6, dtype=np.float32)
    (found,) = outputs(run(runner, module, {"x": x, "s": np.array([3, -1])}, tmp_path))
    np.testing.assert_array_equal(found, x.reshape(3, 2))
    bad = {"x": x, "s": np.array([4, -1])}
    with pytest.raises(InputError):
        module.run(bad)
    assert str(run(runner, module, bad, tmp_path)).startswith(f"{BAD_SHAPE} ")


def test_damaged_files(tmp_path: Path) -> None:
    """`python -m tests.fuzz.libtcomp` tries as many as you like."""
    program = fuzz.build(tmp_path, Path(fuzz.__file__).with_name("libtcomp_driver.c"))
    tally = fuzz.check(program, range(300))
    assert tally[0] and sum(tally.values()) == 300


class Session:
    """One of the library, with its model."""

    def __init__(self, library: ctypes.CDLL, path: Path, threads: int = 1) -> None:
        self.library, self.model, self.handle, why = library, ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(MESSAGE)
        code = library.tcomp_model_load(str(path).encode(), threads, 0, ctypes.byref(self.model), why, MESSAGE)
        assert not code, why.value
        assert not library.tcomp_session_new(self.model, ctypes.byref(self.handle), why, MESSAGE)

    def set_input(self, n: int, array: np.ndarray) -> int:
        shape = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
        return int(self.library.tcomp_session_set_input(self.handle, n, ctypes.c_void_p(array.ctypes.data), shape, array.ndim))

    def run(self) -> int:
        return int(self.library.tcomp_session_run(self.handle))

    def output(self, n: int) -> bytes:
        return ctypes.string_at(self.library.tcomp_session_output(self.handle, n), self.library.tcomp_session_output_bytes(self.handle, n))

    def close(self) -> None:
        self.library.tcomp_session_free(self.handle)
        self.library.tcomp_model_free(self.model)


def test_what_it_says_of_a_model(library: ctypes.CDLL, modules, tmp_path: Path) -> None:
    module, _ = modules["convolutional"]
    module.save(tmp_path / "net.tcomp")
    s = Session(library, tmp_path / "net.tcomp")
    for kind, specs in enumerate((module.inputs, module.outputs)):
        assert library.tcomp_model_count(s.model, kind) == len(specs)
        for n, spec in enumerate(specs):
            assert library.tcomp_model_name(s.model, kind, n).decode() == spec.name
            assert library.tcomp_model_type(s.model, kind, n).decode() == spec.dtype
            assert (library.tcomp_model_rank(s.model, kind, n), library.tcomp_model_element_bytes(s.model, kind, n)) == (len(spec.shape), 4)
            for axis, extent in enumerate(spec.shape):
                name = library.tcomp_model_extent_name(s.model, kind, n, axis)
                assert (library.tcomp_model_extent(s.model, kind, n, axis) if name is None else name.decode()) == extent
    assert library.tcomp_model_name(s.model, 0, 1) is None and library.tcomp_model_rank(s.model, 2, 0) == -1
    s.close()


def test_memory_of_the_caller(library: ctypes.CDLL, modules, tmp_path: Path) -> None:
    module, inputs = modules["convolutional"]
    module.save(tmp_path / "net.tcomp")
    s, x = Session(library, tmp_path / "net.tcomp"), inputs["x"]
    wanted = module(x)
    y = np.full(wanted.size + 2, 7, np.float32)
    place = ctypes.c_void_p(y.ctypes.data + 4)
    assert s.run() == BAD_ARGUMENT and b"input x is missing" in library.tcomp_session_message(s.handle)
    assert (
        not s.set_input(0, x) and not library.tcomp_session_set_output(s.handle, 0, place, ctypes.c_size_t(wanted.nbytes)) and not s.run()
    )
    assert y[1:-1].tobytes() == wanted.tobytes() and y[0] == y[-1] == 7 and s.output(0) == wanted.tobytes()
    library.tcomp_session_set_output(s.handle, 0, place, ctypes.c_size_t(wanted.nbytes - 1))
    assert s.run() == BAD_ARGUMENT and library.tcomp_session_output(s.handle, 0) is None
    library.tcomp_session_set_output(s.handle, 0, None, ctypes.c_size_t(0))
    assert not s.run() and s.output(0) == wanted.tobytes()
    assert (
        library.tcomp_session_set_input(s.handle, 0, ctypes.c_void_p(x.ctypes.data + 1), (ctypes.c_int64 * 4)(*x.shape), 4) == BAD_ARGUMENT
    )
    assert library.tcomp_session_set_input(s.handle, 1, None, None, 0) == BAD_ARGUMENT
    assert library.tcomp_session_run(None) == BAD_ARGUMENT and library.tcomp_session_message(None) == b"the session is NULL"
    s.close()


def test_sessions_of_several_threads_share_a_model(library: ctypes.CDLL, modules, tmp_path: Path) -> None:
    module, inputs = modules["residual"]
    module.save(tmp_path / "net.tcomp")
    first = Session(library, tmp_path / "net.tcomp", threads=2)
    x, wrong = inputs["in put/0"], []

    def work(scale: int) -> None:
        s = Session.__new__(Session)
        s.library, s.model, s.handle = library, first.model, ctypes.c_void_p()
        assert not library.tcomp_session_new(s.model, ctypes.byref(s.handle), None, ctypes.c_size_t(0))
        mine = x * np.float32(scale)
        wanted = module(mine).tobytes()
        for _ in range(50):
            if s.set_input(0, mine) or s.run() or s.output(0) != wanted:
                wrong.append(scale)
        library.tcomp_session_free(s.handle)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first.close()
    assert not wrong


def test_what_needs_more_than_its_code_is_refused(library: ctypes.CDLL, tmp_path: Path) -> None:
    step = {"input": "x", "output": "y"}
    native = native_models.packed(native_models.affine_code(), {**native_models.AFFINE_MANIFEST, "state": [step]}, [("w", native_models.W)])
    (tmp_path / "net.tcomp").write_bytes(native)
    model, why = ctypes.c_void_p(), ctypes.create_string_buffer(MESSAGE)
    assert library.tcomp_model_load(str(tmp_path / "net.tcomp").encode(), 1, 0, ctypes.byref(model), why, MESSAGE) == 5
    assert why.value == b"the model has host steps or state"


def test_files_that_are_no_models(library: ctypes.CDLL, modules, tmp_path: Path) -> None:
    module, _ = modules["lookup"]
    module.save(tmp_path / "net.tcomp")
    data = bytearray((tmp_path / "net.tcomp").read_bytes())
    data[8] = 2
    (tmp_path / "old.tcomp").write_bytes(data)
    data[8], data[-1] = 3, data[-1] ^ 1
    (tmp_path / "notes.tcomp").write_bytes(data)
    (tmp_path / "empty").touch()
    model, why = ctypes.c_void_p(), ctypes.create_string_buffer(MESSAGE)
    for name, flags, threads, code, message in (
        ("none", 0, 0, 3, "No such file"), (".", 0, 0, 3, "no regular file"), ("empty", 0, 0, 3, "it is empty"), ("notes.tcomp", 1, 0, 4, "its notes"),
        ("old.tcomp", 0, 0, 5, "layout version 2, this library reads version 3"), ("net.tcomp", 0, 5000, BAD_ARGUMENT, "0 to 4096"),
    ):  # fmt: skip
        assert library.tcomp_model_load(str(tmp_path / name).encode(), threads, flags, ctypes.byref(model), why, MESSAGE) == code
        assert message in why.value.decode()
        assert library.tcomp_model_load(str(tmp_path / name).encode(), threads, flags, ctypes.byref(model), None, 0) == code
    assert not library.tcomp_model_load(str(tmp_path / "notes.tcomp").encode(), 0, 0, ctypes.byref(model), why, MESSAGE)
    library.tcomp_model_free(model)
    library.tcomp_model_free(None)
    library.tcomp_session_free(None)


def test_a_run_is_stopped(library: ctypes.CDLL, tmp_path: Path) -> None:
    """A loop of many turns, from another thread; the session runs again afterwards."""
    module, steps = tcomp.compile(models.recurrent(), dims={"time": (1, 1 << 24)}, threads=1), 1 << 21
    module.save(tmp_path / "net.tcomp")
    s, state, statuses = Session(library, tmp_path / "net.tcomp"), np.zeros((1, 2, 4), np.float32), list[int]()
    x = np.zeros((steps, 2, 3), np.float32)
    assert not (s.set_input(0, x) or s.set_input(1, state) or s.set_input(2, state))
    runner = threading.Thread(target=lambda: statuses.append(s.run()))
    runner.start()
    while runner.is_alive():
        library.tcomp_session_stop(s.handle)
        time.sleep(0.001)
    assert statuses == [STOPPED] and library.tcomp_session_output(s.handle, 0) is None
    assert not s.set_input(0, x[:5]) and not s.run()
    assert s.output(0) == module.run({"x": x[:5], "h": state, "c": state})["y"].tobytes()
    s.close()


def test_a_forked_child_starts_threads_of_its_own(modules, tmp_path: Path) -> None:
    modules["residual"][0].save(tmp_path / "net.tcomp")
    (tmp_path / "fork.c").write_text("""
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "libtcomp.h"
int main(void) {
  static float image[3 * 16 * 16];
  const int64_t shape[] = {1, 3, 16, 16};
  float mine[10];
  int ended;
  tcomp_model *model;
  tcomp_session *session;
  for (int i = 0; i < 3 * 16 * 16; i++) image[i] = (float)(i % 7);
  if (tcomp_model_load("net.tcomp", 3, 0, &model, NULL, 0) || tcomp_session_new(model, &session, NULL, 0)) return 1;
  if (tcomp_session_set_input(session, 0, image, shape, 4) || tcomp_session_run(session)) return 1;
  memcpy(mine, tcomp_session_output(session, 0), sizeof mine);
  pid_t child = fork();
  if (!child) {
    tcomp_model_after_fork(model);
    _exit(tcomp_session_run(session) || memcmp(mine, tcomp_session_output(session, 0), sizeof mine));
  }
  tcomp_session_free(session);
  tcomp_model_free(model);
  return waitpid(child, &ended, 0) != child || !WIFEXITED(ended) || WEXITSTATUS(ended) ? 2 : 0;
}""")
    program = fuzz.build(tmp_path, tmp_path / "fork.c", SOURCE, flags=["-D_GNU_SOURCE"])
    assert subprocess.run([str(program)], cwd=tmp_path, timeout=60, check=False).returncode == 0
