"""A static linker: relocatable objects of LLVM in, one shared object out, with no system linker.

The loader is left with adding the load address to absolute pointers and looking up a few imported functions, which are called through
stubs in .plt. Relocations that were applied stay in the file, unloaded, as `ld --emit-relocs` leaves them, so that `codegen.relocatable`
can make one object of it again, for static libraries. Sources: System V ABI (gABI) chapters 4-5; AMD64 psABI section 4.4; ELF for the Arm
64-bit Architecture section 5.7.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from tcomp.errors import CodegenError

_EHDR, _SHDR, _PHDR = map(struct.Struct, ("<16sHHIQQQIHHHHHH", "<IIQQQQIIQQ", "<IIQQQQQQ"))
_SYM, _RELA, _DYN = map(struct.Struct, ("<IBBHQQ", "<QQq", "<qQ"))
_PROGBITS, _SYMTAB, _STRTAB, _RELATAB, _HASH, _DYNAMIC, _NOBITS, _RELTAB, _DYNSYM = 1, 2, 3, 4, 5, 6, 8, 9, 11
_X86_UNWIND = 0x70000001
_WRITE, _ALLOC, _EXEC, _INFO_LINK, _TLS = 1, 2, 4, 0x40, 0x400
_LOCAL, _GLOBAL, _WEAK = 0, 1, 2
_OBJECT, _FUNC, _SECTION = 1, 2, 3
_ABSOLUTE = 0xFFF1  # SHN_ABS: of symbols in no section
_LIMIT = 1 << 31  # PC-relative references reach 2 GiB
_Header = namedtuple("_Header", "name kind flags address offset size link info align entry")  # of a section


@dataclass(slots=True, eq=False)
class _Section:
    """One loadable section of one object; `address` is set by the layout."""

    where: str
    output: str
    data: bytes
    size: int
    align: int
    relocations: list[tuple[int, int, _Symbol, int]] = field(default_factory=list)  # offset, type, symbol, addend
    address: int = 0


@dataclass(slots=True, eq=False)
class _Symbol:
    name: str
    binding: int
    kind: int
    section: _Section | None
    value: int
    size: int

    @property
    def address(self) -> int:
        assert self.section is not None
        return self.section.address + self.value


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

    def place(self, section: _Section) -> None:
        """Append an input section; its address is relative to this section until the layout."""
        self.align = max(self.align, section.align)
        section.address = _up(self.size, section.align)
        self.size = section.address + section.size
        if self.kind != _NOBITS:
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
    parsed = [_Object(bytes(data), f"object {index}") for index, data in enumerate(objects)]
    if different := [other for other in parsed if other.machine != parsed[0].machine]:
        raise CodegenError("objects for different processors cannot be linked", where=different[0].where)
    table: dict[str, _Symbol] = {}  # global definitions; a strong one wins over weak ones
    for unit in parsed:
        for symbol in unit.symbols:
            if symbol.binding != _LOCAL and symbol.section is not None:
                other = table.setdefault(symbol.name, symbol)
                if other is not symbol and other.binding == symbol.binding == _GLOBAL:
                    raise CodegenError(f"symbol {symbol.name!r} is defined twice", where=unit.where)
                if other.binding == _WEAK:
                    table[symbol.name] = symbol
    if undefined := [name for name in exports if name not in table]:
        raise CodegenError(f"the exported symbol {undefined[0]!r} is not defined by any object")
    return _Linker(parsed, table, list(dict.fromkeys(exports)), frozenset(imports), soname).emit()


# ---------------------------------------------------------------- layout


class _Linker:
    def __init__(
        self, objects: Sequence[_Object], table: dict[str, _Symbol], exports: list[str], allowed: frozenset[str], soname: str
    ) -> None:
        self.machine, self.objects, self.table, self.exports = _MACHINES[objects[0].machine], objects, table, exports
        self.soname = soname
        self.sections = [section for unit in objects for section in unit.sections]
        self.got: dict[_Symbol | str, int] = {}  # definition, or name of an import -> number of its slot, then its address
        self.stubs: dict[str, int] = {}  # likewise
        self.imports: dict[str, int] = {}  # name -> index in .dynsym
        self.pointers: list[tuple[_Section, int, _Symbol | str, int]] = []  # absolute pointers: where, to what, addend
        for section in self.sections:
            for offset, kind, symbol, addend in section.relocations:
                self.scan(section, offset, kind, self.target(symbol), addend, allowed)
        self.out = self.outputs()

    def target(self, symbol: _Symbol) -> _Symbol | str:
        """The definition that a reference means, or the name of an import."""
        return symbol if symbol.binding == _LOCAL else self.table.get(symbol.name, symbol.name)

    def scan(self, section: _Section, offset: int, kind: int, target: _Symbol | str, addend: int, allowed: frozenset[str]) -> None:
        """Note what a reference needs: a GOT slot, a stub, or an absolute pointer."""
        if isinstance(target, str):
            if target not in allowed:
                why = "generated code may call only kernels of its own model and the functions listed as imports"
                raise CodegenError(f"symbol {target!r} is not defined", where=section.where, why=why)
            self.imports.setdefault(target, len(self.imports) + 1)
        elif target.section is None:
            raise CodegenError("a relocation names a symbol without a section", where=section.where)
        if kind == self.machine.absolute:
            if section.output not in (".data", ".bss") or offset + 8 > section.size:
                raise CodegenError("an absolute address in read-only data is not position independent", where=section.where)
            self.pointers.append((section, offset, target, addend))
        elif (patch := self.machine.patches.get(kind)) is not None and patch.got:
            self.got.setdefault(target, len(self.got))
        elif isinstance(target, str):
            self.got.setdefault(target, len(self.got))
            self.stubs.setdefault(target, len(self.stubs))

    def outputs(self) -> dict[str, _Output]:
        """All sections in file order, with their final sizes."""
        strings, names = _Strings(), [*self.imports, *self.exports]
        self.library = [(1, strings.add("libc.so.6"))] if self.imports else []  # DT_NEEDED
        self.library += [(14, strings.add(self.soname))] if self.soname else []  # DT_SONAME
        self.dynamic_names = [strings.add(name) for name in names]
        relocations, code, data = len(self.pointers) + len(self.got), _ALLOC | _EXEC, _ALLOC | _WRITE
        outputs = [
            _Output(".hash", _HASH, _ALLOC, 8, _hash_table(names), 4, ".dynsym"),
            _Output(".dynsym", _DYNSYM, _ALLOC, 8, bytearray(_SYM.size * (1 + len(names))), _SYM.size, ".dynstr", 1),
            _Output(".dynstr", _STRTAB, _ALLOC, 1, strings.data),
            _Output(".rela.dyn", _RELATAB, _ALLOC, 8, bytearray(_RELA.size * relocations), _RELA.size, ".dynsym"),
            _Output(".rodata", _PROGBITS, _ALLOC, 1),
            _Output(".eh_frame", _PROGBITS, _ALLOC, 8),
            _Output(".text", _PROGBITS, code, 16),
            _Output(".plt", _PROGBITS, code, 16, bytearray(self.machine.stub_size * len(self.stubs))),
            _Output(".dynamic", _DYNAMIC, data, 8, bytearray(_DYN.size * (len(self.library) + 10)), _DYN.size, ".dynstr"),
            _Output(".got", _PROGBITS, data, 8, bytearray(8 * len(self.got)), 8),
            _Output(".data", _PROGBITS, data, 1),
            _Output(".bss", _NOBITS, data, 1),
        ]
        table = {output.name: output for output in outputs}
        for section in self.sections:
            table[section.output].place(section)
        return {name: output for name, output in table.items() if output.size}

    def lay_out(self) -> list[tuple[int, list[_Output]]]:
        """Give every section its address and file offset; the loadable segments as (protection, sections), without padding in the file: the
        next one starts on a new page at the same offset within the page."""
        protections = ((4, _ALLOC), (5, _ALLOC | _EXEC), (6, _ALLOC | _WRITE))
        segments = [(p, members) for p, flags in protections if (members := [x for x in self.out.values() if x.flags == flags])]
        offset = address = _EHDR.size + _PHDR.size * (len(segments) + 2)
        for index, (_, members) in enumerate(segments):
            if index:
                address = _up(address, self.machine.page) + offset % self.machine.page
            for output in members:
                if index and output.align > self.machine.page:  # in the first segment, addresses are offsets
                    raise CodegenError(f"section {output.name} wants an alignment of {output.align} bytes, more than a page")
                padding = _up(address, output.align) - address
                output.offset, output.address = offset + padding, address + padding
                offset, address = output.offset + len(output.data), output.address + output.size
        if address >= _LIMIT:
            raise CodegenError(f"the linked code would take {address >> 20} MiB of address space; at most 2048 can be addressed")
        for section in self.sections:
            section.address += self.out[section.output].address if section.output in self.out else 0
        self.got = {target: self.out[".got"].address + 8 * slot for target, slot in self.got.items()}
        self.stubs = {name: self.out[".plt"].address + self.machine.stub_size * n for name, n in self.stubs.items()}
        return segments

    def relocate(self) -> None:
        for section in self.sections:
            for offset, kind, symbol, addend in section.relocations:
                if kind == self.machine.absolute:
                    continue
                if (patch := self.machine.patches.get(kind)) is None:
                    where = f"{section.where}, reference to {symbol.name or 'a section'!r}"
                    why, hint = (
                        "it is unknown, or not position independent",
                        "compile objects with the relocation model 'pic' and the small code model",
                    )
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
        entries = [(section.address + offset, target, addend, self.machine.absolute) for section, offset, target, addend in self.pointers]
        entries += [(slot, target, 0, self.machine.glob_dat) for target, slot in self.got.items()]
        # Relative relocations come first so that DT_RELACOUNT lets the loader treat them in one sweep.
        relative = [(at, self.machine.relative, to.address + addend) for at, to, addend, _ in entries if isinstance(to, _Symbol)]
        named = [(at, self.imports[to] << 32 | kind, addend) for at, to, addend, kind in entries if isinstance(to, str)]
        for index, relocation in enumerate([*relative, *named]):
            try:
                _RELA.pack_into(self.out[".rela.dyn"].data, index * _RELA.size, *relocation)
            except struct.error as problem:
                raise CodegenError("a pointer in static data cannot be expressed", why=str(problem)) from None
        return len(relative)

    def symbol_tables(self) -> list[_Output]:
        """Fills .dynsym; returns the tables that are not loaded."""
        order = {name: index for index, name in enumerate(self.out, start=1)}
        symbols, strings = bytearray(_SYM.size), _Strings()
        numbers: dict[_Symbol | str, int] = {}  # in .symtab: of sections and imports by name, of others themselves

        def add(key: _Symbol | str, name: str, *rest: int) -> None:
            numbers[key] = len(symbols) // _SYM.size
            symbols.extend(_SYM.pack(strings.add(name), *rest))

        for output in self.out.values():
            add(output.name, "", _SECTION, 0, order[output.name], output.address, 0)
        exported = {self.table[name] for name in self.exports}
        for symbol in (symbol for unit in self.objects for symbol in unit.symbols):
            section, hidden = symbol.section, symbol not in exported and self.target(symbol) is symbol
            named = section is not None and section.size and symbol.kind in (_FUNC, _OBJECT)
            if hidden and section is not None and (named or symbol in self.got):
                add(symbol, symbol.name, symbol.kind, 0, order.get(section.output, _ABSOLUTE), symbol.address, symbol.size)
        local_count = len(symbols) // _SYM.size
        dynamic = [(_GLOBAL << 4 | _FUNC, 0, 0, 0, 0)] * len(self.imports)
        for name in self.exports:
            symbol = self.table[name]
            assert symbol.section is not None
            if not symbol.section.size:
                raise CodegenError(f"the exported symbol {name!r} lies in an empty section")
            dynamic.append((_GLOBAL << 4 | symbol.kind, 0, order[symbol.section.output], symbol.address, symbol.size))
            add(symbol, name, *dynamic[-1])
        for name in self.imports:
            add(name, name, _GLOBAL << 4, 0, 0, 0, 0)
        for index, (name_at, rest) in enumerate(zip(self.dynamic_names, dynamic, strict=True), start=1):
            _SYM.pack_into(self.out[".dynsym"].data, index * _SYM.size, name_at, *rest)
        tables = [_Output(".symtab", _SYMTAB, 0, 8, symbols, _SYM.size, ".strtab", local_count)]
        for name, applied in self.applied_relocations(numbers).items():
            tables.append(_Output(f".rela{name}", _RELATAB, _INFO_LINK, 8, applied, _RELA.size, ".symtab", order[name]))
        return [*tables, _Output(".strtab", _STRTAB, 0, 1, strings.data)]

    def applied_relocations(self, numbers: Mapping[_Symbol | str, int]) -> dict[str, bytearray]:
        """The relocations of the objects, by output section, with final addresses and the `numbers` of symbols in .symtab."""
        kept: dict[str, bytearray] = {}
        for section in self.sections:
            for offset, kind, symbol, addend in section.relocations:
                target, patch = self.target(symbol), self.machine.patches.get(kind)
                if patch is _NONE:
                    continue
                key = target
                if isinstance(target, _Symbol) and target.section is not None and not (patch is not None and patch.got):
                    key = target.section.output if target.section.output in self.out else section.output  # nothing is in an empty one
                    addend += target.address - self.out[key].address
                entry = _RELA.pack(section.address + offset, numbers[key] << 32 | kind, addend)
                kept.setdefault(section.output, bytearray()).extend(entry)
        return kept

    def emit(self) -> bytes:
        out, segments = self.out, self.lay_out()
        self.relocate()
        relative = self.relocate_at_load()
        # What the loader has to know: where the tables lie, and how many relocations are relative.
        dynamic = [*self.library, (4, out[".hash"].address), (5, out[".dynstr"].address), (6, out[".dynsym"].address)]
        dynamic += [(10, out[".dynstr"].size), (11, _SYM.size)]
        if ".rela.dyn" in out:
            dynamic += [(7, out[".rela.dyn"].address), (8, out[".rela.dyn"].size), (9, _RELA.size), (0x6FFFFFF9, relative)]
        out[".dynamic"].data[: _DYN.size * len(dynamic)] = b"".join(_DYN.pack(*tag) for tag in dynamic)
        if self.stubs:
            out[".plt"].data[:] = b"".join(self.machine.stub(at, self.got[name]) for name, at in self.stubs.items())
        return self.file(segments, [*out.values(), *self.symbol_tables()])

    def file(self, segments: list[tuple[int, list[_Output]]], sections: list[_Output]) -> bytes:
        names = _Strings()
        name_at = {name: names.add(name) for name in (*(output.name for output in sections), ".shstrtab")}
        sections.append(_Output(".shstrtab", _STRTAB, 0, 1, names.data))
        order = {output.name: index for index, output in enumerate(sections, start=1)}
        end = max(output.offset + len(output.data) for output in self.out.values())
        for output in sections[len(self.out) :]:
            output.offset = _up(end, output.align)
            end = output.offset + len(output.data)
        table = _up(end, 8)
        file = bytearray(table)
        ident, count = b"\x7fELF\x02\x01\x01".ljust(16, b"\0"), len(segments) + 2
        head = (_EHDR.size, table, 0, _EHDR.size, _PHDR.size, count, _SHDR.size, len(sections) + 1, order[".shstrtab"])
        _EHDR.pack_into(file, 0, ident, 3, self.objects[0].machine, 1, 0, *head)
        programs = []
        for index, (protection, members) in enumerate(segments):
            first, last = members[0], members[-1]
            start, begin = (first.offset, first.address) if index else (0, 0)
            stored, used = last.offset + len(last.data) - start, last.address + last.size - begin
            align = max(self.machine.page, *(output.align for output in members))
            programs.append((1, protection, start, begin, begin, stored, used, align))
        dynamic, stack = self.out[".dynamic"], (0x6474E551, 6, 0, 0, 0, 0, 0, 16)  # PT_GNU_STACK: not executable
        programs += [(2, 6, dynamic.offset, dynamic.address, dynamic.address, dynamic.size, dynamic.size, 8), stack]
        file[_EHDR.size : _EHDR.size + len(programs) * _PHDR.size] = b"".join(_PHDR.pack(*program) for program in programs)
        headers = bytearray(_SHDR.size)
        for x in sections:
            file[x.offset : x.offset + len(x.data)] = x.data
            place = (x.address, x.offset, x.size, order.get(x.link, 0))
            headers += _SHDR.pack(*_Header(name_at[x.name], x.kind, x.flags, *place, x.info, x.align, x.entry))
        return bytes(file + headers)


def _up(value: int, align: int) -> int:
    return (value + align - 1) & -align


class _Strings:
    """A string table."""

    def __init__(self) -> None:
        self.data = bytearray(1)
        self.at: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        """The offset of a string, which is appended if it is new."""
        if text not in self.at:
            self.at[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self.at[text]


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


# ---------------------------------------------------------------- processors


def _signed(value: int, bits: int) -> int:
    """`value` as a `bits`-wide two's complement field. Raises OverflowError if it does not fit."""
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise OverflowError(f"the distance {value} does not fit in {bits} bits")
    return value & (1 << bits) - 1


def _page_offset(target: int, place: int) -> int:
    """The immediate of ADRP, spread over its two fields (bits 29-30 and 5-23)."""
    pages = _signed((target >> 12) - (place >> 12), 21)
    return (pages & 3) << 29 | pages >> 2 << 5


@dataclass(frozen=True, slots=True)
class _Patch:
    """The field that a relocation changes: a distance of 32 or 64 bits, or the immediate of an instruction (`shift`: log2 of the bytes it
    accesses). `got`: it refers to the GOT slot of the target."""

    field: str
    got: bool = False
    shift: int = 0

    def apply(self, data: bytearray, at: int, target: int, place: int) -> None:
        """Patch `data` for a reference from the address `place`. Raises `OverflowError` or `struct.error` for what does not fit."""
        if self.field == "none":
            return
        if self.field == "distance64":
            struct.pack_into("<q", data, at, target - place)
            return
        (code,) = struct.unpack_from("<I", data, at)
        match self.field:
            case "distance32":
                code = _signed(target - place, 32)
            case "branch26":
                if (target - place) % 4:
                    raise OverflowError("the target of a branch is not aligned to an instruction")
                code = code & 0xFC000000 | _signed((target - place) >> 2, 26)
            case "page":
                code = code & 0x9F00001F | _page_offset(target, place)
            case "low12":
                low = target & 0xFFF
                if low & (1 << self.shift) - 1:
                    raise OverflowError(f"the address is not aligned to the {1 << self.shift} bytes that the instruction loads")
                code = code & 0xFFC003FF | low >> self.shift << 10
        struct.pack_into("<I", data, at, code)


@dataclass(frozen=True, slots=True)
class _Machine:
    """The processor-specific part: relocation types, by number, and stubs."""

    page: int  # the largest page size a kernel may use
    absolute: int  # 64-bit absolute relocation
    relative: int  # dynamic: load address + addend
    glob_dat: int  # dynamic: address of an imported symbol
    stub_size: int
    stub: Callable[[int, int], bytes]  # (address of the stub, address of its GOT slot) -> a jump there (x86: jmp *slot(%rip))
    patches: Mapping[int, _Patch]


def _stub_aarch64(address: int, slot: int) -> bytes:
    adrp = 0x90000010 | _page_offset(slot, address)  # adrp x16, slot
    ldr = 0xF9400211 | (slot & 0xFFF) >> 3 << 10  # ldr x17, [x16, :lo12:slot]
    return struct.pack("<4I", adrp, ldr, 0xD61F0220, 0xD503201F)  # br x17; nop


_NONE, _PC32, _PC64, _BRANCH = map(_Patch, ("none", "distance32", "distance64", "branch26"))
_X86_64_PATCHES = {
    0: _NONE, 2: _PC32, 4: _PC32, 24: _PC64,  # NONE, PC32, PLT32, PC64
    **dict.fromkeys((9, 41, 42), _Patch("distance32", got=True)),  # GOTPCREL, GOTPCRELX, REX_GOTPCRELX
}  # fmt: skip
_AARCH64_PATCHES = {
    0: _NONE, 256: _NONE, 261: _PC32, 314: _PC32, 260: _PC64,  # NONE, PREL32, PLT32, PREL64
    282: _BRANCH, 283: _BRANCH, 275: _Patch("page"), 311: _Patch("page", got=True),  # JUMP26, CALL26, ADR_PREL_PG_HI21, ADR_GOT_PAGE
    **{kind: _Patch("low12", shift=n) for kind, n in ((277, 0), (278, 0), (284, 1), (285, 2), (286, 3), (299, 4))},  # ADD, LDST8 to LDST128
    312: _Patch("low12", got=True, shift=3),  # LD64_GOT_LO12_NC
}  # fmt: skip
_MACHINES = {
    62: _Machine(0x1000, 1, 8, 6, 8, lambda at, slot: b"\xff\x25" + struct.pack("<i", slot - at - 6) + b"\xcc\xcc", _X86_64_PATCHES),
    183: _Machine(0x10000, 257, 1027, 1025, 16, _stub_aarch64, _AARCH64_PATCHES),
}


# ---------------------------------------------------------------- reading objects


class _Object:
    """One object, checked: every offset, index and name in it may be wrong."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where = data, where
        ident, kind, self.machine, _, _, _, table_at, _, _, _, _, entry, count, names_at = _EHDR.unpack(self.cut(0, _EHDR.size))
        if ident[:6] != b"\x7fELF\x02\x01" or kind != 1:
            self.refuse("not a little-endian 64-bit ELF relocatable object")
        if self.machine not in _MACHINES:
            self.refuse(f"unknown processor (ELF machine {self.machine})")
        if entry != _SHDR.size or names_at >= count:
            self.refuse("bad section header table")
        self.headers = [_Header(*fields) for fields in _SHDR.iter_unpack(self.cut(table_at, count * entry))]
        self.names = self.cut(self.headers[names_at].offset, self.headers[names_at].size)
        sections = [self.section(header) for header in self.headers]
        self.sections = [section for section in sections if section is not None]
        tables = [index for index, header in enumerate(self.headers) if header.kind == _SYMTAB]
        if len(tables) > 1 or any(header.kind == _RELTAB for header in self.headers):
            self.refuse("more than one symbol table, or relocations without addends")
        self.symbols = [symbol for table in tables for symbol in self.read_symbols(self.headers[table], sections)]
        # Objects have no useful names; they are identified by the kernel that they define.
        if defined := next((symbol.name for symbol in self.symbols if symbol.binding != _LOCAL and symbol.section is not None), ""):
            self.where = f"{where} (defines {defined})"
            for loaded in self.sections:
                loaded.where = self.where + loaded.where.removeprefix(where)
        for header in self.headers:
            target = sections[header.info] if header.kind == _RELATAB and header.info < len(sections) else None
            if target is not None:  # else something else, or relocations of debug information
                self.read_relocations(header, tables, target)

    def refuse(self, why: str) -> NoReturn:
        raise CodegenError("an object file is malformed or of a kind that cannot be linked", where=self.where, why=why)

    def cut(self, offset: int, size: int) -> bytes:
        """Bytes of the file, checked to lie inside."""
        if offset + size > len(self.data):
            self.refuse(f"{size} bytes at offset {offset} lie outside the file of {len(self.data)} bytes")
        return self.data[offset : offset + size]

    def text(self, table: bytes, offset: int) -> str:
        end = table.find(b"\0", offset)
        if end < 0:
            self.refuse("a name lies outside its string table")
        try:
            return table[offset:end].decode()
        except UnicodeDecodeError:
            self.refuse("a name is not UTF-8")

    def section(self, header: _Header) -> _Section | None:
        kind, flags, size = header.kind, header.flags, header.size
        if not flags & _ALLOC:
            return None
        name, align = self.text(self.names, header.name), max(header.align, 1)
        if kind not in (_PROGBITS, _NOBITS, _X86_UNWIND) or flags & _TLS or name.startswith((".ctors", ".dtors")):
            self.refuse(f"section {name} (type {kind}) holds neither code nor plain data")
        if align & align - 1 or size >= _LIMIT or (flags & _EXEC and (flags & _WRITE or kind == _NOBITS)):
            self.refuse(f"section {name} has a bad alignment, size or protection")
        # A table without code or data of its own is dropped later; .eh_frame stays separate because its entries must be contiguous.
        output = ".text" if flags & _EXEC else ".bss" if kind == _NOBITS else ".data" if flags & _WRITE else ".rodata"
        content = b"" if kind == _NOBITS else self.cut(header.offset, header.size)
        return _Section(f"{self.where}, section {name}", name if name == ".eh_frame" else output, content, size, align)

    def read_symbols(self, table: _Header, sections: Sequence[_Section | None]) -> Iterator[_Symbol]:
        if table.size % _SYM.size or table.link >= len(self.headers):
            self.refuse("bad symbol table")
        strings = self.cut(self.headers[table.link].offset, self.headers[table.link].size)
        for name_at, info, _, index, value, extent in _SYM.iter_unpack(self.cut(table.offset, table.size)):
            name, special = self.text(strings, name_at), index >= 0xFF00  # absolute (file names), common
            section = sections[index] if index < len(sections) and not special else None
            if index and section is None and info >> 4 != _LOCAL:
                self.refuse(f"symbol {name!r} is common, absolute or in a section that is not loaded")
            if info >> 4 not in (_LOCAL, _GLOBAL, _WEAK) or (section is not None and (info & 15 > 4 or value > section.size)):
                self.refuse(f"symbol {name!r} is of an unknown kind or lies outside its section")
            yield _Symbol(name, info >> 4, info & 15, section, value, extent)

    def read_relocations(self, header: _Header, tables: Sequence[int], target: _Section) -> None:
        if [header.link] != tables or header.size % _RELA.size:
            self.refuse("bad relocation table")
        for at, info, addend in _RELA.iter_unpack(self.cut(header.offset, header.size)):
            # Every relocation handled here changes 4 or 8 bytes; whether 8 fit is checked by struct for the whole output section.
            if info >> 32 >= len(self.symbols) or at + 4 > len(target.data):
                self.refuse("a relocation points outside its section or symbol table")
            target.relocations.append((at, info & 0xFFFFFFFF, self.symbols[info >> 32], addend))
