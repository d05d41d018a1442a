"""What places tell about iterations: against enumeration."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.ir import expr as E
from tcomp.ir.expr import Expr, loop_var
from tcomp.schedules.analysis.dependence import determined

I, J, K = (loop_var(n, extent) for n, extent in (("i", 6), ("j", 4), ("k", 3)))
N = E.dim("n", 1)


def by_enumeration(places: list[tuple[Expr, ...]], variables: list[Expr]) -> set[Expr]:
    """Variables that are equal wherever two places are, over all pairs of iterations."""
    values = [dict(zip(variables, point, strict=True)) for point in itertools.product(*(range(v.attr.hi + 1) for v in variables))]
    points = [(tuple(E.evaluate_int(i, v) for i in place), v) for place in places for v in values]
    equal = set(variables)
    for (a, u), (b, v) in itertools.combinations(points, 2):
        if a == b:
            equal -= {x for x in equal if u[x] != v[x]}
    return equal


VALUES = st.one_of(
    st.sampled_from([I, J, K]),
    st.builds(lambda a, b, c, d: I * a + J * b + K * c + d, *[st.integers(-4, 8)] * 3, st.integers(0, 3)),
    st.builds(lambda m: I % m, st.integers(2, 4)),
    st.builds(lambda d: I // d, st.integers(2, 4)),
    st.builds(lambda d, m: (I * 4 + J) // d % m, st.integers(1, 6), st.integers(2, 6)),
    st.builds(lambda d: (I * 4 + J) // d, st.integers(1, 6)),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(VALUES, min_size=1, max_size=3), st.integers(0, 3), st.booleans())
def test_never_claims_too_much(values: list[Expr], shift: int, twice: bool) -> None:
    variables = [I, J, K]
    places = [tuple(values)]
    if twice:  # a second access nearby
        places.append((values[0] + shift, *values[1:]))
    assert determined(places, variables) <= by_enumeration(places, variables)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(I, J)], {I, J}),
        ([(I, J), (I, K)], {I}),
        ([(I * 4 + J,)], {I, J}),
        ([(I * 3 + J,)], set()),
        ([(I * 8 + J,), (I * 8 + K + 4,)], {I}),
        ([(I * 8 + J,), (I * 8 + K + 8,)], set()),
        ([(I // 3, I % 3)], {I}),
        ([(I // 3, I % 2)], set()),
        ([((I * 4 + J) // N, (I * 4 + J) % N)], {I, J}),
        ([(I * N, J)], {I, J}),
        ([(I * N + J,)], set()),
        ([(I, J), (I + N, J)], {J}),
    ],
    ids=lambda value: ",".join(sorted(map(str, value))) if isinstance(value, set) else str(value),
)
def test_places(places: list[tuple[Expr, ...]], expected: set[Expr]) -> None:
    assert determined(places, [I, J, K]) == expected


def test_fused_loops_of_symbolic_extents() -> None:
    a, b = E.dim("a", 1), E.dim("b", 1)
    v = loop_var("v", a * b * 7)
    assert determined([(v // (a * b), v // b % a, v % b)], [v]) == {v}
    assert determined([(v // b // a, v // b % a, v % b)], [v]) == {v}
    assert determined([(v // (a * b), v % b)], [v]) == set()
