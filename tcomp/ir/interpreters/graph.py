"""The NumPy reference of graphs: node by node, on logical arrays (layouts change nothing about values).

A LOOP whose body says "stop" ends early; the rows of stacked outputs that it did not reach are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tcomp.errors import InputError, IRError, TcompError
from tcomp.ir.dims import bind_dims
from tcomp.ir.dtypes import to_numpy
from tcomp.ir.expr import Expr, as_expr, evaluate_int
from tcomp.ir.graph import APPEND, IF, KERNEL, SIZE, STRUCTURAL, Graph, Node, Value
from tcomp.ir.interpreters.semantics import Array
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.shape_operands import bind_values

Observer = Callable[[Value, Array], None]


def evaluate_graph(
    graph: Graph, inputs: Mapping[str, Array], on_value: Observer | None = None, dims: Mapping[Expr, int] | None = None
) -> dict[str, Array]:
    """The outputs by name, given the inputs by name (logical arrays of the declared dtypes and shapes).

    Symbolic dims are bound by the shapes of the inputs, or given in `dims`. `on_value` is called with every node output as soon as it is
    known, those inside bodies included (inside a LOOP at each iteration). Values are dropped after their last use.
    Raises `InputError` for inputs that do not fit, `IRError` (naming the node) where the graph itself is wrong.
    """
    names = [v.name for v in graph.inputs]
    missing, unknown = sorted(set(names) - set(inputs)), sorted(set(inputs) - set(names))
    if missing or unknown:
        what = f"no value for the input `{missing[0]}`" if missing else f"there is no input `{unknown[0]}`"
        raise InputError(what, where=f"graph `{graph.name}`", hint=f"its inputs are {', '.join(names)}")
    arrays = [np.asarray(inputs[name]) for name in names]
    shapes = bind_dims([(v.name, v.shape, a.shape) for v, a in zip(graph.inputs, arrays, strict=True)], dims)
    results = _run(graph, arrays, bind_values(graph, arrays, shapes), on_value)
    return {v.name: array for v, array in zip(graph.outputs, results, strict=True)}


def _run(graph: Graph, inputs: Sequence[Array], dims: Mapping[Expr, int], on_value: Observer | None) -> list[Array]:
    """The outputs of a graph; `dims` holds what is known outside of it."""
    for v, array in zip(graph.inputs, inputs, strict=True):
        if array.dtype != to_numpy(v.dtype):
            raise InputError(f"the input `{v.name}` is {array.dtype.name} instead of {v.dtype}", where=f"graph `{graph.name}`")
    dims = bind_dims([(v.name, v.shape, a.shape) for v, a in zip(graph.inputs, inputs, strict=True)], dims)
    values: dict[Value, Array] = {v: np.asarray(a) for v, a in graph.constants.items()} | dict(zip(graph.inputs, inputs, strict=True))
    uses = graph.uses()
    for node in graph.nodes:
        try:
            given = [None if v is None else values[v] for v in node.inputs]
            if node.op is SIZE and (count := given[0]) is not None:
                dims[node.attrs["dim"]] = int(count)
                continue
            if sizes := node.attrs.get("sizes"):
                dims = {d: size for d, size in dims.items() if d not in sizes}
            results = _node(node, given, dims, on_value)
            dims = bind_dims([(v.name, v.shape, a.shape) for v, a in zip(node.outputs, results, strict=True)], dims)
        except TcompError as error:
            where = f"node `{node.name}` ({node.op.name})" + (f", {error.where}" if error.where else "")
            raise error.restated(IRError, where=where) from error
        for v, array in zip(node.outputs, results, strict=True):
            if array.dtype != to_numpy(v.dtype):
                raise IRError(f"`{v.name}` is declared {v.dtype} and computed as {array.dtype.name}", where=f"node `{node.name}`")
            values[v] = array
            if on_value is not None:
                on_value(v, array)
        uses.subtract(v for v in node.inputs if v is not None)
        for value in (*node.inputs, *node.outputs):
            if value is not None and uses[value] <= 0:
                values.pop(value, None)
    return [values[v] for v in graph.outputs]


def _node(node: Node, inputs: Sequence[Array | None], dims: Mapping[Expr, int], on_value: Observer | None) -> list[Array]:
    if node.op not in STRUCTURAL:
        placeholders = [None if v is None else v.placeholder() for v in node.inputs]
        given = {t: a for t, a in zip(placeholders, inputs, strict=True) if t is not None and a is not None}
        return evaluate(node.tensors(placeholders), given, dims)
    arrays = [a for a in inputs if a is not None]
    if node.op is APPEND:
        axis = next((n for n, (a, b) in enumerate(zip(arrays[0].shape, node.outputs[0].shape, strict=True)) if b != 1), 0)
        return [np.concatenate(arrays, axis)]
    if node.op is KERNEL:
        return _run(node.bodies[0], arrays, dims, on_value)
    if node.op is IF:
        return _run(node.bodies[0 if arrays[0].item() else 1], arrays[1:], dims, on_value)
    return _loop(node, arrays, dims, on_value)


def _loop(node: Node, inputs: Sequence[Array], dims: Mapping[Expr, int], on_value: Observer | None) -> list[Array]:
    body, attrs = node.bodies[0], node.attrs
    trips, carried, scanned = evaluate_int(as_expr(attrs["trips"]), dims), int(attrs["carried"]), int(attrs["scanned"])
    state, slices, captured = list(inputs[:carried]), inputs[carried : carried + scanned], inputs[carried + scanned :]
    stacked = [np.zeros([max(trips, 0), *(evaluate_int(d, dims) for d in v.shape[1:])], to_numpy(v.dtype)) for v in node.outputs[carried:]]
    for number in range(trips):
        rows = [a[trips - 1 - number if backwards else number] for a, backwards in zip(slices, attrs["reverse_in"], strict=True)]
        results = _run(body, [np.array(number, np.int64), *state, *map(np.asarray, rows), *captured], dims, on_value)
        state = results[:carried]
        for target, row, backwards in zip(stacked, results[carried:], attrs["reverse_out"], strict=False):
            target[trips - 1 - number if backwards else number] = row
        if attrs["condition"] and not results[len(node.outputs)].item():
            break
    return [*state, *stacked]
