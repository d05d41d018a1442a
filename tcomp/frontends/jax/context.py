"""What the importers of primitives work with: the graph in the making, the equation at hand, and what its arrays are in the graph.

A complex array is two arrays in the graph, of its real and its imaginary parts; an array of random keys is one for each word of a key.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import floordiv, mod
from typing import Any, Self, TypeAlias

import jax
import numpy as np
from jax._src import source_info_util  # where an equation comes from; there is no public name for it

from tcomp.errors import UnsupportedError
from tcomp.frontends.context import GraphContext
from tcomp.ir.broadcasting import HALF
from tcomp.ir.dtypes import BITS, NARROW_INTEGERS, to_numpy
from tcomp.ir.expr import Dim, Expr, as_expr, dim, maximum, minimum
from tcomp.ir.graph import GraphBuilder, Value
from tcomp.ir.simplify import as_dim


@dataclass(frozen=True)
class Parts:
    """A complex array, or one of random keys: the arrays of what its elements consist of, all of one shape and type. `dtype` is JAX's."""

    values: tuple[Value, ...]
    dtype: Any

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The shape of each of the arrays."""
        return self.values[0].shape


Operand: TypeAlias = "Value | Parts"
Handler: TypeAlias = Callable[..., Any]  # (context, *operands, **parameters of the primitive) -> operand, or a tuple of them
Table: TypeAlias = "dict[str, Handler]"  # by the name of the primitive, which is what all versions of JAX agree about


_OPERATIONS: dict[str, Callable[..., Expr]] = {"floordiv": floordiv, "mod": mod, "max": maximum, "min": minimum}  # of sizes, by JAX's names


def is_key(dtype: Any) -> bool:
    """Whether it is a type of random keys."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def is_complex(dtype: Any) -> bool:
    """Whether it is a type of complex numbers."""
    return not is_key(dtype) and np.dtype(dtype).kind == "c"


def is_split(dtype: Any) -> bool:
    """Whether an array of the type is several arrays in the graph."""
    return is_key(dtype) or is_complex(dtype)


def part_types(dtype: Any) -> list[str]:
    """The element types of the arrays that an array of JAX is in the graph. Raises `UnsupportedError` for one that tcomp does not have."""
    if is_key(dtype):
        return ["uint32"] * int(np.prod(dtype._impl.key_shape))
    if is_complex(dtype):
        return [np.zeros((), dtype).real.dtype.name] * 2
    if (name := np.dtype(dtype).name) not in BITS:
        raise UnsupportedError(f"arrays of {name} are not supported")
    return [name]


def leaves(operands: Iterable[Operand]) -> list[Value]:
    """The values of operands, one after the other."""
    return [v for x in operands for v in (x.values if isinstance(x, Parts) else (x,))]


def rebuilt(avals: Iterable[Any], values: Iterator[Value]) -> list[Operand]:
    """Operands of these types from their values."""
    found: list[Operand] = []
    for aval in avals:
        own = [next(values) for _ in part_types(aval.dtype)]
        found.append(Parts(tuple(own), aval.dtype) if is_split(aval.dtype) else own[0])
    return found


def dim_of(size: Any) -> Dim:
    """A symbolic dimension of JAX, which is at least 1."""

    def factor(f: Any) -> Expr:
        if f.var is not None:
            return dim(f.var, 1)
        if f.operation not in _OPERATIONS:
            raise UnsupportedError(f"a size is {size}, which tcomp has no formula for")
        return _OPERATIONS[f.operation](*(as_expr(dim_of(x)) for x in f.operands))

    def term(factors: Any, count: int) -> Expr:
        return prod((factor(f) for f, exponent in factors for _ in range(exponent)), start=as_expr(count))

    if not jax.export.is_symbolic_dim(size):
        return int(size)
    return as_dim(sum((term(t._factors, int(count)) for t, count in size._sorted_terms), start=as_expr(0)))


@dataclass
class Context(GraphContext):
    """The equation at hand (`eqn`), and the graph to which its importer adds. `part`: the number of the part that is imported."""

    eqn: Any = None
    part: int = 0
    callers: tuple[Any, ...] = ()  # the equations whose jaxprs are inlined here, innermost first
    conditional: bool = False  # whether it is part of a branch
    uses: tuple[int, ...] = ()  # how often each operand of the equation is used in its jaxpr
    products: dict[Value, tuple[Value, Value, str, str, str]] = field(default_factory=dict)  # (operands, letters of the Einstein sum)
    symbolic: dict[Expr, Any] = field(default_factory=dict)  # sizes as JAX has them
    short: dict[Value, Value] = field(default_factory=dict)  # values that begin with axes of extent 1, and the same without them

    @abstractmethod
    def evaluate(self, jaxpr: Any, operands: Sequence[Operand]) -> list[Operand]:
        """See `Importer`, which is the context of all handlers."""

    def inside(self, builder: GraphBuilder | None = None) -> Self:
        """The context of a body."""
        return replace(self, builder=builder or GraphBuilder("body"), products={}, short={})

    @property
    def name(self) -> str:
        """The name of the primitive, which its results get."""
        return str(self.eqn.primitive.name)

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The shape of the first result."""
        return self.dims(self.eqn.outvars[0].aval.shape)

    @property
    def dtype(self) -> str:
        """The element type of the first result, or of a part of it."""
        return part_types(self.eqn.outvars[0].aval.dtype)[0]

    @property
    def where(self) -> str:
        """The line of the program that the equation comes from, as far as JAX tells."""
        found = (source_info_util.summarize(eqn.source_info) for eqn in (self.eqn, *self.callers))
        return next((text for text in found if text), "")

    def unsupported(self, why: str) -> UnsupportedError:
        """The error to raise for what cannot be compiled."""
        return UnsupportedError(f"JAX's primitive `{self.name}` cannot be compiled as it is used here", where=self.where, why=why)

    def dims(self, shape: Iterable[Any]) -> tuple[Dim, ...]:
        """Sizes: ints, or those of `jax.export.symbolic_shape`. Raises `UnsupportedError` for a formula that tcomp has no operators for."""
        found = []
        for d in shape:
            size = d if isinstance(d, Expr) else dim_of(d)
            if isinstance(size, Expr) and size is not d:
                self.symbolic[size] = d
            found.append(size)
        return tuple(found)

    def aligned(self, *operands: Value) -> list[Value]:
        """Operands of an elementwise operator: those that only lack axes in front of others are taken without these, as NumPy broadcasts,
        so that what computes the others may be one kernel with the operator. Integers of 4 bits and fewer are taken as int8."""
        rank = max(len(x.shape) for x in operands)
        whole = any(len(x.shape) == rank and x not in self.short for x in operands)
        shortest = (self.short.get(x, x) if whole else x for x in operands)
        return [self.cast(x, "int8") if x.dtype in NARROW_INTEGERS else x for x in shortest]

    def reshape(self, x: Value, shape: Sequence[Dim]) -> Value:
        """The elements in another shape."""
        sizes = self.dims(shape)
        found = super().reshape(x, sizes)
        if found is not x and x.shape and sizes == (1,) * (len(sizes) - len(x.shape)) + x.shape:
            self.short[found] = x
        return found

    def inline(self, function: Callable[..., Any], *operands: Operand) -> Any:
        """What a function of JAX computes of the operands: its result, or a tuple of them. Key arrays are arrays of words there."""
        shapes = [[self.symbolic.get(d, d) if isinstance(d, Expr) else d for d in x.shape] for x in operands]
        dtypes = [x.dtype if isinstance(x, Parts) else to_numpy(x.dtype) for x in operands]
        avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*avals)
        found = self.evaluate(closed, operands)
        return tuple(found) if isinstance(shape, tuple | list) else found[0]


def decomposed(function: Callable[..., Any]) -> Handler:
    """A handler that is a function of JAX on the operands, in float32 for those of 16 bits. Parameters are passed on."""

    def handle(ctx: Context, *operands: Operand, **params: Any) -> Any:
        half = next((x.dtype for x in operands if x.dtype in HALF), None)
        found = ctx.inline(lambda *xs: function(*xs, **params), *map(ctx.wide, operands))
        return ctx.cast(found, half) if half and isinstance(found, Value) and found.dtype == "float32" else found

    return handle
