"""The server's gRPC side: the service GRPCInferenceService of the Open Inference Protocol, and the standard health service's question."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import grpc
import grpc.aio
import numpy as np

from tcomp.errors import TcompError
from tcomp.serve.batching import Arrays
from tcomp.serve.grpc_messages import MESSAGES, PACKAGE
from tcomp.serve.http_tensors import seconds
from tcomp.serve.refusals import Refusal, as_refusal, bad_request
from tcomp.serve.served import ServedModel
from tcomp.serve.state import ServerState
from tcomp.serve.tracing import span

_log = logging.getLogger("tcomp.serve")
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED, 403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND, 413: grpc.StatusCode.RESOURCE_EXHAUSTED, 422: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED, 501: grpc.StatusCode.UNIMPLEMENTED, 503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
_DETAILS = 1000  # characters of a message: what is sent as a header should be short
_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents", "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}  # fmt: skip


def make_handler(state: ServerState) -> grpc.GenericRpcHandler:
    """The handlers of all calls, for a server of `grpc.aio`."""
    service = _Service(state)
    handlers = {}
    for name in ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "RepositoryIndex",
                 "RepositoryModelLoad", "RepositoryModelUnload"):  # fmt: skip
        request = MESSAGES[f"{name}Request"]
        handlers[name] = grpc.unary_unary_rpc_method_handler(
            service.answering(getattr(service, f"on_{name}")), _reader(request), MESSAGES[f"{name}Response"].SerializeToString
        )
    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        service.on_stream, _reader(MESSAGES["ModelInferRequest"]), MESSAGES["ModelStreamInferResponse"].SerializeToString
    )
    return grpc.method_handlers_generic_handler(f"{PACKAGE}.GRPCInferenceService", handlers)


def _reader(message: Any) -> Callable[[bytes], Any]:
    def read(content: bytes) -> Any:
        """The message, and how long it is; None for what is no such message, which the handler refuses."""
        try:
            return message.FromString(content), len(content)
        except Exception:  # noqa: BLE001  protobuf's DecodeError, of whichever implementation
            return None

    return read


class _Service:
    def __init__(self, state: ServerState) -> None:
        self._state, self._repository, self._access = state, state.repository, state.access

    def answering(self, endpoint: Callable[[Any, Any, int], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """The endpoint behind the checks of access; what it raises becomes a status."""
        is_open = endpoint in (self.on_ServerLive, self.on_ServerReady)

        async def answered(read: tuple[Any, int] | None, context: Any) -> Any:
            try:
                if read is None:
                    raise bad_request("the request is no message of the protocol")
                if not is_open:
                    self._check(context)
                return await endpoint(read[0], context, read[1])
            except TcompError as error:
                await _abort(context, as_refusal(error))
            except MemoryError:
                await _abort(context, Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "there is no memory for this request"))

        return answered

    def _check(self, context: Any) -> None:
        if not self._access.open:
            headers = dict(context.invocation_metadata() or ())
            self._access.check(str(headers.get("authorization", "")), context.peer().rpartition(":")[0])

    # ------------------------------------------------------------ inference

    async def on_ModelInfer(self, request: Any, context: Any, size: int) -> Any:
        """The outputs of a model."""
        start = time.monotonic()
        with self._access.pending(size), self._repository.use(request.model_name, request.model_version) as model:
            status = 500
            try:
                answer = await self._infer(model, request, context, start)
                status = 200
                return answer
            except TcompError as error:
                status = as_refusal(error).status
                raise
            except asyncio.CancelledError:
                status = 499  # as nginx has it: the client did not wait for the answer
                raise
            finally:
                model.metrics.answered("grpc", status)
                if self._state.options.log_requests:
                    fields = {"model": model.name, "version": model.version, "status": int(status), "protocol": "grpc"}
                    _log.info("request", extra=fields | {"us": round((time.monotonic() - start) * 1e6)})

    async def on_stream(self, requests: AsyncIterator[tuple[Any, int] | None], context: Any) -> AsyncIterator[Any]:
        """Requests one after the other, each with its answer or its error."""
        async for read in requests:
            answer = MESSAGES["ModelStreamInferResponse"]()
            try:
                if read is None:
                    raise bad_request("the request is no message of the protocol")
                self._check(context)
                answer.infer_response.CopyFrom(await self.on_ModelInfer(read[0], context, read[1]))
            except TcompError as error:
                answer.error_message = as_refusal(error).message
                answer.infer_response.id = read[0].id if read is not None else ""
            yield answer

    async def _infer(self, model: ServedModel, request: Any, context: Any, start: float) -> Any:
        inputs = _inputs(model, request)
        wanted = [_known(output.name, model.outputs) for output in request.outputs] or list(model.outputs)
        limits = [context.time_remaining()]
        if "timeout" in request.parameters:
            parameter = request.parameters["timeout"]
            limits.append(seconds(getattr(parameter, parameter.WhichOneof("parameter_choice") or "int64_param")))
        known = [limit for limit in limits if limit is not None]
        with span("infer", dict(context.invocation_metadata() or ()), model):
            outputs = await model.infer(inputs, start + min(known) if known else None)
        answer = MESSAGES["ModelInferResponse"](model_name=model.name, model_version=model.version, id=request.id)
        for name in wanted:
            wire, array = model.outputs[name], outputs[name]
            answer.outputs.add(name=name, datatype=wire.datatype, shape=array.shape)
            answer.raw_output_contents.append(bytes(wire.to_bytes(array)))
        return answer

    # ------------------------------------------------------------ what there is

    async def on_ServerLive(self, request: Any, context: Any, size: int) -> Any:
        """Whether the server runs."""
        return MESSAGES["ServerLiveResponse"](live=True)

    async def on_ServerReady(self, request: Any, context: Any, size: int) -> Any:
        """Whether all models are ready."""
        return MESSAGES["ServerReadyResponse"](ready=self._state.ready)

    async def on_ModelReady(self, request: Any, context: Any, size: int) -> Any:
        """Whether a model is ready."""
        try:
            self._repository.find(request.name, request.version)
        except Refusal:
            return MESSAGES["ModelReadyResponse"](ready=False)
        return MESSAGES["ModelReadyResponse"](ready=True)

    async def on_ServerMetadata(self, request: Any, context: Any, size: int) -> Any:
        """What the server is."""
        return MESSAGES["ServerMetadataResponse"](**self._state.metadata())

    async def on_ModelMetadata(self, request: Any, context: Any, size: int) -> Any:
        """Inputs and outputs of a model."""
        return MESSAGES["ModelMetadataResponse"](**self._state.model_metadata(self._repository.find(request.name, request.version)))

    async def on_RepositoryIndex(self, request: Any, context: Any, size: int) -> Any:
        """All models."""
        return MESSAGES["RepositoryIndexResponse"](models=self._repository.index(request.ready))

    async def on_RepositoryModelLoad(self, request: Any, context: Any, size: int) -> Any:
        """Load a model anew."""
        self._state.check_management()
        await self._repository.load(request.model_name)
        return MESSAGES["RepositoryModelLoadResponse"]()

    async def on_RepositoryModelUnload(self, request: Any, context: Any, size: int) -> Any:
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
        numbers = np.array(getattr(tensor.contents, field))
        inputs[name] = wire.from_numbers(shape, numbers.tolist())
    return inputs


async def _abort(context: Any, refusal: Refusal) -> None:
    metadata = (("retry-after", str(max(1, round(refusal.retry_after)))),) if refusal.retry_after is not None else ()
    await context.abort(_CODES.get(int(refusal.status), grpc.StatusCode.INTERNAL), refusal.message[:_DETAILS], metadata)
