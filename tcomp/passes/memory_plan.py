"""The memory planner: every intermediate value of a model gets an offset in one arena.

A value occupies its storage from the node that writes it to the last node that reads it; values alive at the same time must not overlap.
Finding the smallest arena is "dynamic storage allocation" (NP-hard; Garey & Johnson SR2).

1. Order. At a sample point of the symbolic dims a few greedy placements compete (largest first, in order of time, ...: Pisarchyk & Lee,
   "Efficient Memory Management for Deep Neural Net Inference", 2020). The smallest arena wins.
2. Offsets. The winner says, for every two values alive together, which lies below. With symbolic sizes an offset is the longest path from
   the bottom. Sizes are polynomials in the dims, and the longer of two paths is bounded by the larger coefficients: right at every size.

The body of a structural node runs between its beginning and end and shares the arena. Some values live in the storage of another
(`Plan.storage`):

    RESHAPE outside of a kernel: the output in that of the input; the input in that of an output of the graph or of its version
    IF      body inputs in the node's inputs; body outputs in the node's outputs, written in place
    LOOP    carried body inputs in the node's carried outputs, which the driver initialises and, after each iteration, overwrites with the
            body's outputs; scanned (one slice at a time) and captured body inputs in the node's inputs; stacked body outputs (one slice at
            a time) in the node's outputs. Carried body outputs live there too if nothing reads the body's input any more; other outputs
            the driver copies. The iteration number (the first body input) has 8 bytes in the arena
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from math import prod

import numpy as np

from tcomp.errors import IRError
from tcomp.ir.dims import upper_bound
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim, Expr, as_expr, bounds, evaluate_int, maximum, variables
from tcomp.ir.graph import IF, LOOP, Graph, Node, Value
from tcomp.ir.linear import Linear, linear
from tcomp.ir.simplify import as_dim, from_linear, simplify
from tcomp.ops.movement import RESHAPE

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
MAX_TYPICAL = 2048  # elements: a symbolic dim with a larger bound is taken as `TYPICAL`, if it may be so small,
TYPICAL = 128  # elements, where a sample of the sizes is needed
MAX_REPAIRS = 8  # rounds for each order of blocks; what sticks out at the top is placed first in the next one: more rounds rarely gain
MAX_ALTERNATIVES = 4  # polynomials in a height, of which it is the maximum; more are merged into one above them, which bounds their number
MIN_ROUNDED = 8 * ALIGNMENT  # bytes: larger coefficients are rounded up to a multiple of the alignment, at a loss of an eighth at most

InPlace = Callable[[Node, Value, Value], bool]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where values live. Offsets and `size` are in bytes, multiples of `ALIGNMENT`; symbolic where sizes are. `offset` has every value with
    storage in the arena, `storage` the values that live in the storage of another (which is in `offset`, or an input, output or constant of
    the graph). `temporaries` has one offset for each size that a node needs. `lower_bound` is the largest number of bytes alive at once;
    None where sizes are symbolic."""

    offset: dict[Value, Dim]
    temporaries: dict[Node, list[Dim]]
    size: Dim
    lower_bound: int | None
    storage: dict[Value, Value]

    def root(self, value: Value) -> Value:
        """The value in whose storage `value` lives (itself, where it has its own)."""
        return _root(value, self.storage)


@dataclass(eq=False, slots=True)
class _Block:
    """Something that needs storage during the closed time interval [birth, death]."""

    size: Dim
    birth: int
    death: int
    values: list[Value] = field(default_factory=list)


def plan_memory(graph: Graph, temporaries: Mapping[Node, Sequence[Dim]] | None = None, in_place: InPlace | None = None) -> Plan:
    """Offsets for all values of `graph` and the bodies of IF and LOOP nodes, except inputs, outputs and constants of `graph`; nodes run in
    order. `temporaries` are sizes in bytes of scratch memory that a node needs while it runs. `in_place(node, input, output)` says whether
    `output` of a node without bodies of its own in memory may be written over `input` while the node runs; it is asked only where `input`
    is not read later and both have the same size. Raises `IRError` where a size depends on a dim that is neither known from the inputs nor
    bounded, or nodes share a body."""
    blocks, scratch, storage = _liveness(graph, temporaries or {}, in_place)
    known = {v for value in graph.inputs for d in value.shape if isinstance(d, Expr) for v in variables(d)}
    known |= {v for b in blocks if isinstance(b.size, Expr) for v in variables(b.size) if v.attr.source is not None}
    counted = graph.counted()
    sizes = [_known_size(b.size, known, counted, b) for b in blocks]
    symbolic = any(isinstance(s, Expr) for s in sizes)
    # Typical values of the dims: the largest, where that is not extreme.
    limits = {v: (v.attr.lo or 0, v.attr.hi) for s in sizes if isinstance(s, Expr) for v in variables(s)}
    sample = {v: hi if hi is not None and hi <= MAX_TYPICAL else max(lo, TYPICAL) for v, (lo, hi) in limits.items()}
    static = [_align(max(evaluate_int(s, sample), 0)) for s in sizes]
    offset, size = _place(static, blocks)
    if symbolic:
        offset, size = _stack([_polynomial(s) for s in sizes], blocks, offset)
    where = dict(zip(blocks, offset, strict=True))
    offsets, needed = {v: where[b] for b in blocks for v in b.values}, {node: [where[b] for b in owned] for node, owned in scratch.items()}
    return Plan(offsets, needed, size, None if symbolic else _peak(static, blocks), storage)


def overwritten(graph: Graph, in_place: InPlace) -> list[tuple[int, int]]:
    """Numbers of an input and an output of `graph` that may have the same address: nothing reads the input once the output is written.
    Several outputs may lie where inputs lie, each where another one does. `in_place` as for `plan_memory`."""
    last = {v: node for node in graph.nodes for v in node.inputs}
    reshaped = {node.inputs[0] for node in graph.nodes if node.op is RESHAPE}
    inputs = {v: n for n, v in enumerate(graph.inputs) if v not in graph.outputs and v not in reshaped}
    outputs = {v: n for n, v in enumerate(graph.outputs)}
    return [
        (inputs[source], outputs[result])
        for node in graph.nodes
        if not _bodies(node)
        for result in node.outputs
        for source in dict.fromkeys(node.inputs)
        if source in inputs and result in outputs and last[source] is node and byte_size(source) == byte_size(result)
        if in_place(node, source, result)
    ]


def byte_size(value: Value) -> Dim:
    """Bytes of a value in its layout."""
    return as_dim(as_expr(prod(value.physical_shape, start=itemsize(value.dtype))))


def _root(value: Value, storage: Mapping[Value, Value]) -> Value:
    while value in storage:
        value = storage[value]
    return value


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _liveness(
    graph: Graph, temporaries: Mapping[Node, Sequence[Dim]], in_place: InPlace | None
) -> tuple[list[_Block], dict[Node, list[_Block]], dict[Value, Value]]:
    """(all blocks, those of temporaries, `Plan.storage`). Time runs over the nodes in order; bodies of one run one after the other."""
    storage, begin, end, body_end = dict[Value, Value](), dict[Node, int](), dict[Node, int](), dict[Graph, int]()
    last_use, block_of = dict[Value, int](), dict[Value, _Block]()  # `block_of`: of every value that has storage in the arena
    external, results = {*graph.inputs, *graph.outputs, *graph.constants}, {*graph.outputs}

    def number(graph: Graph, clock: int) -> int:
        for node in graph.nodes:
            if node in begin:
                raise IRError(f"a body with node `{node.name}` belongs to two nodes", hint="copy the body graph")
            begin[node] = clock = clock + 1
            for body in _bodies(node):
                external.update(body.constants)
                results.update(body.outputs)
                clock = body_end[body] = number(body, clock) + 1
            end[node] = clock
        return clock

    number(graph, 0)
    for node in begin:  # which values of the bodies live in the storage of others
        pairs = list[tuple[Value, Value | None]]()
        if node.op is IF:
            for body in node.bodies:
                pairs += zip(body.inputs, node.inputs[1:], strict=True)
                # An output that is an input or a constant of its body, or listed before, cannot be written in place.
                computed, outer = body.producers(), dict(zip(reversed(body.outputs), reversed(node.outputs), strict=True))
                pairs += [(v, outer[v]) for v in outer if v in computed]
        elif node.op is LOOP:
            carried = node.attrs["carried"]
            pairs += zip(node.bodies[0].inputs[1:], (*node.outputs[:carried], *node.inputs[carried:]), strict=True)
            pairs += _written_in_place(node, in_place)
        elif node.op is RESHAPE:
            (source, *_), (result,) = node.inputs, node.outputs
            assert source is not None
            pairs.append((source, result) if result in results else (result, source))
        storage.update({inner: outer for inner, outer in pairs if outer is not None})

    def use(values: Iterable[Value | None], time: int) -> None:
        for root in (_root(v, storage) for v in values if v is not None):
            last_use[root] = max(time, last_use.get(root, 0))

    def allocate(node: Node, value: Value) -> None:
        if value in storage or value in external:
            return
        size, death = byte_size(value), last_use[value]
        for source in node.inputs if in_place is not None and not _bodies(node) else ():
            # An input with storage of its own, which has not been handed on yet, and that nobody needs after the node.
            block = None if source is None else block_of.get(source)
            if source is None or block is None or last_use[source] != end[node] or block.values[-1] is not source:
                continue
            if any(v is not source and v is not None and _root(v, storage) is source for v in node.inputs):  # reshaped as well
                continue
            if block.size == size and in_place is not None and in_place(node, source, value):
                block.death = death
                block.values.append(value)
                block_of[value] = block
                return
        block_of[value] = _Block(size, begin[node], death, [value])

    for node in begin:
        use((*node.inputs, *node.outputs), end[node])
        for body in _bodies(node):
            use(body.outputs, body_end[body])  # the driver copies those that are not written in place
        if node.op is LOOP:
            use(node.bodies[0].inputs[:1], end[node])  # the driver counts in it
    scratch = {node: [_Block(size, birth, end[node]) for size in temporaries.get(node, ())] for node, birth in begin.items()}
    for node in begin:
        for value in (*node.outputs, *(node.bodies[0].inputs[:1] if node.op is LOOP else ())):
            allocate(node, value)
    return [*dict.fromkeys(block_of.values()), *(block for owned in scratch.values() for block in owned)], scratch, storage


def _written_in_place(loop: Node, in_place: InPlace | None) -> Iterator[tuple[Value, Value]]:
    """Outputs of the body of a LOOP that kernels write where the driver would copy them, and the outputs of the node."""
    body, carried = loop.bodies[0], loop.attrs["carried"]
    order = {node: n for n, node in enumerate(body.nodes)}
    makers = {v: node for node in body.nodes if not _bodies(node) for v in node.outputs}
    readers, counts = {v: node for node in body.nodes for v in node.inputs}, Counter(body.outputs)
    for number, (result, outer) in enumerate(zip(body.outputs, loop.outputs, strict=False)):  # a condition may come behind
        if (maker := makers.get(result)) is None or counts[result] > 1:
            continue
        if number < carried:
            state = body.inputs[1 + number]
            reader = readers.get(state)
            if state in counts or byte_size(state) != byte_size(result) or (reader is not None and order[reader] > order[maker]):
                continue
            if reader is maker and (in_place is None or not in_place(maker, state, result)):
                continue
        yield result, outer


def _bodies(node: Node) -> tuple[Graph, ...]:
    """The sub-graphs whose values are in memory; those of a kernel are its own business."""
    return node.bodies if node.op in (IF, LOOP) else ()


def _known_size(size: Dim, known: set[Expr], limits: Mapping[Expr, Dim], block: _Block) -> Dim:
    """`size` with every dim that is not known before the run replaced by its largest value."""
    if not isinstance(size, Expr) or known.issuperset(variables(size)):
        return size
    unknown = {v: limits.get(v, v.attr.hi) for v in variables(size) if v not in known}
    largest = upper_bound(size, {v: limit for v, limit in unknown.items() if limit is not None}) if None not in unknown.values() else None
    if largest is None:
        owner, names = ", ".join(v.name for v in block.values) or "a temporary", ", ".join(v.name for v in unknown)
        what, why = f"the size {size} in bytes of `{owner}` is not bounded", f"`{names}` is not known from the shapes of the inputs"
        raise IRError(what, why=why, hint="give the dim an upper bound")
    return largest


def _polynomial(size: Dim) -> Linear:
    """An upper bound of `size`, over atoms that are not negative: a multiple of `ALIGNMENT`, or at least `size + ALIGNMENT - 1`, so that
    what lies above can be aligned."""
    if not isinstance(size, Expr):
        return {(): _align(size)}
    terms = linear(simplify(size))
    if any((least := bounds(atom)[0]) is None or least < 0 for monomial in terms for atom in monomial):
        terms = {(simplify(maximum(size, 0)),): 1}
    rounded = {m: _align(c) if abs(c) >= MIN_ROUNDED else c for m, c in terms.items() if m}
    slack = 0 if all(c % ALIGNMENT == 0 for c in rounded.values()) else ALIGNMENT - 1
    rounded[()] = _align(terms.get((), 0) + slack)
    return {m: c for m, c in rounded.items() if c}


def _peak(sizes: Sequence[int], blocks: Sequence[_Block]) -> int:
    """The largest sum of sizes alive at one time."""
    change = Counter[int]()
    for size, b in zip(sizes, blocks, strict=True):
        change[b.birth] += size
        change[b.death + 1] -= size
    return max(accumulate(change[time] for time in sorted(change)), default=0)


def _place(sizes: Sequence[int], blocks: Sequence[_Block]) -> tuple[list[Dim], Dim]:
    """(offsets, total) of the best of several greedy placements."""
    if not blocks:
        return [], 0
    if sum(sizes) >= 1 << 62:
        raise IRError(f"the intermediate values need {sum(sizes)} bytes", hint="check the sizes of the inputs")
    least = _peak(sizes, blocks)
    size, birth, death = np.array(sizes, np.int64), np.array([b.birth for b in blocks]), np.array([b.death for b in blocks])
    # Largest first; as they come; largest area first; longest-lived first.
    keys = ((birth, -size), (-size, birth), (birth, -size * (death - birth + 1)), (-size, birth - death))
    best, total = np.zeros_like(size), 1 << 62
    for order in map(np.lexsort, keys):
        for _ in range(MAX_REPAIRS if total > least else 0):
            offset = _greedy(order, size, birth, death)
            end = offset + size
            if end.max() < total:
                best, total = offset, int(end.max())
            if total == least:
                break
            outliers = np.flatnonzero(end == end.max())
            order = np.concatenate((outliers, order[~np.isin(order, outliers)]))
    return best.tolist(), total


def _greedy(order: np.ndarray, size: np.ndarray, birth: np.ndarray, death: np.ndarray) -> np.ndarray:
    """Each block in turn goes to the tightest gap between those that are alive with it, or on top of them."""
    offset, placed = np.zeros_like(size), np.zeros(len(size), bool)
    for i in order[size[order] > 0]:
        others = np.flatnonzero(placed & (birth <= death[i]) & (death >= birth[i]))
        others = others[np.argsort(offset[others], kind="stable")]
        top = np.maximum.accumulate(np.concatenate(([0], offset[others] + size[others])))
        gap = offset[others] - top[:-1]
        fits = np.flatnonzero(gap >= size[i])
        offset[i] = top[fits[np.argmin(gap[fits])]] if len(fits) else top[-1]
        placed[i] = True
    return offset


_Height = list[Linear]  # the maximum of some polynomials, none of which another one dominates


def _stack(sizes: Sequence[Linear], blocks: Sequence[_Block], sample: Sequence[Dim]) -> tuple[list[Dim], Dim]:
    """(offsets, total): every block lies above those alive with it that come earlier in the order of `sample`."""
    order = sorted(range(len(blocks)), key=lambda i: (int(sample[i]), i))
    height: list[_Height] = [[{}] for _ in blocks]
    top: _Height = [{}]
    below = [0] * len(blocks)  # bit sets of blocks that lie below, directly or not
    for position, i in enumerate(order):
        for j in reversed(order[:position]):
            together = blocks[j].birth <= blocks[i].death and blocks[i].birth <= blocks[j].death
            if together and not below[i] >> j & 1:
                below[i] |= below[j] | 1 << j
                height[i] = _higher(height[i], [_plus(h, sizes[j]) for h in height[j]])
        top = _higher(top, [_plus(h, sizes[i]) for h in height[i]])
    return [_aligned_dim(h) for h in height], _aligned_dim(top)


def _plus(a: Linear, b: Linear) -> Linear:
    return {m: c for m in {**a, **b} if (c := a.get(m, 0) + b.get(m, 0))}


def _higher(a: _Height, b: _Height) -> _Height:
    """The maximum of two heights."""

    def dominates(x: Linear, y: Linear) -> bool:
        return all(x.get(m, 0) >= y.get(m, 0) for m in {**x, **y})

    result: _Height = []
    for h in (*a, *b):
        if not any(dominates(other, h) for other in result):
            result = [other for other in result if not dominates(h, other)] + [h]
    while len(result) > MAX_ALTERNATIVES:
        x, y = result.pop(), result.pop()
        result = _higher(result, [{m: c for m in {**x, **y} if (c := max(x.get(m, 0), y.get(m, 0)))}])
    return result


def _aligned_dim(height: _Height) -> Dim:
    if all(set(h) <= {()} for h in height):
        return _align(max(h.get((), 0) for h in height))
    e = reduce(maximum, map(from_linear, height))
    if any(c % ALIGNMENT for h in height for c in h.values()):
        e = (e + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    return e
