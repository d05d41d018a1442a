"""ATen operators that draw random numbers, from a seed that each run takes from PyTorch's generator: `torch.manual_seed` repeats them. They
are not the numbers that PyTorch draws itself."""

from __future__ import annotations

from typing import Any

import torch

from tcomp.frontends.torch.context import Context, Table
from tcomp.ir.graph import Value
from tcomp.ops.random import RANDOM_NORMAL, RANDOM_UNIFORM

aten = torch.ops.aten


def _uniform(ctx: Context, like: Any, **others: Any) -> Value:
    return ctx.add(RANDOM_UNIFORM, ctx.key(), shape=ctx.shape, dtype=ctx.dtype, low=0.0, high=1.0)


def _normal(ctx: Context, like: Any, **others: Any) -> Value:
    return ctx.add(RANDOM_NORMAL, ctx.key(), shape=ctx.shape, dtype=ctx.dtype, mean=0.0, scale=1.0)


TABLE: Table = {aten.rand: _uniform, aten.rand_like: _uniform, aten.randn: _normal, aten.randn_like: _normal}
