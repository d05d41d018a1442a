"""Tensor expressions: what an operator computes, element by element, and nothing about how.

    A = te.placeholder((M, K), name="A"); B = te.placeholder((K, N), name="B")
    k = te.reduce_axis(K, name="k")
    C = te.compute((M, N), lambda i, j: te.sum(A[i, k] * B[k, j], axis=k), name="C")

A `Tensor` is a placeholder (no body), a compute (axes and a body `Expr`), or an output of an extern: an imperative loop program,
for what is not a tensor expression (sorting, prefix sums, scatter, non-maximum suppression). Tensors are compared by identity.
Reductions may occur anywhere in a body; lowering gives each a stage of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, overload

from tcomp.errors import IRError
from tcomp.ir import expr as E
from tcomp.ir.broadcasting import HALF, broadcast_shape, product_dtype, require_same, term, widened
from tcomp.ir.dtypes import BITS, dtype_name
from tcomp.ir.expr import Dim, Expr, ExprLike, as_expr, cast, const, fma, loop_var, reduce, select
from tcomp.ir.loops import Buffer, Kernel, LoopPrinter, Stmt, block, over, redirect, store
from tcomp.ir.reducers import Reducer, standard_reducers
from tcomp.ir.scalar_operators import numpy_operator
from tcomp.ir.simplify import as_dim, same_shape

__all__ = [
    "Dim", "Expr", "Extern", "Tensor", "abs", "acos", "acosh", "all", "all_of", "any", "asin", "asinh", "atan", "atanh", "call", "cast",
    "ceil", "comm_reducer", "compute", "const", "cos", "cosh", "equal", "erf", "exp", "extern", "externs", "floor", "fma", "isinf", "isnan",
    "log", "matmul", "max", "maximum", "min", "minimum", "not_equal", "placeholder", "power", "prod", "reduce_axis", "round",
    "select", "sigmoid", "sin", "sinh", "sqrt", "sum", "tan", "tanh", "tensors", "trunc", "truncdiv", "truncmod", "var",
]  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Extern:
    """An imperative loop program that computes tensors: `body` reads `inputs` through `parameters` and writes `results`."""

    inputs: tuple[Tensor, ...]
    parameters: tuple[Buffer, ...]  # one per input
    results: tuple[Buffer, ...]  # one per output
    body: Stmt


Operand: TypeAlias = "Tensor | ExprLike"


def _infix(op: str) -> tuple[Callable[[Tensor, Operand], Tensor], Callable[[Tensor, Operand], Tensor]]:
    """The method of the left operand, and that of the right one."""
    return lambda left, right: _by_elements(op, left, right), lambda right, left: _by_elements(op, left, right)


def _prefix(op: str) -> Callable[[Tensor], Tensor]:
    return lambda self: _by_elements(op, self)


class Tensor:
    """A value of TE: `name`, `shape` (ints or symbolic `Expr`), `dtype`, and how its elements are computed.

    `A + B`, `-A`, `A < 0`, `np.exp(A)` compute element by element, shapes broadcast as NumPy's; `A @ B` is the matrix product.
    """

    __slots__ = ("__weakref__", "axes", "body", "dtype", "extern", "index", "name", "shape")

    def __init__(
        self, name: str, shape: Sequence[Dim], dtype: Any, axes: tuple[Expr, ...] = (), body: Expr | None = None,
        extern: Extern | None = None, index: int = 0,
    ) -> None:  # fmt: skip
        if (dtype := dtype_name(dtype)) not in BITS:
            raise IRError(f"unknown dtype `{dtype}` of tensor `{name}`", hint=f"one of {', '.join(BITS)}")
        self.name, self.shape, self.dtype = name, tuple(as_dim(d) for d in shape), dtype
        self.axes, self.body, self.extern, self.index = axes, body, extern, index

    __add__, __radd__ = _infix("add")
    __sub__, __rsub__ = _infix("sub")
    __mul__, __rmul__ = _infix("mul")
    __truediv__, __rtruediv__ = _infix("div")
    __floordiv__, __rfloordiv__ = _infix("floordiv")
    __mod__, __rmod__ = _infix("mod")
    __pow__, __rpow__ = _infix("pow")
    __and__, __rand__ = _infix("and")
    __or__, __ror__ = _infix("or")
    __xor__, __rxor__ = _infix("xor")
    __lt__, __gt__ = _infix("lt")
    __le__, __ge__ = _infix("le")
    __neg__, __abs__, __invert__ = _prefix("neg"), _prefix("abs"), _prefix("not")

    def __matmul__(self, other: Tensor) -> Tensor:
        return matmul(self, other)

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        """NumPy's functions of tensors are tensors."""
        if ufunc.__name__ == "matmul" and len(operands) == 2 and isinstance(operands[0], Tensor) and isinstance(operands[1], Tensor):
            return matmul(*operands)
        return _by_elements(numpy_operator(ufunc, method, options), *operands)

    def __iter__(self) -> Iterator[Any]:
        raise IRError(
            f"`{self!r}` was used as a sequence", why="it is a formula, not an array", hint="te.compute(shape, lambda i: A[i] ...)"
        )

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


def placeholder(shape: Dim | Sequence[Dim], dtype: Any = "float32", name: str = "placeholder") -> Tensor:
    """An input. `dtype` is a name, or a dtype of NumPy; a single extent is the shape of a vector."""
    return Tensor(name, (shape,) if isinstance(shape, int | Expr) else shape, dtype)


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


def call(kernel: Kernel, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The contents of the arrays that a kernel writes, after a call with `tensors` as its buffers, as new tensors.

    `tensors` has one tensor for each buffer of the kernel, of its dtype and shape. In this way a `@tcomp.program` is differentiated:
    `te.vjp(te.call(heat.kernel(n=100), A), A)`. Raises `IRError` where the tensors do not match the buffers.
    """
    if len(tensors) != len(kernel.buffers):
        raise IRError(f"`{kernel.name}` takes {len(kernel.buffers)} arrays, got {len(tensors)}", hint=", ".join(map(repr, kernel.buffers)))
    for b, t in zip(kernel.buffers, tensors, strict=True):
        if b.dtype != t.dtype or not same_shape(b.shape, t.shape):
            raise IRError(f"the tensor `{t!r}` is not like the buffer `{b!r}` of `{kernel.name}`", hint="same dtype and shape")

    def program(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        new = dict(zip(kernel.buffers, inputs, strict=True)) | dict(zip(kernel.outputs, outputs, strict=True))
        copies = [_copied(new[b], i) for b, i in zip(kernel.buffers, inputs, strict=True) if b in kernel.outputs]
        return block(*copies, redirect(kernel.body, lambda b, at: (new[b], at) if b in new else None))

    return externs([(b.shape, b.dtype) for b in kernel.outputs], tensors, program, kernel.name)


def _copied(target: Buffer, source: Buffer) -> Stmt:
    return over(target.shape, lambda at: store(target, at, source[at]), "c{}".format)


def is_placeholder(t: Tensor) -> bool:
    """Whether a tensor is an input: neither a compute nor a result of an extern."""
    return t.body is None and t.extern is None


def tensors(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Every tensor that the outputs depend on, once, producers before consumers."""
    return E.postorder([*outputs], lambda t: t.inputs)


class Reduction(Protocol):
    """A reduction of `body` over one axis or several."""

    def __call__(self, body: Expr, axis: Expr | Sequence[Expr] | None = None) -> Expr: ...


def comm_reducer(combine: Callable[[Expr, Expr], Expr], identity: Callable[[str], ExprLike], name: str = "reduce") -> Reduction:
    """A user-defined reduction: `combine(lhs, rhs)` is associative, `identity(dtype)` its neutral element. Returns `f(body, axis)`."""

    def reducer(dtype: str) -> Reducer:
        lhs, rhs = E.var("lhs", dtype=dtype), E.var("rhs", dtype=dtype)
        return Reducer(name, lhs, rhs, combine(lhs, rhs), as_expr(identity(dtype), dtype))

    return _reduction(name, reducer)


def _reduction(name: str, reducer: Callable[[str], Reducer] | None = None) -> Reduction:
    def reduction(body: Expr, axis: Expr | Sequence[Expr] | None = None) -> Expr:
        if not isinstance(body, Expr):
            hint = f"index the tensor: te.{name}(A[i, k], axis=k)" if isinstance(body, Tensor) else f"te.{name}(A[i, k], axis=k)"
            raise IRError(f"te.{name} of a {type(body).__name__}", why="it reduces an expression", hint=hint)
        if axis is None:
            hint = f'k = te.reduce_axis(n, name="k"), then te.{name}(..., axis=k)'
            raise IRError(f"te.{name} without an axis", where=str(body), why="it reduces over the axes that it is given", hint=hint)
        chosen = standard_reducers(body.dtype)[name] if reducer is None else reducer(body.dtype)
        return reduce(chosen, body, (axis,) if isinstance(axis, Expr) else tuple(axis))

    reduction.__name__, reduction.__doc__ = name, f"The `{name}` of `body` over one axis or several."
    return reduction


sum, prod, max, min, all, any = map(_reduction, ("sum", "prod", "max", "min", "all", "any"))


V = TypeVar("V", Expr, Tensor)


class Function(Protocol):
    """A function of an expression, or of each element of a tensor."""

    __name__: str

    def __call__(self, x: V) -> V: ...


class Function2(Protocol):
    """A function of two expressions, or of the elements of tensors, broadcast."""

    @overload
    def __call__(self, a: ExprLike, b: ExprLike) -> Expr: ...
    @overload
    def __call__(self, a: Tensor, b: Tensor | ExprLike) -> Tensor: ...
    @overload
    def __call__(self, a: ExprLike, b: Tensor) -> Tensor: ...


def _function(op: str) -> Function:
    def apply(x: Any) -> Any:
        return E.unary(op, x) if isinstance(x, Expr) else _by_elements(op, x)

    apply.__name__, apply.__doc__ = op, f"Elementwise `{op}` of an expression or a tensor; keeps the dtype (predicates give bool)."
    return apply


def _function2(op: str, what: str) -> Function2:
    def apply(a: Any, b: Any) -> Any:
        return _by_elements(op, a, b) if isinstance(a, Tensor) or isinstance(b, Tensor) else E.binary(op, a, b)

    apply.__doc__ = f"{what} Of expressions, or of the elements of tensors, broadcast."
    return apply


def _by_elements(op: str, *operands: Operand) -> Tensor:
    """An operator on the elements of broadcast tensors, and expressions or numbers that are the same for all elements."""
    for x in operands:
        if not isinstance(x, Tensor | Expr | int | float) and not (hasattr(x, "item") and getattr(x, "ndim", 0) == 0):
            hint = "pass an array as an input: te.placeholder(shape, dtype)"
            raise IRError(f"`{op}` of a tensor and a {type(x).__name__}", where=", ".join(map(repr, operands))[:200], hint=hint)

    def element(*elements: Expr) -> Expr:
        known = iter(elements)
        return E.operation(op, *(next(known) if isinstance(x, Tensor) else x.item() if hasattr(x, "item") else x for x in operands))

    return elementwise(op, element, *(x for x in operands if isinstance(x, Tensor)))


abs, floor, ceil, round, trunc, isnan, isinf = map(_function, ("abs", "floor", "ceil", "round", "trunc", "isnan", "isinf"))
sqrt, exp, log, tanh, erf = map(_function, ("sqrt", "exp", "log", "tanh", "erf"))
sin, cos, tan, asin, acos, atan = map(_function, ("sin", "cos", "tan", "asin", "acos", "atan"))
sinh, cosh, asinh, acosh, atanh = map(_function, ("sinh", "cosh", "asinh", "acosh", "atanh"))
equal, not_equal = _function2("eq", "a == b."), _function2("ne", "a != b.")
minimum, maximum = _function2("min", "The smaller one; NaN if one is."), _function2("max", "The larger one; NaN if one is.")
all_of = E.all_of
var = E.dim
"""A symbolic size with an inclusive range, to be used in shapes."""
power = _function2("pow", "x ** y.")
truncdiv = _function2("truncdiv", "Integer division rounding towards zero.")
truncmod = _function2("truncmod", "Remainder with the sign of the dividend.")


def sigmoid(x: V) -> V:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + exp(-x))


def broadcast_read(tensor: Tensor, indices: Sequence[ExprLike]) -> Expr:
    """The element of `tensor` at `indices` of a shape that it broadcasts to (aligned at the last axis)."""
    own = indices[len(indices) - tensor.ndim :]
    return tensor[tuple(0 if d == 1 else i for i, d in zip(own, tensor.shape, strict=True))]


def elementwise(name: str, function: Callable[..., Expr], *tensors: Tensor) -> Tensor:
    """`function` of the elements of broadcast tensors; 16-bit floats are computed in float32 and rounded once."""
    half = next((t.dtype for t in tensors if t.dtype in HALF), None)

    def element(*i: Expr) -> Expr:
        result = as_expr(function(*(widened(broadcast_read(t, i)) for t in tensors)))
        return cast(result, half) if half is not None and result.dtype == "float32" else result

    return compute(broadcast_shape(*(t.shape for t in tensors)), element, name)


def rounded(x: Tensor, dtype: str) -> Tensor:
    """The tensor in another type, usually that of an operator's input; itself where it has this type."""
    return x if x.dtype == dtype else compute(x.shape, lambda *i: cast(x[i], dtype), f"{x.name}.round")


def matmul(a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False, dtype: str | None = None) -> Tensor:
    """Matrix product of the last two axes; the axes before them broadcast.

    [..., m, k] x [..., k, n] -> [..., m, n]; a vector is a row on the left ([k]) and a column on the right, and its axis is
    missing in the result. `transpose_a` ([..., k, m]) and `transpose_b` ([..., n, k]) need matrices. 16-bit floats are
    accumulated in float32; 8-bit integers, which may differ in sign, in int32, which is the type of the result. `dtype` asks for another;
    integers that it holds more of are summed in it.
    """
    if a.ndim == 0 or b.ndim == 0:
        raise IRError("a matrix product of a scalar", hint="use a product by elements")
    row, column = a.ndim == 1, b.ndim == 1
    if (transpose_a and row) or (transpose_b and column):
        raise IRError("a vector cannot be transposed in a matrix product")
    inner_a = a.shape[-2] if transpose_a else a.shape[-1]
    inner_b = b.shape[-1] if transpose_b or column else b.shape[-2]
    require_same(inner_a, inner_b, f"contraction of {a!r} with {b!r}")
    batch = broadcast_shape(a.shape[:-2], b.shape[:-2])
    rows = () if row else (a.shape[-1] if transpose_a else a.shape[-2],)
    columns = () if column else (b.shape[-2] if transpose_b else b.shape[-1],)
    k = reduce_axis(inner_a, "k")

    def operand(x: Tensor, outer: Sequence[Expr], inner: Sequence[Expr]) -> Expr:
        at = [0 if d == 1 else i for d, i in zip(x.shape[-3::-1], reversed(outer), strict=False)]
        return x[(*reversed(at), *inner)]

    def element(*index: Expr) -> Expr:
        outer, i, j = index[: len(batch)], index[len(batch) : len(batch) + len(rows)], index[len(batch) + len(rows) :]
        left, right = operand(a, outer, (k, *i) if transpose_a else (*i, k)), operand(b, outer, (*j, k) if transpose_b else (k, *j))
        return sum(term(left, right, dtype), k)

    return rounded(compute((*batch, *rows, *columns), element, "matmul"), dtype or product_dtype(a.dtype))


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
