"""Shape arithmetic at compile time: the elements of small tensors as expressions over symbolic sizes.

Nothing here knows an operator. The TE body of an operator is evaluated at constant indices, reads of known tensors are replaced
by their elements, and the result is simplified: `Concat(Unsqueeze(Gather(Shape(x), 0)), [-1])` becomes `(batch, -1)`.

Elements of all integer types are written as `int64` expressions, because sizes are compared and divided as such; a cast to a
32-bit or wider integer is taken to keep a size (sizes are below 2**31), a cast to a narrower one only where ranges prove it.
Floats appear where exporters scale sizes (`floor(cast(h) * 0.5)`): they are carried as exact fractions of integer expressions,
which is what floating point computes for sizes below 2**24 as long as the factors are dyadic or the divisors integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from math import prod

import numpy as np

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.dtypes import BITS, is_float, is_integer
from tcomp.ir.expr import INDEX, Dim, Expr, all_of, binary, bounds, cast, const, select, unary, variables, walk, with_args, written_size
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.scalar_operators import BINARY
from tcomp.ir.simplify import prove, simplify
from tcomp.ir.te import Tensor

LIMIT = 256  # elements of a tensor that is propagated
_MAX_REDUCED = 4096  # iterations of one reduction
_MAX_NODES, _MAX_DEPTH, MAX_SIZES = 400, 100, 64  # of one element, written out; expressions beyond that are not shapes
_MAX_STEPS = 200_000  # expression nodes looked at for one operator

Elements = tuple[Expr, ...]


class _Unknown(Exception):
    """An element depends on data, or is not an expression we can handle."""


def literals(array: np.ndarray, dtype: str) -> Elements:
    """The elements of a constant array, row-major."""
    kind = dtype if is_float(dtype) or dtype == "bool" else INDEX
    return tuple(const(x, kind) for x in array.ravel().tolist())


def computed(e: Dim) -> Expr:
    """A number in canonical form, and as a constant where it depends on nothing."""
    e = simplify(e)
    if e.op == "const" or variables(e):
        return e
    return const(evaluate([te.compute((), lambda: e, "number")], {})[0].item(), e.dtype)


def closed(outputs: Sequence[Tensor]) -> bool:
    """Whether the tensors depend on no symbolic size."""

    def sizes(t: Tensor) -> set[Expr]:
        body = t.body if t.body is not None else const(0)
        return {v for v in variables(body) if v.dtype == INDEX} - {a for e in walk(body) if e.op == "reduce" for a in e.attr[1]}

    return all(all(isinstance(d, int) for d in t.shape) and sizes(t) <= set(t.axes) for t in te.tensors(outputs))


def propagate(
    outputs: Sequence[Tensor],
    known: Mapping[Tensor, Elements],
    exact: bool = False,
    assume: Callable[[Expr], bool] = lambda condition: False,
) -> list[Elements] | None:
    """Elements (row-major) of all outputs, given those of some placeholders; None where any cannot be known. Output shapes are constant and
    hold at most `LIMIT` elements. `exact`: floats are floats, of data that is known before a run, and no fractions that stand for sizes.
    `assume` is called with a condition of which it is not known whether it holds (that a divisor is not 0, an index is inside), and says
    whether runs where it does not are refused."""
    evaluation = _Evaluation(known, exact)
    try:
        found = [tuple(evaluation.element(t, index) for index in product(*(range(int(d)) for d in t.shape))) for t in outputs]
    except (_Unknown, IRError):
        return None
    return found if not evaluation.conditions or assume(simplify(all_of(evaluation.conditions))) else None


class _Evaluation:
    """Elements of the tensors of one operator."""

    def __init__(self, known: Mapping[Tensor, Elements], exact: bool) -> None:
        self.known, self.exact, self.steps = known, exact, 0
        self.conditions: list[Expr] = []
        self.element = cache(self._element)

    def _element(self, tensor: Tensor, index: tuple[int, ...]) -> Expr:
        if tensor in self.known:
            shape = [d for d in tensor.shape if isinstance(d, int)]
            if len(shape) != tensor.ndim or not all(0 <= i < d for i, d in zip(index, shape, strict=True)):
                raise _Unknown
            return self.known[tensor][int(np.ravel_multi_index(index, shape)) if shape else 0]
        if tensor.body is None:
            raise _Unknown
        result = self.value(tensor.body, dict(zip(tensor.axes, map(const, index), strict=True)), {})
        if too_complex(result) or (not (self.exact or is_float(tensor.dtype)) and any(is_float(e.dtype) for e in walk(result))):
            raise _Unknown
        return result

    def value(self, e: Expr, env: Mapping[Expr, Expr], memo: dict[Expr, Expr]) -> Expr:
        if e not in memo:
            self.steps += 1
            if self.steps > _MAX_STEPS:
                raise _Unknown
            memo[e] = self._value(e, env, memo)
        return memo[e]

    def _value(self, e: Expr, env: Mapping[Expr, Expr], memo: dict[Expr, Expr]) -> Expr:
        match e.op:
            case "const":
                return const(e.attr, INDEX) if is_integer(e.dtype) else e
            case "var":
                return env.get(e, e)
            case "read":
                index = [self.value(i, env, memo) for i in e.args]
                if any(i.op != "const" for i in index):
                    raise _Unknown
                return self.element(e.attr, tuple(int(i.attr) for i in index))
            case "select" if (cond := self.value(e.args[0], env, memo)).op == "const":  # the other side may be undefined
                return self.value(e.args[1 if cond.attr else 2], env, memo)
            case "select":
                return simplify(select(*(self.value(a, env, memo) for a in e.args)))
            case "reduce":
                return self._reduced(e, env)
            case "cast" if self.exact and (is_float(e.dtype) or is_float(e.args[0].dtype)):
                converted = cast(self.value(e.args[0], env, memo), e.dtype)
                return cast(converted, INDEX) if is_integer(e.dtype) else converted
            case "cast":
                return _cast(self.value(e.args[0], env, memo), e.dtype)
        args = tuple(self.value(a, env, memo) for a in e.args)
        if e.op == "checked":
            inside = [c for c in (args[0] >= 0, args[0] < args[1]) if not prove(c)]
            if any(prove(unary("not", c)) for c in inside):
                raise _Unknown
            self.conditions += inside
            return args[0]
        if e.op in BINARY:
            return simplify(binary(e.op, *args))
        if e.op == "bitcast" or (is_integer(e.dtype) and e.op in ("popcount", "not", "shl", "shr")):
            raise _Unknown  # these see the width of the type, which is not kept
        if e.op == "abs" and (low := bounds(args[0])[0]) is not None and low >= 0:
            return args[0]
        return simplify(with_args(e, args))

    def _reduced(self, e: Expr, env: Mapping[Expr, Expr]) -> Expr:
        reducer, axes = e.attr
        if any(a.attr.lo != 0 or a.attr.hi is None or a.attr.extent is not None for a in axes):
            raise _Unknown
        extents = [a.attr.hi + 1 for a in axes]
        if prod(extents) > _MAX_REDUCED:
            raise _Unknown
        total = self.value(reducer.identity, {}, {})
        for index in product(*map(range, extents)):
            term = self.value(e.args[0], {**env, **dict(zip(axes, map(const, index), strict=True))}, {})
            total = self.value(reducer.combine, {reducer.lhs: total, reducer.rhs: term}, {})
        return total


def too_complex(e: Expr) -> bool:
    """Whether an expression is larger, deeper, or depends on more symbolic sizes than that of any shape that is meant."""
    size, depth = written_size(e)
    return size > _MAX_NODES or depth > _MAX_DEPTH or len(variables(e)) > MAX_SIZES


def whole(elements: Elements) -> Elements | None:
    """Float elements as integers; None unless all are whole for sure."""
    try:
        fractions = [_fraction(e) for e in elements]
    except _Unknown:
        return None
    return tuple(n for n, _ in fractions) if all(d == 1 for _, d in fractions) else None


def _cast(e: Expr, dtype: str) -> Expr:
    """`e` converted to `dtype`, in the representation of this module."""
    if is_float(dtype):
        return cast(e, dtype) if not is_float(e.dtype) or e.op == "const" else e
    if dtype == "bool":
        return simplify(binary("ne", e, const(0, e.dtype))) if e.dtype != "bool" else e
    if is_float(e.dtype):
        numerator, denominator = _fraction(e)
        lo = bounds(numerator)[0]
        if denominator != 1 and (lo is None or lo < 0):
            raise _Unknown  # truncation rounds towards zero, floor division does not
        e = simplify(numerator // denominator)
    elif e.dtype == "bool":
        e = simplify(select(e, 1, 0))
    if e.op == "const":
        return const(const(e.attr, dtype).attr, INDEX)
    lo, hi = bounds(e)
    limit = 1 << (BITS[dtype] - 1)
    if BITS[dtype] < 32 and (lo is None or hi is None or lo < -limit or hi >= limit):
        raise _Unknown
    return e


def _fraction(e: Expr) -> tuple[Expr, int]:
    """A float expression as integer numerator / positive integer denominator, where that is exact."""
    match e.op:
        case "const":
            exact = Fraction(e.attr) if np.isfinite(e.attr) else Fraction(1, 1 << 30)
            if exact.denominator > 1024 or abs(exact.numerator) > 1 << 24:
                raise _Unknown
            return const(exact.numerator), exact.denominator
        case "cast" if is_float(e.args[0].dtype):
            return _fraction(e.args[0])
        case "cast":
            return (simplify(select(e.args[0], 1, 0)) if e.args[0].dtype == "bool" else e.args[0]), 1
        case "neg":
            n, d = _fraction(e.args[0])
            return simplify(-n), d
        case "floor" | "ceil":
            n, d = _fraction(e.args[0])
            return simplify(n // d if e.op == "floor" else -((-n) // d)), 1
        case "add" | "sub" | "mul" | "div":
            (n, d), (m, c) = _fraction(e.args[0]), _fraction(e.args[1])
            if e.op in ("add", "sub"):
                return simplify(binary(e.op, n * c, m * d)), d * c
            if e.op == "mul":
                return simplify(n * m), d * c
            if m.op == "const" and m.attr > 0:
                return simplify(n * c), d * int(m.attr)
    raise _Unknown
