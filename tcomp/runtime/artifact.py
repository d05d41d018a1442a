"""The artifact: one file with a model's code, weights and manifest.

All integers are little-endian. Offsets count from the start of the file.

    offset  size
         0     8  magic: 89 54 43 4f 4d 50 0d 0a   (the line end shows damage by text-mode transfers)
         8     4  version of this layout: 1
        12     4  zero
        16    48  (offset, size) of code, weights, manifest: six 64-bit integers
        64    32  SHA-256 of bytes 0..63 followed by the manifest
        96    32  zero
       128        manifest (see tcomp.runtime.manifest), then code, then weights

The code is an ELF shared object with the interface of include/tcomp.h. The weights section starts at a multiple of 4096 and each weight at
a multiple of 64 in it, so that the file can be mapped: pages are read when first used and shared between processes. The last section ends
the file.

Checks. Reading verifies every offset and size against the file, the header and manifest against their SHA-256, and the code against the
SHA-256 in the manifest. Weights have one SHA-256 each in the manifest, checked only on request (`verify`), since that reads all of them:
at 1-2 GB/s with SHA instructions (a CRC-32 is about as fast and proves less), against microseconds for mapping.

Trust. A checksum shows damage, not intent: an artifact holds native code, and loading it is as trusting as loading a shared library. A file
that is mapped must not be changed in place; `write_artifact` and `save` replace it instead (write next to it, then rename).
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import mmap
import os
import secrets
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from tcomp.errors import ArtifactError, TcompError
from tcomp.runtime.manifest import FORMAT, MANIFEST_LIMIT, Manifest, dump_manifest, parse_manifest

Bytes: TypeAlias = npt.NDArray[np.uint8]
Source: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO"

_MAGIC = b"\x89TCOMP\r\n"
_VERSION = 1
_HEAD = struct.Struct("<8sII6Q")
_HEADER_SIZE = 128  # bytes
_PAGE = 4096  # bytes: of x86-64 and AArch64, where the weights section starts so that it can be mapped
_ALIGN = 64  # bytes: a cache line, and the widest vector


def plan_weights(sizes: Sequence[int]) -> list[int]:
    """Offsets in the weights section for weights of these sizes (bytes), in order: the next multiple of 64 each."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(-(-end // _ALIGN) * _ALIGN)
        end = offsets[-1] + size
    return offsets


def write_artifact(
    target: str | os.PathLike[str] | BinaryIO, code: bytes, weights: Sequence[tuple[str, Any]], manifest: dict[str, Any]
) -> None:
    """Write an artifact to a path (atomically: a reader sees the old file or the new one) or to an open file (from its start). `weights`
    are (name, contiguous buffer or ndarray), or have `nbytes` and `__array__` like one: such are materialised when they are written, few at
    a time, in as many threads as there are cores. `manifest` has all keys but `format`, `weights` and `code_sha256`, which are computed
    here. Raises ArtifactError for a malformed manifest or if the file cannot be written."""
    names = [name for name, _ in weights]
    buffers = [buffer if hasattr(buffer, "__array__") else _as_bytes(name, buffer) for name, buffer in weights]
    offsets = plan_weights([buffer.nbytes for buffer in buffers])

    def text(digests: Iterable[str]) -> bytes:
        parts = zip(names, offsets, buffers, digests, strict=True)
        table = [{"name": name, "offset": offset, "size": buffer.nbytes, "sha256": digest} for name, offset, buffer, digest in parts]
        return dump_manifest({**manifest, "format": FORMAT, "weights": table, "code_sha256": hashlib.sha256(code).hexdigest()})

    draft = text(["0" * 64] * len(names))  # as long as the one with the digests, which are known once all weights are written
    parse_manifest(draft)  # what cannot be read is not written
    code_at = -(-(_HEADER_SIZE + len(draft)) // _ALIGN) * _ALIGN
    weights_at = -(-(code_at + len(code)) // _PAGE) * _PAGE
    weights_size = offsets[-1] + buffers[-1].nbytes if buffers else 0
    head = _HEAD.pack(_MAGIC, _VERSION, 0, code_at, len(code), weights_at, weights_size, _HEADER_SIZE, len(draft))

    def write(descriptor: int) -> None:
        digests = [""] * len(names)

        def put(number: int) -> None:
            content = _as_bytes(names[number], buffers[number])
            digests[number] = hashlib.sha256(content).hexdigest()
            _write_at(descriptor, weights_at + offsets[number], content)

        os.ftruncate(descriptor, weights_at + weights_size)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # the large ones first, so that none is left over at the end
            list(pool.map(put, sorted(range(len(names)), key=lambda number: -buffers[number].nbytes)))
        final = text(digests)
        header = (head + hashlib.sha256(head + final).digest()).ljust(_HEADER_SIZE, b"\0")
        _write_at(descriptor, 0, memoryview((header + final).ljust(code_at, b"\0") + code))

    if isinstance(target, (str, os.PathLike)):
        with replacing(Path(target)) as (file,):
            write(file.fileno())
    else:
        write(target.fileno())


def read_artifact(source: Source) -> Artifact:
    """Open an artifact: a path or open file (mapped, read lazily), or its bytes (copied). Raises ArtifactError if anything is wrong."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return Artifact(_copied(source), "the given bytes")
    try:
        if isinstance(source, (str, os.PathLike)):
            with open(source, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:  # a FIFO must not block
                return Artifact(_mapped(file.fileno()), os.fspath(source))
        source.flush()
        return Artifact(_mapped(source.fileno()), str(getattr(source, "name", "the given file")))
    except io.UnsupportedOperation:
        raise ArtifactError("an open file without a descriptor cannot be mapped", hint="give its bytes") from None
    except (OSError, ValueError) as problem:
        raise ArtifactError(f"cannot read the artifact {source}", why=str(problem)) from None


class Artifact:
    """An artifact in memory.

    image: memoryview of the whole file
    manifest: Manifest
    code: bytes, the ELF shared object, verified
    weights: read-only uint8 array over the weights section, aligned to 64 bytes, not verified until `verify` is called
    """

    def __init__(self, image: Bytes, where: str) -> None:
        self.image, self.where = image.data, where

        def damaged(why: str) -> ArtifactError:
            return ArtifactError("the artifact is truncated or damaged", where=where, why=why)

        head = image[:_HEADER_SIZE].tobytes()
        if head[:8] != _MAGIC:
            raise ArtifactError("not a tcomp artifact", where=where, why="it does not start with the magic bytes")
        if len(head) < _HEADER_SIZE:
            raise damaged(f"it has {len(head)} bytes, its header alone {_HEADER_SIZE}")
        _, version, _, *sections = _HEAD.unpack_from(head)
        if version != _VERSION:
            what = f"the artifact has layout version {version}, this runtime reads version {_VERSION}"
            raise ArtifactError(what, where=where, hint="compile the model again, or use the tcomp release that wrote it")
        places = list(zip(sections[::2], sections[1::2], strict=True))
        end = max(map(sum, places))
        if end != image.size or min(sections[::2]) < _HEADER_SIZE or sections[2] % _PAGE:
            raise damaged(f"it has {image.size} bytes, its header tells of {end}")
        if places[2][1] > MANIFEST_LIMIT:
            raise ArtifactError(f"the manifest has {places[2][1]} bytes, more than the {MANIFEST_LIMIT} allowed", where=where)
        code, self.weights, manifest = (image[offset : offset + size] for offset, size in places)
        self.code, self._manifest = code.tobytes(), manifest.tobytes()
        if hashlib.sha256(head[: _HEAD.size] + self._manifest).digest() != head[_HEAD.size : _HEAD.size + 32]:
            raise damaged("header and manifest do not match their checksum")
        self.manifest: Manifest = parse_manifest(self._manifest)
        if hashlib.sha256(self.code).hexdigest() != self.manifest.code_sha256:
            raise damaged("the code does not match its checksum")
        self._places = {weight.name: (weight.offset, weight.size) for weight in self.manifest.weights}
        if bad := [name for name, (offset, size) in self._places.items() if offset % _ALIGN or offset + size > self.weights.size]:
            raise ArtifactError(f"weight {bad[0]!r} lies outside the weights section, or is not aligned", where=where)

    def weight(self, name: str) -> Bytes:
        """The bytes of one weight. Raises KeyError for an unknown name."""
        offset, size = self._places[name]
        return self.weights[offset : offset + size]

    def verify(self) -> None:
        """Check every weight against its SHA-256 (reads all of them). Raises ArtifactError naming the first that is damaged."""
        for weight in self.manifest.weights:
            if hashlib.sha256(self.weight(weight.name).data).hexdigest() != weight.sha256:
                what, why = f"weight {weight.name!r} of the artifact is damaged", "its contents do not match their checksum"
                raise ArtifactError(what, where=self.where, why=why, hint="fetch the file again, or compile the model again")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artifact to a file, atomically. Raises ArtifactError if it cannot be written."""
        with replacing(Path(path)) as (file,):
            file.write(self.image)

    def extract(self, folder: str | os.PathLike[str]) -> None:
        """Write `model.so`, `weights.bin` and `manifest.json` into `folder` (made if missing), for programs without Python."""
        root = Path(folder)
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ArtifactError(f"cannot make the folder {root}", why=str(problem)) from None
        for name, content in (("model.so", self.code), ("weights.bin", self.weights.data), ("manifest.json", self._manifest)):
            with replacing(root / name) as (file,):
                file.write(content)


def _write_at(descriptor: int, offset: int, content: memoryview) -> None:
    while content.nbytes:
        written = os.pwrite(descriptor, content, offset)  # no more than 2 GiB at once
        content, offset = content[written:], offset + written


def _as_bytes(name: str, buffer: Any) -> memoryview:
    """The bytes of a contiguous buffer, without a copy."""
    try:
        if hasattr(buffer, "__array__"):  # element types of ml_dtypes have no buffer format
            buffer = np.asarray(buffer)
            if not buffer.flags.c_contiguous:
                raise ValueError("the array is not contiguous")
            buffer = buffer.reshape(-1).view(np.uint8)
        view = memoryview(buffer)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as problem:
        raise ArtifactError(f"weight {name!r} is not a contiguous buffer", why=str(problem)) from None


def _mapped(descriptor: int) -> Bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if not status.st_size:
        raise ValueError("the file is empty")
    return np.frombuffer(mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ), np.uint8)


def _copied(data: bytes | bytearray | memoryview) -> Bytes:
    """A copy that starts on a page, as the sections of the file expect."""
    content = np.frombuffer(data, np.uint8)
    room = np.empty(content.size + _PAGE, np.uint8)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(room.data)) % _PAGE
    image = room[start : start + content.size]
    image[:] = content
    image.flags.writeable = False
    return image


@contextmanager
def replacing(*paths: Path, error: type[TcompError] = ArtifactError) -> Iterator[list[BinaryIO]]:
    """Files, open for writing and reading, that take the places of `paths` once all are complete; none does if anything fails. A
    reader sees the old file or the new one. Raises `error` if one cannot be written."""
    temporary = {path: path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp") for path in paths}
    try:
        with ExitStack() as files:
            yield [files.enter_context(open(name, "x+b")) for name in temporary.values()]
        for path, name in temporary.items():
            os.replace(name, path)
    except OSError as problem:
        raise error(f"cannot write {' and '.join(map(str, paths))}", why=problem.strerror or str(problem)) from problem
    finally:
        for name in temporary.values():
            with suppress(OSError):
                name.unlink()
