"""Control flow: `scan` and `while` are LOOP nodes, `cond` is IF. Jaxprs of JAX are closed: what they use is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tcomp.frontends.context import Values
from tcomp.frontends.jax.context import Context, Operand, Table, leaves, part_types, rebuilt
from tcomp.ir.graph import IF, LOOP, Graph, GraphBuilder, Value, loop_attrs, materialised
from tcomp.ops.elementwise import LESS_EQUAL, WHERE
from tcomp.ops.reduction import REDUCE_MAX
from tcomp.ops.xla import STOP

if TYPE_CHECKING:
    from tcomp.frontends.jax.importer import Importer

ENDLESS = 1 << 62  # iterations: more than any run has


def _inside(importer: Importer, builder: GraphBuilder | None = None) -> Importer:
    """The importer of a body."""
    inner = type(importer)(builder or GraphBuilder("body"))
    inner.context.eqn, inner.context.callers = importer.context.eqn, importer.context.callers
    inner.context.conditional = importer.context.conditional
    return inner


def _inputs(inner: Importer, values: Sequence[Value]) -> list[Value]:
    return [inner.builder.input(v.name, v.dtype, v.shape) for v in values]


def _scan(
    importer: Importer, *operands: Operand, jaxpr: Any, num_consts: int, num_carry: int, length: int, reverse: bool, **others: Any
) -> list[Operand]:
    consts, carry, xs = operands[:num_consts], operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]

    def body(builder: GraphBuilder, *formal: list[Value]) -> tuple[Values, Values, Graph]:
        inner, (states, rows, captured) = _inside(importer, builder), formal
        results = inner.evaluate(jaxpr.jaxpr, jaxpr.consts, rebuilt(jaxpr.in_avals, iter([*captured, *states, *rows])))
        return leaves(results[:num_carry]), leaves(results[num_carry:]), inner.finish(results)

    values = importer.context.scan(importer.context.dims([length])[0], leaves(carry), leaves(xs), leaves(consts), reverse, body)
    return rebuilt([v.aval for v in importer.context.eqn.outvars], iter(values))


def _while(importer: Importer, *operands: Operand, cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int) -> list[Operand]:
    """The condition comes before the body: a LOOP, whose condition comes after it, stands in an IF."""
    tests, steps = operands[:cond_nconsts], operands[cond_nconsts : cond_nconsts + body_nconsts]
    carry = operands[cond_nconsts + body_nconsts :]
    (first,) = leaves(importer.evaluate(cond_jaxpr.jaxpr, cond_jaxpr.consts, [*tests, *carry]))
    inner, count = _inside(importer), len(leaves(carry))
    inner.builder.input("i", "int64", ())
    names = [*leaves(carry), *leaves(tests), *leaves(steps)]
    formal = iter(_inputs(inner, names))
    avals = body_jaxpr.in_avals
    states = rebuilt(avals[body_nconsts:], formal)
    tests_in = rebuilt(cond_jaxpr.in_avals[:cond_nconsts], formal)
    results = inner.evaluate(body_jaxpr.jaxpr, body_jaxpr.consts, [*rebuilt(avals[:body_nconsts], formal), *states])
    if first.shape:  # of a batch: those that are done stay as they are
        (own,) = leaves(inner.evaluate(cond_jaxpr.jaxpr, cond_jaxpr.consts, [*tests_in, *states]))
        kept = [_kept(inner.context, own, new, old) for new, old in zip(leaves(results), leaves(states), strict=True)]
        results = rebuilt(avals[body_nconsts:], iter(kept))
    goes_on = _any(inner.context, *leaves(inner.evaluate(cond_jaxpr.jaxpr, cond_jaxpr.consts, [*tests_in, *results])))
    body = inner.finish([*results, goes_on])
    types = [(v.dtype, v.shape) for v in leaves(carry)]
    then, otherwise = _inside(importer), _inside(importer)
    values = then.context.structured(LOOP, _inputs(then, names), types, loop_attrs(ENDLESS, count, (), (), True), body)
    same = _inputs(otherwise, names)[:count]
    bodies = then.finish(values), otherwise.finish(same)
    found = importer.context.structured(IF, [_any(importer.context, first), *names], types, {}, *bodies)
    return rebuilt([v.aval for v in importer.context.eqn.outvars], iter(found))


def _any(ctx: Context, condition: Value) -> Value:
    """Whether any element of a condition holds."""
    axes = tuple(range(len(condition.shape)))
    return ctx.add(REDUCE_MAX, condition, axes=axes, keepdims=False) if axes else condition


def _kept(ctx: Context, condition: Value, new: Value, old: Value) -> Value:
    wide = ctx.reshape(condition, [*condition.shape, *[1] * (len(new.shape) - len(condition.shape))])
    return ctx.add(WHERE, wide, new, old)


def _branch(importer: Importer, jaxpr: Any, values: Sequence[Value], unused: int) -> Graph:
    """A branch as a body, which is passed `unused` values in front of those that it uses."""
    inner = _inside(importer)
    inner.context.conditional = True
    given = rebuilt(jaxpr.in_avals, iter(_inputs(inner, values)[unused:]))
    return inner.finish(inner.evaluate(jaxpr.jaxpr, jaxpr.consts, given))


def _choose(importer: Importer, index: Value, branches: Sequence[Any], first: int, values: Sequence[Value]) -> list[Value]:
    """The results of branch number `index - first`, or of the nearest one."""
    ctx, (one, *rest) = importer.context, branches
    condition = ctx.add(LESS_EQUAL, ctx.cast(index, "int32"), ctx.number(first, "int32"))
    if len(rest) == 1:
        bodies = [_branch(importer, jaxpr, values, 0) for jaxpr in branches]
    else:
        inner = _inside(importer)
        number, *passed = _inputs(inner, [index, *values])
        bodies = [_branch(importer, one, [index, *values], 1), inner.finish(_choose(inner, number, rest, first + 1, passed))]
        values = [index, *values]
    return ctx.structured(IF, [condition, *values], [(v.dtype, v.shape) for v in bodies[0].outputs], {}, *bodies)


def _cond(importer: Importer, index: Value, *operands: Operand, branches: Sequence[Any], **others: Any) -> list[Operand]:
    avals = [v.aval for v in importer.context.eqn.outvars]
    known = materialised(importer.builder.constants.get(index))
    if len(branches) == 1 or known is not None:
        one = branches[min(max(int(known), 0), len(branches) - 1) if known is not None else 0]
        return importer.evaluate(one.jaxpr, one.consts, operands)
    return rebuilt(avals, iter(_choose(importer, index, branches, 0, leaves(operands))))


def _platform_index(importer: Importer, platforms: Sequence[Sequence[str] | None], **others: Any) -> list[Operand]:
    """Which of several definitions is for the CPU."""
    found = [n for n, names in enumerate(platforms) if names is None or "cpu" in names]
    return [importer.context.number(found[0], "int32")]


def _linear_solve(importer: Importer, *operands: Operand, const_lengths: Any, jaxprs: Any) -> list[Operand]:
    """By the function that solves, applied to its constants and the right-hand sides."""
    start = const_lengths.matvec + const_lengths.vecmat
    given = [*operands[start : start + const_lengths.solve], *operands[sum(const_lengths) :]]
    return importer.evaluate(jaxprs.solve.jaxpr, jaxprs.solve.consts, given)


def _callback(importer: Importer, *operands: Operand, **params: Any) -> list[Operand]:
    """In a branch, as libraries report errors: the run ends, and whoever called may let JAX run it instead."""
    ctx = importer.context
    if not ctx.conditional:
        raise ctx.unsupported("functions of Python are called by branches alone, as errors")
    avals = [v.aval for v in ctx.eqn.outvars]
    return rebuilt(avals, (ctx.add(STOP, shape=tuple(a.shape), dtype=dtype) for a in avals for dtype in part_types(a.dtype)))


TABLE: Table = {
    "pure_callback": _callback,
    "platform_index": _platform_index,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
}
