"""One case of the schedule fuzzer: a random program, random steps, and what must hold of them.

An accepted step gives a kernel that verifies and replays; what it computes is what the plain kernel computes, bit for bit, in the
interpreter (parallel iterations in random order, temporaries full of garbage) and natively (between guard zones, threads in another order).
A refused step raises `ScheduleError`, says what, where and why, and leaves the schedule as it was.
"""

from __future__ import annotations

import ast
import ctypes
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from textwrap import dedent

import numpy as np
from dice import Dice
from jit import HOST, engine
from programs import EXACT, Maker
from random_loops import imperative
from random_schedules import draw_step
from running import POOL
from witness import flaw, history

from tcomp.codegen.llvm import KernelModule
from tcomp.codegen.native import compile_ir
from tcomp.errors import CodegenError, IRError, ScheduleError
from tcomp.ir.dtypes import UNSIGNED, to_numpy
from tcomp.ir.expr import Expr, as_expr, evaluate_int
from tcomp.ir.loops import GPU_AXES, SERIAL, Allocate, Buffer, For, Kernel, Stmt, hoist_temporaries
from tcomp.ir.loops_eval import run_kernel
from tcomp.ir.parser import parse_kernel
from tcomp.ir.verify import verify_kernel
from tcomp.schedules.legality import Witness
from tcomp.schedules.lower import lower
from tcomp.schedules.primitives.edit import rebuild, swap_buffer
from tcomp.schedules.schedule import Schedule, replay
from tcomp.schedules.trace import Step

Arrays = list[np.ndarray]  # of the parameters of a kernel, in order

STEPS = 12
ROUNDED = {"float16": 1 << 9, "float32": 1 << 20, "float64": 1 << 48}  # beyond, sums of small integers may depend on their order
GUARD = 128  # bytes on both sides of an array


class Failure(Exception):
    """What went wrong with a case: `kind` is what stays the same while the case is made smaller."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(frozen=True, eq=False)
class Subject:
    """A kernel before any schedule, at certain sizes."""

    kernel: Kernel
    dims: dict[Expr, int]

    def arrays(self) -> Arrays:
        """Small integers, the same for the same shapes; outputs hold such too, which they keep where they are not written."""
        rng = np.random.default_rng(1)
        found = []
        for b in self.kernel.buffers:
            low = 0 if b.dtype == "bool" or b.dtype in UNSIGNED else -4
            shape = [evaluate_int(as_expr(d), self.dims) for d in b.shape]
            found.append(rng.integers(low, 2 if b.dtype == "bool" else 5, shape).astype(to_numpy(b.dtype)))
        return found

    @cached_property
    def plain(self) -> Arrays:
        """The results, flat. Raises `IRError` where the program itself is wrong: out of bounds, an undefined read."""
        return interpreted(self, self.kernel, strict=True)


def interpreted(subject: Subject, kernel: Kernel, strict: bool = False) -> Arrays:
    arrays = dict(zip(kernel.buffers, _shaped(kernel, subject.arrays(), subject.dims), strict=True))
    run_kernel(kernel, arrays, subject.dims, shuffle=None if strict else 1, garbage=not strict)
    return [arrays[b].reshape(-1) for b in kernel.outputs]


def _shaped(kernel: Kernel, arrays: Arrays, dims: dict[Expr, int]) -> Arrays:
    """The arrays in the shapes that a schedule gave the parameters."""
    return [a.reshape([evaluate_int(as_expr(d), dims) for d in b.shape]) for b, a in zip(kernel.buffers, arrays, strict=True)]


# ---------------------------------------------------------------- making


def make(dice: Dice) -> Subject:
    """A program that is right by itself and whose results do not depend on the order of sums."""
    while True:
        if dice.one_in(3):
            made = dice.pick(*EXACT)(Maker(dice, 9, 40, dice.flip()))
            subject = Subject(lower("program", made.inputs, made.outputs), made.dims)
        else:
            subject = Subject(*imperative(dice))
        try:
            verify_kernel(subject.kernel)
            results = subject.plain
        except IRError:
            continue
        if all(is_exact(r) for r in results):
            return subject


def is_exact(array: np.ndarray) -> bool:
    limit = ROUNDED.get(array.dtype.name)
    return limit is None or bool(np.all(np.abs(array) < limit))


# ---------------------------------------------------------------- judging


class Run:
    """A schedule of a subject, each step judged as it is taken. Methods raise `Failure`; `steps` then ends with the culprit."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.schedule = subject, Schedule(subject.kernel)
        self.steps: list[Step] = []  # the refused ones too
        self.refused: Counter[str] = Counter()
        self.witnesses: Counter[str] = Counter()

    def roll(self, dice: Dice) -> None:
        for _ in range(dice.number(1, STEPS)):
            self.take(draw_step(dice, self.schedule.kernel))
        self.interpret()
        if dice.one_in(4):
            self.replay()

    def repeat(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.take(step)
        self.interpret()
        self.replay()

    def take(self, step: Step) -> None:
        s, before, length = self.schedule, self.schedule.kernel, len(self.schedule.trace)
        self.steps.append(step)
        try:
            s.apply(step.primitive, *step.arguments, **dict(step.options))
        except ScheduleError as error:
            if s.kernel is not before or len(s.trace) != length:
                raise Failure("a refused step changes the schedule", str(step)) from error
            if not error.what or not error.where or not error.why:
                raise Failure("a refusal does not say what, where and why", str(error)) from error
            self.refused[step.primitive] += 1
            if error.witness is not None:
                self.examine(before, error.witness)
            return
        except Exception as error:
            raise Failure(f"{type(error).__name__} instead of a refusal by {step.primitive}", str(error)) from error
        try:
            verify_kernel(s.kernel)
        except IRError as error:
            raise Failure(f"{step.primitive} makes a malformed kernel", str(error)) from error

    def examine(self, kernel: Kernel, witness: Witness) -> None:
        """Run the program on the instance that the witness names."""
        self.witnesses["exact" if witness.exact else "possible"] += 1
        sizes = {v: witness.fixed.get(v.name, v.attr.lo or 0) for v in kernel.scalars}
        arrays = dict(zip(kernel.buffers, _shaped(kernel, Subject(self.subject.kernel, sizes).arrays(), sizes), strict=True))
        try:
            reason = flaw(witness, history(kernel, arrays, sizes))
        except IRError as error:
            raise Failure("the program cannot be run on the instance of a witness", f"{witness}\n{error}") from error
        if reason:
            raise Failure("a witness is not real", f"{witness}\n{reason}")

    def interpret(self) -> None:
        """What the loops compute."""
        kernel = self.schedule.kernel
        try:
            found = interpreted(self.subject, kernel)
        except IRError as error:
            raise Failure("the interpreter stops", str(error)) from error
        compare("wrong in the interpreter", kernel, found, self.subject.plain)

    def replay(self) -> None:
        """Whether the loops can be had again from the trace."""
        if str(replay(self.subject.kernel, self.schedule.trace)) != str(self.schedule.kernel):
            raise Failure("the trace replays to other loops", str(self.schedule.kernel))


def check(kernel: str, steps: str, **sizes: int) -> Run:
    """A case as text, judged in the interpreter and natively: a printed kernel, a printed trace (refused steps too), values of its sizes."""
    parsed = parse_kernel(dedent(kernel).strip())
    run = Run(Subject(parsed, {v: sizes[v.name] for v in parsed.scalars}))
    run.repeat(_parsed(steps))
    for failure in run_native([run], 2)[0].values():
        raise failure
    return run


def _parsed(steps: str) -> list[Step]:
    found = []
    for line in ast.parse(dedent(steps)).body:
        match line:
            case ast.Expr(ast.Call(ast.Attribute(_, primitive), arguments, options)):
                named = tuple((str(o.arg), ast.literal_eval(o.value)) for o in options)
                found.append(Step(primitive, tuple(map(ast.literal_eval, arguments)), named))
            case _:
                raise ValueError(f"no step: {ast.unparse(line)}")
    return found


def compare(kind: str, kernel: Kernel, found: Arrays, expected: Arrays) -> None:
    for b, got, want in zip(kernel.outputs, found, expected, strict=True):
        if not np.array_equal(got, want):
            raise Failure(kind, f"{b.name} is {got.tolist()} instead of {want.tolist()}")


# ---------------------------------------------------------------- machine code


def run_native(runs: Sequence[Run], opt_level: int) -> tuple[dict[int, Failure], int]:
    """The kernels of the runs, compiled together and called: failures by position, and how many make no code."""
    module, failures, names, refused = KernelModule("fuzz", HOST), dict[int, Failure](), dict[int, str](), 0
    kernels = {n: replace(_for_cpu(run.schedule.kernel), name=f"kernel{n}") for n, run in enumerate(runs)}
    for n, kernel in kernels.items():
        try:
            _define(module, kernel)
            names[n] = kernel.name
        except CodegenError:
            refused += 1
        except Failure as failure:
            failures[n] = failure
    try:
        code = engine(compile_ir(module.text(), HOST, opt_level))
    except CodegenError as error:
        if len(runs) == 1:
            return {0: Failure("LLVM refuses the code", str(error))}, 0
        for n, run in enumerate(runs):  # to know which
            failures.update((n, failure) for failure in run_native([run], opt_level)[0].values())
        return failures, refused
    for n, name in names.items():
        try:
            _call(code.get_function_address(name), kernels[n], runs[n])
        except Failure as failure:
            failures[n] = failure
    return failures, refused


def _for_cpu(kernel: Kernel) -> Kernel:
    """What is meant for a GPU, in one thread."""

    def edit(s: Stmt) -> Stmt | None:
        if isinstance(s, For) and s.kind in GPU_AXES:
            return replace(s, kind=SERIAL, body=rebuild(s.body, edit))
        if isinstance(s, Allocate) and s.buffer.scope == "shared":
            new = Buffer(s.buffer.name, s.buffer.dtype, s.buffer.shape)
            return Allocate(new, rebuild(swap_buffer(s.body, s.buffer, new, lambda indices: indices), edit))
        return None

    return hoist_temporaries(kernel.with_body(rebuild(kernel.body, edit)))[0]


def _define(module: KernelModule, kernel: Kernel) -> None:
    try:
        module.define(kernel)
    except CodegenError:
        raise
    except Exception as error:
        raise Failure(f"{type(error).__name__} in code generation", str(error)) from error


def _call(address: int, kernel: Kernel, run: Run) -> None:
    """One call, every array between guard zones that must not change."""
    dims, arrays = run.subject.dims, run.subject.arrays()
    temporaries = kernel.buffers[len(arrays) :]
    arrays += [np.full([evaluate_int(as_expr(d), dims) for d in b.shape], 85).astype(to_numpy(b.dtype)) for b in temporaries]
    blocks = [np.full(2 * GUARD + a.nbytes, 0xA5, np.uint8) for a in arrays]
    for block, a in zip(blocks, arrays, strict=True):
        block[GUARD : GUARD + a.nbytes] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    types = [ctypes.c_void_p] * (1 + len(blocks)) + [ctypes.c_int64] * len(kernel.scalars)
    pool = ctypes.addressof(POOL)
    ctypes.CFUNCTYPE(None, *types)(address)(pool, *(b.ctypes.data + GUARD for b in blocks), *(dims[v] for v in kernel.scalars))
    for b, block in zip(kernel.buffers, blocks, strict=True):
        if np.any(block[:GUARD] != 0xA5) or np.any(block[-GUARD:] != 0xA5):
            raise Failure("machine code writes out of bounds", f"beside {b.name}")
    count = len(kernel.buffers) - len(temporaries)
    outputs = [b for b in kernel.buffers[:count] if b in kernel.outputs]
    found = [
        block[GUARD:-GUARD].view(a.dtype) for b, block, a in zip(kernel.buffers, blocks, arrays, strict=True) if b in outputs
    ]
    compare("wrong in machine code", replace(kernel, outputs=tuple(outputs)), found, run.subject.plain)
