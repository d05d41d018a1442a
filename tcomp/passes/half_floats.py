"""16-bit floats on processors that cannot compute with them: operators are applied to float32 numbers, and results are rounded.

    op(x) as float16  =  cast(op(cast(x, float32)), float16)

Between two operators the conversions are one rounding, which fuses with the first: values stay in memory as float32 numbers that float16
holds, and constants are widened once. Inside an operator nothing is rounded any more, so that results are at least as exact. Weights that
are used too rarely for arithmetic to matter stay as they are: half as many bytes have to be read.

Rounding to bfloat16, which has the range of float32, takes seven instructions. It is left out where what follows is computed without steps,
so that results are nearer to those in float32 (as XLA does, which calls it excess precision, and PyTorch's Inductor). What is compared,
counted, rounded down, cast by the model, or put out, has been rounded.

Products of bfloat16 numbers with constant weights stay as they are, where the processor has an instruction for them, unless another
algorithm is faster in float32 (see `algorithms`): what they read is stored in 16 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from tcomp.errors import TcompError
from tcomp.ir import expr as E
from tcomp.ir.dtypes import is_float, itemsize, to_numpy
from tcomp.ir.expr import as_expr, bounds
from tcomp.ir.graph import Graph, Node, Value, application
from tcomp.ir.instruction import TILE
from tcomp.ops.elementwise import CAST, ROUND_TO
from tcomp.ops.movement import PAD
from tcomp.passes import algorithm_costs, structure
from tcomp.passes.rewrite import Notes, Replacement, Rewriter, rewrite_graph, rule_for
from tcomp.passes.structure import Body, body_of, structural
from tcomp.target import CpuTarget

WIDE = "float32"
PAIR = 2  # products of bfloat16 that an instruction adds up in a lane
_MOVING = frozenset(["read", "select"])  # operators whose results are operands
_STEPS = frozenset(["floor", "ceil", "round", "trunc", "floordiv", "mod", "truncdiv", "truncmod", "bitcast"])
_SELECTING = _MOVING | {"max", "min", "neg", "abs"}  # or their negatives: they need no rounding


def widen_half_floats(graph: Graph, target: CpuTarget, notes: Notes | None = None, direct: bool = False) -> Graph:
    """The graph with float32 arithmetic in the place of that on 16-bit floats that the processor cannot compute with. `direct`: no other
    algorithms compute products."""
    dtypes = ("bfloat16",) if target.half_arithmetic else ("float16", "bfloat16")
    exact = set[Value]()  # float32 values that need no rounding
    unrounded = dict[Value, Value]()  # bfloat16 values, and the float32 ones that they are rounded from
    products, operands = set[Value](), set[Value]()  # of the graph as it is
    multiplied, stored = set[Value](), set[Value]()  # the same in the new one
    for g in _with_bodies(graph) if target.bfloat16_products else ():
        products |= _products(g, target, direct)
        operands |= _operands(g, products)

    def widened(node: Node, rewriter: Rewriter) -> Replacement:
        """op(x) = cast(op(cast(x, float32)), dtype)"""
        halves = [v for v in node.inputs if v is not None and v.dtype in dtypes]
        if not halves or structural(node) or len({v.dtype for v in halves}) > 1 or _cast_dtype(node) in (WIDE, *dtypes):
            return None
        if not multiplied.isdisjoint(node.outputs):
            return None
        body, kind = body_of(node), halves[0].dtype
        if not products.isdisjoint(node.outputs):
            values = rewriter.add(node.op, _in_pairs(node, rewriter), {**node.attrs, "dtype": WIDE}, node.name)
            multiplied.update(values)
            return narrowed(values, node, rewriter)
        if _made_of(_MOVING, body, kind) and not operands.isdisjoint(node.outputs):
            return None
        if _made_of(_MOVING, body, kind) and not all(v in rewriter.constants or rewriter.producer(v, CAST) for v in halves):
            return None  # inputs that are only moved, such as a cache to which a row is appended, keep their type
        if _made_of(_MOVING, body, kind) and body is not None and any(E.reads(*r.args) for r in E.reads(body.expr)):
            return None  # as do tables, of which a run reads few rows
        if any(v in rewriter.constants and is_streamed(v, node, target) for v in halves):
            return "its weights are read too rarely for the time of conversions to matter"
        types = {v: Value(v.name, WIDE, v.shape, v.layout) for v in halves}
        try:
            results = application(node.op, [None if v is None else types.get(v, v) for v in node.inputs], node.attrs).outputs
        except TcompError:  # an operator on floats of this type alone
            return None
        if any(t.dtype != (WIDE if v.dtype == kind else v.dtype) for t, v in zip(results, node.outputs, strict=True)):
            return None
        more = unrounded if _is_smooth(body) else {}
        wide = {v: more[v] if v in more else _as_float32(v, node, rewriter) for v in dict.fromkeys(halves)}
        values = rewriter.add(node.op, [None if v is None else wide.get(v, v) for v in node.inputs], node.attrs, node.name)
        if _made_of(_SELECTING, body, kind) and more.keys().isdisjoint(halves):
            exact.update(values)
        return narrowed(values, node, rewriter)

    def narrowed(values: Sequence[Value], node: Node, rewriter: Rewriter) -> list[Value]:
        """The results of a node as it was from those in float32."""
        found = list[Value]()
        for new, old in zip(values, node.outputs, strict=True):
            found.append(new if new.dtype == old.dtype else rewriter.add(CAST, [new], {"dtype": old.dtype}, old.name)[0])
            if old in operands:
                stored.add(found[-1])
            elif new.dtype == WIDE and old.dtype == "bfloat16":
                unrounded[found[-1]] = new
        return found

    @rule_for(CAST)
    def rounding(node: Node, rewriter: Rewriter) -> Replacement:
        """cast(cast(x, dtype), float32) = round_to(x, dtype)"""
        before = rewriter.producer(node.inputs[0], CAST)
        if before is None or node.attrs["dtype"] != WIDE or before.attrs["dtype"] not in dtypes:
            return None
        source = before.inputs[0]
        assert source is not None
        if source.dtype != WIDE or before.outputs[0] in stored:
            return None
        return [source] if source in exact else rewriter.add(ROUND_TO, [source], before.attrs, node.name)

    return rewrite_graph(graph, (rounding, widened), notes)


def _with_bodies(graph: Graph) -> Iterator[Graph]:
    yield graph
    for body in (body for node in graph.nodes for body in node.bodies):
        yield from _with_bodies(body)


def _products(graph: Graph, target: CpuTarget, direct: bool) -> set[Value]:
    """The products of bfloat16 numbers with constants that an instruction for them computes in less time than float32 arithmetic takes."""
    found, sample = set[Value](), algorithm_costs.typical_dims(graph)
    for node in graph.nodes:
        x, w = node.inputs if len(node.inputs) == 2 else (None, None)
        if x is None or w is None or w not in graph.constants or {x.dtype, w.dtype} != {"bfloat16"}:
            continue
        product, convolution = structure.matrix_product(node), structure.convolution(node)
        if product is not None and not product.transpose_left and len(w.shape) == 2:
            depth, columns = w.shape[::-1] if product.transpose_right else w.shape
            faster = int(depth) % PAIR == 0
        elif convolution is not None and convolution.group == 1:
            columns = w.shape[0]
            sizes = algorithm_costs.convolution_sizes(node, convolution, sample)
            times = algorithm_costs.algorithm_costs(sizes, target)
            paired = replace(sizes, channels=sizes.channels + sizes.channels % PAIR)
            pairs = algorithm_costs.algorithm_costs(paired, target, _products_at_once(target))
            faster = pairs[0] < (times[0] if direct else min(times.values()))
        else:
            continue
        if faster and int(columns) >= target.lanes(32):
            found.update(node.outputs)
    return found


def _products_at_once(target: CpuTarget) -> float:
    """Products of bfloat16 numbers that a core computes in the time of one of float32 numbers: in vector lanes, or in tile registers."""
    in_tiles = prod(TILE) * TILE[0] * PAIR / target.core.tile_product
    return in_tiles / (target.core.fma * target.lanes(32)) if target.has("amx-bf16") else PAIR


def _in_pairs(node: Node, rewriter: Rewriter) -> Sequence[Value | None]:
    """The operands of a product; those of a convolution of an odd number of channels with another one, of zeros."""
    (x, w), (weights,) = node.inputs, [rewriter.array(v) for v in node.inputs[1:]]
    assert x is not None and w is not None and weights is not None
    missing = weights.shape[1] % PAIR if structure.convolution(node) is not None else 0
    if not missing:
        return node.inputs
    rank = weights.ndim
    (padded,) = rewriter.add(PAD, [x, None], {"before": (0,) * rank, "after": (0, missing, *(0,) * (rank - 2))}, f"{node.name}.pairs")
    return padded, rewriter.constant(np.pad(weights, [(0, missing * (d == 1)) for d in range(rank)]), w.name, w.dtype)


def _operands(graph: Graph, products: set[Value]) -> set[Value]:
    """What the products multiply, where it is stored, and moved, as it is."""
    found = set[Value]()
    for node in reversed(graph.nodes):
        moved = not found.isdisjoint(node.outputs) and not structural(node) and _made_of(_MOVING, body_of(node), "bfloat16")
        if moved or not products.isdisjoint(node.outputs):
            found.update(v for v in node.inputs if v is not None and v.dtype == "bfloat16")
    return found


def _cast_dtype(node: Node) -> str:
    return str(node.attrs["dtype"]) if node.op is CAST else ""


def _made_of(operators: Collection[str], body: Body | None, dtype: str) -> bool:
    """Whether floats are made of those of inputs, and of constants of the type, by these operators alone."""
    number = to_numpy(dtype)
    return body is not None and all(
        float(number.type(e.attr)) == e.attr if e.op == "const" and is_float(e.dtype) else e.op in operators or not is_float(e.dtype)
        for e in E.walk(body.expr, operands=E.value_operands)
    )


def _is_smooth(body: Body | None) -> bool:
    """Whether a float is computed without steps: from slightly different operands come slightly different results."""
    return (
        body is not None
        and is_float(body.expr.dtype)
        and all(
            e.op not in _STEPS and (e.op != "cast" or is_float(e.dtype) or not is_float(e.args[0].dtype))
            for e in E.walk(body.expr, operands=E.value_operands)
        )
    )


def _as_float32(v: Value, node: Node, rewriter: Rewriter) -> Value:
    array = rewriter.array(v)
    if array is not None:
        return rewriter.constant(array.astype(np.float32), v.name, WIDE)
    return rewriter.add(CAST, [v], {"dtype": WIDE}, f"{v.name}.wide")[0]


def is_streamed(weights: Value, node: Node, target: CpuTarget) -> bool:
    """Whether a node reads weights from memory, and uses each so rarely that reading half as many bytes is faster than computing without
    conversions, which take about as long as the multiplications."""
    body = body_of(node)
    if body is None or not all(isinstance(n, int) for n in weights.shape) or not any(e.op == "reduce" for e in E.walk(body.expr)):
        return False
    count = prod(map(int, weights.shape))
    if count * itemsize(WIDE) <= target.l2:
        return False
    axes = {axis for e in E.walk(body.expr) if e.op == "reduce" for axis in e.attr[1]}
    steps = prod(max(1, bounds(as_expr(n))[0] or 1) for n in node.outputs[0].shape) * prod((axis.attr.hi or 0) + 1 for axis in axes)
    return steps / count < 2 * target.core.fma * target.lanes(32) / target.streaming_bandwidth
