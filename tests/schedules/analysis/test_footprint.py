"""Counts of iterations, elements and cache lines, against walking every iteration."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings, strategies as st

from tcomp.ir import expr as E
from tcomp.ir.access import Access, accesses, by_buffer, loop_extents
from tcomp.ir.expr import Expr, as_expr, evaluate_int, substitute
from tcomp.ir.loops import Buffer, For, If, Stmt, block, loop, store
from tcomp.ir.simplify import simplify
from tcomp.schedules.analysis.footprint import Footprints, instances


def points(a: Access, values: dict[Expr, int], running: set[Expr]) -> Iterator[dict[Expr, int]]:
    """Every iteration of the running loops around an access, the others at `values`."""

    def visit(loops: tuple[For, ...], known: dict[Expr, int]) -> Iterator[dict[Expr, int]]:
        if not loops:
            if all(truth(c, known) for c in a.conditions if c.op == "const" or set(E.variables(c)) & running):
                yield known
            return
        x = loops[0]
        each = range(evaluate_int(as_expr(x.extent), known)) if x.var in running else [values[x.var]]
        for n in each:
            yield from visit(loops[1:], {**known, x.var: n})

    yield from visit(a.loops, {})


def truth(condition: Expr, known: dict[Expr, int]) -> bool:
    return bool(substitute(condition, {v: E.const(n) for v, n in known.items()}).attr)


def walked(group: list[Access], values: dict[Expr, int], running: set[Expr]) -> tuple[int, int]:
    """(elements, iterations) by brute force."""
    found, count = set(), 0
    for a in group:
        for known in points(a, values, running):
            count += 1
            place = tuple(evaluate_int(i, known) for i in a.indices)
            if all(0 <= p < n for p, n in zip(place, a.buffer.shape, strict=True)):
                found.add(place)
    return len(found), count


@st.composite
def programs(draw: st.DrawFn) -> Stmt:
    """A nest of up to four loops, triangular and guarded ones among them, around stores at affine indices of one buffer."""
    shape = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    buffer = Buffer("A", "float32", shape)
    names = "ijkl"[: draw(st.integers(1, 4))]
    variables: list[Expr] = []

    def index(size: int) -> Expr:
        e: Expr = as_expr(draw(st.integers(-2, 3)))
        for v in draw(st.lists(st.sampled_from(variables), max_size=2, unique_by=id)):
            kind = draw(st.integers(0, 9))
            n = draw(st.sampled_from([2, 3]))
            e = e + (v // n if kind == 0 else v % n if kind == 1 else v * draw(st.sampled_from([-2, -1, 1, 1, 1, 2, 3])))
        return e

    def nest(depth: int) -> Stmt:
        if depth == len(names):
            stmt = block(*(store(buffer, [index(n) for n in shape], 0.0) for _ in range(draw(st.integers(1, 3)))))
            if draw(st.integers(0, 4)) == 0:
                stmt = If(simplify(index(0) < index(0)), stmt)
            return stmt
        extent = as_expr(draw(st.integers(0, 6)))
        if variables and draw(st.integers(0, 4)) == 0:
            extent = draw(st.sampled_from(variables)) + 1

        def body(v: Expr) -> Stmt:
            variables.append(v)
            return nest(depth + 1)

        return loop(names[depth], simplify(extent) if extent.op != "const" else int(extent.attr), body)

    return nest(0)


@settings(max_examples=150, deadline=None)
@given(programs(), st.data())
def test_footprints_of_affine_programs_are_exact(program: Stmt, data: st.DataObject) -> None:
    found = accesses(program)
    counts = Footprints(found)
    for group in by_buffer(found).values():
        everything = set(loop_extents(program))
        for running in (everything, set(data.draw(st.lists(st.sampled_from(sorted(everything, key=str)))))):
            touched = counts.touched(group, running)
            assert touched.elements == walked(group, counts.middle, running)[0]
            assert touched.lines <= touched.elements


@settings(max_examples=80, deadline=None)
@given(programs())
def test_instances_are_exact(program: Stmt) -> None:
    for a in accesses(program):
        assert instances(a.loops, a.conditions) == walked([a], {}, set(loop_extents(program)))[1]


def test_an_index_that_stands_still_is_a_constant_beside_one_that_runs() -> None:
    """k // 2 of a triangular loop has no digits; the first dimension is coupled with the last by l all the same."""
    buffer = Buffer("A", "float32", (4, 3))

    def inner(k: Expr) -> Stmt:
        return loop("l", 2, lambda m: block(store(buffer, (k // 2, 0), 0.0), store(buffer, (m, m), 0.0)))

    found = accesses(loop("j", 3, lambda j: loop("k", simplify(j + 1), lambda k: inner(k))))
    touched = Footprints(found).touched(found, {found[0].loops[-1].var})
    assert touched.elements == 2  # (0, 0) and (1, 1)
