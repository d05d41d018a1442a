"""Texts as OpenAI's protocol tells them: whole, or piece by piece."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tcomp.generation import Generator, Piece
from tcomp.generation.request import Finish
from tcomp.serve.refusals import Refusal
from tcomp.serve.text.parameters import Asked
from tcomp.serve.text.queue import Progress

_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
}  # fmt: skip


def error(refusal: Refusal) -> dict[str, Any]:
    """A refusal in OpenAI's shape."""
    status, known = int(refusal.status), refusal.where
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": refusal.message, "type": kind, "param": known or None, "code": None}}


@dataclass
class Answer:
    """The answer to one request; `chat` decides its shape."""

    model: str
    asked: Asked
    generator: Generator
    chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    tokens: int = 0  # of all texts so far

    def whole(self, progress: Sequence[Progress]) -> dict[str, Any]:
        """The answer with all texts."""
        choices = []
        for index, request in enumerate(self.asked.requests):
            pieces = [p.piece for p in progress if p.number == index]
            self.tokens += len(pieces)
            text = "".join(piece.text for piece in pieces)
            content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
            choices.append(self._choice(index, content, pieces, request.finish))
        return self._object(choices, "chat.completion" if self.chat else "text_completion") | {"usage": self.usage()}

    def begin(self) -> list[dict[str, Any]]:
        """The chunks before the first piece."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk([self._choice(n, delta, [], None)]) for n in range(len(self.asked.requests))] if self.chat else []

    def chunk(self, progress: Progress) -> dict[str, Any] | None:
        """The chunk of one piece; None where it says nothing."""
        self.tokens += 1
        piece, text = progress.piece, progress.piece.text
        if not text and progress.finish is None and not self.asked.logprobs:
            return None
        content: dict[str, Any] = {"text": text}
        if self.chat:
            content = {"delta": {"content": text} if text or progress.finish is None else {}}
        return self._chunk([self._choice(progress.number, content, [piece], progress.finish)])

    def last(self) -> dict[str, Any]:
        """The chunk with what was used."""
        return self._chunk([]) | {"usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Numbers of tokens. A prompt counts once, however many texts follow it."""
        prompts = {id(request.prompt): len(request.prompt) for request in self.asked.requests}
        read = sum(prompts.values())
        return {"prompt_tokens": read, "completion_tokens": self.tokens, "total_tokens": read + self.tokens}

    def _object(self, choices: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self._object(choices, "chat.completion.chunk" if self.chat else "text_completion")

    def _choice(self, index: int, content: Mapping[str, Any], pieces: Sequence[Piece], finish: Finish | None) -> dict[str, Any]:
        told = [piece for piece in pieces if piece.token not in self.generator.end_tokens]
        logprobs = (self._chat_logprobs(told) if self.chat else self._logprobs(told)) if self.asked.logprobs else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}

    def _chat_logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._text(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        content = [entry(p.token, p.logprob) | {"top_logprobs": [entry(*other) for other in p.top]} for p in pieces]
        return {"content": content, "refusal": None}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        texts = [self._text(piece.token) for piece in pieces]
        offsets = [sum(map(len, texts[:n])) for n in range(len(texts))]
        tops = [{self._text(token): logprob for token, logprob in piece.top} for piece in pieces]
        return {"tokens": texts, "token_logprobs": [p.logprob for p in pieces], "top_logprobs": tops, "text_offset": offsets}

    def _text(self, token: int) -> str:
        assert self.generator.tokenizer is not None
        return self.generator.tokenizer.decode([token], skip_special_tokens=False)
