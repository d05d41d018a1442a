"""The shape of loop nests (split, reorder, fuse, partition), and how iterations run: in order, in lanes, unrolled, on threads, on a
GPU, or all by one instruction."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from tcomp.errors import IRError, ScheduleError
from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import within
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, loop_var
from tcomp.ir.instruction import Instruction, match
from tcomp.ir.simplify import as_dim, prove, quotient, same_dim, simplify
from tcomp.ir.text.expression_parser import parse_expr
from tcomp.schedules.analysis.legality import disorder, race
from tcomp.schedules.handles import Loop, LoopCopy, Size
from tcomp.schedules.instructions import named
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import find_loop, fresh, guard, nesting, rebind, refuse, refuse_conflict, refuse_if, replaced
from tcomp.schedules.primitives.guards import masked

TAILS = ("guard", "mask", "peel", "shift_inwards", "round_up")
MAX_COPIES = 1 << 12  # of the body of one vectorized or unrolled loop: longer code is slow to compile, and exceeds instruction caches


def split(kernel: L.Kernel, loop: Loop, factor: int, tail: str = "guard") -> tuple[L.Kernel, *tuple[str, ...]]:
    """A loop of n iterations becomes a loop over tiles around a loop of `factor` iterations: `i` becomes `i.o` and `i.i`.

    Always legal for full tiles; `tail` says what happens to the iterations that do not fill a tile, if there are any:

    guard          An `If` around the body. Always legal, for extents that depend on sizes or outer loops too. Costs a test in each
                   iteration; lanes of a vector are masked by it.
    mask           Every statement of the body gets a guard of its own; an accumulation whose place is in range anyway adds the identity
                   instead. Always legal. A reduction splits into lanes without masked stores, and statements and loops in the body can be
                   moved separately. Costs operations that do nothing.
    peel           The last n % factor iterations become a loop of their own, `i.t` (loops inside get `.t` as well). Always legal. No
                   tests in full tiles; costs code, and leaves two nests where there was one.
    shift_inwards  The last tile starts at n - factor, overlapping the one before. Legal where n >= factor can be proved and iterations
                   may be executed twice: they accumulate into nothing and read nothing that they write. All tiles are full, which suits
                   vectors; costs repeated work, and tiles can no longer be run in parallel.
    round_up       The loop runs up to the next multiple of factor, and temporaries that it walks along get padding. Legal where the
                   additional iterations write nothing but padding and read in range; split the loops that write a temporary before
                   those that read it. No tests and no second nest; costs memory, and results that nobody uses.

    Good for tiles that fit in a cache or in registers, for lanes of vectors, and for a number of tasks that fits the machine. Returns
    the names of the two loops, and with `peel` of the third, which knows the `copies` of the loops inside.

    >>> A = te.placeholder((10,), name="A")
    >>> B = te.compute((10,), lambda i: A[i] * 2, name="B")
    >>> s = Schedule(B)
    >>> s.split("B.i", 4)
    ('B.i.o', 'B.i.i')
    >>> print(s.kernel.body)
    for B.i.o in 0..3 {
      for B.i.i in 0..4 {
        if B.i.i + B.i.o * 4 < 10 {
          B[B.i.i + B.i.o * 4] = A[B.i.i + B.i.o * 4] * 2.0f
        }
      }
    }
    >>> s = Schedule(B)
    >>> s.split("B.i", 4, "peel")
    ('B.i.o', 'B.i.i', 'B.i.t')
    >>> print(s.kernel.body)
    for B.i.o in 0..2 {
      for B.i.i in 0..4 {
        B[B.i.i + B.i.o * 4] = A[B.i.i + B.i.o * 4] * 2.0f
      }
    }
    for B.i.t in 0..2 {
      B[B.i.t + 8] = A[B.i.t + 8] * 2.0f
    }
    """
    target = find_loop(kernel, loop)
    editing.check_factor(factor)
    refuse_if(tail not in TAILS, f"unknown tail `{tail}`; one of {', '.join(TAILS)}")
    _check_extents_fixed(target)
    extent = as_expr(target.extent)
    outer_extent = as_dim((extent + (factor - 1)) // factor)
    rest: list[str] = []
    if tail == "peel":
        outer_extent = as_dim(_size(kernel, extent) // factor)
        kernel, _, *rest = _parted(kernel, target, as_dim(as_expr(outer_extent) * factor))
        target = find_loop(kernel, loop)
    outer = loop_var(fresh(kernel, f"{target.var.name}.o"), outer_extent)
    inner = loop_var(fresh(kernel, f"{target.var.name}.i"), factor)
    index = outer * factor + inner
    if tail == "peel" or prove(index < extent):
        tail = "none"  # all tiles are full
    if tail == "shift_inwards":
        why = f"cannot prove that `{loop}` has the {factor} iterations of one tile; its extent is {extent}"
        refuse_if(not prove(extent >= factor), why)
        _check_repeatable(target)
        index = E.minimum(outer * factor, extent - factor) + inner
    if tail == "round_up":
        moving = not set(E.variables(extent)) <= set(kernel.scalars)
        refuse_if(moving, f"the extent of `{loop}` depends on a loop: {extent}", "`round_up` pads buffers, whose sizes are fixed")
        kernel = _padded(kernel, target, as_expr(outer_extent) * factor)
        target = find_loop(kernel, loop)
    body = rebind(target.body, {target.var: index})
    if tail == "guard":
        body = guard([index < extent], body)
    if tail == "mask":
        body = masked(kernel, [simplify(index < extent)], body)
    new = L.For(outer, outer_extent, L.For(inner, factor, body), target.kind)
    if tail == "round_up":
        _check_in_range(new, outer, inner)
    return replaced(kernel, {target: new}), *(outer.name, inner.name, *rest)


def _check_repeatable(loop: L.For) -> None:
    """Refuse unless iterations of the loop may be executed twice: the last ones again, in order, after all of them."""
    start, hint = f"iterations of `{loop.var.name}`", "the tails guard, mask and peel execute each iteration once"
    read = editing.reads([loop.body])
    for s in (s for s in editing.stores(loop.body) if not editing.is_local(s.buffer, loop.body)):
        refuse_if(isinstance(s, L.Accumulate), f"{start} accumulate into `{s.buffer.name}`: one executed twice would count twice", hint)
        refuse_if(s.buffer in read, f"{start} read `{s.buffer.name}`, which they write: executed twice, one may find what it wrote", hint)


def _padded(kernel: L.Kernel, loop: L.For, end: Expr) -> L.Kernel:
    """The kernel with temporaries large enough for the loop to run up to `end`; refuses where that could write more than padding."""
    name, inside = loop.var.name, list(L.walk(loop.body))
    endless = any(isinstance(s, L.While) for s in inside)
    refuse_if(endless, f"there is a while loop inside `{name}`, which may not end in additional iterations")
    local = {s.buffer for s in inside if isinstance(s, L.Allocate)}
    outside = {s.buffer for s in L.walk(kernel.body) if isinstance(s, L.Allocate)} - local
    read = [(s, r) for s in L.walk(kernel.body) for r in E.reads(*L.expressions(s))]

    def only_padding(b: L.Buffer, d: int) -> bool:
        """Whether only additional iterations read elements at and beyond the extent of the loop along a dimension, if there are any yet."""
        reading = [(s, r.args[d]) for s, r in read if r.attr is b]
        below = as_expr(loop.extent)
        return same_dim(b.shape[d], below) or all(prove(i < below) or (i is loop.var and s in inside) for s, i in reading)

    for s in (s for s in editing.stores(loop.body) if s.buffer not in local):
        why = f"additional iterations of `{name}` would write beyond the end of the parameter `{s.buffer.name}`"
        refuse_if(s.buffer not in outside, why, "compute it into a temporary first, with cache_write")
        why = f"additional iterations of `{name}` may write elements of `{s.buffer.name}` that are read"
        padding = any(i is loop.var and only_padding(s.buffer, d) for d, i in enumerate(s.indices))
        refuse_if(not padding, why, "`round_up` the loops that write a temporary before those that read it")
    places = [place for s in inside for place in L.places(s) if place[0] in outside]
    walked = dict.fromkeys((b, d) for b, indices in places for d, i in enumerate(indices) if i is loop.var)  # by dimension
    for b in dict.fromkeys(b for b, _ in walked):
        shape = [as_dim(E.maximum(as_expr(n), end)) if (b, d) in walked else n for d, n in enumerate(b.shape)]
        kernel = editing.replace_buffer(kernel, b, editing.temporary(b.name, b.dtype, shape, b.scope))
    return kernel


def _check_in_range(loop: L.For, *variables: Expr) -> None:
    """Refuse unless all places inside a loop that depend on the variables are in range whatever their values, and whatever guards say."""
    affected = set(variables)
    for s in L.walk(loop):
        if isinstance(s, L.For) and not affected.isdisjoint(E.variables(as_expr(s.extent))):
            affected.add(s.var)
        for b, indices in L.places(s):
            for i, n in zip(indices, b.shape, strict=True):
                if not affected.isdisjoint(E.variables(i)) and not within(i, n):
                    why = f"cannot prove that `{E.read(b, indices)}` is in range in additional iterations of `{loop.var.name}`"
                    raise refuse(why, "the other tails (guard, mask, peel, shift_inwards) have none")


def reorder(kernel: L.Kernel, *order: Loop, reassociate: bool = False) -> L.Kernel:
    """Loops directly inside each other take the given order; loops of the nest that are not named keep their places.

    Legal when iterations that touch one element, at least one of them writing, stay in order (with `reassociate`, accumulations into one
    element may change theirs, and so the rounding of floats), and no extent depends on a loop that would stand inside. Good for choosing
    what the innermost loops run along: neighbouring elements for vectors, elements that are used again for caches.

    >>> A, k = te.placeholder((8, 4), name="A"), te.reduce_axis(8, "k")
    >>> s = Schedule(te.compute((4,), lambda i: te.sum(A[k, i], k), "B"))
    >>> s.reorder("B.k", "B.i")
    >>> print(s.loops["B.k"])
    for B.k in 0..8 {
      for B.i in 0..4 {
        B[B.i] += A[B.k, B.i]
      }
    }
    """
    refuse_if(len(set(order)) != len(order) or not order, f"the order ({', '.join(map(str, order))}) should name some loops, each once")
    wanted = [find_loop(kernel, name) for name in order]
    top = next(s for s in L.walk(kernel.body) if s in wanted)
    loops, leaf = L.perfect(top)
    missing = [w.var.name for w in wanted if w not in loops]
    refuse_if(missing, f"{', '.join(missing)} is not in one perfect nest with {top.var.name}")
    _check_extents_fixed(*loops)
    places = iter(wanted)
    arranged = [next(places) if x in wanted else x for x in loops]
    for n, x in enumerate(arranged):
        inside = {later.var for later in arranged[n:]} & set(E.variables(as_expr(x.extent)))
        refuse_if(inside, f"the extent of {x.var.name} depends on a loop that would stand inside it")
    if moved := [new.var.name for old, new in zip(loops, arranged, strict=True) if old is not new]:
        refuse_conflict(f"iterations of {', '.join(moved)}", disorder(loops, arranged, reassociate, kernel.body))
    return nesting(replaced(kernel, {top: editing.enclose(arranged, leaf)}))


def fuse(kernel: L.Kernel, outer: Loop, inner: Loop) -> tuple[L.Kernel, str]:
    """Two loops directly inside each other become one, over i * n + j. Returns its name.

    Legal for loops of one kind if the extent n of the inner one does not depend on the outer one. Good for enough iterations to divide
    among threads, and for long vectors over short rows.

    >>> A = te.placeholder((4, 6), name="A")
    >>> s = Schedule(te.compute((4, 6), lambda i, j: A[i, j] * 2, name="B"))
    >>> s.fuse("B.i", "B.j")
    'B.i_j'
    >>> print(s.kernel.body)
    for B.i_j in 0..24 {
      B[B.i_j // 6, B.i_j % 6] = A[B.i_j // 6, B.i_j % 6] * 2.0f
    }
    """
    first = find_loop(kernel, outer)
    second = first.body
    if not isinstance(second, L.For) or second is not find_loop(kernel, inner):
        raise refuse(f"`{inner}` does not stand directly inside `{outer}`")
    refuse_if(first.kind != second.kind, f"`{outer}` is {first.kind}, `{inner}` is {second.kind}")
    refuse_if(first.var in E.variables(as_expr(second.extent)), f"the extent of `{inner}` depends on `{outer}`")
    _check_extents_fixed(first, second)
    rows, columns = _size(kernel, first.extent), _size(kernel, second.extent)
    extent = as_dim(rows * columns)
    v = loop_var(fresh(kernel, f"{first.var.name}_{editing.last_part(second.var.name)}"), extent)
    body = rebind(second.body, {first.var: v // columns, second.var: v % columns})
    return replaced(kernel, {first: L.For(v, extent, body, first.kind)}), v.name


def partition(kernel: L.Kernel, loop: Loop, point: Size) -> tuple[L.Kernel, str, LoopCopy]:
    """The first `point` iterations and the rest become two loops, each simplified for its range: `i` and `i.t` (tail).

    Legal where 0 <= point <= extent can be proved (a size is >= 0; of max(a, 0), that a <= extent); the point may depend on sizes and on
    loops around. Good for guards, which vanish where they always hold: borders and tails are separated from the many iterations in the
    middle. Returns the names of the two loops; the second knows the `copies` of the loops inside (they get `.t` as well).

    >>> A = te.placeholder((8,), name="A")
    >>> s = Schedule(te.compute((10,), lambda i: te.select(i < 8, A[i], 0.0), name="B"))
    >>> s.partition("B.i", 8)
    ('B.i', 'B.i.t')
    >>> print(s.kernel.body)
    for B.i in 0..8 {
      B[B.i] = A[B.i]
    }
    for B.i.t in 0..2 {
      B[B.i.t + 8] = 0.0f
    }
    """
    target = find_loop(kernel, loop)
    if isinstance(point, str):
        point = _parsed_size(kernel, loop, point)
    _check_extents_fixed(target)
    around = {x.var for x in editing.enclosing(kernel, target)}
    for v in E.variables(as_expr(point)):
        refuse_if(v not in around and v not in kernel.scalars, f"`{v.name}` is neither a size nor a loop around `{loop}`")
    inside = _size(kernel, point) is as_expr(point) and _at_most(_positive(as_expr(point)), as_expr(target.extent))
    refuse_if(not inside, f"cannot prove that {point} lies between 0 and the extent of `{loop}`, {target.extent}")
    return _parted(kernel, target, point)


def _parsed_size(kernel: L.Kernel, loop: Loop, text: str) -> Dim:
    """The size that a text means, over the kernel's sizes and loops."""
    names = {**{name: x.var for name, x in editing.loops_of(kernel).items()}, **{v.name: v for v in kernel.scalars}}
    try:
        size = parse_expr(text, names)
        if size.dtype != INDEX:
            raise IRError(f"it is of type {size.dtype}")
        return as_dim(size)
    except IRError as error:
        known = f"it may use {', '.join(v.name for v in kernel.scalars)}" if kernel.scalars else "all sizes of this kernel are integers"
        where = f"partition of `{loop}` in kernel `{kernel.name}`"
        raise ScheduleError(f"`{text}` is not a size", where=where, why=error.what, hint=known) from None


def _parted(kernel: L.Kernel, target: L.For, point: Dim) -> tuple[L.Kernel, str, LoopCopy]:
    """A loop in two: the first `point` iterations, and the others."""
    loop, rest = target.var.name, as_dim(as_expr(target.extent) - as_expr(point))
    head_var, tail_var = loop_var(loop, point), loop_var(fresh(kernel, loop + ".t"), rest)
    head = L.For(head_var, as_dim(point), rebind(target.body, {target.var: head_var}), target.kind)
    copy, names = editing.rename_inner(kernel, target.body, ".t")
    tail = L.For(tail_var, rest, rebind(copy, {target.var: tail_var + as_expr(point)}), target.kind)
    return replaced(kernel, {target: L.block(head, tail)}), loop, LoopCopy(tail_var.name, copies=names)


def _check_extents_fixed(*loops: L.For) -> None:
    """Refuse if a loop changes its own extent, which is computed once, before the first iteration."""
    for x, r in ((loop, r) for loop in loops for r in E.reads(as_expr(loop.extent))):
        refuse_if(editing.writes(x.body, r.attr), f"the extent of `{x.var.name}` reads `{r.attr.name}`, which is written inside the loop")


def _size(kernel: L.Kernel, extent: Dim) -> Expr:
    """The number of iterations: the extent, or 0 where it may be negative."""
    dims = [as_expr(d) for b in editing.buffers_of(kernel).values() for d in b.shape]  # no buffer has a negative size

    def counts(e: Expr) -> bool:
        if e.op == "floordiv" and e.args[1].op == "const" and e.args[1].attr > 0:
            return counts(e.args[0])
        return prove(e >= 0) or (e.op == "mul" and all(map(counts, e.args))) or any(prove(e >= d) for d in dims)

    e = as_expr(extent)
    return e if counts(e) else simplify(E.maximum(e, 0))


def _positive(point: Expr) -> Expr:
    """What a point is unless it is 0: of max(a, 0), a. Where the extent of a loop is negative, it has as few iterations as one of 0."""
    return next((a for a, b in (point.args, point.args[::-1]) if b is as_expr(0)), point) if point.op == "max" else point


def _at_most(a: Expr, b: Expr) -> bool:
    """Whether a <= b can be proved. x // (c * d) <= y // d follows from x // c <= y, x // d <= y // (c * d) from x <= y // c."""
    if prove(a <= b):
        return True
    (x, m), (y, d) = quotient(a), quotient(b)
    common = gcd(m, d)
    return common > 1 and _at_most(simplify(x // (m // common)), simplify(y // (d // common)))


def set_kind(kernel: L.Kernel, loop: Loop, kind: str, reassociate: bool = False) -> L.Kernel:
    """How the iterations of a loop run: serial, parallel, vectorized, unrolled, or bound to an axis of a GPU (block.x ... thread.z).

    Legal for parallel, vectorized and bound loops when no iteration writes what another one touches; vectorized and unrolled need a
    constant extent of at most 4096. With `reassociate`, a loop that accumulates into one element may be vectorized, or bound to thread.x:
    the lanes (threads) are then reduced as a binary tree. Shorthands: `s.parallel(loop)`, `s.vectorize(loop)`, `s.unroll(loop)`,
    `s.bind(loop, axis)`. Good for threads on outer loops, lanes on inner loops along neighbouring elements, copies of short inner loops.

    >>> A = te.placeholder((4, 8), name="A")
    >>> s = Schedule(te.compute((4, 8), lambda i, j: A[i, j] * 2, name="B"))
    >>> s.set_kind("B.i", "parallel")
    >>> s.vectorize("B.j")
    >>> print(s.kernel.body)
    parallel B.i in 0..4 {
      vectorized B.j in 0..8 {
        B[B.i, B.j] = A[B.i, B.j] * 2.0f
      }
    }
    """
    target = find_loop(kernel, loop)
    refuse_if(kind not in L.KINDS, f"unknown loop kind; one of {', '.join(L.KINDS)}")
    if kind in (L.VECTORIZED, L.UNROLLED):
        if not isinstance(target.extent, int):
            raise refuse(f"the extent of `{loop}` is symbolic: {target.extent}", "split it by a constant first")
        refuse_if(target.extent > MAX_COPIES, f"`{loop}` has {target.extent} iterations: the code would be too long", "split it first")
    if kind not in (L.SERIAL, L.UNROLLED):
        refuse_conflict(f"iterations of `{loop}`", race(target, reassociate and kind in (L.VECTORIZED, "thread.x"), kernel.body))
    return nesting(replaced(kernel, {target: replace(target, kind=kind)}))


def distribute(kernel: L.Kernel, loop: Loop, factor: int, outer: str, inner: str, strided: bool = False) -> tuple[L.Kernel, str, str]:
    """Split a loop for a GPU: `i.o` of kind `outer` around `i.i` of `factor` iterations of kind `inner`, guarded. Returns their names.

    The kinds are serial or GPU axes. With `strided` the loops change places: thread number i.i takes every factor-th iteration, so that
    neighbouring threads touch neighbouring elements. Legal when no iteration writes what another one touches. Good for one loop over
    all threads of a grid, or over those of a block.

    >>> A = te.placeholder((1000,), name="A")
    >>> s = Schedule(te.compute((1000,), lambda i: A[i] * 2, name="B"))
    >>> s.distribute("B.i", 256, "block.x", "thread.x")
    ('B.i.o', 'B.i.i')
    >>> print(s.kernel.body)
    block.x B.i.o in 0..4 {
      thread.x B.i.i in 0..256 {
        if B.i.i + B.i.o * 256 < 1000 {
          B[B.i.i + B.i.o * 256] = A[B.i.i + B.i.o * 256] * 2.0f
        }
      }
    }
    """
    target = find_loop(kernel, loop)
    for kind in (outer, inner):
        refuse_if(kind not in (L.SERIAL, *L.GPU_AXES), f"`{kind}` is not an axis of a GPU")
    refuse_conflict(f"iterations of `{loop}`", race(target, within=kernel.body))
    kernel, *(outer_name, inner_name) = split(kernel, loop, factor)
    first, second = find_loop(kernel, outer_name), find_loop(kernel, inner_name)
    a, b = replace(first, kind=outer), replace(second, kind=inner)
    return nesting(replaced(kernel, {first: editing.enclose([b, a] if strided else [a, b], second.body)})), outer_name, inner_name


def tensorize(kernel: L.Kernel, loop: Loop, instruction: Instruction | str, reassociate: bool = False) -> L.Kernel:
    """Execute a loop, and all that stands inside of it, by one machine instruction (see `tcomp.schedules.instructions`).

    Legal when the loops are the meaning of the instruction, up to their order: each moves the operands by the strides, and as often, as a
    loop of the meaning; dtypes, conversions and the reducer are the same; nothing else stands inside. An instruction that adds floats in
    an order of its own needs `reassociate`. Whether the target has the instruction is checked when code is generated. Good for the
    innermost tile: multiply-add on whole register tiles, dot products of bytes, tensor cores.

      >>> from tcomp.schedules.instructions import fma_tile
      >>> A, B, k = te.placeholder((2, 8), name="A"), te.placeholder((8, 32), name="B"), te.reduce_axis(8, "k")
      >>> s = Schedule(te.compute((2, 32), lambda i, j: te.sum(A[i, k] * B[k, j], k), name="C"))
      >>> s.reorder("C.k", "C.i", "C.j")
      >>> outer, inner = s.split("C.k", 4)
      >>> s.tensorize(inner, fma_tile(2, 2, 4))
      >>> print(s.loops[outer])
      for C.k.o in 0..2 {
        call `fma_tile(2, 2, 4, avx512, float32)` {
          for C.k.i in 0..4 {
            for C.i in 0..2 {
              for C.j in 0..32 {
                C[C.i, C.j] += A[C.i, C.k.i + C.k.o * 4] * B[C.k.i + C.k.o * 4, C.j]
              }
            }
          }
        }
      }
    """
    target = find_loop(kernel, loop)
    refuse_if(any(isinstance(s, L.Call) for s in editing.path(kernel.body, target)), f"loop `{loop}` is executed by an instruction already")
    try:
        wanted = instruction if isinstance(instruction, Instruction) else named(instruction)
        match(wanted, target)
    except IRError as error:
        raise refuse(f"{error.why or error.what}\n{error.where}") from None
    if wanted.reassociates and not reassociate:
        raise refuse(f"`{wanted.name}` adds floats in an order of its own", "allow it by tensorize(..., reassociate=True)")
    return replaced(kernel, {target: L.Call(wanted, target)})


def check_calls(kernel: L.Kernel) -> None:
    """Refuses a kernel in which an instruction would no longer execute what it means."""
    for s in L.walk(kernel.body):
        if isinstance(s, L.Call):
            try:
                match(s.instruction, s.body)
            except IRError as error:
                raise refuse(f"it would change what `{s.instruction.name}` executes: {error.why}") from None
