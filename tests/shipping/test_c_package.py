"""C packages: built by C compilers, run under sanitizers, with the bits of Python; and their interface, called one function at a time."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tcomp
from tcomp.errors import InputError, TcompError
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.runtime.workspace import HUGE_PAGE
from tcomp.shipping.c_interface import CInterface, package_name
from tcomp.shipping.c_package import write_c_package
from tcomp.target import Target
from tests.shipping import conftest as models

STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
SANITIZED = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


class Model(ctypes.Structure):
    _fields_ = [("arena", ctypes.c_void_p), ("arena_bytes", ctypes.c_int64), ("index", ctypes.c_int64), ("extent", ctypes.c_int64)]
    _fields_ += [("reserved", ctypes.c_int64 * 14)]


def run(*command: object, folder: Path, status: int = 0) -> str:
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def packed(modules, name: str, folder: Path, **options) -> Path:
    write_c_package(modules[name][0].artifact, folder / name, name, **options)
    return folder / name


def library(modules, name: str, folder: Path, **options) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(packed(modules, name, folder, **options) / f"lib/lib{name}.so"))
    getattr(loaded, f"{name}_message").restype = ctypes.c_char_p
    if hasattr(loaded, f"{name}_arena_bytes"):
        getattr(loaded, f"{name}_arena_bytes").restype = ctypes.c_int64
    return loaded


def at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def size(n: int) -> ctypes.c_int64:
    return ctypes.c_int64(n)


EXAMPLES = {"residual": [], "recurrent": [5], "convolutional": [2, 10, 7], "detector": [], "lookup": []}


@needs_cc
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_computes_the_bits_of_python(name: str, modules, tmp_path: Path) -> None:
    module, inputs = modules[name]
    folder = packed(modules, name, tmp_path, weights="beside" if name == "recurrent" else "inside")
    files = []
    for n, array in enumerate(inputs.values()):
        array.tofile(tmp_path / f"in{n}.bin")
        files.append(tmp_path / f"in{n}.bin")
    weights = [f'-DWEIGHTS="{folder}/lib/{name}.weights"']
    run(
        "cc",
        "-std=c99",
        *STRICT,
        *SANITIZED,
        *weights,
        "-Iinclude",
        "example/main.c",
        f"lib/lib{name}.a",
        "-lpthread",
        "-o",
        "main",
        folder=folder,
    )
    printed = run(folder / "main", *EXAMPLES[name], *files, folder=tmp_path)
    c = CInterface(name, module.manifest, module.artifact.weights.nbytes, False, True)
    for tensor, wanted in zip(c.outputs, module.run(inputs).values(), strict=True):
        assert (tmp_path / f"{tensor.name}.bin").read_bytes() == wanted.tobytes()
        assert f"{tensor.name} ({wanted.size} values)" in printed
    run(folder / "main", folder=tmp_path)  # with inputs that it makes up
    if EXAMPLES[name]:
        for wrong in ("x.bin", "-1", "3x", ""):
            assert f"{wrong} is not a size (" in run(folder / "main", wrong, folder=tmp_path, status=2)
    if name == "residual":
        assert "none.bin: No such file" in run(folder / "main", "none.bin", folder=tmp_path, status=2)
        (tmp_path / "short.bin").write_bytes(bytes(100))
        wanted = "short.bin: not a file of 768 values of 4 bytes, 3072 bytes in all"
        assert wanted in run(folder / "main", "short.bin", folder=tmp_path, status=2)


@needs_cc
def test_the_header_is_one_of_cpp_as_well(modules, tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    for name in EXAMPLES:
        folder = packed(modules, name, tmp_path)
        run("c++", "-x", "c++", *STRICT, "-fsyntax-only", f"include/{name}.h", folder=folder)


def test_signatures(modules, tmp_path: Path) -> None:
    """Names of the model become names of C; free sizes are arguments, as are counted extents."""
    texts = {name: " ".join((packed(modules, name, tmp_path) / f"include/{name}.h").read_text().split()) for name in EXAMPLES}
    wanted = "int residual_run(residual *model, const float in_put_0[1 * 3 * 16 * 16], float float_2[1 * 10]);"
    assert wanted in texts["residual"] and "#define RESIDUAL_ARENA_BYTES" in texts["residual"]
    assert (
        "int convolutional_run(convolutional *model, int64_t n, int64_t h, int64_t w, const float *x, float *y);" in texts["convolutional"]
    )
    assert "int64_t *kept, int64_t kept_shape[2], float *chosen, int64_t chosen_shape[3]);" in texts["detector"]


@needs_cc
def test_two_models_in_one_program(modules, tmp_path: Path) -> None:
    """The static libraries share no names."""
    a, b = packed(modules, "residual", tmp_path), packed(modules, "lookup", tmp_path)
    (tmp_path / "both.c").write_text("""
#include <stdio.h>
#include "lookup.h"
#include "residual.h"
int main(void) {
  static float image[3 * 16 * 16], classes[10], rows[6];
  static char arena[RESIDUAL_ARENA_BYTES];
  const int64_t ids[3] = {1, 9, 0};
  residual model = {.arena = arena, .arena_bytes = sizeof arena};
  lookup table = {0};
  printf("%d ", residual_run(&model, image, classes));
  printf("%s", lookup_message(lookup_run(&table, ids, rows)));
  printf(": %d of %d", (int)table.index, (int)table.extent);
  return 0;
}""")
    paths = [f"-I{a}/include", f"-I{b}/include", f"{a}/lib/libresidual.a", f"{b}/lib/liblookup.a"]
    run("cc", "-std=c99", *STRICT, *SANITIZED, "both.c", *paths, "-lpthread", "-o", "both", folder=tmp_path)
    assert run(tmp_path / "both", folder=tmp_path) == "0 the model stopped: a value is out of range in y: 9 of 7"


@needs_cc
def test_cmake_and_pkg_config_find_it(modules, tmp_path: Path) -> None:
    folder = packed(modules, "lookup", tmp_path)
    if shutil.which("pkg-config") is not None:
        flags = run("env", f"PKG_CONFIG_PATH={folder}/lib/pkgconfig", "pkg-config", "--cflags", "--libs", "lookup", folder=tmp_path).split()
        run("cc", folder / "example/main.c", *flags, f"-Wl,-rpath,{folder}/lib", "-o", "main", folder=tmp_path)
        assert run(tmp_path / "main", folder=tmp_path).startswith("y (6 values):")
    if shutil.which("cmake") is not None:
        run("cmake", "-S", folder / "example", "-B", "build", folder=tmp_path)
        run("cmake", "--build", "build", folder=tmp_path)
        assert run(tmp_path / "build/main", folder=tmp_path).startswith("y (6 values):")


def test_memory_of_the_caller(modules, tmp_path: Path) -> None:
    """At any address; of a byte less than is needed, nothing is used."""
    module, inputs = modules["convolutional"]
    c = library(modules, "convolutional", tmp_path)
    x, wanted = inputs["x"], module(inputs["x"])
    need = c.convolutional_arena_bytes(size(2), size(10), size(7)) - 64
    room, y = np.full(need + 256, 7, np.uint8), np.empty_like(wanted)
    aligned = -room.ctypes.data % 64
    for skew in (0, 1, 63):
        model = Model(room.ctypes.data + aligned + skew, need + -skew % 64)
        arguments = [ctypes.byref(model), size(2), size(10), size(7), at(x), at(y)]
        assert c.convolutional_run(*arguments) == 0
        np.testing.assert_array_equal(y, wanted)
        model.arena_bytes -= 1
        status = c.convolutional_run(*arguments)
        assert (status == 3) == (need > 0)
    assert (room[:aligned] == 7).all() and (room[aligned + 64 + need :] == 7).all()
    assert c.convolutional_arena_bytes(size(9), size(10), size(7)) == -16


def test_large_arenas(modules, tmp_path: Path) -> None:
    """They are of huge pages, where the system has such."""
    module, _ = modules["convolutional"]
    c, x = library(modules, "convolutional", tmp_path), models.normal(1, 3, 900, 901)
    assert c.convolutional_arena_bytes(size(1), size(900), size(901)) > 2 * HUGE_PAGE
    wanted, model = module(x), Model()
    y = np.empty_like(wanted)
    for h in (2, 900, 2, 900):
        assert c.convolutional_run(ctypes.byref(model), size(1), size(h), size(901), at(x), at(y)) == 0
    assert y.tobytes() == wanted.tobytes()
    c.convolutional_free(ctypes.byref(model))


def test_sizes_and_messages(modules, tmp_path: Path) -> None:
    c, shape = library(modules, "convolutional", tmp_path), (ctypes.c_int64 * 4)()
    assert c.convolutional_shapes(size(2), size(11), size(7), shape) == 0 and [*shape] == [2, 4, 6, 4]
    assert c.convolutional_shapes(size(2), size(11), size(7), None) == 0
    assert c.convolutional_message(c.convolutional_shapes(size(5), size(11), size(7), shape)) == b"n must be between 1 and 4"
    assert c.convolutional_message(c.convolutional_shapes(size(1), size(1 << 40), size(1 << 40), None)).startswith(
        (b"these sizes", b"h must be")
    )
    assert c.convolutional_message(0) == b"no error"
    for unknown in (-1, 9, 1000, 2**31 - 1):
        assert c.convolutional_message(unknown) == b"unknown status"
    model, x = Model(), np.zeros(3, np.float32)
    assert c.convolutional_run(ctypes.byref(model), size(1), size(1), size(1), at(x), None) == 4
    assert c.convolutional_run(None, size(1), size(1), size(1), at(x), at(x)) == 4
    c.convolutional_free(None)


def test_counted_extents(modules, tmp_path: Path) -> None:
    module, inputs = modules["detector"]
    c, wanted = library(modules, "detector", tmp_path), module.run(inputs)
    kept_shape, chosen_shape = (ctypes.c_int64 * 2)(), (ctypes.c_int64 * 3)()
    assert c.detector_shapes(kept_shape, chosen_shape) == 0
    kept, chosen, model = np.zeros([*kept_shape], np.int64), np.zeros([*chosen_shape], np.float32), Model()
    for shapes in ((kept_shape, chosen_shape), (None, None)):
        arguments = [at(inputs["boxes"]), at(inputs["logits"]), at(kept), shapes[0], at(chosen), shapes[1]]
        assert c.detector_run(ctypes.byref(model), *arguments) == 0
    assert tuple(kept_shape) == wanted["kept"].shape and tuple(chosen_shape) == wanted["chosen"].shape
    assert kept.tobytes().startswith(wanted["kept"].tobytes()) and chosen.tobytes().startswith(wanted["chosen"].tobytes())
    c.detector_free(ctypes.byref(model))


def test_values_of_inputs_that_give_sizes(tmp_path: Path) -> None:
    reshape = models.model([("Reshape", ["x", "s"], ["y"])], {"x": [6], "s": (7, [2])}, {"y": [None, None]}, {})
    module = tcomp.compile(reshape)
    write_c_package(module.artifact, tmp_path / "r", "r")
    c = ctypes.CDLL(str(tmp_path / "r/lib/libr.so"))
    c.r_message.restype = ctypes.c_char_p
    x, y, s, shape, model = np.arange(6, dtype=np.float32), np.zeros(6, np.float32), np.array([2, 3]), (ctypes.c_int64 * 2)(), Model()
    assert c.r_shapes(at(s), shape) == 0 and [*shape] == [2, 3]
    assert c.r_run(ctypes.byref(model), at(x), at(s), at(y)) == 0
    np.testing.assert_array_equal(x, y)
    s[:] = 4, 5
    assert c.r_message(c.r_run(ctypes.byref(model), at(x), at(s), at(y))) not in (b"no error", b"unknown status")
    assert c.r_shapes(None, shape) == 4
    c.r_free(ctypes.byref(model))


def test_weights_beside(modules, tmp_path: Path) -> None:
    module, inputs = modules["residual"]
    c, model, y = library(modules, "residual", tmp_path, weights="beside"), Model(), np.zeros((1, 10), np.float32)
    arguments = [ctypes.byref(model), at(inputs["in put/0"]), at(y)]
    assert c.residual_message(c.residual_run(*arguments)).startswith(b"the weights are not loaded")
    assert c.residual_open(ctypes.byref(model), b"/nowhere") == c.residual_open(ctypes.byref(model), __file__.encode()) == 6
    path = str(tmp_path / "residual/lib/residual.weights").encode()
    for _ in range(2):
        assert c.residual_open(ctypes.byref(model), path) == 0
    assert c.residual_run(*arguments) == 0
    np.testing.assert_array_equal(y, module(inputs["in put/0"]))
    c.residual_free(ctypes.byref(model))
    assert c.residual_run(*arguments) == 6


def test_threads(modules, tmp_path: Path) -> None:
    module, inputs = modules["residual"]
    c, model, y = library(modules, "residual", tmp_path), Model(), np.zeros((1, 10), np.float32)
    for threads in (2, 3, 1, 2):
        assert c.residual_set_threads(ctypes.byref(model), threads) == 0
        assert c.residual_run(ctypes.byref(model), at(inputs["in put/0"]), at(y)) == 0
        np.testing.assert_array_equal(y, module(inputs["in put/0"]))
    assert c.residual_set_threads(ctypes.byref(model), 0) == c.residual_set_threads(ctypes.byref(model), 4097) == 5
    c.residual_free(ctypes.byref(model))
    assert not any(model.reserved[9:])


@needs_cc
def test_a_forked_child_starts_threads_of_its_own(modules, tmp_path: Path) -> None:
    folder = packed(modules, "residual", tmp_path)
    (tmp_path / "fork.c").write_text("""
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "residual.h"
int main(void) {
  static float image[3 * 16 * 16], mine[10], its[10];
  int ended;
  residual model = {0};
  for (int i = 0; i < 3 * 16 * 16; i++) image[i] = (float)(i % 7);
  if (residual_set_threads(&model, 3) || residual_run(&model, image, mine)) return 1;
  pid_t child = fork();
  if (!child) {
    residual_after_fork(&model);
    int status = residual_run(&model, image, its) || memcmp(mine, its, sizeof mine);
    residual_free(&model);
    _exit(status);
  }
  residual_free(&model);
  return waitpid(child, &ended, 0) != child || !WIFEXITED(ended) || WEXITSTATUS(ended) ? 2 : 0;
}""")
    run(
        "cc",
        "-std=gnu99",
        *STRICT,
        f"-I{folder}/include",
        "fork.c",
        folder / "lib/libresidual.a",
        "-lpthread",
        "-o",
        "fork",
        folder=tmp_path,
    )
    run("timeout", 60, tmp_path / "fork", folder=tmp_path)


def test_a_run_is_stopped(tmp_path: Path) -> None:
    """A loop of many turns, from another thread."""
    module = tcomp.compile(models.recurrent(), dims={"time": (1, 1 << 24)})
    write_c_package(module.artifact, tmp_path / "long", "long_net")
    c, model = ctypes.CDLL(str(tmp_path / "long/lib/liblong_net.so")), Model()
    steps = 1 << 21
    x, state = np.zeros((steps, 2, 3), np.float32), np.zeros(8, np.float32)
    y, ends, statuses = np.zeros((steps, 8), np.float32), np.zeros((2, 8), np.float32), []
    arguments = [ctypes.byref(model), size(steps), at(x), at(state), at(state), at(y), at(ends[0]), at(ends[1])]
    runner = threading.Thread(target=lambda: statuses.append(c.long_net_run(*arguments)))
    runner.start()
    while runner.is_alive():
        c.long_net_stop(ctypes.byref(model))
        time.sleep(0.001)
    assert statuses == [1]
    c.long_net_free(ctypes.byref(model))


def test_packages_for_another_processor(tmp_path: Path) -> None:
    """Cross-compiled: every relocation of the static library is one of the processor's."""
    artifact, _ = compile_model(models.residual(), CompileOptions(Target.parse("cpu -march=aarch64")))
    write_c_package(artifact, tmp_path / "arm", "arm")
    assert (tmp_path / "arm/lib/libarm.so").read_bytes()[18:20] == b"\xb7\0"
    if shutil.which("readelf") is not None:
        printed = run("readelf", "-rsW", "lib/libarm.a", folder=tmp_path / "arm")
        assert "R_AARCH64_ADR_PRE" in printed and "R_X86" not in printed and "arm_run" in printed


@pytest.mark.parametrize(
    ("text", "given", "name"),
    [
        ("resnet50", True, "resnet50"), ("My-Net v2", False, "my_net_v2"), ("3d", False, "m_3d"), ("ü", False, "model"), ("int", False, "int_2"),
        ("x" * 64, True, "x" * 64),
    ],
)  # fmt: skip
def test_names(text: str, given: bool, name: str) -> None:
    assert package_name(text, given) == name


@pytest.mark.parametrize("text", ["", "a-b", "3d", "int", "a b", "x" * 65, "_x", "malloc", "ü", "a\n"])
def test_bad_names(text: str) -> None:
    with pytest.raises(InputError, match="cannot be the name of a package") as caught:
        package_name(text, given=True)
    assert package_name(caught.value.hint.removeprefix("--name "), given=True)


def test_folders_appear_whole_or_not_at_all(modules, tmp_path: Path) -> None:
    artifact = modules["lookup"][0].artifact
    (tmp_path / "empty").mkdir()
    write_c_package(artifact, tmp_path / "empty", "x")
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "file").touch()
    for name in ("empty", "file", "absent/inner", "nul\0"):
        with pytest.raises(TcompError, match="cannot write the folder"):
            write_c_package(artifact, tmp_path / name, "x")
    for version in ("", "1.0b", "1..2", "-1"):
        with pytest.raises(InputError, match="is not a version"):
            write_c_package(artifact, tmp_path / "new", "x", version)
    (tmp_path / "file").unlink()
    assert sorted(tmp_path.rglob("*")) == before
