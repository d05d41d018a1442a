"""Dead code elimination: nodes, constants, and inputs and outputs of sub-graphs that nothing needs.

A loop's carried value is needed if its final value is, or if computing something needed in a later iteration reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from tcomp.ir.graph import IF, LOOP, Graph, Node, Value

T = TypeVar("T")


def eliminate_dead(graph: Graph) -> Graph:
    """The graph without what its outputs do not depend on; its own inputs and outputs stay as they are."""
    needed = set(graph.outputs)
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if needed.isdisjoint(node.outputs):
            continue
        if node.op is LOOP:
            node = _trim_loop(node, needed)
        elif node.bodies:
            node = _trim_branches(node, needed)
        nodes.append(node)
        needed.update(v for v in node.inputs if v is not None)
    constants = {v: array for v, array in graph.constants.items() if v in needed}
    return replace(graph, nodes=tuple(reversed(nodes)), constants=constants)


def _trim_branches(node: Node, needed: Collection[Value]) -> Node:
    """IF and KERNEL: all bodies have the node's outputs, and its inputs (those of an IF after the condition)."""
    kept = [n for n, v in enumerate(node.outputs) if v in needed]
    bodies = [eliminate_dead(replace(body, outputs=_pick(body.outputs, kept))) for body in node.bodies]
    read = [_used(body) for body in bodies]
    inputs = [
        n for n in range(len(bodies[0].inputs)) if any(b.inputs[n] in r for b, r in zip(bodies, read, strict=True))
    ]
    first = 1 if node.op is IF else 0
    return replace(
        node,
        inputs=(*node.inputs[:first], *_pick(node.inputs[first:], inputs)),
        outputs=_pick(node.outputs, kept),
        bodies=tuple(replace(body, inputs=_pick(body.inputs, inputs)) for body in bodies),
    )


def _trim_loop(node: Node, needed: Collection[Value]) -> Node:
    body, attrs = node.bodies[0], dict(node.attrs)
    carried, scanned = attrs["carried"], attrs["scanned"]
    stacked = len(node.outputs) - carried
    condition = body.outputs[carried + stacked :]
    states = [n for n in range(carried) if node.outputs[n] in needed]
    stacks = [n for n in range(stacked) if node.outputs[carried + n] in needed]
    while True:
        results = (*_pick(body.outputs, states), *_pick(body.outputs[carried:], stacks), *condition)
        trimmed = eliminate_dead(replace(body, outputs=results))
        used = _used(trimmed)
        grown = [n for n in range(carried) if n in states or body.inputs[1 + n] in used]
        if grown == states:
            break
        states = grown
    slices = [n for n in range(scanned) if body.inputs[1 + carried + n] in used]
    captured = [
        n for n in range(len(node.inputs) - carried - scanned) if body.inputs[1 + carried + scanned + n] in used
    ]
    inputs = [*states, *(carried + n for n in slices), *(carried + scanned + n for n in captured)]
    attrs.update(
        carried=len(states),
        scanned=len(slices),
        reverse_in=_pick(attrs["reverse_in"], slices),
        reverse_out=_pick(attrs["reverse_out"], stacks),
    )
    return replace(
        node,
        attrs=attrs,
        inputs=_pick(node.inputs, inputs),
        outputs=_pick(node.outputs, [*states, *(carried + n for n in stacks)]),
        bodies=(replace(trimmed, inputs=(body.inputs[0], *_pick(body.inputs[1:], inputs))),),
    )


def _used(graph: Graph) -> set[Value | None]:
    return {*graph.outputs, *(v for node in graph.nodes for v in node.inputs)}


def _pick(items: Sequence[T], positions: Sequence[int]) -> tuple[T, ...]:
    return tuple(items[n] for n in positions)
