"""HTTP/2 as the server speaks it: large messages, frames of every kind, and what it does not put up with."""

from __future__ import annotations

import random
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, Self

import grpc
import numpy as np
import pytest
from hpack import Decoder, Encoder, HPACKError, InvalidTableIndex

from tcomp.serve.grpc.headers import HeaderDecoder
from tcomp.serve.grpc.messages import MESSAGES
from tests.serve.servers import Running, running
from tests.serve.test_grpc import Client, infer_request, refused

DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 1, 1, 4, 8, 32
PATH = "/inference.GRPCInferenceService/ModelInfer"
FIELDS = {":method": "POST", ":scheme": "http", ":path": PATH, ":authority": "x", "te": "trailers", "content-type": "application/grpc"}


class Peer:
    """A client that sends what it likes."""

    def __init__(self, server: Running, preface: bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") -> None:
        import socket

        self.socket = socket.create_connection(("127.0.0.1", server.grpc_port), timeout=20)
        self.encoder, self.decoder, self.received = Encoder(), Decoder(), b""
        self.socket.sendall(preface)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, kind: int, flags: int = 0, stream: int = 0, content: bytes = b"") -> None:
        self.socket.sendall(frame(kind, flags, stream, content))

    def headers(self, stream: int, flags: int = END_HEADERS, **changes: str) -> None:
        fields = {**FIELDS, **{name.replace("_", "-"): value for name, value in changes.items() if name != "path"}}
        fields[":path"] = changes.get("path", PATH)
        self.send(HEADERS, flags, stream, self.encoder.encode(list(fields.items())))

    def call(self, stream: int, message: bytes) -> None:
        self.headers(stream)
        self.send(DATA, END_STREAM, stream, struct.pack(">BI", 0, len(message)) + message)

    def next(self, *kinds: int) -> tuple[int, int, int, bytes]:
        """The next frame of these kinds. Raises ConnectionError at the end."""
        while True:
            while len(self.received) < 9 or len(self.received) < 9 + int.from_bytes(self.received[:3]):
                part = self.socket.recv(1 << 16)
                if not part:
                    raise ConnectionError
                self.received += part
            end = 9 + int.from_bytes(self.received[:3])
            found, self.received = self.received[:end], self.received[end:]
            if found[3] == HEADERS:
                self.fields = {str(name): str(value) for name, value in self.decoder.decode(found[9:])}
            if found[3] in kinds:
                return found[3], found[4], int.from_bytes(found[5:9]), found[9:]

    def status(self) -> tuple[int, int]:
        """Stream and grpc-status of the next call that ends."""
        while True:
            _, flags, stream, _ = self.next(HEADERS)
            if flags & END_STREAM:
                return stream, int(self.fields["grpc-status"])

    def gone(self) -> int:
        """The error with which the server ends the connection."""
        code = int.from_bytes(self.next(GOAWAY)[3][4:8])
        with pytest.raises(ConnectionError):
            self.next(DATA)
        return code


def frame(kind: int, flags: int = 0, stream: int = 0, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


MESSAGE = infer_request(model="plus").SerializeToString()


def test_large_messages_and_many_at_a_time(server: Running) -> None:
    """8 MB there and back, beyond all windows of flow control; and 64 calls at once on one connection."""
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) as channel:
        x = np.random.default_rng(0).standard_normal((250_000, 8), np.float32)
        answer = Client(channel)("ModelInfer", infer_request(x, model="plus"))
        assert np.array_equal(np.frombuffer(answer.raw_output_contents[0], np.float32), (x + 2).ravel())
        inputs = [np.full((1 + n % 3, 8), n, np.float32) for n in range(64)]
        with ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(lambda x: Client(channel)("ModelInfer", infer_request(x, model="plus")), inputs))
        for x, answer in zip(inputs, answers, strict=True):
            assert answer.raw_output_contents[0] == (x + 2).tobytes()


def test_the_answer_waits_for_the_window(server: Running) -> None:
    with Peer(server) as peer:
        peer.send(SETTINGS, 0, 0, struct.pack(">HI", 4, 10))  # bytes of a stream's window
        peer.call(1, MESSAGE)
        assert len(peer.next(DATA)[3]) == 10
        peer.send(WINDOW, 0, 1, struct.pack(">I", 7))
        assert len(peer.next(DATA)[3]) == 7
        peer.send(SETTINGS, 0, 0, struct.pack(">HI", 4, 15))  # 5 more
        assert len(peer.next(DATA)[3]) == 5
        peer.send(WINDOW, 0, 1, struct.pack(">I", 1000))
        peer.next(DATA)
        assert peer.status() == (1, 0)


def test_frames_that_are_allowed(server: Running) -> None:
    """Padding, priorities, headers in several frames, pings, frames of unknown types."""
    with Peer(server) as peer:
        peer.send(99, 255, 7, b"unknown")
        peer.send(PRIORITY, 0, 1, bytes(5))
        peer.send(PING, 0, 0, b"12345678")
        assert peer.next(PING)[1:] == (ACK, 0, b"12345678")
        block = peer.encoder.encode(list(FIELDS.items()))
        peer.send(HEADERS, PADDED | WITH_PRIORITY, 1, b"\x03" + bytes(5) + block[:20] + bytes(3))
        peer.send(CONTINUATION, 0, 1, block[20:30])
        peer.send(CONTINUATION, END_HEADERS, 1, block[30:])
        body = struct.pack(">BI", 0, len(MESSAGE)) + MESSAGE
        peer.send(DATA, PADDED, 1, b"\x02" + body[:50] + bytes(2))
        peer.send(DATA, 0, 1, body[50:])
        peer.send(HEADERS, END_HEADERS | END_STREAM, 1, peer.encoder.encode([("trailer", "x")]))
        assert peer.status() == (1, 0)
        peer.call(3, MESSAGE)  # the tables of headers still agree
        assert peer.status() == (3, 0)


def test_calls_that_are_refused(server: Running) -> None:
    with Peer(server) as peer:
        peer.headers(1, path="/inference.GRPCInferenceService/Nothing")
        assert peer.status() == (1, 12)
        peer.headers(3)
        peer.send(DATA, END_STREAM, 3, b"\x01\x00\x00\x00\x01x")  # compressed
        assert peer.status() == (3, 12)
        for stream, body in ((5, b""), (7, b"\x00"), (9, b"\x00\x00\x00\x00\x09x"), (11, b"\x00\x00\x00\x00\x00y")):
            peer.headers(stream)
            peer.send(DATA, END_STREAM, stream, body)
            assert peer.status() == (stream, 3)
        peer.headers(13, content_type="text/plain")
        peer.next(HEADERS)
        assert peer.fields == {":status": "415"}
        peer.headers(15, grpc_timeout="1n")
        peer.send(DATA, END_STREAM, 15, struct.pack(">BI", 0, len(MESSAGE)) + MESSAGE)
        assert peer.status() == (15, 4)
        peer.call(17, MESSAGE)
        assert peer.status() == (17, 0)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (frame(DATA, 0, 0, b"x"), 1), (frame(DATA, 0, 1, b"x"), 1), (frame(HEADERS, END_HEADERS, 2), 1), (frame(HEADERS, END_HEADERS, 1, b"\xff" * 20), 9),
        (frame(HEADERS, END_HEADERS | PADDED, 1, b"\x09x"), 1), (frame(CONTINUATION, 0, 1), 1), (frame(HEADERS, 0, 1) + frame(PING, 0, 0, bytes(8)), 1),
        (frame(SETTINGS, 0, 0, b"12345"), 6), (frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31)), 3), (frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 1)), 1),
        (frame(PING, 0, 0, b"1"), 6), (frame(WINDOW, 0, 0, bytes(4)), 3), (frame(WINDOW, 0, 0, struct.pack(">I", (1 << 31) - 1)), 3), (frame(PUSH, 0, 1), 1),
        (frame(RST, 0, 1, b"1"), 6), (b"\xff\xff\xff" + frame(DATA)[3:], 6), (frame(PING, 0, 0, bytes(8)) * 21_000, 11), (frame(SETTINGS) * 21_000, 11),
        (frame(HEADERS, 0, 1, bytes(100)) + frame(CONTINUATION, 0, 1, bytes(1000)) * 20, 11),
    ],
)  # fmt: skip
def test_what_ends_a_connection(server: Running, content: bytes, code: int) -> None:
    with Peer(server) as peer:
        try:
            peer.socket.sendall(content)
        except OSError:  # it has ended before all was sent
            pass
        try:
            assert peer.gone() == code
        except ConnectionResetError:
            assert code == 11  # what was not read any more is answered so
    with Peer(server) as peer:
        peer.call(1, MESSAGE)
        assert peer.status() == (1, 0)


def test_streams_that_are_reset_again_and_again(server: Running) -> None:
    """CVE-2023-44487."""
    with Peer(server) as peer:
        try:
            for n in range(1, 4000, 2):
                peer.headers(n)
                peer.send(RST, 0, n, bytes(4))
            assert peer.gone() == 11
        except (BrokenPipeError, ConnectionResetError):
            pass
    with Peer(server) as peer:
        peer.call(1, MESSAGE)
        assert peer.status() == (1, 0)


def test_no_http2(server: Running) -> None:
    with Peer(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") as peer:
        assert peer.gone() == 1


def test_clients_that_hang(models: Path) -> None:
    with running(models, receive_timeout=0.2, max_connections=2) as server, Peer(server) as hanging, Peer(server, b"PRI") as silent:
        hanging.headers(1)
        hanging.send(DATA, 0, 1, b"\x00\x00\x00\x00\x09x")
        assert hanging.status() == (1, 1)
        with pytest.raises((ConnectionError, ConnectionResetError)):
            silent.next(GOAWAY)
        hanging.call(3, MESSAGE)
        assert hanging.status() == (3, 0)
        with Peer(server) as other:
            other.next(SETTINGS)
            with Peer(server) as third, pytest.raises(OSError):  # one too many
                third.next(SETTINGS)


def test_clients_that_do_not_read(models: Path) -> None:
    """Neither is their window opened, nor are their answers taken from the socket; memory would fill with them."""
    with running(models, receive_timeout=0.05) as server:
        with Peer(server) as shut:
            shut.send(SETTINGS, 0, 0, struct.pack(">HI", 4, 10))
            shut.call(1, MESSAGE)
            shut.next(DATA)
            assert shut.next(RST)[2:] == (1, struct.pack(">I", 8))
        with Peer(server) as silent:
            silent.headers(1, path="/inference.GRPCInferenceService/ModelStreamInfer")
            assert silent.status() == (1, 1)  # after ten times 0.05 s
        with Peer(server) as deaf:
            deaf.send(SETTINGS, 0, 0, struct.pack(">HI", 4, (1 << 31) - 1))
            deaf.send(WINDOW, 0, 0, struct.pack(">I", 1 << 30))
            large = infer_request(np.ones((30_000, 8), np.float32), model="plus").SerializeToString()
            with pytest.raises(OSError):
                for stream in range(1, 1000, 2):
                    deaf.call(stream, large)
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            assert Client(channel)("ModelInfer", infer_request()).id == "seven"


def test_bytes_of_calls_are_counted(models: Path) -> None:
    with running(models, max_pending=1000) as server:
        with Peer(server) as holding, grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            holding.headers(1)
            holding.send(DATA, 0, 1, struct.pack(">BI", 0, 2000) + bytes(900))
            holding.send(PING, 0, 0, bytes(8))
            holding.next(PING)
            code, details = refused(lambda: Client(channel)("ModelInfer", infer_request()))
            assert code == "RESOURCE_EXHAUSTED" and "pending" in details
            holding.send(RST, 0, 1, bytes(4))
            holding.send(PING, 0, 0, bytes(8))
            holding.next(PING)
            assert Client(channel)("ModelInfer", infer_request()).id == "seven"
        text = server.ask("GET", "/metrics")[1].decode()
        assert "\ntcomp_pending_bytes 0.0" in text


def test_bytes_of_a_stream_count_until_they_are_answered(models: Path) -> None:
    with running(models, max_pending=1000) as server, grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        messages = MESSAGES["ModelInferRequest"], MESSAGES["ModelStreamInferResponse"]
        call = channel.stream_stream(
            f"{PATH.replace('ModelInfer', 'ModelStreamInfer')}", messages[0].SerializeToString, messages[1].FromString
        )
        given, taken = Queue[Any](), 0
        answers = call(iter(given.get, None), timeout=20)
        for _ in range(20):
            given.put(infer_request())
            taken += next(answers).infer_response.id == "seven"
        given.put(None)
        assert taken == 20 and not [*answers]
        assert "\ntcomp_pending_bytes 0.0" in server.ask("GET", "/metrics")[1].decode()


def test_the_end_of_a_connection_waits_for_its_calls(models: Path) -> None:
    with running(models) as server:
        peer = Peer(server)
        peer.headers(1)
        body = struct.pack(">BI", 0, len(MESSAGE)) + MESSAGE
        peer.send(DATA, 0, 1, body[:50])
        peer.send(PING, 0, 0, bytes(8))
        peer.next(PING)
        with ThreadPoolExecutor(1) as pool:

            def rest() -> tuple[int, int]:
                assert int.from_bytes(peer.next(GOAWAY)[3][4:8]) == 0
                peer.headers(3)  # too late
                assert peer.next(RST)[2] == 3
                peer.send(DATA, END_STREAM, 1, body[50:])
                return peer.status()

            answer = pool.submit(rest)
            time.sleep(0.05)
            server.stop()
            assert answer.result(20) == (1, 0)
        peer.socket.close()


@pytest.mark.parametrize("table", [0, 64, 200, 4096])
def test_headers_are_those_of_a_decoder_that_remembers_nothing(table: int) -> None:
    """Blocks that say the same in other words, and the same words that say something else since the table has changed."""
    rng = random.Random(table)
    encoder, plain, ours = Encoder(), Decoder(), HeaderDecoder(1 << 14)
    blocks = []
    for turn in range(600):
        fields = [*FIELDS.items(), ("grpc-timeout", f"{rng.randrange(3)}S"), (f"x-{rng.randrange(4)}", rng.choice(("a", "b" * 50)))]
        if not turn % 50:
            encoder.header_table_size = rng.choice((table, 4096))
        blocks.append(encoder.encode(fields if rng.random() < 0.3 else fields[:6]))
        block = rng.choice(blocks[-4:]) if rng.random() < 0.3 else blocks[-1]
        try:
            expected: dict[Any, Any] = dict(plain.decode(block))
        except (HPACKError, InvalidTableIndex):
            with pytest.raises((HPACKError, InvalidTableIndex)):
                ours.decode(block)
            return  # as a connection does
        assert ours.decode(block) == expected


def test_the_same_words_of_a_header_after_the_table_has_changed() -> None:
    ours = HeaderDecoder(1 << 14)
    insert = b"\x40\x01x\x01"  # the field x with a value of one byte, which enters the table
    assert ours.decode(insert + b"a") == {"x": "a"}
    assert [ours.decode(b"\xbe") for _ in range(3)] == [{"x": "a"}] * 3  # the newest entry
    assert ours.decode(insert + b"b") == {"x": "b"}
    assert [ours.decode(b"\xbe") for _ in range(3)] == [{"x": "b"}] * 3
    assert ours.decode(b"\x20") == {}  # no table from here on
    with pytest.raises(InvalidTableIndex):
        ours.decode(b"\xbe")
