"""Tensors of the Open Inference Protocol, version 2: names of element types, and arrays as bytes or as lists of numbers.

https://github.com/kserve/open-inference-protocol; bytes are little-endian and row-major. Elements of types that the protocol lacks (float8,
int4, ...) are UINT8 that hold the bits, one an element, as NumPy without ml_dtypes has them. Strings are BYTES: in bytes, each is its
length (four of them) and its UTF-8.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tcomp.errors import ArtifactError, InputError
from tcomp.runtime import TensorSpec, numpy_dtype
from tcomp.runtime.arrays import admit
from tcomp.runtime.host_steps.steps import STRING, strings
from tcomp.runtime.manifest import MAX_AXES
from tcomp.serve.refusals import as_refusal, bad_request

_NAMES = {  # in the order of Triton's enumeration
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8", "int16": "INT16",
    "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64", STRING: "BYTES", "bfloat16": "BF16",
}  # fmt: skip
TRITON_TYPES = ("TYPE_INVALID", *(f"TYPE_{'STRING' if name == 'BYTES' else name}" for name in _NAMES.values()))
"""The names that Triton's configuration of a model has for element types; their places are the numbers."""
_LENGTH = 4  # bytes that say how long a string is
MAX_EXTENT = 1 << 40  # of an axis: more than any memory has elements, and products of them are no trouble

assert sys.byteorder == "little", "tensors on the wire are little-endian, and are not swapped"


class WireType:
    """An input or output as the protocol has it.

    name, datatype: as clients see them; triton_type: the datatype as Triton's model configuration has it
    shape: extents, -1 where one is free
    dtype: of arrays that the model takes or makes
    """

    __slots__ = ("_admitted", "datatype", "dtype", "name", "shape", "spec", "triton_type")

    def __init__(self, spec: TensorSpec) -> None:
        """Raises ArtifactError for complex numbers, which the protocol lacks."""
        if spec.dtype.startswith("complex"):
            raise ArtifactError(f"{spec} cannot be served", why="the protocol has no complex numbers")
        self.spec, self.name = spec, spec.name
        self.dtype = np.dtype(object) if spec.dtype == STRING else numpy_dtype(spec.dtype)
        self.datatype = _NAMES.get(spec.dtype, "UINT8")
        self._admitted = spec if spec.dtype in _NAMES else replace(spec, dtype="uint8")  # as numbers are converted
        self.triton_type = TRITON_TYPES[1 + list(_NAMES.values()).index(self.datatype)]
        self.shape = [extent if isinstance(extent, int) else -1 for extent in spec.shape]

    def check_datatype(self, datatype: object) -> None:
        """Raises Refusal if a client says that the elements are of another type."""
        if datatype != self.datatype:
            raise bad_request(f"input {self.name!r} has the wrong datatype", why=f"expected {self.datatype}, got {str(datatype)[:40]}")

    def from_bytes(self, shape: Sequence[int], content: bytes | memoryview) -> npt.NDArray[Any]:
        """The array in some bytes, which it uses where they lie. Raises Refusal if there are too few or too many."""
        extents = check_shape(shape, self.name)
        if self.datatype == "BYTES":
            return self.from_numbers(extents, _split(bytes(content), self.name))
        wanted = prod(extents) * self.dtype.itemsize
        if len(content) != wanted:
            why = f"{self.datatype}{[*extents]} takes {wanted} bytes, and there are {len(content)}"
            raise bad_request(f"the data of input {self.name!r} does not fit its shape", why=why)
        array = np.frombuffer(content, self.dtype).reshape(extents)
        if self.datatype == "BOOL" and wanted and array.view(np.uint8).max() > 1:
            raise bad_request(f"input {self.name!r} has values that are not booleans", why="BOOL is a byte, 0 or 1")
        return array

    def from_numbers(self, shape: Sequence[int], numbers: object) -> npt.NDArray[Any]:
        """The array of a list of numbers (or strings), flat or nested. Raises Refusal for what is no such list, or does not fit."""
        extents = check_shape(shape, self.name)
        array = self.convert(numbers)
        if array.shape != extents and array.size != prod(extents):
            why = f"the shape {[*extents]} has {prod(extents)} elements, and there are {array.size}"
            raise bad_request(f"the data of input {self.name!r} does not fit its shape", why=why)
        return array.reshape(extents)

    def convert(self, numbers: object) -> npt.NDArray[Any]:
        """The array of nested lists of numbers or strings (or of a NumPy array of the wire's type). Raises Refusal."""
        if self.datatype == "BYTES":
            return self._strings(numbers)
        if isinstance(numbers, np.ndarray):
            return numbers.view(self.dtype) if numbers.dtype.itemsize == self.dtype.itemsize else numbers.astype(self.dtype)
        if not isinstance(numbers, list | int | float):
            raise bad_request(f"the data of input {self.name!r} is not a list of numbers", why=f"it is a {type(numbers).__name__}")
        try:
            return admit(numbers, self._admitted, numpy_dtype(self._admitted.dtype)).view(self.dtype)
        except InputError as problem:
            raise as_refusal(problem) from None

    def _strings(self, values: object) -> npt.NDArray[Any]:
        """The array of nested lists of strings, or of their UTF-8."""
        try:
            array = np.asarray(values, object)
            return strings([text.decode() if isinstance(text, bytes) else _checked(text) for text in array.flat], array.shape)
        except (ValueError, TypeError) as problem:  # lists of different lengths, no UTF-8; something else than strings
            raise bad_request(f"the data of input {self.name!r} are not strings", why=str(problem)[:80]) from None

    def to_bytes(self, array: npt.NDArray[Any]) -> bytes | memoryview:
        """The bytes of an output, where they lie if its elements do so in order."""
        if self.datatype == "BYTES":
            return b"".join(len(text).to_bytes(_LENGTH, "little") + text for text in (str(element).encode() for element in array.flat))
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    def to_numbers(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """An output as an array of a type that writers of JSON know, or of strings."""
        if self.datatype == "BF16":
            return array.astype(np.float32) if array.dtype != np.uint16 else (array.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(array if self.spec.dtype in _NAMES else array.view(np.uint8))


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"there is a {type(text).__name__}")
    return text


def _split(content: bytes, name: str) -> list[bytes]:
    """The UTF-8 of strings, each behind its length. Raises Refusal."""
    found, end = [], 0
    while end < len(content):
        begin = end + _LENGTH
        end = begin + int.from_bytes(content[end:begin], "little")
        if end > len(content):
            raise bad_request(f"the data of input {name!r} end within a string", why="each is its length, in four bytes, and its UTF-8")
        found.append(content[begin:end])
    return found


def check_shape(shape: object, name: str) -> tuple[int, ...]:
    """The extents that a client sends. Raises Refusal for what is not a list of sizes."""
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes) or len(shape) > MAX_AXES:
        raise bad_request(f"the shape of input {name!r} is not a list of sizes")
    for extent in shape:
        if type(extent) is not int or not 0 <= extent <= MAX_EXTENT:
            raise bad_request(f"the shape of input {name!r} is not a list of sizes", why=f"it is {str(list(shape))[:80]}")
    return tuple(shape)
