"""What the importers of ATen operators work with: the graph in the making, and types as PyTorch has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add, floordiv, mod, mul
from typing import Any, TypeAlias

import numpy as np
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND, elementwise_dtypes
from torch.fx import Node as FxNode

from tcomp.errors import UnsupportedError
from tcomp.frontends.context import GraphContext
from tcomp.ir.dtypes import to_numpy
from tcomp.ir.expr import Dim, Expr, as_expr, dim, maximum, minimum
from tcomp.ir.graph import SIZE, Node, Value
from tcomp.ir.scalar_operators import OPERATORS
from tcomp.ir.shape_operands import derived
from tcomp.ir.simplify import as_dim
from tcomp.ops.counting import POSITIONS
from tcomp.ops.movement import CONCAT, DIMS, product
from tcomp.ops.reduction import REDUCE_MIN

Scalar: TypeAlias = "int | float | bool | Expr"
Operand: TypeAlias = "Value | Scalar"
Handler: TypeAlias = Callable[..., Any]  # (context, *arguments of the ATen operator) -> Value, or a tuple of them
Table: TypeAlias = "dict[Any, Handler]"  # by the operator, of all overloads; or by its name, where it exists only once PyTorch needs it

DTYPES = {
    torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64", torch.bool: "bool",
    torch.int8: "int8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64", torch.uint8: "uint8",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
FORMULAS: dict[str, Callable[..., Expr]] = {
    "Add": add, "Mul": mul, "FloorDiv": floordiv, "CleanDiv": floordiv, "Mod": mod, "PythonMod": mod, "Max": maximum, "Min": minimum,
}  # fmt: skip
"""Functions of sizes, by the names that they have in PyTorch."""
UNBOUNDED = 1 << 40  # sizes from which on PyTorch means no bound


def dtype_name(dtype: torch.dtype) -> str:
    """The name of an element type. Raises `UnsupportedError` for one that tcomp does not have."""
    if dtype not in DTYPES:
        raise UnsupportedError(f"tensors of {dtype} are not supported")
    return DTYPES[dtype]


def contiguous(tensor: torch.Tensor | int) -> torch.Tensor:
    """The tensor itself, if its elements lie in order, else a copy; a size as an int64."""
    if isinstance(tensor, int):
        return torch.tensor(tensor)
    return tensor if tensor.is_contiguous() and not tensor.is_neg() else tensor.resolve_neg().contiguous()


def array_of(tensor: torch.Tensor | int) -> np.ndarray:
    """The elements of a tensor where they lie, if they are contiguous, else a copy; a size as an int64."""
    tensor = contiguous(tensor).detach()
    return tensor.view(torch.int16).numpy().view(to_numpy("bfloat16")) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """An array as a tensor of the same memory."""
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype.name == "bfloat16" else torch.from_numpy(array)


class Dims:
    """Symbolic sizes of PyTorch, which are formulas of sympy, as those of tcomp. `ranges` of symbols come before those of the trace."""

    def __init__(self, ranges: Mapping[Any, Any] | None = None) -> None:
        self.symbols: dict[str, Expr] = {}
        self.given: dict[Expr, tuple[Any, Any]] = {}  # symbols as PyTorch has them, and where from
        self.ranges = ranges or {}

    def __call__(self, size: Any) -> Dim:
        """An int, or a `torch.SymInt`. Raises `UnsupportedError` for a formula that tcomp has no operators for."""
        return size if isinstance(size, int) else as_dim(self._formula(size.node.expr, size.node.shape_env))

    def _formula(self, e: Any, env: Any) -> Expr:
        if e.is_Integer:
            return as_expr(int(e))
        if e.is_Symbol:
            if str(e) not in self.symbols:
                self.symbols[str(e)] = dim(str(e), *self._range(e, env))
            found = self.symbols[str(e)]
            self.given[found] = e, env
            return found
        if type(e).__name__ not in FORMULAS:
            raise UnsupportedError(f"a size is {e}, which tcomp has no formula for")
        return reduce(FORMULAS[type(e).__name__], (self._formula(a, env) for a in e.args))

    def _range(self, symbol: Any, env: Any) -> tuple[int, int | None]:
        """The least and the largest value of a symbol; None: there is no largest one."""
        known = self.ranges.get(symbol) or env.var_to_range.get(symbol)
        low, high = (int(b) if b.is_Integer else None for b in (known.lower, known.upper)) if known else (None, None)
        least = 1 if symbol in self.ranges else 0  # without any limit, what is empty is not an input that there is code for
        return max(low or 0, least), None if high is None or high >= UNBOUNDED else high

    def give(self, size: Any, element: Expr) -> None:
        """Take the value of the symbol `size`, a `torch.SymInt`, from an element of an input: it is not an extent of any."""
        symbol = size.node.expr
        low, high = self._range(symbol, size.node.shape_env)
        self.symbols[str(symbol)] = as_expr(derived(str(symbol), element, low, high, "a size"))

    def symint(self, size: Dim) -> Any:
        """A size of tcomp's as PyTorch has it: the inverse of a call."""
        if not isinstance(size, Expr) or size.op == "const":
            return size.attr if isinstance(size, Expr) else size
        if size.op == "var":
            symbol, env = self.given[size]
            return env.create_symintnode(symbol, hint=None)
        return OPERATORS[size.op](*map(self.symint, size.args))


@dataclass
class Context(GraphContext):
    """The node at hand (`node`), the graph to which its importer adds, and what it has imported so far (`values`, by node). Random
    operators draw `streams` different sequences from the input `seed`, if there are any."""

    dims: Dims
    node: Any = None
    values: dict[FxNode, Any] = field(default_factory=dict)
    seed: Value | None = None
    streams: int = 0
    counted: set[Expr] = field(default_factory=set)  # sizes that a run counts
    required: list[Value] = field(default_factory=list)  # conditions, bool scalars: a run ends with an error where one is false
    flips: dict[Value, tuple[Value, tuple[int, ...]]] = field(default_factory=dict)  # (of what, along which axes)

    @property
    def name(self) -> str:
        """The name of the node, which its results get."""
        return str(self.node.name)

    @property
    def result(self) -> Any:
        """What PyTorch says of the (first) result."""
        example = self.node.meta["val"]
        return example[0] if isinstance(example, tuple | list) else example

    @property
    def dtype(self) -> str:
        """The element type of the (first) result."""
        return dtype_name(self.result.dtype)

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The shape of the (first) result."""
        return tuple(map(self.dims, self.result.shape))

    def unsupported(self, why: str) -> UnsupportedError:
        """The error to raise for what cannot be compiled."""
        return UnsupportedError(f"`{self.node.target}` cannot be compiled as it is used here", where=self.name, why=why)

    def key(self) -> Value:
        """The key (uint32 [2]) of one more random operator: the seed of a run, and a number of its own. Raises `UnsupportedError` for an
        operator with a generator of its own."""
        if self.node.kwargs.get("generator") is not None:
            raise self.unsupported("it has a generator of its own")
        if self.seed is None:
            self.seed = self.builder.input("seed", "uint32", (1,))
        self.streams += 1
        return self.add(CONCAT, self.seed, self.number([self.streams], "uint32"), axis=0)

    def require(self, condition: Value) -> None:
        """Have a run end with an error where any of the bools is false."""
        axes = tuple(range(len(condition.shape)))
        self.required.append(self.add(REDUCE_MIN, condition, axes=axes, keepdims=False) if axes else condition)

    def positions(self, x: Value, size: Any) -> tuple[Value, Dim]:
        """The row-major positions of elements that are not zero (more of them than there are), and their number, PyTorch's `size`."""
        if 0 in x.shape:
            raise self.unsupported("there are no elements")
        places, count = self.results(POSITIONS, x)
        number = self.dims(size)
        if isinstance(number, Expr) and number.op != "var":
            raise self.unsupported(f"the number of elements is {number}")
        if isinstance(number, Expr) and number not in self.counted:
            self.counted.add(number)
            self.builder.append(Node(SIZE, (count,), (), {"dim": number, "bound": product(x.shape)}, self.name))
        return places, number

    def tensor(self, x: Operand, dtype: str) -> Value:
        """A tensor, or a number as one, of this element type."""
        if isinstance(x, Value):
            return self.cast(x, dtype)
        if isinstance(x, Expr):
            return self.cast(self.add(DIMS, dims=(x,), shape=(), dtype="int64"), dtype)
        return self.number(x, dtype)

    def promoted(self, *operands: Operand, kind: KIND = KIND.DEFAULT, count: int | None = None) -> list[Value]:
        """The operands in the element type that an elementwise operator on them computes with. `count`: of the arguments that decide."""
        given = [a.meta["val"] if isinstance(a, FxNode) else a for a in self.node.args[: len(operands) if count is None else count]]
        given = [1 if isinstance(a, torch.SymInt) else a for a in given]
        dtype, _ = elementwise_dtypes(*given, type_promotion_kind=kind)
        name = dtype_name(dtype)
        if isinstance(result := self.node.meta["val"], torch.Tensor) and result.dtype in (torch.float16, torch.bfloat16):
            name = dtype_name(result.dtype)  # operators compute with wider numbers inside anyway
        return [self.tensor(x, name) for x in operands]

    def flip(self, x: Value, axes: tuple[int, ...]) -> Value:
        """The elements in reverse order along axes; what is flipped back is what it was."""
        source, along = self.flips.get(x, (x, ()))
        if along == axes:
            return source
        found = self.reversed(x, axes)
        self.flips[found] = x, axes
        return found

    def axis(self, x: Value, n: int) -> int:
        """An axis, counted from the front."""
        return n + len(x.shape) if n < 0 else n

    def axes(self, x: Value, given: int | Sequence[int] | None) -> tuple[int, ...]:
        """Axes, counted from the front; None or none given: all."""
        several = [given] if isinstance(given, int) else given
        if not x.shape:  # a scalar may be said to have an axis
            return ()
        return tuple(self.axis(x, n) for n in several) if several else tuple(range(len(x.shape)))


def widened(handler: Handler) -> Handler:
    """A handler that gets 16-bit operands as float32 numbers, since each of the operators that it is made of would round."""
    return lambda ctx, *args, **others: handler(ctx, *map(ctx.wide, args), **{k: ctx.wide(x) for k, x in others.items()})
