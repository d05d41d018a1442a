"""Relocatable objects made without a compiler, and archives of them: from a linked shared object, and from data.

What `codegen.elf.link` made keeps the relocations that it applied. With them its sections can be placed anew, in a program or in another
shared object, where all names but those that were exported are local. Sources: System V ABI (gABI) chapter 4; for archives, ar(5) of
System V.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from tcomp.errors import CodegenError

_EHDR, _SHDR = map(struct.Struct, ("<16sHHIQQQIHHHHHH", "<IIQQQQIIQQ"))
_SYM, _RELA = map(struct.Struct, ("<IBBHQQ", "<QQq"))
_PROGBITS, _SYMTAB, _STRTAB, _RELATAB, _NOBITS = 1, 2, 3, 4, 8
_ALLOC, _INFO_LINK = 2, 0x40
_GLOBAL, _OBJECT = 1, 1
_KEPT = (".rodata", ".eh_frame", ".text", ".data", ".bss")  # what came from objects; the rest is made by linking
_MOST_ALIGNED = 2 << 20  # bytes: a huge page
MACHINES = {"x86_64": 62, "aarch64": 183}  # ELF's numbers


class _Header(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


@dataclass(frozen=True, slots=True)
class _Section:
    """A section to be written; `link` and `info` are final numbers."""

    name: str
    kind: int
    flags: int
    content: bytes
    size: int
    align: int = 1
    link: int = 0
    info: int = 0
    entry: int = 0


def relocatable(code: bytes) -> bytes:
    """The shared object `code` as a relocatable object, the inverse of `codegen.elf.link`: exported symbols are global, imported ones
    undefined, all others local. Raises CodegenError for a malformed file, or one that kept no relocations."""
    return _Shared(code).object()


def data_object(arch: str, symbol: str, content: bytes | memoryview, align: int) -> bytes:
    """An object with `content` as constant data (aligned to `align` bytes) under the global name `symbol`."""
    strings = b"\0" + symbol.encode() + b"\0"
    symbols = _SYM.pack(0, 0, 0, 0, 0, 0) + _SYM.pack(1, _GLOBAL << 4 | _OBJECT, 0, 1, 0, len(content))
    sections = [
        _Section(".rodata", _PROGBITS, _ALLOC, bytes(content), len(content), align),
        _Section(".symtab", _SYMTAB, 0, symbols, len(symbols), 8, 3, 1, _SYM.size),
        _Section(".strtab", _STRTAB, 0, strings, len(strings)),
    ]
    return _write(MACHINES[arch], sections)


def archive(members: Sequence[tuple[str, bytes, Sequence[str]]]) -> bytes:
    """A static library: objects with their names (at most 15 bytes) and the global names that each defines, which its index lists."""
    bodies, at = [], 0
    for name, content, _ in members:
        if len(name.encode()) > 15 or "/" in name:
            raise CodegenError(f"`{name}` is not a name of a member of an archive", why="such have at most 15 bytes, and no slash")
        bodies.append(_member(f"{name}/", content))
    index_size = 4 + sum(4 + len(s.encode()) + 1 for _, _, symbols in members for s in symbols)
    at = 8 + 60 + index_size + index_size % 2
    offsets = []
    for body, (_, _, symbols) in zip(bodies, members, strict=True):
        offsets += [at] * len(symbols)
        at += len(body)
    if at >= 1 << 32:
        raise CodegenError("a static library of more than 4 GiB cannot be indexed")
    names = b"".join(s.encode() + b"\0" for _, _, symbols in members for s in symbols)
    index = struct.pack(f">{1 + len(offsets)}I", len(offsets), *offsets) + names
    return b"".join([b"!<arch>\n", _member("/", index), *bodies])


def _member(name: str, content: bytes) -> bytes:
    head = f"{name:<16}{0:<12}{0:<6}{0:<6}{'644':<8}{len(content):<10}`\n".encode()
    return head + content + b"\n" * (len(content) % 2)


class _Shared:
    """A shared object of this package's linker, checked: every offset, index and name in it may be wrong."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        ident, kind, self.machine, _, _, _, table_at, _, _, _, _, entry, count, names_at = _EHDR.unpack(self.cut(0, _EHDR.size))
        if ident[:6] != b"\x7fELF\x02\x01" or kind != 3 or self.machine not in MACHINES.values() or entry != _SHDR.size:
            self.refuse("it is not a little-endian 64-bit ELF shared object of a known processor")
        self.headers = [_Header(*fields) for fields in _SHDR.iter_unpack(self.cut(table_at, count * entry))]
        if names_at >= count:
            self.refuse("bad section header table")
        names = self.content(self.headers[names_at])
        self.names = [self.text(names, header.name) for header in self.headers]
        self.kept = [n for n, name in enumerate(self.names) if name in _KEPT]
        self.numbers = {old: new for new, old in enumerate(self.kept, 1)}
        self.applied = [n for n, h in enumerate(self.headers) if h.kind == _RELATAB and not h.flags & _ALLOC and h.info in self.numbers]
        tables = [h for h in self.headers if h.kind == _SYMTAB]
        if len(tables) != 1 or tables[0].link >= count:
            self.refuse("it has no symbol table")
        if not self.applied:
            what, why = "the code cannot be linked anew", "it was linked without keeping its relocations"
            raise CodegenError(what, why=why, hint="compile the model again, with this release of tcomp")
        self.symbols = [*_SYM.iter_unpack(self.content(tables[0]))]
        self.strings = self.content(self.headers[tables[0].link])

    def object(self) -> bytes:
        """See `relocatable`."""
        sections = []
        for number in self.kept:
            h = self.headers[number]
            if h.align.bit_count() != 1 or h.align > _MOST_ALIGNED:
                self.refuse("a section has a bad alignment")
            content = b"" if h.kind == _NOBITS else bytes(self.content(h))
            sections.append(_Section(self.names[number], h.kind, h.flags, content, h.size, h.align))
        symtab = len(self.kept) + len(self.applied) + 1
        symbols, places, local = self.symbol_table()
        for number in self.applied:
            h, table = self.headers[number], bytearray()
            at = self.headers[h.info].address
            for offset, info, addend in _RELA.iter_unpack(self.content(h)):
                if not at <= offset <= at + self.headers[h.info].size - 4 or info >> 32 not in places:
                    self.refuse("a relocation points outside its section or symbol table")
                table += _RELA.pack(offset - at, places[info >> 32] << 32 | info & 0xFFFFFFFF, addend)
            sections.append(
                _Section(self.names[number], _RELATAB, _INFO_LINK, bytes(table), len(table), 8, symtab, self.numbers[h.info], _RELA.size)
            )
        sections.append(_Section(".symtab", _SYMTAB, 0, symbols, len(symbols), 8, symtab + 1, local, _SYM.size))
        sections.append(_Section(".strtab", _STRTAB, 0, bytes(self.strings), len(self.strings)))
        return _write(self.machine, sections)

    def symbol_table(self) -> tuple[bytes, dict[int, int], int]:
        """The symbols that stay, the new number of each old one, and how many are local."""
        table, places, local = bytearray(), dict[int, int](), 0
        for old, (name, info, other, index, value, size) in enumerate(self.symbols):
            if 0 < index < 0xFF00:
                if index not in self.numbers:  # of a section that linking made
                    continue
                index, value = self.numbers[index], value - self.headers[index].address
                if value < 0:
                    self.refuse("a symbol lies outside its section")
            if not info >> 4:
                if local != len(places):
                    self.refuse("local symbols follow global ones")
                local += 1
            places[old] = len(places)
            table += _SYM.pack(name, info, other, index, value, size)
        return bytes(table), places, local

    def refuse(self, why: str) -> NoReturn:
        raise CodegenError("the code of a model is malformed", why=why)

    def cut(self, offset: int, size: int) -> memoryview:
        """Bytes of the file, checked to lie inside."""
        if offset + size > len(self.data):
            self.refuse(f"{size} bytes at offset {offset} lie outside the file of {len(self.data)} bytes")
        return self.data[offset : offset + size]

    def content(self, header: _Header) -> memoryview:
        """The bytes of a section, whole entries of tables."""
        size = header.size
        if header.entry and size % header.entry or (header.kind, header.entry) in ((_SYMTAB, 0), (_RELATAB, 0)):
            self.refuse("a table does not consist of whole entries")
        if {_SYMTAB: _SYM.size, _RELATAB: _RELA.size}.get(header.kind, header.entry) != header.entry:
            self.refuse("a table has entries of an unknown size")
        return self.cut(header.offset, size)

    def text(self, table: memoryview, offset: int) -> str:
        """A name in a table of strings."""
        name, end, _ = bytes(table[offset : offset + 64]).partition(b"\0")
        return name.decode(errors="replace") if end else self.refuse("a name lies outside its string table")


def _write(machine: int, sections: Sequence[_Section]) -> bytes:
    """A relocatable object, whose stack need not be executable."""
    all_sections = [*sections, _Section(".note.GNU-stack", _PROGBITS, 0, b"", 0), _Section(".shstrtab", _STRTAB, 0, b"", 0)]
    names, name_at = bytearray(1), []
    for s in all_sections:
        name_at.append(len(names))
        names += s.name.encode() + b"\0"
    parts, at, headers = [b""], _EHDR.size, bytearray(_SHDR.size)
    for s, name in zip(all_sections, name_at, strict=True):
        content = bytes(names) if s.name == ".shstrtab" else s.content
        padding = -at % s.align
        parts += [bytes(padding), content]
        size = max(s.size, len(content))
        headers += _SHDR.pack(name, s.kind, s.flags, 0, at + padding, size, s.link, s.info, s.align, s.entry)
        at += padding + len(content)
    padding, count = -at % 8, len(all_sections) + 1
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    parts[0] = _EHDR.pack(ident, 1, machine, 1, 0, 0, at + padding, 0, _EHDR.size, 0, 0, _SHDR.size, count, count - 1)
    return b"".join([*parts, bytes(padding), headers])
