"""Runs emitted CUDA C++ on a CPU: the very text, compiled by the host's compiler behind a header that plays the device.

Copies in the background are done at the last moment, when they are waited for; until then their place holds garbage: whoever reads it, or
overwrites it or what is copied, too early shows as a difference from the reference. Copies that are not aligned to their size are reported.

The blocks of a launch run one after the other. The threads of a block are contexts that take turns at barriers, in ascending or
descending order: a missing barrier, or two threads that write one element, shows as a difference between the two orders or from the
reference. A thread that misses a barrier that others wait at is reported.

Products in the background read shared memory as soon as they are started where threads ascend, and as late as possible where they descend;
the sums are as they were until they are waited for.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
# No contraction and no strict aliasing assumptions, as on the device.
FLAGS = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-O1", "-w")


def _group_mma(found: re.Match[str]) -> str:
    pointers = re.sub(r'"\+[fr]"\(', "&(", found[2])
    factors = found[3].replace('"l"(', "(")
    return f'group_mma("{found[1]}", {{{pointers}}}, {factors});'


_ASM = (  # what stands for the instructions of the device
    (re.compile(r'asm\("(mma[\w.]+)[^"]*" : "\+[fr]"\((\w+)\[0\]\)[^:]*: "r"\((\w+)\[0\]\).*?"r"\((?!\3\b)(\w+)\[0\]\).*?\);'),
     r'warp_mma("\1", \2, \3, \4);'),
    (re.compile(r'asm volatile\("cp\.async\.c[ag]\.shared\.global [^"]*" :: "r"\(to\), "l"\(from\)(?:, "n"\(N\))?, "r"\(size\) : "memory"\);'),
     "copy_later(to, from, N, size);"),
    (re.compile(r'asm volatile\("\{ \.reg \.pred add; setp\.eq\.b32 add, 0, 0; (wgmma[\w.]+) [^"]*" : (.*) : ("l".*)\);'), _group_mma),
    (re.compile(r'asm volatile\("wgmma\.wait_group\.sync\.aligned 0;"[^;]*\);'), "wait_products();"),
    (re.compile(r'asm volatile\("(?:wgmma\.fence\.sync\.aligned;|wgmma\.commit_group\.sync\.aligned;|fence\.proxy\.async\.shared::cta;|)"[^;]*\);'), ";"),
    (re.compile(r'asm volatile\("cp\.async\.commit_group;"[^;]*\);'), "commit_copies();"),
    (re.compile(r'asm volatile\("cp\.async\.wait_group %0;"[^;]*\);'), "wait_copies(N);"),
)  # fmt: skip


@functools.cache
def compiler() -> str | None:
    return shutil.which("c++")


@functools.cache
def library(text: str) -> ctypes.CDLL:
    """The text compiled for the host; each `__global__` function `f` is called through `f_run(descending, grid, block, args)`."""
    text = re.sub(r"extern __shared__ (__align__\(\d+\)) unsigned char (\w+)\[\];", r"static \1 unsigned char \2[228 << 10];", text)
    for instruction, stand_in in _ASM:
        text = instruction.sub(stand_in, text)
    text = '#include "device.h"\n' + text + "".join(_runner(*f) for f in _functions(text))
    device = _compiled("device.o", str(HERE / "device.cpp"), "-c")
    # With the header compiled beforehand, as most of the time is that of <cmath> otherwise: compilers look for a file of this name.
    header = _compiled("device.h.gch", "-x", "c++-header", str(HERE / "device.h"))
    return ctypes.CDLL(str(_compiled("kernel.so", f"-I{header.parent}", "-x", "c++", "-", "-x", "none", str(device), "-shared", text=text)))


def _compiled(name: str, *flags: str, text: str = "") -> Path:
    """A file of this name, which the compiler makes of the text unless that was done before."""
    parts = (text, *((HERE / file).read_text() for file in ("device.h", "device.cpp")), *FLAGS, *flags)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    target = Path(tempfile.gettempdir()) / "tcomp-cuda-host" / key / name
    target.parent.mkdir(exist_ok=True, parents=True)
    if not target.exists():
        temporary = target.with_name(f"{os.getpid()}.{threading.get_ident()}")
        command = [compiler() or "c++", *FLAGS, *flags, f"-I{HERE}", "-o", str(temporary)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stderr}\n{text}"
        temporary.rename(target)
    return target


def _functions(text: str) -> list[tuple[str, list[str], bool]]:
    """(name, types of the parameters, whether it has barriers) of every `__global__` function."""
    found = []
    for part in text.split('extern "C" __global__ void ')[1:]:
        head = part.split(") {\n", 1)[0].split(") ", 1)[1]
        name, parameters = head.split("(", 1)
        types = [p.rsplit(" ", 1)[0].replace(" __restrict__", "") for p in parameters.split(", ")] if parameters else []
        found.append((name, types, "__syncthreads" in part or "warp_mma" in part))
    return found


def _runner(name: str, types: Sequence[str], barriers: bool) -> str:
    arguments = ", ".join(f"*({t} *)args[{n}]" for n, t in enumerate(types))
    return (
        f'\nextern "C" int {name}_run(int descending, const int *grid, const int *block, void **given) {{\n'
        f"  static void **args; args = given;\n"
        f"  return run({str(barriers).lower()}, descending, grid, block, [] {{ {name}({arguments}); }});\n}}\n"
    )


def launch(text: str, name: str, grid: Sequence[int], block: Sequence[int], args: Sequence[int], descending: bool = False) -> None:
    """Run one launch; `args` are addresses and integers, all of 64 bits."""
    cells = (ctypes.c_int64 * max(1, len(args)))(*args)
    places = (ctypes.c_void_p * max(1, len(args)))(*(ctypes.addressof(cells) + 8 * n for n in range(len(args))))
    three = ctypes.c_int * 3
    code = getattr(library(text), f"{name}_run")(int(descending), three(*grid), three(*block), places)
    assert code != 1, f"{name}: some threads of a block wait at a barrier that others do not reach"
    assert code == 0, f"{name}: a copy in the background is not aligned"
