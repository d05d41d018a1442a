"""What the tensor expression of a node says about it, whatever the operator is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tcomp.ir import te
from tcomp.ir.dtypes import BITS, SIGNED, integer_range, is_float
from tcomp.ir.expr import BINARY, UNARY, Expr, binary, const, reads, rewrite, substitute, unary, variables, walk
from tcomp.ir.graph import Node, Value, application
from tcomp.ir.simplify import same_shape, simplify

MAX_STAGES = 16  # tensors inlined into one body


@dataclass(frozen=True, slots=True)
class Body:
    """An output element as one expression over the node's inputs: `leaves` are their placeholders."""

    tensor: te.Tensor
    expr: Expr
    leaves: Mapping[Value, te.Tensor]

    def reads_of(self, value: Value) -> list[Expr]:
        """The reads of one input."""
        return [r for r in reads(self.expr) if r.attr is self.leaves[value]]


def bodies(node: Node) -> list[Body | None]:
    """One for each output of a node; None where it is no single expression (imperative programs, too many stages)."""
    made = application(node.op, node.inputs, node.attrs)
    leaves = {v: t for v, t in zip(node.inputs, made.inputs, strict=True) if v is not None and t is not None}
    return [None if (e := inlined(t)) is None else Body(t, e, leaves) for t in made.outputs]


@lru_cache(maxsize=4096)
def inlined(tensor: te.Tensor) -> Expr | None:
    """The body with the bodies of all computed tensors in the place of their reads."""
    stages = list(te.tensors([tensor]))
    if len(stages) > MAX_STAGES or any(t.extern is not None for t in stages):
        return None
    flat: dict[te.Tensor, Expr] = {}
    for t in stages:
        if t.body is None:
            continue
        captured = False

        def rule(e: Expr) -> Expr | None:
            nonlocal captured
            if e.op != "read" or e.attr not in flat:
                return None
            inner = flat[e.attr]
            bound = {axis for r in walk(inner) if r.op == "reduce" for axis in r.attr[1]}
            captured |= not bound.isdisjoint(variables(*e.args))  # an index would be taken for the inner sum's own axis
            return substitute(inner, dict(zip(e.attr.axes, e.args, strict=True)))

        flat[t] = rewrite(t.body, rule)
        if captured:
            return None
    return flat.get(tensor)


# ---------------------------------------------------------------- elements that are merely moved


def moved(body: Body) -> tuple[Value, tuple[Expr, ...]] | None:
    """(input, canonical indices) if the output element is one element of an input."""
    e = body.expr
    if e.op != "read":
        return None
    source = next((v for v, t in body.leaves.items() if t is e.attr), None)
    return None if source is None else (source, canonical(body.tensor, e.args))


def canonical(tensor: te.Tensor, indices: Sequence[Expr]) -> tuple[Expr, ...]:
    """Indices over the axes of `tensor`, simplified; axes of extent 1 are 0."""
    flat = {axis: const(0) for axis, d in zip(tensor.axes, tensor.shape, strict=True) if d == 1}
    return tuple(simplify(substitute(i, flat)) for i in indices)


def is_identity(tensor: te.Tensor, source: Value, indices: Sequence[Expr]) -> bool:
    """Whether `tensor` equals `source`, which it reads at `indices`."""
    return same_shape(tensor.shape, source.shape) and tuple(indices) == canonical(tensor, tensor.axes)


def with_constants(body: Body, values: Mapping[Value, bool | int | float]) -> Body:
    """The body for inputs whose elements are all equal, with neutral elements dropped.

        x + 0 == x    x - 0 == x    x * 1 == x    x / 1 == x    x ** 1 == x    max(x, -inf) == x    min(x, inf) == x

    (-0.0 + 0.0 is 0.0, which compares equal to -0.0.) Casts to a type that holds every value, and back, are dropped
    too.
    """
    known = {body.leaves[v]: const(value, v.dtype) for v, value in values.items()}

    def rule(e: Expr) -> Expr | None:
        if e.op == "read":
            return known.get(e.attr)
        if e.op == "cast" and e.args[0].op == "cast" and e.args[0].args[0].dtype == e.dtype:
            return e.args[0].args[0] if lossless(e.dtype, e.args[0].dtype) else None
        if e.op in BINARY and len(e.args) == 2:
            a, b = e.args
            if e.op in ("add", "max", "min") and _neutral(e.op, a):
                return b
            if e.op in ("add", "sub", "pow", "max", "min") and _neutral(e.op, b):
                return a
        return None

    return Body(body.tensor, rewrite(body.expr, rule), body.leaves)


def _neutral(op: str, e: Expr) -> bool:
    if e.op != "const" or not is_float(e.dtype):
        return False
    return bool(e.attr == {"add": 0.0, "sub": 0.0, "pow": 1.0, "max": float("-inf"), "min": float("inf")}[op])


def lossless(source: str, target: str) -> bool:
    """Whether every value of `source` is a value of `target`."""
    if source == target or source == "bool":
        return True
    if is_float(source):
        return is_float(target) and BITS[source] < BITS[target]
    if is_float(target):
        return BITS[source] - (source in SIGNED) <= _PRECISION[target]
    (lo, hi), (low, high) = integer_range(source), integer_range(target)
    return target != "bool" and low <= lo and hi <= high


_PRECISION = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}  # bits of the significand


# ---------------------------------------------------------------- affine functions of one element


def affine(body: Body, source: Value) -> tuple[Expr, Expr] | None:
    """(a, b) with  output[i] == a * source[i] + b,  a and b free of `source`. None if there is no such pair."""
    if not same_shape(body.tensor.shape, source.shape):
        return None
    at = canonical(body.tensor, body.tensor.axes)
    if any(canonical(body.tensor, r.args) != at for r in body.reads_of(source)):
        return None
    return _affine(body.expr, body.leaves[source])


def _affine(e: Expr, source: te.Tensor) -> tuple[Expr, Expr] | None:
    one, zero = const(1, e.dtype), const(0, e.dtype)
    if not any(r.attr is source for r in reads(e)):
        return zero, e
    if e.op == "read":
        return one, zero
    parts = [p for arg in e.args if (p := _affine(arg, source)) is not None]
    if e.op not in ("add", "sub", "mul", "div", "neg") or len(parts) != len(e.args):
        return None
    (a, b), (c, d) = parts[0], parts[-1]
    match e.op:
        case "add":
            return _add(a, c), _add(b, d)
        case "sub":
            return _add(a, _negated(c)), _add(b, _negated(d))
        case "mul" if c is zero:
            return _times(a, d), _times(b, d)
        case "mul" if a is zero:
            return _times(c, b), _times(d, b)
        case "div" if c is zero:
            return binary("div", a, d), b if b is zero else binary("div", b, d)
        case "neg":
            return _negated(a), _negated(b)
    return None


def _is(e: Expr, value: float) -> bool:
    return e.op == "const" and bool(e.attr == value)


def _add(a: Expr, b: Expr) -> Expr:
    return a if _is(b, 0.0) else b if _is(a, 0.0) else a + b


def _times(a: Expr, b: Expr) -> Expr:
    return const(0, a.dtype) if _is(a, 0.0) or _is(b, 0.0) else b if _is(a, 1.0) else a * b


def _negated(a: Expr) -> Expr:
    return a if _is(a, 0.0) else unary("neg", a)


def operations(e: Expr) -> int:
    """Arithmetic operations on floats in an expression."""
    return sum(1 for node in walk(e) if is_float(node.dtype) and node.op in (*BINARY, *UNARY))


# ---------------------------------------------------------------- linear operands


def scaled_dim(body: Body, operand: Value, axis: int | None) -> int | None:
    """The dim of `operand` that runs along `axis` of the output wherever it is read: multiplying the operand along that
    dim multiplies what is read by a factor that depends on the output's `axis` only. -1 where `axis` is None (one
    factor for all). None if there is no such dim.
    """
    accesses = body.reads_of(operand)
    if axis is None:
        return -1 if accesses else None
    dims = range(len(operand.shape)) if accesses else ()
    return next((d for d in dims if all(simplify(r.args[d]) is body.tensor.axes[axis] for r in accesses)), None)


def scales_with(body: Body, operands: Sequence[Value]) -> bool:
    """Whether the output is multiplied by s when all `operands` are (s being constant within each sum)."""
    leaves = [body.leaves[v] for v in operands]
    memo: dict[Expr, str | None] = {}
    for e in walk(body.expr):
        memo[e] = _degree(e, leaves, memo)
    return memo[body.expr] == "linear"


def _degree(e: Expr, operands: Sequence[te.Tensor], memo: Mapping[Expr, str | None]) -> str | None:
    """ "linear" in the operands, "free" of them, "zero" (both), or None (neither)."""
    if _is(e, 0.0):
        return "zero"
    degrees = [memo[arg] for arg in e.args]
    if e.op == "read":
        return None if any(d not in ("free", "zero") for d in degrees) else "linear" if e.attr in operands else "free"
    if all(d in ("free", "zero") for d in degrees):
        return "free"
    known = {d for d in degrees if d != "zero"}
    match e.op:
        case "add" | "sub" | "neg":
            return "linear" if known == {"linear"} else None
        case "mul":
            return "linear" if sorted(map(str, degrees)) == ["free", "linear"] else None
        case "div":
            return "linear" if degrees == ["linear", "free"] else None
        case "select":
            return "linear" if degrees[0] == "free" and {d for d in degrees[1:] if d != "zero"} == {"linear"} else None
        case "reduce":
            reducer = e.attr[0]
            return "linear" if reducer.combine in (reducer.lhs + reducer.rhs, reducer.rhs + reducer.lhs) else None
    return None


def shifts_with(body: Body, operand: Value) -> bool:
    """Whether the output grows by t when `operand` grows by t."""
    return _shifts(body.expr, body.leaves[operand])


def _shifts(e: Expr, operand: te.Tensor) -> bool:
    if e.op == "read":
        return e.attr is operand
    if e.op == "add":
        free = [not any(r.attr is operand for r in reads(arg)) for arg in e.args]
        return (free[1] and _shifts(e.args[0], operand)) or (free[0] and _shifts(e.args[1], operand))
    return e.op == "sub" and not any(r.attr is operand for r in reads(e.args[1])) and _shifts(e.args[0], operand)
