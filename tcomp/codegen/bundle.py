"""Relocatable objects, not yet linked, as one file: an archive without an index, of members `0.o`, `1.o`, ... (ar(5)).

Artifacts hold a bundle for platforms for which this package has no linker.
"""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.codegen.relocatable import archive
from tcomp.errors import CodegenError

_MAGIC, _HEADER = b"!<arch>\n", 60


def bundle(objects: Sequence[bytes]) -> bytes:
    """The archive of all objects."""
    return archive([(f"{n}.o", content, ()) for n, content in enumerate(objects)])


def is_bundle(code: bytes | memoryview) -> bool:
    """Whether the code of an artifact is a bundle."""
    return bytes(code[: len(_MAGIC)]) == _MAGIC


def unbundle(code: bytes | memoryview) -> list[bytes]:
    """The objects, in order. Raises CodegenError for a malformed file."""
    data, at, found = bytes(code), len(_MAGIC), list[bytes]()
    while at < len(data):
        header = data[at : at + _HEADER]
        digits = header[48:58].decode("ascii", "replace").strip()
        if len(header) < _HEADER or header[58:] != b"`\n" or not digits.isdecimal() or at + _HEADER + int(digits) > len(data):
            raise CodegenError("the code of a model is malformed", why=f"there is no member of an archive at offset {at}")
        if not header.startswith(b"/ "):  # the index, which is empty
            found.append(data[at + _HEADER : at + _HEADER + int(digits)])
        at += _HEADER + int(digits) + int(digits) % 2
    return found
