"""A static linker: relocatable objects of LLVM in, one shared object out, with no system linker.

The loader is left with adding the load address to absolute pointers and looking up a few imported functions, which are called through
stubs in .plt. Relocations that were applied stay in the file, unloaded, as `ld --emit-relocs` leaves them, so that `elf.relocatable` can
make one object of it again, for static libraries. Source: System V ABI (gABI) chapters 4-5.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tcomp.codegen.elf import format as F
from tcomp.codegen.elf.objects import Object, Section, Symbol
from tcomp.codegen.elf.processors import NONE, PROCESSORS
from tcomp.errors import CodegenError


@dataclass(slots=True, eq=False)
class _Output:
    """One section of the shared object."""

    name: str
    kind: int
    flags: int
    align: int
    data: bytearray = field(default_factory=bytearray)
    entry: int = 0
    link: str = ""
    info: int = 0
    size: int = 0
    address: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        self.size = len(self.data)

    def place(self, section: Section) -> None:
        """Append an input section; its address is relative to this section until the layout."""
        self.align = max(self.align, section.align)
        section.address = F.round_up(self.size, section.align)
        self.size = section.address + section.size
        if self.kind != F.NOBITS:
            self.data.extend(bytes(section.address - len(self.data)) + section.data)


def link(objects: Sequence[bytes], exports: Sequence[str], *, imports: Sequence[str] = (), soname: str = "") -> bytes:
    """The shared object made of `objects`, with the functions `exports` visible to a loader.

    `imports` names the functions (not data) of the C library that may stay undefined; it is recorded as needed only if one of them is used.
    `soname` is the name that programs linked with the library ask for.
    Symbols that are not exported stay in the (unloaded) symbol table, so that profilers name kernels. Raises CodegenError for a malformed
    object, a symbol undefined or defined twice, a relocation that is not position independent or out of reach, and sections this linker
    does not handle (thread-local data, constructors).
    """
    if not objects:
        raise CodegenError("nothing to link: no objects were given")
    parsed = [Object(bytes(data), f"object {index}") for index, data in enumerate(objects)]
    if different := [other for other in parsed if other.machine != parsed[0].machine]:
        raise CodegenError("objects for different processors cannot be linked", where=different[0].where)
    table: dict[str, Symbol] = {}  # global definitions; a strong one wins over weak ones
    for unit in parsed:
        for symbol in unit.symbols:
            if symbol.binding != F.LOCAL and symbol.section is not None:
                other = table.setdefault(symbol.name, symbol)
                if other is not symbol and other.binding == symbol.binding == F.GLOBAL:
                    raise CodegenError(f"symbol {symbol.name!r} is defined twice", where=unit.where)
                if other.binding == F.WEAK:
                    table[symbol.name] = symbol
    if undefined := [name for name in exports if name not in table]:
        raise CodegenError(f"the exported symbol {undefined[0]!r} is not defined by any object")
    return _Linker(parsed, table, list(dict.fromkeys(exports)), frozenset(imports), soname).emit()


class _Linker:
    def __init__(
        self, objects: Sequence[Object], table: dict[str, Symbol], exports: list[str], allowed: frozenset[str], soname: str
    ) -> None:
        self.processor, self.objects, self.table, self.exports = PROCESSORS[objects[0].machine], objects, table, exports
        self.soname = soname
        self.sections = [section for unit in objects for section in unit.sections]
        self.got: dict[Symbol | str, int] = {}  # definition, or name of an import -> number of its slot, then its address
        self.stubs: dict[str, int] = {}  # likewise
        self.imports: dict[str, int] = {}  # name -> index in .dynsym
        self.pointers: list[tuple[Section, int, Symbol | str, int]] = []  # absolute pointers: where, to what, addend
        for section in self.sections:
            for offset, kind, symbol, addend in section.relocations:
                self.scan(section, offset, kind, self.target(symbol), addend, allowed)
        self.out = self.outputs()

    def target(self, symbol: Symbol) -> Symbol | str:
        """The definition that a reference means, or the name of an import."""
        return symbol if symbol.binding == F.LOCAL else self.table.get(symbol.name, symbol.name)

    def scan(self, section: Section, offset: int, kind: int, target: Symbol | str, addend: int, allowed: frozenset[str]) -> None:
        """Note what a reference needs: a GOT slot, a stub, or an absolute pointer."""
        if isinstance(target, str):
            if target not in allowed:
                why = "generated code may call only kernels of its own model and the functions listed as imports"
                raise CodegenError(f"symbol {target!r} is not defined", where=section.where, why=why)
            self.imports.setdefault(target, len(self.imports) + 1)
        elif target.section is None:
            raise CodegenError("a relocation names a symbol without a section", where=section.where)
        if kind == self.processor.absolute:
            if section.output not in (".data", ".bss") or offset + 8 > section.size:
                raise CodegenError("an absolute address in read-only data is not position independent", where=section.where)
            self.pointers.append((section, offset, target, addend))
        elif (patch := self.processor.patches.get(kind)) is not None and patch.got:
            self.got.setdefault(target, len(self.got))
        elif isinstance(target, str):
            self.got.setdefault(target, len(self.got))
            self.stubs.setdefault(target, len(self.stubs))

    def outputs(self) -> dict[str, _Output]:
        """All sections in file order, with their final sizes."""
        strings, names = F.Strings(), [*self.imports, *self.exports]
        self.library = [(1, strings.add("libc.so.6"))] if self.imports else []  # DT_NEEDED
        self.library += [(14, strings.add(self.soname))] if self.soname else []  # DT_SONAME
        self.dynamic_names = [strings.add(name) for name in names]
        relocations, code, data = len(self.pointers) + len(self.got), F.ALLOC | F.EXEC, F.ALLOC | F.WRITE
        outputs = [
            _Output(".hash", F.HASH, F.ALLOC, 8, _hash_table(names), 4, ".dynsym"),
            _Output(".dynsym", F.DYNSYM, F.ALLOC, 8, bytearray(F.SYM.size * (1 + len(names))), F.SYM.size, ".dynstr", 1),
            _Output(".dynstr", F.STRTAB, F.ALLOC, 1, strings.data),
            _Output(".rela.dyn", F.RELATAB, F.ALLOC, 8, bytearray(F.RELA.size * relocations), F.RELA.size, ".dynsym"),
            _Output(".rodata", F.PROGBITS, F.ALLOC, 1),
            _Output(".eh_frame", F.PROGBITS, F.ALLOC, 8),
            _Output(".text", F.PROGBITS, code, 16),
            _Output(".plt", F.PROGBITS, code, 16, bytearray(self.processor.stub_size * len(self.stubs))),
            _Output(".dynamic", F.DYNAMIC, data, 8, bytearray(F.DYN.size * (len(self.library) + 10)), F.DYN.size, ".dynstr"),
            _Output(".got", F.PROGBITS, data, 8, bytearray(8 * len(self.got)), 8),
            _Output(".data", F.PROGBITS, data, 1),
            _Output(".bss", F.NOBITS, data, 1),
        ]
        table = {output.name: output for output in outputs}
        for section in self.sections:
            table[section.output].place(section)
        return {name: output for name, output in table.items() if output.size}

    def lay_out(self) -> list[tuple[int, list[_Output]]]:
        """Give every section its address and file offset; the loadable segments as (protection, sections), without padding in the file: the
        next one starts on a new page at the same offset within the page."""
        protections = ((4, F.ALLOC), (5, F.ALLOC | F.EXEC), (6, F.ALLOC | F.WRITE))
        segments = [(p, members) for p, flags in protections if (members := [x for x in self.out.values() if x.flags == flags])]
        offset = address = F.EHDR.size + F.PHDR.size * (len(segments) + 2)
        for index, (_, members) in enumerate(segments):
            if index:
                address = F.round_up(address, self.processor.page) + offset % self.processor.page
            for output in members:
                if index and output.align > self.processor.page:  # in the first segment, addresses are offsets
                    raise CodegenError(f"section {output.name} wants an alignment of {output.align} bytes, more than a page")
                padding = F.round_up(address, output.align) - address
                output.offset, output.address = offset + padding, address + padding
                offset, address = output.offset + len(output.data), output.address + output.size
        if address >= F.LIMIT:
            raise CodegenError(f"the linked code would take {address >> 20} MiB of address space; at most 2048 can be addressed")
        for section in self.sections:
            section.address += self.out[section.output].address if section.output in self.out else 0
        self.got = {target: self.out[".got"].address + 8 * slot for target, slot in self.got.items()}
        self.stubs = {name: self.out[".plt"].address + self.processor.stub_size * n for name, n in self.stubs.items()}
        return segments

    def relocate(self) -> None:
        for section in self.sections:
            for offset, kind, symbol, addend in section.relocations:
                if kind == self.processor.absolute:
                    continue
                if (patch := self.processor.patches.get(kind)) is None:
                    where = f"{section.where}, reference to {symbol.name or 'a section'!r}"
                    why = "it is unknown, or not position independent"
                    hint = "compile objects with the relocation model 'pic' and the small code model"
                    raise CodegenError(f"relocation type {kind} is not supported", where=where, why=why, hint=hint)
                target, output, place = self.target(symbol), self.out[section.output], section.address + offset
                address = self.got[target] if patch.got else self.stubs[target] if isinstance(target, str) else target.address
                try:
                    patch.apply(output.data, place - output.address, address + addend, place)
                except (OverflowError, struct.error) as problem:
                    what = f"relocation of type {kind} to {symbol.name or 'a section'!r} cannot be resolved"
                    raise CodegenError(what, where=section.where, why=str(problem)) from None

    def relocate_at_load(self) -> int:
        """Write the relocations that are left to the loader; returns how many of them only add the load address."""
        entries = [(section.address + offset, target, addend, self.processor.absolute) for section, offset, target, addend in self.pointers]
        entries += [(slot, target, 0, self.processor.glob_dat) for target, slot in self.got.items()]
        # Relative relocations come first so that DT_RELACOUNT lets the loader treat them in one sweep.
        relative = [(at, self.processor.relative, to.address + addend) for at, to, addend, _ in entries if isinstance(to, Symbol)]
        named = [(at, self.imports[to] << 32 | kind, addend) for at, to, addend, kind in entries if isinstance(to, str)]
        for index, relocation in enumerate([*relative, *named]):
            try:
                F.RELA.pack_into(self.out[".rela.dyn"].data, index * F.RELA.size, *relocation)
            except struct.error as problem:
                raise CodegenError("a pointer in static data cannot be expressed", why=str(problem)) from None
        return len(relative)

    def symbol_tables(self) -> list[_Output]:
        """Fills .dynsym; returns the tables that are not loaded."""
        order = {name: index for index, name in enumerate(self.out, start=1)}
        symbols, strings = bytearray(F.SYM.size), F.Strings()
        numbers: dict[Symbol | str, int] = {}  # in .symtab: of sections and imports by name, of others themselves

        def add(key: Symbol | str, name: str, *rest: int) -> None:
            numbers[key] = len(symbols) // F.SYM.size
            symbols.extend(F.SYM.pack(strings.add(name), *rest))

        for output in self.out.values():
            add(output.name, "", F.SECTION, 0, order[output.name], output.address, 0)
        exported = {self.table[name] for name in self.exports}
        for symbol in (symbol for unit in self.objects for symbol in unit.symbols):
            section, hidden = symbol.section, symbol not in exported and self.target(symbol) is symbol
            named = section is not None and section.size and symbol.kind in (F.FUNC, F.OBJECT)
            if hidden and section is not None and (named or symbol in self.got):
                add(symbol, symbol.name, symbol.kind, 0, order.get(section.output, F.ABSOLUTE), symbol.address, symbol.size)
        local_count = len(symbols) // F.SYM.size
        dynamic = [(F.GLOBAL << 4 | F.FUNC, 0, 0, 0, 0)] * len(self.imports)
        for name in self.exports:
            symbol = self.table[name]
            assert symbol.section is not None
            if not symbol.section.size:
                raise CodegenError(f"the exported symbol {name!r} lies in an empty section")
            dynamic.append((F.GLOBAL << 4 | symbol.kind, 0, order[symbol.section.output], symbol.address, symbol.size))
            add(symbol, name, *dynamic[-1])
        for name in self.imports:
            add(name, name, F.GLOBAL << 4, 0, 0, 0, 0)
        for index, (name_at, rest) in enumerate(zip(self.dynamic_names, dynamic, strict=True), start=1):
            F.SYM.pack_into(self.out[".dynsym"].data, index * F.SYM.size, name_at, *rest)
        tables = [_Output(".symtab", F.SYMTAB, 0, 8, symbols, F.SYM.size, ".strtab", local_count)]
        for name, applied in self.applied_relocations(numbers).items():
            tables.append(_Output(f".rela{name}", F.RELATAB, F.INFO_LINK, 8, applied, F.RELA.size, ".symtab", order[name]))
        return [*tables, _Output(".strtab", F.STRTAB, 0, 1, strings.data)]

    def applied_relocations(self, numbers: Mapping[Symbol | str, int]) -> dict[str, bytearray]:
        """The relocations of the objects, by output section, with final addresses and the `numbers` of symbols in .symtab."""
        kept: dict[str, bytearray] = {}
        for section in self.sections:
            for offset, kind, symbol, addend in section.relocations:
                target, patch = self.target(symbol), self.processor.patches.get(kind)
                if patch is NONE:
                    continue
                key = target
                if isinstance(target, Symbol) and target.section is not None and not (patch is not None and patch.got):
                    key = target.section.output if target.section.output in self.out else section.output  # nothing is in an empty one
                    addend += target.address - self.out[key].address
                entry = F.RELA.pack(section.address + offset, numbers[key] << 32 | kind, addend)
                kept.setdefault(section.output, bytearray()).extend(entry)
        return kept

    def emit(self) -> bytes:
        out, segments = self.out, self.lay_out()
        self.relocate()
        relative = self.relocate_at_load()
        # What the loader has to know: where the tables lie, and how many relocations are relative.
        dynamic = [*self.library, (4, out[".hash"].address), (5, out[".dynstr"].address), (6, out[".dynsym"].address)]
        dynamic += [(10, out[".dynstr"].size), (11, F.SYM.size)]
        if ".rela.dyn" in out:
            dynamic += [(7, out[".rela.dyn"].address), (8, out[".rela.dyn"].size), (9, F.RELA.size), (0x6FFFFFF9, relative)]
        out[".dynamic"].data[: F.DYN.size * len(dynamic)] = b"".join(F.DYN.pack(*tag) for tag in dynamic)
        if self.stubs:
            out[".plt"].data[:] = b"".join(self.processor.stub(at, self.got[name]) for name, at in self.stubs.items())
        return self.file(segments, [*out.values(), *self.symbol_tables()])

    def file(self, segments: list[tuple[int, list[_Output]]], sections: list[_Output]) -> bytes:
        names = F.Strings()
        name_at = {name: names.add(name) for name in (*(output.name for output in sections), ".shstrtab")}
        sections.append(_Output(".shstrtab", F.STRTAB, 0, 1, names.data))
        order = {output.name: index for index, output in enumerate(sections, start=1)}
        end = max(output.offset + len(output.data) for output in self.out.values())
        for output in sections[len(self.out) :]:
            output.offset = F.round_up(end, output.align)
            end = output.offset + len(output.data)
        table = F.round_up(end, 8)
        file = bytearray(table)
        count = len(segments) + 2
        head = (F.EHDR.size, table, 0, F.EHDR.size, F.PHDR.size, count, F.SHDR.size, len(sections) + 1, order[".shstrtab"])
        F.EHDR.pack_into(file, 0, F.IDENT, 3, self.objects[0].machine, 1, 0, *head)
        programs = []
        for index, (protection, members) in enumerate(segments):
            first, last = members[0], members[-1]
            start, begin = (first.offset, first.address) if index else (0, 0)
            stored, used = last.offset + len(last.data) - start, last.address + last.size - begin
            align = max(self.processor.page, *(output.align for output in members))
            programs.append((1, protection, start, begin, begin, stored, used, align))
        dynamic, stack = self.out[".dynamic"], (0x6474E551, 6, 0, 0, 0, 0, 0, 16)  # PT_GNU_STACK: not executable
        programs += [(2, 6, dynamic.offset, dynamic.address, dynamic.address, dynamic.size, dynamic.size, 8), stack]
        file[F.EHDR.size : F.EHDR.size + len(programs) * F.PHDR.size] = b"".join(F.PHDR.pack(*program) for program in programs)
        headers = bytearray(F.SHDR.size)
        for x in sections:
            file[x.offset : x.offset + len(x.data)] = x.data
            place = (x.address, x.offset, x.size, order.get(x.link, 0))
            headers += F.SHDR.pack(*F.Header(name_at[x.name], x.kind, x.flags, *place, x.info, x.align, x.entry))
        return bytes(file + headers)


def _hash_table(names: Sequence[str]) -> bytearray:
    """DT_HASH over the dynamic symbols 1, 2, ... (gABI, chapter 5, "Hash Table")."""
    buckets, chains = [0] * max(1, len(names)), [0] * (len(names) + 1)
    for index, name in enumerate(names, start=1):
        h = 0
        for byte in name.encode():
            h = (h << 4) + byte
            h = (h ^ (h & 0xF0000000) >> 24) & 0x0FFFFFFF
        chains[index], buckets[h % len(buckets)] = buckets[h % len(buckets)], index
    return bytearray(struct.pack(f"<{2 + len(buckets) + len(chains)}I", len(buckets), len(chains), *buckets, *chains))
