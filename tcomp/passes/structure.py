"""The structure of what a node computes, derived from its tensor expression and never from its operator: movements, affine and linear maps,
contractions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from tcomp.errors import TcompError
from tcomp.ir import access, expr as E, te
from tcomp.ir.dtypes import BITS, NARROW_FLOATS, SIGNED, integer_range, is_float, is_integer
from tcomp.ir.graph import STRUCTURAL, Application, Node, Operator, Value, application
from tcomp.ir.simplify import as_dim, same_shape, simplify
from tcomp.ops.matmul import MATMUL
from tcomp.ops.nn import CONV, CONV_TRANSPOSE
from tcomp.ops.reduction import SOFTMAX

MAX_STAGES = 16  # tensors inlined into one body: bounds the size of the expression


@dataclass(frozen=True, slots=True)
class Body:
    """An output element as one expression over the node's inputs: `leaves` are their placeholders."""

    tensor: te.Tensor
    expr: E.Expr
    leaves: Mapping[Value, te.Tensor]

    def reads_of(self, value: Value) -> list[E.Expr]:
        """The reads of one input."""
        return [r for r in E.reads(self.expr) if r.attr is self.leaves[value]]


def structural(node: Node) -> bool:
    """Whether a node has no tensor expression."""
    return node.op in STRUCTURAL


def bodies(node: Node) -> list[Body | None]:
    """One for each output of a node; None where it is not a single expression (imperative programs, too many stages)."""
    found = application(node.op, node.inputs, node.attrs)
    leaves = {v: t for v, t in zip(node.inputs, found.inputs, strict=True) if v is not None and t is not None}
    return [None if (e := inlined(t)) is None else Body(t, e, leaves) for t in found.outputs]


def body_of(node: Node | None) -> Body | None:
    """The body of a node with one output; None for any other."""
    return None if node is None or structural(node) or len(node.outputs) != 1 else bodies(node)[0]


@lru_cache(maxsize=4096)
def inlined(tensor: te.Tensor) -> E.Expr | None:
    """The body with the bodies of all computed tensors in the place of their reads."""
    stages = list(te.tensors([tensor]))
    if len(stages) > MAX_STAGES or any(t.extern is not None for t in stages):
        return None
    flat, captured = dict[te.Tensor, E.Expr](), False

    def rule(e: E.Expr) -> E.Expr | None:
        nonlocal captured
        if e.op != "read" or e.attr not in flat:
            return None
        inner = flat[e.attr]
        bound = {axis for r in E.walk(inner) if r.op == "reduce" for axis in r.attr[1]}
        captured |= not bound.isdisjoint(E.variables(*e.args))  # an index would be taken for the inner sum's own axis
        return E.substitute(inner, dict(zip(e.attr.axes, e.args, strict=True)))

    for t in stages:
        if t.body is not None:
            flat[t] = E.rewrite(t.body, rule)
    return None if captured else flat.get(tensor)


@dataclass(frozen=True, slots=True)
class Movement:
    """tensor[axes] = source[indices]; axes of extent 1 are 0 in the indices."""

    source: Value
    tensor: te.Tensor
    indices: tuple[E.Expr, ...]

    @property
    def is_identity(self) -> bool:
        """Whether the tensor equals its source."""
        return same_shape(self.tensor.shape, self.source.shape) and self.indices == canonical(self.tensor, self.tensor.axes)


def movement(body: Body | None) -> Movement | None:
    """Where an output element comes from, if it is one element of an input."""
    if body is None or body.expr.op != "read":
        return None
    source = next((v for v, t in body.leaves.items() if t is body.expr.attr), None)
    return None if source is None else Movement(source, body.tensor, canonical(body.tensor, body.expr.args))


def canonical(tensor: te.Tensor, indices: Sequence[E.Expr]) -> tuple[E.Expr, ...]:
    """Indices over the axes of `tensor`, simplified; axes of extent 1 are 0."""
    flat = unit_axes(tensor)
    return tuple(simplify(E.substitute(i, flat)) for i in indices)


def unit_axes(tensor: te.Tensor) -> dict[E.Expr, E.Expr]:
    """The axes of extent 1, each with its only value."""
    return {axis: E.const(0) for axis, d in zip(tensor.axes, tensor.shape, strict=True) if d == 1}


_NEUTRAL = {"add": 0.0, "sub": 0.0, "pow": 1.0, "max": float("-inf"), "min": float("inf")}


def with_constants(body: Body, values: Mapping[Value, bool | int | float]) -> Body:
    """The body for inputs whose elements are all equal, with neutral elements dropped: x + 0 == x, x - 0 == x, x * 1 == x, x / 1 == x,
    x ** 1 == x, max(x, -inf) == x, min(x, inf) == x. (-0.0 + 0.0 is 0.0, which compares equal to -0.0.) Casts to a type that holds every
    value, and back, are dropped too."""
    known = {body.leaves[v]: E.const(value, v.dtype) for v, value in values.items()}

    def rule(e: E.Expr) -> E.Expr | None:
        if e.op == "read":
            return known.get(e.attr)
        if e.op == "cast" and e.args[0].op == "cast" and e.args[0].args[0].dtype == e.dtype:
            return e.args[0].args[0] if lossless(e.dtype, e.args[0].dtype) else None
        if e.op in _NEUTRAL:
            dropped = [is_float(x.dtype) and _is(x, _NEUTRAL[e.op]) for x in e.args]
            return e.args[1] if dropped[0] and e.op in ("add", "max", "min") else e.args[0] if dropped[1] else None
        return None

    return Body(body.tensor, E.rewrite(body.expr, rule), body.leaves)


_SIGNIFICAND = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}  # bits


def lossless(source: str, target: str) -> bool:
    """Whether every value of `source` is a value of `target`, and a conversion back gives it again."""
    if source in NARROW_FLOATS or target in NARROW_FLOATS:
        return False  # which saturate
    if source == target or source == "bool":
        return True
    if is_float(source):
        return is_float(target) and BITS[source] < BITS[target]
    if is_float(target):
        return BITS[source] - (source in SIGNED) <= _SIGNIFICAND[target]
    (lo, hi), (low, high) = integer_range(source), integer_range(target)
    return target != "bool" and low <= lo and hi <= high


def affine(body: Body, source: Value) -> tuple[E.Expr, E.Expr] | None:
    """(a, b) with  output[i] == a * source[i] + b,  a and b free of `source`. None if there is no such pair."""
    return _affine_of(body.tensor, body.expr, body.leaves[source])


@lru_cache(maxsize=4096)
def _affine_of(tensor: te.Tensor, e: E.Expr, source: te.Tensor) -> tuple[E.Expr, E.Expr] | None:
    at, reads = canonical(tensor, tensor.axes), (r for r in E.reads(e) if r.attr is source)
    if not same_shape(tensor.shape, source.shape) or any(canonical(tensor, r.args) != at for r in reads):
        return None
    return _affine(e, source)


def _affine(whole: E.Expr, source: te.Tensor) -> tuple[E.Expr, E.Expr] | None:
    """The pair of an expression from those of its parts, each once: what does not depend on `source` has a factor of 0."""
    forms: dict[E.Expr, tuple[E.Expr, E.Expr]] = {}
    for e in E.postorder([whole], lambda e: () if e.op == "read" else e.args):
        zero = E.const(0, e.dtype)
        if e.op == "read" and e.attr is source:
            forms[e] = E.const(1, e.dtype), zero
            continue
        if e.op == "read" and any(r.attr is source for r in E.reads(*e.args)):
            return None
        parts = [forms[arg] for arg in e.args] if e.op != "read" else []
        if all(factor.op == "const" and factor.attr == 0 for factor, _ in parts):
            forms[e] = zero, e
            continue
        (a, b), (c, d) = parts[0], parts[-1]
        match e.op:
            case "add":
                forms[e] = _add(a, c), _add(b, d)
            case "sub":
                forms[e] = _add(a, _negated(c)), _add(b, _negated(d))
            case "mul" if c is zero:
                forms[e] = _times(a, d), _times(b, d)
            case "mul" if a is zero:
                forms[e] = _times(c, b), _times(d, b)
            case "div" if c is zero:
                forms[e] = E.binary("div", a, d), b if b is zero else E.binary("div", b, d)
            case "neg":
                forms[e] = _negated(a), _negated(b)
            case _:
                return None
    return forms[whole]


def _is(e: E.Expr, value: float) -> bool:
    return e.op == "const" and bool(e.attr == value)


def _add(a: E.Expr, b: E.Expr) -> E.Expr:
    return a if _is(b, 0.0) else b if _is(a, 0.0) else a + b


def _times(a: E.Expr, b: E.Expr) -> E.Expr:
    return E.const(0, a.dtype) if _is(a, 0.0) or _is(b, 0.0) else b if _is(a, 1.0) else a * b


def _negated(a: E.Expr) -> E.Expr:
    return a if _is(a, 0.0) else -a


def scaled_dim(body: Body, operand: Value, axis: int | None) -> int | None:
    """The dim of `operand` that runs along `axis` of the output wherever it is read: a factor along that dim multiplies what is read by one
    that depends on the output's `axis` only. -1 where `axis` is None (one factor for all). None if there is no such dim."""
    accesses = body.reads_of(operand)
    if axis is None or not accesses:
        return -1 if accesses else None
    return next((d for d in range(len(operand.shape)) if all(simplify(r.args[d]) is body.tensor.axes[axis] for r in accesses)), None)


def scales_with(body: Body, operands: Sequence[Value]) -> bool:
    """Whether the output is multiplied by s when all `operands` are (s being constant within each sum)."""
    leaves = [body.leaves[v] for v in operands]
    known: dict[E.Expr, str | None] = {}  # "linear" in the operands, "free" of them, "zero" (both), or None (neither)

    def degree(e: E.Expr) -> str | None:
        if _is(e, 0.0):
            return "zero"
        degrees = [known[arg] for arg in e.args]
        if all(d in ("free", "zero") for d in degrees):
            return "linear" if e.op == "read" and e.attr in leaves else "free"
        match e.op:
            case "add" | "sub" | "neg":
                linear = set(degrees) - {"zero"} == {"linear"}
            case "mul" | "div":
                linear = degrees == ["linear", "free"] or e.op == "mul" and degrees == ["free", "linear"]
            case "select":
                linear = degrees[0] == "free" and set(degrees[1:]) - {"zero"} == {"linear"}
            case _:
                linear = e.op == "reduce" and e.attr[0].op == "add" and degrees == ["linear"]
        return "linear" if linear else None

    for e in E.walk(body.expr):
        known[e] = degree(e)
    return known[body.expr] == "linear"


def shifts_with(body: Body, operand: Value) -> bool:
    """Whether the output grows by t when `operand` grows by t."""
    leaf = body.leaves[operand]

    def shifts(e: E.Expr) -> bool:
        if e.op not in ("add", "sub"):
            return e.op == "read" and e.attr is leaf
        free_a, free_b = (all(r.attr is not leaf for r in E.reads(arg)) for arg in e.args)
        return (free_b and shifts(e.args[0])) or (e.op == "add" and free_a and shifts(e.args[1]))

    return shifts(body.expr)


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
    if not _contracts(node):
        return None
    forms, sums = product((False, True), repeat=2), _sums(node)
    return next((MatrixProduct(a, b) for a, b in forms if computes(node, MATMUL, {"transpose_a": a, "transpose_b": b, **sums})), None)


def convolution(node: Node) -> Convolution | None:
    """The convolution that a node computes; None where it computes anything else."""
    if not _contracts(node):
        return None
    applied = application(node.op, node.inputs, node.attrs)
    found = [r for t in te.tensors(applied.outputs) if t.body is not None for r in E.reads(t.body) if r.attr in applied.inputs]
    if len(found) != 2 or not 3 <= found[0].attr.ndim == found[1].attr.ndim:
        return None
    (x, w), axes = sorted(found, key=lambda r: applied.inputs.index(r.attr)), set(applied.outputs[0].axes)
    forms = [form for i in x.args[2:] if (form := access.affine(i)) is not None]
    channels, depth = x.attr.shape[1], w.attr.shape[1]
    if len(forms) < len(x.args) - 2 or not isinstance(channels, int) or not isinstance(depth, int) or not depth:
        return None
    strides = tuple(max((c for v, c in form.terms.items() if v in axes), default=1) for form in forms)
    dilations = tuple(form.terms.get(k, 1) for form, k in zip(forms, w.args[2:], strict=True))
    result = Convolution(strides, dilations, channels // depth)
    return result if computes(node, CONV, asdict(result) | _sums(node)) else None


def _sums(node: Node) -> dict[str, Any]:
    """The attribute of contractions that says in which type integers are summed."""
    dtype = node.outputs[0].dtype
    return {"dtype": dtype} if is_integer(dtype) else {}


def adjacent_windows(node: Node) -> bool:
    """Whether a node computes a transposed convolution, of one group, whose windows neither overlap nor leave gaps: they are as wide as the
    stride, and nothing is cut off. See `ops.nn.conv_transpose`."""
    if not _contracts(node):
        return False
    x, w = (v.shape for v in node.inputs if v is not None)
    spread = tuple(as_dim(E.as_expr(d) * E.as_expr(n)) for d, n in zip(x[2:], w[2:], strict=False))
    none, one = (0,) * len(spread), (1,) * len(spread)
    return computes(node, CONV_TRANSPOSE, {"strides": w[2:], "dilations": one, "group": 1, "before": none, "shape": spread})


def softmax_axis(node: Node | None) -> int | None:
    """The axis along which a node computes the softmax of its input; None where it computes anything else."""
    if node is None or structural(node) or len(node.inputs) != 1 or node.inputs[0] is None:
        return None
    axes = reversed(range(len(node.inputs[0].shape)))
    return next((axis for axis in axes if computes(node, SOFTMAX, {"axes": (axis,)})), None)


def _contracts(node: Node) -> bool:
    """Whether a node has two inputs and reduces: others need no closer look."""
    if structural(node) or len(node.inputs) != 2 or None in node.inputs or len(node.outputs) != 1:
        return False
    return _reduces(application(node.op, node.inputs, node.attrs).outputs)


@lru_cache(maxsize=4096)
def _reduces(outputs: tuple[te.Tensor, ...]) -> bool:
    found = [t.body for t in te.tensors(outputs) if t.body is not None]
    return len(found) <= 2 and any(e.op == "reduce" for e in E.walk(*found))


def computes(node: Node, operator: Operator, attrs: Mapping[str, Any]) -> bool:
    """Whether a node computes what another operator would compute of its inputs with these attributes: whether their tensor expressions are
    equal, stage by stage, up to the names of axes and stages."""
    return _computes(application(node.op, node.inputs, node.attrs), operator, tuple(attrs.items()))


@lru_cache(maxsize=4096)
def _computes(now: Application, operator: Operator, attrs: tuple[tuple[str, Any], ...]) -> bool:
    try:
        then = operator.apply(now.inputs, dict(attrs))
    except (TcompError, ValueError, IndexError):  # other ranks or sizes than it takes
        return False
    twins = {a: a for a in now.inputs if a is not None}

    def same_tensor(a: te.Tensor, b: te.Tensor) -> bool:
        if a in twins:
            return twins[a] is b
        if a.body is None or b.body is None or a.shape != b.shape or a.dtype != b.dtype:
            return False
        twins[a] = b
        return same(a.body, b.body, dict(zip(a.axes, b.axes, strict=True)))

    def same(a: E.Expr, b: E.Expr, variables: dict[E.Expr, E.Expr]) -> bool:
        if a.op != b.op and {a.op, b.op} == {"var", "const"} and E.bounds(a) == E.bounds(b) == (0, 0):
            return True  # the place along an axis of extent 1
        if (a.op, a.dtype, len(a.args)) != (b.op, b.dtype, len(b.args)):
            return False
        match a.op:
            case "var":
                return variables.get(a, a) is b
            case "read":
                equal = same_tensor(a.attr, b.attr)
            case "reduce":
                (reducer, over), (other, others) = a.attr, b.attr
                equal = reducer == other and list(map(E.bounds, over)) == list(map(E.bounds, others))
                variables.update(zip(over, others, strict=False))
            case _:
                equal = a.attr == b.attr
        return equal and all(same(x, y, variables) for x, y in zip(a.args, b.args, strict=True))

    return len(now.outputs) == len(then) and all(map(same_tensor, now.outputs, then))
