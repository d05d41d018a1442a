"""11. Derivatives: the adjoint of a tensor expression is a tensor expression. Train a small network with them.

Run me:  python tutorials/11_derivatives.py
"""

import numpy as np

import tcomp
from tcomp import te
from tcomp.ir.te import print_te

# Tensors compute as NumPy's arrays do: shapes broadcast, `@` is the matrix product. Numbers are small so that the text below is short.
x, w, b = te.placeholder((4, 3), name="x"), te.placeholder((3, 2), name="w"), te.placeholder((2,), name="b")
y = te.tanh(x @ w + b)

# For each tensor of the second argument: the derivative of sum(y) by its elements. Each read is turned around: `w[k, j]`, read for all i,
# becomes a sum over i; `b[j]` a sum over i, too. What is computed anyway, `tanh` itself, is read instead of being computed again.
dw, db = te.vjp(y, [w, b])
print(print_te([dw, db]))

# A maximum over windows, and rows chosen by data. The first is turned around by isl: the windows that an element lies in are those whose
# place differs by less than their size. The second becomes a scatter: a loop that adds at places from data, in the order of the loop.
signal, rows = te.placeholder((9,), name="signal"), te.placeholder((3,), "int64", name="rows")
k = te.reduce_axis(3, name="k")
peaks = te.compute((4,), lambda i: te.max(signal[i * 2 + k], axis=k), "peaks")
chosen = te.compute((3,), lambda n: signal[te.maximum(te.minimum(te.cast(rows[n], "int64"), 8), 0)], "chosen")
print("\nof a maximum over windows:\n")
print(print_te([te.vjp(peaks, signal)]))
print("\nof rows chosen by data:\n")
print(print_te([te.vjp(chosen, signal)]))

# Forward mode, second derivatives, and a derivative for each part of a batch.
gradient = te.vjp(te.compute((), lambda: te.sum(signal[n := te.reduce_axis(9, "n")] * signal[n] * signal[n], axis=n)), signal)
direction = te.placeholder((9,), name="direction")
curvature = te.jvp(gradient, signal, direction)  # the Hessian times a direction: 6 * signal * direction
f = tcomp.build([signal, direction, curvature])
s, d = np.linspace(-1, 1, 9, dtype=np.float32), np.ones(9, np.float32)
assert np.allclose(f(s, d), 6 * s * d, atol=1e-5)
each = te.vmap(lambda row: te.vjp(te.tanh(row @ w), row))(x)
assert each.shape == (4, 3)

# A step of gradient descent is one function: loss, gradients by the weights, new weights. Learn the parity of two bits.
N, H = 4, 8
bits, target, rate = te.placeholder((N, 2), name="bits"), te.placeholder((N,), name="target"), 0.5
weights = [te.placeholder(shape, name=name) for name, shape in (("w1", (2, H)), ("b1", (H,)), ("w2", (H,)))]
w1, b1, w2 = weights
error = te.sigmoid(te.tanh(bits @ w1 + b1) @ w2) - target
n = te.reduce_axis(N, name="n")
loss = te.compute((), lambda: te.sum(error[n] * error[n], axis=n), "loss")
step = tcomp.build([bits, target, *weights, loss, *(p - rate * g for p, g in zip(weights, te.vjp(loss, weights), strict=True))])

inputs = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
parity = np.array([0, 1, 1, 0], np.float32)
rng = np.random.default_rng(0)
values = [rng.normal(size=p.shape).astype(np.float32) for p in weights]
for _ in range(2000):
    now, *values = step(inputs, parity, *values)
assert now < 0.01
print("\nlearned: the loss is below 0.01")
