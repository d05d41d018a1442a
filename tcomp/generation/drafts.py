"""Tokens that are guessed, and checked in one run (Leviathan et al. 2023): the text is that without guesses, in fewer runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Draft = Callable[[Sequence[int], int], Sequence[int]]  # (tokens so far, how many at most) -> those that may follow
LONGEST = 3  # tokens that are looked for


def from_text(tokens: Sequence[int], most: int) -> list[int]:
    """What followed the last tokens where they stood before (prompt lookup, Saxena 2023): the last three of them if they did, else the last
    two, or the last one; [] where they are new."""
    tokens = list(tokens)
    for count in range(min(LONGEST, len(tokens) - 1), 0, -1):
        last = tokens[-count:]
        for at in range(len(tokens) - count - 1, -1, -1):
            if tokens[at] == last[0] and tokens[at : at + count] == last:
                return tokens[at + count : at + count + most]
    return []
