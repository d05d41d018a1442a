"""Races in a block of GPU threads, found by running it: who touched which element since the last barrier, and which copies are under way.

Independent of how barriers are placed: every access of every thread is looked at, one by one. Registers are no memory of the block: that
each thread keeps to its own is proved when code is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from tcomp.codegen.cuda.barriers import Placement, is_phase
from tcomp.ir import expr as E, loops as L
from tcomp.ir.dtypes import SIGNED, UNSIGNED
from tcomp.ir.expr import Expr, as_expr, evaluate_int
from tcomp.ir.loops import Buffer, Stmt
from tcomp.ir.text.printer import Printer

Element = tuple[Buffer, tuple[int, ...]]
Thread = frozenset[tuple[str, int]]
_FUNCTIONS = {"select": lambda condition, a, b: a if condition else b, "min": min, "max": max, "true": True, "false": False}
_FUNCTIONS |= dict.fromkeys((*SIGNED, *UNSIGNED), int)


class Block:
    """One block: `touched` by whom since the last barrier (and whether written), `groups` of copies that have not arrived."""

    def __init__(self, placement: Placement, copies: Collection[Stmt], values: Mapping[Expr, int]) -> None:
        self.placement, self.copies, self.values = placement, copies, dict(values)
        self.touched: dict[Element, set[tuple[Thread, bool]]] = {}
        self.groups: list[dict[Element, bool]] = [{}]  # the last one is not complete
        self.races: set[str] = set()
        self.functions: dict[Expr, tuple[tuple[Expr, ...], Callable[..., int]]] = {}

    def run(self, s: Stmt) -> None:
        if s in self.placement.before:
            pending = self.placement.before[s]
            if pending is not None:
                complete = len(self.groups) - 1
                del self.groups[: max(0, complete - pending)]
            self.touched.clear()
        if is_phase(s):
            self.phase(s)
        elif isinstance(s, L.For):
            for value in range(evaluate_int(s.extent, self.values)):
                self.values[s.var] = value
                self.run(s.body)
        elif isinstance(s, L.If):
            branch = s.then if self.value(s.cond) else s.otherwise
            if branch is not None:
                self.run(branch)
        else:
            for child in L.children(s):
                self.run(child)

    def phase(self, s: Stmt) -> None:
        copying = s in self.copies
        for thread, element, writes in list(self.accesses(s, frozenset())):
            for who, wrote in self.touched.get(element, ()):
                if (writes or wrote) and (who != thread or copying):
                    self.races.add(f"{element[0].name}{list(element[1])}")
            for group in self.groups[: len(self.groups) - copying]:
                if element in group and (writes or group[element]):
                    self.races.add(f"copied {element[0].name}{list(element[1])}")
            if copying:
                self.groups[-1][element] = self.groups[-1].get(element, False) or writes
            else:
                self.touched.setdefault(element, set()).add((thread, writes))
        if s in self.placement.groups:
            self.groups.append({})

    def accesses(self, s: Stmt, thread: Thread) -> Iterator[tuple[Thread, Element, bool]]:
        for e in L.expressions(s):
            for r in (r for r in E.reads(e) if r.attr.scope != "register"):
                yield thread, (r.attr, tuple(self.value(i) for i in r.args)), False
        if isinstance(s, L.Store | L.Accumulate) and s.buffer.scope != "register":
            yield thread, (s.buffer, tuple(self.value(i) for i in s.indices)), True
        if isinstance(s, L.For):
            for value in range(evaluate_int(s.extent, self.values)):
                self.values[s.var] = value
                yield from self.accesses(s.body, thread | {(s.kind, value)} if s.kind.startswith("thread") else thread)
        elif isinstance(s, L.If):
            branch = s.then if self.value(s.cond) else s.otherwise
            if branch is not None:
                yield from self.accesses(branch, thread)
        else:
            for child in L.children(s):
                yield from self.accesses(child, thread)

    def value(self, e: Expr) -> int:
        """The value of an expression; each is made a function of its variables once."""
        if e not in self.functions:
            variables = E.variables(e)
            printer = Printer()
            names = [printer.variables.bind(v, f"v{n}") for n, v in enumerate(variables)]
            text = printer.term(as_expr(e), 0, "").replace("~", "1-")  # of conditions only
            self.functions[e] = variables, eval(f"lambda {', '.join(names)}: {text}", _FUNCTIONS)
        variables, function = self.functions[e]
        return int(function(*[self.values[v] for v in variables]))
