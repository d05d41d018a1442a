"""Verifies graphs: what operators take and give, bodies of structural ones, layouts."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import Any

import numpy as np

from tcomp.errors import IRError, TcompError
from tcomp.ir.dtypes import BITS, to_numpy
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr
from tcomp.ir.graph import APPEND, IF, KERNEL, SIZE, STRUCTURAL, Graph, Node, Value, infer, needs
from tcomp.ir.layout import Layout
from tcomp.ir.simplify import as_dim, same_dim, same_shape
from tcomp.ir.verify.expressions import Require, require_at, verify_expr
from tcomp.ir.verify.loops import verify_te


def verify_graph(graph: Graph) -> None:
    """Single assignment, definition before use, outputs that operators really give, closed bodies with fitting signatures."""
    where = f"graph `{graph.name}`"
    known: set[Value] = set()
    require_at(where, len({v.name for v in graph.inputs}) == len(graph.inputs), "two inputs have the same name")

    def define(v: Value, place: str) -> None:
        require = partial(require_at, place)
        require(v not in known, "`{}` is defined twice", v.name)
        known.add(v)
        require(v.dtype in BITS, "unknown dtype `{}` of `{}`", v.dtype, v.name)
        for d in v.shape:
            if isinstance(d, Expr):
                verify_expr(d, f"{place}, shape of `{v.name}`")
            else:
                require(d >= 0, "`{}` has an extent of {}", v.name, d)
        if v.layout is not None:
            _verify_layout(v.layout, v, require)

    for v in (*graph.inputs, *graph.constants):
        define(v, where)
    for v, array in graph.constants.items():
        fits = array.shape == v.shape and array.dtype == to_numpy(v.dtype)
        require_at(where, fits, "the constant `{!r}` holds {}{}", v, array.dtype.name, list(array.shape))
    counted: set[Any] = {node.attrs.get("dim") for node in graph.nodes if node.op is SIZE}
    for node in graph.nodes:
        place = f"{where}, node `{node.name}` ({node.op.name})"
        for value in filter(None, node.inputs):
            require_at(place, value in known, "`{}` is used but not defined before", value.name, why="bodies are closed: pass it in")
        for v in node.outputs:
            define(v, place)
        for attr in node.attrs.values():
            _verify_attribute(attr, place)
        if node.op in STRUCTURAL:
            _verify_structural(node, place, counted)
        else:
            _verify_application(node, place)
    for v in graph.outputs:
        require_at(where, v in known, "the output `{}` is not defined", v.name)


def _verify_layout(layout: Layout, v: Value, require: Require) -> None:
    """Every axis is stored exactly once: its pieces, innermost first, continue each other up to an uncut one."""
    why = f"the value has {len(v.shape)}"
    require(layout.rank == len(v.shape), "the layout {} of `{}` is for {} dimensions", layout, v.name, layout.rank, why=why)
    for axis in range(layout.rank):
        pieces = sorted((p for p in layout.pieces if p.axis == axis), key=lambda p: p.div)
        ends = [1, *(p.div * (p.mod or 1) for p in pieces)]
        once = pieces and all(p.div == end and (p.mod is None) == (p is pieces[-1]) for p, end in zip(pieces, ends, strict=False))
        require(once, "the layout {} of `{}` does not store axis {} exactly once", layout, v.name, axis)
        halo = all(min(p.before, p.after) >= 0 and (len(pieces) == 1 or p.before == p.after == 0) for p in pieces)
        require(halo, "the layout {} of `{}` has a halo around a part of axis {}", layout, v.name, axis)


def _verify_attribute(value: Any, place: str) -> None:
    for item in value if isinstance(value, tuple) else ():
        _verify_attribute(item, place)
    fits = value is None or (isinstance(value, tuple | bool | int | float | str | Expr) and not isinstance(value, np.generic))
    require_at(place, fits, "an attribute is a {}", type(value).__name__, hint="None, bool, int, float, str, dims and tuples of these")


def _verify_application(node: Node, place: str) -> None:
    require_at(place, not node.bodies, "only structural operators have bodies")
    require_at(place, node.op.function is not None, "the operator `{}` has no definition", node.op.name)
    try:
        derived = infer(node.op, node.inputs, node.attrs, node.name).outputs
        verify_te(derived, (d for d in needs(node) if isinstance(d, Expr)))
    except TcompError as error:
        raise error.restated(IRError, where=f"{place}: {error.where}") from error
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        raise IRError(f"the operator does not take these inputs and attributes: {error}", where=place) from error
    _verify_types("the operator", derived, "the node declares", node.outputs, place)


def _verify_types(
    giver: str, given: Sequence[Any], taker: str, taken: Sequence[Any], place: str, layouts: bool = False, counted: Container[Dim] = ()
) -> None:
    """Where a size of the taker is `counted`, any will do."""
    require_at(place, len(given) == len(taken), "{} gives {} values, {} {}", giver, len(given), taker, len(taken))
    for a, b in zip(given, taken, strict=True):
        shape = [e if e in counted else d for d, e in zip(a.shape, b.shape, strict=False)]
        same = a.dtype == b.dtype and len(a.shape) == len(b.shape) and same_shape(shape, b.shape) and (not layouts or a.layout == b.layout)
        require_at(place, same, "{} gives {!r}, {} {!r}", giver, a, taker, b)


def _verify_structural(node: Node, place: str, counted: Container[Dim]) -> None:
    require, wanted, is_kernel = partial(require_at, place), 2 if node.op is IF else 1, node.op is KERNEL
    if node.op is SIZE:
        count, *others = node.inputs
        fits = count is not None and (count.dtype, count.shape, others, node.outputs) == (INDEX, (), [], ())
        require(fits and node.attrs.keys() == {"dim", "bound"}, "a size is one int64 scalar, with `dim` and `bound`")
        require(isinstance(d := node.attrs["dim"], Expr) and d.op == "var", "`{}` is not a symbolic dim", node.attrs["dim"])
        return
    if node.op is APPEND:
        _verify_append(node, place)
        return
    require(len(node.bodies) == wanted, "`{}` has {} bodies instead of {}", node.op.name, len(node.bodies), wanted)
    inputs = [v for v in node.inputs if v is not None]
    require(len(inputs) == len(node.inputs), "an input of a structural operator is left out")
    for body in node.bodies:
        try:
            verify_graph(body)
        except IRError as error:
            raise error.restated(IRError, where=f"{place}: {error.where}") from error
    if node.op is IF:
        require(inputs and inputs[0].dtype == "bool" and all(d == 1 for d in inputs[0].shape), "the condition is not one bool")
        inputs = inputs[1:]
    elif is_kernel:
        require(all(inner.op not in STRUCTURAL for inner in node.bodies[0].nodes), "a kernel contains a structural operator")
    else:
        _verify_loop(node, inputs, place)
        return
    for body in node.bodies:
        _verify_types("the node", inputs, "the body takes", body.inputs, place, layouts=is_kernel)
        _verify_types("the body", body.outputs, "the node declares", node.outputs, place, is_kernel, () if is_kernel else counted)


def _verify_append(node: Node, place: str) -> None:
    require, (old, new) = partial(require_at, place), node.inputs if len(node.inputs) == 2 else (None, None)
    require(old is not None and new is not None and len(node.outputs) == 1, "state and new rows are appended, to one value")
    assert old is not None and new is not None
    (whole,) = node.outputs
    axes = [n for n, (a, b) in enumerate(zip(old.shape, whole.shape, strict=False)) if not same_shape((a,), (b,))]
    axis = axes[0] if axes else 0
    sizes = [(*v.shape[:axis], as_dim(as_expr(old.shape[axis]) + new.shape[axis]), *v.shape[axis + 1 :]) for v in (old, new)]
    fits = old.dtype == new.dtype == whole.dtype and all(len(v.shape) == len(whole.shape) for v in (old, new))
    require(fits and all(same_shape(s, whole.shape) for s in sizes), "`{!r}` and `{!r}` do not make `{!r}`", old, new, whole)
    require(all(d == 1 for d in old.shape[:axis]), "rows that are appended do not stand behind each other")


def _verify_loop(node: Node, inputs: Sequence[Value], place: str) -> None:
    require, body, attrs, outputs = partial(require_at, place), node.bodies[0], node.attrs, node.outputs
    missing = {"trips", "carried", "scanned", "reverse_in", "reverse_out", "condition"} - set(attrs)
    require(not missing, "a loop lacks the attribute `{}`", min(missing, default=""))
    trips, carried, scanned = attrs["trips"], attrs["carried"], attrs["scanned"]
    stacked = len(outputs) - carried
    what = "{} carried and {} scanned values do not fit {} inputs, {} outputs"
    require(len(inputs) >= carried + scanned and stacked >= 0, what, carried, scanned, len(inputs), len(outputs))
    flags = len(attrs["reverse_in"]) == scanned and len(attrs["reverse_out"]) == stacked
    require(flags, "reverse_in and reverse_out need one flag for each scanned input and stacked output")

    def rows(values: Sequence[Value]) -> list[Value]:
        for v in values:
            whole = v.shape and same_dim(v.shape[0], trips)
            require(whole, "`{!r}` does not have one row for each of the {} iterations", v, trips)
        return [Value(v.name, v.dtype, v.shape[1:]) for v in values]

    given = [Value("iteration", INDEX, ()), *inputs[:carried], *rows(inputs[carried : carried + scanned]), *inputs[carried + scanned :]]
    sizes = attrs.get("sizes", ())
    results = [*outputs[:carried], *rows(outputs[carried:]), *([Value("condition", "bool", ())] if attrs["condition"] else [])]
    results += [Value("size", INDEX, ()) for _ in sizes]
    _verify_types("the node", given, "the body takes", body.inputs, place, counted=sizes)
    _verify_types("the body", body.outputs, "the node declares", results, place, counted=sizes)
    _verify_types("the node", inputs[:carried], "the carried outputs are", outputs[:carried], place, counted=sizes)
