"""The server's HTTP side: the Open Inference Protocol, version 2, with its extensions for binary tensors, statistics and the model
repository; plain JSON; pictures; texts (`text`); health, metrics and a page for people."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from http import HTTPStatus
from typing import TypeAlias, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tcomp.errors import TcompError
from tcomp.serve.batching import Arrays
from tcomp.serve.http_tensors import HEADER_LENGTH, JSON, dump_json, encode_infer, is_large, json_response, parse_infer, parse_json
from tcomp.serve.images import best, read_image
from tcomp.serve.metrics import CONTENT_TYPE
from tcomp.serve.refusals import Refusal, as_refusal, bad_request
from tcomp.serve.served import ServedModel
from tcomp.serve.state import CLIENT_GONE, ServerState
from tcomp.serve.status_page import status_page
from tcomp.serve.text.endpoints import TextEndpoints, refused as text_refused
from tcomp.serve.tracing import span

T = TypeVar("T")
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

_OPEN = ("/v2/health/live", "/v2/health/ready")  # answered without a token: they say nothing of the models
_LARGE = 1 << 17  # bytes of JSON whose parsing the event loop does not wait for


def make_app(state: ServerState) -> Starlette:
    """The ASGI application that serves the models of a repository."""
    service = _Service(state)
    model, versioned = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
    get: dict[str, Endpoint] = {"/": service.page, "/metrics": service.metrics, "/v2": service.server}
    get |= {"/v2/health/live": service.live, "/v2/health/ready": service.ready, "/v2/models/stats": service.statistics}
    post: dict[str, Endpoint] = {"/v2/repository/index": service.index}
    post |= {f"/v2/repository/models/{{name}}/{verb}": getattr(service, verb) for verb in ("load", "unload")}
    texts = TextEndpoints(state, service.received, _unless_gone)
    post |= {"/v1/models/{name}:predict": service.predict, "/v1/models/{name}/image": service.image}
    for prefix in (model, versioned):
        get |= {f"{prefix}/ready": service.model_ready, f"{prefix}/config": service.config, f"{prefix}/stats": service.statistics}
        post[f"{prefix}/infer"] = service.infer
        get[prefix] = service.metadata
    post_routes = [Route(path, service.answering(endpoint), methods=["POST"]) for path, endpoint in post.items()]
    get_routes = [Route(path, service.answering(endpoint), methods=["GET"]) for path, endpoint in get.items()]
    routes = [*sorted(post_routes, key=lambda route: not route.path.endswith("/infer")), *get_routes]  # the most frequent first
    for path, endpoint in (texts.post | texts.get).items():
        answered = service.answering(endpoint, text_refused)
        routes.append(Route(path, answered, methods=["POST" if path in texts.post else "GET"]))
    return Starlette(routes=routes, exception_handlers={HTTPException: _not_routed, Exception: _failed})


class _Service:
    """The endpoints."""

    def __init__(self, state: ServerState) -> None:
        self._state, self._options, self._access = state, state.options, state.access
        self._repository = state.repository

    # ------------------------------------------------------------ what is common

    def answering(self, endpoint: Endpoint, body_of: Callable[[Refusal], bytes] | None = None) -> Endpoint:
        """The endpoint behind the checks of access; what it raises becomes an answer, whose body `body_of` writes."""

        async def answered(request: Request) -> Response:
            try:
                if not self._access.open and request.url.path not in _OPEN:
                    peer = request.client.host if request.client is not None else ""
                    self._access.check(request.headers.get("authorization", ""), peer)
                return await endpoint(request)
            except TcompError as error:
                return _refused(as_refusal(error), body_of)
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            except MemoryError:
                return _refused(Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "there is no memory for this request"), body_of)

        return answered

    async def received(self, request: Request) -> bytes:
        """The body of a request that is small while it is worked on. Raises Refusal as `_admitted` and `_body`."""
        with self._access.pending(self._admitted(request)):
            return await self._body(request)

    async def _body(self, request: Request) -> bytes:
        """All of the request's body. Raises Refusal if it is too large or takes too long."""
        length = _length(request)
        chunks, size = [], 0
        try:
            async with asyncio.timeout(self._options.receive_timeout):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > length:
                        raise bad_request("the body is longer than its Content-Length")
                    chunks.append(chunk)
        except TimeoutError:
            what = f"the body did not come within {self._options.receive_timeout:g} seconds"
            raise Refusal(HTTPStatus.REQUEST_TIMEOUT, what) from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _admitted(self, request: Request, default: int | None = None) -> int:
        """How many bytes the body has. Raises Refusal if that is too much, or not said and there is no default."""
        length = _length(request, default)
        if length > self._options.max_request:
            what = f"the request has {length} bytes, more than {self._options.max_request}"
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, what)
        if encoding := request.headers.get("content-encoding"):
            raise Refusal(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content encoding {encoding[:20]!r} is not supported", hint="send it as it is"
            )
        return length

    def _model(self, request: Request) -> AbstractContextManager[ServedModel]:
        """The model that a request names: see `ServerState.inference`."""
        return self._state.inference("http", request.path_params["name"], request.path_params.get("version", ""))

    async def _run(self, request: Request, model: ServedModel, inputs: Arrays, timeout: float | None = None) -> Arrays:
        """The outputs; a client that goes while others are before it is not computed for."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with span(request.headers, model.name, model.version):
            if not model.batcher.waiting:
                return await model.infer(inputs, deadline)
            return await _unless_gone(request, model.infer(inputs, deadline))

    # ------------------------------------------------------------ inference

    async def infer(self, request: Request) -> Response:
        """POST /v2/models/NAME[/versions/VERSION]/infer"""
        with self._access.pending(self._admitted(request)), self._model(request) as model:
            body, header_length = await self._body(request), request.headers.get(HEADER_LENGTH)
            if header_length is None and len(body) > _LARGE:
                asked = await asyncio.to_thread(parse_infer, body, header_length, model)
            else:
                asked = parse_infer(body, header_length, model)
            outputs = await self._run(request, model, asked.inputs, asked.timeout)
            if is_large(asked, outputs):
                content, length = await asyncio.to_thread(encode_infer, model, asked, outputs)
            else:
                content, length = encode_infer(model, asked, outputs)
            if length is None:
                return Response(content, media_type=JSON)
            return Response(content, media_type="application/octet-stream", headers={HEADER_LENGTH: str(length)})

    async def predict(self, request: Request) -> Response:
        """POST /v1/models/NAME:predict with {"inputs": {NAME: nested lists}}: {"outputs": {NAME: nested lists}}"""
        with self._access.pending(self._admitted(request)), self._model(request) as model:
            given = (await asyncio.to_thread(parse_json, await self._body(request))).get("inputs")
            if not isinstance(given, dict):
                raise bad_request("the request has no inputs", hint='{"inputs": {"NAME": [[...]]}}')
            if unknown := [name for name in given if name not in model.inputs]:
                raise bad_request(f"the model has no input {unknown[0][:80]!r}", why=f"it has {', '.join(model.inputs)}")
            inputs = {name: await asyncio.to_thread(model.inputs[name].convert, numbers) for name, numbers in given.items()}
            outputs = await self._run(request, model, inputs)
            shown = {name: model.outputs[name].to_numbers(array) for name, array in outputs.items()}
            return Response(await asyncio.to_thread(dump_json, {"outputs": shown}), media_type=JSON)

    async def image(self, request: Request) -> Response:
        """POST /v1/models/NAME/image with a picture: the best elements of the output"""
        with self._access.pending(self._admitted(request)), self._model(request) as model:
            inputs = await asyncio.to_thread(read_image, await self._body(request), model)
            outputs = await self._run(request, model, inputs)
            return json_response(best(model, outputs))

    # ------------------------------------------------------------ what there is

    async def live(self, request: Request) -> Response:
        """GET /v2/health/live"""
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        """GET /v2/health/ready: 503 while models are loaded or could not be, and once the server is being stopped"""
        return json_response({"ready": self._state.ready}, 200 if self._state.ready else 503)

    async def server(self, request: Request) -> Response:
        """GET /v2"""
        return json_response(self._state.metadata())

    async def model_ready(self, request: Request) -> Response:
        """GET /v2/models/NAME/ready"""
        model = self._find(request)
        return json_response({"name": model.name, "ready": True})

    async def metadata(self, request: Request) -> Response:
        """GET /v2/models/NAME"""
        return json_response(self._state.model_metadata(self._find(request)))

    async def config(self, request: Request) -> Response:
        """GET /v2/models/NAME/config: how it is served, by the names of Triton, and by those of its options"""
        model = self._find(request)
        return json_response(self._state.model_config(model) | asdict(model.options) | model.loaded.batching)

    async def statistics(self, request: Request) -> Response:
        """GET /v2/models/stats, /v2/models/NAME/stats"""
        models = [self._find(request)] if "name" in request.path_params else self._repository.models
        return json_response(self._state.statistics(models))

    async def index(self, request: Request) -> Response:
        """POST /v2/repository/index"""
        with self._access.pending(size := self._admitted(request, 0)):
            wanted = parse_json(await self._body(request)) if size else {}
        return json_response(self._repository.index(wanted.get("ready") is True))

    async def load(self, request: Request) -> Response:
        """POST /v2/repository/models/NAME/load"""
        self._state.check_management()
        await self._repository.load(request.path_params["name"])
        return json_response({})

    async def unload(self, request: Request) -> Response:
        """POST /v2/repository/models/NAME/unload"""
        self._state.check_management()
        await self._repository.unload(request.path_params["name"])
        return json_response({})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics"""
        return Response(await asyncio.to_thread(self._state.metrics.text), media_type=CONTENT_TYPE)

    async def page(self, request: Request) -> Response:
        """GET /: a page for people"""
        policy = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(status_page(self._state), media_type="text/html; charset=utf-8", headers=policy)

    def _find(self, request: Request) -> ServedModel:
        return self._repository.find(request.path_params["name"], request.path_params.get("version", ""))


def _length(request: Request, default: int | None = None) -> int:
    """The length of the body (bytes). Raises Refusal if the client does not say it."""
    text = request.headers.get("content-length", "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise Refusal(HTTPStatus.LENGTH_REQUIRED, "the request has no Content-Length", hint="send the body in one piece, not in chunks")
    return int(text)


async def _unless_gone(request: Request, answer: Awaitable[T]) -> T:
    """The answer. Raises ClientDisconnect, and cancels it, as soon as the client has closed its connection."""
    working, gone = asyncio.ensure_future(answer), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and gone.result()["type"] == "http.disconnect":
            raise ClientDisconnect
        return await working
    finally:
        working.cancel()
        gone.cancel()


async def _not_routed(request: Request, error: Exception) -> Response:
    """No endpoint has this path, or this method."""
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "")
    what = f"{error.detail}: {request.method} {request.url.path[:200]}" + f"; it takes {allowed}" * bool(allowed)
    return Response(dump_json({"error": what}), error.status_code, error.headers, JSON)


async def _failed(request: Request, error: Exception) -> Response:
    """A bug; Starlette raises the error again, and it is logged."""
    return json_response({"error": "internal error"}, 500)


def _refused(refusal: Refusal, body_of: Callable[[Refusal], bytes] | None) -> Response:
    headers = refusal.fields
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    body = dump_json({"error": refusal.message}) if body_of is None else body_of(refusal)
    return Response(body, int(refusal.status), headers, JSON)
