"""Where a stage is computed: inside its readers, inside their loops, inside the loops of what it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, pairwise

from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import Box, box_touched, in_range, indices_of, interval
from tcomp.ir.expr import Dim, Expr, as_expr
from tcomp.ir.polyhedral.inverse_maps import Inverse, Solution, holds, inverse
from tcomp.ir.simplify import as_dim, difference, prove, same_dim, simplify
from tcomp.schedules.analysis.access_patterns import Nest
from tcomp.schedules.handles import Loop, Stage
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import find_loop, nesting, path, reads, rebuild, refuse, refuse_if, without_allocation, writes


def inline(kernel: L.Kernel, stage: Stage) -> L.Kernel:
    """Every reader of a temporary computes the element itself; the temporary vanishes.

    Legal when one statement stores the stage, each element in one iteration, from values that do not change until the last reader; not for
    reductions, outputs, and what is computed from its own elements. Good for cheap elementwise work: it saves the memory traffic, and
    costs one computation per reader instead of one in all.

      >>> A = te.placeholder((8,), name="A")
      >>> B = te.compute((8,), lambda i: te.exp(A[i]), name="B")
      >>> s = Schedule(te.compute((4, 8), lambda i, j: B[i * 2] + A[j], name="C"))
      >>> s.inline("B")
      >>> print(s.kernel.body)
      for C.i in 0..4 {
        for C.j in 0..8 {
          C[C.i, C.j] = exp(A[C.i * 2]) + A[C.j]
        }
      }
    """
    buffer = editing.find_temporary(kernel, stage, ", only temporaries vanish")
    scope = editing.scope_of(kernel, buffer)
    stores = [s for s in editing.stores(scope) if s.buffer is buffer]
    refuse_if(any(isinstance(s, L.Accumulate) for s in stores), f"`{stage}` is a reduction", "compute_at moves it into its reader's loops")
    refuse_if(len(stores) != 1, f"{len(stores)} statements store `{stage}`")
    write = stores[0]
    assert isinstance(write, L.Store)
    element = _elements(scope, write)

    def rule(e: Expr) -> Expr | None:
        return element(e.args) if e.op == "read" and e.attr is buffer else None

    def empty(s: L.Stmt) -> bool:
        return s is write or (not isinstance(s, L.Store | L.Accumulate | L.While) and all(map(empty, L.children(s))))

    body = rebuild(without_allocation(kernel.body, buffer), lambda s: L.Block(()) if empty(s) else None)
    body = L.map_expressions(body, lambda e: simplify(E.rewrite(e, rule)) if any(r.attr is buffer for r in E.reads(e)) else e)
    return kernel.with_body(body)


def _elements(scope: L.Stmt, write: L.Store) -> Callable[[Sequence[Expr]], Expr]:
    """The value of an element of a buffer that one statement stores, from its place. Refuses where readers cannot compute it instead."""
    buffer, name = write.buffer, write.buffer.name
    refuse_if(buffer in reads([write]), f"`{name}` is computed from its own elements")
    editing.check_bounds_no_loops(scope, buffer)
    above, reading = path(scope, write), [s for s in L.walk(scope) if any(r.attr is buffer for r in E.reads(*L.expressions(s)))]
    split = max((n for n, s in enumerate(above) if all(path(s, r) for r in reading)), default=0)
    common, below = above[split], above[split + 1 :]
    parts = L.children(common)
    readers = [n for n, c in enumerate(parts) if buffer in reads([c])]
    first = next((n for n, c in enumerate(parts) if below and c is below[0]), -1)
    if not isinstance(common, L.Block) or not readers or readers[0] <= first:
        raise refuse(f"`{name}` is not stored whole before it is read" if readers else f"`{name}` is not read")
    refuse_if(any(isinstance(s, L.While) for s in below), f"`{name}` is stored in a `while` loop")
    loops = tuple(s for s in below if isinstance(s, L.For))
    conditions = [s.cond if inner is s.then else E.unary("not", s.cond) for s, inner in pairwise(below) if isinstance(s, L.If)]
    needed = [write.value, *conditions]
    inverted = inverse(write.indices, buffer.shape, loops)
    for x in loops:
        unknown = x.var not in inverted.values and x.var in E.variables(*needed, *write.indices)
        refuse_if(unknown, f"the index of `{name}` does not tell which iteration of `{x.var.name}` stores an element")
    for source in sorted({r.attr for r in E.reads(*needed)}, key=lambda b: b.name):
        what = f"`{source.name}`, which `{name}` is computed from,"
        refuse_if(any(isinstance(s, L.Allocate) and s.buffer is source for s in below), f"{what} is gone where `{name}` is read")
        refuse_if(any(writes(c, source) for c in parts[first : readers[-1] + 1]), f"{what} may change before `{name}` is read")
    shared = [s for s in above[:split] if isinstance(s, L.For | L.While)]

    def element(place: Sequence[Expr]) -> Expr:
        """One that is not stored may be anything, but what its value reads must not be out of range."""
        values, required = inverted.at(place)
        required += [E.substitute(c, values) for c in conditions]
        required += [as_expr(0) < E.substitute(as_expr(x.extent), values) for x in loops if x.var not in values]
        stored = [c for c in map(simplify, required) if not holds(c)]
        if shared and stored:
            outer = next((s.var.name for s in shared if isinstance(s, L.For)), "the loop around it")
            shown = f"`{name}[{', '.join(map(str, place))}]`"
            raise refuse(f"{shown} may stem from an earlier iteration of `{outer}`: it is stored where {E.all_of(stored)}")
        return E.select_where(stored, E.substitute(write.value, values), E.const(0, buffer.dtype))

    return element


def compute_at(kernel: L.Kernel, stage: Stage, loop: Loop, scope: str = "global") -> L.Kernel:
    """Move the computation of a temporary into a loop of its reader, restricted to the part that one iteration reads.

    The buffer shrinks to the box that is read and takes the scope given. The loops of the stage become one per dimension, the reduction
    loops inside them; loops of the reader may have any shape. Legal when all readers stand inside the loop, each nest of the stage is one
    statement whose index tells the iteration, it computes nothing else, and its sources do not change before the reader. Good for
    locality: the part is still in the cache, or in registers, when it is read. Costs what several iterations compute again.

      >>> A = te.placeholder((18,), name="A")
      >>> B = te.compute((18,), lambda i: te.exp(A[i]), name="B")
      >>> s = Schedule(te.compute((16, 5), lambda i, j: B[i] + B[i + 2] * A[j], name="C"))
      >>> outer, inner = s.split("C.i", 4)
      >>> s.compute_at("B", outer)
      >>> print(s.kernel.body)
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
    """
    target = find_loop(kernel, loop)
    buffer = editing.find_temporary(kernel, stage, ", only temporaries move", "cache_write gives it one")
    point = _find_insertion_point(kernel, buffer, target)
    without = dict.fromkeys(point.nests, L.Block(()))
    outside = rebuild(kernel.body, {**without, target: L.Block(())}.get)
    refuse_if(indices_of(outside, buffer), f"`{stage}` is also read outside of loop `{loop}`")
    refuse_if(not indices_of(target.body, buffer), f"loop `{loop}` does not read `{stage}`")
    editing.check_bounds_no_loops(target, buffer)
    _check_pure(point)
    first, last = (point.items.index(point.nests[n]) for n in (0, -1))
    refuse_if(last > point.at, f"`{stage}` is computed once more behind loop `{loop}`")
    _check_stable(kernel, point, reads(point.nests), first, point.at, target)
    editing.check_shared_memory(kernel, scope, target)
    repeated = any(isinstance(s, L.For | L.While) for s in point.shared) and not editing.stores_all(point.nests[0], buffer)
    refuse_if(repeated, f"`{stage}` may keep elements from an earlier iteration of the loops around it")
    box = box_touched(target.body, buffer, clip=scope != "register", sizes=kernel.scalars)
    local = editing.temporary(buffer.name, buffer.dtype, box.extent, scope)
    readers = editing.swap_buffer(target.body, buffer, local, lambda at: tuple(i - b for i, b in zip(at, box.base, strict=True)))
    new = replace(target, body=L.Allocate(local, L.block(*_moved(kernel, point, box, local), readers)))
    return nesting(kernel.with_body(without_allocation(rebuild(kernel.body, {**without, target: new}.get), buffer)))


def reverse_compute_at(kernel: L.Kernel, stage: Stage, loop: Loop) -> L.Kernel:
    """Move the computation of a stage to the end of a loop that computes what it reads: each iteration goes on with its own results.

    Legal when each element of the stage needs only elements that one iteration of the loop completes: reductions must be finished inside
    the loop, and neighbours that belong to other iterations must not be read. Good for epilogues (bias, activation, a residual, pooling of
    a tile) of a nest that is tiled already: the results are still in the cache when they are used.

      >>> A, k = te.placeholder((8, 3), name="A"), te.reduce_axis(3, "k")
      >>> B = te.compute((8,), lambda i: te.sum(A[i, k], k), name="B")
      >>> s = Schedule(te.compute((8,), lambda i: te.maximum(B[i], 0.0), name="C"))
      >>> outer, inner = s.split("B.i", 4)
      >>> s.reverse_compute_at("C", outer)
      >>> print(s.loops[outer])
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
    """
    target, buffer = find_loop(kernel, loop), editing.find_buffer(kernel, stage)
    point = _find_insertion_point(kernel, buffer, target)
    first, last, item = point.items.index(point.nests[0]), point.items.index(point.nests[-1]), point.items[point.at]
    refuse_if(first < point.at, f"`{stage}` is computed before loop `{loop}`", "compute_at moves it into the loops of its readers")
    _check_pure(point)
    early = any(indices_of(x, buffer) for x in point.items[point.at : last] if x not in point.nests)
    refuse_if(early, f"`{stage}` is used before it is computed")
    needed = reads(point.nests)
    sources = sorted((b for b in needed if writes(item, b)), key=lambda b: b.name)
    refuse_if(not sources, f"`{stage}` uses nothing that loop `{loop}` computes")
    _check_stable(kernel, point, needed - set(sources), point.at, last, target)
    _check_stable(kernel, point, sources, point.at + 1, last, target)
    around = path(item, target)
    if (test := next((s for s in around if isinstance(s, L.If | L.While)), None)) is not None:
        raise refuse(f"loop `{loop}` runs only where {test.cond}")
    loops = [s for s in around if isinstance(s, L.For)]
    only = _iterations_of(point, {b: _completed_in(item, b, loops) for b in sources}, loops)
    new = replace(target, body=L.block(target.body, *_moved(kernel, point, _box_of(buffer, only), only=only)))
    return nesting(editing.replaced(kernel, {**dict.fromkeys(point.nests, L.Block(())), target: new}))


def _completed_in(item: L.Stmt, buffer: L.Buffer, loops: Sequence[L.For]) -> Inverse:
    """The iteration of `loops` after which an element is complete: the only one in which anything writes it."""
    target, order = loops[-1], list(L.walk(item))
    found: list[tuple[list[L.Stmt], Inverse]] = []
    for write in (s for s in editing.stores(item) if s.buffer is buffer):
        around = path(item, write)
        later = target not in around and order.index(write) > order.index(target)
        refuse_if(later, f"`{buffer.name}` is not complete where loop `{target.var.name}` ends: it is written behind it")
        inverted = inverse(write.indices, buffer.shape, [s for s in around if isinstance(s, L.For)])
        for x in loops:
            why = f"`{buffer.name}` is complete only after all iterations of `{x.var.name}`"
            hint = f"reorder `{x.var.name}` inside of `{target.var.name}`, or name a loop outside of it"
            refuse_if(x in around and x.var not in inverted.values, why, hint)
        found.append((around, inverted))
    inside = next((inverted for around, inverted in found if target in around), None)
    if inside is None:
        raise refuse(f"loop `{target.var.name}` does not compute `{buffer.name}`")
    for around, inverted in found:
        for x in loops:
            several = x in around and inverted.values[x.var] is not inside.values[x.var]
            refuse_if(several, f"`{buffer.name}` is written in several iterations of `{x.var.name}`")
    return inside


def _iterations_of(point: _InsertionPoint, homes: Mapping[L.Buffer, Inverse], loops: Sequence[L.For]) -> Inverse:
    """For each loop its iteration in which an element of the stage can be computed."""
    buffer, values, places = point.stage, dict[Expr, Expr](), tuple[Expr, ...]()
    for nest in point.nests:
        found = editing.single_write(nest, buffer)
        inverted = inverse(found.leaf.indices, buffer.shape, found.loops)
        places = inverted.places
        reduced = {x.var: x.extent for x in found.loops if x.var not in inverted.values}
        for r in (r for r in E.reads(*L.expressions(found.leaf), *found.conditions) if r.attr in homes):
            home, _ = homes[r.attr].at([E.substitute(i, inverted.values) for i in r.args])
            for x in loops:
                span = interval(home[x.var], reduced)
                if span is None or span[0] is not span[1] or E.reads(span[0]) or values.setdefault(x.var, span[0]) is not span[0]:
                    why = f"one element of `{buffer.name}` needs elements of `{r.attr.name}` from several iterations of `{x.var.name}`"
                    raise refuse(why, f"it reads {r}")
    for x in loops:
        for condition in (values[x.var] >= 0, values[x.var] < E.substitute(as_expr(x.extent), values)):
            if not holds(condition):
                shown = {place: E.var("abcdefghijklmnop"[d]) for d, place in enumerate(places)}
                element = f"{buffer.name}[{', '.join(str(v) for v in shown.values())}]"
                wanted = simplify(E.substitute(condition, shown))
                raise refuse(f"`{element}` would be missing: no iteration of `{x.var.name}` goes with it unless {wanted}")
    return Inverse(places, values, ())


def _box_of(buffer: L.Buffer, only: Inverse) -> Box:
    """A box around the elements of some iterations: a dimension is narrowed where the loops run over its highest digits."""
    solution = Solution(set(only.places))
    solution.solve([(e, x) for x, e in only.values.items()])
    box = Box.whole(buffer.shape)
    for d, (place, whole) in enumerate(zip(only.places, buffer.shape, strict=True)):
        start, size = as_expr(0), whole
        for e, digits in solution.digits.found.items():
            offset = difference(e, place)
            known = {x.low.attr: (x.high, value) for x, value in digits.items() if x.low.op == "const" and offset.op == "const"}
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
        box = box.replaced({d: (simplify(start), size)})
    return box


@dataclass(frozen=True, slots=True)
class _InsertionPoint:
    """The statements of one sequence, seen through blocks and allocations; `nests` among them compute a stage, and `items[at]` is or
    contains a loop. `shared` are the loops and conditions around the sequence inside the scope of the stage."""

    stage: L.Buffer
    shared: tuple[L.Stmt, ...]
    items: tuple[L.Stmt, ...]
    nests: tuple[L.Stmt, ...]
    at: int


def _find_insertion_point(kernel: L.Kernel, buffer: L.Buffer, target: L.For) -> _InsertionPoint:
    """The innermost sequence that has the loop in one item and all that writes the buffer in others. Raises `ScheduleError`."""
    name, loop = buffer.name, target.var.name
    node, shared = editing.scope_of(kernel, buffer), list[L.Stmt]()
    refuse_if(not path(node, target), f"loop `{loop}` stands outside of the allocation of `{name}`")
    while True:
        items = editing.sequence(node)
        at = next(n for n, item in enumerate(items) if path(item, target))
        nests = tuple(item for n, item in enumerate(items) if n != at and writes(item, buffer))
        if not writes(items[at], buffer):
            break
        refuse_if(writes(target, buffer), f"loop `{loop}` is one of those that compute `{name}`")
        refuse_if(nests, f"`{name}` is computed around loop `{loop}` and elsewhere")
        shared.append(items[at])
        node = next(c for c in L.children(items[at]) if path(c, target))
    refuse_if(not nests, f"nothing computes `{name}`")
    return _InsertionPoint(buffer, tuple(shared), items, nests, at)


def _check_pure(point: _InsertionPoint) -> None:
    """Refuses nests that do anything but compute the stage from other buffers."""
    for computed in (s.buffer for nest in point.nests for s in editing.stores(nest)):
        refuse_if(computed is not point.stage, f"the loops that compute `{point.stage.name}` compute `{computed.name}` too")
    refuse_if(point.stage in reads(point.nests), f"`{point.stage.name}` is computed from its own elements")


def _check_stable(kernel: L.Kernel, point: _InsertionPoint, sources: Iterable[L.Buffer], first: int, last: int, target: L.For) -> None:
    """Refuses if a source is written by items first..last (those that compute the stage aside), or does not live where the loop stands."""
    for source in sorted(sources, key=lambda b: b.name):
        what, there = f"`{source.name}`, which is needed,", path(editing.scope_of(kernel, source), target)
        refuse_if(not there, f"{what} is not allocated around `{target.var.name}`")
        changed = any(writes(item, source) for item in point.items[first : last + 1] if item not in point.nests)
        refuse_if(changed, f"{what} is written between the stage and loop `{target.var.name}`")


def _moved(kernel: L.Kernel, point: _InsertionPoint, box: Box, local: L.Buffer | None = None, only: Inverse | None = None) -> list[L.Stmt]:
    """A stage's nests over a box of its buffer, one loop per dimension outside and the reduction loops inside; of the elements those that
    belong to the iterations `only`. They write into the box `local`, if given: then elements outside of the stage may be computed as well,
    as nobody uses them. A loop over a dimension has the name of the stage's outermost loop over it."""
    buffer, moved, taken = point.stage, list[L.Stmt](), set[str]()
    for found in (editing.single_write(nest, buffer) for nest in point.nests):
        inverted = inverse(found.leaf.indices, buffer.shape, found.loops)
        for x in found.spatial:
            unknown = x.var not in inverted.values
            refuse_if(unknown, f"the index of `{buffer.name}` does not tell which iteration of `{x.var.name}` computes an element")
        names = []
        for d, index in enumerate(found.leaf.indices):
            walked = [x.var.name for x in found.loops if x.var in E.variables(index)]
            numbered = (editing.fresh(kernel, f"{[*walked, buffer.name][0]}.{k}") for k in count(d))
            names.append(next(n for n in chain(walked, numbered) if n not in taken))
            taken.add(names[-1])
        moved.append(L.over(box.extent, partial(_element, found, inverted, box, local, only), names.__getitem__))
    return moved


def _element(found: Nest, inverted: Inverse, box: Box, local: L.Buffer | None, only: Inverse | None, outer: tuple[Expr, ...]) -> L.Stmt:
    """The statement that computes the element `outer` of a box."""
    buffer, element = found.writes, tuple(b + v for b, v in zip(box.base, outer, strict=True))
    values, conditions = inverted.at(element)
    body = editing.enclose([x for x in found.loops if x.var not in values], L.where(found.conditions, found.leaf))
    to, at = (buffer, element) if local is None else (local, outer)
    body = editing.rebind(body, values)
    body = rebuild(body, lambda s: replace(s, buffer=to, indices=at) if isinstance(s, L.Store | L.Accumulate) else None)
    safe = all(in_range(r.args, r.attr.shape) for s in L.walk(body) for r in E.reads(*L.expressions(s)))  # whatever guards say
    within = [c for e, n in zip(element, buffer.shape, strict=True) for c in (e >= 0, e < as_expr(n))]
    belongs = [] if only is None else [E.equal(e, x) for x, e in only.at(element)[0].items()]
    conditions += [c for c in belongs if not holds(c)]
    return editing.guard([*([] if local is not None and safe else within), *conditions], body)
