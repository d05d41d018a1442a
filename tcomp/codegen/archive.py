"""Archives of relocatable objects: static libraries, and what artifacts hold for platforms for which this package has no linker.

Source: ar(5) of System V.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tcomp.errors import CodegenError

_MAGIC, _HEADER = b"!<arch>\n", 60


def archive(files: Sequence[tuple[str, bytes, Sequence[str]]]) -> bytes:
    """A static library: objects with their names (at most 15 bytes) and the global names that each defines, which its index lists."""
    bodies, at = [], 0
    for name, content, _ in files:
        if len(name.encode()) > 15 or "/" in name:
            raise CodegenError(f"`{name}` is not a name of a member of an archive", why="such have at most 15 bytes, and no slash")
        bodies.append(_member(f"{name}/", content))
    index_size = 4 + sum(4 + len(s.encode()) + 1 for _, _, symbols in files for s in symbols)
    at = len(_MAGIC) + _HEADER + index_size + index_size % 2
    offsets = []
    for body, (_, _, symbols) in zip(bodies, files, strict=True):
        offsets += [at] * len(symbols)
        at += len(body)
    if at >= 1 << 32:
        raise CodegenError("a static library of more than 4 GiB cannot be indexed")
    names = b"".join(s.encode() + b"\0" for _, _, symbols in files for s in symbols)
    index = struct.pack(f">{1 + len(offsets)}I", len(offsets), *offsets) + names
    return b"".join([_MAGIC, _member("/", index), *bodies])


def _member(name: str, content: bytes) -> bytes:
    head = f"{name:<16}{0:<12}{0:<6}{0:<6}{'644':<8}{len(content):<10}`\n".encode()
    return head + content + b"\n" * (len(content) % 2)


def members(code: bytes | memoryview) -> list[bytes]:
    """The contents of the members, in order. Raises CodegenError for a malformed file."""
    data, at, found = bytes(code), len(_MAGIC), list[bytes]()
    if not data.startswith(_MAGIC):
        raise CodegenError("the code of a model is malformed", why="it is not an archive of objects")
    while at < len(data):
        header = data[at : at + _HEADER]
        digits = header[48:58].decode("ascii", "replace").strip()
        if len(header) < _HEADER or header[58:] != b"`\n" or not digits.isdecimal() or at + _HEADER + int(digits) > len(data):
            raise CodegenError("the code of a model is malformed", why=f"there is no member of an archive at offset {at}")
        if not header.startswith(b"/ "):  # the index, which is empty
            found.append(data[at + _HEADER : at + _HEADER + int(digits)])
        at += _HEADER + int(digits) + int(digits) % 2
    return found
