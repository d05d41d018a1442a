"""Who runs the loops: C compilers, given the text of the unscheduled program, and tcomp.

Each contender makes of a kernel a function on arrays, one for each of its buffers, that works in place.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import tcomp
from tcomp.backends import backend_of
from tcomp.codegen.c import c_text
from tcomp.errors import CodegenError
from tcomp.ir.loops import Buffer, Kernel, hoist_temporaries

Run = Callable[[Sequence[np.ndarray]], None]

GCC = ("gcc", "-O3", "-march=native")
CLANG = ("clang-19", "-O3", "-march=native", "-fno-crash-diagnostics")
_TILED = (*CLANG, "-mllvm", "-polly", "-mllvm", "-polly-parallel")
_STRIPS = (*_TILED, "-mllvm", "-polly-vectorizer=stripmine")
# Polly packs matrix products that it recognises, and then runs them on one thread: without, it tiles them and uses all. Its
# strip-mining crashes on some kernels (heat-3d, in clang 19): then LLVM's vectorizer is left to itself.
POLLY = {"packed": _STRIPS, "tiled": (*_STRIPS, "-mllvm", "-polly-pattern-matching-based-opts=false")}
POLLY_AT_LEAST = {"plain": _TILED}


def polly(kernel: Kernel, folder: Path, threads: int) -> dict[str, Compiled]:
    """Polly's code under each of its settings that works and gives code of its own. `regions` is None where Polly changed nothing."""
    without, found = compiled_c(kernel, CLANG, folder, "clang", threads), dict[str, Compiled]()
    for settings in (POLLY, POLLY_AT_LEAST):
        for name, command in settings.items() if not found else ():
            with suppress(subprocess.CalledProcessError):
                made = compiled_c(kernel, command, folder, name, threads)
                if made.code not in [other.code for other in found.values()]:
                    found[f"polly {name}"] = made if made.code != without.code else replace(made, regions=None)
    return found


def contender(kernel: Kernel, threads: int) -> Run:
    """tcomp's code for the program, by its default schedule."""
    run = tcomp.build(backend_of().schedule(kernel), threads=threads)
    return lambda arrays: run(*arrays)


@dataclass(frozen=True)
class Compiled:
    """What a C compiler made: the function, and the number of parallel regions in it."""

    run: Run
    regions: int | None
    code: str


def available(command: Sequence[str]) -> bool:
    return shutil.which(command[0]) is not None


def compiled_c(kernel: Kernel, command: Sequence[str], folder: Path, name: str, threads: int) -> Compiled:
    """The program through a C compiler. OpenMP, where the compiler uses it, has `threads` threads: its runtime reads that when it is
    loaded, so that all libraries of a process agree. Raises `CodegenError` for symbolic sizes, `CalledProcessError` where the compiler
    fails."""
    if kernel.scalars:
        raise CodegenError(f"`{kernel.name}` has symbolic sizes", hint="fix them: kernel(n=...)")
    complete, temporaries = hoist_temporaries(kernel)
    source, library, assembly = (folder / f"{kernel.name}-{name}.{ending}" for ending in ("c", "so", "s"))
    source.write_text(c_text(complete))
    subprocess.run([*command, "-fPIC", "-S", str(source), "-o", str(assembly)], check=True, capture_output=True, text=True)
    text = assembly.read_text()
    subprocess.run(
        [*command, "-shared", "-fPIC", str(assembly), "-o", str(library), "-lgomp", "-lm"], check=True, capture_output=True, text=True
    )
    os.environ["OMP_NUM_THREADS"] = str(threads)
    function = ctypes.CDLL(str(library))[kernel.name]
    function.restype, function.argtypes = None, [ctypes.c_void_p] * len(complete.buffers)
    places = [aligned(b) for b in temporaries]

    def run(arrays: Sequence[np.ndarray]) -> None:
        function(*(a.ctypes.data for a in (*arrays, *places)))

    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith((".file", ".ident", "#")))
    return Compiled(run, len(re.findall(r"call\w*\s+\*?GOMP_parallel\w*start", text)), code)


def aligned(b: Buffer) -> np.ndarray:
    """Memory for a buffer of constant shape, at the start of a page: for all contenders the same."""
    dtype = np.dtype(b.dtype)
    size = int(np.prod([int(d) for d in b.shape], dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + size].view(dtype).reshape([int(d) for d in b.shape])
