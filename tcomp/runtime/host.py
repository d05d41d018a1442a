"""What this machine is: its processor, caches and cores; may it run this code, and with how many threads?"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from contextlib import suppress
from functools import cache
from math import ceil
from pathlib import Path

from tcomp.errors import ArtifactError

_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}

# LLVM's name of a feature -> the kernel's name in /proc/cpuinfo, where they differ by more than punctuation.
_KERNEL_NAMES = {
    "x86_64": {
        "x87": "fpu", "bmi": "bmi1", "sse3": "pni", "lzcnt": "abm", "sahf": "lahflm", "prfchw": "3dnowprefetch", "pclmul": "pclmulqdq",
        "sha": "shani", "rdrnd": "rdrand", "crc32": "sse42", "64bit": "lm",
    },
    "aarch64": {
        "fparmv8": "fp", "neon": "asimd", "fullfp16": "asimdhp", "fp16fml": "asimdfhm", "dotprod": "asimddp", "lse": "atomics",
        "crc": "crc32", "rdm": "asimdrdm", "rcpc": "lrcpc", "jsconv": "jscvt", "complxnum": "fcma",
    },
}  # fmt: skip


def check_target(triple: str, features: tuple[str, ...]) -> None:
    """Refuse code that this machine cannot run. Raises ArtifactError naming what is missing."""
    name = triple.partition("-")[0].lower()
    wanted, here = _ALIASES.get(name, name), _ALIASES.get(platform.machine().lower(), platform.machine().lower())
    if wanted not in _KERNEL_NAMES:
        why = "the Python runtime runs code for Linux on x86-64 and AArch64"
        raise ArtifactError(
            f"the artifact was compiled for {triple}", why=why, hint="make a package of it: tcomp package --format c, or wasm"
        )
    if wanted != here or sys.platform != "linux" or "linux" not in triple:
        why = f"this machine is {here} {sys.platform}"
        raise ArtifactError(f"the artifact was compiled for {triple}", why=why, hint="compile the model for this machine")
    if features and not _cpu_flags():
        why, hint = "/proc/cpuinfo cannot be read", "mount /proc"
        raise ArtifactError("this machine does not tell whether it has the instructions that the artifact uses", why=why, hint=hint)
    names = _KERNEL_NAMES.get(wanted, {})
    if missing := [feature for feature in features if names.get(_plain(feature), _plain(feature)) not in _cpu_flags()]:
        hint = "compile the model for this machine, or for an older one (--target 'cpu -mcpu=x86-64-v3')"
        raise ArtifactError(f"this processor lacks instructions that the artifact uses: {', '.join(missing)}", hint=hint)
    if tiles := [feature for feature in features if _plain(feature).startswith("amx") and not tiles_permitted()]:
        why, hint = "the system does not let this process use its tile registers", "--target 'cpu -mattr=-amx-int8,-amx-bf16,-amx-tile'"
        raise ArtifactError(f"the artifact uses {', '.join(tiles)}", why=why, hint=f"compile the model without: {hint}")


@cache
def tiles_permitted() -> bool:
    """Whether Linux lets this process use the tile registers of x86-64 (AMX), for which it has to ask: arch_prctl(ARCH_REQ_XCOMP_PERM,
    XFEATURE_XTILE_DATA)."""
    return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)


def _plain(feature: str) -> str:
    """One spelling for LLVM's avx512vnni, sse4.1, amx-int8 and the kernel's avx512_vnni, sse4_1, amx_int8."""
    return re.sub(r"[-+_.]", "", feature.lower())


def cpuinfo(key: str) -> str:
    """The value of the first line with this key in /proc/cpuinfo, "" if there is none. Only the first processor's entry is read: it is
    enough, and asking for all is slow on large machines."""
    with suppress(OSError), open("/proc/cpuinfo", "rb", buffering=0) as file:
        lines = (line.partition(":") for line in file.read(16384).decode(errors="replace").splitlines())
        return next((value.strip() for name, _, value in lines if name.strip() == key), "")
    return ""


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


@cache
def _cpu_flags() -> frozenset[str]:
    return frozenset(map(_plain, (cpuinfo("flags") or cpuinfo("Features")).split()))


@cache
def default_threads() -> int:
    """Physical cores that this process may use: the affinity mask without SMT siblings, bounded by the cgroup's CPU quota."""
    quota = cpu_quota()
    return max(1, min(physical_cores(), len(os.sched_getaffinity(0)) if quota is None else ceil(quota)))


def physical_cores() -> int:
    """Distinct cores that this process may use: two SMT siblings share the vector units that generated code keeps busy."""
    return len(set(map(core_of, os.sched_getaffinity(0))))


def core_of(cpu: int, root: Path = Path("/sys/devices/system/cpu")) -> str:
    """A text that is the same for all logical processors of one core. `root` is where the kernel describes them."""
    with suppress(OSError):
        return (root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    return str(cpu)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the control groups (v1 or v2) of this process grant, or None. `root` is where /proc and /sys lie."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or "cpu" in controllers.split(","):
            # A group is bounded by all groups above it. Inside a container the path may be the host's: then only the root is visible.
            folder = (base := root / "sys/fs/cgroup" / controllers) / path.strip("/")
            quotas += [_quota_of(group) for group in (folder, *folder.parents) if group.is_relative_to(base)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    try:
        one = group / "cpu.max"  # of version 2
        quota, period = one.read_text().split() if one.exists() else [(group / f"cpu.cfs_{w}_us").read_text() for w in ("quota", "period")]
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
