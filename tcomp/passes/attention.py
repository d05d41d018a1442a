"""Attention: products with a softmax go through each row of scores once, where the scores of one matrix would not stay in near memory.

matmul(softmax(x), v) becomes one operator, `softmax_product`, in which x is read by folds alone. `partition` then computes x in the same
kernel, and the schedule (`flash_attention`, on CPUs and GPUs) block by block: no array of queries x keys is stored. Short rows stay
as they are: all of them are near, and one operator after the other has nothing to rescale. So do few rows of a GPU, whose tiles would leave
it idle: operators of their own divide rows as well.

Source: T. Dao et al., "FlashAttention: fast and memory-efficient exact attention with IO-awareness" (2022).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import prod

from tcomp.ir.dtypes import FLOATS, itemsize
from tcomp.ir.expr import Dim, bounds
from tcomp.ir.graph import Graph, Node, Value
from tcomp.ops.attention import SOFTMAX_PRODUCT
from tcomp.passes import contractions
from tcomp.passes.rewrite import Notes, Rewriter, rewrite_graph

LONG = 256  # elements of a row: several blocks
UNBOUNDED = 1 << 20  # a size that may be larger is one of which nothing is known


@dataclass(frozen=True)
class AttentionTiles:
    """What the blocks of a GPU compute in one pass: matrices with `least` rows together, and one of some `widths`; 16-bit floats, too."""

    min_rows: int
    widths: Container[int]


def join_attention(graph: Graph, near: int, notes: Notes | None = None, blocks: AttentionTiles | None = None) -> Graph:
    """The graph with products of float32 or float64 with a softmax as one operator each, where a matrix of scores may take more than
    `near` bytes (those of a core's own cache, or of the shared memory of a GPU's `blocks`). Symbolic sizes count with their upper bounds;
    without one they stay apart, and a number of matrices counts as 1."""

    def one_pass(node: Node, rewriter: Rewriter) -> Sequence[Value] | str | None:
        """matmul(softmax(x), v) = softmax_product(x, v)"""
        found = contractions.matrix_product(node)
        softmax = rewriter.producer(node.inputs[0]) if found is not None else None
        axis = contractions.softmax_axis(softmax)
        if found is None or softmax is None or axis is None:
            return None
        weights, (x, *_) = softmax.outputs[0], softmax.inputs
        assert x is not None
        transposed = found.transpose_left or found.transpose_right
        if axis != len(x.shape) - 1 or transposed or min(len(v.shape) for v in node.inputs if v) < 2:
            return "the sums are not along the rows of the softmax"
        if x.dtype not in (("float32", "float64") if blocks is None else FLOATS):
            return f"not for {x.dtype}"
        if not rewriter.used_once(weights):
            return "the softmax is used elsewhere"
        (rows, keys), columns = map(_most, x.shape[-2:]), node.outputs[0].shape[-1]
        if rows is None or keys is None:
            return "the number of scores is not bounded"
        if keys < LONG or rows * keys * itemsize(x.dtype) <= near:
            return "the scores stay near"
        if blocks is not None and prod(_most(n) or 1 for n in x.shape[:-1]) < blocks.min_rows:
            return "there are too few rows to keep all processors busy"
        if blocks is not None and (not isinstance(columns, int) or columns not in blocks.widths):
            return f"a block does not compute {columns} columns at a time"
        return rewriter.add(SOFTMAX_PRODUCT, [x, node.inputs[1]], {}, node.name)

    return rewrite_graph(graph, (one_pass,), notes)


def _most(extent: Dim) -> int | None:
    """The largest that an extent may be, where there is a bound."""
    most = extent if isinstance(extent, int) else bounds(extent)[1]
    return most if most is not None and (most < UNBOUNDED or isinstance(extent, int)) else None
