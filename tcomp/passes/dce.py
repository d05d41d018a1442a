"""Dead code elimination: nodes, constants, and inputs and outputs of sub-graphs that nothing needs.

A loop's carried value is needed if its final value is, or if computing something needed in a later iteration reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from tcomp.ir.expr import Expr, variables
from tcomp.ir.graph import IF, LOOP, SIZE, Graph, Needed, Node, is_needed, needs

T = TypeVar("T")


def eliminate_dead(graph: Graph, trimmed: bool = False) -> Graph:
    """The graph without what its outputs do not depend on; its own inputs and outputs stay as they are. Bodies that are `trimmed` are
    entered only where an output of their node is not needed: or each pass would take time in proportion to their size times their depth."""
    counts = any(node.op is SIZE for node in graph.nodes)
    needed: Needed = {*graph.outputs, *variables(*(d for v in graph.outputs for d in v.shape if counts and isinstance(d, Expr)))}
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if not is_needed(node, needed):
            continue
        if node.bodies:
            unchanged = trimmed and needed.issuperset(node.outputs)
            node = _trim_loop(node, needed, unchanged) if node.op is LOOP else _trim_branches(node, needed, unchanged)
        nodes.append(node)
        needed.update(needs(node) if counts else node.inputs)
    constants = {v: array for v, array in graph.constants.items() if v in needed}
    return replace(graph, nodes=tuple(reversed(nodes)), constants=constants)


def _trim_branches(node: Node, needed: Needed, unchanged: bool) -> Node:
    """IF and KERNEL: all bodies have the node's outputs, and its inputs (those of an IF after the condition)."""
    used = [n for n, v in enumerate(node.outputs) if v in needed]
    bodies = node.bodies if unchanged else [eliminate_dead(replace(b, outputs=_pick(b.outputs, used))) for b in node.bodies]
    read = sorted({n for body in bodies for n in _read_inputs(body)})
    first = 1 if node.op is IF else 0
    inputs, trimmed = _pick(node.inputs[first:], read), tuple(replace(body, inputs=_pick(body.inputs, read)) for body in bodies)
    return replace(node, inputs=(*node.inputs[:first], *inputs), outputs=_pick(node.outputs, used), bodies=trimmed)


def _trim_loop(node: Node, needed: Needed, unchanged: bool) -> Node:
    (body,), attrs, carried = node.bodies, dict(node.attrs), node.attrs["carried"]
    stacked, first_captured = len(node.outputs) - carried, carried + attrs["scanned"]
    condition = body.outputs[carried + stacked :]
    states = [n for n in range(carried) if node.outputs[n] in needed]
    stacks = [n for n in range(stacked) if node.outputs[carried + n] in needed]
    while True:
        results = (*_pick(body.outputs, states), *_pick(body.outputs[carried:], stacks), *condition)
        trimmed = body if unchanged else eliminate_dead(replace(body, outputs=results))
        read = [n - 1 for n in _read_inputs(trimmed) if n]  # by the node's inputs: the body has the iteration number before them
        grown = sorted({*states, *(n for n in read if n < carried)})
        if grown == states:
            break
        states = grown
    inputs = [*states, *(n for n in read if n >= carried)]
    slices = [n - carried for n in inputs if carried <= n < first_captured]
    attrs |= {"carried": len(states), "scanned": len(slices)}
    attrs |= {"reverse_in": _pick(attrs["reverse_in"], slices), "reverse_out": _pick(attrs["reverse_out"], stacks)}
    outputs = _pick(node.outputs, [*states, *(carried + n for n in stacks)])
    trimmed = replace(trimmed, inputs=(body.inputs[0], *_pick(body.inputs[1:], inputs)))
    return replace(node, attrs=attrs, inputs=_pick(node.inputs, inputs), outputs=outputs, bodies=(trimmed,))


def _read_inputs(graph: Graph) -> list[int]:
    """The inputs, by number, that a graph reads or passes on."""
    used = {*graph.outputs, *(v for node in graph.nodes for v in node.inputs)}
    return [n for n, v in enumerate(graph.inputs) if v in used]


def _pick(items: Sequence[T], positions: Iterable[int]) -> tuple[T, ...]:
    return tuple(items[n] for n in positions)
