"""The clients of NVIDIA Triton, which speak the same protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.serve.servers import W, running

X = np.arange(16, dtype=np.float32).reshape(2, 8) / 8


def check(module: Any, url: str, error: Any) -> None:
    client = module.InferenceServerClient(url)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("mlp")
    given, wanted = module.InferInput("x", [2, 8], "FP32"), module.InferRequestedOutput("y")
    given.set_data_from_numpy(X)
    result = client.infer("mlp", [given], outputs=[wanted], request_id="seven", timeout=10_000_000)
    np.testing.assert_allclose(result.as_numpy("y"), X @ W, rtol=1e-5)
    with pytest.raises(error, match="there is no model 'none'"):
        client.infer("none", [given])
    client.unload_model("mlp")
    assert not client.is_model_ready("mlp")
    client.load_model("mlp")
    assert client.is_model_ready("mlp")
    client.close()


def test_http(models: Any) -> None:
    module = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")
    from tritonclient.utils import InferenceServerException

    with running(models, management=True) as server:
        check(module, f"127.0.0.1:{server.port}", InferenceServerException)
        client = module.InferenceServerClient(f"127.0.0.1:{server.port}")
        given = module.InferInput("x", [2, 8], "FP32")
        given.set_data_from_numpy(X, binary_data=False)
        np.testing.assert_allclose(client.infer("mlp", [given]).as_numpy("y"), X @ W, rtol=1e-5)
        assert client.get_model_metadata("plus")["versions"] == ["1", "2"]
        assert {row["name"] for row in client.get_model_repository_index()} == {"mlp", "plus", "mixed", "picture"}


def test_grpc(models: Any) -> None:
    module = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]")
    from tritonclient.utils import InferenceServerException

    with running(models, management=True) as server:
        check(module, f"127.0.0.1:{server.grpc_port}", InferenceServerException)
        client = module.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        assert list(client.get_model_metadata("plus").versions) == ["1", "2"]
