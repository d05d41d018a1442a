"""ONNX operators: If, Loop, Scan. Sub-graphs become closed graphs; what they use of the graphs around them is passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from onnx import GraphProto

from tcomp.errors import UnsupportedError
from tcomp.frontends.onnx.context import Body, Context, Table, Type
from tcomp.frontends.onnx.reader import tensor_type
from tcomp.frontends.onnx.signature import LARGEST
from tcomp.ir.expr import Dim, as_expr, const, maximum, select
from tcomp.ir.given import is_given
from tcomp.ir.graph import IF, LOOP, Graph, Value, loop_attrs
from tcomp.ir.simplify import same_dim, same_shape
from tcomp.ops.elementwise import FULL
from tcomp.ops.movement import TRANSPOSE
from tcomp.ops.recurrent import STACK

MAX_UNROLLED = 32  # iterations of a loop that is no LOOP because shapes change from one to the next; each adds its nodes to the graph


def _type(value: Value) -> Type:
    return value.dtype, value.shape


def _different(a: Sequence[Value], b: Sequence[Value]) -> tuple[Value, Value] | None:
    """The first two values whose types differ."""
    return next(((x, y) for x, y in zip(a, b, strict=False) if x.dtype != y.dtype or not same_shape(x.shape, y.shape)), None)


def _if(ctx: Context) -> tuple[Value, ...]:
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
    if (pair := _different(then.outputs, otherwise.outputs)) is not None:
        why = f"its branches give {pair[0]} and {pair[1]}, and which one is taken depends on input data"
        raise ctx.unsupported(why, hint="fix the condition at export, or the symbolic sizes with --dim")
    shared = list(dict.fromkeys([*then.captured, *otherwise.captured]))
    graphs = [_closed(body, [], shared, body.outputs) for body in bodies]
    return ctx.scope.append(IF, [ctx.value(0), *shared], [_type(v) for v in then.outputs], {}, ctx.name, graphs)


def _closed(body: Body, formal: Sequence[Value], shared: Sequence[Value], outputs: Sequence[Value]) -> Graph:
    """The body as a graph of its formal inputs and of all `shared` outer values, used or not."""
    inner = [body.captured.get(v) or body.scope.builder.input(v.name, v.dtype, v.shape) for v in shared]
    return body.scope.finish([*formal, *inner], outputs)


def _loop(ctx: Context) -> tuple[Value, ...]:
    """A known or a data-dependent number of trips."""
    first = const(True, "bool") if ctx.input(1) is None else ctx.given_numbers(1, "whether the first iteration runs")[0]
    trips: Dim = 0
    if first.op != "const" or first.attr:
        if ctx.input(0) is None:
            raise ctx.unsupported("it has no trip count; how often it runs depends on input data")
        (trips,) = ctx.given_dims(0, "the trip count")
        trips = max(trips, 0) if isinstance(trips, int) else trips
    if first.op != "const" or is_given(trips):
        stacks = len(ctx.attrs["body"].output) > len(ctx.inputs) - 1
        trips = ctx.size(select(first, maximum(as_expr(trips), 0), 0), "the trip count", most=LARGEST if stacks else None)
    states = [ctx.value(i) for i in range(2, len(ctx.inputs))]
    if not isinstance(trips, int) or trips > MAX_UNROLLED:
        return _as_loop(ctx, trips, states)
    with suppress(UnsupportedError), ctx.bodies.attempt():
        return _as_loop(ctx, trips, states)
    return _unrolled(ctx, trips, states)


def _as_loop(ctx: Context, trips: Dim, states: Sequence[Value]) -> tuple[Value, ...]:
    # Whenever the body runs, the condition it is given is true.
    body = ctx.bodies.closed(ctx.attrs["body"], [("int64", ()), np.array(True), *map(_type, states)], repeated=True)
    condition, *results = body.outputs
    count = len(states)
    if len(results) < count:
        raise ctx.invalid(f"its body returns {len(results)} values for {count} carried ones")
    goes_on = body.scope.known(condition)
    if goes_on is not None and not goes_on.item():
        trips = trips if isinstance(trips, int) and trips == 0 else 1
    elif goes_on is None and len(results) > count:
        raise ctx.unsupported("how many rows it stacks depends on input data")
    outputs = results if goes_on is not None else [*results, condition]
    formal = [v for v in body.inputs if v not in body.scope.builder.constants]
    attrs = loop_attrs(trips, count, (), (False,) * (len(results) - count), goes_on is None)
    return _append_loop(ctx, body, formal, states, outputs, attrs)


def _append_loop(
    ctx: Context, body: Body, formal: Sequence[Value], inputs: Sequence[Value], outputs: Sequence[Value], attrs: Mapping[str, Any]
) -> tuple[Value, ...]:
    """A LOOP node, with the inputs and outputs of its body that are not captured."""
    captured, count = list(body.captured), attrs["carried"]
    if (pair := _different(inputs[:count], outputs[:count])) is not None:
        raise ctx.unsupported(f"the type of a carried value changes from one iteration to the next: {pair[0]}, then {pair[1]}")
    rows = outputs[count : count + len(attrs["reverse_out"])]
    types = [*map(_type, inputs[:count]), *((v.dtype, (attrs["trips"], *v.shape)) for v in rows)]
    return ctx.scope.append(LOOP, [*inputs, *captured], types, attrs, ctx.name, [_closed(body, formal, captured, outputs)])


def _unrolled(ctx: Context, trips: int, states: Sequence[Value]) -> tuple[Value, ...]:
    """The body once for each iteration: shapes may change, the condition must be known."""
    proto, now, rows = ctx.attrs["body"], list(states), []
    for number in range(trips):
        condition, *results = ctx.bodies.inline(proto, [ctx.constant(number, "int64"), ctx.constant(True), *now])
        now = results[: len(states)]
        rows.append(results[len(states) :])
        if (goes_on := ctx.scope.known(condition)) is None:
            raise ctx.unsupported("how often it runs depends on input data, and so do shapes")
        if not goes_on.item():
            break
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

    sequences = [_moved(ctx, v, axis, 0) for v, axis in zip(values[count:], flags("scan_input_axes", scanned), strict=True)]
    states, trips = values[:count], sequences[0].shape[0]
    if not all(same_dim(s.shape[0], trips) for s in sequences):
        raise ctx.invalid(f"scanned inputs of different lengths: {', '.join(map(str, sequences))}")
    body = ctx.bodies.closed(proto, [*map(_type, states), *((s.dtype, s.shape[1:]) for s in sequences)], repeated=True)
    number = body.scope.builder.input("iteration", "int64", ())
    reverse_in, reverse_out = flags("scan_input_directions", scanned), flags("scan_output_directions", stacked)
    attrs = loop_attrs(trips, count, [bool(f) for f in reverse_in], [bool(f) for f in reverse_out])
    results = _append_loop(ctx, body, [number, *body.inputs], [*states, *sequences], body.outputs, attrs)
    rows = (_moved(ctx, v, 0, axis) for v, axis in zip(results[count:], flags("scan_output_axes", stacked), strict=True))
    return *results[:count], *rows


def _moved(ctx: Context, value: Value, source: int, target: int) -> Value:
    perm = list(range(rank := len(value.shape)))
    perm.insert(ctx.axis(target, rank), perm.pop(ctx.axis(source, rank)))
    return value if perm == list(range(rank)) else ctx.add(TRANSPOSE, [value], perm=tuple(perm))


TABLE: Table = {"If": _if, "Loop": _loop, "Scan": ((9, _scan),)}
