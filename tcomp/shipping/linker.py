"""The linker for platforms of which this package is none: LLVM's and Zig's, from the wheel `ziglang` of PyPI (the extra `targets`)."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tcomp.errors import CodegenError, TargetError
from tcomp.platforms import BY_TRIPLE, Platform

TIMEOUT = 1800  # seconds: the first library for a platform has the linker compile its support functions, on a busy machine for minutes
STACK = 1 << 20  # bytes of the stack of a module


def check_linker(platform: Platform) -> None:
    """Raises TargetError where a package for the platform needs a linker that is not installed."""
    if platform.linker and importlib.util.find_spec("ziglang") is None:
        why = "what links for it is the optional package ziglang (400 MB)"
        raise TargetError(f"no package can be made for {platform.triple}", why=why, hint="pip install 'tcomp[targets]'")


def check_packaged(triple: str, format: str) -> None:
    """Raises TargetError where a format of package (see `tcomp package`) is not for a platform, or the linker is not installed."""
    if (platform := BY_TRIPLE.get(triple)) is None:  # a GPU, which each format tells about itself
        return
    if (platform.format == "wasm") != (format == "wasm"):
        hint = "--format wasm" if platform.format == "wasm" else "compile the model with --target wasm32"
        raise TargetError(f"there is no package of the format {format} for {triple}", hint=hint)
    if platform.linker and format in ("wheel", "oci"):
        why = "the Python runtime, which such a package needs, runs code for Linux on x86-64 and AArch64"
        raise TargetError(f"there is no package of the format {format} for {triple}", why=why, hint="--format c")
    check_linker(platform)


def link_wasm(objects: Sequence[bytes], exports: Sequence[str]) -> bytes:
    """A WebAssembly module with a memory of its own, that imports nothing. Raises CodegenError if the linker refuses."""
    options = ["--no-entry", "--strip-all", "--stack-first", "-z", f"stack-size={STACK}", "--fatal-warnings"]
    return _linked("wasm-ld", objects, "model.wasm", [*options, *(f"--export={name}" for name in exports)])[0]


def link_shared(objects: Sequence[bytes], platform: Platform, name: str) -> tuple[bytes, bytes | None]:
    """A shared library by the name `name` (`libNAME.so`, `NAME.dll`, `libNAME.dylib`), which exports what its objects say; for Windows
    also the library to link programs against. Raises CodegenError if the linker refuses."""
    options = ["-target", platform.linker, "-shared", "-nostdlib" if platform.format == "elf" else "-O1"]
    if platform.format == "elf":
        options += [f"-Wl,-soname,{name}", "-Wl,-z,now", "-Wl,-z,undefs"]
    elif platform.format == "macho":
        options += [f"-Wl,-install_name,@rpath/{name}"]
    beside = [f"-Wl,--out-implib,{name}.a"] if platform.format == "coff" else []
    found = _linked("cc", objects, name, [*options, *beside], *([f"{name}.a"] if beside else []))
    return found[0], found[1] if beside else None


def assembled(text: str, data: bytes | memoryview, platform: Platform) -> bytes:
    """The object of assembly, beside which there is a file `data`. Raises CodegenError if the assembler refuses."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data").write_bytes(data)
        # Objects are cached by the text of the assembly alone: it says what the data are.
        (Path(folder) / "data.s").write_text(f"# {hashlib.sha256(data).hexdigest()}\n{text}", encoding="ascii")
        _run("cc", ["-target", platform.linker, "-c", "-o", "data.o", "data.s"], Path(folder))
        return (Path(folder) / "data.o").read_bytes()


def _run(tool: str, arguments: Sequence[str], folder: Path) -> None:
    try:
        command = [sys.executable, "-m", "ziglang", tool, *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise CodegenError("the linker cannot be run", why=str(problem)) from problem
    if done.returncode:
        raise CodegenError("the linker refuses the model", why=(done.stderr or done.stdout).strip()[:2000])


def _linked(tool: str, objects: Sequence[bytes], output: str, options: Sequence[str], *more: str) -> list[bytes]:
    """The files that a link of objects writes, `output` first."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for n, content in enumerate(objects):
            (folder / f"{n}.o").write_bytes(content)
        names = [f"{n}.o" for n in range(len(objects))]
        _run(tool, [*options, "-o", output, *names], folder)
        return [(folder / name).read_bytes() for name in (output, *more)]
