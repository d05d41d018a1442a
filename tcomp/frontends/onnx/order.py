"""The order of a graph's nodes, and whether its names make sense."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from onnx import AttributeProto, GraphProto, NodeProto

from tcomp.errors import ImportModelError


def check_text(*names: str | bytes) -> None:
    """The protobuf library returns strings that are not UTF-8 as bytes."""
    for name in names:
        if not isinstance(name, str):
            raise ImportModelError(f"the name {name!r} is not valid UTF-8")


def check_names(proto: GraphProto) -> None:
    """Raises `ImportModelError` where two values of a graph have one name, or a name is no text."""
    check_text(proto.name, *(i.name for i in (*proto.input, *proto.output)), *(t.name for t in proto.initializer))
    inputs = [i.name for i in proto.input]
    initializers = [t.name for t in proto.initializer] + [t.values.name for t in proto.sparse_initializer]
    defaults = set(inputs)
    seen: set[str] = set()
    for name in [*inputs, *(n for n in initializers if n not in defaults)]:
        if name in seen or not name:
            raise ImportModelError(f"two values are called `{name}`" if name else "a value has no name", where=f"graph `{proto.name}`")
        seen.add(name)
    for node in proto.node:
        for output in node.output:
            if output in seen:
                raise ImportModelError(f"two values are called `{output}`", where=f"graph `{proto.name}`, node `{node.name}`")
            if output:
                seen.add(output)


def _reads(node: NodeProto) -> set[str]:
    """Names a node uses, those that its sub-graphs use included."""
    names = {i for i in node.input if i}
    stack = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
    while stack:
        graph = stack.pop()
        names.update(o.name for o in graph.output)
        for inner in graph.node:
            names.update(i for i in inner.input if i)
            stack.extend(a.g for a in inner.attribute if a.type == AttributeProto.GRAPH)
    return names


def ordered(nodes: Sequence[NodeProto], outputs: Iterable[str], where: str) -> list[NodeProto]:
    """The nodes that the outputs need, in topological order (the given one where it is). Raises `ImportModelError` on a cycle."""
    for node in nodes:
        check_text(node.op_type, node.domain, node.name, *node.input, *node.output)
    producer = {o: i for i, node in enumerate(nodes) for o in node.output if o}
    needs: dict[int, set[int]] = {}
    stack = [producer[o] for o in outputs if o in producer]
    while stack:
        i = stack.pop()
        if i not in needs:
            needs[i] = {producer[n] for n in _reads(nodes[i]) if n in producer}
            stack.extend(needs[i])
    users: dict[int, list[int]] = {}
    for i, before in needs.items():
        for j in before:
            users.setdefault(j, []).append(i)
    waiting = {i: len(before) for i, before in needs.items()}
    ready = [i for i, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(nodes[i])
        for user in users.get(i, ()):
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, user)
    if len(order) != len(needs):
        stuck = next(nodes[i] for i, count in waiting.items() if count)
        raise ImportModelError("the graph has a cycle", where=f"{where}, through node `{stuck.name}` ({stuck.op_type})")
    return order
