"""Whether a witness is real: the program is run at its sizes, and the two iterations must touch the element, in that order.

The interpreter notes, for each execution of a store or accumulation, the loops around it and what it touches. Conditions and extents
around a statement belong to it: it reads what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tcomp.ir.expr import Expr
from tcomp.ir.loops import Accumulate, Buffer, For, If, Kernel, Stmt, Store
from tcomp.ir.loops_eval import _Memory, _Program
from tcomp.schedules.legality import Iteration, Witness

Element = tuple[str, tuple[int, ...]]  # buffer, indices


@dataclass(frozen=True)
class Event:
    """One execution of a statement."""

    stmt: str
    loops: Mapping[str, int]
    reads: frozenset[Element]
    writes: Element

    def touches(self, element: Element) -> bool:
        return element in self.reads or element == self.writes


class _Recorder(_Program):
    def __init__(self, scalars: Mapping[Expr, int]) -> None:
        super().__init__(scalars, None, True)
        self.events: list[Event] = []
        self.read: list[Element] = []  # by the statement being executed, and by what stands around it

    def statement(self, stmt: Stmt) -> Callable[[], Any]:
        run = super().statement(stmt)
        if isinstance(stmt, Store | Accumulate):
            return self._leaf(stmt, run)
        if isinstance(stmt, For | If):

            def around() -> None:
                mark = len(self.read)
                run()
                del self.read[mark:]

            return around
        return run

    def _leaf(self, stmt: Store | Accumulate, run: Callable[[], Any]) -> Callable[[], Any]:
        loops, places, text = tuple(self.loops), self.expressions(stmt.indices), str(stmt).strip()

        def leaf() -> None:
            mark = len(self.read)
            run()
            here = {v.name: self.slots[self.slot[v]] for v in loops}
            written = (stmt.buffer.name, tuple(f() for f in places))
            self.events.append(Event(text, here, frozenset(self.read), written))
            del self.read[mark:]

        return leaf

    def _read(self, e: Expr, args: list[Callable[[], Any]]) -> Callable[[], Any]:
        run, name = super()._read(e, args), e.attr.name

        def read() -> Any:
            self.read.append((name, tuple([f() for f in args])))
            return run()

        return read


def history(kernel: Kernel, arrays: Mapping[Buffer, np.ndarray], sizes: Mapping[Expr, int]) -> list[Event]:
    """What a kernel does, in order."""
    program = _Recorder(sizes)
    for b, array in arrays.items():
        program.memory[b] = _Memory(array)
    with np.errstate(all="ignore"):
        program.statement(kernel.body)()
    return program.events


def flaw(witness: Witness, events: Sequence[Event]) -> str:
    """Why a witness is not real; empty if it is. The iterations need not be executed if it is not exact."""
    element = witness.buffer, tuple(witness.element)
    first, second = (list(_matching(i, witness.fixed, events)) for i in (witness.first, witness.second))
    if not witness.exact:
        return ""
    for side, found in ((witness.first, first), (witness.second, second)):
        if not found:
            return f"{side} is never executed"
        if not any(events[n].touches(element) for n in found):
            return f"{side} does not touch {element}"
    for n in first:
        for m in second:
            a, b = events[n], events[m]
            if n < m and a.touches(element) and b.touches(element) and element in (a.writes, b.writes):
                return ""
    return "the iterations do not touch the element in this order, one of them writing"


def _matching(iteration: Iteration, fixed: Mapping[str, int], events: Sequence[Event]) -> Iterator[int]:
    text = str(iteration.stmt).strip()
    wanted = {**iteration.loops, **fixed}
    for n, event in enumerate(events):
        if event.stmt == text and all(event.loops.get(v, value) == value for v, value in wanted.items()):
            yield n
