"""Knobs: whatever is decided, the program means the same; what was decided can be decided again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import ScheduleError
from tcomp.ir import te
from tcomp.ir.loops import UNROLLED
from tcomp.schedules.cpu.default import operand_layouts, schedule
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.lowering import lower
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST
from tests.schedules.programs import Program, programs
from tests.schedules.running import expected, interpreted, native

HASWELL = CpuTarget.parse("cpu -march=x86_64 -mcpu=haswell -l2=1M -l3=16M")  # a cache that holds the operands


def at_random(seed: int) -> Knobs:
    rng = random.Random(seed)
    return Knobs(pick=lambda name, options, default: rng.choice(options))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs(largest=40, volume=3000), st.integers(0, 1 << 30))
def test_every_decision_keeps_the_meaning(program: Program, seed: int) -> None:
    kernel = lower("program", program.inputs, program.outputs)
    knobs = at_random(seed)
    s = schedule(kernel, HASWELL, knobs)
    for got, want in zip(interpreted(program, s.kernel, shuffle=1), expected(program), strict=True):
        program.same(got, want)
    again = schedule(kernel, HASWELL, Knobs({name: answer.value for name, answer in knobs.asked.items()}))
    assert str(again.kernel) == str(s.kernel) and again.trace == s.trace
    assert str(schedule(kernel, HASWELL, Knobs(knobs.decisions)).kernel) == str(s.kernel)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(programs(largest=150, volume=100_000), st.integers(0, 1 << 30))
def test_every_decision_keeps_the_meaning_natively(program: Program, seed: int) -> None:
    s = schedule(lower("program", program.inputs, program.outputs), HOST, at_random(seed))
    for got, want in zip(native(program, s.kernel, threads=True), expected(program), strict=True):
        program.same(got, want)


def test_a_product_has_a_space() -> None:
    a, b = te.placeholder((256, 128), name="A"), te.placeholder((128, 512), name="B")
    k = te.reduce_axis(128, "k")
    kernel = lower("k", [a, b], [te.compute((256, 512), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="C")])
    knobs = Knobs()
    schedule(kernel, HASWELL, knobs)
    assert knobs.decisions == {}
    tile = knobs.asked["C.acc.tile"]
    assert tile.value == tile.default and len(tile.options) > 20 and {(6, 2), (4, 3), (1, 7)} <= set(tile.options)
    narrow = Knobs({"C.acc.tile": (4, 1)})
    assert operand_layouts(kernel, frozenset({1}), HASWELL, narrow)[1].pieces[-1].mod == 8
    assert schedule(kernel, HASWELL, narrow).loops["C.0.i"].extent == 4
    assert knobs.asked["C.acc.unroll"].options == (1, 2, 4, 8)
    steps = schedule(kernel, HASWELL, Knobs({"C.acc.unroll": 4})).loops["C.k.i"]
    assert steps.extent == 4 and steps.kind == UNROLLED


def test_a_decision_that_is_no_option_is_passed_over() -> None:
    knobs = Knobs({"tile": 5})
    assert knobs.choice("tile", (4, 8), 8) == 8
    assert knobs.choice("tile", (4, 8), 4) == 8  # asked again: the same answer


def test_an_answer_that_is_no_option_is_refused() -> None:
    with pytest.raises(ScheduleError, match="knob `tile` has no option 5"):
        Knobs(pick=lambda name, options, default: 5).choice("tile", (4, 8), 8)
