"""What no LLVM intrinsic does alone: the operations on vector registers that a `VectorOp` with a name of ours stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Emit = Callable[[str], str]  # an operation -> the register that it gives
Declare = Callable[[str, str], str]  # (name of an intrinsic, its declaration)
Emission = Callable[[Emit, Declare, Sequence[str]], str]  # ..., the registers of the arguments -> that of the result


def _word_products(bits: int) -> Emission:
    """sums int32 [lanes] + a int16 [lanes, 2] * b int16 [lanes, 2], summed over two."""
    intrinsic = {256: "llvm.x86.avx2.pmadd.wd", 512: "llvm.x86.avx512.pmaddw.d.512"}[bits]
    sums, words = f"<{bits // 32} x i32>", f"<{bits // 16} x i16>"

    def emit(op: Emit, declare: Declare, arguments: Sequence[str]) -> str:
        total, a, b = arguments
        declare(intrinsic, f"declare {sums} @{intrinsic}({words}, {words})")
        products = op(f"call {sums} @{intrinsic}({words} {a}, {words} {b})")
        return op(f"add {sums} {total}, {products}")

    return emit


def _widened_products(bits: int) -> Emission:
    """The same of b int8 [lanes, 2]."""
    products, bytes_, words = _word_products(bits), f"<{bits // 16} x i8>", f"<{bits // 16} x i16>"

    def emit(op: Emit, declare: Declare, arguments: Sequence[str]) -> str:
        total, a, b = arguments
        return products(op, declare, (total, a, op(f"sext {bytes_} {b} to {words}")))

    return emit


def _bfloat_products(bits: int) -> Emission:
    """sums float32 [lanes] + a bfloat16 [lanes, 2] * b bfloat16 [lanes, 2], summed over two."""
    intrinsic, sums, numbers = f"llvm.x86.avx512bf16.dpbf16ps.{bits}", f"<{bits // 32} x float>", f"<{bits // 16} x bfloat>"

    def emit(op: Emit, declare: Declare, arguments: Sequence[str]) -> str:
        total, *factors = arguments
        declare(intrinsic, f"declare {sums} @{intrinsic}({sums}, {numbers}, {numbers})")
        a, b = (op(f"bitcast <{bits // 16} x i16> {x} to {numbers}") for x in factors)
        return op(f"call {sums} @{intrinsic}({sums} {total}, {numbers} {a}, {numbers} {b})")

    return emit


_KINDS = {"vpmaddwd": _word_products, "vpmaddwd_bytes": _widened_products, "vdpbf16ps": _bfloat_products}
SEQUENCES: Mapping[str, Emission] = {f"tcomp.{name}.{bits}": kind(bits) for name, kind in _KINDS.items() for bits in (256, 512)}
