"""Layouts: how each intermediate value and each weight lies in memory, chosen from the structure of the kernels.

A layout is a property of a value, not of an operator: kernels read and write logical elements, so any assignment is right, and the choice
is only about speed. Four rules:

1. Activations. A kernel that reduces windows (convolution, pooling) or contracts with a constant has its vector lanes along an axis that is
   neither a window nor shared with the reduction: the output channel. That axis goes to the end (NCHW becomes NHWC). Other kernels follow
   their largest input, axis by axis, through transposes and broadcasts; an axis whose rows products with constants walk together (rule 4)
   stays the last one.
2. Weights. Each constant gets a copy in the layout that its reader wants (`operand_layouts`: packed panels), stored in the artifact.
3. Padding. Intermediate values get a halo of zeros as wide as their readers' windows reach: no kernel copies them.
4. Pitch. Rows that products, or windows of depthwise convolutions, walk together at distances of a multiple of `ALIASED` would evict each
   other: a cache line separates them.

Inputs and outputs of the graph stay row-major. Separate kernels copy an input that vectors would read across its rows at several places or
whose rows are shorter than vectors (windows of weights), and, where a model of the machine says that it pays, an output that was computed
in another layout or an image of few channels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf, lcm, prod
from typing import Concatenate, ParamSpec, TypeVar

from tcomp.ir import expr as E
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.graph import KERNEL, Graph, Node, Value, canonical_graph_text
from tcomp.ir.layout import LINE, Layout
from tcomp.ir.linear import linear
from tcomp.ir.read_patterns import SMALL_WINDOW, Widths, joined
from tcomp.ir.text.printer import unused
from tcomp.ops.movement import IDENTITY
from tcomp.passes import kernel_layouts
from tcomp.passes.kernel_layouts import MIN_LANES, known_size, lanes_along

ALIASED = 2048  # bytes: addresses that differ by a multiple share one of two sets of a first-level cache whose ways are 4096 bytes
MAX_ALIASED_ROWS = 8  # rows of a product at such addresses before they evict each other: the ways of such a cache
UNKNOWN = 32  # elements of an axis whose extent is not known, as assumed to count zeros and rows
MAX_ZEROS = 0.5  # zeros around each element of what windows are reduced over; with more, testing each element is cheaper
MAX_COPY_TIME = 0.6  # of the time without copies of inputs, by the model, which underestimates copies of images that no cache holds
SUMMED_PAIRS = (("int8", "uint8"), ("int8", "int16"), ("int16", "int16"), ("bfloat16", "bfloat16"))  # types whose products are added up

P = ParamSpec("P")
T = TypeVar("T")

OperandLayouts = Callable[[Graph, frozenset[int]], Mapping[int, Layout]]  # (kernel body, its constant inputs) -> what is wanted for some
Axes = Mapping[Value, set[int]]
Seconds = Callable[[Graph], float]  # kernel body -> how long it takes, about
Layouts = Mapping[int, Layout | None]  # of inputs or outputs, by number; others stay as they are


def choose_layouts(
    graph: Graph,
    operand_layouts: OperandLayouts,
    halos: bool = True,
    seconds: Seconds | None = None,
    decided: Callable[[Graph], None] = lambda body: None,
) -> Graph:
    """The graph with layouts on intermediate values and constants. Control-flow bodies keep row-major boundaries. Without `halos`, as for
    a GPU, values get no zeros around them, and are computed as they lie; so are outputs without `seconds`. `decided` is told the body of
    each kernel once its layouts are."""
    graph, gathered = _copied_inputs(graph) if halos else (graph, {})
    output_layouts, memory_order = _remembered(kernel_layouts.output_layouts), _remembered(kernel_layouts.memory_order)
    operand_layouts, grouped = _remembered(operand_layouts), _remembered(kernel_layouts.groups)
    products = list(_products(graph))
    # What kernels compute for each other.
    passed_on = {v for n in graph.nodes if n.op is KERNEL and len(n.outputs) == 1 for v in n.outputs} - set(graph.outputs)
    around = _halos(graph, passed_on) if halos else {}
    walked_axes = _walked_axes(graph, products, passed_on) if halos else {}
    summed = _summed_neighbours(graph, products)
    fixed = set(graph.outputs) | {v for n in graph.nodes if n.op is not KERNEL for v in (*n.inputs, *n.outputs) if v is not None}
    constants, names, nodes = dict(graph.constants), {v.name for v in graph.values()}, list[Node]()
    chosen, copies = dict[Value, Value](), dict[tuple[Value, Layout], Value]()

    def append(node: Node) -> None:
        """Add a kernel, whose layouts are final."""
        nodes.append(node)
        decided(node.bodies[0])

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
                    append(_copy(source, copy))
            found[n] = copies[source, layout]
        return tuple(found)

    for node in graph.nodes:
        inputs = tuple(None if v is None else chosen.get(v, v) for v in node.inputs)
        if node.op is not KERNEL:
            bodies = tuple(choose_layouts(b, operand_layouts, halos, seconds, decided) for b in node.bodies)
            nodes.append(replace(node, inputs=inputs, bodies=bodies))
            continue
        body = with_layouts(node.bodies[0], dict(enumerate(v.layout for v in inputs if v is not None)))
        known = frozenset(n for n, v in enumerate(inputs) if v in graph.constants)
        wishes, copied_out = output_layouts(body, known), False
        (result, *others), (wish, *_) = node.outputs, wishes
        if seconds is not None and not others and (result in fixed or _is_narrow(result, wish)):
            wish, first = _fastest(body, wish, result in fixed, known, operand_layouts, seconds)
            wishes, copied_out = [wish], wish is not None and result in fixed
            inputs, body = copied(inputs, first, "rows"), with_layouts(body, first)
        if copied_out:
            node = replace(node, outputs=(Value(_fresh(f"{result.name}.last", names), result.dtype, result.shape),))
        otherwise = memory_order(body, frozenset(walked_axes.get(result, ()))) if not others else None
        pairs = zip(node.outputs, wishes, strict=True)
        found = {v: None if v in fixed else w or summed.get(v) or gathered.get(v) or otherwise for v, w in pairs}
        groups = grouped(body)
        layouts = [_spaced(v, w, around.get(v, {}), walked_axes.get(v, ()), groups) for v, w in found.items()]
        outputs = tuple(Value(v.name, v.dtype, v.shape, w) if w is not None else v for v, w in zip(node.outputs, layouts, strict=True))
        chosen.update((v, w) for v, w in zip(node.outputs, outputs, strict=True) if v is not w)
        body = with_layouts(body, {}, dict(enumerate(layouts)))
        if seconds is not None and not others:
            short = {n: w for n, w in kernel_layouts.strided_inputs(body, known).items() if _row(body.inputs[n]) < MIN_LANES}
            inputs, body = copied(inputs, short, "rows"), with_layouts(body, short)
        panels = operand_layouts(body, known)
        inputs, body = copied(inputs, panels, "packed"), with_layouts(body, panels)
        append(replace(node, inputs=inputs, outputs=outputs, bodies=(body,)))
        if copied_out:
            append(_copy(outputs[0], result))
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


def _expected(extent: E.Dim) -> int:
    return extent if isinstance(extent, int) else UNKNOWN


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


def _copied_inputs(graph: Graph) -> tuple[Graph, dict[Value, Layout]]:
    """(the graph with copies of inputs, as `kernel_layouts.gathered` says; the layouts of the copies and of what kernels pass on)."""
    gathered, wanted = _remembered(kernel_layouts.gathered), dict[Value, Layout]()
    for node in graph.nodes:
        if node.op is KERNEL:
            sources = [v for v in node.inputs if v is not None]
            wanted.update((sources[n], layout) for n, layout in gathered(node.bodies[0]).items())
    names = {v.name for v in graph.values()}
    copies: dict[Value | None, Value] = {v: Value(_fresh(f"{v.name}.last", names), v.dtype, v.shape) for v in graph.inputs if v in wanted}
    wanted.update((copy, wanted[v]) for v, copy in copies.items() if v is not None)
    nodes = (replace(n, inputs=tuple(copies.get(v, v) for v in n.inputs)) if n.op is KERNEL else n for n in graph.nodes)
    return replace(graph, nodes=(*(_copy(v, copies[v]) for v in graph.inputs if v in copies), *nodes)), wanted


def _is_narrow(result: Value, wish: Layout | None) -> bool:
    """Whether a result has too few elements along the last axis of a layout wished for to fill a vector."""
    return wish is not None and known_size(result.shape[wish.pieces[-1].axis]) < MIN_LANES


def _fastest(
    body: Graph, wish: Layout | None, fixed: bool, constants: frozenset[int], operand_layouts: OperandLayouts, seconds: Seconds
) -> tuple[Layout | None, dict[int, Layout]]:
    """How a result is computed in the least time: in the layout wished for or row-major, and from which inputs, given by number, that are
    copied first, into layouts whose rows its lanes run along. What is `fixed` has to be row-major in the end; from another layout a kernel
    of its own copies it. What takes each element of an input once changes the layout as it goes."""
    (result,), stages = body.outputs, kernel_layouts.stage_bodies(body, kernel_layouts.value_tensors(body)[1])
    if not any(kernel_layouts.reductions(e) or len(reads := set(E.reads(e))) > len({r.attr for r in reads}) for e in stages.values()):
        return None if fixed else wish, {}
    row_major = with_layouts(body, {}, {0: None})
    ways: list[tuple[Graph, list[Node], dict[int, Layout]]] = [(row_major, [], {})] if fixed else []
    if wish is not None and not (fixed and (wish.is_identity or _is_narrow(result, wish))):
        wished = with_layouts(body, {}, {0: wish})
        ways.append((wished, [_copy(wished.outputs[0], row_major.outputs[0])] if fixed else [], {}))
    for computed, copies in [(row_major, list[Node]()), *((computed, copies) for computed, copies, _ in ways if copies)]:
        if first := kernel_layouts.strided_inputs(computed, constants):
            from_rows = with_layouts(computed, first)
            ways.append((from_rows, [*copies, *(_copy(body.inputs[n], from_rows.inputs[n]) for n in first)], first))

    def time(way: tuple[Graph, list[Node], dict[int, Layout]]) -> float:
        computed, copies, first = way
        kernel = seconds(with_layouts(computed, operand_layouts(computed, constants)))
        return (kernel + sum(seconds(copy.bodies[0]) for copy in copies)) / (MAX_COPY_TIME if first else 1)

    best, _, first = min(ways, key=time) if len(ways) > 1 else ways[0]
    return best.outputs[0].layout, first


def _row(v: Value) -> int:
    """Elements of the innermost axis of more than one: what a kernel that copies panels can transpose in registers."""
    return next((size for d in reversed(v.physical_shape) if (size := known_size(d)) > 1), 1)


_Product = tuple[Node, E.Expr, dict[E.Expr, Value]]


def _products(graph: Graph) -> Iterator[_Product]:
    """Reductions of two operands, one constant or bytes: (kernel, reduction, the value that each read is of, through zeros around it)."""
    reductions = _remembered(kernel_layouts.reductions_of_two)
    for node in graph.nodes:
        if node.op is KERNEL and any(v is not None and (v in graph.constants or v.dtype in ("uint8", "int16")) for v in node.inputs):
            sources = [v for v in node.inputs if v is not None]
            for reduction, operands in reductions(node.bodies[0]):
                yield node, reduction, {r: sources[number] for r, number in operands.items()}


def _walked_axes(graph: Graph, products: Sequence[_Product], passed_on: set[Value]) -> Axes:
    """For what is passed on: the axes whose rows products with constants walk together, which are those along which they sum it up, all of
    them or groups of neighbours, and the channels of depthwise convolutions."""
    walked = dict[Value, set[int]]()
    for node, reduction, operands in products:
        if reduction.args[0].op == "mul" and any(v in graph.constants for v in node.inputs):
            reduced = reduction.attr[1]
            for r, v in operands.items():
                if v in passed_on and is_float(v.dtype):
                    along = {d for d, i in enumerate(r.args) if _is_summed(i, reduced)}
                    windows = any(d not in along and not set(reduced).isdisjoint(E.variables(i)) for d, i in enumerate(r.args))
                    lanes = {d for d, i in enumerate(r.args) if windows and i.op == "var"}
                    walked.setdefault(v, set()).update(along | lanes)
    return walked


def _is_summed(index: E.Expr, reduced: Collection[E.Expr]) -> bool:
    """Whether a reduction runs along an axis with this index, or along the group of neighbours that a quotient chooses."""
    factors = [monomial[0] for monomial in linear(index) if monomial]
    return all(x in reduced or x.op == "floordiv" for x in factors) and any(x in reduced for x in factors)


def _summed_neighbours(graph: Graph, products: Sequence[_Product]) -> dict[Value, Layout]:
    """For the bytes of activations, and bfloat16 numbers, the axis that a product sums goes to the end: instructions add up neighbours."""
    wanted: dict[Value, Layout] = {}
    for _, reduction, operands in products:
        reads = sorted(E.reads(reduction.args[0]), key=lambda r: operands.get(r) not in graph.constants)
        weights, read = sorted(reads, key=lambda r: (itemsize(r.dtype), r.dtype))
        if (weights.dtype, read.dtype) in SUMMED_PAIRS and read in operands:
            axes = [d for d, i in enumerate(read.args) if i in reduction.attr[1] and i in weights.args]
            rank = len(operands[read].shape)
            if len(axes) == 1 and rank > 2 and axes[0] != rank - 1:
                wanted[operands[read]] = lanes_along(axes[0], rank)
    return wanted


def _spaced(v: Value, layout: Layout | None, halo: Widths, walked: Collection[int], groups: int) -> Layout | None:
    """The layout with zeros around, and a line of the cache between rows that would evict each other; whole groups of so many elements, as
    the loops over them are cut there."""
    w = layout or Layout.identity(len(v.shape))
    last = w.pieces[-1].axis if w.pieces else -1
    if last in walked and last not in halo and not w.pads:
        row, rows = v.shape[last], prod(_expected(d) for n, d in enumerate(v.shape) if n != last)
        if isinstance(row, int) and row * itemsize(v.dtype) % ALIASED == 0 and rows > MAX_ALIASED_ROWS:
            halo = {**halo, last: (0, lcm(LINE // itemsize(v.dtype), groups))}
    return w.with_halo(halo) if halo else layout


def _halos(graph: Graph, passed_on: set[Value]) -> dict[Value, Widths]:
    """The zeros that readers expect around what is passed on, unless windows are small, or most were zeros: tests are cheaper."""
    reaches = _remembered(kernel_layouts.reaches)
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
