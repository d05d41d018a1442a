"""One case of the schedule fuzzer: a random program, random steps, and what must hold of them.

An accepted step gives a kernel that verifies and replays; what it computes is what the plain kernel computes, bit for bit, in the
interpreter (parallel iterations in random order, temporaries full of garbage) and natively (between guard zones, threads in another order).
A refused step raises `ScheduleError`, says what, where and why, and leaves the schedule as it was.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from textwrap import dedent

import numpy as np

from tcomp.errors import IRError, ScheduleError
from tcomp.ir.expr import Expr
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Kernel
from tcomp.ir.text.parser import parse_kernel
from tcomp.ir.verify.loops import verify_kernel
from tcomp.schedules.analysis.in_place import reusable_in_place
from tcomp.schedules.analysis.legality import Witness
from tcomp.schedules.lowering import lower
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.trace import Step
from tests.schedules.dice import Dice
from tests.schedules.pipelines import pipeline
from tests.schedules.programs import EXACT, Maker
from tests.schedules.random_loops import imperative
from tests.schedules.random_schedules import draw_step
from tests.schedules.subject import Failure, Subject, compare, interpreted, shaped
from tests.schedules.together import Case, run_native
from tests.schedules.witness import Event, flaw, history, misjudged

STEPS = 12
FEW = 60  # executions whose dependences are compared pair by pair
ROUNDED = {"float16": 1 << 9, "float32": 1 << 20, "float64": 1 << 48}  # beyond, sums of small integers may depend on their order

# ---------------------------------------------------------------- making


def make(dice: Dice) -> Subject:
    """A program that is right by itself and whose results do not depend on the order of sums."""
    while True:
        match dice.pick("expressions", "pipeline", "loops", "loops"):
            case "expressions":
                made = dice.pick(*EXACT)(Maker(dice, 9, 40, dice.flip()))
                subject = Subject(lower("program", made.inputs, made.outputs), made.dims)
            case "pipeline":
                subject = pipeline(dice, 4)
            case _:
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

    @property
    def case(self) -> Case:
        return self.subject, self.schedule.kernel

    def roll(self, dice: Dice) -> None:
        for _ in range(dice.number(1, STEPS)):
            self.take(draw_step(dice, self.schedule.kernel))
        self.interpret()
        if dice.one_in(4):
            self.replay()
        if dice.one_in(8):
            self.compare_dependences()
        if dice.one_in(8):
            self.overwrite()

    def repeat(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.take(step)
        self.interpret()
        self.replay()
        self.compare_dependences()
        self.overwrite()

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
        try:
            reason = flaw(witness, self.events(kernel, sizes))
        except IRError as error:
            raise Failure("the program cannot be run on the instance of a witness", f"{witness}\n{error}") from error
        if reason:
            raise Failure("a witness is not real", f"{witness}\n{reason}")

    def events(self, kernel: Kernel, sizes: dict[Expr, int]) -> list[Event]:
        arrays = shaped(kernel, Subject(self.subject.kernel, sizes).arrays(), sizes)
        return history(kernel, dict(zip(kernel.buffers, arrays, strict=True)), sizes)

    def compare_dependences(self) -> None:
        """The dependences of the loops as scheduled with those of their executions, where there are few."""
        events = self.events(self.schedule.kernel, self.subject.dims)
        if len(events) <= FEW and (reason := misjudged(self.schedule.kernel, events, self.subject.dims)):
            raise Failure("wrong dependences", reason)

    def interpret(self) -> None:
        """What the loops compute."""
        kernel = self.schedule.kernel
        try:
            found = interpreted(self.subject, kernel)
        except IRError as error:
            raise Failure("the interpreter stops", str(error)) from error
        compare("wrong in the interpreter", kernel, found, self.subject.plain)

    def overwrite(self) -> None:
        """Whether results are the same where an output lies over an input. Where it is not written, the output is what lies there."""
        kernel, dims = self.schedule.kernel, self.subject.dims
        for source, output in reusable_in_place(kernel):
            found = []
            for apart in (True, False):
                arrays = dict(zip(kernel.buffers, shaped(kernel, self.subject.arrays(), dims), strict=True))
                arrays[output] = arrays[source].copy() if apart else arrays[source]
                run_kernel(kernel, arrays, dims, shuffle=1, garbage=True)
                found.append([arrays[b].reshape(-1) for b in kernel.outputs])
            compare(f"wrong where {output.name} lies over {source.name}", kernel, *reversed(found))

    def replay(self) -> None:
        """Whether the loops can be had again from the trace."""
        if str(Schedule(self.subject.kernel).replay(self.schedule.trace)) != str(self.schedule.kernel):
            raise Failure("the trace replays to other loops", str(self.schedule.kernel))


def check(kernel: str, steps: str, **sizes: int) -> Run:
    """A case as text, judged in the interpreter and natively: a printed kernel, a printed trace (refused steps too), values of sizes."""
    source = parse_kernel(dedent(kernel).strip())
    run = Run(Subject(source, {v: sizes[v.name] for v in source.scalars}))
    run.repeat(parsed(steps))
    for failure in run_native([run.case], 2)[0].values():
        raise failure
    return run


def parsed(steps: str) -> list[Step]:
    found = []
    for line in ast.parse(dedent(steps)).body:
        match line:
            case ast.Expr(ast.Call(ast.Attribute(_, primitive), arguments, options)):
                named = tuple((str(o.arg), ast.literal_eval(o.value)) for o in options)
                found.append(Step(primitive, tuple(map(ast.literal_eval, arguments)), named))
            case _:
                raise ValueError(f"no step: {ast.unparse(line)}")
    return found
