"""Access patterns: the roles of loops in the accesses inside them. Default schedules decide by these, never by names of operators."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.access import affine, coefficient, stride
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim, Expr
from tcomp.ir.linear import known_factor
from tcomp.ir.loops import Accumulate, Allocate, Block, Buffer, For, If, Kernel, Stmt, Store, While, children, walk
from tcomp.ir.read_patterns import concatenated_row_length

MIN_TILE_ROWS = 4  # rows, and steps of a contiguous reduction, that make a tile which uses its operands often (two vectors of float64)
MIN_APART = 128  # iterations inside of a loop of unknown extent that fill tiles and hide the loads of weights: each round does for itself
SYMBOLIC = 512  # assumed size of an unbounded symbolic extent: a sequence, an image


@dataclass(frozen=True, slots=True)
class Nest:
    """A perfect loop nest around one store or accumulation (`leaf`): its loops, outermost first, and the conditions under which the leaf is
    executed, conjunctions split up."""

    loops: tuple[For, ...]
    leaf: Store | Accumulate
    conditions: tuple[Expr, ...] = ()

    @property
    def writes(self) -> Buffer:
        """The buffer that it stores or accumulates into."""
        return self.leaf.buffer

    @property
    def is_reduction(self) -> bool:
        """Whether it accumulates."""
        return isinstance(self.leaf, Accumulate)

    @property
    def spatial(self) -> tuple[For, ...]:
        """Loops that run over elements of the result."""
        used = E.variables(*self.leaf.indices)
        return tuple(x for x in self.loops if x.var in used)

    @property
    def reduction_loops(self) -> tuple[For, ...]:
        """Loops that run over what is accumulated."""
        used = E.variables(*self.leaf.indices)
        return tuple(x for x in self.loops if x.var not in used)

    @property
    def element_conditions(self) -> list[Expr]:
        """The conditions that say which elements are written: those in which no reduction loop occurs."""
        return [c for c in self.conditions if {x.var for x in self.reduction_loops}.isdisjoint(E.variables(c))]

    @property
    def reads(self) -> tuple[Expr, ...]:
        """The reads of the value that is stored or accumulated."""
        return E.reads(self.leaf.value)

    def loop_along(self, dim: int) -> str | None:
        """The loop that indexes a dimension of what is written, counted from the last one, -1; None where the index is not a loop."""
        index = self.leaf.indices[dim] if len(self.leaf.indices) >= -dim else None
        return next((x.var.name for x in self.loops if x.var is index), None)


def nest_of(stmt: Stmt) -> Nest | None:
    """The statement as a nest, if it is one write inside of loops and conditions only; None for any other."""
    loops, conditions = list[For](), list[Expr]()
    while True:
        match stmt:
            case For(body=body):
                loops.append(stmt)
                stmt = body
            case If(cond, then, None):
                conditions += E.conjuncts(cond)
                stmt = then
            case Store() | Accumulate():
                return Nest(tuple(loops), stmt, tuple(conditions))
            case _:
                return None


def write_nests(stmt: Stmt) -> list[Nest]:
    """All nests around single writes, in program order."""
    found = nest_of(stmt)
    return [found] if found is not None else [n for child in children(stmt) for n in write_nests(child)]


def contiguous(reads: Sequence[Expr], v: Expr) -> bool:
    """Whether every read has stride 0 or 1 along `v`: neighbouring iterations read the same element, or neighbouring ones."""
    return all(stride(r, v) in (0, 1) for r in reads)


def extent_of(extent: Dim, default: int = SYMBOLIC) -> int:
    """A number to reason with, where the extent is symbolic: its largest exact size, or its upper bound if small, else `default`."""
    if isinstance(extent, int):
        return extent
    if extent.op == "var" and extent.attr.exact:
        return int(max(extent.attr.exact))
    hi = E.bounds(extent)[1]
    return default if hi is None else min(hi, default)


def iterations(loops: Iterable[For]) -> int:
    """How many iterations a nest has; symbolic extents are taken as in `extent_of`."""
    return prod(extent_of(x.extent) for x in loops)


def bytes_of(buffer: Buffer, repeated: Sequence[For] = ()) -> int:
    """The size of a buffer, or of the part of it for one iteration of `repeated` loops; symbolic extents are taken as in `extent_of`."""
    counts = {x.extent for x in repeated}
    return prod(extent_of(n) for n in buffer.shape if n not in counts) * itemsize(buffer.dtype)


def is_imperative(kernel: Kernel) -> bool:
    """Whether a kernel is a program written by hand (an extern), which runs as it is written. One that was lowered from tensor expressions
    writes each element by one statement."""
    if any(isinstance(x, If | While) or (isinstance(x, For) and isinstance(x.body, Block)) for x in walk(kernel.body)):
        return True
    found = nests(kernel)
    written = [(n.writes, n.is_reduction) for n in found]
    forms = [[affine(i) for i in n.leaf.indices] for n in found]
    return len(set(written)) < len(written) or any(
        (n.is_reduction and (n.writes, False) not in written)  # adds to the previous content of the element
        or len(n.spatial) < len(n.leaf.indices)
        or not all(f is not None and list(f.terms.values()) == [1] for f in form)  # a loop variable plus a constant
        or any(r.attr is n.writes for r in n.reads)
        for n, form in zip(found, forms, strict=True)
    )


def nests(kernel: Kernel) -> list[Nest]:
    """Top-level nests without conditions, skipping what has been shaped already, and the zeros around a result."""
    found = [n for s in _top_level(kernel.body) if (n := nest_of(s)) is not None and not n.conditions]
    computed = {n.writes for n in found if not n.is_reduction and n.leaf.value.op != "const"}
    return [n for n in found if n.leaf.value.op != "const" or n.writes not in computed]


def _top_level(stmt: Stmt) -> Iterator[Stmt]:
    if isinstance(stmt, Block | Allocate):
        for child in children(stmt):
            yield from _top_level(child)
    else:
        yield stmt


def result_nest(kernel: Kernel, buffer: str) -> Nest:
    """The nest that stores a buffer. Raises `ScheduleError` where it is not a perfect nest without conditions."""
    return _the_nest(kernel, buffer, False)


def reduction_nest(kernel: Kernel, buffer: str) -> Nest:
    """The nest that accumulates into a buffer. Raises as `result_nest`."""
    return _the_nest(kernel, buffer, True)


def _the_nest(kernel: Kernel, buffer: str, is_reduction: bool) -> Nest:
    found = next((n for n in nests(kernel) if n.writes.name == buffer and n.is_reduction is is_reduction), None)
    if found is None:
        raise ScheduleError(f"no nest of loops alone writes `{buffer}`", where=f"kernel `{kernel.name}`")
    return found


def is_product(reduction: Nest) -> bool:
    """Whether the reduced value is a product of two factors that both read: a contraction, if the reduction is a sum."""
    value = reduction.leaf.value
    return value.op == "mul" and all(E.reads(a) for a in value.args)


def is_sum(reduction: Nest) -> bool:
    """Whether a reduction is a sum."""
    return isinstance(reduction.leaf, Accumulate) and reduction.leaf.reducer.op == "add"


def batch_axes(reduction: Nest) -> list[str]:
    """Output axes that index every operand: between their iterations nothing is shared, so that they come first."""
    if not is_product(reduction):
        return []
    operands = [E.variables(*r.args) for r in reduction.reads]
    return [x.var.name for x in reduction.spatial[:-1] if all(x.var in used for used in operands)]


def repetitions(reduction: Nest) -> list[For]:
    """Output axes of unknown extent, a batch, around rows of known extents that are enough for each of their iterations to be a product
    of its own, scheduled like one alone."""
    rows = reduction.spatial[:-1]
    known = prod(x.extent for x in rows if isinstance(x.extent, int))
    return [x for x in rows if not isinstance(x.extent, int)] if known >= MIN_APART else []


def row_axis(reduction: Nest) -> For | None:
    """The output axis that reuses what the lanes read: an operand that runs along the lanes does not depend on it, or, where there is no
    such axis, a window moves along it over the operand (a depthwise convolution whose lanes run along rows of the image). The longest is
    taken, but one whose extent is not known, and may be 1, only where no other is long enough for a tile."""
    *others, last = reduction.spatial
    operands = [(r, E.variables(*r.args)) for r in reduction.reads]
    of_lanes = [(r, used) for r, used in operands if last.var in used]
    found = [x for x in others if any(x.var not in used for _, used in of_lanes) and any(x.var in used for _, used in operands)]
    if not found:
        indices = [i for r, _ in of_lanes for i in r.args]
        windows = [(i, c, extent_of(f.extent)) for i in indices for f in reduction.reduction_loops if (c := coefficient(i, f.var))]
        # Neighbours along such an axis read the same elements in other steps of the reduction.
        found = [x for x in others if any(0 < abs(coefficient(i, x.var) or 0) <= abs(c) * (n - 1) for i, c, n in windows)]
    return max(reversed(found), key=lambda x: (isinstance(x.extent, int) and x.extent >= MIN_TILE_ROWS, extent_of(x.extent)), default=None)


def contiguous_reduction(reduction: Nest) -> For | None:
    """The innermost reduction loop along which all reads except gathers are contiguous, if it is long enough for vectors; else None."""
    long = (x for x in reversed(reduction.reduction_loops) if extent_of(x.extent) >= MIN_TILE_ROWS)
    placed = [r for r in reduction.reads if not E.reads(*r.args)]
    return next((x for x in long if {stride(r, x.var) for r in placed} in ({1}, {0, 1})), None)


def grouped_axis(kernel: Kernel) -> tuple[str, int] | None:
    """(output loop, group size) of a grouped reduction: an operand depends on the loop only through its quotient by the size, as in a
    grouped convolution the input does on the output channel. None for any other kernel."""
    for reduction in (n for n in nests(kernel) if n.is_reduction):
        for x, r in itertools.product(reduction.spatial, reduction.reads):
            through = {e for i in r.args for e in E.walk(i) if x.var in e.args}
            sizes = {e.args[1].attr for e in through if e.op == "floordiv" and e.args[0] is x.var and e.args[1].op == "const"}
            if len(sizes) == len(through) == 1 and x.var not in r.args:
                (size,) = sizes
                if size > 1 and x.extent != size and known_factor(x.extent) % size == 0:
                    return x.var.name, size
    return None


def concatenated_results(kernel: Kernel) -> dict[str, tuple[str, int]]:
    """The results that concatenate rows of a reduction, by name: (buffer of the reduction, elements of a row)."""
    reduced, found = {n.writes for n in nests(kernel) if n.is_reduction}, dict[str, tuple[str, int]]()
    for out in (n for n in nests(kernel) if n.writes in kernel.outputs and not n.is_reduction):
        axes, shape = [x.var for x in out.loops], [x.extent for x in out.loops]
        for r in (r for r in out.reads if r.attr in reduced):
            if (length := concatenated_row_length(axes, shape, r.args)) is not None:
                found[out.writes.name] = r.attr.name, length
    return found


def row_loops(kernel: Kernel, out: Nest, inside: tuple[str, ...]) -> list[Expr] | None:
    """The loops of the result that index its reductions: the same for all of them, each index a loop by itself."""
    stages = {n.writes.name: n for n in nests(kernel) if n.writes.name in inside}
    reduced = {n.writes.name for n in nests(kernel) if n.is_reduction}
    read = [r for r in out.reads if r.attr.name in inside]
    if any(i.op not in ("var", "const") for r in read for i in r.args):
        return None
    used = [(r.attr.name, [x.var for x in out.loops if x.var in r.args]) for r in read]
    rows = [loops for name, loops in used if name in reduced or len(loops) < len(out.loops)]
    if not rows or any(other != rows[0] for other in rows):
        return None
    # Stages that read other stages must walk the same rows in their leading dimensions.
    leading = ((tuple(x.var for x in nest.spatial[: len(rows[0])]), r) for nest in stages.values() for r in nest.reads)
    apart = any(r.attr.name in inside and len(r.args) == len(rows[0]) and r.args != own for own, r in leading)
    return None if apart else rows[0]


def stage_axes(kernel: Kernel, buffer: str, is_reduction: bool) -> list[str]:
    """The loops that index a stage, wherever it has been moved: those of the nest that initialises it or, with `is_reduction`, of the one
    that accumulates into it."""
    for x in walk(kernel.body):
        if isinstance(x, Store | Accumulate) and x.buffer.name == buffer and isinstance(x, Accumulate) == is_reduction:
            return [i.name for i in x.indices]
    return []
