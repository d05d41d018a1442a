"""Names that are not taken."""

from __future__ import annotations

from collections.abc import Container
from itertools import count


def unused(name: str, taken: Container[str], numbered: str = "{}_{}", first: int = 1) -> str:
    """`name`, or where it is taken the first that is not with a number behind it: `numbered` says how, `first` is the least number."""
    if name not in taken:
        return name
    return next(c for n in count(first) if (c := numbered.format(name, n)) not in taken)
