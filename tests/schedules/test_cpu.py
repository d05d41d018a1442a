"""Lowering and the default schedules: reference == loops as lowered == loops as scheduled == machine code."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jit import HOST
from programs import Program, layouts, programs
from running import expected, interpreted, native

from tcomp.codegen.llvm import emit_kernel
from tcomp.codegen.native import compile_ir
from tcomp.ir.loops import Kernel, hoist_temporaries
from tcomp.ir.verify import verify_kernel
from tcomp.schedules.cpu import schedule
from tcomp.schedules.lower import lower
from tcomp.schedules.schedule import replay
from tcomp.target import Target

HASWELL = Target.parse("cpu -march=x86_64 -mcpu=haswell")
ARM = Target.parse("cpu -march=aarch64 -mcpu=neoverse-n1")
SMALL = programs()
MEDIUM = programs(largest=40, volume=3000)
LARGE = programs(largest=150, volume=100_000)


def lowered(program: Program) -> Kernel:
    return lower("program", program.inputs, program.outputs)


def agree(program: Program, found: list, reference: list) -> None:
    for got, want in zip(found, reference, strict=True):
        program.same(got, want)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SMALL)
def test_lowering_keeps_the_meaning(program: Program) -> None:
    agree(program, interpreted(program, lowered(program)), expected(program))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SMALL, st.data())
def test_lowering_through_layouts(program: Program, data: st.DataObject) -> None:
    chosen = [data.draw(layouts(t.ndim)) for t in (*program.inputs, *program.outputs)]
    tensors = (*program.inputs, *program.outputs)
    kernel = lower("program", program.inputs, program.outputs, dict(zip(tensors, chosen, strict=True)))
    agree(program, interpreted(program, kernel, chosen), expected(program))
    scheduled = schedule(kernel, HASWELL).kernel
    agree(program, interpreted(program, scheduled, chosen), expected(program))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(MEDIUM, st.sampled_from([HOST, HASWELL, ARM]))
def test_default_schedules_keep_the_meaning(program: Program, target: Target) -> None:
    """The interpreter checks bounds, undefined reads, and (by shuffling parallel iterations) races."""
    kernel = lowered(program)
    s = schedule(kernel, target)
    agree(program, interpreted(program, s.kernel, shuffle=1), expected(program))
    assert str(replay(kernel, s.trace)) == str(s.kernel)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(LARGE, st.booleans())
def test_machine_code_equals_the_reference(program: Program, threads: bool) -> None:
    agree(program, native(program, schedule(lowered(program), HOST).kernel, threads=threads), expected(program))


@pytest.mark.skipif(not HASWELL.runs_on(HOST), reason="needs an x86 processor with AVX2")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(LARGE)
def test_machine_code_for_narrower_vectors(program: Program) -> None:
    agree(program, native(program, schedule(lowered(program), HASWELL).kernel, target=HASWELL), expected(program))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(LARGE, st.sampled_from([HASWELL, ARM]))
def test_other_machines_get_code_as_well(program: Program, target: Target) -> None:
    kernel = schedule(lowered(program), target).kernel
    verify_kernel(kernel)
    assert compile_ir(emit_kernel(hoist_temporaries(kernel)[0], target), target).startswith(b"\x7fELF")
