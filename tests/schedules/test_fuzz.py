"""Two thousand cases of the schedule fuzzer; `python -m tests.fuzz_schedules` runs as many as wanted and makes failures small."""

from __future__ import annotations

import pytest

from tcomp.schedules.schedule import PRIMITIVES
from tests.fuzz_schedules import BATCH, batch
from tests.schedules.random_schedules import is_drawn

CASES = 2000


@pytest.mark.parametrize("first", range(0, CASES, BATCH))
def test_accepted_is_right_and_refused_is_explained(first: int) -> None:
    tally = batch(seed=0, first=first, count=min(BATCH, CASES - first))
    assert not tally.failures, f"python -m tests.fuzz_schedules --seed 0 --start {tally.failures[0][0]} --cases 1"


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_arguments_of_every_primitive_are_drawn(primitive: str) -> None:
    assert is_drawn(primitive), "tell random_schedules.py how to draw its arguments"
