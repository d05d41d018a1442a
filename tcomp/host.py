"""This machine, as a compiler asks it: its processor and caches. Its cores: `tcomp.runtime.host`."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from pathlib import Path

from tcomp import cache
from tcomp.runtime.host import cpuinfo

# What tells one processor from another in /proc/cpuinfo, on x86-64 and AArch64.
_PROCESSOR = re.compile(r"^(?:vendor_id|cpu family|model|stepping|flags|CPU \w+|Features)\s*:.*", re.MULTILINE)


def processor() -> tuple[str, list[str]]:
    """LLVM's name of the processor, and the features that it finds. They are kept for the next time: to load LLVM takes longer than many a
    compilation out of the cache, which asks it nothing else."""
    import llvmlite  # where this machine is asked, not to describe another

    described = set()
    with suppress(OSError):
        described = set(_PROCESSOR.findall(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")))
    name = cache.name(llvmlite.__version__, platform.machine(), *sorted(described))
    kept = cache.load("processors", name) if described else None
    if kept is None:
        import llvmlite.binding as llvm

        kept = llvm.get_host_cpu_name(), sorted(name for name, on in llvm.get_host_cpu_features().items() if on)
        if described:
            cache.store("processors", name, kept)
    cpu, features = kept
    return cpu, features


def processor_name() -> str:
    """The name that the processor gives itself, "" where it gives none."""
    return cpuinfo("model name") or cpuinfo("CPU part")


def data_caches() -> dict[str, int | None]:
    """Bytes of "l1", "l2" and "l3" from sysfs; None for what cannot be read."""
    sizes: dict[str, int | None] = {"l1": None, "l2": None, "l3": None}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with suppress(OSError, ValueError):
            kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
            if kind != "Instruction" and f"l{level}" in sizes:
                sizes[f"l{level}"] = int(size.rstrip("KM")) << {"K": 10, "M": 20}.get(size[-1:], 0) or None
    return sizes
