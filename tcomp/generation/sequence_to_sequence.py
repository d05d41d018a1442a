"""Text of models with an encoder: what comes out of a source, token by token."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tcomp.errors import InputError
from tcomp.generation.folder import TOKENIZER, end_tokens, read_tokenizer, start_tokens
from tcomp.generation.request import Completion, Piece, Request, completion
from tcomp.generation.sampling import Sampling
from tcomp.generation.slots import longest_sequence
from tcomp.runtime import LoadedModel, Manifest, Module, State

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Source = str | Sequence[int] | np.ndarray[Any, Any]


def reads_source(manifest: Manifest) -> bool:
    """Whether a model takes a `source`, `ids` of the text so far and its state, and gives `logits`."""
    state = {pair.input for pair in manifest.state}
    fits = bool(state) and {spec.name for spec in manifest.inputs} - state == {"source", "ids"}
    return fits and any(o.name == "logits" for o in manifest.outputs)


class SequenceToSequence:
    """A model with an encoder and a decoder (T5, Whisper), its tokenizer, and the state of the text that it makes.

    model: Module, with inputs `source`, and `ids` [1, tokens], an output `logits` [1, vocabulary] of the last token, and state
    tokenizer: what encodes and decodes, as `tokenizers.Tokenizer` does; None where sources and texts are tokens
    start_tokens: tuple of int, with which a text begins
    end_tokens: frozenset of int, which end it

    The encoder runs once for a source. One thread at a time uses it.
    """

    def __init__(
        self, model: LoadedModel, tokenizer: Tokenizer | None = None, start_tokens: Sequence[int] = (0,), end_tokens: Sequence[int] = ()
    ) -> None:
        """Raises `InputError` for a model of another kind."""
        if not isinstance(model, Module) or not reads_source(model.manifest):
            hint = 'compile the folder of a T5 or Whisper for CPUs with state="auto"'
            raise InputError("this is not a model with an encoder and state", why="it has to take `source` and `ids`", hint=hint)
        self.model, self.tokenizer = model, tokenizer
        self.start_tokens, self.end_tokens, self.context = tuple(start_tokens), frozenset(end_tokens), longest_sequence(model)
        self._source, self._state = next(s for s in model.inputs if s.name == "source"), State(model)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], model: LoadedModel | str | os.PathLike[str], threads: int | None = None
    ) -> SequenceToSequence:
        """As `Generator.load`; without tokenizer.json in the folder, sources and texts are tokens."""
        path = Path(folder)
        if not isinstance(model, LoadedModel):
            model = Module.load(os.fspath(model), threads=threads, mmap=False)
        tokenizer = read_tokenizer(path / TOKENIZER) if (path / TOKENIZER).exists() else None
        return cls(model, tokenizer, start_tokens(path), end_tokens(path))

    def stream(
        self,
        source: Source,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
        prompt: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Iterator[Piece]:
        """The tokens that come out of a source: a text or tokens for T5, float32 [1, mels, frames] for Whisper. `prompt`: the tokens that
        the text begins with, instead of `start_tokens`; for the rest see `Generator.stream`. Raises `InputError` for an empty source or
        prompt, or one that does not fit."""
        yield from self._pieces(source, self._request(max_tokens, sampling, stop, top_logprobs, prompt), timeout)

    def complete(self, source: Source, max_tokens: int = 128, timeout: float | None = None, **options: Any) -> Completion:
        """As `stream`, all at once."""
        request = self._request(max_tokens, **options)
        return completion(request, tuple(self._pieces(source, request, timeout)))

    def _request(
        self,
        max_tokens: int,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
        prompt: Sequence[int] | None = None,
    ) -> Request:
        tokens = self.start_tokens if prompt is None else prompt
        fixed: dict[str, Any] = {"decoder": self.tokenizer, "end_tokens": self.end_tokens, "context": self.context}
        return Request(tokens, max_tokens, sampling, stop, top_logprobs, **fixed)

    def _pieces(self, source: Source, request: Request, timeout: float | None) -> Iterator[Piece]:
        given, tokens = self._given(source), request.prompt
        self._state.truncate(0)
        while request.finish is None:
            logits = self._state.run({"source": given, "ids": np.array([tokens], np.int64)}, timeout)["logits"]
            piece = request.advance(logits[-1])
            yield piece
            given, tokens = given[..., :0], [piece.token]

    def _given(self, source: Source) -> np.ndarray[Any, Any]:
        if isinstance(source, str):
            if self.tokenizer is None:
                raise InputError("there is no tokenizer", hint="give tokens, or a tokenizer")
            source = self.tokenizer.encode(source).ids
        given = np.asarray(source, np.float32) if self._source.dtype == "float32" else np.array(source, np.int64)[None]
        if not given.size or given.ndim != len(self._source.shape):
            raise InputError(f"a source of the shape {list(given.shape)}", why=f"{list(self._source.shape)} is expected")
        return given
