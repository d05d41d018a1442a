"""Tests that count the threads and descriptors of a process: in a new one, in which no module that another test left has any."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

_ALONE = "TCOMP_TEST_ALONE"  # set in the new process


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run by a pytest of its own."""

    @functools.wraps(test)
    def started(*args: Any, **kwargs: Any) -> None:
        if _ALONE in os.environ:
            return test(*args, **kwargs)
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", f"{inspect.getsourcefile(test)}::{test.__name__}"]
        done = subprocess.run(command, env={**os.environ, _ALONE: "1"}, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout

    return started
