"""One text that is asked for, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from tcomp.errors import InputError
from tcomp.generation.grammar import Constraint
from tcomp.generation.sampling import Sampling, choose, log_probabilities
from tcomp.generation.text import Decoder, GrowingText

Finish = Literal["stop", "length"]


class Tokens(Decoder, Protocol):
    """What turns text into tokens and back, as `tokenizers.Tokenizer` does."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Any:
        """An object whose `ids` are the tokens."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One more token: its number, the text that is certain now (maybe none); and, if they were asked for, the logarithm of its
    probability by the model (before temperature and the like), and those of the likeliest tokens."""

    token: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What came after a prompt. `finish`: "stop" for a stop string or an end token, "length" where there were tokens enough."""

    text: str
    pieces: tuple[Piece, ...]
    prompt_tokens: int
    finish: Finish


class Request:
    """A text that is asked for.

    prompt: list of int, its first tokens
    tokens: list of int, those and all that were chosen
    finish: "stop" once a stop string or an end token came, "length" once there are tokens enough; None before
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
        *,
        constraint: Constraint | None = None,
        decoder: Decoder | None = None,
        end_tokens: frozenset[int] = frozenset(),
        context: int = 1 << 31,
    ) -> None:
        """`constraint`: what may follow; `decoder` turns tokens into text (None: there is no text), `context` is the most tokens that
        prompt and text may have together; for the rest see `Generator.stream`. Raises `InputError` for an empty prompt, or one that does
        not fit."""
        self.prompt = [int(t) for t in prompt]
        if not self.prompt:
            raise InputError("the prompt has no tokens")
        if len(self.prompt) >= context:
            raise InputError(f"the prompt has {len(self.prompt)} tokens", why=f"the context of the model has {context}")
        self.tokens, self.end_tokens = list(self.prompt), end_tokens
        self._sampling, self._top, self._constraint = sampling or Sampling(), top_logprobs, constraint
        self._random, self._most = self._sampling.generator(), min(context, len(self.prompt) + max_tokens)
        self._growing = GrowingText(decoder, self.prompt, stop) if decoder is not None else None
        self.finish: Finish | None = "length" if max_tokens < 1 else None

    def advance(self, logits: np.ndarray[Any, Any]) -> Piece:
        """Choose one more token, given the logits [vocabulary] of what follows after `tokens`. Raises `InputError` for those of no use."""
        possible = logits if self._constraint is None else self._constraint.allowed(logits)
        token = choose(possible, self.tokens, len(self.prompt), self._sampling, self._random)
        if self._constraint is not None:
            self._constraint.accept(token)
        logprob, best = None, tuple[tuple[int, float], ...]()
        if self._top is not None:
            logprobs = log_probabilities(logits)
            logprob = float(logprobs[token])
            best = tuple((int(t), float(logprobs[t])) for t in np.argsort(-logprobs, kind="stable")[: self._top])
        self.tokens.append(token)
        text, ended = "", token in self.end_tokens
        if self._growing is not None and not ended:
            text = self._growing.add(token)
        stopped = self._growing is not None and self._growing.stopped
        if ended or stopped or (self._constraint is not None and self._constraint.ended):
            self.finish = "stop"
        elif len(self.tokens) >= self._most:
            self.finish = "length"
        if self.finish is not None and self._growing is not None and not stopped:
            text += self._growing.finish()
        return Piece(token, text, logprob, best)


def completion(request: Request, pieces: tuple[Piece, ...]) -> Completion:
    """What all pieces of a request are together."""
    return Completion("".join(p.text for p in pieces), pieces, len(request.prompt), request.finish or "length")
