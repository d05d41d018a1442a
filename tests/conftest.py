"""Shared by all tests: golden files, signals."""

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tcomp.cache import folder

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing with them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares text with tests/golden/<name>."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        assert path.read_text() == text + "\n", f"{path} differs; if that is intended, run pytest --update-golden"

    return check


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody asks
def pytest_xdist_auto_num_workers() -> int:
    """Two workers of pytest-xdist more than there are cores, as some tests wait: for other processes, for time to pass."""
    return len(os.sched_getaffinity(0)) + 2


def pytest_configure() -> None:
    """Kernels are compiled in the test's own process: pytest-xdist keeps all cores busy already, and a worker process takes as long to start
    as several small kernels take to compile. And what was started in the background ignores Ctrl-C, and so would the processes that tests
    send it to."""
    os.environ.setdefault("TCOMP_JOBS", "1")
    gc.set_threshold(20_000, 20, 20)  # a process of all tests holds a million objects, which are looked at again in every full collection
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):  # each process that a test starts would compile all sources anew, for half a second
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(folder() / "bytecode"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The smoke test first: where it fails, nothing else is worth reading. Then the longest tests of all: at the end, workers of pytest-xdist
    would wait for the one that has them."""
    first = ["test_smoke.py", "test_conformance.py", "test_tutorials.py"]
    items.sort(key=lambda item: first.index(item.path.name) if item.path.name in first else len(first))


def pytest_sessionfinish() -> None:
    """What lives until the end is garbage of nobody: pytest would look at all of it five times more, for seconds in each worker process."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests record as "summary" is printed at the end, also by the worker processes of pytest-xdist."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, text in report.user_properties if getattr(report, "when", "") == "call" else ():
                if name == "summary":
                    terminalreporter.write_line(str(text))
