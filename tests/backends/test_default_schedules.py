"""A model compiles where the default schedule of a kernel is refused as a whole: its loops stay as lowered, and the kernel says so."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import tcomp
from tcomp.backends import backend_of
from tcomp.backends.kernel import build_loops, operand_layouts
from tcomp.errors import ScheduleError
from tcomp.ir.fallback import Fallback, FallbackKind
from tcomp.ir.graph import Graph, GraphBuilder
from tcomp.ops import elementwise as ew
from tcomp.ops.matmul import MATMUL
from tcomp.pipeline import compile_graph
from tcomp.schedules.cpu import default
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.schedule import Schedule

CPU = backend_of("cpu")


def refused(*rest: object) -> Schedule:
    raise ScheduleError("`collapse` does not apply", why="no reason")


def product(weight: np.ndarray | None = None) -> Graph:
    """relu(x @ w) with 5 x 7 and 7 x 9 elements; w is an input, or a constant."""
    g = GraphBuilder("g")
    x, w = g.input("x", "float32", (5, 7)), g.input("w", "float32", (7, 9)) if weight is None else g.constant(weight, "w")
    return g.build(g.add(ew.RELU, g.add(MATMUL, [x, w])))


@pytest.fixture
def all_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("TCOMP_CACHE", str(tmp_path))
    monkeypatch.setattr(default, "_prepared", refused)


@pytest.mark.usefixtures("all_refused")
def test_the_model_runs_as_lowered(caplog: pytest.LogCaptureFixture) -> None:
    w = np.random.default_rng(0).standard_normal((7, 9)).astype(np.float32)
    with caplog.at_level(logging.WARNING, "tcomp"):
        module = tcomp.runtime.Module.load(compile_graph(product(w)))
    assert "default schedule was refused: no reason" in caplog.text
    x = np.random.default_rng(1).standard_normal((5, 7)).astype(np.float32)
    np.testing.assert_allclose(module(x), np.maximum(x @ w, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("all_refused")
def test_the_kernel_says_so() -> None:
    body = product()
    s = build_loops(body, "k", CPU)
    (output,) = s.kernel.outputs
    assert s.fallbacks == (Fallback(FallbackKind.LEFT_AS_LOWERED, output.name, "no reason"),)
    assert s.kernel.notes == (f"`{output.name}` is left as lowered: no reason",)
    assert str(Schedule(s.source).replay(s.trace)) == str(s.kernel)
    assert operand_layouts(body, frozenset({1}), CPU) == {}


def test_decisions_that_are_refused_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner passes over them; the records of a database are tried before they are followed."""
    monkeypatch.setattr(default, "_prepared", refused)
    with pytest.raises(ScheduleError, match="collapse"):
        build_loops(product(), "k", CPU, Knobs({"y.tile": 4}))
