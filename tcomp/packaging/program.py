"""A partitioned graph, its compiled kernels and its memory plan -> the program of the model: which kernel runs when, on which memory.

Control flow becomes steps: a branch writes the results of both sides in the same place; a loop keeps its carried values in the node's
outputs, copies each iteration's results there, and finds the slices of scanned values by address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from tcomp.backends.kernel import CompiledKernel
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, loop_var, maximum, minimum
from tcomp.ir.graph import IF, KERNEL, LOOP, Graph, Node, Value
from tcomp.ir.program import Branch, Call, Copy, Program, Ref, Repeat, SetIndex, Step
from tcomp.ir.simplify import prove
from tcomp.packaging.weights import Weights
from tcomp.passes.memory_plan import Plan, byte_size


def assemble(
    graph: Graph,
    dims: Sequence[Expr],
    kernels: Mapping[Node, CompiledKernel],
    plan: Plan,
    weights: Weights,
) -> Program:
    """The steps of the model's entry function."""
    places = _Places(graph, plan, weights)
    by_name = {d.name: d for d in dims}
    steps = _steps(graph, kernels, plan, places, by_name, 0)
    return Program(tuple(dims), _workspace(graph, plan.size), tuple(v.shape for v in graph.outputs), tuple(steps))


def _workspace(graph: Graph, size: Dim) -> Dim:
    """Bytes of workspace; -1 for dims that would make an extent negative (a window larger than the image): no run may happen then."""
    extents: dict[Expr, None] = {}

    def visit(g: Graph) -> None:
        for value in g.values():
            extents.update((d, None) for d in value.shape if isinstance(d, Expr))
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


class _Places:
    """Where each value lives."""

    def __init__(self, graph: Graph, plan: Plan, weights: Weights) -> None:
        self.plan, self.weights = plan, weights
        self.fixed: dict[Value, Ref] = {v: Ref("input", n, 0) for n, v in enumerate(graph.inputs)}
        self.fixed.update((v, Ref("output", n, 0)) for n, v in enumerate(graph.outputs))
        self.slices: dict[Value, Ref] = {}  # one iteration's part of a scanned value

    def of(self, value: Value) -> Ref:
        """A value in the storage of another one is found through that one, unless it is a slice of it."""
        while value not in self.slices and value in self.plan.storage and value not in self.fixed:
            value = self.plan.storage[value]
        if value in self.slices:
            return self.slices[value]
        if value in self.fixed:
            return self.fixed[value]
        if value in self.weights.offset:
            return Ref("weights", 0, self.weights.offset[value])
        return Ref("workspace", 0, self.plan.offset[value])


def _steps(
    graph: Graph, kernels: Mapping[Node, CompiledKernel], plan: Plan, places: _Places, dims: Mapping[str, Expr], depth: int
) -> list[Step]:
    steps: list[Step] = []
    for node in graph.nodes:
        if node.op is KERNEL:
            compiled = kernels[node]
            buffers = [places.of(v) for v in (*node.inputs, *node.outputs) if v is not None]
            buffers += [Ref("workspace", 0, offset) for offset in plan.temporaries.get(node, [])]
            steps.append(Call(compiled.symbol, tuple(buffers), tuple(dims[n] for n in compiled.scalars), node.name))
        elif node.op is IF:
            condition = node.inputs[0]
            assert condition is not None
            then, otherwise = (tuple(_steps(b, kernels, plan, places, dims, depth)) for b in node.bodies)
            steps.append(Branch(places.of(condition), then, otherwise))
        elif node.op is LOOP:
            steps += _loop(node, kernels, plan, places, dims, depth)
    return steps


def _loop(
    node: Node, kernels: Mapping[Node, CompiledKernel], plan: Plan, places: _Places, dims: Mapping[str, Expr], depth: int
) -> list[Step]:
    body, attrs = node.bodies[0], node.attrs
    carried, scanned, trips = int(attrs["carried"]), int(attrs["scanned"]), as_dim(attrs["trips"])
    stacked = len(node.outputs) - carried
    inputs = [v for v in node.inputs if v is not None]
    iteration = loop_var(f"iteration{depth}", trips)
    initial: list[Step] = []
    for source, target in zip(inputs[:carried], node.outputs[:carried], strict=True):
        initial += _copy(places.of(target), places.of(source), byte_size(target))
    for n, (v, backwards) in enumerate(zip(inputs[carried : carried + scanned], attrs["reverse_in"], strict=True)):
        part = body.inputs[1 + carried + n]
        places.slices[part] = _slice(places.of(v), iteration, trips, byte_size(part), backwards)
    inside: list[Step] = [SetIndex(places.of(body.inputs[0]), iteration)] if _reads(body, body.inputs[0]) else []
    inside += _steps(body, kernels, plan, places, dims, depth + 1)
    handed: list[Step] = []
    for result, target in zip(body.outputs[:carried], node.outputs[:carried], strict=True):
        handed += _copy(places.of(target), places.of(result), byte_size(target))
    inside += _merged(handed)
    for n, backwards in zip(range(stacked), attrs["reverse_out"], strict=True):
        part = body.outputs[carried + n]
        row = _slice(places.of(node.outputs[carried + n]), iteration, trips, byte_size(part), backwards)
        inside += _copy(row, places.of(part), byte_size(part))
    condition = places.of(body.outputs[-1]) if attrs["condition"] else None
    return [*initial, Repeat(iteration, trips, tuple(inside), condition)]


def _reads(body: Graph, value: Value) -> bool:
    """Whether anything in a body needs a value of it; bodies of its nodes get theirs through the inputs of these."""
    return value in body.outputs or any(value in node.inputs for node in body.nodes)


def _merged(copies: Sequence[Step]) -> list[Step]:
    """Copies of what lies side by side, to places side by side, as one: where it certainly does, and the places are others."""
    merged: list[Step] = []
    for step in copies:
        last = merged[-1] if merged else None
        if isinstance(last, Copy) and isinstance(step, Copy) and _beside(last.dst, last.bytes, step.dst) and _beside(last.src, last.bytes, step.src):
            whole = Copy(last.dst, last.src, as_dim(as_expr(last.bytes) + as_expr(step.bytes)))
            if _disjoint(whole):
                merged[-1] = whole
                continue
        merged.append(step)
    return merged


def _beside(first: Ref, size: Dim, second: Ref) -> bool:
    same = (first.base, first.index) == (second.base, second.index)
    return same and as_expr(first.offset) + as_expr(size) is as_expr(second.offset)


def _disjoint(copy: Copy) -> bool:
    a, b, size = as_expr(copy.dst.offset), as_expr(copy.src.offset), as_expr(copy.bytes)
    return (copy.dst.base, copy.dst.index) != (copy.src.base, copy.src.index) or prove(a + size <= b) or prove(b + size <= a)


def _slice(whole: Ref, iteration: Expr, trips: Dim, size: Dim, backwards: bool) -> Ref:
    number = as_expr(trips) - 1 - iteration if backwards else iteration
    return Ref(whole.base, whole.index, as_dim(as_expr(whole.offset) + number * as_expr(size)))


def _copy(target: Ref, source: Ref, size: Dim) -> list[Step]:
    return [] if target == source else [Copy(target, source, size)]
