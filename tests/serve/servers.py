"""Small models, and servers that answer on loopback."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import tcomp
from tcomp.serve.options import ServerOptions
from tcomp.serve.server import serve

W = np.random.default_rng(0).standard_normal((8, 5), np.float32)


def artifact(path: Path, nodes: list[tuple[Any, ...]], inputs: dict[str, list[Any]], outputs: dict[str, list[Any]], **weights: Any) -> Path:
    given, made_of = ([helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in group.items()] for group in (inputs, outputs))
    made = [helper.make_node(op, args, [out], **(more[0] if more else {})) for op, args, out, *more in nodes]
    graph = helper.make_graph(
        made, "net", given, made_of, [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in weights.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    tcomp.compile(model.SerializeToString()).save(path)
    return path


class Running(NamedTuple):
    port: int
    grpc_port: int | None
    stop: Any = None  # ends the server

    def ask(
        self, method: str, path: str, body: bytes | str | dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (of JSON, what it says), headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body, headers or {})
            answer = connection.getresponse()
            content = answer.read()
            fields = {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()
        return answer.status, json.loads(content) if fields.get("content-type") == "application/json" else content, fields


@contextmanager
def running(models: Path, **options: Any) -> Iterator[Running]:
    """A server in a thread of its own."""
    ports: Future[Running] = Future()
    ends: list[Any] = []

    def end() -> None:
        with suppress(RuntimeError):  # the loop has ended
            ends[0].call_soon_threadsafe(ends[1].set)

    async def main() -> None:
        stop = asyncio.Event()
        ends.extend((asyncio.get_running_loop(), stop))
        await serve(
            ServerOptions(models, port=0, **{"grpc_port": 0, "poll": 0, **options}),
            lambda http, grpc: ports.set_result(Running(http, grpc, end)),
            stop,
        )

    def work() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if ports.done():
                raise
            ports.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield ports.result(60)
    end()
    thread.join(60)
    assert not thread.is_alive()
