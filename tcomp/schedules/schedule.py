"""A schedule: a program's loops, and the trace of the steps that shaped them.

Loops are named by their variables, stages by the buffers they compute. A name is unique in the kernel and survives all steps that concern
other loops. A stage may also be given as its tensor, a loop as its axis, a size as an expression or its text ("n // 4").
"""

from __future__ import annotations

import inspect
import re
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, TypeVarTuple, overload

from tcomp.errors import IRError, ScheduleError
from tcomp.ir import loops as L
from tcomp.ir.expr import Expr
from tcomp.ir.fallback import Fallback, FallbackKind
from tcomp.ir.instruction import Instruction
from tcomp.ir.layout import Layout
from tcomp.ir.polyhedral.in_range import safe_tensors
from tcomp.ir.simplify import as_dim
from tcomp.ir.te import Tensor, is_placeholder, tensors
from tcomp.ir.text.parser import parse_kernel
from tcomp.ir.text.printer import as_html
from tcomp.ir.verify.loops import verify_kernel
from tcomp.schedules.analysis.legality import proving
from tcomp.schedules.handles import Loop
from tcomp.schedules.instructions import text_of
from tcomp.schedules.lowering import lower
from tcomp.schedules.primitives import affine_transforms, editing, guards, loop_structure, memory_latency, placement, reductions, storage
from tcomp.schedules.primitives.collapse import collapse
from tcomp.schedules.primitives.online_softmax import online
from tcomp.schedules.trace import Step, Trace, read_json

Program = L.Kernel | Tensor | Sequence[Tensor]
P = ParamSpec("P")
R = TypeVar("R")
Rs = TypeVarTuple("Rs")


def kernel_of(program: Program) -> L.Kernel:
    """A program as loops, before any schedule: a kernel stays itself; tensors are lowered (see `inputs_and_outputs`), with guards around
    indices that are not proved to be in range. Raises `IRError` for an access that is out of range in some iteration."""
    if isinstance(program, L.Kernel):
        return program
    inputs, outputs = inputs_and_outputs(program)
    return lower(re.sub(r"\W", "_", outputs[-1].name), inputs, safe_tensors(outputs)[0])


def inputs_and_outputs(program: Tensor | Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(placeholders, results) of tensor expressions: a tensor is computed from its placeholders, in the order of their first use; a
    sequence lists the placeholders first, then the tensors to compute. Raises `IRError` for anything else."""
    if isinstance(program, Tensor):
        program = [*(t for t in tensors([program]) if is_placeholder(t) and t is not program), program]
    hint = "a tensor to compute, a list of placeholders and then tensors to compute, or a kernel"
    if not isinstance(program, Sequence) or not all(isinstance(t, Tensor) for t in program):
        raise IRError(f"this is not a program: {program!r:.80}", hint=hint)
    inputs = [t for t in program if is_placeholder(t)]
    outputs = [t for t in program if not is_placeholder(t)]
    if not outputs or list(program) != [*inputs, *outputs]:
        raise IRError("a program takes the placeholders first, then at least one tensor to compute", where=str(list(program)), hint=hint)
    return inputs, outputs


@overload
def _method(primitive: Callable[Concatenate[L.Kernel, P], L.Kernel]) -> Callable[Concatenate[Schedule, P], None]: ...
@overload
def _method(primitive: Callable[Concatenate[L.Kernel, P], tuple[L.Kernel, R]]) -> Callable[Concatenate[Schedule, P], R]: ...
@overload
def _method(primitive: Callable[Concatenate[L.Kernel, P], tuple[L.Kernel, *Rs]]) -> Callable[Concatenate[Schedule, P], tuple[*Rs]]: ...
def _method(primitive: Callable[..., Any]) -> Callable[..., Any]:
    """The method that applies a primitive to a schedule's kernel; it has its parameters and documentation."""

    @wraps(primitive)
    def method(self: Schedule, *arguments: Any, **options: Any) -> Any:
        try:  # a wrong number of arguments is Python's error
            _signature(primitive.__name__).bind(*arguments, **options)
        except TypeError as error:
            raise TypeError(f"Schedule.{primitive.__name__}(): {error}") from None
        return self.apply(primitive.__name__, *arguments, **options)

    return method


class Primitives:
    """Every primitive as a method of schedules: it returns what the primitive returns besides the kernel."""

    split = _method(loop_structure.split)
    reorder = _method(loop_structure.reorder)
    fuse = _method(loop_structure.fuse)
    partition = _method(loop_structure.partition)
    set_kind = _method(loop_structure.set_kind)
    distribute = _method(loop_structure.distribute)
    inline = _method(placement.inline)
    compute_at = _method(placement.compute_at)
    reverse_compute_at = _method(placement.reverse_compute_at)
    cache_read = _method(storage.cache_read)
    cache_write = _method(storage.cache_write)
    cache_factors = _method(reductions.cache_factors)
    precompute = _method(storage.precompute)
    relayout = _method(storage.relayout)
    set_scope = _method(storage.set_scope)
    pipeline = _method(memory_latency.pipeline)
    rfactor = _method(reductions.rfactor)
    decompose_reduction = _method(reductions.decompose_reduction)
    mask = _method(guards.mask)
    tensorize = _method(loop_structure.tensorize)
    affine = _method(affine_transforms.affine)
    skew = _method(affine_transforms.skew)
    shift = _method(affine_transforms.shift)
    fission = _method(affine_transforms.fission)
    fuse_loops = _method(affine_transforms.fuse_loops)
    collapse = _method(collapse)
    expand = _method(storage.expand)
    prefetch = _method(memory_latency.prefetch)
    promote = _method(storage.promote)
    tighten = _method(guards.tighten)
    unguard = _method(guards.unguard)
    clean = _method(guards.clean)
    note = _method(guards.note)
    stream = _method(memory_latency.stream)
    online = _method(online)
    specialize = _method(guards.specialize)


PRIMITIVES = {name: inspect.unwrap(method) for name, method in vars(Primitives).items() if callable(method)}


class Schedule(Primitives):
    """A kernel, and the steps that made it from a program as lowered: a tensor, the tensors `[A, B, C]`, or a kernel. Every primitive is a
    method; see `help(Schedule.split)`. One that would change what the program computes raises `ScheduleError`, and changes nothing.

    `kernel` is the program as scheduled so far, `source` the program before any step, `trace` the steps, `fallbacks` what the schedule
    functions could not do (a trace keeps only their printed lines, as notes).
    """

    def __init__(self, program: Program) -> None:
        self.kernel = self.source = kernel_of(program)
        self.trace = Trace()
        self.fallbacks: tuple[Fallback, ...] = ()

    @property
    def loops(self) -> dict[str, L.For]:
        """The loops by name, in program order: `s.loops["C.i"].extent`, `.kind`, `.body`."""
        return editing.loops_of(self.kernel)

    @property
    def stages(self) -> dict[str, L.Buffer]:
        """The buffers that are computed, temporaries included, by name, in program order: `s.stages["C"].shape`, `.dtype`, `.scope`."""
        return {s.buffer.name: s.buffer for s in editing.stores(self.kernel.body)}

    def __str__(self) -> str:
        return str(self.kernel)

    def _repr_html_(self) -> str:
        return as_html(str(self.trace), f"{len(self.trace)} steps") + as_html(str(self))

    def __repr__(self) -> str:
        return f"<Schedule of {self.kernel.name} after {len(self.trace)} steps: loops {', '.join(self.loops)}>"

    def apply(self, primitive: str, *arguments: Any, **options: Any) -> Any:
        """Apply a primitive by name; returns the name it made, a tuple of them, or None. Names may be handles: see `schedules.handles`.

        Raises `ScheduleError`, and leaves the schedule as it was, if the step is unknown, malformed or refused.
        """
        step = _step(self.kernel, primitive, arguments, options)
        result = _run(self.kernel, step)
        self.kernel, *names = result if isinstance(result, tuple) else (result,)
        self.trace += (step,)
        return names[0] if len(names) == 1 else (tuple(names) or None)

    def replay(self, trace: Iterable[Step]) -> Self:
        """Apply the steps of a trace, all of them or, if one is refused, none; returns itself. Raises `ScheduleError` naming that step."""
        with self.together():
            for number, step in enumerate(trace, len(self.trace) + 1):
                try:
                    self.apply(step.primitive, *step.arguments, **dict(step.options))
                except ScheduleError as error:
                    refused = error.restated(ScheduleError, where=f"step {number}, {str(step)[:200]}\n{error.where}".rstrip())
                    refused.witness = error.witness
                    raise refused from error
        return self

    @contextmanager
    def together(self) -> Iterator[None]:
        """Steps inside the `with` are all applied or, if one is refused, none."""
        before = self.kernel, self.trace, self.fallbacks
        try:
            yield
        except BaseException:
            self.kernel, self.trace, self.fallbacks = before
            raise

    @contextmanager
    def attempt(self, where: str, otherwise: FallbackKind) -> Iterator[None]:
        """As `together`, but a refusal raises nothing: what `where` names stays as it was, which is recorded as a fallback of that kind."""
        try:
            with self.together():
                yield
        except ScheduleError as error:
            self.fall_back(otherwise, where, error.reason)

    def copy(self) -> Schedule:
        """An independent copy of the schedule, for another continuation."""
        return copy(self)

    def to_json(self) -> str:
        """The program before any step, printed, and the trace: all that it takes to make the schedule again, and to prove it."""
        return self.trace.to_json(str(self.source))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The schedule that `to_json` wrote, every step applied again. Raises `ScheduleError` for what is malformed or refused."""
        trace, kernel = read_json(text)
        return cls(parse_source(kernel)).replay(trace)

    def tile(self, i: Loop, j: Loop, rows: int, columns: int, tail: str = "guard") -> tuple[str, str, str, str]:
        """Two loops directly inside each other become loops over tiles around loops inside a tile: `split`, `split`, `reorder`.

        Legal when the reordering of the four is. Good for reuse: what one tile touches stays in a cache, or in registers. Returns the
        names (i outer, j outer, i inner, j inner). `peel` is not a tail of a tile, as it leaves two nests; `partition` the outer loops
        of a tile where full tiles should be nests of their own.

        >>> A = te.placeholder((8, 6), name="A")
        >>> s = Schedule(te.compute((6, 8), lambda i, j: A[j, i], name="B"))
        >>> s.tile("B.i", "B.j", 3, 4)
        ('B.i.o', 'B.j.o', 'B.i.i', 'B.j.i')
        >>> print(s.trace)
        s.split("B.i", 3)
        s.split("B.j", 4)
        s.reorder("B.i.o", "B.j.o", "B.i.i", "B.j.i")
        """
        with self.together():
            (io, ii, *_), (jo, ji, *_) = self.split(i, rows, tail), self.split(j, columns, tail)
            self.reorder(io, jo, ii, ji)
        return io, jo, ii, ji

    def vectorize(self, loop: Loop, lanes: int | None = None, reassociate: bool = False, tail: str = "guard") -> None:
        """Run the iterations of a loop as lanes of a vector; with `lanes`, split the loop by that and do it to the inner one, `loop.i`.

        Legal as `set_kind(loop, "vectorized")` and `split` are, the steps it is made of. Good for loops whose neighbouring iterations
        touch neighbouring elements.

        >>> A = te.placeholder((10,), name="A")
        >>> s = Schedule(te.compute((10,), lambda i: A[i] * 2, name="B"))
        >>> s.vectorize("B.i", 4)
        >>> print(s.trace)
        s.split("B.i", 4)
        s.set_kind("B.i.i", "vectorized")
        """
        with self.together():
            self.set_kind(loop if lanes is None else self.split(loop, lanes, tail)[1], L.VECTORIZED, reassociate)

    def unroll(self, loop: Loop, factor: int | None = None, tail: str = "guard") -> None:
        """Copy the body of a loop for each iteration; with `factor`, split the loop by that and do it to the inner one, `loop.i`.

        Legal for constant extents. Good for short inner loops, whose indices become constants and whose elements then stay in registers.

        >>> A = te.placeholder((8,), name="A")
        >>> s = Schedule(te.compute((8,), lambda i: A[i] * 2, name="B"))
        >>> s.unroll("B.i", 4)
        >>> print(s.trace)
        s.split("B.i", 4)
        s.set_kind("B.i.i", "unrolled")
        """
        with self.together():
            self.set_kind(loop if factor is None else self.split(loop, factor, tail)[1], L.UNROLLED)

    def parallel(self, loop: Loop) -> None:
        """`set_kind(loop, "parallel")`: share the iterations of a loop among threads."""
        self.set_kind(loop, L.PARALLEL)

    def bind(self, loop: Loop, axis: str, reassociate: bool = False) -> None:
        """`set_kind(loop, axis)`: run the iterations of a loop along an axis of a GPU, `block.x` to `thread.z`."""
        self.set_kind(loop, axis, reassociate)

    def fall_back(self, kind: FallbackKind, where: str, reason: str) -> None:
        """Record what is not done: in `fallbacks` for programs, as a note in the kernel for people."""
        fallback = Fallback(kind, where, reason)
        self.note(str(fallback))
        self.fallbacks += (fallback,)


def parse_source(text: str | None) -> L.Kernel:
    """The kernel that a stored trace starts from. Raises `ScheduleError` where it is missing or malformed."""
    if text is None:
        raise ScheduleError("this trace does not say which kernel it starts from", hint="Schedule.to_json does; or replay it on a schedule")
    try:
        kernel = parse_kernel(text)
        verify_kernel(kernel)
    except IRError as error:
        raise ScheduleError("the kernel of this trace is malformed", where=error.where, why=error.what) from None
    return kernel


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of proving a trace: how many of its steps hold, how often isl was asked, seconds in all and in isl, and the refusal
    that ended it, if one did."""

    steps: int
    proved: int
    questions: int
    seconds: float
    isl_seconds: float
    refused: ScheduleError | None

    @property
    def ok(self) -> bool:
        """Whether all steps are proved."""
        return self.refused is None


def prove(kernel: L.Kernel, trace: Iterable[Step]) -> Proof:
    """Apply a trace again to the kernel it starts from, isl judging every step. A refused step ends the proof; it raises nothing."""
    trace, started, s, refused = tuple(trace), time.perf_counter(), Schedule(kernel), None
    with proving() as asked:
        try:
            for step in trace:
                s.replay([step])
        except ScheduleError as error:
            refused = error
    return Proof(len(trace), len(s.trace), asked.questions, time.perf_counter() - started, asked.seconds, refused)


def _step(kernel: L.Kernel, name: str, arguments: Sequence[Any], options: dict[str, Any]) -> Step:
    """The call of a primitive as data: arguments that have a default are named, where they differ from it."""
    if name not in PRIMITIVES:
        raise ScheduleError(f"unknown schedule primitive `{name}`", hint=editing.did_you_mean(name, sorted(PRIMITIVES), "primitives"))
    signature = _signature(name)
    try:
        bound = signature.bind(*arguments, **options)
    except TypeError as error:
        raise _misused(kernel, name, str(error)) from None
    positional, named = list[Any](), list[tuple[str, Any]]()
    for parameter, value in bound.arguments.items():
        p = signature.parameters[parameter]
        plain = [_plain(kernel, name, p, v) for v in (value if p.kind is p.VAR_POSITIONAL else [value])]
        if p.default is p.empty:
            positional += plain
        elif plain != [p.default]:
            named.append((parameter, plain[0]))
    return Step(name, tuple(positional), tuple(named))


def _run(kernel: L.Kernel, step: Step) -> Any:
    """The result of the primitive of a step. Raises `ScheduleError` where it refuses, or instructions would not execute what they mean."""
    try:
        result = PRIMITIVES[step.primitive](kernel, *step.arguments, **dict(step.options))
        loop_structure.check_calls(result[0] if isinstance(result, tuple) else result)
        return result
    except editing.Refusal as refusal:
        name = step.arguments[1] if step.primitive == "set_kind" else step.primitive  # as in `s.parallel(loop)`
        what = f"`{name}` does not apply to kernel `{kernel.name}`"
        refused = ScheduleError(what, where=f"\n{kernel.body}", why=refusal.what, hint=refusal.hint)
        refused.witness = refusal.witness
        raise refused from None
    except IRError as error:  # an expression that is not valid, for example a size beyond 64 bits
        raise ScheduleError(f"`{step}` makes no program of kernel `{kernel.name}`", where=error.where, why=str(error.what)) from error


@cache
def _signature(primitive: str) -> inspect.Signature:
    """The parameters of a primitive, without the kernel."""
    _, *rest = inspect.signature(PRIMITIVES[primitive], eval_str=True).parameters.values()
    return inspect.Signature(rest)


def _misused(kernel: L.Kernel, primitive: str, why: str) -> ScheduleError:
    hint = re.sub(r"tcomp(\.\w+)*\.", "", f"{primitive}{_signature(primitive)}")  # types by the names that users import
    return ScheduleError(f"`{primitive}` takes other arguments", where=f"kernel `{kernel.name}`", why=why, hint=hint)


def _plain(kernel: L.Kernel, primitive: str, parameter: inspect.Parameter, value: Any) -> Any:
    """An argument as a trace stores it: None, a boolean, an integer, a name, or text."""
    types = typing.get_args(parameter.annotation) or (parameter.annotation,)
    match value:
        case None | bool() if type(value) in types:
            return value
        case Tensor() | L.Buffer() if str in types:
            return value.name
        case Layout() if str in types:
            return str(value)
        case Instruction() if str in types:
            return text_of(value)
        case Expr() if {int, Expr} <= {*types}:  # a size
            value = as_dim(value)
            return value if isinstance(value, int) else str(value)
        case Expr() if str in types and value.op == "var":
            return editing.loop_name(kernel, value)
        case str() if str in types:
            return str(value)  # of a handle the name alone
        case Expr() if value.op != "const":
            pass  # a size that is not known is not an integer
        case _ if int in types and not isinstance(value, bool) and hasattr(value, "__index__"):
            return int(value)
    raise _misused(kernel, primitive, f"`{parameter.name}` cannot be {value!r:.80}, which is of type {type(value).__name__}")
