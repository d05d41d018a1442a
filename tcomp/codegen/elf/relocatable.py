"""Relocatable objects made without a compiler: from a linked shared object, and from data.

What `elf.linker` made keeps the relocations that it applied. With them its sections can be placed anew, in a program or in another
shared object, where all names but those that were exported are local. Source: System V ABI (gABI) chapter 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tcomp.codegen.elf import format as F
from tcomp.errors import CodegenError

_KEPT = (".rodata", ".eh_frame", ".text", ".data", ".bss")  # what came from objects; the rest is made by linking
_MOST_ALIGNED = 2 << 20  # bytes: a huge page


@dataclass(frozen=True, slots=True)
class _Section:
    """A section to be written; `link` and `info` are final numbers."""

    name: str
    kind: int
    flags: int
    content: bytes | bytearray
    size: int
    align: int = 1
    link: int = 0
    info: int = 0
    entry: int = 0


def relocatable(code: bytes | memoryview) -> bytes:
    """The shared object `code` as a relocatable object, the inverse of `elf.linker.link`: exported symbols are global, imported ones
    undefined, all others local. Raises CodegenError for a malformed file, or one that kept no relocations."""
    return _Shared(bytes(code)).object()


def data_object(arch: str, symbol: str, content: bytes | memoryview, align: int) -> bytes:
    """An object with `content` as constant data (aligned to `align` bytes) under the global name `symbol`."""
    strings = F.Strings()
    symbols = bytes(F.SYM.size) + F.SYM.pack(strings.add(symbol), F.GLOBAL << 4 | F.OBJECT, 0, 1, 0, len(content))
    sections = [
        _Section(".rodata", F.PROGBITS, F.ALLOC, bytes(content), len(content), align),
        _Section(".symtab", F.SYMTAB, 0, symbols, len(symbols), 8, 3, 1, F.SYM.size),
        _Section(".strtab", F.STRTAB, 0, strings.data, len(strings.data)),
    ]
    return _write(F.MACHINES[arch], sections)


class _Shared(F.File):
    """A shared object of this package's linker."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, 3)
        self.section_names = [self.text(self.names, header.name) for header in self.headers]
        self.kept = [n for n, name in enumerate(self.section_names) if name in _KEPT]
        self.numbers = {old: new for new, old in enumerate(self.kept, 1)}
        self.applied = [n for n, h in enumerate(self.headers) if h.kind == F.RELATAB and not h.flags & F.ALLOC and h.info in self.numbers]
        tables = [h for h in self.headers if h.kind == F.SYMTAB]
        if len(tables) != 1 or tables[0].link >= len(self.headers):
            self.refuse("it has no symbol table")
        if not self.applied:
            what, why = "the code cannot be linked anew", "it was linked without keeping its relocations"
            raise CodegenError(what, why=why, hint="compile the model again, with this release of tcomp")
        self.symbols = [*F.SYM.iter_unpack(self.content(tables[0]))]
        self.strings = self.content(self.headers[tables[0].link])

    def object(self) -> bytes:
        """See `relocatable`."""
        sections = []
        for number in self.kept:
            h = self.headers[number]
            if h.align.bit_count() != 1 or h.align > _MOST_ALIGNED:
                self.refuse("a section has a bad alignment")
            content = b"" if h.kind == F.NOBITS else self.content(h)
            sections.append(_Section(self.section_names[number], h.kind, h.flags, content, h.size, h.align))
        symtab = len(self.kept) + len(self.applied) + 1
        symbols, places, local = self.symbol_table()
        for number in self.applied:
            h, table = self.headers[number], bytearray()
            at = self.headers[h.info].address
            for offset, info, addend in F.RELA.iter_unpack(self.content(h)):
                if not at <= offset <= at + self.headers[h.info].size - 4 or info >> 32 not in places:
                    self.refuse("a relocation points outside its section or symbol table")
                table += F.RELA.pack(offset - at, places[info >> 32] << 32 | info & 0xFFFFFFFF, addend)
            sections.append(
                _Section(
                    self.section_names[number], F.RELATAB, F.INFO_LINK, table, len(table), 8, symtab, self.numbers[h.info], F.RELA.size
                )
            )
        sections.append(_Section(".symtab", F.SYMTAB, 0, symbols, len(symbols), 8, symtab + 1, local, F.SYM.size))
        sections.append(_Section(".strtab", F.STRTAB, 0, self.strings, len(self.strings)))
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
            table += F.SYM.pack(name, info, other, index, value, size)
        return bytes(table), places, local


def _write(machine: int, sections: Sequence[_Section]) -> bytes:
    """A relocatable object, whose stack need not be executable."""
    all_sections = [*sections, _Section(".note.GNU-stack", F.PROGBITS, 0, b"", 0), _Section(".shstrtab", F.STRTAB, 0, b"", 0)]
    names = F.Strings()
    name_at = [names.add(s.name) for s in all_sections]
    parts, at, headers = list[bytes | bytearray]([b""]), F.EHDR.size, bytearray(F.SHDR.size)
    for s, name in zip(all_sections, name_at, strict=True):
        content = names.data if s.name == ".shstrtab" else s.content
        padding = -at % s.align
        parts += [bytes(padding), content]
        size = max(s.size, len(content))
        headers += F.SHDR.pack(name, s.kind, s.flags, 0, at + padding, size, s.link, s.info, s.align, s.entry)
        at += padding + len(content)
    padding, count = -at % 8, len(all_sections) + 1
    parts[0] = F.EHDR.pack(F.IDENT, 1, machine, 1, 0, 0, at + padding, 0, F.EHDR.size, 0, 0, F.SHDR.size, count, count - 1)
    return b"".join([*parts, bytes(padding), headers])
