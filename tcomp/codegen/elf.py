"""A static linker: relocatable objects in, one shared object out, with no system linker.

LLVM compiles every kernel alone into a position-independent ELF object. `link` lays these out as

    R   headers, .hash, .dynsym, .dynstr, .rela.dyn, .rodata, .eh_frame
    RX  .text, .plt
    RW  .dynamic, .got, .data, .bss
    --  .symtab, .strtab, .shstrtab        (not loaded: names for profilers and debuggers)

and resolves the references between them. What remains for the dynamic loader is to add the load address to absolute
pointers and to look up the few imported functions. Imported *functions* are reached through a stub in .plt that jumps
through .got, bound at load.

Sources: System V ABI (gABI) chapters 4-5; AMD64 psABI section 4.4; ELF for the Arm 64-bit Architecture (AAELF64)
section 5.7.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from tcomp.errors import CodegenError

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_SHDR = struct.Struct("<IIQQQQIIQQ")
_PHDR = struct.Struct("<IIQQQQQQ")
_SYM = struct.Struct("<IBBHQQ")
_RELA = struct.Struct("<QQq")
_DYN = struct.Struct("<qQ")

_PROGBITS, _SYMTAB, _STRTAB, _RELATAB, _HASH, _DYNAMIC, _NOBITS, _RELTAB, _DYNSYM = 1, 2, 3, 4, 5, 6, 8, 9, 11
_X86_UNWIND = 0x70000001
_WRITE, _ALLOC, _EXEC, _TLS = 1, 2, 4, 0x400
_LOCAL, _GLOBAL, _WEAK = 0, 1, 2
_OBJECT, _FUNC = 1, 2
_LIMIT = 1 << 31  # PC-relative references reach 2 GiB


@dataclass(slots=True, eq=False)
class _Section:
    """One loadable section of one object; `address` is set by the layout."""

    where: str
    output: str
    data: bytearray
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
        """The address in the shared object, once it is laid out."""
        assert self.section is not None
        return self.section.address + self.value


@dataclass(slots=True)
class _Object:
    where: str
    machine: int
    sections: list[_Section]
    symbols: list[_Symbol]


@dataclass(slots=True, eq=False)
class _Output:
    """One section of the shared object."""

    name: str
    kind: int
    flags: int
    align: int
    data: bytearray = field(default_factory=bytearray)
    size: int = 0
    entry: int = 0
    link: str = ""
    info: int = 0
    address: int = 0
    offset: int = 0

    def place(self, section: _Section) -> None:
        """Append an input section; its address is relative to this section until `_lay_out` knows better."""
        self.align = max(self.align, section.align)
        section.address = _up(self.size, section.align)
        self.size = section.address + section.size
        if self.kind != _NOBITS:
            self.data.extend(bytes(section.address - len(self.data)))
            self.data.extend(section.data)


@dataclass(frozen=True, slots=True)
class _Machine:
    """What differs between processors. `patch(data, at, type, S + A, GOT + A, P)` returns False for an unknown type."""

    page: int  # the largest page size a kernel may use
    absolute: int  # 64-bit absolute relocation
    relative: int  # dynamic: load address + addend
    glob_dat: int  # dynamic: address of an imported symbol
    got_types: frozenset[int]
    stub_size: int
    stub: Callable[[int, int], bytes]  # (address of the stub, address of its GOT slot) -> code
    patch: Callable[[bytearray, int, int, int, int, int], bool]


def link(objects: Sequence[bytes], exports: Sequence[str], *, imports: Sequence[str] = ()) -> bytes:
    """The shared object made of `objects`, with the functions `exports` visible to a loader.

    `imports` names the functions (not data) of the C library that may stay undefined; it is recorded as needed only if one of
    them is used. Symbols that are not exported stay in the (unloaded) symbol table, so that profilers name kernels. The
    result depends on nothing but the arguments. Raises CodegenError for a malformed object, a symbol undefined or
    defined twice, a relocation that is not position independent or out of reach, and sections this linker does not
    handle (thread-local data, constructors).
    """
    if not objects:
        raise CodegenError("nothing to link: no objects were given")
    parsed = [_parse(bytes(data), f"object {index}") for index, data in enumerate(objects)]
    number = parsed[0].machine
    for other in parsed:
        if other.machine != number:
            raise CodegenError("objects for different processors cannot be linked", where=other.where)
    machine = _MACHINES[number]
    table = _definitions(parsed)
    for name in exports:
        if name not in table:
            raise CodegenError(f"the exported symbol {name!r} is not defined by any object")
    return _Linker(machine, parsed, table, list(dict.fromkeys(exports)), frozenset(imports)).emit(number)


def _definitions(objects: Iterable[_Object]) -> dict[str, _Symbol]:
    """Global definitions by name; a strong one wins over weak ones, two strong ones are an error."""
    table: dict[str, _Symbol] = {}
    for unit in objects:
        for symbol in unit.symbols:
            if symbol.binding == _LOCAL or symbol.section is None:
                continue
            other = table.get(symbol.name)
            if other is not None and other.binding == symbol.binding == _GLOBAL:
                raise CodegenError(f"symbol {symbol.name!r} is defined twice", where=unit.where)
            if other is None or other.binding == _WEAK:
                table[symbol.name] = symbol
    return table


# ---- layout --------------------------------------------------------------------------------------


class _Linker:
    def __init__(
        self, machine: _Machine, objects: list[_Object], table: dict[str, _Symbol], exports: list[str], allowed: frozenset[str]
    ) -> None:
        self.machine, self.objects, self.table, self.exports = machine, objects, table, exports
        self.sections = [section for unit in objects for section in unit.sections]
        self.got: dict[_Symbol | str, int] = {}  # definition, or name of an import -> slot
        self.stubs: dict[str, int] = {}
        self.imports: dict[str, int] = {}  # name -> index in .dynsym
        self.pointers: list[tuple[_Section, int, _Symbol | str, int]] = []  # absolute pointers: where, to what, addend
        self._scan(allowed)
        self.out = self._outputs()

    def _target(self, symbol: _Symbol) -> _Symbol | str:
        """The definition a reference means, or the name of an import."""
        if symbol.binding == _LOCAL:
            return symbol
        return self.table.get(symbol.name, symbol.name)

    def _scan(self, allowed: frozenset[str]) -> None:
        """Collect what the references need: GOT slots, stubs, absolute pointers."""
        for section in self.sections:
            for offset, kind, symbol, addend in section.relocations:
                target = self._target(symbol)
                if isinstance(target, str):
                    if target not in allowed:
                        raise CodegenError(
                            f"symbol {target!r} is not defined",
                            where=section.where,
                            why="generated code may call only kernels of its own model and the functions listed as imports",
                        )
                    self.imports.setdefault(target, len(self.imports) + 1)
                elif target.section is None:
                    raise CodegenError("a relocation names a symbol without a section", where=section.where)
                if kind == self.machine.absolute:
                    if section.output not in (".data", ".bss") or offset + 8 > section.size:
                        raise CodegenError("an absolute address in read-only data is not position independent", where=section.where)
                    self.pointers.append((section, offset, target, addend))
                elif kind in self.machine.got_types:
                    self.got.setdefault(target, len(self.got))
                elif isinstance(target, str):
                    self.got.setdefault(target, len(self.got))
                    self.stubs.setdefault(target, len(self.stubs))

    def _outputs(self) -> dict[str, _Output]:
        """All sections in file order, with their final sizes."""
        strings = _Strings()
        self.library = strings.add("libc.so.6") if self.imports else None  # its name, if it is needed
        self.dynamic_names = [strings.add(name) for name in (*self.imports, *self.exports)]
        outputs = [
            _Output(".hash", _HASH, _ALLOC, 8, _hash_table([*self.imports, *self.exports]), entry=4, link=".dynsym"),
            _Output(".dynsym", _DYNSYM, _ALLOC, 8, bytearray(_SYM.size * (1 + len(self.dynamic_names))), 0, _SYM.size, ".dynstr", 1),
            _Output(".dynstr", _STRTAB, _ALLOC, 1, strings.data),
            _Output(".rela.dyn", _RELATAB, _ALLOC, 8, bytearray(24 * (len(self.pointers) + len(self.got))), 0, _RELA.size, ".dynsym"),
            _Output(".rodata", _PROGBITS, _ALLOC, 1),
            _Output(".eh_frame", _PROGBITS, _ALLOC, 8),
            _Output(".text", _PROGBITS, _ALLOC | _EXEC, 16),
            _Output(".plt", _PROGBITS, _ALLOC | _EXEC, 16, bytearray(self.machine.stub_size * len(self.stubs))),
            _Output(
                ".dynamic", _DYNAMIC, _ALLOC | _WRITE, 8, bytearray(_DYN.size * ((self.library is not None) + 10)), 0, _DYN.size, ".dynstr"
            ),
            _Output(".got", _PROGBITS, _ALLOC | _WRITE, 8, bytearray(8 * len(self.got)), 0, 8),
            _Output(".data", _PROGBITS, _ALLOC | _WRITE, 1),
            _Output(".bss", _NOBITS, _ALLOC | _WRITE, 1),
        ]
        table = {output.name: output for output in outputs}
        for output in outputs:
            output.size = len(output.data)
        for section in self.sections:
            table[section.output].place(section)
        return {name: output for name, output in table.items() if output.size}

    def _lay_out(self) -> list[tuple[int, list[_Output]]]:
        """Give every section its address and file offset; the loadable segments as (flags, sections).

        Segments follow each other in the file without padding: the next one starts on a new page at the same offset
        within the page.
        """
        segments: list[tuple[int, list[_Output]]] = []
        for protection, flags in ((4, _ALLOC), (5, _ALLOC | _EXEC), (6, _ALLOC | _WRITE)):
            members = [output for output in self.out.values() if output.flags == flags]
            if members:
                segments.append((protection, members))
        offset = address = _EHDR.size + _PHDR.size * (len(segments) + 2)
        for index, (_, members) in enumerate(segments):
            if index:
                address = _up(address, self.machine.page) + offset % self.machine.page
            for output in members:
                if output.align > self.machine.page:
                    raise CodegenError(f"section {output.name} wants an alignment of {output.align} bytes, more than a page")
                padding = _up(address, output.align) - address
                offset, address = offset + padding, address + padding
                output.offset, output.address = offset, address
                offset += len(output.data)
                address += output.size
        if address >= _LIMIT:
            raise CodegenError(f"the linked code would take {address >> 20} MiB of address space; at most 2048 can be addressed")
        for section in self.sections:
            section.address += self.out[section.output].address if section.output in self.out else 0
        return segments

    # ---- contents --------------------------------------------------------------------------------

    def _address(self, target: _Symbol | str) -> int:
        if isinstance(target, str):
            return self.out[".plt"].address + self.machine.stub_size * self.stubs[target] if target in self.stubs else 0
        return target.address

    def _relocate(self) -> None:
        got = self.out[".got"].address if self.got else 0
        for section in self.sections:
            output = self.out.get(section.output)
            for offset, kind, symbol, addend in section.relocations:
                if kind == self.machine.absolute:
                    continue
                assert output is not None  # a section with relocations is not empty
                target = self._target(symbol)
                place = section.address + offset
                slot = got + 8 * self.got[target] + addend if target in self.got else 0
                try:
                    known = self.machine.patch(output.data, place - output.address, kind, self._address(target) + addend, slot, place)
                except (OverflowError, struct.error) as problem:
                    raise CodegenError(
                        f"relocation of type {kind} to {symbol.name or 'a section'!r} cannot be resolved",
                        where=section.where,
                        why=str(problem),
                    ) from None
                if not known:
                    raise CodegenError(
                        f"relocation type {kind} is not supported",
                        where=f"{section.where}, reference to {symbol.name or 'a section'!r}",
                        why="it is unknown, or not position independent",
                        hint="compile objects with the relocation model 'pic' and the small code model",
                    )

    def _relocate_at_load(self) -> int:
        """What is left to the loader; returns how many of these relocations only add the load address."""
        out, machine = self.out, self.machine
        # Relative relocations come first so that DT_RELACOUNT lets the loader treat them in one sweep.
        entries = [(section.address + offset, target, addend, machine.absolute) for section, offset, target, addend in self.pointers]
        entries += [(out[".got"].address + 8 * slot, target, 0, machine.glob_dat) for target, slot in self.got.items()]
        relocations = [
            (place, machine.relative, target.address + addend) for place, target, addend, _ in entries if isinstance(target, _Symbol)
        ]
        relative = len(relocations)
        relocations += [
            (place, self.imports[target] << 32 | kind, addend) for place, target, addend, kind in entries if isinstance(target, str)
        ]
        for index, relocation in enumerate(relocations):
            try:
                _RELA.pack_into(out[".rela.dyn"].data, index * _RELA.size, *relocation)
            except struct.error as problem:
                raise CodegenError("a pointer in static data cannot be expressed", why=str(problem)) from None
        return relative

    def _write_stubs(self) -> None:
        for name, index in self.stubs.items():
            plt, at = self.out[".plt"], index * self.machine.stub_size
            code = self.machine.stub(plt.address + at, self.out[".got"].address + 8 * self.got[name])
            plt.data[at : at + self.machine.stub_size] = code

    def _symbols(self) -> list[_Output]:
        """Fills .dynsym; returns the tables that are not loaded."""
        order = {name: index for index, name in enumerate(self.out, start=1)}
        dynamic = self.out[".dynsym"].data
        symbols, strings = bytearray(_SYM.size), _Strings()
        exported = {self.table[name] for name in self.exports}
        for unit in self.objects:
            for symbol in unit.symbols:
                named = symbol.section is not None and symbol.section.size and symbol.kind in (_FUNC, _OBJECT)
                if named and symbol.section is not None and symbol not in exported and self._target(symbol) is symbol:
                    index = order[symbol.section.output]
                    symbols += _SYM.pack(strings.add(symbol.name), symbol.kind, 0, index, symbol.address, symbol.size)
        local_count = len(symbols) // _SYM.size
        for index in range(1, len(self.imports) + 1):
            _SYM.pack_into(dynamic, index * _SYM.size, self.dynamic_names[index - 1], _GLOBAL << 4 | _FUNC, 0, 0, 0, 0)
        for index, name in enumerate(self.exports, start=1 + len(self.imports)):
            symbol = self.table[name]
            assert symbol.section is not None
            if not symbol.section.size:
                raise CodegenError(f"the exported symbol {name!r} lies in an empty section")
            rest = (_GLOBAL << 4 | symbol.kind, 0, order[symbol.section.output], symbol.address, symbol.size)
            _SYM.pack_into(dynamic, index * _SYM.size, self.dynamic_names[index - 1], *rest)
            symbols += _SYM.pack(strings.add(name), *rest)
        return [
            _Output(".symtab", _SYMTAB, 0, 8, symbols, len(symbols), _SYM.size, ".strtab", local_count),
            _Output(".strtab", _STRTAB, 0, 1, strings.data, len(strings.data)),
        ]

    def _write_dynamic(self, relative: int) -> None:
        """What the loader has to know: where the tables lie, and how many relocations are relative."""
        out = self.out
        dynamic = [] if self.library is None else [(1, self.library)]
        dynamic += [(4, out[".hash"].address), (5, out[".dynstr"].address), (6, out[".dynsym"].address)]
        dynamic += [(10, out[".dynstr"].size), (11, _SYM.size)]
        if ".rela.dyn" in out:
            dynamic += [(7, out[".rela.dyn"].address), (8, out[".rela.dyn"].size), (9, _RELA.size)]
            dynamic += [(0x6FFFFFF9, relative)]
        for index, tag in enumerate(dynamic):
            _DYN.pack_into(out[".dynamic"].data, index * _DYN.size, *tag)

    def emit(self, number: int) -> bytes:
        """The bytes of the shared object for an ELF machine number."""
        segments = self._lay_out()
        self._relocate()
        relative = self._relocate_at_load()
        self._write_stubs()
        symbols = self._symbols()
        self._write_dynamic(relative)
        return self._file(number, segments, [*self.out.values(), *symbols])

    def _file(self, number: int, segments: list[tuple[int, list[_Output]]], sections: list[_Output]) -> bytes:
        """The shared object: headers, sections, section headers."""
        names = _Strings()
        name_at = {output.name: names.add(output.name) for output in sections}
        name_at[".shstrtab"] = names.add(".shstrtab")
        sections.append(_Output(".shstrtab", _STRTAB, 0, 1, names.data, len(names.data)))
        order = {output.name: index for index, output in enumerate(sections, start=1)}

        end = max(output.offset + len(output.data) for output in self.out.values())
        for output in sections[-3:]:
            output.offset = _up(end, output.align)
            end = output.offset + len(output.data)
        table = _up(end, 8)
        file = bytearray(table)
        ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
        count = len(segments) + 2
        head = (_EHDR.size, table, 0, _EHDR.size, _PHDR.size, count, _SHDR.size, len(sections) + 1, order[".shstrtab"])
        _EHDR.pack_into(file, 0, ident, 3, number, 1, 0, *head)
        programs = []
        for index, (protection, members) in enumerate(segments):
            first, last = members[0], members[-1]
            start, begin = (first.offset, first.address) if index else (0, 0)
            stored, used = last.offset + len(last.data) - start, last.address + last.size - begin
            programs.append((1, protection, start, begin, begin, stored, used, self.machine.page))
        dynamic = self.out[".dynamic"]
        programs.append((2, 6, dynamic.offset, dynamic.address, dynamic.address, dynamic.size, dynamic.size, 8))
        programs.append((0x6474E551, 6, 0, 0, 0, 0, 0, 16))  # PT_GNU_STACK: not executable
        for index, program in enumerate(programs):
            _PHDR.pack_into(file, _EHDR.size + index * _PHDR.size, *program)
        headers = bytearray(_SHDR.size)
        for output in sections:
            file[output.offset : output.offset + len(output.data)] = output.data
            place = (name_at[output.name], output.kind, output.flags, output.address, output.offset, output.size)
            headers += _SHDR.pack(*place, order.get(output.link, 0), output.info, output.align, output.entry)
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
    buckets = [0] * max(1, len(names))
    chains = [0] * (len(names) + 1)
    for index, name in enumerate(names, start=1):
        h = 0
        for byte in name.encode():
            h = (h << 4) + byte
            h = (h ^ (h & 0xF0000000) >> 24) & 0x0FFFFFFF
        chains[index], buckets[h % len(buckets)] = buckets[h % len(buckets)], index
    return bytearray(struct.pack(f"<{2 + len(buckets) + len(chains)}I", len(buckets), len(chains), *buckets, *chains))


# ---- processors ----------------------------------------------------------------------------------


def _signed(value: int, bits: int) -> int:
    """`value` as a `bits`-wide two's complement field. Raises OverflowError if it does not fit."""
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise OverflowError(f"the distance {value} does not fit in {bits} bits")
    return value & (1 << bits) - 1


def _patch_x86_64(data: bytearray, at: int, kind: int, target: int, slot: int, place: int) -> bool:
    if kind == 0:  # NONE
        return True
    if kind in (2, 4):  # PC32, PLT32
        struct.pack_into("<I", data, at, _signed(target - place, 32))
    elif kind in (9, 41, 42):  # GOTPCREL, GOTPCRELX, REX_GOTPCRELX
        struct.pack_into("<I", data, at, _signed(slot - place, 32))
    elif kind == 24:  # PC64
        struct.pack_into("<q", data, at, target - place)
    else:
        return False
    return True


def _stub_x86_64(address: int, slot: int) -> bytes:
    return b"\xff\x25" + struct.pack("<i", slot - address - 6) + b"\xcc\xcc"  # jmp *slot(%rip)


_LOW12_SHIFT = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4, 312: 3}  # ADD, LDST8/16/32/64/128 _ABS_LO12_NC; LD64_GOT_LO12_NC


def _page_offset(target: int, place: int) -> int:
    """The immediate of ADRP, spread over its two fields (bits 29-30 and 5-23)."""
    pages = _signed((target >> 12) - (place >> 12), 21)
    return (pages & 3) << 29 | pages >> 2 << 5


def _patch_aarch64(data: bytearray, at: int, kind: int, target: int, slot: int, place: int) -> bool:
    if kind in (0, 256):  # NONE
        return True
    if kind in (261, 314):  # PREL32, PLT32
        struct.pack_into("<I", data, at, _signed(target - place, 32))
        return True
    if kind == 260:  # PREL64
        struct.pack_into("<q", data, at, target - place)
        return True
    (code,) = struct.unpack_from("<I", data, at)
    if kind in (282, 283):  # JUMP26, CALL26
        if (target - place) % 4:
            raise OverflowError("the target of a branch is not aligned to an instruction")
        code = code & 0xFC000000 | _signed((target - place) >> 2, 26)
    elif kind in (275, 311):  # ADR_PREL_PG_HI21, ADR_GOT_PAGE
        code = code & 0x9F00001F | _page_offset(slot if kind == 311 else target, place)
    elif kind in _LOW12_SHIFT:
        low, shift = (slot if kind == 312 else target) & 0xFFF, _LOW12_SHIFT[kind]
        if low & (1 << shift) - 1:
            raise OverflowError(f"the address is not aligned to the {1 << shift} bytes that the instruction loads")
        code = code & 0xFFC003FF | low >> shift << 10
    else:
        return False
    struct.pack_into("<I", data, at, code)
    return True


def _stub_aarch64(address: int, slot: int) -> bytes:
    adrp = 0x90000010 | _page_offset(slot, address)  # adrp x16, slot
    ldr = 0xF9400211 | (slot & 0xFFF) >> 3 << 10  # ldr x17, [x16, :lo12:slot]
    return struct.pack("<4I", adrp, ldr, 0xD61F0220, 0xD503201F)  # br x17; nop


_MACHINES = {
    62: _Machine(0x1000, 1, 8, 6, frozenset((9, 41, 42)), 8, _stub_x86_64, _patch_x86_64),
    183: _Machine(0x10000, 257, 1027, 1025, frozenset((311, 312)), 16, _stub_aarch64, _patch_aarch64),
}


# ---- reading objects -----------------------------------------------------------------------------


def _malformed(where: str, why: str) -> NoReturn:
    raise CodegenError("an object file is malformed or of a kind that cannot be linked", where=where, why=why)


def _parse(data: bytes, where: str) -> _Object:
    """An object, checked."""
    return _Reader(data, where).object()


class _Reader:
    """Reads one object; every offset, index and name in it may be wrong."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where = data, where
        ident, kind, self.machine, _, _, _, table_at, _, _, _, _, entry, count, names_at = _EHDR.unpack(self.cut(0, _EHDR.size))
        if ident[:6] != b"\x7fELF\x02\x01" or kind != 1:
            _malformed(where, "not a little-endian 64-bit ELF relocatable object")
        if self.machine not in _MACHINES:
            _malformed(where, f"unknown processor (ELF machine {self.machine})")
        if entry != _SHDR.size or names_at >= count:
            _malformed(where, "bad section header table")
        self.headers = list(_SHDR.iter_unpack(self.cut(table_at, count * entry)))
        self.names = self.cut(*self.headers[names_at][4:6])

    def cut(self, offset: int, size: int) -> bytes:
        """Bytes of the file, checked to lie inside."""
        if offset + size > len(self.data):
            _malformed(self.where, f"{size} bytes at offset {offset} lie outside the file of {len(self.data)} bytes")
        return self.data[offset : offset + size]

    def text(self, table: bytes, offset: int) -> str:
        """A name in a string table."""
        end = table.find(b"\0", offset)
        if end < 0:
            _malformed(self.where, "a name lies outside its string table")
        try:
            return table[offset:end].decode()
        except UnicodeDecodeError:
            _malformed(self.where, "a name is not UTF-8")

    def object(self) -> _Object:
        """All that is linked of the object."""
        sections = [self.section(*header) for header in self.headers]
        tables = [index for index, header in enumerate(self.headers) if header[1] == _SYMTAB]
        if len(tables) > 1 or any(header[1] == _RELTAB for header in self.headers):
            _malformed(self.where, "more than one symbol table, or relocations without addends")
        symbols = [symbol for table in tables for symbol in self.symbols(table, sections)]
        # Objects have no useful names of their own; the kernel they define tells more.
        defined = next((symbol.name for symbol in symbols if symbol.binding != _LOCAL and symbol.section is not None), "")
        if defined:
            for loaded in filter(None, sections):
                loaded.where = f"{self.where} (defines {defined}){loaded.where.removeprefix(self.where)}"
            self.where = f"{self.where} (defines {defined})"
        for header in self.headers:
            self.relocations(header, tables, sections, symbols)
        return _Object(self.where, self.machine, [section for section in sections if section is not None], symbols)

    def section(
        self, name_at: int, kind: int, flags: int, _address: int, offset: int, size: int, _link: int, _info: int, align: int, _entry: int
    ) -> _Section | None:
        """A section, if it is loaded."""
        if not flags & _ALLOC:
            return None
        name, align = self.text(self.names, name_at), max(align, 1)
        if kind not in (_PROGBITS, _NOBITS, _X86_UNWIND) or flags & _TLS or name.startswith((".ctors", ".dtors")):
            _malformed(self.where, f"section {name} (type {kind}) holds neither code nor plain data")
        if align & align - 1 or size >= _LIMIT or (flags & _EXEC and (flags & _WRITE or kind == _NOBITS)):
            _malformed(self.where, f"section {name} has a bad alignment, size or protection")
        # A table without code or data of its own is dropped later; .eh_frame is kept apart because its entries must be contiguous.
        output = ".text" if flags & _EXEC else ".bss" if kind == _NOBITS else ".data" if flags & _WRITE else ".rodata"
        output = ".eh_frame" if name == ".eh_frame" else output
        content = bytearray() if kind == _NOBITS else bytearray(self.cut(offset, size))
        return _Section(f"{self.where}, section {name}", output, content, size, align)

    def symbols(self, table: int, sections: Sequence[_Section | None]) -> Iterator[_Symbol]:
        """The symbols of a table, checked."""
        offset, size, strings_at = self.headers[table][4:7]
        if size % _SYM.size or strings_at >= len(self.headers):
            _malformed(self.where, "bad symbol table")
        strings = self.cut(*self.headers[strings_at][4:6])
        for name_at, info, _, index, value, extent in _SYM.iter_unpack(self.cut(offset, size)):
            name, special = self.text(strings, name_at), index >= 0xFF00  # absolute (file names), common
            section = sections[index] if index < len(sections) and not special else None
            if index and section is None and info >> 4 != _LOCAL:
                _malformed(self.where, f"symbol {name!r} is common, absolute or in a section that is not loaded")
            if info >> 4 not in (_LOCAL, _GLOBAL, _WEAK) or (section is not None and (info & 15 > 4 or value > section.size)):
                _malformed(self.where, f"symbol {name!r} is of an unknown kind or lies outside its section")
            yield _Symbol(name, info >> 4, info & 15, section, value, extent)

    def relocations(
        self, header: Sequence[int], tables: Sequence[int], sections: Sequence[_Section | None], symbols: Sequence[_Symbol]
    ) -> None:
        """Gives a section its relocations, if the header is that of a table of them."""
        _, kind, _, _, offset, size, link_to, target_at, _, _ = header
        target = sections[target_at] if kind == _RELATAB and target_at < len(sections) else None
        if target is None:
            return  # something else, or relocations of debug information
        if [link_to] != tables or size % _RELA.size:
            _malformed(self.where, "bad relocation table")
        for at, info, addend in _RELA.iter_unpack(self.cut(offset, size)):
            # Every relocation handled here changes 4 or 8 bytes; whether 8 fit is checked by struct for the whole output section.
            if info >> 32 >= len(symbols) or at + 4 > len(target.data):
                _malformed(self.where, "a relocation points outside its section or symbol table")
            target.relocations.append((at, info & 0xFFFFFFFF, symbols[info >> 32], addend))
