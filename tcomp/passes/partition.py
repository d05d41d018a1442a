"""Partition: operators become kernels. One reduction (or none) with the elementwise work around it is one kernel.

An edge is fused when its value has one reader and
  - the reader is elementwise over the value at the same index (an epilogue), or
  - the producer is free of reductions and the reader uses each element about once (a prologue), or
  - the producer only moves elements and every index stays affine, whoever reads it (a view), or computes them from positions alone, or
  - the producer only moves matrices to where a product reads each several times (heads of attention that share keys), or
  - the producer is a product of matrices, and what reads it concatenates their rows (heads that are joined), or
  - the reader only takes the maximum of rows, and sums of exponentials relative to it, for a product (see `primitives.online_softmax`), or
  - the producer puts a constant around its input and the reader's windows are small (depthwise convolution, pooling): a copy costs as much.
What costs nothing to compute again (a view, what is broadcast from few elements) is computed by each of its readers that it can be fused
with. A reshape of what lies in memory in any case stays outside of kernels: its result is the same memory. Why an edge is not fused is
recorded, edge by edge.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np

from tcomp.ir import expr as E
from tcomp.ir.access import affine
from tcomp.ir.broadcasting import BYTES
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.fallback import Fallback, FallbackKind
from tcomp.ir.graph import KERNEL, STRUCTURAL, Graph, GraphBuilder, Node, Value, infer
from tcomp.ir.read_patterns import SMALL_WINDOW, concatenated_row_length, reach, window_size
from tcomp.ir.scalar_operators import UNARY
from tcomp.ir.simplify import simplify
from tcomp.ir.te import Tensor, tensors
from tcomp.ir.text.printer import unused
from tcomp.ops.movement import RESHAPE
from tcomp.passes.structure import matrix_product

MAX_OPERATORS = 40  # in one kernel: bounds the time to schedule and compile it
MAX_READS = 8  # of one operand for one element, unless the operator reduces: of more, it is a sum that is written out
MAX_READ_AGAIN = 0.25  # elements of operands for one of a result that readers compute again where they would read it otherwise
MAX_RECOMPUTED = 2  # operations for an element that several readers compute again: about what it costs to store and load it
MAX_STEPS = 4  # operators for an element that is computed from its position alone, wherever it is read
FUNCTION_COST = 8  # operations that an elementary function takes, about: it is a polynomial
INLINE_ELEMENTS = 1  # constants up to this size become literals of the kernel

Unfused: TypeAlias = list[tuple[str, Fallback]]  # (value, why a reader is another kernel)


class Obstacle(StrEnum):
    """Why the edges from a value to its readers are not fused; the values are the words that are printed."""

    DIFFERENT_KERNELS = "the value has several readers, in different kernels"
    CONTROL_FLOW = "control flow is no part of a kernel"
    CLOSED = "imperative or multi-output operators are kernels of their own"
    OUTPUT = "the value is an output of the graph"
    TOO_MANY_OPERATORS = f"a kernel has at most {MAX_OPERATORS} operators"
    BOTH_REDUCE = "both sides reduce"
    NOT_ELEMENTWISE = "the reader is not elementwise over the result of a reduction"
    USED_MANY_TIMES = "the reader uses each element many times, it would be computed again each time"
    RECOMPUTED = "the reader would compute each element several times"


def partition(graph: Graph, unfused: Unfused | None = None, halos: bool = True, whole: bool = True) -> Graph:
    """The graph with every operator inside a KERNEL node; control flow stays, its bodies are partitioned too. With `halos` values may get
    zeros around them (`choose_layouts`), and padding becomes part of the kernels that read it; and heads of attention may share keys, and
    be joined, without copies: schedules have to cut axes of which an index is a quotient. `unfused` receives the readers of values that are
    not fused with their producers. A `whole` graph is no body of control flow."""
    used = set(graph.outputs) | {v for n in graph.nodes for v in n.inputs if v is not None}
    literals = {v: np.asarray(a) for v, a in graph.constants.items() if a.size <= INLINE_ELEMENTS}
    facts = {n: _Facts(n, used, literals) for n in graph.nodes if n.op not in STRUCTURAL}
    renamed = _renamed(graph, facts) if whole else set()
    graph, grouping = _grouped(graph, facts, halos, renamed)
    used.update(v for n in graph.nodes for v in n.inputs if v is not None)
    if whole and not any(known.windows for known in facts.values()):  # whose layouts would be others
        alone = [n for n in graph.nodes if n.op is RESHAPE and len(grouping.groups[n].nodes) == 1]
        external = {*graph.inputs, *graph.outputs, *graph.constants}
        outputs = {n.inputs[0]: n for n in alone if n.outputs[0] in graph.outputs and n.inputs[0] not in external}
        renamed |= {n for n in alone if n.outputs[0] not in graph.outputs or outputs.get(n.inputs[0]) is n}
    if unfused is not None:
        unfused += [(value.name, fallback) for value, fallback in grouping.not_fused()]
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op in STRUCTURAL:
            nodes.append(replace(node, bodies=tuple(partition(body, unfused, halos, False) for body in node.bodies)))
        elif node in renamed:
            nodes.append(node)
        elif grouping.groups[node].nodes[-1] is node:  # the kernel takes the place of its last operator, after all that it reads
            nodes.append(_kernel(graph, grouping.groups[node].nodes, used))
    read = {v for n in nodes for v in n.inputs} | set(graph.outputs)
    return replace(graph, nodes=tuple(nodes), constants={v: a for v, a in graph.constants.items() if v in read})


def _renamed(graph: Graph, facts: Mapping[Node, _Facts]) -> set[Node]:
    """The nodes that reshape what is row-major in memory in any case: an input or output of the graph, or what is reduced, but not from
    windows."""
    makers, found = graph.producers(), set[Node]()
    for node in (n for n in graph.nodes if n.op is RESHAPE and n.outputs[0] not in graph.outputs):
        (source, *_) = node.inputs
        maker = None if source is None else makers.get(source)
        reduced = maker is not None and maker in facts and facts[maker].reduces and not facts[maker].windows
        if source in graph.inputs or source in graph.outputs or reduced:
            found.add(node)
    return found


def _grouped(graph: Graph, facts: dict[Node, _Facts], halos: bool, renamed: set[Node]) -> tuple[Graph, _Grouping]:
    """The graph with copies of what its readers compute again, and what becomes one kernel. Copies that would be kernels of their own are
    not made."""
    shared = set[tuple[Node, Node]]()  # (node, reader) for which there is no copy
    while True:
        copied, copies, kept = _copies(graph, facts, shared, renamed)
        grouping = _Grouping(copied, facts, halos, renamed)
        left = defaultdict[Node, list[Node]](list)
        for c in copies:
            assert c.reader is not None
            if grouping.groups[c.now] is not grouping.groups[c.reader.now]:
                left[c.node].append(c.reader.node)
        again = {n for n, readers in left.items() if len(readers) > 1 or n in kept or not facts[n].is_view}
        if not again:
            return copied, grouping
        shared |= {(n, r) for n in again for r in left[n]}
        shared |= {(c.node, c.reader.node) for c in copies if c.node in again and c.reader and not facts[c.node].is_view}


def _copies(
    graph: Graph, facts: dict[Node, _Facts], shared: Container[tuple[Node, Node]], renamed: Container[Node]
) -> tuple[Graph, list[_Copy], set[Node]]:
    """(the graph with a copy of each cheap node for each reader, the copies, the nodes that are there as well); `facts` grow."""
    stored, names = {*graph.inputs, *graph.outputs}, {v.name for v in graph.values()}
    emitted, readers = list[_Copy](), defaultdict[Value, list[_Copy]](list)

    def emit(node: Node, outputs: tuple[Value, ...], of: _Copy | None = None) -> None:
        made = _Copy(node, list(node.inputs), outputs, of)
        emitted.append(made)
        for v in dict.fromkeys(v for v in node.inputs if v is not None):
            readers[v].append(made)

    for node in reversed(graph.nodes):
        rest = [r for v in node.outputs for r in readers[v]]
        if len(rest) > 1 and node in facts and node not in renamed and facts[node].is_cheap(node, stored):
            (value,) = node.outputs
            own = [r for r in rest if (node, r.node) not in shared and facts[node].suits(facts.get(r.node))]
            for reader in own:
                result = Value(unused(value.name, names, "{}.{}"), value.dtype, value.shape, value.layout)
                names.add(result.name)
                reader.inputs = [result if v is value else v for v in reader.inputs]
                emit(node, (result,), reader)
            if len(own) == len(rest):
                continue
        emit(node, node.outputs)
    for made in emitted:
        made.now = made.node
        if (inputs := tuple(made.inputs)) != made.node.inputs or made.outputs != made.node.outputs:
            made.now = replace(made.node, inputs=inputs, outputs=made.outputs)
            if made.node in facts:
                facts[made.now] = facts[made.node].renamed(dict(zip(made.node.inputs, inputs, strict=True)))
    now = replace(graph, nodes=tuple(made.now for made in reversed(emitted)))
    return now, [made for made in emitted if made.reader is not None], {made.node for made in emitted if made.reader is None}


@dataclass(eq=False)
class _Copy:
    """A node, as it is in the graph or with other inputs and outputs (`now`); a copy has one `reader`."""

    node: Node
    inputs: list[Value | None]
    outputs: tuple[Value, ...]
    reader: _Copy | None

    def __post_init__(self) -> None:
        self.now = self.node


class _Facts:
    """Structure of one node's TE, as fusion needs it: the `outputs` that are `used`, the `bodies` of all its tensors, and `reads`, the
    (reader, read) of every access to each input; `known` are constants of few elements."""

    def __init__(self, node: Node, used: Container[Value], known: Mapping[Value, np.ndarray]) -> None:
        applied = infer(node.op, node.inputs, node.attrs, node.name)
        self.outputs = tuple(t for v, t in zip(node.outputs, applied.outputs, strict=True) if v in used)
        stages = list(tensors(self.outputs))
        accesses: dict[Tensor, list[tuple[Tensor, E.Expr]]] = {}
        for t in stages:
            for r in E.reads(t.body) if t.body is not None else ():
                accesses.setdefault(r.attr, []).append((t, r))
        pairs = [(v, t) for v, t in zip(node.inputs, applied.inputs, strict=True) if v is not None and t is not None]
        self.reads = {v: accesses.get(t, []) for v, t in pairs}
        self.bodies = tuple(t.body for t in stages if t.body is not None)
        self.imperative = any(t.extern is not None for t in stages)
        self.literals = {t: E.const(known[v].reshape(-1)[0].item(), v.dtype) for v, t in pairs if v in known and known[v].size}

    @cached_property
    def reduces(self) -> bool:
        """Whether an element is reduced from many, by a reduction or by a sum that is written out; or whether its position decides how
        the same elements are combined (the transforms of fast algorithms): all results of one tile are computed together."""

        def is_matrix(e: E.Expr) -> bool:
            selects = e.op == "select" and e.args[0].op == "eq" and not E.reads(e.args[0])
            return selects and len(set(E.reads(e.args[1])) & set(E.reads(e.args[2]))) > 1

        is_sum = any(n > MAX_READS for b in self.bodies for n in Counter(r.attr for r in E.reads(b)).values())
        return is_sum or any(e.op == "reduce" or is_matrix(e) for e in E.walk(*self.bodies))

    @cached_property
    def contracts(self) -> bool:
        """Whether it reduces products of several operands."""
        reductions = [e for e in E.walk(*self.bodies) if e.op == "reduce"]
        return any(e.args[0].op == "mul" and len({r.attr for r in E.reads(e.args[0])}) > 1 for e in reductions)

    def is_online_softmax(self, value: Value) -> bool:
        """Whether a value is read by reductions of its rows alone: their maximum, and sums of exponentials relative to it, for a
        product."""
        stages = [t for t, _ in self.reads[value]]
        maxima = [t for t in stages if t.body is not None and t.body.op == "reduce" and t.body.attr[0].op == "max"]
        weights = [t for t in stages if t.body is not None and t.body.op == "exp" and {r.attr for r in E.reads(t.body)} >= set(maxima)]
        sums = [b for b in self.bodies if any(r.attr in weights for r in E.reads(b))]

        def is_cast(body: E.Expr) -> bool:  # 16-bit weights are rounded for the product
            return body.op == "read" or body.op == "cast" and is_cast(body.args[0])

        reduced = all(b.op == "reduce" or is_cast(b) for b in sums)
        return len(maxima) == len(weights) == 1 and len(stages) == 2 and reduced and self.contracts

    @cached_property
    def body(self) -> E.Expr | None:
        """The expression of an element of the only output, if that is one stage."""
        return self.bodies[0] if len(self.outputs) == len(self.bodies) == 1 else None

    @property
    def moved(self) -> tuple[E.Expr, ...] | None:
        """The indices at which elements of one input are read, if the result is one of these."""
        return self.body.args if self.body is not None and self.body.op == "read" else None

    @cached_property
    def is_view(self) -> bool:
        """The result is one input element, at an affine index."""
        return self.moved is not None and not self.imperative and not self.reduces and all(affine(i) is not None for i in self.moved)

    def renamed(self, values: Mapping[Value | None, Value | None]) -> _Facts:
        """The facts of the same operator on other inputs."""
        other = copy(self)
        other.reads = {new: self.reads[old] for old, new in values.items() if old in self.reads and new is not None}
        return other

    @cached_property
    def windows(self) -> bool:
        """Whether an index depends on an axis that is reduced and on another one."""
        summed = {axis for e in E.walk(*self.bodies) if e.op == "reduce" for axis in e.attr[1]}
        used = (set(E.variables(i)) for reads in self.reads.values() for _, r in reads for i in r.args)
        return any(len(variables) > 1 and not summed.isdisjoint(variables) for variables in used)

    def is_cheap(self, node: Node, stored: Container[Value]) -> bool:
        """Whether several readers had better compute the result themselves: a view, or a few operations on positions alone, on few
        elements, or on what is `stored` in any case."""
        if len(node.outputs) != 1 or node.outputs[0] in stored or self.imperative or self.reduces or len(self.bodies) != 1:
            return False
        if self.is_view or (not node.inputs and self.steps <= MAX_STEPS):
            return True
        sizes = {v: prod(v.shape) for v in (*node.inputs, *node.outputs) if v is not None and all(isinstance(d, int) for d in v.shape)}
        if self.operations > MAX_RECOMPUTED or len(sizes) < len({*node.inputs, *node.outputs} - {None}):
            return False
        return bool(sum(sizes[v] for v in self.reads if v not in stored) <= MAX_READ_AGAIN * sizes[node.outputs[0]])

    def suits(self, reader: _Facts | None) -> bool:
        """Whether a reader may as well read what the result is made of: a row where it read a row, or operands that it copies anyway."""
        if reader is None or self.moved is None or reader.contracts or not self.outputs[0].axes:
            return reader is not None
        form = affine(self.moved[-1]) if self.moved else None
        return form is not None and form.terms.get(self.outputs[0].axes[-1]) == 1

    @cached_property
    def pads(self) -> bool:
        """The result is one input, with a constant around it."""
        body = self.body if self.body is None else E.rewrite(self.body, lambda e: self.literals.get(e.attr) if e.op == "read" else None)
        return body is not None and reach(simplify(body), filling=True) is not None

    @cached_property
    def operations(self) -> int:
        """A rough count of the arithmetic for one element."""
        return _cost(e for e in E.walk(*self.bodies) if is_float(e.dtype))

    @cached_property
    def steps(self) -> int:
        """The same with the arithmetic on integers, also of indices, and without conversions."""
        return _cost(e for e in E.walk(*self.bodies) if e.op != "cast")

    def is_aligned(self, value: Value) -> bool:
        """Every access reads the element at the index that is being computed, with the same shape."""
        if len(self.outputs) != 1 or self.outputs[0].shape != value.shape:
            return False
        reads = [(t, zip(r.args, t.axes, t.shape, strict=True)) for t, r in self.reads[value] if t.shape == value.shape]
        return len(reads) == len(self.reads[value]) and all(i is a or n == 1 for _, places in reads for i, a, n in places)

    def reads_once(self, value: Value) -> bool:
        """No element of the value is read more than a few times by one kernel."""
        for t, r in self.reads[value]:
            assert t.body is not None
            axes = {*t.axes, *(axis for e in E.walk(t.body) if e.op == "reduce" for axis in e.attr[1])}
            window = any(len(set(E.variables(i)) & axes) > 1 for i in r.args)  # neighbours read the same elements
            if window or any(E.bounds(a)[1] != 0 for a in axes - set(E.variables(*r.args))):
                return False
        return True


def _cost(expressions: Iterable[E.Expr]) -> int:
    """The number of operators, of which functions count as several."""
    operators = [e.op for e in expressions if e.op not in ("var", "const", "read")]
    return sum(FUNCTION_COST if op in UNARY and op not in ("neg", "abs", "not") else 1 for op in operators)


@dataclass(eq=False)
class _Group:
    nodes: list[Node]
    reduces: bool
    closed: bool  # nothing may join
    pointwise: bool = True  # every edge inside reads its value at the index being computed


class _Grouping:
    """Which nodes become one kernel: `groups`, by each of their nodes."""

    def __init__(self, graph: Graph, facts: Mapping[Node, _Facts], halos: bool, renamed: Container[Node]) -> None:
        self.graph, self.facts, self.halos = graph, facts, halos
        self.producers, self.consumers = graph.producers(), graph.consumers()
        self.place = {node: n for n, node in enumerate(graph.nodes)}
        self.groups: dict[Node, _Group] = {}
        for node in graph.nodes:
            known = facts.get(node)
            single = known is not None and not known.imperative and len(known.outputs) == 1 and node not in renamed
            self.groups[node] = _Group([node], known is not None and known.reduces, not single)
            # Nearest producers first: of several reductions that could take this node as their epilogue, the last one computed gets it.
            produced = dict.fromkeys(v for v in node.inputs if v in self.producers)
            for value in sorted(produced, key=lambda v: -self.place[self.producers[v]]):
                self.join(self.producers[value], value)
        self.read_as_bytes()
        read = [(node, value) for node in graph.nodes for value in node.outputs if value in self.consumers]
        changed = True
        while changed:  # readers may have come together since: x * sigmoid(x) reads x twice, in one kernel
            changed = False
            for node, value in read:
                changed |= self.groups[node].nodes[-1] is node and self.join(node, value)

    def not_fused(self) -> Iterator[tuple[Value, Fallback]]:
        """The values that other kernels read, with each reader and the reason."""
        edges = ((node, value, reader) for node in self.graph.nodes for value in node.outputs for reader in self.consumers.get(value, ()))
        for node, value, reader in edges:
            if self.groups[reader] is not self.groups[node]:
                edge = f"{node.op.name} -> {reader.op.name} ({reader.name})"
                yield value, Fallback(FallbackKind.NOT_FUSED, edge, self.obstacle(node, value) or "")

    def read_as_bytes(self) -> None:
        """Bytes go through memory as bytes: what widens them at the end of a kernel moves to the kernel that reads it. (Integers of 16 bits
        stay what they are: see `quantized.use_words`.)"""
        for node in reversed(self.graph.nodes):
            group, value = self.groups[node], node.outputs[0] if node.outputs else None
            if value not in self.consumers or value in self.graph.outputs or len(group.nodes) == 1 or group.nodes[-1] is not node:
                continue
            source = next((v for v in node.inputs if v is not None and v.dtype in BYTES and v.shape == value.shape), None)
            readers, (reader, *others) = self.consumers[value], {self.groups[r]: None for r in self.consumers[value]}
            if source is None or itemsize(value.dtype) == 1 or value.dtype == "int16" or others or reader.closed:
                continue
            if not all(self.facts[r].is_aligned(v) for r, v in ((node, source), *((r, value) for r in readers))):
                continue
            group.nodes.remove(node)
            reader.nodes = sorted([node, *reader.nodes], key=self.place.__getitem__)
            self.groups[node] = reader

    def join(self, producer: Node, value: Value) -> bool:
        """Merge the group of a value's producer into that of its readers, if that can be."""
        readers = self.consumers[value]
        first, second = self.groups[producer], self.groups[readers[0]]
        if first is second or self.obstacle(producer, value) is not None:
            return False
        members = sorted([*first.nodes, *second.nodes], key=self.place.__getitem__)
        pointwise = first.pointwise and second.pointwise and all(self.facts[r].is_aligned(value) for r in readers)
        merged = _Group(members, first.reduces or second.reduces, False, pointwise)
        self.groups.update((n, merged) for n in members)
        return True

    def obstacle(self, producer: Node, value: Value) -> Obstacle | None:
        """Why the edges from a value to all its readers cannot be fused; None if they can."""
        facts, readers = self.facts, self.consumers[value]
        other, group = self.groups[producer], self.groups.get(readers[0])
        if group is None or any(self.groups.get(r) is not group for r in readers):
            return Obstacle.DIFFERENT_KERNELS
        if producer not in facts or readers[0] not in facts:
            return Obstacle.CONTROL_FLOW
        if group.closed or other.closed:
            return Obstacle.CLOSED
        if value in self.graph.outputs:
            return Obstacle.OUTPUT
        if len(group.nodes) + len(other.nodes) > MAX_OPERATORS:
            return Obstacle.TOO_MANY_OPERATORS
        aligned = all(facts[r].is_aligned(value) for r in readers)
        if group.reduces and other.reduces:
            online = len(readers) == 1 and facts[readers[0]].is_online_softmax(value) and any(facts[n].contracts for n in other.nodes)
            fits = online and not any(facts[n].is_online_softmax(v) for n in other.nodes for v in facts[n].reads)
            return None if fits else Obstacle.BOTH_REDUCE
        if other.reduces:
            fits = aligned and group.pointwise or other.nodes[-1] is producer and self.joins_heads(producer, group.nodes)
            return None if fits else Obstacle.NOT_ELEMENTWISE
        if group.reduces and not (aligned and group.pointwise and not any(facts[r].reduces for r in readers)):
            alone = len(other.nodes) == 1
            fits = (
                (len(readers) == 1 and self.is_view(other.nodes, readers[0]))
                or self.made_of_positions(other.nodes)
                or (self.halos and alone and self.reads_halo(producer, value))
                or (alone and all(window_size(facts[r].bodies) <= SMALL_WINDOW for r in readers) and facts[producer].pads)
                # A contraction reads its operands over and over, whatever a single edge looks like.
                or (self.read_once(value) and not any(facts[n].contracts for n in group.nodes))
            )
            return None if fits else Obstacle.USED_MANY_TIMES
        cheap = aligned or self.read_once(value) or sum(facts[n].operations for n in other.nodes) <= MAX_RECOMPUTED
        return None if cheap else Obstacle.RECOMPUTED

    def read_once(self, value: Value) -> bool:
        """Whether every reader of a value reads each element once. Walks the readers' bodies: asked last."""
        return all(self.facts[r].reads_once(value) for r in self.consumers[value])

    def made_of_positions(self, nodes: Sequence[Node]) -> bool:
        """Whether nodes read nothing from others, and compute little: their results are as quickly computed as loaded, and a condition on
        them is one on the loops."""
        own = {v for n in nodes for v in n.outputs}
        return own.issuperset(v for n in nodes for v in n.inputs) and sum(self.facts[n].steps for n in nodes) <= MAX_STEPS

    def joins_heads(self, product: Node, readers: Sequence[Node]) -> bool:
        """Whether nodes, one after the other, concatenate rows of the matrices that a product computes, and do nothing else."""
        if (
            not self.halos
            or readers[0].inputs != product.outputs
            or matrix_product(product) is None
            or (moved := self.moved(readers)) is None
        ):
            return False
        last, indices = moved
        return self.facts[product].bodies[-1].op == "reduce" and concatenated_row_length(last.axes, last.shape, indices) is not None

    def is_view(self, nodes: Sequence[Node], reader: Node) -> bool:
        """Whether nodes only move elements, and read them at affine indices; or matrices of a product at a quotient: heads that share
        keys."""
        if all(self.facts[n].is_view for n in nodes):
            return True
        if not self.halos or matrix_product(reader) is None or (moved := self.moved(nodes)) is None:
            return False
        matrices, indices = moved[0].axes[:-2], [simplify(i) for i in moved[1]]
        quotients = [i for i in indices if i.op == "floordiv" and i.args[0] in matrices and i.args[1].op == "const"]
        others = [i for i in indices if i not in quotients]
        return len(quotients) == 1 and all(affine(i) is not None for i in others) and quotients[0].args[0] not in E.variables(*others)

    def moved(self, nodes: Sequence[Node]) -> tuple[Tensor, Sequence[E.Expr]] | None:
        """The composed movement of a chain of nodes: (tensor, indices of its elements in the input); None if they do more than move."""
        (last, *_) = self.facts[nodes[-1]].outputs
        indices: Sequence[E.Expr] = last.axes
        for n, node in reversed(list(enumerate(nodes))):
            facts = self.facts[node]
            if facts.moved is None or n and node.inputs != nodes[n - 1].outputs:
                return None
            indices = [E.substitute(i, dict(zip(facts.outputs[0].axes, indices, strict=True))) for i in facts.moved]
        return last, indices

    def reads_halo(self, padding: Node, value: Value) -> bool:
        """Whether a node puts zeros around what another kernel computes, which can store them, and readers reach into them."""
        facts, (t,), sources = self.facts, self.facts[padding].outputs, [v for v in padding.inputs if v is not None]
        if len(sources) != 1 or t.body is None or sources[0] in self.graph.outputs or facts[padding].imperative:
            return False
        maker = self.producers.get(sources[0])
        if maker is None or maker not in facts or facts[maker].imperative or len(maker.outputs) != 1 or reach(simplify(t.body)) is None:
            return False
        reads = [r for n in self.consumers[value] for _, r in facts[n].reads[value]]
        composed = (simplify(E.substitute(t.body, dict(zip(t.axes, r.args, strict=True)))) for r in reads)
        return all(e.op == "read" or reach(e) is not None for e in composed)


def _kernel(graph: Graph, members: Sequence[Node], used: Container[Value]) -> Node:
    """One KERNEL node for the members; tiny constants are copied inside, everything else is passed in."""
    inside = {v for n in members for v in n.outputs}
    builder = GraphBuilder("_".join(dict.fromkeys(n.op.name for n in members))[:60])
    mapping, outer = dict[Value, Value](), list[Value]()
    for v in dict.fromkeys(v for n in members for v in n.inputs if v is not None and v not in inside):
        if (array := graph.constants.get(v)) is not None and array.size <= INLINE_ELEMENTS:
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
