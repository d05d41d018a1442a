"""Weights that models store in few bits stay so up to the kernel that multiplies with them.

    x @ dequantize(w, scales, zeros by blocks)     =  block_product(x, packed w, scales, zeros)
    block_product that may round activations       =  byte_block_product(byte_blocks(x), packed w, scales, zeros)

Dequantisation is then a prologue of the product, a step of the loop over blocks; memory is read once, in the bits that the model has. Where
a target has no instruction for products of bytes, and many rows share the weights, they are written out as floats instead.
"""

from __future__ import annotations

import numpy as np

from tcomp.ir.dtypes import NARROW_INTEGERS, integer_range, is_float
from tcomp.ir.graph import Graph, Node, Value
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import RESHAPE, SLICE, TRANSPOSE, product
from tcomp.ops.quantization import BLOCK_PRODUCT, DEQUANTIZE, MANY_ROWS, UNPACK, packed
from tcomp.ops.stored_weights import BYTE_BLOCK_PRODUCT, BYTE_BLOCKS, LARGEST
from tcomp.passes.quantized import GROUP
from tcomp.passes.rewrite import Notes, Replacement, Rewriter, rewrite_graph, rule_for
from tcomp.passes.structure import matrix_product

LARGEST_SUM = {8: 1 << 24, 16: 1 << 31}  # integers up to this are exact in float32, or fit into 32 bits
_BITS = {**NARROW_INTEGERS, "int8": 8, "uint8": 8}


def keep_blocks(graph: Graph, notes: Notes | None = None) -> Graph:
    """The graph with products of weights that were quantised by blocks in the place of products of their values."""
    return rewrite_graph(graph, (block_weights,), notes)


def block_weights(node: Node, rewriter: Rewriter) -> Replacement:
    """x @ dequantize(w by blocks) = block_product(x, w)"""
    x, value = node.inputs if len(node.inputs) == 2 else (None, None)
    moved = rewriter.producer(value, TRANSPOSE)
    swapped = moved is not None and tuple(moved.attrs["perm"]) == (1, 0)
    source = rewriter.producer(moved.inputs[0] if moved is not None and swapped else value, DEQUANTIZE)
    if x is None or source is None or (block := source.attrs["block"]) < 2:
        return None
    form = matrix_product(node)  # of the few nodes that read such weights
    if form is None or form.transpose_left:
        return None
    transposed = form.transpose_right != swapped
    data, scale, zero = source.inputs
    arrays = [None if v is None else rewriter.array(v) for v in (data, scale, zero)]
    integers, scales, zeros = arrays
    if data is None or integers is None or scales is None or (zero is not None and zeros is None):
        return None
    along = 1 if transposed else 0  # the axis that is summed
    if integers.ndim != 2 or data.dtype not in _BITS or source.attrs["axis"] != along or scales.ndim != 2 or x.dtype != "float32":
        return "weights are quantised by blocks in another way than products take"
    bits = _BITS[data.dtype]
    numbers = integers.astype(np.int32)
    points = np.zeros(scales.shape, np.float32) if zeros is None else zeros.astype(np.float32)
    lowest = integer_range(data.dtype)[0]
    numbers, points = numbers - lowest, points - lowest
    if not transposed:
        numbers, scales, points = numbers.T, scales.T, points.T
    if numbers.shape[1] % block or block % (8 // bits) or points.shape != scales.shape:
        return "the last block is not whole"
    constants = [packed(numbers.astype(np.uint8), bits), np.ascontiguousarray(scales), np.ascontiguousarray(points)]
    names = (data.name, f"{data.name}.scales", f"{data.name}.zeros")
    inputs = [x, *(rewriter.constant(a, name) for a, name in zip(constants, names, strict=True)), None]
    return rewriter.add(BLOCK_PRODUCT, inputs, {"bits": bits, "block": block, "rounded": 0}, node.name)


def multiply_blocks(graph: Graph, lanes: int, notes: Notes | None = None, words: bool = False, panel: int = 0) -> Graph:
    """The graph with products in blocks, for vectors of `lanes` 32-bit lanes that add up products of bytes; 0: the target has none. Of
    vectors that multiply bytes by integers of 16 bits (`words`), activations are such, also where bytes would be allowed. Columns that do
    not fill vectors are filled up to whole panels of `panel`."""

    @rule_for(BLOCK_PRODUCT)
    def rounded_activations(node: Node, rewriter: Rewriter) -> Replacement:
        """block_product(x, w) = byte_block_product(byte_blocks(x), w), or x @ dequantize(unpack(w)) for many rows"""
        x, w, scales, zeros, choice = node.inputs
        if x is None or w is None or scales is None or zeros is None or choice is not None:
            return None
        bits, block = node.attrs["bits"], node.attrs["block"]
        (out, stored), rows = w.shape, product(x.shape[:-1])
        assert isinstance(out, int) and isinstance(stored, int)
        each, allowed = 8 // bits, node.attrs.get("rounded", 0)
        allowed = 16 if allowed and words else allowed
        own, count = block // each, stored * each // block
        fits = lanes > 0 and own % GROUP == 0
        fits = fits and allowed in LARGEST and block * LARGEST[allowed] * ((1 << bits) - 1) < LARGEST_SUM[allowed]
        extra = -out % lanes and -out % max(panel, lanes) if lanes else 0  # columns more, so that all of them are in whole panels
        fits = fits and (not extra or all(rewriter.array(v) is not None for v in (w, scales, zeros)))
        if allowed and fits and w in rewriter.constants:
            scales = _without_loss(scales, rewriter)
            if extra:
                w, scales, zeros = (_with_rows(v, extra, rewriter) for v in (w, scales, zeros))
            attrs, zero = {"bits": bits, "dtype": x.dtype}, 1
            points, point = rewriter.array(zeros), None
            if points is not None and (points == points.flat[0]).all() and points.flat[0] == int(points.flat[0]):
                zero = int(points.flat[0])
            elif points is not None and bool((points == np.clip(points, 0, 255).astype(np.uint8)).all()):
                point = rewriter.constant(points.astype(np.uint8), zeros.name)
            else:
                point = zeros
            (weights,) = rewriter.add(RESHAPE, [w], {"shape": (out + extra, count, own)}, f"{w.name}.blocks")
            how = {"block": block, "each": each, "bits": allowed, "zero": zero, **({"whole": True} if words else {})}
            rounded = rewriter.add(BYTE_BLOCKS, [x], how, f"{node.name}.bytes")
            if not extra:
                return rewriter.add(BYTE_BLOCK_PRODUCT, [*rounded, weights, scales, point], attrs, node.name)
            (whole,) = rewriter.add(BYTE_BLOCK_PRODUCT, [*rounded, weights, scales, point], attrs, f"{node.name}.panels")
            axes = len(whole.shape)
            return rewriter.add(SLICE, [whole], {"starts": (0,) * axes, "steps": (1,) * axes, "shape": (*whole.shape[:-1], out)}, node.name)
        if isinstance(rows, int) and rows > MANY_ROWS and is_float(x.dtype):
            numbers = w if bits == 8 else rewriter.add(UNPACK, [w], {"bits": bits, "count": stored * each})[0]
            attrs = {"axis": 1, "block": block, "dtype": x.dtype}
            (weights,) = rewriter.add(DEQUANTIZE, [numbers, scales, zeros], attrs, f"{w.name}.floats")
            return rewriter.add(MATMUL, [x, weights], {"transpose_a": False, "transpose_b": True}, node.name)
        return "activations may not be rounded" if not allowed else "no vectors multiply such bytes" if not fits else None

    return rewrite_graph(graph, (rounded_activations,), notes)


def _without_loss(scales: Value, rewriter: Rewriter) -> Value:
    """Scales in half as many bytes, where they are float32 numbers that float16 holds, as those of most formats are."""
    array = rewriter.array(scales)
    if array is None or array.dtype != np.float32:
        return scales
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    return rewriter.constant(half, scales.name) if (half.astype(np.float32) == array).all() else scales


def _with_rows(value: Value, extra: int, rewriter: Rewriter) -> Value:
    """A constant with so many more rows, copies of its last one."""
    array = rewriter.array(value)
    assert array is not None
    return rewriter.constant(np.pad(array, ((0, extra), (0, 0)), mode="edge"), value.name)
