"""What a node computes, recognised by its tensor expression, whatever its operator is called: contractions and softmax.

Rewrites that replace a contraction (Winograd's and Strassen's algorithms, integer arithmetic, attention) ask here for the form they need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from tcomp.errors import TcompError
from tcomp.ir import te
from tcomp.ir.access import affine
from tcomp.ir.expr import Expr, as_dim, as_expr, bounds, reads, walk
from tcomp.ir.graph import Node, Operator, application
from tcomp.ops.matmul import MATMUL
from tcomp.ops.nn import CONV, CONV_TRANSPOSE
from tcomp.ops.reduction import SOFTMAX
from tcomp.passes.structure import structural


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """[..., m, k] x [..., k, n] -> [..., m, n] of a node's two inputs, or of transposed ones. See `ops.matmul`."""

    transpose_left: bool
    transpose_right: bool


@dataclass(frozen=True, slots=True)
class Convolution:
    """The convolution, without padding, of a node's inputs (data, weights), by its attributes. See `ops.nn.conv`; where a window has one
    element along an axis, its dilation is 1."""

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    group: int


def matrix_product(node: Node) -> MatrixProduct | None:
    """The matrix product that a node computes; None where it computes anything else."""
    for left, right in product((False, True), repeat=2) if _contracts(node) else ():
        if computes(node, MATMUL, {"transpose_a": left, "transpose_b": right}):
            return MatrixProduct(left, right)
    return None


def convolution(node: Node) -> Convolution | None:
    """The convolution that a node computes; None where it computes anything else."""
    if not _contracts(node):
        return None
    applied = application(node.op, node.inputs, node.attrs)
    found = [r for t in te.tensors(applied.outputs) if t.body is not None for r in reads(t.body) if r.attr in applied.inputs]
    if len(found) != 2 or not 3 <= found[0].attr.ndim == found[1].attr.ndim:
        return None
    (x, w), axes = sorted(found, key=lambda r: applied.inputs.index(r.attr)), set(applied.outputs[0].axes)
    forms = [form for i in x.args[2:] if (form := affine(i)) is not None]
    channels, depth = x.attr.shape[1], w.attr.shape[1]
    if len(forms) < len(x.args) - 2 or not isinstance(channels, int) or not isinstance(depth, int) or not depth:
        return None
    strides = tuple(max((c for v, c in form.terms.items() if v in axes), default=1) for form in forms)
    dilations = tuple(form.terms.get(k, 1) for form, k in zip(forms, w.args[2:], strict=True))
    result = Convolution(strides, dilations, channels // depth)
    return result if computes(node, CONV, asdict(result)) else None


def adjacent_windows(node: Node) -> bool:
    """Whether a node computes a transposed convolution, of one group, whose windows neither overlap nor leave gaps: they are as wide as the
    stride, and nothing is cut off. See `ops.nn.conv_transpose`."""
    if not _contracts(node):
        return False
    x, w = (v.shape for v in node.inputs if v is not None)
    spread = tuple(as_dim(as_expr(d) * as_expr(n)) for d, n in zip(x[2:], w[2:], strict=False))
    none, one = (0,) * len(spread), (1,) * len(spread)
    return computes(node, CONV_TRANSPOSE, {"strides": w[2:], "dilations": one, "group": 1, "before": none, "shape": spread})


def softmax_axis(node: Node | None) -> int | None:
    """The axis along which a node computes the softmax of its input; None where it computes anything else."""
    if node is None or structural(node) or len(node.inputs) != 1 or node.inputs[0] is None:
        return None
    axes = range(len(node.inputs[0].shape))
    return next((axis for axis in reversed(axes) if computes(node, SOFTMAX, {"axes": (axis,)})), None)


def _contracts(node: Node) -> bool:
    """Whether a node has two inputs and reduces: others need no closer look."""
    if structural(node) or len(node.inputs) != 2 or None in node.inputs or len(node.outputs) != 1:
        return False
    bodies = [t.body for t in te.tensors(application(node.op, node.inputs, node.attrs).outputs) if t.body is not None]
    return len(bodies) <= 2 and any(e.op == "reduce" for e in walk(*bodies))


def computes(node: Node, operator: Operator, attrs: Mapping[str, Any]) -> bool:
    """Whether a node computes what another operator would compute of its inputs with these attributes: whether their tensor expressions are
    equal, stage by stage, up to the names of axes and stages."""
    now = application(node.op, node.inputs, node.attrs)
    try:
        then = application(operator, node.inputs, attrs)
    except (TcompError, ValueError, IndexError):  # other ranks or sizes than it takes
        return False
    twins = {a: b for a, b in zip(now.inputs, then.inputs, strict=True) if a is not None and b is not None}

    def same_tensor(a: te.Tensor, b: te.Tensor) -> bool:
        if a in twins:
            return twins[a] is b
        if a.body is None or b.body is None or a.shape != b.shape or a.dtype != b.dtype:
            return False
        twins[a] = b
        return same(a.body, b.body, dict(zip(a.axes, b.axes, strict=True)))

    def same(a: Expr, b: Expr, variables: dict[Expr, Expr]) -> bool:
        if (a.op, a.dtype, len(a.args)) != (b.op, b.dtype, len(b.args)):
            return False
        match a.op:
            case "var":
                return variables.get(a, a) is b
            case "read":
                equal = same_tensor(a.attr, b.attr)
            case "reduce":
                (reducer, over), (other, others) = a.attr, b.attr
                equal = reducer == other and list(map(bounds, over)) == list(map(bounds, others))
                variables.update(zip(over, others, strict=False))
            case _:
                equal = a.attr == b.attr
        return equal and all(same(x, y, variables) for x, y in zip(a.args, b.args, strict=True))

    return len(now.outputs) == len(then.outputs) and all(map(same_tensor, now.outputs, then.outputs))
