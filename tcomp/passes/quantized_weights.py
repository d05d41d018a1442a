"""Float models with weights in fewer bits: products with large constant matrices keep these as numbers of 8 or 4 bits in blocks of 32, or
as 16-bit floats.

Rounding is to nearest. A block has one scale, a float16 where that is in range:

    int8    integers -127 .. 127, the largest of a block is exact but for the scale's own rounding
    int4    integers -8 .. 7, of which -8 stands for the element of the largest size, as in the format Q4_0 of GGUF

Activations are rounded block by block to integers of 16 bits where the target multiplies bytes (`passes.stored_weights`), which changes
sums by less than 1e-4. As w8a8 and w4a8, the same weights, they are rounded to bytes: half as many instructions, and changes of about 1e-2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from tcomp.errors import InputError
from tcomp.ir.dtypes import to_numpy
from tcomp.ir.graph import Graph, Node
from tcomp.ops.quantization import BLOCK_PRODUCT, packed
from tcomp.ops.stored_weights import WIDE_PRODUCT
from tcomp.passes.rewrite import Notes, Replacement, Rewriter, rewrite_graph
from tcomp.passes.structure import matrix_product

BLOCK = 32  # elements along the sum that share a scale
MIN_ELEMENTS = 1 << 13  # of a matrix that is worth it: others stay in caches
_BITS = {"int8": (8, 16), "int4": (4, 16), "w8a8": (8, 8), "w4a8": (4, 8)}  # of weights, and those that activations are rounded to
_HALF = {"bf16": "bfloat16", "fp16": "float16"}
KINDS = (*_BITS, *_HALF)
_SMALLEST_SCALE = 6.2e-5  # the smallest normal float16


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix that was given fewer bits: its name, shape [in, out], what it is now, and the root mean square of the error over that of
    its elements."""

    name: str
    shape: tuple[int, int]
    kind: str
    error: float


def quantize_weights(graph: Graph, kind: str, found: list[QuantizedWeight], notes: Notes | None = None) -> Graph:
    """The graph with the weights of products as `kind`, one of `KINDS`; what was changed is appended to `found`. Raises `InputError` for
    another kind."""
    check_kind(kind)

    def fewer_bits(node: Node, rewriter: Rewriter) -> Replacement:
        """x @ w = x @ quantized(w)"""
        form = matrix_product(node) if len(node.inputs) == 2 else None
        if form is None or form.transpose_left:
            return None
        x, w = node.inputs
        array = rewriter.array(w)
        if x is None or w is None or array is None or array.ndim != 2 or x.dtype != "float32" or array.dtype != np.float32:
            return None
        if array.size < MIN_ELEMENTS:
            return "the weights are few"
        rows = array if form.transpose_right else array.T  # [out, in]
        if kind in _HALF:
            dtype = _HALF[kind]
            half = array.astype(to_numpy(dtype))
            _note(found, w.name, rows, (half if form.transpose_right else half.T).astype(np.float32), kind)
            inputs = [x, rewriter.constant(half, f"{w.name}.{kind}", dtype)]
            return rewriter.add(WIDE_PRODUCT, inputs, {"transpose_b": form.transpose_right}, node.name)
        if rows.shape[1] % BLOCK:
            return f"{rows.shape[1]} elements are not blocks of {BLOCK}"
        if not np.isfinite(array).all():
            return "weights that are not finite have no scales"
        bits, rounded = _BITS[kind]
        numbers, scales = quantized(rows, bits)
        zero = 1 << (bits - 1)
        _note(found, w.name, rows, dequantized(numbers, scales, zero), kind)
        constants = [packed(numbers, bits), scales, np.full(scales.shape, zero, np.uint8)]
        names = (f"{w.name}.int{bits}", f"{w.name}.scales", f"{w.name}.zeros")
        stored = [rewriter.constant(a, name) for a, name in zip(constants, names, strict=True)]
        return rewriter.add(BLOCK_PRODUCT, [x, *stored, None], {"bits": bits, "block": BLOCK, "rounded": rounded}, node.name)

    return rewrite_graph(graph, (fewer_bits,), notes)


def check_kind(kind: str) -> None:
    """Raises `InputError` unless weights can be stored so."""
    if kind not in KINDS:
        raise InputError(f"weights cannot be stored as `{kind}`", hint=f"one of {', '.join(KINDS)}")


def quantized(rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(numbers uint8 [out, in], moved by half of their range; scales [out, in / 32]) of float32 [out, in], for 8 or 4 bits."""
    blocks = rows.reshape(rows.shape[0], -1, BLOCK)
    half = 1 << (bits - 1)
    if bits == 8:
        scales = np.abs(blocks).max(-1) / 127
    else:
        place = np.abs(blocks).argmax(-1)
        scales = np.take_along_axis(blocks, place[..., None], -1)[..., 0] / -half
    small = np.abs(scales)
    if small.max(initial=0) < np.finfo(np.float16).max and small[small > 0].min(initial=1) > _SMALLEST_SCALE:
        scales = scales.astype(np.float16)
    wide = scales.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(wide == 0, 0, np.float32(1) / wide)
    numbers = np.rint(blocks * inverse[..., None])
    low = 1 if bits == 8 else 0  # the range of bytes is symmetric
    return np.clip(numbers + half, low, 2 * half - 1).astype(np.uint8).reshape(rows.shape), scales


def dequantized(numbers: np.ndarray, scales: np.ndarray, zero: int) -> np.ndarray:
    """The floats [out, in] that are represented by the numbers and scales of blocks."""
    blocks = numbers.reshape(*scales.shape, -1).astype(np.float32) - zero
    return (blocks * scales.astype(np.float32)[..., None]).reshape(numbers.shape)


def _note(found: list[QuantizedWeight], name: str, rows: np.ndarray, now: np.ndarray, kind: str) -> None:
    difference = now - rows
    whole, error = (float(np.sqrt(sum(np.vdot(row, row) for row in a))) for a in (rows, difference))  # without a copy in more bits
    found.append(QuantizedWeight(name, (rows.shape[1], rows.shape[0]), kind, error / whole if whole else 0.0))


def summary(found: list[QuantizedWeight]) -> str:
    """A line for people: how many, and the errors, of all together and of the worst."""
    if not found:
        return "no weights were quantised: there are no products with large constant matrices"
    elements = [prod(w.shape) for w in found]
    mean = float(np.sqrt(np.average([w.error**2 for w in found], weights=elements)))
    worst = max(found, key=lambda w: w.error)
    errors = f"{mean:.2%} of their size (root mean square), at most {worst.error:.2%} ({worst.name})"
    return f"{len(found)} weights as {found[0].kind}: error {errors}"
