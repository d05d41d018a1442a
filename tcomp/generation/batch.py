"""Sequences that grow by a token each in one run: their states lie side by side and end at the same row, wherever they begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tcomp.generation.slots import Slot, new_state, run_tokens
from tcomp.runtime import Module, State

_ROOM = 64  # rows that a new state has room for behind those that it gets


class Batch:
    """The states of some slots as one, for a model with a batch. Slots that are in it hold their tokens, but no rows of their own."""

    def __init__(self, model: Module) -> None:
        self._model, self._slots = model, list[Slot]()
        self._state: State | None = None

    def gather(self, slots: Sequence[Slot]) -> None:
        """Have just these slots in it. Each of them, and each that leaves, is copied once."""
        if [*slots] == self._slots:
            return
        columns = {slot: self._column(n) for n, slot in enumerate(self._slots)}
        for slot, values in columns.items():
            if slot not in slots:
                slot.hold(slot.tokens, values)
        state = None
        if slots:
            rows = max(len(slot.tokens) for slot in slots)
            state = new_state(self._model, len(slots), rows + _ROOM)
            views = state.extend(rows)
            for n, slot in enumerate(slots):
                for name, own in (columns.get(slot) or slot.values()).items():
                    views[name][rows - len(slot.tokens) :, n] = own[:, 0]
        self._slots, self._state = [*slots], state

    def advance(self, tokens: Sequence[int], timeout: float | None = None) -> np.ndarray[Any, Any]:
        """One more token of each slot: the logits [slots, vocabulary] of what follows. Raises as `State.run`."""
        assert self._state is not None
        starts = [self._state.length - len(slot.tokens) for slot in self._slots]
        found = run_tokens(self._state, [[token] for token in tokens], starts, timeout)
        for slot, token in zip(self._slots, tokens, strict=True):
            slot.tokens.append(token)
        return found

    def _column(self, number: int) -> dict[str, np.ndarray[Any, Any]]:
        """The rows of a slot."""
        assert self._state is not None
        start = self._state.length - len(self._slots[number].tokens)
        return {name: view[start:, number : number + 1] for name, view in self._state.values().items()}
