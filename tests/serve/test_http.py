"""The Open Inference Protocol over HTTP, plain JSON, pictures, and the pages beside them."""

from __future__ import annotations

import io
import json
import socket

import numpy as np
import pytest

from tests.serve.servers import Running, W, running

X = np.arange(16, dtype=np.float32).reshape(2, 8) / 8


def request(x: np.ndarray, **more: object) -> dict[str, object]:
    return {"inputs": [{"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}], **more}


def binary(x: np.ndarray, outputs: bool = True, size: int | None = None, **more: object) -> tuple[bytes, dict[str, str]]:
    tensor = {
        "name": "x",
        "shape": list(x.shape),
        "datatype": "FP32",
        "parameters": {"binary_data_size": x.nbytes if size is None else size},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": outputs}, **more}).encode()
    return head + x.tobytes(), {"Inference-Header-Content-Length": str(len(head))}


def test_numbers_in_json(server: Running) -> None:
    status, answer, _ = server.ask("POST", "/v2/models/mlp/infer", request(X, id="seven"))
    assert status == 200 and answer["id"] == "seven" and answer["model_name"] == "mlp" and answer["model_version"] == "1"
    (y,) = answer["outputs"]
    assert y["name"] == "y" and y["datatype"] == "FP32" and y["shape"] == [2, 5]
    np.testing.assert_allclose(np.array(y["data"]).reshape(2, 5), X @ W, rtol=1e-5)
    nested = {"inputs": [{"name": "x", "shape": [2, 8], "datatype": "FP32", "data": X.tolist()}]}
    assert server.ask("POST", "/v2/models/mlp/versions/1/infer", nested)[1]["outputs"] == answer["outputs"]


def test_tensors_as_bytes(server: Running) -> None:
    status, answer, headers = server.ask("POST", "/v2/models/mlp/infer", *binary(X))
    length = int(headers["inference-header-content-length"])
    (y,) = json.loads(answer[:length])["outputs"]
    assert status == 200 and y["parameters"] == {"binary_data_size": 40}
    np.testing.assert_allclose(np.frombuffer(answer[length:], np.float32).reshape(2, 5), X @ W, rtol=1e-5)
    _, answer, _ = server.ask("POST", "/v2/models/mlp/infer", *binary(X, False))
    assert len(answer["outputs"][0]["data"]) == 10


def test_an_answer_is_sent_at_once(server: Running) -> None:
    """Its headers and its body in one packet, also of the last answer of a connection."""
    body, headers = binary(X)
    for last in ("keep-alive", "close"):
        lines = [f"{name}: {value}" for name, value in {"Host": "x", "Content-Length": len(body), "Connection": last, **headers}.items()]
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall("\r\n".join(["POST /v2/models/mlp/infer HTTP/1.1", *lines, "\r\n"]).encode() + body)
            head, _, content = client.recv(1 << 16).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and f"content-length: {len(content)}".encode() in head and content


def test_outputs_that_are_wanted(server: Running) -> None:
    wanted = [{"name": "y", "parameters": {"binary_data": True}}]
    _, answer, headers = server.ask("POST", "/v2/models/mlp/infer", request(X, outputs=wanted))
    assert len(answer) == int(headers["inference-header-content-length"]) + 40


def test_plain_json(server: Running) -> None:
    status, answer, _ = server.ask("POST", "/v1/models/mlp:predict", {"inputs": {"x": X.tolist()}})
    assert status == 200
    np.testing.assert_allclose(answer["outputs"]["y"], X @ W, rtol=1e-5)
    assert server.ask("POST", "/v1/models/mlp:predict", {"inputs": {"x": [["a"]]}})[0] == 400
    assert server.ask("POST", "/v1/models/mlp:predict", {"inputs": {"z": [[1]]}})[0] == 400
    assert server.ask("POST", "/v1/models/mlp:predict", {"instances": [[1]]})[0] == 400


def test_pictures(server: Running) -> None:
    image = pytest.importorskip("PIL.Image", reason="pictures need pillow")
    picture = image.new("RGB", (40, 30), (255, 0, 51))
    file = io.BytesIO()
    picture.save(file, "PNG")
    status, answer, _ = server.ask("POST", "/v1/models/picture/image", file.getvalue())
    assert status == 200 and [row["label"] for row in answer["best"]] == ["red", "blue"]
    np.testing.assert_allclose([row["score"] for row in answer["best"]], [1, 0.2], rtol=1e-5)
    assert server.ask("POST", "/v1/models/picture/image", file.getvalue()[:50])[0] == 400
    assert server.ask("POST", "/v1/models/mlp/image", file.getvalue())[0] == 404


def test_what_there_is(server: Running) -> None:
    assert server.ask("GET", "/v2/health/live")[:2] == (200, {"live": True})
    assert server.ask("GET", "/v2/health/ready")[:2] == (200, {"ready": True})
    assert "binary_tensor_data" in server.ask("GET", "/v2")[1]["extensions"]
    _, model, _ = server.ask("GET", "/v2/models/plus")
    assert model["versions"] == ["1", "2"] and model["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}]
    assert server.ask("GET", "/v2/models/plus/versions/2/ready")[:2] == (200, {"name": "plus", "ready": True})
    assert server.ask("GET", "/v2/models/plus/versions/3/ready")[0] == 404
    assert server.ask("GET", "/v2/models/mlp/config")[1]["batched"] is True
    mixed = server.ask("GET", "/v2/models/mixed/config")[1]
    assert mixed["batched"] is False and "effect on each other" in mixed["why_not"]
    _, rows, _ = server.ask("POST", "/v2/repository/index", b"")
    assert {(row["name"], row["version"], row["state"]) for row in rows} >= {("plus", "1", "READY"), ("mlp", "1", "READY")}


def test_the_highest_version_is_the_default(server: Running) -> None:
    for version, k in (("", 2), ("/versions/1", 1), ("/versions/2", 2)):
        _, answer, _ = server.ask("POST", f"/v2/models/plus{version}/infer", request(X))
        assert answer["outputs"][0]["data"] == (X + k).ravel().tolist()


def test_figures_and_pages(server: Running) -> None:
    server.ask("POST", "/v2/models/mlp/infer", request(X))
    _, text, headers = server.ask("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain")
    lines = dict(line.rsplit(b" ", 1) for line in text.splitlines() if not line.startswith(b"#"))
    assert float(lines[b'tcomp_request_seconds_count{model="mlp",version="1"}']) >= 1
    assert float(lines[b'tcomp_requests_total{model="mlp",protocol="http",status="200",version="1"}']) >= 1
    assert float(lines[b'tcomp_batch_rows_sum{model="mlp",version="1"}']) >= 2
    _, page, headers = server.ask("GET", "/")
    assert b"<b>mlp</b>" in page and b"<script" not in page and "default-src 'none'" in headers["content-security-policy"]
    counts = server.ask("GET", "/v2/models/mlp/stats")[1]["model_stats"][0]["inference_stats"]
    assert counts["success"]["count"] >= 1


TENSOR = {"name": "x", "shape": [2, 8], "datatype": "FP32", "data": X.ravel().tolist()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [3, 8]}, "24 elements"), ({"shape": [-1, 8]}, "not a list of sizes"), ({"shape": [1 << 50, 8]}, "not a list of sizes"),
        ({"shape": "28"}, "not a list of sizes"), ({"shape": [4, 4]}, "wrong shape"), ({"shape": [], "data": [1]}, "wrong shape"), ({"datatype": "FP64"}, "expected FP32"), ({"datatype": None}, "expected FP32"),
        ({"name": "z"}, "no input 'z'"), ({"data": "abc"}, "not a list of numbers"), ({"data": [1, [2]]}, "rectangular"), ({"data": ["1"] * 16}, "without loss"),
        ({"data": None}, "not a list of numbers"), ({"parameters": 3}, "not an object"), ({"parameters": {"binary_data_size": 64}}, "binary_data_size"),
        ({"parameters": {"shared_memory_region": "r"}}, "not supported"),
    ],
)  # fmt: skip
def test_a_wrong_input_is_refused_by_name(server: Running, change: dict[str, object], message: str) -> None:
    status, answer, _ = server.ask("POST", "/v2/models/mlp/infer", {"inputs": [TENSOR | change]})
    assert status == 400 and message in answer["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not valid JSON"), (b"[" * 100_000, "not valid JSON"), (b"[]", "not an object"), (b"{}", "not an array of objects"), (b'{"inputs": [1]}', "not an array of objects"),
        (b'{"inputs": []}', "missing x"), (json.dumps({"inputs": [TENSOR, TENSOR]}).encode(), "given twice"), (b"\xff\xfe", "not valid JSON"),
        (json.dumps({"inputs": [TENSOR], "id": 3}).encode(), "not a string"), (json.dumps({"inputs": [TENSOR], "outputs": [{"name": "z"}]}).encode(), "no output 'z'"),
        (json.dumps({"inputs": [TENSOR], "parameters": {"timeout": "x"}}).encode(), "microseconds"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused(server: Running, body: bytes, message: str) -> None:
    status, answer, _ = server.ask("POST", "/v2/models/mlp/infer", body)
    assert status == 400 and message in answer["error"]


def test_wrong_bytes_are_refused(server: Running) -> None:
    for size in (0, 63, 65, -1, 1 << 60):
        assert server.ask("POST", "/v2/models/mlp/infer", *binary(X, size=size))[0] == 400
    body, _ = binary(X)
    for length in ("-1", "x", "99999", "1e3", "²"[:0], "0"):
        assert server.ask("POST", "/v2/models/mlp/infer", body, {"Inference-Header-Content-Length": length})[0] == 400


def test_other_refusals(server: Running) -> None:
    assert server.ask("POST", "/v2/models/none/infer", request(X))[0] == 404
    status, answer, fields = server.ask("GET", "/v2/models/mlp/infer")
    assert status == 405 and fields["allow"] == "POST" and answer["error"].endswith("it takes POST")
    assert server.ask("GET", "/v3")[0] == 404 and "GET /v3" in server.ask("GET", "/v3")[1]["error"]
    assert server.ask("POST", "/v2/repository/models/mlp/unload", b"")[0] == 403
    assert server.ask("POST", "/v2/models/mlp/infer", b"x", {"Content-Encoding": "gzip"})[0] == 415
    assert server.ask("POST", "/v2/models/mlp/infer", b"", {"Content-Length": str(1 << 40)})[0] == 413
    assert server.ask("POST", "/v2/models/mlp/infer", iter([b"{}"]))[0] == 411  # in chunks
    assert server.ask("POST", "/v2/models/mlp/infer", request(X, parameters={"timeout": 1}))[0] == 504


def test_limits_of_memory(models, tmp_path) -> None:
    with running(models, max_request=4096, max_pending=600) as server:
        status, answer, headers = server.ask("POST", "/v2/models/mlp/infer", b"x" * 1000)
        assert status == 429 and "pending" in answer["error"] and headers["retry-after"] == "1"
        assert server.ask("POST", "/v2/models/mlp/infer", b"x" * 5000)[0] == 413
        assert server.ask("POST", "/v2/repository/index", b"x" * 5000)[0] == 413
        assert server.ask("POST", "/v2/models/mlp/infer", *binary(X))[0] == 200
