"""Partition: operators become kernels. One reduction (or none) with the elementwise work around it is one kernel.

An edge is fused when its value has one reader and
  - the reader is elementwise over the value at the same index (an epilogue), or
  - the producer is free of reductions and the reader uses each element about once (a prologue), or
  - the producer only moves elements and every index stays affine, whoever reads it (a view).
Why an edge is not fused is recorded, edge by edge.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tcomp.ir import expr as E
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Expr
from tcomp.ir.graph import IF, KERNEL, LOOP, Graph, GraphBuilder, Node, Value, infer
from tcomp.ir.halo import reach
from tcomp.ir.simplify import linear, simplify
from tcomp.ir.te import Tensor, tensors

MOST_NODES = 40  # operators in one kernel, so that compile time stays bounded
MOST_TAPS = 8  # elements of one operand that an operator reads for one element, unless it reduces
INLINE_ELEMENTS = 1  # constants up to this size become literals of the kernel


def partition(graph: Graph, note: Callable[[str], None] = lambda text: None, halos: bool = True) -> Graph:
    """The graph with every operator inside a KERNEL node; control flow stays, its bodies are partitioned too.

    With `halos` values may get zeros around them (`choose_layouts`), and padding becomes part of the kernels that read it.
    `note` receives one line for each edge that was not fused, with the reason.
    """
    used = set(graph.outputs) | {v for n in graph.nodes for v in n.inputs if v is not None}
    facts = {n: _Facts.of(n, used) for n in graph.nodes if n.op not in (IF, LOOP)}
    groups = _grouped(graph, facts, note, halos)
    return _rebuilt(graph, groups, used, note, halos)


# ---------------------------------------------------------------- what a node is


@dataclass(eq=False)
class _Facts:
    """Structure of one node's TE, as fusion needs it."""

    node: Node
    outputs: tuple[Tensor, ...]
    inputs: dict[Value, Tensor]
    imperative: bool
    reduces: bool

    @staticmethod
    def of(node: Node, used: Container[Value]) -> _Facts:
        results = infer(node.op, node.inputs, node.attrs, node.name)
        outputs = tuple(t for v, t in zip(node.outputs, results, strict=True) if v in used)
        placeholders: dict[Value, Tensor] = {}
        stages = list(tensors(outputs))
        for t in stages:
            if t.body is None and t.extern is None:
                for v in node.inputs:
                    if v is not None and v.name == t.name and v not in placeholders:
                        placeholders[v] = t
        return _Facts(
            node,
            outputs,
            placeholders,
            any(t.extern is not None for t in stages),
            any(_folds(t.body) for t in stages if t.body is not None),
        )

    def reads_of(self, value: Value) -> list[tuple[Tensor, Expr]]:
        """(reader, read) of every access to an input."""
        found = []
        for t in tensors(self.outputs):
            if t.body is not None:
                found += [(t, r) for r in E.reads(t.body) if r.attr.name == value.name and r.attr.body is None and r.attr.extern is None]
        return found

    @property
    def moves_only(self) -> bool:
        """The result is one input element, at an affine index."""
        if len(self.outputs) != 1 or self.imperative or self.reduces:
            return False
        stages = [t for t in tensors(self.outputs) if t.body is not None]
        return len(stages) == 1 and stages[0].body is not None and stages[0].body.op == "read" and _affine(stages[0].body)

    @property
    def dear(self) -> int:
        """A rough count of the arithmetic for one element."""
        bodies = [t.body for t in tensors(self.outputs) if t.body is not None]
        return sum(
            (8 if e.op in E.UNARY and e.op not in ("neg", "abs", "not") else 1)
            for e in E.walk(*bodies)
            if e.op not in ("var", "const", "read") and is_float(e.dtype)
        )


def _folds(body: Expr) -> bool:
    """Whether an element is folded from many: by a reduction, or by a sum that is written out."""
    reads = E.reads(body)
    return any(e.op == "reduce" for e in E.walk(body)) or any(sum(r.attr is t for r in reads) > MOST_TAPS for t in {r.attr for r in reads})


def _affine(r: Expr) -> bool:
    return all(len(m) <= 1 and (not m or m[0].op == "var") for i in r.args for m in linear(i))


def _aligned(facts: _Facts, value: Value) -> bool:
    """Every access reads the element at the index that is being computed, with the same shape."""
    output = facts.outputs[0]
    if len(facts.outputs) != 1 or output.shape != value.shape:
        return False
    return all(
        t.shape == value.shape and all(i is a or n == 1 for i, a, n in zip(r.args, t.axes, t.shape, strict=True))
        for t, r in facts.reads_of(value)
    )


def _uses_once(facts: _Facts, value: Value) -> bool:
    """No element of the value is read more than a few times by one kernel."""
    for t, r in facts.reads_of(value):
        axes = set(t.axes)
        assert t.body is not None
        for e in E.walk(t.body):
            if e.op == "reduce":
                axes |= set(e.attr[1])
        if any(E.bounds(a)[1] != 0 for a in axes - set(E.variables(*r.args))):
            return False
        if any(len(set(E.variables(i)) & axes) > 1 for i in r.args):
            return False  # a window: neighbours read the same elements
    return True


# ---------------------------------------------------------------- grouping


@dataclass(eq=False)
class _Group:
    nodes: list[Node]
    reduces: bool
    closed: bool  # nothing may join
    pointwise: bool = True  # every edge inside reads its value at the index being computed


def _grouped(graph: Graph, facts: Mapping[Node, _Facts], note: Callable[[str], None], halos: bool) -> dict[Node, _Group]:
    producers, consumers = graph.producers(), graph.consumers()
    groups: dict[Node, _Group] = {}
    for node in graph.nodes:
        groups[node] = _Group([node], False, True)
        if node in facts:
            groups[node] = _Group([node], facts[node].reduces, facts[node].imperative or len(facts[node].outputs) != 1)
        # Nearest producers first: of several reductions that could take this node as their epilogue, the last one computed gets it.
        for value in sorted({v for v in node.inputs if v in producers}, key=lambda v: -graph.nodes.index(producers[v])):
            _try(graph, facts, groups, producers[value], value, consumers, halos)
    changed = True
    while changed:  # readers may have come together since: x * sigmoid(x) reads x twice, in one kernel
        changed = False
        for node in graph.nodes:
            for value in node.outputs:
                if value in consumers and groups[node].nodes[-1] is node:
                    changed |= _try(graph, facts, groups, node, value, consumers, halos) is None
    for node in graph.nodes:
        for value in node.outputs:
            for reader in consumers.get(value, ()):
                if groups[reader] is not groups[node]:
                    why = _why_not(graph, facts, groups, node, value, consumers, halos)
                    note(f"%{value.name}: {node.op.name} -> {reader.op.name} ({reader.name}) not fused: {why}")
    return groups


def _try(
    graph: Graph,
    facts: Mapping[Node, _Facts],
    groups: dict[Node, _Group],
    producer: Node,
    value: Value,
    consumers: Mapping[Value, Sequence[Node]],
    halos: bool,
) -> str | None:
    """Merge the group of a value's producer into that of its readers; the reason if that cannot be."""
    if groups[producer] is groups[consumers[value][0]]:
        return "they are one kernel"
    why = _why_not(graph, facts, groups, producer, value, consumers, halos)
    if why is None:
        first, second = groups[producer], groups[consumers[value][0]]
        order = {n: k for k, n in enumerate(graph.nodes)}
        members = sorted([*first.nodes, *second.nodes], key=order.__getitem__)
        pointwise = first.pointwise and second.pointwise and all(_aligned(facts[r], value) for r in consumers[value])
        merged = _Group(members, first.reduces or second.reduces, False, pointwise)
        groups.update((n, merged) for n in members)
    return why


def _why_not(
    graph: Graph,
    facts: Mapping[Node, _Facts],
    groups: Mapping[Node, _Group],
    producer: Node,
    value: Value,
    consumers: Mapping[Value, Sequence[Node]],
    halos: bool,
) -> str | None:
    """None if the edges from a value to all its readers can be fused."""
    readers = consumers[value]
    other, group = groups[producer], groups.get(readers[0])
    if group is None or any(groups.get(r) is not group for r in readers):
        return f"the value has {len(readers)} readers in different kernels"
    if producer not in facts or readers[0] not in facts:
        return "control flow is no part of a kernel"
    if group.closed or other.closed:
        return "imperative or multi-output operators are kernels of their own"
    if value in graph.outputs:
        return "the value is an output of the graph"
    if len(group.nodes) + len(other.nodes) > MOST_NODES:
        return f"a kernel has at most {MOST_NODES} operators"
    if group.reduces and other.reduces:
        return "both sides reduce"
    aligned = all(_aligned(facts[r], value) for r in readers)
    if other.reduces:
        return None if aligned and group.pointwise else "the reader is not elementwise over the result of a reduction"
    if group.reduces and not (aligned and group.pointwise and not any(facts[r].reduces for r in readers)):
        if len(readers) == 1 and all(facts[n].moves_only for n in other.nodes):
            return None
        if halos and len(other.nodes) == 1 and _reads_halo(graph, facts, producer, value, readers):
            return None
        if all(_uses_once(facts[r], value) for r in readers) and not _contracts(group, facts):
            return None
        return "the reader uses each element many times, it would be computed anew each time"
    if aligned or all(_uses_once(facts[r], value) for r in readers):
        return None
    dear = sum(facts[n].dear for n in other.nodes)
    return None if dear <= 2 else "the reader would compute each element several times"


def _reads_halo(graph: Graph, facts: Mapping[Node, _Facts], padding: Node, value: Value, readers: Sequence[Node]) -> bool:
    """Whether a node puts zeros around what another kernel computes: that one can store them around its result, and the readers' indices
    may reach into them."""
    (t,), sources = facts[padding].outputs, [v for v in padding.inputs if v is not None]
    if len(sources) != 1 or t.body is None or sources[0] in graph.outputs or facts[padding].imperative:
        return False
    maker = graph.producers().get(sources[0])
    if maker is None or maker not in facts or facts[maker].imperative or len(maker.outputs) != 1 or reach(simplify(t.body)) is None:
        return False
    reads = [r for n in readers for _, r in facts[n].reads_of(value)]
    composed = [simplify(E.substitute(t.body, dict(zip(t.axes, r.args, strict=True)))) for r in reads]
    return all(e.op == "read" or reach(e) is not None for e in composed)


def _contracts(group: _Group, facts: Mapping[Node, _Facts]) -> bool:
    """Whether the group folds products: its operands are read over and over, whatever a single edge looks like."""
    for n in group.nodes:
        for t in tensors(facts[n].outputs):
            if t.body is not None:
                for e in E.walk(t.body):
                    if e.op == "reduce" and e.args[0].op == "mul" and len({r.attr for r in E.reads(e.args[0])}) > 1:
                        return True
    return False


# ---------------------------------------------------------------- rebuilding


def _rebuilt(graph: Graph, groups: Mapping[Node, _Group], used: Container[Value], note: Callable[[str], None], halos: bool) -> Graph:
    nodes: list[Node] = []
    last = {group: group.nodes[-1] for group in groups.values()}
    for node in graph.nodes:
        group = groups[node]
        if node is not last[group]:
            continue  # the kernel stands where its last operator stood, after all it reads
        if node.op in (IF, LOOP):
            nodes.append(replace(node, bodies=tuple(partition(b, note, halos) for b in node.bodies)))
        else:
            nodes.append(_kernel(graph, group.nodes, used))
    read = {v for n in nodes for v in n.inputs} | set(graph.outputs)
    constants = {v: a for v, a in graph.constants.items() if v in read}
    return Graph(graph.name, graph.inputs, graph.outputs, tuple(nodes), constants)


def _kernel(graph: Graph, members: Sequence[Node], used: Container[Value]) -> Node:
    """One KERNEL node for the members; tiny constants are copied inside, everything else is passed in."""
    inside = {v for n in members for v in n.outputs}
    builder = GraphBuilder("_".join(dict.fromkeys(n.op.name for n in members))[:60])
    mapping: dict[Value, Value] = {}
    outer: list[Value] = []
    for v in dict.fromkeys(v for n in members for v in n.inputs if v is not None and v not in inside):
        array = graph.constants.get(v)
        if array is not None and array.size <= INLINE_ELEMENTS:
            mapping[v] = builder.constant(np.asarray(array), v.name, v.dtype)
        else:
            mapping[v] = builder.input(v.name, v.dtype, v.shape, v.layout)
            outer.append(v)
    for n in members:
        outputs = tuple(Value(builder.fresh(v.name), v.dtype, v.shape, v.layout) for v in n.outputs)
        mapping.update(zip(n.outputs, outputs, strict=True))
        builder.append(Node(n.op, tuple(None if v is None else mapping[v] for v in n.inputs), outputs, n.attrs, n.name, n.bodies))
    results = tuple(v for v in members[-1].outputs if v in used)
    body = builder.build([mapping[v] for v in results])
    return Node(KERNEL, tuple(outer), results, {}, members[-1].name or results[0].name, (body,))
