"""Rewriting graphs: rules that replace nodes, and what keeps the result well-formed. A rule sees one node whose inputs are already
rewritten:

    values      one for each output: what replaces it (None: it stays). New nodes are added to the `Rewriter`.
    a string    it nearly applied: why not. Goes to the `Notes`.
    None        it does not concern this node.

Every output of a rewritten graph is the same `Value` as before, computed by one node and by no other output as well: models name their
outputs, and branches and loops write theirs in place. An output that equals an input, a constant or another output is copied (`identity`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import numpy as np

from tcomp.errors import IRError
from tcomp.ir.graph import IF, LOOP, Graph, GraphBuilder, Node, Operator, Value, materialised
from tcomp.ir.simplify import same_shape
from tcomp.ops.movement import IDENTITY
from tcomp.passes.dce import eliminate_dead

MAX_SWEEPS = 20  # rules make graphs simpler, so that few sweeps suffice; the limit is for rules that undo each other

Replacement = Sequence[Value | None] | str | None


@dataclass(slots=True)
class Notes:
    """Why rewrites fired, or did not: `lines` for people by the names of nodes, for `tcomp explain`."""

    lines: dict[str, list[str]] = field(default_factory=dict)

    def add(self, node: Node, rule: str, text: str) -> None:
        """Record what a rule (or, without a name, a pass) did to a node, or why it did not apply; once."""
        lines, line = self.lines.setdefault(label(node), []), f"{rule}: {text}" if rule else text
        if line not in lines:
            lines.append(line)


def label(node: Node) -> str:
    """The name of a node, or of its first output where it has none."""
    return node.name or (node.outputs[0].name if node.outputs else node.op.name)


class Rewriter(GraphBuilder):
    """A graph being rebuilt, in order, from another one. Its values keep their identity unless replaced."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.name)
        self._source, self.inputs, self.constants, self._outputs = graph, list(graph.inputs), dict(graph.constants), graph.outputs
        self._names.update(v.name for v in graph.values())
        self._replaced, self._producer = dict[Value, Value](), dict[Value, Node]()
        self._uses = graph.uses()

    def producer(self, value: Value | None, *operators: Operator) -> Node | None:
        """The node of the new graph that computes `value`, if by one of these operators (none: by any); None for inputs, constants and
        values to come."""
        node = None if value is None else self._producer.get(value)
        return node if node is None or not operators or node.op in operators else None

    def array(self, value: Value | None) -> np.ndarray | None:
        """The elements of a constant, where these are materialised."""
        return None if value is None else materialised(self.constants.get(value))

    def used_once(self, value: Value) -> bool:
        """Whether a single node reads the value, once, and it is not an output."""
        return self._uses[value] == 1 and value not in self._outputs

    def is_read(self, value: Value) -> bool:
        """Whether a node reads the value, which is not an output."""
        return self._uses[value] > 0 and value not in self._outputs

    def is_copy(self, node: Node) -> bool:
        """Whether the node is a copy that gives an output a storage of its own."""
        copies = node.op is IDENTITY and node.outputs[0] in self._outputs
        return copies and (node.inputs[0] not in self._producer or node.inputs[0] in self._outputs)

    def resolve(self, value: Value) -> Value:
        """The value that replaces `value` after the replacements so far."""
        while value in self._replaced:
            value = self._replaced[value]
        return value

    def resolved(self, node: Node) -> Node:
        """The node with what has replaced its inputs."""
        inputs = tuple(None if v is None else self.resolve(v) for v in node.inputs)
        return node if inputs == node.inputs else replace(node, inputs=inputs)

    def add(
        self, op: Operator, inputs: Sequence[Value | None], attrs: Mapping[str, Any] | None = None, name: str = ""
    ) -> tuple[Value, ...]:
        """Add a node that applies an operator; returns its outputs."""
        values = super().add(op, inputs, attrs, name)
        self._producer.update((v, self.nodes[-1]) for v in values)
        self._uses.update(v for v in inputs if v is not None)
        return values

    def append(self, node: Node) -> None:
        """Add a node unchanged."""
        super().append(node)
        self._producer.update((v, node) for v in node.outputs)

    def replace(self, node: Node, values: Sequence[Value | None]) -> bool:
        """Replace the node's outputs by `values`; False if a type does not fit (nothing is changed then). The node itself must be
        appended where one of `values` is None."""
        pairs = [(old, self.resolve(new)) for old, new in zip(node.outputs, values, strict=True) if new is not None]
        if not all(old is not new and same_type(old, new) for old, new in pairs):
            return False
        for old, new in pairs:
            self.merge(old, new)
        stack = [node] if len(pairs) == len(values) else []  # nodes that are gone: what only they used is not used any more
        while stack:
            for v in (v for v in stack.pop().inputs if v is not None):
                self._uses[v] -= 1
                source = self._producer.get(v)
                if source is not None and not any(self._uses[u] > 0 for u in source.outputs):
                    stack.append(source)
        return True

    def merge(self, value: Value, other: Value) -> None:
        """Use `other` in the place of `value`."""
        self._replaced[value] = other
        self._uses[other] += self._uses.pop(value, 0)

    def finish(self) -> Graph:
        """The new graph, without dead nodes."""
        renamed, outputs = dict[Value | None, Value](), list[Value]()  # `renamed`: a value computed by a node -> the output it is now
        final = {v for v in self._outputs if self.resolve(v) is v and v in self._producer}
        for old in self._outputs:
            new = self.resolve(old)
            if old in outputs or (new is old and old not in self._producer):
                old = Value(self.fresh(old.name), old.dtype, old.shape, old.layout)
            if new is not old or old not in self._producer:
                if new in self._producer and new not in final and new not in renamed:
                    renamed[new] = old
                else:
                    self.nodes.append(Node(IDENTITY, (new,), (old,), {}, old.name))
            outputs.append(old)
        for place, n in enumerate(self.nodes if renamed else ()):
            inputs, results = tuple(renamed.get(v, v) for v in n.inputs), tuple(renamed.get(v, v) for v in n.outputs)
            self.nodes[place] = replace(n, inputs=inputs, outputs=results)
        made = replace(self._source, outputs=tuple(outputs), nodes=tuple(self.nodes), constants=self.constants)
        return eliminate_dead(made, trimmed=True)  # bodies are graphs that were finished, or come from such


def same_type(a: Value, b: Value) -> bool:
    """Equal dtype and layout, and shapes that are equal for sure."""
    return a.dtype == b.dtype and a.layout == b.layout and same_shape(a.shape, b.shape)


Rule = Callable[[Node, Rewriter], Replacement]


def rule_for(*operators: Operator) -> Callable[[Rule], Rule]:
    """A rule about nodes of these operators alone."""

    def restricted(rule: Rule) -> Rule:
        return wraps(rule)(lambda node, rewriter: rule(node, rewriter) if node.op in operators else None)

    return restricted


def rewrite_graph(graph: Graph, rules: Sequence[Rule], notes: Notes | None = None) -> Graph:
    """Apply rules, inside branches and loops too, until none fires. The first rule that fires on a node wins."""
    notes = Notes() if notes is None else notes
    for _ in range(MAX_SWEEPS):
        graph, fired = _sweep(graph, rules, notes)
        if not fired:
            return graph
    raise IRError(f"the rules on graph `{graph.name}` do not come to an end", why=f"still firing after {MAX_SWEEPS} sweeps")


def _sweep(graph: Graph, rules: Sequence[Rule], notes: Notes) -> tuple[Graph, bool]:
    rewriter, fired = Rewriter(graph), False
    for original in graph.nodes:
        node, values = rewriter.resolved(original), None
        if node.op in (IF, LOOP):
            swept = [_sweep(body, rules, notes) for body in node.bodies]
            fired |= any(changed for _, changed in swept)
            node = replace(node, bodies=tuple(body for body, _ in swept))
        for rule in () if rewriter.is_copy(node) else rules:
            result = rule(node, rewriter)
            if isinstance(result, str):
                notes.add(node, rule.__name__, result)
            elif result is not None:
                fits = rewriter.replace(node, result)
                notes.add(node, rule.__name__, "applied" if fits else "the result has another type")
                if fits:
                    fired, values = True, result
                    break
        if values is None or None in values:
            rewriter.append(node)
    return rewriter.finish(), fired
