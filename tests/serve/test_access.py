"""Tokens, rates, TLS."""

from __future__ import annotations

import datetime
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

from tcomp.errors import InputError
from tcomp.serve.access import Access
from tcomp.serve.health import is_ready
from tcomp.serve.metrics import Metrics
from tcomp.serve.options import ServerOptions, check_server_options
from tcomp.serve.refusals import Refusal
from tests.serve.servers import running
from tests.serve.test_grpc import Client, infer_request, refused
from tests.serve.test_http import X, binary

TOKEN = "0123456789abcdef"


def test_requests_need_a_token(models: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"# of tests\n{TOKEN}\nanother-token-of-somebody\n")
    with running(models, tokens=tmp_path / "tokens") as server:
        body, headers = binary(X)
        infer = "/v2/models/mlp/infer"
        for wrong in ({}, {"Authorization": "Bearer nothing"}, {"Authorization": TOKEN}, {"Authorization": f"Basic {TOKEN}"}):
            status, answer, found = server.ask("POST", infer, body, headers | wrong)
            assert status == 401 and found["www-authenticate"] == "Bearer" and "token" in answer["error"]
        assert server.ask("GET", "/metrics")[0] == server.ask("GET", "/")[0] == server.ask("GET", "/v2/models/mlp")[0] == 401
        assert server.ask("GET", "/v2/health/live")[0] == 200
        assert server.ask("POST", infer, body, headers | {"Authorization": f"Bearer {TOKEN}"})[0] == 200
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            client = Client(channel)
            assert client("ServerLive").live
            assert refused(lambda: client("ModelInfer", infer_request()))[0] == "UNAUTHENTICATED"
            assert client("ModelInfer", infer_request(), metadata=[("authorization", f"Bearer {TOKEN}")]).id == "seven"


def test_a_client_that_asks_too_often(models: Path) -> None:
    with running(models, rate=0.01, burst=3) as server:
        body, headers = binary(X)
        answers = [server.ask("POST", "/v2/models/mlp/infer", body, headers) for _ in range(5)]
        assert [status for status, _, _ in answers] == [200, 200, 200, 429, 429]
        assert 0 < int(answers[-1][2]["retry-after"]) <= 100 and "requests per second" in answers[-1][1]["error"]
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            assert refused(lambda: Client(channel)("ModelMetadata", name="mlp"))[0] == "RESOURCE_EXHAUSTED"  # the same client


def test_rates_are_those_of_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tcomp.serve.access.time.monotonic", lambda: now[0])
    access = Access(ServerOptions(Path("."), rate=2.0, burst=2), Metrics())

    def allowed(peer: str) -> bool:
        try:
            access.check("", peer)
        except Refusal as refusal:
            assert refusal.retry_after is not None and 0 < refusal.retry_after <= 0.5
            return False
        return True

    assert [allowed("a"), allowed("a"), allowed("a"), allowed("b")] == [True, True, False, True]
    now[0] = 0.5
    assert [allowed("a"), allowed("a")] == [True, False]
    now[0] = 100.0
    assert [allowed("a") for _ in range(4)] == [True, True, False, False]


def test_pending_bytes_are_given_back() -> None:
    access = Access(ServerOptions(Path("."), max_pending=10), Metrics())
    with access.pending(6):
        with pytest.raises(Refusal, match="pending"), access.pending(5):
            pass
        with access.pending(4):
            pass
    with access.pending(10):
        pass


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("secret\n")
    (tmp_path / "none").write_text("# nothing\n")
    for name, message in (("short", "fewer than 16"), ("none", "has none"), (".", "cannot read")):
        with pytest.raises(InputError, match=message):
            Access(ServerOptions(tmp_path, tokens=tmp_path / name), Metrics())
    for options, message in (
        ({"certificate": tmp_path / "short"}, "belong together"), ({"client_ca": tmp_path / "short"}, "need TLS"), ({"poll": -1}, "negative"),
        ({"drain_timeout": 0}, "more than 0"), ({"trusted": tmp_path / "missing"}, "no such file"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            check_server_options(ServerOptions(tmp_path, **options))


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    pytest.importorskip("cryptography", reason="certificates are made by the package cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")]), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False).add_extension(
        x509.BasicConstraints(True, 0), True
    )
    (folder / "cert.pem").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return folder / "cert.pem", folder / "key.pem"


def test_tls_for_both_protocols(models: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with running(models, certificate=cert, private_key=key) as server:
        context: Any = ssl.create_default_context(cafile=str(cert))
        with urllib.request.urlopen(f"https://localhost:{server.port}/v2/health/live", context=context, timeout=20) as answer:
            assert answer.status == 200
        assert is_ready(server.port)
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials) as channel:
            assert Client(channel)("ServerLive").live


def test_clients_need_certificates_where_that_is_asked(models: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with running(models, certificate=cert, private_key=key, client_ca=cert) as server:
        context: Any = ssl.create_default_context(cafile=str(cert))
        with pytest.raises(OSError):
            urllib.request.urlopen(f"https://localhost:{server.port}/v2/health/live", context=context, timeout=20)
        assert is_ready(server.port)
        context.load_cert_chain(cert, key)
        with urllib.request.urlopen(f"https://localhost:{server.port}/v2/health/live", context=context, timeout=20) as answer:
            assert answer.status == 200


def test_a_certificate_that_is_none(models: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.pem").write_text("nothing")
    with (
        pytest.raises(InputError, match="certificate cannot be used"),
        running(models, certificate=tmp_path / "wrong.pem", private_key=tmp_path / "wrong.pem"),
    ):
        pass
