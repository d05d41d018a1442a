"""Calls of gRPC over HTTP/2, on asyncio: what the protocol asks of a server, and nothing else.

grpcio's own server takes 250 us for a call that does nothing, half of them to pass it between its threads and Python's; here all happens
in the event loop that also speaks HTTP/1. Frames are those of RFC 9113, headers are decoded by the package `hpack`, and messages are
framed as https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md says. Compressed messages are refused.

A peer may not: send frames or headers larger than the limits, open more streams than allowed, reset streams again and again, or keep the
server busy with frames that ask for nothing (CVE-2019-9512 to 9518, CVE-2023-44487, CVE-2024-27316): its connection ends.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import struct
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

from hpack import HPACKError, InvalidTableIndex

from tcomp.serve.access import Access
from tcomp.serve.grpc import frames as F
from tcomp.serve.grpc.eager import begun
from tcomp.serve.grpc.frames import Call, Methods, Status, Stream, Streaming, Unary
from tcomp.serve.grpc.headers import HeaderDecoder
from tcomp.serve.options import ServerOptions
from tcomp.serve.refusals import Refusal

_log = logging.getLogger("tcomp.serve")

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_LIMIT = 1 << 20  # bytes of a frame that clients may send
_HEADER_LIMIT = 1 << 14  # bytes of the headers of a call
_WINDOW = (1 << 31) - 1  # the most that there may be: what is pending is bounded by the server's limits, which answer instead of waiting
_STREAMS = 1 << 10  # calls of one connection at the same time
_PATIENCE = 10_000  # frames of one connection in a second for which nothing is to be done
_STREAM_PATIENCE = 10  # times longer than a request may take, the next one of a stream may be in coming
_RESET_COST = 20  # of these frames: what a call costs that is begun in vain


class _ConnectionError(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class _Connection(asyncio.Protocol):
    """One client. What it sends is handled as it comes; each call is a task."""

    def __init__(self, server: GrpcServer) -> None:
        self.server, self.loop = server, asyncio.get_running_loop()
        self.streams: dict[int, Stream] = {}
        self._buffer, self._greeted, self._closing = bytearray(), False, False
        self._decoder = HeaderDecoder(_HEADER_LIMIT)
        self._block: tuple[int, int, bytearray] | None = None  # stream, flags and content of headers that go on in the next frame
        self._last, self._idle, self._since = 0, 0, time.monotonic()  # the highest stream; frames that asked for nothing, since when
        self._window, self._stream_window, self._frame_size = 65535, 65535, 16384  # what the peer takes, until it says more
        self._incomplete: list[Stream] = []  # calls that began in what has just come
        self._owed = 0  # bytes received for which the window was not opened again

    # ------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come; it gets the server's settings."""
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) else ""
        if len(self.server.connections) >= self.server.options.max_connections:
            self.transport.abort()
            return
        self.server.connections.add(self)
        settings = {F.MAX_STREAMS: _STREAMS, F.INITIAL_WINDOW: _WINDOW, F.MAX_FRAME: _FRAME_LIMIT, F.MAX_HEADERS: _HEADER_LIMIT}
        content = b"".join(struct.pack(">HI", *pair) for pair in settings.items())
        self.transport.write(F.frame(F.SETTINGS, 0, 0, content) + F.frame(F.WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW - 65535)))
        self._alarm: asyncio.TimerHandle | None = self.loop.call_later(self.server.options.receive_timeout, self.transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        """The client has gone; nobody waits for its calls."""
        self.server.connections.discard(self)
        for stream in list(self.streams.values()):
            self._drop(stream)
        if getattr(self, "_alarm", None) is not None:
            assert self._alarm is not None
            self._alarm.cancel()

    def pause_writing(self) -> None:
        """The client does not read its answers: it is not listened to, and not for long."""
        self.transport.pause_reading()
        self._alarm = self.loop.call_later(self.server.options.receive_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        if self._alarm is not None:
            self._alarm.cancel()
        self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Handle all frames that are complete."""
        buffer = self._buffer
        buffer += data
        try:
            if not self._greeted:
                if not _PREFACE.startswith(bytes(buffer[: len(_PREFACE)])):
                    raise _ConnectionError(F.PROTOCOL, "it speaks no HTTP/2")
                if len(buffer) < len(_PREFACE):
                    return
                self._greeted = True
                del buffer[: len(_PREFACE)]
                assert self._alarm is not None
                self._alarm.cancel()
            start, end = 0, len(buffer)
            while end - start >= 9:
                size = int.from_bytes(buffer[start : start + 3])
                if size > _FRAME_LIMIT:
                    raise _ConnectionError(F.FRAME_SIZE, "a frame is too large")
                if end - start < 9 + size:
                    break
                number = int.from_bytes(buffer[start + 5 : start + 9]) & 0x7FFFFFFF
                self._handle(buffer[start + 3], buffer[start + 4], number, bytes(memoryview(buffer)[start + 9 : start + 9 + size]))
                start += 9 + size
            del buffer[:start]
            self._expect()
        except _ConnectionError as problem:
            self._give_up(problem.code)
        except (HPACKError, InvalidTableIndex, UnicodeDecodeError, struct.error, IndexError):
            self._give_up(F.COMPRESSION)

    def _expect(self) -> None:
        """The rest of calls that have begun is to come in time."""
        for stream in self._incomplete:
            if not stream.ended and stream.number in self.streams:
                stream.alarm = self.loop.call_later(self.server.options.receive_timeout, self._too_slow, stream)
        self._incomplete.clear()

    def _give_up(self, code: int) -> None:
        self.transport.write(F.frame(F.GOAWAY, 0, 0, struct.pack(">II", self._last, code)))
        self.transport.close()
        self._buffer.clear()

    def drain(self) -> None:
        """Take no more calls; end when the last is answered."""
        if not self._closing:
            self._closing = True
            self.transport.write(F.frame(F.GOAWAY, 0, 0, struct.pack(">II", self._last, F.NO_ERROR)))
        if not self.streams:
            self.transport.close()

    # ------------------------------------------------------------ frames

    def _handle(self, kind: int, flags: int, number: int, content: bytes) -> None:
        if self._block is not None and kind != F.CONTINUATION:
            raise _ConnectionError(F.PROTOCOL, "headers are interrupted")
        if kind not in (F.DATA, F.HEADERS) or not content:
            self._idling(1)
        if kind == F.DATA:
            self._data(flags, number, content)
        elif kind == F.HEADERS:
            content = self._unpadded(flags, content)
            self._headers(number, flags, content[5:] if flags & F.WITH_PRIORITY else content)
        elif kind == F.CONTINUATION:
            if self._block is None or self._block[0] != number:
                raise _ConnectionError(F.PROTOCOL, "a continuation of nothing")
            first, before, block = self._block
            self._block = None
            self._headers(first, before & ~F.END_HEADERS | flags & F.END_HEADERS, bytes(block) + content)
        elif kind == F.RST_STREAM:
            if len(content) != 4 or not number:
                raise _ConnectionError(F.FRAME_SIZE, "a reset of four bytes was expected")
            if (stream := self.streams.get(number)) is not None:
                self._idling(_RESET_COST)
                self._drop(stream)
        elif kind == F.SETTINGS:
            self._settings(flags, number, content)
        elif kind == F.PING:
            if len(content) != 8 or number:
                raise _ConnectionError(F.FRAME_SIZE, "a ping of eight bytes was expected")
            if not flags & F.ACK:
                self.transport.write(F.frame(F.PING, F.ACK, 0, content))
        elif kind == F.WINDOW_UPDATE:
            self._window_update(number, content)
        elif kind == F.PUSH_PROMISE:
            raise _ConnectionError(F.PROTOCOL, "clients do not push")

    def _idling(self, cost: int) -> None:
        self._idle += cost
        if self._idle > _PATIENCE:
            now = time.monotonic()
            if now < self._since + 1:
                raise _ConnectionError(F.CALM, "too many frames that ask for nothing")
            self._idle, self._since = 0, now

    @staticmethod
    def _unpadded(flags: int, content: bytes) -> bytes:
        if not flags & F.PADDED:
            return content
        if not content or content[0] >= len(content):
            raise _ConnectionError(F.PROTOCOL, "there is more padding than content")
        return content[1 : len(content) - content[0]]

    def _settings(self, flags: int, number: int, content: bytes) -> None:
        if number or len(content) % 6 or (flags & F.ACK and content):
            raise _ConnectionError(F.FRAME_SIZE, "settings of six bytes each were expected")
        if flags & F.ACK:
            return
        for key, value in struct.iter_unpack(">HI", content):
            if key == F.INITIAL_WINDOW:
                if value > _WINDOW:
                    raise _ConnectionError(F.FLOW_CONTROL, "the window is too large")
                change, self._stream_window = value - self._stream_window, value
                for stream in self.streams.values():
                    stream.window += change
            elif key == F.MAX_FRAME:
                if not 16384 <= value < 1 << 24:
                    raise _ConnectionError(F.PROTOCOL, "the size of frames is out of range")
                self._frame_size = value
        self.transport.write(F.frame(F.SETTINGS, F.ACK, 0))
        self._flush()

    def _window_update(self, number: int, content: bytes) -> None:
        if len(content) != 4:
            raise _ConnectionError(F.FRAME_SIZE, "an update of four bytes was expected")
        more = int.from_bytes(content) & 0x7FFFFFFF
        if not number:
            self._window += more
            if not more or self._window > _WINDOW:
                raise _ConnectionError(F.FLOW_CONTROL, "the window is out of range")
        elif (stream := self.streams.get(number)) is not None:
            stream.window += more
            if not more or stream.window > _WINDOW:
                self._reset(stream, F.FLOW_CONTROL)
        self._flush()

    # ------------------------------------------------------------ calls

    def _headers(self, number: int, flags: int, block: bytes) -> None:
        if len(block) > _HEADER_LIMIT:
            raise _ConnectionError(F.CALM, "the headers are too large")
        if not flags & F.END_HEADERS:
            self._block = number, flags, bytearray(block)
            return
        headers = self._decoder.decode(block)  # also of what is refused: it changes the table
        if (known := self.streams.get(number)) is not None:  # trailers
            if not flags & F.END_STREAM or known.ended:
                raise _ConnectionError(F.PROTOCOL, "headers in the middle of a call")
            self._end(known)
            return
        if number % 2 == 0 or number <= self._last:
            if number % 2 and number:  # of a call that was answered or reset in the meantime
                return
            raise _ConnectionError(F.PROTOCOL, "a stream of the wrong number")
        self._last = number
        if self._closing or len(self.streams) >= _STREAMS:
            self.transport.write(F.frame(F.RST_STREAM, 0, number, struct.pack(">I", F.REFUSED)))
            return
        stream = self._begin(number, headers)
        if stream is not None and flags & F.END_STREAM:
            self._end(stream)

    def _begin(self, number: int, headers: Mapping[str, str]) -> Stream | None:
        """The stream of a new call; None if it was refused."""
        path, options = headers.get(":path", ""), self.server.options
        timeout = F.seconds(headers["grpc-timeout"]) if "grpc-timeout" in headers else None
        deadline = None if timeout is None else time.monotonic() + timeout
        stream = Stream(number, self._stream_window, Call(headers, self.peer, deadline))
        if headers.get(":method") != "POST" or not headers.get("content-type", "").startswith("application/grpc"):
            self.transport.write(F.frame(F.HEADERS, F.END_HEADERS | F.END_STREAM, number, F.literal(":status", "415")))
            return None
        if self.server.calls >= options.max_connections:
            self._refuse(number, Status(F.EXHAUSTED, "too many calls at the same time"))
            return None
        if (streaming := self.server.methods.streaming.get(path)) is not None:
            stream.messages = asyncio.Queue()
            stream.task = self.loop.create_task(self._answer_stream(stream, streaming))
        elif (unary := self.server.methods.unary.get(path)) is not None:
            stream.unary = unary
            self._incomplete.append(stream)
        else:
            self._refuse(number, Status(F.UNIMPLEMENTED, f"there is no method {path[:100]}"))
            return None
        self.server.calls += 1
        self.streams[number] = stream
        return stream

    def _too_slow(self, stream: Stream) -> None:
        self._fail(stream, Status(F.CANCELLED, f"the request did not come within {self.server.options.receive_timeout:g} seconds"))

    def _data(self, flags: int, number: int, content: bytes) -> None:
        self._owed += len(content)
        if self._owed > 1 << 20:
            self.transport.write(F.frame(F.WINDOW_UPDATE, 0, 0, struct.pack(">I", self._owed)))
            self._owed = 0
        if not number or (number > self._last and number % 2) or number % 2 == 0:
            raise _ConnectionError(F.PROTOCOL, "data of no stream")
        stream = self.streams.get(number)
        if stream is None:  # answered or reset in the meantime
            return
        if stream.ended:
            self._reset(stream, F.STREAM_CLOSED)
            return
        content = self._unpadded(flags, content)
        try:
            self.server.access.take(len(content))
        except Refusal as refusal:
            self._fail(stream, Status(F.EXHAUSTED, refusal.message, {"retry-after": "1"}))
            return
        stream.body += content
        stream.counted += len(content)
        if len(stream.body) > self.server.options.max_request + 5:
            self._fail(stream, Status(F.EXHAUSTED, f"the message is larger than {self.server.options.max_request} bytes"))
            return
        if stream.messages is not None:
            self._split(stream, stream.messages)
        if flags & F.END_STREAM and number in self.streams:
            self._end(stream)

    def _split(self, stream: Stream, messages: asyncio.Queue[bytes | None]) -> None:
        """Hand on the complete messages of a method that streams."""
        while len(stream.body) >= 5:
            size = int.from_bytes(stream.body[1:5])
            if stream.body[0] or size > self.server.options.max_request:
                self._fail(stream, Status(F.UNIMPLEMENTED if stream.body[0] else F.EXHAUSTED, "a message is compressed, or too large"))
                return
            if len(stream.body) < 5 + size:
                return
            messages.put_nowait(bytes(stream.body[5 : 5 + size]))
            del stream.body[: 5 + size]

    def _end(self, stream: Stream) -> None:
        """The client has sent all of a call."""
        stream.ended = True
        if stream.alarm is not None:
            stream.alarm.cancel()
            stream.alarm = None
        if stream.messages is not None:
            stream.messages.put_nowait(None)
            return
        assert stream.unary is not None
        body = stream.body
        if len(body) < 5 or body[0] or int.from_bytes(body[1:5]) != len(body) - 5:
            compressed = bool(body) and body[0] == 1
            why = "compressed messages are not supported" if compressed else "the request is not one message"
            self._fail(stream, Status(F.UNIMPLEMENTED if compressed else F.INVALID, why))
            return
        stream.task = begun(self._answer(stream, stream.unary, bytes(memoryview(body)[5:])), self.loop)

    async def _answer(self, stream: Stream, method: Unary, message: bytes) -> None:
        try:
            answer = await method(message, stream.call)
        except Exception as error:  # noqa: BLE001  one call must not end the connection
            self._fail(stream, _status(error))
            return
        if stream.number not in self.streams:  # reset while the answer was made
            return
        size, number = 5 + len(answer), stream.number
        begin = F.frame(F.HEADERS, F.END_HEADERS, number, F.BEGIN)
        trailers = F.frame(F.HEADERS, F.END_HEADERS | F.END_STREAM, number, F.DONE)
        if size <= self._frame_size and size <= stream.window and size <= self._window:
            self._window -= size
            self.transport.write(b"".join((begin, F.frame(F.DATA, 0, number, struct.pack(">BI", 0, len(answer)) + answer), trailers)))
            self._forget(stream)
            return
        self.transport.write(begin)
        stream.waiting += struct.pack(">BI", 0, len(answer)) + answer
        stream.trailers = trailers
        self._flush()
        self._wait_for_window(stream)

    async def _answer_stream(self, stream: Stream, method: Streaming) -> None:
        assert stream.messages is not None
        number, messages = stream.number, stream.messages

        async def given() -> AsyncIterator[bytes]:
            while True:
                try:
                    async with asyncio.timeout(_STREAM_PATIENCE * self.server.options.receive_timeout):
                        message = await messages.get()
                except TimeoutError:
                    raise Status(F.CANCELLED, "no further request came") from None
                if message is None:
                    return
                yield message
                self._give(stream, 5 + len(message))  # the next one is asked for: this one is answered

        self.transport.write(F.frame(F.HEADERS, F.END_HEADERS, number, F.BEGIN))
        code = Status(F.OK, "")
        try:
            async for answer in method(given(), stream.call):
                stream.waiting += struct.pack(">BI", 0, len(answer)) + answer
                self._flush()
                if stream.waiting and stream.alarm is None:
                    self._wait_for_window(stream)
                while len(stream.waiting) > _FRAME_LIMIT and number in self.streams:
                    await asyncio.sleep(0.01)  # the client does not read
        except Exception as error:  # noqa: BLE001  one call must not end the connection
            code = _status(error)
        fields = b"".join(F.literal(name, value) for name, value in F.trailers(code).items())
        stream.trailers = F.frame(F.HEADERS, F.END_HEADERS | F.END_STREAM, number, fields)
        self._flush()

    def _flush(self) -> None:
        """Send what the windows allow."""
        for stream in [s for s in self.streams.values() if s.waiting or s.trailers]:
            while stream.waiting:
                size = min(len(stream.waiting), stream.window, self._window, self._frame_size)
                if size <= 0:
                    break
                self.transport.write(F.frame(F.DATA, 0, stream.number, bytes(stream.waiting[:size])))
                del stream.waiting[:size]
                stream.window -= size
                self._window -= size
                if stream.alarm is not None:
                    self._wait_for_window(stream)
            if not stream.waiting and stream.alarm is not None:
                stream.alarm.cancel()
                stream.alarm = None
            if not stream.waiting and stream.trailers:
                self.transport.write(stream.trailers)
                self._forget(stream)

    def _wait_for_window(self, stream: Stream) -> None:
        """Reset a stream for whose answer the client opens no window in time."""
        if stream.alarm is not None:
            stream.alarm.cancel()
        if stream.number in self.streams:
            stream.alarm = self.loop.call_later(self.server.options.receive_timeout, self._reset, stream, F.CANCEL)

    def _refuse(self, number: int, status: Status) -> None:
        """Answer a call that has not begun."""
        fields = {"content-type": "application/grpc", **F.trailers(status)}
        block = b"\x88" + b"".join(F.literal(name, value) for name, value in fields.items())
        self.transport.write(F.frame(F.HEADERS, F.END_HEADERS | F.END_STREAM, number, block))

    def _fail(self, stream: Stream, status: Status) -> None:
        """End a call, before any message of its answer, with an error."""
        if stream.number not in self.streams:
            return
        if stream.messages is None:
            self._refuse(stream.number, status)
        else:  # its headers were sent
            block = b"".join(F.literal(name, value) for name, value in F.trailers(status).items())
            self.transport.write(F.frame(F.HEADERS, F.END_HEADERS | F.END_STREAM, stream.number, block))
        if not stream.ended:  # the client need not send the rest
            self.transport.write(F.frame(F.RST_STREAM, 0, stream.number, struct.pack(">I", F.NO_ERROR)))
        self._drop(stream)

    def _reset(self, stream: Stream, code: int) -> None:
        self.transport.write(F.frame(F.RST_STREAM, 0, stream.number, struct.pack(">I", code)))
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        """Nobody waits for this call any more."""
        if stream.task is not None and stream.task is not asyncio.current_task(self.loop):
            stream.task.cancel()
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        if self.streams.pop(stream.number, None) is not None:
            self.server.calls -= 1
            self._give(stream, stream.counted)
            if stream.alarm is not None:
                stream.alarm.cancel()
        if self._closing and not self.streams:
            self.transport.close()

    def _give(self, stream: Stream, size: int) -> None:
        """Bytes of a call do not count as pending any more; none do once it has ended."""
        size = min(size, stream.counted)
        stream.counted -= size
        self.server.access.give(size)


def _status(error: Exception) -> Status:
    if isinstance(error, Status):
        return error
    _log.error("a call failed", exc_info=error)
    return Status(F.INTERNAL, "internal error")


class GrpcServer:
    """A server for the methods of one service.

    connections: those that are open; calls: how many are under way
    """

    def __init__(self, methods: Methods, options: ServerOptions, access: Access) -> None:
        self.methods, self.options, self.access = methods, options, access
        self.connections: set[_Connection] = set()
        self.calls = 0
        self._server: asyncio.Server | None = None

    async def start(self, listener: Any, context: ssl.SSLContext | None) -> None:
        """Accept connections of a socket, with TLS if there is a context."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=listener, ssl=context, backlog=1024)

    async def stop(self, seconds: float) -> None:
        """Accept nothing more; wait so long for the calls that are under way, and end."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self.connections):
            connection.drain()
        end = time.monotonic() + seconds
        while self.connections and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.transport.abort()
