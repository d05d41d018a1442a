"""Operators of the domain ai.onnx.preview.training: Adagrad, Adam, Momentum, for any number of tensors. Gradient is refused."""

from __future__ import annotations

from tcomp.frontends.onnx.context import Context, Handler, Reader, Table, attribute
from tcomp.ir.graph import Operator, Value
from tcomp.ops import training as ops


def _optimiser(op: Operator, per_tensor: int, **readers: Reader) -> Handler:
    """Inputs are the rate, the number of the step, all parameters, all their gradients, and all of each further state; outputs all new
    parameters, and all of each new state: `per_tensor` inputs for each tensor."""

    def handler(ctx: Context) -> tuple[Value, ...]:
        count, rest = divmod(len(ctx.inputs) - 2, per_tensor)
        if count < 1 or rest:
            raise ctx.invalid(f"{len(ctx.inputs)} inputs; it takes two, and {per_tensor} for each tensor of parameters")
        attrs = {name: read(ctx) for name, read in readers.items()}
        rate, step, *tensors = (ctx.value(i) for i in range(len(ctx.inputs)))
        updated = [ctx.add_several(op, [rate, step, *tensors[i::count]], **attrs) for i in range(count)]
        return tuple(v for kind in zip(*updated, strict=True) for v in kind)

    return handler


def _nesterov(ctx: Context) -> bool:
    if (mode := ctx.attrs["mode"]) not in ("nesterov", "standard"):
        raise ctx.invalid(f"attribute `mode` is {mode!r}; ONNX has nesterov and standard")
    return bool(mode == "nesterov")


def _gradient(ctx: Context) -> Value:
    raise ctx.unsupported("it stands for the derivative of the graph before it", "export the nodes of the backward pass themselves")


_decay = attribute("norm_coefficient")
TABLE: Table = {
    "Adagrad": _optimiser(ops.ADAGRAD, 3, decay=_decay, rate_decay=attribute("decay_factor"), epsilon=attribute("epsilon")),
    "Adam": _optimiser(
        ops.ADAM, 4, alpha=attribute("alpha"), beta=attribute("beta"), decay=_decay,
        decay_after=attribute("norm_coefficient_post"), epsilon=attribute("epsilon"),
    ),
    "Momentum": _optimiser(ops.MOMENTUM, 3, alpha=attribute("alpha"), beta=attribute("beta"), decay=_decay, nesterov=_nesterov),
    "Gradient": _gradient,
}  # fmt: skip
