"""Where values lie: copies of buffers, in memory or in registers; their scope, their layout, and their dimensions.

Buffers are dense and row-major, so expanding a dimension only gives another view of the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import islpy as isl

from tcomp.errors import IRError
from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import box_touched, indices_of
from tcomp.ir.expr import Dim, Expr, as_expr
from tcomp.ir.layout import Layout
from tcomp.ir.linear import known_factor
from tcomp.ir.polyhedral.model import REDUCE, model
from tcomp.ir.simplify import as_dim, prove, simplify
from tcomp.ir.text.parser import parse_layout
from tcomp.schedules.analysis.legality import conflict_of, dependences, race
from tcomp.schedules.handles import BufferCopy, Loop, Stage
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import find_buffer, fresh, rebuild, refuse, refuse_conflict, refuse_if, replace_buffer, writes


def cache_write(kernel: L.Kernel, stage: Stage, name: str, layout: Layout | str | None = None) -> tuple[L.Kernel, BufferCopy]:
    """Compute a stage into a new temporary `name` and copy that: the temporary can then be moved into the loops of the copy.

    The copy is one nest with the loops `stage.0`, `stage.1`, ... The temporary may have a layout of its own (see `relayout`). Returns
    its name, which knows these loops. Legal when the stage's first nest stores every element, so that nothing of what a parameter held
    before is read or left. Good for accumulators: with `compute_at` and the scope "register", a tile of the result stays in registers over
    the whole reduction.

      >>> A, k = te.placeholder((4, 3), name="A"), te.reduce_axis(3, "k")
      >>> s = Schedule(te.compute((4,), lambda i: te.sum(A[i, k], k), name="C"))
      >>> s.cache_write("C", "acc")
      'acc'
      >>> print(s.kernel.body)
      alloc acc: float32[4]
      for C.init.i in 0..4 {
        acc[C.init.i] = 0.0f
      }
      for C.i in 0..4 {
        for C.k in 0..3 {
          acc[C.i] += A[C.i, C.k]
        }
      }
      for C.0 in 0..4 {
        C[C.0] = acc[C.0]
      }
    """
    target = find_buffer(kernel, stage)
    items = editing.sequence(scope := editing.scope_of(kernel, target))
    nests = [item for item in items if writes(item, target)]
    refuse_if(not nests, f"nothing computes `{stage}`")
    partial = target in kernel.buffers and not editing.stores_all(nests[0], target)
    refuse_if(partial, f"`{stage}` may keep some of what it holds before", "its first nest should store all elements")
    editing.check_bounds_no_loops(scope, target)
    placed = _layout(layout, target.shape)
    local = L.Buffer(fresh(kernel, name), target.dtype, placed.shape(target.shape))
    copy, loops = editing.nest_over(kernel, target.name, target.shape, lambda at: L.Store(target, at, E.read(local, placed.indices(at))))
    moved = items[items.index(nests[0]) : items.index(nests[-1]) + 1]  # what stands between the nests may read the stage
    new = {s: editing.swap_buffer(s, target, local, placed.indices) for s in moved}
    new[nests[-1]] = L.block(new[nests[-1]], copy)
    # Allocated outside of everything if that is one sequence with the nests: temporaries of the whole kernel are planned together.
    around = kernel.body if nests[0] in editing.sequence(kernel.body) else scope
    changed = rebuild(kernel.body, lambda s: L.Allocate(local, rebuild(s, new.get)) if s is around else None)
    return kernel.with_body(changed), BufferCopy(local.name, stores=loops)


def cache_read(
    kernel: L.Kernel, buffer: Stage, loop: Loop | None, name: str, scope: str = "global", layout: Layout | str | None = None
) -> tuple[L.Kernel, BufferCopy]:
    """Copy the part of a buffer that a loop's body reads into a new buffer first, and read that instead.

    With `loop` None the whole buffer is copied before everything else. The copy is a stage called `name` with one loop per dimension,
    `name.0`, `name.1`, ...; it takes the scope given, and a layout of its own (see `relayout`), which makes it a packed panel. Returns
    its name, which knows these loops. Legal when the loop's body does not write the buffer. Good for operands that are read many times, or
    with large strides: they are staged in shared memory or packed once, and then read in the order in which they lie. Costs the copy.

      >>> A, k = te.placeholder((4, 8), name="A"), te.reduce_axis(4, "k")
      >>> s = Schedule(te.compute((8,), lambda i: te.sum(A[k, i] * A[k, 0], k), name="C"))
      >>> outer, inner = s.split("C.i", 4)
      >>> s.cache_read("A", outer, "P", layout="(b/2,a,b%2)")  # panels of two columns
      'P'
      >>> print(s.loops[outer])
      for C.i.o in 0..2 {
        alloc P: float32[4, 4, 2]
        for P.0 in 0..4 {
          for P.1 in 0..4 {
            for P.2 in 0..2 {
              P[P.0, P.1, P.2] = A[P.1, P.0 * 2 + P.2]
            }
          }
        }
        for C.i.i in 0..4 {
          for C.k in 0..4 {
            C[C.i.i + C.i.o * 4] += P[C.i.o * 2 + C.i.i // 2, C.k, C.i.i % 2] * P[0, C.k, 0]
          }
        }
      }
    """
    source = find_buffer(kernel, buffer)
    target = None if loop is None else editing.find_loop(kernel, loop)
    where = kernel.body if target is None else target.body
    refuse_if(writes(where, source), f"`{buffer}` is written where the copy would be read")
    refuse_if(editing.is_local(source, where), f"`{buffer}` is allocated where the copy would be read, and nothing is written to it")
    refuse_if(not indices_of(where, source), f"`{buffer}` is not read there")
    editing.check_bounds_no_loops(where, source)
    if target is not None:
        editing.check_shared_memory(kernel, scope, target)
    box = box_touched(where, source, sizes=kernel.scalars)
    placed = _layout(layout, box.extent)
    local = editing.temporary(fresh(kernel, name), source.dtype, placed.shape(box.extent), scope)

    def element(at: editing.Indices) -> L.Stmt:
        inside = placed.logical(at)
        index = [simplify(b + i) for b, i in zip(box.base, inside, strict=True)]
        conditions = [c for i, n in zip((*inside, *index), (*box.extent, *source.shape), strict=True) for c in (i >= 0, i < as_expr(n))]
        return editing.guard(conditions, L.Store(local, at, E.read(source, index)))

    copy, loops = editing.nest_over(kernel, local.name, local.shape, element)
    readers = editing.swap_buffer(where, source, local, lambda at: placed.indices([i - b for i, b in zip(at, box.base, strict=True)]))
    body = L.Allocate(local, L.block(copy, readers))
    changed = editing.replaced(kernel, {where: body})
    for x in editing.enclosing(changed, body):  # concurrent iterations may touch more elements of the source now
        if x.kind in (L.PARALLEL, L.VECTORIZED) and writes(x, source):
            refuse_conflict(f"iterations of `{x.var.name}`", race(x, within=changed.body))
    return changed, BufferCopy(local.name, loads=loops)


def precompute(kernel: L.Kernel, buffer: Stage, name: str) -> tuple[L.Kernel, BufferCopy]:
    """Keep what is computed from single elements of a parameter, like `alpha * A[i, k]`, in a temporary as large as the parameter.

    The largest such expression is meant, the first one where there are several; the stage `name` computes it for all elements, before
    everything else, in one loop per dimension: `name.0`, `name.1`, ... Returns its name, which knows these loops. Legal for floating-point
    parameters that the kernel does not write. Good for factors of a product that each row of the result would compute again.

      >>> A, B, k = te.placeholder((4, 6), name="A"), te.placeholder((6,), name="B"), te.reduce_axis(6, "k")
      >>> s = Schedule(te.compute((4,), lambda i: te.sum(A[i, k] * 1.5 * B[k], k), name="C"))
      >>> s.precompute("A", "T")
      'T'
      >>> print(s.loops["T.0"], s.loops["C.i"])
      for T.0 in 0..4 {
        for T.1 in 0..6 {
          T[T.0, T.1] = A[T.0, T.1] * 1.5f
        }
      }
      for C.i in 0..4 {
        for C.k in 0..6 {
          C[C.i] += T[C.i, C.k] * B[C.k]
        }
      }
    """
    source = find_buffer(kernel, buffer)
    refuse_if(source not in kernel.buffers, f"`{buffer}` is a temporary", "it is for inputs")
    refuse_if(writes(kernel.body, source), f"`{buffer}` is written", "it is for inputs")
    why = f"`{buffer}` holds {source.dtype}: what is computed from elements that nothing reads might fail"
    refuse_if(source.dtype not in _HARMLESS, why)
    if (wanted := computed_from(source, *(e for s in L.walk(kernel.body) for e in L.expressions(s)))) is None:
        raise refuse(f"nothing is computed from elements of `{buffer}` alone")
    local = L.Buffer(fresh(kernel, name), wanted.dtype, source.shape)

    def at(e: Expr, places: Sequence[Expr]) -> Expr:
        """The same of another element."""
        return E.substitute(e, {r: E.read(source, places) for r in E.reads(e)})

    def rule(e: Expr) -> Expr | None:
        found = E.reads(e)
        same = len(found) == 1 and found[0].attr is source and e is not found[0] and at(wanted, found[0].args) is e
        return E.read(local, found[0].args) if same else None

    stage, loops = editing.nest_over(kernel, local.name, source.shape, lambda places: L.Store(local, places, at(wanted, places)))
    body = L.map_expressions(kernel.body, lambda e: E.rewrite(e, rule))
    return kernel.with_body(L.Allocate(local, L.block(stage, body))), BufferCopy(local.name, loads=loops)


_HARMLESS = ("float16", "float32", "float64")  # any bits may be computed with: nothing divides by zero or is out of range


def computed_from(source: L.Buffer, *roots: Expr) -> Expr | None:
    """The largest expression that is computed from one element of a buffer, and constants; None where elements are only read."""
    element, sizes = E.var("element", dtype=source.dtype), dict[Expr, int]()
    for e in E.walk(*roots):
        found = E.reads(e)
        if e.op != "read" and e.dtype in _HARMLESS and len(found) == 1 and found[0].attr is source:
            without = E.substitute(e, {found[0]: element})
            if E.variables(without) == (element,):
                sizes[e] = sum(1 for _ in E.walk(without))
    return max(sizes, key=sizes.__getitem__, default=None)


def relayout(kernel: L.Kernel, buffer: Stage, layout: Layout | str) -> L.Kernel:
    """Change how the elements of a temporary lie in memory.

    A layout lists the dimensions of the buffer, slowest first, as pieces of the old ones, called a, b, c, ...: `(b,a)` transposes,
    `(a/8,b,a%8)` cuts the first into blocks of 8 whose inside lies together (a packed panel), `(a,b+0+1)` leaves one element free behind
    each row. What does not divide is padded; what padding holds is not defined. Legal for temporaries (the layout of a parameter is part
    of the kernel's signature), if every element gets exactly one place. Good for reading along the lanes with unit stride, and for a pitch
    that keeps columns out of the same cache set or memory bank.

      >>> A, k = te.placeholder((5, 3), name="A"), te.reduce_axis(5, "k")
      >>> s = Schedule(te.compute((3,), lambda i: te.sum(A[k, i], k), name="C"))
      >>> s.cache_read("A", None, "P")
      'P'
      >>> s.relayout("P", "(a/4,b,a%4)")
      >>> s.stages["P"].shape
      (2, 3, 4)
      >>> print(s.loops["C.i"])
      for C.i in 0..3 {
        for C.k in 0..5 {
          C[C.i] += P[C.k // 4, C.i, C.k % 4]
        }
      }
    """
    old = editing.find_temporary(kernel, buffer, "; its layout is part of the kernel's signature")
    placed = _layout(layout, old.shape)
    editing.check_bounds_no_loops(kernel.body, old)
    return replace_buffer(kernel, old, editing.temporary(old.name, old.dtype, placed.shape(old.shape), old.scope), placed.indices)


def _layout(given: Layout | str | None, shape: Sequence[Dim]) -> Layout:
    """The layout meant by a text, for a buffer of the given shape."""
    if given is None:
        return Layout.identity(len(shape))
    try:
        layout = parse_layout(given, len(shape)) if isinstance(given, str) else given
    except IRError as error:
        raise refuse(f"`{given}` is not a layout of {len(shape)} dimensions: {error.what}", "for example (a/8,b,a%8)") from None
    for axis, extent in enumerate(shape):
        reach: int | None = 1
        for p in sorted((p for p in layout.pieces if p.axis == axis), key=lambda p: (p.div, p.mod is None)):
            if p.div != reach or ((p.before or p.after) and (p.div, p.mod) != (1, None)):  # no halo around a part
                reach = 0
                break
            reach = None if p.mod is None else p.div * p.mod
        letter = "abcdefghijklmnop"[axis]
        why = f"the layout {layout} does not give each of the {extent} elements along `{letter}` one place"
        refuse_if(reach is not None and not prove(as_expr(extent) <= reach), why, f"cut it as {letter}/8 and {letter}%8, say")
    return layout


def set_scope(kernel: L.Kernel, buffer: Stage, scope: str) -> L.Kernel:
    """Where a temporary lives: in memory ("global"), once per block of GPU threads ("shared"), or once per thread ("register").

    Legal for temporaries, in registers for those of constant shape, in shared memory for those allocated outside of the loops over threads.
    Good for what is small and used at once.

      >>> A, k = te.placeholder((5,), name="A"), te.reduce_axis(5, "k")
      >>> s = Schedule(te.compute((), lambda: te.sum(A[k], k), name="C"))
      >>> s.cache_write("C", "acc")
      'acc'
      >>> s.set_scope("acc", "register")
      >>> s.stages["acc"].scope
      'register'
    """
    old = editing.find_temporary(kernel, buffer, ", it is in global memory")
    editing.check_shared_memory(kernel, scope, editing.scope_of(kernel, old))
    return replace_buffer(kernel, old, editing.temporary(old.name, old.dtype, old.shape, scope))


def promote(kernel: L.Kernel, loop: Loop, buffer: Stage, name: str, anew: bool = False) -> tuple[L.Kernel, BufferCopy]:
    """Keep the elements of `buffer` that each iteration of a serial loop accumulates into in registers, the new buffer `name`: they are
    loaded before the loop and stored after it. With `anew` (zero-initialised promotion) the registers start from the identity of the
    reduction, and are accumulated into `buffer` after the loop.

    The copies have the loops and guards that stand around the accumulation inside of `loop`; initialisation has no guards. Returns the
    name of the registers, which knows these loops.

    Legal when the loop has an iteration, all its iterations accumulate into the same elements, by one statement, and it touches them
    in no other way. Good for programs that update a matrix in place: the code generator cannot tell the elements that are accumulated
    into from others of the same buffer that are read, and would store and load them at every step. `anew` sums up in blocks, the loop being
    one of them: rounding errors grow with the length of a block and the number of blocks, not with their product.

    Sources: S. Carr and K. Kennedy, "Scalar replacement in the presence of conditional control flow" (1994); N. Higham, "The accuracy of
    floating point summation" (1993).

      >>> A, k = te.placeholder((9, 4), name="A"), te.reduce_axis(9, "k")
      >>> s = Schedule(te.compute((4,), lambda i: te.sum(A[k, i], k), name="C"))
      >>> s.reorder("C.k", "C.i")
      >>> s.promote("C.k", "C", "acc")
      'acc'
      >>> print(s.kernel.body)
      for C.init.i in 0..4 {
        C[C.init.i] = 0.0f
      }
      alloc acc: float32[4] register
      for acc.0 in 0..4 {
        acc[acc.0] = C[acc.0]
      }
      for C.k in 0..9 {
        for C.i in 0..4 {
          acc[C.i] += A[C.k, C.i]
        }
      }
      for C.0 in 0..4 {
        C[C.0] = acc[C.0]
      }
    """
    target, source = editing.find_loop(kernel, loop), find_buffer(kernel, buffer)
    refuse_if(target.kind != L.SERIAL, f"`{loop}` is {target.kind}", "it is for loops whose iterations follow each other")
    refuse_if(not prove(1 <= as_expr(target.extent)), f"`{loop}` may have no iteration: its extent is {target.extent}")
    refuse_if(editing.is_local(source, target), f"`{buffer}` is another one in every iteration of `{loop}`")
    found = [s for s in L.walk(target) if isinstance(s, L.Accumulate) and s.buffer is source]
    refuse_if(len(found) != 1, f"{len(found) or 'no'} statements in `{loop}` accumulate into `{buffer}`", "it is for exactly one")
    update = found[0]
    around = [s for s in editing.path(target.body, update) if isinstance(s, L.For | L.If)]
    conditions = [s.cond for s in around if isinstance(s, L.If)]
    branches = any(isinstance(s, L.If) and s.otherwise is not None for s in around)
    why = f"which elements of `{buffer}` are accumulated into depends on data, or on a branch"
    refuse_if(branches or E.reads(*update.indices, *conditions), why)
    used = E.variables(*update.indices, *conditions)
    places = [s for s in around if isinstance(s, L.For) and s.var in used]
    moving = target.var in used or any(target.var in E.variables(as_expr(x.extent)) for x in places)
    refuse_if(moving, f"the iterations of `{loop}` accumulate into different elements of `{buffer}`")
    for x in (s for s in around if isinstance(s, L.For)):
        refuse_if(x not in places and not prove(1 <= as_expr(x.extent)), f"`{x.var.name}` may have no iteration: its extent is {x.extent}")
        strange = x in places and (x.kind not in (L.SERIAL, L.UNROLLED, L.VECTORIZED) or not isinstance(x.extent, int))
        refuse_if(strange, f"`{x.var.name}` is {x.kind}, its extent {x.extent}", "registers are for loops of constant extent")
    _check_alone(kernel, target, update, places)

    local = editing.temporary(fresh(kernel, name), source.dtype, [x.extent for x in places], "register")
    cells = tuple(x.var for x in places)

    def copy(prefix: str, move: L.Stmt, guarded: bool = True) -> tuple[L.Stmt, list[str]]:
        for s in reversed(around):
            move = replace(s, body=move) if s in places else L.If(s.cond, move) if isinstance(s, L.If) and guarded else move
        names = {x.var.name: fresh(kernel, f"{prefix}.{n}") for n, x in enumerate(places)}
        return editing.renamed(move, names.__getitem__), list(names.values())

    sums = E.read(local, cells)
    start = update.reducer.identity if anew else E.read(source, update.indices)
    load, loads = copy(local.name, L.Store(local, cells, start), guarded=not anew)
    result = L.Accumulate(source, update.indices, sums, update.reducer) if anew else L.Store(source, update.indices, sums)
    save, saves = copy(source.name, result)
    body = rebuild(target, lambda s: replace(update, buffer=local, indices=cells) if s is update else None)
    changed = editing.replaced(kernel, {target: L.Allocate(local, L.block(load, body, save))})
    return changed, BufferCopy(local.name, loads=loads, stores=saves)


def _check_alone(kernel: L.Kernel, target: L.For, update: L.Accumulate, places: Sequence[L.For]) -> None:
    """Refuses unless each element that a run of the loop accumulates into has one register, and is touched in no other way."""
    m = model(target, kernel.body)
    with editing.proof(f"the uses of `{update.buffer.name}`"):
        for d in dependences(m):
            sides = [a.kind == REDUCE and i.stmt is update for i, a in ((d.source, d.first), (d.target, d.second))]
            bad = same = d.relation
            if all(sides):
                for n in (n for n, x in enumerate(d.source.loops) if x in places):
                    same = same.equate(isl.dim_type.in_, n, isl.dim_type.out, n)
                bad = bad.subtract(same)
            refuse_conflict(f"uses of what `{target.var.name}` accumulates into", conflict_of(m, d, bad) if any(sides) else None)


def expand(kernel: L.Kernel, buffer: Stage, dim: int, factor: int) -> L.Kernel:
    """Dimension `dim` of a buffer becomes two: element [.., i, ..] is [.., i // factor, i % factor, ..] of the same memory.

    Legal when the extent is certainly a multiple of `factor`, for parameters as well. Good for indices that are quotients: after splitting
    the loops, the channels of a grouped convolution are two plain loops.

    >>> A = te.placeholder((3,), name="A")
    >>> s = Schedule(te.compute((12,), lambda i: A[i // 4], name="B"))
    >>> s.expand("B", 0, 4)
    >>> s.split("B.i", 4)
    ('B.i.o', 'B.i.i')
    >>> print(s)
    kernel B(A: float32[3], B: float32[3, 4]) -> (B) {
      for B.i.o in 0..3 {
        for B.i.i in 0..4 {
          B[B.i.o, B.i.i] = A[B.i.o]
        }
      }
    }
    """
    old = find_buffer(kernel, buffer)
    refuse_if(not 0 <= dim < len(old.shape), f"`{buffer}` has {len(old.shape)} dimensions, none is number {dim}")
    extent = old.shape[dim]
    if factor < 1 or known_factor(extent) % factor:
        raise refuse(f"{factor} is not a divisor of the extent {extent} of dimension {dim} of `{buffer}`")
    quotient = as_dim(simplify(as_expr(extent) // factor))
    new = L.Buffer(old.name, old.dtype, (*old.shape[:dim], quotient, factor, *old.shape[dim + 1 :]), old.scope)
    return replace_buffer(kernel, old, new, lambda at: (*at[:dim], at[dim] // factor, at[dim] % factor, *at[dim + 1 :]))
