"""ONNX operators on sequences and optionals, all done while the model is imported: see `containers`."""

from __future__ import annotations

from tcomp.frontends.onnx.containers import Container, type_name
from tcomp.frontends.onnx.context import Context, Table
from tcomp.frontends.onnx.handlers.movement import parts, reshaped
from tcomp.ir.graph import Value
from tcomp.ir.simplify import same_shape
from tcomp.ops.movement import CONCAT, GATHER
from tcomp.ops.recurrent import STACK

MAX_ELEMENTS = 4096  # that a tensor is split into; each is a node of the graph


def _sequence(ctx: Context, items: list[Value], kind: str) -> Container:
    """A sequence of the type `kind`, such as "seq(float32)"."""
    if other := next((v for v in items if f"seq({v.dtype})" != kind), None):
        raise ctx.invalid(f"a sequence of {kind[4:-1]} cannot hold {other}")
    return Container(ctx.name, kind, items)


def _items(ctx: Context) -> list[Value]:
    """The elements of input 0, a sequence."""
    if not isinstance(value := ctx.value(0), Container) or value.is_optional:
        raise ctx.invalid(f"input 0 is {value}, no sequence")
    return list(value.items)


def _position(ctx: Context, i: int, count: int, end: bool = False) -> int:
    """The position that input `i` gives among `count` elements, or (`end`) behind them: the last one where it is left out. It may be
    counted from the end."""
    if ctx.input(i) is None:
        return count - 1 + end
    (at,) = ctx.require_dims(i, "the position")
    if not isinstance(at, int) or not -count <= at < count + end:
        raise ctx.invalid(f"position {at} among {count}")
    return at + count if at < 0 else at


def _insert(ctx: Context) -> Container:
    items = _items(ctx)
    items.insert(_position(ctx, 2, len(items), end=True), ctx.value(1))
    return _sequence(ctx, items, ctx.value(0).dtype)


def _erase(ctx: Context) -> Container:
    if not (items := _items(ctx)):
        raise ctx.invalid("the sequence is empty")
    del items[_position(ctx, 1, len(items))]
    return _sequence(ctx, items, ctx.value(0).dtype)


def _at(ctx: Context) -> Value:
    """Which element is known, or it is looked up among elements of one shape."""
    items = _items(ctx)
    if ctx.dims(1) is not None:
        return items[_position(ctx, 1, len(items))]
    if not items or not all(same_shape(v.shape, items[0].shape) for v in items):
        raise ctx.unsupported("which element it takes depends on input data, and their shapes differ", "make the position a constant")
    index = reshaped(ctx, ctx.value(1), ())
    return ctx.add(GATHER, [ctx.add(STACK, items, axis=0), index], axis=0)


def _split(ctx: Context) -> Container:
    """Into parts of given sizes, of one size (the last may be smaller), or into slices."""
    x, axis, split = ctx.value(0), ctx.axis(ctx.attrs["axis"]), ctx.input(1)
    extent = x.shape[axis]
    if split is not None and len(split.shape) == 1:
        return _sequence(ctx, list(parts(ctx, x, axis, ctx.given_dims(1, "the split"))), f"seq({x.dtype})")
    step = 1 if split is None else ctx.require_dims(1, "the split")[0]
    if not isinstance(extent, int) or not isinstance(step, int):
        raise ctx.unsupported(f"into how many parts an axis of size {extent} is split is not known", "fix that size with --dim")
    if step < 1 or extent > step * MAX_ELEMENTS:
        raise ctx.unsupported(f"{extent} elements are split into parts of {step}; at most {MAX_ELEMENTS} parts are accepted")
    pieces = list(parts(ctx, x, axis, [min(step, extent - start) for start in range(0, extent, step)]))
    if split is None and not ctx.attrs["keepdims"]:
        pieces = [reshaped(ctx, p, (*x.shape[:axis], *x.shape[axis + 1 :])) for p in pieces]
    return _sequence(ctx, pieces, f"seq({x.dtype})")


def _concat(ctx: Context) -> Value:
    items, new = _items(ctx), bool(ctx.attrs["new_axis"])
    if not items:
        raise ctx.unsupported("the sequence is empty: its result would have no shape")
    axis = ctx.axis(ctx.attrs["axis"], len(items[0].shape) + new)
    if new:
        if not all(same_shape(v.shape, items[0].shape) for v in items):
            raise ctx.invalid(f"elements of different shapes along a new axis: {', '.join(map(str, items))}")
        return ctx.add(STACK, items, axis=axis)
    return items[0] if len(items) == 1 else ctx.add(CONCAT, items, axis=axis)


def _map(ctx: Context) -> tuple[Value, ...]:
    """The body once for each element; tensors are passed to all."""
    count, body = len(_items(ctx)), ctx.attrs["body"]
    given = [ctx.value(i) for i in range(len(ctx.inputs))]
    lists = [[*v.items] if isinstance(v, Container) else [v] * count for v in given]
    if any(len(items) != count for items in lists):
        raise ctx.invalid(f"sequences of different lengths: {', '.join(map(str, given))}")
    rows = [ctx.bodies.inline(body, [items[n] for items in lists]) for n in range(count)]
    return tuple(_sequence(ctx, [row[n] for row in rows], f"seq({type_name(o.type, ctx.where)})") for n, o in enumerate(body.output))


def _optional(ctx: Context) -> Container:
    if (value := ctx.input(0)) is not None:
        return Container(ctx.name, f"optional({value.dtype})", [value])
    if (kind := ctx.attrs.get("type")) is None:
        raise ctx.invalid("it has neither an input nor a type")
    return Container(ctx.name, f"optional({type_name(kind, ctx.where)})", [])


def _has_element(ctx: Context) -> Value:
    value = ctx.input(0)
    return ctx.constant(value is not None and not (isinstance(value, Container) and value.is_optional and not value.items))


def _get_element(ctx: Context) -> Value:
    value = ctx.value(0)
    if not isinstance(value, Container) or not value.is_optional:
        return value
    if not value.items:
        raise ctx.invalid("the optional is empty")
    return value.items[0]


TABLE: Table = {
    "SequenceInsert": _insert, "SequenceErase": _erase, "SequenceAt": _at,
    "SequenceLength": lambda ctx: ctx.constant(len(_items(ctx)), "int64"), "SequenceMap": _map,
    "SplitToSequence": _split, "ConcatFromSequence": _concat,
    "Optional": _optional, "OptionalHasElement": _has_element, "OptionalGetElement": _get_element,
    "SequenceEmpty": lambda ctx: _sequence(ctx, [], f"seq({ctx.dtype('dtype', 'float32')})"),
    "SequenceConstruct": lambda ctx: _sequence(ctx, [ctx.value(i) for i in range(len(ctx.inputs))], f"seq({ctx.value(0).dtype})"),
}  # fmt: skip
