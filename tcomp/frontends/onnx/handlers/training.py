"""Operators of the domain ai.onnx.preview.training: Adagrad, Adam, Momentum, for any number of tensors; and Gradient,
the derivatives of the graph before it, node by node in reverse (`te.vjp` of each operator)."""

from __future__ import annotations

from functools import partial

from tcomp.errors import IRError
from tcomp.frontends.onnx.context import Context, Handler, Table
from tcomp.ir.dtypes import is_float
from tcomp.ir.graph import STRUCTURAL, Node, Operator, Value
from tcomp.ir.te import Tensor
from tcomp.ops import training as ops
from tcomp.ops.elementwise import ADD, FULL
from tcomp.ops.expression import EXPRESSION, TensorFunction


def _optimiser(op: Operator, per_tensor: int, *names: str) -> Handler:
    """Inputs are the rate, the number of the step, all parameters, all their gradients, and all of each further state; outputs all new
    parameters, and all of each new state: `per_tensor` inputs for each tensor. `names` are attributes."""

    def handler(ctx: Context) -> tuple[Value, ...]:
        count, rest = divmod(len(ctx.inputs) - 2, per_tensor)
        if count < 1 or rest:
            raise ctx.invalid(f"{len(ctx.inputs)} inputs; it takes two, and {per_tensor} for each tensor of parameters")
        attrs = {name: ctx.attrs[name] for name in names}
        updated = [ctx.add_several(op, [*ctx.inputs[:2], *ctx.inputs[2 + i :: count]], **attrs) for i in range(count)]
        return tuple(v for kind in zip(*updated, strict=True) for v in kind)

    return handler


def _applied(node: Node, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The results of a node for its inputs, but those left out."""
    given = iter(tensors)
    return node.tensors([None if v is None else next(given) for v in node.inputs])


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
        if not depend.isdisjoint(node.inputs):
            depend.update(node.outputs)
    adjoints = {y: ctx.add(FULL, [], shape=y.shape, value=1.0, dtype=y.dtype)}
    for node in reversed(nodes):
        given, inputs = [adjoints.get(v) for v in node.outputs], [v for v in node.inputs if v is not None]
        wrt = tuple(n for n, v in enumerate(inputs) if v in depend and is_float(v.dtype))
        if not any(given) or not wrt:
            continue
        if node.op in STRUCTURAL or not all(is_float(v.dtype) for v in node.outputs):
            raise ctx.unsupported(f"`y` depends on {node.outputs[0]}, which is computed by `{node.op.name}`: its derivative is not known")
        full = [g or ctx.add(FULL, [], shape=v.shape, value=0.0, dtype=v.dtype) for g, v in zip(given, node.outputs, strict=True)]
        function, operands = TensorFunction(node.op.name, partial(_applied, node)).derivative(len(inputs), wrt), [*inputs, *full]
        try:
            parts = ctx.scope.add(EXPRESSION, operands, function.attributes([(v.dtype, v.shape) for v in operands]), ctx.name)
        except IRError as error:
            raise ctx.unsupported(f"the derivative of `{node.op.name}` is not known: {error.reason}") from error
        for n, part in zip(wrt, parts, strict=True):
            adjoints[inputs[n]] = ctx.add(ADD, [adjoints[inputs[n]], part]) if inputs[n] in adjoints else part
    return tuple(adjoints[x] if x in adjoints else ctx.add(FULL, [], shape=x.shape, value=0.0, dtype=x.dtype) for x in xs)


TABLE: Table = {
    "Adagrad": _optimiser(ops.ADAGRAD, 3, "norm_coefficient", "decay_factor", "epsilon"),
    "Adam": _optimiser(ops.ADAM, 4, "alpha", "beta", "norm_coefficient", "norm_coefficient_post", "epsilon"),
    "Momentum": _optimiser(ops.MOMENTUM, 3, "alpha", "beta", "norm_coefficient", "mode"),
    "Gradient": _gradient,
}
