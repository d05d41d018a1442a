"""What layers of language models have in common: weights by name, products with them, norms, activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tcomp.frontends.language_models.stored import StoredBlocks
from tcomp.ir.expr import Dim, as_expr
from tcomp.ir.graph import GraphBuilder, Operator, Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import elementwise as ew
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import GATHER, RESHAPE, SLICE
from tcomp.ops.quantization import BLOCK_PRODUCT
from tcomp.ops.reduction import LAYER_NORM, RMS_NORM

# (name as in Hugging Face's files, shape) -> float32 or 16-bit floats; of matrices of products also blocks
Weights = Callable[[str, tuple[int, ...]], np.ndarray | StoredBlocks]


@dataclass
class Layers:
    """A graph in the making, of weights that are asked for by name and shape, one after the other."""

    weights: Weights
    epsilon: float
    g: GraphBuilder = field(default_factory=GraphBuilder, kw_only=True)

    def add(self, op: Operator, inputs: list[Value | None], name: str = "", **attrs: Any) -> Value:
        """The first result of one more operator."""
        return self.g.add(op, inputs, attrs, name)[0]

    def array(self, name: str, *shape: int) -> np.ndarray:
        """Weights in float32, or in 16-bit floats."""
        found = self.weights(name, shape)
        assert isinstance(found, np.ndarray), name
        return found

    def floats(self, name: str, *shape: int, offset: float = 0.0) -> Value:
        """Weights in float32, and `offset`."""
        found = self.array(name, *shape).astype(np.float32) + np.float32(offset)
        return self.g.constant(np.ascontiguousarray(found), name)

    def linear(self, x: Value, name: str, columns: int, bias: bool = False, result: str = "") -> Value:
        """x [..., in] times weights [columns, in], and a bias; the name of that is `result`, or that of the weights."""
        product = name if bias else result or name
        found = self.weights(f"{name}.weight", (columns, int(x.shape[-1])))
        if isinstance(found, StoredBlocks):
            y = self.block_product(x, found, name, product)
        else:
            matrix = self.g.constant(np.ascontiguousarray(found.astype(np.float32)), f"{name}.weight")
            y = self.add(MATMUL, [x, matrix], product, transpose_a=False, transpose_b=True)
        return self.add(ew.ADD, [y, self.floats(f"{name}.bias", columns)], result or f"{name}.bias") if bias else y

    def block_product(self, x: Value, found: StoredBlocks, name: str, result: str, choice: Value | None = None) -> Value:
        """x [..., in] times a matrix in few bits, or those of the experts chosen."""
        parts = {"weight": found.numbers, "scales": found.scales, "zeros": found.zeros}
        stored = [self.g.constant(np.ascontiguousarray(a), f"{name}.{part}") for part, a in parts.items()]
        how = {"bits": found.bits, "block": found.block, "rounded": 16}
        return self.add(BLOCK_PRODUCT, [x, *stored, choice], result, **how)

    def rms_norm(self, x: Value, name: str, offset: float = 0.0) -> Value:
        """x [..., size] over its root mean square, times weights and `offset`."""
        scale = self.floats(f"{name}.weight", int(x.shape[-1]), offset=offset)
        return self.add(RMS_NORM, [x, scale], name, axis=len(x.shape) - 1, epsilon=self.epsilon)

    def layer_norm(self, x: Value, name: str) -> Value:
        """x [..., size] normalised, with scales and biases."""
        size = int(x.shape[-1])
        scale, bias = self.floats(f"{name}.weight", size), self.floats(f"{name}.bias", size)
        return self.add(LAYER_NORM, [x, scale, bias], name, axis=len(x.shape) - 1, epsilon=self.epsilon)

    def activated(self, x: Value, activation: str) -> Value:
        """One of ACTIVATIONS of x."""
        match activation:
            case "silu":
                return self.add(ew.SWISH, [x], alpha=1.0)
            case "relu":
                return self.add(ew.RELU, [x])
            case _:
                return self.add(ew.GELU, [x], approximate="none" if activation == "gelu" else "tanh")

    def rows(self, table: np.ndarray, ids: Value, name: str) -> Value:
        """The vectors [..., size] of tokens [...], float32, of a table [tokens, size], which is kept as it is."""
        x = self.add(GATHER, [self.g.constant(table, name), ids], "embedding", axis=0)
        return x if x.dtype == "float32" else self.add(ew.CAST, [x], dtype="float32")

    def part(self, x: Value, first: Dim, count: Dim, axis: int = -1, name: str = "") -> Value:
        """So much of x from `first` on along an axis."""
        own = [n == axis % len(x.shape) for n in range(len(x.shape))]
        shape = tuple(count if here else d for here, d in zip(own, x.shape, strict=True))
        return self.add(SLICE, [x], name, starts=tuple(first if here else 0 for here in own), steps=(1,) * len(own), shape=shape)

    def reshaped(self, x: Value, *shape: Dim, name: str = "") -> Value:
        """x in another shape."""
        return self.add(RESHAPE, [x], name, shape=shape)

    def last(self, x: Value) -> Value:
        """The last row of x [tokens, size], as [1, size]."""
        return self.part(x, as_dim(as_expr(x.shape[0]) - 1), 1, 0, "last")

    def by_table(self, y: Value, name: str, tokens: int, result: str = "logits") -> Value:
        """Logits [..., tokens] of y [..., size], by the table [tokens, size] of their vectors."""
        return self.add(MATMUL, [y, self.floats(name, tokens, int(y.shape[-1]))], result, transpose_a=False, transpose_b=True)
