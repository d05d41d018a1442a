"""Text after a prompt, token by token."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tcomp.errors import InputError
from tcomp.generation.chat_template import ChatTemplate
from tcomp.generation.drafts import Draft, from_text
from tcomp.generation.folder import TOKENIZER, chat_template, end_tokens, read_tokenizer
from tcomp.generation.grammar import Constraint, Grammar, Grammars
from tcomp.generation.request import Completion, Piece, Request, completion
from tcomp.generation.sampling import Sampling
from tcomp.generation.scheduler import Scheduler
from tcomp.generation.slots import Slot, checked_model, longest_sequence, most_drafts
from tcomp.runtime import LoadedModel, Module

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Generator:
    """A language model, its tokenizer, and the state of the sequence that it continued last.

    model: Module, with an input `ids` [1, tokens], an output `logits` [1, vocabulary] of the last token, and state
    tokenizer: what encodes and decodes, as `tokenizers.Tokenizer` does; None where prompts are tokens
    end_tokens: frozenset of int, which end a text
    chat: ChatTemplate or None, how messages become a prompt
    context: int, the most tokens of a sequence

    A prompt that begins like the last sequence (a chat that goes on) computes only what is new. One thread at a time uses it.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer | None = None,
        end_tokens: Sequence[int] = (),
        context: int | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        """`context` defaults to what the model takes. Raises `InputError` for a model of another kind."""
        self.model = checked_model(model)
        longest = longest_sequence(self.model)
        self.tokenizer, self.end_tokens, self.chat = tokenizer, frozenset(end_tokens), chat
        self.context = longest if context is None else min(context, longest)
        self._slot = Slot(self.model)
        self._grammars: Grammars | None = None

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model: LoadedModel | str | os.PathLike[str], threads: int | None = None) -> Generator:
        """The language model in a folder of Hugging Face (tokenizer.json, config.json, tokenizer_config.json), as it was compiled of it
        with state="auto": what `tcomp.compile` returned, or the path of its artifact. Raises as `tcomp.load` does, and `InputError` for a
        tokenizer or template that cannot be read."""
        path = Path(folder)
        if not isinstance(model, LoadedModel):
            # Read, not mapped: without large pages for files, weights stream up to three times as fast from memory of its own.
            model = Module.load(os.fspath(model), threads=threads, mmap=False)
        return cls(model, read_tokenizer(path / TOKENIZER), end_tokens(path), chat=chat_template(path))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. Raises `InputError` without a tokenizer."""
        return self._encode(text, True)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens after which the model answers messages, each with a `role` ("user", say) and `content`. Raises `InputError` where the
        folder has no template for chats, or it refuses them."""
        if self.chat is None:
            raise InputError("the model has no template for chats", why="neither chat_template.jinja nor tokenizer_config.json has one")
        return self._encode(self.chat.text(messages), False)  # templates write special tokens themselves

    def request(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
        grammar: Grammar | None = None,
    ) -> Request:
        """A text that is asked for, as `stream` describes it, for a `Scheduler`."""
        tokens = self.encode(prompt) if isinstance(prompt, str) else prompt
        constraint = None if grammar is None else self._constraint(grammar)
        fixed: dict[str, Any] = {"decoder": self.tokenizer, "end_tokens": self.end_tokens, "context": self.context}
        return Request(tokens, max_tokens, sampling, stop, top_logprobs, constraint=constraint, **fixed)

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
        grammar: Grammar | None = None,
        draft: Draft = from_text,
        timeout: float | None = None,
    ) -> Iterator[Piece]:
        """The tokens after a prompt (text, or tokens), as they are computed, to the first stop string or end token, both left out of the
        text, or until there are `max_tokens` or the context is full. The last piece may have text that was held back. `top_logprobs`: how
        many of the likeliest tokens pieces tell besides their own logarithm of probability; None: not that either. `grammar`: what the
        text may be. `draft` guesses tokens for a model that was compiled with the dim `drafts`: from what the text repeats, or as the
        `guess` of a smaller model's generator does; the text is the same. `timeout` is in seconds, of each run. Raises `InputError` for
        an empty prompt, or one that does not fit."""
        yield from self._pieces(self.request(prompt, max_tokens, sampling, stop, top_logprobs, grammar), draft, timeout)

    def complete(
        self, prompt: str | Sequence[int], max_tokens: int = 128, draft: Draft = from_text, timeout: float | None = None, **options: Any
    ) -> Completion:
        """As `stream`, all at once."""
        request = self.request(prompt, max_tokens, **options)
        return completion(request, tuple(self._pieces(request, draft, timeout)))

    def complete_all(self, prompts: Sequence[str | Sequence[int]], max_tokens: int = 128, **options: Any) -> list[Completion]:
        """As `complete` for each prompt, all of them at the same time. Raises what the first that fails does."""
        requests = [self.request(prompt, max_tokens, **options) for prompt in prompts]
        pieces: dict[Request, list[Piece]] = {request: [] for request in requests}
        scheduler = Scheduler(self.model, len(requests))
        for request in requests:
            if request.finish is None:
                scheduler.add(request)
        while scheduler.running or scheduler.waiting:
            for progress in scheduler.step():
                if progress.error is not None:
                    raise progress.error
                assert progress.piece is not None
                pieces[progress.request].append(progress.piece)
        return [completion(request, tuple(found)) for request, found in pieces.items()]

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """The likeliest tokens after these, as a draft for a larger model."""
        return [piece.token for piece in self.stream(tokens, most)]

    def logits(self, tokens: Sequence[int], timeout: float | None = None) -> np.ndarray[Any, Any]:
        """Those of what follows after tokens: float32 [vocabulary]. Only what is new behind the last sequence is computed."""
        return self._slot.logits(tokens, timeout)

    def _constraint(self, grammar: Grammar) -> Constraint:
        if self.tokenizer is None:
            raise InputError("a grammar is of text, and there is no tokenizer", hint="give one")
        if self._grammars is None:  # which takes a moment
            self._grammars = Grammars(self.tokenizer, self.end_tokens)
        return self._grammars.constraint(grammar)

    def _encode(self, text: str, special: bool) -> list[int]:
        if self.tokenizer is None:
            raise InputError("there is no tokenizer", hint="give tokens, or a tokenizer")
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return found

    def _pieces(self, request: Request, draft: Draft, timeout: float | None) -> Iterator[Piece]:
        most = most_drafts(self.model)
        while request.finish is None:
            tokens, room = request.tokens, min(most, self.context - len(request.tokens))
            held = room > 0 and self._slot.common(tokens) >= len(tokens) - 1
            guesses = [*draft(tokens, room)][:room] if held else []
            rows = self._slot.guess(tokens, guesses, timeout) if guesses else [self._slot.logits(tokens, timeout)]
            for row, guess in zip(rows, [*guesses, None], strict=True):
                piece = request.advance(row)
                yield piece
                if request.finish is not None or piece.token != guess:
                    break
