"""Reading ONNX files: protobuf messages to arrays, dtypes and attribute values. Trusts nothing in the file."""

from __future__ import annotations

import mmap
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from math import lcm, prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, ModelProto, SparseTensorProto, TensorProto, TypeProto

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.ir.dtypes import NARROW, to_numpy

DTYPES: Mapping[int, str] = {
    TensorProto.FLOAT: "float32", TensorProto.DOUBLE: "float64", TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16",
    TensorProto.INT8: "int8", TensorProto.INT16: "int16", TensorProto.INT32: "int32", TensorProto.INT64: "int64",
    TensorProto.UINT8: "uint8", TensorProto.UINT16: "uint16", TensorProto.UINT32: "uint32", TensorProto.UINT64: "uint64",
    TensorProto.BOOL: "bool",
    **{TensorProto.DataType.Value(name): dtype for name, dtype in (
        ("FLOAT8E4M3FN", "float8_e4m3fn"), ("FLOAT8E4M3FNUZ", "float8_e4m3fnuz"), ("FLOAT8E5M2", "float8_e5m2"),
        ("FLOAT8E5M2FNUZ", "float8_e5m2fnuz"), ("FLOAT8E8M0", "float8_e8m0fnu"), ("FLOAT6E2M3", "float6_e2m3fn"),
        ("FLOAT6E3M2", "float6_e3m2fn"), ("FLOAT4E2M1", "float4_e2m1fn"), ("INT4", "int4"), ("UINT4", "uint4"), ("INT2", "int2"),
        ("UINT2", "uint2")) if name in dict(TensorProto.DataType.items())},  # older versions of `onnx` lack some
}  # fmt: skip
ELEM_TYPES: Mapping[str, int] = {dtype: number for number, dtype in DTYPES.items()}
_TYPED_FIELDS = {"float32": "float_data", "float64": "double_data", "int64": "int64_data", "uint64": "uint64_data", "uint32": "uint64_data"}
_ATTRIBUTE_TYPES = (
    AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.STRING, AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS,
    AttributeProto.TENSOR, AttributeProto.SPARSE_TENSOR, AttributeProto.GRAPH, AttributeProto.TYPE_PROTO,
)  # fmt: skip
_MAX_DENSE = 1 << 32  # bytes of a sparse tensor written out


def read_model(source: str | os.PathLike[str] | bytes | ModelProto) -> tuple[ModelProto, TensorReader]:
    """The model, and what reads its tensors. Large initializers are views of the encoded model. Raises `ImportModelError` for what is no
    ONNX model."""
    path = Path(source) if isinstance(source, str | os.PathLike) else None
    where = str(path or ("the given ModelProto" if isinstance(source, ModelProto) else "the given bytes"))
    weights: dict[str, memoryview] = {}
    try:
        if isinstance(source, ModelProto):
            model = source
        else:
            slim, weights = split_weights(source if isinstance(source, bytes) else _mapped(Path(source)))
            model = ModelProto.FromString(slim)
    except OSError as error:
        raise ImportModelError("the model cannot be read", where=where, why=error.strerror or str(error)) from error
    except DecodeError as error:
        raise ImportModelError("this is not an ONNX model", where=where, why="it is not a protobuf message of that type") from error
    if not model.HasField("graph") or not model.opset_import:
        raise ImportModelError("this is not an ONNX model", where=where, why="it has no graph, or does not say which opset it uses")
    if model.ir_version < 1:
        raise ImportModelError("the model has no version of the format (`ir_version`)", where=where)
    if model.ir_version > onnx.IR_VERSION:
        what, why = f"version {model.ir_version} of the format is newer than any known here", f"the newest one known is {onnx.IR_VERSION}"
        raise UnsupportedError(what, where=where, why=why, hint="update `onnx`")
    return model, TensorReader(path.parent if path else None, weights)


def _mapped(path: Path) -> bytes | mmap.mmap:
    """The content of a file, mapped: weights are most of a model, and need no copy."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_size:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return file.read()


def dtype_name(elem_type: int, where: str) -> str:
    """The dtype of an ONNX element type. Raises `UnsupportedError` for strings and complex numbers."""
    if elem_type in DTYPES:
        return DTYPES[elem_type]
    names = TensorProto.DataType
    if elem_type not in names.values() or elem_type == TensorProto.UNDEFINED:
        raise ImportModelError(f"unknown element type {elem_type}", where=where)
    hint = f"supported are {', '.join(ELEM_TYPES)}"
    raise UnsupportedError(f"element type `{names.Name(elem_type)}` is not supported", where=where, hint=hint)


def tensor_type(proto: TypeProto, where: str) -> tuple[str, list[int | str | None] | None]:
    """(dtype, dims) of a tensor type; a dim is an int, a name, or None where it is open (-1 as well); dims is None if the rank is open."""
    kind = proto.WhichOneof("value")
    if kind is None:
        raise ImportModelError("a value has no type", where=where)
    if kind != "tensor_type":
        raise UnsupportedError(f"values of type `{kind.removesuffix('_type')}` are not supported", where=where)
    dtype = dtype_name(proto.tensor_type.elem_type, where)
    if not proto.tensor_type.HasField("shape"):
        return dtype, None
    given = [d.dim_value if d.WhichOneof("value") == "dim_value" else d.dim_param for d in proto.tensor_type.shape.dim]
    if any(isinstance(d, int) and d < -1 for d in given):
        raise ImportModelError("a size is negative", where=where, why=f"the shape is declared as {given}")
    return dtype, [d if (isinstance(d, int) and d >= 0) or (isinstance(d, str) and d not in ("", "?")) else None for d in given]


class TensorReader:
    """Arrays of tensor messages. External data is mapped, not read, and must lie inside `folder`. `weights` holds the data of initializers
    of the main graph that was cut out of their messages."""

    def __init__(self, folder: Path | None, weights: Mapping[str, memoryview]) -> None:
        self.folder, self.weights = folder, weights
        self._files: dict[str, np.ndarray] = {}

    def array(self, tensor: TensorProto, where: str = "", raw: memoryview | bytes | None = None) -> np.ndarray:
        """The array of a tensor message, read-only where that saves a copy. Raises `ImportModelError` if sizes do not match."""
        where = where or f"tensor `{tensor.name}`"
        name, shape = dtype_name(tensor.data_type, where), tuple(tensor.dims)
        dtype, width = to_numpy(name), NARROW.get(name, 8)  # bits of an element; of those of a byte and more, of its bytes
        if any(d < 0 for d in shape) or dtype.itemsize * prod(max(d, 1) for d in shape) > sys.maxsize:
            raise ImportModelError(f"a tensor has the shape {list(shape)}", where=where)
        count = prod(shape)
        size = -(count * dtype.itemsize * width // -8)  # bytes
        if raw is None and tensor.data_location == TensorProto.EXTERNAL:
            return _elements(self._external(tensor, size, where), count, width).view(dtype).reshape(shape)
        if raw is None and tensor.HasField("raw_data"):
            raw = tensor.raw_data
        values = getattr(tensor, _TYPED_FIELDS.get(dtype.name, "int32_data")) if raw is None else raw
        wanted, unit = (size if width in (2, 4) else count, "elements") if raw is None else (size, "bytes")
        what = "a tensor's data does not fit its type"
        if len(values) != wanted:
            raise ImportModelError(what, where=where, why=f"{dtype.name}{list(shape)} takes {wanted} {unit}, the file has {len(values)}")
        if raw is not None:
            return _elements(np.frombuffer(raw, np.uint8), count, width).view(dtype).reshape(shape)
        stored = np.array(
            values, np.uint64 if dtype.name in ("uint64", "uint32") else None
        )  # as the field has it: perhaps wider than the tensor
        kind = np.dtype(np.uint16) if name in ("float16", "bfloat16") else np.dtype(np.uint8) if name in NARROW else dtype  # their bits
        if kind.kind in "iu" and stored.size and not np.iinfo(kind).min <= stored.min() <= stored.max() <= np.iinfo(kind).max:
            raise ImportModelError(what, where=where, why=f"{stored.min()} to {stored.max()} are not in the range of {dtype.name}")
        stored = stored.astype(kind)
        return (_elements(stored, count, width) if width in (2, 4) else stored).view(dtype).reshape(shape)

    def _external(self, tensor: TensorProto, size: int, where: str) -> np.ndarray:
        entries: dict[str, str | bytes] = {entry.key: entry.value for entry in tensor.external_data}
        if self.folder is None:
            what = "the model's weights are in another file, but the model was given without its folder"
            hint = "pass the path of the model, or a ModelProto that onnx.load has read completely"
            raise ImportModelError(what, where=where, hint=hint)
        location = entries.get("location", "")
        if isinstance(location, bytes):  # which the protobuf library makes of text that is not UTF-8
            raise ImportModelError(f"external data {location!r} cannot be read", where=where, why="the location is not valid UTF-8")
        if location not in self._files:
            self._files[location] = self._external_file(location, self.folder, where)
        content = self._files[location]
        try:
            offset, length = int(entries.get("offset", "0")), int(entries.get("length", str(size)))
        except ValueError as error:
            raise ImportModelError("external data has a malformed offset or length", where=where) from error
        if length != size or offset < 0 or offset + size > content.size:
            what = f"external data does not fit the tensor: {length} bytes at {offset} of `{location}` ({content.size} bytes)"
            raise ImportModelError(what, where=where, why=f"the tensor takes {size} bytes")
        return content[offset : offset + size]

    def _external_file(self, location: str, folder: Path, where: str) -> np.ndarray:
        """The content of a regular file inside the folder: no device, pipe or link that leads outside is opened, or waited for."""
        parts = PurePosixPath(location).parts
        try:
            root = folder.resolve()
            path = root if "\0" in location else (root / location).resolve()
            if ".." in parts or location.startswith("/") or not path.is_relative_to(root):
                raise ImportModelError(f"external data `{location}` lies outside the model's folder", where=where)
            if path == root or not stat.S_ISREG(os.stat(path).st_mode):
                raise ImportModelError(f"external data `{location}` is not a regular file", where=where)
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it was replaced meanwhile
                    raise ImportModelError(f"external data `{location}` is not a regular file", where=where)
                return np.memmap(file, np.uint8, "r") if os.fstat(file.fileno()).st_size else np.zeros(0, np.uint8)
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            why = getattr(error, "strerror", None) or str(error)
            raise ImportModelError(f"external data `{location}` cannot be read", where=where, why=why) from error

    def dense(self, sparse: SparseTensorProto, where: str) -> np.ndarray:
        """A sparse tensor written out."""
        values, indices = self.array(sparse.values, where), self.array(sparse.indices, where)
        shape, size = tuple(sparse.dims), prod(sparse.dims)
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
        match onnx.helper.get_attribute_value(attr) if attr.type in _ATTRIBUTE_TYPES else None:
            case None:
                raise UnsupportedError(f"attribute `{attr.name}` has a type that is not supported ({attr.type})", where=where)
            case bytes(text):
                return text.decode(errors="replace")
            case TensorProto() as tensor:
                return self.array(tensor, where)
            case SparseTensorProto() as sparse:
                return self.dense(sparse, where)
            case list(values):
                return [v.decode(errors="replace") if isinstance(v, bytes) else v for v in values]
            case value:
                return value


def _elements(octets: np.ndarray, count: int, width: int) -> np.ndarray:
    """Elements of less than a byte, packed from the lowest bits up, as a byte each. All else as it is."""
    if width == 8:
        return octets
    group = lcm(width, 8) // 8  # bytes that hold a whole number of elements
    padded = np.zeros(-(len(octets) // -group) * group, np.uint8)
    padded[: len(octets)] = octets
    words = sum((padded[n::group].astype(np.uint32) << 8 * n for n in range(group)), np.uint32(0))
    parts = [(words >> shift & ((1 << width) - 1)).astype(np.uint8) for shift in range(0, 8 * group, width)]
    return np.stack(parts, axis=1).ravel()[:count]


# The protobuf library copies each `bytes` field twice (into the message, and out of it). Therefore the large `raw_data` fields of the main
# graph's initializers are cut out of the encoded model before it is parsed, and remembered.
# Source of the encoding: https://protobuf.dev/programming-guides/encoding/ and the field numbers of onnx.proto.

_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_NAME, _TENSOR_RAW_DATA = 7, 5, 8, 9
_LENGTH_DELIMITED, _FIXED_SIZES = 2, {1: 8, 5: 4}  # wire types; bytes of those of fixed size
LARGE = 1024  # bytes from which a field is cut out


class _Malformed(Exception):
    """Not the encoding of a message; the protobuf library says so better."""


def split_weights(content: bytes | mmap.mmap) -> tuple[bytes, dict[str, memoryview]]:
    """(the model without large weights, the weights by initializer name). Returns all of `content` where it is malformed."""
    weights: dict[str, memoryview] = {}
    try:
        return _slim(memoryview(content), (_MODEL_GRAPH, _GRAPH_INITIALIZER), weights), weights
    except (_Malformed, UnicodeDecodeError):
        return bytes(content), {}


def _slim(message: memoryview, path: tuple[int, ...], weights: dict[str, memoryview]) -> bytes:
    """A message whose fields at `path`, fields of fields, are tensors: the same without large weights."""
    parts: list[bytes | memoryview] = []
    for number, kind, field, value in _fields(message):
        slim: bytes | None = None
        if kind == _LENGTH_DELIMITED and number == path[0]:
            slim = _slim(value, path[1:], weights) if len(path) > 1 else _slim_tensor(value, weights)
        parts += [field] if slim is None else [_header(number, len(slim)), slim]
    return b"".join(parts)


def _slim_tensor(message: memoryview, weights: dict[str, memoryview]) -> bytes | None:
    """The tensor without its data; None where there is nothing to cut, or no name to remember it by."""
    if len(message) < LARGE:
        return None
    name, data, parts = "", None, []
    for number, kind, field, value in _fields(message):
        if kind == _LENGTH_DELIMITED and number == _TENSOR_NAME:
            name = bytes(value).decode()
        if kind == _LENGTH_DELIMITED and number == _TENSOR_RAW_DATA:
            data = value
        else:
            parts.append(field)
    if not name or name in weights or data is None or len(data) < LARGE:
        return None
    weights[name] = data
    return b"".join(parts)


def _fields(message: memoryview) -> Iterator[tuple[int, int, memoryview, memoryview]]:
    """(field number, wire type, the whole field, its value) of each field."""
    position, end = 0, len(message)
    while position < end:
        start = position
        tag, begin = _varint(message, position)
        kind = tag & 7
        if kind == 0:
            _, position = _varint(message, begin)
        else:
            length, begin = _varint(message, begin) if kind == _LENGTH_DELIMITED else (_FIXED_SIZES.get(kind, end), begin)
            position = begin + length  # of an unknown type: beyond the end
        if position > end:
            raise _Malformed
        yield tag >> 3, kind, message[start:position], message[begin:position]


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """(the value, the position behind it)."""
    value = 0
    for n, byte in enumerate(message[position : position + 10]):
        value |= (byte & 0x7F) << (7 * n)
        if byte < 0x80:
            return value, position + n + 1
    raise _Malformed


def _header(number: int, length: int) -> bytes:
    last = max(length.bit_length() - 1, 0) // 7
    return bytes([number << 3 | _LENGTH_DELIMITED, *(length >> 7 * n & 0x7F | (n < last) << 7 for n in range(last + 1))])
