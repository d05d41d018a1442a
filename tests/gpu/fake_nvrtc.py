"""What `codegen.nvrtc` uses of `cuda.bindings.nvrtc`: machine code is the text itself, which `fake_cupy` runs."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

nvrtcResult = SimpleNamespace(NVRTC_SUCCESS=0)
_programs: list[bytes] = []


def nvrtcVersion() -> tuple[int, int, int]:
    return 0, 0, 0


def nvrtcGetSupportedArchs() -> tuple[int, list[int]]:
    return 0, [80, 90]


def nvrtcCreateProgram(src: bytes, name: bytes, numHeaders: int, headers: list[bytes], includeNames: list[bytes]) -> tuple[int, int]:
    _programs.append(src)
    return 0, len(_programs) - 1


def nvrtcCompileProgram(prog: int, numOptions: int, options: list[bytes]) -> tuple[int]:
    return (0,)


def nvrtcDestroyProgram(prog: int) -> tuple[int]:
    return (0,)


def nvrtcGetProgramLogSize(prog: int) -> tuple[int, int]:
    return 0, 0


def nvrtcGetCUBINSize(prog: int) -> tuple[int, int]:
    return 0, len(_programs[prog])


def nvrtcGetCUBIN(prog: int, cubin: bytes) -> tuple[int]:
    ctypes.memmove(ctypes.c_char_p(cubin), _programs[prog], len(cubin))
    return (0,)


def nvrtcGetProgramLog(prog: int, log: bytes) -> tuple[int]:
    return (0,)


nvrtcGetPTXSize, nvrtcGetPTX = nvrtcGetProgramLogSize, nvrtcGetProgramLog
