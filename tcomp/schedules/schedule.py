"""A schedule: a program's loops, and the trace of the steps that shaped them.

    s = Schedule(C)                          # a tensor, [A, B, C], or a kernel
    outer, inner = s.split("C.i", 8)         # a primitive; it returns the names of what it made
    s.parallel(outer)
    print(s)                                 # the loops, with their kinds and the scopes of buffers
    print(s.trace)                           # the steps, as the Python that repeats them

Loops are named by their variables, stages by the buffers they compute. A name is unique in the kernel and survives all steps that
concern other loops. Where it is natural, a stage may also be given as its tensor, a loop as its axis, a size as an expression or as
the text of one ("n // 4"). A step that would change what the program computes raises `ScheduleError`; the schedule is then as it was.
"""

# mypy: disable-error-code="no-any-return"
# (what `apply` returns depends on the primitive, whose signature says so)
from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, overload

from tcomp.errors import IRError, ScheduleError
from tcomp.ir import loops as L
from tcomp.ir.expr import INDEX, Dim, Expr, as_dim
from tcomp.ir.fallback import Fallback, FallbackKind
from tcomp.ir.instruction import Instruction
from tcomp.ir.layout import Layout
from tcomp.ir.te import Tensor, is_placeholder, tensors
from tcomp.ir.text.parser import parse_expr, parse_kernel
from tcomp.ir.verify import verify_kernel
from tcomp.schedules.handles import BufferCopy, LoopCopy, PartialResults
from tcomp.schedules.instructions import text_of
from tcomp.schedules.lowering import lower
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.affine import affine, fission, fuse_loops, shift, skew
from tcomp.schedules.primitives.buffer_dimensions import collapse, expand
from tcomp.schedules.primitives.cache_factors import cache_factors
from tcomp.schedules.primitives.cache_hints import prefetch, stream
from tcomp.schedules.primitives.compute_at import compute_at, inline, reverse_compute_at
from tcomp.schedules.primitives.guards import clean, mask, note, specialize, unguard
from tcomp.schedules.primitives.loop_structure import distribute, fuse, partition, reorder, set_kind, split
from tcomp.schedules.primitives.online_softmax import online
from tcomp.schedules.primitives.reductions import decompose_reduction, rfactor
from tcomp.schedules.primitives.software_pipelining import pipeline
from tcomp.schedules.primitives.storage import cache_read, cache_write, precompute, promote, relayout, set_scope
from tcomp.schedules.primitives.tensorize import intact, tensorize
from tcomp.schedules.trace import Step, Trace, read_json

PRIMITIVES: dict[str, Callable[..., Any]] = {
    p.__name__: p
    for p in (
        split, reorder, fuse, partition, set_kind, distribute, inline, compute_at, reverse_compute_at, cache_read, cache_write,
        cache_factors, precompute, relayout, set_scope, pipeline, rfactor, decompose_reduction, mask,
        tensorize, affine, skew, shift, fission, fuse_loops, collapse, expand, prefetch, promote, unguard, clean, note,
        stream, online, specialize,
    )
}  # fmt: skip

Program = L.Kernel | Tensor | Sequence[Tensor]
Loop = str | Expr  # its name, or an axis of a tensor that has one loop
Stage = str | Tensor


def kernel_of(program: Program) -> L.Kernel:
    """A program as loops, before any schedule: a kernel stays itself; tensors are lowered (see `inputs_and_outputs`)."""
    if isinstance(program, L.Kernel):
        return program
    inputs, outputs = inputs_and_outputs(program)
    return lower(re.sub(r"\W", "_", outputs[-1].name), inputs, outputs)


def inputs_and_outputs(program: Tensor | Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(placeholders, results) of tensor expressions: a tensor is computed from its placeholders, in the order of their first use; a
    sequence lists the placeholders first, then the tensors to compute. Raises `IRError` for anything else."""
    if isinstance(program, Tensor):
        program = [*(t for t in tensors([program]) if is_placeholder(t) and t is not program), program]
    hint = "a tensor to compute, a list of placeholders and then tensors to compute, or a kernel"
    if not isinstance(program, Sequence) or not all(isinstance(t, Tensor) for t in program):
        raise IRError(f"this is no program: {program!r:.80}", hint=hint)
    inputs = [t for t in program if is_placeholder(t)]
    outputs = [t for t in program if not is_placeholder(t)]
    if not outputs or list(program) != [*inputs, *outputs]:
        raise IRError("a program takes the placeholders first, then at least one tensor to compute", where=str(list(program)), hint=hint)
    return inputs, outputs


class Schedule:
    """A kernel and the steps that made it of a program as lowered. Every primitive is a method; see `help(Schedule.split)`.

    `kernel` is the program as scheduled so far, `source` the program before any step, `trace` the steps, `fallbacks` what the schedule
    functions could not do (a trace keeps only their printed lines, as notes).
    """

    def __init__(self, program: Program) -> None:
        self.kernel = self.source = kernel_of(program)
        self.trace = Trace()
        self.fallbacks: tuple[Fallback, ...] = ()

    # ------------------------------------------------------------ looking

    @property
    def loops(self) -> dict[str, L.For]:
        """The loops by name, in program order: `s.loops["C.i"].extent`, `.kind`, `.body`."""
        return editing.loops_of(self.kernel)

    @property
    def stages(self) -> dict[str, L.Buffer]:
        """The buffers that are computed, temporaries included, by name, in program order: `s.stages["C"].shape`, `.dtype`, `.scope`."""
        return {s.buffer.name: s.buffer for s in L.walk(self.kernel.body) if isinstance(s, L.Store | L.Accumulate)}

    def __str__(self) -> str:
        return str(self.kernel)

    def __repr__(self) -> str:
        return f"<Schedule of {self.kernel.name} after {len(self.trace)} steps: loops {', '.join(self.loops)}>"

    # ------------------------------------------------------------ traces

    def apply(self, primitive: str, *arguments: Any, **options: Any) -> Any:
        """Apply a primitive by name; returns the name it made, a tuple of them, or None. Names may be handles: see `schedules.handles`.

        Raises `ScheduleError`, and leaves the schedule as it was, if the step is unknown, malformed or refused.
        """
        step = _step(self.kernel, primitive, arguments, options)
        result = _run(self.kernel, step)
        self.kernel, *names = result if isinstance(result, tuple) else (result,)
        self.trace += (step,)
        return names[0] if len(names) == 1 else (tuple(names) or None)

    def replay(self, trace: Iterable[Step]) -> None:
        """Apply the steps of a trace, all of them or, if one is refused, none. Raises `ScheduleError` naming that step."""
        with self.together():
            for number, step in enumerate(trace, len(self.trace) + 1):
                try:
                    self.apply(step.primitive, *step.arguments, **dict(step.options))
                except ScheduleError as error:
                    where = f"step {number}, {str(step)[:200]}\n{error.where}".rstrip()
                    refused = error.restated(ScheduleError, where=where)
                    refused.witness = error.witness
                    raise refused from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Steps inside the `with` are all applied or, if one is refused, none."""
        before = self.kernel, self.trace, self.fallbacks
        try:
            yield
        except BaseException:
            self.kernel, self.trace, self.fallbacks = before
            raise

    def copy(self) -> Schedule:
        """A schedule to go on with differently."""
        return copy(self)

    def to_json(self) -> str:
        """The program before any step, printed, and the trace: all that it takes to make the schedule again, and to prove it."""
        return self.trace.to_json(str(self.source))

    @classmethod
    def from_json(cls, text: str | bytes) -> Schedule:
        """The schedule that `to_json` wrote, every step applied again. Raises `ScheduleError` for what is malformed or refused."""
        trace, kernel = read_json(text)
        s = cls(parse_source(kernel))
        s.replay(trace)
        return s

    # ------------------------------------------------------------ primitives

    @overload
    def split(self, loop: Loop, factor: int, tail: Literal["peel"]) -> tuple[str, str, LoopCopy]: ...
    @overload
    def split(self, loop: Loop, factor: int, tail: str = "guard") -> tuple[str, ...]: ...
    def split(self, loop: Loop, factor: int, tail: str = "guard") -> tuple[str, ...]:
        return self.apply("split", loop, factor, tail)

    def reorder(self, *order: Loop, reassociate: bool = False) -> None:
        self.apply("reorder", *order, reassociate=reassociate)

    def fuse(self, outer: Loop, inner: Loop) -> str:
        return self.apply("fuse", outer, inner)

    def partition(self, loop: Loop, point: Dim | str) -> tuple[str, LoopCopy]:
        return self.apply("partition", loop, point)

    def set_kind(self, loop: Loop, kind: str, reassociate: bool = False) -> None:
        self.apply("set_kind", loop, kind, reassociate)

    def tile(self, i: Loop, j: Loop, rows: int, columns: int, tail: str = "guard") -> tuple[str, str, str, str]:
        """Two loops directly inside each other become loops over tiles around loops inside a tile: `split`, `split`, `reorder`.

        Legal when the reordering of the four is. Good for reuse: what one tile touches stays in a cache, or in registers. Returns the
        names (i outer, j outer, i inner, j inner). `peel` is no tail of a tile, as it leaves two nests; `partition` the outer loops
        of a tile where full tiles are wanted apart.

        >>> A = te.placeholder((8, 6), name="A")
        >>> s = Schedule(te.compute((6, 8), lambda i, j: A[j, i], name="B"))
        >>> s.tile("B.i", "B.j", 3, 4)
        ('B.i.o', 'B.j.o', 'B.i.i', 'B.j.i')
        >>> print(s.kernel.body)
        for B.i.o in 0..2 {
          for B.j.o in 0..2 {
            for B.i.i in 0..3 {
              for B.j.i in 0..4 {
                B[B.i.i + B.i.o * 3, B.j.i + B.j.o * 4] = A[B.j.i + B.j.o * 4, B.i.i + B.i.o * 3]
              }
            }
          }
        }
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
        >>> print(s.kernel.body)
        for B.i.o in 0..3 {
          vectorized B.i.i in 0..4 {
            if B.i.i + B.i.o * 4 < 10 {
              B[B.i.i + B.i.o * 4] = A[B.i.i + B.i.o * 4] * 2.0f
            }
          }
        }
        >>> print(s.trace)
        s.split("B.i", 4)
        s.set_kind("B.i.i", "vectorized")
        """
        with self.together():
            self.apply("set_kind", loop if lanes is None else self.split(loop, lanes, tail)[1], L.VECTORIZED, reassociate)

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
            self.apply("set_kind", loop if factor is None else self.split(loop, factor, tail)[1], L.UNROLLED)

    def parallel(self, loop: Loop) -> None:
        self.apply("set_kind", loop, L.PARALLEL)

    def bind(self, loop: Loop, axis: str, reassociate: bool = False) -> None:
        self.apply("set_kind", loop, axis, reassociate)

    def distribute(self, loop: Loop, factor: int, outer: str, inner: str, strided: bool = False) -> tuple[str, str]:
        return self.apply("distribute", loop, factor, outer, inner, strided)

    def inline(self, stage: Stage) -> None:
        self.apply("inline", stage)

    def compute_at(self, stage: Stage, loop: Loop, scope: str = "global") -> None:
        self.apply("compute_at", stage, loop, scope)

    def reverse_compute_at(self, stage: Stage, loop: Loop) -> None:
        self.apply("reverse_compute_at", stage, loop)

    def cache_write(self, stage: Stage, name: str, layout: Layout | str | None = None) -> BufferCopy:
        return self.apply("cache_write", stage, name, layout)

    def cache_read(
        self, buffer: Stage, loop: Loop | None, name: str, scope: str = "global", layout: Layout | str | None = None
    ) -> BufferCopy:
        return self.apply("cache_read", buffer, loop, name, scope, layout)

    def cache_factors(self, loop: Loop, left: str, right: str, scope: str = "global") -> tuple[BufferCopy, BufferCopy]:
        return self.apply("cache_factors", loop, left, right, scope)

    def precompute(self, buffer: Stage, name: str) -> BufferCopy:
        return self.apply("precompute", buffer, name)

    def relayout(self, buffer: Stage, layout: Layout | str) -> None:
        self.apply("relayout", buffer, layout)

    def set_scope(self, buffer: Stage, scope: str) -> None:
        self.apply("set_scope", buffer, scope)

    def pipeline(self, loop: Loop, stages: int, *buffers: Stage) -> str:
        return self.apply("pipeline", loop, stages, *buffers)

    def rfactor(self, stage: Stage, loop: Loop, lanes: int) -> PartialResults:
        return self.apply("rfactor", stage, loop, lanes)

    def online(self, stage: Stage, loop: Loop, factor: int) -> tuple[str, str, str, str]:
        return self.apply("online", stage, loop, factor)

    def decompose_reduction(self, stage: Stage, loop: Loop) -> None:
        self.apply("decompose_reduction", stage, loop)

    def mask(self, stage: Stage) -> None:
        self.apply("mask", stage)

    def tensorize(self, loop: Loop, instruction: Instruction | str, reassociate: bool = False) -> None:
        self.apply("tensorize", loop, instruction, reassociate)

    def affine(self, loop: Loop | None, order: str, names: str, parallel: str = "") -> dict[str, str]:
        return self.apply("affine", loop, order, names, parallel)

    def prefetch(self, buffer: Stage, loop: Loop, distance: int, at: Loop | str = "") -> None:
        self.apply("prefetch", buffer, loop, distance, at)

    def stream(self, buffer: Stage) -> None:
        self.apply("stream", buffer)

    def promote(self, loop: Loop, buffer: Stage, name: str, anew: bool = False) -> BufferCopy:
        return self.apply("promote", loop, buffer, name, anew)

    def unguard(self, loop: Loop) -> None:
        self.apply("unguard", loop)

    def specialize(self, loop: Loop) -> LoopCopy:
        return self.apply("specialize", loop)

    def skew(self, outer: Loop, inner: Loop, factor: int) -> None:
        self.apply("skew", outer, inner, factor)

    def shift(self, loop: Loop, stage: Stage, offset: int) -> None:
        self.apply("shift", loop, stage, offset)

    def fission(self, loop: Loop) -> tuple[str, ...]:
        return self.apply("fission", loop)

    def fuse_loops(self, first: Loop, second: Loop) -> None:
        self.apply("fuse_loops", first, second)

    def expand(self, buffer: Stage, dim: int, factor: int) -> None:
        self.apply("expand", buffer, dim, factor)

    def collapse(self) -> None:
        self.apply("collapse")

    def clean(self) -> None:
        self.apply("clean")

    def note(self, text: str) -> None:
        self.apply("note", text)

    def fall_back(self, kind: FallbackKind, where: str, reason: str) -> None:
        """Record what is not done: in `fallbacks` for programs, as a note in the kernel for people."""
        fallback = Fallback(kind, where, reason)
        self.note(str(fallback))
        self.fallbacks += (fallback,)


for _name, _primitive in {**PRIMITIVES, "parallel": set_kind, "bind": set_kind}.items():
    getattr(Schedule, _name).__doc__ = _primitive.__doc__  # a method has the documentation of the primitive that it applies


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


def replay(kernel: L.Kernel, trace: Iterable[Step]) -> L.Kernel:
    """The kernel after the steps of a trace. Raises `ScheduleError` naming the step that is refused."""
    s = Schedule(kernel)
    s.replay(trace)
    return s.kernel


# ---------------------------------------------------------------- arguments: as given, as kept in a trace, as a primitive takes them


def _step(kernel: L.Kernel, name: str, arguments: Sequence[Any], options: dict[str, Any]) -> Step:
    """The call of a primitive as data: arguments that have a default are kept by name, where they differ from it."""
    if name not in PRIMITIVES:
        raise ScheduleError(f"unknown schedule primitive `{name}`", hint=editing.did_you_mean(name, sorted(PRIMITIVES), "primitives"))
    signature = _signature(name)
    try:
        bound = signature.bind(*arguments, **options)
    except TypeError as error:
        raise _misused(kernel, name, str(error)) from None
    positional: list[Any] = []
    named: list[tuple[str, Any]] = []
    for parameter, value in bound.arguments.items():
        p = signature.parameters[parameter]
        plain = [_plain(kernel, name, p, v, p.annotation) for v in (value if p.kind is p.VAR_POSITIONAL else [value])]
        if p.default is p.empty:
            positional += plain
        elif plain != [p.default]:
            named.append((parameter, plain[0]))
    return Step(name, tuple(positional), tuple(named))


def _run(kernel: L.Kernel, step: Step) -> Any:
    """What the primitive of a step returns. Raises `ScheduleError` where it refuses, or instructions would not execute what they mean."""
    signature = _signature(step.primitive)
    bound = signature.bind(*step.arguments, **dict(step.options))
    for parameter, value in bound.arguments.items():
        bound.arguments[parameter] = _meant(kernel, step, value, signature.parameters[parameter].annotation)
    try:
        result = PRIMITIVES[step.primitive](kernel, *bound.args, **bound.kwargs)
        intact(result[0] if isinstance(result, tuple) else result)
        return result
    except editing.Refusal as refusal:
        name = step.arguments[1] if step.primitive == "set_kind" else step.primitive  # as in `s.parallel(loop)`
        what = f"`{name}` does not apply to kernel `{kernel.name}`"
        refused = ScheduleError(what, where=f"\n{kernel.body}", why=refusal.what, hint=refusal.hint)
        refused.witness = refusal.witness
        raise refused from None
    except IRError as error:  # an expression that cannot be: a size beyond 64 bits, say
        raise ScheduleError(f"`{step}` makes no program of kernel `{kernel.name}`", where=error.where, why=str(error.what)) from error


@cache
def _signature(primitive: str) -> inspect.Signature:
    """The parameters of a primitive, without the kernel."""
    _, *rest = inspect.signature(PRIMITIVES[primitive], eval_str=True).parameters.values()
    return inspect.Signature(rest)


def _misused(kernel: L.Kernel, primitive: str, why: str) -> ScheduleError:
    hint = f"{primitive}{_signature(primitive)}"
    return ScheduleError(f"`{primitive}` takes other arguments", where=f"kernel `{kernel.name}`", why=why, hint=hint)


def _types(hint: Any) -> tuple[Any, ...]:
    """The types that a union allows."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, UnionType) else (hint,)


def _element_type(types: Iterable[Any]) -> Any:
    """The type of the elements, if one of the types is a sequence."""
    return next((typing.get_args(t)[0] for t in types if typing.get_origin(t) in (list, tuple, Sequence)), None)


def _plain(kernel: L.Kernel, primitive: str, parameter: inspect.Parameter, value: Any, hint: Any) -> Any:
    """What the trace keeps of an argument: None, a boolean, an integer, a name, text, or a tuple."""
    types = _types(hint)
    match value:
        case None | bool() if type(value) in types:
            return value
        case Tensor() | L.Buffer() if str in types:
            return value.name
        case Layout() if str in types:
            return str(value)
        case Instruction() if str in types:
            return text_of(value)
        case Expr() if Expr in types:
            value = as_dim(value)
            return value if isinstance(value, int) else str(value)
        case Expr() if str in types and value.op == "var":
            return _axis(kernel, value.name)
        case str() if str in types or Expr in types:
            return str(value)  # of a handle the name alone
        case list() | tuple() if (element := _element_type(types)) is not None:
            return tuple(_plain(kernel, primitive, parameter, v, element) for v in value)
        case Expr() if value.op != "const":
            pass  # a size that is not known is no integer
        case _ if int in types and not isinstance(value, bool) and hasattr(value, "__index__"):
            return int(value)
    raise _misused(kernel, primitive, f"`{parameter.name}` cannot be {value!r:.80}, which is of type {type(value).__name__}")


def _axis(kernel: L.Kernel, name: str) -> str:
    """The loop that is meant by an axis `k` of a tensor: `k` itself, else the one `STAGE.k` there is."""
    loops = editing.loops_of(kernel)
    found = [loop for b in editing.buffers_of(kernel) if (loop := f"{b}.{name}") in loops]
    if name in loops or not found:
        return name
    if len(found) > 1:
        hint = f"name one of {', '.join(found)}"
        raise ScheduleError(f"several loops have the axis `{name}`", where=f"kernel `{kernel.name}`", hint=hint)
    return found[0]


def _meant(kernel: L.Kernel, step: Step, value: Any, hint: Any) -> Any:
    """What the primitive takes: text becomes an expression over the kernel's sizes and loops where one is wanted."""
    types = _types(hint)
    if isinstance(value, tuple):
        return tuple(_meant(kernel, step, v, hint if (element := _element_type(types)) is None else element) for v in value)
    if not isinstance(value, str) or Expr not in types:
        return value
    names = {**{name: x.var for name, x in editing.loops_of(kernel).items()}, **{v.name: v for v in kernel.scalars}}
    try:
        size = parse_expr(value, names)
        if size.dtype != INDEX:
            raise IRError(f"it is of type {size.dtype}")
        return as_dim(size)
    except IRError as error:
        known = f"it may use {', '.join(v.name for v in kernel.scalars)}" if kernel.scalars else "all sizes of this kernel are integers"
        raise ScheduleError(f"`{value}` is no size", where=f"{step} on kernel `{kernel.name}`", why=error.what, hint=known) from None
