"""ONNX operators: If, Loop, Scan. Sub-graphs become closed graphs; what they use of the graphs around them is passed in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import GraphProto

from tcomp.errors import UnsupportedError
from tcomp.frontends.onnx.containers import Container, alike, leaves, rebuilt
from tcomp.frontends.onnx.context import Body, Context, Table
from tcomp.frontends.onnx.handlers.movement import cut, moved, reshaped
from tcomp.frontends.onnx.reader import tensor_type
from tcomp.frontends.onnx.scope import Scope, Type
from tcomp.frontends.onnx.signature import LARGEST
from tcomp.ir.dims import upper_bound
from tcomp.ir.expr import Dim, Expr, as_expr, bounds, const, maximum, minimum, select, variables
from tcomp.ir.graph import IF, LOOP, Graph, Value, loop_attrs
from tcomp.ir.shape_operands import depends_on_values
from tcomp.ir.simplify import as_dim, difference, prove, same_dim, same_shape
from tcomp.ops.elementwise import ADD, CAST, FULL, MAX, MIN, WHERE
from tcomp.ops.movement import AT_MOST, RESHAPE
from tcomp.ops.recurrent import STACK

ENDLESS = 1 << 62  # iterations: more than any run has
MAX_APPENDED = 1024  # iterations of a loop that carries a sequence
MAX_UNROLLED = 32  # iterations of a loop that is not a LOOP because shapes change from one to the next; each adds its nodes to the graph


def _type(value: Value) -> Type:
    return value.dtype, value.shape


def _if(ctx: Context) -> tuple[Value, ...]:
    """Where the branches give results of different sizes, each gives these sizes as well."""
    branches = ctx.attrs["then_branch"], ctx.attrs["else_branch"]
    if (known := ctx.known(0)) is not None:
        return tuple(ctx.bodies.inline(branches[0 if known.item() else 1]))
    if ctx.scope.known_elements(ctx.value(0)) is not None:  # sizes decide
        with suppress(UnsupportedError), ctx.bodies.attempt():
            return _either(ctx, branches)
        # As torch exports `squeeze`: one branch drops an axis if it is 1, and the model goes on with its result.
        return ctx.assumed(0, ctx.bodies.inline(branches[0]))
    return _either(ctx, branches)


def _either(ctx: Context, branches: Sequence[GraphProto]) -> tuple[Value, ...]:
    """Both branches; a run decides."""
    then, otherwise = bodies = [ctx.bodies.closed(branch, conditional=True) for branch in branches]
    if len(then.outputs) != len(otherwise.outputs):
        raise ctx.invalid("its branches have different numbers of outputs")
    types, sizes = list[Type](), dict[Expr, tuple[Dim, Dim]]()  # `sizes`: what a dim of the results is in each branch
    if not alike(then.outputs, otherwise.outputs):
        why = "its branches give sequences of different lengths or optionals that differ, and which one is taken depends on input data"
        raise ctx.unsupported(why, hint="fix the condition at export")
    tensors = [leaves(body.outputs) for body in bodies]
    for one, other in zip(*tensors, strict=True):
        if (one.dtype, len(one.shape)) != (other.dtype, len(other.shape)):
            why = f"its branches give {one} and {other}, and which one is taken depends on input data"
            raise ctx.unsupported(why, hint="fix the condition at export, or the symbolic sizes with --dim")
        pairs = [(d, e, None if same_dim(d, e) else ctx.scope.new_size(ctx.name)) for d, e in zip(one.shape, other.shape, strict=True)]
        sizes |= {size: (d, e) for d, e, size in pairs if size is not None}
        types.append((one.dtype, tuple(d if size is None else size for d, _, size in pairs)))
    shared = list(dict.fromkeys([*then.captured, *otherwise.captured]))
    results = [[*tensors[n], *(_extent(body.scope, pair[n], ctx.name) for pair in sizes.values())] for n, body in enumerate(bodies)]
    graphs = [_closed(body, [], shared, outputs) for body, outputs in zip(bodies, results, strict=True)]
    types += [("int64", ())] * len(sizes)
    values = ctx.scope.append(IF, [ctx.value(0), *shared], types, {}, ctx.name, graphs)
    for (size, pair), count in zip(sizes.items(), values[len(tensors[0]) :], strict=True):
        ends = [_limit(ctx, d, body) for d, body in zip(pair, bodies, strict=True)]
        ctx.scope.set_size(size, count, as_dim(maximum(*map(as_expr, ends))), ctx.name)
    chosen = iter(values)
    return tuple(rebuilt(v, chosen) for v in then.outputs)


def _extent(scope: Scope, size: Dim, name: str) -> Value:
    return scope.from_elements([as_expr(size)], "int64", (), name)


def _limit(ctx: Context, size: Dim, body: Body) -> Dim:
    """What a size that a body computes never exceeds, over the dims around it."""
    if (limit := upper_bound(size, body.scope.limits())) is None:
        raise ctx.unsupported(f"a result has the size {size}, which has no bound")
    return limit


def _closed(body: Body, formal: Sequence[Value], shared: Sequence[Value], outputs: Sequence[Value]) -> Graph:
    """The body as a graph of its formal inputs and of all `shared` outer values, used or not."""
    inner = [body.captured.get(v) or body.scope.builder.input(v.name, v.dtype, v.shape) for v in shared]
    return body.scope.finish([*formal, *inner], outputs)


def _loop(ctx: Context) -> tuple[Value, ...]:
    """A number of trips that is known, or given before a run, or that depends on data; values that stay as large as they are, or grow."""
    known = [const(True, "bool")] if ctx.input(1) is None else ctx.scope.given_elements(ctx.value(1))
    first = None if known is None else known[0]
    trips = 0 if first is not None and first.op == "const" and not first.attr else _trips(ctx)
    if first is None:
        count = ctx.add(WHERE, [reshaped(ctx, ctx.value(1), ()), _extent(ctx.scope, trips, ctx.name), ctx.constant(0)])
        trips = ctx.counted(count, trips)
    elif first.op != "const" or depends_on_values(trips):
        stacks = len(ctx.attrs["body"].output) > len(ctx.inputs) - 1
        trips = ctx.size(select(first, maximum(as_expr(trips), 0), 0), "the trip count", most=LARGEST if stacks else None)
    states = [ctx.value(i) for i in range(2, len(ctx.inputs))]
    if any(isinstance(v, Container) for v in states):
        if not isinstance(trips, int):
            raise ctx.unsupported("it carries a sequence, and how often it runs is not known", hint="fix symbolic sizes with --dim")
        return _unrolled(ctx, trips, states)
    if not isinstance(trips, int) or trips > MAX_UNROLLED:
        return _as_loop(ctx, trips, states)
    with suppress(UnsupportedError), ctx.bodies.attempt():
        return _as_loop(ctx, trips, states, grows=False)
    with suppress(UnsupportedError), ctx.bodies.attempt():
        return _unrolled(ctx, trips, states)
    return _as_loop(ctx, trips, states)


def _trips(ctx: Context) -> Dim:
    """How often the loop may run, whatever its condition says."""
    most = ctx.scope.trips_bound(_bound_name(ctx))
    if ctx.input(0) is None:
        return ENDLESS if most is None else most
    if (known := ctx.scope.given_elements(ctx.value(0))) is not None:
        return max(trips, 0) if isinstance(trips := as_dim(known[0]), int) else trips
    given = ctx.add(MAX, [reshaped(ctx, ctx.value(0), ()), ctx.constant(0)])
    if most is not None:
        return ctx.counted(ctx.add(AT_MOST, [given], most=most), most)
    return ctx.counted(ctx.add(MIN, [given, ctx.constant(ENDLESS)]), ENDLESS)


def _bound_name(ctx: Context) -> str:
    """What the caller says a bound of the number of trips by."""
    return re.sub(r"\W", "_", f"{ctx.name}_trips")


def _as_loop(ctx: Context, trips: Dim, states: Sequence[Value], grows: bool = True) -> tuple[Value, ...]:
    types, count, sizes = [*map(_type, states)], len(states), dict[Expr, tuple[int, int]]()  # `sizes`: where a dim is: state and axis
    while True:
        # Whenever the body runs, the condition it is given is true.
        body = ctx.bodies.closed(ctx.attrs["body"], [("int64", ()), np.array(True), *types], repeated=True)
        condition, *results = body.outputs
        if len(results) < count:
            raise ctx.invalid(f"its body returns {len(results)} values for {count} carried ones")
        changed = [
            (n, axis)
            for n, (v, (dtype, shape)) in enumerate(zip(results, types, strict=False))
            if grows and (v.dtype, len(v.shape)) == (dtype, len(shape))
            for axis, (d, e) in enumerate(zip(v.shape, shape, strict=True))
            if e not in sizes and not same_dim(d, e)
        ]
        if not changed:
            break
        for n, axis in changed:
            size, (dtype, shape) = ctx.scope.new_size(ctx.name), types[n]
            sizes[size], types[n] = (n, axis), (dtype, (*shape[:axis], size, *shape[axis + 1 :]))
    goes_on = body.scope.known(condition)
    if goes_on is not None and not goes_on.item():
        trips = trips if isinstance(trips, int) and trips == 0 else 1
    if goes_on is not None and trips == ENDLESS:
        raise ctx.unsupported("it never ends: it has neither a trip count nor a condition")
    stacked, outputs, initial = len(results) - count, list(results), list(states)
    formal = [v for v in body.inputs if v not in body.scope.builder.constants]
    if stacked:
        _limited(ctx, trips)
    most = ctx.scope.trips_bound(_bound_name(ctx)) if ctx.input(0) is None and goes_on is None else None
    if counts := goes_on is None and (stacked > 0 or most is not None):  # one more carried value says how many rows there are
        done = body.scope.add(ADD, [body.inputs[0], body.scope.builder.constant(np.array(1))], {}, ctx.name)
        if most is not None:  # or that there would be more than the caller's bound
            more = body.scope.add(CAST, [condition], {"dtype": "int64"}, ctx.name)
            more = body.scope.add(RESHAPE, more, {"shape": ()}, ctx.name)
            done = body.scope.add(ADD, [*done, *more], {}, ctx.name)
        formal.insert(count + 1, body.scope.builder.input("rows", "int64", ()))
        outputs[count:count], initial = done, [*states, ctx.constant(0)]
    outputs += [condition] if goes_on is None else []
    outputs += [_extent(body.scope, results[n].shape[axis], ctx.name) for n, axis in sizes.values()]
    attrs = loop_attrs(trips, len(initial), (), (False,) * stacked, goes_on is None, list(sizes))
    for size, (n, axis) in sizes.items():
        bound = _growth(ctx, trips, list(sizes), size, states[n].shape[axis], _limit(ctx, results[n].shape[axis], body))
        ctx.scope.set_size(size, _extent(ctx.scope, states[n].shape[axis], ctx.name), bound, ctx.name)
    values = _append_loop(ctx, body, formal, initial, outputs, attrs)
    if not counts:
        return values
    wanted = ctx.counted(values[count], trips if most is None else most + 1)
    rows = wanted if most is None else as_dim(minimum(as_expr(wanted), most))
    found = *values[:count], *(cut(ctx, v, 0, 0, rows) for v in values[count + 1 :])
    return found if most is None else tuple(ctx.scope.with_shape(v, v.shape, as_expr(wanted) <= most, ctx.name) for v in found)


def _limited(ctx: Context, trips: Dim) -> None:
    """Raises `UnsupportedError` where the number of trips has no bound."""
    if (most := bounds(trips)[1]) is not None and most >= ENDLESS:
        why = "how often it runs, and so the size of its results, depends on input data and has no bound"
        raise ctx.unsupported(f"{why}: --dim {_bound_name(ctx)}=0..N gives one, and runs that want more trips end with an error")


def _growth(ctx: Context, trips: Dim, sizes: Sequence[Expr], size: Expr, first: Dim, after: Dim) -> Dim:
    """What `size`, one of the `sizes` of a loop, never exceeds, which is `first`, and at most `after` one more iteration of the body."""
    most, step = bounds(after)[1], difference(after, size)
    if set(sizes).isdisjoint(variables(as_expr(after))):
        return as_dim(maximum(as_expr(first), as_expr(after)))
    if most is not None:
        return as_dim(maximum(as_expr(first), most))
    if not set(sizes).isdisjoint(variables(step)):
        raise ctx.unsupported(f"a carried value has the size {size}, then {after}: that it has a bound cannot be seen")
    if prove(step <= 0):
        return first
    _limited(ctx, trips)
    return as_dim(as_expr(first) + maximum(step, 0) * as_expr(trips))


def _append_loop(
    ctx: Context, body: Body, formal: Sequence[Value], inputs: Sequence[Value], outputs: Sequence[Value], attrs: Mapping[str, Any]
) -> tuple[Value, ...]:
    """A LOOP node, with the inputs and outputs of its body that are not captured."""
    captured, count, sizes = list(body.captured), attrs["carried"], attrs.get("sizes", ())
    for before, after, given in zip(inputs[:count], outputs[:count], formal[1:], strict=False):
        shape = [e if e in sizes else d for d, e in zip(after.shape, given.shape, strict=False)]
        if before.dtype != after.dtype or len(after.shape) != len(given.shape) or not same_shape(shape, given.shape):
            raise ctx.unsupported(f"the type of a carried value changes from one iteration to the next: {before}, then {after}")
    graph, rows = _closed(body, formal, captured, outputs), outputs[count : count + len(attrs["reverse_out"])]
    inside = {*sizes, *graph.counted()}
    if ragged := [v for v in rows if not inside.isdisjoint(variables(*(d for d in v.shape if isinstance(d, Expr))))]:
        raise ctx.unsupported(f"it stacks rows whose sizes differ from one iteration to the next: {ragged[0]}")
    types = [*map(_type, formal[1 : count + 1]), *((v.dtype, (attrs["trips"], *v.shape)) for v in rows)]
    return ctx.scope.append(LOOP, [*inputs, *captured], types, attrs, ctx.name, [graph])


def _unrolled(ctx: Context, trips: int, states: Sequence[Value]) -> tuple[Value, ...]:
    """The body once for each iteration: shapes may change, the condition must be known."""
    proto, now, rows = ctx.attrs["body"], list(states), []
    for number in range(min(trips, MAX_APPENDED)):
        given = [  # what began as an optional is passed as one
            Container(v.name, first.dtype, [v]) if first.dtype.startswith("optional(") and v.dtype != first.dtype else v
            for v, first in zip(now, states, strict=True)
        ]
        condition, *results = ctx.bodies.inline(proto, [ctx.constant(number, "int64"), ctx.constant(True), *given])
        now = results[: len(states)]
        rows.append(results[len(states) :])
        if (goes_on := ctx.scope.known(condition)) is None:
            raise ctx.unsupported("how often it runs depends on input data, and so do shapes")
        if not goes_on.item():
            break
    else:
        if trips > MAX_APPENDED:
            raise ctx.unsupported(f"it carries a sequence and runs more than {MAX_APPENDED} times")
    if rows:
        return *now, *(ctx.add(STACK, list(column), axis=0) for column in zip(*rows, strict=True))
    types = [tensor_type(o.type, ctx.where) for o in proto.output[1 + len(states) :]]  # what is stacked in no iteration is as declared
    shapes = [(0, *(d if isinstance(d, int) else 0 for d in dims or [])) for _, dims in types]
    return *now, *(ctx.add(FULL, [], shape=s, value=0, dtype=dtype) for s, (dtype, _) in zip(shapes, types, strict=True))


def _scan(ctx: Context) -> tuple[Value, ...]:
    """A loop over slices of its inputs."""
    proto, scanned = ctx.attrs["body"], ctx.attrs["num_scan_inputs"]
    values = [ctx.value(i) for i in range(len(ctx.inputs))]
    count = len(values) - scanned
    stacked = len(proto.output) - count
    if scanned < 1 or count < 0 or stacked < 0:
        raise ctx.invalid(f"{len(values)} inputs, {scanned} of them scanned; its body has {len(proto.output)} outputs")

    def flags(name: str, length: int) -> list[int]:
        given: list[int] = ctx.attrs.get(name) or [0] * length
        if len(given) != length:
            raise ctx.invalid(f"attribute `{name}` has {len(given)} entries instead of {length}")
        return given

    sequences = [moved(ctx, v, axis, 0) for v, axis in zip(values[count:], flags("scan_input_axes", scanned), strict=True)]
    states, trips = values[:count], sequences[0].shape[0]
    if not all(ctx.can_be(s.shape[:1], (trips,)) for s in sequences):
        raise ctx.invalid(f"scanned inputs of different lengths: {', '.join(map(str, sequences))}")
    body = ctx.bodies.closed(proto, [*map(_type, states), *((s.dtype, s.shape[1:]) for s in sequences)], repeated=True)
    reverse_in, reverse_out = flags("scan_input_directions", scanned), flags("scan_output_directions", stacked)
    attrs = loop_attrs(trips, count, [bool(f) for f in reverse_in], [bool(f) for f in reverse_out])
    number = body.scope.builder.input("iteration", "int64", ())
    results = _append_loop(ctx, body, [number, *body.inputs], [*states, *sequences], body.outputs, attrs)
    rows = (moved(ctx, v, 0, axis) for v, axis in zip(results[count:], flags("scan_output_axes", stacked), strict=True))
    return *results[:count], *rows


def _batched_scan(ctx: Context) -> tuple[Value, ...]:
    """Scan of opset 8: that of later opsets in a loop over the batch, the first axis of all values."""
    if ctx.input(0) is not None:
        raise ctx.unsupported("its sequences have lengths of their own", hint="export the model with opset 9 or newer")
    values = [ctx.value(i) for i in range(1, len(ctx.inputs))]
    if flat := [v for n, v in enumerate(values) if len(v.shape) < (1 if n < len(values) - ctx.attrs["num_scan_inputs"] else 2)]:
        raise ctx.invalid(f"{flat[0]} has no axis for the batch, or for the sequence")
    for v in values:
        ctx.require_same(v.shape[0], values[0].shape[0])
    attrs = {**ctx.attrs, "scan_input_directions": ctx.attrs.get("directions")}
    body = ctx.bodies.closed(
        lambda scope, bodies, inputs: _scan(replace(ctx, scope=scope, bodies=bodies, inputs=inputs[1:], attrs=attrs)),
        [("int64", ()), *((v.dtype, v.shape[1:]) for v in values)],
        repeated=True,
    )
    attrs = loop_attrs(values[0].shape[0], 0, (False,) * len(values), (False,) * len(body.outputs))
    return _append_loop(ctx, body, body.inputs, values, body.outputs, attrs)


TABLE: Table = {"If": _if, "Loop": _loop, "Scan": ((8, _batched_scan), (9, _scan))}
