"""Operators of PyTorch by others: its own table, and ours."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import _reduction, functional

from tcomp.frontends.torch.definitions import indexing, linalg, losses, moments, movement, optimizers, windows
from tcomp.frontends.torch.definitions.losses import multilabel_margin_loss
from tcomp.frontends.torch.importer import HANDLERS

aten = torch.ops.aten
FURTHER = (
    aten.upsample_nearest2d, aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten.upsample_trilinear3d, aten.adaptive_max_pool2d,
    aten.adaptive_max_pool3d, aten.tril_indices, aten.triu_indices, aten.as_strided_copy, aten.bucketize, aten.dist, aten.narrow_copy,
    aten.unbind_copy, aten._batch_norm_with_update_functional, aten.addmm, aten.addmv, aten.elu, aten.ldexp, aten.linalg_vector_norm,
    aten.native_dropout, aten.arange,
)  # fmt: skip
"""What PyTorch decomposes, but does not count among its core operators."""


@cache
def decompositions() -> dict[Any, Any]:
    """How operators are written by those of core ATen, and a few more, but for those that are imported as they are."""
    table = dict(torch._decomp.core_aten_decompositions()) | torch._decomp.get_decompositions(FURTHER)
    found = {op: function for op, function in table.items() if getattr(op, "overloadpacket", None) not in HANDLERS}
    for family in (indexing, linalg, losses, moments, movement, optimizers, windows):
        for op, function in family.TABLE.items():
            several = [getattr(op, name) for name in op.overloads() if "out" not in name] if hasattr(op, "overloads") else [op]
            found |= dict.fromkeys(several, function)
    return found


def _multilabel_margin_loss_of(
    x: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
) -> Tensor:
    legacy = _reduction.legacy_get_enum(size_average, reduce) if (size_average, reduce) != (None, None) else None
    return multilabel_margin_loss(x, target, _reduction.get_enum(reduction) if legacy is None else legacy)[0]


def corrected(module: GraphModule) -> GraphModule:
    """The graph of Dynamo, with functions of our own for what PyTorch decomposes wrongly before it asks."""
    for node in module.graph.nodes:
        if node.target is functional.multilabel_margin_loss:
            node.target = _multilabel_margin_loss_of
    return module
