"""16-bit floats on processors that cannot compute with them: operators are applied to float32 numbers, and results are rounded.

    op(x) as float16  =  cast(op(cast(x, float32)), float16)

Between two operators the conversions are one rounding, which fuses with the first: values stay in memory as float32 numbers that float16
holds, and constants are widened once. Inside an operator nothing is rounded any more, so that results are at least as exact. Weights that
are used too rarely for arithmetic to matter stay as they are: half as many bytes have to be read.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

import numpy as np

from tcomp.errors import TcompError
from tcomp.ir import expr as E
from tcomp.ir.dtypes import is_float, itemsize, to_numpy
from tcomp.ir.expr import as_expr, bounds
from tcomp.ir.graph import Graph, Node, Value, application
from tcomp.ops.elementwise import CAST, ROUND_TO
from tcomp.passes.rewrite import Notes, Replacement, Rewriter, rewrite_graph, rule_for
from tcomp.passes.structure import Body, body_of, structural
from tcomp.target import CpuTarget

WIDE = "float32"
_MOVING = frozenset(["read", "select"])  # operators whose results are operands
_SELECTING = _MOVING | {"max", "min", "neg", "abs"}  # or their negatives: they need no rounding


def widen_half_floats(graph: Graph, target: CpuTarget, notes: Notes | None = None) -> Graph:
    """The graph with float32 arithmetic in the place of that on 16-bit floats that the processor cannot compute with."""
    dtypes = ("bfloat16",) if target.half_arithmetic else ("float16", "bfloat16")
    exact = set[Value]()  # float32 values that need no rounding

    def widened(node: Node, rewriter: Rewriter) -> Replacement:
        """op(x) = cast(op(cast(x, float32)), dtype)"""
        halves = [v for v in node.inputs if v is not None and v.dtype in dtypes]
        if not halves or structural(node) or len({v.dtype for v in halves}) > 1 or _cast_dtype(node) in (WIDE, *dtypes):
            return None
        body, kind = body_of(node), halves[0].dtype
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
        wide = {v: _as_float32(v, node, rewriter) for v in dict.fromkeys(halves)}
        values = rewriter.add(node.op, [None if v is None else wide.get(v, v) for v in node.inputs], node.attrs, node.name)
        if _made_of(_SELECTING, body, kind):
            exact.update(values)
        return [
            new if new.dtype == old.dtype else rewriter.add(CAST, [new], {"dtype": old.dtype}, old.name)[0]
            for new, old in zip(values, node.outputs, strict=True)
        ]

    @rule_for(CAST)
    def rounding(node: Node, rewriter: Rewriter) -> Replacement:
        """cast(cast(x, dtype), float32) = round_to(x, dtype)"""
        before = rewriter.producer(node.inputs[0], CAST)
        if before is None or node.attrs["dtype"] != WIDE or before.attrs["dtype"] not in dtypes:
            return None
        source = before.inputs[0]
        assert source is not None
        if source.dtype != WIDE:
            return None
        return [source] if source in exact else rewriter.add(ROUND_TO, [source], before.attrs, node.name)

    return rewrite_graph(graph, (rounding, widened), notes)


def _cast_dtype(node: Node) -> str:
    return str(node.attrs["dtype"]) if node.op is CAST else ""


def _made_of(operators: Collection[str], body: Body | None, dtype: str) -> bool:
    """Whether floats are made of those of inputs, and of constants of the type, by these operators alone."""
    number = to_numpy(dtype)
    return body is not None and all(
        float(number.type(e.attr)) == e.attr if e.op == "const" and is_float(e.dtype) else e.op in operators or not is_float(e.dtype)
        for e in E.walk(body.expr, operands=E.value_operands)
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
