"""How code gets into the process: the code that was asked for, whatever happens to descriptors, files and folders meanwhile."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcomp.errors import ArtifactError
from tcomp.runtime import Module
from tcomp.runtime.native_code import open_library
from tests.runtime import native_models as models

X = np.arange(8, dtype=np.float32).reshape(2, 4)
TWO = np.float32(2)


def check(module: Any, sign: int = 1) -> None:
    assert np.array_equal(module(X, TWO), 2 * X + sign * models.W)


def in_a_process(program: str, *arguments: object) -> None:
    """Run a program that has the paths of both models: y = s * x + w and y = s * x - w."""
    text = f"import os, sys\nimport numpy as np\nfrom tests.runtime.test_native_code import *\n{program}"
    command = [sys.executable, "-c", text, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


@pytest.fixture
def paths(affine: bytes, difference: bytes, tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "sum.tcomp").write_bytes(affine)
    (tmp_path / "difference.tcomp").write_bytes(difference)
    return tmp_path / "sum.tcomp", tmp_path / "difference.tcomp"


def test_a_module_runs_its_own_code_after_all_descriptors_were_closed(paths: tuple[Path, Path]) -> None:
    """What a daemon does when it starts. A library of the same name, /proc/self/fd/3, was taken for the one that had it first."""
    in_a_process(
        """
first = Module.load(sys.argv[1], threads=1)
os.closerange(3, 256)
second = Module.load(sys.argv[2], threads=1)
check(first), check(second, -1), check(first)
del first
check(second, -1)
""",
        *paths,
    )


def test_loading_keeps_no_descriptor_and_closes_none_of_others(paths: tuple[Path, Path]) -> None:
    check(Module.load(paths[0]))  # the first of a process makes the pipe by which Ctrl-C is heard
    before = os.listdir("/proc/self/fd")
    module = Module.load(paths[0])
    assert os.listdir("/proc/self/fd") == before
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
    check(module)
    del module
    for other in others:
        os.close(other)  # it is still there


def test_a_thousand_modules_need_no_descriptors(paths: tuple[Path, Path]) -> None:
    in_a_process(
        """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
modules = [Module.load(sys.argv[1 + number % 2]) for number in range(1000)]
for number, module in enumerate(modules):
    check(module, 1 - number % 2 * 2)
""",
        *paths,
    )


def test_another_library_under_the_same_name_is_not_taken_for_it(affine: bytes, difference: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", bytes)  # zeros: each library has the same spelling
    first = Module.load(affine)
    with pytest.raises(ArtifactError, match="other code"):
        Module.load(difference)
    check(first)


def test_code_in_a_file_is_written_once_and_then_used_by_all(affine: bytes, difference: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.so"
    first = Module.load(affine, code_path=path)
    before = path.stat()
    second = Module.load(affine, code_path=os.fspath(path))
    assert path.stat() == before and str(path) in Path("/proc/self/maps").read_text()
    third = Module.load(difference, code_path=path)  # mapped files do not change: another one takes the name
    assert path.stat().st_ino != before.st_ino and os.listdir(tmp_path) == ["model.so"]
    check(first), check(second), check(third, -1)


def test_processes_share_the_file_of_the_code(paths: tuple[Path, Path], tmp_path: Path) -> None:
    """It was removed and written again by every process, and those that loaded it meanwhile found it incomplete, or changing."""
    program = "import sys\nfrom tests.runtime.test_native_code import *\nfor _ in range(40): check(Module.load(sys.argv[1], code_path=sys.argv[2]))"
    command = [sys.executable, "-c", program, paths[0], tmp_path / "model.so"]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) for _ in range(4)]
    assert [process.communicate(timeout=120)[1] for process in started] == [""] * 4


@pytest.mark.parametrize("kind", ["writable by others", "link", "other bytes"])
def test_a_file_that_others_can_change_is_replaced(affine: bytes, affine_code: bytes, tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "model.so", tmp_path / "elsewhere"
    (target if kind == "link" else path).write_bytes(affine_code if kind != "other bytes" else affine_code[:-1])
    if kind == "link":
        path.symlink_to(target)
    if kind == "writable by others":
        path.chmod(0o666)
    before = target.stat() if target.exists() else None
    check(Module.load(affine, code_path=path))
    status = path.lstat()
    assert stat.S_ISREG(status.st_mode) and not status.st_mode & 0o022 and path.read_bytes() == affine_code
    assert before is None or target.stat() == before


@pytest.mark.parametrize(
    ("path", "message"), [("a\0b", "null"), ("missing/model.so", "No such file"), (".", "cannot write"), ("x" * 300, "name too long")]
)
def test_paths_that_cannot_be_written(affine: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match=message):
        Module.load(affine, code_path=path)
    assert os.listdir(tmp_path) == []


def refuse(*_: Any) -> int:
    raise OSError("not permitted")


def test_without_memory_files_code_is_loaded_from_a_temporary_file(affine: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))
    check(Module.load(affine))
    assert os.listdir(tmp_path) == []


def test_without_any_place_for_the_code_there_is_a_message(affine: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path / "missing"))
    with pytest.raises(
        ArtifactError, match=r"not permitted, as a memory file; (.|\n)*No such file(.|\n)*, as a temporary file(.|\n)*TMPDIR"
    ):
        Module.load(affine)


@pytest.mark.parametrize("code", [b"", b"\x7fELF", b"no library" * 1000])
def test_what_is_no_library(code: bytes) -> None:
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        open_library(code)


def hidden(*mounts: str) -> list[str]:
    """The start of a command that runs with other file systems mounted; skips the test where that is not permitted."""
    command = ["unshare", "-m", "sh", "-c", f'{" && ".join(mounts)} && exec "$@"', "sh"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no permission to mount file systems")
    return command


def test_without_proc_a_model_runs_or_says_what_it_misses(paths: tuple[Path, Path], tmp_path: Path, affine_code: bytes) -> None:
    (tmp_path / "avx.tcomp").write_bytes(
        models.packed(affine_code, models.AFFINE_MANIFEST, [("w", models.W)], features=["avx2" if "x86" in models.TRIPLE else "sve"])
    )
    program = """
from tests.runtime.test_native_code import *
assert not os.path.exists("/proc/self")
check(Module.load(sys.argv[1]))
with pytest.raises(ArtifactError, match="does not tell"):
    Module.load(sys.argv[2])
"""
    command = [*hidden("mount -t tmpfs none /proc"), sys.executable, "-c", program, paths[0], tmp_path / "avx.tcomp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("options", "message"), [("noexec", "failed to map"), ("size=4k", "No space left")])
def test_temporary_folders_that_cannot_be_used(paths: tuple[Path, Path], tmp_path: Path, options: str, message: str) -> None:
    """Asked for only where there is no /proc, or no memory files."""
    program = """
from tests.runtime.test_native_code import *
with pytest.raises(ArtifactError, match=f"(?s){sys.argv[2]}.*TMPDIR"):
    Module.load(sys.argv[1])
assert os.listdir(os.environ["TMPDIR"]) == []
"""
    (folder := tmp_path / "small").mkdir()
    command = hidden("mount -t tmpfs none /proc", f"mount -t tmpfs -o {options} none {folder}")
    command += [sys.executable, "-c", program, os.fspath(paths[0]), message]
    environment = {**os.environ, "TMPDIR": os.fspath(folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
