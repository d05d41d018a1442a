"""Hash-consing, construction and the ranges of single operators."""

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from tcomp.errors import IRError
from tcomp.ir import expr as E, te

X, N = E.var("x", 0, 9), E.dim("n")
A = te.placeholder((10,), name="A")


def test_equal_structure_is_the_same_object():
    assert X + 1 is X + 1
    assert A[X] * 2.0 is A[X] * 2.0
    assert A[X] is not te.placeholder((10,), name="A")[X]
    assert E.var("x", 0, 9) is X
    assert E.var("x", 0, 8) is not X


def test_constants_are_told_apart_by_bits_and_dtype():
    assert E.const(0.0, "float32") is not E.const(-0.0, "float32")
    assert E.const(float("nan"), "float32") is E.const(float("nan"), "float32")
    assert E.const(1, "int64") is not E.const(1, "int32")
    assert E.const(True, "bool") is not E.const(1, "int64")
    assert E.const(300, "uint8") is E.const(44, "uint8")
    assert E.const(-(2**63) - 1) is E.const(2**63 - 1)


def test_copies_and_pickles_keep_identity():
    e = E.select(X < N, X // 3, -X)
    assert copy.deepcopy(e) is e
    assert pickle.loads(pickle.dumps(e)) is e


def test_unused_expressions_are_freed():
    before = len(E._interned)
    keep = [A[X * n + 12345] for n in range(2, 50)]
    assert all(E.variables(e) == (X,) and E.reads(e) == (e,) for e in keep)  # what is remembered of them does not keep them alive
    assert len(E._interned) > before
    del keep
    gc.collect()
    E._drop_unused()
    assert len(E._interned) <= before + 1
    assert A[X * 2 + 12345] is A[X * 2 + 12345]


def test_the_table_of_expressions_stays_small_while_threads_use_it(monkeypatch):
    monkeypatch.setattr(E, "_FEWEST_TO_DROP", 0)
    monkeypatch.setattr(E, "_drop_at", 0)  # unused ones are looked for again and again

    def same(_):
        return all(X * n + 54321 is X * n + 54321 for n in range(2, 400))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(same, range(8)))
    E._drop_unused()
    assert not any(key[0] == "const" and key[3] == 54321 for key in E._interned)


def test_folding_keeps_float_semantics():
    f = A[X]
    assert (f + 0.0).op == "add"  # -0.0 + 0.0 is 0.0
    assert (f * 0.0).op == "mul"  # NaN * 0
    assert f * 1.0 is f
    assert X + 0 is X and X * 0 is E.const(0) and X - X is E.const(0) and X % 1 is E.const(0)
    assert E.equal(f, f).op == "eq"  # NaN
    assert E.minimum(E.const(3), 5) is E.const(3)


def test_numbers_may_stand_on_the_left():
    f, k = A[X], te.placeholder((10,), "int32", "K")[X]
    found = [2.0**f, 5 ^ k, 1 << k, 64 >> k]
    assert [(e.op, e.args[0].attr, e.args[1]) for e in found] == [("pow", 2.0, f), ("xor", 5, k), ("shl", 1, k), ("shr", 64, k)]


def test_substitute_is_simultaneous():
    y = E.var("y")
    assert E.substitute(X - y, {X: y, y: X}) is y - X


def test_rewriting_does_not_look_into_what_is_known():
    y, asked = E.var("y"), []
    inner = X * 7 + 1
    assert E.rewrite(inner * 3, asked.append, {inner: y}) is y * 3
    assert asked == [E.const(3), y * 3]
    assert E.rewrite(inner, asked.append, {inner: y}) is y and len(asked) == 2


def test_reads_and_variables_are_in_order_of_first_use():
    y, f = E.var("y"), A[X]
    e = A[y + 1] * f + f * A[E.cast(A[y], E.INDEX)]
    assert E.reads(e) == (A[y + 1], f, A[y], A[E.cast(A[y], E.INDEX)]) == E.reads(e)
    assert E.variables(e) == (y, X) == E.variables(y, e) and E.variables(f, e) == (X, y) and E.variables() == ()


def test_walk_visits_shared_nodes_once_and_operands_first():
    shared = X * 7
    order = list(E.walk(shared + shared // 2 * shared))
    assert len(order) == len(set(order)) and order.index(shared) < order.index(order[-1])


def test_empty_axes_have_no_values():
    v = E.loop_var("k", 0)
    assert E.bounds(v) == (0, -1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: A[X] + X, "`add` of float32 and int64"),
        (lambda: A[X, X], "has 1 dimensions and was indexed with 2"),
        (lambda: bool(X < 3), "no truth value"),
        (lambda: range(X), "a symbolic expression was used where an integer is needed"),
        (lambda: E.unary("frob", X), "unknown function"),
        (lambda: E.select(X, X, X), "select of"),
        (lambda: E.evaluate_int(X + N, {X: 1}), "not all variables"),
    ],
)
def test_refused(build, message):
    with pytest.raises(IRError, match=message):
        build()
