"""Host steps as data, as the manifest of an artifact has them."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tcomp.errors import ArtifactError
from tcomp.runtime.schema import Count

Array: TypeAlias = npt.NDArray[Any]

STRING = "string"  # the element type of arrays of str, which are NumPy's arrays of objects
ANY_SHAPE = "..."  # the only "extent" of a shape about which nothing is known
_NUMBERS = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """A computation: `operator` is one of `operators.OPERATORS`, `name` is for people, inputs ("": none) and outputs are names of values,
    `attributes` those of the operator."""

    operator: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SavedArray:
    """An array in JSON: of strings as they are (`strings`), of numbers in Base64 (`data`), little-endian."""

    dtype: str
    shape: tuple[Count, ...]
    strings: tuple[str, ...] = ()
    data: str = ""


def saved_array(array: Array) -> dict[str, Any]:
    """An array of strings (objects) or numbers as JSON."""
    if array.dtype == object:
        return {"dtype": STRING, "shape": list(array.shape), "strings": [*array.reshape(-1)]}
    little = array.astype(array.dtype.newbyteorder("<"))
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": base64.b64encode(little.tobytes()).decode()}


def restored_array(saved: SavedArray) -> Array:
    """What `saved_array` was given. Raises ArtifactError where parts do not fit together."""
    try:
        if saved.dtype == STRING:
            return strings(saved.strings, saved.shape)
        if saved.dtype not in _NUMBERS:
            raise ValueError(f"unknown element type {saved.dtype!r}")
        content = base64.b64decode(saved.data, validate=True)
        return np.frombuffer(content, np.dtype(saved.dtype).newbyteorder("<")).astype(saved.dtype).reshape(saved.shape)
    except (ValueError, binascii.Error) as problem:
        raise ArtifactError("a constant of the artifact's host steps is malformed", why=str(problem)) from None


def strings(values: Any, shape: tuple[int, ...]) -> Array:
    """An array of str. Raises ValueError where their number does not fit the shape."""
    listed = [*values]
    if prod(shape) != len(listed):
        raise ValueError(f"{len(listed)} strings for the shape {shape}")
    array = np.empty(len(listed), object)
    array[:] = listed
    return array.reshape(shape)
