"""Forward mode: the tangent of a tensor expression is a tensor expression over the same axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Expr, const, select
from tcomp.ir.simplify import same_shape
from tcomp.ir.te import Extern, Tensor
from tcomp.ir.transforms import scalar
from tcomp.ir.transforms.programs import forward_program
from tcomp.ir.transforms.stages import require_float, results, share, stages, zeros

Tensors = Tensor | Sequence[Tensor]


@overload
def jvp(outputs: Tensor, wrt: Tensors, tangents: Tensors) -> Tensor: ...
@overload
def jvp(outputs: Sequence[Tensor], wrt: Tensors, tangents: Tensors) -> list[Tensor]: ...
def jvp(outputs: Tensors, wrt: Tensors, tangents: Tensors) -> Tensor | list[Tensor]:
    """Jacobian-vector products: for each output, its change when the tensors of `wrt` change by `tangents`, as a tensor of its shape and
    dtype (a list of them for a list); zeros where it does not depend on them, or has integers.

    `tangents` are like the tensors of `wrt`, which are of floats. Conventions are those of `vjp`. Raises `IRError` as `vjp` does.
    """
    alone, outputs = isinstance(outputs, Tensor), [outputs] if isinstance(outputs, Tensor) else list(outputs)
    wrt = [wrt] if isinstance(wrt, Tensor) else list(wrt)
    tangents = [tangents] if isinstance(tangents, Tensor) else list(tangents)
    if len(tangents) != len(wrt):
        raise IRError(f"{len(tangents)} tangents for {len(wrt)} variables", hint="one for each variable, in order")
    found: dict[Tensor, Tensor] = {}
    for t, tangent in zip(wrt, tangents, strict=True):
        require_float(t, "the variable")
        if tangent.dtype != t.dtype or not same_shape(tangent.shape, t.shape):
            raise IRError(f"the tangent `{tangent!r}` is not like the variable `{t!r}`", hint="same shape and dtype")
        found[t] = tangent
    programs: dict[Extern, list[Tensor | None]] = {}
    for t in te.tensors(outputs):
        if t in found or not any(u in found for u in t.inputs):
            continue
        if (program := t.extern) is not None:
            if program not in programs:
                given = {n: found[u] for n, u in enumerate(program.inputs) if u in found}
                programs[program] = forward_program(program, given)
            if (own := programs[program][t.index]) is not None:
                found[t] = own
        else:
            _through(t, found)
    changes = results([found.get(t) or zeros(t.shape, t.dtype, f"{t.name}.tangent") for t in outputs])
    return changes[0] if alone else changes


def _through(t: Tensor, found: dict[Tensor, Tensor]) -> None:
    def tangent(read: Expr) -> Expr | None:
        return found[read.attr][read.args] if read.attr in found else None

    for stage in stages(t):
        own = scalar.forward(stage.body, tangent)
        if own is None:
            continue
        if stage.reducer is not None:
            guards, factor = share(stage)
            own = own if factor is None else own * factor
            for guard in guards:
                own = select(guard, own, const(0.0, own.dtype))
            own = te.sum(own, stage.reduced)
        found[stage.tensor] = Tensor(f"{stage.tensor.name}.tangent", stage.tensor.shape, own.dtype, stage.tensor.axes, own)
