"""Collections are rare while something compiles, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tcomp.garbage import SELDOM, seldom_collected


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_come_back_with_the_last_to_leave() -> None:
    gc.set_threshold(500, 7, 8)
    first, second = seldom_collected(), seldom_collected()
    with pytest.raises(ValueError, match="in between"), first:
        assert gc.get_threshold() == (SELDOM, 7, 8)
        second.__enter__()
        raise ValueError("in between")
    assert gc.get_threshold() == (SELDOM, 7, 8)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (500, 7, 8)


@pytest.mark.parametrize("threshold", [0, SELDOM * 2])
def test_what_is_rarer_already_stays(threshold: int) -> None:
    gc.set_threshold(threshold, 10, 10)
    with seldom_collected():
        assert gc.get_threshold() == (threshold, 10, 10)
    assert gc.get_threshold() == (threshold, 10, 10)
