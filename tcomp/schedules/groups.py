"""How the default schedules of all targets cut a kernel into groups: each result with the temporaries that only it reads; products with a
softmax (attention) among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tcomp.errors import ScheduleError
from tcomp.ir.fallback import FallbackKind
from tcomp.ir.loops import Accumulate, For, Kernel
from tcomp.schedules.analysis.access_patterns import Nest, is_product, is_sum, nests, result_nest, row_axis
from tcomp.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Group:
    """A result, the temporaries computed inside its loops, in order, and the kind of its schedule (`shape`)."""

    result: str
    inside: tuple[str, ...]
    shape: str


def attachments(kernel: Kernel) -> list[tuple[str, tuple[str, ...]]]:
    """Results in order, each with the temporaries that only it reads, directly or through each other."""
    order = list(dict.fromkeys(n.writes.name for n in nests(kernel)))
    outputs = {b.name for b in kernel.outputs}
    homes: dict[str, str] = {}
    for name in reversed(order):
        readers = {n.writes.name for n in nests(kernel) if name in {r.attr.name for r in n.reads}} - {name}
        places = {homes.get(r, r) for r in readers}
        homes[name] = next(iter(places)) if name not in outputs and len(places) == 1 else name
    return [(name, tuple(n for n in order if homes[n] == name and n != name)) for name in order if homes[name] == name]


@dataclass(frozen=True, slots=True)
class SoftmaxProduct:
    """A product with a softmax, scheduled as a whole: `result` is computed from `sums` of exponentials relative to `maximum`, all of them
    reductions over the same axis, and the maximum from the reduction `scores`, if there is one. `elements` are elementwise stages to be
    inlined: the operand of the maximum, and the exponentials."""

    result: str
    maximum: str
    sums: tuple[str, ...]
    scores: str | None
    elements: tuple[str, ...]


def softmax_product(kernel: Kernel, result: str, inside: Sequence[str]) -> SoftmaxProduct | None:
    """The product with a softmax that computes a result; None if it is computed otherwise. `inside` are the temporaries that only it
    reads."""
    here = [n for n in nests(kernel) if n.writes.name in inside]
    reductions = [n for n in here if n.is_reduction]
    used = {r.attr.name for n in here for r in n.reads}

    def is_maximum(n: Nest) -> bool:
        return isinstance(n.leaf, Accumulate) and n.leaf.reducer.op == "max"

    maxima = [n for n in reductions if n.writes.name in used and is_maximum(n)]
    if len(maxima) != 1:
        return None
    top = maxima[0].writes.name

    def reads(n: Nest, names: Sequence[str]) -> bool:
        return any(r.attr.name in names for r in n.reads)

    elements = [n for n in here if n.leaf.value.op != "const" and not n.is_reduction]
    weights = [n.writes.name for n in elements if reads(n, [top])]
    terms = [n.writes.name for n in elements if n.writes.name not in weights]
    sums = [n for n in reductions if is_sum(n) and reads(n, [top, *weights])]
    scores = [
        n.writes.name for n in reductions if any(reads(x, [n.writes.name]) for x in (maxima[0], *elements) if x.writes.name not in weights)
    ]
    known = {top, *weights, *terms, *(n.writes.name for n in sums), *scores}
    products = [n for n in sums if is_product(n) and row_axis(n) is not None]
    empty = any(x.extent == 0 for n in here for x in n.loops)
    if empty or known != set(inside) or len(scores) > 1 or len(maxima[0].reduction_loops) != 1 or not products:
        return None
    return SoftmaxProduct(result, top, tuple(n.writes.name for n in sums), scores[0] if scores else None, (*terms, *weights))


def in_one_pass(s: Schedule, apply: Callable[[SoftmaxProduct], None]) -> set[str]:
    """Apply a schedule to all products with a softmax; returns the buffers whose nests are still as lowered."""
    left = {n.writes.name for n in nests(s.kernel)}
    products = [found for result, inside in attachments(s.kernel) if (found := softmax_product(s.kernel, result, inside)) is not None]
    for found in products:
        with s.attempt(found.result, FallbackKind.STAGE_BY_STAGE):
            apply(found)
            left.difference_update({found.result, found.maximum, found.scores, *found.sums, *found.elements})
    return left


def row_and_column_loops(s: Schedule, found: SoftmaxProduct, product: Nest) -> tuple[For, For, list[str]]:
    """(loop over rows, loop over columns, names of the other loops) of the result; rows are the last dimension of the maximum."""
    out = result_nest(s.kernel, found.result)
    row = next(r.args[-1:] for r in product.reads if r.attr.name == found.maximum)
    places = [r.args for r in out.reads if r.attr is product.writes]
    through = {v: at for args in places for v, at in zip(product.leaf.indices, args, strict=True)}
    axes = [through.get(v) for v in (*row, product.spatial[-1].var)]
    loops = [x for v in axes for x in out.loops if x.var is v]
    if len(set(loops)) != 2 or len(places) != 1:
        raise ScheduleError("there are no blocks of rows", why="the sums are not read row by row")
    return loops[0], loops[1], [x.var.name for x in out.loops if x not in loops]
