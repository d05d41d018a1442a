"""The weights section of an artifact: the constants of a graph in their physical layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tcomp.ir.graph import KERNEL, Constant, Graph, Value
from tcomp.ir.layout import Layout
from tcomp.runtime.artifact import plan_weights


@dataclass(frozen=True, slots=True)
class Weight:
    """A constant in its physical layout, made when asked for: weights are large, and one at a time is enough."""

    array: Constant
    layout: Layout

    @property
    def nbytes(self) -> int:
        """Its size in its layout."""
        return math.prod(int(d) for d in self.layout.shape(self.array.shape)) * self.array.dtype.itemsize

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return self.layout.to_physical(np.asarray(self.array))


@dataclass(frozen=True, slots=True)
class Weights:
    """Constants, in the order of the weights section, and where each value finds its own."""

    named: tuple[tuple[str, Weight], ...]
    offset: Mapping[Value, int]


def collect_weights(graph: Graph) -> Weights:
    """All constants of a graph and its control-flow bodies."""
    values: dict[Value, Constant] = {}

    def visit(g: Graph) -> None:
        values.update((v, a) for v, a in g.constants.items())
        for node in g.nodes:
            if node.op is not KERNEL:
                for body in node.bodies:
                    visit(body)

    visit(graph)
    weights = [Weight(array, v.layout or Layout.identity(len(array.shape))) for v, array in values.items()]
    offsets = plan_weights([w.nbytes for w in weights])
    named = tuple((f"{number}:{v.name}", w) for number, (v, w) in enumerate(zip(values, weights, strict=True)))
    return Weights(named, dict(zip(values, offsets, strict=True)))
