"""Text after a prompt, token by token."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tcomp.errors import ImportModelError, InputError
from tcomp.frontends.language_models.config import read_config
from tcomp.generation.sampling import Sampling, choose, log_probabilities
from tcomp.generation.text import GrowingText
from tcomp.runtime import Module, State

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHUNK = 512  # tokens of a prompt that one run takes: memory for activations does not grow with longer ones


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
    finish: Literal["stop", "length"]


class Generator:
    """A language model, its tokenizer, and the state of the sequence that it continued last.

    model: Module, with an input `ids` [1, tokens], an output `logits` [1, vocabulary] of the last token, and state
    tokenizer: what encodes and decodes, as `tokenizers.Tokenizer` does; None where prompts are tokens
    end_tokens: frozenset of int, which end a text

    A prompt that begins like the last sequence (a chat that goes on) computes only what is new. One thread at a time uses it.
    """

    def __init__(
        self, model: Module, tokenizer: Tokenizer | None = None, end_tokens: Sequence[int] = (), context: int | None = None
    ) -> None:
        """`context`: the most tokens of a sequence (default: what the model takes). Raises `InputError` for a model of another kind."""
        inputs, outputs = ({spec.name: spec for spec in specs} for specs in (model.inputs, model.outputs))
        fits = set(inputs) - {pair.input for pair in model.manifest.state} == {"ids"} and "logits" in outputs
        if not fits:
            hint = 'compile the folder of a language model with state="auto"'
            raise InputError("this is no language model with state", why="it has to take `ids` and its state, and give `logits`", hint=hint)
        self.model, self.tokenizer, self.end_tokens = model, tokenizer, frozenset(end_tokens)
        longest = next((d.max for d in model.manifest.dims if d.name == inputs["ids"].shape[-1]), None)
        self.context = min(n for n in (context, longest, 1 << 31) if n is not None)
        self._state, self._tokens = State(model), list[int]()
        self._logits: np.ndarray[Any, Any] | None = None  # after the last of the tokens

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], artifact: str | os.PathLike[str] | None = None, threads: int | None = None, **options: Any
    ) -> Generator:
        """The model in a folder of Hugging Face (config.json, safetensors, tokenizer.json), compiled with these options of
        `tcomp.compile` (weights="int4", say); or, with `artifact`, what was compiled of it before, with state="auto". Raises as
        `tcomp.compile` and `tcomp.load` do, and `InputError` for a tokenizer that cannot be read."""
        path = Path(folder)
        if artifact is None:
            from tcomp.api import compile  # only where something is compiled

            model = compile(path, threads=threads, state="auto", **options)
        else:
            # Read, not mapped: weights stream up to three times as fast from the large pages that memory of its own has.
            model = Module.load(os.fspath(artifact), threads=threads, mmap=False)
        if not isinstance(model, Module):
            raise InputError("text is generated on CPUs", hint="compile the model for one")
        return cls(model, read_tokenizer(path / "tokenizer.json"), end_tokens(path))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. Raises `InputError` without a tokenizer."""
        if self.tokenizer is None:
            raise InputError("there is no tokenizer", hint="give tokens, or a tokenizer")
        found: list[int] = self.tokenizer.encode(text).ids
        return found

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
        timeout: float | None = None,
    ) -> Iterator[Piece]:
        """The tokens after a prompt (text, or tokens), as they are computed, to the first stop string or end token, both left out of the
        text, or until there are `max_tokens` or the context is full. The last piece may have text that was held back. `top_logprobs`: how
        many of the likeliest tokens pieces tell besides their own logarithm of probability; None: not that either. `timeout` is in
        seconds, of each run. Raises `InputError` for an empty prompt, or one that does not fit."""
        yield from self._pieces(self._prompt(prompt), max_tokens, sampling or Sampling(), stop, top_logprobs, timeout)

    def complete(self, prompt: str | Sequence[int], max_tokens: int = 128, **options: Any) -> Completion:
        """As `stream`, all at once."""
        tokens = self._prompt(prompt)
        pieces = tuple(self.stream(tokens, max_tokens, **options))
        ended = len(pieces) < max_tokens and len(tokens) + len(pieces) < self.context
        ended = ended or bool(pieces) and (pieces[-1].token in self.end_tokens or self._stopped)
        return Completion("".join(p.text for p in pieces), pieces, len(tokens), "stop" if ended else "length")

    def _prompt(self, prompt: str | Sequence[int]) -> list[int]:
        tokens = self.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        if not tokens:
            raise InputError("the prompt has no tokens")
        if len(tokens) >= self.context:
            raise InputError(f"the prompt has {len(tokens)} tokens", why=f"the context of the model has {self.context}")
        return tokens

    def _pieces(
        self, prompt: list[int], max_tokens: int, sampling: Sampling, stop: Sequence[str], top: int | None, timeout: float | None
    ) -> Iterator[Piece]:
        random, occurred = sampling.generator(), list(prompt)
        growing = GrowingText(self.tokenizer, prompt, stop) if self.tokenizer is not None else None
        self._stopped = False
        logits = self.logits(prompt, timeout)
        for number in range(min(max_tokens, self.context - len(prompt))):
            token = choose(logits, occurred, sampling, random)
            logprob, best = None, tuple[tuple[int, float], ...]()
            if top is not None:
                logprobs = log_probabilities(logits)
                logprob = float(logprobs[token])
                best = tuple((int(t), float(logprobs[t])) for t in np.argsort(-logprobs, kind="stable")[:top])
            occurred.append(token)
            over = token in self.end_tokens
            text = "" if growing is None or over else growing.add(token)
            self._stopped = growing is not None and growing.stopped
            last = over or self._stopped or number + 1 == min(max_tokens, self.context - len(prompt))
            if last and growing is not None and not self._stopped:
                text += growing.finish()
            yield Piece(token, text, logprob, best)
            if last:
                return
            logits = self.logits(occurred, timeout)

    def logits(self, tokens: Sequence[int], timeout: float | None = None) -> np.ndarray[Any, Any]:
        """Those of what follows after tokens: float32 [vocabulary]. Only what is new behind the last sequence is computed."""
        same = 0
        for a, b in zip(self._tokens, tokens, strict=False):
            if a != b:
                break
            same += 1
        if same == len(tokens) == len(self._tokens) and self._logits is not None:
            return self._logits
        same = min(same, len(tokens) - 1)
        self._state.truncate(same)
        self._tokens = list(tokens[:same])
        for at in range(same, len(tokens), CHUNK):
            part = list(tokens[at : at + CHUNK])
            found = self._state.run({"ids": np.array([part], np.int64)}, timeout)["logits"]
            self._tokens += part
        self._logits = found[0]
        return self._logits


def read_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a file tokenizer.json. Raises `InputError`."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError("text needs a package to become tokens", why=str(error), hint="pip install 'tcomp[generate]'") from error
    try:
        return Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # noqa: BLE001  the package raises nothing more special
        raise InputError("the tokenizer cannot be read", where=os.fspath(path), why=str(error)[:200]) from None


def end_tokens(folder: Path) -> list[int]:
    """The tokens that end a text, as generation_config.json or config.json say; none where they do not."""
    for name in ("generation_config.json", "config.json"):
        try:
            value = read_config(folder / name).get("eos_token_id")
        except ImportModelError:
            continue
        listed = value if isinstance(value, list) else [value]
        if tokens := [t for t in listed if isinstance(t, int) and not isinstance(t, bool)]:
            return tokens
    return []
