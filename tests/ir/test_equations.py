"""Equations between sizes, against all sizes in a small range."""

from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.ir.equations import Contradiction, Sizes
from tcomp.ir.expr import Expr, as_expr, dim, evaluate_int, maximum, minimum, variables
from tcomp.ir.simplify import prove, simplify

HIGHEST = 40
A, B = dim("a", 1, HIGHEST), dim("b", 1, HIGHEST)


def met(*pairs):
    sizes = Sizes(HIGHEST + 1)
    sizes.start([(A, B)])
    for x, y in pairs:
        assert sizes.meet(x, y, "here")
    return sizes


def allowed(sizes):
    """Every (a, b) that is still possible."""
    a, b = (as_expr(sizes.now(v)) for v in (A, B))
    free = variables(a, b)
    found = set()
    for values in product(*(range(v.attr.lo, v.attr.hi + 1) for v in free)):
        at = dict(zip(free, values, strict=True))
        if all(holds(c, at) for c in sizes.conditions()):
            found.add((evaluate_int(a, at), evaluate_int(b, at)))
    return found


def holds(condition: Expr, at) -> bool:
    return bool(evaluate_int(simplify(condition), at))


def wanted(*pairs):
    everything = product(range(1, HIGHEST + 1), repeat=2)
    return {(a, b) for a, b in everything if all(evaluate_int(as_expr(x) - y, {A: a, B: b}) == 0 for x, y in pairs)}


@pytest.mark.parametrize(
    ("pairs", "value"),
    [
        ([(A, 4)], "4"),
        ([(A, B)], "a"),
        ([(minimum(A, 16), A)], "a"),
        ([(minimum(A, 16), 8)], "8"),
        ([(A // 8 * 8, A)], "a * 8"),
        ([((A + 1) // 2 * 2, (A + 3) // 4 * 4)], "a * 4 + a_rest"),
        ([(A // 4, 5)], "a"),
        ([(A * B, B * 6)], "6"),
        ([(A * 3 + 3, 12)], "3"),
        ([(A, B * 2 + 1)], "b * 2 + 1"),
        ([(A // 2 * 2, A), (A // 3 * 3, A)], "a * 6"),
        ([(A % 4, 1)], "a * 4 + 1"),
        ([(maximum(A - 3, 0), A - 3)], "a"),
        ([(A * A, B * 4)], None),  # not decided
        ([(A // 2, B // 2)], None),
    ],
    ids=str,
)
def test_solutions(pairs, value):
    sizes = met(*pairs)
    assert allowed(sizes) == wanted(*pairs)
    if value is None:
        assert sizes.now(A) is A and sizes.conditions()
    else:
        assert str(sizes.now(A)) == value and all(prove(as_expr(sizes.now(x)) <= sizes.now(y)) for x, y in pairs)


@pytest.mark.parametrize("pair", [(A, 0), (A * 2, 5), (A + B, 1), (A % 4, 4), (A // 4, 50), (A // 2 * 2, A // 2 * 2 + 1)], ids=str)
def test_contradictions(pair):
    with pytest.raises(Contradiction):
        met(pair)


def test_sizes_that_only_a_run_tells_are_left_alone():
    sizes = Sizes(HIGHEST + 1)
    sizes.start([(A,)])
    assert not sizes.meet(A, B, "here") and sizes.now(A) is A


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_solutions_are_exact(data):
    """What random equations allow is what they say: a size is neither lost nor let through."""

    def size(depth: int) -> Expr:
        kind = data.draw(st.sampled_from(["var", "const", "add", "sub", "mul", "div", "mod", "min", "max"])) if depth else "var"
        if kind in ("var", "const"):
            return data.draw(st.sampled_from([A, A, B])) if kind == "var" else as_expr(data.draw(st.integers(1, 9)))
        x, c = size(depth - 1), data.draw(st.sampled_from([1, 2, 3, 4, 8]))
        y = data.draw(st.sampled_from([as_expr(c), A, B]))
        return {
            "add": lambda: x + y, "sub": lambda: x - y, "mul": lambda: x * y, "div": lambda: x // c, "mod": lambda: x % c,
            "min": lambda: minimum(x, y), "max": lambda: maximum(x, y),
        }[kind]()  # fmt: skip

    pairs = [(simplify(size(2)), simplify(size(2))) for _ in range(data.draw(st.integers(1, 3)))]
    expected = wanted(*pairs)
    try:
        assert allowed(met(*pairs)) == expected
    except Contradiction:
        assert not expected
