"""The endpoints: /v1/models, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tcomp.errors import TcompError
from tcomp.generation import Generator
from tcomp.serve.http_tensors import JSON, dump_json, json_response, parse_json
from tcomp.serve.refusals import Refusal, as_refusal
from tcomp.serve.served import ServedModel
from tcomp.serve.state import ServerState
from tcomp.serve.text import answers, parameters
from tcomp.serve.text.queue import Texts


class TextEndpoints:
    """What answers requests for texts. `received` gives the body of a request, `unless_gone` waits for an answer as long as the client
    does."""

    def __init__(self, state: ServerState, received: Callable[[Request], Awaitable[bytes]], unless_gone: Callable[..., Any]) -> None:
        self._state, self._received, self._unless_gone = state, received, unless_gone
        self.get = {"/v1/models": self.models, "/v1/models/{name}": self.model}
        self.post = {"/v1/completions": self.completions, "/v1/chat/completions": self.chat_completions}

    async def models(self, request: Request) -> Response:
        """GET /v1/models: those that write text"""
        names = {m.name: m for m in self._state.repository.models if m.texts is not None}
        return json_response({"object": "list", "data": [_model(m) for m in names.values()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME"""
        model = self._state.repository.find(request.path_params["name"])
        _generator(model)
        return json_response(_model(model))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        return await self._answer(request, parameters.completion, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        return await self._answer(request, parameters.chat, chat=True)

    async def _answer(self, request: Request, read: Callable[[Mapping[str, Any], Generator], parameters.Asked], chat: bool) -> Response:
        body = parse_json(await self._received(request))
        with ExitStack() as stack:
            model = stack.enter_context(self._state.inference("openai", parameters.model_name(body), ""))
            generator = _generator(model)
            assert model.texts is not None
            asked = await asyncio.to_thread(read, body, generator)  # long prompts and grammars take a while
            answer = answers.Answer(model.name, asked, generator, chat)
            texts = stack.enter_context(model.texts.join(asked.requests))
            if asked.stream:
                return _Events(answer, texts, stack.pop_all())

            async def whole() -> bytes:
                return dump_json(answer.whole([progress async for progress in texts.pieces()]))

            return Response(await self._unless_gone(request, whole()), media_type=JSON)


def refused(refusal: Refusal) -> bytes:
    """The body of a refusal."""
    return dump_json(answers.error(refusal))


class _Events(StreamingResponse):
    """An answer as server-sent events. Texts that are not whole when the client goes are given up."""

    def __init__(self, answer: answers.Answer, texts: Texts, held: ExitStack) -> None:
        super().__init__(self._chunks(answer, texts), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._held, self._whole = held, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        with self._held:
            await super().__call__(scope, receive, send)
            if not self._whole:
                raise ClientDisconnect

    async def _chunks(self, answer: answers.Answer, texts: Texts) -> AsyncIterator[bytes]:
        try:
            for chunk in answer.begin():
                yield _event(dump_json(chunk))
            async for progress in texts.pieces():
                if (found := answer.chunk(progress)) is not None:
                    yield _event(dump_json(found))
            if answer.asked.usage:
                yield _event(dump_json(answer.last()))
        except TcompError as error:  # the status has been sent already
            yield _event(refused(as_refusal(error)))
        self._whole = True
        yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _generator(model: ServedModel) -> Generator:
    if model.texts is None:
        why = "it was not compiled of a language model's folder with --state auto, or lies without its tokenizer.json"
        raise Refusal(HTTPStatus.NOT_FOUND, f"the model {model.name[:80]!r} writes no text", where="model", why=why)
    return model.texts.generator


def _model(model: ServedModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": int(time.time() - (time.monotonic() - model.since)), "owned_by": "tcomp"}
