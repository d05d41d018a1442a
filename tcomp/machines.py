"""The machine model: one table of processors and one of GPUs with the figures that compilation asks for.

Nothing is measured or guessed here: these are data about machines, by LLVM's names of them. `tcomp.target` describes the machine that code
is made for by these tables, and schedules and cost models ask that target.

Sources: Intel's, AMD's and Arm's optimisation manuals, A. Fog's instruction tables, uops.info; bandwidths by STREAM as commonly reported.
"""

from __future__ import annotations

from dataclasses import dataclass

_V2 = frozenset({"cx16", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"})
_AVX = _V2 | {"avx"}
_V3 = _AVX | {"avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_ICELAKE = _V4 | {"avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vnni", "avx512vpopcntdq", "gfni"}
_SAPPHIRE = _ICELAKE | {"amx-bf16", "amx-int8", "amx-tile", "avx512bf16", "avx512fp16", "avxvnni"}
_NEON = frozenset({"fp-armv8", "neon"})
_NEOVERSE = _NEON | {"dotprod", "fullfp16", "lse"}
_NEOVERSE_V = _NEOVERSE | {"bf16", "i8mm"}

FEATURES: dict[str, dict[str, frozenset[str]]] = {
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
ALL_FEATURES = {arch: frozenset[str]().union(*cpus.values()) for arch, cpus in FEATURES.items()}
"""The features that decide which instructions generated code may use; all others of a processor are of no concern here."""

AVX512 = _V4
"""Features without which an x86-64 processor's vectors are no wider than 256 bits."""


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
    spared_registers: int = 0  # vector registers that products are faster without, where that was measured (`Target.tile_registers`)


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
    tensor: int = 1024  # float16 multiply-adds of an SM a cycle by `mma` (twice as many by `wgmma`), half of tf32, twice of int8
    threads: int = 2048  # that an SM holds at most
    blocks: int = 32
    registers: int = 1 << 16  # of 32 bits, of an SM


CORES = {
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
    "znver5": Core(3.8, 2, 4, issue=8, l1=128, l2=60, l3=20, divide=8, memory=35, memory_all=400, spared_registers=4),
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
"""Every processor of `FEATURES`, by its name."""

GPUS = {
    "sm_75": Gpu(40, 1.59, 64, 320, 1200, 4 << 20, 64, 512, 1024, 16),  # T4
    "sm_80": Gpu(108, 1.41, 64, 1935, 4500, 40 << 20, 164),  # A100
    "sm_86": Gpu(72, 1.70, 128, 600, 2000, 6 << 20, 100, 512, 1536, 16),  # A10
    "sm_87": Gpu(16, 1.30, 128, 205, 800, 4 << 20, 164, 1024, 1536, 16),  # Jetson AGX Orin
    "sm_89": Gpu(142, 2.52, 128, 864, 5000, 96 << 20, 100, 512, 1536, 24),  # L40S
    "sm_90": Gpu(132, 1.83, 128, 3350, 7000, 50 << 20, 228),  # H100 SXM
    "sm_100": Gpu(148, 1.85, 128, 8000, 12000, 126 << 20, 228),  # B200
    "sm_103": Gpu(148, 1.92, 128, 8000, 12000, 126 << 20, 228),  # B300
    "sm_120": Gpu(170, 2.41, 128, 1792, 8000, 96 << 20, 100, 256, 1536, 24),  # RTX 5090
    "sm_121": Gpu(48, 2.40, 128, 273, 2000, 24 << 20, 100, 256, 1536, 24),  # GB10
}

CACHES = {"l1": 32 << 10, "l2": 1 << 20, "l3": 16 << 20}
"""Bytes of data cache, per core but for the shared third level, where nothing else is known."""

CUDA_ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_120", "sm_121")
