"""CUDA C++ to machine code by NVRTC, on any machine: neither a GPU nor a driver is needed, only the packages of `tcomp[cuda]`."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from tcomp.errors import CodegenError, TargetError


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources of one function on one architecture."""

    registers: int  # of a thread
    shared: int  # bytes of shared memory of a block
    spilled: int  # bytes that a thread spills to local memory
    stack: int  # bytes that a thread keeps in local memory


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code for one architecture, the portable code it was made from, and what its functions take."""

    cubin: bytes
    ptx: bytes
    usage: dict[str, Usage]


def compile_text(text: str, arch: str, name: str = "kernel") -> Binary:
    """Compile a program for an architecture such as "sm_90a". Raises `TargetError` where the compiler is not installed or does not know the
    architecture, `CodegenError` where it refuses the program."""
    nvrtc = _nvrtc()
    if arch not in architectures():
        raise TargetError(f"NVRTC {version()} has no architecture {arch}", hint=f"one of {', '.join(architectures())}")
    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), f"{name}.cu".encode(), 0, [], []))
    try:
        # No contraction: sums of products are fused where the program says so, and nowhere else.
        options = [f"--gpu-architecture={arch}", "--std=c++17", "--fmad=false", "--ptxas-options=-v"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace").rstrip("\0")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CodegenError("NVRTC refused the generated code", where=f"{name} for {arch}", why=log)
        cubin = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return Binary(cubin, _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program), _usage(log))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def architectures() -> tuple[str, ...]:
    """The architectures for which the installed compiler generates machine code, those with architecture-specific features ("a")
    included."""
    numbers = _checked(_nvrtc().nvrtcGetSupportedArchs())
    return tuple(f"sm_{n}{suffix}" for n in numbers for suffix in (("", "a") if n >= 90 else ("",)))


@functools.cache
def version() -> str:
    """The version of NVRTC; part of the key under which compiled kernels are cached."""
    major, minor = _checked(_nvrtc().nvrtcVersion())
    return f"{major}.{minor}"


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        status, _, _ = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as problem:
        why = f"NVRTC is not installed: {problem}"
        raise TargetError("kernels for CUDA cannot be compiled here", why=why, hint="pip install 'tcomp[cuda]'") from problem
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise TargetError("NVRTC does not work", why=str(status), hint="pip install --force-reinstall 'tcomp[cuda]'")
    return nvrtc


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status) != 0:
        raise CodegenError("NVRTC failed", why=str(status))
    return values[0] if len(values) == 1 else tuple(values)


def _text(size: Any, get: Any, program: Any) -> bytes:
    buffer = bytes(_checked(size(program)))
    _checked(get(program, buffer))  # fills the buffer in place
    return buffer


def _usage(log: str) -> dict[str, Usage]:
    """The figures that the assembler reports for each function."""
    figures = (
        r"Used (\d+) registers",
        r"(\d+) bytes smem",
        r"(\d+) bytes spill stores",
        r"(\d+) bytes spill loads",
        r"(\d+) bytes stack frame",
    )
    _, *parts = re.split(r"Compiling entry function '(\w+)'", log)
    reports = zip(parts[::2], parts[1::2], strict=True)
    found = {name: [int((re.findall(figure, report) or [0])[0]) for figure in figures] for name, report in reports}
    return {name: Usage(registers, shared, stores + loads, stack) for name, (registers, shared, stores, loads, stack) in found.items()}
