"""The platforms that code is made for: architecture and system, by all their names, and what differs between them.

A name is that of an architecture (`arm64`: the system is then Linux, or what `-os=` says) or a triple of compilers and distributions
(`aarch64-linux-gnu`), which says the system, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from tcomp.errors import TargetError


@dataclass(frozen=True, slots=True)
class Platform:
    """An architecture under a system.

    `triple`: LLVM's name. `linker`: the target of the linker of the extra `targets`; "" where this package links by itself. `format`: of
    object files. `pointer_bits`: 32 or 64. `threaded`: whether models may run on several threads.
    """

    arch: str
    os: str
    triple: str
    linker: str = ""
    format: str = "elf"
    pointer_bits: int = 64
    threaded: bool = True


_ALL = (
    Platform("x86_64", "linux", "x86_64-unknown-linux-gnu"),
    Platform("aarch64", "linux", "aarch64-unknown-linux-gnu"),
    Platform("riscv64", "linux", "riscv64-unknown-linux-gnu", "riscv64-linux-gnu"),
    Platform("armv7", "linux", "armv7-unknown-linux-gnueabihf", "arm-linux-gnueabihf", pointer_bits=32, threaded=False),
    Platform("wasm32", "none", "wasm32-unknown-unknown", "wasm32-freestanding", "wasm", 32, False),
    Platform("x86_64", "windows", "x86_64-w64-windows-gnu", "x86_64-windows-gnu", "coff", threaded=False),
    Platform("aarch64", "macos", "arm64-apple-macosx11.0.0", "aarch64-macos.11.0", "macho", threaded=False),
)
PLATFORMS = {(p.arch, p.os): p for p in _ALL}
"""Every platform that LLVM, as it is linked into llvmlite, makes objects for and that this package knows how to link."""
BY_TRIPLE = {p.triple: p for p in _ALL}

ARCHITECTURES = {
    "x86_64": "x86_64", "amd64": "x86_64", "x86-64": "x86_64", "x64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64",
    "armv8": "aarch64", "riscv64": "riscv64", "riscv64gc": "riscv64", "rv64": "riscv64", "rv64gcv": "riscv64",
    "armv7": "armv7", "armv7a": "armv7",
    "armv7l": "armv7", "armhf": "armv7", "wasm32": "wasm32", "wasm": "wasm32",
}  # fmt: skip
"""Names of architectures -> that by which this package knows them."""
_ARCH_IN_TRIPLES = ARCHITECTURES | {"arm": "armv7"}
_OS = {
    "linux": "linux",
    "windows": "windows",
    "win32": "windows",
    "macos": "macos",
    "macosx": "macos",
    "darwin": "macos",
    "mingw32": "windows",
}


def default_os(arch: str) -> str:
    """The system of an architecture where nothing is said."""
    return next(p.os for p in _ALL if p.arch == arch)


def named(name: str) -> tuple[str, str] | None:
    """(architecture, system or "" where the name says none) of a platform's name: `arm64`, `aarch64-linux-gnu`, `x86_64-pc-windows-msvc`,
    `arm64-apple-darwin`, `wasm32-simd128`; None for what is no such name."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name], ""
    first, *rest = name.split("-")
    if not rest or (arch := _ARCH_IN_TRIPLES.get(first)) is None:
        return None
    if arch == "wasm32":
        return (arch, "none") if set(rest) <= {"simd128", "unknown", "freestanding", "none"} else None
    if any(part.startswith(("android", "musl", "ios")) for part in rest):  # other loaders and C libraries, which nobody tried
        return None
    systems = {_OS[word] for part in rest if (word := part.rstrip("0123456789.") if part.startswith(("darwin", "macos")) else part) in _OS}
    return (arch, systems.pop()) if len(systems) == 1 else None


def platform_of(arch: str, os: str, where: str = "") -> Platform:
    """The platform. Raises TargetError, with the list of all, for a pair for which no code can be made."""
    if (found := PLATFORMS.get((arch, os))) is None:
        raise TargetError(f"no code can be made for {arch} under {os}", where=where, hint=f"one of {listing()}")
    return found


def listing() -> str:
    """All platforms, for messages."""
    return ", ".join(f"{p.arch} ({p.os})" if p.os != "none" else p.arch for p in _ALL)
