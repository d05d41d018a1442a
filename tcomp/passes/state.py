"""State: outputs that continue an input (present = past and some new rows) live in the memory of that input. Those of the type of an input
replace it: a run reads one and writes the other, and nothing is to be done about them here.

    present = concat(past, new) along any axis   =   transpose(append(past', transpose(new))), rows first

Along their first axis, rows are appended behind the others: where an output has the address of the input (as `runtime.state` sees to), the
new rows are all that is written; else the old ones are copied first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tcomp.errors import InputError
from tcomp.ir.graph import APPEND, Graph, Node, Value
from tcomp.ops.movement import CONCAT, IDENTITY, TRANSPOSE

_PAST = ("past", "past_key_values", "past_key_value")  # what names of inputs have where those of outputs have "present"


def state_pairs(graph: Graph, given: Mapping[str, str] | str) -> dict[str, str]:
    """The pairs (input, output) of a graph in which the output continues the input, of those given, or, for "auto", of those of names with
    "past" and "present". Raises `InputError` for names that the graph does not have, and for outputs that are no state."""
    pairs = _named(graph, given)
    grown = {past: present for past, present in pairs.items() if _continuation(graph, past, present) is not None}
    if given != "auto":
        for past in pairs.keys() - grown.keys() - replaced_pairs(graph, given).keys():
            why = "it is not that input with new rows behind it, nor of its type"
            raise InputError(f"the output `{pairs[past]}` does not continue `{past}`", why=why)
        if len(set(pairs.values())) < len(pairs):
            raise InputError("one output cannot continue two inputs")
    return grown


def replaced_pairs(graph: Graph, given: Mapping[str, str] | str) -> dict[str, str]:
    """The pairs (input, output) of those meant in which the output is of the input's type, and takes its place in the next run."""
    types = {v.name: (v.dtype, v.shape) for v in graph.inputs}
    results = {v.name: (v.dtype, v.shape) for v in graph.outputs}
    return {past: present for past, present in _named(graph, given).items() if types[past] == results[present]}


def _named(graph: Graph, given: Mapping[str, str] | str) -> dict[str, str]:
    inputs, outputs = {v.name for v in graph.inputs}, [v.name for v in graph.outputs]
    if given == "auto":
        found = {}
        for name in outputs:
            past = next((p for word in _PAST if (p := name.replace("present", word)) in inputs and p != name), None)
            if past is not None:
                found[past] = name
        return found
    if isinstance(given, str):
        raise InputError(f"`{given}` says nothing of state", hint='"auto", or pairs of an input and an output')
    for past, present in given.items():
        for name, known, kind in ((past, inputs, "input"), (present, outputs, "output")):
            if name not in known:
                raise InputError(f"there is no {kind} `{name}` to be state", hint=f"there are {', '.join(sorted(known))}")
    return dict(given)


def _continuation(graph: Graph, past: str, present: str) -> Node | None:
    """The node that puts rows behind an input, if that is what an output is."""
    value, producers = next(v for v in graph.outputs if v.name == present), graph.producers()
    node = producers.get(value)
    while node is not None and node.op is IDENTITY and node.inputs[0] is not None:
        node = producers.get(node.inputs[0])
    fits = node is not None and node.op is CONCAT and len(node.inputs) == 2
    return node if node is not None and fits and node.inputs[0] in graph.inputs and node.inputs[0].name == past else None


def rows_first(graph: Graph, pairs: Mapping[str, str]) -> Graph:
    """The graph with the axis along which state grows as the first one of it, in inputs and outputs."""
    for past, present in pairs.items():
        node = _continuation(graph, past, present)
        assert node is not None
        old, new = node.inputs
        assert old is not None and new is not None
        axis, rank = int(node.attrs["axis"]), len(old.shape)
        if axis and any(d != 1 for d in old.shape[:axis]):
            perm = (axis, *(d for d in range(rank) if d != axis))
            graph = _moved(graph, node, old, new, present, perm)
    return graph


def _moved(graph: Graph, node: Node, old: Value, new: Value, present: str, perm: tuple[int, ...]) -> Graph:
    inverse = tuple(perm.index(d) for d in range(len(perm)))
    (result,) = node.outputs

    def permuted(v: Value, name: str) -> Value:
        return Value(name, v.dtype, [v.shape[d] for d in perm])

    outer = Value(f"{old.name}.as_given", old.dtype, old.shape)
    past, rows, grown = permuted(old, old.name), permuted(new, f"{present}.rows"), permuted(result, present)
    inner = Value(f"{present}.as_given", result.dtype, result.shape)
    final = next(v for v in graph.outputs if v.name == present)
    swap: dict[Value | None, Value] = {old: outer, result: inner}
    nodes = [Node(TRANSPOSE, (past,), (outer,), {"perm": inverse}, outer.name)]
    for n in graph.nodes:
        if n is node:
            nodes.append(Node(TRANSPOSE, (swap.get(new, new),), (rows,), {"perm": perm}, rows.name))
            nodes.append(Node(CONCAT, (past, rows), (grown,), {"axis": 0}, node.name))
            nodes.append(Node(TRANSPOSE, (grown,), (inner,), {"perm": inverse}, inner.name))
        elif final is result or final not in n.outputs:  # a copy of the result for the output is not needed any more
            nodes.append(replace(n, inputs=tuple(swap.get(v, v) for v in n.inputs)))
    inputs = tuple(past if v is old else v for v in graph.inputs)
    outputs = tuple(grown if v is final else swap.get(v, v) for v in graph.outputs)
    return replace(graph, inputs=inputs, outputs=outputs, nodes=tuple(nodes))


def append_rows(graph: Graph, pairs: Mapping[str, str]) -> Graph:
    """The graph with APPEND in place of the nodes that append new rows to state. Raises `InputError` where the graph has no such node."""
    appended = {}
    for past, present in pairs.items():
        node = _continuation(graph, past, present)
        outputs = [] if node is None else [v for v in graph.outputs if v.name == present]
        if node is None or outputs != [*node.outputs] or any(d != 1 for d in node.outputs[0].shape[: int(node.attrs["axis"])]):
            raise InputError(f"the output `{present}` cannot continue `{past}` in its memory", why="passes have made another step of it")
        appended[node] = Node(APPEND, node.inputs, node.outputs, {}, node.name)
    return replace(graph, nodes=tuple(appended.get(n, n) for n in graph.nodes))
