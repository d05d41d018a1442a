"""Partition: operators become kernels. One reduction (or none) with the elementwise work around it is one kernel.

An edge is fused when its value has one reader and
  - the reader is elementwise over the value at the same index (an epilogue), or
  - the producer is free of reductions and the reader uses each element about once (a prologue), or
  - the producer only moves elements and every index stays affine, whoever reads it (a view).
Why an edge is not fused is recorded, edge by edge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tcomp.ir import expr as E
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Expr
from tcomp.ir.graph import IF, KERNEL, LOOP, Graph, GraphBuilder, Node, Value, infer
from tcomp.ir.simplify import linear
from tcomp.ir.te import Tensor, tensors

MOST_NODES = 40  # operators in one kernel, so that compile time stays bounded
INLINE_ELEMENTS = 1  # constants up to this size become literals of the kernel


def partition(graph: Graph, note: Callable[[str], None] = lambda text: None) -> Graph:
    """The graph with every operator inside a KERNEL node; control flow stays, its bodies are partitioned too.

    `note` receives one line for each edge that was not fused, with the reason.
    """
    facts = {n: _Facts.of(n) for n in graph.nodes if n.op not in (IF, LOOP)}
    groups = _grouped(graph, facts, note)
    return _rebuilt(graph, groups, note)


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
    def of(node: Node) -> _Facts:
        outputs = infer(node.op, node.inputs, node.attrs, node.name)
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
            any(e.op == "reduce" for t in stages if t.body is not None for e in E.walk(t.body)),
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


def _affine(r: Expr) -> bool:
    return all(len(m) <= 1 and (not m or m[0].op == "var") for i in r.args for m in linear(i))


def _aligned(facts: _Facts, value: Value) -> bool:
    """Every access reads the element at the index that is being computed, with the same shape."""
    output = facts.outputs[0]
    if len(facts.outputs) != 1 or output.shape != value.shape:
        return False
    chain = {t for t in tensors(facts.outputs) if t.body is not None}
    return len(chain) >= 1 and all(t.shape == value.shape and r.args == t.axes for t, r in facts.reads_of(value))


def _uses_once(facts: _Facts, value: Value) -> bool:
    """No element of the value is read more than a few times by one kernel."""
    for t, r in facts.reads_of(value):
        axes = set(t.axes)
        assert t.body is not None
        for e in E.walk(t.body):
            if e.op == "reduce":
                axes |= set(e.attr[1])
        if any((E.bounds(a)[1] or 1) > 0 for a in axes - set(E.variables(*r.args))):
            return False
        if any(len(set(E.variables(i)) & axes) > 1 for i in r.args):
            return False  # a window: neighbours read the same elements
    return True


# ---------------------------------------------------------------- grouping


@dataclass(eq=False)
class _Group:
    nodes: list[Node] = field(default_factory=list)
    reduces: bool = False
    closed: bool = False  # nothing may join


def _grouped(graph: Graph, facts: Mapping[Node, _Facts], note: Callable[[str], None]) -> dict[Node, _Group]:
    producers, consumers = graph.producers(), graph.consumers()
    groups: dict[Node, _Group] = {}
    for node in graph.nodes:
        group = _Group([node], closed=True)
        if node in facts:
            here = facts[node]
            group = _Group([node], here.reduces, here.imperative or len(node.outputs) > 1)
            joined: list[_Group] = []
            for value in dict.fromkeys(v for v in node.inputs if v in producers):
                assert value is not None
                producer = producers[value]
                other = groups[producer]
                reason = _why_not(graph, here, facts.get(producer), value, group, other, consumers)
                if reason is None and other not in joined:
                    joined.append(other)
                    group.reduces |= other.reduces
                    group.nodes = other.nodes + group.nodes
                elif reason is not None:
                    note(f"%{value.name}: {producer.op.name} -> {node.op.name} ({node.name}) not fused: {reason}")
        for member in group.nodes:
            groups[member] = group
    return groups


def _why_not(
    graph: Graph,
    reader: _Facts,
    producer: _Facts | None,
    value: Value,
    group: _Group,
    other: _Group,
    consumers: Mapping[Value, Sequence[Node]],
) -> str | None:
    """None if the edge can be fused."""
    if producer is None:
        return "the producer is control flow"
    if group.closed or other.closed:
        return "imperative or multi-output operators are kernels of their own"
    if value in graph.outputs:
        return "the value is an output of the graph"
    if len(consumers[value]) > 1:
        return f"the value has {len(consumers[value])} readers"
    if len(group.nodes) + len(other.nodes) > MOST_NODES:
        return f"a kernel has at most {MOST_NODES} operators"
    if reader.reduces:
        if other.reduces:
            return "both sides reduce"
        if all(n.op not in (KERNEL,) and _Facts.of(n).moves_only for n in other.nodes):
            return None
        return None if _uses_once(reader, value) else "the reader uses each element many times, it would be computed anew each time"
    if other.reduces:
        if group.reduces:
            return "both sides reduce"
        return None if _aligned(reader, value) else "the reader is not elementwise over the result of a reduction"
    if _aligned(reader, value) or _uses_once(reader, value):
        return None
    dear = sum(_Facts.of(n).dear for n in other.nodes)
    return None if dear <= 2 else "the reader would compute each element several times"


# ---------------------------------------------------------------- rebuilding


def _rebuilt(graph: Graph, groups: Mapping[Node, _Group], note: Callable[[str], None]) -> Graph:
    nodes: list[Node] = []
    last = {group: group.nodes[-1] for group in groups.values()}
    used_inside: set[Value] = set()
    for node in graph.nodes:
        group = groups[node]
        if node is not last[group]:
            continue  # the kernel stands where its last operator stood, after all it reads
        if node.op in (IF, LOOP):
            nodes.append(replace(node, bodies=tuple(partition(b, note) for b in node.bodies)))
        else:
            kernel = _kernel(graph, group.nodes)
            used_inside |= set(graph.constants) - set(kernel.inputs)
            nodes.append(kernel)
    read = {v for n in nodes for v in n.inputs} | set(graph.outputs)
    constants = {v: a for v, a in graph.constants.items() if v in read}
    return Graph(graph.name, graph.inputs, graph.outputs, tuple(nodes), constants)


def _kernel(graph: Graph, members: Sequence[Node]) -> Node:
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
    results = members[-1].outputs
    body = builder.build([mapping[v] for v in results])
    return Node(KERNEL, tuple(outer), results, {}, members[-1].name or results[0].name, (body,))
