"""The artifact file: round trips, atomic writes, and every kind of damage."""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from tcomp.errors import ArtifactError
from tcomp.runtime import Module, plan_weights, read_artifact, write_artifact
from tcomp.runtime.artifact import scratch_file
from tests.runtime import native_models as models

CODE = b"\x7fELF stands for itself here"


def pack(weights: list[tuple[str, Any]] | None = None, **changes: Any) -> bytes:
    return models.packed(CODE, models.AFFINE_MANIFEST, [("w", models.W)] if weights is None else weights, **changes)


@given(st.lists(st.integers(0, 300), max_size=12))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_planned_weights_are_aligned_and_disjoint(sizes: list[int]) -> None:
    offsets = plan_weights(sizes)
    assert len(offsets) == len(sizes) and all(offset % 64 == 0 for offset in offsets)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(0 <= start - end < 64 for start, end in zip(offsets[1:], ends, strict=False))


def test_round_trip_through_path_bytes_and_open_file(tmp_path: Path) -> None:
    big = np.arange(5000, dtype=np.float64).reshape(50, 100)
    half = np.array([1.5, 2.0], ml_dtypes.bfloat16)
    weights = [("big", big), ("none", b""), ("half", half), ("raw", bytearray(b"abc"))]
    path = tmp_path / "model.tcomp"
    write_artifact(path, CODE, weights, models.AFFINE_MANIFEST)
    with tempfile.TemporaryFile() as file:
        write_artifact(file, CODE, weights, models.AFFINE_MANIFEST)
        artifacts = [read_artifact(path), read_artifact(str(path)), read_artifact(path.read_bytes()), read_artifact(file)]
    for artifact in artifacts:
        artifact.verify()
        assert artifact.code == CODE
        assert artifact.weight("big").tobytes() == big.tobytes() and artifact.weight("raw").tobytes() == b"abc"
        assert artifact.weight("half").tobytes() == half.tobytes() and artifact.weight("none").size == 0
        assert artifact.weights.ctypes.data % 64 == 0 and not artifact.weights.flags.writeable
        assert artifact.manifest == artifacts[0].manifest
    manifest = artifacts[0].manifest
    assert [str(spec) for spec in manifest.inputs] == ["x: float32[n, 4]", "s: float32[]"]
    assert (manifest.dims[0].name, manifest.dims[0].max, manifest.threads) == ("n", 4000000, 2)


def test_the_same_artifact_has_the_same_bytes_and_an_aligned_weights_section() -> None:
    data = pack()
    assert data == pack()
    assert np.frombuffer(data, np.uint64, 8, 16)[2] % 4096 == 0


def test_failed_writes_leave_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.tcomp"
    write_artifact(path, CODE, [], models.AFFINE_MANIFEST)
    before = path.read_bytes()
    with pytest.raises(ArtifactError, match=r"inputs\[0\]\.dtype"):
        write_artifact(path, CODE, [], {**models.AFFINE_MANIFEST, "inputs": [{"name": "x", "dtype": "float31", "shape": []}]})
    with pytest.raises(ArtifactError, match="not a contiguous buffer"):
        write_artifact(path, CODE, [("w", np.zeros((4, 4))[:, 1])], models.AFFINE_MANIFEST)
    with pytest.raises(ArtifactError, match="cannot write"):
        write_artifact(tmp_path / "missing" / "model.tcomp", CODE, [], models.AFFINE_MANIFEST)
    assert os.listdir(tmp_path) == ["model.tcomp"] and path.read_bytes() == before


def test_saving_over_a_mapped_file_does_not_disturb_it(tmp_path: Path) -> None:
    path = tmp_path / "model.tcomp"
    path.write_bytes(pack())
    old = read_artifact(path)
    read_artifact(pack([("w", np.full(4, 9, np.float32))])).save(path)
    assert old.weight("w").tobytes() == models.W.tobytes()
    assert read_artifact(path).weight("w").tobytes() == np.full(4, 9, np.float32).tobytes()
    old.save(path)
    assert path.read_bytes() == pack()


def test_extract(tmp_path: Path) -> None:
    artifact = read_artifact(pack())
    artifact.extract(tmp_path / "out")
    assert (tmp_path / "out" / "model.so").read_bytes() == CODE
    assert (tmp_path / "out" / "weights.bin").read_bytes() == models.W.tobytes()
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["producer"] == "tests"
    assert json.loads((tmp_path / "out" / "notes.json").read_text()) == {}


def test_files_that_are_not_artifacts(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello")
    for name, message in (
        ("missing", "No such file"),
        ("fifo", "not a regular file"),
        ("empty", "empty"),
        ("text", "not a tcomp artifact"),
        (".", "directory|regular"),
    ):
        with pytest.raises(ArtifactError, match=message):
            read_artifact(tmp_path / name)
    with pytest.raises(ArtifactError, match="give its bytes"):
        read_artifact(io.BytesIO(pack()))
    with pytest.raises(ArtifactError, match="not a tcomp artifact"):
        read_artifact(b"")


def test_other_versions_are_named() -> None:
    newer = bytearray(pack())
    newer[8] = 7
    with pytest.raises(ArtifactError, match="layout version 7"):
        read_artifact(newer)


def test_damaged_weights_are_found_on_request_and_named() -> None:
    data = bytearray(pack([("first", bytes(100)), ("second", bytes(100))]))
    data[int(np.frombuffer(data, np.uint64, 1, 32)[0]) + 227] ^= 1
    artifact = read_artifact(data)
    with pytest.raises(ArtifactError, match="'second'"):
        artifact.verify()


def test_notes_are_checked_when_they_are_read() -> None:
    noted = {"kernels": ["conv"], "more": {"ü": [1.5, None]}}
    data = bytearray(pack(notes=noted))
    assert read_artifact(data).notes == noted and b"conv" not in read_artifact(data)._manifest
    data[-2] ^= 1
    artifact = read_artifact(data)
    for read in (lambda: artifact.notes, artifact.verify):
        with pytest.raises(ArtifactError, match="its notes do not match"):
            read()


@given(st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_damage_to_weights_is_found(data: st.DataObject) -> None:
    """Of single bytes, of several, of whole pages; also by pages that changed places."""
    damaged, at = _LONG.copy(), st.integers(_WEIGHTS_AT, _LONG.size - 1)
    kind = data.draw(st.sampled_from(("byte", "bytes", "zeros", "swap")))
    if kind == "byte":
        damaged[data.draw(at)] ^= data.draw(st.integers(1, 255))
    elif kind == "bytes":
        for place in data.draw(st.lists(at, min_size=2, max_size=9)):
            damaged[place] = data.draw(st.integers(0, 255))
    else:
        one, other = (data.draw(st.integers(_WEIGHTS_AT // 4096, _LONG.size // 4096 - 1)) * 4096 for _ in range(2))
        damaged[one : one + 4096], damaged[other : other + 4096] = (
            _LONG[other : other + 4096] if kind == "swap" else 0,
            _LONG[one : one + 4096],
        )
    assume(not np.array_equal(damaged, _LONG))
    artifact = read_artifact(damaged.data)
    for checksum in ("crc32", "sha256"):
        with pytest.raises(ArtifactError, match="damaged"):
            artifact.verify(checksum)


_LONG = np.frombuffer(
    pack([("long", np.random.default_rng(0).bytes(5 << 18)), ("odd", b"odd"), ("last", np.random.default_rng(1).bytes(9000))]), np.uint8
)
_WEIGHTS_AT = int(_LONG[32:40].view(np.uint64)[0])


def test_large_weights_are_checked_by_several_threads_or_by_one_if_need_be(monkeypatch: pytest.MonkeyPatch) -> None:
    read_artifact(_LONG.data).verify()

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    read_artifact(_LONG.data).verify()
    assert pack([("w", bytes(3 << 20)), ("v", bytes(10))])


def test_large_files_are_mapped_in_huge_pages(tmp_path: Path) -> None:
    """Where Linux has them for the files of this folder, and free ones: then for a copy made by one large write, too."""
    weights = [(str(n), np.full(size, n, np.uint8)) for n, size in enumerate((3 << 20, 100, 5 << 20, 1 << 20, 77, 4 << 20))]
    written, saved, plain = tmp_path / "written", tmp_path / "saved", tmp_path / "plain"
    write_artifact(written, CODE, weights, models.AFFINE_MANIFEST)
    read_artifact(written).save(saved)
    plain.write_bytes(written.read_bytes())
    assert saved.read_bytes() == plain.read_bytes()
    huge = {}
    for path in (written, saved, plain):
        artifact = read_artifact(path)
        artifact.verify()
        mapping = Path("/proc/self/smaps").read_text().partition(str(path))[2]
        huge[path] = int(mapping.partition("FilePmdMapped:")[2].split()[0]) if "FilePmdMapped:" in mapping else 0
    assert not huge[plain] or (huge[written] and huge[saved])


def test_without_mapping_a_file_may_change(tmp_path: Path) -> None:
    path = tmp_path / "model.tcomp"
    path.write_bytes(_LONG)
    with open(path, "r+b") as file:
        artifacts = [read_artifact(path, mmap=False), read_artifact(file, mmap=False)]
        file.truncate(0)
    for artifact in artifacts:
        artifact.verify()
        assert artifact.weights.ctypes.data % 64 == 0 and not artifact.weights.flags.writeable and bytes(artifact.image) == _LONG.tobytes()


def test_the_artifact_cannot_be_written_to(tmp_path: Path) -> None:
    path = tmp_path / "model.tcomp"
    path.write_bytes(pack())
    for artifact in (read_artifact(path), read_artifact(path, mmap=False), read_artifact(pack())):
        assert artifact.image.readonly
        with pytest.raises(ValueError, match="read-only"):
            artifact.weight("w")[0] = 1


def test_a_mapping_ends_with_the_last_array_over_it(tmp_path: Path) -> None:
    path = tmp_path / "model.tcomp"
    path.write_bytes(pack())
    descriptors = os.listdir("/proc/self/fd")
    weight = read_artifact(path).weight("w")
    assert os.listdir("/proc/self/fd") == descriptors and str(path) in Path("/proc/self/maps").read_text()
    assert weight.tobytes() == models.W.tobytes()
    del weight
    assert str(path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("source", [5, None, 1.5, True, ["model.tcomp"], object()])
def test_what_is_no_source(source: Any) -> None:
    with pytest.raises(ArtifactError, match="give a path"):
        Module.load(source)


def test_bytes_of_any_kind() -> None:
    data = bytearray(pack())
    spread = np.zeros((len(data), 2), np.uint8)
    spread[:, 0] = data
    for source in (data, memoryview(data), memoryview(spread[:, 0]), memoryview(data).toreadonly()):
        read_artifact(source).verify()


def test_a_nul_in_a_path_is_refused(tmp_path: Path) -> None:
    artifact, path = read_artifact(pack()), tmp_path / "a\0b"
    for use in (read_artifact, artifact.save, artifact.extract, lambda p: write_artifact(p, CODE, [], models.AFFINE_MANIFEST)):
        with pytest.raises(ArtifactError, match="null"):
            use(path)


def test_a_full_disk() -> None:
    with open("/dev/full", "wb") as file, pytest.raises(ArtifactError, match="cannot write the artifact"):
        write_artifact(file, CODE, [], models.AFFINE_MANIFEST)


def test_without_a_temporary_folder_an_artifact_is_made_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path / "missing"))
    with scratch_file() as file:
        write_artifact(file, CODE, [("w", models.W)], models.AFFINE_MANIFEST)
        artifact = read_artifact(file)
    artifact.verify()


def test_manifest_fields_are_checked() -> None:
    tensor = {"name": "y", "dtype": "float32", "shape": [1]}
    for changes, message in (
        ({"dims": [{"name": "n", "min": 5, "max": 2, "data_dependent": False}]}, r"dims\[0\]\.max"),
        ({"dims": [*models.AFFINE_MANIFEST["dims"], {"name": "k", "min": 1, "max": 2, "data_dependent": False}]}, "'k'"),
        ({"dims": [{"name": "n", "min": 0, "max": 2, "data_dependent": True}]}, "not data-dependent"),
        ({"inputs": [{"name": "x", "dtype": "float32", "shape": ["m"]}]}, r"shape\[0\]"),
        ({"inputs": [{"name": "x", "dtype": "float32", "shape": [1.5]}]}, r"shape\[0\]"),
        ({"inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}]}, r"shape\[0\]"),
        ({"inputs": [{"name": "x", "dtype": "float32", "shape": [1] * 65}]}, "at most 64"),
        ({"outputs": [tensor, tensor]}, "same name"),
        ({"threads": 0}, "threads"),
        ({"threads": True}, "threads"),
        ({"errors": [1]}, "errors"),
        ({"notes": []}, "notes"),
        ({"triple": None}, "triple"),
        ({"features": "avx"}, "features"),
        ({"outputs": tensor}, "outputs"),
        ({"dims": ["n"]}, r"dims\[0\]"),
        ({"producer": None}, "producer"),
        ({"notes": {"x": float("nan")}}, "JSON"),
        ({"notes": {"x": b"bytes"}}, "JSON"),
    ):
        with pytest.raises(ArtifactError, match=message):
            pack(**changes)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_is_refused(affine: bytes, data: st.DataObject) -> None:
    """Header, manifest and code are always checked: damage there never goes unnoticed, nor reaches native code."""
    damaged = bytearray(affine)
    used = int(np.frombuffer(affine, np.uint64, 8, 16)[0] + np.frombuffer(affine, np.uint64, 8, 16)[1])
    signature = range(112, 176)  # means nothing to those who do not ask for it
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.one_of(st.integers(0, 191), st.integers(0, used - 1)))
            damaged[at] ^= data.draw(st.integers(1, 255))
    try:
        module = Module.load(bytes(damaged), threads=1)
    except ArtifactError:
        return
    assert all(before == after or at in signature for at, (before, after) in enumerate(zip(affine, damaged, strict=True)))
    x = np.ones((2, 4), np.float32)
    assert np.array_equal(module(x, np.float32(2)), 2 * x + models.W)


def test_a_hostile_manifest_cannot_exhaust_memory_or_the_stack() -> None:
    import hashlib
    import struct

    for text in (b"[" * 100000, b'{"a":' * 100000, b'{"format":' + b"9" * 10000 + b"}", b"\xff", b"{}", b'{"format":1}', b'{"format":3}'):
        end = -(-(192 + len(text)) // 64) * 64
        weights_at = -(-end // 4096) * 4096
        for offset in (weights_at, 1 << 62, 0):
            head = struct.pack("<8sII8Q", b"\x89TCOMP\r\n", 3, 0, end, 0, offset, 0, 192, len(text), offset, 0)
            data = (head + hashlib.sha256(head + text).digest()).ljust(192, b"\0") + text
            with pytest.raises(ArtifactError, match="JSON|manifest" if offset == weights_at else "damaged"):
                read_artifact(data.ljust(weights_at, b"\0"))
