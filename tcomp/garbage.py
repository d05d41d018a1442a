"""Garbage collection while the compiler runs.

A compilation makes millions of small objects, most of which live until it ends, and few cycles. With Python's default thresholds the
collector looks at them again and again and finds nothing: a sixth of the time of a large model. Cycles are still found, only later.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 1_000_000  # new objects, some 100 MB, between two collections of the youngest generation

_lock = threading.Lock()
_running = 0
_before = gc.get_threshold()


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside the `with`, or the function that it decorates, collections are rare. Several threads may be inside: the last to leave restores
    the thresholds that the first one found. Where collection is off, or rarer already, nothing changes."""
    global _running, _before
    with _lock:
        if not _running:
            _before = gc.get_threshold()
            if 0 < _before[0] < SELDOM:
                gc.set_threshold(SELDOM, *_before[1:])
        _running += 1
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if not _running:
                gc.set_threshold(*_before)
