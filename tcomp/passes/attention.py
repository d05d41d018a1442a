"""Attention: products with a softmax go through each row of scores once, where the scores of one matrix would not stay in a core's cache.

matmul(softmax(x), v) becomes one operator, `softmax_product`, in which only reductions read x. `partition` then computes x in the same
kernel, and the schedule (`flash_attention`, on CPUs and GPUs) block by block: no array of queries x keys is stored. Short rows stay
as they are: all of them stay in the cache, and one operator after the other has nothing to rescale. So do few rows on a GPU, whose tiles
would leave it idle: separate operators share the elements of a row among threads as well.

Source: T. Dao et al., "FlashAttention: fast and memory-efficient exact attention with IO-awareness" (2022).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from math import prod

from tcomp.ir.dtypes import FLOATS, itemsize
from tcomp.ir.expr import Dim, bounds
from tcomp.ir.graph import Graph, Node
from tcomp.ops.matmul import SOFTMAX_PRODUCT
from tcomp.passes import structure
from tcomp.passes.rewrite import Notes, Replacement, Rewriter, rewrite_graph

MIN_KEYS = 256  # elements of a row of scores: two blocks of the schedule; a shorter row is one block, which nothing goes on from
UNBOUNDED = 1 << 20  # elements of a symbolic extent: where it may be larger, its bound says nothing about likely sizes


@dataclass(frozen=True)
class AttentionTiles:
    """What the blocks of a GPU compute in one pass: matrices with `min_rows` rows together, and one of some `widths`; 16-bit floats, too."""

    min_rows: int
    widths: Container[int]


def join_attention(graph: Graph, cache_bytes: int, notes: Notes | None = None, tiles: AttentionTiles | None = None) -> Graph:
    """The graph with products of float32 or float64 with a softmax as one operator each, where a matrix of scores may take more than
    `cache_bytes` (those of a core's own cache, or of the shared memory of a GPU with `tiles`). Symbolic sizes count with their upper bounds;
    without one they stay as they are, and a number of matrices counts as 1."""

    def one_pass(node: Node, rewriter: Rewriter) -> Replacement:
        """matmul(softmax(x), v) = softmax_product(x, v)"""
        found = structure.matrix_product(node)
        softmax = rewriter.producer(node.inputs[0]) if found is not None else None
        axis = structure.softmax_axis(softmax)
        if found is None or softmax is None or axis is None:
            return None
        weights, (x, *_) = softmax.outputs[0], softmax.inputs
        assert x is not None
        transposed = found.transpose_left or found.transpose_right
        if axis != len(x.shape) - 1 or transposed or min(len(v.shape) for v in node.inputs if v) < 2:
            return "the sums are not along the rows of the softmax"
        if x.dtype not in (("float32", "float64") if tiles is None else FLOATS):
            return f"not for {x.dtype}"
        if not rewriter.used_once(weights):
            return "the softmax is used elsewhere"
        (rows, keys), columns = map(_upper_bound, x.shape[-2:]), node.outputs[0].shape[-1]
        if rows is None or keys is None:
            return "the number of scores is not bounded"
        if keys < MIN_KEYS or rows * keys * itemsize(x.dtype) <= cache_bytes:
            return "the scores stay in the cache"
        if tiles is not None and prod(_upper_bound(n) or 1 for n in x.shape[:-1]) < tiles.min_rows:
            return "there are too few rows to keep all processors busy"
        if tiles is not None and (not isinstance(columns, int) or columns not in tiles.widths):
            return f"a block does not compute {columns} columns at a time"
        return rewriter.add(SOFTMAX_PRODUCT, [x, node.inputs[1]], {}, node.name)

    return rewrite_graph(graph, (one_pass,), notes)


def _upper_bound(extent: Dim) -> int | None:
    if isinstance(extent, int):
        return extent
    bound = bounds(extent)[1]
    return bound if bound is not None and bound < UNBOUNDED else None
