"""Weights as views of a model file's bytes.

The protobuf library copies each `bytes` field twice (into the message, and out of it). This module cuts the large `raw_data`
fields of the main graph's initializers out of the encoded model before it is parsed, and remembers where they lie.
Source of the encoding: https://protobuf.dev/programming-guides/encoding/ and the field numbers of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from mmap import mmap

_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_NAME, _TENSOR_RAW_DATA = 7, 5, 8, 9
_LENGTH_DELIMITED = 2
LARGE = 1024  # bytes from which a field is cut out


class _Malformed(Exception):
    """Not the encoding of a message; the protobuf library says so better."""


def split(content: bytes | mmap) -> tuple[bytes, dict[str, memoryview]]:
    """(the model without large weights, the weights by initializer name). Returns all of `content` where it is malformed."""
    view = memoryview(content)
    weights: dict[str, memoryview] = {}
    try:
        slim = b"".join(_slim_model(view, weights))
    except (_Malformed, UnicodeDecodeError):
        return bytes(content), {}
    return slim, weights


def _slim_model(view: memoryview, weights: dict[str, memoryview]) -> Iterator[bytes | memoryview]:
    for number, kind, start, body, end in _fields(view, 0, len(view)):
        if number == _MODEL_GRAPH and kind == _LENGTH_DELIMITED:
            graph = b"".join(_slim_graph(view, body, end, weights))
            yield _header(number, len(graph))
            yield graph
        else:
            yield view[start:end]


def _slim_graph(view: memoryview, begin: int, end: int, weights: dict[str, memoryview]) -> Iterator[bytes | memoryview]:
    for number, kind, start, body, stop in _fields(view, begin, end):
        tensor = None
        if number == _GRAPH_INITIALIZER and kind == _LENGTH_DELIMITED and stop - body >= LARGE:
            tensor = _slim_tensor(view, body, stop, weights)
        if tensor is None:
            yield view[start:stop]
        else:
            yield _header(number, len(tensor))
            yield tensor


def _slim_tensor(view: memoryview, begin: int, end: int, weights: dict[str, memoryview]) -> bytes | None:
    """The tensor without its data; None where there is nothing to cut, or no name to remember it by."""
    name, data, parts = "", None, []
    for number, kind, start, body, stop in _fields(view, begin, end):
        if kind == _LENGTH_DELIMITED and number == _TENSOR_NAME:
            name = bytes(view[body:stop]).decode()
        if kind == _LENGTH_DELIMITED and number == _TENSOR_RAW_DATA:
            data = view[body:stop]
        else:
            parts.append(view[start:stop])
    if not name or name in weights or data is None or len(data) < LARGE:
        return None
    weights[name] = data
    return b"".join(parts)


def _fields(view: memoryview, position: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(field number, wire type, start, start of the value, end) of each field."""
    while position < end:
        start = position
        tag, position = _varint(view, position, end)
        kind, body = tag & 7, position
        if kind == 0:
            _, position = _varint(view, position, end)
        elif kind == 1:
            position += 8
        elif kind == _LENGTH_DELIMITED:
            length, body = _varint(view, position, end)
            position = body + length
        elif kind == 5:
            position += 4
        else:
            raise _Malformed
        if position > end:
            raise _Malformed
        yield tag >> 3, kind, start, body, position


def _varint(view: memoryview, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 64:
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise _Malformed


def _header(number: int, length: int) -> bytes:
    encoded = bytearray([number << 3 | _LENGTH_DELIMITED])
    while length >= 0x80:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)
