"""Stopping a run: after a time, by another thread, or by Ctrl-C.

Native code looks at the status of its call every few milliseconds at most, and ends when it is not 0 (`tcomp.codegen.llvm.checkpoints`).
Python's own signal handlers wait until native code has returned; the byte that Python writes for each signal to the descriptor of
`signal.set_wakeup_fd` does not: a thread reads it, and stops what runs in the main thread. The handler then runs. Where it returns instead
of raising KeyboardInterrupt, the run starts again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import get_ident
from weakref import ref

from tcomp.errors import InputError, StoppedError
from tcomp.runtime.frame import Frame

STOPPED = -1  # the status
_main = threading.main_thread().ident
_watched = False
_frames: set[ref[Frame]] = set()  # all there are. What is not running may be stopped, too: a run begins with a new status


def run_frame(run: Callable[[int], int], frame: Frame, timeout: float | None = None) -> int:
    """The status of a run. Raises StoppedError if it was stopped: by its timeout, or by `stop`."""
    frame.stopped, frame.thread = "", get_ident()
    take_back = None if timeout is None else _stop_after(frame, timeout)
    try:  # all in one function: a call more is a tenth of the time of a small bound run
        while True:
            frame.call.status = 0
            if not frame.stopped and (status := run(frame.address)) != STOPPED:
                return status
            if frame.stopped:  # maybe before it began
                raise StoppedError("the run was stopped", why=frame.stopped)
    finally:
        if take_back is not None:
            take_back()  # it must not stop the next run of the frame


def _stop_after(frame: Frame, seconds: float) -> Callable[[], None]:
    """Stop a run so many seconds from now, unless what is returned is called before. Raises InputError for no such time."""
    if not seconds > 0:
        raise InputError(f"a timeout must be more than 0 seconds, not {seconds}")
    watch = _watch_of_this_process()
    return partial(watch.cancel, watch.set(frame, seconds))


class _Watch:
    """A thread that stops runs whose time is over. One for all: to start a thread for each takes longer than many a run."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._alarms: dict[object, tuple[float, Frame, str]] = {}  # of what runs now: when, which, and why
        self._wakes = 0.0  # when the thread looks again, by time.monotonic
        self._thread: threading.Thread | None = None

    def set(self, frame: Frame, seconds: float) -> object:
        """Stop a frame so many seconds from now, unless the alarm that is returned is cancelled."""
        end, alarm = time.monotonic() + seconds, object()
        with self._changed:
            self._alarms[alarm] = end, frame, f"it took longer than {seconds:g} s"
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tcomp-timeouts", daemon=True)
                self._wakes = end
                self._thread.start()
            elif end < self._wakes:
                self._wakes = end
                self._changed.notify()
        return alarm

    def cancel(self, alarm: object) -> None:
        """The frame is not stopped any more after this."""
        with self._changed:
            self._alarms.pop(alarm, None)

    def _work(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for alarm in [alarm for alarm, (end, *_) in self._alarms.items() if end <= now]:
                    _, frame, why = self._alarms.pop(alarm)
                    _stop(frame, why)
                self._wakes = min((end for end, *_ in self._alarms.values()), default=now + _LONG)
                self._changed.wait(self._wakes - now)


_LONG = 3600.0  # seconds that the thread sleeps if there is nothing to wait for
_watch: _Watch | None = None


def _watch_of_this_process() -> _Watch:
    """A child made by fork has no threads but one, and maybe a lock that nobody gives back: it gets a watch of its own."""
    global _watch
    if (watch := _watch) is None:
        watch = _watch = _Watch()
        os.register_at_fork(after_in_child=_forget_watch)
    return watch


def _forget_watch() -> None:
    global _watch
    _watch = None


def stoppable(frame: Frame) -> Frame:
    """The frame, which `stop` and Ctrl-C know of from now on."""
    _frames.add(ref(frame, _frames.discard))
    return frame


def stop(owner: object, why: str) -> None:
    """Stop the runs of all frames of an owner."""
    for frame in _all():
        if frame.owner is owner:
            _stop(frame, why)


def _all() -> list[Frame]:
    return [frame for known in list(_frames) if (frame := known()) is not None]


def _stop(frame: Frame, why: str) -> None:
    frame.stopped = why
    frame.call.status = STOPPED


def answer_interrupts() -> None:
    """From now on, Ctrl-C stops what runs in the main thread; in a child made by fork, once this is called again. Does nothing in other
    threads, and where a program uses the descriptor of wake-ups for itself: its signals are handled when the run is over."""
    global _watched
    if _watched or get_ident() != _main:
        return
    _watched = True
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    if (before := signal.set_wakeup_fd(writer, warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
        return
    threading.Thread(target=_watch_signals, args=(reader,), name="tcomp-signals", daemon=True).start()
    os.register_at_fork(after_in_child=lambda: _forget(writer))


def _watch_signals(reader: int) -> None:
    while signals := os.read(reader, 64):
        if signal.SIGINT in signals:
            for frame in _all():
                if frame.thread == _main:
                    frame.call.status = STOPPED


def _forget(writer: int) -> None:
    """In a child, nobody reads the wake-ups of the parent's pipe; the next module starts another thread."""
    global _watched
    with suppress(ValueError):  # not the main thread
        if (now := signal.set_wakeup_fd(-1)) not in (writer, -1):
            signal.set_wakeup_fd(now)
    _watched = False
