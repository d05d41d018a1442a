"""What a model holds of a sequence: its state after the tokens so far, so that only new ones are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from tcomp.errors import InputError
from tcomp.runtime import LoadedModel, Module, State

CHUNK = 512  # tokens of a prompt that one run takes: memory for activations does not grow with longer ones


def is_language_model(model: LoadedModel) -> TypeGuard[Module]:
    """Whether it takes `ids` and its state, gives `logits`, and runs in this process."""
    names = {spec.name for spec in model.inputs} - {pair.input for pair in model.manifest.state}
    return isinstance(model, Module) and names == {"ids"} and any(o.name == "logits" for o in model.outputs)


def checked_model(model: LoadedModel) -> Module:
    """The model. Raises `InputError` if it is no language model."""
    if not is_language_model(model):
        hint = 'compile the folder of a language model for CPUs with state="auto"'
        raise InputError("this is no language model with state", why="it has to take `ids` and its state, and give `logits`", hint=hint)
    return model


def longest_sequence(model: Module) -> int:
    """The most tokens of a sequence."""
    name = next(spec.shape[-1] for spec in model.inputs if spec.name == "ids")
    return next((d.max for d in model.manifest.dims if d.name == name and d.max is not None), 1 << 31)


class Slot:
    """The state of one sequence of a language model, and the tokens that it comes from. One thread at a time uses it."""

    def __init__(self, model: Module) -> None:
        self._state, self.tokens = State(model), list[int]()
        self._logits: np.ndarray[Any, Any] | None = None  # after the last of the tokens

    def common(self, tokens: Sequence[int]) -> int:
        """How many tokens begin both these and those that it holds."""
        pairs = zip(self.tokens, tokens, strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(tokens)))

    def advance(self, tokens: Sequence[int], timeout: float | None = None) -> np.ndarray[Any, Any] | None:
        """One run at most towards these tokens: the logits of what follows, float32 [vocabulary]; None while there are tokens left that
        were too many for one run. Raises as `State.run`."""
        same = self.common(tokens)
        if same == len(tokens) == len(self.tokens) and self._logits is not None:
            return self._logits
        same = min(same, len(tokens) - 1)
        self._state.truncate(same)
        self.tokens, self._logits = list(self.tokens[:same]), None
        part = list(tokens[same : same + CHUNK])
        found = self._state.run({"ids": np.array([part], np.int64)}, timeout)["logits"]
        self.tokens += part
        self._logits = found[0]
        return self._logits if len(self.tokens) == len(tokens) else None

    def logits(self, tokens: Sequence[int], timeout: float | None = None) -> np.ndarray[Any, Any]:
        """As `advance`, in as many runs as it takes."""
        while (found := self.advance(tokens, timeout)) is None:
            pass
        return found
