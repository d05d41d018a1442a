"""TE -> loops: the plain loop program of a tensor expression, before any schedule. A *stage* is a tensor that gets a buffer: an output, a
reduction, an extern, or an elementwise tensor that is too expensive for each reader to compute again; all else is inlined. A stage is one
nest, a reduction two: one stores the identity, one accumulates. Logical indices become physical ones here, through the buffers' layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

from tcomp.errors import IRError
from tcomp.ir import expr as E, loops as L, te
from tcomp.ir.access import affine
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.expr import Dim, Expr, as_expr, loop_var
from tcomp.ir.graph import Graph, Value
from tcomp.ir.layout import Layout
from tcomp.ir.read_patterns import covers, reach
from tcomp.ir.simplify import as_dim, prove, simplify
from tcomp.ir.te import Tensor
from tcomp.ir.text.printer import unused

EXPENSIVE = {
    "exp", "log", "tanh", "erf", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "pow", "sqrt",
}  # fmt: skip
EXPENSIVE_COST, MAX_INLINED_COST = 4, 3  # float operations: one of these counts as; a body of so few is inlined wherever it is read
MAX_ROW_BYTES = 1 << 14  # of a row of a temporary that several readers share: it lies on a thread's stack, and takes a part of it
MAX_RECOMPUTED_OPERATIONS = 16  # for each element, instead of storing a tensor that is read at several places of a window
MAX_WINDOW_SPAN = 32  # elements between the places of a window: a wider one does not stay in registers or a few lines of the cache


def lower(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], layouts: Mapping[Tensor, Layout] | None = None) -> L.Kernel:
    """The unscheduled kernel that computes `outputs` from `inputs`; `layouts` (default row-major) are those of the buffers.

    Raises `IRError` when the outputs depend on a placeholder that is not among the inputs.
    """
    lowering = _Lowering(dict(layouts or {}))
    outputs = [lowering.without_halo(t) for t in outputs]
    stages, final = normalize(outputs)
    for t in inputs:
        lowering.declare(t, t.name)
    originals: dict[Tensor, Tensor] = {}
    for original, t in zip(outputs, final, strict=True):
        lowering.layouts.setdefault(t, lowering.layout(original))
        originals[t] = original
    main = lowering.layout(final[0]).with_halo({})
    computed = [t for t in stages if t.body is not None or t.extern is not None]
    if missing := next((t for t in stages if t not in computed and t not in lowering.buffers), None):
        raise IRError(f"tensor `{missing.name}` is read but is not among the inputs of `{name}`", hint="pass every placeholder")
    for t in computed:
        if t not in originals and t.ndim == main.rank and t.extern is None:
            lowering.layouts.setdefault(t, main)  # a temporary lies as the result does, so that their loops match
        lowering.declare(t, originals.get(t, t).name)
    lowering.taken.update(v.name for v in E.variables(*(as_expr(d) for t in stages for d in t.shape)))  # no loop may hide a size
    nests: list[L.Stmt] = []
    for n, t in enumerate(computed):
        if t.extern is None:
            nests += lowering.nests(t)
        elif all(u.extern is not t.extern for u in computed[:n]):
            nests.append(lowering.extern_nest(t.extern, stages))
    body = L.allocated([lowering.buffers[t] for t in computed if t not in originals], L.block(*nests))
    results = tuple(lowering.buffers[t] for t in final)
    parameters = tuple(lowering.buffers[t] for t in inputs) + results
    statements = [*L.walk(body)]
    bound = {s.var.name for s in statements if isinstance(s, L.For)}
    buffers = [*parameters, *(s.buffer for s in statements if isinstance(s, L.Allocate))]
    used = [*(as_expr(d) for b in buffers for d in b.shape), *(e for s in statements for e in L.expressions(s))]
    symbolic = {v.name: v for v in E.with_extents(*used) if v.name not in bound}
    return L.Kernel(name, parameters, results, tuple(symbolic[n] for n in sorted(symbolic)), body)


def lower_graph(graph: Graph, name: str) -> L.Kernel:
    """The unscheduled kernel of a KERNEL body; layouts are those of the graph's inputs and outputs."""
    inputs, outputs = tensors_of(graph)
    ends = zip([*inputs, *outputs], [*graph.inputs, *graph.outputs], strict=True)
    return lower(name, inputs, outputs, {t: v.layout for t, v in ends if v.layout is not None})


def tensors_of(graph: Graph) -> tuple[list[Tensor], list[Tensor]]:
    """A KERNEL body as TE, its operators chained: (placeholders, outputs)."""
    inputs = [v.placeholder() for v in graph.inputs]
    values: dict[Value, Tensor] = dict(zip(graph.inputs, inputs, strict=True))
    values.update((v, _literal(v, np.asarray(array))) for v, array in graph.constants.items())
    for node in graph.nodes:
        values.update(zip(node.outputs, node.tensors([None if v is None else values[v] for v in node.inputs]), strict=True))
    return inputs, [_computed(values[v], v) for v in graph.outputs]


def _literal(value: Value, array: np.ndarray) -> Tensor:
    """A constant of one element (or none) as a tensor expression."""
    if array.size > 1:
        raise IRError(f"constant `{value.name}` of {array.size} elements inside a kernel", hint="pass it to the kernel as an input")
    return te.compute(value.shape, lambda *indices: E.const(array.reshape(-1)[0] if array.size else 0, value.dtype), value.name)


def _computed(t: Tensor, value: Value) -> Tensor:
    """An output as a computation: an input handed through is copied."""
    return te.compute(value.shape, lambda *indices: t[indices], value.name) if t.body is None and t.extern is None else t


def normalize(outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(stages in order, the outputs among them): reductions alone at the root of a body, cheap tensors inlined."""
    order = list(te.tensors(outputs))
    readers: dict[Tensor, list[Tensor]] = {}
    for t in order:
        for u in t.inputs:
            readers.setdefault(u, []).append(t)
    stages: list[Tensor] = []
    replaced: dict[Tensor, Tensor] = {}  # tensor -> the stage that holds it
    inlined: dict[Tensor, tuple[tuple[Expr, ...], Expr]] = {}  # tensor -> axes, body over stages
    uses = _uses(order)

    def over_stages(e: Expr) -> Expr | None:
        if e.op == "read" and e.attr in inlined:
            axes, inner = inlined[e.attr]
            return E.substitute(inner, dict(zip(axes, e.args, strict=True)))
        stage = replaced.get(e.attr) if e.op == "read" else None  # none of a stage: what was rewritten may come back from a folded select
        return None if stage is None or stage is e.attr else E.read(stage, e.args)

    for t in order:
        if t.extern is not None:
            stage = _rebuilt_extern(t, replaced, stages)
        elif t.body is None:
            stage = t
        else:
            body = E.rewrite(t.body, over_stages)
            if body.op != "reduce":
                body = _hoist(t, body, stages)
                if t not in outputs and _inline(t, body, readers.get(t, []), uses[t]):
                    inlined[t] = (t.axes, body)
                    continue
            stage = t if body is t.body else Tensor(t.name, t.shape, t.dtype, t.axes, body)
        replaced[t] = stage
        stages.append(stage)
    return stages, [replaced[t] for t in outputs]


def _rebuilt_extern(t: Tensor, replaced: Mapping[Tensor, Tensor], stages: list[Tensor]) -> Tensor:
    assert t.extern is not None
    siblings = [s for s in stages if s.extern is not None and s.extern.body is t.extern.body]  # other outputs of the same program
    if (same := next((s for s in siblings if s.index == t.index), None)) is not None:
        return same
    inputs = tuple(replaced[u] for u in t.extern.inputs)
    program = siblings[0].extern if siblings else te.Extern(inputs, t.extern.parameters, t.extern.results, t.extern.body)
    return Tensor(t.name, t.shape, t.dtype, extern=program, index=t.index)


def _uses(order: Sequence[Tensor]) -> dict[Tensor, int]:
    """How many elements of each tensor one element of a stage reads, through readers that are cheap enough to be inlined."""
    uses = dict.fromkeys(order, 1)
    for r in reversed(order):
        if r.body is not None:
            recomputed = r.body.op != "reduce" and _operations(r.body) * (uses[r] - 1) <= MAX_RECOMPUTED_OPERATIONS
            axes, places = _axes(r), _needed_reads(r.body)
            for t in r.inputs:
                window = _window_size([e.args for e in places if e.attr is t], axes)
                uses[t] = max(uses[t], (uses[r] if recomputed else 1) * window)
    return uses


def _window_size(places: Sequence[Sequence[Expr]], axes: Collection[Expr]) -> int:
    """The number of places, if they are those of a window (all follow the axes, at offsets of at most MAX_WINDOW_SPAN); else 1."""
    for indices in zip(*places, strict=True) if len(places) > 1 else ():
        found = [place for i in indices if (place := affine(simplify(i), axes, clamped=True)) is not None]
        offsets = [place.constant for place in found]
        if len(found) < len(indices) or any(p.terms != found[0].terms for p in found) or max(offsets) - min(offsets) > MAX_WINDOW_SPAN:
            return 1
    return len(places)


def _needed_reads(body: Expr) -> set[Expr]:
    """The reads that one element evaluates at most: of a selection, those of the case with more of them."""
    needs: dict[Expr, set[Expr]] = {}
    for e in E.walk(body):
        of_operands = [needs[a] for a in e.args]
        needed = [of_operands[0], max(of_operands[1:], key=len)] if e.op == "select" else of_operands
        needs[e] = set().union(*needed, {e} if e.op == "read" else ())
    return needs[body]


def _operations(body: Expr) -> int:
    """The number of operations on values: index arithmetic and conditions on indices do not count."""

    def counts(e: Expr) -> bool:
        return e.op not in ("var", "const", "read") and (e.dtype != "bool" or bool(E.reads(e)))

    return sum(counts(e) and e.op != "select" for e in E.walk(body, operands=lambda e: e.args if counts(e) else ()))


def _inline(t: Tensor, body: Expr, readers: Sequence[Tensor], uses: int) -> bool:
    """Whether each reader should compute the elements itself, `uses` of them for one of its own."""
    if any(r.extern is not None for r in readers) or _operations(body) * (uses - 1) > MAX_RECOMPUTED_OPERATIONS:
        return False
    operations = [e.op for e in E.walk(body) if e.op not in ("var", "const", "read") and is_float(e.dtype)]
    if sum(EXPENSIVE_COST if op in EXPENSIVE else 1 for op in operations) <= MAX_INLINED_COST:
        return True
    if len(readers) > 1:  # stored for all readers where a row of it fits a thread's stack; computed again otherwise
        row = [*t.shape[-1:], *(n for r in readers for n in _reduced(r, t))]
        sizes = [n for n in row if isinstance(n, int)]
        return not (row and len(sizes) == len(row) and sizes[0] * itemsize(t.dtype) <= MAX_ROW_BYTES)
    # Not where a reader uses one element again and again: an axis of its iteration space is not in the index.
    reads = [(r, e) for r in readers if r.body is not None for e in E.reads(r.body) if e.attr is t]
    return all(E.bounds(v)[1] == 0 for r, e in reads for v in _axes(r) - set(E.variables(*e.args)))


def _reduced(reader: Tensor, t: Tensor) -> list[Dim]:
    """The extents of the axes of `t` along which a reader reduces it."""
    assert reader.body is not None
    along = {v for e in E.walk(reader.body) if e.op == "reduce" for v in e.attr[1]}
    reads = [e for e in E.reads(reader.body) if e.attr is t]
    return [n for e in reads for n, index in zip(t.shape, e.args, strict=True) if not along.isdisjoint(E.variables(index))]


def _axes(t: Tensor) -> set[Expr]:
    """The variables of a tensor's iteration space, those of its reductions included."""
    assert t.body is not None
    return {*t.axes, *(v for e in E.walk(t.body) if e.op == "reduce" for v in e.attr[1])}


def _hoist(t: Tensor, body: Expr, stages: list[Tensor]) -> Expr:
    """Give each reduction inside a body a stage of its own."""

    def rule(e: Expr) -> Expr | None:
        if e.op != "reduce":
            return None
        used = set(E.variables(e))
        axes = tuple(a for a in t.axes if a in used)
        shape = tuple(n for a, n in zip(t.axes, t.shape, strict=True) if a in used)
        stages.append(Tensor(f"{t.name}_{e.attr[0].name}", shape, e.dtype, axes, e))
        return E.read(stages[-1], axes)

    return E.rewrite(body, rule)


class _Lowering:
    """The buffers of one kernel, their layouts, the names that are taken in it; and the nests over them."""

    def __init__(self, layouts: dict[Tensor, Layout]) -> None:
        self.layouts = layouts
        self.buffers: dict[Tensor, L.Buffer] = {}
        self.taken: set[str] = set()

    def fresh(self, name: str) -> str:
        name = unused("".join(ch if ch.isalnum() or ch in "_." else "_" for ch in name) or "t", self.taken)
        self.taken.add(name)
        return name

    def layout(self, t: Tensor) -> Layout:
        return self.layouts.get(t) or Layout.identity(t.ndim)

    def declare(self, t: Tensor, name: str) -> None:
        self.buffers[t] = L.Buffer(self.fresh(name), t.dtype, self.layout(t).shape(t.shape))

    def without_halo(self, t: Tensor) -> Tensor:
        """A copy of an output that has a halo, so that nothing is accumulated in the middle of a larger buffer; others stay themselves."""
        if not self.layout(t).has_halo:
            return t
        copy: Tensor = te.compute(t.shape, lambda *i: t[i], t.name)
        self.layouts[copy] = self.layouts.pop(t)
        return copy

    def physical(self, e: Expr) -> Expr:
        """The expression with reads of buffers for those of tensors, simplified. A read that reaches into a halo loses its condition."""

        def unguarded(node: Expr) -> Expr | None:
            if node.op != "select" or (found := reach(node)) is None:
                return None
            read, widths = found
            have = {p.axis: (p.before, p.after) for p in self.layout(read.attr).pieces} if isinstance(read.attr, Tensor) else {}
            return read if covers(have, widths) else None

        def rule(node: Expr) -> Expr | None:
            tensor = node.attr if node.op == "read" else None
            return E.read(self.buffers[tensor], self.layout(tensor).indices(node.args)) if isinstance(tensor, Tensor) else None

        if any(layout.has_halo for layout in self.layouts.values()):
            e = E.rewrite(simplify(e), unguarded)
        return simplify(E.rewrite(e, rule))

    def nests(self, t: Tensor) -> list[L.Stmt]:
        """The nests that compute a stage, in loops over its physical dimensions, halos left out."""
        assert t.body is not None
        layout, target = self.layout(t), self.buffers[t]
        reducer, axes = t.body.attr if t.body.op == "reduce" else (None, ())
        extents = [axis.attr.extent if axis.attr.extent is not None else axis.attr.hi + 1 for axis in axes]
        inner = [as_dim(as_expr(n) - (p.before + p.after)) for p, n in zip(layout.pieces, target.shape, strict=True)]

        def names(prefix: str) -> list[str]:
            dims = [t.axes[p.axis].name + ("b" if p.div != 1 else "") for p in layout.pieces]
            return [self.fresh(f"{target.name}.{prefix}{dim}") for dim in dims]

        def places(variables: Sequence[Expr]) -> tuple[Expr, ...]:
            return tuple(simplify(v + p.before) for v, p in zip(variables, layout.pieces, strict=False))

        def leaf(variables: tuple[Expr, ...]) -> L.Stmt:
            assert t.body is not None
            logical = layout.logical(places(variables))
            mapping = dict(zip((*t.axes, *axes), (*logical, *variables[len(inner) :]), strict=True))
            valid = [as_expr(i < as_expr(n)) for i, n in zip(logical, t.shape, strict=True)] if layout.pads else []
            inside = E.all_of([c for c in map(simplify, valid) if not prove(c)])
            value = self.physical(E.substitute(t.body if reducer is None else t.body.args[0], mapping))
            value = E.select(inside, value, E.const(0, t.dtype) if reducer is None else reducer.identity)
            at = places(variables)
            return L.Store(target, at, value) if reducer is None else L.Accumulate(target, at, value, reducer)

        update = names("") + [self.fresh(f"{target.name}.{axis.name}") for axis in axes]
        nest = L.over([*inner, *extents], leaf, update.__getitem__)
        if reducer is None:
            return [*self.halo(t, inner), nest]
        return [L.over(inner, lambda at: L.Store(target, places(at), reducer.identity), names("init.").__getitem__), nest]

    def halo(self, t: Tensor, inner: Sequence[E.Dim]) -> list[L.Stmt]:
        """Nests that store the zeros around the axes, each element once, where `inner` elements along each dimension lie inside."""
        pieces, target = self.layout(t).pieces, self.buffers[t]
        whole: list[tuple[Expr, E.Dim]] = [(as_expr(0), n) for n in target.shape]
        middle = [(as_expr(p.before), n) for p, n in zip(pieces, inner, strict=True)]
        slabs: list[L.Stmt] = []

        def zero(start: Sequence[Expr], at: Sequence[Expr]) -> L.Stmt:
            return L.Store(target, tuple(simplify(s + v) for s, v in zip(start, at, strict=True)), E.const(0, t.dtype))

        for d, piece in enumerate(pieces):
            for first, count in ((as_expr(0), piece.before), (as_expr(target.shape[d]) - piece.after, piece.after)):
                if count:
                    starts, extents = zip(*middle[:d], (first, count), *whole[d + 1 :], strict=True)
                    names = [self.fresh(f"{target.name}.halo.{t.axes[p.axis].name}") for p in pieces]
                    slabs.append(L.over(extents, partial(zero, starts), names.__getitem__))
        return slabs

    def extern_nest(self, program: te.Extern, stages: Sequence[Tensor]) -> L.Stmt:
        """The body of an extern over the kernel's buffers, with loops of other names."""
        tensors = dict(zip(program.parameters, program.inputs, strict=True))
        tensors |= {program.results[t.index]: t for t in stages if t.extern is program}
        replacements = {b: (self.buffers[t], self.layout(t)) for b, t in tensors.items()}
        body = program.body
        for number, result in enumerate(program.results):
            if result not in replacements:  # an output nobody uses still has to be written somewhere
                dead = L.Buffer(self.fresh(f"unused{number}"), result.dtype, result.shape)
                replacements[result] = (dead, Layout.identity(len(result.shape)))
                body = L.Allocate(dead, body)

        def place(buffer: L.Buffer, indices: tuple[Expr, ...]) -> L.Place | None:
            return (found[0], found[1].indices(indices)) if (found := replacements.get(buffer)) else None

        return _rename_loops(L.redirect(body, place), self.fresh)


def _rename_loops(stmt: L.Stmt, fresh: Callable[[str], str]) -> L.Stmt:
    """Every loop gets a fresh name."""
    if isinstance(stmt, L.For):
        # The extent may mention outer loop variables, renamed by now: take it from the loop, not from the old variable.
        new = loop_var(fresh(stmt.var.name), stmt.extent)
        body = L.map_expressions(stmt.body, lambda e: E.substitute(e, {stmt.var: new}))
        return L.For(new, stmt.extent, _rename_loops(body, fresh), stmt.kind)
    return L.with_children(stmt, [_rename_loops(c, fresh) for c in L.children(stmt)])
