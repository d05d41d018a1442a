"""Operators of the domain ai.onnx.preview.training: Adagrad, Adam, Momentum, for any number of tensors; and Gradient,
the derivatives of the graph before it, node by node in reverse (`te.vjp` of each operator)."""

from __future__ import annotations

from tcomp.errors import IRError
from tcomp.frontends.onnx.context import Context, Handler, Reader, Table, attribute
from tcomp.ir.dtypes import is_float
from tcomp.ir.graph import STRUCTURAL, Operator, Value
from tcomp.ops import VJP, training as ops
from tcomp.ops.elementwise import ADD, FULL


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


def _gradient(ctx: Context) -> tuple[Value, ...]:
    """The derivatives of `y`, or of the sum of its elements, for each of `xs`."""
    names, y = ctx.attrs["xs"], ctx.bodies.value(ctx.attrs["y"])
    xs = [ctx.bodies.value(name) for name in names]
    if any(ctx.input(n) is not x for n, x in enumerate(xs)):
        raise ctx.unsupported("its inputs are others than the tensors that `xs` names", "pass these tensors")
    if other := next((v for v in (y, *xs) if not is_float(v.dtype)), None):
        raise ctx.invalid(f"{other} has no derivative: it is of integers")
    nodes = list(ctx.scope.builder.nodes)
    depend = set(xs)
    for node in nodes:
        if not depend.isdisjoint(v for v in node.inputs if v is not None):
            depend.update(node.outputs)
    adjoints = {y: ctx.add(FULL, [], shape=y.shape, value=1.0, dtype=y.dtype)}
    for node in reversed(nodes):
        given = [adjoints.get(v) for v in node.outputs]
        wrt = [n for n, v in enumerate(node.inputs) if v is not None and v in depend and is_float(v.dtype)]
        if not any(given) or not wrt or depend.isdisjoint(node.outputs):
            continue
        if node.op in STRUCTURAL or not all(is_float(v.dtype) for v in node.outputs):
            raise ctx.unsupported(f"`y` depends on {node.outputs[0]}, which is computed by `{node.op.name}`: its derivative is not known")
        full = [g or ctx.add(FULL, [], shape=v.shape, value=0.0, dtype=v.dtype) for g, v in zip(given, node.outputs, strict=True)]
        attrs = {"op": node.op.name, "attrs": tuple(node.attrs.items()), "outputs": len(full)}
        for n in wrt:
            try:
                (part,) = ctx.scope.add(VJP, [*node.inputs, *full], {**attrs, "wrt": n}, ctx.name)
            except IRError as error:
                raise ctx.unsupported(f"the derivative of `{node.op.name}` is not known: {error.reason}") from error
            v = node.inputs[n]
            assert v is not None
            adjoints[v] = ctx.add(ADD, [adjoints[v], part]) if v in adjoints else part
    return tuple(adjoints[x] if x in adjoints else ctx.add(FULL, [], shape=x.shape, value=0.0, dtype=x.dtype) for x in xs)


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
