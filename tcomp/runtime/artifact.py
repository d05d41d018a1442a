"""The artifact: one file with a model's code, weights and manifest.

All integers are little-endian. Offsets count from the start of the file.

    offset  size
         0     8  magic: 89 54 43 4f 4d 50 0d 0a   (the line end shows damage by text-mode transfers)
         8     4  version of this layout: 3
        12     4  zero
        16    64  (offset, size) of code, weights, manifest, notes: eight 64-bit integers
        80    32  SHA-256 of bytes 0..79 followed by the manifest
       112    64  zero, or the Ed25519 signature of bytes 0..111 (see tcomp.runtime.signing)
       176    16  zero
       192        manifest (see tcomp.runtime.manifest), then code, then weights, then notes

The code is an ELF shared object with the interface of include/tcomp.h. It starts at the next multiple of 64, the weights section at the
next multiple of 4096 and each weight at the next multiple of 64 in it, so that the file can be mapped: pages are read when first used and
shared between processes. Notes, which start at the next multiple of 64, are a JSON object that no run needs: how the kernels came about,
what they have to do. They are read when they are asked for. What lies between sections is zero; the last one ends the file.

Checks. Reading checks all of the file but weights and notes: the header field by field, header and manifest against their SHA-256, the code
against the SHA-256 in the manifest. Notes are checked against theirs when they are read. Weights are checked on request (`verify`), since
that reads all of them: against a CRC-32 for every mebibyte of a weight, by all cores (22 to 36 ms for 100 MB on two cores of a Zen 3). It
finds every damage that spans less than five bytes of a mebibyte, and all others but one in 4e9. Signed weights are checked against SHA-256s
instead, which takes twice as long.

Trust. A checksum shows damage, not intent: an artifact holds native code, and loading it is as trusting as loading a shared library, unless
it is signed (SECURITY.md). A file that is mapped must not be changed in place: the model would see the change, or the process die by SIGBUS
where the file got shorter. `write_artifact` and `save` replace it instead (write next to it, then rename); where others may do worse, read
it into memory (`mmap=False`).
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
import stat
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, cached_property
from itertools import chain, islice, pairwise
from mmap import MADV_HUGEPAGE, MAP_SHARED, PROT_READ
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tcomp.errors import ArtifactError, TcompError
from tcomp.runtime.manifest import FORMAT, MANIFEST_LIMIT, Manifest, dump_json, parse_manifest, parse_notes
from tcomp.runtime.workspace import HUGE_PAGE

Bytes: TypeAlias = npt.NDArray[np.uint8]
T = TypeVar("T")
R = TypeVar("R")
_Place: TypeAlias = tuple[int, int]
Source: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO"

_MAGIC = b"\x89TCOMP\r\n"
_VERSION = 3
_HEAD = struct.Struct("<8sII8Q")
_SIGNED = 112  # bytes at the start: what a signature signs
_SIGNATURE = slice(112, 176)
_HEADER_SIZE = 192  # bytes
_BLOCK = 1 << 20  # bytes of a weight that have checksums of their own: enough that threads share large weights
_CODE_LIMIT = 1 << 31  # bytes: what relative addresses reach
_PAGE = 4096  # bytes: of x86-64 and AArch64, where the weights section starts so that it can be mapped
_ALIGN = 64  # bytes: a cache line, and the widest vector


def _sha256(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).digest()


def _crc32(content: bytes | memoryview) -> bytes:
    return zlib.crc32(content).to_bytes(4, "big")


_CHECKSUMS: dict[str, Callable[[memoryview], bytes]] = {"crc32": _crc32, "sha256": _sha256}  # of blocks of weights


def _blocks(content: memoryview) -> list[memoryview]:
    return [content[start : start + _BLOCK] for start in range(0, content.nbytes, _BLOCK)]


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
    a time, in as many threads as there are cores. `manifest` has all keys but `format`, `weights` and checksums, which are computed here;
    `notes` among them, a dictionary, becomes a section of its own. Raises ArtifactError for a malformed manifest or if the file cannot be
    written."""
    names = [name for name, _ in weights]
    buffers = [buffer if hasattr(buffer, "__array__") else _as_bytes(name, buffer) for name, buffer in weights]
    sizes = [buffer.nbytes for buffer in buffers]
    offsets = plan_weights(sizes)
    notes = dump_json({} if (noted := manifest.get("notes")) is None else noted, "the notes")
    parse_notes(notes)
    said = {key: value for key, value in manifest.items() if key != "notes"}

    def text(checksums: Sequence[dict[str, str]]) -> bytes:
        parts = zip(names, offsets, sizes, checksums, strict=True)
        table = [{"name": name, "offset": offset, "size": size, **sums} for name, offset, size, sums in parts]
        digests = {"code_sha256": _sha256(code).hex(), "notes_sha256": _sha256(notes).hex()}
        return dump_json({**said, "format": FORMAT, "weights": table, **digests}, "the manifest")

    # As long as the one with the checksums, which are known once all weights are written.
    draft = text([{kind: digest(memoryview(b"")).hex() * -(-size // _BLOCK) for kind, digest in _CHECKSUMS.items()} for size in sizes])
    parse_manifest(draft)  # what cannot be read is not written
    places = _places(len(draft), len(code), offsets[-1] + sizes[-1] if sizes else 0, len(notes))
    (code_at, _), (weights_at, _), _, (notes_at, _) = places
    head = _HEAD.pack(_MAGIC, _VERSION, 0, *(number for place in places for number in place))

    def write(descriptor: int) -> None:
        checksums: list[dict[str, str]] = [{}] * len(names)

        def put(number: int) -> None:
            content = _as_bytes(names[number], buffers[number])
            checksums[number] = {kind: b"".join(map(digest, _blocks(content))).hex() for kind, digest in _CHECKSUMS.items()}
            _write_at(descriptor, weights_at + offsets[number], content)

        os.ftruncate(descriptor, notes_at)
        _make_huge_pages(descriptor, [weights_at + offset for offset in offsets], notes_at)
        _write_at(descriptor, notes_at, memoryview(notes))
        _in_threads(put, sorted(range(len(names)), key=lambda number: -sizes[number]))  # so that no large one is left over at the end
        final = text(checksums)
        header = (head + _sha256(head + final)).ljust(_HEADER_SIZE, b"\0")
        _write_at(descriptor, 0, memoryview((header + final).ljust(code_at, b"\0") + code))

    if isinstance(target, (str, os.PathLike)):
        with replacing(Path(target)) as (file,):
            write(file.fileno())
    else:
        try:
            write(target.fileno())
        except OSError as problem:
            raise ArtifactError("cannot write the artifact", why=problem.strerror or str(problem)) from problem


def _places(manifest: int, code: int, weights: int, notes: int) -> tuple[_Place, _Place, _Place, _Place]:
    """(offset, size) of code, weights, manifest and notes of these sizes."""
    code_at = -(-(_HEADER_SIZE + manifest) // _ALIGN) * _ALIGN
    weights_at = -(-(code_at + code) // _PAGE) * _PAGE
    return (code_at, code), (weights_at, weights), (_HEADER_SIZE, manifest), (-(-(weights_at + weights) // _ALIGN) * _ALIGN, notes)


def read_artifact(source: Source, mmap: bool = True) -> Artifact:
    """Open an artifact: a path or open file (mapped, read lazily; without `mmap` read into memory at once), or its bytes (copied). No
    descriptor is kept. Raises ArtifactError if anything is wrong."""
    get = _mapped if mmap else _read
    try:
        if isinstance(source, (bytes, bytearray, memoryview)):
            return Artifact(_copied(source), "the given bytes")
        if isinstance(source, (str, os.PathLike)):
            with open(source, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:  # a FIFO must not block
                return Artifact(get(file.fileno()), os.fspath(source))
        source.flush()
        return Artifact(get(source.fileno()), str(getattr(source, "name", "the given file")))
    except io.UnsupportedOperation:
        raise ArtifactError("an open file without a descriptor cannot be mapped", hint="give its bytes") from None
    except AttributeError:
        what = f"an artifact cannot be read from an object of type {type(source).__name__}"
        raise ArtifactError(what, hint="give a path, an open file, the bytes of an artifact, or an Artifact") from None
    except (OSError, ValueError) as problem:  # a NUL in a path is a ValueError
        raise ArtifactError(f"cannot read the artifact {source!r}", why=str(problem)) from None
    except MemoryError:
        raise ArtifactError("the artifact does not fit in memory", hint="load it from a file, mapped") from None


class Artifact:
    """An artifact in memory.

    image: memoryview of the whole file
    manifest: Manifest
    code: bytes, the ELF shared object, verified
    weights: read-only uint8 array over the weights section, aligned to 64 bytes, not verified until `verify` is called
    notes: dict, what else was written down when the model was compiled; read when it is first asked for
    signature, signed: bytes, an Ed25519 signature (64 zero bytes if there is none) and what it signs; not verified
    """

    def __init__(self, image: Bytes, where: str) -> None:
        self.image, self.where = image.data, where

        def damaged(why: str) -> ArtifactError:
            return ArtifactError("the artifact is truncated or damaged", where=where, why=why)

        head = image[:_HEADER_SIZE].tobytes()
        if head[:8] != _MAGIC:
            hint = "make one of a model: tcomp compile model.onnx -o model.tcomp"
            raise ArtifactError("not a tcomp artifact", where=where, why="it does not start with the magic bytes", hint=hint)
        if len(head) < _HEADER_SIZE:
            raise damaged(f"it has {len(head)} bytes, its header alone {_HEADER_SIZE}")
        _, version, zero, *sections = _HEAD.unpack_from(head)
        if version != _VERSION:
            what = f"the artifact has layout version {version}, this runtime reads version {_VERSION}"
            raise ArtifactError(what, where=where, hint="compile the model again, or use the tcomp release that wrote it")
        code_size, weights_size, manifest_size, notes_size = sections[1::2]
        limits = (("manifest", manifest_size, MANIFEST_LIMIT), ("code", code_size, _CODE_LIMIT), ("notes", notes_size, MANIFEST_LIMIT))
        for what, size, limit in limits:
            if size > limit:
                raise ArtifactError(f"the {what} of the artifact: {size} bytes, more than the {limit} allowed", where=where)
        places = _places(manifest_size, code_size, weights_size, notes_size)
        if (end := sum(places[3])) != image.size or [number for place in places for number in place] != sections:
            raise damaged(f"it has {image.size} bytes, its header tells of {end}")
        code, self.weights, manifest, self._noted = (image[offset : offset + size] for offset, size in places)
        self.code, self._manifest = code.tobytes(), manifest.tobytes()
        self.signed, self.signature = head[:_SIGNED], head[_SIGNATURE]
        if _sha256(head[: _HEAD.size] + self._manifest) != head[_HEAD.size : _SIGNED]:
            raise damaged("header and manifest do not match their checksum")
        self.manifest: Manifest = parse_manifest(self._manifest)
        if _sha256(self.code).hex() != self.manifest.code_sha256:
            raise damaged("the code does not match its checksum")
        filled = [(0, _SIGNATURE.stop), *sorted((offset, offset + size) for offset, size in places)]
        if zero or any(image[end:begin].any() for (_, end), (begin, _) in pairwise(filled)):
            raise damaged("there is something between its sections")
        self._places = {weight.name: (weight.offset, weight.size) for weight in self.manifest.weights}
        offsets, sizes = zip(*self._places.values(), strict=True) if self._places else ((), ())
        if [*offsets] != plan_weights(sizes) or weights_size != (offsets[-1] + sizes[-1] if sizes else 0):
            raise ArtifactError("the weights do not fill their section in order, or are not aligned", where=where)

    @cached_property
    def notes(self) -> dict[str, Any]:
        """What the compiler noted: kernels and how they came about. Raises ArtifactError if it is damaged."""
        content = self._noted.tobytes()
        if _sha256(content).hex() != self.manifest.notes_sha256:
            raise ArtifactError("the artifact is damaged", where=self.where, why="its notes do not match their checksum")
        return parse_notes(content)

    def weight(self, name: str) -> Bytes:
        """The bytes of one weight. Raises KeyError for an unknown name."""
        offset, size = self._places[name]
        return self.weights[offset : offset + size]

    def verify(self, by: Literal["crc32", "sha256"] = "crc32") -> None:
        """Check the notes, and all weights, which reads them, by all cores: against their CRC-32s, which finds damage, or against their
        SHA-256s, which no one can forge. Raises ArtifactError naming the first that is damaged."""
        weights = self.manifest.weights
        blocks = [_blocks(self.weight(weight.name).data) for weight in weights]
        digests = iter(_in_threads(_CHECKSUMS[by], [*chain.from_iterable(blocks)]))
        for weight, parts in zip(weights, blocks, strict=True):
            if b"".join(islice(digests, len(parts))).hex() != getattr(weight, by):
                what, why = f"weight {weight.name!r} of the artifact is damaged", "its contents do not match their checksum"
                raise ArtifactError(what, where=self.where, why=why, hint="fetch the file again, or compile the model again")
        _ = self.notes  # which are checked when they are read
        if any(self.weights[a.offset + a.size : b.offset].any() for a, b in pairwise(weights)):
            raise ArtifactError("the artifact is damaged", where=self.where, why="there is something between its weights")

    def save(self, path: str | os.PathLike[str], signature: bytes | None = None) -> None:
        """Write the artifact to a file, atomically; with a signature (see `tcomp.runtime.signing`) in place of the one that it has. Raises
        ArtifactError if it cannot be written."""
        with replacing(Path(path)) as (file,):
            for start in range(0, self.image.nbytes, HUGE_PAGE):  # as copies: Linux writes memory without pages yet in smaller pieces
                _write_at(file.fileno(), start, memoryview(bytes(self.image[start : start + HUGE_PAGE])))
            file.seek(_SIGNATURE.start)
            file.write(self.signature if signature is None else signature)

    def extract(self, folder: str | os.PathLike[str]) -> None:
        """Write `model.so`, `weights.bin`, `manifest.json` and `notes.json` into `folder` (made if missing), for programs without
        Python."""
        root = Path(folder)
        try:
            root.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as problem:
            raise ArtifactError(f"cannot make the folder {root}", why=str(problem)) from None
        texts = ("manifest.json", self._manifest), ("notes.json", self._noted.data)
        for name, content in (("model.so", self.code), ("weights.bin", self.weights.data), *texts):
            with replacing(root / name) as (file,):
                file.write(content)


def _write_at(descriptor: int, offset: int, content: memoryview) -> None:
    while content.nbytes:
        written = os.pwrite(descriptor, content, offset)  # no more than 2 GiB at once
        content, offset = content[written:], offset + written


def _make_huge_pages(descriptor: int, places: Sequence[int], size: int) -> None:
    """Have Linux keep a file of `size` bytes in huge pages of its cache, which are mapped as such: it takes one for a write that fills it.
    Those in which anything begins, at `places`, are filled with zeros, as the writes that follow do not fill them."""
    zeros = memoryview(bytes(HUGE_PAGE))
    for page in sorted({at // HUGE_PAGE for at in places}):
        if (page + 1) * HUGE_PAGE <= size:
            _write_at(descriptor, page * HUGE_PAGE, zeros)


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


def _in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results for all items; in as many threads as there are cores, or in this one where no other can be started."""
    workers = min(len(os.sched_getaffinity(0)), len(items))
    if workers > 1:
        from concurrent.futures import ThreadPoolExecutor  # where nothing is verified, the import would be time lost

        with suppress(RuntimeError), ThreadPoolExecutor(workers) as pool:
            return list(pool.map(function, items))
    return list(map(function, items))


def _size(descriptor: int) -> int:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if not status.st_size:
        raise ValueError("the file is empty")
    return status.st_size


@cache
def _libc() -> tuple[Callable[..., int | None], Callable[..., int], Callable[..., int]]:
    """mmap, munmap and madvise."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    library.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    library.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return library.mmap, library.munmap, library.madvise


def _mapped(descriptor: int) -> Bytes:
    """A file, mapped for as long as an array over it lives. By the C library, since Python's `mmap` keeps a copy of the descriptor."""
    size, (mmap, munmap, madvise) = _size(descriptor), _libc()
    address = mmap(None, size, PROT_READ, MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    madvise(address, size, MADV_HUGEPAGE)  # what is not in memory yet is read in huge pages; other kernels refuse, and are only slower
    room = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(room, munmap, address, size).atexit = False
    return np.frombuffer(memoryview(room).toreadonly(), np.uint8)


def _read(descriptor: int) -> Bytes:
    """The contents of a file. If it gets shorter meanwhile, zeros end them, and some checksum will not match."""
    image, start = _room(_size(descriptor)), 0
    while got := os.preadv(descriptor, [image[start:].data], start):
        start += got
    image[start:] = 0
    image.flags.writeable = False
    return image


def _copied(data: bytes | bytearray | memoryview) -> Bytes:
    content = np.frombuffer(data.tobytes() if isinstance(data, memoryview) and not data.c_contiguous else data, np.uint8)
    image = _room(content.size)
    image[:] = content
    image.flags.writeable = False
    return image


def _room(size: int) -> Bytes:
    """Memory that starts on a page, as the sections of the file expect."""
    room = np.empty(size + _PAGE, np.uint8)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(room.data)) % _PAGE
    return room[start : start + size]


def scratch_file() -> BinaryIO:
    """A file without a name, open for writing and reading: in the temporary folder, else in memory. Raises ArtifactError."""
    import tempfile  # which programs that only run models do without

    with suppress(OSError):  # no folder is usable
        return cast(BinaryIO, tempfile.TemporaryFile())
    try:
        return open(os.memfd_create("tcomp-artifact", os.MFD_CLOEXEC), "w+b")
    except OSError as problem:
        raise ArtifactError("there is no place to make the artifact in", why=str(problem), hint="set TMPDIR, or name a file") from None


@contextmanager
def replacing(*paths: Path, error: type[TcompError] = ArtifactError) -> Iterator[list[BinaryIO]]:
    """Files, open for writing and reading, that take the places of `paths` once all are complete; none does if anything fails. A
    reader sees the old file or the new one. Raises `error` if one cannot be written."""
    temporary = {path: path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp") for path in paths}
    try:
        with ExitStack() as files:
            try:
                opened: list[BinaryIO] = [files.enter_context(open(name, "x+b")) for name in temporary.values()]
            except ValueError as problem:  # a NUL in a path
                raise OSError(str(problem)) from None
            yield opened
        for path, name in temporary.items():
            os.replace(name, path)
    except (OSError, ArtifactError) as problem:
        cause = problem.__cause__ if isinstance(problem, ArtifactError) else problem
        if not isinstance(cause, OSError):  # no file is to blame
            raise
        raise error(f"cannot write {' and '.join(map(str, paths))}", why=cause.strerror or str(cause)) from cause
    finally:
        for name in temporary.values():
            with suppress(OSError, ValueError):
                name.unlink()
