"""Default CPU schedules, chosen by the structure of the loops and a model of the machine; never by an operator's name.

A kernel is cut into groups: a nest that stores a result, with the reductions that only it reads. Reductions read by several groups are
stored whole and are a group of their own. Stages that read windows of each other (`stencils`) and products with a softmax
(`flash_attention`) come first.

    elementwise   no reduction               vector lanes along the contiguous axis, threads along the outer loops
    contraction   one reduction, read at     a tile of accumulators stays in registers over the whole reduction; lanes along an
                  the element stored         output axis (matmul, convolution, depthwise, pooling, column sums)
    rows          reductions over the rest   everything about one row in one place; each reduction runs in vector lanes
                  of a row                   (softmax, normalisation, row sums, dot products)
"""

from __future__ import annotations

from tcomp.ir import expr as E
from tcomp.ir.access import lane_span, linear_index, stride
from tcomp.ir.dtypes import is_float
from tcomp.ir.fallback import FallbackKind
from tcomp.ir.layout import Layout
from tcomp.ir.loops import Kernel, Store, walk
from tcomp.schedules.analysis import access_patterns as patterns
from tcomp.schedules.cpu import block_dot_products, contraction, elementwise, flash_attention, row_reductions, stencils
from tcomp.schedules.cpu.common import nest_lanes, stream
from tcomp.schedules.cpu.dot_products import add_up_groups, grouped, separate_rows, split_groups
from tcomp.schedules.cpu.tile_products import multiply_tiles
from tcomp.schedules.cpu.work_partition import split_row_sums
from tcomp.schedules.groups import Group, attachments, in_one_pass
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.polyhedral import polyhedral_or_not
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

MIN_GATHERED = 4  # vectors of a reduction by gathers from which lanes run along it: with 500 trees 1.3 to 1.9 times as fast as across rows


def schedule(kernel: Kernel, target: CpuTarget, knobs: Knobs | None = None) -> Schedule:
    """The schedule of a kernel as lowered: the default one, unless `knobs` decide otherwise. Where a step is refused (for example,
    because independence cannot be proved), the group stays as it was before, and a note in the kernel says so."""
    knobs = knobs or Knobs()
    s = _prepared(kernel, target)
    if patterns.is_imperative(s.kernel):
        s = polyhedral_or_not(s, target, target.cores)
        s.clean()
        return s
    for chain in stencils.chains(s.kernel):
        with s.attempt(chain.results[-1], FallbackKind.STAGE_BY_STAGE):
            stencils.schedule(s, chain, target, knobs)
    split_groups(s, target)
    split_row_sums(s, target)
    shaped = block_dot_products.in_registers(s, target, knobs)
    rest = in_one_pass(s, lambda found: flash_attention.schedule(s, found, target, knobs)) - shaped
    shaped = set(s.stages) - rest
    for group in (group for group in _groups(s, target) if group.result not in shaped):
        with s.attempt(group.result, FallbackKind.LEFT_AS_LOWERED):
            if group.shape == "elementwise":
                elementwise.schedule(s, group.result, target, knobs)
            elif group.shape == "contraction":
                contraction.schedule(s, group.result, group.inside[0], target, knobs)
            else:
                row_reductions.schedule(s, group, target, knobs)
    for result in s.kernel.outputs:
        stored = any(isinstance(x, Store) and x.buffer is result for x in walk(s.kernel.body))
        if stored:
            stream(s, editing.find_buffer(s.kernel, result.name), target, knobs)
    s.clean()
    separate_rows(s, target)
    add_up_groups(s, target)
    multiply_tiles(s, target)
    return s


def _prepared(kernel: Kernel, target: CpuTarget) -> Schedule:
    """The kernel with as few, but plain, dimensions as its accesses allow."""
    s = Schedule(kernel)
    s.collapse(patterns.MIN_APART)
    if not patterns.is_imperative(s.kernel):
        for result, (stage, size) in patterns.concatenated_results(s.kernel).items():
            _expand(s, patterns.result_nest(s.kernel, result).loops[-1].var.name, size)
            indices = next(r.args for r in patterns.result_nest(s.kernel, result).reads if r.attr.name == stage)
            s.reorder(*(i.name for i in indices if i.op == "var"))
        if (found := patterns.grouped_axis(s.kernel)) is not None and not _fills_vectors(s, *found, target):
            _expand(s, *found)
    return s


def _fills_vectors(s: Schedule, loop: str, size: int, target: CpuTarget) -> bool:
    """Whether lanes should run across groups of `size` neighbours along a loop: each group fills a part of a vector only, and what it
    shares is picked from the vector that holds it for all of them (grouped convolutions of few channels)."""
    for nest in (n for n in patterns.nests(s.kernel) if n.is_reduction):
        axis = nest.spatial[-1] if nest.spatial else None
        if axis is not None and axis.var.name == loop:
            lanes = nest_lanes(target, nest)
            floats = all(is_float(b.dtype) for b in (nest.writes, *(r.attr for r in nest.reads)))
            groups = [r for r in nest.reads if stride(r, axis.var) is None]
            fits = lanes % size == 0 and size < lanes <= patterns.extent_of(axis.extent)
            return floats and fits and all(lane_span(linear_index(r.attr, r.args), axis.var, lanes) < lanes for r in groups)
    return False


def _expand(s: Schedule, loop: str, size: int) -> None:
    """Split an axis into groups of `size`, in all nests that walk it and in the buffers that they write."""
    extent = editing.find_loop(s.kernel, loop).extent

    def whole(d: E.Dim) -> bool:
        """Whether a dimension holds the axis, and behind it whole groups that nothing is written to."""
        return d == extent or (isinstance(d, int) and isinstance(extent, int) and d > extent and d % size == extent % size == 0)

    todo, done = [loop], set[str]()
    while todo:
        if (name := todo.pop()) in done:
            continue
        done.add(name)
        v = editing.find_loop(s.kernel, name).var
        written = {n.writes for n in patterns.nests(s.kernel) if n.writes.shape}
        accesses = [a for n in patterns.nests(s.kernel) for a in ((n.writes, n.leaf.indices), *((r.attr, r.args) for r in n.reads))]
        places = {(b, d) for b, indices in accesses for d, i in enumerate(indices) if i is v and b in written and whole(b.shape[d])}
        todo += [i.name for b, indices in accesses for d, i in enumerate(indices) if (b, d) in places and i.op == "var"]
        s.split(name, size)
        for b, d in sorted(places, key=lambda place: (place[0].name, -place[1])):
            s.expand(b.name, d, size)


def _groups(s: Schedule, target: CpuTarget, packable: frozenset[str] = frozenset()) -> list[Group]:
    """Each temporary attached to the one result that reads it, if that can be. `packable`: buffers whose layout may be chosen (weights)."""

    def formed(result: str, inside: tuple[str, ...]) -> list[Group]:
        if any(n.is_reduction for n in patterns.nests(s.kernel) if n.writes.name == result):
            inside = (*inside, s.cache_write(result, f"{result}.acc"))
        if (shape := _shape(s, result, inside, target, packable)) is not None:
            return [Group(result, inside, shape)]
        read = {r.attr.name for n in patterns.nests(s.kernel) if n.writes.name == result for r in n.reads}
        direct, others = (tuple(name for name in inside if (name in read) == wanted) for wanted in (True, False))
        if others and (shape := _shape(s, result, direct, target, packable)) is not None:  # what its reductions read is stored whole
            return [*(g for name in others for g in formed(name, ())), Group(result, direct, shape)]
        # The structure does not allow one nest for all: every stage is stored whole.
        return [*(g for name in inside for g in formed(name, ())), Group(result, (), "elementwise")]

    return [g for result, inside in attachments(s.kernel) for g in formed(result, inside)]


def _shape(s: Schedule, result: str, inside: tuple[str, ...], target: CpuTarget, packable: frozenset[str]) -> str | None:
    if not inside:
        return "elementwise"
    out = patterns.result_nest(s.kernel, result)
    reductions = [n for n in patterns.nests(s.kernel) if n.is_reduction and n.writes.name in inside]
    outer = patterns.row_loops(s.kernel, out, inside) if reductions else None
    if outer is None:
        return None
    if len(outer) == len(out.loops):  # the reduction of each element
        return None if len(inside) > 1 else "contraction" if _lanes_along_output(reductions[0], out, target, packable) else "rows"
    return None if out.loops and out.loops[-1].var in outer else "rows"  # where the contiguous axis is outside, a row would be strided


def _lanes_along_output(reduction: patterns.Nest, out: patterns.Nest, target: CpuTarget, packable: frozenset[str]) -> bool:
    """Whether vector lanes should run along the contiguous axis of the result rather than along the reduction."""
    if not out.loops or not reduction.spatial:
        return False
    lane, lanes, along = reduction.spatial[-1], nest_lanes(target, reduction), patterns.contiguous_reduction(reduction)
    if patterns.extent_of(lane.extent) * 2 < lanes:
        return along is None
    product, rows = patterns.is_product(reduction), patterns.row_axis(reduction)
    if any(E.reads(*r.args) for r in reduction.reads):  # gathered along either axis, from tables that all of the output reads
        # Lanes along a long reduction share what one element of the output reads, and are filled whatever the number of such elements.
        filled = along is not None and patterns.extent_of(along.extent) >= lanes * MIN_GATHERED
        return not filled or not any(E.reads(r.args[-1]) for r in reduction.reads)
    if patterns.contiguous([r for r in reduction.reads if not (product and r.attr.name in packable)], lane.var):
        return True
    if product and rows is not None and patterns.extent_of(rows.extent) >= contraction.MIN_PACKED_ROWS:
        return True  # the operand that is contiguous in no output axis is packed first
    return along is None or patterns.extent_of(along.extent) < lanes


def operand_layouts(kernel: Kernel, constants: frozenset[int], target: CpuTarget, knobs: Knobs | None = None) -> dict[int, Layout]:
    """The packed layouts that the default schedule of an unscheduled kernel wants for constant parameters. A contraction reads its vector
    operand in panels as wide as the register tile, one panel after the other, in the order of the reduction loops:
    `[column / width][reduction loops...][column % width]`."""
    knobs, s = knobs or Knobs(), _prepared(kernel, target)
    if patterns.is_imperative(s.kernel):
        return {}
    wishes = block_dot_products.operand_layouts(s.kernel, constants, target)
    if wishes:
        return wishes
    names = {b.name: n for n, b in enumerate(kernel.buffers)}
    packable = frozenset(kernel.buffers[n].name for n in constants)
    original = {n.writes.name: n for n in patterns.nests(kernel) if n.is_reduction}
    for group in (g for g in _groups(s, target, packable) if g.shape == "contraction"):
        nest = patterns.reduction_nest(s.kernel, group.inside[0])
        width = contraction.tile_of(nest, target, knobs, packable).vectors * nest_lanes(target, nest)
        columns = nest.spatial[-1].extent
        source = original.get(group.result) or original.get(nest.writes.name)
        if source is None or not patterns.is_product(source):
            continue
        for r in source.reads:
            number = names.get(r.attr.name, -1)  # temporaries are not parameters
            if number in constants and (order := contraction.panel_order(source, r)) is not None:
                whole = isinstance(columns, int) and columns != source.spatial[-1].extent and columns % width  # a group is not cut
                panels = Layout.blocked(order[0], order[1], patterns.extent_of(columns) if whole else width)
                wishes[number] = grouped(panels, source, target)
    return wishes
