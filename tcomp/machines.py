"""The machine model: one table of processors and one of GPUs with the figures that compilation asks for.

These are data, by LLVM's names of processors and GPUs. A `Target` describes the machine that code is made for by these tables; schedules
and cost models ask that target. What the machine at hand really does is measured by `tcomp.calibration`, for reports alone.

Latencies, ports and caches are those of Intel's, AMD's and Arm's optimisation manuals, A. Fog's instruction tables and uops.info,
bandwidths those of STREAM as commonly reported.
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
_RVA22V = frozenset({"a", "c", "d", "f", "m", "v", "zba", "zbb", "zbs"})  # of the profile RVA22, what code is made of
_ARMV7 = frozenset({"neon", "vfp3"})
_ARMV7VE = _ARMV7 | {"fp16", "hwdiv", "hwdiv-arm", "vfp4"}
_WASM = frozenset({"bulk-memory", "mutable-globals", "nontrapping-fptoint", "sign-ext", "simd128"})

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
    "riscv64": {**dict.fromkeys(("generic-rv64", "sifive-p670"), _RVA22V), "spacemit-x60": _RVA22V | {"zvl256b"}},
    "armv7": {**dict.fromkeys(("cortex-a7", "cortex-a15"), _ARMV7VE), "cortex-a9": _ARMV7 | {"fp16"}},
    "wasm32": {"lime1": _WASM, "bleeding-edge": _WASM | {"relaxed-simd"}},
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

    ghz: float = 3  # sustained while all vector units are busy
    fma: float = 2  # fused multiply-adds (and additions, ...) a cycle
    latency: float = 4  # cycles from a multiply-add to one that depends on it
    loads: float = 2  # a cycle
    stores: float = 1  # a cycle
    issue: float = 4  # instructions of all kinds a cycle
    divide: float = 10  # cycles between two divisions or square roots of float32 vectors
    l1: int = 32 << 10  # bytes of the first-level data cache, of the second level for each core, of the third level for all cores,
    l2: int = 1 << 20  # where the line of a target says nothing; those of a host are asked of the system
    l3: int = 16 << 20
    l1_bandwidth: float = 128  # bytes a cycle, to the registers
    l2_bandwidth: float = 40  # bytes a cycle, to the first-level cache
    l3_bandwidth: float = 10  # bytes a cycle
    memory_bandwidth: float = 12  # GB/s that one core draws
    total_memory_bandwidth: float = 100  # GB/s that all cores together draw
    memory_latency: float = 220  # nanoseconds from a load to its value when memory is busy (fitted to streamed weights on znver4)

    half_vector: float = 1  # the share of an instruction's time on a vector that one on half of a vector takes
    unrolled_steps: int = 8  # of a reduction, at most: where code is compiled once more, operands of all steps would take registers
    loads_first: bool = False  # whether code is ordered so that all operands of a step are loaded before the first of them is used
    spared_registers: int = 0  # vector registers that tiles of products leave free: where that is faster, or they would spill
    spill: float = 1.5  # cycles for a vector that is stored and loaded again, which nothing hides
    tile_product: float = 16  # cycles of a product in tile registers (AMX), of 16 rows by 16 columns and 64 bytes of each,
    tile_latency: float = 52  # from one to another that adds to the same sums,
    tile_load: float = 8  # to load such a register,
    tile_sums: float = 48  # and to clear, load, store and read one of sums (an estimate)
    line: int = 64  # bytes of a line of the caches
    l1_span: int = 4096  # bytes between addresses that fall into the same set of the first-level cache: its size by its ways
    page: int = 4096  # bytes that one address translation covers, at whose end hardware stops to prefetch
    tlb_entries: int = 64  # pages whose translations are at hand
    tlb_miss: float = 8  # cycles to find the translation of another page in the second-level table
    l2_vector_load: float = 0.5  # cycles by which a step of a product takes longer for each vector that comes from the second-level cache,
    memory_vector_load: float = 8.0  # and that it takes at least for each from beyond (both fitted to products on skylake-avx512)
    row_eviction: float = 1.05  # factor for products whose rows evict each other from the first-level cache (fitted likewise; on znver4,
    # 48 and 128 rows of 12 KiB by 768 columns take 1.2 to 1.3 times as long in tiles of 14 rows as in tiles of 6)
    l2_ways: int = 16  # of the second-level cache: addresses whose distance is its size by its ways fall into one set
    usable_cache: float = 0.8  # share of a cache that a working set may take: stacks and code take the rest (fitted to benchmarks.model)
    exposed_transfer: float = 0.2  # share of a transfer's time that is waited for though something else takes longer (likewise)
    parallel_region: float = 1300  # cycles to wake the threads of a region and to wait for them: half a microsecond
    product_efficiency: float = 0.93  # share of `fma` that products of matrices attain (fitted, as what follows: see `passes.algorithms`)
    tile_bandwidth: float = 14  # bytes a cycle of the tiles and points of Winograd's algorithm, which are transformed on the way
    quarters_bandwidth: float = 28  # bytes a cycle of the quarters and products of Strassen's, while the last-level cache holds them,
    cached_quarters: int = 40 << 20  # which is up to so many bytes (fitted to znver5, where that cache has 32 MiB),
    large_quarters_bandwidth: float = 6  # and where they are more, and come from memory


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
    shared_bandwidth: float = 128  # bytes that an SM moves from or to shared memory a cycle: 4 for each of 32 banks
    l1_bandwidth: float = 64  # bytes that an SM moves through its first cache a cycle
    launch: float = 3000  # nanoseconds that another launch takes, with the wait for the one before (CUDA graphs, as commonly reported)
    latency: float = 700  # nanoseconds from a load to its value when memory is busy (an estimate for current boards)
    in_flight: int = 48 << 10  # bytes of loads that an SM has under way at most; bandwidth times latency of an A100 asks for 13 KB of each


K = 1 << 10  # bytes
CORES = {
    #                      GHz fma lat ld   st iss div      L1        L2         L3   L1  L2  L3 one  all  (bytes, bytes a cycle, GB/s)
    "x86-64":         Core(  3, 1, 8,   1,   1, 4, 14,  32 * K, 1024 * K, 16384 * K,  16, 16, 10, 12, 100, spared_registers=2),
    "x86-64-v2":      Core(  3, 1, 8,   1,   1, 4, 14,  32 * K, 1024 * K, 16384 * K,  32, 24, 10, 12, 100, spared_registers=2),
    "nehalem":        Core(  3, 1, 8,   1,   1, 4, 14,  32 * K,  256 * K,  8192 * K,  32, 24, 10,  9,  25, spared_registers=4),
    "sandybridge":    Core(  3, 1, 8,   2,   1, 4, 28,  32 * K,  256 * K,  8192 * K,  48, 24, 10, 10,  40, spared_registers=4),
    "x86-64-v3":      Core(  3, 2, 5,   2,   1, 4,  8,  32 * K, 1024 * K, 16384 * K,  64, 32, 10, 12, 100),
    "haswell":        Core(  3, 2, 5,   2,   1, 4, 14,  32 * K,  256 * K,  8192 * K,  64, 32, 10, 12,  55),
    "broadwell":      Core(  3, 2, 5,   2,   1, 4, 10,  32 * K,  256 * K,  8192 * K,  64, 32, 10, 12,  60),
    "skylake":        Core(3.8, 2, 4,   2,   1, 4,  5,  32 * K,  256 * K,  8192 * K,  64, 32, 10, 16,  32),
    "alderlake":      Core(4.5, 2, 4,   3,   2, 6,  5,  48 * K, 1280 * K, 30720 * K,  96, 40, 10, 30,  65, tlb_entries=96),
    "znver1":         Core(3.2, 1, 5,   1,   1, 5,  6,  32 * K,  512 * K,  8192 * K,  32, 32, 10, 18, 120),
    "znver2":         Core(3.2, 2, 5,   2,   1, 5,  6,  32 * K,  512 * K, 16384 * K,  64, 32, 16, 20, 150),
    "znver3":         Core(3.4, 2, 4,   2,   1, 6,  5,  32 * K,  512 * K, 32768 * K,  64, 32, 16, 22, 160),
    "znver4":         Core(3.6, 1, 4,   1, 0.5, 6, 10,  32 * K, 1024 * K, 32768 * K,  64, 32, 16, 28, 300, tlb_entries=72,
                       half_vector=0.5, row_eviction=1.25, quarters_bandwidth=20, cached_quarters=20 << 20),
    "znver5":         Core(3.8, 2, 4,   2,   1, 8,  8,  32 * K, 1024 * K, 16384 * K, 128, 60, 20, 35, 400, spared_registers=4,
                       tlb_entries=96),
    "skylake-avx512": Core(2.6, 2, 4,   2,   1, 4, 10,  32 * K, 1024 * K, 16384 * K, 128, 40, 10, 12, 100),
    "cascadelake":    Core(2.8, 2, 4,   2,   1, 4, 10,  32 * K, 1024 * K, 16384 * K, 128, 40, 10, 12, 100),
    "cooperlake":     Core(2.8, 2, 4,   2,   1, 4, 10,  32 * K, 1024 * K, 16384 * K, 128, 40, 10, 12, 100),
    "x86-64-v4":      Core(  3, 2, 4,   2,   1, 5, 10,  32 * K, 1024 * K, 16384 * K, 128, 40, 10, 12, 200),
    "icelake-client": Core(3.2, 1, 4,   2,   1, 5, 10,  48 * K,  512 * K,  8192 * K, 128, 40, 10, 20,  45),
    "rocketlake":     Core(4.2, 1, 4,   2,   1, 5, 10,  48 * K,  512 * K, 16384 * K, 128, 40, 10, 22,  40),
    "tigerlake":      Core(3.5, 1, 4,   2,   1, 5, 10,  48 * K, 1280 * K, 12288 * K, 128, 40, 10, 22,  50),
    "icelake-server": Core(2.8, 2, 4,   2,   1, 5, 10,  32 * K, 1024 * K, 16384 * K, 128, 40, 10, 12, 150),
    "sapphirerapids": Core(  3, 2, 4,   2,   1, 6, 10,  32 * K, 1024 * K, 16384 * K, 128, 40, 10, 14, 220, tlb_entries=96),
    "emeraldrapids":  Core(  3, 2, 4,   2,   1, 6, 10,  32 * K, 1024 * K, 16384 * K, 128, 40, 10, 14, 260, tlb_entries=96),
    "graniterapids":  Core(  3, 2, 4,   2,   1, 6, 10,  32 * K, 1024 * K, 16384 * K, 128, 40, 10, 16, 450, tlb_entries=96),
    "generic":        Core(2.5, 2, 4,   2,   1, 3,  7,  32 * K, 1024 * K, 16384 * K,  32, 16, 10, 12,  50),
    "cortex-a53":     Core(1.4, 1, 8, 0.5, 0.5, 2, 20,  32 * K,  128 * K,   512 * K,   8,  6,  4,  3,   6, l1_span=8192, tlb_entries=10),
    "cortex-a72":     Core(1.8, 1, 7,   1,   1, 3, 14,  32 * K,  256 * K,  1024 * K,  16, 10, 10,  5,   8, l1_span=16384, tlb_entries=32),
    "cortex-a76":     Core(2.4, 2, 4,   2,   1, 4,  7,  64 * K,  512 * K,  4096 * K,  32, 20, 10, 12,  20, l1_span=16384, tlb_entries=44),
    "neoverse-n1":    Core(2.6, 2, 4,   2,   1, 4,  7,  64 * K, 1024 * K, 32768 * K,  32, 20, 10, 16, 160, l1_span=16384, tlb_entries=40),
    "neoverse-n2":    Core(  3, 2, 4,   2,   1, 5,  7,  64 * K, 1024 * K, 32768 * K,  32, 24, 10, 20, 200, l1_span=16384, tlb_entries=48),
    "neoverse-v1":    Core(2.6, 4, 4,   3,   2, 8,  5,  64 * K, 1024 * K, 32768 * K,  48, 32, 10, 22, 250, l1_span=16384, tlb_entries=48),
    "neoverse-v2":    Core(3.2, 4, 4,   3,   2, 8,  5,  64 * K, 2048 * K, 65536 * K,  48, 32, 10, 30, 400, l1_span=16384, tlb_entries=48),
    "apple-m1":       Core(3.1, 4, 4,   3,   2, 8,  4, 128 * K, 3072 * K,  8192 * K,  48, 32, 10, 55,  60, line=128, l1_span=16384,
                       page=16384, tlb_entries=160),
    "generic-rv64":   Core(1.8, 1, 5,   1,   1, 3, 16,  32 * K,  512 * K,  4096 * K,  16, 16, 10,  8,  20),
    "sifive-p670":    Core(2.8, 2, 5,   2,   1, 6, 12,  32 * K, 1024 * K,  8192 * K,  32, 24, 10, 12,  40),
    "spacemit-x60":   Core(1.6, 1, 5,   1,   1, 2, 24,  32 * K,  512 * K,   512 * K,  16, 12, 10,  4,   8),
    "cortex-a7":      Core(1.0, .25, 8, 0.5, 0.5, 2, 80, 32 * K, 512 * K,   512 * K,   8,  4,  4,  1,   2, spared_registers=2),
    "cortex-a9":      Core(1.2, .25, 9, 0.5, 0.5, 2, 60, 32 * K, 512 * K,   512 * K,   8,  4,  4,  1,   2, spared_registers=4),
    "cortex-a15":     Core(1.8, 1, 10,  1, 0.5, 3, 40,  32 * K, 1024 * K,  1024 * K,  16,  8,  8,  3,   6, spared_registers=2),
    "lime1":          Core(  3, 2, 4,   2,   1, 5,  8,  32 * K, 1024 * K, 16384 * K,  32, 24, 10, 12,  60, spared_registers=1,
                       unrolled_steps=1, loads_first=True),
    "bleeding-edge":  Core(  3, 2, 4,   2,   1, 5,  8,  32 * K, 1024 * K, 16384 * K,  32, 24, 10, 12,  60, spared_registers=1,
                       unrolled_steps=1, loads_first=True),
}  # fmt: skip
"""Every processor of `FEATURES`, by its name. Those with SSE or AVX alone multiply and add one after the other; on Zen 4 vectors of 512
bits take two cycles on units of 256 bits. WebAssembly is what V8 makes of it on a current x86-64: registers of 128 bits, of which it keeps
one for itself, and into which it loads all operands of a step before the first is used; products and sums are two instructions. The cores
of RISC-V and ARMv7 are estimates from their makers' descriptions: nothing was measured on them."""

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
