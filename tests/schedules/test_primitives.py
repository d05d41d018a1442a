"""Schedule primitives: any sequence of steps that is accepted keeps the meaning of the program, replays, and leaves no race."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Program, elementwise, imperative, programs
from races import races
from running import expected, interpreted, native

from tcomp.errors import CodegenError, ScheduleError
from tcomp.ir import expr as E
from tcomp.ir import te
from tcomp.ir.expr import as_dim, as_expr
from tcomp.ir.loops import KINDS, Accumulate, Allocate, For, Kernel, Stmt, Store, expressions, walk
from tcomp.ir.verify import verify_kernel
from tcomp.schedules import primitives as P
from tcomp.schedules.lower import lower
from tcomp.schedules.schedule import Schedule, Step, replay


def nest_at(kernel: Kernel, loop: str) -> list[str]:
    """The loops that stand directly inside each other from `loop` inwards."""
    names, s = [], P.find_loop(kernel, loop)
    inner: Stmt = s
    while isinstance(inner, For):
        names.append(inner.var.name)
        inner = inner.body
    return names


def temporaries(kernel: Kernel) -> list[str]:
    return [s.buffer.name for s in walk(kernel.body) if isinstance(s, Allocate)]


def readers(kernel: Kernel, buffer: str) -> list[str]:
    """Loops around a read of a buffer that do not write it."""
    found = []
    for s in walk(kernel.body):
        if isinstance(s, For):
            inside = list(walk(s.body))
            read = any(r.attr.name == buffer for x in inside for r in E.reads(*expressions(x)))
            if read and not any(isinstance(x, Store | Accumulate) and x.buffer.name == buffer for x in inside):
                found.append(s.var.name)
    return found


def folds(kernel: Kernel) -> list[tuple[str, str]]:
    """(stage, loop around its accumulation)"""
    loops = [s for s in walk(kernel.body) if isinstance(s, For)]
    return [(x.buffer.name, f.var.name) for f in loops for x in walk(f.body) if isinstance(x, Accumulate)]


def draw_step(draw: st.DrawFn, s: Schedule) -> tuple[str, tuple[Any, ...]]:
    """One step, likely but not sure to be legal."""
    pick = lambda choices: draw(st.sampled_from(list(choices)))  # noqa: E731
    loops = P.loop_names(s.kernel)
    buffers = [b.name for b in s.kernel.buffers] + temporaries(s.kernel)
    local = temporaries(s.kernel) or buffers
    if not loops:
        return "clean", ()
    match pick(
        ["split", "reorder", "fuse", "partition", "set_kind", "set_kind", "cache_read", "cache_write", "rfactor", "collapse", "clean"]
        + ["compute_at", "compute_at", "compute_at", "relayout", "set_scope"] * bool(temporaries(s.kernel))
    ):
        case "split":
            return "split", (pick(loops), draw(st.integers(1, 5)))
        case "reorder":
            return "reorder", tuple(draw(st.permutations(nest_at(s.kernel, pick(loops)))))
        case "fuse":
            nest = nest_at(s.kernel, pick(loops))
            return "fuse", tuple(nest[:2]) if len(nest) > 1 else (nest[0], pick(loops))
        case "partition":
            loop = pick(loops)
            extent = P.find_loop(s.kernel, loop).extent
            if isinstance(extent, int):
                return "partition", (loop, draw(st.integers(0, extent)))
            return "partition", (loop, as_dim(as_expr(extent) // draw(st.integers(1, 3))))
        case "set_kind":
            return "set_kind", (pick(loops), pick(KINDS[:4]), draw(st.booleans()))
        case "compute_at":
            name = pick(local)
            return "compute_at", (name, pick(readers(s.kernel, name) or loops), pick(["global", "register"]))
        case "cache_read":
            return "cache_read", (pick(buffers), pick([None, *loops]), "cached", pick(["global", "register"]))
        case "cache_write":
            return "cache_write", (pick(buffers), "written")
        case "relayout":
            name = pick(local)
            rank = len(P.find_buffer(s.kernel, name).shape)
            return "relayout", (name, draw(st.integers(0, max(0, rank - 1))), draw(st.integers(1, 4)))
        case "rfactor":
            stage, loop = pick(folds(s.kernel) or [(buffers[0], loops[0])])
            return "rfactor", (stage, loop, draw(st.integers(1, 4)))
        case "set_scope":
            return "set_scope", (pick(local), pick(["global", "register"]))
        case other:
            return other, ()


@st.composite
def scheduled(draw: st.DrawFn, of: st.SearchStrategy[Program], steps: int) -> tuple[Program, Schedule]:
    """A program and a schedule of it: the steps that were accepted. Refused ones change nothing and show the loops."""
    program = draw(of)
    s = Schedule(lower("program", program.inputs, program.outputs))
    for _ in range(draw(st.integers(1, steps))):
        name, arguments = draw_step(draw, s)
        before, length = s.kernel, len(s.trace)
        try:
            s.apply(name, *arguments)
            verify_kernel(s.kernel)
        except ScheduleError as error:
            assert s.kernel is before and len(s.trace) == length
            assert "kernel `program`" in error.what and error.why
        except Exception as error:
            error.add_note(f"{program}{s.kernel}\n{Step(name, arguments)}")
            raise
    return program, s


@settings(max_examples=250, deadline=None, derandomize=True)
@given(scheduled(programs(largest=4, volume=60), 7))
def test_random_schedules_keep_the_meaning(case: tuple[Program, Schedule]) -> None:
    program, s = case
    for got, want in zip(interpreted(program, s.kernel, shuffle=1), expected(program), strict=True):
        program.same(got, want)
    assert str(replay(lower("program", program.inputs, program.outputs), s.trace)) == str(s.kernel)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(scheduled(programs(largest=4, volume=40), 5))
def test_no_schedule_makes_a_race(case: tuple[Program, Schedule]) -> None:
    program, s = case
    assert not races(s.kernel, program.dims)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(scheduled(programs(largest=6, volume=300), 6))
def test_machine_code_of_random_schedules(case: tuple[Program, Schedule]) -> None:
    """Some schedules make no code (a vectorized loop inside another, lanes that are no power of two); the others are right."""
    program, s = case
    try:
        found = native(program, s.kernel, threads=True)
    except CodegenError:
        return
    for got, want in zip(found, expected(program), strict=True):
        program.same(got, want)
