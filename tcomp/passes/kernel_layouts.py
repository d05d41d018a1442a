"""The layouts that suit one kernel, derived from its tensor expressions: of its outputs, of its inputs, and the zeros around them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, lcm, prod

from tcomp.ir import expr as E
from tcomp.ir.access import coefficient, stride
from tcomp.ir.dtypes import itemsize
from tcomp.ir.graph import Graph, Node, Operator, Value, attributes_key
from tcomp.ir.layout import Layout
from tcomp.ir.linear import linear
from tcomp.ir.read_patterns import Widths, reach, selections, window_size
from tcomp.ir.simplify import simplify
from tcomp.ir.te import Tensor, placeholder, tensors
from tcomp.passes.structure import inlined

MIN_LANES = 8  # elements along an axis that lanes run along: the float32 of a 256-bit vector


def lanes_along(axis: int, rank: int) -> Layout:
    """Row-major, but with one axis at the end."""
    return Layout.permuted((*(d for d in range(rank) if d != axis), axis))


def known_size(extent: E.Dim) -> int:
    """An extent; 1 for one that is symbolic."""
    return extent if isinstance(extent, int) else 1


def _bytes(read: E.Expr) -> int:
    """The size of what is read from; symbolic extents count as 1."""
    return prod(map(known_size, read.attr.shape)) * itemsize(read.attr.dtype)


@dataclass(frozen=True, slots=True)
class _Chain:
    """The computation of a kernel body, independent of names and layouts of values: nodes read values by number, inputs coming first."""

    inputs: tuple[tuple[str, tuple[E.Dim, ...]], ...]
    steps: tuple[tuple[Operator, Hashable, tuple[int | None, ...]], ...]
    nodes: tuple[Node, ...] = field(compare=False)


def value_tensors(body: Graph) -> tuple[list[Tensor], dict[Value, Tensor]]:
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


def stage_bodies(body: Graph, values: Mapping[Value, Tensor]) -> dict[Tensor, E.Expr]:
    """The stages of a kernel body, in order: each tensor and the expression of its elements."""
    return {t: t.body for t in tensors([values[v] for v in body.outputs]) if t.body is not None}


def reductions(body: E.Expr) -> list[E.Expr]:
    """All reductions in the expression of a stage."""
    return [e for e in E.walk(body) if e.op == "reduce"]


def _input_reads(body: Graph, reduces: bool) -> Iterator[tuple[Value, Tensor, int, list[E.Expr]]]:
    """(result, its tensor, input by number, the reads of that) for all results of a kernel body that reduce, or that do not."""
    inputs, values = value_tensors(body)
    for v in body.outputs:
        t = values[v]
        if (flat := inlined(t)) is not None and t.axes and bool(reductions(flat)) == reduces:
            yield from ((v, t, n, [r for r in E.reads(flat) if r.attr is x]) for n, x in enumerate(inputs))


def gathered(body: Graph) -> dict[int, Layout]:
    """The inputs, by number, that are read at several places for each element, and not to be summed up, where the last axis of a result
    that has no wish runs across their rows: with that axis at the end."""
    wishes, found = dict(zip(body.outputs, output_layouts(body, frozenset()), strict=True)), dict[int, Layout]()
    for v, t, number, reads in _input_reads(body, False):
        axes = {d for r in reads for d, i in enumerate(r.args) if i is t.axes[-1]}
        rank = len(body.inputs[number].shape)
        if wishes[v] is None and len(reads) > 1 and len(axes) == 1 and axes.isdisjoint({rank - 1}):
            found[number] = lanes_along(axes.pop(), rank)
    return found


def strided_inputs(body: Graph, constants: frozenset[int]) -> dict[int, Layout]:
    """The inputs, by number, that reductions read across their rows, as lanes run along the last axis of the result's layout: with the axis
    at the end that lanes run along."""
    found, (result,) = dict[int, Layout](), body.outputs
    for _, t, number, reads in _input_reads(body, True):
        layout = body.inputs[number].layout or Layout.identity(len(body.inputs[number].shape))
        lane = t.axes[-1 if result.layout is None else result.layout.pieces[-1].axis]
        along = {d for r in reads for d, i in enumerate(r.args) if lane in E.variables(i)}
        if along and number not in constants and not layout.pads and layout.pieces and layout.pieces[-1].axis not in along:
            found[number] = lanes_along(max(along), layout.rank).with_halo({p.axis: (p.before, p.after) for p in layout.pieces})
    return found


def reductions_of_two(body: Graph) -> list[tuple[E.Expr, dict[E.Expr, int]]]:
    """The reductions of two operands in a kernel body, and the number of the input that each of these is, if it is one."""
    inputs, values = value_tensors(body)
    number = {t: n for n, t in enumerate(inputs)}

    def unpadded(read: E.Expr) -> Tensor:
        """The tensor that is read, behind padding stages."""
        while read.attr.body is not None and len(inner := E.reads(read.attr.body)) == 1 and inner[0].attr.ndim == read.attr.ndim:
            (read,) = inner
        tensor: Tensor = read.attr
        return tensor

    found = [(e, E.reads(e.args[0])) for stage in stage_bodies(body, values).values() for e in reductions(stage)]
    return [(e, {r: number[t] for r in reads if (t := unpadded(r)) in number}) for e, reads in found if len(reads) == 2]


def groups(body: Graph) -> int:
    """The elements of each group, where a kernel body reduces something else for each group of neighbours (the output channels of a grouped
    convolution); 1 for any other."""
    stages = stage_bodies(body, value_tensors(body)[1])
    indices = [i for e in stages.values() for reduction in reductions(e) for r in E.reads(reduction.args[0]) for i in r.args]
    return lcm(*(int(q.args[1].attr) for i in indices for q in E.walk(i) if q.op == "floordiv" and q.args[1].op == "const"))


def memory_order(body: Graph, walked: frozenset[int]) -> Layout | None:
    """For a result whose readers walk rows along the axis, one of `walked`, whose elements are neighbours in the largest input: that axis
    at the end."""
    if not walked:
        return None
    inputs, values = value_tensors(body)
    t, given = values[body.outputs[0]], {x: v.layout for x, v in zip(inputs, body.inputs, strict=True)}
    flat = inlined(t)
    largest = None if flat is None or reductions(flat) else max(E.reads(flat), key=_bytes, default=None)
    if largest is None or given.get(largest.attr) is not None:
        return None
    neighbours = [n for n, a in enumerate(t.axes) if stride(largest, a) == 1 and known_size(t.shape[n]) > 1]
    return lanes_along(neighbours[0], t.ndim) if len(neighbours) == 1 and neighbours[0] in walked and neighbours[0] != t.ndim - 1 else None


def reaches(body: Graph) -> list[tuple[int, Widths, float]]:
    """(input by number, how far it is read over its edges, as zeros, elements of the windows; infinity for other reductions)."""
    inputs, values = value_tensors(body)
    number, stages = {t: n for n, t in enumerate(inputs)}, stage_bodies(body, values)

    def is_window(t: Tensor, reduction: E.Expr) -> bool:  # of the result's axes
        indices = [linear(i) for r in E.reads(reduction.args[0]) for i in r.args]
        return all(any((a,) in i and any((x,) in i for x in t.axes) for i in indices) for a in reduction.attr[1])

    window = window_size(stages.values()) if all(is_window(t, e) for t, stage in stages.items() for e in reductions(stage)) else inf
    found = [reach(e) for stage in stages.values() for e in selections(simplify(stage))]
    return [(number[r.attr], widths, window) for r, widths in filter(None, found) if r.attr in number]


def output_layouts(body: Graph, constants: frozenset[int]) -> list[Layout | None]:
    """The layouts that suit the outputs of a kernel body, of whose inputs these are constants, by number."""
    inputs, values = value_tensors(body)
    layouts = {t: v.layout for t, v in zip(inputs, body.inputs, strict=True) if v.layout is not None}
    known = {t for n, t in enumerate(inputs) if n in constants}
    for t, stage in stage_bodies(body, values).items():
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
                return max(own, key=lambda n: known_size(t.shape[n]))
        if is_windowed(t.axes[-1]):
            free = [n for n, a in enumerate(t.axes) if indexes(reads, a) and not is_windowed(a) and known_size(t.shape[n]) > 1]
            return max(free, key=lambda n: (n > 0, known_size(t.shape[n])), default=None)
        row = [n for n, a in enumerate(t.axes) if a in E.variables(*last.args)] if (last := _only(reads, t.axes[-1])) is not None else []
        while row and row[0] != t.ndim - len(row):
            del row[0]
        if row and prod(known_size(t.shape[n]) for n in row) < MIN_LANES:  # few pixels: along an axis that indexes a matrix for all of them
            shared = [
                n for n, a in enumerate(t.axes) if (r := _only(reads, a)) is not None and not set(t.axes) & set(E.variables(*r.args)) - {a}
            ]
            return max((n for n in shared if known_size(t.shape[n]) >= MIN_LANES), key=lambda n: known_size(t.shape[n]), default=None)
        return None

    axes = map(lane_axis, reductions(body)) if t.ndim > 2 else iter(())
    return next((lanes_along(axis, t.ndim) for axis in axes if axis is not None and axis != t.ndim - 1), None)


def _only(reads: Sequence[E.Expr], axis: E.Expr) -> E.Expr | None:
    """The read that an axis indexes, if it is one alone."""
    found = [r for r in reads if axis in E.variables(*r.args)]
    return found[0] if len(found) == 1 else None


def _inherited(t: Tensor, body: E.Expr, layouts: Mapping[Tensor, Layout]) -> Layout | None:
    """The order of the largest input's axes, carried over to the axes of the result that index them (of equal ones, what is not row-major);
    where it has another rank (tokens that become an image), the last one, unless that is the same for all elements of an axis. None where
    lanes would run across separate products: where both operands of one have the last axis, and others for themselves; and where sums, of
    products say, would be fewer neighbours than vectors have lanes, though rows of the result fill these."""
    place, found = {a: n for n, a in enumerate(t.axes)}, list[tuple[int, Layout]]()
    row_major = 0  # bytes of the largest input that lies in order, and is read so or is a matrix of a product
    otherwise: Layout | None = None
    reads = E.reads(simplify(body))
    largest = max(map(_bytes, reads), default=0)
    for r in reads:
        layout = layouts.get(r.attr)
        last = r.args[-1] if r.args else None
        if last is not None and last.op == "mod":  # channels in parts, a row of each
            last = last.args[0]
        elsewhere = r.attr.ndim != t.ndim and layout is None and last in t.axes[:-1]
        whole = {a for a, n in zip(t.axes, t.shape, strict=True) if n != 1} <= set(E.variables(*r.args))  # not one row for all others
        if elsewhere and whole and t.shape[-1] != 1 and _bytes(r) == largest:
            otherwise = lanes_along(t.axes.index(last), t.ndim)
        if layout is None and (r.args == t.axes or (r.attr.ndim == t.ndim == 2 and reductions(body))):
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
    if layout is None or size < row_major or numbered:
        return None
    neighbours, row = (known_size(t.shape[n]) for n in (layout.pieces[-1].axis, -1))
    return None if reductions(body) and neighbours < MIN_LANES <= row else layout


def _numbers_products(body: E.Expr, axis: E.Expr) -> bool:
    """Whether an axis says which of several products of matrices an element belongs to: both operands have it."""
    for product in (e.args[0] for e in reductions(body) if e.args[0].op == "mul"):
        used = [set(E.variables(*(i for r in E.reads(a) for i in r.args))) for a in product.args]
        if all(axis in variables for variables in used) and used[0] - used[1] and used[1] - used[0]:
            return True
    return False
