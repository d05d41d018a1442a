"""What a run did when, in which thread: events that the code records, as spans of time, and as a file for viewers (Perfetto, Chrome)."""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tcomp.runtime.pool import View

CAPACITY = 1 << 16  # events, of 32 bytes each; what comes later is lost


class Span(NamedTuple):
    """A kernel, from its call to its return in the caller's thread; or (`chunk`) the part of one that a thread computed. `start` (seconds)
    counts from that of the first; `thread` is the system's number. What a kernel takes beyond the caller's own chunk, it waits for."""

    kernel: str
    chunk: bool
    thread: int
    start: float
    seconds: float


class TracedView(ctypes.Structure):
    """A view of the thread pool that records events."""

    _fields_ = [("view", View), ("events", ctypes.c_void_p)]


class Events:
    """Room for events, as the code writes them (see `tcomp.codegen.llvm.events`)."""

    def __init__(self) -> None:
        self._cells = (ctypes.c_int64 * (2 + 4 * CAPACITY))(CAPACITY)
        self.address = ctypes.addressof(self._cells)

    def waited(self, caller: int, seconds: float) -> float:
        """How long, of a run of so many seconds, its calling thread waited for chunks of others: in each parallel region from the end of
        its own chunk to that of the last one. Forgets what was recorded."""
        used = min(self._cells[1], CAPACITY)
        cells = self._cells[2 : 2 + 4 * used]
        self._cells[1] = 0
        rows = sorted(zip(cells[2::4], cells[3::4], cells[1::4], strict=True))  # start, end, thread
        if not rows:
            return 0.0
        ticks, own_end, last = 0, rows[0][0], rows[0][0]
        for start, end, thread in rows:
            if thread == caller:  # the next region: all chunks of the one before have ended
                ticks += max(0, min(last, start) - own_end)
                own_end = last = end
            else:
                last = max(last, end)
        ticks += last - own_end
        return ticks * seconds / max(1, max(end for _, end, _ in rows) - rows[0][0])

    def spans(self, names: Sequence[str], caller: int, seconds: float) -> list[Span]:
        """What was recorded in a run of so many seconds, by start."""
        used = min(self._cells[1], CAPACITY)
        cells = self._cells[2 : 2 + 4 * used]
        rows = sorted(zip(cells[2::4], cells[3::4], cells[::4], cells[1::4], strict=True))  # start, end, number of the call or -1, thread
        if not rows:
            return []
        first, rate = rows[0][0], seconds / max(1, max(end for _, end, _, _ in rows) - rows[0][0])
        calls = [(start, number) for start, _, number, _ in rows if number >= 0]
        starts = [start for start, _ in calls]
        spans = []
        for start, end, number, thread in rows:
            chunk = number < 0
            name = names[calls[max(0, bisect_right(starts, start) - 1)][1]] if chunk and calls else names[number]
            spans.append(Span(name, chunk, thread if chunk else caller, (start - first) * rate, (end - start) * rate))
        return spans


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Spans in the Trace Event Format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing show: to be written as JSON."""
    events: list[dict[str, Any]] = []
    threads: dict[int, None] = {}
    for span in spans:
        times = {"ts": span.start * 1e6, "dur": span.seconds * 1e6, "pid": os.getpid(), "tid": span.thread}
        events.append({"name": span.kernel, "cat": "chunk" if span.chunk else "kernel", "ph": "X", **times})
        threads.setdefault(span.thread)
    for number, thread in enumerate(threads):
        label = "caller" if number == 0 else f"worker {number}"
        events.append({"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": thread, "args": {"name": label}})
    return {"traceEvents": events, "displayTimeUnit": "ns"}
