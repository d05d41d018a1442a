"""Algorithms: which of several ways to compute the same thing a node takes. So far: convolutions directly, or Winograd's way.

Winograd's algorithm multiplies 2.25 or 4 times less, but moves tiles to and from points, and streams more weights. `winograd_tile`
weighs both, by constants that were fitted to 34 convolutions of real networks; who has timed them may decide otherwise. Rounding errors are about ten times those of the direct sum and stay far below `ERROR` of the largest output, which tests
hold them to; F(6 x 6, 3x3) is not offered. `tcomp.compile(..., winograd=False)` and `--no-winograd` do without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tcomp.ir.expr import Dim, as_dim, as_expr
from tcomp.ir.graph import Graph, Node, Value
from tcomp.ops.movement import PAD
from tcomp.ops.nn import CONV
from tcomp.ops.winograd import TAPS, WINOGRAD_INPUT, WINOGRAD_OUTPUT, WINOGRAD_PRODUCT, transformed_weights
from tcomp.passes.canonicalize import uniform
from tcomp.passes.rewrite import Notes, Rewriter, rewrite_graph

ERROR = 1e-3  # of the largest output: no algorithm is chosen that may be less exact
STREAMED = 8  # bytes of weights a cycle, which are at home in no near cache
MOVED = 14  # bytes of tiles and points a cycle: they are transformed on the way
REACHED = 0.93  # of the peak of the multiply-adds
WORTHWHILE = 0.95  # of the time of the direct sum


@dataclass(frozen=True, slots=True)
class Convolution:
    """The sizes of a 3x3 convolution of stride 1: what tells which algorithm is faster. `height` and `width` are those of the result."""

    batch: int
    channels: int
    outputs: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"3x3 convolution {self.batch}x{self.channels} -> {self.outputs}x{self.height}x{self.width}"


Choose = Callable[[Convolution, int], int]
"""The tile edge for a convolution, told the one that the model suggests; 0 for the direct sum."""


def choose_algorithms(
    graph: Graph, lanes: int, notes: Notes | None = None, choose: Choose = lambda convolution, suggested: suggested
) -> Graph:
    """The graph with 3x3 convolutions in float32 replaced by Winograd's algorithm where that is faster, on a machine whose vectors have
    so many `lanes`."""

    def winograd(node: Node, rewriter: Rewriter) -> Sequence[Value] | str | None:
        """conv(x, w) = winograd_output(winograd_product(winograd_input(x), G w G'))"""
        return _winograd(node, rewriter, lanes, choose) if node.op is CONV else None

    return rewrite_graph(graph, (winograd,), notes)


def _winograd(node: Node, rewriter: Rewriter, lanes: int, choose: Choose) -> Sequence[Value] | str | None:
    x, w = node.inputs
    assert x is not None and w is not None
    weights, output = rewriter.array(w), node.outputs[0]
    if weights is None or weights.shape[2:] != (TAPS, TAPS) or node.attrs["group"] != 1 or output.dtype != "float32":
        return None
    if any(n != 1 for n in (*node.attrs["strides"], *node.attrs["dilations"])):
        return None
    height, width = output.shape[2:]
    if not isinstance(height, int) or not isinstance(width, int):
        return "the number of tiles is not known"
    batch = output.shape[0] if isinstance(output.shape[0], int) else 1
    sizes = Convolution(batch, weights.shape[1], weights.shape[0], height, width)
    tile = choose(sizes, winograd_tile(sizes, lanes))
    if not tile:
        return "the direct sum is faster"
    missing = [-d % tile for d in (height, width)]
    source = _padded(x, missing, rewriter, node.name)
    (points,) = rewriter.add(WINOGRAD_INPUT, [source], {"tile": tile}, f"{node.name}.tiles")
    kernels = rewriter.constant(transformed_weights(weights, tile), f"{w.name}.winograd")
    (products,) = rewriter.add(WINOGRAD_PRODUCT, [points, kernels], {}, f"{node.name}.products")
    return rewriter.add(WINOGRAD_OUTPUT, [products], {"shape": (height, width)}, node.name)


def _padded(x: Value, missing: Sequence[int], rewriter: Rewriter, name: str) -> Value:
    """x with so many more zeros behind its spatial axes, by a wider pad where there is one."""
    if not any(missing):
        return x
    before: Sequence[Dim] = (0, 0, 0, 0)
    after: Sequence[Dim] = (0, 0, *missing)
    pad = rewriter.producer(x)
    if pad is not None and _of_zeros(pad, rewriter) and (source := pad.inputs[0]) is not None:
        before, after = pad.attrs["before"], [as_dim(as_expr(a) + b) for a, b in zip(pad.attrs["after"], after, strict=True)]
        x = source
    return rewriter.add(PAD, [x, None], {"before": tuple(before), "after": tuple(after)}, f"{name}.pad")[0]


def _of_zeros(pad: Node, rewriter: Rewriter) -> bool:
    if pad.op is not PAD or pad.attrs.get("mode", "constant") != "constant":
        return False
    return pad.inputs[1] is None or uniform(rewriter.array(pad.inputs[1])) == 0


def winograd_tile(x: Convolution, lanes: int) -> int:
    """The tile edge of the fastest algorithm: 2 or 4; 0 for the direct sum."""
    costs = algorithm_costs(x, lanes)
    return min(costs, key=lambda tile: costs[tile] * (1 if tile else WORTHWHILE))


def algorithm_costs(x: Convolution, lanes: int) -> dict[int, float]:
    """Cycles by the model of all algorithms that are worth considering, by their tile edges, 0 for the direct sum."""
    costs = {0: _cycles(9 * x.batch * x.height * x.width, 9, x.channels, x.outputs, lanes)}
    for tile in (2, 4) if min(x.channels, x.outputs) >= lanes else ():
        points, tiles = (tile + TAPS - 1) ** 2, x.batch * -(-x.height // tile) * -(-x.width // tile)
        moved = (x.batch * x.height * x.width + 2 * points * tiles) * (x.channels + x.outputs)  # each is written and read once
        costs[tile] = _cycles(points * tiles, points, x.channels, x.outputs, lanes) + moved * 4 / MOVED
    return costs


def _cycles(products: int, weights: int, channels: int, outputs: int, lanes: int) -> float:
    """Of a core with two multiply-add units: `products` and `weights` are those of one pair of channels. Weights are asked for ahead: the
    more is computed with each, the more of them arrive meanwhile."""
    vectors = channels * -(-outputs // lanes)
    computing, arriving = vectors * products / 2, vectors * weights * lanes * 4 / STREAMED
    return computing / REACHED + arriving * min(1.0, arriving / computing)
