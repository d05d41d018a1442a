"""Bytes that are not requests, clients that go or hang: refused, with nothing lost for others. Many more of each: tests/serve/soak.py."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from pathlib import Path

import numpy as np

from tests.serve.servers import Running, running
from tests.serve.test_http import binary

X = np.arange(16, dtype=np.float32).reshape(2, 8)


def http_request(generator: random.Random) -> bytes:
    """A request as text, with something wrong in it: bytes changed, cut, or repeated."""
    body, headers = binary(X)
    fields = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "Content-Length": str(len(body)), "Host": "x"}.items())
    content = bytearray(f"POST /v2/models/mlp/infer HTTP/1.1\r\n{fields}\r\n".encode() + body)
    for _ in range(generator.randint(1, 8)):
        place = generator.randrange(len(content))
        match generator.randrange(4):
            case 0:
                content[place] = generator.randrange(256)
            case 1:
                del content[place : place + generator.randint(1, 40)]
            case 2:
                content[place:place] = content[: generator.randint(1, 40)]
            case 3:
                content[place:place] = generator.randbytes(8)
        content = content or bytearray(b"x")
    return bytes(content)


def http2_garbage(generator: random.Random) -> bytes:
    """The start of a connection of HTTP/2, and frames of random types, flags, streams and contents."""
    frames = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] if generator.random() < 0.8 else []
    for _ in range(generator.randint(1, 5)):
        content = generator.randbytes(generator.randrange(60))
        length = len(content) if generator.random() < 0.8 else generator.randrange(1 << 24)
        frames.append(
            struct.pack(">I", length)[1:] + bytes([generator.randrange(12), generator.randrange(256)]) + generator.randbytes(4) + content
        )
    return b"".join(frames)


def send(port: int, content: bytes, wait: float = 0.3) -> bytes:
    """What the server answers until it closes the connection, or says nothing for a while."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as connection:
        found = b""
        try:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                found += part
        except OSError:
            pass
        return found


def good(server: Running) -> bool:
    body, headers = binary(X)
    return server.ask("POST", "/v2/models/mlp/infer", body, headers)[0] == 200


def test_garbage_is_refused(server: Running) -> None:
    generator = random.Random(0)
    for _ in range(60):
        answer = send(server.port, http_request(generator))
        if answer:
            status = int(answer.split(b" ", 2)[1])
            assert status == 200 or 400 <= status < 500, answer
    assert server.grpc_port is not None
    for _ in range(20):
        send(server.grpc_port, http2_garbage(generator), 0.05)
    assert good(server)


def test_clients_that_go_or_hang(models: Path) -> None:
    with running(models, receive_timeout=0.2, max_connections=20) as server:
        hanging = []
        for n in range(8):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            connection.sendall(b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx"[: -n or None])
            hanging.append(connection)
            assert good(server)
        for connection in hanging[4:]:
            connection.close()
        assert hanging[0].recv(1000).startswith(b"HTTP/1.1 408")
        for silent in (b"", b"POST /v2/models/mlp/infer HT"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
                connection.sendall(silent)
                assert connection.recv(1) == b""
        time.sleep(0.05)
        assert good(server)
        lines = server.ask("GET", "/metrics")[1].decode().splitlines()
        assert next(line for line in lines if line.startswith("tcomp_pending_bytes ")) == "tcomp_pending_bytes 0.0"
        for connection in hanging[:4]:
            connection.close()


def test_more_connections_than_may_be(models: Path) -> None:
    with running(models, max_connections=3) as server:
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
        time.sleep(0.1)
        assert server.ask("GET", "/v2/health/live")[0] == 503
        for connection in held:
            connection.close()
        time.sleep(0.1)
        assert good(server)


def test_answers_are_strict_json(server: Running) -> None:
    """Numbers that JSON lacks are null; as bytes they are what they are."""
    x = np.full((1, 8), np.inf, np.float32)
    status, answer, _ = server.ask("POST", "/v2/models/plus/infer", *binary(x, False))
    assert status == 200 and json.dumps(answer) and answer["outputs"][0]["data"] == [None] * 8
