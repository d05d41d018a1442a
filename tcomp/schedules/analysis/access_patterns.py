"""What a loop means to the accesses below it: the structure that default schedules look at, instead of operator names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tcomp.ir import expr as E
from tcomp.ir.access import affine, coefficient, stride
from tcomp.ir.concatenated_rows import concatenated_row_length
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim, Expr
from tcomp.ir.loops import Accumulate, Allocate, Block, Buffer, For, If, Kernel, Stmt, Store, While, perfect, walk

LONG = 4  # rows make a tile that uses its operands often
SYMBOLIC = 512  # assumed size of an unbounded symbolic extent


@dataclass(frozen=True, slots=True)
class Nest:
    """A perfect nest at the top level of a kernel: its loops, outermost first, and the store inside."""

    loops: tuple[For, ...]
    leaf: Store | Accumulate

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
        used = set(E.variables(*self.leaf.indices))
        return tuple(x for x in self.loops if x.var in used)

    @property
    def reduction_loops(self) -> tuple[For, ...]:
        """Loops that run over what is accumulated."""
        used = set(E.variables(*self.leaf.indices))
        return tuple(x for x in self.loops if x.var not in used)

    @property
    def reads(self) -> tuple[Expr, ...]:
        """The reads of the value that is stored or accumulated."""
        return E.reads(self.leaf.value)


def contiguous(reads: Sequence[Expr], v: Expr) -> bool:
    """Every read is a unit-stride vector or the same element for neighbouring values of `v`."""
    return all(stride(r, v) in (0, 1) for r in reads)


def extent_of(extent: Dim, default: int = SYMBOLIC) -> int:
    """A number to reason with, where the extent is symbolic: its upper bound if small, else `default`."""
    if isinstance(extent, int):
        return extent
    hi = E.bounds(extent)[1]
    return default if hi is None else min(hi, default)


def bytes_of(buffer: Buffer) -> int:
    """The size of a buffer; symbolic extents are taken as in `extent_of`."""
    return prod(extent_of(n) for n in buffer.shape) * itemsize(buffer.dtype)


def is_imperative(kernel: Kernel) -> bool:
    """Programs written by hand (externs) run as they are written. What is lowered from a body writes each element in one place."""
    statements = list(walk(kernel.body))
    if any(isinstance(x, If | While) or (isinstance(x, For) and isinstance(x.body, Block)) for x in statements):
        return True
    found = nests(kernel)
    written = [(n.writes, n.is_reduction) for n in found]
    return len(set(written)) < len(written) or any(
        (n.is_reduction and (n.writes, False) not in written)  # goes on from what the element held
        or len(n.spatial) < len(n.leaf.indices)
        or not all(map(_is_shifted_loop, n.leaf.indices))
        or any(r.attr is n.writes for r in n.reads)
        for n in found
    )


def _is_shifted_loop(index: Expr) -> bool:
    """Whether an index is a loop variable plus a constant."""
    found = affine(index)
    return found is not None and list(found.terms.values()) == [1]


def nests(kernel: Kernel) -> list[Nest]:
    """Top-level perfect nests around a store, skipping what has been shaped already, and the zeros around a result."""
    found: list[Nest] = []

    def visit(x: Stmt) -> None:
        if isinstance(x, Block):
            for c in x.stmts:
                visit(c)
        elif isinstance(x, Allocate):
            visit(x.body)
        else:
            loops, leaf = perfect(x)
            if isinstance(leaf, Store | Accumulate):
                found.append(Nest(tuple(loops), leaf))

    visit(kernel.body)
    computed = {n.writes for n in found if not n.is_reduction and n.leaf.value.op != "const"}
    return [n for n in found if n.leaf.value.op != "const" or n.writes not in computed]


def result_nest(kernel: Kernel, buffer: str) -> Nest:
    """The nest that stores a buffer."""
    return next(n for n in nests(kernel) if n.writes.name == buffer and not n.is_reduction)


def reduction_nest(kernel: Kernel, buffer: str) -> Nest:
    """The nest that accumulates into a buffer."""
    return next(n for n in nests(kernel) if n.writes.name == buffer and n.is_reduction)


def is_product(reduction: Nest) -> bool:
    """A sum of products of reads: a contraction."""
    value = reduction.leaf.value
    return value.op == "mul" and all(E.reads(a) for a in value.args)


def is_sum(reduction: Nest) -> bool:
    """Whether it sums up."""
    reducer = reduction.leaf.reducer if isinstance(reduction.leaf, Accumulate) else None
    return reducer is not None and reducer.combine in (reducer.lhs + reducer.rhs, reducer.rhs + reducer.lhs)


def batch_axes(reduction: Nest) -> list[str]:
    """Output axes that index every operand: between their iterations nothing is shared, so that they come first."""
    if not is_product(reduction):
        return []
    operands = [set(E.variables(*r.args)) for r in reduction.reads]
    return [x.var.attr.name for x in reduction.spatial[:-1] if all(x.var in used for used in operands)]


def row_axis(reduction: Nest) -> For | None:
    """The output axis that reuses what the lanes read: an operand that runs along the lanes does not depend on it, or, where there is no such
    axis, a window moves along it over the operand (a depthwise convolution whose lanes run along rows of the image).

    The longest is taken, but one whose extent is not known, and may be 1, only where no other is long enough for a tile.
    """
    lane = reduction.spatial[-1].var
    operands = [set(E.variables(*r.args)) for r in reduction.reads]
    found = [
        x
        for x in reduction.spatial[:-1]
        if any(lane in used and x.var not in used for used in operands) and any(x.var in used for used in operands)
    ]
    if not found:
        indices = [i for r in reduction.reads if lane in E.variables(*r.args) for i in r.args]
        found = [x for x in reduction.spatial[:-1] if any(_moves(x, f, i) for i in indices for f in reduction.reduction_loops)]
    return max(reversed(found), key=lambda x: (isinstance(x.extent, int) and x.extent >= LONG, extent_of(x.extent)), default=None)


def _moves(row: For, reduction: For, index: Expr) -> bool:
    """Whether neighbours along `row` read the same elements in other steps of a reduction."""
    step, along = coefficient(index, row.var), coefficient(index, reduction.var)
    if not step or not along:
        return False
    return abs(step) <= abs(along) * (extent_of(reduction.extent) - 1)


def contiguous_reduction(reduction: Nest) -> For | None:
    """The reduction that all reads walk contiguously."""
    for x in reversed(reduction.reduction_loops):
        along = contiguous(reduction.reads, x.var) and any(stride(r, x.var) == 1 for r in reduction.reads)
        if along and extent_of(x.extent) >= 4:
            return x
    return None


def grouped_axis(kernel: Kernel) -> tuple[str, int] | None:
    """A loop over elements of a reduction, and a size, where an operand depends on the loop only through its quotient by the size: the
    output channels of a grouped convolution."""
    for reduction in (n for n in nests(kernel) if n.is_reduction):
        for x in reduction.spatial:
            for r in reduction.reads:
                through = {e for i in r.args for e in E.walk(i) if x.var in e.args}
                divisors = {e.args[1].attr for e in through if e.op == "floordiv" and e.args[0] is x.var and e.args[1].op == "const"}
                if len(divisors) == len(through) == 1 and isinstance(x.extent, int):
                    (size,) = divisors
                    if 1 < size < x.extent and x.extent % size == 0 and all(i is not x.var for i in r.args):
                        return x.var.attr.name, size
    return None


def concatenated_results(kernel: Kernel) -> dict[str, tuple[str, int]]:
    """The results that put rows of a reduction beside each other: which one, and how long its rows are."""
    reduced, found = {n.writes for n in nests(kernel) if n.is_reduction}, dict[str, tuple[str, int]]()
    for out in (n for n in nests(kernel) if n.writes in kernel.outputs and not n.is_reduction):
        axes, shape = [x.var for x in out.loops], [x.extent for x in out.loops]
        for r in (r for r in out.reads if r.attr in reduced):
            if (length := concatenated_row_length(axes, shape, r.args)) is not None:
                found[out.writes.name] = r.attr.name, length
    return found


def row_loops(kernel: Kernel, out: Nest, inside: tuple[str, ...]) -> list[Expr] | None:
    """The loops of the result that index its reductions: the same for all of them, each index a loop by itself."""
    rows: list[Expr] | None = None
    stages = {n.writes.name: n for n in nests(kernel) if n.writes.name in inside}
    reduced = {n.writes.name for n in nests(kernel) if n.is_reduction}
    for r in out.reads:
        if r.attr.name not in inside:
            continue
        if any(i.op not in ("var", "const") for i in r.args):
            return None
        used = [x.var for x in out.loops if x.var in r.args]
        if r.attr.name in reduced or len(used) < len(out.loops):
            if rows is not None and rows != used:
                return None
            rows = used
    if rows is None:
        return None
    for nest in stages.values():  # stages that read other stages must walk the same rows in their leading dimensions
        leading = [x.var for x in nest.spatial[: len(rows)]]
        if any(r.attr.name in inside and len(r.args) == len(rows) and list(r.args) != leading for r in nest.reads):
            return None
    return rows


def stage_axes(kernel: Kernel, buffer: str, is_reduction: bool) -> list[str]:
    """The loops that index a stage which has been moved: those of the nest that clears it, or of the one that accumulates."""
    for x in walk(kernel.body):
        if isinstance(x, Store | Accumulate) and x.buffer.name == buffer and isinstance(x, Accumulate) == is_reduction:
            return [i.attr.name for i in x.indices]
    return []
