"""Images of models: the folder, and the server in it, run as the image runs it, but for the container."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcomp.shipping.container import write_container
from tests.shipping import isolation


@pytest.fixture(scope="module")
def image(modules, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image") / "net"
    write_container(modules["recurrent"][0].artifact, folder, "net", "1.5")
    return folder


def start(image: Path, folder: Path) -> tuple[subprocess.Popen[str], str]:
    (wheel,) = image.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    command = isolation.program(folder / "site", isolation.numpy_alone(folder))
    command[-1] += f"import runpy; sys.argv[0] = 'server.py'; runpy.run_path({str(image / 'server.py')!r}, run_name='__main__')"
    arguments = ["net", "--host", "127.0.0.1", "--port", "0", "--max-bytes", "100000"]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().split()[-1]
    return process, f"http://{address}"


@pytest.fixture(scope="module")
def server(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process, address = start(image, tmp_path_factory.mktemp("server"))
    yield address
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def ask(url: str, body: bytes | None = None, kind: str = "application/json") -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": kind}), timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def request(inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    return {
        "id": "7",
        "inputs": [{"name": n, "datatype": "FP32", "shape": [*a.shape], "data": a.reshape(-1).tolist()} for n, a in inputs.items()],
    }


def test_the_folder(image: Path) -> None:
    text = (image / "Containerfile").read_text()
    assert re.search(r"^FROM \S+:\d+\.\d+\.\d+-slim", text) and "\nUSER 10001:10001\n" in text and "HEALTHCHECK" in text
    for copied in re.findall(r"^COPY (\S+)", text, re.MULTILINE):
        assert (image / copied).is_file() and f"!{copied}" in (image / ".containerignore").read_text()


def test_health_and_metadata(server: str) -> None:
    assert ask(f"{server}/v2/health/live")[0] == ask(f"{server}/v2/health/ready")[0] == 200
    found = json.loads(ask(f"{server}/v2/models/net")[1])
    assert found["inputs"][0] == {"name": "x", "datatype": "FP32", "shape": [-1, 2, 3]} and len(found["outputs"]) == 3
    assert (
        ask(f"{server}/v2/models/other")[0] == ask(f"{server}/../etc/passwd")[0] == ask(f"{server}/v2/models/other/infer", b"{}")[0] == 404
    )


def test_runs_have_the_bits_of_python(server: str, modules) -> None:
    module, inputs = modules["recurrent"]
    wanted = module.run(inputs)
    status, body = ask(f"{server}/v2/models/net/infer", json.dumps(request(inputs)).encode())
    found = json.loads(body)
    assert status == 200 and found["id"] == "7"
    for output in found["outputs"]:
        array = np.array(output["data"], np.float32).reshape(output["shape"])
        assert array.tobytes() == wanted[output["name"]].tobytes()
    content = io.BytesIO()
    np.savez(content, **inputs)
    status, body = ask(f"{server}/v2/models/net/infer", content.getvalue(), "application/x-npz")
    with np.load(io.BytesIO(body)) as arrays:
        assert status == 200 and all(arrays[name].tobytes() == array.tobytes() for name, array in wanted.items())


def test_malformed_requests(server: str, modules) -> None:
    good = request(modules["recurrent"][1])

    def changed(**values: object) -> bytes:
        return json.dumps({"inputs": [{**good["inputs"][0], **values}, *good["inputs"][1:]]}).encode()

    bodies = [
        b"", b"{", b"[]", b"\xff", b"[" * 50_000, b'{"inputs": 3}', b'{"inputs": [3]}', b'{"inputs": []}', changed(name="z"), changed(name=3),
        changed(shape=[1]), changed(shape=[-1, 2, 3]), changed(shape=[1 << 50]), changed(shape="x"), changed(datatype="FP99"), changed(datatype=[]),
        changed(data=["a"] * 30), changed(data=None), changed(data=[[1], [1, 2]]), changed(datatype="INT32"), changed(data=[1e300]),
    ]  # fmt: skip
    for body in bodies:
        status, answer = ask(f"{server}/v2/models/net/infer", body)
        assert status == 400 and json.loads(answer)["error"], body[:80]
    compressed = io.BytesIO()
    np.savez_compressed(compressed, x=np.zeros((1000, 1000)))
    for body in (b"", b"PK", compressed.getvalue()):
        assert ask(f"{server}/v2/models/net/infer", body, "application/x-npz")[0] == 400
    assert ask(f"{server}/v2/models/net/infer", bytes(100_001))[0] == 413
    assert ask(f"{server}/v2/health/ready")[0] == 200


def test_the_health_check_of_the_image(server: str, image: Path) -> None:
    port = server.rpartition(":")[2]
    for given, status in ((port, 0), ("1", 1)):
        done = subprocess.run([sys.executable, str(image / "server.py"), "net", "--check", "--port", given], timeout=60, check=False)
        assert done.returncode == status


def test_requests_under_way_are_answered_before_it_ends(image: Path, modules, tmp_path: Path) -> None:
    """Also where other connections are idle."""
    process, address = start(image, tmp_path)
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps(request(modules["recurrent"][1])).encode()
    head = f"POST /v2/models/net/infer HTTP/1.1\r\nHost: net\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    connections = [socket.create_connection((host, int(port)), timeout=20) for _ in range(9)]
    for connection in connections[1:]:
        connection.sendall(head + body)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    answers = [connection.recv(15) for connection in connections]
    assert answers == [b"", *[b"HTTP/1.1 200 OK"] * 8]
    for connection in connections:
        connection.close()


def test_weights_beside_the_image(modules, tmp_path: Path) -> None:
    files = write_container(modules["residual"][0].artifact, tmp_path / "net", "net", weights="beside")
    assert tmp_path / "net/net.tcomp" in files and all(path.is_file() for path in files)
    assert "ENV NET_MODEL=/model/net.tcomp" in (tmp_path / "net/Containerfile").read_text()
    assert "net.tcomp" not in (tmp_path / "net/.containerignore").read_text()
