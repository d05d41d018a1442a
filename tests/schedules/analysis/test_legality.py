"""The judge: what it accepts beyond the quick test, and the witnesses of what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E, te
from tcomp.ir.loops import Accumulate, Allocate, Buffer, If, Kernel, Stmt, Store, block, loop, store
from tcomp.schedules import Schedule
from tcomp.schedules.analysis.legality import Witness, out_of_bounds, proving

N = te.var("n")
A, X, Y = Buffer("A", "float32", (N, N)), Buffer("X", "float32", (N,)), Buffer("Y", "float32", (N,))
P = Buffer("P", "int64", (N,))
ADD = te.sum(A[0, 0], te.reduce_axis(1)).attr[0]


def kernel(body: Stmt) -> Kernel:
    return Kernel("k", (A, X, Y, P), (A, X, Y), (N,), body)


def nest(body: Callable[[E.Expr, E.Expr], Stmt], triangular: bool = False) -> Kernel:
    return kernel(loop("i", N, lambda i: loop("j", i if triangular else N, lambda j: body(i, j))))


def refused(k: Kernel, step: Callable[[Schedule], Any]) -> Witness | None:
    s = Schedule(k)
    with pytest.raises(ScheduleError, match="may touch the same element") as caught:
        step(s)
    assert s.kernel is k and len(s.trace) == 0
    assert caught.value.witness is None or str(caught.value.witness) in str(caught.value)
    return caught.value.witness


def test_the_witness_of_a_recurrence() -> None:
    w = refused(kernel(loop("i", N, lambda i: If(i >= 1, Store(X, (i,), X[E.maximum(i - 1, 0)])))), lambda s: s.parallel("i"))
    assert str(w) == "`X[i] = X[max(i - 1, 0)]` at i=1 and then `X[i] = X[max(i - 1, 0)]` at i=2 both touch X[1] (with n=3)"
    assert w is not None and w.exact and w.element == (1,)


def test_accesses_apart_by_parity_do_not_conflict() -> None:
    s = Schedule(kernel(loop("i", N // 2, lambda i: Store(X, (2 * i,), X[2 * i + 1]))))
    s.parallel("i")


def test_halves_do_not_conflict() -> None:
    Schedule(kernel(loop("i", N // 2, lambda i: Store(X, (i,), X[i + (N + 1) // 2])))).parallel("i")
    w = refused(kernel(loop("i", N // 2, lambda i: Store(X, (i,), X[i + N // 2 - 1]))), lambda s: s.parallel("i"))
    assert w is not None and w.fixed == {"n": 4}


def test_interchange_by_direction() -> None:
    down = nest(lambda i, j: Store(A, (i + 1, j + 1), A[i, j]))
    Schedule(down).reorder("j", "i")
    w = refused(nest(lambda i, j: If((i >= 1) & (j < N - 1), Store(A, (i, j), A[i - 1, j + 1]))), lambda s: s.reorder("j", "i"))
    assert w is not None and w.first.loops["i"] < w.second.loops["i"] and w.first.loops["j"] > w.second.loops["j"]


def test_accumulations_keep_their_order_unless_told() -> None:
    k = kernel(loop("i", N, lambda i: loop("j", N, lambda j: Accumulate(X, (E.as_expr(0),), A[i, j], ADD))))
    refused(k, lambda s: s.reorder("j", "i"))
    Schedule(k).reorder("j", "i", reassociate=True)
    rows = kernel(loop("i", N, lambda i: loop("j", N, lambda j: Accumulate(X, (i,), A[i, j], ADD))))
    Schedule(rows).reorder("j", "i")  # each element's own accumulations stay in order


def test_accumulations_by_two_reducers_conflict() -> None:
    greatest = te.max(A[0, 0], te.reduce_axis(1)).attr[0]
    body = lambda i, j: block(Accumulate(X, (i,), A[i, j], ADD), Accumulate(X, (i,), A[i, j], greatest))
    refused(nest(body), lambda s: s.apply("set_kind", "j", "vectorized", True) if isinstance(N, int) else s.parallel("j"))


def test_what_is_not_affine_may_conflict() -> None:
    w = refused(kernel(loop("i", N, lambda i: Store(X, (P[i],), Y[i]))), lambda s: s.parallel("i"))
    assert w is not None and not w.exact and "both may touch X[" in str(w)


def test_buffers_of_one_iteration_do_not_conflict() -> None:
    T = Buffer("T", "float32", (N,))
    k = kernel(loop("i", N, lambda i: Allocate(T, block(loop("j", N, lambda j: store(T, (j,), A[i, j])), Store(X, (i,), T[0])))))
    Schedule(k).parallel("i")


def test_a_guard_reads_memory() -> None:
    k = kernel(loop("i", N, lambda i: If(P[0] < 3, store(P, (i,), 1))))
    refused(k, lambda s: s.parallel("i"))


def test_proving_puts_every_question_to_isl() -> None:
    i, j, k = 33, 17, 9
    a, b = te.placeholder((i, k), name="A"), te.placeholder((k, j), name="B")
    r = te.reduce_axis(k, "k")
    with proving() as proofs:
        s = Schedule([a, b, te.compute((i, j), lambda i, j: te.sum(a[i, r] * b[r, j], r), name="C")])
        s.split("C.i", 4)
        s.split("C.j", 8)
        s.parallel("C.i.o")
        s.vectorize("C.j.i")
    assert proofs.questions == 2 and 0 < proofs.seconds < 5


@pytest.mark.parametrize("reach", [0, 1])
def test_elements_outside_of_a_buffer(reach: int) -> None:
    found = out_of_bounds(loop("i", N, lambda i: Store(X, (i,), A[i, i + reach])))
    assert (found is None) == (reach == 0)
    if found:
        assert str(found) == "`X[i] = A[i, i + 1]` at i=0 touches A[0, 1] (with n=1)"


def test_witnesses_against_enumeration() -> None:
    """Random pairs of affine accesses in a 2-d nest: a refusal names a pair that touches one element, an acceptance means there is none."""
    accepted = 0
    for a, b, c, d in itertools.product(range(-1, 3), range(2), range(-1, 2), range(2)):
        B = Buffer("B", "float32", (40, 40))
        body = loop("i", 4, lambda i: loop("j", 5, lambda j: Store(B, (i * a + j + 9, j * b + i + 9), B[i * c + j + 10, j * d + 9])))  # noqa: B023
        s = Schedule(Kernel("k", (B,), (B,), (), body))
        points = list(itertools.product(range(4), range(5)))

        def places(i: int, j: int) -> list[tuple[int, int]]:
            return [(i * a + j + 9, j * b + i + 9), (i * c + j + 10, j * d + 9)]  # noqa: B023

        clash = {
            (p, q) for p in points for q in points if p[0] < q[0] and ({places(*p)[0]} & {*places(*q)} or {places(*q)[0]} & {*places(*p)})
        }
        try:
            s.parallel("i")
            accepted += 1
            assert not clash
        except ScheduleError as error:
            w = error.witness
            assert isinstance(w, Witness) and (tuple(w.first.loops.values()), tuple(w.second.loops.values())) in clash
    assert accepted > 3
