"""Tests that count the threads and descriptors of a process: in a child, in which no module that another test left has any."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from typing import Any


def in_child(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run in a forked child. Threads do not survive a fork, so that the first pool of the child is a new one."""

    @functools.wraps(test)
    def forked(*args: Any, **kwargs: Any) -> None:
        if (child := os.fork()) == 0:
            status = 1
            try:
                test(*args, **kwargs)
                status = 0
            except BaseException:  # noqa: BLE001  whatever it is, it is told, and the child ends here
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    return forked
