"""The listings in the docstrings of the schedules package are what really happens."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import tcomp.schedules
from tcomp import te
from tcomp.schedules import Schedule

KNOWN = {"te": te, "Schedule": Schedule}


def listings() -> Iterator[doctest.DocTest]:
    """Docstrings with examples, which know `te` and `Schedule`, in the order of the modules' and functions' names; once, where methods share that of a primitive."""
    finder, seen = doctest.DocTestFinder(exclude_empty=True), set[str]()
    for module in pkgutil.walk_packages(tcomp.schedules.__path__, "tcomp.schedules."):
        for found in sorted(finder.find(importlib.import_module(module.name), module.name, extraglobs=KNOWN), key=lambda test: test.name):
            if found.examples and found.docstring not in seen:
                seen.add(found.docstring or "")
                yield found


@pytest.mark.parametrize("listing", [pytest.param(test, id=test.name.removeprefix("tcomp.schedules.")) for test in listings()])
def test_listing(listing: doctest.DocTest) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    runner.run(listing, out=report.append)
    assert not runner.failures, "".join(report)
