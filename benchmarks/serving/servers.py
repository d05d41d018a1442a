"""The servers: tcomp's, FastAPI with ONNX Runtime, and MLServer with ONNX Runtime."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.serving.clients import Elements, Load, by_grpc, by_http, field
from tcomp.serve.grpc.messages import MESSAGES

THREADS = len(os.sched_getaffinity(0))
_TYPES = {np.dtype(np.float32): "FP32", np.dtype(np.int64): "INT64"}
Inputs = Mapping[str, np.ndarray]

FASTAPI = """
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

MLSERVER = """
import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse

class OnnxModel(MLModel):
    async def load(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.settings.parameters.threads
        self.session = onnxruntime.InferenceSession(self.settings.parameters.uri, options, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload):
        names = [output.name for output in self.session.get_outputs()]
        arrays = self.session.run(names, {given.name: NumpyCodec.decode_input(given) for given in payload.inputs})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output(*pair) for pair in zip(names, arrays)])
"""


class Server(NamedTuple):
    """One way to ask a server.

    label: its name
    protocol: by which it is compared with others
    process: its id
    load: a load of one request
    """

    label: str
    protocol: str
    process: int
    load: Load


@contextmanager
def tcomp_server(artifact: Path, inputs: Inputs, *options: str) -> Iterator[tuple[list[Server], int]]:
    """`tcomp serve` of one artifact, and its port of gRPC."""
    command = [sys.executable, "-m", "tcomp", "serve", str(artifact), "--port", "0", "--grpc-port", "0", "--json", "--poll", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            ports = json.loads(process.stdout.readline())
            tensors = [
                tensor | {"parameters": {"binary_data_size": a.nbytes}}
                for tensor, a in zip(_described(inputs), inputs.values(), strict=True)
            ]
            head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
            header = f"Inference-Header-Content-Length: {len(head)}\r\n"
            request = _post(f"/v2/models/{artifact.stem}/infer", head + _joined(inputs), header)
            by_bytes = by_http(ports["port"], request, lambda head, body: _floats(body[field(head, b"inference-header-content-length") :]))
            yield (
                [
                    Server("tcomp", "bytes", process.pid, by_bytes),
                    *_open_inference("tcomp", process.pid, artifact.stem, inputs, ports["port"], ports["grpc_port"]),
                ],
                ports["grpc_port"],
            )
        finally:
            process.terminate()


@contextmanager
def fastapi_server(onnx_path: Path, inputs: Inputs) -> Iterator[list[Server]]:
    """FastAPI with ONNX Runtime, whose endpoint takes the bytes of tensors as they are, and runs the session in a thread."""
    with tempfile.TemporaryDirectory() as folder:
        program, port = Path(folder) / "peer.py", _free_port()
        program.write_text(FASTAPI)
        with subprocess.Popen([sys.executable, program, onnx_path, str(port), str(THREADS)]) as process:
            try:
                load = by_http(port, _post("/infer", _joined(inputs), ""), lambda head, body: _floats(body))
                yield [Server("FastAPI + ONNX Runtime", "bytes", process.pid, load)]
            finally:
                process.terminate()


@contextmanager
def mlserver(python: Path, onnx_path: Path, inputs: Inputs) -> Iterator[list[Server]]:
    """MLServer, of another environment, with ONNX Runtime, as its documentation has it: a process that infers beside that which answers, and
    adaptive batches."""
    with tempfile.TemporaryDirectory() as name:
        folder, http, grpc = Path(name), _free_port(), _free_port()
        (folder / "onnx_model.py").write_text(MLSERVER)
        ports = {"http_port": http, "grpc_port": grpc, "metrics_port": _free_port()}
        (folder / "settings.json").write_text(json.dumps(ports | {"debug": False}))
        settings = {"name": "model", "implementation": "onnx_model.OnnxModel", "max_batch_size": 32, "max_batch_time": 0.005}
        parameters = {"uri": str(onnx_path), "threads": THREADS}
        (folder / "model-settings.json").write_text(json.dumps(settings | {"parameters": parameters}))
        command, environment = [str(python.parent / "mlserver"), "start", name], os.environ | {"PYTHONPATH": name}
        with subprocess.Popen(command, cwd=name, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                yield _open_inference("MLServer + ONNX Runtime", process.pid, "model", inputs, http, grpc)
            finally:
                process.terminate()


def _open_inference(label: str, process: int, model: str, inputs: Inputs, http: int, grpc: int) -> list[Server]:
    """A server of the Open Inference Protocol, by JSON and by gRPC."""
    tensors = [tensor | {"data": array.reshape(-1).tolist()} for tensor, array in zip(_described(inputs), inputs.values(), strict=True)]
    request = _post(f"/v2/models/{model}/infer", json.dumps({"inputs": tensors}).encode(), "Content-Type: application/json\r\n")
    message = MESSAGES["ModelInferRequest"](model_name=model, raw_input_contents=[array.tobytes() for array in inputs.values()])
    for tensor in _described(inputs):
        message.inputs.add(**tensor)
    by_json = by_http(http, request, lambda head, body: np.array(json.loads(body)["outputs"][0]["data"], np.float32))
    return [Server(label, "JSON", process, by_json), Server(label, "gRPC", process, by_grpc(grpc, message.SerializeToString()))]


def _described(inputs: Inputs) -> list[dict[str, Any]]:
    return [{"name": name, "shape": list(array.shape), "datatype": _TYPES[array.dtype]} for name, array in inputs.items()]


def _joined(inputs: Inputs) -> bytes:
    return b"".join(array.tobytes() for array in inputs.values())


def _floats(content: bytes) -> Elements:
    return np.frombuffer(content, np.float32)


def _post(path: str, body: bytes, headers: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def cpu_seconds(process: int) -> float:
    """Of all threads of a process and of those that it has started, up to now."""
    folder = Path(f"/proc/{process}")
    with suppress(OSError):  # it has ended
        times = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
        children = [int(child) for path in folder.glob("task/*/children") for child in path.read_text().split()]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))
    return 0.0


def busy_seconds() -> float:
    """Of all processors of the machine, up to now, whoever used them; with what a hypervisor gave to others."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # not: idle, and waiting for disks
