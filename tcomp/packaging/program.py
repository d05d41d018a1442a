"""A partitioned graph, its compiled kernels and its memory plan -> the program of the model: which kernel runs when, on which memory.

Control flow becomes steps: a branch writes the results of both sides in the same place; a loop keeps its carried values in the node's
outputs, copies each iteration's results there, and finds the slices of scanned values by address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from tcomp.backends.kernel import CompiledKernel
from tcomp.ir import program as P
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, loop_var, maximum, minimum
from tcomp.ir.graph import IF, KERNEL, LOOP, Graph, Node, Value
from tcomp.ir.simplify import prove
from tcomp.packaging.weights import Weights
from tcomp.passes.memory_plan import Plan, byte_size


def assemble(graph: Graph, dims: Sequence[Expr], kernels: Mapping[Node, CompiledKernel], plan: Plan, weights: Weights) -> P.Program:
    """The steps of the model's entry function."""
    steps = _Assembly(graph, dims, kernels, plan, weights).steps(graph, 0)
    return P.Program(tuple(dims), _workspace(graph, plan.size), tuple(v.shape for v in graph.outputs), tuple(steps))


def _workspace(graph: Graph, size: Dim) -> Dim:
    """Bytes of workspace; -1 for dims that would make an extent negative (a window larger than the image): no run may happen then."""
    extents: dict[Expr, None] = {}

    def visit(g: Graph) -> None:
        extents.update((d, None) for value in g.values() for d in value.shape if isinstance(d, Expr))
        for node in g.nodes:
            for body in node.bodies:
                visit(body)

    visit(graph)
    doubtful = [e for e in extents if not prove(e >= 0)]
    if not doubtful:
        return size
    while len(doubtful) > 1:  # a balanced tree
        doubtful = [minimum(a, b) for a, b in zip_longest(doubtful[::2], doubtful[1::2], fillvalue=doubtful[0])]
    fault = maximum(minimum(doubtful[0], 0), -1)  # -1 or 0
    return as_dim(maximum(as_expr(size), 0) * (fault + 1) + fault)


class _Assembly:
    """Steps of a graph and of the bodies in it, and where each value lives."""

    def __init__(self, graph: Graph, dims: Sequence[Expr], kernels: Mapping[Node, CompiledKernel], plan: Plan, weights: Weights) -> None:
        self.dims = {d.name: d for d in dims}
        self.kernels, self.plan, self.weights = kernels, plan, weights
        self.fixed = {v: P.Ref("input", n, 0) for n, v in enumerate(graph.inputs)}
        self.fixed |= {v: P.Ref("output", n, 0) for n, v in enumerate(graph.outputs)}
        self.slices: dict[Value, P.Ref] = {}  # one iteration's part of a scanned value

    def place(self, value: Value) -> P.Ref:
        """A value in the storage of another one is found through that one, unless it is a slice of it."""
        while value not in self.slices and value in self.plan.storage and value not in self.fixed:
            value = self.plan.storage[value]
        if found := self.slices.get(value) or self.fixed.get(value):
            return found
        if value in self.weights.offset:
            return P.Ref("weights", 0, self.weights.offset[value])
        return P.Ref("workspace", 0, self.plan.offset[value])

    def steps(self, graph: Graph, depth: int) -> list[P.Step]:
        steps: list[P.Step] = []
        for node in graph.nodes:
            if node.op is KERNEL:
                compiled = self.kernels[node]
                buffers = [self.place(v) for v in (*node.inputs, *node.outputs) if v is not None]
                buffers += [P.Ref("workspace", 0, offset) for offset in self.plan.temporaries.get(node, [])]
                steps.append(P.Call(compiled.symbol, tuple(buffers), tuple(self.dims[n] for n in compiled.scalars), node.name))
            elif node.op is IF:
                condition = node.inputs[0]
                assert condition is not None
                then, otherwise = (tuple(self.steps(body, depth)) for body in node.bodies)
                steps.append(P.Branch(self.place(condition), then, otherwise))
            elif node.op is LOOP:
                steps += self.loop(node, depth)
        return steps

    def loop(self, node: Node, depth: int) -> list[P.Step]:
        body, attrs = node.bodies[0], node.attrs
        carried, scanned, trips = int(attrs["carried"]), int(attrs["scanned"]), as_dim(attrs["trips"])
        inputs = [v for v in node.inputs if v is not None]
        iteration = loop_var(f"iteration{depth}", trips)

        def row(whole: P.Ref, part: Value, backwards: bool) -> P.Ref:
            number = as_expr(trips) - 1 - iteration if backwards else iteration
            return P.Ref(whole.base, whole.index, as_dim(as_expr(whole.offset) + number * as_expr(byte_size(part))))

        initial = self.copies(inputs[:carried], node.outputs[:carried])
        for v, part, backwards in zip(inputs[carried : carried + scanned], body.inputs[1 + carried :], attrs["reverse_in"], strict=False):
            self.slices[part] = row(self.place(v), part, backwards)
        index = body.inputs[0]  # bodies of the body's nodes get it through the inputs of these
        needs_index = index in body.outputs or any(index in inner.inputs for inner in body.nodes)
        steps: list[P.Step] = [P.SetIndex(self.place(index), iteration)] if needs_index else []
        steps += self.steps(body, depth + 1)
        steps += _merged(self.copies(body.outputs[:carried], node.outputs[:carried]))
        for v, part, backwards in zip(node.outputs[carried:], body.outputs[carried:], attrs["reverse_out"], strict=False):
            steps += _copy(row(self.place(v), part, backwards), self.place(part), byte_size(part))
        condition = self.place(body.outputs[-1]) if attrs["condition"] else None
        return [*initial, P.Repeat(iteration, trips, tuple(steps), condition)]

    def copies(self, sources: Sequence[Value], targets: Sequence[Value]) -> list[P.Copy]:
        pairs = zip(sources, targets, strict=True)
        return [c for source, target in pairs for c in _copy(self.place(target), self.place(source), byte_size(target))]


def _copy(target: P.Ref, source: P.Ref, size: Dim) -> list[P.Copy]:
    return [] if target == source else [P.Copy(target, source, size)]


def _merged(copies: Sequence[P.Copy]) -> list[P.Copy]:
    """Copies of what is adjacent, to adjacent places, as one: where it certainly is, and source and destination are disjoint."""
    merged: list[P.Copy] = []
    for step in copies:
        if merged:
            last = merged[-1]
            whole = P.Copy(last.dst, last.src, as_dim(as_expr(last.bytes) + as_expr(step.bytes)))
            if _adjacent(last.dst, last.bytes, step.dst) and _adjacent(last.src, last.bytes, step.src) and _disjoint(whole):
                merged[-1] = whole
                continue
        merged.append(step)
    return merged


def _adjacent(first: P.Ref, size: Dim, second: P.Ref) -> bool:
    same = (first.base, first.index) == (second.base, second.index)
    return same and as_expr(first.offset) + as_expr(size) is as_expr(second.offset)


def _disjoint(copy: P.Copy) -> bool:
    a, b, size = as_expr(copy.dst.offset), as_expr(copy.src.offset), as_expr(copy.bytes)
    return (copy.dst.base, copy.dst.index) != (copy.src.base, copy.src.index) or prove(a + size <= b) or prove(b + size <= a)
