"""The format of 64-bit ELF files, as far as the linker reads and writes them: structures, numbers, tables of strings.

Source: System V ABI (gABI) chapters 4-5.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, NoReturn

from tcomp.errors import CodegenError

EHDR, SHDR, PHDR = map(struct.Struct, ("<16sHHIQQQIHHHHHH", "<IIQQQQIIQQ", "<IIQQQQQQ"))
SYM, RELA, DYN = map(struct.Struct, ("<IBBHQQ", "<QQq", "<qQ"))
PROGBITS, SYMTAB, STRTAB, RELATAB, HASH, DYNAMIC, NOBITS, RELTAB, DYNSYM = 1, 2, 3, 4, 5, 6, 8, 9, 11
X86_UNWIND = 0x70000001
WRITE, ALLOC, EXEC, INFO_LINK, TLS = 1, 2, 4, 0x40, 0x400
LOCAL, GLOBAL, WEAK = 0, 1, 2
OBJECT, FUNC, SECTION = 1, 2, 3
ABSOLUTE = 0xFFF1  # SHN_ABS: of symbols in no section
IDENT = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")  # little-endian, 64 bits
MACHINES = {"x86_64": 62, "aarch64": 183}
LIMIT = 1 << 31  # PC-relative references reach 2 GiB


class Header(NamedTuple):
    """Of a section."""

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


def round_up(value: int, align: int) -> int:
    """The next multiple of a power of two."""
    return (value + align - 1) & -align


class Strings:
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


class File:
    """What is read, checked: every offset, index and name in it may be wrong. `kind` is ELF's number of what it must be."""

    problem = "the code of a model is malformed"

    def __init__(self, data: bytes, kind: int, where: str = "") -> None:
        self.data, self.where = data, where
        ident, found, self.machine, _, _, _, table_at, _, _, _, _, entry, count, names_at = EHDR.unpack(self.cut(0, EHDR.size))
        if ident[:6] != IDENT[:6] or found != kind:
            self.refuse(f"it is not a little-endian 64-bit ELF file of type {kind}")
        if self.machine not in MACHINES.values():
            self.refuse(f"unknown processor (ELF machine {self.machine})")
        if entry != SHDR.size or names_at >= count:
            self.refuse("bad section header table")
        self.headers = [Header(*fields) for fields in SHDR.iter_unpack(self.cut(table_at, count * entry))]
        self.names = self.content(self.headers[names_at])

    def refuse(self, why: str) -> NoReturn:
        """Raises CodegenError."""
        raise CodegenError(self.problem, where=self.where, why=why)

    def cut(self, offset: int, size: int) -> bytes:
        """Bytes of the file, checked to lie inside."""
        if offset + size > len(self.data):
            self.refuse(f"{size} bytes at offset {offset} lie outside the file of {len(self.data)} bytes")
        return self.data[offset : offset + size]

    def content(self, header: Header) -> bytes:
        """The bytes of a section; of a table of symbols or relocations, whole entries."""
        whole = {SYMTAB: SYM.size, RELATAB: RELA.size}.get(header.kind)
        if whole is not None and (header.entry != whole or header.size % whole):
            self.refuse("a table does not consist of whole entries")
        return self.cut(header.offset, header.size)

    def text(self, table: bytes, offset: int) -> str:
        """A name in a table of strings."""
        end = table.find(b"\0", offset)
        if end < 0:
            self.refuse("a name lies outside its string table")
        try:
            return table[offset:end].decode()
        except UnicodeDecodeError:
            self.refuse("a name is not UTF-8")
