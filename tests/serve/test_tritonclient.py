"""The clients of NVIDIA Triton, which speak the same protocol."""

from __future__ import annotations

import csv
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.servers import W, running

X = np.arange(16, dtype=np.float32).reshape(2, 8) / 8


def check(module: Any, url: str, error: Any, config: Any, statistics: Any) -> None:
    """`config` and `statistics` make dictionaries of what the client returns."""
    client = module.InferenceServerClient(url)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("mlp")
    given, wanted = module.InferInput("x", [2, 8], "FP32"), module.InferRequestedOutput("y")
    given.set_data_from_numpy(X)
    result = client.infer("mlp", [given], outputs=[wanted], request_id="seven", timeout=10_000_000)
    np.testing.assert_allclose(result.as_numpy("y"), X @ W, rtol=1e-5)
    with pytest.raises(error, match="there is no model 'none'"):
        client.infer("none", [given])
    described = config(client.get_model_config("mlp"))
    assert described["max_batch_size"] == 32 and described["instance_group"][0]["kind"] == "KIND_CPU"
    assert [(t["name"], t["data_type"], [*map(int, t["dims"])]) for t in described["input"]] == [("x", "TYPE_FP32", [8])]
    assert [(t["name"], t["data_type"], [*map(int, t["dims"])]) for t in described["output"]] == [("y", "TYPE_FP32", [5])]
    assert not config(client.get_model_config("mixed")).get("max_batch_size")  # its rows have an effect on each other
    (counts,) = statistics(client.get_inference_statistics("mlp"))["model_stats"]
    assert int(counts["inference_count"]) == 2 and int(counts["execution_count"]) == 1  # two rows, one run
    for part in ("success", "queue", "compute_infer", "compute_input", "compute_output"):
        assert int(counts["inference_stats"][part]["count"]) == 1
    times = {part: int(told.get("ns", 0)) for part, told in counts["inference_stats"].items()}
    assert 0 < times["compute_infer"] and times["queue"] + times["compute_infer"] <= times["success"]
    client.unload_model("mlp")
    assert not client.is_model_ready("mlp")
    client.load_model("mlp")
    assert client.is_model_ready("mlp")
    client.close()


def test_http(models: Any) -> None:
    module = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")
    from tritonclient.utils import InferenceServerException

    with running(models, management=True) as server:
        check(module, f"127.0.0.1:{server.port}", InferenceServerException, dict, dict)
        client = module.InferenceServerClient(f"127.0.0.1:{server.port}")
        given = module.InferInput("x", [2, 8], "FP32")
        given.set_data_from_numpy(X, binary_data=False)
        np.testing.assert_allclose(client.infer("mlp", [given]).as_numpy("y"), X @ W, rtol=1e-5)
        assert client.get_model_metadata("plus")["versions"] == ["1", "2"]
        assert {row["name"] for row in client.get_model_repository_index()} == {"mlp", "plus", "mixed", "picture"}


def test_grpc(models: Any) -> None:
    module = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]")
    from google.protobuf.json_format import MessageToDict
    from tritonclient.utils import InferenceServerException

    def of_json(message: Any) -> Any:
        return MessageToDict(message, preserving_proto_field_name=True)

    with running(models, management=True) as server:
        url = f"127.0.0.1:{server.grpc_port}"
        check(module, url, InferenceServerException, lambda answer: of_json(answer)["config"], of_json)
        client = module.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        assert list(client.get_model_metadata("plus").versions) == ["1", "2"]


@pytest.mark.skipif(shutil.which("perf_analyzer") is None, reason="needs perf-analyzer, for glibc 2.38")
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_load_generator(models: Any, protocol: str, tmp_path: Path) -> None:
    """NVIDIA's perf_analyzer, which asks for the configuration and statistics of a model."""
    with running(models) as server:
        url = f"127.0.0.1:{server.port if protocol == 'http' else server.grpc_port}"
        command = ["perf_analyzer", "-m", "mlp", "-i", protocol, "-u", url, "-b", "2", "--concurrency-range", "4", "--request-count", "200"]
        done = subprocess.run([*command, "-f", "report.csv"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (row,) = csv.DictReader((tmp_path / "report.csv").open())
        assert float(row["Inferences/Second"]) > 0 and float(row["Server Compute Infer"]) > 0
