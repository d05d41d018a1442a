"""What a model holds of a sequence: its state after the tokens so far, so that only new ones are computed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from tcomp.errors import InputError
from tcomp.runtime import LoadedModel, Manifest, Module, State

CHUNK = 512  # tokens of a prompt that one run takes: memory for activations does not grow with longer ones


def continues_text(manifest: Manifest) -> bool:
    """Whether a model takes `ids` of a sequence and its state, and gives `logits`."""
    state = {pair.input for pair in (*manifest.state, *manifest.replaced)}
    shapes = {spec.name: spec.shape for spec in manifest.inputs if spec.name not in state}
    fits = shapes.keys() == {"ids"} and shapes["ids"][0] == 1 or shapes.keys() == {"ids", "starts"} and isinstance(shapes["ids"][0], str)
    return bool(state) and fits and any(o.name == "logits" for o in manifest.outputs)


def is_language_model(model: LoadedModel) -> TypeGuard[Module]:
    """Whether it continues text, and runs in this process."""
    return isinstance(model, Module) and continues_text(model.manifest)


def checked_model(model: LoadedModel) -> Module:
    """The model. Raises `InputError` if it is not a language model."""
    if not is_language_model(model):
        hint = 'compile the folder of a language model for CPUs with state="auto"'
        raise InputError("this is not a language model with state", why="it has to take `ids` and its state, and give `logits`", hint=hint)
    return model


def longest_sequence(model: Module) -> int:
    """The most tokens of a sequence."""
    return _most(model, -1)


def largest_batch(model: Module) -> int:
    """How many sequences it may continue in one run."""
    return _most(model, 0)


def _most(model: Module, axis: int) -> int:
    size = next(spec.shape[axis] for spec in model.inputs if spec.name == "ids")
    return next((d.max for d in model.manifest.dims if d.name == size and d.max is not None), 1 << 31) if isinstance(size, str) else size


def new_state(model: Module, batch: int, capacity: int = 256) -> State:
    """An empty state of so many sequences side by side."""
    size = next(spec.shape[0] for spec in model.inputs if spec.name == "ids")
    return State(model, capacity, {size: batch} if isinstance(size, str) else None)


def most_drafts(model: Module) -> int:
    """How many guessed tokens a run may check: those besides the last one that have logits."""
    rows = next(spec.shape[0] for spec in model.outputs if spec.name == "logits")
    found = re.fullmatch(r"min\(\w+, (\d+)\)", rows) if isinstance(rows, str) else None
    return int(found[1]) - 1 if found else 0


def run_tokens(state: State, tokens: Sequence[Sequence[int]], starts: Sequence[int], timeout: float | None) -> np.ndarray[Any, Any]:
    """Continue sequences, which begin at these rows, by tokens: the logits [batch, vocabulary] of what follows. Raises as `State.run`."""
    inputs = {"ids": np.array(tokens, np.int64)}
    if any(spec.name == "starts" for spec in state.model.inputs):
        inputs["starts"] = np.array(starts, np.int64)
    return state.run(inputs, timeout)["logits"]


class Slot:
    """The state of one sequence of a language model, and the tokens that it comes from. One thread at a time uses it."""

    def __init__(self, model: Module) -> None:
        self._state, self.tokens = new_state(model, 1), list[int]()
        self._logits: np.ndarray[Any, Any] | None = None  # after the last of the tokens

    def common(self, tokens: Sequence[int]) -> int:
        """How many tokens begin both these and those that it holds."""
        if list(tokens[: len(self.tokens)]) == self.tokens:  # as in every step: at the speed of a comparison in C
            return len(self.tokens)
        pairs = zip(self.tokens, tokens, strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(tokens)))

    def advance(self, tokens: Sequence[int], timeout: float | None = None) -> np.ndarray[Any, Any] | None:
        """One run at most towards these tokens: the logits of what follows, float32 [vocabulary]; None while there are tokens left that
        were too many for one run. Raises as `State.run`."""
        same = self.common(tokens)
        if same == len(tokens) == len(self.tokens) and self._logits is not None:
            return self._logits
        same = min(same, len(tokens) - 1)
        if same < len(self.tokens):
            same = same if self._state.rewinds else 0
            self._state.truncate(same)
        self.tokens, self._logits = list(self.tokens[:same]), None
        part = list(tokens[same : same + CHUNK])
        found = run_tokens(self._state, [part], [0], timeout)
        self.tokens += part
        self._logits = found[-1]
        return self._logits if len(self.tokens) == len(tokens) else None

    def guess(self, tokens: Sequence[int], drafts: Sequence[int], timeout: float | None = None) -> np.ndarray[Any, Any]:
        """One run behind tokens of which all but the last are held: the logits float32 [1 + drafts, vocabulary] of what follows after these
        tokens, and after each of those drafts. Raises as `State.run`."""
        self._state.truncate(len(tokens) - 1)
        found = run_tokens(self._state, [[tokens[-1], *drafts]], [0], timeout)
        self.tokens, self._logits = [*tokens, *drafts], found[-1]
        return found

    def logits(self, tokens: Sequence[int], timeout: float | None = None) -> np.ndarray[Any, Any]:
        """As `advance`, in as many runs as it takes."""
        while (found := self.advance(tokens, timeout)) is None:
            pass
        return found

    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        """The rows of its state, by the names of inputs."""
        return self._state.values()

    def hold(self, tokens: Sequence[int], values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Hold these tokens and the rows that come from them."""
        self._state.truncate(0)
        for name, view in self._state.extend(len(tokens)).items():
            view[...] = values[name]
        self.tokens, self._logits = list(tokens), None
