"""ONNX operators that draw random numbers: RandomNormal, RandomUniform, Bernoulli, Multinomial, Dropout.

Numbers depend on the attribute `seed` (0 where it is left out) and on which of the model's random nodes it is: no two nodes draw the same,
and every run draws the same again.
"""

from __future__ import annotations

import numpy as np

from tcomp.frontends.onnx.context import Context, Handler, Table
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise as ew, random as rnd
from tcomp.ops.reduction import CUM_SUM, REDUCE_MAX


def _key(ctx: Context) -> Value:
    """The key of the numbers of this node: the attribute `seed`, by its bits, and the number of the node."""
    return ctx.constant(np.array([np.float32(ctx.attrs.get("seed") or 0.0).view(np.uint32), ctx.bodies.stream()], np.uint32))


def _numbers(op: Operator, *names: str) -> Handler:
    """A tensor of the shape given by an attribute, or of that of the input; `names` are the parameters of the distribution."""

    def handler(ctx: Context) -> Value:
        like = ctx.input(0)
        shape, default = (tuple(ctx.attrs["shape"]), None) if like is None else (like.shape, like.dtype)
        return ctx.add(op, [_key(ctx)], shape=shape, dtype=ctx.dtype("dtype", default), **{name: ctx.attrs[name] for name in names})

    return handler


def _bernoulli(ctx: Context) -> Value:
    x = ctx.value(0)
    return ctx.add(rnd.BERNOULLI, [_key(ctx), x], dtype=ctx.dtype("dtype", x.dtype))


def _multinomial(ctx: Context) -> Value:
    """Classes drawn by unnormalised log-probabilities [batch, classes]; sums are float64, so that many classes keep their weight."""
    x = ctx.add(ew.CAST, [ctx.value(0)], dtype="float64")
    if len(x.shape) != 2 or x.shape[1] == 0 or ctx.attrs["sample_size"] < 1:
        raise ctx.invalid(f"it draws {ctx.attrs['sample_size']} of {ctx.value(0)}; it takes [batch, classes], and draws one or more")
    weights = ctx.add(ew.EXP, [ctx.add(ew.SUB, [x, ctx.add(REDUCE_MAX, [x], axes=(1,), keepdims=True)])])
    cumulative = ctx.add(CUM_SUM, [weights], axis=1, exclusive=False, reverse=False)
    return ctx.add(rnd.MULTINOMIAL, [_key(ctx), cumulative], count=ctx.attrs["sample_size"], dtype=ctx.dtype("dtype"))


def _dropout(ctx: Context) -> Value | tuple[Value, ...]:
    """In training mode (of opset 12 and later), which may be known at run time only, elements are dropped."""
    x, ratio, training = ctx.value(0), ctx.input(1), ctx.input(2)
    known, share = ctx.known(2), ctx.known(1)
    if training is None or (known is not None and not known.item()) or (share is not None and share.item() == 0):
        return (x, ctx.add(ew.FULL, [], shape=x.shape, value=1, dtype="bool" if ctx.opset >= 10 else x.dtype)) if ctx.wants(1) else x
    return ctx.add_several(rnd.DROPOUT, [_key(ctx), x, ratio, training if known is None else None], probability=0.5)


TABLE: Table = {
    **dict.fromkeys(("RandomUniform", "RandomUniformLike"), _numbers(rnd.RANDOM_UNIFORM, "low", "high")),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike"), _numbers(rnd.RANDOM_NORMAL, "mean", "scale")),
    "Bernoulli": _bernoulli, "Multinomial": _multinomial, "Dropout": _dropout,
}  # fmt: skip
