"""The names in an ONNX graph: what they are, who reads them, and in which order its nodes can be computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter

from onnx import AttributeProto, GraphProto, NodeProto

from tcomp.errors import ImportModelError
from tcomp.ir.expr import postorder


def check_text(*names: str | bytes) -> None:
    """Raises `ImportModelError` for a name that is not UTF-8: the protobuf library returns those as bytes."""
    for name in names:
        if not isinstance(name, str):
            raise ImportModelError(f"the name {name!r} is not valid UTF-8")


def initializers(proto: GraphProto) -> list[str]:
    """The names of the constants of a graph."""
    return [*(t.name for t in proto.initializer), *(t.values.name for t in proto.sparse_initializer)]


def check_names(proto: GraphProto) -> None:
    """Raises `ImportModelError` where two values of a graph have one name, or a name is not text."""
    check_text(proto.name, *(i.name for i in (*proto.input, *proto.output)), *(t.name for t in proto.initializer))
    where, inputs = f"graph `{proto.name}`", [i.name for i in proto.input]
    defaults = set(inputs)  # an initializer of the same name is the default of an input
    named = [(name, where) for name in (*inputs, *(n for n in initializers(proto) if n not in defaults))]
    if not all(name for name, _ in named):
        raise ImportModelError("a value has no name", where=where)
    seen: set[str] = set()
    for name, place in (*named, *((o, f"{where}, node `{node.name}`") for node in proto.node for o in node.output if o)):
        if name in seen:
            raise ImportModelError(f"two values are called `{name}`", where=place)
        seen.add(name)


class Reads:
    """What the nodes of a model read from the graph they are in: a sub-graph is walked once, however deep it lies."""

    def __init__(self) -> None:
        self.free: dict[int, tuple[GraphProto, set[str]]] = {}  # by identity; the graphs are held, so that none takes another's place

    def of_node(self, node: NodeProto) -> set[str]:
        """Names a node uses, those that its sub-graphs take from outside included."""
        graphs = (a.g for a in node.attribute if a.type == AttributeProto.GRAPH)
        named = {a.s.decode(errors="replace") for a in node.attribute if node.op_type == "Gradient" and a.name == "y"}
        return {name for name in node.input if name}.union(named, *map(self.of_graph, graphs))

    def of_graph(self, graph: GraphProto) -> set[str]:
        """Names a graph uses and does not define."""
        if (found := self.free.get(id(graph))) is None:
            used = {o.name for o in graph.output}.union(*map(self.of_node, graph.node))
            used.difference_update((i.name for i in graph.input), initializers(graph), *(node.output for node in graph.node))
            found = self.free[id(graph)] = graph, used
        return found[1]


def ordered(nodes: Sequence[NodeProto], outputs: Iterable[str], where: str, reads: Reads) -> list[NodeProto]:
    """The nodes that the outputs need, in topological order (the given one where it is). Raises `ImportModelError` on a cycle."""
    for node in nodes:
        check_text(node.op_type, node.domain, node.name, *node.input, *node.output)
    producer = {o: i for i, node in enumerate(nodes) for o in node.output if o}
    needs = {i: {producer[n] for n in reads.of_node(node) if n in producer} for i, node in enumerate(nodes)}
    wanted = set(postorder([producer[o] for o in outputs if o in producer], lambda i: list(needs[i])))
    try:
        order = [*TopologicalSorter(needs).static_order()]
    except CycleError as error:
        stuck = nodes[error.args[1][0]]
        raise ImportModelError("the graph has a cycle", where=f"{where}, through node `{stuck.name}` ({stuck.op_type})") from None
    given = all(before < i for i, read in needs.items() for before in read)
    return [nodes[i] for i in (range(len(nodes)) if given else order) if i in wanted]
