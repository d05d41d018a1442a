"""A module of loop programs, and what is known of the expressions in them, wherever they occur."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from tcomp.codegen.llvm.builder import Module
from tcomp.codegen.llvm.math import lower
from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import clamped_check, in_range
from tcomp.ir.expr import Expr, const
from tcomp.ir.loops import Buffer, Stmt
from tcomp.ir.simplify import from_linear, prove
from tcomp.target import CpuTarget

Term = tuple[tuple[Expr, ...], int]  # of a linear form: factors, and their coefficient


class Form(NamedTuple):
    """The linear form of an index, outermost loops first. `inner`: the variables that occur in anything but `c * variable`."""

    terms: tuple[Term, ...]
    offset: int
    inner: frozenset[Expr]


class KernelModule(Module):
    """A module of loop programs, and what is known about the expressions in them. `overlapping`: buffers that may share memory with
    others."""

    def __init__(self, name: str, target: CpuTarget, notes: Sequence[str] = (), overlapping: frozenset[Buffer] = frozenset()) -> None:
        super().__init__(name, target, notes)
        self.overlapping = overlapping
        self.forms: dict[Any, Form] = {}
        self.per_lane: dict[Buffer, tuple[Expr, int]] = {}  # buffers allocated inside a vectorized loop: lane variable, lanes
        self._variables: dict[Expr, tuple[Expr, ...]] = {}
        self._buffers: dict[Expr, frozenset[Buffer]] = {}
        self.lowered = cache(lambda e: lower(e, target))  # by operations that the target has; None where it has the operator
        self.in_bounds = cache(lambda read: in_range(read.args, read.attr.shape))  # whether a read lies inside its buffer for all values
        self.checks = cache(lambda e: tuple(_certain_checks(e)))  # those that every evaluation makes
        self.holds = cache(_holds)
        self.sums = cache(_sums)
        self.constant = cache(self._constant)  # the name of a constant
        self.has_tiles = False  # whether tile registers are used

    def _constant(self, content: str, align: int) -> str:
        name = f"@constant{len(self.functions)}"
        self.functions.append(f"{name} = private unnamed_addr constant {content}, align {align}")
        return name

    def parameter(self, buffer: Buffer, ref: str, written: bool) -> str:
        """A pointer parameter with what is known of its memory."""
        return f"ptr{'' if buffer in self.overlapping else ' noalias'} nonnull{'' if written else ' readonly'} {ref}"

    def variables(self, e: Expr) -> tuple[Expr, ...]:
        """The variables that a value depends on."""
        for node in _unknown(e, self._variables):
            own = (node,) if node.op == "var" else self.per_lane.get(node.attr, ())[:1] if node.op == "read" else ()
            of_args = [v for a in node.args for v in self._variables[a]]
            self._variables[node] = (
                self._variables[node.args[0]] if len(node.args) == 1 and not own else tuple(dict.fromkeys([*of_args, *own]))
            )
        return self._variables[e]

    def buffers(self, e: Expr) -> frozenset[Buffer]:
        """The buffers that a value is read from."""
        for node in _unknown(e, self._buffers):
            own = frozenset((node.attr,)) if node.op == "read" else frozenset()
            self._buffers[node] = own.union(*(self._buffers[a] for a in node.args))
        return self._buffers[e]

    def written(self, stmt: Stmt) -> set[Buffer]:
        """The buffers that a statement may write."""
        return {s.buffer for s in L.walk(stmt) if isinstance(s, L.Store | L.Accumulate)}

    def unsafe(self, e: Expr) -> bool:
        """Whether evaluating `e` where it is not wanted might fault, or report an index."""
        reporting = () if self.target.unchecked else ("checked",)
        return bool(self.buffers(e)) and any((n.op == "read" and not self.in_bounds(n)) or n.op in reporting for n in E.walk(e))


def bytes_constant(content: bytes) -> str:
    """Bytes as LLVM writes a constant."""
    return f'[{len(content)} x i8] c"\\{content.hex(chr(92))}"'


def _holds(buffer: Buffer, terms: tuple[Term, ...], start: int, count: int) -> bool:
    """Whether `count` elements from `terms + start` on, in row-major order, certainly lie in a buffer."""
    index = from_linear(dict(terms)) + start
    return prove(index >= 0) and prove(index + (count - 1) < math.prod(map(E.as_expr, buffer.shape), start=const(1)))


def _sums(terms: tuple[Term, ...], lane: Expr, lanes: int) -> list[int]:
    """The sum of terms that depend on the lane alone, for each of the lanes."""
    total = from_linear(dict(terms))
    return [E.evaluate_int(total, {lane: n}) for n in range(lanes)]


def _unknown(e: Expr, facts: Mapping[Expr, Any]) -> Iterable[Expr]:
    """The sub-expressions that `facts` lacks, operands before users."""
    if e in facts:
        return ()
    return (e,) if all(a in facts for a in e.args) else [node for node in E.walk(e) if node not in facts]


def _certain_checks(e: Expr) -> Iterator[Expr]:
    stack, seen = [e], set[Expr]()  # what is shared is looked at once
    while stack:
        if (node := stack.pop()) in seen:
            continue
        seen.add(node)
        if node.op == "checked" or clamped_check(node) is not None:
            yield node  # with what its operands check
        else:
            stack.extend(node.args[:1] if node.op == "select" else node.args)
