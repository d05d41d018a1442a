"""What machine code is made for: instruction set, vector width, registers, caches, cores, and how fast these are.

A `Target` is written and parsed as one line, which is also its identity in cache keys and artifacts:

    cpu -march=x86_64 -mcpu=cascadelake
    cpu -march=x86_64 -mcpu=haswell -mattr=-fma -l2=512K -cores=4
    cpu -march=aarch64 -mcpu=neoverse-n1
    cuda -arch=sm_80,sm_90a
    cuda -arch=sm_90a -precision=tf32

`cpu` alone (or `native`) is this machine. `-mattr` and the sizes are printed only where they differ from what is usual.
A cuda target names the GPU architectures that get machine code (other GPUs, if newer, are served by portable code for the oldest).
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tcomp.errors import TargetError

# ---------------------------------------------------------------- known processors

_V2 = frozenset({"cx16", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"})
_AVX = _V2 | {"avx"}
_V3 = _AVX | {"avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_ICELAKE = _V4 | {"avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vnni", "avx512vpopcntdq", "gfni"}
_SAPPHIRE = _ICELAKE | {"amx-bf16", "amx-int8", "amx-tile", "avx512bf16", "avx512fp16", "avxvnni"}
_NEON = frozenset({"fp-armv8", "neon"})
_NEOVERSE = _NEON | {"dotprod", "fullfp16", "lse"}
_NEOVERSE_V = _NEOVERSE | {"bf16", "i8mm"}

_CPUS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {
        "x86-64": frozenset(),
        "x86-64-v2": _V2,
        "nehalem": _V2,
        "sandybridge": _AVX,
        "x86-64-v3": _V3,
        "haswell": _V3,
        "broadwell": _V3,
        "skylake": _V3,
        "alderlake": _V3 | {"avxvnni", "gfni"},
        "znver1": _V3,
        "znver2": _V3,
        "znver3": _V3,
        "x86-64-v4": _V4,
        "skylake-avx512": _V4,
        "cascadelake": _V4 | {"avx512vnni"},
        "cooperlake": _V4 | {"avx512vnni", "avx512bf16"},
        "icelake-client": _ICELAKE,
        "icelake-server": _ICELAKE,
        "rocketlake": _ICELAKE,
        "tigerlake": _ICELAKE,
        "znver4": _ICELAKE | {"avx512bf16"},
        "znver5": _ICELAKE | {"avx512bf16", "avxvnni"},
        "sapphirerapids": _SAPPHIRE,
        "emeraldrapids": _SAPPHIRE,
        "graniterapids": _SAPPHIRE | {"amx-fp16"},
    },
    "aarch64": {
        "generic": _NEON,
        "cortex-a53": _NEON,
        "cortex-a72": _NEON,
        "cortex-a76": _NEOVERSE,
        "neoverse-n1": _NEOVERSE,
        "neoverse-n2": _NEOVERSE_V,
        "neoverse-v1": _NEOVERSE_V,
        "neoverse-v2": _NEOVERSE_V,
        "apple-m1": _NEOVERSE,
    },
}
_FEATURES = {arch: frozenset().union(*cpus.values()) for arch, cpus in _CPUS.items()}
"""The features that decide which instructions generated code may use; all others of a processor are of no concern here."""


@dataclass(frozen=True, slots=True)
class Core:
    """How fast a processor is. Rates are those of one core, a cycle, for vectors of the full width; bandwidths are attainable ones."""

    ghz: float = 3.0  # sustained while all vector units are busy
    fma: float = 2  # fused multiply-adds (and additions, ...)
    latency: float = 4  # cycles from one to the next that depends on it
    loads: float = 2
    stores: float = 1
    issue: float = 4  # instructions of all kinds
    divide: float = 10  # cycles between two divisions or square roots of float32 vectors
    l1: float = 128  # bytes to the registers
    l2: float = 40  # bytes from the second-level cache
    l3: float = 10
    memory: float = 12.0  # GB/s that one core draws
    memory_all: float = 100.0  # GB/s that all cores together draw


@dataclass(frozen=True, slots=True)
class Gpu:
    """How fast a GPU is: that of the largest widespread board of an architecture. Bandwidths in GB/s, `l2` in bytes, `shared` memory of
    an SM in KiB."""

    sms: int
    ghz: float
    lanes: int  # float32 multiply-adds of an SM a cycle
    memory: float
    cache: float
    l2: int
    shared: int


_CORES = {
    "x86-64": Core(fma=1, latency=8, loads=1, l1=16, l2=16, divide=14),  # a multiplication and an addition
    "x86-64-v2": Core(fma=1, latency=8, loads=1, l1=32, l2=24, divide=14),
    "nehalem": Core(fma=1, latency=8, loads=1, l1=32, l2=24, divide=14, memory=9, memory_all=25),
    "sandybridge": Core(fma=1, latency=8, l1=48, l2=24, divide=28, memory=10, memory_all=40),
    "x86-64-v3": Core(latency=5, l1=64, l2=32, divide=8),
    "haswell": Core(latency=5, l1=64, l2=32, divide=14, memory_all=55),
    "broadwell": Core(latency=5, l1=64, l2=32, memory_all=60),
    "skylake": Core(3.8, l1=64, l2=32, divide=5, memory=16, memory_all=32),
    "alderlake": Core(4.5, loads=3, stores=2, issue=6, l1=96, l2=40, divide=5, memory=30, memory_all=65),
    "znver1": Core(3.2, 1, 5, loads=1, issue=5, l1=32, l2=32, divide=6, memory=18, memory_all=120),
    "znver2": Core(3.2, 2, 5, issue=5, l1=64, l2=32, divide=6, l3=16, memory=20, memory_all=150),
    "znver3": Core(3.4, 2, 4, issue=6, l1=64, l2=32, divide=5, l3=16, memory=22, memory_all=160),
    "znver4": Core(3.6, 1, 4, loads=1, stores=0.5, issue=6, l1=64, l2=32, l3=16, divide=10, memory=28, memory_all=300),
    "znver5": Core(3.8, 2, 4, issue=8, l1=128, l2=60, l3=20, divide=8, memory=35, memory_all=400),
    "skylake-avx512": Core(2.6),
    "cascadelake": Core(2.8),
    "cooperlake": Core(2.8),
    "x86-64-v4": Core(3.0, issue=5, memory_all=200),
    "icelake-client": Core(3.2, 1, issue=5, memory=20, memory_all=45),
    "rocketlake": Core(4.2, 1, issue=5, memory=22, memory_all=40),
    "tigerlake": Core(3.5, 1, issue=5, memory=22, memory_all=50),
    "icelake-server": Core(2.8, issue=5, memory_all=150),
    "sapphirerapids": Core(3.0, issue=6, memory=14, memory_all=220),
    "emeraldrapids": Core(3.0, issue=6, memory=14, memory_all=260),
    "graniterapids": Core(3.0, issue=6, memory=16, memory_all=450),
    "generic": Core(2.5, 2, 4, issue=3, l1=32, l2=16, divide=7, memory_all=50),
    "cortex-a53": Core(1.4, 1, 8, loads=0.5, stores=0.5, issue=2, l1=8, l2=6, l3=4, divide=20, memory=3, memory_all=6),
    "cortex-a72": Core(1.8, 1, 7, loads=1, issue=3, l1=16, l2=10, divide=14, memory=5, memory_all=8),
    "cortex-a76": Core(2.4, 2, 4, issue=4, l1=32, l2=20, divide=7, memory=12, memory_all=20),
    "neoverse-n1": Core(2.6, 2, 4, issue=4, l1=32, l2=20, divide=7, memory=16, memory_all=160),
    "neoverse-n2": Core(3.0, 2, 4, issue=5, l1=32, l2=24, divide=7, memory=20, memory_all=200),
    "neoverse-v1": Core(2.6, 4, 4, 3, 2, issue=8, l1=48, l2=32, divide=5, memory=22, memory_all=250),
    "neoverse-v2": Core(3.2, 4, 4, 3, 2, issue=8, l1=48, l2=32, divide=5, memory=30, memory_all=400),
    "apple-m1": Core(3.1, 4, 4, 3, 2, issue=8, l1=48, l2=32, divide=4, memory=55, memory_all=60),
}
"""Sources: Intel's and Arm's optimisation manuals, A. Fog's instruction tables, uops.info; bandwidths by STREAM as commonly reported."""

_SPARED = {"znver5": 4}
"""Registers that products are faster without, where that was measured (`Target.tile_registers`)."""

_GPUS = {
    "sm_75": Gpu(40, 1.59, 64, 320, 1200, 4 << 20, 64),  # T4
    "sm_80": Gpu(108, 1.41, 64, 1935, 4500, 40 << 20, 164),  # A100
    "sm_86": Gpu(72, 1.70, 128, 600, 2000, 6 << 20, 100),  # A10
    "sm_87": Gpu(16, 1.30, 128, 205, 800, 4 << 20, 164),  # Jetson AGX Orin
    "sm_89": Gpu(142, 2.52, 128, 864, 5000, 96 << 20, 100),  # L40S
    "sm_90": Gpu(132, 1.83, 128, 3350, 7000, 50 << 20, 228),  # H100 SXM
    "sm_100": Gpu(148, 1.85, 128, 8000, 12000, 126 << 20, 228),  # B200
    "sm_103": Gpu(148, 1.92, 128, 8000, 12000, 126 << 20, 228),  # B300
    "sm_120": Gpu(170, 2.41, 128, 1792, 8000, 96 << 20, 100),  # RTX 5090
    "sm_121": Gpu(48, 2.40, 128, 273, 2000, 24 << 20, 100),  # GB10
}

_CACHES = {"l1": 32 << 10, "l2": 1 << 20, "l3": 16 << 20}
_CUDA_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_120", "sm_121")
_PRECISIONS = ("tf32", "fp16", "bf16")
_CUDA_USUAL = ("sm_80", "sm_90a")
_ARCH_NAMES = {"x86_64": "x86_64", "amd64": "x86_64", "x86-64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Target:
    """One kind of machine.

    `arch` is "x86_64", "aarch64" or "cuda" (then `kind` is as well, `cpu` lists the GPU architectures, separated by commas, and the
    feature "scalar" says that buffers need not be aligned for vector accesses, "precision=tf32" that products of matrices may be less exact); `cpu` is LLVM's name of the processor; `features` are those of LLVM's feature names that it has
    and that generated code may use, sorted. `l1`, `l2` (per core) and `l3` (shared) are bytes of data cache. `cores` counts
    physical cores.
    """

    arch: str
    cpu: str
    features: tuple[str, ...]
    l1: int = _CACHES["l1"]
    l2: int = _CACHES["l2"]
    l3: int = _CACHES["l3"]
    cores: int = 1
    kind: str = "cpu"

    @staticmethod
    @functools.cache
    def host() -> Target:
        """This machine. Raises `TargetError` on an architecture without a code generator."""
        arch = _ARCH_NAMES.get(platform.machine().lower())
        if arch is None:
            raise TargetError(f"no code generator for this machine ({platform.machine()})", hint=f"known: {', '.join(_CPUS)}")
        cpu, features = _host_processor()
        present = _FEATURES[arch].intersection(features)
        if not _CPUS[arch].get(cpu, _FEATURES[arch]) <= present:
            # A virtual machine that hides features, or a processor this table does not know: the richest baseline that it has.
            baseline = {"x86_64": ("x86-64-v4", "x86-64-v3", "x86-64-v2", "x86-64"), "aarch64": ("generic",)}[arch]
            cpu = next(name for name in baseline if _CPUS[arch][name] <= present or name == baseline[-1])
        l1, l2, l3 = _host_caches().values()
        return Target(arch, cpu, tuple(sorted(present)), l1, l2, l3, _host_cores())

    @staticmethod
    def parse(text: str) -> Target:
        """A target from its line of text; see the module. Raises `TargetError` that lists what is possible."""
        words = text.split()
        if words and words[0] == "cuda":
            return _cuda(words[1:], text)
        if words and words[0] in _ARCH_NAMES:
            words = ["cpu", f"-march={words[0]}", *words[1:]]
        if words in (["cpu"], ["native"], ["cpu", "-mcpu=native"]):
            return Target.host()
        if not words or words[0] != "cpu":
            raise TargetError(
                f"unknown target `{text}`",
                hint="`cpu`, `cpu -mcpu=NAME`, `cpu -march=aarch64 -mcpu=NAME`, `aarch64`, `cuda`, `cuda -arch=sm_90a`",
            )
        options = dict(_option(word, text) for word in words[1:])
        arch = _arch(options.pop("march", None), options.get("mcpu"), text)
        cpu = options.pop("mcpu", next(iter(_CPUS[arch])))
        if cpu not in _CPUS[arch]:
            raise TargetError(f"unknown processor `{cpu}` of {arch}", where=text, hint=f"one of {', '.join(_CPUS[arch])}")
        features = _features(arch, cpu, options.pop("mattr", ""), text)
        l1, l2, l3 = (_size(options[level], level, text) if level in options else usual for level, usual in _CACHES.items())
        return Target(arch, cpu, features, l1, l2, l3, _size(options.get("cores", "1"), "cores", text))

    def __str__(self) -> str:
        if self.kind == "cuda":
            return " ".join(["cuda", f"-arch={self.cpu}", *(f"-{f}" for f in self.features)])
        words = ["cpu", f"-march={self.arch}", f"-mcpu={self.cpu}"]
        usual = _CPUS[self.arch][self.cpu]
        changes = [f"+{f}" for f in self.features if f not in usual] + [f"-{f}" for f in sorted(usual - set(self.features))]
        if changes:
            words.append("-mattr=" + ",".join(changes))
        words += [f"-{level}={_size_text(getattr(self, level))}" for level, size in _CACHES.items() if getattr(self, level) != size]
        if self.cores != 1:
            words.append(f"-cores={self.cores}")
        return " ".join(words)

    def has(self, feature: str) -> bool:
        return feature in self.features

    @property
    def triple(self) -> str:
        """LLVM's name of the platform. Objects are made for Linux."""
        if self.kind == "cuda":
            return "cuda"
        return f"{self.arch}-unknown-linux-gnu"

    @property
    def llvm_features(self) -> str:
        """LLVM's feature string; every feature of concern is switched explicitly."""
        return ",".join(("+" if f in self.features else "-") + f for f in sorted(_FEATURES[self.arch]))

    @property
    def vector_bits(self) -> int:
        """Width of the widest useful vector registers: 512, 256 or 128."""
        if _V4 <= set(self.features):
            return 512
        return 256 if self.has("avx") else 128

    @property
    def vector_registers(self) -> int:
        return 32 if self.arch == "aarch64" or self.vector_bits == 512 else 16

    @property
    def tile_registers(self) -> int:
        """Vector registers that the accumulators and operands of a product take at most: on some processors fewer than all are faster."""
        return self.vector_registers - _SPARED.get(self.cpu, 0)

    @property
    def fma(self) -> bool:
        """Whether a * b + c with one rounding is an instruction."""
        return self.arch == "aarch64" or self.has("fma")

    @property
    def half_arithmetic(self) -> bool:
        """Whether float16 is computed with directly."""
        return self.has("fullfp16") or (self.has("avx512fp16") and self.vector_bits == 512)

    @property
    def half_conversion(self) -> bool:
        """Whether float16 <-> float32 is an instruction."""
        return self.arch == "aarch64" or self.has("f16c")

    @property
    def core(self) -> Core:
        """How fast one core is, by the tables; `tcomp.machine` measures this machine."""
        return _CORES[self.cpu]

    @property
    def streamed(self) -> float:
        """Bytes a cycle that each core gets of what no cache of its own holds and it has asked for ahead, as weights are."""
        return min(0.8 * self.core.l3, self.core.memory_all / (self.cores * self.core.ghz))

    @property
    def compute_capability(self) -> int:
        """The oldest of a CUDA target's architectures: 80 for "sm_80,sm_90a". One text is compiled for all of them."""
        return min(int(arch[3:].rstrip("a")) for arch in self.cpu.split(","))

    def executes(self, arch: str) -> bool:
        """Whether each of a CUDA target's architectures has what "sm_80" has: those as new. What "sm_90a" has, that one has alone."""
        if self.kind != "cuda":
            return False
        return set(self.cpu.split(",")) == {arch} if arch.endswith("a") else self.compute_capability >= int(arch.removeprefix("sm_"))

    @property
    def precision(self) -> str:
        """In which a CUDA target multiplies the matrices of float32 models: "fp32", unless "-precision=" says tf32, fp16 or bf16."""
        return next((f.removeprefix("precision=") for f in self.features if f.startswith("precision=")), "fp32")

    @property
    def gpu(self) -> Gpu:
        """How fast the first of a CUDA target's architectures is."""
        return _GPUS[self.cpu.split(",")[0].removesuffix("a")]

    @property
    def shared_of_block(self) -> int:
        """Bytes of shared memory that a block may have on each of a CUDA target's architectures: all of an SM but what the system takes."""
        return min(_GPUS[arch.removesuffix("a")].shared for arch in self.cpu.split(",")) - 1 << 10

    def lanes(self, bits: int) -> int:
        """Elements of `bits` bits in one vector register."""
        return self.vector_bits // bits

    def runs_on(self, host: Target) -> bool:
        """Whether code made for this target can run on `host`."""
        return self.kind == host.kind and self.arch == host.arch and set(self.features) <= set(host.features)


# ---------------------------------------------------------------- parsing


def _option(word: str, text: str) -> tuple[str, str]:
    match = re.fullmatch(r"-(march|mcpu|mattr|l1|l2|l3|cores)=(\S+)", word)
    if match is None:
        raise TargetError(f"unknown option `{word}`", where=text, hint="-march= -mcpu= -mattr=+feature,-feature -l1= -l2= -l3= -cores=")
    return match[1], match[2]


def _cuda(words: list[str], text: str) -> Target:
    archs: tuple[str, ...] = _CUDA_USUAL
    features = set[str]()
    for word in words:
        if word == "-scalar":
            features.add("scalar")
        elif word == "-precision=fp32":
            pass  # what is computed if nothing is said
        elif word.startswith("-precision="):
            if word[11:] not in _PRECISIONS:
                raise TargetError(f"unknown precision `{word[11:]}`", where=text, hint=f"one of fp32, {', '.join(_PRECISIONS)}")
            if any(f.startswith("precision=") for f in features):
                raise TargetError("two precisions are given", where=text, hint="leave one of them away")
            features.add(word[1:])
        elif word.startswith("-arch="):
            archs = tuple(dict.fromkeys(word[6:].split(",")))
        else:
            raise TargetError(f"unknown option `{word}`", where=text, hint="cuda -arch=sm_80,sm_90a -precision=tf32 (or fp16, bf16)")
    unknown = [a for a in archs if a not in _CUDA_ARCHS]
    if unknown:
        raise TargetError(f"unknown GPU architecture `{unknown[0]}`", where=text, hint=f"one of {', '.join(_CUDA_ARCHS)}")
    target = Target("cuda", ",".join(archs), tuple(sorted(features)), kind="cuda")
    if target.precision != "fp32" and target.compute_capability < 80:
        raise TargetError(f"GPUs before sm_80 compute no products in {target.precision}", where=text, hint="-arch=sm_80, or leave -precision away")
    return target


def _arch(name: str | None, cpu: str | None, text: str) -> str:
    if name is not None:
        if name not in _ARCH_NAMES:
            raise TargetError(f"unknown architecture `{name}`", where=text, hint=f"one of {', '.join(_CPUS)}")
        return _ARCH_NAMES[name]
    found = [arch for arch, cpus in _CPUS.items() if cpu in cpus]
    if not found:
        names = "; ".join(f"{arch}: {', '.join(cpus)}" for arch, cpus in _CPUS.items())
        raise TargetError(f"unknown processor `{cpu}`" if cpu else "no processor given", where=text, hint=names)
    return found[0]


def _features(arch: str, cpu: str, changes: str, text: str) -> tuple[str, ...]:
    features = set(_CPUS[arch][cpu])
    for change in filter(None, changes.split(",")):
        sign, name = change[0], change[1:]
        if sign not in "+-" or name not in _FEATURES[arch]:
            raise TargetError(f"unknown feature `{change}`", where=text, hint=f"+ or - one of {', '.join(sorted(_FEATURES[arch]))}")
        features.add(name) if sign == "+" else features.discard(name)
    return tuple(sorted(features))


def _size(value: str, what: str, text: str) -> int:
    match = re.fullmatch(r"(\d{1,9})([KM]?)", value)
    if match is None or int(match[1]) == 0:
        raise TargetError(f"`{value}` is no {'count' if what == 'cores' else 'size'} for -{what}", where=text, hint="as in 32K, 2M")
    return int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]]


def _size_text(size: int) -> str:
    for shift, unit in ((20, "M"), (10, "K")):
        if size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)


# ---------------------------------------------------------------- this machine

# What tells one processor from another in /proc/cpuinfo, on x86-64 and AArch64.
_PROCESSOR = re.compile(r"^(?:vendor_id|cpu family|model|stepping|flags|CPU \w+|Features)\s*:.*", re.MULTILINE)


def _host_processor() -> tuple[str, list[str]]:
    """LLVM's name of the processor, and the features that it finds. They are kept for the next time: to load LLVM takes longer than many a
    compilation out of the cache, which asks it nothing else."""
    import llvmlite  # where this machine is asked, not to describe another

    from tcomp import cache

    try:
        described = set(_PROCESSOR.findall(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")))
    except OSError:
        described = set()
    name = cache.name(llvmlite.__version__, platform.machine(), *sorted(described))
    kept = cache.load("processors", name) if described else None
    if kept is None:
        import llvmlite.binding as llvm

        kept = llvm.get_host_cpu_name(), sorted(name for name, on in llvm.get_host_cpu_features().items() if on)
        if described:
            cache.store("processors", name, kept)
    cpu, features = kept
    return cpu, features


def _host_caches() -> dict[str, int]:
    """Sizes in bytes from sysfs; what cannot be read keeps its usual value."""
    sizes = dict(_CACHES)
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
            if kind != "Instruction" and f"l{level}" in sizes:
                sizes[f"l{level}"] = _size(size, f"l{level}", str(index))
        except (OSError, TargetError):
            continue
    return sizes


def _host_cores() -> int:
    """Physical cores that this process may use."""
    usable: Iterable[int] = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in usable:
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))
