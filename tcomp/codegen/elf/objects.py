"""Relocatable objects as LLVM writes them, read and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tcomp.codegen.elf import format as F


@dataclass(slots=True, eq=False)
class Section:
    """One loadable section of one object; `address` is set by the layout."""

    where: str
    output: str
    data: bytes
    size: int
    align: int
    relocations: list[tuple[int, int, Symbol, int]] = field(default_factory=list)  # offset, type, symbol, addend
    address: int = 0


@dataclass(slots=True, eq=False)
class Symbol:
    """A name of one object; `section` is None where it is defined elsewhere."""

    name: str
    binding: int
    kind: int
    section: Section | None
    value: int
    size: int

    @property
    def address(self) -> int:
        """Of a symbol that is defined; relative to the output section until the layout."""
        assert self.section is not None
        return self.section.address + self.value


class Object(F.File):
    """One object."""

    problem = "an object file is malformed or of a kind that cannot be linked"

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(data, 1, where)
        sections = [self._section(header) for header in self.headers]
        self.sections = [section for section in sections if section is not None]
        tables = [index for index, header in enumerate(self.headers) if header.kind == F.SYMTAB]
        if len(tables) > 1 or any(header.kind == F.RELTAB for header in self.headers):
            self.refuse("more than one symbol table, or relocations without addends")
        self.symbols = [symbol for table in tables for symbol in self._read_symbols(self.headers[table], sections)]
        # Objects have no useful names; they are identified by the kernel that they define.
        if defined := next((symbol.name for symbol in self.symbols if symbol.binding != F.LOCAL and symbol.section is not None), ""):
            self.where = f"{where} (defines {defined})"
            for loaded in self.sections:
                loaded.where = self.where + loaded.where.removeprefix(where)
        for header in self.headers:
            target = sections[header.info] if header.kind == F.RELATAB and header.info < len(sections) else None
            if target is not None:  # else something else, or relocations of debug information
                self._read_relocations(header, tables, target)

    def _section(self, header: F.Header) -> Section | None:
        kind, flags, size = header.kind, header.flags, header.size
        if not flags & F.ALLOC:
            return None
        name, align = self.text(self.names, header.name), max(header.align, 1)
        if kind not in (F.PROGBITS, F.NOBITS, F.X86_UNWIND) or flags & F.TLS or name.startswith((".ctors", ".dtors")):
            self.refuse(f"section {name} (type {kind}) holds neither code nor plain data")
        if align & align - 1 or size >= F.LIMIT or (flags & F.EXEC and (flags & F.WRITE or kind == F.NOBITS)):
            self.refuse(f"section {name} has a bad alignment, size or protection")
        # A table without code or data of its own is dropped later; .eh_frame stays separate because its entries must be contiguous.
        output = ".text" if flags & F.EXEC else ".bss" if kind == F.NOBITS else ".data" if flags & F.WRITE else ".rodata"
        content = b"" if kind == F.NOBITS else self.cut(header.offset, header.size)
        return Section(f"{self.where}, section {name}", name if name == ".eh_frame" else output, content, size, align)

    def _read_symbols(self, table: F.Header, sections: Sequence[Section | None]) -> Iterator[Symbol]:
        if table.link >= len(self.headers):
            self.refuse("bad symbol table")
        strings = self.content(self.headers[table.link])
        for name_at, info, _, index, value, extent in F.SYM.iter_unpack(self.content(table)):
            name, special = self.text(strings, name_at), index >= 0xFF00  # absolute (file names), common
            section = sections[index] if index < len(sections) and not special else None
            if index and section is None and info >> 4 != F.LOCAL:
                self.refuse(f"symbol {name!r} is common, absolute or in a section that is not loaded")
            if info >> 4 not in (F.LOCAL, F.GLOBAL, F.WEAK) or (section is not None and (info & 15 > 4 or value > section.size)):
                self.refuse(f"symbol {name!r} is of an unknown kind or lies outside its section")
            yield Symbol(name, info >> 4, info & 15, section, value, extent)

    def _read_relocations(self, header: F.Header, tables: Sequence[int], target: Section) -> None:
        if [header.link] != tables:
            self.refuse("bad relocation table")
        for at, info, addend in F.RELA.iter_unpack(self.content(header)):
            # Every relocation handled here changes 4 or 8 bytes; whether 8 fit is checked by struct for the whole output section.
            if info >> 32 >= len(self.symbols) or at + 4 > len(target.data):
                self.refuse("a relocation points outside its section or symbol table")
            target.relocations.append((at, info & 0xFFFFFFFF, self.symbols[info >> 32], addend))
