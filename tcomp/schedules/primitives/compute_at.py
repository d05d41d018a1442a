"""Where a stage is computed: inside its readers, inside their loops, inside the loops of what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tcomp.ir import expr as E
from tcomp.ir.access import box_touched, indices_of, interval
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr
from tcomp.ir.loops import (
    Accumulate,
    Allocate,
    Block,
    Buffer,
    For,
    If,
    Kernel,
    Stmt,
    Store,
    While,
    block,
    children,
    expressions,
    map_expressions,
    walk,
)
from tcomp.ir.simplify import difference, prove, same_dim, simplify
from tcomp.schedules.analysis.inverse_maps import Inverse, Solution, holds, inverse
from tcomp.schedules.primitives.editing import find_buffer, find_loop, nesting, rebuild, refuse, swap_buffer, temporary, without_allocation
from tcomp.schedules.primitives.insertion_points import (
    InsertionPoint,
    bounds_loops,
    chain,
    check_pure,
    check_shared_memory,
    check_stable,
    find_insertion_point,
    path,
    reads,
    restricted,
    scope_of,
    stores_all,
    writes,
)


def inline(kernel: Kernel, stage: str) -> Kernel:
    """Every reader of a temporary computes the element itself; the temporary vanishes.

    Legal when one statement stores the stage, each element in one iteration, from values that do not change until the last reader. Of
    reductions, outputs, and what is computed from its own elements, nothing can be inlined.

    Good for cheap elementwise work: it saves the memory traffic, and costs one computation per reader instead of one in all.

      >>> from tcomp import te
      >>> from tcomp.schedules import Schedule
      >>> A = te.placeholder((8,), name="A")
      >>> B = te.compute((8,), lambda i: te.exp(A[i]), name="B")
      >>> s = Schedule(te.compute((4, 8), lambda i, j: B[i * 2] + A[j], name="C"))
      >>> print(s)
      kernel C(A: float32[8], C: float32[4, 8]) -> (C) {
        alloc B: float32[8]
        for B.i in 0..8 {
          B[B.i] = exp(A[B.i])
        }
        for C.i in 0..4 {
          for C.j in 0..8 {
            C[C.i, C.j] = B[C.i * 2] + A[C.j]
          }
        }
      }
      >>> s.inline("B")
      >>> print(s)
      kernel C(A: float32[8], C: float32[4, 8]) -> (C) {
        for C.i in 0..4 {
          for C.j in 0..8 {
            C[C.i, C.j] = exp(A[C.i * 2]) + A[C.j]
          }
        }
      }
    """
    buffer = find_buffer(kernel, stage, "inline")
    if buffer in kernel.buffers:
        raise refuse(kernel, "inline", f"`{stage}` is a parameter, only temporaries vanish")
    scope = scope_of(kernel, buffer)
    stores = [s for s in walk(scope) if isinstance(s, Store | Accumulate) and s.buffer is buffer]
    if any(isinstance(s, Accumulate) for s in stores):
        raise refuse(kernel, "inline", f"`{stage}` is a reduction", "compute_at moves it into its reader's loops")
    if len(stores) != 1:
        raise refuse(kernel, "inline", f"{len(stores)} statements store `{stage}`")
    write = stores[0]
    assert isinstance(write, Store)
    source = _source(kernel, scope, buffer, write)

    def rule(e: Expr) -> Expr | None:
        return source.element(kernel, e.args) if e.op == "read" and e.attr is buffer else None

    body = map_expressions(kernel.body, lambda e: simplify(E.rewrite(e, rule)) if any(r.attr is buffer for r in E.reads(e)) else e)
    body = rebuild(without_allocation(body, buffer), lambda s: Block(()) if isinstance(s, Store) and s.buffer is buffer else None)
    return kernel.with_body(_without_empty(body))


@dataclass(frozen=True, slots=True)
class _Source:
    """What one statement stores: its value, where it stores it, and when."""

    write: Store
    inverse: Inverse
    loops: tuple[For, ...]
    conditions: tuple[Expr, ...]
    shared: tuple[Stmt, ...]  # around the statement and its readers, inside the allocation

    def element(self, kernel: Kernel, place: Sequence[Expr]) -> Expr:
        """The value of an element. One that is not stored may be anything, but what its value reads must not be out of range."""
        values, required = self.inverse.at(place)
        required += [E.substitute(c, values) for c in self.conditions]
        required += [as_expr(0) < E.substitute(as_expr(x.extent), values) for x in self.loops if x.var not in values]
        stored = [c for c in map(simplify, required) if not holds(c)]
        if self.shared and stored:
            outer = next((s.var.name for s in self.shared if isinstance(s, For)), "the loop around it")
            element = f"{self.write.buffer.name}[{', '.join(map(str, place))}]"
            why = f"`{element}` may stem from an earlier iteration of `{outer}`: it is stored where {E.all_of(stored)}"
            raise refuse(kernel, "inline", why)
        return E.select_where(stored, E.substitute(self.write.value, values), E.const(0, self.write.buffer.dtype))


def _source(kernel: Kernel, scope: Stmt, buffer: Buffer, write: Store) -> _Source:
    """The only statement that stores a buffer, if its value can be computed by the readers instead."""
    name = buffer.name
    if any(r.attr is buffer for r in E.reads(*expressions(write))):
        raise refuse(kernel, "inline", f"`{name}` is computed from its own elements")
    if bounds_loops(scope, buffer):
        raise refuse(kernel, "inline", f"the extent of a loop is read from `{name}`")
    above = path(scope, write)
    split = max((n for n, s in enumerate(above) if all(path(s, r) for r in _readers(scope, buffer))), default=0)
    meeting, below = above[split], above[split + 1 :]
    readers = [n for n, c in enumerate(children(meeting)) if _readers(c, buffer)]
    first = next((n for n, c in enumerate(children(meeting)) if below and c is below[0]), -1)
    if not isinstance(meeting, Block) or not readers or readers[0] <= first:
        raise refuse(kernel, "inline", f"`{name}` is not stored whole before it is read" if readers else f"`{name}` is not read")
    loops = tuple(s for s in below if isinstance(s, For))
    if any(isinstance(s, While) for s in below):
        raise refuse(kernel, "inline", f"`{name}` is stored in a `while` loop")
    conditions = []
    for s, inner in pairwise(below):
        if isinstance(s, If):
            conditions.append(s.cond if inner is s.then else E.unary("not", s.cond))
    needed = [write.value, *conditions]
    inverted = inverse(write.indices, buffer.shape, loops)
    for x in loops:
        if x.var not in inverted.values and x.var in E.variables(*needed, *write.indices):
            raise refuse(kernel, "inline", f"the index of `{name}` does not tell which iteration of `{x.var.name}` stores an element")
    for source in sorted({r.attr for r in E.reads(*needed)}, key=lambda b: b.name):
        if any(isinstance(s, Allocate) and s.buffer is source for s in below):
            raise refuse(kernel, "inline", f"`{source.name}`, which `{name}` is computed from, is gone where `{name}` is read")
        if any(writes(c, source) for c in children(meeting)[first : readers[-1] + 1]):
            raise refuse(kernel, "inline", f"`{source.name}`, which `{name}` is computed from, may change before `{name}` is read")
    shared = tuple(s for s in above[:split] if isinstance(s, For | While))
    return _Source(write, inverted, loops, tuple(conditions), shared)


def _readers(stmt: Stmt, buffer: Buffer) -> list[Stmt]:
    return [s for s in walk(stmt) if any(r.attr is buffer for r in E.reads(*expressions(s)))]


def _without_empty(stmt: Stmt) -> Stmt:
    """Without the loops and conditions around nothing."""

    def empty(s: Stmt) -> bool:
        return not isinstance(s, Store | Accumulate | While) and all(empty(c) for c in children(s))

    return rebuild(stmt, lambda s: Block(()) if empty(s) else None)


def compute_at(kernel: Kernel, stage: str, loop: str, scope: str = "global") -> Kernel:
    """Move the computation of a temporary into a loop of its reader, restricted to the part that one iteration reads.

    The buffer shrinks to the box that is read and takes the scope given; elements that several iterations use are computed again in
    each. The loops of the stage become one per dimension, the reduction loops inside them; loops of the reader may have any shape.

    Legal when all readers stand inside the loop, each nest of the stage is one statement whose index tells the iteration, it computes
    nothing else, and what it is computed from does not change before the reader.

    Good for locality: the part is still in the cache, or in registers, when it is read. The price is what is computed twice.

      >>> from tcomp import te
      >>> from tcomp.schedules import Schedule
      >>> A = te.placeholder((18,), name="A")
      >>> B = te.compute((18,), lambda i: te.exp(A[i]), name="B")
      >>> s = Schedule(te.compute((16, 5), lambda i, j: B[i] + B[i + 2] * A[j], name="C"))
      >>> outer, inner = s.split("C.i", 4)
      >>> s.compute_at("B", outer)
      >>> print(s)
      kernel C(A: float32[18], C: float32[16, 5]) -> (C) {
        for C.i.o in 0..4 {
          alloc B: float32[6]
          for B.i in 0..6 {
            B[B.i] = exp(A[B.i + C.i.o * 4])
          }
          for C.i.i in 0..4 {
            for C.j in 0..5 {
              C[C.i.i + C.i.o * 4, C.j] = B[C.i.i] + B[C.i.i + 2] * A[C.j]
            }
          }
        }
      }
    """
    step = "compute_at"
    target, buffer = find_loop(kernel, loop, step), find_buffer(kernel, stage, step)
    if buffer in kernel.buffers:
        raise refuse(kernel, step, f"`{stage}` is a parameter, only temporaries move", "cache_write gives it one")
    point = find_insertion_point(kernel, step, buffer, target)
    outside = rebuild(kernel.body, lambda s: Block(()) if s is target or s in point.nests else None)
    if indices_of(outside, buffer):
        raise refuse(kernel, step, f"`{stage}` is also read outside of loop `{loop}`")
    if not indices_of(target.body, buffer):
        raise refuse(kernel, step, f"loop `{loop}` does not read `{stage}`")
    if bounds_loops(target, buffer):
        raise refuse(kernel, step, f"the extent of a loop is read from `{stage}`")
    check_pure(kernel, step, point.nests, buffer)
    if point.places[-1] > point.at:
        raise refuse(kernel, step, f"`{stage}` is computed once more behind loop `{loop}`")
    check_stable(kernel, step, point, reads(point.nests), point.places[0], point.at, target)
    check_shared_memory(kernel, step, scope, target)
    if any(isinstance(s, For | While) for s in point.shared) and not stores_all(point.nests[0], buffer):
        raise refuse(kernel, step, f"`{stage}` may keep elements from an earlier iteration of the loops around it")
    box = box_touched(target.body, buffer, clip=scope != "register")
    local = temporary(kernel, step, buffer.name, buffer.dtype, box.extent, scope)
    taken: set[str] = set()
    moved = [restricted(kernel, step, nest, buffer, box.base, box.extent, taken, local) for nest in point.nests]
    readers = swap_buffer(target.body, buffer, local, lambda indices: tuple(i - b for i, b in zip(indices, box.base, strict=True)))
    body = Allocate(local, block(*moved, readers))
    stripped = rebuild(kernel.body, lambda s: Block(()) if s in point.nests else (replace(target, body=body) if s is target else None))
    return nesting(kernel, step, kernel.with_body(without_allocation(stripped, buffer)))


def reverse_compute_at(kernel: Kernel, stage: str, loop: str) -> Kernel:
    """Move the computation of a stage to the end of a loop that computes what it reads: each iteration goes on with its own results.

    Legal when every element of the stage needs only elements that one iteration of the loop completes, and each element has such an
    iteration: reductions must be finished inside the loop, and neighbours that belong to other iterations must not be read.

    Good for epilogues (bias, activation, a residual, pooling of a tile) of a nest that is tiled already: the results are still in the
    cache when they are used.

      >>> from tcomp import te
      >>> from tcomp.schedules import Schedule
      >>> A = te.placeholder((8, 3), name="A")
      >>> k = te.reduce_axis(3, "k")
      >>> B = te.compute((8,), lambda i: te.sum(A[i, k], k), name="B")
      >>> s = Schedule(te.compute((8,), lambda i: te.maximum(B[i], 0.0), name="C"))
      >>> outer, inner = s.split("B.i", 4)
      >>> s.reverse_compute_at("C", outer)
      >>> print(s)
      kernel C(A: float32[8, 3], C: float32[8]) -> (C) {
        alloc B: float32[8]
        for B.init.i in 0..8 {
          B[B.init.i] = 0.0f
        }
        for B.i.o in 0..2 {
          for B.i.i in 0..4 {
            for B.k in 0..3 {
              B[B.i.i + B.i.o * 4] += A[B.i.i + B.i.o * 4, B.k]
            }
          }
          for C.i in 0..4 {
            C[B.i.o * 4 + C.i] = max(B[B.i.o * 4 + C.i], 0.0f)
          }
        }
      }
    """
    step = "reverse_compute_at"
    target, buffer = find_loop(kernel, loop, step), find_buffer(kernel, stage, step)
    point = find_insertion_point(kernel, step, buffer, target)
    first, last = point.places[0], point.places[-1]
    if first < point.at:
        raise refuse(kernel, step, f"`{stage}` is computed before loop `{loop}`", "compute_at moves it into the loops of its readers")
    check_pure(kernel, step, point.nests, buffer)
    if any(indices_of(item, buffer) for item in point.items[point.at : last] if item not in point.nests):
        raise refuse(kernel, step, f"`{stage}` is used before it is computed")
    needed = reads(point.nests)
    made = sorted((b for b in needed if writes(point.items[point.at], b)), key=lambda b: b.name)
    if not made:
        raise refuse(kernel, step, f"`{stage}` uses nothing that loop `{loop}` computes")
    check_stable(kernel, step, point, needed - set(made), point.at, last, target)
    check_stable(kernel, step, point, set(made), point.at + 1, last, target)
    around = path(point.items[point.at], target)
    for s in around:
        if isinstance(s, If | While):
            raise refuse(kernel, step, f"loop `{loop}` runs only where {s.cond}")
    loops = [s for s in around if isinstance(s, For)]
    homes = {b: _completed_in(kernel, step, point, b, loops) for b in made}
    part = _Part(buffer, *_belongs_to(kernel, step, point, buffer, homes, loops))
    base, extent = part.box()
    taken: set[str] = set()
    moved = [restricted(kernel, step, nest, buffer, base, extent, taken, only=part.only) for nest in point.nests]
    new = replace(target, body=block(target.body, *moved))
    changed = rebuild(kernel.body, lambda s: Block(()) if s in point.nests else (new if s is target else None))
    return nesting(kernel, step, kernel.with_body(changed))


def _completed_in(kernel: Kernel, step: str, point: InsertionPoint, made: Buffer, loops: Sequence[For]) -> Inverse:
    """The iteration of `loops` after which an element is complete: the only one in which anything writes it."""
    item, target = point.items[point.at], loops[-1]
    order = list(walk(item))
    found: list[tuple[list[Stmt], Inverse]] = []
    for write in (s for s in order if isinstance(s, Store | Accumulate) and s.buffer is made):
        around = path(item, write)
        if target not in around and order.index(write) > order.index(target):
            raise refuse(kernel, step, f"`{made.name}` is not complete where loop `{target.var.name}` ends: it is written behind it")
        inverted = inverse(write.indices, made.shape, [s for s in around if isinstance(s, For)])
        for x in loops:
            if x in around and x.var not in inverted.values:
                why = f"`{made.name}` is complete only after all iterations of `{x.var.name}`"
                raise refuse(kernel, step, why, f"reorder `{x.var.name}` inside of `{target.var.name}`, or name a loop outside of it")
        found.append((around, inverted))
    inside = next((inverted for around, inverted in found if target in around), None)
    if inside is None:
        raise refuse(kernel, step, f"loop `{target.var.name}` does not compute `{made.name}`")
    for around, inverted in found:
        for x in loops:
            if x in around and inverted.values[x.var] is not inside.values[x.var]:
                raise refuse(kernel, step, f"`{made.name}` is written in several iterations of `{x.var.name}`")
    return inside


def _belongs_to(
    kernel: Kernel, step: str, point: InsertionPoint, buffer: Buffer, homes: dict[Buffer, Inverse], loops: Sequence[For]
) -> tuple[tuple[Expr, ...], dict[Expr, Expr]]:
    """(variables for an element of the stage, for each loop its iteration in which the element can be computed, over these)."""
    values: dict[Expr, Expr] = {}
    places: tuple[Expr, ...] = ()
    for nest in point.nests:
        found = chain(kernel, step, nest, buffer)
        inverted = inverse(found.write.indices, buffer.shape, found.loops)
        places = inverted.places
        reduced = {x.var: x.extent for x in found.loops if x.var not in inverted.values}
        for r in (r for r in E.reads(*expressions(found.write), *found.conditions) if r.attr in homes):
            home, _ = homes[r.attr].at([E.substitute(i, inverted.values) for i in r.args])
            for x in loops:
                span = interval(home[x.var], reduced)
                if span is None or span[0] is not span[1] or E.reads(span[0]) or values.setdefault(x.var, span[0]) is not span[0]:
                    why = f"one element of `{buffer.name}` needs elements of `{r.attr.name}` from several iterations of `{x.var.name}`"
                    raise refuse(kernel, step, why, f"it reads {r}")
    for x in loops:
        for condition in (values[x.var] >= 0, values[x.var] < E.substitute(as_expr(x.extent), values)):
            if not holds(condition):
                shown = {place: E.var("abcdefghijklmnop"[d]) for d, place in enumerate(places)}
                element = f"{buffer.name}[{', '.join(str(v) for v in shown.values())}]"
                wanted = simplify(E.substitute(condition, shown))
                why = f"`{element}` would be missing: no iteration of `{x.var.name}` goes with it unless {wanted}"
                raise refuse(kernel, step, why)
    return places, values


@dataclass(frozen=True, slots=True)
class _Part:
    """The elements of a buffer that belong to one iteration of some loops: those for which `values` are the loops' variables."""

    buffer: Buffer
    places: tuple[Expr, ...]
    values: dict[Expr, Expr]

    def box(self) -> tuple[list[Expr], list[Dim]]:
        """(base, extent) of a box around the part: a dimension is narrowed where the loops run over its highest digits."""
        solution = Solution(set(self.places))
        solution.solve([(e, x) for x, e in self.values.items()])
        base: list[Expr] = []
        extent: list[Dim] = []
        for place, whole in zip(self.places, self.buffer.shape, strict=True):
            start, size = as_expr(0), whole
            for e, digits in solution.digits.found.items():
                offset = difference(e, place)
                known = {d.low.attr: (d.high, value) for d, value in digits.items() if d.low.op == "const" and offset.op == "const"}
                above: Dim | None = whole if prove(E.equal(offset, 0)) else None  # the place of a digit, if all higher ones are known
                for divisor, (high, value) in sorted(known.items(), reverse=True):
                    if high is None:
                        start, size = value * divisor - offset, divisor
                    elif above is not None and same_dim(as_dim(high), above):
                        start, size = start + value * divisor, divisor
                    else:
                        continue
                    above = divisor
            if place in solution.values:
                start, size = solution.values[place], 1
            base.append(simplify(start))
            extent.append(size)
        return base, extent

    def only(self, element: Sequence[Expr]) -> list[Expr]:
        """The conditions under which an element belongs to the part."""
        here = dict(zip(self.places, element, strict=True))
        conditions = [E.equal(simplify(E.substitute(e, here)), x) for x, e in self.values.items()]
        return [c for c in conditions if not holds(c)]
