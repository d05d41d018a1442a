"""Answers requests to one installed model by HTTP, after the open inference protocol: `python server.py NAME`. Standard library and NumPy.

https://github.com/kserve/open-inference-protocol. Tensors are JSON, or whole requests .npz files. SIGTERM lets requests end that are under
way, and refuses others.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import math
import select
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

NPZ = "application/x-npz"
SECONDS = 30  # within which a request must have been sent
# Names of element types in the protocol; others have no name there, and go as .npz alone.
TYPES = {"bool": "BOOL", **{f"{k}{b}": f"{k.upper()}{b}" for k in ("int", "uint") for b in (8, 16, 32, 64)}}
TYPES |= {"float16": "FP16", "float32": "FP32", "float64": "FP64"}
STRINGS = "BYTES"


class Refusal(Exception):
    """A request that is answered by a status and a message."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server(ThreadingHTTPServer):
    """Requests in threads of their own, as many as `slots` run the model at the same time."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], name: str, model: Any, refused: type[Exception], write: Any, concurrency: int, most: int
    ) -> None:
        super().__init__(address, Handler)
        self.name, self.model, self.refused, self.write, self.most = name, model, refused, write, most
        self.slots, self.open = threading.BoundedSemaphore(concurrency), set[socket.socket]()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Called for each connection, before its thread starts."""
        self.open.add(request)
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        """Called when a connection has ended."""
        self.open.discard(request)
        super().close_request(request)

    def drain(self) -> None:
        """Once `shutdown` was called: take what was connected before; what was sent will be answered, and idle connections end."""
        while select.select([self], [], [], 0)[0]:
            self.handle_request()
        for connection in list(self.open):
            with suppress(OSError):  # it was closed meanwhile
                connection.shutdown(socket.SHUT_RD)

    def metadata(self) -> dict[str, Any]:
        """The model, in the words of the protocol: -1 is an extent that is free."""
        ends = {
            kind: [
                {
                    "name": s.name,
                    "datatype": {**TYPES, "string": STRINGS}.get(s.dtype, s.dtype),
                    "shape": [e if isinstance(e, int) else -1 for e in s.shape],
                }
                for s in specs
            ]
            for kind, specs in (("inputs", self.model.inputs), ("outputs", self.model.outputs))
        }
        return {"name": self.name, "platform": "tcomp", **ends}

    def infer(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One run, or a refusal: 503 where all slots are taken for 30 seconds."""
        if not self.slots.acquire(timeout=SECONDS):
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests are under way")
        try:
            return dict(self.model.run(inputs))
        except self.refused as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, str(error)) from None
        finally:
            self.slots.release()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = SECONDS
    server: Server

    def finish(self) -> None:
        """Called when it ends."""
        with suppress(OSError):  # the client has gone
            super().finish()

    def do_GET(self) -> None:
        """Health and metadata."""
        if self.path in ("/v2/health/live", "/v2/health/ready", f"/v2/models/{self.server.name}/ready"):
            self._json(HTTPStatus.OK, {"live" if self.path.endswith("live") else "ready": True})
        elif self.path == "/v2":
            self._json(HTTPStatus.OK, {"name": "tcomp", "version": "2", "extensions": []})
        elif self.path == f"/v2/models/{self.server.name}":
            self._json(HTTPStatus.OK, self.server.metadata())
        else:
            self._json(HTTPStatus.NOT_FOUND, {"error": "there is nothing of this name"})

    def do_POST(self) -> None:
        """Inference."""
        try:
            if self.path != f"/v2/models/{self.server.name}/infer":
                raise Refusal(HTTPStatus.NOT_FOUND, "there is nothing of this name")
            body = self._body()
            if self.headers.get_content_type() == NPZ:
                outputs = self.server.infer(_from_npz(body))
                content = io.BytesIO()
                self.server.write(content, outputs)
                self._send(HTTPStatus.OK, NPZ, content.getvalue())
            else:
                request = _parsed(body)
                outputs = self.server.infer(dict(map(_tensor, request["inputs"])))
                record = [_described(name, array) for name, array in outputs.items()]
                found = {"model_name": self.server.name, "outputs": record}
                self._json(HTTPStatus.OK, found | ({"id": request["id"]} if isinstance(request.get("id"), str) else {}))
        except Refusal as refusal:
            self.close_connection = True  # the body may not have been read
            self._json(refusal.status, {"error": str(refusal)})

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            raise Refusal(HTTPStatus.LENGTH_REQUIRED, "a request needs a Content-Length")
        if int(length) > self.server.most:
            self.rfile.read(min(int(length), 1 << 20))  # else the answer may be lost with a connection that is closed before it is read
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {self.server.most} bytes")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise Refusal(HTTPStatus.BAD_REQUEST, "the request ended early")
        return body

    def _json(self, status: HTTPStatus, record: object) -> None:
        self._send(status, "application/json", json.dumps(record).encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)


def _bad(message: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, message)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _bad(f"the request is no JSON: {error}") from None
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise _bad("the request has no list `inputs`")
    return request


def _tensor(record: Any) -> tuple[str, np.ndarray]:
    """The name and array of an input of the protocol; `data` is flat or nested."""
    kinds = {name: dtype for dtype, name in TYPES.items()}
    if not isinstance(record, dict) or not isinstance(record.get("name"), str) or not isinstance(shape := record.get("shape"), list):
        raise _bad("an input needs `name`, `shape`, `datatype` and `data`")
    name, kind, data = record["name"], record.get("datatype"), record.get("data")
    if not isinstance(kind, str) or kind not in (*kinds, STRINGS) or not isinstance(data, list):
        raise _bad(f"input `{name}` has no such datatype, or no list `data`")
    if not all(type(e) is int and 0 <= e < 1 << 40 for e in shape) or len(shape) > 64:
        raise _bad(f"input `{name}` has no such shape")
    if kind == STRINGS:
        if not all(isinstance(text, str) for text in data) or len(data) != math.prod(shape):
            raise _bad(f"the data of input `{name}` are no flat list of as many strings as its shape says")
        return name, np.array(data, object).reshape(shape)
    try:
        dtype = np.dtype(kinds[kind])
        values = np.array(data)
        array = values.astype(dtype)
        if dtype.kind in "iub" and not np.array_equal(array, values):
            raise ValueError(f"there are values that {kind} lacks")
        return name, array.reshape(shape)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _bad(f"the data of input `{name}` do not fit: {error}") from None


def _from_npz(body: bytes) -> dict[str, np.ndarray]:
    """The arrays of a .npz file, each no larger than the file may be: what is compressed is refused."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ValueError("compressed arrays are not taken")
        with np.load(io.BytesIO(body), allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, NotImplementedError, MemoryError) as error:
        raise _bad(f"the request is no .npz file: {error}") from None


def _described(name: str, array: np.ndarray) -> dict[str, Any]:
    if array.dtype == object:
        return {"name": name, "datatype": STRINGS, "shape": [*array.shape], "data": array.reshape(-1).tolist()}
    if array.dtype.name not in TYPES:
        raise _bad(f"output `{name}` is {array.dtype}, which JSON requests have no name for; send a .npz file")
    return {"name": name, "datatype": TYPES[array.dtype.name], "shape": [*array.shape], "data": array.reshape(-1).tolist()}


def _answers(port: int) -> int:
    """The exit status of a health check."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=2) as answer:
            return 0 if answer.status == HTTPStatus.OK else 1
    except (urllib.error.URLError, OSError):
        return 1


def main() -> int:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description="Answers requests to an installed model, by HTTP.")
    parser.add_argument("model", help="the name of its package")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, help="of a run; default: as compiled")
    parser.add_argument("--concurrency", type=int, default=2, help="runs at the same time (default: 2)")
    parser.add_argument("--max-bytes", type=int, default=64 << 20, help="of a request (default: 64 MiB)")
    parser.add_argument("--check", action="store_true", help="only ask whether the server of this container answers")
    given = parser.parse_args()
    if given.check:
        return _answers(given.port)
    package = importlib.import_module(given.model)
    refused = importlib.import_module(f"{given.model}._runtime.errors").TcompError
    write = importlib.import_module(f"{given.model}._runtime.array_files").write_arrays
    try:
        model = package.load(threads=given.threads)
    except refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with Server((given.host, given.port), given.model, model, refused, write, max(1, given.concurrency), given.max_bytes) as server:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
        print(f"serving {given.model} on {given.host}:{server.server_port}", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.1)
        server.drain()
    return 0  # `with` has waited for the requests under way


if __name__ == "__main__":
    sys.exit(main())
