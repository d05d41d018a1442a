"""The command `tcomp serve`: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.serve.servers import Running
from tests.serve.test_grpc import Client, infer_request
from tests.serve.test_http import binary


def command(*arguments: object) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "tcomp", "serve", *map(str, arguments)]
    return subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    )


def test_every_accepted_request_is_answered(models: Path) -> None:
    """SIGTERM under load. A client that was not accepted gets no answer at all: its connection is refused, or closed with nothing read."""
    process = command(models, "--port", 0, "--grpc-port", 0, "--json", "--log-requests")
    assert process.stdout is not None
    server = Running(*json.loads(process.stdout.readline()).values())
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    body, headers = binary(x)
    answers: list[Any] = []
    under_way = threading.Semaphore(0)

    def http_client() -> None:
        while True:
            try:
                status, _, _ = server.ask("POST", "/v2/models/plus/infer", body, headers)
            except OSError:
                return
            answers.append(status)
            under_way.release()

    def grpc_client() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            while True:
                try:
                    Client(channel)("ModelInfer", infer_request(model="plus"))
                except grpc.RpcError as error:
                    assert error.code().name in ("UNAVAILABLE", "CANCELLED")
                    return
                answers.append(200)
                under_way.release()

    clients = [threading.Thread(target=target) for target in (http_client, http_client, grpc_client, grpc_client)]
    for client in clients:
        client.start()
    for _ in range(40):
        assert under_way.acquire(timeout=20)
    process.send_signal(signal.SIGTERM)
    for client in clients:
        client.join(20)
        assert not client.is_alive()
    _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["message"] for line in lines][-1] == "stopped" and not [line for line in lines if line["level"] in ("error", "warning")]
    assert set(answers) == {200}
    # All that were accepted were answered, and the answers arrived.
    assert [line["status"] for line in lines if line["message"] == "request"] == [200] * len(answers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "there are no models"), (["model.onnx"], "tcomp compile model.onnx"), ([".", "--preferred", "x"], "not a list of sizes"), ([".", "--certificate", "c.pem"], "belong together"),
        ([".", "--max-batch", "2", "--preferred", "3"], "preferred sizes"), ([".", "--host", "192.0.2.1", "--port", "0"], "cannot listen"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    from typer.testing import CliRunner

    from tcomp.cli.app import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"no artifact")
    monkeypatch.setattr("tcomp.serve.logs.log_to_stderr", lambda: None)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2 and message in result.output
