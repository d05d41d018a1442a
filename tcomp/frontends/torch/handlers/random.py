"""ATen operators that draw random numbers, from a seed that each run takes from PyTorch's generator: `torch.manual_seed` repeats them. They
are not the numbers that PyTorch draws itself."""

from __future__ import annotations

from typing import Any

import torch

from tcomp.frontends.torch.context import Context, Handler, Table, dtype_name
from tcomp.frontends.torch.handlers.movement import result_shape
from tcomp.ir.graph import Operator, Value
from tcomp.ops import random as rnd
from tcomp.ops.elementwise import FULL

aten = torch.ops.aten


def _numbers(op: Operator, *names: str) -> Handler:
    """A tensor of the result's shape; `names` are the parameters of the distribution, by default those of the standard one."""

    def handler(ctx: Context, x: Any, first: float = 0.0, second: float = 1.0, **others: Any) -> Value:
        dtype = dtype_name(ctx.node.meta["val"].dtype)
        return ctx.add(op, ctx.key(), shape=result_shape(ctx), dtype=dtype, **dict(zip(names, (float(first), float(second)), strict=True)))

    return handler


_uniform, _normal = _numbers(rnd.RANDOM_UNIFORM, "low", "high"), _numbers(rnd.RANDOM_NORMAL, "mean", "scale")


def _bernoulli(ctx: Context, x: Value, p: float | None = None, **others: Any) -> Value:
    probability = x if p is None else ctx.add(FULL, shape=x.shape, value=float(p), dtype="float32")
    return ctx.add(rnd.BERNOULLI, ctx.key(), probability, dtype=dtype_name(ctx.node.meta["val"].dtype))


def _dropout(ctx: Context, x: Value, p: float, train: bool | None = True) -> tuple[Value, ...]:
    if train is False or p == 0:
        return x, ctx.add(FULL, shape=x.shape, value=1, dtype="bool")
    return ctx.results(rnd.DROPOUT, ctx.key(), x, None, None, probability=float(p))


TABLE: Table = {
    aten.rand: lambda ctx, size, **others: _uniform(ctx, None), aten.randn: lambda ctx, size, **others: _normal(ctx, None),
    aten.rand_like: lambda ctx, x, **others: _uniform(ctx, x), aten.randn_like: lambda ctx, x, **others: _normal(ctx, x),
    aten.uniform: _uniform, aten.normal_functional: _normal, aten.bernoulli: _bernoulli, aten.native_dropout: _dropout,
}  # fmt: skip
