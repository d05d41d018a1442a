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
from typing import NamedTuple

import numpy as np

from benchmarks.serving.clients import Load, by_grpc, by_http, field
from benchmarks.serving.perf_analyzer import as_message, configuration, metadata, statistics, tensors
from tcomp.serve.grpc.messages import MESSAGES

THREADS = len(os.sched_getaffinity(0))
Inputs = Mapping[str, np.ndarray]

FASTAPI = """
import json, sys
import numpy as np
import onnxruntime, uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = int(sys.argv[3])
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
(output,) = session.get_outputs()
types = {"FP32": np.float32, "INT64": np.int64}
described = json.loads(sys.argv[4])
app = FastAPI()

@app.post("/v2/models/model/infer")
async def infer(request: Request) -> Response:
    body, feeds = await request.body(), {}
    start = int(request.headers["inference-header-content-length"])
    asked = json.loads(body[:start])
    for given in asked["inputs"]:
        dtype, shape = np.dtype(types[given["datatype"]]), given["shape"]
        feeds[given["name"]] = array = np.frombuffer(body, dtype, int(np.prod(shape)), start).reshape(shape)
        start += array.nbytes
    (y,) = await run_in_threadpool(session.run, None, feeds)
    tensor = {"name": output.name, "datatype": "FP32", "shape": y.shape, "parameters": {"binary_data_size": y.nbytes}}
    head = json.dumps({"model_name": "model", "id": asked.get("id", ""), "outputs": [tensor]}).encode()
    return Response(head + y.tobytes(), headers={"Inference-Header-Content-Length": str(len(head))})

for path, answer in described.items():  # which perf_analyzer asks for
    app.add_api_route(path, lambda answer=answer: answer)
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

# `mlserver start`, with the two calls that MLServer lacks and perf_analyzer makes before and after a measurement.
START = """
import sys
import grpc
from mlserver.cli import main
from mlserver.grpc.server import GRPCServer

def extended(create, config, statistics):
    def create_server(self):
        async def get_config(request, context): return config
        async def get_statistics(request, context): return statistics
        methods = {"ModelConfig": get_config, "ModelStatistics": get_statistics}
        server = create(self)
        handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
        return server
    return create_server

if __name__ == "__main__":
    statistics, config = bytes.fromhex(sys.argv.pop()), bytes.fromhex(sys.argv.pop())
    GRPCServer._create_server = extended(GRPCServer._create_server, config, statistics)
    main()
"""


class Server(NamedTuple):
    """One way to ask a server.

    label: its name
    protocol: by which it is compared with others
    process: its id
    load: a load of one request
    port, model: where, and what of it
    """

    label: str
    protocol: str
    process: int
    load: Load
    port: int
    model: str


@contextmanager
def tcomp_server(artifact: Path, inputs: Inputs, *options: str) -> Iterator[tuple[list[Server], int]]:
    """`tcomp serve` of one artifact, and its port of gRPC."""
    command = [sys.executable, "-m", "tcomp", "serve", str(artifact), "--port", "0", "--grpc-port", "0", "--json", "--poll", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            ports = json.loads(process.stdout.readline())
            model = artifact.stem
            by_bytes = _binary("tcomp", process.pid, model, inputs, ports["port"])
            others = _open_inference("tcomp", process.pid, model, inputs, ports["port"], ports["grpc_port"])
            yield [by_bytes, *others], ports["grpc_port"]
        finally:
            process.terminate()


@contextmanager
def fastapi_server(onnx_path: Path, inputs: Inputs) -> Iterator[list[Server]]:
    """FastAPI with ONNX Runtime, whose endpoint takes tensors as bytes and runs the session in a thread."""
    described = metadata("model", onnx_path, inputs)
    of_model = {"": described, "/config": configuration(described), "/stats": statistics("model")}
    answers = {"/v2": {"name": "FastAPI", "version": "1", "extensions": []}} | {f"/v2/models/model{k}": v for k, v in of_model.items()}
    with tempfile.TemporaryDirectory() as folder:
        program, port = Path(folder) / "peer.py", _free_port()
        program.write_text(FASTAPI)
        with subprocess.Popen([sys.executable, program, onnx_path, str(port), str(THREADS), json.dumps(answers)]) as process:
            try:
                yield [_binary("FastAPI + ONNX Runtime", process.pid, "model", inputs, port)]
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
        described = metadata("model", onnx_path, inputs)
        settings = {end: described[end] for end in ("platform", "inputs", "outputs")}
        settings |= {"name": "model", "implementation": "onnx_model.OnnxModel", "max_batch_size": 32, "max_batch_time": 0.005}
        parameters = {"uri": str(onnx_path), "threads": THREADS}
        (folder / "model-settings.json").write_text(json.dumps(settings | {"parameters": parameters}))
        (folder / "start.py").write_text(START)
        config = {"config": as_message(configuration(described))}
        answers = {"ModelConfigResponse": config, "ModelStatisticsResponse": statistics("model")}
        messages = [MESSAGES[kind](**answer).SerializeToString().hex() for kind, answer in answers.items()]
        command, environment = [str(python), "start.py", "start", name, *messages], os.environ | {"PYTHONPATH": name}
        with subprocess.Popen(command, cwd=name, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                yield _open_inference("MLServer + ONNX Runtime", process.pid, "model", inputs, http, grpc)
            finally:
                process.terminate()


def _open_inference(label: str, process: int, model: str, inputs: Inputs, http: int, grpc: int) -> list[Server]:
    """A server of the Open Inference Protocol, by JSON and by gRPC."""
    described = [tensor | {"data": array.reshape(-1).tolist()} for tensor, array in zip(tensors(inputs), inputs.values(), strict=True)]
    request = _post(f"/v2/models/{model}/infer", json.dumps({"inputs": described}).encode(), "Content-Type: application/json\r\n")
    contents = [array.tobytes() for array in inputs.values()]
    message = MESSAGES["ModelInferRequest"](model_name=model, inputs=tensors(inputs), raw_input_contents=contents)
    by_json = by_http(http, request, lambda head, body: np.array(json.loads(body)["outputs"][0]["data"], np.float32))
    loads = {"JSON": (by_json, http), "gRPC": (by_grpc(grpc, message.SerializeToString()), grpc)}
    return [Server(label, protocol, process, load, port, model) for protocol, (load, port) in loads.items()]


def _binary(label: str, process: int, model: str, inputs: Inputs, port: int) -> Server:
    """A server of the Open Inference Protocol with the extension for tensors as bytes."""
    sizes = [{"parameters": {"binary_data_size": array.nbytes}} for array in inputs.values()]
    described = [tensor | size for tensor, size in zip(tensors(inputs), sizes, strict=True)]
    head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    content = head + b"".join(array.tobytes() for array in inputs.values())
    request = _post(f"/v2/models/{model}/infer", content, f"Inference-Header-Content-Length: {len(head)}\r\n")
    load = by_http(port, request, lambda head, body: np.frombuffer(body[field(head, b"inference-header-content-length") :], np.float32))
    return Server(label, "bytes", process, load, port, model)


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
