"""Every system call of loader, writers and cache fails once: it works all the same, or is refused with a clear error, and nothing is left
behind or half written."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tcomp import cache
from tcomp.errors import TcompError
from tcomp.runtime import Module, read_artifact, write_artifact
from tests.runtime import native_models as models
from tests.runtime.failing_calls import ERRORS, failing

MOST = 200  # calls that one operation makes, at most
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def packed(weight: float) -> bytes:
    return models.packed(models.affine_code(), models.AFFINE_MANIFEST, [("w", np.full(4, weight, np.float32)), ("v", np.zeros(5000))])


@pytest.fixture(scope="module")
def versions() -> tuple[bytes, bytes]:
    return packed(1), packed(2)


def run(module: Module) -> None:
    assert np.array_equal(module.run({"x": X, "s": np.float32(3)})["y"], 3 * X + 1)


def load_path(folder: Path, versions: tuple[bytes, bytes]) -> None:
    run(Module.load(folder / "model", threads=1))


def load_and_verify(folder: Path, versions: tuple[bytes, bytes]) -> None:
    run(Module.load(folder / "model", threads=2, verify=True))


def load_into_memory(folder: Path, versions: tuple[bytes, bytes]) -> None:
    run(Module.load(folder / "model", threads=1, mmap=False))


def load_bytes(folder: Path, versions: tuple[bytes, bytes]) -> None:
    run(Module.load(versions[0], threads=1))


def load_from_code_path(folder: Path, versions: tuple[bytes, bytes]) -> None:
    run(Module.load(folder / "model", threads=1, code_path=folder / "code.so"))


def save(folder: Path, versions: tuple[bytes, bytes]) -> None:
    read_artifact(versions[1]).save(folder / "model")


def write(folder: Path, versions: tuple[bytes, bytes]) -> None:
    weights = [("w", np.full(4, 2, np.float32)), ("v", np.zeros(5000))]
    write_artifact(folder / "model", read_artifact(versions[1]).code, weights, models.AFFINE_MANIFEST)


def extract(folder: Path, versions: tuple[bytes, bytes]) -> None:
    read_artifact(versions[0]).extract(folder / "parts")


def keep(folder: Path, versions: tuple[bytes, bytes]) -> None:
    cache.store("kind", "a" * 64, {"some": "record"})
    assert cache.load("kind", "a" * 64) in (None, {"some": "record"})
    assert cache.recall("kind", "b" * 64, lambda: [1, 2]) == [1, 2]


def descriptors() -> list[str]:
    gc.collect()
    return sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}"))


@pytest.mark.parametrize(
    "operation", [load_path, load_and_verify, load_into_memory, load_bytes, load_from_code_path, save, write, extract, keep]
)
def test_a_call_that_fails(
    operation: Callable[..., None],
    versions: tuple[bytes, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    old, new = versions
    scratch, folder = tmp_path / "scratch", tmp_path / "models"
    for place in (scratch, folder, tmp_path / "cache"):
        place.mkdir()
    monkeypatch.setenv("TCOMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    (folder / "model").write_bytes(old)
    operation(folder, versions)  # what is imported or remembered by the first call is there from now on
    wanted = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")}
    (folder / "model").write_bytes(old)
    gc.freeze()  # collecting is quick then
    request.addfinalizer(gc.unfreeze)
    before, seen = descriptors(), set[str]()
    for code in ERRORS:
        for number in range(1, MOST):
            (folder / "model").write_bytes(old)
            with failing(number, code) as shim:
                try:
                    operation(folder, versions)
                    refused = None
                except TcompError as error:
                    refused = error
            if not shim.failed:
                assert refused is None
                break
            what = f"call {number}, {shim.failed}, fails with {errno.errorcode[code]}"
            seen.add(shim.failed)
            assert refused is None or refused.what, what
            del refused
            assert (folder / "model").read_bytes() in (old, new), what
            assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")} <= wanted, what
            assert descriptors() == before, what
        else:
            raise AssertionError(f"{operation.__name__} makes more than {MOST} calls")
    assert len(seen) >= 1 and "open" in seen or operation is load_bytes


def test_a_short_write_goes_on(versions: tuple[bytes, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: whole(descriptor, bytes(data)[:1000], offset))
    (tmp_path / "model").write_bytes(versions[0])
    write(tmp_path, versions)
    assert (tmp_path / "model").read_bytes() == versions[1]
