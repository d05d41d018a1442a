"""Requests for inference and their answers in HTTP: JSON, with the bytes of tensors behind it (the binary tensor extension)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response

from tcomp.serve.batching import Arrays
from tcomp.serve.refusals import bad_request
from tcomp.serve.served import ServedModel

JSON = "application/json"
HEADER_LENGTH = "inference-header-content-length"
_REFUSED = {
    "shared_memory_region": "tensors in shared memory", "classification": "the classification extension",
    "sequence_id": "sequences of requests",
}  # fmt: skip


@dataclass(slots=True)
class InferRequest:
    """What a client asks: inputs by name; outputs that it wants, and whether as bytes; its deadline in seconds from now."""

    inputs: Arrays
    wanted: dict[str, bool]
    id: str = ""
    timeout: float | None = None


def parse_json(content: bytes | memoryview, what: str = "the request") -> dict[str, Any]:
    """An object of JSON. Raises Refusal."""
    try:
        found = orjson.loads(content)
    except (orjson.JSONDecodeError, RecursionError) as problem:
        raise bad_request(f"{what} is not valid JSON", why=str(problem)) from None
    if not isinstance(found, dict):
        raise bad_request(f"{what} is not an object of JSON", why=f"it is a {type(found).__name__}")
    return found


def parse_infer(body: bytes, header_length: str | None, model: ServedModel) -> InferRequest:
    """The request in the body of an HTTP request; `header_length` is the header of that name. Raises Refusal."""
    view = memoryview(body)
    if header_length is not None:
        if not header_length.isascii() or not header_length.isdigit() or len(header_length) > 12 or int(header_length) > len(body):
            raise bad_request("Inference-Header-Content-Length is not a number of bytes of the body", why=f"it is {header_length[:20]}")
        head, rest = view[: int(header_length)], view[int(header_length) :]
    else:
        head, rest = view, view[:0]
    request = parse_json(head)
    parameters = _parameters(request, "the request")
    inputs: Arrays = {}
    for tensor in _tensors(request, "inputs"):
        rest = _add_input(tensor, model, inputs, rest)
    if len(rest):
        raise bad_request(f"{len(rest)} bytes follow the data of the last input", why="binary_data_size says how many an input has")
    binary = parameters.get("binary_data_output", False)
    wanted = {name: binary is True for name in model.outputs}
    if request.get("outputs"):
        wanted = {}
        for tensor in _tensors(request, "outputs"):
            name = _name(tensor, "output", model.outputs)
            wanted[name] = _parameters(tensor, f"output {name!r}").get("binary_data", binary) is True
    identifier = request.get("id", "")
    if not isinstance(identifier, str):
        raise bad_request("the id of the request is not a string")
    return InferRequest(inputs, wanted, identifier, seconds(parameters.get("timeout")))


def seconds(timeout: object) -> float | None:
    """The parameter `timeout` (microseconds; 0: none) of a request. Raises Refusal."""
    if timeout is None or (type(timeout) is int and timeout == 0):
        return None
    if type(timeout) is not int or timeout < 0 or timeout > 1 << 50:
        raise bad_request("the parameter timeout is not a number of microseconds", why=f"it is {str(timeout)[:40]}")
    return timeout / 1e6


def _add_input(tensor: Mapping[str, Any], model: ServedModel, inputs: Arrays, rest: memoryview) -> memoryview:
    """Add one input, and return the bytes behind it."""
    name = _name(tensor, "input", model.inputs)
    if name in inputs:
        raise bad_request(f"input {name!r} is given twice")
    wire = model.inputs[name]
    wire.check_datatype(tensor.get("datatype"))
    size = _parameters(tensor, f"input {name!r}").get("binary_data_size")
    if size is None:
        if "data" not in tensor:
            raise bad_request(f"input {name!r} has no data")
        inputs[name] = wire.from_numbers(tensor.get("shape", ()), tensor["data"])
        return rest
    if type(size) is not int or not 0 <= size <= len(rest):
        raise bad_request(f"input {name!r} has a wrong binary_data_size", why=f"it is {str(size)[:40]}, and {len(rest)} bytes follow")
    if "data" in tensor:
        raise bad_request(f"input {name!r} has both data and binary_data_size")
    inputs[name] = wire.from_bytes(tensor.get("shape", ()), rest[:size])
    return rest[size:]


def _tensors(request: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    tensors = request.get(kind)
    if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
        raise bad_request(f"{kind} of the request is not an array of objects")
    return tensors


def _name(tensor: Mapping[str, Any], kind: str, known: Mapping[str, Any]) -> str:
    name = tensor.get("name")
    if not isinstance(name, str) or name not in known:
        raise bad_request(f"the model has no {kind} {str(name)[:80]!r}", why=f"it has {', '.join(known)}")
    return name


def _parameters(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    parameters = part.get("parameters", {})
    if not isinstance(parameters, dict):
        raise bad_request(f"the parameters of {where} are not an object")
    if refused := [what for name, what in _REFUSED.items() if parameters.get(name)]:
        raise bad_request(f"{refused[0]} are not supported", where=where)
    return parameters


def encode_infer(model: ServedModel, request: InferRequest, outputs: Arrays) -> tuple[bytes, int | None]:
    """The body of the answer, and the length of the JSON at its start if bytes follow."""
    described: list[dict[str, Any]] = []
    parts: list[bytes | memoryview] = []
    for name, binary in request.wanted.items():
        wire, array = model.outputs[name], outputs[name]
        tensor: dict[str, Any] = {"name": name, "datatype": wire.datatype, "shape": list(array.shape)}
        if binary:
            parts.append(wire.to_bytes(array))
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            tensor["data"] = wire.to_numbers(array).reshape(-1)
        described.append(tensor)
    answer = {"model_name": model.name, "model_version": model.version, "outputs": described}
    if request.id:
        answer["id"] = request.id
    head = dump_json(answer)
    return (b"".join((head, *parts)), len(head)) if parts else (head, None)


def dump_json(value: Any) -> bytes:
    """As bytes; arrays become lists, and what is not finite null."""
    return orjson.dumps(value, np.ndarray.tolist, orjson.OPT_SERIALIZE_NUMPY)  # orjson itself knows arrays of numbers only


def json_response(value: Any, status: int = 200) -> Response:
    """An answer of HTTP in JSON."""
    return Response(dump_json(value), status, media_type=JSON)


def is_large(request: InferRequest, outputs: Arrays) -> bool:
    """Whether writing the numbers of an answer takes long enough that the event loop should not."""
    return sum(outputs[name].size for name, binary in request.wanted.items() if not binary) > 1 << 15
