"""Random index expressions and their values on every assignment of small ranges."""

import itertools

import numpy as np
from hypothesis import strategies as st

from tcomp.ir import expr as E
from tcomp.ir.interpreters import semantics

X = E.var("x", 0, 5)
Y = E.var("y", -3, 2)
N = E.dim("n", 1, 4)
I = E.loop_var("i", N)
J = E.loop_var("j", 2 * N + 1)
VARIABLES = (X, Y, N, I, J)

_ASSIGNMENTS = np.array(
    [
        (x, y, n, i, j)
        for x, y, n in itertools.product(range(6), range(-3, 3), range(1, 5))
        for i, j in itertools.product(range(n), range(2 * n + 1))
    ]
)
VALUES = dict(zip(VARIABLES, _ASSIGNMENTS.T, strict=True))


def values(e: E.Expr) -> tuple[np.ndarray, np.ndarray]:
    """(values, defined) of an expression on every assignment; undefined where something is divided by zero."""
    memo = {}
    count = len(_ASSIGNMENTS)
    for node in E.walk(e):
        if node.op == "const":
            memo[node] = np.full(count, node.attr), np.ones(count, bool)
        elif node.op == "var":
            memo[node] = VALUES[node], np.ones(count, bool)
        else:
            args = [memo[a][0] for a in node.args]
            defined = np.logical_and.reduce([memo[a][1] for a in node.args])
            if node.op == "select":
                defined = memo[node.args[0]][1] & np.where(args[0], memo[node.args[1]][1], memo[node.args[2]][1])
            elif node.op in ("floordiv", "mod", "truncdiv", "truncmod"):
                defined = defined & (args[1] != 0)
            memo[node] = semantics.apply(node.op, node.dtype, args), defined
    return memo[e]


def _arithmetic(children: st.SearchStrategy[E.Expr]) -> st.SearchStrategy[E.Expr]:
    divisors = st.one_of(st.integers(1, 8).map(E.const), st.sampled_from([N, N * 2, E.const(-3), X + 1]))
    return st.one_of(
        st.builds(E.binary, st.sampled_from(["add", "sub", "mul", "min", "max", "add", "sub"]), children, children),
        st.builds(E.binary, st.sampled_from(["floordiv", "mod", "floordiv", "mod", "truncdiv", "truncmod"]), children, divisors),
        st.builds(E.binary, st.just("mul"), children, st.integers(-4, 8).map(E.const)),
        st.builds(E.unary, st.just("neg"), children),
        st.builds(E.select, _comparisons(children), children, children),
    )


def _comparisons(children: st.SearchStrategy[E.Expr]) -> st.SearchStrategy[E.Expr]:
    plain = st.builds(E.binary, st.sampled_from(["lt", "le", "eq", "ne"]), children, children)
    return st.one_of(plain, plain.map(lambda c: E.unary("not", c)))


LEAVES = st.one_of(st.sampled_from(VARIABLES), st.integers(-6, 12).map(E.const))
INDICES = st.recursive(LEAVES, _arithmetic, max_leaves=8)
CONDITIONS = _comparisons(INDICES)
