"""The interpreter of loop programs: values, and what it must not let pass."""

import numpy as np
import pytest

from tcomp.errors import InputError, IRError
from tcomp.ir import expr as E, loops as L
from tcomp.ir.dtypes import FLOATS, SIGNED, UNSIGNED, integer_range, is_float, to_numpy
from tcomp.ir.expr import reduce
from tcomp.ir.interpreters import semantics
from tcomp.ir.interpreters.loops import run_kernel, run_stmt
from tcomp.ir.reducers import standard_reducers
from tcomp.ir.text.parser import parse_kernel

_FLOATS, _INTEGERS = list(FLOATS), [*SIGNED, *UNSIGNED]
A, B = L.Buffer("A", "float32", (4,)), L.Buffer("B", "float32", (4,))


def run(text, shuffle=None, scalars=None, **arrays):
    kernel = parse_kernel(text)
    run_kernel(kernel, {b: arrays[b.name] for b in kernel.buffers}, scalars, shuffle)
    return arrays


MATMUL = """
kernel matmul<M{1..}, K{1..}>(A: float32[M, K], B: float32[K, 3], C: float32[M, 3]) -> (C) {
  parallel i in 0..M {
    alloc acc: float32[3] register
    vectorized j in 0..3 {
      acc[j] = 0.0f
    }
    for k in 0..K {
      vectorized j2 in 0..3 {
        acc[j2] += A[i, k] * B[k, j2]
      }
    }
    unrolled j3 in 0..3 {
      C[i, j3] = acc[j3]
    }
  }
}"""


@pytest.mark.parametrize("shuffle", [None, 1])
def test_matmul(shuffle):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(5, 4)).astype(np.float32), rng.normal(size=(4, 3)).astype(np.float32)
    got = run(MATMUL, shuffle, A=a, B=b, C=np.zeros((5, 3), np.float32))["C"]
    np.testing.assert_allclose(got, a @ b, rtol=1e-5, atol=1e-6)


def test_accumulate_while_and_integers():
    text = """
kernel digits(X: int64[], N: int32[], S: uint8[]) -> (X, N, S) {
  while 0 < X[] {
    S[] += uint8(X[] % 10) * 100u8
    N[] max= int32(X[] % 10)
    X[] = X[] // 10
  }
}"""
    got = run(text, X=np.array(90417), N=np.array(-1, np.int32), S=np.array(0, np.uint8))
    assert got["N"] == 9 and got["S"] == 21 * 100 % 256 and got["X"] == 0


def test_branches_and_dims():
    text = """
kernel clip<n{1..9}>(A: float32[n]) -> (A) {
  for i in 0..n {
    if i < n // 2 {
      A[i] = 0.0f
    } else {
      A[i] = float32(n)
    }
  }
}"""
    np.testing.assert_array_equal(run(text, A=np.ones(5, np.float32))["A"], [0, 0, 5, 5, 5])


def test_shared_sub_expressions_are_computed_only_where_chosen():
    v = E.loop_var("i", 4)
    beyond = A[v + 1] * 2.0
    value = E.select(v < 3, beyond + beyond, 0.0)
    out = np.zeros(4, np.float32)
    run_stmt(L.For(v, 4, L.Store(B, (v,), value)), {A: np.arange(4, dtype=np.float32), B: out})
    np.testing.assert_array_equal(out, [4, 8, 12, 0])


def test_cached_values_do_not_outlive_a_statement():
    text = """
kernel twice(A: float32[3]) -> (A) {
  for i in 0..3 {
    A[0] = (A[0] + 1.0f) * (A[0] + 1.0f)
  }
}"""
    np.testing.assert_array_equal(run(text, A=np.zeros(3, np.float32))["A"], [25, 0, 0])


def test_a_race_shows_in_shuffled_order():
    text = """
kernel race(A: float32[64]) -> (A) {
  parallel i in 0..63 {
    A[i + 1] = A[i] + 1.0f
  }
}"""
    serial, shuffled = (run(text, s, A=np.zeros(64, np.float32))["A"] for s in (None, 3))
    assert serial[63] == 63 and shuffled[63] != 63


def test_an_allocation_is_new_each_time():
    text = """
kernel fresh(A: float32[2]) -> (A) {
  for i in 0..2 {
    alloc t: float32[1] register
    if i == 0 {
      t[0] = 1.0f
    }
    A[i] = t[0]
  }
}"""
    with pytest.raises(IRError, match=r"reads t\[0\]\n.*i = 1\n.*has not been written"):
        run(text, A=np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("stmt", "message"),
    [
        (  # the same variable in two nests
            L.block(L.loop("i", 5, lambda i: L.store(A, (i,), 0.0)), L.loop("i", 5, lambda i: L.store(A, (i - 1,), 0.0))),
            r"stores to A\[4\]\n  where: loops i = 4",
        ),
        (L.loop("i", 5, lambda i: L.store(A, (i,), 0.0)), r"stores to A\[4\]\n  where: loops i = 4\n  why: its shape is \(4,\)"),
        (L.loop("i", 4, lambda i: L.store(A, (0,), A[i - 1])), r"reads A\[-1\]"),
        (L.store(A, (0,), B[0]), "`B` is used outside of its allocation"),
        (L.store(A, (E.var("q"),), 0.0), "the variable `q` has no value"),
        (L.Store(A, (E.const(0),), reduce(standard_reducers("float32")["sum"], A[0], [E.loop_var("k", 2)])), "`reduce`"),
        (L.Accumulate(A, (E.const(4),), A[0], standard_reducers("float32")["sum"]), r"reads A\[4\]"),
    ],
)
def test_refused(stmt, message):
    with pytest.raises(IRError, match=message):
        run_stmt(stmt, {A: np.zeros(4, np.float32)})


def test_wrong_arrays():
    kernel = parse_kernel("kernel k<n{1..}>(A: float32[n], B: float32[n]) -> (B) { B[0] = A[0] }")
    a, b = kernel.buffers
    with pytest.raises(InputError, match="no array for the buffer `B`"):
        run_kernel(kernel, {a: np.zeros(2, np.float32)})
    with pytest.raises(InputError, match="dimension 0 of `B` is 3 instead of 2"):
        run_kernel(kernel, {a: np.zeros(2, np.float32), b: np.zeros(3, np.float32)})
    with pytest.raises(InputError, match="`B` is float64 instead of float32"):
        run_kernel(kernel, {a: np.zeros(2, np.float32), b: np.zeros(2)})


def test_undefined_results():
    stmt = L.store(A, (0,), A[1])
    with pytest.raises(IRError, match="has not been written"):
        run_stmt(stmt, {A: np.zeros(4, np.float32)}, undefined=[A])


@pytest.mark.parametrize("source", [*_FLOATS, *_INTEGERS])
def test_casts_of_scalars_equal_casts_of_arrays(source: str) -> None:
    """Ties, overflows, numbers that no double holds: element by element as `semantics.cast` converts all at once."""
    if source in _FLOATS:
        rng = np.random.default_rng(0)
        special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65519.0, 65520.0, 1 + 2**-8, 1 + 2**-9 + 2**-30]
        values = [*(rng.standard_normal(100) * 10.0 ** rng.integers(-9, 9, 100)), *special]
    else:
        lo, hi = integer_range(source)
        values = [n for n in (lo, hi, 0, 1, 2**24 + 1, 2**31 - 1, 2**53, 2**53 + 1, 2**62 + 2**38 + 1) if lo <= n <= hi]
    for dtype in (*_FLOATS, *_INTEGERS, "bool"):
        with np.errstate(all="ignore"):
            given = np.array(values).astype(to_numpy(source))
            wanted = semantics.cast(given, dtype)
        x, y, i = L.Buffer("x", source, (len(values),)), L.Buffer("y", dtype, (len(values),)), E.loop_var("i", len(values))
        found = np.zeros(len(values), to_numpy(dtype))
        body = L.For(i, len(values), L.store(y, (i,), E.cast(x[i], dtype)))
        run_kernel(L.Kernel("k", (x, y), (y,), (), body), {x: given, y: found})
        exact = np.float64 if is_float(dtype) else None  # NumPy takes no NaN of bfloat16 for another
        np.testing.assert_array_equal(np.asarray(found, exact), np.asarray(wanted, exact))
