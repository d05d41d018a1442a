"""A random graph under construction: every node is computed by onnx's reference implementation as soon as it is added."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

OPSET = 21
LARGEST = 2000  # elements of a value
HIGHEST = 2000.0  # magnitude of an element: sums of products of such numbers are still exact in float32
FLOATS, SIGNED, UNSIGNED = ("float32", "float64", "float16"), ("int64", "int32", "int8"), ("uint8",)
INTEGERS = SIGNED + UNSIGNED
NUMBERS = FLOATS + INTEGERS


class Unfit(Exception):
    """A node cannot be added: nothing that it could take is there, or its result is too large."""


class Value(NamedTuple):
    """`exact`: any right implementation computes the same bits, so that what depends on single bits may follow."""

    name: str
    array: np.ndarray
    exact: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> str:
        return self.array.dtype.name


class Graph:
    """Nodes, and their results for one set of inputs."""

    def __init__(self, seed: str) -> None:
        self.rng = Random(seed)
        self.values: list[Value] = []
        self.nodes: list[NodeProto] = []
        self.inputs: list[Value] = []
        self.constants: list[Value] = []
        self.tuples: set[str] = set()  # values whose last size, on which the rank of a result depends, has no name
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def shape(self, rank: int | None = None, low: int = 1, high: int = 5) -> tuple[int, ...]:
        """A random shape; rarely with a size of 0 or one that fills vectors."""
        rank = self.rng.choice((0, 1, 2, 2, 3, 3, 4)) if rank is None else rank
        odd = {0: 0, 1: 17, 2: 33}
        return tuple(odd.get(self.rng.randrange(90 if low else 60), self.rng.randint(low, high)) or low for _ in range(rank))

    def numbers(self, dtype: str, shape: Sequence[int], low: int = -4, high: int = 4) -> np.ndarray:
        """Whole numbers and, of floats, quarters."""
        if dtype == "bool":
            return self.array([self.rng.random() < 0.5 for _ in range(int(np.prod(shape)))], dtype, shape)
        low = 0 if dtype.startswith("uint") else low
        if dtype in FLOATS:
            return self.array([self.rng.randint(4 * low, 4 * high) / 4 for _ in range(int(np.prod(shape)))], dtype, shape)
        return self.array([self.rng.randint(low, high) for _ in range(int(np.prod(shape)))], dtype, shape)

    @staticmethod
    def array(values: Sequence[Any], dtype: str, shape: Sequence[int]) -> np.ndarray:
        return np.array(values, dtype).reshape(tuple(shape))

    def constant(self, array: Any, dtype: str = "int64") -> Value:
        """An initializer."""
        value = Value(self.fresh(), np.array(array, dtype))
        self.constants.append(value)
        return value

    def new(self, dtype: str, shape: Sequence[int], low: int = -4, high: int = 4) -> Value:
        """An input, or an initializer."""
        if self.chance(0.4):
            return self.constant(self.numbers(dtype, shape, low, high), dtype)
        value = Value(self.fresh(), self.numbers(dtype, shape, low, high))
        self.inputs.append(value)
        self.values.append(value)
        return value

    def dtype(self, kinds: Sequence[str]) -> str:
        """One of the types, the first most often."""
        return self.rng.choice((*kinds, kinds[0], kinds[0]))

    def some(self, kinds: Sequence[str], rank: int | None = None, exact: bool = False, least: int = 0) -> Value:
        """A value of one of these types, of this rank or one of at least `least`: one that is there, or a new one."""
        fits = [
            v
            for v in self.values
            if v.dtype in kinds and (len(v.shape) == rank if rank is not None else len(v.shape) >= least) and (v.exact or not exact)
        ]
        if fits and self.chance(0.8):
            return self.rng.choice(fits[-6:])
        return self.new(self.dtype(kinds), self.shape(rank if rank is not None else self.rng.randint(least, max(3, least))))

    def like(self, v: Value, low: int = -4, high: int = 4) -> Value:
        """A value that broadcasts with another, of the same type."""
        fits = [w for w in self.values if w.dtype == v.dtype and broadcast(v.shape, w.shape)]
        if fits and self.chance(0.5) and low == -4:
            return self.rng.choice(fits)
        shape = tuple(1 if self.chance(0.3) else d for d in v.shape)[self.rng.randrange(len(v.shape) + 1) if self.chance(0.3) else 0 :]
        return self.new(v.dtype, shape, low, high)

    def axis(self, v: Value) -> int:
        """An axis, from either end."""
        if not v.shape:
            raise Unfit
        return self.rng.randrange(-len(v.shape), len(v.shape))

    def add(self, op: str, inputs: Sequence[Value | None], outputs: int = 1, exact: bool | None = None, **attrs: Any) -> list[Value]:
        """Add a node; its results. By default exact where all of its inputs are."""
        names = [self.fresh() for _ in range(outputs)]
        node = helper.make_node(op, ["" if v is None else v.name for v in inputs], names, **attrs)
        given = list({v.name: v for v in inputs if v is not None}.values())
        try:
            arrays = evaluated(model([node], given, names), {v.name: v.array for v in given})
        except Exception as error:
            raise Unfit(str(error)) from error
        exact = all(v.exact for v in given) if exact is None else exact and all(v.exact for v in given)
        made = []
        for name, array in zip(names, map(np.asarray, arrays), strict=True):
            if array.size > LARGEST or (array.size and array.dtype.kind in "fiu" and not np.abs(array.astype(np.float64)).max() <= HIGHEST):
                raise Unfit
            made.append(Value(name, array, exact))
        self.nodes.append(node)
        self.values += made
        return made

    def model(self) -> ModelProto:
        """The graph as a model: its outputs are the values that nothing reads."""
        read = {name for node in self.nodes for name in node.input}
        names = [name for node in self.nodes for name in node.output if name not in read]
        used = [v for v in self.inputs if v.name in read]
        self.outputs = [v for v in self.values if v.name in names]
        return model(self.nodes, used, names, [v for v in self.constants if v.name in read], self.symbols(used))

    def symbols(self, inputs: Sequence[Value]) -> dict[str, list[int | str]]:
        """Names for some sizes of inputs: equal sizes may have one name, or each its own. Not for 1, which broadcasts, and 0: a name stands
        for sizes that agree."""
        if self.chance(0.6):
            return {}
        shared = self.chance(0.5)
        name = (lambda v, axis: f"n{v.shape[axis]}") if shared else (lambda v, axis: f"{v.name}_{axis}")
        return {
            v.name: [
                d if self.chance(0.5) or d < 2 or (v.name in self.tuples and axis == len(v.shape) - 1) else name(v, axis)
                for axis, d in enumerate(v.shape)
            ]
            for v in inputs
        }


def broadcast(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes broadcast."""
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


def evaluated(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of onnx's reference implementation."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found: list[np.ndarray] = ReferenceEvaluator(model).run(None, dict(feeds))
        return found


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[str],
    constants: Sequence[Value] = (),
    symbols: dict[str, list[int | str]] | None = None,
) -> ModelProto:
    """A model whose outputs have no declared types."""
    shapes = symbols or {}
    infos = [
        helper.make_tensor_value_info(v.name, helper.np_dtype_to_tensor_dtype(v.array.dtype), shapes.get(v.name, v.shape)) for v in inputs
    ]
    ends = [helper.make_empty_tensor_value_info(name) for name in outputs]
    made = helper.make_graph(list(nodes), "random", infos, ends, [numpy_helper.from_array(v.array, v.name) for v in constants])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
