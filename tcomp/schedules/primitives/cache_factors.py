"""Copies of the factors of a sum of products, element by element of what is summed rather than of the buffers that are read."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir.access import digit
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.expr import INDEX, Expr
from tcomp.ir.simplify import linear, prove, simplify
from tcomp.schedules.analysis.access_patterns import Nest, nest_of
from tcomp.schedules.handles import BufferCopy, Loop
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import fresh, refuse, refuse_if
from tcomp.schedules.primitives.guards import always_in_range, guarded_reads


def cache_factors(kernel: L.Kernel, loop: Loop, left: str, right: str, scope: str = "global") -> tuple[L.Kernel, BufferCopy, BufferCopy]:
    """Copy the factors of the products that a loop's body sums into new buffers first, and multiply these.

    A buffer has one dimension for each loop inside that its factor depends on, in their order, and one nest that fills it, with the loops
    `left.0`, `left.1`, ... (the names returned know them). Conditions of the sum go to the copies: an element whose product is not summed
    is zero. What widens a factor for the product (a conversion to a type that holds all its values, a cut to tf32) is left to the product,
    so that copies are small.

    Legal where the body is one sum of products over loops of constant extent, and each of its conditions depends on what both factors
    depend on, or holds for a whole element of the sum, which nobody may use where it does not hold. A sum that is a negative zero may
    become a positive one. Good for products whose operands are used many times: the copies are read without conditions and without the
    index arithmetic of the operands (a convolution becomes a product of matrices, made tile by tile). `cache_read` copies a box of a
    buffer instead, in which elements lie as they do there.

      >>> A, B, k = te.placeholder((9,), name="A"), te.placeholder((3,), name="B"), te.reduce_axis(3, "k")
      >>> s = Schedule(te.compute((7,), lambda i: te.sum(A[i + k] * B[k], k), name="C"))
      >>> outer, inner = s.split("C.k", 2)
      >>> s.reorder(outer, "C.i", inner, reassociate=True)
      >>> s.cache_factors(outer, "a", "b")
      ('a', 'b')
      >>> print(s.loops[outer])
      for C.k.o in 0..2 {
        alloc a: float32[7, 2]
        alloc b: float32[2]
        for a.0 in 0..7 {
          for a.1 in 0..2 {
            a[a.0, a.1] = select(C.k.o * 2 + a.1 < 3, A[C.k.o * 2 + a.0 + a.1], 0.0f)
          }
        }
        for b.0 in 0..2 {
          b[b.0] = select(C.k.o * 2 + b.0 < 3, B[C.k.o * 2 + b.0], 0.0f)
        }
        for C.i in 0..7 {
          for C.k.i in 0..2 {
            C[C.i] += a[C.i, C.k.i] * b[C.k.i]
          }
        }
      }
    """
    target = editing.find_loop(kernel, loop)
    editing.check_shared_memory(kernel, scope, target)
    found = nest_of(target.body)
    update = found.leaf if found is not None else None
    product, masks = product_of(update) if isinstance(update, L.Accumulate) else (None, [])
    if found is None or product is None or not isinstance(update, L.Accumulate):
        raise refuse(f"the body of `{loop}` is not one sum of products")
    for x in found.loops:
        if x.kind not in (L.SERIAL, L.UNROLLED) or not isinstance(x.extent, int):
            raise refuse(f"loop `{x.var.name}` is {x.kind} and runs {x.extent} times", "shape the loops afterwards")
    factors = [core_of(x) for x in product.args]
    conditions = [*found.conditions, *(c for mask in masks for c in E.conjuncts(mask))]
    own = any(r.attr is update.buffer for r in E.reads(*factors, *conditions))
    refuse_if(own, f"a factor, or a condition of the sum, is read from `{update.buffer.name}`")
    used = [[x for x in found.loops if x.var in E.variables(f)] for f in factors]
    tested_by = {c: _factors_that_test(kernel, found, c, used) for c in conditions}
    given = [[c for c in conditions if n in tested_by[c]] for n in range(2)]
    for core, known in zip(factors, given, strict=True):
        for c in (c for c in conditions if c not in known):
            refuse_if(not _protects_nothing(c, core, found.loops), f"`{core}` may be out of range where {c} does not hold")
    place = E.read(update.buffer, update.indices)
    refuse_if(not always_in_range(update), f"`{place}` may be out of range where nothing is summed")
    names = [fresh(kernel, left), fresh(kernel, right)]
    refuse_if(names[0] == names[1], "the copies need different names")
    buffers, nests, copies, staged = [], list[L.Stmt](), [], []
    for name, whole, core, loops, known in zip(names, product.args, factors, used, given, strict=True):
        buffers.append(local := editing.temporary(name, core.dtype, [x.extent for x in loops], scope))
        nest, loads = _copy(kernel, local, core, loops, known)
        nests.append(nest)
        copies.append(BufferCopy(name, loads=loads))
        staged.append(E.substitute(whole, {core: E.read(local, [x.var for x in loops])}))
    total = editing.enclose(found.loops, L.Accumulate(update.buffer, update.indices, E.binary("mul", *staged), update.reducer))
    new = L.For(target.var, target.extent, editing.allocated(buffers, L.block(*nests, total)), target.kind)
    return editing.nesting(editing.replaced(kernel, {target: new})), copies[0], copies[1]


def _copy(kernel: L.Kernel, buffer: L.Buffer, factor: Expr, loops: Sequence[L.For], known: Sequence[Expr]) -> tuple[L.Stmt, list[str]]:
    """The nest that fills a buffer with a factor, an element for each iteration of the loops, zeros where a condition does not hold; and
    the names of its loops."""
    zero, conditions = E.const(0, factor.dtype), list(known)
    while factor.op == "select" and factor.args[2] is zero:  # a padded operand
        conditions += E.conjuncts(factor.args[0])
        factor = factor.args[1]
    element, variables = E.select_where(conditions, factor, zero), [x.var for x in loops]

    def store(at: tuple[Expr, ...]) -> L.Stmt:
        return L.Store(buffer, at, simplify(E.substitute(element, dict(zip(variables, at, strict=True)))))

    return editing.nest_over(kernel, buffer.name, buffer.shape, store)


def product_of(update: L.Accumulate) -> tuple[Expr | None, list[Expr]]:
    """The product that is summed, and the conditions under which it is; None for any other accumulation."""
    r, value, conditions = update.reducer, update.value, list[Expr]()
    while value.op == "select" and value.args[2] is r.identity:
        conditions.append(value.args[0])
        value = value.args[1]
    adds = r.combine.op == "add" and set(r.combine.args) == {r.lhs, r.rhs} and r.identity.op == "const" and r.identity.attr == 0
    return (value if adds and value.op == "mul" else None), conditions


def core_of(factor: Expr) -> Expr:
    """A factor without the conversions that make it fit the product: they keep zero zero, and copies of what they convert are smaller."""
    while factor.args:
        x = factor.args[0]
        widens = factor.op == "cast" and itemsize(x.dtype) <= itemsize(factor.dtype) and is_float(x.dtype) <= is_float(factor.dtype)
        cut = factor.op == "bitcast" or (factor.op == "and" and factor.args[1].op == "const")
        if not (widens and x.dtype != "bool") and not cut:
            break
        factor = x
    return factor


def _factors_that_test(kernel: L.Kernel, found: Nest, condition: Expr, used: Sequence[Sequence[L.For]]) -> list[int]:
    """The factors whose copies are zero where a condition of the sum does not hold."""
    refuse_if(E.reads(condition), f"whether something is summed depends on data: {condition}")
    moving = [x for x in found.loops if x.var in E.variables(condition)]
    holders = [n for n, loops in enumerate(used) if set(moving) <= set(loops)]
    if len(holders) == 2 or (holders and _unused_otherwise(kernel, found.leaf, condition, moving)):
        return holders
    why = f"where {condition} does not hold, a factor would have to be zero, and the other one finite"
    raise refuse(why, "make the sum's own conditions those of both factors")


def _unused_otherwise(kernel: L.Kernel, update: L.Stmt, condition: Expr, moving: Sequence[L.For]) -> bool:
    """Whether a condition holds for all iterations of an element of the sum or for none, and nobody reads it in the latter case."""
    assert isinstance(update, L.Accumulate)
    if not editing.is_local(update.buffer, kernel.body) or any(x.var not in update.indices for x in moving):
        return False
    number = {x.var: update.indices.index(x.var) for x in moving}
    tests = ((E.substitute(condition, {v: r.args[d] for v, d in number.items()}), known) for r, known in guarded_reads(kernel.body, update))
    return all(simplify(needed) in known or prove(needed) for needed, known in tests)


def _protects_nothing(condition: Expr, factor: Expr, inside: Sequence[L.For]) -> bool:
    """Whether a condition says nothing about where a factor is read: they depend on nothing in common but on digits of their own of the
    number of an iteration (of loops that were fused)."""
    moving = {x.var for x in inside}
    indices = [i for r in E.reads(factor) for i in r.args]
    if not moving.isdisjoint(set(E.variables(condition)) & set(E.variables(*indices))):
        return False
    tested, read = ([a for i in several if i.dtype == INDEX for m in linear(i) for a in m] for several in (condition.args, indices))
    return not any(_overlap(a, b) for a in tested for b in read if not moving >= {*E.variables(a, b)})


def _overlap(a: Expr, b: Expr) -> bool:
    if {v for v in E.variables(a) if v.attr.extent is not None}.isdisjoint(E.variables(b)):  # sizes are the same for all iterations
        return False
    one, other = digit(a), digit(b)
    return one.whole is not other.whole or not (_up_to(one.high, other.low) or _up_to(other.high, one.low))


def _up_to(high: Expr | None, low: Expr) -> bool:
    return high is not None and (prove(high <= low) or prove(E.equal(low % high, 0)))
