"""Copies of the factors of a sum of products, element by element of what is summed rather than of the buffers that are read."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.ir import expr as E
from tcomp.ir.access import digit
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.expr import INDEX, Expr, loop_var
from tcomp.ir.loops import SERIAL, UNROLLED, Accumulate, Allocate, Buffer, For, If, Kernel, Stmt, Store, block, children, expressions, walk
from tcomp.ir.simplify import linear, prove, simplify
from tcomp.schedules.handles import BufferCopy
from tcomp.schedules.primitives.editing import find_loop, fresh, nesting, refuse, replace_loop, temporary
from tcomp.schedules.primitives.insertion_points import Chain, chain_of, check_shared_memory
from tcomp.schedules.primitives.tail_strategies import always_in_range


def cache_factors(kernel: Kernel, loop: str, left: str, right: str, scope: str = "global") -> tuple[Kernel, BufferCopy, BufferCopy]:
    """Copy the factors of the products that a loop's body sums into new buffers first, and multiply these.

    A buffer has one dimension for each loop inside that its factor depends on, in their order, and one nest that fills it, with the loops
    `left.0`, `left.1`, ... (the names returned know them). Conditions of the sum go to the copies: an element whose product is not summed is zero. What widens a factor
    for the product (a conversion to a type that holds all its values, a cut to tf32) is left to the product, so that copies are small.

    Legal where the body is one sum of products over loops of constant extent, and each of its conditions depends on what both factors
    depend on, or holds for a whole element of the sum: then nobody may use the elements for which it does not hold. A sum that is a
    negative zero may become a positive one.

    Good for products whose operands are used many times: the copies are read without conditions and without the index arithmetic of the
    operands, whatever that is (a convolution becomes a product of matrices, which are made tile by tile). `cache_read` copies a box of a
    buffer instead, in which elements lie as they do there.

      >>> from tcomp import te
      >>> from tcomp.schedules import Schedule
      >>> A, B, k = te.placeholder((9,), name="A"), te.placeholder((3,), name="B"), te.reduce_axis(3, "k")
      >>> s = Schedule(te.compute((7,), lambda i: te.sum(A[i + k] * B[k], k), name="C"))
      >>> outer, inner = s.split("C.k", 2)
      >>> s.reorder(outer, "C.i", inner, reassociate=True)
      >>> s.cache_factors(outer, "a", "b")
      ('a', 'b')
      >>> print(s)
      kernel C(A: float32[9], B: float32[3], C: float32[7]) -> (C) {
        for C.init.i in 0..7 {
          C[C.init.i] = 0.0f
        }
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
      }
    """
    step = "cache_factors"
    target = find_loop(kernel, loop, step)
    check_shared_memory(kernel, step, scope, target)
    found = chain_of(target.body)
    update = found.write if found is not None else None
    product, masks = product_of(update) if isinstance(update, Accumulate) else (None, [])
    if found is None or product is None or not isinstance(update, Accumulate):
        raise refuse(kernel, step, f"the body of `{loop}` is not one sum of products")
    inside = _loops(kernel, step, found)
    factors = [core_of(x) for x in product.args]
    conditions = [c for cond in (*found.conditions, *masks) for c in E.conjuncts(cond)]
    if any(r.attr is update.buffer for r in E.reads(*factors, *conditions)):
        raise refuse(kernel, step, f"a factor, or a condition of the sum, is read from `{update.buffer.name}`")
    used = [[x for x in inside if x.var in E.variables(f)] for f in factors]
    given: list[list[Expr]] = [[], []]
    for c in conditions:
        for n in _holders(kernel, step, found, c, used):
            given[n].append(c)
    for core, known in zip(factors, given, strict=True):
        for c in conditions:
            if c not in known and not _protects_nothing(c, core, inside):
                raise refuse(kernel, step, f"`{core}` may be out of range where {c} does not hold")
    if not always_in_range(update):
        raise refuse(kernel, step, f"`{E.read(update.buffer, update.indices)}` may be out of range where nothing is summed")
    names = [fresh(kernel, left), fresh(kernel, right)]
    if names[0] == names[1]:
        raise refuse(kernel, step, "the copies need different names")
    buffers = [temporary(kernel, step, n, f.dtype, [x.extent for x in u], scope) for n, f, u in zip(names, factors, used, strict=True)]
    copies, loads = zip(*(_copy(kernel, b, f, u, known) for b, f, u, known in zip(buffers, factors, used, given, strict=True)), strict=True)
    staged = [
        E.substitute(whole, {core: E.read(b, [x.var for x in u])})
        for whole, core, b, u in zip(product.args, factors, buffers, used, strict=True)
    ]
    new: Stmt = Accumulate(update.buffer, update.indices, E.binary("mul", *staged), update.reducer)
    for x in reversed(inside):
        new = For(x.var, x.extent, new, x.kind)
    new = block(*copies, new)
    for b in reversed(buffers):
        new = Allocate(b, new)
    changed = nesting(kernel, step, replace_loop(kernel, target, For(target.var, target.extent, new, target.kind)))
    return changed, BufferCopy(names[0], loads[0]), BufferCopy(names[1], loads[1])


def _copy(kernel: Kernel, buffer: Buffer, factor: Expr, loops: Sequence[For], conditions: Sequence[Expr]) -> tuple[Stmt, list[str]]:
    """The nest that fills a buffer with a factor, one element for each iteration of the loops, zeros where a condition does not hold;
    and its loops."""
    places = [loop_var(fresh(kernel, f"{buffer.name}.{d}"), x.extent) for d, x in enumerate(loops)]
    at = {x.var: v for x, v in zip(loops, places, strict=True)}
    zero, conditions = E.const(0, factor.dtype), list(conditions)
    while factor.op == "select" and factor.args[2] is zero:  # a padded operand
        conditions += E.conjuncts(factor.args[0])
        factor = factor.args[1]
    element = E.select_where(conditions, factor, zero)
    nest: Stmt = Store(buffer, tuple(places), simplify(E.substitute(element, at)))
    for v, x in reversed(list(zip(places, loops, strict=True))):
        nest = For(v, x.extent, nest)
    return nest, [v.name for v in places]


def product_of(update: Accumulate) -> tuple[Expr | None, list[Expr]]:
    """The product that is summed, and the conditions under which it is; None for any other accumulation."""
    r, value, conditions = update.reducer, update.value, list[Expr]()
    while value.op == "select" and value.args[2] is r.identity:
        conditions.append(value.args[0])
        value = value.args[1]
    adds = r.combine.op == "add" and set(r.combine.args) == {r.lhs, r.rhs} and r.identity.op == "const" and r.identity.attr == 0
    return (value if adds and value.op == "mul" else None), conditions


def _loops(kernel: Kernel, step: str, found: Chain) -> tuple[For, ...]:
    for x in found.loops:
        if x.kind not in (SERIAL, UNROLLED) or not isinstance(x.extent, int):
            raise refuse(kernel, step, f"loop `{x.var.name}` is {x.kind} and runs {x.extent} times", "shape the loops afterwards")
    return found.loops


def core_of(factor: Expr) -> Expr:
    """A factor without what makes it fit the product: those operators keep zero zero, and copies of what they are applied to are smaller."""
    while factor.args:
        x = factor.args[0]
        widens = factor.op == "cast" and itemsize(x.dtype) <= itemsize(factor.dtype) and is_float(x.dtype) <= is_float(factor.dtype)
        cut = factor.op == "bitcast" or (factor.op == "and" and factor.args[1].op == "const")
        if not (widens and x.dtype != "bool") and not cut:
            break
        factor = x
    return factor


def _holders(kernel: Kernel, step: str, found: Chain, condition: Expr, used: Sequence[Sequence[For]]) -> list[int]:
    """The factors whose copies are zero where a condition of the sum does not hold."""
    if E.reads(condition):
        raise refuse(kernel, step, f"whether something is summed depends on data: {condition}")
    moving = [x for x in found.loops if x.var in E.variables(condition)]
    holders = [n for n, loops in enumerate(used) if set(moving) <= set(loops)]
    update = found.write
    if len(holders) == 2 or (holders and _unused_otherwise(kernel, update, condition, moving)):
        return holders
    why = f"where {condition} does not hold, a factor would have to be zero, and the other one finite"
    raise refuse(kernel, step, why, "make the sum's own conditions those of both factors")


def _unused_otherwise(kernel: Kernel, update: Stmt, condition: Expr, moving: Sequence[For]) -> bool:
    """Whether a condition holds for all iterations of an element of the sum or for none, and nobody reads it in the latter case."""
    assert isinstance(update, Accumulate)
    local = any(isinstance(s, Allocate) and s.buffer is update.buffer for s in walk(kernel.body))
    if not local or any(x.var not in update.indices for x in moving):
        return False

    def unread(s: Stmt, known: tuple[Expr, ...]) -> bool:
        if s is not update:
            for r in E.reads(*expressions(s)):
                if r.attr is update.buffer:
                    here = simplify(E.substitute(condition, {x.var: r.args[update.indices.index(x.var)] for x in moving}))
                    if here not in known and not prove(here):
                        return False
        if isinstance(s, If):
            inner = (*known, *map(simplify, E.conjuncts(s.cond)))
            return unread(s.then, inner) and (s.otherwise is None or unread(s.otherwise, known))
        return all(unread(c, known) for c in children(s))

    return unread(kernel.body, ())


def _protects_nothing(condition: Expr, factor: Expr, inside: Sequence[For]) -> bool:
    """Whether a condition says nothing about where a factor is read: they depend on nothing in common but on digits of their own of the
    number of an iteration (of loops that were fused)."""
    moving = {x.var for x in inside}
    indices = [i for r in E.reads(factor) for i in r.args]
    return not any(
        _overlap(a, b)
        for a in _atoms(*condition.args)
        for b in _atoms(*indices)
        if not (moving >= set(E.variables(a)) and moving >= set(E.variables(b)))
    ) and not any(v in E.variables(condition) for v in E.variables(*indices) if v in moving)


def _atoms(*indices: Expr) -> list[Expr]:
    return [a for i in indices if i.dtype == INDEX for monomial in linear(i) for a in monomial]


def _overlap(a: Expr, b: Expr) -> bool:
    if {v for v in E.variables(a) if v.attr.extent is not None}.isdisjoint(E.variables(b)):  # sizes are the same for all iterations
        return False
    one, other = digit(a), digit(b)
    return one.whole is not other.whole or not (_up_to(one.high, other.low) or _up_to(other.high, one.low))


def _up_to(high: Expr | None, low: Expr) -> bool:
    return high is not None and (prove(high <= low) or prove(E.equal(low % high, 0)))
