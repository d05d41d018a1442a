"""Control flow: `scan` and `while` are LOOP nodes, `cond` is IF. Jaxprs of JAX are closed: what they use is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tcomp.frontends.context import Values
from tcomp.frontends.jax.context import Context, Operand, Table, leaves, part_types, rebuilt
from tcomp.ir.graph import IF, LOOP, Graph, GraphBuilder, Value, loop_attrs, materialised
from tcomp.ops.elementwise import LESS_EQUAL, WHERE
from tcomp.ops.reduction import REDUCE_MAX
from tcomp.ops.xla import STOP

ENDLESS = 1 << 62  # iterations: more than any run has


def _inputs(inner: Context, values: Sequence[Value]) -> list[Value]:
    return [inner.builder.input(v.name, v.dtype, v.shape) for v in values]


def _scan(
    ctx: Context, *operands: Operand, jaxpr: Any, num_consts: int, num_carry: int, length: int, reverse: bool, **others: Any
) -> list[Operand]:
    consts, carry, xs = operands[:num_consts], operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]

    def body(builder: GraphBuilder, *formal: list[Value]) -> tuple[Values, Values, Graph]:
        inner, (states, rows, captured) = ctx.inside(builder), formal
        results = inner.evaluate(jaxpr, rebuilt(jaxpr.in_avals, iter([*captured, *states, *rows])))
        return leaves(results[:num_carry]), leaves(results[num_carry:]), inner.finished(leaves(results))

    values = ctx.scan(ctx.dims([length])[0], leaves(carry), leaves(xs), leaves(consts), reverse, body)
    return rebuilt([v.aval for v in ctx.eqn.outvars], iter(values))


def _while(ctx: Context, *operands: Operand, cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int) -> list[Operand]:
    """The condition comes before the body: a LOOP, whose condition comes after it, stands in an IF."""
    tests, steps = operands[:cond_nconsts], operands[cond_nconsts : cond_nconsts + body_nconsts]
    carry = operands[cond_nconsts + body_nconsts :]
    (first,) = leaves(ctx.evaluate(cond_jaxpr, [*tests, *carry]))
    inner, count = ctx.inside(), len(leaves(carry))
    inner.builder.input("i", "int64", ())
    names = [*leaves(carry), *leaves(tests), *leaves(steps)]
    formal = iter(_inputs(inner, names))
    avals = body_jaxpr.in_avals
    states = rebuilt(avals[body_nconsts:], formal)
    tests_in = rebuilt(cond_jaxpr.in_avals[:cond_nconsts], formal)
    results = inner.evaluate(body_jaxpr, [*rebuilt(avals[:body_nconsts], formal), *states])
    if first.shape:  # of a batch: those that are done stay as they are
        (own,) = leaves(inner.evaluate(cond_jaxpr, [*tests_in, *states]))
        kept = [_kept(inner, own, new, old) for new, old in zip(leaves(results), leaves(states), strict=True)]
        results = rebuilt(avals[body_nconsts:], iter(kept))
    goes_on = _any(inner, *leaves(inner.evaluate(cond_jaxpr, [*tests_in, *results])))
    body = inner.finished(leaves([*results, goes_on]))
    types = [(v.dtype, v.shape) for v in leaves(carry)]
    then, otherwise = ctx.inside(), ctx.inside()
    values = then.structured(LOOP, _inputs(then, names), types, loop_attrs(ENDLESS, count, (), (), True), body)
    same = _inputs(otherwise, names)[:count]
    bodies = then.finished(leaves(values)), otherwise.finished(leaves(same))
    found = ctx.structured(IF, [_any(ctx, first), *names], types, {}, *bodies)
    return rebuilt([v.aval for v in ctx.eqn.outvars], iter(found))


def _any(ctx: Context, condition: Value) -> Value:
    """Whether any element of a condition holds."""
    axes = tuple(range(len(condition.shape)))
    return ctx.add(REDUCE_MAX, condition, axes=axes, keepdims=False) if axes else condition


def _kept(ctx: Context, condition: Value, new: Value, old: Value) -> Value:
    wide = ctx.reshape(condition, [*condition.shape, *[1] * (len(new.shape) - len(condition.shape))])
    return ctx.add(WHERE, wide, new, old)


def _choose(ctx: Context, index: Value, branches: Sequence[Any], first: int, values: Sequence[Value]) -> list[Value]:
    """The results of branch number `index - first`, or of the nearest one."""
    one, *rest = branches
    if not rest:
        return leaves(ctx.evaluate(one, rebuilt(one.in_avals, iter(values))))
    condition, bodies = ctx.add(LESS_EQUAL, ctx.cast(index, "int32"), ctx.number(first, "int32")), list[Graph]()
    for own in ([one], rest):
        inner = ctx.inside()
        inner.conditional = True
        number, *passed = _inputs(inner, [index, *values])
        bodies.append(inner.finished(_choose(inner, number, own, first + 1, passed)))
    return ctx.structured(IF, [condition, index, *values], [(v.dtype, v.shape) for v in bodies[0].outputs], {}, *bodies)


def _cond(ctx: Context, index: Value, *operands: Operand, branches: Sequence[Any], **others: Any) -> list[Operand]:
    if (known := materialised(ctx.builder.constants.get(index))) is not None:
        return ctx.evaluate(branches[min(max(int(known), 0), len(branches) - 1)], operands)
    return rebuilt([v.aval for v in ctx.eqn.outvars], iter(_choose(ctx, index, branches, 0, leaves(operands))))


def _platform_index(ctx: Context, platforms: Sequence[Sequence[str] | None], **others: Any) -> list[Operand]:
    """Which of several definitions is for the CPU."""
    found = [n for n, names in enumerate(platforms) if names is None or "cpu" in names]
    return [ctx.number(found[0], "int32")]


def _linear_solve(ctx: Context, *operands: Operand, const_lengths: Any, jaxprs: Any) -> list[Operand]:
    """By the function that solves, applied to its constants and the right-hand sides."""
    start = const_lengths.matvec + const_lengths.vecmat
    given = [*operands[start : start + const_lengths.solve], *operands[sum(const_lengths) :]]
    return ctx.evaluate(jaxprs.solve, given)


def _callback(ctx: Context, *operands: Operand, **params: Any) -> list[Operand]:
    """In a branch, as libraries report errors: the run ends, and whoever called may let JAX run it instead."""
    if not ctx.conditional:
        raise ctx.unsupported("functions of Python are called by branches alone, as errors")
    avals = [v.aval for v in ctx.eqn.outvars]
    return rebuilt(avals, (ctx.add(STOP, shape=tuple(a.shape), dtype=dtype) for a in avals for dtype in part_types(a.dtype)))


TABLE: Table = {
    "pure_callback": _callback, "platform_index": _platform_index, "scan": _scan, "while": _while, "cond": _cond,
    "custom_linear_solve": _linear_solve,
}  # fmt: skip
