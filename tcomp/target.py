"""What machine code is made for: instruction set, vector width, registers, caches, cores, and how fast these are.

A `Target` is written and parsed as one line, which is also its identity in cache keys and artifacts:

    cpu -march=x86_64 -mcpu=cascadelake
    cpu -march=x86_64 -mcpu=haswell -mattr=-fma -l2=512K -cores=4
    cpu -march=aarch64 -mcpu=neoverse-n1            (or arm64, aarch64-linux-gnu, ...)
    cpu -march=aarch64 -mcpu=apple-m1 -os=macos     (or arm64-apple-darwin)
    cpu -march=wasm32 -mcpu=lime1                   (or wasm32)
    cpu -unchecked
    cuda -arch=sm_80,sm_90a
    cuda -arch=sm_90a -precision=tf32

`cpu` alone (or `native`) is this machine. `-mattr`, `-os` and the sizes are printed only where they differ from what is usual. All names of
platforms are in `tcomp.platforms`.
A cuda target names the GPU architectures that get machine code (other GPUs, if newer, are served by portable code for the oldest).
"""

from __future__ import annotations

import functools
import platform
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from tcomp import cache
from tcomp.errors import TargetError
from tcomp.machines import ALL_FEATURES, AVX512, CORES, CUDA_ARCHITECTURES, FEATURES, GPUS, INTEL_AVX512, Core, Gpu
from tcomp.platforms import ARCHITECTURES, BY_TRIPLE, Platform, default_os, listing, named, platform_of
from tcomp.runtime.host import data_caches, physical_cores, tiles_permitted

_USUAL = Core()
_CACHES = ("l1", "l2", "l3")
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
_USUAL_GPUS: tuple[str, ...] = ("sm_80", "sm_90a")
_HOSTS = ("x86_64", "aarch64")  # where this package runs
_OS_SAID = {"apple-m1"}  # processors that most know under another system than Linux: it has to be said


class Target(ABC):
    """One kind of machine: a `CpuTarget` or a `CudaTarget`. Equal targets print the same line."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """A target of this class from its line of text; see the module. Raises `TargetError` that lists what is possible."""
        words = text.split()
        found = _cuda(words, text) if words[:1] == ["cuda"] else _cpu(words, text)
        if not isinstance(found, cls):
            raise TargetError(f"`{text}` is not a {cls.__name__}")
        return found

    @staticmethod
    @functools.cache
    def host() -> CpuTarget:
        """This machine. Raises `TargetError` on an architecture without a code generator."""
        if (arch := ARCHITECTURES.get(platform.machine().lower())) not in _HOSTS:
            raise TargetError(f"this machine ({platform.machine()}) cannot be compiled for as it is", hint=f"known: {', '.join(_HOSTS)}")
        cpu, features = _processor()
        present = ALL_FEATURES[arch].intersection(features)
        if "amx-tile" in present and not tiles_permitted():
            present -= {name for name in present if name.startswith("amx")}
        if not FEATURES[arch].get(cpu, ALL_FEATURES[arch]) <= present:
            # A virtual machine that hides features, or a processor this table does not know: the richest baseline that it has.
            baseline = {"x86_64": ("x86-64-v4", "x86-64-v3", "x86-64-v2", "x86-64"), "aarch64": ("generic",)}[arch]
            cpu = next(name for name in baseline if FEATURES[arch][name] <= present or name == baseline[-1])
        l1, l2, l3 = (getattr(CORES[cpu], level) if size is None else size for level, size in data_caches().items())
        return CpuTarget(arch, cpu, tuple(sorted(present)), l1, l2, l3, physical_cores())

    @property
    @abstractmethod
    def triple(self) -> str:
        """The name of the platform in artifacts: LLVM's, or "cuda"."""

    @property
    def machine(self) -> str:
        """The processor or the GPU architectures alone, without caches, cores or options: for clusters of many machines."""
        return f"{self.arch}-{self.manifest['cpu']}"

    @property
    @abstractmethod
    def family(self) -> str:
        """What machines of one shipped cost model have in common."""

    @property
    @abstractmethod
    def manifest(self) -> dict[str, Any]:
        """What artifacts say of the target they are made for."""

    arch: str
    """The architecture that processors have in common; "cuda" for GPUs."""
    precision: str | None = None
    """In which products of float32 matrices are computed; None where there is no choice."""


@dataclass(frozen=True)
class CpuTarget(Target):
    """A CPU. `arch` is one of `FEATURES` ("x86_64", "aarch64", ...); `cpu` is LLVM's name of the processor; `features` are those of LLVM's
    feature names that it has and that generated code may use, sorted. `l1`, `l2` (per core) and `l3` (shared) are bytes of data cache,
    `cores` physical cores. `unchecked` code does not report indices that are out of range, and divisions by zero. `os` is the system, ""
    for the usual one."""

    arch: str
    cpu: str
    features: tuple[str, ...]
    l1: int = _USUAL.l1
    l2: int = _USUAL.l2
    l3: int = _USUAL.l3
    cores: int = 1
    unchecked: bool = False
    os: str = ""

    def __str__(self) -> str:
        usual = FEATURES[self.arch][self.cpu]
        changes = ",".join([f"+{f}" for f in self.features if f not in usual] + [f"-{f}" for f in sorted(usual - set(self.features))])
        words = ["cpu", f"-march={self.arch}", f"-mcpu={self.cpu}", *([f"-mattr={changes}"] if changes else [])]
        words += [f"-os={self.platform.os}"] * (bool(self.os) or self.cpu in _OS_SAID)
        words += [f"-{level}={_size_text(size)}" for level in _CACHES if (size := getattr(self, level)) != getattr(self.core, level)]
        return " ".join(words + [f"-cores={self.cores}"] * (self.cores != 1) + ["-unchecked"] * self.unchecked)

    @property
    def triple(self) -> str:
        """LLVM's name of the platform."""
        return self.platform.triple

    @property
    def platform(self) -> Platform:
        """Architecture and system."""
        return platform_of(self.arch, self.os or default_os(self.arch))

    @classmethod
    def baseline(cls, triple: str) -> CpuTarget:
        """The most modest processor of a platform, given as in artifacts. Raises TargetError for an unknown one."""
        if (found := BY_TRIPLE.get(triple)) is None:
            raise TargetError(f"no code can be made for {triple}", hint=f"one of {listing()}")
        cpu = min(FEATURES[found.arch], key=lambda name: len(FEATURES[found.arch][name]))
        os = "" if found.os == default_os(found.arch) else found.os
        return cls(found.arch, cpu, tuple(sorted(FEATURES[found.arch][cpu])), os=os)

    @property
    def family(self) -> str:
        """The processor itself, but that Intel's with AVX-512 are one family: the shipped model was trained on servers of that kind. On
        AMD's, which have other units and caches, it would order candidates by what is slow elsewhere."""
        return "intel-avx512" if self.cpu in INTEL_AVX512 and self.vector_bits == 512 else self.cpu

    @property
    def manifest(self) -> dict[str, Any]:
        """Features are checked when the artifact is loaded."""
        return {"triple": self.triple, "cpu": self.cpu, "features": list(self.features)}

    def runs_on(self, machine: Target) -> bool:
        """Whether code made for this target can run on a machine: it has the same architecture, and all features."""
        if not isinstance(machine, CpuTarget) or self.platform != machine.platform:
            return False
        return set(self.features) <= set(machine.features)

    def has(self, feature: str) -> bool:
        """Whether generated code may use a feature, by LLVM's name."""
        return feature in self.features

    @property
    def llvm_features(self) -> str:
        """LLVM's feature string; every feature of concern is switched explicitly."""
        return ",".join(("+" if f in self.features else "-") + f for f in sorted(ALL_FEATURES[self.arch]))

    @property
    def vector_bits(self) -> int:
        """Width of the widest useful vector registers: 512, 256 or 128."""
        if AVX512 <= set(self.features):
            return 512
        return 256 if self.has("avx") or self.has("zvl256b") else 128

    @property
    def vector_registers(self) -> int:
        """Vector registers of a core."""
        return 32 if self.arch in ("aarch64", "riscv64") or self.vector_bits == 512 else 16

    @property
    def tile_registers(self) -> int:
        """Vector registers that the accumulators and operands of a product take at most: on some processors fewer than all are faster."""
        return self.vector_registers - self.core.spared_registers

    @property
    def fma(self) -> bool:
        """Whether a * b + c with one rounding is an instruction."""
        return self.arch in ("aarch64", "riscv64") or self.has("fma") or self.has("vfp4")

    @property
    def relaxed_fma(self) -> bool:
        """Whether vectors have a multiply-add that rounds once or twice, as the machine likes."""
        return self.has("relaxed-simd")

    @property
    def half_arithmetic(self) -> bool:
        """Whether float16 is computed with directly."""
        return self.has("fullfp16") or (self.has("avx512fp16") and self.vector_bits == 512)

    @property
    def bfloat16_products(self) -> bool:
        """Whether an instruction adds products of bfloat16 numbers up in float32, two at a time."""
        return self.has("avx512bf16")

    @property
    def half_conversion(self) -> bool:
        """Whether float16 <-> float32 is an instruction."""
        return self.arch == "aarch64" or self.has("f16c") or self.has("fp16")

    @property
    def rounding(self) -> bool:
        """Whether rounding a float to an integer that is a float is an instruction."""
        return self.arch != "armv7" and (self.arch != "x86_64" or self.has("sse4.1"))

    @property
    def core(self) -> Core:
        """How fast one core is, by the tables; `tcomp.calibration` measures this machine."""
        return CORES[self.cpu]

    @property
    def streaming_bandwidth(self) -> float:
        """Bytes per cycle that each core gets, with prefetching, of data that none of its own caches holds, such as weights."""
        return min(0.8 * self.core.l3_bandwidth, self.core.total_memory_bandwidth / (self.cores * self.core.ghz))

    def lanes(self, bits: int) -> int:
        """Elements of `bits` bits in one vector register."""
        return self.vector_bits // bits


@dataclass(frozen=True)
class CudaTarget(Target):
    """GPUs. `archs` get machine code; products of float32 matrices are computed in `precision` ("fp32", "tf32", "fp16" or "bf16");
    without `vector_access` buffers need not be aligned for vectors; `unchecked` as for a `CpuTarget`."""

    archs: tuple[str, ...]
    precision: str = "fp32"
    vector_access: bool = True
    unchecked: bool = False

    triple = family = arch = "cuda"

    @property
    def _options(self) -> list[str]:
        """What is not usual, sorted."""
        given = {f"precision={self.precision}": self.precision != "fp32", "scalar": not self.vector_access, "unchecked": self.unchecked}
        return [option for option, unusual in given.items() if unusual]

    def __str__(self) -> str:
        return " ".join(["cuda", f"-arch={','.join(self.archs)}", *(f"-{option}" for option in self._options)])

    @property
    def manifest(self) -> dict[str, Any]:
        """Options take the place of features."""
        return {"triple": self.triple, "cpu": ",".join(self.archs), "features": self._options}

    @property
    def compute_capability(self) -> int:
        """The oldest of the architectures: 80 for "sm_80,sm_90a". One text is compiled for all of them."""
        return min(capability(arch)[0] for arch in self.archs)

    def executes(self, arch: str) -> bool:
        """Whether each of the architectures has what "sm_80" has: those as new. What "sm_90a" has, that one has alone."""
        number, alone = capability(arch)
        return set(self.archs) == {arch} if alone else self.compute_capability >= number

    @property
    def gpu(self) -> Gpu:
        """How fast the first of the architectures is."""
        return GPUS[self.archs[0].removesuffix("a")]

    @property
    def shared_per_block(self) -> int:
        """Bytes of shared memory that a block may have on each of the architectures: all of an SM but 1 KiB that the system takes."""
        return min(GPUS[arch.removesuffix("a")].shared for arch in self.archs) - 1 << 10


# What tells one processor from another in /proc/cpuinfo, on x86-64 and AArch64.
_DESCRIPTION = re.compile(r"^(?:vendor_id|cpu family|model|stepping|flags|CPU \w+|Features)\s*:.*", re.MULTILINE)


def _processor() -> tuple[str, list[str]]:
    """LLVM's name of the processor, and the features that it finds. They are cached: to load LLVM takes longer than many a compilation out
    of the cache, which asks it nothing else."""
    import llvmlite  # where this machine is asked, not to describe another

    def asked() -> tuple[str, list[str]]:
        import llvmlite.binding as llvm

        return llvm.get_host_cpu_name(), sorted(name for name, on in llvm.get_host_cpu_features().items() if on)

    described: list[str] = []
    with suppress(OSError):
        described = sorted(set(_DESCRIPTION.findall(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))))
    if not described:
        return asked()
    cpu, features = cache.recall("processors", cache.name(llvmlite.__version__, platform.machine(), *described), asked)
    return cpu, features


def capability(arch: str) -> tuple[int, bool]:
    """The compute capability of a GPU architecture, and whether its code runs on no other: (90, True) of "sm_90a"."""
    return int(arch.removeprefix("sm_").removesuffix("a")), arch.endswith("a")


def _cpu(words: list[str], text: str) -> CpuTarget:
    if words and (known := named(words[0].lower())) is not None:
        words = ["cpu", f"-march={known[0]}", *[f"-os={known[1]}"] * bool(known[1]), *words[1:]]
    if words in (["cpu"], ["native"], ["cpu", "-mcpu=native"]):
        return Target.host()
    if words[-1:] == ["-unchecked"]:
        return replace(_cpu(words[:-1], text), unchecked=True)
    if not words or words[0] != "cpu":
        hint = f"`cpu`, `cpu -mcpu=NAME`, `cuda`, `cuda -arch=sm_90a`, or a platform: {listing()}"
        raise TargetError(f"unknown target `{text}`", hint=hint)
    hint = "-march= -os= -mcpu= -mattr=+feature,-feature -l1= -l2= -l3= -cores=, and last -unchecked"
    options = _options(words, r"(march|os|mcpu|mattr|l1|l2|l3|cores)=(\S+)", text, hint)
    cpu = options.get("mcpu")
    arch = options.get("march") or next((name for name, cpus in FEATURES.items() if cpu in cpus), None)
    if arch is None:
        names = "; ".join(f"{name}: {', '.join(cpus)}" for name, cpus in FEATURES.items())
        raise TargetError(f"unknown processor `{cpu}`" if cpu else "no processor given", where=text, hint=names)
    arch = ARCHITECTURES[_one_of(arch, ARCHITECTURES, "architecture", text, FEATURES)]
    if cpu in _OS_SAID and "os" not in options:
        raise TargetError(f"`{cpu}` runs more than one system", where=text, hint="say which: -os=macos, or -os=linux")
    system = platform_of(arch, options.get("os", default_os(arch)), text).os
    usual = "apple-m1" if system == "macos" else next(iter(FEATURES[arch]))
    cpu = _one_of(cpu or usual, FEATURES[arch], "processor", text)
    features = set(FEATURES[arch][cpu])
    for change in filter(None, options.get("mattr", "").split(",")):
        sign, name = change[0], change[1:]
        if sign not in "+-" or name not in ALL_FEATURES[arch]:
            raise TargetError(f"unknown feature `{change}`", where=text, hint=f"+ or - one of {', '.join(sorted(ALL_FEATURES[arch]))}")
        features.add(name) if sign == "+" else features.discard(name)
    l1, l2, l3 = (_size(options[level], level, text) if level in options else getattr(CORES[cpu], level) for level in _CACHES)
    cores = _size(options.get("cores", "1"), "cores", text)
    return CpuTarget(arch, cpu, tuple(sorted(features)), l1, l2, l3, cores, os="" if system == default_os(arch) else system)


def _cuda(words: list[str], text: str) -> CudaTarget:
    hint = "cuda -arch=sm_80,sm_90a -precision=tf32 (or fp16, bf16) -unchecked"
    options = _options(words, r"(arch|precision)=(\S+)|(scalar|unchecked)()", text, hint)
    given = options["arch"].split(",") if "arch" in options else _USUAL_GPUS
    archs = tuple(_one_of(arch, CUDA_ARCHITECTURES, "GPU architecture", text) for arch in dict.fromkeys(given))
    precision = _one_of(options.get("precision", "fp32"), _PRECISIONS, "precision", text)
    target = CudaTarget(archs, precision, "scalar" not in options, "unchecked" in options)
    if precision != "fp32" and target.compute_capability < 80:
        raise TargetError(f"GPUs before sm_80 compute no products in {precision}", where=text, hint="-arch=sm_80, or leave -precision away")
    return target


def _options(words: list[str], pattern: str, text: str, hint: str) -> dict[str, str]:
    """The options behind the first word, by name, each at most once."""
    found: dict[str, str] = {}
    for word in words[1:]:
        if (match := re.fullmatch(f"-(?:{pattern})", word)) is None:
            raise TargetError(f"unknown option `{word}`", where=text, hint=hint)
        name, value = (part for part in match.groups() if part is not None)
        if name in found:
            raise TargetError(f"-{name} is given twice", where=text, hint="leave one of them out")
        found[name] = value
    return found


def _one_of(name: str, known: Iterable[str], what: str, text: str, shown: Iterable[str] = ()) -> str:
    if name not in known:
        raise TargetError(f"unknown {what} `{name}`", where=text, hint=f"one of {', '.join(shown or known)}")
    return name


def _size(value: str, what: str, text: str) -> int:
    if (match := re.fullmatch(r"(\d{1,9})([KM]?)", value)) is None or int(match[1]) == 0:
        raise TargetError(f"`{value}` is not a {'count' if what == 'cores' else 'size'} for -{what}", where=text, hint="as in 32K, 2M")
    return int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]]


def _size_text(size: int) -> str:
    return next((f"{size >> shift}{unit}" for shift, unit in ((20, "M"), (10, "K")) if size % (1 << shift) == 0), str(size))
