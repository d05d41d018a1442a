"""`program`: a Python function on arrays that is a loop program as well.

@program(A="float64[n, n]")
def seidel_2d(steps, n, A):
    for t in range(steps):
        for i in range(1, n - 1):
            for j in range(1, n - 1):
                A[i, j] = (A[i, j - 1] + A[i, j] + A[i, j + 1] + A[i - 1, j] + A[i + 1, j]) / 5.0

seidel_2d(10, 100, a)                   # runs as plain Python on NumPy arrays: the reference
seidel_2d.kernel(n=100)                 # a `Kernel`: n is 100, `steps` a scalar that is passed in a call
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any, NoReturn, cast

from tcomp.errors import IRError, ProgramError
from tcomp.frontends.python.source import Source
from tcomp.frontends.python.translate import OPERATORS, translate
from tcomp.frontends.python.values import Value, number
from tcomp.ir import expr as E
from tcomp.ir.dtypes import BITS
from tcomp.ir.expr import Dim, Expr, as_expr
from tcomp.ir.loops import Buffer, Kernel
from tcomp.ir.polyhedral.in_range import safe_kernel
from tcomp.ir.simplify import as_dim, prove
from tcomp.ir.verify.loops import verify_kernel

Size = int | tuple[int | None, int | None]  # a value, or the lowest and highest one


def program(**arrays: str) -> Callable[[Callable[..., Any]], Program]:
    """Make a function on arrays a loop program. `arrays` gives the dtype and shape of each array parameter by name, as in
    `A="float64[n, 2 * m + 1]"`; the element of an array without dimensions, `float64[]`, is `A[()]`.

    All other parameters are integers, symbolic until `Program.kernel` or a default value fixes them, or, with the annotation `float` or
    `bool`, numbers that one of these must fix. A name in a shape that is not a parameter is a size too. The function may use

    - `for` over `range` (with a constant step), `while`, `if`, assignments to elements and to local variables, `a, b = b, a`;
    - arithmetic, comparisons, `and`/`or`/`not`, `x if c else y`, `min`, `max`, `abs`, functions of `math` and NumPy, conversions
      (`int(x)`, `np.float32(x)`), `A.shape[k]`, numbers of the module;
    - local arrays: `A = np.empty((n, n))`, `np.zeros`;
    - `tcomp.assume(n <= m)`, about sizes.

    Numbers have NumPy's types: next to an array element a Python number takes the element's dtype.
    An index that leaves its array, in some iteration or for some sizes or data, is refused or raises `IndexError` in the call.
    Raises `ProgramError` for a declaration that does not fit the function; `Program.kernel` raises it, with the line, for all else.
    """
    return lambda function: Program(function, arrays)


class Program:
    """A function that runs as plain Python when it is called, and makes kernels."""

    def __init__(self, function: Callable[..., Any], arrays: Mapping[str, str]) -> None:
        functools.update_wrapper(self, function)
        self.function, self.name = function, function.__name__
        self.parameters = inspect.signature(function).parameters
        if other := [p for p in self.parameters.values() if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]:
            raise ProgramError(f"`{self.name}` takes `{other[0]}`", hint="a loop program has plain parameters only")
        if unknown := [name for name in arrays if name not in self.parameters]:
            raise ProgramError(
                f"`{unknown[0]}` is not a parameter of `{self.name}`", hint=f"its parameters are {', '.join(self.parameters)}"
            )
        self.arrays = {name: _Declared(self.name, name, arrays[name]) for name in self.parameters if name in arrays}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function itself."""
        return self.function(*args, **kwargs)

    def kernel(self, **sizes: Size | float) -> Kernel:
        """The loop program. `sizes` fixes parameters (`n=100`) or bounds them (`n=(4, None)`: at least 4) by name; integers that are
        not given are scalars of the kernel. Its buffers are the array parameters in order; those that are written are its outputs.

        Raises `ProgramError`, with file, line and source text, for what cannot be translated.
        """
        source = Source(self.function)
        in_shapes = [n for d in self.arrays.values() for n in d.names]
        names = dict.fromkeys([p for p in self.parameters if p not in self.arrays] + in_shapes)
        if unknown := [name for name in sizes if name not in names]:
            hint = f"its sizes are {', '.join(names)}" if names else "it has none"
            raise ProgramError(f"`{unknown[0]}` is not a size of `{self.name}`", hint=hint)
        numbers = {name: self._number(name, sizes.get(name), 1 if name in in_shapes else None) for name in names}
        buffers = {name: Buffer(name, d.dtype, d.shape(numbers)) for name, d in self.arrays.items()}
        own = {n: v for n, v in numbers.items() if n in self.parameters}
        try:
            body, written, assumptions = translate(source, buffers, own, _outside(cast(FunctionType, self.function)))
        except RecursionError:
            source.refuse(source.function, "an expression is nested too deeply", hint="compute parts of it in variables of their own")
        scalars = tuple(v.expr for v in numbers.values() if v.expr.op == "var")
        outputs = tuple(b for b in buffers.values() if b in written)
        doc = inspect.getdoc(self.function)
        kernel = Kernel(self.name, tuple(buffers.values()), outputs, scalars, body, (doc.split("\n")[0],) if doc else (), (*assumptions,))
        try:
            verify_kernel(kernel)
            return safe_kernel(kernel)[0]
        except IRError as error:
            raise error.restated(ProgramError, where=f"{source.file}:{source.first}: {error.where}") from None

    def _number(self, name: str, given: Size | float | None, least: int | None) -> Value:
        """The value of a parameter, or the variable that stands for it."""
        parameter = self.parameters.get(name)
        if given is None and parameter is not None and parameter.default is not parameter.empty:
            given = parameter.default
        wanted = int if parameter is None else parameter.annotation
        wanted = {"float": float, "bool": bool}.get(wanted, wanted) if isinstance(wanted, str) else wanted
        if wanted in (float, bool):
            if given is None or isinstance(given, tuple):
                why = f"it is a {wanted.__name__}: only integers stay symbolic"
                raise ProgramError(f"`{name}` of `{self.name}` needs a value", why=why, hint=f"kernel({name}=...)")
            given = wanted(given)
        elif given is None or isinstance(given, tuple):
            lo, hi = given or (least, None)
            return Value(E.var(name, lo, hi), True)
        elif not isinstance(given, int) or isinstance(given, bool):
            hint = f"annotate it, `{name}: float`, where it is none"
            raise ProgramError(f"`{name}` of `{self.name}` is {given!r} instead of an integer", hint=hint)
        return cast(Value, number(given))

    def __repr__(self) -> str:
        return f"<program {self.name}({', '.join(str(self.arrays.get(p, p)) for p in self.parameters)})>"


class _Declared:
    """The declaration of an array parameter: `float64[n, m + 1]`."""

    def __init__(self, program: str, name: str, text: str) -> None:
        self.where, self.text, self.name = f'{program}: {name}="{text}"', text, name
        try:
            tree = ast.parse(text.removesuffix("[]"), mode="eval").body
        except (SyntaxError, TypeError, ValueError):
            self._refuse("the declaration of an array cannot be read")
        base, dims = (tree.value, tree.slice) if isinstance(tree, ast.Subscript) else (tree, ast.Tuple([]))
        if not isinstance(base, ast.Name) or base.id not in BITS:
            self._refuse(f"unknown dtype `{ast.unparse(base)}`", f"one of {', '.join(BITS)}")
        self.dtype: str = base.id
        self.dims = dims.elts if isinstance(dims, ast.Tuple) else [dims]
        self.names = [n.id for d in self.dims for n in ast.walk(d) if isinstance(n, ast.Name)]

    def shape(self, numbers: Mapping[str, Value]) -> tuple[Dim, ...]:
        found = tuple(as_dim(self._extent(d, numbers)) for d in self.dims)
        if negative := [d for d in found if isinstance(d, int) and d < 0]:
            self._refuse(f"an extent of `{self.name}` is {negative[0]}", "give larger sizes")
        return found

    def _extent(self, node: ast.AST, numbers: Mapping[str, Value]) -> Expr:
        match node:
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                return as_expr(value)
            case ast.Name(id=name) if numbers[name].expr.dtype == E.INDEX:
                return numbers[name].expr
            case ast.BinOp(left=left, op=op, right=right) if type(op) in (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv):
                a, b = self._extent(left, numbers), self._extent(right, numbers)
                if isinstance(op, ast.FloorDiv) and not prove(b > 0):
                    self._refuse(f"`{ast.unparse(node)}` divides by what may not be positive")
                return E.binary(OPERATORS[type(op)], a, b)
        self._refuse(f"`{ast.unparse(node)}` is not an extent")

    def _refuse(self, what: str, hint: str = "integers, names of sizes, and +, -, *, // of them: float64[n, 2 * m + 1]") -> NoReturn:
        raise ProgramError(what, where=self.where, hint=hint)

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def _outside(function: FunctionType) -> dict[str, Any]:
    """The names that a function sees from outside: of its module, and of the functions around it."""
    found = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        found.pop(name, None)
        with suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found
