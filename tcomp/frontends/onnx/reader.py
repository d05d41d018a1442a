"""Reading ONNX files: protobuf messages to arrays, dtypes and attribute values. Trusts nothing in the file."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, ModelProto, SparseTensorProto, TensorProto, TypeProto

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import wire
from tcomp.ir.dtypes import to_numpy

DTYPES: Mapping[int, str] = {
    TensorProto.FLOAT: "float32", TensorProto.DOUBLE: "float64", TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16",
    TensorProto.INT8: "int8", TensorProto.INT16: "int16", TensorProto.INT32: "int32", TensorProto.INT64: "int64",
    TensorProto.UINT8: "uint8", TensorProto.UINT16: "uint16", TensorProto.UINT32: "uint32", TensorProto.UINT64: "uint64",
    TensorProto.BOOL: "bool",
}  # fmt: skip
ELEM_TYPES: Mapping[str, int] = {dtype: number for number, dtype in DTYPES.items()}
_TYPED_FIELDS = {"float32": "float_data", "float64": "double_data", "int64": "int64_data", "uint64": "uint64_data", "uint32": "uint64_data"}
_MAX_DENSE = 1 << 32  # bytes of a sparse tensor written out


def read_model(source: str | os.PathLike[str] | bytes | ModelProto) -> tuple[ModelProto, TensorReader]:
    """The model, and what reads its tensors. Large initializers are views of the encoded model.

    Raises `ImportModelError` for what is no ONNX model.
    """
    folder: Path | None = None
    weights: dict[str, memoryview] = {}
    if isinstance(source, ModelProto):
        model, where = source, "the given ModelProto"
    else:
        if isinstance(source, bytes):
            content: bytes | mmap.mmap = source
            where = "the given bytes"
        else:
            path = Path(source)
            where, folder = str(path), path.parent
            try:
                content = _mapped(path)
            except OSError as error:
                raise ImportModelError("the model cannot be read", where=where, why=error.strerror or str(error)) from error
        try:
            slim, weights = wire.split(content)
            model = ModelProto.FromString(slim)
        except DecodeError as error:
            raise ImportModelError("this is no ONNX model", where=where, why="it is not a protobuf message of that type") from error
    if not model.HasField("graph") or not model.opset_import:
        raise ImportModelError("this is no ONNX model", where=where, why="it has no graph, or does not say which opset it uses")
    return model, TensorReader(folder, weights)


def _mapped(path: Path) -> bytes | mmap.mmap:
    """The content of a file, mapped: weights are most of a model, and need no copy."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_size:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return file.read()


def dtype_name(elem_type: int, where: str) -> str:
    """The dtype of an ONNX element type. Raises `UnsupportedError` for strings, complex and sub-byte or 8-bit float types."""
    if elem_type in DTYPES:
        return DTYPES[elem_type]
    names = TensorProto.DataType
    if elem_type not in names.values() or elem_type == TensorProto.UNDEFINED:
        raise ImportModelError(f"unknown element type {elem_type}", where=where)
    raise UnsupportedError(
        f"element type `{names.Name(elem_type)}` is not supported", where=where, hint=f"supported are {', '.join(ELEM_TYPES)}"
    )


def tensor_type(proto: TypeProto, where: str) -> tuple[str, list[int | str | None] | None]:
    """(dtype, dims) of a tensor type; a dim is an int, a name, or None where it is open; dims is None if the rank is open."""
    kind = proto.WhichOneof("value")
    if kind is None:
        raise ImportModelError("a value has no type", where=where)
    if kind != "tensor_type":
        raise UnsupportedError(f"values of type `{kind.removesuffix('_type')}` are not supported", where=where)
    dtype = dtype_name(proto.tensor_type.elem_type, where)
    if not proto.tensor_type.HasField("shape"):
        return dtype, None
    dims: list[int | str | None] = []
    for d in proto.tensor_type.shape.dim:
        if d.WhichOneof("value") == "dim_value":
            dims.append(d.dim_value if d.dim_value >= 0 else None)
        else:
            dims.append(d.dim_param if isinstance(d.dim_param, str) and d.dim_param not in ("", "?") else None)
    return dtype, dims


class TensorReader:
    """Arrays of tensor messages. External data is mapped, not read, and must lie inside `folder`.

    `weights` holds the data of initializers of the main graph that was cut out of their messages.
    """

    def __init__(self, folder: Path | None, weights: Mapping[str, memoryview]) -> None:
        self.folder, self.weights = folder, weights
        self._files: dict[Path, np.ndarray] = {}

    def initializer(self, tensor: TensorProto) -> np.ndarray:
        """The array of an initializer of the main graph, see `array`."""
        return self.array(tensor, raw=self.weights.get(tensor.name))

    def array(self, tensor: TensorProto, where: str = "", raw: memoryview | bytes | None = None) -> np.ndarray:
        """The array of a tensor message, read-only where that saves a copy. Raises `ImportModelError` if sizes do not match."""
        where = where or f"tensor `{tensor.name}`"
        dtype = to_numpy(dtype_name(tensor.data_type, where))
        shape = tuple(tensor.dims)
        if any(d < 0 for d in shape):
            raise ImportModelError(f"a tensor has the shape {list(shape)}", where=where)
        count = prod(shape)
        if raw is None and tensor.data_location == TensorProto.EXTERNAL:
            return self._external(tensor, count * dtype.itemsize, where).view(dtype).reshape(shape)
        if raw is None and tensor.HasField("raw_data"):
            raw = tensor.raw_data
        if raw is not None:
            _check_size(len(raw), count * dtype.itemsize, shape, dtype.name, where)
            return np.frombuffer(raw, dtype).reshape(shape)
        values = getattr(tensor, _TYPED_FIELDS.get(dtype.name, "int32_data"))
        _check_size(len(values), count, shape, dtype.name, where, "elements")
        if dtype.name in ("float16", "bfloat16"):
            return np.array(values, np.uint16).view(dtype).reshape(shape)
        try:
            return np.array(values, np.int32 if dtype.name == "bool" else dtype).astype(dtype, copy=False).reshape(shape)
        except OverflowError as error:
            raise ImportModelError("a tensor's data does not fit its type", where=where, why=str(error)) from error

    def _external(self, tensor: TensorProto, size: int, where: str) -> np.ndarray:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if self.folder is None:
            raise ImportModelError(
                "the model's weights are in another file, but the model was given without its folder",
                where=where,
                hint="pass the path of the model, or a ModelProto that onnx.load has read completely",
            )
        root = self.folder.resolve()
        path = (root / location).resolve()
        if not location or not path.is_relative_to(root):
            raise ImportModelError(f"external data `{location}` lies outside the model's folder", where=where)
        if path not in self._files:
            if not path.is_file():
                raise ImportModelError(f"external data file `{location}` does not exist", where=where)
            empty = path.stat().st_size == 0
            self._files[path] = np.zeros(0, np.uint8) if empty else np.memmap(path, np.uint8, "r")
        content = self._files[path]
        try:
            offset, length = int(entries.get("offset", "0")), int(entries.get("length", str(size)))
        except ValueError as error:
            raise ImportModelError("external data has a malformed offset or length", where=where) from error
        if length != size or offset < 0 or offset + size > content.size:
            raise ImportModelError(
                f"external data does not fit the tensor: {length} bytes at {offset} of `{location}` ({content.size} bytes)",
                where=where,
                why=f"the tensor takes {size} bytes",
            )
        return content[offset : offset + size]

    def dense(self, sparse: SparseTensorProto, where: str) -> np.ndarray:
        """A sparse tensor written out."""
        values, indices = self.array(sparse.values, where), self.array(sparse.indices, where)
        shape = tuple(sparse.dims)
        size = prod(shape)
        if any(d <= 0 for d in shape) or size * values.itemsize > _MAX_DENSE or values.ndim != 1:
            raise ImportModelError(f"a sparse tensor has the shape {list(shape)}", where=where)
        if indices.ndim == 2 and indices.shape == (values.size, len(shape)):
            indices = indices @ np.array([prod(shape[a + 1 :]) for a in range(len(shape))], np.int64)
        if indices.shape != values.shape or (indices.size and not (0 <= indices.min() and indices.max() < size)):
            raise ImportModelError("a sparse tensor has indices that do not fit it", where=where)
        result = np.zeros(size, values.dtype)
        result[indices] = values
        return result.reshape(shape)

    def attribute(self, attr: AttributeProto, where: str) -> Any:
        """int, float, str, list of these, `np.ndarray` (tensor), `GraphProto` or `TypeProto`."""
        kind = attr.type
        match kind:
            case AttributeProto.INT:
                return attr.i
            case AttributeProto.FLOAT:
                return attr.f
            case AttributeProto.STRING:
                return attr.s.decode(errors="replace")
            case AttributeProto.INTS:
                return list(attr.ints)
            case AttributeProto.FLOATS:
                return list(attr.floats)
            case AttributeProto.STRINGS:
                return [s.decode(errors="replace") for s in attr.strings]
            case AttributeProto.TENSOR:
                return self.array(attr.t, where)
            case AttributeProto.SPARSE_TENSOR:
                return self.dense(attr.sparse_tensor, where)
            case AttributeProto.GRAPH:
                return attr.g
            case AttributeProto.TYPE_PROTO:
                return attr.tp
        raise UnsupportedError(f"attribute `{attr.name}` has a type that is not supported ({kind})", where=where)


def _check_size(given: int, wanted: int, shape: tuple[int, ...], dtype: str, where: str, unit: str = "bytes") -> None:
    if given != wanted:
        raise ImportModelError(
            "a tensor's data does not fit its type", where=where, why=f"{dtype}{list(shape)} takes {wanted} {unit}, the file has {given}"
        )


def newest_opset(domain: str) -> int:
    """The newest opset of a standard domain that the installed `onnx` describes; 0 for other domains."""
    return int(onnx.defs.onnx_opset_version()) if domain in ("", "ai.onnx") else 0
