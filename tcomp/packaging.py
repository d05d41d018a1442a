"""From a partitioned graph, its compiled kernels and its memory plan to the parts of an artifact: host program, weights, manifest.

The host program says which kernel runs when, on which memory. Control flow becomes steps: a branch writes the results of both sides in the
same place; a loop keeps its carried values in the node's outputs, copies each iteration's results there, and finds the slices of scanned
values by address.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

import tcomp
from tcomp.backends.kernel import CompiledKernel
from tcomp.errors import CodegenError, ParseError, UnsupportedError
from tcomp.ir import loops as L, program as P, te
from tcomp.ir.dims import SolvedDims, solved_dims, upper_bound
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, bounds, loop_var, maximum, select, substitute, var, variables, walk, with_sources
from tcomp.ir.fallback import Fallback
from tcomp.ir.graph import APPEND, IF, KERNEL, LOOP, SIZE, Application, Constant, Graph, LazyConstant, Node, Value, application
from tcomp.ir.layout import Layout
from tcomp.ir.shape_operands import elements_of, sizes_in
from tcomp.ir.simplify import as_dim, prove
from tcomp.ir.text.expression_parser import parse_expr
from tcomp.passes.memory_plan import Plan, byte_size
from tcomp.runtime.artifact import plan_weights
from tcomp.schedules.cost.roofline import Work
from tcomp.target import Target

Kernels = Mapping[Node, CompiledKernel]
NotFused = Sequence[tuple[str, Fallback]]  # (value, why it is stored)


def _graphs(graph: Graph, kernels: bool) -> Iterator[Graph]:
    """A graph and all bodies in it; those of KERNEL nodes only if `kernels`."""
    yield graph
    for node in graph.nodes:
        for body in node.bodies if kernels or node.op is not KERNEL else ():
            yield from _graphs(body, kernels)


@dataclass(frozen=True, slots=True)
class Weight:
    """A constant in its physical layout, materialised when it is read: weights are large, and one at a time is enough."""

    array: Constant
    layout: Layout

    @property
    def nbytes(self) -> int:
        """Its size in its layout."""
        return math.prod(int(d) for d in self.layout.shape(self.array.shape)) * self.array.dtype.itemsize

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return self.layout.to_physical(np.asarray(self.array))


def collect_weights(graph: Graph) -> tuple[list[tuple[str, Weight]], dict[Value, int]]:
    """All constants of a graph and its control-flow bodies, named, in the order of the weights section; and each value's offset there."""
    values = {v: array for g in _graphs(graph, kernels=False) for v, array in g.constants.items()}
    numbers, number, named = dict[Hashable, int](), dict[Value, int](), list[tuple[str, Weight]]()
    for v, array in values.items():  # versions of a graph share what both read
        key = array.key if isinstance(array, LazyConstant) else id(array), v.dtype, v.layout
        number[v] = numbers.setdefault(key, len(named))
        if number[v] == len(named):
            named.append((f"{len(named)}:{v.name}", Weight(array, v.layout or Layout.identity(len(array.shape)))))
    offsets = plan_weights([w.nbytes for _, w in named])
    return named, {v: offsets[n] for v, n in number.items()}


def assemble(graph: Graph, dims: SolvedDims, kernels: Kernels, plan: Plan, weights: Mapping[Value, int]) -> P.Program:
    """The steps of the model's entry function; `weights` are offsets in the weights section."""
    steps = _Assembly(graph, dims, kernels, plan, weights).steps(graph, 0)
    shapes, checks, limits = tuple(v.shape for v in graph.outputs), tuple(_gap(c) for c, _ in dims.checks), graph.counted()
    sizes, counted = _doubtful_sizes(graph, limits), tuple(limits.items())
    program = P.Program(tuple(dims.extents.values()), plan.size, shapes, tuple(steps), sizes, checks, counted)
    return program if all(v is size for v, size in dims.values.items()) else P.with_sizes(program, dims.values)


def _gap(condition: Expr) -> Dim:
    """A size that is 0 where a comparison holds."""
    if condition.op not in ("lt", "le", "eq"):
        return as_dim(select(condition, 0, 1))
    a, b = condition.args
    return as_dim(a - b if condition.op == "eq" else maximum(a - b + (condition.op == "lt"), 0))


def _doubtful_sizes(graph: Graph, limits: Mapping[Expr, Dim]) -> tuple[Dim, ...]:
    """Extents that dims may make negative (a window larger than the image), and bytes of values, stored or not, that may be too many."""
    values = [v for g in _graphs(graph, kernels=True) for v in g.values()]
    extents = dict.fromkeys(d for v in values for d in v.shape if isinstance(d, Expr) and not prove(d >= 0))
    largest = (upper_bound(byte_size(v), limits) for v in {(v.dtype, v.physical_shape): v for v in values}.values())
    sizes = dict.fromkeys(size for size in largest if isinstance(size, Expr) and not prove(size < 1 << 62))
    return tuple(extents | sizes)


class _Assembly:
    """Steps of a graph and of the bodies in it, and where each value lives."""

    def __init__(self, graph: Graph, dims: SolvedDims, kernels: Kernels, plan: Plan, weights: Mapping[Value, int]) -> None:
        self.dims, self.numbers = {d.name: d for d in dims.values}, {d: n for n, d in enumerate(dims.extents)}
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
        if value in self.weights:
            return P.Ref("weights", 0, self.weights[value])
        return P.Ref("workspace", 0, self.plan.offset[value])

    def steps(self, graph: Graph, depth: int) -> list[P.Step]:
        steps: list[P.Step] = []
        for node in graph.nodes:
            if node.op is KERNEL:
                compiled = self.kernels[node]
                buffers = [self.place(v) for v in (*node.inputs, *node.outputs) if v is not None]
                buffers += [P.Ref("workspace", 0, offset) for offset in self.plan.temporaries.get(node, [])]
                steps.append(P.Call(compiled.symbol, tuple(buffers), tuple(self.dims[n] for n in compiled.scalars), node.name))
            elif node.op is SIZE:
                (count,) = node.inputs
                assert count is not None
                steps.append(self.size(node.attrs["dim"], count))
            elif node.op is APPEND:
                (old, new), (whole,) = node.inputs, node.outputs
                assert old is not None and new is not None
                base = self.place(whole)
                target = P.Ref(base.base, base.index, as_dim(as_expr(base.offset) + byte_size(old)))
                steps += [*_copy(base, self.place(old), byte_size(old)), *_copy(target, self.place(new), byte_size(new))]
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
        stacked = [*zip(node.outputs[carried:], body.outputs[carried:], attrs["reverse_out"], strict=False)]
        for v, part, backwards in stacked:
            if self.plan.storage.get(part) is v:
                self.slices[part] = row(self.place(v), part, backwards)
        index = body.inputs[0]  # bodies of the body's nodes get it through the inputs of these
        needs_index = index in body.outputs or any(index in inner.inputs for inner in body.nodes)
        steps: list[P.Step] = [P.SetIndex(self.place(index), iteration)] if needs_index else []
        steps += self.steps(body, depth + 1)
        steps += _merged(self.copies(body.outputs[:carried], node.outputs[:carried]))
        for v, part, backwards in stacked:
            steps += _copy(row(self.place(v), part, backwards), self.place(part), byte_size(part))
        sizes = attrs.get("sizes", ())
        steps += [self.size(d, v) for d, v in zip(sizes, body.outputs[len(body.outputs) - len(sizes) :], strict=True)]
        condition = self.place(body.outputs[len(node.outputs)]) if attrs["condition"] else None
        return [*initial, P.Repeat(iteration, trips, tuple(steps), condition)]

    def copies(self, sources: Sequence[Value], targets: Sequence[Value]) -> list[P.Copy]:
        pairs = zip(sources, targets, strict=True)
        return [c for source, target in pairs for c in _copy(self.place(target), self.place(source), byte_size(source))]

    def size(self, dim: Expr, count: Value) -> P.Step:
        return P.Copy(P.Ref("dims", 0, 8 * self.numbers[dim]), self.place(count), 8)


def _copy(target: P.Ref, source: P.Ref, size: Dim) -> list[P.Copy]:
    size = size if prove(as_expr(size) >= 0) else as_dim(maximum(as_expr(size), 0))  # an extent that is counted may come out negative
    return [] if target == source else [P.Copy(target, source, size)]


def _merged(copies: Sequence[P.Copy]) -> list[P.Copy]:
    """Copies of what is adjacent, to adjacent places, as one: where it certainly is, and source and destination are disjoint."""

    def adjacent(first: P.Ref, size: Dim, second: P.Ref) -> bool:
        same = (first.base, first.index) == (second.base, second.index)
        return same and as_expr(first.offset) + as_expr(size) is as_expr(second.offset)

    merged: list[P.Copy] = []
    for step in copies:
        if merged and adjacent(merged[-1].dst, merged[-1].bytes, step.dst) and adjacent(merged[-1].src, merged[-1].bytes, step.src):
            dst, src, size = merged[-1].dst, merged[-1].src, as_expr(merged[-1].bytes) + as_expr(step.bytes)
            a, b = as_expr(dst.offset), as_expr(src.offset)
            if (dst.base, dst.index) != (src.base, src.index) or prove(a + size <= b) or prove(b + size <= a):
                merged[-1] = P.Copy(dst, src, as_dim(size))
                continue
        merged.append(step)
    return merged


def symbolic_dims(graph: Graph) -> SolvedDims:
    """The symbolic dims, from the shapes of the inputs, those that values of inputs give, then those that a run counts. Raises
    `UnsupportedError` where nothing tells one."""
    dims = solved_dims([d for v in graph.inputs for d in v.shape if isinstance(d, Expr)])
    if plain := {d: var(d.name, d.attr.lo, d.attr.hi) for d in dims.extents if d.op == "var" and d.attr.source is not None}:
        # A kernel alone, that gets from shapes what values give the model.
        dims.extents = {d: plain.get(raw, raw) for d, raw in dims.extents.items()}
        dims.values = {d: substitute(value, plain) for d, value in dims.values.items()}
        dims.checks = [(substitute(c, plain), d) for c, d in dims.checks]
    wanted = {**sizes_in(graph), **dict.fromkeys(variables(*graph.checks))}
    for v in with_sources((d for d in wanted if d.attr.source is not None), {*dims.values}):
        if (source := v.attr.source) is None:
            continue
        value = None if source.value is None else substitute(source.value, dims.values)
        own = v if value is source.value else var(v.name, v.attr.lo, v.attr.hi, source=replace(source, value=value))
        dims.values[v] = own
        if v.dtype == INDEX:
            dims.extents[v] = own
    for d in graph.counted():
        dims.extents[d] = dims.values[d] = d
    sizes = [as_expr(d) for value in graph.values() for d in value.shape if isinstance(d, Expr)]
    if free := [v.name for v in variables(*sizes, *graph.checks) if v not in dims.values]:
        hint = " ".join(f"--dim {name}=N" for name in free) + ", each with its size"
        raise UnsupportedError(f"the size {', '.join(free)} is in no input's shape", hint=hint)
    dims.checks += [(condition, as_expr(1)) for condition in graph.checks]
    return dims


def manifest(
    graph: Graph, dims: SolvedDims, target: Target, threads: int | None, kernels: Kernels, not_fused: NotFused, workspace: Dim
) -> dict[str, Any]:
    """JSON: the fields of `runtime.manifest.Manifest` except those that `write_artifact` adds. `workspace`: bytes that a run takes."""
    counted = graph.counted()
    schedules: dict[str, list[str]] = {}  # of each distinct kernel, with the names of the nodes that it computes
    for node, compiled in kernels.items():
        for schedule in (compiled.schedule, *compiled.versions):
            schedules.setdefault(schedule, []).append(node.name)

    def extent(d: Dim) -> int | str:
        return d if isinstance(d, int) else d.name if d.op == "var" else str(d)

    def ranged(v: Expr) -> str:
        lo, hi = bounds(v)
        return f"{v.name} in {lo}..{'' if hi is None else hi}"

    names = [str(extent(d)) for d in dims.extents]
    inexact = [d for _, d in dims.checks[: len(dims.checks) - len(graph.checks)]]
    unlike = [f"no {' and '.join(map(ranged, variables(d)))} makes {d} the size that an input has" for d in inexact]

    def specs(values: Sequence[Value]) -> list[dict[str, Any]]:
        return [{"name": v.name, "dtype": v.dtype, "shape": [extent(d) for d in v.shape]} for v in values]

    return {
        "producer": f"tcomp {tcomp.__version__}",
        **target.manifest,
        "inputs": specs(graph.inputs),
        "outputs": specs(graph.outputs),
        "dims": [
            _dim(graph, name, own) | {"data_dependent": d in counted} for name, (d, own) in zip(names, dims.extents.items(), strict=True)
        ],
        "threads": threads,
        "state": [
            {"input": old.name, "output": n.outputs[0].name} for n in graph.nodes if n.op is APPEND and (old := n.inputs[0]) is not None
        ],
        "errors": [f"a value is out of range in {' + '.join(_checking(node.bodies[0])) or node.name}" for node in kernels],
        **({} if graph.host is None else {"host": asdict(graph.host)}),
        "checks": [*unlike, *(f"{c} does not hold, in {where}" for c, where in graph.checks.items())],
        "notes": {
            "kernels": [node.name for node in kernels],
            "facts": _facts(graph, dims, kernels, not_fused),
            "schedules": [{"kernels": names, "schedule": json.loads(schedule)} for schedule, names in schedules.items()],
            "target": str(target),
            "workspace": workspace if isinstance(workspace, int) else None,
        },
    }


def _checking(body: Graph) -> list[str]:
    """The nodes of a kernel that check indices or divisors."""
    return [node.name for node in body.nodes if _checks(application(node.op, node.inputs, node.attrs))]


@lru_cache(4096)  # nodes of one kind share an application
def _checks(applied: Application) -> bool:
    def roots(t: te.Tensor) -> Iterator[Expr]:
        if t.body is not None:
            yield t.body
        for s in () if t.extern is None else L.walk(t.extern.body):
            yield from L.expressions(s)

    return any(e.op == "checked" for t in te.tensors(applied.outputs) for root in roots(t) for e in walk(root))


def _dim(graph: Graph, name: str, d: Expr) -> dict[str, Any]:
    lo, hi = bounds(d)
    described = {"name": name, "min": max(lo or 0, 0), "max": hi}
    if (source := d.attr.source) is None or any(d in v.shape for v in graph.inputs):
        return described
    return described | {"values": [graph.inputs[n].name for n in elements_of(d)], "what": source.what}


def _facts(graph: Graph, dims: SolvedDims, kernels: Kernels, not_fused: NotFused) -> list[dict[str, Any]]:
    """For each kernel, in order: the fields of `Work` for all its calls of a run, as sizes over the dims (see `runtime.plan`); `layout` of
    its results; `not_fused`, why these are stored (see `passes.partition`). Work is left out where it depends on data: in branches and
    `while` loops."""
    counted = graph.counted()
    names = {d.name: value for d, value in dims.values.items() if d not in counted}
    numbers = {d: ["dim", n] for n, d in enumerate(dims.extents.values())}
    reasons: dict[str, list[str]] = {}
    for name, fallback in not_fused:
        reasons.setdefault(name, []).append(str(fallback))

    @cache
    def work(texts: Sequence[str], times: Dim) -> dict[str, Any] | None:
        with suppress(CodegenError, ParseError):  # a size that only the model itself computes, or one that a loop reads from an array
            sizes = [as_dim(as_expr(parse_expr(text, names)) * as_expr(times)) for text in texts]
            return {f.name: P.size_data(n, numbers, "a kernel") for f, n in zip(fields(Work), sizes, strict=True)}
        return None

    found = []
    for node, times in _calls(graph, 1):
        fact: dict[str, Any] = {"layout": "; ".join(str(v.layout) for v in node.outputs if v.layout is not None)}
        fact["not_fused"] = [reason for v in node.outputs for reason in reasons.get(v.name, ())]
        if times is not None and (sizes := work(tuple(kernels[node].work), times)) is not None:
            fact["work"] = sizes
        found.append(fact)
    return found


def _calls(graph: Graph, times: Dim | None) -> Iterator[tuple[Node, Dim | None]]:
    """The kernel nodes in program order, with the number of their calls; None where that depends on data."""
    for node in graph.nodes:
        if node.op is KERNEL:
            yield node, times
        elif node.op in (IF, LOOP):
            counted = node.op is LOOP and not node.attrs["condition"]
            inner = as_dim(as_expr(times) * as_expr(node.attrs["trips"])) if counted and times is not None else None
            for body in node.bodies:
                yield from _calls(body, inner)
