"""In-place buffer reuse: which results of a kernel may take the memory of an input, so that the caches hold one array less.

An output may lie where an input lies if no element of the input is read once the element of the output at the same place has been
written: neither later in the order of the program nor, where iterations run at the same time, in another one of them. As in `legality`, a
quick test settles what is done element by element, isl the rest; what isl cannot settle is not reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import islpy as isl

from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import Access, accesses
from tcomp.ir.expr import Expr
from tcomp.ir.loops import Buffer, Kernel, Stmt
from tcomp.ir.polyhedral.model import READ, Instance, Relation, TooHard, limited, map_of, model
from tcomp.schedules.analysis.dependence import determined


def reusable_in_place(kernel: Kernel) -> list[tuple[Buffer, Buffer]]:
    """Pairs (input, output) of a kernel's buffers: the output may lie where the input lies, which has its shape and dtype. Not if its
    stores bypass the caches: these need no room there."""
    found = accesses(kernel.body)
    streamed = {s.buffer for s in L.walk(kernel.body) if isinstance(s, L.Store) and L.bypasses_caches(s)}
    return [
        (source, output)
        for output in kernel.outputs
        if output not in streamed
        for source in kernel.buffers
        if source not in kernel.outputs and (source.shape, source.dtype) == (output.shape, output.dtype)
        if _elementwise(found, source, output) or _read_before(kernel.body, source, output)
    ]


def _elementwise(found: Sequence[Access], source: Buffer, output: Buffer) -> bool:
    """Each element of the output is written once, and that iteration alone reads the element of the input: at the indices of the store,
    which determine the iteration; and the ranges of several stores, such as of a tile and of the tail, are disjoint."""
    writes = {a.statement: a for a in found if a.buffer is output and a.writes}
    for a in (a for a in found if a.buffer is source or a.buffer is output):
        if (write := writes.get(a.statement)) is None or a.indices != write.indices or (a.buffer is output and not a.writes):
            return False
    if not writes or not all(isinstance(s, L.Store) for s in writes):
        return False
    for write in writes.values():
        around = [x.var for x in write.loops]
        if not determined([write.indices], around).issuperset(around):
            return False
    return all(_apart(a.indices, b.indices) for a, b in combinations(writes.values(), 2))


def _apart(one: Sequence[Expr], other: Sequence[Expr]) -> bool:
    """Whether two places differ whatever the iterations."""
    return any(
        (a[1] is not None and b[0] is not None and a[1] < b[0]) or (b[1] is not None and a[0] is not None and b[1] < a[0])
        for a, b in zip(map(E.bounds, one), map(E.bounds, other), strict=True)
    )


def _read_before(body: Stmt, source: Buffer, output: Buffer) -> bool:
    """Whether isl finds no element of the input that is read after, or while, the element of the output at the same place is written."""
    deciding = [e for s in L.walk(body) if isinstance(s, L.For | L.If | L.While) for e in L.expressions(s)]
    if any(e.attr is source for e in E.reads(*deciding)):
        return False
    try:
        with limited():
            m = model(_only(body, source, output))
            found = [(i, a, a.relation.set_tuple_name(isl.dim_type.out, "place")) for i in m.instances for a in i.accesses]
            reads = [(i, relation) for i, a, relation in found if a.buffer is source]
            writes = [(i, relation) for i, a, relation in found if a.buffer is output and a.kind != READ]
            for (reader, read), (writer, written) in product(reads, writes):
                late = writer.order.lex_lt_map(reader.order).union(_at_once(writer, reader))
                if not written.apply_range(read.reverse()).intersect(late).intersect_params(m.context).is_empty():
                    return False
            return True
    except TooHard:
        return False


def _only(stmt: Stmt, *buffers: Buffer) -> Stmt:
    """The statement without what touches none of the buffers."""
    if isinstance(stmt, L.Store | L.Accumulate):
        touched = stmt.buffer in buffers or any(e.attr in buffers for e in E.reads(*L.expressions(stmt)))
        return stmt if touched else L.Block(())
    return L.with_children(stmt, [_only(child, *buffers) for child in L.children(stmt)])


def _at_once(first: Instance, second: Instance) -> Relation:
    """Pairs of their iterations that may run at the same time: in different iterations of a loop around both whose iterations are in no
    order, all loops around that one being at the same."""
    pairs = isl.Map.empty(first.order.lex_lt_map(second.order).get_space())
    for depth, (a, b) in enumerate(zip(first.loops, second.loops, strict=False)):
        if a is not b:
            break
        if a.kind in (L.PARALLEL, L.VECTORIZED):
            outer, count = [f"t{n}" for n in range(2 * depth + 1)], first.order.dim(isl.dim_type.out)
            rest = [[f"{side}{n}" for n in range(2 * depth + 1, count)] for side in "ab"]
            other = map_of([*outer, *rest[0]], [*outer, *rest[1]], f"{rest[0][0]} != {rest[1][0]}")
            pairs = pairs.union(first.order.apply_range(other).apply_range(second.order.reverse()))
    return pairs
