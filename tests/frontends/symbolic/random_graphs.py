"""Random ONNX graphs with symbolic inputs, of operators that are valid at three given sizes of each dim.

Hidden sizes stand behind the names of dims: two axes that have to be equal usually have different names, as exporters that know no better
write them, and nothing but the operators says that they are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import onnx
from onnx import TensorProto, helper

HIDDEN = {"a": (4, 6, 10), "b": (3, 5, 7), "c": (8, 4, 12), "d": (2, 1, 3)}  # the sizes of three runs
RUNS = 3
MAX_ELEMENTS = 20_000

Shape = tuple[tuple[int, ...], ...]  # for each axis, its extents in the three runs


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: Shape

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass
class Graph:
    """A graph that grows by random operators."""

    random: Random
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: dict[str, list[int | str]] = field(default_factory=dict)
    pool: list[Tensor] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def constant(self, array: object, dtype: str = "int64") -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array, dtype)
        return name

    def weights(self, *shape: int) -> str:
        return self.constant(np.random.default_rng(len(self.constants)).standard_normal(shape) * 0.5, "float32")

    def value(self, op: str, *inputs: str, **attrs: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attrs))
        self.used.update(inputs)
        return name

    def add(self, shape: Shape, op: str, *inputs: str, **attrs: object) -> None:
        self.pool.append(Tensor(self.value(op, *inputs, **attrs), shape))

    def pick(self, suits: Callable[[Tensor], bool] = lambda t: True) -> Tensor | None:
        """A tensor, a recent one more often."""
        found = [t for t in self.pool if suits(t)]
        return self.random.choice(found[-4:] + found) if found else None

    def input(self) -> None:
        axes, declared, name = [], list[int | str](), f"x{len(self.inputs)}"
        for axis in range(self.random.choice([2, 3, 3, 4])):
            if self.random.random() < 0.35:
                size = self.random.choice([1, 4, 6])
                axes.append((size,) * RUNS)
                declared.append(size)
            else:
                hidden = self.random.choice(list(HIDDEN))
                axes.append(HIDDEN[hidden])
                declared.append(hidden if self.random.random() < 0.3 else f"{name}_{axis}_{hidden}")
        self.inputs[name] = declared
        self.pool.append(Tensor(name, tuple(axes)))


def fixed(axis: tuple[int, ...]) -> int | None:
    return axis[0] if len(set(axis)) == 1 else None


def each(function: Callable[..., int], *axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(function(*at) for at in zip(*axes, strict=True))


def unary(g: Graph, x: Tensor) -> None:
    g.add(x.shape, g.random.choice(["Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Identity"]), x.name)


def binary(g: Graph, x: Tensor) -> None:
    """Of equal sizes, or broadcast along axes of 1, or a constant."""

    def fits(t: Tensor) -> bool:
        pairs = zip(t.shape[::-1], x.shape[::-1], strict=False)
        return t is not x and t.rank <= x.rank and all(a == b or fixed(a) == 1 for a, b in pairs)

    op = g.random.choice(["Add", "Mul", "Sub", "Max"])
    if (y := g.pick(fits)) is not None:
        return g.add(x.shape, op, *g.random.sample([x.name, y.name], 2))
    g.add(x.shape, op, x.name, g.weights(*([fixed(x.shape[-1]) or 1] if x.rank else [])))


def where(g: Graph, x: Tensor) -> None:
    if (y := g.pick(lambda t: t.shape == x.shape and t is not x)) is not None:
        g.add(x.shape, "Where", g.value("Less", x.name, y.name), x.name, y.name)


def matmul(g: Graph, x: Tensor) -> None:
    y = g.pick(lambda t: t.rank == 2 and t.shape[0] == x.shape[-1]) if x.rank >= 2 else None
    if y is not None:
        g.add((*x.shape[:-1], y.shape[1]), "MatMul", x.name, y.name)
    elif x.rank >= 2 and (k := fixed(x.shape[-1])):
        g.add((*x.shape[:-1], (4,) * RUNS), "MatMul", x.name, g.weights(k, 4))


def square(g: Graph, x: Tensor) -> None:
    """x times itself transposed, as attention has it, and its softmax."""
    if x.rank >= 2:
        order = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
        scores = g.value("MatMul", x.name, g.value("Transpose", x.name, perm=order))
        g.add((*x.shape[:-1], x.shape[-2]), "Softmax", scores, axis=-1)


def concat(g: Graph, x: Tensor) -> None:
    if x.rank:
        axis = g.random.randrange(x.rank)
        y = g.pick(lambda t: t.rank == x.rank and all(a == b for n, (a, b) in enumerate(zip(t.shape, x.shape, strict=True)) if n != axis))
        assert y is not None
        shape = (*x.shape[:axis], each(lambda p, q: p + q, x.shape[axis], y.shape[axis]), *x.shape[axis + 1 :])
        g.add(shape, "Concat", x.name, y.name, axis=axis)


def transpose(g: Graph, x: Tensor) -> None:
    perm = g.random.sample(range(x.rank), x.rank)
    g.add(tuple(x.shape[n] for n in perm), "Transpose", x.name, perm=perm)


def flatten(g: Graph, x: Tensor) -> None:
    """Two neighbours joined: by -1, or by a product of sizes."""
    if x.rank < 2:
        return
    at = g.random.randrange(x.rank - 1)
    shape = (*x.shape[:at], each(lambda p, q: p * q, *x.shape[at : at + 2]), *x.shape[at + 2 :])
    if at == 0:
        target = g.constant([-1, *(fixed(a) or 0 for a in x.shape[2:])]) if all(fixed(a) for a in x.shape[2:]) else None
    else:
        target = g.constant([*[0] * at, -1]) if at == x.rank - 2 else None
    if target is None:
        sizes = g.value("Shape", x.name)
        pair = g.value("ReduceProd", g.value("Slice", sizes, g.constant([at]), g.constant([at + 2])), keepdims=1)
        parts = [g.value("Slice", sizes, g.constant([0]), g.constant([at])), pair]
        target = g.value("Concat", *parts, g.value("Slice", sizes, g.constant([at + 2]), g.constant([x.rank])), axis=0)
    g.add(shape, "Reshape", x.name, target)


def split_axis(g: Graph, x: Tensor) -> None:
    """[..., n] as [..., n / 2, 2] where n is even in every run."""
    if x.rank and all(n % 2 == 0 for n in x.shape[-1]):
        shape = (*x.shape[:-1], each(lambda n: n // 2, x.shape[-1]), (2,) * RUNS)
        g.add(shape, "Reshape", x.name, g.constant([*[0] * (x.rank - 1), -1, 2]))


def halves(g: Graph, x: Tensor) -> None:
    axes = [n for n, a in enumerate(x.shape) if all(size % 2 == 0 for size in a)]
    if axes:
        axis = g.random.choice(axes)
        names = [f"v{len(g.nodes)}_{n}" for n in range(2)]
        g.nodes.append(helper.make_node("Split", [x.name], names, axis=axis, num_outputs=2))
        g.used.add(x.name)
        shape = (*x.shape[:axis], each(lambda n: n // 2, x.shape[axis]), *x.shape[axis + 1 :])
        g.pool += [Tensor(name, shape) for name in names]


def reduction(g: Graph, x: Tensor) -> None:
    if x.rank:
        axis, keep = g.random.randrange(x.rank), g.random.random() < 0.5
        shape = (*x.shape[:axis], *([(1,) * RUNS] if keep else []), *x.shape[axis + 1 :])
        op = g.random.choice(["ReduceMean", "ReduceSum", "ReduceMax"])
        g.add(shape, op, x.name, g.constant([axis]), keepdims=int(keep))


def softmax(g: Graph, x: Tensor) -> None:
    if x.rank:
        g.add(x.shape, "Softmax", x.name, axis=g.random.randrange(x.rank))


def norm(g: Graph, x: Tensor) -> None:
    if x.rank and (k := fixed(x.shape[-1])):
        g.add(x.shape, "LayerNormalization", x.name, g.weights(k), g.weights(k), axis=-1)


def slice_(g: Graph, x: Tensor) -> None:
    """A constant window, or the first half by a computed size."""
    if not x.rank:
        return
    axis = g.random.randrange(x.rank)
    if g.random.random() < 0.5:
        half = g.value("Div", g.value("Shape", x.name, start=axis, end=axis + 1), g.constant([2]))
        start, end, extent = g.constant([0]), half, each(lambda n: n // 2, x.shape[axis])
    else:
        low, high, step = g.random.choice([(1, 1 << 40, 1), (0, -1, 1), (0, 1 << 40, 2), (-2, 1 << 40, 1), (0, 3, 1)])
        extent = each(lambda n: len(range(n)[low:high:step]), x.shape[axis])
        if min(extent) > 0:
            shape = (*x.shape[:axis], extent, *x.shape[axis + 1 :])
            parameters = [g.constant([v]) for v in (low, high, axis, step)]
            return g.add(shape, "Slice", x.name, *parameters)
        return
    if min(extent) > 0:
        g.add((*x.shape[:axis], extent, *x.shape[axis + 1 :]), "Slice", x.name, start, end, g.constant([axis]))


def pad(g: Graph, x: Tensor) -> None:
    if x.rank:
        axis = g.random.randrange(x.rank)
        pads = [int(n in (axis, axis + x.rank)) for n in range(2 * x.rank)]
        shape = (*x.shape[:axis], each(lambda n: n + 2, x.shape[axis]), *x.shape[axis + 1 :])
        mode = g.random.choice(["constant", "edge"])
        g.add(shape, "Pad", x.name, g.constant(pads), mode=mode)


def expand(g: Graph, x: Tensor) -> None:
    y = g.pick(lambda t: t.rank >= x.rank and all(a == b or fixed(a) == 1 for a, b in zip(x.shape[::-1], t.shape[::-1], strict=False)))
    if y is not None:
        g.add(y.shape, "Expand", x.name, g.value("Shape", y.name))


def tile(g: Graph, x: Tensor) -> None:
    if x.rank:
        g.add((*x.shape[:-1], each(lambda n: n * 2, x.shape[-1])), "Tile", x.name, g.constant([1] * (x.rank - 1) + [2]))


def gather(g: Graph, x: Tensor) -> None:
    if x.rank:
        axis = g.random.randrange(x.rank)
        if g.random.random() < 0.5:
            g.add((*x.shape[:axis], *x.shape[axis + 1 :]), "Gather", x.name, g.constant(0), axis=axis)
        else:
            g.add((*x.shape[:axis], (2,) * RUNS, *x.shape[axis + 1 :]), "Gather", x.name, g.constant([0, -1]), axis=axis)


def unsqueeze(g: Graph, x: Tensor) -> None:
    axis = g.random.randrange(x.rank + 1)
    if x.rank < 4:
        g.add((*x.shape[:axis], (1,) * RUNS, *x.shape[axis:]), "Unsqueeze", x.name, g.constant([axis]))


def pool(g: Graph, x: Tensor) -> None:
    if x.rank >= 3 and min(n for a in x.shape[2:] for n in a) >= 2:
        spatial = x.rank - 2
        shape = (*x.shape[:2], *(each(lambda n: n // 2, a) for a in x.shape[2:]))
        g.add(shape, g.random.choice(["MaxPool", "AveragePool"]), x.name, kernel_shape=[2] * spatial, strides=[2] * spatial)


def convolution(g: Graph, x: Tensor) -> None:
    if x.rank in (3, 4) and (channels := fixed(x.shape[1])):
        stride, spatial = g.random.choice([1, 2]), x.rank - 2
        shape = (x.shape[0], (4,) * RUNS, *(each(lambda n: (n - 1) // stride + 1, a) for a in x.shape[2:]))
        attrs = {"pads": [1] * 2 * spatial, "strides": [stride] * spatial}
        g.add(shape, "Conv", x.name, g.weights(4, channels, *[3] * spatial), **attrs)


def upsample(g: Graph, x: Tensor) -> None:
    if x.rank in (3, 4):
        scales = g.constant([1, 1, *[2] * (x.rank - 2)], "float32")
        attrs = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        g.add((*x.shape[:2], *(each(lambda n: n * 2, a) for a in x.shape[2:])), "Resize", x.name, "", scales, **attrs)


def positions(g: Graph, x: Tensor) -> None:
    """A table of 32 rows, cut to the length of an axis and added."""
    if x.rank and max(x.shape[-1]) <= 32:
        cut = g.value("Slice", g.weights(32), g.constant([0]), g.value("Shape", x.name, start=x.rank - 1, end=x.rank))
        g.add(x.shape, "Add", x.name, cut)


def numbers(g: Graph, x: Tensor) -> None:
    """0, 1, ..., n - 1 for the last axis, as floats, added."""
    if x.rank:
        length = g.value("Squeeze", g.value("Shape", x.name, start=x.rank - 1, end=x.rank))
        count = g.value("Range", g.constant(0), length, g.constant(1))
        g.add(x.shape, "Add", x.name, g.value("Cast", count, to=TensorProto.FLOAT))


def cumulative(g: Graph, x: Tensor) -> None:
    if x.rank:
        g.add(x.shape, "CumSum", x.name, g.constant(g.random.randrange(x.rank)))


def zeros(g: Graph, x: Tensor) -> None:
    g.add(x.shape, "Add", x.name, g.value("ConstantOfShape", g.value("Shape", x.name)))


OPERATORS = (
    unary, binary, binary, where, matmul, matmul, square, concat, concat, transpose, flatten, split_axis, halves, reduction, softmax,
    norm, slice_, pad, expand, tile, gather, unsqueeze, pool, convolution, upsample, positions, numbers, cumulative, zeros,
)  # fmt: skip


def random_model(seed: int, length: int = 12) -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    """A model, and inputs for it of three sizes."""
    g = Graph(Random(seed))
    for _ in range(g.random.choice([2, 3])):
        g.input()
    while len(g.nodes) < length:
        x = g.pick(lambda t: max(np.prod([a[run] for a in t.shape], dtype=int) for run in range(RUNS)) < MAX_ELEMENTS)
        assert x is not None
        g.random.choice(OPERATORS)(g, x)
    results = [t for t in g.pool if t.name not in g.used and t.name not in g.inputs]
    inputs = {t.name: t for t in g.pool if t.name in g.inputs}
    graph = helper.make_graph(
        g.nodes, f"random{seed}",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, declared) for name, declared in g.inputs.items()],
        [helper.make_tensor_value_info(t.name, TensorProto.FLOAT, [None] * t.rank) for t in results],
        [onnx.numpy_helper.from_array(a, n) for n, a in g.constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    arrays = np.random.default_rng(seed)
    return model, [
        {name: arrays.standard_normal([a[run] for a in t.shape]).astype(np.float32) for name, t in inputs.items()} for run in range(RUNS)
    ]
