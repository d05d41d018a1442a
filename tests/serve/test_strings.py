"""Strings as inputs and outputs: BYTES of the protocol, in JSON, as bytes, and by gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from onnx import TensorProto, helper

import tcomp
from tests.serve.servers import Running, running

WORDS = ["Ä", "x\0y", ""]
LOWER = ["ä", "x\0y", ""]
TENSOR = {"name": "words", "shape": [3], "datatype": "BYTES"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """ "words": strings[n] -> lower: strings[n], number: float32[n], 1 for an x."""
    ends = [
        [helper.make_tensor_value_info(name, kind, ["n"]) for name, kind in group.items()]
        for group in ({"words": TensorProto.STRING}, {"lower": TensorProto.STRING, "number": TensorProto.FLOAT})
    ]
    encoder = {"domain": "ai.onnx.ml", "keys_strings": ["x\0y"], "values_floats": [1.0], "default_float": 0.0}
    nodes = [
        helper.make_node("StringNormalizer", ["words"], ["lower"], case_change_action="LOWER"),
        helper.make_node("LabelEncoder", ["lower"], ["code"], **encoder), helper.make_node("Abs", ["code"], ["number"]),
    ]  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(helper.make_graph(nodes, "net", *ends), opset_imports=opsets, ir_version=8)
    folder = tmp_path_factory.mktemp("strings")
    tcomp.compile(model.SerializeToString()).save(folder / "words.tcomp")
    with running(folder) as found:
        yield found


def packed(words: list[str]) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text for text in (word.encode() for word in words))


def test_in_json(server: Running) -> None:
    status, answer, _ = server.ask("POST", "/v2/models/words/infer", {"inputs": [{**TENSOR, "data": WORDS}]})
    assert status == 200 and answer["outputs"] == [
        {**TENSOR, "name": "lower", "data": LOWER},
        {"name": "number", "datatype": "FP32", "shape": [3], "data": [0, 1, 0]},
    ]
    status, answer, _ = server.ask("POST", "/v1/models/words:predict", {"inputs": {"words": WORDS}})
    assert status == 200 and answer["outputs"] == {"lower": LOWER, "number": [0, 1, 0]}
    assert server.ask("GET", "/v2/models/words")[1]["inputs"] == [{**TENSOR, "shape": [-1]}]
    assert not server.ask("GET", "/v2/models/words/config")[1]["batched"]


def test_as_bytes(server: Running) -> None:
    content = packed(WORDS)
    tensor = {**TENSOR, "parameters": {"binary_data_size": len(content)}}
    head = json.dumps({"inputs": [tensor], "outputs": [{"name": "lower", "parameters": {"binary_data": True}}]}).encode()
    fields = {"Inference-Header-Content-Length": str(len(head))}
    status, answer, headers = server.ask("POST", "/v2/models/words/infer", head + content, fields)
    assert status == 200 and answer[int(headers["inference-header-content-length"]) :] == packed(LOWER)


@pytest.mark.parametrize("raw", [False, True])
def test_by_grpc(server: Running, raw: bool) -> None:
    import grpc

    from tcomp.serve.grpc.messages import MESSAGES

    request = MESSAGES["ModelInferRequest"](model_name="words")
    tensor = request.inputs.add(**TENSOR)
    if raw:
        request.raw_input_contents.append(packed(WORDS))
    else:
        tensor.contents.bytes_contents.extend(word.encode() for word in WORDS)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", lambda m: m.SerializeToString(), MESSAGES["ModelInferResponse"].FromString
        )
        answer = call(request, timeout=20)
    assert answer.raw_output_contents[0] == packed(LOWER) and answer.outputs[0].datatype == "BYTES"


@pytest.mark.parametrize("data", [None, 3, [3], ["a", "b"], ["a", ["b"], "c"], [["a"], ["b", "c"]], {}, [None, "a", "b"]])
def test_what_is_no_string(server: Running, data: object) -> None:
    assert server.ask("POST", "/v2/models/words/infer", {"inputs": [{**TENSOR, "data": data}]})[0] == 400


@pytest.mark.parametrize(
    "content", [b"", b"\1\0", packed(["a", "b"]), packed(WORDS)[:-1], packed(WORDS) + b"\0", b"\xff\xff\xff\xffabc", b"\1\0\0\0\xff" * 3]
)
def test_bytes_that_are_no_strings(server: Running, content: bytes) -> None:
    head = json.dumps({"inputs": [{**TENSOR, "parameters": {"binary_data_size": len(content)}}]}).encode()
    fields = {"Inference-Header-Content-Length": str(len(head))}
    assert server.ask("POST", "/v2/models/words/infer", head + content, fields)[0] == 400
