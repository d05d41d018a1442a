"""Clients in a closed loop: each sends its next request when it has the answer to the last one. They are the same for all servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeAlias

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from tcomp.serve.grpc.messages import MESSAGES

METHOD = "/inference.GRPCInferenceService/ModelInfer"
Elements: TypeAlias = npt.NDArray[Any]


class Outcome(NamedTuple):
    """What became of a load: requests per second, two percentiles of their latencies (seconds), and the elements of an answer."""

    requests_per_second: float
    p50: float
    p99: float
    answer: Elements


def outcome(latencies: list[float], seconds: float, answer: Elements) -> Outcome:
    """Of requests that took so many seconds together."""
    latencies.sort()
    p50, p99 = (latencies[int(share * (len(latencies) - 1))] for share in (0.5, 0.99))
    return Outcome(len(latencies) / seconds, p50, p99, answer)


Load: TypeAlias = Callable[[int, float], Coroutine[Any, Any, Outcome]]
"""A load of so many clients for so many seconds."""


class HttpClient(asyncio.Protocol):
    """One connection in a closed loop, with as little work as possible."""

    def __init__(self, request: bytes, latencies: list[float], end: float) -> None:
        self.request, self.latencies, self.end = request, latencies, end
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.buffer, self.missing, self.head, self.body = bytearray(), -1, b"", b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._send()

    def _send(self) -> None:
        self.sent = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.missing < 0:
            if (at := self.buffer.find(b"\r\n\r\n")) < 0:
                return
            self.head = bytes(self.buffer[:at]).lower()
            if not self.head.startswith(b"http/1.1 200"):
                self.done.set_exception(RuntimeError(bytes(self.buffer[:500]).decode(errors="replace")))
                self.transport.close()
                return
            self.start = at + 4
            self.missing = self.start + field(self.head, b"content-length")
        if len(self.buffer) < self.missing:
            return
        now = time.perf_counter()
        self.latencies.append(now - self.sent)
        self.body = bytes(self.buffer[self.start :])
        self.buffer.clear()
        self.missing = -1
        if now < self.end:
            self._send()
        elif not self.done.done():
            self.done.set_result(None)
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))


def field(head: bytes, name: bytes) -> int:
    """The number in a field of the head of an answer, in lower case; 0 where there is none."""
    return int(head.partition(b"\r\n%b:" % name)[2].partition(b"\r\n")[0] or 0)


def by_http(port: int, request: bytes, elements: Callable[[bytes, bytes], Elements]) -> Load:
    """A load of one prepared request; `elements` are those of an answer's head and body."""

    async def load(clients: int, seconds: float) -> Outcome:
        latencies: list[float] = []
        start, loop = time.perf_counter(), asyncio.get_running_loop()
        made = [HttpClient(request, latencies, start + seconds) for _ in range(clients)]
        for client in made:
            await loop.create_connection(lambda client=client: client, "127.0.0.1", port)
        await asyncio.gather(*(client.done for client in made))
        return outcome(latencies, time.perf_counter() - start, elements(made[0].head, made[0].body))

    return load


def by_grpc(port: int, message: bytes) -> Load:
    """A load of one prepared message, by the client of grpcio."""

    async def load(clients: int, seconds: float) -> Outcome:
        latencies: list[float] = []
        start = time.perf_counter()

        async def client(call: Any) -> bytes:
            while True:
                sent = time.perf_counter()
                try:
                    answer: bytes = await call(message)
                except grpc.aio.AioRpcError as problem:
                    raise RuntimeError(problem.details()) from None
                latencies.append(time.perf_counter() - sent)
                if time.perf_counter() > start + seconds:
                    return answer

        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            answers = await asyncio.gather(*(client(channel.unary_unary(METHOD)) for _ in range(clients)))
        took = time.perf_counter() - start
        (content,) = MESSAGES["ModelInferResponse"].FromString(answers[0]).raw_output_contents
        return outcome(latencies, took, np.frombuffer(content, np.float32))

    return load
