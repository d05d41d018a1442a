"""TE -> loops: the plain loop program of a tensor expression, one nest per stage, before any schedule.

A *stage* is a tensor that gets a buffer: an output, a reduction, an extern, or an elementwise tensor that is too expensive
to be computed again by each reader. Everything else is inlined into its readers. A reduction becomes two nests: one that stores the
identity, one that accumulates. Logical indices become physical ones here, through the layouts of the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from tcomp.errors import IRError
from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir import te
from tcomp.ir.access import affine
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.expr import Expr, as_expr, loop_var
from tcomp.ir.graph import Graph, Value
from tcomp.ir.halo import covers, reach
from tcomp.ir.layout import Layout
from tcomp.ir.names import unused
from tcomp.ir.simplify import prove, simplify
from tcomp.ir.te import Tensor

EXPENSIVE = {"exp", "log", "tanh", "erf", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "pow", "sqrt"}

ROW_BYTES = 1 << 14  # of a row of a temporary that is kept for several readers: a part of a thread's stack
RECOMPUTED = 16  # operations that may be repeated for each element, rather than keep a tensor that is read at several places of a window
WINDOW_SPAN = 32  # elements between the places of a window, at most


def lower(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], layouts: Mapping[Tensor, Layout] | None = None) -> L.Kernel:
    """The unscheduled kernel that computes `outputs` from `inputs`; `layouts` (default row-major) are those of the buffers.

    Raises `IRError` when the outputs depend on a placeholder that is not among the inputs.
    """
    layouts = dict(layouts or {})
    outputs = [_apart(t, layouts) for t in outputs]
    stages, final = normalize(outputs)
    names = _Names()
    buffers: dict[Tensor, L.Buffer] = {}
    for t in inputs:
        buffers[t] = L.Buffer(names.fresh(t.name), t.dtype, _layout(layouts, t).shape(t.shape))
    aliases: dict[Tensor, Tensor] = {}
    for original, t in zip(outputs, final, strict=True):
        layouts.setdefault(t, layouts.get(original) or Layout.identity(t.ndim))
        aliases[t] = original
    temporaries = []
    main = _layout(layouts, final[0]).with_halo({})
    for t in stages:
        if t.body is None and t.extern is None:
            if t not in buffers:
                raise IRError(f"tensor `{t.name}` is read but is not among the inputs of `{name}`", hint="pass every placeholder")
            continue
        if t not in aliases and t.ndim == main.rank and t.extern is None:
            layouts.setdefault(t, main)  # a temporary lies as the result does, so that their loops match
        buffers[t] = L.Buffer(names.fresh(aliases.get(t, t).name), t.dtype, _layout(layouts, t).shape(t.shape))
        if t not in aliases:
            temporaries.append(buffers[t])
    nests: list[L.Stmt] = []
    done: set[int] = set()
    for t in stages:
        if t.extern is not None:
            if id(t.extern) not in done:
                done.add(id(t.extern))
                nests.append(_extern_nest(t.extern, stages, buffers, layouts, names))
        elif t.body is not None:
            nests.extend(_nests(t, buffers, layouts, names))
    body: L.Stmt = L.block(*nests)
    for temporary in reversed(temporaries):
        body = L.Allocate(temporary, body)
    results = tuple(buffers[t] for t in final)
    parameters = tuple(buffers[t] for t in inputs) + results
    return L.Kernel(name, parameters, results, free_variables(body, parameters), body)


def _apart(t: Tensor, layouts: dict[Tensor, Layout]) -> Tensor:
    """An output with a halo is a copy: nothing is accumulated in the middle of a larger buffer."""
    if t not in layouts or not layouts[t].has_halo:
        return t
    copy: Tensor = te.compute(t.shape, lambda *i: t[i], t.name)
    layouts[copy] = layouts.pop(t)
    return copy


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
    literal = E.const(array.reshape(-1)[0] if array.size else 0, value.dtype)
    return te.compute(value.shape, lambda *indices: literal, value.name)


def _computed(t: Tensor, value: Value) -> Tensor:
    """An output as a computation: an input handed through is copied."""
    if t.body is None and t.extern is None:
        return te.compute(value.shape, lambda *indices: t[indices] if indices else t[()], value.name)
    return t


def free_variables(body: L.Stmt, parameters: Iterable[L.Buffer]) -> tuple[Expr, ...]:
    """The symbolic dims a statement needs: variables that no loop binds, by name."""
    bound = {s.var.attr.name for s in L.walk(body) if isinstance(s, L.For)}
    roots = [as_expr(d) for b in parameters for d in b.shape]
    for s in L.walk(body):
        roots += _expressions_and_shapes(s)
    found: dict[str, Expr] = {}
    for v in E.with_extents(*roots):
        if v.attr.name not in bound:
            found[v.attr.name] = v
    return tuple(found[n] for n in sorted(found))


def _expressions_and_shapes(s: L.Stmt) -> list[Expr]:
    roots = list(L.expressions(s))
    if isinstance(s, L.Allocate):
        roots += [as_expr(d) for d in s.buffer.shape]
    return roots


class _Names:
    """Unique names within a kernel."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def fresh(self, name: str) -> str:
        name = unused("".join(ch if ch.isalnum() or ch in "_." else "_" for ch in name) or "t", self.taken)
        self.taken.add(name)
        return name


# ---------------------------------------------------------------- TE -> stages


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
    wanted = set(outputs)
    uses = _uses(order)
    for t in order:
        if t.extern is not None:
            stage = _rebuilt_extern(t, replaced, stages)
        elif t.body is None:
            stage = t
        else:
            body = _over_stages(t.body, replaced, inlined)
            if body.op != "reduce":
                body = _hoist(t, body, stages)
                if t not in wanted and _inline(t, body, readers.get(t, []), uses[t]):
                    inlined[t] = (t.axes, body)
                    continue
            stage = t if body is t.body else Tensor(t.name, t.shape, t.dtype, t.axes, body)
        replaced[t] = stage
        stages.append(stage)
    return stages, [replaced[t] for t in outputs]


def _rebuilt_extern(t: Tensor, replaced: Mapping[Tensor, Tensor], stages: list[Tensor]) -> Tensor:
    assert t.extern is not None
    for stage in stages:  # another output of the same program
        if stage.extern is not None and stage.extern.body is t.extern.body and stage.index == t.index:
            return stage
    inputs = tuple(replaced[u] for u in t.extern.inputs)
    siblings = [s for s in stages if s.extern is not None and s.extern.body is t.extern.body]
    program = siblings[0].extern if siblings else te.Extern(inputs, t.extern.parameters, t.extern.results, t.extern.body)
    return Tensor(t.name, t.shape, t.dtype, extern=program, index=t.index)


def _uses(order: Sequence[Tensor]) -> dict[Tensor, int]:
    """At how many places of each tensor an element of a stage is computed from, where readers that are cheap are no stages themselves."""
    uses = dict.fromkeys(order, 1)
    for r in reversed(order):
        if r.body is not None:
            again = uses[r] if r.body.op != "reduce" and _operations(r.body) * (uses[r] - 1) <= RECOMPUTED else 1
            axes, places = _axes(r), _together(r.body)
            for t in r.inputs:
                uses[t] = max(uses[t], again * _window([e.args for e in places if e.attr is t], axes))
    return uses


def _window(places: Sequence[Sequence[Expr]], axes: Collection[Expr]) -> int:
    """How many places there are that follow the axes close to each other; 1 where they are not known to do so."""
    for indices in zip(*places, strict=True) if len(places) > 1 else ():
        found = [place for i in indices if (place := affine(simplify(i), axes, clamped=True)) is not None]
        offsets = [place.constant for place in found]
        if len(found) < len(indices) or any(place.terms != found[0].terms for place in found) or max(offsets) - min(offsets) > WINDOW_SPAN:
            return 1
    return len(places)


def _together(body: Expr) -> set[Expr]:
    """The reads that one element needs, at most: of the cases of a selection the one with most of them."""
    needs: dict[Expr, set[Expr]] = {}
    for e in E.walk(body):
        if e.op == "select":
            needs[e] = needs[e.args[0]] | max(needs[e.args[1]], needs[e.args[2]], key=len)
        else:
            needs[e] = set().union(*(needs[a] for a in e.args)) | ({e} if e.op == "read" else set())
    return needs[body]


def _operations(body: Expr) -> int:
    """Operations on values; those on indices, and what selects by place, are left out."""
    seen: set[Expr] = set()
    todo = [body]
    while todo:
        e = todo.pop()
        if e not in seen and e.op not in ("var", "const", "read") and (e.dtype != "bool" or E.reads(e)):
            seen.add(e)
            todo += e.args
    return sum(e.op != "select" for e in seen)


def _inline(t: Tensor, body: Expr, readers: Sequence[Tensor], uses: int) -> bool:
    """Whether each reader should compute the element itself, at so many places for one of its own."""
    if any(r.extern is not None for r in readers) or _operations(body) * (uses - 1) > RECOMPUTED:
        return False
    cost = sum(4 if e.op in EXPENSIVE else 1 for e in E.walk(body) if e.op not in ("var", "const", "read") and is_float(e.dtype))
    if cost <= 3:
        return True
    if len(readers) > 1:  # kept for all readers where a row of it fits a thread's stack; computed again otherwise
        return not (t.shape and isinstance(t.shape[-1], int) and t.shape[-1] * itemsize(t.dtype) <= ROW_BYTES)
    return all(not _repeats(t, r) for r in readers)


def _repeats(t: Tensor, reader: Tensor) -> bool:
    """Whether the reader uses an element of `t` more than a few times (an axis of its iteration space is not in the index)."""
    assert reader.body is not None
    axes = _axes(reader)
    for r in E.reads(reader.body):
        if r.attr is t:
            missing = axes - set(E.variables(*r.args))
            if any(E.bounds(v)[1] != 0 for v in missing):
                return True
    return False


def _axes(t: Tensor) -> set[Expr]:
    """The variables of a tensor's iteration space, those of its reductions included."""
    assert t.body is not None
    return {*t.axes, *(v for e in E.walk(t.body) if e.op == "reduce" for v in e.attr[1])}


def _over_stages(body: Expr, replaced: Mapping[Tensor, Tensor], inlined: Mapping[Tensor, tuple[tuple[Expr, ...], Expr]]) -> Expr:
    def rule(e: Expr) -> Expr | None:
        if e.op != "read":
            return None
        if e.attr in inlined:
            axes, inner = inlined[e.attr]
            return E.substitute(inner, dict(zip(axes, e.args, strict=True)))
        target = replaced[e.attr]
        return None if target is e.attr else E.read(target, e.args)

    return E.rewrite(body, rule)


def _hoist(t: Tensor, body: Expr, stages: list[Tensor]) -> Expr:
    """Give each reduction inside a body a stage of its own."""

    def rule(e: Expr) -> Expr | None:
        if e.op != "reduce":
            return None
        used = set(E.variables(e))
        axes = tuple(a for a in t.axes if a in used)
        shape = tuple(n for a, n in zip(t.axes, t.shape, strict=True) if a in used)
        part = Tensor(f"{t.name}_{e.attr[0].name}", shape, e.dtype, axes, e)
        stages.append(part)
        return E.read(part, axes)

    return E.rewrite(body, rule)


# ---------------------------------------------------------------- stages -> nests


def _layout(layouts: Mapping[Tensor, Layout], t: Tensor) -> Layout:
    return layouts.get(t) or Layout.identity(t.ndim)


def _nests(t: Tensor, buffers: Mapping[Tensor, L.Buffer], layouts: Mapping[Tensor, Layout], names: _Names) -> list[L.Stmt]:
    assert t.body is not None
    layout, target = _layout(layouts, t), buffers[t]
    is_reduce = t.body.op == "reduce"
    update_loops, places = _loops(t, layout, target, names, "")
    logical = layout.logical(places)
    mapping = dict(zip(t.axes, logical, strict=True))
    valid = [as_expr(i < as_expr(n)) for i, n in zip(logical, t.shape, strict=True)] if layout.pads else []
    inside = E.all_of([c for c in map(simplify, valid) if not prove(c)])
    if not is_reduce:
        value = _physical(E.substitute(t.body, mapping), buffers, layouts)
        nest = _nest(update_loops, L.Store(target, places, E.select(inside, value, E.const(0, t.dtype))))
        return [*_halo(t, layout, target, names), nest]
    reducer, axes = t.body.attr
    reduced = []
    for axis in axes:
        extent = axis.attr.extent if axis.attr.extent is not None else axis.attr.hi + 1
        v = loop_var(names.fresh(f"{target.name}.{axis.attr.name}"), extent)
        reduced.append((v, E.as_dim(extent)))
        mapping[axis] = v
    value = _physical(E.substitute(t.body.args[0], mapping), buffers, layouts)
    if inside.op != "const":
        value = E.select(inside, value, reducer.identity)
    init_loops, init_places = _loops(t, layout, target, names, "init.")
    init = _nest(init_loops, L.Store(target, init_places, reducer.identity))
    return [init, _nest(update_loops + reduced, L.Accumulate(target, places, value, reducer))]


def _loops(t: Tensor, layout: Layout, target: L.Buffer, names: _Names, prefix: str) -> tuple[list[tuple[Expr, E.Dim]], tuple[Expr, ...]]:
    """(loop variables over physical dimensions, halos left out, with extents; physical indices)."""
    loops, places = [], []
    for piece, whole in zip(layout.pieces, target.shape, strict=True):
        axis = t.axes[piece.axis].attr.name + ("b" if piece.div != 1 else "")
        extent = E.as_dim(as_expr(whole) - (piece.before + piece.after))
        v = loop_var(names.fresh(f"{target.name}.{prefix}{axis}"), extent)
        loops.append((v, extent))
        places.append(simplify(v + piece.before))
    return loops, tuple(places)


def _halo(t: Tensor, layout: Layout, target: L.Buffer, names: _Names) -> list[L.Stmt]:
    """Nests that store the zeros around the axes, each element once."""
    slabs: list[L.Stmt] = []
    for d, piece in enumerate(layout.pieces):
        for first, count in ((as_expr(0), piece.before), (as_expr(target.shape[d]) - piece.after, piece.after)):
            if not count:
                continue
            loops, places = [], []
            for k, (other, whole) in enumerate(zip(layout.pieces, target.shape, strict=True)):
                inner = E.as_dim(as_expr(whole) - (other.before + other.after))
                start, extent = (first, count) if k == d else (as_expr(other.before), inner) if k < d else (as_expr(0), whole)
                v = loop_var(names.fresh(f"{target.name}.halo.{t.axes[other.axis].attr.name}"), extent)
                loops.append((v, extent))
                places.append(simplify(start + v))
            slabs.append(_nest(loops, L.Store(target, tuple(places), E.const(0, t.dtype))))
    return slabs


def _nest(loops: Sequence[tuple[Expr, E.Dim]], leaf: L.Stmt) -> L.Stmt:
    for v, extent in reversed(loops):
        leaf = L.For(v, extent, leaf)
    return leaf


def _physical(e: Expr, buffers: Mapping[Tensor, L.Buffer], layouts: Mapping[Tensor, Layout]) -> Expr:
    """Reads of tensors become reads of buffers; indices are simplified. What reaches into a halo needs no condition."""

    def unguarded(node: Expr) -> Expr | None:
        if node.op != "select" or (found := reach(node)) is None:
            return None
        read, widths = found
        have = {p.axis: (p.before, p.after) for p in _layout(layouts, read.attr).pieces} if isinstance(read.attr, Tensor) else {}
        return read if covers(have, widths) else None

    def rule(node: Expr) -> Expr | None:
        if node.op == "read" and isinstance(node.attr, Tensor):
            return E.read(buffers[node.attr], _layout(layouts, node.attr).indices(node.args))
        return None

    if any(layout.has_halo for layout in layouts.values()):
        e = E.rewrite(simplify(e), unguarded)
    return simplify(E.rewrite(e, rule))


def _extern_nest(
    program: te.Extern, stages: Sequence[Tensor], buffers: Mapping[Tensor, L.Buffer], layouts: Mapping[Tensor, Layout], names: _Names
) -> L.Stmt:
    """The body of an extern over the kernel's buffers, loops renamed apart."""
    replacements: dict[L.Buffer, tuple[L.Buffer, Layout]] = {}
    for t, parameter in zip(program.inputs, program.parameters, strict=True):
        replacements[parameter] = (buffers[t], _layout(layouts, t))
    for t in stages:
        if t.extern is program:
            replacements[program.results[t.index]] = (buffers[t], _layout(layouts, t))
    body = program.body
    for number, result in enumerate(program.results):
        if result not in replacements:  # an output nobody uses still has to be written somewhere
            unused = L.Buffer(names.fresh(f"unused{number}"), result.dtype, result.shape)
            replacements[result] = (unused, Layout.identity(len(result.shape)))
            body = L.Allocate(unused, body)
    return rename_loops(replace_buffers(body, replacements), names.fresh)


def replace_buffers(stmt: L.Stmt, replacements: Mapping[L.Buffer, tuple[L.Buffer, Layout]]) -> L.Stmt:
    """Accesses of some buffers redirected to others, through a layout."""

    def place(buffer: L.Buffer, indices: tuple[Expr, ...]) -> L.Place | None:
        if buffer not in replacements:
            return None
        target, layout = replacements[buffer]
        return target, layout.indices(indices)

    return L.redirect(stmt, place)


def rename_loops(stmt: L.Stmt, fresh: Callable[[str], str]) -> L.Stmt:
    """Every loop gets a fresh name; `fresh(name) -> str`."""
    if isinstance(stmt, L.For):
        # The extent may mention outer loop variables, renamed by now: take it from the loop, not from the old variable.
        renamed = loop_var(fresh(stmt.var.attr.name), stmt.extent)
        body = L.map_expressions(stmt.body, lambda e: E.substitute(e, {stmt.var: renamed}))
        return L.For(renamed, stmt.extent, rename_loops(body, fresh), stmt.kind)
    return L.with_children(stmt, [rename_loops(c, fresh) for c in L.children(stmt)])
