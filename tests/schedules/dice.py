"""Where random programs and schedules get their choices from: hypothesis, which shrinks, or a seeded generator, which is quick."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st


class Dice(ABC):
    """Draws numbers; everything else is made of them."""

    @abstractmethod
    def number(self, low: int, high: int) -> int:
        """An integer, both ends included."""

    def pick(self, *choices: Any) -> Any:
        return choices[self.number(0, len(choices) - 1)]

    def flip(self) -> bool:
        return bool(self.number(0, 1))

    def one_in(self, n: int) -> bool:
        return self.number(1, n) == n

    def shuffled(self, items: Sequence[Any]) -> list[Any]:
        rest = list(items)
        return [rest.pop(self.number(0, len(rest) - 1)) for _ in items]


class Hypothesis(Dice):
    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))


class Seeded(Dice):
    """The same draws for the same seed, on every machine."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)
