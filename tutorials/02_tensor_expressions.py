"""2. Write an operator as a tensor expression, look at its loops, and build it.

Run me:  python tutorials/02_tensor_expressions.py
"""

import numpy as np

import tcomp
from tcomp import te
from tcomp.schedules.cpu import default as cpu
from tcomp.schedules.lowering import lower
from tcomp.target import CpuTarget

# What is computed, element by element: relu(A B + bias).
M, K, N = 100, 64, 72
A, B, bias = te.placeholder((M, K), name="A"), te.placeholder((K, N), name="B"), te.placeholder((N,), name="bias")
k = te.reduce_axis(K, name="k")
C = te.compute((M, N), lambda i, j: te.sum(A[i, k] * B[k, j], axis=k), name="C")
D = te.compute((M, N), lambda i, j: te.maximum(C[i, j] + bias[j], 0.0), name="D")

# The plain loops: one nest clears, one accumulates, one finishes.
plain = lower("gemm", [A, B, bias], [D])
print("As lowered:\n")
print(plain)

# The default schedule looks at the structure: A and B are multiplied and summed over k; B is contiguous along j, A does not depend on j.
# So j runs in vector lanes, rows of A share each vector of B, and a tile of sums stays in registers.
schedule = cpu.schedule(plain, CpuTarget.parse("cpu -mcpu=skylake-avx512"))
print("\nThe steps of the default schedule:\n")
for step in schedule.trace:
    print(" ", step)
print("\nThe loops they make:\n")
print(schedule.kernel)

# `build` does all this for this machine and returns a function of arrays.
f = tcomp.build([A, B, bias, D])
rng = np.random.default_rng(0)
a, b, c = (rng.standard_normal(shape, np.float32) for shape in ((M, K), (K, N), (N,)))
assert np.allclose(f(a, b, c), np.maximum(a @ b + c, 0), atol=1e-4)
print("\nright")
