"""The instructions that `tensorize` is given: generators of `Instruction`s, whose docstrings show their meanings as loops. Costs are of
the cores they were made for: two 512-bit FMA ports (x86 servers), two 128-bit pipes (NEON), a tensor core of sm_80.
Sources: Intel Intrinsics Guide; Arm Architecture Reference Manual, C7.2 (SDOT); PTX ISA 8.5, sections 9.7.14 (fragments of mma) and
9.7.15 (wgmma: matrix descriptors, fragments of the sum, the asynchronous proxy).
"""

from __future__ import annotations

import re
from functools import cache

from tcomp.errors import ScheduleError, TcompError
from tcomp.ir import expr as E, loops as L
from tcomp.ir.dtypes import BITS, is_float, itemsize
from tcomp.ir.expr import Expr
from tcomp.ir.instruction import (
    CORE,
    ELEMENT,
    TILE,
    WARP,
    WARPGROUP,
    Fragment,
    Instruction,
    Operand,
    TileOp,
    VectorOp,
    WarpOp,
    lane_of,
    tile_depth,
)
from tcomp.ir.reducers import standard_reducers
from tcomp.ir.text.parser import parse_instruction

# bits of a vector, the feature that multiplies and adds them
_ISAS = {"avx512": (512, "avx512f"), "avx2": (256, "fma"), "neon": (128, "neon")}


@cache
def fma_tile(rows: int, vectors: int, unroll: int = 1, isa: str = "avx512", dtype: str = "float32") -> Instruction:
    """A register tile of `rows` x `vectors` accumulators, updated `unroll` times by a column of `a` and a row of `b`:

        for k in 0..unroll { for r in 0..rows { for j in 0..vectors*lanes { acc[r, j] += a[r, k] * b[k, j] } } }

    `rows * vectors + vectors + 1` registers are used, of 32 (avx512, neon) or 16 (avx2). `dtype` is float32 or float64.
    """
    if isa not in _ISAS or dtype not in ("float32", "float64"):
        raise ScheduleError(f"fma_tile of {dtype} for `{isa}`", hint=f"float32 or float64, for one of {', '.join(_ISAS)}")
    bits, feature = _ISAS[isa]
    lanes = bits // BITS[dtype]
    suffix = {"float32": "f32", "float64": "f64"}[dtype]
    op = VectorOp(f"llvm.fma.v{lanes}{suffix}", ("a", "b", "acc"), lanes)
    return _panel(_call("fma_tile", rows, vectors, unroll, isa, dtype), (rows, vectors, unroll), (dtype, dtype, dtype), op, feature)


@cache
def vpdpbusd(rows: int, vectors: int, unroll: int = 1, bits: int = 512) -> Instruction:
    """AVX-512 VNNI (of 512 or 256 bits, there also AVX-VNNI): sums of four products of uint8 by int8, exact, in wrapping 32-bit integers.

        for k in 0..unroll { for r in 0..rows { for j in 0..vectors*lanes { for g in 0..4 {
          acc[r, j] += int32(a[r, k, g]) * int32(b[k, j, g])
        } } } }

    So `b` is packed in groups of four rows; `a` is as it is.
    """
    return _byte_tile("vpdpbusd", ("acc", "a", "b"), ("int32", "uint8", "int8"), (rows, vectors, unroll), bits)


@cache
def vpdpbusd_unsigned(rows: int, vectors: int, unroll: int = 1, bits: int = 512) -> Instruction:
    """As `vpdpbusd`, but of int8 by uint8: the packed operand is the unsigned one, as weights of few bits are."""
    return _byte_tile("vpdpbusd_unsigned", ("acc", "b", "a"), ("int32", "int8", "uint8"), (rows, vectors, unroll), bits)


def _byte_tile(name: str, arguments: tuple[str, ...], dtypes: tuple[str, str, str], sizes: tuple[int, int, int], bits: int) -> Instruction:
    if bits not in (512, 256):
        raise ScheduleError(f"{name} of {bits} bits", hint="512 or 256")
    op = VectorOp(f"llvm.x86.avx512.vpdpbusd.{bits}", arguments, bits // 32, 4)
    return _panel(_call(name, *sizes, bits), sizes, dtypes, op, *(("avx512vnni",) if bits == 512 else ("avx512vnni", "avxvnni")))


@cache
def vpmaddwd(rows: int, vectors: int, unroll: int = 1, bits: int = 512) -> Instruction:
    """AVX2 (of 512 bits, AVX-512 BW): sums of two products of int16, exact, added to wrapping 32-bit integers by another instruction.

    for k in 0..unroll { for r in 0..rows { for j in 0..vectors*lanes { for g in 0..2 {
      acc[r, j] += int32(a[r, k, g]) * int32(b[k, j, g])
    } } } }
    """
    return _pair_tile("vpmaddwd", ("int32", "int16", "int16"), (rows, vectors, unroll), bits, "avx512bw" if bits == 512 else "avx2")


@cache
def vpmaddwd_bytes(rows: int, vectors: int, unroll: int = 1, bits: int = 512) -> Instruction:
    """As `vpmaddwd`, but of int16 by int8: the packed operand is widened by an instruction of its own, once for all rows."""
    return _pair_tile("vpmaddwd_bytes", ("int32", "int16", "int8"), (rows, vectors, unroll), bits, "avx512bw" if bits == 512 else "avx2")


@cache
def vdpbf16ps(rows: int, vectors: int, unroll: int = 1, bits: int = 512) -> Instruction:
    """AVX-512 BF16: sums of two products of bfloat16 numbers, added to float32; in an order of its own, numbers below 2**-126 taken as 0.

    for k in 0..unroll { for r in 0..rows { for j in 0..vectors*lanes { for g in 0..2 {
      acc[r, j] += float32(a[r, k, g]) * float32(b[k, j, g])
    } } } }
    """
    return _pair_tile("vdpbf16ps", ("float32", "bfloat16", "bfloat16"), (rows, vectors, unroll), bits, "avx512bf16")


def _pair_tile(name: str, dtypes: tuple[str, str, str], sizes: tuple[int, int, int], bits: int, feature: str) -> Instruction:
    if bits not in (512, 256):
        raise ScheduleError(f"{name} of {bits} bits", hint="512 or 256")
    op = VectorOp(f"tcomp.{name}.{bits}", ("acc", "a", "b"), bits // 32, 2)
    return _panel(_call(name, *sizes, bits), sizes, dtypes, op, feature)


@cache
def sdot(rows: int, vectors: int, unroll: int = 1) -> Instruction:
    """NEON: as `vpdpbusd` with four lanes, of int8 by int8."""
    op = VectorOp("llvm.aarch64.neon.sdot.v4i32.v16i8", ("acc", "a", "b"), 4, 4)
    return _panel(_call("sdot", rows, vectors, unroll), (rows, vectors, unroll), ("int32", "int8", "int8"), op, "dotprod")


@cache
def tdpbusd(rows: int, columns: int, steps: int, height: int = 1, width: int = 1) -> Instruction:
    """AMX on bytes: a block of sums in up to four tile registers of 16 rows and 16 columns, over a whole reduction: of one loop, or of a
    window. Exact, in wrapping 32-bit integers.

        for h in 0..height { for w in 0..width { for k in 0..steps { for r in 0..rows { for j in 0..columns { for g in 0..4 {
          acc[r, j] += int32(a[r, h, w, k, g]) * int32(b[h, w, k, j, g])
        } } } } } }

    A tile holds as many steps as divide all of them, up to 16.
    """
    sizes = (rows, columns, steps, height, width)
    return _tile_product("tdpbusd", sizes, ("int32", "uint8", "int8"), "amx-int8")


@cache
def tdpbsud(rows: int, columns: int, steps: int, height: int = 1, width: int = 1) -> Instruction:
    """As `tdpbusd`, of int8 by uint8: the packed operand is the unsigned one, as weights of few bits are."""
    return _tile_product("tdpbsud", (rows, columns, steps, height, width), ("int32", "int8", "uint8"), "amx-int8")


@cache
def tdpbf16ps(rows: int, columns: int, steps: int, height: int = 1, width: int = 1) -> Instruction:
    """AMX on bfloat16 numbers: as `tdpbusd` with groups of two, added to float32; in an order of its own, numbers below 2**-126 taken
    as 0."""
    return _tile_product("tdpbf16ps", (rows, columns, steps, height, width), ("float32", "bfloat16", "bfloat16"), "amx-bf16")


def _tile_product(name: str, sizes: tuple[int, ...], dtypes: tuple[str, str, str], feature: str) -> Instruction:
    if min(sizes) < 1:
        raise ScheduleError(f"`{_call(name, *sizes)}` is not a block of tiles", hint="all sizes are positive")
    rows, columns, steps, height, width = sizes
    group = 4 // itemsize(dtypes[1])
    extents = {"h": height, "w": width, "k": steps, "r": rows, "j": columns, "g": group}
    meaning = _product(extents, ("rj", "rhwkg", "hwkjg"), dtypes)
    operands = (Operand((None, 1)), Operand((None, None, None, group, 1)), Operand((None, None, None, group, 1)))
    op = TileOp(f"llvm.x86.{name}", ("acc", "a", "b"), group)
    products = height * width * steps // tile_depth(steps) * -(-rows // TILE[0]) * -(-columns // TILE[1])
    return Instruction(_call(name, *sizes), meaning, operands, op, (feature,), 16.0 * products, 2 * products, is_float(dtypes[0]))


def _panel(name: str, sizes: tuple[int, int, int], dtypes: tuple[str, str, str], op: VectorOp, *features: str) -> Instruction:
    """acc[r, j] += a[r, k, g] * b[k, j, g], the last dimension only where more than one element goes into a lane."""
    rows, vectors, unroll = sizes
    if min(sizes) < 1:
        raise ScheduleError(f"`{name}` is not a tile", hint="rows, vectors and unroll are positive")
    g = "g" if op.group > 1 else ""
    extents = {"k": unroll, "r": rows, "j": vectors * op.lanes, **dict.fromkeys(g, op.group)}
    meaning = _product(extents, ("rj", f"rk{g}", f"kj{g}"), dtypes)
    inner = (1,) * len(g)
    operands = (Operand((None, 1)), Operand((None, None, *inner)), Operand((None, op.group, *inner)))
    multiplies, loads = unroll * rows * vectors, unroll * (rows + vectors)
    reorders = op.group > 1 and is_float(dtypes[0])
    return Instruction(name, meaning, operands, op, features, max(multiplies, loads) / 2, multiplies + loads, reorders)


def _product(extents: dict[str, int], indices: tuple[str, str, str], dtypes: tuple[str, str, str], cut: bool = False) -> L.Kernel:
    """acc[..] += a[..] * b[..] in loops of the given extents, outermost first, each array indexed by some of them: a letter is a loop. The
    factors are converted to the type of the sum; or, with `cut`, cut to tf32."""
    arrays = zip(("acc", "a", "b"), dtypes, indices, strict=True)
    acc, a, b = (L.Buffer(name, dtype, [extents[x] for x in letters]) for name, dtype, letters in arrays)

    def body(variables: tuple[Expr, ...]) -> L.Stmt:
        at = dict(zip(extents, variables, strict=True))
        to, *factors = (E.read(array, [at[x] for x in letters]) for array, letters in zip((acc, a, b), indices, strict=True))
        left, right = (tf32(x) if cut else E.cast(x, acc.dtype) for x in factors)
        return L.Accumulate(acc, to.args, left * right, standard_reducers(acc.dtype)["sum"])

    return L.Kernel("meaning", (acc, a, b), (acc,), (), L.over([*extents.values()], body, "".join(extents).__getitem__))


def _assignment(to: L.Buffer, source: L.Buffer | None = None) -> L.Kernel:
    """to[..] = source[..] for all elements; or 0."""
    nest = L.over(to.shape, lambda at: L.Store(to, at, E.read(source, at) if source else E.const(0, to.dtype)), "ij".__getitem__)
    return L.Kernel("meaning", (to, source) if source else (to,), (to,), (), nest)


_LANE = lane_of(WARP)
_ACC = Fragment((_LANE // 4 + ELEMENT // 2 * 8, _LANE % 4 * 2 + ELEMENT % 2), 4)  # of 16 x 8 results
_MMA = {  # dtype of `a`: (dtype of `b`, dtype of the sum, that in PTX, the factors in PTX, depth, elements of one register)
    "float16": ("float16", "float32", "f32", "f16.f16", 16, 2),
    "bfloat16": ("bfloat16", "float32", "f32", "bf16.bf16", 16, 2),
    "float32": ("float32", "float32", "f32", "tf32.tf32", 8, 1),
    "int8": ("int8", "int32", "s32", "s8.s8", 32, 4),
    "uint8": ("int8", "int32", "s32", "u8.s8", 32, 4),
}
_REGISTER = ("register",)


@cache
def mma(dtype: str) -> Instruction:
    """`mma.sync` on a tile of 16 x 8 results: depth 16 for float16 and bfloat16, 8 for float32 as tf32, 32 for bytes.

        for i in 0..16 { for j in 0..8 { for k in 0..depth { acc[i, j] += float32(a[i, k]) * float32(b[k, j]) } } }

    Of float32 the product is `tf32(a) * tf32(b)`, of int8 and uint8 the sum is int32, and `b` is int8. A sum in `register` scope is
    divided among the threads, cleared by `mma_fill` and written by `mma_store`. Float sums are in an order of their own.
    """
    if dtype not in _MMA:
        raise ScheduleError(f"mma of {dtype}", hint=f"one of {', '.join(_MMA)}")
    second, total, sums, factors, depth, per = _MMA[dtype]
    meaning = _product({"i": 16, "j": 8, "k": depth}, ("ij", "ik", "kj"), (total, dtype, second), dtype == "float32")
    # Registers hold `per` elements side by side along k; those of `a` go down the rows first, then along k.
    along = _LANE % 4 * per + ELEMENT % per
    of_a = Fragment((_LANE // 4 + ELEMENT // per % 2 * 8, along + ELEMENT // (2 * per) * (depth // 2)), depth // 2)
    of_b = Fragment((along + ELEMENT // per * (depth // 2), _LANE // 4), depth // 4)
    memory = ("global", "shared")
    operands = (Operand((None, None), fragment=_ACC), Operand((None, None), memory, of_a), Operand((None, None), memory, of_b))
    op = WarpOp(f"mma.sync.aligned.m16n8k{depth}.row.col.{sums}.{factors}.{sums}", ("acc", "a", "b", "acc"))
    return Instruction(_call("mma", dtype), meaning, operands, op, ("sm_80",), 8.0, 1, reassociates=total == "float32")


@cache
def mma_fill(dtype: str = "float32") -> Instruction:
    """Clears the sums of an `mma`: for i in 0..16 { for j in 0..8 { acc[i, j] = 0 } }."""
    meaning, operands = _assignment(_sums_of_mma("acc", dtype)), (Operand((None, None), _REGISTER, _ACC),)
    return Instruction(_call("mma_fill", dtype), meaning, operands, WarpOp("", ("acc",)), ("sm_80",), 1.0, 4)


@cache
def mma_store(dtype: str = "float32") -> Instruction:
    """Writes the sums of an `mma`: for i in 0..16 { for j in 0..8 { out[i, j] = acc[i, j] } }."""
    meaning = _assignment(_sums_of_mma("out", dtype), _sums_of_mma("acc", dtype))
    operands = (Operand((None, None), ("global", "shared"), _ACC), Operand((None, None), _REGISTER, _ACC))
    return Instruction(_call("mma_store", dtype), meaning, operands, WarpOp("", ("out", "acc")), ("sm_80",), 4.0, 4)


@cache
def wgmma(dtype: str, n: int) -> Instruction:
    """`wgmma.mma_async` of a warpgroup (128 threads, sm_90a) on a tile of 64 x `n` results: depth 16 for float16 and bfloat16, 8 for
    float32 as tf32, 32 for bytes. `n` is a multiple of 8 up to 256, of bytes one of 16 (or 8, or 24).

    Both factors lie in shared memory along the reduction, in rows of 32, 64, or 128 bytes, as one or more of these instructions read
    them; the code generator swizzles the rows, so that 8 of them lie in different banks. They are indexed by core matrix (8 rows of 16
    bytes) and place in it.

        for i in 0..8 { for r in 0..8 { for j in 0..n/8 { for s in 0..8 { for k in 0..2 { for c in 0..row {
          acc[i, r, j, s] += float32(a[i, k, r, c]) * float32(b[j, k, s, c])
        } } } } } }

    Conversions, sums and dtypes are those of `mma`; of float32 the tensor cores read words as they are, and ignore the lowest 13 bits,
    which is the cut to tf32. The sum is in registers, divided among the threads of the warpgroup; each clears and uses the elements that
    it holds (as those of four `mma`s below each other). That columns lie side by side in it says which factor is `a`.
    """
    if dtype not in _MMA:
        raise ScheduleError(f"wgmma of {dtype}", hint=f"one of {', '.join(_MMA)}")
    second, total, sums, factors, *_ = _MMA[dtype]
    if not isinstance(n, int) or n % 8 or not 8 <= n <= 256 or (total == "int32" and n % 16 and n not in (8, 24)):
        raise ScheduleError(f"wgmma of {dtype} with {n} columns", hint="a multiple of 8 up to 256; of bytes, one of 16, or 8, or 24")
    rows, row = CORE[0], CORE[1] // itemsize(dtype)
    extents = {"i": 64 // rows, "r": rows, "j": n // rows, "s": rows, "k": 2, "c": row}
    meaning = _product(extents, ("irjs", "ikrc", "jksc"), (total, dtype, second), dtype == "float32")
    lane = lane_of(WARPGROUP)
    held = (lane // 32 * 2 + ELEMENT // 2 % 2, lane // 4 % 8, ELEMENT // 4, lane % 4 * 2 + ELEMENT % 2)
    cores = Operand((None, row, None, 1), ("shared",))
    operands = (Operand((None, None, None, 1), _REGISTER, Fragment(held, n // 2, WARPGROUP)), cores, cores)
    op = WarpOp(f"wgmma.mma_async.sync.aligned.m64n{n}k{2 * row}.{sums}.{factors}", ("acc", "a", "b"))
    return Instruction(_call("wgmma", dtype, n), meaning, operands, op, ("sm_90a",), n / 2, 1, reassociates=total == "float32")


def _sums_of_mma(name: str, dtype: str) -> L.Buffer:
    if dtype not in ("float32", "int32"):
        raise ScheduleError(f"an mma does not sum {dtype}", hint="float32 or int32")
    return L.Buffer(name, dtype, (16, 8))


def tf32(x: Expr) -> Expr:
    """A float32 with the 10 bits of fraction that tensor cores multiply, the others cut off."""
    return E.bitcast(E.bitcast(x, "uint32") & 0xFFFFE000, "float32")


_GENERATORS = {
    f.__name__: f
    for f in (fma_tile, vpdpbusd, vpdpbusd_unsigned, vpmaddwd, vpmaddwd_bytes, vdpbf16ps, sdot)
    + (tdpbusd, tdpbsud, tdpbf16ps)
    + (mma, mma_fill, mma_store, wgmma)
}


def _call(name: str, *arguments: int | str) -> str:
    return f"{name}({', '.join(map(str, arguments))})"


def text_of(instruction: Instruction) -> str:
    """An instruction as a trace stores it: the call of its generator (its name), if it has one, else its printed form."""
    try:
        known = str(named(instruction.name)) == str(instruction)
    except TcompError:
        known = False
    return instruction.name if known else str(instruction)


def named(text: str) -> Instruction:
    """The instruction that `text_of` wrote. Raises `ScheduleError` where there is none."""
    call = re.fullmatch(r"(\w+)\(([\w, ]*)\)", text, re.ASCII)
    if call is None:
        return parse_instruction(text)
    hint = "one of " + ", ".join(f"{n}(...)" for n in _GENERATORS)
    if call[1] not in _GENERATORS:
        raise ScheduleError(f"there is no instruction `{text}`", hint=hint)
    arguments = [int(a) if a.isdigit() and len(a) < 6 else a for a in call[2].split(", ") if a]
    try:
        return _GENERATORS[call[1]](*arguments)
    except TypeError as error:
        raise ScheduleError(f"there is no instruction `{text}`", why=str(error), hint=hint) from None
