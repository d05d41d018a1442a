"""The access algebra against enumeration: affine forms, digits, intervals, boxes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.ir import expr as E
from tcomp.ir.access import (
    Access,
    Affine,
    Box,
    Digit,
    accesses,
    affine,
    box_touched,
    coefficient,
    digit,
    indices_of,
    interval,
    stride,
    within,
    without,
)
from tcomp.ir.expr import Expr, as_expr, evaluate_int, loop_var
from tcomp.ir.loops import Buffer, For, If, Stmt, block, loop, store, walk
from tcomp.ir.simplify import simplify
from tests.ir.index_programs import INDICES, VARIABLES, I, J, N, X, values

A, B, C = (loop_var(name, extent) for name, extent in (("a", 6), ("b", 4), ("c", 3)))
SIZES = {A: 6, B: 4, C: 3}
SUMS = st.builds(lambda a, b, c, d: Affine({A: a, B: b, C: c}, d), *[st.integers(-4, 5)] * 3, st.integers(-3, 9))


def written(form: Affine) -> Expr:
    return simplify(sum((v * c for v, c in form.terms.items()), as_expr(form.constant)))


def everywhere() -> Iterator[dict[Expr, int]]:
    for point in itertools.product(*map(range, SIZES.values())):
        yield dict(zip(SIZES, point, strict=True))


# ---------------------------------------------------------------- affine forms, strides


@given(SUMS)
def test_affine_forms(form: Affine) -> None:
    found = affine(written(form))
    assert found is not None and found.constant == form.constant
    assert found.terms == {v: c for v, c in form.terms.items() if c}
    reached = [evaluate_int(written(form), point) for point in everywhere()]
    assert found.span(SIZES) == (min(reached), max(reached))


@given(SUMS, st.integers(0, 3), st.integers(4, 8))
def test_clamped_affine_forms_leave_their_bounds_out(form: Affine, low: int, high: int) -> None:
    e = simplify(E.minimum(E.maximum(written(form), low), N + high))
    found = affine(e, SIZES, clamped=True)
    if e.op in ("min", "max") and any(form.terms.values()):  # else the sum is a constant, or its range makes a bound superfluous
        assert affine(e, SIZES) is None and found is not None
        assert found.terms == {v: c for v, c in form.terms.items() if c} and found.constant == form.constant


@settings(max_examples=200, deadline=None)
@given(INDICES, st.sampled_from(VARIABLES))
def test_coefficients(e: Expr, v: Expr) -> None:
    e = simplify(e)
    c, split = coefficient(e, v), without(e, v)
    assert (None if split is None else split[0]) == c
    if split is not None:
        assert v not in E.variables(split[1])
        (expected, defined), (found, _) = values(e), values(v * split[0] + split[1])
        np.testing.assert_array_equal(found[defined], expected[defined])


def test_strides_are_those_of_addresses() -> None:
    image = Buffer("image", "float32", (N, 7, 16))
    read = image[A, B + C, C * 2]
    assert [stride(read, v) for v in (A, B, C)] == [112, 16, 18]
    assert stride(image[I, A // 2, 0], A) is None
    assert stride(Buffer("image", "float32", (7, N))[A, 0], A) is None  # no constant


# ---------------------------------------------------------------- digits


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["floordiv", "mod"]), st.sampled_from([2, 3, 4, 6, 12, N, N * 2])), min_size=1, max_size=3))
def test_digits_are_what_they_say(steps: list[tuple[str, int | Expr]]) -> None:
    e = J + X * 9
    for op, by in steps:
        e = E.binary(op, e, by)
    d = digit(e)
    meant = d.whole // d.low if d.high is None else d.whole // d.low % d.size
    np.testing.assert_array_equal(values(meant)[0], values(e)[0])


def test_digits_of_split_and_fused_loops() -> None:
    assert (digit(A // 4).low, digit(A // 4).high) == (as_expr(4), None)
    long = loop_var("long", 60)
    d = digit(simplify(long // 3 % 4))
    assert (d.whole, d.low, d.high) == (long, as_expr(3), as_expr(12))
    by = E.var("d", 0, 3)
    assert digit(A % 2 // by) == Digit(A % 2, by, None)  # of A % 2, not of A: the divisor may be 0


# ---------------------------------------------------------------- intervals


@settings(max_examples=400, deadline=None)
@given(INDICES)
def test_intervals_hold(e: Expr) -> None:
    """All values lie between ends that do not depend on the loops that run."""
    found = interval(e, {I: N, J: 2 * N + 1})
    if found is not None:
        assert {I, J}.isdisjoint(E.variables(*found))
        reached, defined = values(e)
        (low, known), (high, too) = map(values, found)
        defined = defined & known & too
        assert (low <= reached)[defined].all() and (reached <= high)[defined].all(), f"{e} in {found[0]} .. {found[1]}"


@given(SUMS, st.sampled_from([1, 2, 3]))
def test_intervals_of_affine_indices_are_exact(form: Affine, divisor: int) -> None:
    e = simplify(written(form) // divisor)
    found = interval(e, {B: 4, C: 3})
    assert found is not None
    for a in range(6):
        reached = [evaluate_int(e, {A: a, B: b, C: c}) for b in range(4) for c in range(3)]
        low, high = (evaluate_int(end, {A: a}) for end in found)
        assert low <= min(reached) and max(reached) <= high
        if divisor == 1:
            assert (low, high) == (min(reached), max(reached))


@settings(max_examples=300, deadline=None)
@given(INDICES, st.sampled_from([3, 8, N, N * 2]))
def test_what_is_within_range_is(e: Expr, extent: int | Expr) -> None:
    if within(e, extent):
        (index, defined), (size, _) = values(e), values(as_expr(extent))
        assert ((0 <= index) & (index < size))[defined].all()


# ---------------------------------------------------------------- boxes


@st.composite
def nests(draw: st.DrawFn) -> Stmt:
    """Up to three loops, the inner ones triangular at times, around stores at sums, quotients and clamped indices of their variables."""
    buffer = Buffer("T", "float32", draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)))
    around: list[Expr] = []

    def index(size: int) -> Expr:
        e: Expr = as_expr(draw(st.integers(0, 2)))
        for v in draw(st.lists(st.sampled_from(around), max_size=2, unique_by=id)):
            kind = draw(st.integers(0, 6))
            e = e + (v // 2 if kind == 0 else v % 3 if kind == 1 else v * draw(st.sampled_from([-1, 1, 1, 2])))
        return E.minimum(E.maximum(e, 0), size - 1) if draw(st.booleans()) else e

    def nest(depth: int) -> Stmt:
        if depth == 3:
            stores = block(*(store(buffer, [index(int(n)) for n in buffer.shape], 0.0) for _ in range(draw(st.integers(1, 2)))))
            return If(simplify(index(9) < index(9)), stores) if draw(st.integers(0, 5)) == 0 else stores

        def body(v: Expr) -> Stmt:
            around.append(v)
            return nest(depth + 1)

        extent = draw(st.sampled_from(around)) + 1 if around and draw(st.integers(0, 4)) == 0 else draw(st.integers(1, 5))
        return loop("xyz"[depth], extent, body)

    return nest(0)


def iterations(a: Access) -> Iterator[dict[Expr, int]]:
    """Every iteration in which an access happens, whatever the sizes of its loops."""

    def visit(loops: tuple[For, ...], known: dict[Expr, int]) -> Iterator[dict[Expr, int]]:
        if loops:
            for n in range(evaluate_int(as_expr(loops[0].extent), known)):
                yield from visit(loops[1:], {**known, loops[0].var: n})
        elif all(E.substitute(c, {v: E.const(n) for v, n in known.items()}).attr for c in a.conditions):
            yield known

    yield from visit(a.loops, {})


@settings(max_examples=200, deadline=None)
@given(nests(), st.integers(0, 3), st.booleans())
def test_boxes_hold_all_that_is_touched(program: Stmt, depth: int, clip: bool) -> None:
    """The box of any inner statement, for all values of the loops around it; its size is the same everywhere."""
    inner = [program, *(s.body for s in walk(program) if isinstance(s, For))][depth]
    found = accesses(program)
    buffer = found[0].buffer
    box = box_touched(inner, buffer, clip)
    assert all(isinstance(n, int) for n in box.extent)
    for a in found:
        for here in iterations(a):
            for i, base, extent, size in zip(a.indices, box.base, box.extent, buffer.shape, strict=True):
                place, start = evaluate_int(i, here), evaluate_int(base, here)
                if 0 <= place < int(size):  # a box that is the whole dimension holds no element beyond it
                    assert start <= place < start + evaluate_int(extent, here)


@given(nests())
def test_accesses_and_their_indices(program: Stmt) -> None:
    found = accesses(program)
    assert [a.statement for a in found] == [s for s in walk(program) if hasattr(s, "indices")]
    assert indices_of(program, found[0].buffer) == list(dict.fromkeys(a.indices for a in found))
    assert all(a.writes and [x.var for x in a.loops] == [s.var for s in walk(program) if isinstance(s, For)] for a in found)


SIDES = st.tuples(st.sampled_from([as_expr(0), as_expr(3), N - 1, N * 2 - 1]), st.sampled_from([1, 2, N, N + 2]))


@settings(max_examples=100, deadline=None)
@given(SIDES, SIDES)
def test_unions_hold_both(one: tuple[Expr, int | Expr], other: tuple[Expr, int | Expr]) -> None:
    shape = (N * 3 + 5,)
    boxes = [Box((base,), (extent,)) for base, extent in (one, other)]
    both = boxes[0].union(boxes[1], shape)
    for n in range(1, 5):  # N is at most 4
        start = evaluate_int(both.base[0], {N: n})
        end = start + evaluate_int(both.extent[0], {N: n})
        for box in boxes:
            first = evaluate_int(box.base[0], {N: n})
            assert start <= first and first + evaluate_int(box.extent[0], {N: n}) <= end


def test_unions_that_are_known_are_tight() -> None:
    last, one_before = Box((N - 1,), (1,)), Box((N - 2,), (1,))
    assert last.union(one_before, (N,)) == Box((simplify(N - 2),), (2,))
    assert Box.whole((N, 4)).union(Box.whole((N, 4)).replaced({1: (as_expr(1), 2)}), (N, 4)).is_whole((N, 4))


@pytest.mark.parametrize("clip, extent", [(True, 8), (False, 12)])
def test_boxes_are_clipped_where_asked(clip: bool, extent: int) -> None:
    b = Buffer("T", "float32", (8,))
    assert box_touched(loop("x", 12, lambda x: store(b, (x,), 0.0)), b, clip).extent == (extent,)
