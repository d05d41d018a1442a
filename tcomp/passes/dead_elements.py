"""Dead-element elimination by slice propagation: where only a slice of a tensor is read, only that slice is computed.

    matmul(x, w)[:, :1] = matmul(x[:, :1], w)

Classifiers read one token, language models the last one. From the outputs backwards, the box of elements that something reads of each value
is found; operators are then applied to boxes of their inputs. A result may be sliced along axis i where the operator's tensor expression
says `x[..., i, ...]` in all reads of an input, or does not mention i there, and the operator applied to the slices has the same expression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tcomp.errors import TcompError
from tcomp.ir import expr as E, te
from tcomp.ir.access import Box, without
from tcomp.ir.graph import IF, LOOP, Application, Constant, Graph, Node, Value, application, materialised
from tcomp.ir.simplify import as_dim, difference, same_shape, simplify
from tcomp.ops.movement import RESHAPE, SLICE, WITH_SHAPE
from tcomp.passes.canonicalize import uniform
from tcomp.passes.rewrite import Notes, Rewriter
from tcomp.passes.structure import body_of, movement, structural, unit_axes, with_constants

MAX_SLICE = 0.75  # of the elements of an axis: computing a few less is no gain, and their rows no longer fill vectors and lines


@dataclass(frozen=True, slots=True)
class _Part:
    """What computes `box` of an `output`, the only one of its node that is read, from boxes of its inputs (`needs`): the node with other
    `attrs` or, where it only takes elements of one input, a slice of that: so many elements (`counts`) in `steps`, axis by axis."""

    output: Value
    box: Box
    needs: Mapping[Value, Box]
    attrs: Mapping[str, Any] | None = None
    steps: tuple[int, ...] = ()
    counts: tuple[E.Dim, ...] = ()


def eliminate_dead_elements(graph: Graph, notes: Notes | None = None) -> Graph:
    """The graph without computations of elements that nothing reads, within it and within each body."""
    notes = Notes() if notes is None else notes
    found, rewriter = _propagated(graph), Rewriter(graph)
    slices: dict[Value, tuple[Value, Box]] = {}  # what is computed in the place of a value, and which box of it that is

    def sliced(v: Value, box: Box, steps: Sequence[int] | None = None, counts: Sequence[E.Dim] = ()) -> Value:
        now, there = slices.get(v, (rewriter.resolve(v), Box.whole(v.shape)))
        if steps is None and box == there:
            return now
        starts = tuple(as_dim(difference(a, b)) for a, b in zip(box.base, there.base, strict=True))
        attrs = {"starts": starts, "steps": steps or (1,) * len(v.shape), "shape": box.extent if steps is None else counts}
        return rewriter.add(SLICE, [now], attrs, f"{v.name}.part")[0]

    for original in graph.nodes:
        node, entry = rewriter.resolved(original), found.get(original)
        whole = entry is not None and entry.box.is_whole(entry.output.shape)
        if entry is not None and entry.attrs is not None:
            inputs = [None if v is None else sliced(v, entry.needs[v]) for v in original.inputs]
            outputs = rewriter.add(node.op, inputs, entry.attrs, node.name)
            slices[entry.output] = outputs[node.outputs.index(entry.output)], entry.box
            before, after = (", ".join(map(str, shape)) for shape in (entry.output.shape, entry.box.extent))
            notes.add(node, "eliminate_dead_elements", f"of [{before}] only [{after}] is read")
        elif entry is not None and not (whole and slices.keys().isdisjoint(entry.needs)):
            ((source, box),) = entry.needs.items()
            now = sliced(source, box, entry.steps, entry.counts)
            if not same_shape(now.shape, entry.box.extent):
                (now,) = rewriter.add(RESHAPE, [now], {"shape": entry.box.extent}, node.name)
            if whole:
                rewriter.replace(node, [now])
            else:
                slices[entry.output] = now, entry.box
        elif node.op in (IF, LOOP):
            rewriter.append(replace(node, bodies=tuple(eliminate_dead_elements(body, notes) for body in node.bodies)))
        else:
            rewriter.append(node)
    return rewriter.finish()


def _propagated(graph: Graph) -> dict[Node, _Part]:
    """Nodes that need not compute all of their output, or that do not read all of an input."""
    boxes = {v: Box.whole(v.shape) for v in graph.outputs}
    found: dict[Node, _Part] = {}
    for node in reversed(graph.nodes):
        wanted = [n for n, v in enumerate(node.outputs) if v in boxes]
        needs: Mapping[Value, Box] = {}
        if len(wanted) == 1 and not structural(node):
            box = boxes[node.outputs[wanted[0]]]
            entry = _slice_of_input(node, box, graph.constants) or _sliced_node(node, wanted[0], box)
            if entry is not None:
                found[node], needs = entry, entry.needs
        for v in node.inputs if wanted else ():
            if v is not None:
                box = needs.get(v, Box.whole(v.shape))
                boxes[v] = boxes[v].union(box, v.shape) if v in boxes else box
    return found


def _slice_of_input(node: Node, box: Box, constants: Mapping[Value, Constant]) -> _Part | None:
    """The part of its input that a slice, or a gather at a constant position, reads for a box of its output; None for other operators, and
    if it is the whole input."""
    body = body_of(node)
    if body is None or body.expr.op != "read" or node.op is WITH_SHAPE:  # which reads all, but by another formula of the same size
        return None
    values = {v: value for v in body.leaves if (value := uniform(materialised(constants.get(v)))) is not None}
    if (move := movement(with_constants(body, values))) is None:
        return None
    if any(extent == 1 and part != 1 for extent, part in zip(body.tensor.shape, box.extent, strict=True)):
        return None  # of a single element nothing is read: no index says so
    axes, left = body.tensor.axes, [n for n, d in enumerate(body.tensor.shape) if d != 1]
    needs, steps, counts = dict[int, tuple[E.Expr, E.Dim]](), list[int](), list[E.Dim]()
    for d, index in enumerate(move.indices):
        step, rest, (start, extent) = 1, index, (E.as_expr(0), as_dim(1))
        if left and axes[left[0]] in E.variables(index):
            axis = left.pop(0)
            step, rest = without(index, axes[axis]) or (0, index)
            start, extent = box.base[axis], box.extent[axis]
        if step < 1 or E.reads(rest) or not set(axes).isdisjoint(E.variables(rest)):
            return None
        reach = extent if step == 1 else as_dim(E.maximum((E.as_expr(extent) - 1) * step + 1, 0))  # of no element: none
        needs[d] = simplify(rest + start * step), reach
        steps.append(step)
        counts.append(extent)
    part = Box.whole(move.source.shape).replaced(needs)
    if left or part.is_whole(move.source.shape):
        return None
    return _Part(node.outputs[0], box, {move.source: part}, None, tuple(steps), tuple(counts))


def _sliced_node(node: Node, output: int, box: Box) -> _Part | None:
    """The node for a part of its output, where the operator allows for one that is small enough."""

    def is_small(part: E.Dim, extent: E.Dim) -> bool:
        """Whether so few positions of an axis are to be computed on their own; of a symbolic one, those of a known number are."""
        return isinstance(part, int) and 0 < part and (not isinstance(extent, int) or part <= MAX_SLICE * extent)

    small = [d for d, (part, extent) in enumerate(zip(box.extent, node.outputs[output].shape, strict=True)) if is_small(part, extent)]
    now = application(node.op, node.inputs, node.attrs)
    tensor = now.outputs[output]
    along = {d: dims for d in small if (dims := _dims_along(tensor, d)) is not None}
    if not along:
        return None
    sides = {d: (box.base[d], box.extent[d]) for d in along}
    box = Box.whole(tensor.shape).replaced(sides)
    leaves = [(v, leaf) for v, leaf in zip(node.inputs, now.inputs, strict=True) if v is not None and leaf is not None]
    needs = {v: Box.whole(v.shape).replaced({dims[leaf]: sides[d] for d, dims in along.items() if leaf in dims}) for v, leaf in leaves}
    attrs = dict(node.attrs)
    if "shape" in attrs and same_shape(attrs["shape"], tensor.shape):
        attrs["shape"] = box.extent
    smaller = {v: Value(v.name, v.dtype, b.extent) for v, b in needs.items()}
    try:
        then = application(node.op, [None if v is None else smaller[v] for v in node.inputs], attrs)
    except TcompError:
        return None
    equal = same_shape(then.outputs[output].shape, box.extent) and _equal(now, then, output, along)
    return _Part(node.outputs[output], box, needs, attrs) if equal else None


def _dims_along(output: te.Tensor, dim: int) -> dict[te.Tensor, int] | None:
    """The dims of all tensors that only `dim` of the output indexes, in all reads; None where it means something else as well."""
    dims, stages = {output: dim}, [t for t in reversed(list(te.tensors([output]))) if not te.is_placeholder(t)]
    if any(t.body is None for t in stages):
        return None
    bodies = {t: simplify(t.body) for t in stages if t.body is not None}
    for t, body in bodies.items():  # those that read a tensor come before it
        axis = t.axes[dims[t]] if t in dims else None
        uses = [(e, n) for e in E.walk(body) for n, arg in enumerate(e.args) if arg is axis]
        if body is axis or any(e.op != "read" or dims.setdefault(e.attr, n) != n for e, n in uses):
            return None
    whole = any(
        r.attr in dims and (t not in dims or r.args[dims[r.attr]] is not t.axes[dims[t]])
        for t, body in bodies.items()
        for r in E.reads(body)
    )
    return None if whole else dims


def _equal(now: Application, then: Application, output: int, along: Mapping[int, Mapping[te.Tensor, int]]) -> bool:
    """Whether an operator, applied to slices along some dimensions, says of an element what it says now, stage by stage."""
    old, new = (list(te.tensors([applied.outputs[output]])) for applied in (now, then))
    sources, leaves = dict(zip(new, old, strict=False)), dict(zip(then.inputs, now.inputs, strict=True))

    def same_body(a: te.Tensor, b: te.Tensor) -> bool:
        if a.body is None or b.body is None or len(a.axes) != len(b.axes):
            return False
        same = True

        def rule(e: E.Expr) -> E.Expr | None:
            nonlocal same
            if e.op != "read":
                return None
            source, indices = sources[e.attr], list(e.args)
            for dims in along.values():
                if source in dims:
                    axis, dim = a.axes[dims[a]], dims[source]
                    same &= indices[dim] is axis or (e.attr.shape[dim] == 1 and indices[dim] is E.const(0))
                    indices[dim] = axis
            return E.read(source, indices)

        flat = unit_axes(a)
        body = simplify(E.substitute(E.substitute(b.body, dict(zip(b.axes, a.axes, strict=True))), flat))
        return simplify(E.rewrite(body, rule)) is simplify(E.substitute(a.body, flat)) and same

    return len(old) == len(new) and all(leaves.get(b) is a if te.is_placeholder(a) else same_body(a, b) for b, a in sources.items())
