"""Candidates: given and drawn."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.autotune.tasks import Program, instantiate, sample
from tcomp.errors import ScheduleError
from tcomp.ir.fallback import FallbackKind
from tcomp.schedules import Schedule
from tcomp.schedules.knobs import Knobs, decode, encode
from tcomp.target import CpuTarget
from tests.autotune.spaces import product, refused, scaled, split_scaled

HASWELL = CpuTarget.parse("cpu -march=x86_64 -mcpu=haswell")
PRODUCT = Program.of(product(), HASWELL, 1)
SCALED = Program.of(scaled(), HASWELL, 1, schedule=split_scaled)

options = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(max_size=8), options, max_size=4))
def test_decisions_are_written_and_read(decisions: dict) -> None:
    text = encode(decisions)
    assert decode(text) == decisions
    assert encode(dict(reversed(decisions.items()))) == text


@pytest.mark.parametrize("text", ["", "[1]", '{"a": {"b": 1}}', "{", "[" * 5000])
def test_what_are_no_decisions(text: str) -> None:
    with pytest.raises(ScheduleError, match="these are not decisions"):
        decode(text)


def test_candidates_are_what_their_decisions_say() -> None:
    rng = random.Random(1)
    first = instantiate(PRODUCT, {})
    assert first.decisions == {}
    found = [first, *(sample(PRODUCT, rng) for _ in range(12))]
    assert len({c.identity for c in found}) > 5
    for made in found:
        again = instantiate(PRODUCT, decode(encode(made.decisions)))
        assert again.identity == made.identity and again.decisions == made.decisions


def test_a_space_is_drawn_from() -> None:
    rng = random.Random(4)
    assert len({sample(SCALED, rng).identity for _ in range(200)}) == 1 + 3 * 4  # no factor; else with or without vectors and threads


def test_what_is_refused_is_raised() -> None:
    with pytest.raises(ScheduleError, match="no loop `no such loop`"):
        instantiate(Program.of(scaled(), HASWELL, 1, schedule=refused), {"impossible": True})


def falling_back(s: Schedule, knobs: Knobs) -> None:
    s.fall_back(FallbackKind.LEFT_AS_LOWERED, "A", "always")
    if knobs.flag("more", False):
        s.fall_back(FallbackKind.LEFT_AS_LOWERED, "B", "it is so")


def test_falling_back_is_a_refusal_unless_the_default_does() -> None:
    task = Program.of(scaled(), HASWELL, 1, schedule=falling_back)
    instantiate(task, {})
    with pytest.raises(ScheduleError, match="cannot be followed for B(.|\n)*it is so"):
        instantiate(task, {"more": True})
