"""Reductions: partial results, and guards inside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tcomp.ir import expr as E
from tcomp.ir.expr import Expr, as_dim, as_expr, loop_var
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
    block,
    map_expressions,
)
from tcomp.ir.simplify import simplify
from tcomp.schedules.primitives.edit import conjuncts, find_buffer, fresh, guard, hoist_allocation, perfect, producers, rebuild, refuse
from tcomp.schedules.primitives.tails import folded_under


def rfactor(kernel: Kernel, stage: str, fold: str, lanes: int) -> tuple[Kernel, str]:
    """Split a fold into `lanes` interleaved partial folds: partial[.., l] folds the elements congruent to l, then the partial
    results are folded in order of l.

    Reassociates the reduction (in a fixed way). The stage must be as lowered. Returns the kernel and the new stage's name.
    """
    buffer = find_buffer(kernel, stage, "rfactor")
    nests = producers(kernel.body, buffer)
    if len(nests) != 2:
        raise refuse(kernel, "rfactor", f"`{stage}` is not a plain reduction (a nest that clears and one that accumulates)")
    loops, leaf = perfect(nests[1])
    if not isinstance(leaf, Accumulate) or any(i not in [x.var for x in loops] for i in leaf.indices):
        raise refuse(kernel, "rfactor", f"`{stage}` has been scheduled already")
    if any(r.attr is buffer for r in E.reads(leaf.value)):
        raise refuse(kernel, "rfactor", f"`{stage}` is computed from its own elements")
    target = next((x for x in loops if x.var.attr.name == fold), None)
    if target is None or target.var in leaf.indices:
        raise refuse(kernel, "rfactor", f"`{fold}` is not a fold of `{stage}`")
    if lanes < 1:
        raise refuse(kernel, "rfactor", f"{lanes} lanes")
    name = fresh(kernel, stage + ".p")
    partial = Buffer(name, buffer.dtype, (*buffer.shape, lanes))
    extent = as_expr(target.extent)
    outer_extent = as_dim((extent + (lanes - 1)) // lanes)
    outer, lane = loop_var(fresh(kernel, fold + ".o"), outer_extent), loop_var(f"{name}.lane", lanes)
    index = outer * lanes + lane
    value = simplify(E.substitute(leaf.value, {target.var: index}))
    update: Stmt = guard([index < extent], Accumulate(partial, (*leaf.indices, lane), value, leaf.reducer))
    for x in reversed([x for x in loops if x.var not in leaf.indices]):
        update = For(outer, outer_extent, update) if x is target else replace(x, body=update)
    spatial = [x for x in loops if x.var in leaf.indices]

    def renamed(suffix: str) -> dict[Expr, Expr]:
        tails = [x.var.attr.name.rsplit(".", 1)[-1] for x in spatial]
        tails = [t if [*tails, "lane"].count(t) == 1 else f"{t}{n}" for n, t in enumerate(tails)]
        return {x.var: loop_var(fresh(kernel, f"{name}.{suffix}{t}"), x.extent) for x, t in zip(spatial, tails, strict=True)}

    def nest(mapping: Mapping[Expr, Expr], inner: Stmt, lane_var: Expr) -> Stmt:
        inner = map_expressions(inner, lambda e: E.substitute(e, mapping))
        inner = For(lane_var, lanes, inner)
        for x in reversed(spatial):
            inner = For(mapping[x.var], x.extent, inner)
        return inner

    init_lane = loop_var(f"{name}.init.lane", lanes)
    init = nest(renamed("init."), Store(partial, (*leaf.indices, init_lane), leaf.reducer.identity), init_lane)
    accumulate = nest(renamed(""), update, lane)
    final_lane = loop_var(fresh(kernel, f"{stage}.lane"), lanes)
    final: Stmt = Accumulate(buffer, leaf.indices, E.read(partial, (*leaf.indices, final_lane)), leaf.reducer)
    final = For(final_lane, lanes, final)
    for x in reversed(spatial):
        final = replace(x, body=final)
    new = Allocate(partial, block(init, accumulate, nests[0], final))
    body = rebuild(kernel.body, lambda s: new if s is nests[1] else (Block(()) if s is nests[0] else None))
    return kernel.with_body(hoist_allocation(body, partial)), name


def mask(kernel: Kernel, stage: str) -> Kernel:
    """DOC_MASK"""
    buffer = find_buffer(kernel, stage, "mask")

    def edit(s: Stmt) -> Stmt | None:
        if isinstance(s, If) and s.otherwise is None and isinstance(s.then, Accumulate) and s.then.buffer is buffer:
            masked = folded_under(kernel, conjuncts(s.cond), s.then)
            if isinstance(masked, If) and masked.then is s.then:
                why = f"`{s.cond}` keeps the places of `{stage}` in range, or concurrent iterations apart: it has to stay an `If`"
                raise refuse(kernel, "mask", why)
            return masked
        return None

    return kernel.with_body(rebuild(kernel.body, edit))
