"""FlexAttention of the domain ai.onnx.preview: attention whose scores and probabilities pass through sub-graphs of the node."""

from __future__ import annotations

from tcomp.errors import IRError
from tcomp.frontends.onnx.context import Context, Table
from tcomp.frontends.onnx.handlers.movement import repeated
from tcomp.ir.graph import Value
from tcomp.ir.simplify import same_shape
from tcomp.ops import elementwise as ew, movement as mv
from tcomp.ops.matmul import MATMUL
from tcomp.ops.reduction import SOFTMAX


def _modified(ctx: Context, name: str, x: Value) -> Value:
    """What the sub-graph `name` makes of `x`; without one, `x`."""
    if (body := ctx.attrs.get(name)) is None:
        return x
    results = ctx.bodies.inline(body, [x])
    if len(results) != 1 or results[0].dtype != x.dtype or not same_shape(results[0].shape, x.shape):
        raise ctx.invalid(f"attribute `{name}` makes {', '.join(map(str, results))} of {x}; it has to keep the type")
    return results[0]


def _by_head(ctx: Context, x: Value, heads: int) -> Value:
    """Keys or values, each head of theirs repeated for the heads of queries that share it."""
    own = x.shape[1]
    if not isinstance(own, int) or own == 0 or heads % own:
        raise IRError(f"{heads} heads of queries do not divide among {own} heads of keys")
    return repeated(ctx, x, 1, heads // own)


def _flex_attention(ctx: Context) -> Value:
    """Queries and keys are each multiplied by the root of the scale, as the definition says, so that 16-bit products do not overflow."""
    q, k, v = (ctx.value(i) for i in range(3))
    if any(len(x.shape) != 4 for x in (q, k, v)):
        raise ctx.invalid(f"inputs {q}, {k}, {v}; they have rank 4")
    heads, width = q.shape[1], q.shape[3]
    if not isinstance(heads, int) or not isinstance(width, int) or width == 0:
        raise ctx.unsupported("the number of heads or their size is symbolic", hint="fix it with --dim")
    k, v = _by_head(ctx, k, heads), _by_head(ctx, v, heads)
    scale = ctx.attrs.get("scale")
    root = (width**-0.5 if scale is None else scale) ** 0.5
    if isinstance(root, complex):
        raise ctx.unsupported(f"the scale {scale} is negative")
    precise = ctx.dtype("softmax_precision", "float64" if q.dtype == "float64" else "float32")
    queries, keys = ctx.add(ew.SCALE, [q], factor=root), ctx.add(ew.SCALE, [k], factor=root)
    scores = ctx.add(MATMUL, [queries, ctx.add(mv.TRANSPOSE, [keys], perm=(0, 1, 3, 2))])
    scores = _modified(ctx, "score_mod", ctx.add(ew.CAST, [scores], dtype=precise))
    probabilities = _modified(ctx, "prob_mod", ctx.add(SOFTMAX, [scores], axes=(3,)))
    return ctx.add(ew.CAST, [ctx.add(MATMUL, [probabilities, ctx.add(ew.CAST, [v], dtype=precise)])], dtype=q.dtype)


TABLE: Table = {"FlexAttention": _flex_attention}
