"""What relocations change in code, and how stubs jump, by processor.

Sources: AMD64 psABI section 4.4; ELF for the Arm 64-bit Architecture section 5.7.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tcomp.codegen.elf.format import MACHINES


def _signed(value: int, bits: int) -> int:
    """`value` as a `bits`-wide two's complement field. Raises OverflowError if it does not fit."""
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise OverflowError(f"the distance {value} does not fit in {bits} bits")
    return value & (1 << bits) - 1


def page_offset(target: int, place: int) -> int:
    """The immediate of ADRP, spread over its two fields (bits 29-30 and 5-23)."""
    pages = _signed((target >> 12) - (place >> 12), 21)
    return (pages & 3) << 29 | pages >> 2 << 5


@dataclass(frozen=True, slots=True)
class Patch:
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
                code = code & 0x9F00001F | page_offset(target, place)
            case "low12":
                low = target & 0xFFF
                if low & (1 << self.shift) - 1:
                    raise OverflowError(f"the address is not aligned to the {1 << self.shift} bytes that the instruction loads")
                code = code & 0xFFC003FF | low >> self.shift << 10
        struct.pack_into("<I", data, at, code)


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor-specific part: relocation types, by number, and stubs."""

    page: int  # the largest page size a kernel may use
    absolute: int  # 64-bit absolute relocation
    relative: int  # dynamic: load address + addend
    glob_dat: int  # dynamic: address of an imported symbol
    stub_size: int
    stub: Callable[[int, int], bytes]  # (address of the stub, address of its GOT slot) -> a jump there
    patches: Mapping[int, Patch]


def _stub_x86_64(address: int, slot: int) -> bytes:
    return b"\xff\x25" + struct.pack("<i", slot - address - 6) + b"\xcc\xcc"  # jmp *slot(%rip)


def _stub_aarch64(address: int, slot: int) -> bytes:
    adrp = 0x90000010 | page_offset(slot, address)  # adrp x16, slot
    ldr = 0xF9400211 | (slot & 0xFFF) >> 3 << 10  # ldr x17, [x16, :lo12:slot]
    return struct.pack("<4I", adrp, ldr, 0xD61F0220, 0xD503201F)  # br x17; nop


NONE, _PC32, _PC64, _BRANCH = map(Patch, ("none", "distance32", "distance64", "branch26"))
_X86_64_PATCHES = {
    0: NONE, 2: _PC32, 4: _PC32, 24: _PC64,  # NONE, PC32, PLT32, PC64
    **dict.fromkeys((9, 41, 42), Patch("distance32", got=True)),  # GOTPCREL, GOTPCRELX, REX_GOTPCRELX
}  # fmt: skip
_AARCH64_PATCHES = {
    0: NONE, 256: NONE, 261: _PC32, 314: _PC32, 260: _PC64,  # NONE, PREL32, PLT32, PREL64
    282: _BRANCH, 283: _BRANCH, 275: Patch("page"), 311: Patch("page", got=True),  # JUMP26, CALL26, ADR_PREL_PG_HI21, ADR_GOT_PAGE
    **{kind: Patch("low12", shift=n) for kind, n in ((277, 0), (278, 0), (284, 1), (285, 2), (286, 3), (299, 4))},  # ADD, LDST8 to LDST128
    312: Patch("low12", got=True, shift=3),  # LD64_GOT_LO12_NC
}  # fmt: skip
PROCESSORS = {
    MACHINES["x86_64"]: Processor(0x1000, 1, 8, 6, 8, _stub_x86_64, _X86_64_PATCHES),
    MACHINES["aarch64"]: Processor(0x10000, 257, 1027, 1025, 16, _stub_aarch64, _AARCH64_PATCHES),
}
