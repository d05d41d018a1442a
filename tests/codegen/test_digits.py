"""Quotients and remainders that are counted from one iteration to the next are those that a division gives."""

import numpy as np
import pytest

from tcomp.codegen.llvm.digits import digits
from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import For
from tcomp.ir.text.parser import parse_kernel
from tests.codegen.jit import HOST, compile_kernel

KERNEL = """
kernel k<a{0..}, b{0..}, n{0..}>(A: int64[a], B: int64[b], C: int64[n, 5]) -> (C) {
  KIND i in 0..n {
    C[i, 0] = i % b
    C[i, 1] = i // b % a
    C[i, 2] = i // b // a
    C[i, 3] = i // 3 % (b + 1)
    C[i, 4] = (i + 1) // b + i // 3 // (b + 1) + i // a
  }
}
"""


def kernel(kind):
    return parse_kernel(KERNEL.replace("KIND", kind))


def test_what_is_counted():
    """A constant divides a number where a size divides the quotient; a sum is no number that is counted."""
    made = kernel("for")
    assert isinstance(made.body, For)
    found = digits(made.body, {d for b in made.buffers for d in b.shape if not isinstance(d, int)})
    assert [str(d.remainder) for d in found] == ["i % b", "i // b % a", "i % 3", "i // 3 % (b + 1)", "i % a"]
    assert digits(made.body, ()) == digits(made.body, made.scalars) == found


@pytest.mark.parametrize("kind", ["for", "parallel"])
def test_as_divided(kind):
    made = kernel(kind)
    run = compile_kernel(made)
    for a, b, n in ((2, 3, 20), (1, 1, 7), (5, 7, 3), (3, 40, 300), (0, 4, 9), (4, 0, 9), (0, 0, 5), (1, 2, 0), (3, 2, 20_000)):
        arrays = [np.zeros(a, np.int64), np.zeros(b, np.int64), np.full((n, 5), -1)]
        expected = [x.copy() for x in arrays]
        run(*arrays, a, b, n)
        if n <= 300:
            run_kernel(made, dict(zip(made.buffers, expected, strict=True)))
            np.testing.assert_array_equal(arrays[2], expected[2])
        else:  # a loop that asks at times whether to stop, by the formula
            i = np.arange(n)
            sums = (i + 1) // b + i // 3 // (b + 1) + i // a
            np.testing.assert_array_equal(arrays[2], np.stack([i % b, i // b % a, i // b // a, i // 3 % (b + 1), sums], 1))


def test_no_division_is_left_in_the_loop():
    text = emit_kernel(
        parse_kernel("""
kernel k<h{1..}, w{1..}>(A: float32[h, w], B: float32[h * w]) -> (B) {
  for i in 0..(h * w) {
    B[i] = A[i // w, i % w] * 2.0f
  }
}
"""),
        HOST,
    )
    body = text.partition("\npart")[2]
    assert "getelementptr" in body and "urem" not in body and "udiv" not in body
