"""Operators that move elements of any type, strings included: functions from arrays to arrays, by the newest of ONNX's definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tcomp.errors import InputError, OutOfRangeError
from tcomp.runtime.host_steps.steps import Array

MAX_ELEMENTS = 1 << 26  # of one result: an artifact that nobody trusts may ask for any number


def bounded(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape. Raises InputError if it has too many elements."""
    if prod(shape) > MAX_ELEMENTS:
        raise InputError(f"a host step makes more than {MAX_ELEMENTS} elements", why=f"its result has the shape {[*shape]}")
    return tuple(map(int, shape))


@dataclass(frozen=True)
class AxisAttributes:
    """`axis` counts from the end where it is negative."""

    axis: int


@dataclass(frozen=True)
class ReshapeAttributes:
    """`allow_zero`: a 0 in the shape is a 0, not the size of the input."""

    allow_zero: bool


def reshape(arguments: Sequence[Array], attributes: ReshapeAttributes) -> list[Array]:
    """Reshape."""
    x, shape = arguments
    sizes = [x.shape[n] if d == 0 and not attributes.allow_zero else int(d) for n, d in enumerate(shape)]
    return [x.reshape(sizes)]


def flatten(arguments: Sequence[Array], attributes: AxisAttributes) -> list[Array]:
    """Flatten to two axes."""
    x = arguments[0]
    axis = attributes.axis + x.ndim * (attributes.axis < 0)
    return [x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))]


@dataclass(frozen=True)
class TransposeAttributes:
    """`perm`: empty for the reversed order of axes."""

    perm: tuple[int, ...]


def concat(arguments: Sequence[Array], attributes: AxisAttributes) -> list[Array]:
    """Concat."""
    bounded([sum(a.size for a in arguments)])
    return [np.concatenate(arguments, attributes.axis)]


def gather(arguments: Sequence[Array], attributes: AxisAttributes) -> list[Array]:
    """Gather."""
    x, indices = arguments
    bounded([x.size // max(1, x.shape[attributes.axis]), indices.size])
    return [np.take(x, _in_range(indices, x.shape[attributes.axis]), attributes.axis)]


def gather_elements(arguments: Sequence[Array], attributes: AxisAttributes) -> list[Array]:
    """GatherElements."""
    x, indices = arguments
    if x.ndim != indices.ndim:
        raise InputError(f"GatherElements of {x.ndim} axes by indices of {indices.ndim}")
    axis = range(x.ndim)[attributes.axis]
    grid = [np.arange(n).reshape([-1 if a == b else 1 for b in range(x.ndim)]) for a, n in enumerate(indices.shape)]
    grid[axis] = _in_range(indices, x.shape[axis])
    return [x[tuple(grid)]]


def features(arguments: Sequence[Array], attributes: object) -> list[Array]:
    """ArrayFeatureExtractor: columns; those of a vector are a row."""
    x, indices = arguments
    x = x.reshape(1, -1) if x.ndim == 1 else x
    bounded([x.size // max(1, x.shape[-1]), indices.size])
    return [np.take(x, _in_range(indices.reshape(-1), x.shape[-1]), -1)]


def _in_range(indices: Array, size: int) -> Array:
    outside = (indices < -size) | (indices >= size)
    if outside.any():
        index = int(indices[outside].reshape(-1)[0])
        raise OutOfRangeError(f"an index is {index}, and there are {size} elements")
    return indices


def cut(arguments: Sequence[Array], attributes: object) -> list[Array]:
    """Slice: inputs are the array, starts, ends, and perhaps axes and steps."""
    x, starts, ends, *others = arguments
    axes = others[0] if others and others[0].size else np.arange(len(starts))
    steps = others[1] if len(others) > 1 else np.ones(len(starts), np.int64)
    parts = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axes.tolist(), steps.tolist(), strict=True):
        size = x.shape[axis]
        lo = max(start + size, 0 if step > 0 else -1) if start < 0 else start
        hi = max(end + size, -1 if step < 0 else 0) if end < 0 else end
        parts[axis] = slice(max(lo, 0), hi if hi >= 0 else None, step) if lo >= 0 else slice(0, 0)
    return [np.ascontiguousarray(x[tuple(parts)])]


@dataclass(frozen=True)
class SplitAttributes:
    """`parts`: how many there are, where no sizes are given."""

    axis: int
    parts: int


def split(arguments: Sequence[Array], attributes: SplitAttributes) -> list[Array]:
    """Split, into parts of the sizes of input 1, or as many as there are outputs."""
    x = arguments[0]
    size, count = x.shape[attributes.axis], attributes.parts
    sizes = arguments[1].tolist() if len(arguments) > 1 else [-(-size // count)] * (count - 1)
    if len(arguments) > 1 and (sum(sizes) != size or len(sizes) != count or min(sizes, default=0) < 0):
        raise InputError(f"Split of {size} elements into {count} parts of sizes {sizes}")
    ends = np.minimum(np.cumsum(sizes[: count - 1]).astype(int), size)
    return [np.ascontiguousarray(part) for part in np.split(x, ends, attributes.axis)]


def expand(arguments: Sequence[Array], attributes: object) -> list[Array]:
    """Expand."""
    x, shape = arguments
    return [np.broadcast_to(x, bounded(np.broadcast_shapes(x.shape, bounded(shape.tolist())))).copy()]


def tile(arguments: Sequence[Array], attributes: object) -> list[Array]:
    """Tile."""
    x, repeats = arguments
    bounded([n * int(r) for n, r in zip(x.shape, repeats, strict=True)])
    return [np.tile(x, repeats)]


def where(arguments: Sequence[Array], attributes: object) -> list[Array]:
    """Where."""
    bounded(np.broadcast_shapes(*(a.shape for a in arguments)))
    return [np.where(*arguments)]


def equal(arguments: Sequence[Array], attributes: object) -> list[Array]:
    """Equal."""
    a, b = arguments
    bounded(np.broadcast_shapes(a.shape, b.shape))
    return [np.asarray(np.equal(a, b)).astype(np.bool_)]


@dataclass(frozen=True)
class ShapeAttributes:
    """The axes from `start` to `end` (none: all that follow)."""

    start: int
    end: int | None


@dataclass(frozen=True)
class CompressAttributes:
    """`axis`: none for the flattened array."""

    axis: int | None
