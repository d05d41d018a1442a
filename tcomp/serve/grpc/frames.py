"""What is sent over a connection of gRPC: frames, headers and codes; and what a method is.

Frames are those of RFC 9113, header fields those of RFC 7541.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias
from urllib.parse import quote

# Frames, their flags, settings and errors: RFC 9113, sections 6 and 7.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_HEADERS = 3, 4, 5, 6
NO_ERROR, PROTOCOL, FLOW_CONTROL, STREAM_CLOSED, FRAME_SIZE, REFUSED, CANCEL, COMPRESSION, CALM = 0, 1, 3, 5, 6, 7, 8, 9, 11
OK, CANCELLED, INVALID, EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 1, 3, 8, 12, 13  # codes of gRPC
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}  # seconds


class Status(Exception):
    """How a call ends that has no answer: a code of gRPC, a message, and further fields of the trailers."""

    def __init__(self, code: int, message: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.fields = code, message, fields or {}


class Call(NamedTuple):
    """What is known of a call beside its messages: headers, the client's address, and its deadline by time.monotonic."""

    headers: Mapping[str, str]
    peer: str
    deadline: float | None


Unary: TypeAlias = Callable[[bytes, Call], Awaitable[bytes]]
Streaming: TypeAlias = Callable[[AsyncIterator[bytes], Call], AsyncIterator[bytes]]


class Methods(NamedTuple):
    """The methods of a service, by path. They raise Status."""

    unary: Mapping[str, Unary]
    streaming: Mapping[str, Streaming]


@dataclass(slots=True)
class Stream:
    """A call that is under way."""

    number: int
    window: int  # bytes that the peer takes
    call: Call
    unary: Unary | None = None
    messages: asyncio.Queue[bytes | None] | None = None  # of a method that streams
    body: bytearray = field(default_factory=bytearray)
    counted: int = 0  # bytes of it that count as pending
    task: asyncio.Task[None] | None = None
    alarm: asyncio.TimerHandle | None = None
    waiting: bytearray = field(default_factory=bytearray)  # bytes of the answer for which there was no window
    trailers: bytes = b""  # to be sent behind them
    ended: bool = False  # whether the client has said all


def literal(name: str, value: str) -> bytes:
    """A field of a header that no table has (RFC 7541, section 6.2.2)."""
    return b"\0" + _text(name.encode()) + _text(value.encode())


def _text(content: bytes) -> bytes:
    if len(content) < 127:
        return bytes([len(content)]) + content
    rest, digits = len(content) - 127, bytearray([127])
    while rest >= 128:
        digits.append(rest % 128 + 128)
        rest //= 128
    return bytes([*digits, rest]) + content


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """A frame of a stream (0: of the connection)."""
    return struct.pack(">HBBBI", len(content) >> 8, len(content) & 255, kind, flags, stream) + content


def seconds(timeout: str) -> float | None:
    """Those of a header `grpc-timeout`; None for any other text."""
    found = _TIMEOUT.fullmatch(timeout)
    return int(found[1]) * _UNITS[found[2]] if found else None


def trailers(status: Status) -> dict[str, str]:
    """The fields that end a call."""
    message = {"grpc-message": quote(status.message, safe=" !#$&'()*+,/:;=?@[]")} if status.message else {}
    return {"grpc-status": str(status.code), **message, **status.fields}


BEGIN = b"\x88" + literal("content-type", "application/grpc")  # 0x88 is `:status: 200`
DONE = literal("grpc-status", "0")
