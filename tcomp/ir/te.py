"""Tensor expressions: what an operator computes, element by element, and nothing about how.

    A = te.placeholder((M, K), name="A"); B = te.placeholder((K, N), name="B")
    k = te.reduce_axis(K, name="k")
    C = te.compute((M, N), lambda i, j: te.sum(A[i, k] * B[k, j], axis=k), name="C")

A `Tensor` is a placeholder (no body), a compute (axes and a body `Expr`), or an output of an extern: an imperative loop program,
for what is no tensor expression (sorting, prefix sums, scatter, non-maximum suppression). Tensors are compared by identity.
Reductions may occur anywhere in a body; lowering gives each a stage of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, overload

from tcomp.errors import IRError
from tcomp.ir import expr as E
from tcomp.ir.dtypes import BITS
from tcomp.ir.expr import Dim, Expr, ExprLike, Reducer, as_expr, cast, const, fma, loop_var, reduce, select, standard_reducers
from tcomp.ir.loops import Buffer, LoopPrinter, Stmt
from tcomp.ir.simplify import as_dim

__all__ = [
    "Dim", "Expr", "Extern", "Tensor", "abs", "acos", "acosh", "all", "all_of", "any", "asin", "asinh", "atan", "atanh", "cast", "ceil",
    "comm_reducer", "compute", "const", "cos", "cosh", "equal", "erf", "exp", "extern", "externs", "floor", "fma", "isinf", "isnan",
    "log", "max", "maximum", "min", "minimum", "not_equal", "placeholder", "power", "prod", "reduce_axis", "round",
    "select", "sigmoid", "sin", "sinh", "sqrt", "sum", "tan", "tanh", "tensors", "trunc", "truncdiv", "truncmod", "var",
]  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Extern:
    """An imperative loop program that computes tensors: `body` reads `inputs` through `parameters` and writes `results`."""

    inputs: tuple[Tensor, ...]
    parameters: tuple[Buffer, ...]  # one per input
    results: tuple[Buffer, ...]  # one per output
    body: Stmt


class Tensor:
    """A value of TE: `name`, `shape` (ints or symbolic `Expr`), `dtype`, and how its elements are computed."""

    __slots__ = ("__weakref__", "axes", "body", "dtype", "extern", "index", "name", "shape")

    def __init__(
        self, name: str, shape: Sequence[Dim], dtype: str, axes: tuple[Expr, ...] = (), body: Expr | None = None,
        extern: Extern | None = None, index: int = 0,
    ) -> None:  # fmt: skip
        if dtype not in BITS:
            raise IRError(f"unknown dtype `{dtype}` of tensor `{name}`", hint=f"one of {', '.join(BITS)}")
        self.name, self.shape, self.dtype = name, tuple(as_dim(d) for d in shape), dtype
        self.axes, self.body, self.extern, self.index = axes, body, extern, index

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __getitem__(self, indices: ExprLike | tuple[ExprLike, ...]) -> Expr:
        return E.read(self, indices if isinstance(indices, tuple) else (indices,))

    def __call__(self, *indices: ExprLike) -> Expr:
        return E.read(self, indices)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors this one reads directly, each once, in order of first use."""
        if self.extern is not None:
            return self.extern.inputs
        return () if self.body is None else tuple(dict.fromkeys(r.attr for r in E.reads(self.body)))

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


def placeholder(shape: Sequence[Dim], dtype: str = "float32", name: str = "placeholder") -> Tensor:
    """An input."""
    return Tensor(name, shape, dtype)


def reduce_axis(extent: Dim | tuple[int, Dim], name: str = "k") -> Expr:
    """A variable 0 <= k < extent to reduce over. `(0, extent)` is accepted as well, as in TVM. Raises `IRError` for another start."""
    if isinstance(extent, tuple):
        start, extent = extent
        if start != 0:
            raise IRError(f"reduce axis `{name}` starts at {start}", hint="start at 0 and add the offset in the body")
    return loop_var(name, extent)


@overload
def compute(shape: Sequence[Dim], function: Callable[..., ExprLike], name: str = ...) -> Tensor: ...
@overload
def compute(shape: Sequence[Dim], function: Callable[..., tuple[ExprLike, ...]], name: str = ...) -> tuple[Tensor, ...]: ...
def compute(shape: Sequence[Dim], function: Callable[..., Any], name: str = "compute") -> Tensor | tuple[Tensor, ...]:
    """A tensor of the given shape whose element at (i, j, ...) is `function(i, j, ...)`.

    `function` takes one index expression per dimension (or `*indices`) and returns an `Expr`, or a tuple of them for
    several outputs over the same axes; then a tuple of tensors is returned.
    """
    shape = tuple(as_dim(d) for d in shape)
    parameters = list(inspect.signature(function).parameters.values())
    names = [p.name for p in parameters if p.default is p.empty]
    if [p for p in parameters if p.kind is p.VAR_POSITIONAL]:  # `any` is a reduction in this module
        names = [f"i{n}" for n in range(len(shape))]
    elif len(names) != len(shape):
        raise IRError(f"a compute over {len(shape)} dimensions was given a function of {len(names)} indices")
    axes = tuple(map(loop_var, names, shape))
    bodies = function(*axes)
    several = isinstance(bodies, tuple)
    tensors = []
    for number, body in enumerate(bodies if several else (bodies,)):
        body = as_expr(body, "float32")
        if [e for e in E.walk(body) if e.op == "reduce" and set(e.attr[1]) & set(axes)]:
            what = f"`{name}` reduces over an axis that has the name and extent of an output axis"
            raise IRError(what, where=str(body), hint="give te.reduce_axis another name")
        tensors.append(Tensor(f"{name}.{number}" if several else name, shape, body.dtype, axes, body))
    return tuple(tensors) if several else tensors[0]


Type: TypeAlias = tuple[Sequence[Dim], str]  # shape and dtype
Writer: TypeAlias = Callable[[Sequence[Buffer], Sequence[Buffer]], Stmt]  # (input buffers, output buffers) -> a program


def extern(result: Type, inputs: Sequence[Tensor], function: Writer, name: str = "extern") -> Tensor:
    """A tensor of the type `result` = (shape, dtype), computed by an imperative loop program."""
    return externs([result], inputs, function, name)[0]


def externs(results: Sequence[Type], inputs: Sequence[Tensor], function: Writer, name: str = "extern") -> tuple[Tensor, ...]:
    """Several tensors computed by one program (see `extern`)."""
    parameters = tuple(Buffer(f"in{n}", t.dtype, t.shape) for n, t in enumerate(inputs))
    outputs = tuple(Buffer(f"out{n}", dtype, tuple(map(as_dim, shape))) for n, (shape, dtype) in enumerate(results))
    program = Extern(tuple(inputs), parameters, outputs, function(parameters, outputs))
    names = [f"{name}.{n}" for n in range(len(outputs))] if len(outputs) > 1 else [name]
    return tuple(Tensor(label, b.shape, b.dtype, extern=program, index=n) for n, (label, b) in enumerate(zip(names, outputs, strict=True)))


def is_placeholder(t: Tensor) -> bool:
    """Whether a tensor is an input: neither a compute nor a result of an extern."""
    return t.body is None and t.extern is None


def tensors(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Every tensor that the outputs depend on, once, producers before consumers."""
    return E.postorder([*outputs], lambda t: t.inputs)


class Reduction(Protocol):
    """A reduction of `body` over one axis or several."""

    def __call__(self, body: Expr, axis: Expr | Sequence[Expr]) -> Expr: ...


def comm_reducer(combine: Callable[[Expr, Expr], Expr], identity: Callable[[str], ExprLike], name: str = "reduce") -> Reduction:
    """A user-defined reduction: `combine(lhs, rhs)` is associative, `identity(dtype)` its neutral element. Returns `f(body, axis)`."""

    def reducer(dtype: str) -> Reducer:
        lhs, rhs = E.var("lhs", dtype=dtype), E.var("rhs", dtype=dtype)
        return Reducer(name, lhs, rhs, combine(lhs, rhs), as_expr(identity(dtype), dtype))

    return _reduction(name, reducer)


def _reduction(name: str, reducer: Callable[[str], Reducer] | None = None) -> Reduction:
    def reduction(body: Expr, axis: Expr | Sequence[Expr]) -> Expr:
        chosen = standard_reducers(body.dtype)[name] if reducer is None else reducer(body.dtype)
        return reduce(chosen, body, (axis,) if isinstance(axis, Expr) else tuple(axis))

    reduction.__name__, reduction.__doc__ = name, f"The `{name}` of `body` over one axis or several."
    return reduction


sum, prod, max, min, all, any = map(_reduction, ("sum", "prod", "max", "min", "all", "any"))


def _function(op: str) -> Callable[[Expr], Expr]:
    def apply(x: Expr) -> Expr:
        return E.unary(op, x)

    apply.__name__, apply.__doc__ = op, f"Elementwise `{op}`; keeps the dtype (predicates give bool)."
    return apply


abs, floor, ceil, round, trunc, isnan, isinf = map(_function, ("abs", "floor", "ceil", "round", "trunc", "isnan", "isinf"))
sqrt, exp, log, tanh, erf = map(_function, ("sqrt", "exp", "log", "tanh", "erf"))
sin, cos, tan, asin, acos, atan = map(_function, ("sin", "cos", "tan", "asin", "acos", "atan"))
sinh, cosh, asinh, acosh, atanh = map(_function, ("sinh", "cosh", "asinh", "acosh", "atanh"))
equal, not_equal, minimum, maximum, all_of = E.equal, E.not_equal, E.minimum, E.maximum, E.all_of
var = E.dim
"""A symbolic size with an inclusive range, to be used in shapes."""
power = E.binary_function("pow", "x ** y.")
truncdiv = E.binary_function("truncdiv", "Integer division rounding towards zero.")
truncmod = E.binary_function("truncmod", "Remainder with the sign of the dividend.")


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + exp(-x))


def print_te(outputs: Sequence[Tensor]) -> str:
    """Tensors and everything they depend on, producers first, as text; `text.parser.parse_te` reads it back."""
    return "\n".join(_TensorPrinter().tensors(outputs))


class _TensorPrinter(LoopPrinter):
    def tensors(self, outputs: Sequence[Tensor]) -> list[str]:
        """The lines of everything that the outputs depend on."""
        needed, lines = list(tensors(outputs)), list[str]()
        for t in needed:
            if t.extern is not None:
                together = [u for u in needed if u.extern is t.extern]
                lines += self.extern(t.extern, together) if t is together[0] else []
            elif t.body is None:
                lines.append(f"  {self.arrays.bind(t, t.name)}: {t.dtype}{self.shape(t.shape)}")
            else:
                with self.bindings(zip(t.axes, t.shape, strict=True)) as axes:
                    body = self.expression(t.body, "    ")
                lines.append(f"  {self.arrays.bind(t, t.name)}[{axes}] = {body}")
        reducers = self.reducer_lines()
        head = f"te{self.dims(self.variables.free)} {{"
        return [head, *reducers, *lines, f"  return {', '.join(self.arrays(t, t.name) for t in outputs)}", "}"]

    def extern(self, program: Extern, used: Sequence[Tensor]) -> list[str]:
        by_index = {t.index: t for t in used}
        inputs = [self.arrays(t, t.name) for t in program.inputs]
        names = [self.arrays.bind(by_index[n], by_index[n].name) if n in by_index else "_" for n in range(len(program.results))]
        with self.arrays.scope((*program.parameters, *program.results)):
            parameters, results = (", ".join(map(self.buffer, buffers)) for buffers in (program.parameters, program.results))
            head = f"  {', '.join(names)} = extern({', '.join(inputs)}) as ({parameters}) -> ({results})"
            return self.braced(head, program.body, "  ")
