"""The Open Inference Protocol over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from tcomp.serve.grpc.messages import MESSAGES
from tests.serve.servers import Running, W, running

X = np.arange(16, dtype=np.float32).reshape(2, 8) / 8


class Client:
    """Calls by name; fields of the request as keywords."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def __call__(self, name: str, /, request: Any = None, timeout: float = 20, metadata: Any = None, **fields: Any) -> Any:
        message = request if request is not None else MESSAGES[f"{name}Request"](**fields)
        call = self.channel.unary_unary(
            f"/inference.GRPCInferenceService/{name}", lambda m: m.SerializeToString(), MESSAGES[f"{name}Response"].FromString
        )
        return call(message, timeout=timeout, metadata=metadata)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Client]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield Client(channel)


def infer_request(x: np.ndarray = X, raw: bool = True, model: str = "mlp", **tensor: Any) -> Any:
    request = MESSAGES["ModelInferRequest"](model_name=model, id="seven")
    request.inputs.add(**{"name": "x", "datatype": "FP32", "shape": x.shape, **tensor})
    if raw:
        request.raw_input_contents.append(x.tobytes())
    else:
        request.inputs[0].contents.fp32_contents.extend(x.ravel())
    return request


def test_tensors_as_bytes_and_as_numbers(client: Client) -> None:
    for raw in (True, False):
        answer = client("ModelInfer", infer_request(raw=raw))
        assert (answer.model_name, answer.model_version, answer.id) == ("mlp", "1", "seven")
        (y,), (content,) = answer.outputs, answer.raw_output_contents
        assert (y.name, y.datatype, list(y.shape)) == ("y", "FP32", [2, 5])
        np.testing.assert_allclose(np.frombuffer(content, np.float32).reshape(2, 5), X @ W, rtol=1e-5)


def test_a_stream_answers_each_request(client: Client) -> None:
    stream = client.channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer", lambda m: m.SerializeToString(), MESSAGES["ModelStreamInferResponse"].FromString
    )
    good, wrong = infer_request(), infer_request(name="z")
    answers = list(stream(iter([good, wrong, good]), timeout=20))
    assert ["no input 'z'" in answer.error_message for answer in answers] == [False, True, False]
    assert answers[0].infer_response == answers[2].infer_response and answers[0].infer_response.id == "seven"


def test_what_there_is(client: Client) -> None:
    assert client("ServerLive").live and client("ServerReady").ready
    assert client("ModelReady", name="mlp").ready and not client("ModelReady", name="none").ready
    health = client.channel.unary_unary("/grpc.health.v1.Health/Check")
    assert health(b"", timeout=20) == b"\x08\x01"  # SERVING
    assert client("ServerMetadata").name == "tcomp"
    model = client("ModelMetadata", name="plus")
    assert list(model.versions) == ["1", "2"] and list(model.inputs[0].shape) == [-1, 8]
    assert {(m.name, m.version) for m in client("RepositoryIndex").models} >= {("plus", "1"), ("mlp", "1")}


def refused(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()


def test_refusals(client: Client) -> None:
    infer = "ModelInfer"
    code, details = refused(lambda: client(infer, infer_request(model="none")))
    assert code == "NOT_FOUND" and "no model 'none'" in details
    for wrong, message in (
        ({"name": "z"}, "no input 'z'"), ({"datatype": "FP64"}, "expected FP32"), ({"shape": [3, 8]}, "takes 96 bytes"),
        ({"shape": [-2, -8]}, "not a list of sizes"), ({"shape": [4, 4]}, "wrong shape"),
    ):  # fmt: skip
        code, details = refused(lambda wrong=wrong: client(infer, infer_request(**wrong)))
        assert code == "INVALID_ARGUMENT" and message in details
    both = infer_request()
    both.raw_input_contents.append(b"")
    assert refused(lambda: client(infer, both))[0] == "INVALID_ARGUMENT"
    assert refused(lambda: client("RepositoryModelUnload", model_name="mlp"))[0] == "PERMISSION_DENIED"
    late = infer_request()
    late.parameters["timeout"].int64_param = 1  # microseconds
    assert refused(lambda: client(infer, late))[0] == "DEADLINE_EXCEEDED"


def test_messages_that_are_none(client: Client) -> None:
    call = client.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    generator = np.random.default_rng(1)
    content = bytearray(infer_request().SerializeToString())
    for n in range(100):
        mutated = bytearray(content)
        for _ in range(1 + n % 4):
            mutated[generator.integers(len(mutated))] = generator.integers(256)
        try:
            call(bytes(mutated[: generator.integers(1, len(mutated) + 1)]), timeout=20)
        except grpc.RpcError as error:
            assert error.code().name in ("INVALID_ARGUMENT", "NOT_FOUND"), error
    assert client("ServerLive").live


def test_a_message_that_is_too_large(models: Any) -> None:
    with running(models, max_request=1000) as server, grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        assert refused(lambda: Client(channel)("ModelInfer", infer_request(np.zeros((100, 8), np.float32))))[0] == "RESOURCE_EXHAUSTED"
        assert Client(channel)("ModelInfer", infer_request()).id == "seven"
