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
from tcomp.machines import ALL_FEATURES, AVX512, CORES, CUDA_ARCHITECTURES, FEATURES, GPUS, Core, Gpu

_USUAL = Core()
_CACHES = ("l1", "l2", "l3")
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
    l1: int = _USUAL.l1
    l2: int = _USUAL.l2
    l3: int = _USUAL.l3
    cores: int = 1
    kind: str = "cpu"

    @staticmethod
    @functools.cache
    def host() -> Target:
        """This machine. Raises `TargetError` on an architecture without a code generator."""
        arch = _ARCH_NAMES.get(platform.machine().lower())
        if arch is None:
            raise TargetError(f"no code generator for this machine ({platform.machine()})", hint=f"known: {', '.join(FEATURES)}")
        cpu, features = _host_processor()
        present = ALL_FEATURES[arch].intersection(features)
        if not FEATURES[arch].get(cpu, ALL_FEATURES[arch]) <= present:
            # A virtual machine that hides features, or a processor this table does not know: the richest baseline that it has.
            baseline = {"x86_64": ("x86-64-v4", "x86-64-v3", "x86-64-v2", "x86-64"), "aarch64": ("generic",)}[arch]
            cpu = next(name for name in baseline if FEATURES[arch][name] <= present or name == baseline[-1])
        l1, l2, l3 = _host_caches(CORES[cpu]).values()
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
        cpu = options.pop("mcpu", next(iter(FEATURES[arch])))
        if cpu not in FEATURES[arch]:
            raise TargetError(f"unknown processor `{cpu}` of {arch}", where=text, hint=f"one of {', '.join(FEATURES[arch])}")
        features = _features(arch, cpu, options.pop("mattr", ""), text)
        l1, l2, l3 = (_size(options[level], level, text) if level in options else getattr(CORES[cpu], level) for level in _CACHES)
        return Target(arch, cpu, features, l1, l2, l3, _size(options.get("cores", "1"), "cores", text))

    def __str__(self) -> str:
        if self.kind == "cuda":
            return " ".join(["cuda", f"-arch={self.cpu}", *(f"-{f}" for f in self.features)])
        words = ["cpu", f"-march={self.arch}", f"-mcpu={self.cpu}"]
        usual = FEATURES[self.arch][self.cpu]
        changes = [f"+{f}" for f in self.features if f not in usual] + [f"-{f}" for f in sorted(usual - set(self.features))]
        if changes:
            words.append("-mattr=" + ",".join(changes))
        words += [f"-{level}={_size_text(size)}" for level in _CACHES if (size := getattr(self, level)) != getattr(self.core, level)]
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
        return ",".join(("+" if f in self.features else "-") + f for f in sorted(ALL_FEATURES[self.arch]))

    @property
    def vector_bits(self) -> int:
        """Width of the widest useful vector registers: 512, 256 or 128."""
        if AVX512 <= set(self.features):
            return 512
        return 256 if self.has("avx") else 128

    @property
    def vector_registers(self) -> int:
        return 32 if self.arch == "aarch64" or self.vector_bits == 512 else 16

    @property
    def tile_registers(self) -> int:
        """Vector registers that the accumulators and operands of a product take at most: on some processors fewer than all are faster."""
        return self.vector_registers - self.core.spared_registers

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
        return CORES[self.cpu]

    @property
    def streamed(self) -> float:
        """Bytes a cycle that each core gets of what no cache of its own holds and it has asked for ahead, as weights are."""
        return min(0.8 * self.core.l3_bandwidth, self.core.total_memory_bandwidth / (self.cores * self.core.ghz))

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
        return GPUS[self.cpu.split(",")[0].removesuffix("a")]

    @property
    def shared_of_block(self) -> int:
        """Bytes of shared memory that a block may have on each of a CUDA target's architectures: all of an SM but what the system takes."""
        return min(GPUS[arch.removesuffix("a")].shared for arch in self.cpu.split(",")) - 1 << 10

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
    unknown = [a for a in archs if a not in CUDA_ARCHITECTURES]
    if unknown:
        raise TargetError(f"unknown GPU architecture `{unknown[0]}`", where=text, hint=f"one of {', '.join(CUDA_ARCHITECTURES)}")
    target = Target("cuda", ",".join(archs), tuple(sorted(features)), kind="cuda")
    if target.precision != "fp32" and target.compute_capability < 80:
        raise TargetError(f"GPUs before sm_80 compute no products in {target.precision}", where=text, hint="-arch=sm_80, or leave -precision away")
    return target


def _arch(name: str | None, cpu: str | None, text: str) -> str:
    if name is not None:
        if name not in _ARCH_NAMES:
            raise TargetError(f"unknown architecture `{name}`", where=text, hint=f"one of {', '.join(FEATURES)}")
        return _ARCH_NAMES[name]
    found = [arch for arch, cpus in FEATURES.items() if cpu in cpus]
    if not found:
        names = "; ".join(f"{arch}: {', '.join(cpus)}" for arch, cpus in FEATURES.items())
        raise TargetError(f"unknown processor `{cpu}`" if cpu else "no processor given", where=text, hint=names)
    return found[0]


def _features(arch: str, cpu: str, changes: str, text: str) -> tuple[str, ...]:
    features = set(FEATURES[arch][cpu])
    for change in filter(None, changes.split(",")):
        sign, name = change[0], change[1:]
        if sign not in "+-" or name not in ALL_FEATURES[arch]:
            raise TargetError(f"unknown feature `{change}`", where=text, hint=f"+ or - one of {', '.join(sorted(ALL_FEATURES[arch]))}")
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


def _host_caches(core: Core) -> dict[str, int]:
    """Sizes in bytes from sysfs; what cannot be read is as the table says."""
    sizes: dict[str, int] = {level: getattr(core, level) for level in _CACHES}
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
