"""Programs of loops: a Python function on arrays, its reference, its machine code, and an order that nobody wrote by hand.

A tensor expression says what each element is. Some programs are about order instead: a stencil that sweeps over one array in time, a
solver, a sort. They are written as plain loops. The same function runs in Python, and is compiled.
"""

import numpy as np

import tcomp
from tcomp.schedules.polyhedral import polyhedral
from tcomp.target import Target


@tcomp.program(A="float64[n, n]")
def seidel(steps: int, n: int, A: np.ndarray) -> None:
    """Gauss-Seidel: every element becomes the mean of its neighbourhood, in place, row by row."""
    for _t in range(steps):
        for i in range(1, n - 1):
            for j in range(1, n - 1):
                A[i, j] = (A[i - 1, j] + A[i, j - 1] + A[i, j] + A[i, j + 1] + A[i + 1, j]) / 5.0


# As Python, slowly: this is what the program means.
small = np.random.default_rng(0).standard_normal((12, 12))
reference = small.copy()
seidel(3, 12, reference)

# As loops. Sizes that are given become constants, the others are passed in a call.
kernel = seidel.kernel()
print(kernel)
compiled = tcomp.build(kernel)
result = small.copy()
compiled(result, steps=3)
np.testing.assert_allclose(result, reference, rtol=1e-12)

# No loop of this program may run in parallel, and tcomp says why: each element waits for its neighbours.
s = tcomp.Schedule(kernel)
try:
    s.parallel("i")
except tcomp.TcompError as error:
    print("refused:", error.why)

# But iterations along a diagonal do not wait for each other. isl finds such orders from the dependences; the order enters the schedule as one
# more step, proved like every other.
kernel = seidel.kernel(n=500, steps=200)
s = polyhedral(kernel, Target.host(), threads=2)
print(s.trace)
print("parallel loops:", [name for name, loop in s.loops.items() if loop.kind == "parallel"])

grid = np.random.default_rng(1).standard_normal((500, 500))
plain, skewed = grid.copy(), grid.copy()
tcomp.build(kernel)(plain)
tcomp.build(s, threads=2)(skewed)
np.testing.assert_array_equal(plain, skewed)  # the same bits: only the order changed
print("same bits in another order")


# Programs stay in their arrays. What leaves one in some iteration is refused, with that iteration; what depends on sizes or data is checked
# in the call, which raises IndexError as Python does.
@tcomp.program(A="float64[n]", B="float64[m]")
def shifted(n: int, m: int, A: np.ndarray, B: np.ndarray) -> None:
    """Copy all elements of A but the first into B."""
    for i in range(n - 1):
        B[i] = A[i + 1]


f = tcomp.build(shifted.kernel())
f(np.arange(5.0), np.zeros(4))
try:
    f(np.arange(5.0), np.zeros(3))
except IndexError as error:
    print("refused:", error)
