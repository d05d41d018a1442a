"""The server's gRPC side: the service GRPCInferenceService of the Open Inference Protocol, and the standard health service's question."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from google.protobuf.message import DecodeError

from tcomp.errors import TcompError
from tcomp.serve.batching import Arrays
from tcomp.serve.grpc.frames import INTERNAL, Call, Methods, Status, Streaming, Unary
from tcomp.serve.grpc.messages import MESSAGES, PACKAGE
from tcomp.serve.http_tensors import seconds
from tcomp.serve.refusals import Refusal, as_refusal, bad_request
from tcomp.serve.served import ServedModel
from tcomp.serve.state import ServerState
from tcomp.serve.tracing import span
from tcomp.serve.wire import TRITON_TYPES

_CODES = {400: 3, 401: 16, 403: 7, 404: 5, 413: 8, 422: 9, 429: 8, 501: 12, 503: 14, 504: 4}  # HTTP's status -> gRPC's code
_DETAILS = 1000  # characters of a message: what is sent as a header should be short
_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents", "FP32": "fp32_contents",
    "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
_KIND_CPU = 2  # of instances, in Triton's model_config.proto


def make_methods(state: ServerState) -> Methods:
    """The methods of the service."""
    service, prefix = _Service(state), f"/{PACKAGE}.GRPCInferenceService/"
    names = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics",
             "ModelInfer", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload")  # fmt: skip
    unary: dict[str, Unary] = {f"{prefix}{name}": service.answering(name) for name in names}
    streaming: dict[str, Streaming] = {f"{prefix}ModelStreamInfer": service.on_stream}
    unary["/grpc.health.v1.Health/Check"] = service.health
    return Methods(unary, streaming)


class _Service:
    def __init__(self, state: ServerState) -> None:
        self._state, self._repository, self._access = state, state.repository, state.access

    def answering(self, name: str) -> Unary:
        """The method of that name behind the checks of access; what it raises becomes a status."""
        endpoint: Callable[[Any, Call], Awaitable[Any]] = getattr(self, f"on_{name}")
        is_open, read = name in ("ServerLive", "ServerReady"), MESSAGES[f"{name}Request"].FromString

        async def answered(content: bytes, call: Call) -> bytes:
            try:
                if not is_open:
                    self._check(call)
                answer: bytes = (await endpoint(_parsed(read, content), call)).SerializeToString()
                return answer
            except TcompError as error:
                raise _status(as_refusal(error)) from None
            except MemoryError:
                raise _status(Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "there is no memory for this request")) from None

        return answered

    def _check(self, call: Call) -> None:
        if not self._access.open:
            self._access.check(call.headers.get("authorization", ""), call.peer)

    async def health(self, content: bytes, call: Call) -> bytes:
        """Whether all models are ready, as probes of Kubernetes ask (https://github.com/grpc/grpc/blob/master/doc/health-checking.md): the
        answer's field 1 is 1 for yes, 2 for no."""
        return b"\x08\x01" if self._state.ready else b"\x08\x02"

    # ------------------------------------------------------------ inference

    async def on_ModelInfer(self, request: Any, call: Call) -> Any:
        """The outputs of a model."""
        with self._state.inference("grpc", request.model_name, request.model_version) as model:
            return await self._infer(model, request, call)

    async def on_stream(self, requests: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
        """Requests one after the other, each with its answer or its error."""
        async for content in requests:
            answer = MESSAGES["ModelStreamInferResponse"]()
            try:
                self._check(call)
                request = _parsed(MESSAGES["ModelInferRequest"].FromString, content)
                answer.infer_response.id = request.id
                answer.infer_response.CopyFrom(await self.on_ModelInfer(request, call))
            except TcompError as error:
                answer.error_message = as_refusal(error).message
            yield answer.SerializeToString()

    async def _infer(self, model: ServedModel, request: Any, call: Call) -> Any:
        start = time.monotonic()
        inputs = _inputs(model, request)
        wanted = [_known(output.name, model.outputs) for output in request.outputs] or list(model.outputs)
        deadline = call.deadline
        if "timeout" in request.parameters:
            parameter = request.parameters["timeout"]
            given = seconds(getattr(parameter, parameter.WhichOneof("parameter_choice") or "int64_param"))
            deadline = min(start + given, deadline or math.inf) if given is not None else deadline
        with span(call.headers, model.name, model.version):
            outputs = await model.infer(inputs, deadline)
        answer = MESSAGES["ModelInferResponse"](model_name=model.name, model_version=model.version, id=request.id)
        for name in wanted:
            wire, array = model.outputs[name], outputs[name]
            answer.outputs.add(name=name, datatype=wire.datatype, shape=array.shape)
            answer.raw_output_contents.append(array.tobytes() if wire.datatype != "BYTES" else wire.to_bytes(array))
        return answer

    # ------------------------------------------------------------ what there is

    async def on_ServerLive(self, request: Any, call: Call) -> Any:
        """Whether the server runs."""
        return MESSAGES["ServerLiveResponse"](live=True)

    async def on_ServerReady(self, request: Any, call: Call) -> Any:
        """Whether all models are ready."""
        return MESSAGES["ServerReadyResponse"](ready=self._state.ready)

    async def on_ModelReady(self, request: Any, call: Call) -> Any:
        """Whether a model is ready."""
        try:
            self._repository.find(request.name, request.version)
        except Refusal:
            return MESSAGES["ModelReadyResponse"](ready=False)
        return MESSAGES["ModelReadyResponse"](ready=True)

    async def on_ServerMetadata(self, request: Any, call: Call) -> Any:
        """What the server is."""
        return MESSAGES["ServerMetadataResponse"](**self._state.metadata())

    async def on_ModelMetadata(self, request: Any, call: Call) -> Any:
        """Inputs and outputs of a model."""
        return MESSAGES["ModelMetadataResponse"](**self._state.model_metadata(self._repository.find(request.name, request.version)))

    async def on_ModelConfig(self, request: Any, call: Call) -> Any:
        """How a model is served."""
        config = self._state.model_config(self._repository.find(request.name, request.version))
        for tensor in (*config["input"], *config["output"]):
            tensor["data_type"] = TRITON_TYPES.index(tensor["data_type"])
        for group in config["instance_group"]:
            group["kind"] = _KIND_CPU
        return MESSAGES["ModelConfigResponse"](config=config)

    async def on_ModelStatistics(self, request: Any, call: Call) -> Any:
        """Counts and times of a model, or of all."""
        models = [self._repository.find(request.name, request.version)] if request.name else self._repository.models
        return MESSAGES["ModelStatisticsResponse"](**self._state.statistics(models))

    async def on_RepositoryIndex(self, request: Any, call: Call) -> Any:
        """All models."""
        return MESSAGES["RepositoryIndexResponse"](models=self._repository.index(request.ready))

    async def on_RepositoryModelLoad(self, request: Any, call: Call) -> Any:
        """Load a model anew."""
        self._state.check_management()
        await self._repository.load(request.model_name)
        return MESSAGES["RepositoryModelLoadResponse"]()

    async def on_RepositoryModelUnload(self, request: Any, call: Call) -> Any:
        """Serve a model no more."""
        self._state.check_management()
        await self._repository.unload(request.model_name)
        return MESSAGES["RepositoryModelUnloadResponse"]()


def _known(name: str, names: Mapping[str, Any]) -> str:
    if name not in names:
        raise bad_request(f"the model has no output {name[:80]!r}", why=f"it has {', '.join(names)}")
    return name


def _inputs(model: ServedModel, request: Any) -> Arrays:
    """The arrays of a request. Raises Refusal."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise bad_request(f"the request has {len(request.inputs)} inputs, and raw_input_contents for {len(raw)}")
    inputs: Arrays = {}
    for number, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in model.inputs:
            raise bad_request(f"the model has no input {name[:80]!r}", why=f"it has {', '.join(model.inputs)}")
        if name in inputs:
            raise bad_request(f"input {name!r} is given twice")
        wire = model.inputs[name]
        wire.check_datatype(tensor.datatype)
        shape = tuple(tensor.shape)
        if raw:
            inputs[name] = wire.from_bytes(shape, raw[number])
            continue
        if (field := _CONTENTS.get(wire.datatype)) is None:
            raise bad_request(f"input {name!r}: {wire.datatype} can be sent in raw_input_contents alone")
        inputs[name] = wire.from_numbers(shape, [*getattr(tensor.contents, field)])
    return inputs


def _parsed(read: Callable[[bytes], Any], content: bytes) -> Any:
    """The message. Raises Refusal for what is none."""
    try:
        return read(content)
    except DecodeError:
        raise bad_request("the request is not a message of the protocol") from None


def _status(refusal: Refusal) -> Status:
    return Status(_CODES.get(int(refusal.status), INTERNAL), refusal.message[:_DETAILS], refusal.fields)
