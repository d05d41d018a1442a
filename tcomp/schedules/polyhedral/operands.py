"""Operands of contractions that are read often, arranged as the inner loops want them before anything is ordered."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.expr import Expr
from tcomp.ir.loops import Accumulate, Buffer, Kernel, Store, expressions, walk
from tcomp.ir.polyhedral.model import Instance, model
from tcomp.schedules.analysis.access_patterns import extent_of
from tcomp.schedules.primitives.storage import computed_from
from tcomp.schedules.schedule import Schedule

PACKED_FROM = 16  # reads of an element for which it is copied first: the copy is one read and one write


def pack(s: Schedule) -> None:
    """Operands of contractions that are read often, as the inner loops want them: factors computed once, and the axis along memory of
    the result along memory in them as well."""
    contractions = _contractions(s.kernel)
    for b in {r.attr: None for x in contractions for r in _reused(s.kernel, x)}:
        if computed_from(b, *(e for x in contractions for e in expressions(x.stmt))) is not None:
            with suppress(ScheduleError):  # temporaries and integers are left as they are
                s.precompute(b.name, f"{b.name}.f")
    contractions = _contractions(s.kernel)
    for b in {r.attr: None for x in contractions for r in _reused(s.kernel, x)}:
        along = _along_memory(contractions, b)
        if len(along) == 1 and (last := along.pop()) != len(b.shape) - 1:
            axes = [*(d for d in range(len(b.shape)) if d != last), last]
            layout = f"({','.join('abcdefghijklmnop'[d] for d in axes)})"
            with suppress(ScheduleError):
                if b in s.kernel.buffers:
                    s.cache_read(b.name, None, f"{b.name}.t", layout=layout)
                else:
                    s.relayout(b.name, layout)


def _contractions(kernel: Kernel) -> list[Instance]:
    """Accumulations into a matrix at least, each element many times."""
    found = [x for x in model(kernel.body).instances if isinstance(x.stmt, Accumulate) and len(x.stmt.indices) >= 2]
    return [x for x in found if any(loop.var not in _written_at(x) and extent_of(loop.extent) >= PACKED_FROM for loop in x.loops)]


def _written_at(x: Instance) -> tuple[Expr, ...]:
    """The variables in the indices of the element that a statement writes."""
    assert isinstance(x.stmt, Store | Accumulate)
    return E.variables(*x.stmt.indices)


def _reused(kernel: Kernel, x: Instance) -> list[Expr]:
    """Reads of elements that the program does not write, each of them many times in one contraction."""
    assert isinstance(x.stmt, Accumulate)
    written = {s.buffer for s in walk(kernel.body) if isinstance(s, Store | Accumulate) and s.buffer in kernel.buffers}
    reads = [r for r in E.reads(x.stmt.value) if r.attr not in written]
    return [r for r in reads if any(loop.var not in E.variables(*r.args) and extent_of(loop.extent) >= PACKED_FROM for loop in x.loops)]


def _along_memory(contractions: Sequence[Instance], b: Buffer) -> set[int]:
    """The dimensions of an operand that follow the last index of the result."""
    found = set()
    for x in contractions:
        assert isinstance(x.stmt, Accumulate)
        lane = set(E.variables(x.stmt.indices[-1]))
        found |= {d for r in E.reads(x.stmt.value) if r.attr is b for d, i in enumerate(r.args) if lane & set(E.variables(i))}
    return found
