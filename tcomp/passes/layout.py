"""Layouts: how each intermediate value and each weight lies in memory, chosen from the structure of the kernels.

A layout is a property of a value, not of an operator: kernels read and write logical elements, so any assignment is right, and the choice
is only about speed. Four rules:

1. Activations. A kernel that reduces windows (convolution, pooling) or contracts with a constant has its vector lanes along an axis that is
   neither a window nor shared with the reduction: the output channel. That axis goes to the end (NCHW becomes NHWC). Other kernels follow
   their largest input, axis by axis, through transposes and broadcasts; an axis that a product with a constant sums stays the last one.
2. Weights. Each constant gets a copy in the layout that its reader wants (`operand_layouts`: packed panels), stored in the artifact.
3. Padding. Intermediate values get a halo of zeros as wide as their readers' windows reach: no kernel copies them.
4. Pitch. Rows that products walk together at distances of a multiple of `ALIASED` would evict each other: a cache line separates them.

Inputs and outputs of the graph stay row-major. Separate kernels copy an input that vectors would read across its rows at several places or
whose rows are shorter than vectors (windows of weights), and, where a model of the machine says that it pays, an output that was computed
in another layout or an image of few channels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf, lcm, prod
from typing import Concatenate, ParamSpec, TypeVar

from tcomp.ir import expr as E
from tcomp.ir.access import coefficient, stride
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.graph import APPEND, KERNEL, Graph, Node, Operator, Value, attributes_key, canonical_graph_text
from tcomp.ir.layout import LINE, Layout
from tcomp.ir.read_patterns import SMALL_WINDOW, Widths, joined, reach, selections, window_size
from tcomp.ir.simplify import linear, simplify
from tcomp.ir.te import Tensor, placeholder, tensors
from tcomp.ir.text.printer import unused
from tcomp.ops.movement import IDENTITY
from tcomp.passes.structure import inlined

MIN_LANES = 8  # elements along an axis that lanes run along: the float32 of a 256-bit vector
ALIASED = 2048  # bytes: addresses that differ by a multiple share one of two sets of a first-level cache whose ways are 4096 bytes
MAX_ALIASED_ROWS = 8  # rows of a product at such addresses before they evict each other: the ways of such a cache
UNKNOWN = 32  # elements of an axis whose extent is not known, as assumed to count zeros and rows
MAX_ZEROS = 0.5  # zeros around each element of what windows are reduced over; with more, testing each element is cheaper
MAX_COPY_TIME = 0.6  # of the time without copies of inputs, by the model, which underestimates copies of images that no cache holds

P = ParamSpec("P")
T = TypeVar("T")

OperandLayouts = Callable[[Graph, frozenset[int]], Mapping[int, Layout]]  # (kernel body, its constant inputs) -> what is wanted for some
Seconds = Callable[[Graph], float]  # kernel body -> how long it takes, about
Layouts = Mapping[int, Layout | None]  # of inputs or outputs, by number; others stay as they are


def choose_layouts(graph: Graph, operand_layouts: OperandLayouts, halos: bool = True, seconds: Seconds | None = None) -> Graph:
    """The graph with layouts on intermediate values and constants. Control-flow bodies keep row-major boundaries. Without `halos`, as for
    a GPU, values get no zeros around them, and are computed as they lie; so are outputs without `seconds`."""
    graph, gathered = _copied_inputs(graph) if halos else (graph, {})
    output_layouts, operand_layouts, memory_order = _remembered(_output_layouts), _remembered(operand_layouts), _remembered(_memory_order)
    grouped = _remembered(_groups)
    products = list(_products(graph))
    # What kernels compute for each other.
    passed_on = {v for n in graph.nodes if n.op is KERNEL and len(n.outputs) == 1 for v in n.outputs} - set(graph.outputs)
    around, summed_axes = (_halos(graph, passed_on), _summed_axes(graph, products, passed_on)) if halos else ({}, {})
    summed_bytes = _summed_bytes(products)
    fixed = set(graph.outputs) | {
        v for n in graph.nodes if (n.bodies or n.op is APPEND) and n.op is not KERNEL for v in (*n.inputs, *n.outputs) if v is not None
    }
    constants, names, nodes = dict(graph.constants), {v.name for v in graph.values()}, list[Node]()
    chosen, copies = dict[Value, Value](), dict[tuple[Value, Layout], Value]()

    def copied(inputs: tuple[Value | None, ...], layouts: Mapping[int, Layout], suffix: str) -> tuple[Value | None, ...]:
        """The inputs of a kernel, some of them, given by number, as copies in other layouts: packed constants, or what kernels copy."""
        found = list(inputs)
        for n, layout in layouts.items():
            source = found[n]
            assert source is not None
            if (source, layout) not in copies:
                copy = copies[source, layout] = Value(_fresh(f"{source.name}.{suffix}", names), source.dtype, source.shape, layout)
                if source in constants:
                    constants[copy] = constants[source]
                else:
                    nodes.append(_copy(source, copy))
            found[n] = copies[source, layout]
        return tuple(found)

    for node in graph.nodes:
        inputs = tuple(None if v is None else chosen.get(v, v) for v in node.inputs)
        if node.op is not KERNEL:
            bodies = tuple(choose_layouts(b, operand_layouts, halos, seconds) for b in node.bodies)
            nodes.append(replace(node, inputs=inputs, bodies=bodies))
            continue
        body = with_layouts(node.bodies[0], dict(enumerate(v.layout for v in inputs if v is not None)))
        known = frozenset(n for n, v in enumerate(inputs) if v in graph.constants)
        wishes, copied_out = output_layouts(body, known), False
        (result, *others), (wish, *_) = node.outputs, wishes
        if seconds is not None and not others and (result in graph.outputs or result not in fixed and _is_narrow(result, wish)):
            wish, first = _fastest(body, wish, result in fixed, known, operand_layouts, seconds)
            wishes, copied_out = [wish], wish is not None and result in fixed
            inputs, body = copied(inputs, first, "rows"), with_layouts(body, first)
        if copied_out:
            node = replace(node, outputs=(Value(_fresh(f"{result.name}.last", names), result.dtype, result.shape),))
        otherwise = memory_order(body, frozenset(summed_axes.get(result, ()))) if not others else None
        pairs = zip(node.outputs, wishes, strict=True)
        found = {v: None if v in fixed else w or summed_bytes.get(v) or gathered.get(v) or otherwise for v, w in pairs}
        groups = grouped(body)
        layouts = [_spaced(v, w, around.get(v, {}), summed_axes.get(v, ()), groups) for v, w in found.items()]
        outputs = tuple(Value(v.name, v.dtype, v.shape, w) if w is not None else v for v, w in zip(node.outputs, layouts, strict=True))
        chosen.update((v, w) for v, w in zip(node.outputs, outputs, strict=True) if v is not w)
        body = with_layouts(body, {}, dict(enumerate(layouts)))
        if seconds is not None and not others:
            short = {n: w for n, w in _strided_inputs(body, known).items() if _row(body.inputs[n]) < MIN_LANES}
            inputs, body = copied(inputs, short, "rows"), with_layouts(body, short)
        panels = operand_layouts(body, known)
        inputs, body = copied(inputs, panels, "packed"), with_layouts(body, panels)
        nodes.append(replace(node, inputs=inputs, outputs=outputs, bodies=(body,)))
        if copied_out:
            nodes.append(_copy(outputs[0], result))
    used = {v for n in nodes for v in n.inputs} | set(graph.outputs)
    return replace(graph, nodes=tuple(nodes), constants={v: a for v, a in constants.items() if v in used})


def with_layouts(body: Graph, inputs: Layouts, outputs: Layouts | None = None) -> Graph:
    """A kernel body with other layouts on its inputs or outputs."""
    pairs = [*((body.inputs[n], w) for n, w in inputs.items()), *((body.outputs[n], w) for n, w in (outputs or {}).items())]
    new: dict[Value | None, Value] = {v: Value(v.name, v.dtype, v.shape, w) for v, w in pairs if w != v.layout}
    if not new:
        return body

    def swap(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(new.get(v, v) for v in values)

    nodes = tuple(replace(n, inputs=tuple(new.get(v, v) for v in n.inputs), outputs=swap(n.outputs)) for n in body.nodes)
    return Graph(body.name, swap(body.inputs), swap(body.outputs), nodes, body.constants)


def _copy(source: Value, target: Value) -> Node:
    """A kernel that changes the layout."""
    inner, outer = Value("x", source.dtype, source.shape, source.layout), Value("y", target.dtype, target.shape, target.layout)
    body = Graph("copy", (inner,), (outer,), (Node(IDENTITY, (inner,), (outer,), {}, "copy"),))
    return Node(KERNEL, (source,), (target,), {}, target.name, (body,))


def _fresh(name: str, taken: set[str]) -> str:
    found = unused(name, taken, "{}{}")
    taken.add(found)
    return found


def _last(axis: int, rank: int) -> Layout:
    """Row-major, but with one axis at the end."""
    return Layout.permuted((*(d for d in range(rank) if d != axis), axis))


def _size(extent: E.Dim) -> int:
    return extent if isinstance(extent, int) else 1


def _expected(extent: E.Dim) -> int:
    return extent if isinstance(extent, int) else UNKNOWN


def _bytes(read: E.Expr) -> int:
    """The size of what is read from; symbolic extents count as 1."""
    return prod(map(_size, read.attr.shape)) * itemsize(read.attr.dtype)


_text = lru_cache(1 << 14)(canonical_graph_text)  # several questions about a kernel body follow each other


def _remembered(function: Callable[Concatenate[Graph, P], T]) -> Callable[Concatenate[Graph, P], T]:
    """The function, called once for all kernel bodies that compute the same."""
    known: dict[Hashable, T] = {}

    def cached(body: Graph, /, *args: P.args, **options: P.kwargs) -> T:
        key = _text(body), args
        if key not in known:
            known[key] = function(body, *args, **options)
        return known[key]

    return cached


@dataclass(frozen=True, slots=True)
class _Chain:
    """The computation of a kernel body, independent of names and layouts of values: nodes read values by number, inputs coming first."""

    inputs: tuple[tuple[str, tuple[E.Dim, ...]], ...]
    steps: tuple[tuple[Operator, Hashable, tuple[int | None, ...]], ...]
    nodes: tuple[Node, ...] = field(compare=False)


def _value_tensors(body: Graph) -> tuple[list[Tensor], dict[Value, Tensor]]:
    """(placeholders, the tensor of each value) of a kernel body."""
    given = (*body.inputs, *body.constants)
    values = [*given, *(v for node in body.nodes for v in node.outputs)]
    number = {v: n for n, v in enumerate(values)}
    steps = tuple((n.op, attributes_key(n.attrs), tuple(None if v is None else number[v] for v in n.inputs)) for n in body.nodes)
    found = _tensors(_Chain(tuple((v.dtype, v.shape) for v in given), steps, body.nodes))
    return list(found[: len(body.inputs)]), dict(zip(values, found, strict=True))


@lru_cache(maxsize=1024)
def _tensors(chain: _Chain) -> tuple[Tensor, ...]:
    """Those of all values, once: several questions concern each kernel, and what is known of a tensor is cached."""
    found = [placeholder(shape, dtype) for dtype, shape in chain.inputs]
    for node, (_, _, sources) in zip(chain.nodes, chain.steps, strict=True):
        found += node.tensors([None if n is None else found[n] for n in sources])
    return tuple(found)


def _stages(body: Graph, values: Mapping[Value, Tensor]) -> dict[Tensor, E.Expr]:
    """The stages of a kernel body, in order: each tensor and the expression of its elements."""
    return {t: t.body for t in tensors([values[v] for v in body.outputs]) if t.body is not None}


def _reductions(body: E.Expr) -> list[E.Expr]:
    return [e for e in E.walk(body) if e.op == "reduce"]


def _copied_inputs(graph: Graph) -> tuple[Graph, dict[Value, Layout]]:
    """(the graph with copies of inputs, as `_gathered` says; the layouts of the copies, and of what kernels make for each other)."""
    gathered, wanted = _remembered(_gathered), dict[Value, Layout]()
    for node in graph.nodes:
        if node.op is KERNEL:
            sources = [v for v in node.inputs if v is not None]
            wanted.update((sources[n], layout) for n, layout in gathered(node.bodies[0]).items())
    names = {v.name for v in graph.values()}
    copies: dict[Value | None, Value] = {v: Value(_fresh(f"{v.name}.last", names), v.dtype, v.shape) for v in graph.inputs if v in wanted}
    wanted.update((copy, wanted[v]) for v, copy in copies.items() if v is not None)
    nodes = (replace(n, inputs=tuple(copies.get(v, v) for v in n.inputs)) if n.op is KERNEL else n for n in graph.nodes)
    return replace(graph, nodes=(*(_copy(v, copies[v]) for v in graph.inputs if v in copies), *nodes)), wanted


def _input_reads(body: Graph, reduces: bool) -> Iterator[tuple[Value, Tensor, int, list[E.Expr]]]:
    """(result, its tensor, input by number, the reads of that) for all results of a kernel body that reduce, or that do not."""
    inputs, values = _value_tensors(body)
    for v in body.outputs:
        t = values[v]
        if (flat := inlined(t)) is not None and t.axes and bool(_reductions(flat)) == reduces:
            yield from ((v, t, n, [r for r in E.reads(flat) if r.attr is x]) for n, x in enumerate(inputs))


def _gathered(body: Graph) -> dict[int, Layout]:
    """The inputs, by number, that are read at several places for each element, and not to be summed up, where the last axis of a result
    that has no wish runs across their rows: with that axis at the end."""
    wishes, found = dict(zip(body.outputs, _output_layouts(body, frozenset()), strict=True)), dict[int, Layout]()
    for v, t, number, reads in _input_reads(body, False):
        axes = {d for r in reads for d, i in enumerate(r.args) if i is t.axes[-1]}
        rank = len(body.inputs[number].shape)
        if wishes[v] is None and len(reads) > 1 and len(axes) == 1 and axes.isdisjoint({rank - 1}):
            found[number] = _last(axes.pop(), rank)
    return found


def _is_narrow(result: Value, wish: Layout | None) -> bool:
    """Whether a result has too few elements along the last axis of a layout wished for to fill a vector."""
    return wish is not None and _size(result.shape[wish.pieces[-1].axis]) < MIN_LANES


def _fastest(
    body: Graph, wish: Layout | None, fixed: bool, constants: frozenset[int], operand_layouts: OperandLayouts, seconds: Seconds
) -> tuple[Layout | None, dict[int, Layout]]:
    """How a result is computed in the least time: in the layout wished for or row-major, and from which inputs, given by number, that are
    copied first, into layouts whose rows its lanes run along. What is `fixed` has to be row-major in the end; from another layout a kernel
    of its own copies it. What takes each element of an input once changes the layout as it goes."""
    (result,), stages = body.outputs, _stages(body, _value_tensors(body)[1])
    if not any(_reductions(e) or len(reads := set(E.reads(e))) > len({r.attr for r in reads}) for e in stages.values()):
        return None if fixed else wish, {}
    row_major = with_layouts(body, {}, {0: None})
    ways: list[tuple[Graph, list[Node], dict[int, Layout]]] = [(row_major, [], {})] if fixed else []
    if wish is not None and not (fixed and (wish.is_identity or _is_narrow(result, wish))):
        wished = with_layouts(body, {}, {0: wish})
        ways.append((wished, [_copy(wished.outputs[0], row_major.outputs[0])] if fixed else [], {}))
    for computed, copies in [(row_major, list[Node]()), *((computed, copies) for computed, copies, _ in ways if copies)]:
        if first := _strided_inputs(computed, constants):
            from_rows = with_layouts(computed, first)
            ways.append((from_rows, [*copies, *(_copy(body.inputs[n], from_rows.inputs[n]) for n in first)], first))

    def time(way: tuple[Graph, list[Node], dict[int, Layout]]) -> float:
        computed, copies, first = way
        kernel = seconds(with_layouts(computed, operand_layouts(computed, constants)))
        return (kernel + sum(seconds(copy.bodies[0]) for copy in copies)) / (MAX_COPY_TIME if first else 1)

    best, _, first = min(ways, key=time) if len(ways) > 1 else ways[0]
    return best.outputs[0].layout, first


def _strided_inputs(body: Graph, constants: frozenset[int]) -> dict[int, Layout]:
    """The inputs, by number, that reductions read across their rows, as lanes run along the last axis of the result's layout: with the axis
    at the end that lanes run along."""
    found, (result,) = dict[int, Layout](), body.outputs
    for _, t, number, reads in _input_reads(body, True):
        layout = body.inputs[number].layout or Layout.identity(len(body.inputs[number].shape))
        lane = t.axes[-1 if result.layout is None else result.layout.pieces[-1].axis]
        along = {d for r in reads for d, i in enumerate(r.args) if lane in E.variables(i)}
        if along and number not in constants and not layout.pads and layout.pieces and layout.pieces[-1].axis not in along:
            found[number] = _last(max(along), layout.rank).with_halo({p.axis: (p.before, p.after) for p in layout.pieces})
    return found


def _row(v: Value) -> int:
    """Elements of the innermost axis of more than one: what a kernel that copies panels can transpose in registers."""
    return next((size for d in reversed(v.physical_shape) if (size := _size(d)) > 1), 1)


_Product = tuple[Node, E.Expr, dict[E.Expr, Value]]


def _products(graph: Graph) -> Iterator[_Product]:
    """Reductions of two operands, one constant or bytes: (kernel, reduction, the value that each read is of, through zeros around it)."""
    reductions = _remembered(_reductions_of_two)
    for node in graph.nodes:
        if node.op is KERNEL and any(v is not None and (v in graph.constants or v.dtype == "uint8") for v in node.inputs):
            sources = [v for v in node.inputs if v is not None]
            for reduction, operands in reductions(node.bodies[0]):
                yield node, reduction, {r: sources[number] for r, number in operands.items()}


def _reductions_of_two(body: Graph) -> list[tuple[E.Expr, dict[E.Expr, int]]]:
    """The reductions of two operands in a kernel body, and the number of the input that each of these is, if it is one."""
    inputs, values = _value_tensors(body)
    number = {t: n for n, t in enumerate(inputs)}

    def unpadded(read: E.Expr) -> Tensor:
        """The tensor that is read, behind padding stages."""
        while read.attr.body is not None and len(inner := E.reads(read.attr.body)) == 1 and inner[0].attr.ndim == read.attr.ndim:
            (read,) = inner
        tensor: Tensor = read.attr
        return tensor

    found = [(e, E.reads(e.args[0])) for stage in _stages(body, values).values() for e in _reductions(stage)]
    return [(e, {r: number[t] for r in reads if (t := unpadded(r)) in number}) for e, reads in found if len(reads) == 2]


def _summed_axes(graph: Graph, products: Sequence[_Product], passed_on: set[Value]) -> dict[Value, set[int]]:
    """For what is passed on: the axes along which products with constants sum it up."""
    found: dict[Value, set[int]] = {}
    for node, reduction, operands in products:
        if reduction.args[0].op == "mul" and any(v in graph.constants for v in node.inputs):
            for r, v in operands.items():
                if v in passed_on and is_float(v.dtype):
                    found.setdefault(v, set()).update(d for d, i in enumerate(r.args) if i in reduction.attr[1])
    return found


def _summed_bytes(products: Sequence[_Product]) -> dict[Value, Layout]:
    """For the bytes of activations, the axis that a product of bytes sums goes to the end: instructions add up neighbours."""
    wanted: dict[Value, Layout] = {}
    for _, reduction, operands in products:
        weights, read = sorted(E.reads(reduction.args[0]), key=lambda r: r.dtype)
        if (weights.dtype, read.dtype) == ("int8", "uint8") and read in operands:
            axes = [d for d, i in enumerate(read.args) if i in reduction.attr[1] and i in weights.args]
            rank = len(operands[read].shape)
            if len(axes) == 1 and rank > 2 and axes[0] != rank - 1:
                wanted[operands[read]] = _last(axes[0], rank)
    return wanted


def _groups(body: Graph) -> int:
    """The elements of each group, where a kernel body reduces something else for each group of neighbours (the output channels of a grouped
    convolution); 1 for any other."""
    stages = _stages(body, _value_tensors(body)[1])
    indices = [i for e in stages.values() for reduction in _reductions(e) for r in E.reads(reduction.args[0]) for i in r.args]
    return lcm(*(int(q.args[1].attr) for i in indices for q in E.walk(i) if q.op == "floordiv" and q.args[1].op == "const"))


def _spaced(v: Value, layout: Layout | None, halo: Widths, summed: Collection[int], groups: int) -> Layout | None:
    """The layout with zeros around, and a line of the cache between rows that would evict each other; whole groups of so many elements, as
    the loops over them are cut there."""
    w = layout or Layout.identity(len(v.shape))
    last = w.pieces[-1].axis if w.pieces else -1
    if last in summed and last not in halo and not w.pads:
        row, rows = v.shape[last], prod(_expected(d) for n, d in enumerate(v.shape) if n != last)
        if isinstance(row, int) and row * itemsize(v.dtype) % ALIASED == 0 and rows > MAX_ALIASED_ROWS:
            halo = {**halo, last: (0, lcm(LINE // itemsize(v.dtype), groups))}
    return w.with_halo(halo) if halo else layout


def _memory_order(body: Graph, summed: frozenset[int]) -> Layout | None:
    """For a result that is summed along the axis whose elements are neighbours in the largest input: that axis at the end."""
    if not summed:
        return None
    inputs, values = _value_tensors(body)
    t, given = values[body.outputs[0]], {x: v.layout for x, v in zip(inputs, body.inputs, strict=True)}
    flat = inlined(t)
    largest = None if flat is None or _reductions(flat) else max(E.reads(flat), key=_bytes, default=None)
    if largest is None or given.get(largest.attr) is not None:
        return None
    neighbours = [n for n, a in enumerate(t.axes) if stride(largest, a) == 1 and _size(t.shape[n]) > 1]
    return _last(neighbours[0], t.ndim) if len(neighbours) == 1 and neighbours[0] in summed and neighbours[0] != t.ndim - 1 else None


def _halos(graph: Graph, passed_on: set[Value]) -> dict[Value, Widths]:
    """The zeros that readers expect around what is passed on, unless windows are small, or most were zeros: tests are cheaper."""
    reaches = _remembered(_reaches)
    wanted, windows = dict[Value, Widths](), dict[Value, float]()
    for node in graph.nodes:
        sources = [v for v in node.inputs if v is not None]
        if node.op is KERNEL and not passed_on.isdisjoint(sources):
            for number, widths, window in reaches(node.bodies[0]):
                if (source := sources[number]) in passed_on:
                    wanted[source] = joined(wanted.get(source, {}), widths)
                    windows[source] = max(windows.get(source, 0), window)

    def zeros_per_element(value: Value, widths: Widths) -> float:
        return prod(1 + sum(widths.get(n, (0, 0))) / _expected(d) for n, d in enumerate(value.shape)) - 1

    return {v: w for v, w in wanted.items() if windows[v] > SMALL_WINDOW and (windows[v] == inf or zeros_per_element(v, w) <= MAX_ZEROS)}


def _reaches(body: Graph) -> list[tuple[int, Widths, float]]:
    """(input by number, how far it is read over its edges, as zeros, elements of the windows; infinity for other reductions)."""
    inputs, values = _value_tensors(body)
    number, stages = {t: n for n, t in enumerate(inputs)}, _stages(body, values)

    def is_window(t: Tensor, reduction: E.Expr) -> bool:  # of the result's axes
        indices = [linear(i) for r in E.reads(reduction.args[0]) for i in r.args]
        return all(any((a,) in i and any((x,) in i for x in t.axes) for i in indices) for a in reduction.attr[1])

    window = window_size(stages.values()) if all(is_window(t, e) for t, stage in stages.items() for e in _reductions(stage)) else inf
    found = [reach(e) for stage in stages.values() for e in selections(simplify(stage))]
    return [(number[r.attr], widths, window) for r, widths in filter(None, found) if r.attr in number]


def _output_layouts(body: Graph, constants: frozenset[int]) -> list[Layout | None]:
    """The layouts that suit the outputs of a kernel body, of whose inputs these are constants, by number."""
    inputs, values = _value_tensors(body)
    layouts = {t: v.layout for t, v in zip(inputs, body.inputs, strict=True) if v.layout is not None}
    known = {t for n, t in enumerate(inputs) if n in constants}
    for t, stage in _stages(body, values).items():
        layout = _lanes_last(t, stage, known) or _inherited(t, stage, layouts)
        if layout is not None and not layout.is_identity:
            layouts[t] = layout
    for t in (values[v] for v in body.outputs):  # through a change of rank and back (channel shuffle)
        if t not in layouts and (flat := inlined(t)) is not None and (layout := _inherited(t, flat, layouts)) is not None:
            layouts[t] = layout
    return [layouts.get(values[v]) for v in body.outputs]


def _lanes_last(t: Tensor, body: E.Expr, constants: set[Tensor]) -> Layout | None:
    """Channels last, for reductions of windows, contractions with constants, and rows of pixels that are too short for a vector."""

    def lane_axis(reduction: E.Expr) -> int | None:
        reads, reduced = E.reads(reduction.args[0]), set(reduction.attr[1])
        weights, others = ([r for r in reads if (r.attr in constants) == known] for known in (True, False))

        def indexes(reads: Sequence[E.Expr], axis: E.Expr) -> bool:
            return any(axis in E.variables(*r.args) for r in reads)

        def is_windowed(axis: E.Expr) -> bool:
            """Whether an index combines the axis with a reduction, by a sum or a table: neighbouring elements share inputs. (Not where it
            adds a quotient of the axis, such as the group of a channel: whole vectors share it.)"""
            indices = [i for r in reads for i in r.args if axis in (used := set(E.variables(i))) and used & reduced]
            return any(coefficient(i, axis) is not None or any(axis in E.variables(*t.args) for t in E.reads(i)) for i in indices)

        if weights and others:
            free = [n for n, a in enumerate(t.axes) if indexes(weights, a) and not is_windowed(a)]
            if own := [n for n in free if not indexes(others, t.axes[n])] or free:
                return max(own, key=lambda n: _size(t.shape[n]))
        if is_windowed(t.axes[-1]):
            free = [n for n, a in enumerate(t.axes) if indexes(reads, a) and not is_windowed(a) and _size(t.shape[n]) > 1]
            return max(free, key=lambda n: (n > 0, _size(t.shape[n])), default=None)
        row = [n for n, a in enumerate(t.axes) if a in E.variables(*last.args)] if (last := _only(reads, t.axes[-1])) is not None else []
        while row and row[0] != t.ndim - len(row):
            del row[0]
        if row and prod(_size(t.shape[n]) for n in row) < MIN_LANES:  # few pixels: along an axis that indexes a matrix for all of them
            shared = [
                n for n, a in enumerate(t.axes) if (r := _only(reads, a)) is not None and not set(t.axes) & set(E.variables(*r.args)) - {a}
            ]
            return max((n for n in shared if _size(t.shape[n]) >= MIN_LANES), key=lambda n: _size(t.shape[n]), default=None)
        return None

    axes = map(lane_axis, _reductions(body)) if t.ndim > 2 else iter(())
    return next((_last(axis, t.ndim) for axis in axes if axis is not None and axis != t.ndim - 1), None)


def _only(reads: Sequence[E.Expr], axis: E.Expr) -> E.Expr | None:
    """The read that an axis indexes, if it is one alone."""
    found = [r for r in reads if axis in E.variables(*r.args)]
    return found[0] if len(found) == 1 else None


def _inherited(t: Tensor, body: E.Expr, layouts: Mapping[Tensor, Layout]) -> Layout | None:
    """The order of the largest input's axes, carried over to the axes of the result that index them (of equal ones, what is not row-major);
    where it has another rank (tokens that become an image), the last one, unless that is the same for all elements of an axis. None where
    lanes would run across separate products: where both operands of one have the last axis, and others for themselves."""
    place, found = {a: n for n, a in enumerate(t.axes)}, list[tuple[int, Layout]]()
    row_major = 0  # bytes of the largest input that lies in order, and is read so or is a matrix of a product
    otherwise: Layout | None = None
    reads = E.reads(simplify(body))
    largest = max(map(_bytes, reads), default=0)
    for r in reads:
        layout = layouts.get(r.attr)
        elsewhere = r.args and r.attr.ndim != t.ndim and layout is None and r.args[-1] in t.axes[:-1]
        whole = {a for a, n in zip(t.axes, t.shape, strict=True) if n != 1} <= set(E.variables(*r.args))  # not one row for all others
        if elsewhere and whole and t.shape[-1] != 1 and _bytes(r) == largest:
            otherwise = _last(t.axes.index(r.args[-1]), t.ndim)
        if layout is None and (r.args == t.axes or (r.attr.ndim == t.ndim == 2 and _reductions(body))):
            row_major = max(row_major, _bytes(r))
        if layout is None or r.attr.ndim != t.ndim or layout.pads:
            continue
        # The axes of the result in the order in which those of the input that they index lie in memory, if that is an order of all.
        used = [[place[v] for v in E.variables(r.args[piece.axis]) if v in place] for piece in layout.pieces]
        missing = [n for n in range(t.ndim) if [n] not in used]
        order = [axes[0] if axes else missing.pop(0) if missing else -1 for axes in used]
        if all(len(axes) <= 1 for axes in used) and sorted(order) == list(range(t.ndim)):
            found.append((_bytes(r), Layout.permuted(order)))
    size, layout = max(found, key=lambda x: x[0], default=(largest, otherwise))
    numbered = layout is not None and _numbers_products(body, t.axes[layout.pieces[-1].axis])
    return None if size < row_major or numbered else layout


def _numbers_products(body: E.Expr, axis: E.Expr) -> bool:
    """Whether an axis says which of several products of matrices an element belongs to: both operands have it."""
    for product in (e.args[0] for e in _reductions(body) if e.args[0].op == "mul"):
        used = [set(E.variables(*(i for r in E.reads(a) for i in r.args))) for a in product.args]
        if all(axis in variables for variables in used) and used[0] - used[1] and used[1] - used[0]:
            return True
    return False
