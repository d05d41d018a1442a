"""The machine model: one table of processors and one of GPUs with the figures that compilation asks for.

These are data, by LLVM's names of processors and GPUs. A `Target` describes the machine that code is made for by these tables; schedules
and cost models ask that target. What the machine at hand really does is measured by `tcomp.calibration`, for reports alone.

Latencies, ports and caches are those of Intel's, AMD's and Arm's optimisation manuals, A. Fog's instruction tables and uops.info, bandwidths
those of STREAM as commonly reported.
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
        **dict.fromkeys(("x86-64-v2", "nehalem"), _V2),
        "sandybridge": _AVX,
        **dict.fromkeys(("x86-64-v3", "haswell", "broadwell", "skylake", "znver1", "znver2", "znver3"), _V3),
        "alderlake": _V3 | {"avxvnni", "gfni"},
        **dict.fromkeys(("x86-64-v4", "skylake-avx512"), _V4),
        "cascadelake": _V4 | {"avx512vnni"},
        "cooperlake": _V4 | {"avx512vnni", "avx512bf16"},
        **dict.fromkeys(("icelake-client", "icelake-server", "rocketlake", "tigerlake"), _ICELAKE),
        "znver4": _ICELAKE | {"avx512bf16"},
        "znver5": _ICELAKE | {"avx512bf16", "avxvnni"},
        **dict.fromkeys(("sapphirerapids", "emeraldrapids"), _SAPPHIRE),
        "graniterapids": _SAPPHIRE | {"amx-fp16"},
    },
    "aarch64": {
        **dict.fromkeys(("generic", "cortex-a53", "cortex-a72"), _NEON),
        **dict.fromkeys(("cortex-a76", "neoverse-n1", "apple-m1"), _NEOVERSE),
        **dict.fromkeys(("neoverse-n2", "neoverse-v1", "neoverse-v2"), _NEOVERSE_V),
    },
}
ALL_FEATURES = {arch: frozenset[str]().union(*cpus.values()) for arch, cpus in FEATURES.items()}
"""The features that decide which instructions generated code may use; all others of a processor are of no concern here."""

INTEL_AVX512 = frozenset({
    "skylake-avx512", "cascadelake", "cooperlake", "icelake-client", "icelake-server", "rocketlake", "tigerlake", "sapphirerapids",
    "emeraldrapids", "graniterapids",
})  # fmt: skip
"""Intel's processors with AVX-512: alike enough that what was learned on one of them ranks schedules on the others."""

AVX512 = _V4
"""Features without which an x86-64 processor's vectors are no wider than 256 bits."""


@dataclass(frozen=True, slots=True)
class Core:
    """One core of a processor: what its default schedules and the model of their cost ask for.

    Rates are a cycle, for vectors of the full width; bandwidths are attainable ones. The defaults are those of Intel's first servers
    with AVX-512 (skylake-avx512), on which the schedules and the model were measured first.
    """

    ghz: float = 3.0  # sustained while all vector units are busy
    fma: float = 2  # fused multiply-adds (and additions, ...) a cycle
    latency: float = 4  # cycles from a multiply-add to one that depends on it
    loads: float = 2  # a cycle
    stores: float = 1  # a cycle
    issue: float = 4  # instructions of all kinds a cycle
    divide: float = 10  # cycles between two divisions or square roots of float32 vectors
    spill: float = 1.5  # cycles for a vector that is stored and loaded again, which nothing hides
    spared_registers: int = 0  # vector registers that tiles of products leave free: where that is faster, or they would spill

    l1: int = 32 << 10  # bytes of the first-level data cache, of the second level for each core, of the third level for all cores,
    l2: int = 1 << 20  # where the line of a target says nothing; those of a host are asked of the system
    l3: int = 16 << 20
    line: int = 64  # bytes of a line of the caches
    l1_span: int = 4096  # bytes between addresses that fall into the same set of the first-level cache: its size by its ways
    page: int = 4096  # bytes that one address translation covers, at whose end hardware stops to prefetch
    tlb_entries: int = 64  # pages whose translations are at hand
    tlb_miss: float = 8  # cycles to find the translation of another page in the second-level table

    l1_bandwidth: float = 128  # bytes a cycle, to the registers
    l2_bandwidth: float = 40  # bytes a cycle, to the first-level cache
    l3_bandwidth: float = 10  # bytes a cycle
    memory_bandwidth: float = 12.0  # GB/s that one core draws
    total_memory_bandwidth: float = 100.0  # GB/s that all cores together draw
    shared_bandwidth: float = 1.0  # bytes a cycle that each core gets while all cores read the same from beyond their own caches
    parallel_region: float = 1300  # cycles to wake the threads of a region and to wait for them: half a microsecond

    def load_cycles(self, level: str, size: int) -> float:
        """Cycles to load `size` bytes from the cache `level` ("l1", "l2", "l3") while a product is computed, which leaves four fifths of
        the bandwidth (measured on skylake-avx512)."""
        bandwidth: float = getattr(self, f"{level}_bandwidth")
        return size / (0.8 * bandwidth)


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
    "x86-64": Core(fma=1, latency=8, loads=1, l1_bandwidth=16, l2_bandwidth=16, divide=14, spared_registers=2),  # without multiply-adds
    "x86-64-v2": Core(fma=1, latency=8, loads=1, l1_bandwidth=32, l2_bandwidth=24, divide=14, spared_registers=2),
    "nehalem": Core(
        fma=1, latency=8, loads=1, divide=14, spared_registers=4, l2=256 << 10, l3=8 << 20, l1_bandwidth=32, l2_bandwidth=24,
        memory_bandwidth=9, total_memory_bandwidth=25,
    ),
    "sandybridge": Core(
        fma=1, latency=8, divide=28, spared_registers=2, l2=256 << 10, l3=8 << 20, l1_bandwidth=48, l2_bandwidth=24, memory_bandwidth=10,
        total_memory_bandwidth=40,
    ),
    "x86-64-v3": Core(latency=5, divide=8, l1_bandwidth=64, l2_bandwidth=32),
    "haswell": Core(latency=5, divide=14, l2=256 << 10, l3=8 << 20, l1_bandwidth=64, l2_bandwidth=32, total_memory_bandwidth=55),
    "broadwell": Core(latency=5, l2=256 << 10, l3=8 << 20, l1_bandwidth=64, l2_bandwidth=32, total_memory_bandwidth=60),
    "skylake": Core(
        ghz=3.8, divide=5, l2=256 << 10, l3=8 << 20, l1_bandwidth=64, l2_bandwidth=32, memory_bandwidth=16, total_memory_bandwidth=32,
    ),
    "alderlake": Core(
        ghz=4.5, loads=3, stores=2, issue=6, divide=5, l1=48 << 10, l2=1280 << 10, l3=30 << 20, tlb_entries=96, l1_bandwidth=96,
        l2_bandwidth=40, memory_bandwidth=30, total_memory_bandwidth=65,
    ),
    "znver1": Core(
        ghz=3.2, fma=1, latency=5, loads=1, issue=5, divide=6, l2=512 << 10, l3=8 << 20, l1_bandwidth=32, l2_bandwidth=32,
        memory_bandwidth=18, total_memory_bandwidth=120,
    ),
    "znver2": Core(
        ghz=3.2, latency=5, issue=5, divide=6, l2=512 << 10, l1_bandwidth=64, l2_bandwidth=32, l3_bandwidth=16, memory_bandwidth=20,
        total_memory_bandwidth=150,
    ),
    "znver3": Core(
        ghz=3.4, issue=6, divide=5, l2=512 << 10, l3=32 << 20, l1_bandwidth=64, l2_bandwidth=32, l3_bandwidth=16, memory_bandwidth=22,
        total_memory_bandwidth=160,
    ),
    "znver4": Core(  # vectors of 512 bits take two cycles on units of 256 bits
        ghz=3.6, fma=1, loads=1, stores=0.5, issue=6, l3=32 << 20, tlb_entries=72, l1_bandwidth=64, l2_bandwidth=32, l3_bandwidth=16,
        memory_bandwidth=28, total_memory_bandwidth=300,
    ),
    "znver5": Core(
        ghz=3.8, issue=8, divide=8, spared_registers=4, tlb_entries=96, l2_bandwidth=60, l3_bandwidth=20, memory_bandwidth=35,
        total_memory_bandwidth=400,
    ),
    "skylake-avx512": Core(ghz=2.6),
    "cascadelake": Core(ghz=2.8),
    "cooperlake": Core(ghz=2.8),
    "x86-64-v4": Core(issue=5, total_memory_bandwidth=200),
    "icelake-client": Core(ghz=3.2, fma=1, issue=5, l1=48 << 10, l2=512 << 10, l3=8 << 20, memory_bandwidth=20, total_memory_bandwidth=45),
    "rocketlake": Core(ghz=4.2, fma=1, issue=5, l1=48 << 10, l2=512 << 10, memory_bandwidth=22, total_memory_bandwidth=40),
    "tigerlake": Core(ghz=3.5, fma=1, issue=5, l1=48 << 10, l2=1280 << 10, l3=12 << 20, memory_bandwidth=22, total_memory_bandwidth=50),
    "icelake-server": Core(ghz=2.8, issue=5, total_memory_bandwidth=150),
    "sapphirerapids": Core(issue=6, tlb_entries=96, memory_bandwidth=14, total_memory_bandwidth=220),
    "emeraldrapids": Core(issue=6, tlb_entries=96, memory_bandwidth=14, total_memory_bandwidth=260),
    "graniterapids": Core(issue=6, tlb_entries=96, memory_bandwidth=16, total_memory_bandwidth=450),
    "generic": Core(ghz=2.5, issue=3, divide=7, l1_bandwidth=32, l2_bandwidth=16, total_memory_bandwidth=50),
    "cortex-a53": Core(
        ghz=1.4, fma=1, latency=8, loads=0.5, stores=0.5, issue=2, divide=20, l2=128 << 10, l3=512 << 10, l1_span=8192, tlb_entries=10,
        l1_bandwidth=8, l2_bandwidth=6, l3_bandwidth=4, memory_bandwidth=3, total_memory_bandwidth=6,
    ),
    "cortex-a72": Core(
        ghz=1.8, fma=1, latency=7, loads=1, issue=3, divide=14, l2=256 << 10, l3=1 << 20, l1_span=16384, tlb_entries=32, l1_bandwidth=16,
        l2_bandwidth=10, memory_bandwidth=5, total_memory_bandwidth=8,
    ),
    "cortex-a76": Core(
        ghz=2.4, divide=7, l1=64 << 10, l2=512 << 10, l3=4 << 20, l1_span=16384, tlb_entries=44, l1_bandwidth=32, l2_bandwidth=20,
        memory_bandwidth=12, total_memory_bandwidth=20,
    ),
    "neoverse-n1": Core(
        ghz=2.6, divide=7, l1=64 << 10, l3=32 << 20, l1_span=16384, tlb_entries=40, l1_bandwidth=32, l2_bandwidth=20,
        memory_bandwidth=16, total_memory_bandwidth=160,
    ),
    "neoverse-n2": Core(
        issue=5, divide=7, l1=64 << 10, l3=32 << 20, l1_span=16384, tlb_entries=48, l1_bandwidth=32, l2_bandwidth=24,
        memory_bandwidth=20, total_memory_bandwidth=200,
    ),
    "neoverse-v1": Core(
        ghz=2.6, fma=4, loads=3, stores=2, issue=8, divide=5, l1=64 << 10, l3=32 << 20, l1_span=16384, tlb_entries=48, l1_bandwidth=48,
        l2_bandwidth=32, memory_bandwidth=22, total_memory_bandwidth=250,
    ),
    "neoverse-v2": Core(
        ghz=3.2, fma=4, loads=3, stores=2, issue=8, divide=5, l1=64 << 10, l2=2 << 20, l3=64 << 20, l1_span=16384, tlb_entries=48,
        l1_bandwidth=48, l2_bandwidth=32, memory_bandwidth=30, total_memory_bandwidth=400,
    ),
    "apple-m1": Core(
        ghz=3.1, fma=4, loads=3, stores=2, issue=8, divide=4, l1=128 << 10, l2=3 << 20, l3=8 << 20, line=128, l1_span=16384, page=16384,
        tlb_entries=160, l1_bandwidth=48, l2_bandwidth=32, memory_bandwidth=55, total_memory_bandwidth=60,
    ),
}  # fmt: skip
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

CUDA_ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_120", "sm_121")
