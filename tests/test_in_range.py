"""Programs of one's own stay in their arrays: what is proved, what is refused and with which witness, and what a call checks."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, assume as given_that, example, given, settings, strategies as st

import tcomp
from tcomp import te
from tcomp.errors import InputError, IRError, OutOfRangeError, ProgramError
from tcomp.frontends.python import Program
from tcomp.ir import expr as E, loops as L
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Buffer, Kernel, loop, store
from tcomp.ir.polyhedral import in_range
from tcomp.ir.polyhedral.in_range import quick_kernel, safe_kernel, safe_tensors
from tcomp.ir.reducers import standard_reducers
from tcomp.ir.simplify import as_dim, simplify
from tcomp.ir.text.parser import parse_kernel
from tcomp.schedules.index_checks import checked_first
from tests import own_programs
from tests.instructions import instructions
from tests.ir.index_programs import CONDITIONS, INDICES, VALUES, I, J, N, X, Y, values


def message(error: pytest.ExceptionInfo[Exception]) -> str:
    return str(error.value)


# ---------------------------------------------------------------- tensor expressions


def test_an_operator_that_reads_past_its_array_is_refused_with_a_witness() -> None:
    A = te.placeholder((64, 64), name="A")
    shifted = te.compute((64, 64), lambda i, j: A[i + 1, j], name="B")
    for make in (lambda: tcomp.build([A, shifted]), lambda: tcomp.Schedule(shifted)):
        with pytest.raises(IRError, match=r"`A\[i \+ 1, j\]` is outside of `A` at i = 63, j = 0") as error:
            make()
        assert "index 0 is 64, the extent is 64" in message(error) and "tensor `B`" in message(error)


@pytest.mark.parametrize(
    ("body", "witness"),
    [
        (lambda A, i, j, k: A[j, i], "`A[j, i]` is outside of `A` at i = 0, j = 6"),
        (lambda A, i, j, k: A[i, j - 1], "`A[i, j - 1]` is outside of `A` at i = 0, j = 0"),
        (lambda A, i, j, k: A[5 - i, j], "outside"),
        (lambda A, i, j, k: A[(i + j) % 7, j], "outside"),
        (lambda A, i, j, k: te.select(i < 5, A[i + 2, j], 0.0), "outside"),
        (lambda A, i, j, k: te.sum(A[i, j + k], k), "outside"),
    ],
)
def test_wrong_indices(body, witness: str) -> None:
    A, k = te.placeholder((6, 7), name="A"), te.reduce_axis(2, "k")
    t = te.compute((6 + (witness == "outside"), 7), lambda i, j: body(A, i, j, k), "B")
    with pytest.raises(IRError, match="is outside of") as error:
        tcomp.build([A, t])
    assert witness in message(error)


def test_the_shape_of_a_tensor_counts_even_if_it_is_never_stored() -> None:
    A = te.placeholder((40,), name="A")
    halves = te.compute((64,), lambda i: A[i // 2], name="halves")
    with pytest.raises(IRError, match=r"outside of `halves` at i = 63"):
        tcomp.build([A, te.compute((64,), lambda i: halves[i + 1], name="B")])


def test_conditions_around_an_access_are_part_of_the_proof() -> None:
    A = te.placeholder((6, 7), name="A")
    padded = te.compute(
        (8, 9), lambda i, j: te.select((1 <= i) & (i < 7) & (1 <= j) & (j < 8), A[i - 1, j - 1], te.select(i < 6, A[i, 0], 0.0)), "P"
    )
    assert safe_tensors([padded]) == ([padded], ())


def test_sizes_that_do_not_fit_are_found_in_the_call() -> None:
    n, m = te.var("n"), te.var("m")
    A = te.placeholder((n, m), name="A")
    f = tcomp.build([A, te.compute((n, m), lambda i, j: A[j, i], name="B")])
    a = np.arange(9, dtype=np.float32).reshape(3, 3)
    np.testing.assert_array_equal(f(a), a.T)
    for _ in range(2):
        with pytest.raises(IndexError, match=r"outside of `A` at m = 2, n = 3, i = 2, j = 0"):
            f(a[:, :2].copy())
    g = tcomp.build(tcomp.Schedule([A, te.compute((n, m), lambda i, j: A[j, i], name="B")]))
    with pytest.raises(OutOfRangeError, match="index 1 is 2, the extent is 2"):
        g(a[:, :2].copy(), np.zeros((3, 2), np.float32))


def test_an_assumption_is_checked_in_the_call() -> None:
    n, m = te.var("n"), te.var("m")
    A, B = te.placeholder((n,), name="A"), te.placeholder((m,), name="B")
    t = te.compute((n,), lambda i: A[i] + B[i], name="C")
    f = tcomp.build([A, B, t], assume=[n <= m])
    assert f(np.ones(2, np.float32), np.ones(3, np.float32)).tolist() == [2, 2]
    with pytest.raises(InputError, match="`n <= m` does not hold|`n < m \\+ 1` does not hold"):
        f(np.ones(4, np.float32), np.ones(3, np.float32))
    with pytest.raises(IRError, match=r"tcomp.build\(tensors, assume=\[n <= m\]\)"):
        tcomp.assume(n <= m)


# ---------------------------------------------------------------- loops


@tcomp.program(A="float64[n]")
def past(n, A):
    for i in range(n + 4):
        A[i] = 1.0


@tcomp.program(A="float64[n]")
def backwards(n, A):
    for i in range(n):
        A[i] = A[i - 1]


@tcomp.program(A="float64[n]", B="float64[m]")
def copied(n, m, A, B):
    for i in range(n):
        B[i] = A[i]


@tcomp.program(A="float64[n]", B="float64[m]")
def assuming(n, m, A, B):
    tcomp.assume(n <= m)
    for i in range(n):
        B[i] = A[i]


@tcomp.program(A="float64[n]")
def assuming_in_a_loop(n, A):
    for i in range(n):
        tcomp.assume(i < n)
        A[i] = 0.0


@tcomp.program(A="float64[n]")
def insertion_sort(n, A):
    for i in range(1, n):
        key = A[i]
        j = i - 1
        while j >= 0 and A[j] > key:
            A[j + 1] = A[j]
            j -= 1
        A[j + 1] = key


@tcomp.program(A="float64[n]", B="int64[n]", C="float64[n]")
def looked_up_often(n, m, A, B, C):
    for i in range(m):
        for j in range(n):
            if j > i:
                C[j] += A[n - 1 - B[j]]


def test_indices_that_are_used_often_are_checked_before() -> None:
    """By loops of their own, behind which others have no guards; where one is out of range, only if it is used."""
    f, n = tcomp.build(looked_up_often.kernel(), threads=1), 50
    given = {"A": np.arange(n) * 0.5, "B": np.arange(n) * 7 % n, "C": np.zeros(n)}
    for m, last in ((1, 0), (20, 0), (1, n), (20, n), (0, n)):  # where there are few uses, and where a strange element is not used
        given["B"][0], expected = last, np.zeros(n)
        with np.errstate(all="ignore"):
            looked_up_often(n, m, given["A"], given["B"], expected)
        given["C"][:] = 0
        f(*given.values(), m=m)
        np.testing.assert_array_equal(given["C"], expected)
    given["B"][[3, 30]] = -1, n
    for m in (2, 20):
        with pytest.raises(OutOfRangeError, match="the index is 50, and there are 50 elements"):
            f(*given.values(), m=m)
    safe, results = safe_kernel(looked_up_often.kernel())[0], list[np.ndarray]()
    for kernel in (safe, twice := checked_first(safe, lambda k: k)):
        results.append(np.zeros(n))
        arrays = dict(zip(kernel.buffers, (given["A"], np.arange(n) * 7 % n, results[-1]), strict=True))
        run_kernel(kernel, arrays, {v: {"n": n, "m": 20}[v.name] for v in kernel.scalars})
    np.testing.assert_array_equal(*results)
    assert quick_kernel(safe) is None  # there are sizes that need no guards, of loops without iterations
    assert str(parse_kernel(str(twice))) == str(twice) and own_programs.guards(twice) == own_programs.guards(safe) == 1


@tcomp.program(A="float64[n]", B="int64[n]", C="float64[n]")
def looked_up_at_one_place(n, A, B, C):
    for i in range(n):
        if A[i] > 4.0:
            C[i] += A[B[n - 1]]


def test_one_element_that_is_used_often_is_checked_before() -> None:
    f = tcomp.build(looked_up_at_one_place.kernel(), threads=1)
    assert str(f.loops()).count("checked(") == 1 and "outside0[] = " in str(f.loops())
    for n, index in ((20, 5), (20, -1), (20, 20), (1, 3), (4, 9)):
        a, b, c = np.arange(n) * 1.0, np.full(n, index), np.zeros(n)
        if n > 5 and not 0 <= index < n:
            with pytest.raises(OutOfRangeError, match=f"the index is {index}, and there are {n} elements"):
                f(a, b, c)
        else:  # an index that is not used may be anything
            f(a, b, c)
            np.testing.assert_array_equal(c, [0, 0, 0, 0, 0, *[5] * (n - 5)][:n])


@tcomp.program(A="float64[n]", B="int64[n]", C="float64[n]")
def looked_up_once(n, A, B, C):
    for i in range(n):
        C[i] += A[B[n - 1 - i]]


@tcomp.program(A="float64[n]", B="int64[n]", C="float64[n]")
def looked_up_by_remainders(n, m, A, B, C):
    for _ in range(n):
        for j in range(n):
            C[j] += A[B[j % m]]


@tcomp.program(A="float64[n]", B="int64[n]", C="float64[n]")
def looked_up_in_a_triangle(n, m, A, B, C):
    for i in range(n):
        for j in range(i):
            if i < m:
                C[j] += A[B[(i + j) % n]]


@pytest.mark.parametrize(
    ("program", "n"), [(looked_up_once, 2000), (looked_up_by_remainders, 16), (looked_up_at_one_place, 2000), (looked_up_in_a_triangle, 20)]
)
def test_guards_cost_no_instructions(program: Program, n: int) -> None:
    """Of those that more elements take: what a call takes besides is the same."""

    def count(size: int) -> int:
        given: dict[str, np.ndarray] = {"A": np.arange(float(size)), "B": np.arange(size)[::-1].copy(), "C": np.zeros(size)}
        return instructions(own_programs.bound(tcomp.build(program.kernel(n=size), threads=1), given, {"m": size}))

    try:
        guarded = count(2 * n) - count(n)
        with own_programs.unguarded():
            plain = count(2 * n) - count(n)
    except PermissionError as error:  # as in some containers: instructions cannot be counted there
        pytest.skip(str(error))
    assert guarded <= 1.01 * plain + 100, (guarded, plain)  # Python differs by some


def test_counting_instructions_ends_where_it_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="the child ended"):
        instructions(lambda: 1 // 0)
    monkeypatch.setattr("tests.instructions._ptrace", lambda *request: -1)
    with pytest.raises(PermissionError, match="may not be traced"):
        instructions(list)


def test_a_program_that_leaves_its_array_is_refused_with_a_witness() -> None:
    with pytest.raises(ProgramError, match=r"`A\[i\]` is outside of `A` at n = 1, i = 1") as error:
        past.kernel()
    assert "test_in_range.py:" in message(error) and "the index is 1, the extent is 1" in message(error)
    with pytest.raises(ProgramError, match=r"at i = 10\n"):
        past.kernel(n=10)
    with pytest.raises(ProgramError, match="Python counts from the end; write n - 1"):
        backwards.kernel()


def test_sizes_of_a_program_are_checked_in_the_call() -> None:
    a, b = np.arange(5.0), np.zeros(7)
    tcomp.build(copied.kernel())(a, b)
    np.testing.assert_array_equal(b, [0, 1, 2, 3, 4, 0, 0])
    with pytest.raises(IndexError, match=r"`B\[i\]` is outside of `B` at m = 5, n = 7, i = 5|at n = 7, m = 5, i = 5"):
        tcomp.build(copied.kernel())(b, a)


@tcomp.program(A="float64[n]", B="int64[n]", C="float64[m]")
def copied_if(n, m, A, B, C):
    for i in range(n):
        if A[0] > 0.0:
            C[i] = A[B[i]]


def test_sizes_choose_the_code_where_data_decide() -> None:
    """Whether C is large enough is asked once in a call, unless it is not; what B holds, in each iteration."""
    kernel = copied_if.kernel()
    quick, condition = quick_kernel(safe_kernel(kernel)[0])
    assert own_programs.guards(kernel) == 2 and own_programs.guards(quick) == 1 and str(condition) == "n < m + 1"
    f, a, b = tcomp.build(kernel), np.arange(1.0, 6.0), np.arange(5)[::-1].copy()
    for size in (5, 7, 5):
        f(a, b, c := np.zeros(size))
        np.testing.assert_array_equal(c[:5], a[::-1])
    f(-a, b, c := np.zeros(3))
    assert not c.any()
    for wrong in (lambda: f(a, b, np.zeros(3)), lambda: f(a, b + 1, np.zeros(5)), lambda: f(a, b - 1, np.zeros(3))):
        with pytest.raises(OutOfRangeError):
            wrong()
    s = tcomp.Schedule(kernel)
    s.split("i", 4)
    tcomp.build(s)(a, b, c := np.zeros(9))
    np.testing.assert_array_equal(c[:5], a[::-1])


@tcomp.program(A="float64[1]", B="int64[n]", C="float64[n]")
def first_of_one(n, A, B, C):
    for i in range(n):
        C[i] = A[B[i]]


def test_an_array_of_one_element_is_guarded_too() -> None:
    f, c = tcomp.build(first_of_one.kernel()), np.zeros(3)
    f(np.ones(1), np.zeros(3, np.int64), c)
    assert c.all()
    with pytest.raises(OutOfRangeError, match="the index is 1, and there are 1 elements"):
        f(np.ones(1), np.array([0, 1, 0]), c)


def test_a_program_may_state_what_it_assumes() -> None:
    kernel = assuming.kernel()
    assert "assume" in str(kernel) and str(parse_kernel(str(kernel))) == str(kernel)
    with pytest.raises(InputError, match="does not hold for") as error:
        tcomp.build(kernel)(np.zeros(7), np.zeros(5))
    assert not isinstance(error.value, OutOfRangeError)
    with pytest.raises(InputError, match="does not hold"):
        assuming(7, 5, np.zeros(7), np.zeros(5))
    assert assuming.kernel(n=3, m=4).assumptions == ()
    with pytest.raises(ProgramError, match="assumes what does not hold"):
        assuming.kernel(n=4, m=3)
    with pytest.raises(ProgramError, match="outside of loops and branches"):
        assuming_in_a_loop.kernel()


def test_a_kernel_of_your_own_and_its_schedule_are_proved() -> None:
    A, B = Buffer("A", "float32", (8,)), Buffer("B", "float32", (8,))
    wrong = Kernel("k", (A, B), (B,), (), loop("i", 8, lambda i: store(B, (i,), A[i * 2])))
    with pytest.raises(IRError, match=r"outside of `A` at i = 4"):
        tcomp.build(wrong)
    s = tcomp.Schedule(wrong)
    s.split("i", 2)
    with pytest.raises(IRError, match=r"outside of `A` at i = 4"):
        tcomp.build(s)


def test_what_a_loop_tests_and_how_it_steps_is_part_of_the_proof() -> None:
    """Of insertion sort all accesses are proved but for the last, which needs an invariant."""
    assert own_programs.guards(insertion_sort.kernel()) == 1


def test_a_variable_is_known_to_decrease_by_the_operator_that_updates_it_not_by_its_name() -> None:
    j, A, B = Buffer("j", "int64", (), "register"), Buffer("A", "float32", (4,)), Buffer("B", "float32", (8,))
    for reducer, guards in ((standard_reducers("int64")["sum"], 0), (replace(standard_reducers("int64")["prod"], name="sum"), 1)):
        step = L.block(L.If(0 <= j[()], loop("k", 1, lambda k: store(B, (k,), A[j[()]]))), L.Accumulate(j, (), E.const(-3), reducer))
        body = L.Allocate(j, L.block(store(j, (), 2), loop("i", 8, lambda _, step=step: step)))
        assert own_programs.guards(safe_kernel(Kernel("k", (A, B), (B,), (), body))[0]) == guards


# ---------------------------------------------------------------- the prover


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@example(N + E.select(X < E.minimum(X, Y), X, N), E.const(5), [])  # simplified, the index does not mention y
@given(INDICES, st.sampled_from([E.const(5), N, N * 2 + 1, N + Y + 3]), st.lists(CONDITIONS, max_size=2))
def test_verdicts_are_those_of_every_iteration(index: E.Expr, extent: E.Expr, conditions: list[E.Expr]) -> None:
    """X, I and J are loops, Y and N sizes. What is required of the sizes holds for exactly those that keep the index in range."""
    (at, defined), (limit, _) = values(index), values(extent)
    executed = np.ones(len(at), bool)
    for condition in conditions:
        holds, known = values(condition)
        executed &= np.asarray(holds, bool)
        defined = defined & known
    given_that(defined.all())
    outside = executed & ((at < 0) | (at >= limit))
    prover = in_range._Prover("", ())
    scope = in_range._Scope(((X, 6), (I, N), (J, as_dim(2 * N + 1))), tuple(simplify(c) for c in conditions))
    read = E.read(Buffer("A", "float32", (extent,)), (index,))
    sizes = {(int(y), int(n)) for y, n in zip(VALUES[Y], VALUES[N], strict=True)}
    of = {size: (VALUES[Y] == size[0]) & (VALUES[N] == size[1]) for size in sizes}
    try:
        doubtful = prover.doubtful(read, scope)
    except IRError:
        assert all(outside[of[s]].any() for s in sizes if executed[of[s]].any())
        return
    if doubtful:
        return
    for y, n in sizes:
        fails = own_programs._raises(OutOfRangeError, lambda y=y, n=n: [r.check({Y: y, N: n}) for r in prover.required()])
        assert fails == outside[of[y, n]].any()


def test_a_guard_keeps_the_identity_of_what_needs_none() -> None:
    x = te.placeholder((9,), name="x")
    kernel = tcomp.Schedule(te.compute((9,), lambda i: x[8 - i], name="y")).source
    assert safe_kernel(kernel)[0] is kernel and not any(isinstance(s, L.If) for s in L.walk(kernel.body))


# ---------------------------------------------------------------- random programs


def test_wrong_programs_are_refused_or_raise() -> None:
    for case in islice(own_programs.cases("quick", True), 60):
        assert own_programs.judge(case, native=True) in ("refused", "raises")


def test_right_programs_are_proved_and_run() -> None:
    for number, case in enumerate(islice(own_programs.cases("quick", False), 200)):
        assert own_programs.judge(case, native=number % 20 == 0) in ("proved", "guarded")
