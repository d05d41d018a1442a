"""What a request costs besides the run of a tiny model."""

from __future__ import annotations

import asyncio
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.serving.clients import METHOD
from benchmarks.serving.servers import tcomp_server


def overhead(requests: int = 2000) -> dict[str, float]:
    """Medians in microseconds, for a tiny model: a run in this process, and requests by HTTP, by gRPC with grpcio's client, and by gRPC with
    a client that does nothing but write and read frames, beside an echo by grpcio's own server."""
    import grpc
    from onnx import TensorProto, helper, numpy_helper

    import tcomp
    from tcomp.serve.grpc.messages import MESSAGES

    w = numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    given, made = ([helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 64])] for n in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "tiny", given, made, [w])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.ones((1, 64), np.float32)
    request = MESSAGES["ModelInferRequest"](model_name="tiny")
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    request.raw_input_contents.append(x.tobytes())
    message = request.SerializeToString()
    found: dict[str, float] = {}

    def median(call: Any) -> float:
        for _ in range(200):
            call()
        times = []
        for _ in range(requests):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6

    def by_clients(port: int) -> dict[str, float]:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, FrameClient(port, METHOD, message) as client:
            call = channel.unary_unary(METHOD)
            return {"client of grpcio": median(lambda: call(message)), "frames alone": median(client.call)}

    with tempfile.TemporaryDirectory() as folder:
        module = tcomp.compile(model.SerializeToString())
        module.save(Path(folder) / "tiny.tcomp")
        found["module.run"] = median(lambda: module.run({"x": x}))
        with tcomp_server(Path(folder) / "tiny.tcomp", {"x": x}) as (servers, port):
            by_bytes = next(server for server in servers if server.protocol == "bytes")
            found["HTTP"] = asyncio.run(by_bytes.load(1, 2.0)).p50 * 1e6
            found |= {f"gRPC, {client}": us for client, us in by_clients(port).items()}
    with echo() as port:
        found |= {f"echo by grpcio, {client}": us for client, us in by_clients(port).items()}
    return found


ECHO = """
import asyncio, sys, grpc, uvloop
async def main():
    async def echo(body, context): return body
    service, method = sys.argv[1].strip("/").split("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(echo)}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner: runner.run(main())
"""


@contextmanager
def echo() -> Iterator[int]:
    """A server of grpcio that does nothing: what there is to beat."""
    with subprocess.Popen([sys.executable, "-c", ECHO, METHOD], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


class FrameClient:
    """A client of HTTP/2 that sends one prepared call after the other: what a client in C would cost, nearly nothing."""

    def __init__(self, port: int, method: str, message: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "x",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        self.headers = b"".join(b"\0" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in fields.items())
        self.body = b"\0" + struct.pack(">I", len(message)) + message
        self.stream, self.received = 1, b""
        window = struct.pack(">HI", 4, 1 << 30)
        self.socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self._frame(4, 0, 0, window) + self._frame(8, 0, 0, struct.pack(">I", 1 << 30))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    @staticmethod
    def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
        return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content

    def _next(self) -> tuple[int, int, int, bytes]:
        while len(self.received) < 9 or len(self.received) < 9 + int.from_bytes(self.received[:3], "big"):
            part = self.socket.recv(1 << 16)
            if not part:
                raise ConnectionError("the server closed the connection")
            self.received += part
        end = 9 + int.from_bytes(self.received[:3], "big")
        frame, self.received = self.received[:end], self.received[end:]
        return frame[3], frame[4], int.from_bytes(frame[5:9], "big"), frame[9:]

    def call(self) -> None:
        """One call; its answer is awaited."""
        self.socket.sendall(self._frame(1, 4, self.stream, self.headers) + self._frame(0, 1, self.stream, self.body))
        while True:
            kind, flags, stream, content = self._next()
            if kind in (4, 6) and not flags & 1:  # settings and pings want an answer
                self.socket.sendall(self._frame(kind, 1, 0, content if kind == 6 else b""))
            if kind in (3, 7):
                raise ConnectionError(f"the server gave up: {content!r}")
            if kind == 1 and flags & 1 and stream == self.stream:
                self.stream += 2
                return
