"""Names of ELF symbols made those of one library, so that many libraries can be linked into one program.

An object keeps all its bytes; new names are put behind them, and the symbols point there. Source: System V ABI (gABI) chapter 4.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import NoReturn

from tcomp.errors import CodegenError

_SYMTAB = 2
_LAYOUTS = {  # class: header (offset and size of the fields for sections), section header, symbol; numbers of fields
    1: (struct.Struct("<16sHHIIIIIHHHHHH"), struct.Struct("<IIIIIIIIII"), struct.Struct("<IIIBBH"), (3, 4, 5)),
    2: (struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ"), (1, 2, 3)),
}


def defined(code: bytes) -> set[str]:
    """The global names that an object defines. Raises CodegenError for a malformed file."""
    return {name for _, name, is_defined in _Object(code).globals() if is_defined}


def renamed(code: bytes, prefix: str, names: Collection[str], kept: Collection[str]) -> bytes:
    """An object whose global symbols among `names`, defined there or elsewhere, begin with `prefix`, except those in `kept`. Raises
    CodegenError for a malformed file."""
    return _Object(code).renamed(prefix, frozenset(names) - frozenset(kept))


class _Object:
    """A little-endian relocatable object; every offset in it may be wrong."""

    def __init__(self, code: bytes) -> None:
        self.data = code
        if code[:4] != b"\x7fELF" or len(code) < 64 or code[4] not in _LAYOUTS or code[5] != 1:
            self.refuse("it is not a little-endian ELF object")
        self.header, self.section, self.symbol, (self.info, self.other, self.index) = _LAYOUTS[code[4]]
        fields = self.header.unpack_from(code)
        self.table_at, size, count = fields[6], fields[11], fields[12]
        if size != self.section.size or self.table_at + count * size > len(code):
            self.refuse("its section header table lies outside the file")
        self.sections = [self.section.unpack_from(code, self.table_at + n * size) for n in range(count)]
        tables = [s for s in self.sections if s[1] == _SYMTAB]
        if len(tables) != 1 or tables[0][6] >= count:
            self.refuse("it has no symbol table")
        self.symbols_at, self.symbols_size, self.names = tables[0][4], tables[0][5], tables[0][6]
        self.names_at, self.names_size = self.sections[self.names][4:6]
        if max(self.symbols_at + self.symbols_size, self.names_at + self.names_size) > len(code):
            self.refuse("its symbols lie outside the file")

    def globals(self) -> list[tuple[int, str, bool]]:
        """(offset of the symbol, name, whether it is defined here)."""
        found = []
        for at in range(self.symbols_at, self.symbols_at + self.symbols_size - self.symbol.size + 1, self.symbol.size):
            fields = self.symbol.unpack_from(self.data, at)
            if fields[self.info] >> 4:  # not local
                end = self.data.find(b"\0", self.names_at + fields[0], self.names_at + self.names_size)
                if end < 0:
                    self.refuse("a name lies outside its string table")
                found.append((at, self.data[self.names_at + fields[0] : end].decode("ascii", "replace"), fields[self.index] != 0))
        return found

    def renamed(self, prefix: str, names: frozenset[str]) -> bytes:
        """See the function of this name."""
        data, strings = bytearray(self.data), bytearray(self.data[self.names_at : self.names_at + self.names_size])
        for at, name, _ in self.globals():
            if name in names:
                struct.pack_into("<I", data, at, len(strings))
                strings += f"{prefix}{name}".encode() + b"\0"
        fields = [*self.sections[self.names]]
        fields[4], fields[5] = len(data), len(strings)
        self.section.pack_into(data, self.table_at + self.names * self.section.size, *fields)
        return bytes(data + strings)

    def refuse(self, why: str) -> NoReturn:
        raise CodegenError("the code of a model is malformed", why=why)
