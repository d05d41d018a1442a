"""Default GPU schedules, chosen by the structure of the loops; never by an operator's name.

A kernel is cut into groups as on a CPU (a nest that stores a result, with the reductions that only it reads); each becomes one launch.

    elementwise      no reduction           one thread per vector of up to 16 bytes, all loops fused; small results of one shape that
                                            follow each other are fused horizontally, in one launch
    thread tile      one reduction, read    one thread per tile of accumulators in registers, over the whole reduction; neighbouring
                     where it is stored     threads take neighbouring columns (matmul, convolution, pooling, column sums)
    block tile       a sum of products, of  one block per tile of the result: both factors are staged in shared memory, a slice of the
                     rows and columns       reduction at a time, copied some slices in advance (matmul, convolution: see `gemm`)
    gemv             a sum of products of   one block per strip of columns: its threads split the reduction, so that the wide factor
                     few rows, many columns streams at full speed (vectors by matrices: see `gemv`)
    thread per row   reductions over the    one thread per row, which it keeps to itself
                     rest of a short row
    block per row    reductions over the    one block per row: each thread reduces a strided part, then the block reduces the partial
                     rest of a row          results as a tree (softmax, normalisation, row sums)

Products with a softmax, such as attention, are one group, and go through each row of scores once: see `flash_attention`. A reduction whose
result is too small to fill the machine is first split into many partial ones (split-K). Every phase of a block is a thread loop of its own,
so that the loops executed one by one compute the same as on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.access import stride
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim, Expr
from tcomp.ir.fallback import FallbackKind
from tcomp.ir.instruction import WARP
from tcomp.ir.layout import Layout
from tcomp.ir.loops import For, Kernel
from tcomp.ir.simplify import same_shape
from tcomp.schedules.analysis import access_patterns as patterns
from tcomp.schedules.analysis.access_patterns import Nest, extent_of, iterations, nests, reduction_nest, result_nest
from tcomp.schedules.gpu import block_tiles, flash_attention, gemm, gemv, imperative, thread_mapping as T
from tcomp.schedules.groups import Group, attachments, in_one_pass
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import fuse_all, unroll
from tcomp.target import CudaTarget

# Thresholds of the choice between schedules. They follow from the figures of an A100 (108 SMs) and were not fitted to measurements.
BLOCK_THREADS = 256  # threads of a block: 8 warps, so that 8 blocks fill an SM and each may use 32 registers a thread or more
BUSY_THREADS = 1 << 15  # threads that keep a large GPU busy: about 10 warps for each of its SMs
MIN_BLOCK_ROW = 32  # elements: from this length on a row gets a block, as it keeps a whole warp busy
MAX_THREAD_ROW = 256  # bytes of a short row's intermediate values that one thread keeps in 64 of its registers
MAX_SHARED_ROW = 32 << 10  # bytes of a row's intermediate values in shared memory: several blocks of an SM still fit
MIN_SPLIT_LENGTH = 1 << 15  # elements: from this length on a reduction with few results is split, to outweigh a second launch
MIN_SPLIT_PART = 32  # elements: the least that a part of a split reduction accumulates
MIN_COLUMNS = 16  # columns of a product from which on neighbouring threads walk along them: half a warp
REGISTER_TILES = ((8, 8), (8, 4), (4, 4), (2, 4), (1, 4), (1, 2))  # (rows, columns) of results of a thread, best first
MAX_ROW_THREADS, FEW_ROWS, LONG_ROW = 1024, 256, 1 << 13  # threads of a block at most, for fewer rows than that, of so many elements
MIN_BLOCKS = 64  # blocks that keep more than half of a large GPU's multiprocessors busy
ROW_ELEMENTS = 4  # elements of a row for each thread


def schedule(kernel: Kernel, target: CudaTarget, knobs: Knobs | None = None) -> Schedule:
    """The default schedule of a kernel as lowered. Programs written by hand (externs) run as they are written: see `imperative`.

    A group for which a step is refused (for example, because independence cannot be proved) runs on one thread; a note in the kernel says
    so."""
    s = Schedule(kernel)
    s.collapse()
    decided = Knobs() if knobs is None else knobs
    if patterns.is_imperative(s.kernel):
        imperative.schedule(s)
    else:
        rest = in_one_pass(s, lambda found: flash_attention.schedule(s, found, target, decided))
        for group in _groups(s, rest, target):
            with s.attempt(group.result, FallbackKind.ONE_THREAD):
                _schedule_group(s, group, target, decided)
    s.clean()
    return s


def _groups(s: Schedule, rest: set[str], target: CudaTarget) -> list[Group]:
    """Attach each temporary to the one result that reads it, where the structure allows; it is stored whole otherwise. `rest`: the buffers
    whose nests are as lowered."""
    groups: list[Group] = []
    for result, inside in [(result, inside) for result, inside in attachments(s.kernel) if result in rest]:
        for group in _form_groups(s, result, inside, target):
            last = groups[-1] if groups else None
            if last is not None and last.shape == group.shape == "elementwise" and _are_alike(s, last.result, group.result):
                groups[-1] = Group(last.result, (*last.inside, group.result), "elementwise")
            else:
                groups.append(group)
    return groups


def _are_alike(s: Schedule, first: str, second: str) -> bool:
    """Whether two results have the same loops, too few of them for vectors."""
    one, two = result_nest(s.kernel, first), result_nest(s.kernel, second)
    alike = bool(one.loops) and same_shape([x.extent for x in one.loops], [x.extent for x in two.loops])
    return alike and _vector_lanes(one) == _vector_lanes(two) == 1


def _form_groups(s: Schedule, result: str, inside: tuple[str, ...], target: CudaTarget) -> list[Group]:
    groups: list[Group] = []
    reductions = {n.writes.name for n in nests(s.kernel) if n.is_reduction}
    if len(reduced := {*inside, result} & reductions) == 1:
        (name,) = reduced
        reduction, out = reduction_nest(s.kernel, name), result_nest(s.kernel, name)
        if (product := block_tiles.find(reduction, out, target)) is not None:
            partial = gemm.split_k(s, name, product)
        elif (strip := gemv.find(reduction, out, target)) is not None:
            partial = gemv.split_k(s, name, reduction, strip)
        else:
            partial = _split_reduction(s, name)
        if partial is not None:
            groups += _form_groups(s, partial, (), target)
    if result in reductions:
        inside = (*inside, s.cache_write(result, f"{result}.acc"))
    shape = _shape(s, result, inside, target)
    if shape is not None:
        return [*groups, Group(result, inside, shape)]
    for name in inside:
        groups += _form_groups(s, name, (), target)
    return [*groups, Group(result, (), "elementwise")]


def _split_reduction(s: Schedule, result: str) -> str | None:
    """Cut a long reduction with few results into partial reductions that fill the machine; the name of their stage."""
    reduction = reduction_nest(s.kernel, result)
    if not reduction.reduction_loops:
        return None
    longest = T.longest(reduction.reduction_loops)
    results, length = iterations(reduction.spatial), extent_of(longest.extent)
    by_blocks = _prefers_block_per_row(reduction)  # many threads reduce a row; elsewhere a thread has some results of its own
    least, threads = (MIN_SPLIT_LENGTH, BLOCK_THREADS * 8) if by_blocks else (MIN_SPLIT_PART * 8, 1)
    if length < least or results * threads >= BUSY_THREADS:
        return None
    partial = s.rfactor(result, longest.var.name, _floor_power(min(4 * BUSY_THREADS // results, length // MIN_SPLIT_PART)))
    s.mask(partial)
    return partial


def _shape(s: Schedule, result: str, inside: tuple[str, ...], target: CudaTarget) -> str | None:
    """The kind of schedule (see the table above) of a result with what is computed inside its loops; None if it cannot be there."""
    if not inside:
        return "elementwise"
    out = result_nest(s.kernel, result)
    reductions = [n for n in nests(s.kernel) if n.is_reduction and n.writes.name in inside]
    rows = patterns.row_loops(s.kernel, out, inside) if reductions else None
    if rows is None:
        return None
    long = all(_longest(n) >= MIN_BLOCK_ROW for n in reductions)
    if len(rows) < len(out.loops):
        if not rows or out.loops[-1].var in rows or not _fits(s, inside, rows):
            return None
        return "block per row" if long else "thread per row" if _fits(s, inside, rows, MAX_THREAD_ROW) else None
    if len(inside) > 1:
        together = rows and long and _fits(s, inside, rows) and all(patterns.contiguous_reduction(n) is not None for n in reductions)
        return "block per row" if together else None
    if block_tiles.find(reductions[0], out, target) is not None:
        return "block tile"
    if gemv.find(reductions[0], out, target) is not None:
        return "gemv"
    return "block per row" if _prefers_block_per_row(reductions[0]) else "thread tile"


def _longest(reduction: Nest) -> int:
    return max((extent_of(x.extent) for x in reduction.reduction_loops), default=1)


def _prefers_block_per_row(reduction: Nest) -> bool:
    """Whether neighbouring threads should walk along the reduction rather than along the result."""
    if _longest(reduction) < MIN_BLOCK_ROW:
        return False
    if not reduction.spatial:
        return True
    lane = reduction.spatial[-1]
    if T.is_contraction(reduction) and patterns.row_axis(reduction) is not None and extent_of(lane.extent) >= MIN_COLUMNS:
        return False
    return patterns.contiguous_reduction(reduction) is not None and not patterns.contiguous(reduction.reads, lane.var)


def _fits(s: Schedule, inside: Sequence[str], rows: Sequence[Expr], most: int = MAX_SHARED_ROW) -> bool:
    """Whether the intermediate values of a row take at most `most` bytes; those of a symbolic row may take any."""
    buffers = [editing.find_buffer(s.kernel, name) for name in inside]
    known = all(isinstance(n, int) for b in buffers for n in b.shape[len(rows) :])
    return known and sum(prod(map(extent_of, b.shape[len(rows) :])) * itemsize(b.dtype) for b in buffers) <= most


def _schedule_group(s: Schedule, group: Group, target: CudaTarget, knobs: Knobs) -> None:
    try:
        with s.together():
            match group.shape:
                case "elementwise" if group.inside:  # horizontal fusion: a thread computes one element of each
                    first, *others = [fuse_all(s, T.names(result_nest(s.kernel, x).loops)) for x in (group.result, *group.inside)]
                    for other in others:
                        s.fuse_loops(first, other)
                    _grid(s, [first])
                case "elementwise":
                    _elementwise(s, group.result)
                case "thread tile":
                    _thread_tile(s, group.result, group.inside[0])
                case "block tile":
                    gemm.schedule(s, group.result, group.inside[0], target, knobs)
                case "gemv":
                    gemv.schedule(s, group.result, group.inside[0], target)
                case "thread per row":
                    rows, rest = map(T.names, _rows_and_rest(s, group))
                    s.reorder(*rows, *rest)
                    home = _grid(s, rows)
                    for name in reversed(group.inside):
                        s.compute_at(name, home, "register")
                    unroll(s, rest)
                case _:
                    _block_per_row(s, group)
    except ScheduleError as error:
        if group.shape == "elementwise" and group.inside:  # one needs of another what another thread computes
            for result in (group.result, *group.inside):
                _elementwise(s, result)
        elif group.shape in ("block tile", "gemv"):
            s.fall_back(FallbackKind.NOT_STAGED, group.result, error.reason)
            _thread_tile(s, group.result, group.inside[0])
        else:
            raise


def _elementwise(s: Schedule, result: str) -> None:
    nest = result_nest(s.kernel, result)
    if not nest.loops:
        return
    loops = T.names(nest.loops)
    if (width := _vector_lanes(nest)) > 1:
        loops[-1], lane = s.split(loops[-1], width)
        s.vectorize(lane)
    _grid(s, loops)


def _vector_lanes(nest: Nest) -> int:
    """How many neighbouring elements one thread takes: as many as the widest type allows, where rows divide and lie side by side."""
    lane = nest.loops[-1]
    written = E.read(nest.writes, nest.leaf.indices)
    whole = isinstance(lane.extent, int) and stride(written, lane.var) == 1 and patterns.contiguous(nest.reads, lane.var)
    return T.power_of_two(extent_of(lane.extent), T.widest_vector(nest, nest)) if whole and iterations(nest.loops) >= BUSY_THREADS else 1


def _grid(s: Schedule, loops: Sequence[str]) -> str:
    """Fuse perfectly nested loops and run them on all threads, in smaller blocks where there is little to do, so that it spreads over more
    multiprocessors; returns the thread loop."""
    flat = fuse_all(s, loops)
    many = extent_of(editing.find_loop(s.kernel, flat).extent, 1 << 20)
    return s.distribute(flat, min(BLOCK_THREADS, max(WARP, _floor_power(many // MIN_BLOCKS))), "block.x", "thread.x")[1]


def _floor_power(n: int) -> int:
    """The largest power of two up to a number; 1 of 0."""
    return 1 << max(0, n.bit_length() - 1)


def _thread_tile(s: Schedule, result: str, acc: str) -> None:
    reduction, out = reduction_nest(s.kernel, acc), result_nest(s.kernel, result)
    if not out.loops:
        return  # a short reduction into one element: one thread
    loops, inner = T.names(out.loops), list[str]()
    row = patterns.row_axis(reduction) if T.is_contraction(reduction) else None
    rows, columns = _register_tile(reduction, row)
    tile = {len(loops) - 1: columns} if row is None else {reduction.spatial.index(row): rows, len(loops) - 1: columns}
    for d, n in tile.items():
        if n > 1:
            loops[d], element = s.split(loops[d], n)
            inner.append(element)
    fastest = _fastest(reduction)
    if not inner and fastest is not reduction.spatial[-1]:  # neighbouring threads read neighbouring elements
        loops.append(loops.pop(reduction.spatial.index(fastest)))
    s.reorder(*loops, *inner)
    s.compute_at(acc, _grid(s, loops), "register")
    width = T.vector_width(reduction, out, columns) if columns > 1 else 1
    T.lanes(s, inner, width)
    T.lanes(s, patterns.stage_axes(s.kernel, acc, False), width)
    # Reduction loops in the order of the largest operand's memory, the slowest first; before them, those that do not move along it.
    largest = max(reduction.reads, key=_elements, default=None)
    steps = {x.var.name: 0 if largest is None else stride(largest, x.var) for x in reduction.reduction_loops}
    slowest_first = sorted(steps, key=lambda x: -(1 << 40) if (step := steps[x]) is None else -abs(step))
    spatial = patterns.stage_axes(s.kernel, acc, True)
    s.reorder(*slowest_first, *spatial, reassociate=True)
    T.lanes(s, spatial, width)


def _elements(buffer_read: Expr) -> int:
    return prod(extent_of(n) for n in buffer_read.attr.shape)


def _fastest(reduction: Nest) -> For:
    """The axis of the result along which most of what is read lies side by side; the last one where there is no difference."""
    return max(reversed(reduction.spatial), key=lambda x: sum(_elements(r) for r in reduction.reads if stride(r, x.var) == 1))


def _register_tile(reduction: Nest, row: For | None) -> tuple[int, int]:
    """(rows, columns) of results that one thread computes: large tiles reuse what they load, small ones fill the machine."""
    results = iterations(reduction.spatial)
    if not T.is_contraction(reduction):
        return 1, 1
    columns = reduction.spatial[-1].extent if _fastest(reduction) is reduction.spatial[-1] else 1
    for rows, width in REGISTER_TILES:
        r = 1 if row is None else _fitting(row.extent, range(1, rows + 1), 2)
        c = _fitting(columns, [n for n in (1, 2, 4, 8) if n <= width], width // 2)
        if r * c * 2 >= rows * width and results // (r * c) >= BUSY_THREADS // 2:
            return r, c
    return 1, 1


def _fitting(extent: Dim, sizes: Sequence[int], least: int) -> int:
    """The last of ascending `sizes` that leaves no remainder; of a long or symbolic extent for which that is none from `least` on, the last
    of all."""
    if not isinstance(extent, int):
        return sizes[-1]
    best = max(n for n in sizes if extent % n == 0)
    return best if best >= least or extent < 8 * sizes[-1] else sizes[-1]


def _rows_and_rest(s: Schedule, group: Group) -> tuple[list[For], list[For]]:
    """The loops of a result that index its reductions, and the others."""
    out = result_nest(s.kernel, group.result)
    rows = patterns.row_loops(s.kernel, out, group.inside) or []
    return [x for x in out.loops if x.var in rows], [x for x in out.loops if x.var not in rows]


def _block_per_row(s: Schedule, group: Group) -> None:
    rows, rest = _rows_and_rest(s, group)
    reductions = {n.writes.name: n for n in nests(s.kernel) if n.is_reduction and n.writes.name in group.inside}
    length, count = max(_longest(n) for n in reductions.values()), iterations(rows)
    most = MAX_ROW_THREADS if count < FEW_ROWS and length >= LONG_ROW else BLOCK_THREADS
    threads = min(most, max(WARP, 1 << (-(-length // ROW_ELEMENTS) - 1).bit_length()))
    partials = {}
    for name, reduction in reductions.items():
        axis = patterns.contiguous_reduction(reduction) or T.longest(reduction.reduction_loops)
        partials[name] = s.rfactor(name, axis.var.name, threads)
    if rows:
        s.reorder(*T.names((*rows, *rest)))
        home = fuse_all(s, T.names(rows))
        s.bind(home, "block.x")
        for name in reversed(group.inside):
            s.compute_at(name, home, "shared")
            if name in partials:
                s.compute_at(partials[name], home, "shared")
    for name in group.inside:
        if (partial := partials.get(name)) is not None:
            T.bind(s, {partial.init_lane: "thread.x", partial.lane: "thread.x"})
            s.bind(partial.final_lane, "thread.x", reassociate=True)
        else:
            T.over_threads(s, patterns.stage_axes(s.kernel, name, False)[len(rows) :], threads)
    T.over_threads(s, T.names(rest), threads)


def operand_layouts(kernel: Kernel, constants: frozenset[int], target: CudaTarget) -> dict[int, Layout]:
    """The layouts that the default schedule of an unscheduled kernel wants for constant parameters: the axis along which they are copied,
    or which neighbouring threads walk, comes last."""
    s = Schedule(kernel)
    s.collapse()
    if patterns.is_imperative(s.kernel):
        return {}
    names = {b.name: n for n, b in enumerate(kernel.buffers)}
    wishes: dict[int, Layout] = {}
    for reduction in nests(kernel):
        if not (reduction.is_reduction and reduction.spatial and T.is_contraction(reduction)):
            continue
        product = block_tiles.find(reduction, result_nest(kernel, reduction.writes.name), target)
        for r in reduction.reads:
            last = product.sliced.var if product is not None and r in product.copied_along_reduction else reduction.spatial[-1].var
            number = names.get(r.attr.name)  # None for a temporary
            along = [d for d, i in enumerate(r.args) if last in E.variables(i)]
            if number in constants and number is not None and len(along) == 1 and r.args[along[0]] is last and along[0] != len(r.args) - 1:
                rest = [d for d in range(len(r.args)) if d != along[0]]
                wishes[number] = Layout.permuted([*rest, along[0]])
    return wishes
