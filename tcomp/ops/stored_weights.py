"""Products with weights that are stored in few bits, of activations that are rounded to integers block by block.

    y[.., o] = sum over blocks b: sw[o, b] * (sx[.., b] * sum over k of xq[.., b, k] * wq[o, b, k]  -  z[o, b] * sums[.., b])
    sums[.., b] = sx[.., b] * sum over k of xq[.., b, k]

The inner sums are of integers, exact and in any order. Integers xq of 8 bits are a byte. Those of 16 are two, 256 * xh + xl, each of which
is multiplied by itself, or are taken as they are, where vectors multiply such. Of a byte with several numbers, those at one position are
summed after another; so activations lie in that order, and weights as they are stored.
"""

from __future__ import annotations

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.broadcasting import HALF, require_same, widened
from tcomp.ir.expr import Expr, cast, const, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor

LARGEST = {8: 127, 16: 127 << 8}  # of the integers of so many bits that stand for activations: the upper byte of 16 is at most 127, too
SMALLEST = 1e-30  # of the largest element of a block: blocks of smaller ones are zeros


def byte_blocks(x: Tensor, block: int, each: int, bits: int, whole: bool = False, zero: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Activations [..., in] as integers of 8 or 16 `bits`: (their bytes int8 [..., blocks, bits / 8, each, block / each], the upper ones
    first, or, as a `whole`, int16 [..., blocks, 1, each, block / each]; scales float32 [..., blocks]; sums float32 [..., blocks]).

    x[..., b * block + j * each + p] is about integer[..., b, p, j] * scales[..., b], the largest of a block exactly; `sums` are those of
    a block, times `zero`, the integer that stands for weights of 0. Rounding is to nearest, ties to even.
    """
    size = x.shape[-1]
    if not isinstance(size, int) or each < 1 or block % each or size % block or bits not in LARGEST:
        raise IRError(f"{x!r} does not consist of blocks of {block} elements, {each} in a byte")
    rows, count, largest = x.shape[:-1], size // block, LARGEST[bits]
    k, p, j = te.reduce_axis(block, "k"), te.reduce_axis(each, "p"), te.reduce_axis(block // each, "j")
    peak = te.compute((*rows, count), lambda *i: te.max(te.abs(widened(x[(*i[:-1], i[-1] * block + k)])), k), "peak")
    scales = te.compute(peak.shape, lambda *i: peak[i] * (1 / largest), "scales")
    inverse = te.compute(peak.shape, lambda *i: select(scales[i] > SMALLEST / largest, 1.0 / scales[i], 0.0), "inverse")

    def byte(*i: Expr) -> Expr:
        *row, b, part, p, j = i
        value = cast(te.round(widened(x[(*row, b * block + j * each + p)]) * inverse[(*row, b)]), "int32")
        if whole or bits == 8:
            return cast(value, "int16" if whole else "int8")
        upper = (value + 128) >> 8
        return cast(select(te.equal(part, 0), upper, value - (upper << 8)), "int8")

    bytes_ = te.compute((*rows, count, 1 if whole else bits // 8, each, block // each), byte, "bytes")

    def integer(*i: Expr) -> Expr:
        upper, lower = (cast(bytes_[(*i, part, p, j)], "int32") for part in (0, bytes_.shape[-3] - 1))
        return lower if upper is lower else (upper << 8) + lower

    total = te.compute(peak.shape, lambda *i: te.sum(integer(*i), (p, j)), "total")
    sums = te.compute(peak.shape, lambda *i: cast(total[i], "float32") * (scales[i] * float(zero)), "sums")
    return bytes_, scales, sums


def byte_block_product(
    x: Tensor, x_scales: Tensor, x_sums: Tensor, w: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, dtype: str
) -> Tensor:
    """y [..., out], of what `byte_blocks` makes of activations and weights uint8 [out, blocks, bytes of a block] of `bits` bits, the lowest
    bits first; `scales` [out, blocks] and `zeros` (likewise; None: that of `byte_blocks`) are numbers of any type. Sums over blocks are of
    float32."""
    each = 8 // bits
    if w.dtype != "uint8" or 8 % bits or w.ndim != 3 or x.ndim < 4:
        raise IRError(f"{w!r} are not blocks of weights of {bits} bits")
    out, count, own = w.shape
    *rows, blocks, parts, positions, places = x.shape
    if positions != each or (x.dtype, parts) not in (("int8", 1), ("int8", 2), ("int16", 1)):
        raise IRError(f"{x!r} are not activations for weights of {bits} bits")
    require_same(blocks, count, "blocks of activations and weights")
    require_same(places, own, "bytes of a block")
    j, p, b = te.reduce_axis(own, "j"), te.reduce_axis(each, "p"), te.reduce_axis(count, "b")

    kind = "int16" if x.dtype == "int16" else "uint8"  # widened before they are unpacked: vectors then shift and mask half as often

    def number(*i: Expr) -> Expr:
        o, block, position, place = i
        return (cast(w[o, block, place], kind) >> cast(position * bits, kind)) & const((1 << bits) - 1, kind)

    numbers = te.compute((out, count, each, own), number, "numbers") if each > 1 else None

    def weight(o: Expr, block: Expr) -> Expr:
        return cast(w[o, block, j] if numbers is None else numbers[o, block, p, j], "int32")

    def products(*i: Expr) -> Expr:
        *row, part, o, block = i
        value = cast(x[(*row, block, part, p if each > 1 else 0, j)], "int32") * weight(o, block)
        return te.sum(value, (j, p) if each > 1 else j)

    total = te.compute((*rows, parts, out, count), products, "total")

    def term(row: tuple[Expr, ...], o: Expr) -> Expr:
        upper, lower = (total[(*row, part, o, b)] for part in (0, parts - 1))
        value, moved = lower if parts == 1 else (upper << 8) + lower, x_sums[(*row, b)]
        moved = moved if zeros is None else cast(zeros[o, b], "float32") * moved
        return te.fma(cast(value, "float32"), x_scales[(*row, b)], -moved) * widened(scales[o, b])

    y = te.compute((*rows, out), lambda *i: te.sum(term(i[:-1], i[-1]), b), "sum")
    return y if dtype == "float32" else te.compute(y.shape, lambda *i: cast(y[i], dtype), "rounded")


def wide_product(x: Tensor, w: Tensor, transpose_b: bool) -> Tensor:
    """x times weights that are stored as 16-bit floats, [k, n] or, with `transpose_b`, [n, k]; products and sums are of float32."""
    if w.ndim != 2 or w.dtype not in HALF or x.dtype != "float32":
        raise IRError(f"a product of {x!r} with 16-bit weights {w!r}")
    return te.matmul(x, te.compute(w.shape, lambda *i: widened(w[i]), "weights"), transpose_b=transpose_b)


WIDE_PRODUCT = Operator("wide_product", wide_product)
BYTE_BLOCKS, BYTE_BLOCK_PRODUCT = Operator("byte_blocks", byte_blocks), Operator("byte_block_product", byte_block_product)
