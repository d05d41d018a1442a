"""The polyhedral scheduler as a whole: operands, the plan from isl's order, `affine`, and the kinds of the loops it makes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from textwrap import shorten

import islpy as isl

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import is_multiple, linear_index, without
from tcomp.ir.dtypes import itemsize
from tcomp.ir.fallback import FallbackKind
from tcomp.ir.linear import linear
from tcomp.ir.loops import Accumulate, Buffer, For, Kernel, Store
from tcomp.ir.polyhedral.model import Instance, TooHard, model
from tcomp.schedules.analysis.access_patterns import extent_of, iterations
from tcomp.schedules.cost.roofline import statements
from tcomp.schedules.handles import LoopCopy
from tcomp.schedules.polyhedral.bands import Planner
from tcomp.schedules.polyhedral.blocks import in_blocks
from tcomp.schedules.polyhedral.plan import Loop, worth_threads
from tcomp.schedules.primitives.storage import computed_from
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

MAX_REASON = 183  # characters of a reason that is printed: with its beginning, a line of 200
MIN_PACKED_READS = 16  # reads of an element for which it is copied first: the copy is one read and one write
MIN_ALIGNED_VECTORS = 8  # vectors of a loop for which one more, to align the others, is cheap


def polyhedral(program: Kernel | Schedule, target: CpuTarget, threads: int = 1) -> Schedule:
    """The schedule of an affine loop program, made in place where a schedule is given.

    Raises `ScheduleError` where isl finds no order within its limits, or none that gains threads, lanes or chains side by side; the
    schedule is then as it was.
    """
    s = program if isinstance(program, Schedule) else Schedule(program)
    for x in model(s.kernel.body).instances:
        if not x.exact or not isinstance(x.stmt, Store | Accumulate):
            raise _no_schedule(s, f"whether `{x.stmt}` is executed depends on data")
    with s.together():
        _pack(s)
        planner = _planner(s, None, target, threads)
        if not _in_blocks(s, planner):
            _ordered(s, None, planner)
        s.clean()
    return s


def polyhedral_or_not(s: Schedule, target: CpuTarget, threads: int) -> Schedule:
    """The default for programs without a structural schedule: the polyhedral one or, where that gains nothing, as written with a note."""
    if not worth_threads(sum(iterations(loops) for _, loops, _ in statements(s.kernel)) // 2):
        return s
    try:
        return polyhedral(s, target, threads)
    except (ScheduleError, isl.Error) as error:
        why = error.reason if isinstance(error, ScheduleError) else "isl gave up"
        s.fall_back(FallbackKind.AS_WRITTEN, "", shorten(why, MAX_REASON, placeholder="..."))
        return s


def _no_schedule(s: Schedule, why: str) -> ScheduleError:
    return ScheduleError(f"no polyhedral schedule of kernel `{s.kernel.name}`", why=why)


def _planner(s: Schedule, nest: str | None, target: CpuTarget, threads: int) -> Planner:
    """The planner of a nest, or of the whole kernel."""
    m = model(s.kernel.body) if nest is None else model(s.loops[nest], s.kernel.body)
    try:
        return Planner(m, target, threads)
    except TooHard as error:
        raise _no_schedule(s, f"isl gave up: {error}") from None


def _ordered(s: Schedule, nest: str | None, planner: Planner) -> None:
    """The order of a nest, or of the whole kernel, and the kinds of its loops."""
    for fused in (None, False):
        try:
            plan = planner.plan(fused)
            if not plan.gains():
                raise _no_schedule(s, "the loops that do most of the work depend on each other")
            made = s.affine(nest, plan.order(), plan.naming(), plan.parallel())
            break
        except TooHard as error:
            raise _no_schedule(s, f"isl gave up: {error}") from None
        except ScheduleError:
            if fused is False:
                raise
    planned = {loop: plan.loops[name] for loop, name in made.items() if name in plan.loops}
    for role in ("lanes", "vector", L.UNROLLED, "sum"):  # `affine` made the parallel loops
        for name, loop in list(s.loops.items()):
            if name in planned and planned[name].role == role and name in s.loops:
                with suppress(ScheduleError), s.together():  # one that cannot get its kind runs in order
                    for tail in _set_kind(s, name, loop, planned[name], planner.target):
                        planned |= {copy: planned[x] for x, copy in tail.copies.items() if x in planned}


def _in_blocks(s: Schedule, planner: Planner) -> bool:
    """The order in blocks of steps, where there is one in which updates are summed in registers; else nothing changes."""
    steps = len(s.trace)
    with suppress(ScheduleError, TooHard), s.together():
        for nest in in_blocks(s, planner.model, planner.tree()):
            with suppress(ScheduleError):  # stays as it is
                _ordered(s, nest, _planner(s, nest, planner.target, planner.threads))
        if not any(step.primitive == "promote" for step in s.trace[steps:]):
            raise _no_schedule(s, "no sum of a block of steps stays in registers")
        return True
    return False


def _pack(s: Schedule) -> None:
    """Operands of contractions that are read often, as the inner loops want them: factors computed once, and the axis along memory of
    the result along memory in them as well."""
    for b, reads in _operands(s.kernel).items():
        if computed_from(b, *(e for stmt, _ in reads for e in L.expressions(stmt))) is not None:
            with suppress(ScheduleError):  # temporaries and integers are left as they are
                s.precompute(b.name, f"{b.name}.f")
    for b, reads in _operands(s.kernel).items():
        # The dimensions that follow the last index of the result.
        along = {d for stmt, r in reads for d, i in enumerate(r.args) if {*E.variables(stmt.indices[-1])} & {*E.variables(i)}}
        if len(along) == 1 and (last := along.pop()) != len(b.shape) - 1:
            axes = [*(d for d in range(len(b.shape)) if d != last), last]
            layout = f"({','.join('abcdefghijklmnop'[d] for d in axes)})"
            with suppress(ScheduleError):
                if b in s.kernel.buffers:
                    s.cache_read(b.name, None, f"{b.name}.t", layout=layout)
                else:
                    s.relayout(b.name, layout)


def _operands(kernel: Kernel) -> dict[Buffer, list[tuple[Accumulate, E.Expr]]]:
    """The reads of each buffer in contractions (accumulations into a matrix at least, into each element many times), of those buffers that
    the program does not write, and whose elements are read many times in one contraction."""
    sums = [(x, x.stmt) for x in model(kernel.body).instances if isinstance(x.stmt, Accumulate)]
    contractions = [(x, stmt) for x, stmt in sums if len(stmt.indices) >= 2 and _repeats(x, stmt.indices)]
    written = {s.buffer for s in L.walk(kernel.body) if isinstance(s, Store | Accumulate) and s.buffer in kernel.buffers}
    reads = [(x, stmt, r) for x, stmt in contractions for r in E.reads(stmt.value)]
    reused = dict.fromkeys(r.attr for x, _, r in reads if r.attr not in written and _repeats(x, r.args))
    return {b: [(stmt, r) for _, stmt, r in reads if r.attr is b] for b in reused}


def _repeats(x: Instance, indices: Sequence[E.Expr]) -> bool:
    """Whether a statement accesses an element many times."""
    return any(loop.var not in E.variables(*indices) and extent_of(loop.extent) >= MIN_PACKED_READS for loop in x.loops)


def _set_kind(s: Schedule, name: str, loop: For, plan: Loop, target: CpuTarget) -> Sequence[LoopCopy]:
    """Gives one loop its kind; returns the tails that this takes."""
    match plan.role:
        case "unrolled" if loop.extent == plan.size:
            s.unroll(name)
        case "lanes" if loop.extent == plan.size:
            s.vectorize(name)
        case "lanes":
            s.vectorize(name, plan.size)
        case "vector":
            return _vectorize(s, name, target)
        case "sum":  # goes to registers; where its buffer is not read as well, the code generator sees to that
            inside = list(L.walk(loop))
            for b in {x.buffer for x in inside if isinstance(x, Accumulate)} & {r.attr for x in inside for r in E.reads(*L.expressions(x))}:
                s.promote(loop.var.name, b.name, f"{b.name}.sums")
    return ()


def _vectorize(s: Schedule, name: str, target: CpuTarget) -> list[LoopCopy]:
    """Full vectors, and the rest in masked ones: at the end, and at the start where full ones then stay within cache lines."""
    tails, loop = list[LoopCopy](), s.loops[name]
    stores = [x for x in L.walk(loop.body) if isinstance(x, Store | Accumulate)]
    lanes = target.lanes(8 * max(itemsize(b.dtype) for x in stores for b in (x.buffer, *(r.attr for r in E.reads(x.value)))))
    if loop.extent == lanes:
        s.vectorize(name)
        return []
    if before := _unaligned(loop, stores, lanes):
        head, name = s.partition(name, before)
        tails.append(name)
        with suppress(ScheduleError):
            s.vectorize(head, lanes)
    _, inner, rest = s.split(name, lanes, "peel")
    assert isinstance(rest, LoopCopy)
    tails.append(rest)
    s.vectorize(inner)
    with suppress(ScheduleError):
        s.vectorize(rest, lanes)
    return tails


def _unaligned(loop: For, stores: Sequence[Store | Accumulate], lanes: int) -> int:
    """Iterations of a loop before the first that stores at a multiple of `lanes`, if that is the same for all stores and outer loops."""
    if not isinstance(loop.extent, int) or loop.extent < MIN_ALIGNED_VECTORS * lanes:
        return 0
    found = set()
    for x in stores:
        along, start = without(linear_index(x.buffer, x.indices), loop.var) or (0, E.as_expr(0))
        offset = linear(start).get((), 0)
        found.add(-offset % lanes if along == 1 and is_multiple(start - offset, lanes) else 0)
    return found.pop() if len(found) == 1 else 0
