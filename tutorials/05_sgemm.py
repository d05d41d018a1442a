"""5. Schedule a matrix product by hand: as fast as the processor can multiply and add.

Run me:  python tutorials/05_sgemm.py
"""

import time

import numpy as np

import tcomp
from tcomp import te
from tcomp.calibration import peak_flops

# What is computed says nothing about how: a million sums of a thousand products.
N = 1024
A, B = te.placeholder((N, N), name="A"), te.placeholder((N, N), name="B")
k = te.reduce_axis(N, name="k")
C = te.compute((N, N), lambda i, j: te.sum(A[i, k] * B[k, j], axis=k), name="C")

# A core multiplies and adds two vectors a cycle, but loads only two a cycle and waits about four cycles for each sum. So every loaded
# vector must be used several times, by sums that do not wait for each other: a tile of sums that stay in registers. Six rows of four
# vectors of 16 floats are 24 sums; with one register for an element of A and four for a row of B, 29 of the 32 are in use. In each step
# along k, 4 loads and 6 broadcasts feed 24 multiply-adds.
target = tcomp.Target.host()
LANES = target.lanes(32)
ROWS, VECTORS = (6, 4) if target.vector_registers == 32 else (4, 2)
PANEL = VECTORS * LANES

s = tcomp.Schedule([A, B, C])

# 1. The tile. The sums go to a buffer of their own, T; C is only a copy of it. The copy is cut into panels of columns and, inside, tiles of
#    rows, and T is computed where one tile of it is needed. Its size is constant there: it fits in registers.
s.cache_write("C", "T")
rows, row = s.split("C.0", ROWS)
panel, columns = s.split("C.1", PANEL)
vector, lane = s.split(columns, LANES)
s.reorder(panel, rows, row, vector, lane)
s.compute_at("T", rows, "register")

# 2. The order inside the tile: k outside, so that each step along k updates all sums once. The loops over the tile are unrolled, because
#    registers have no addresses; the innermost 16 columns are one vector. First for the sums, then for what clears them, then for the copy.
sums, lanes = s.split("C.j", LANES)
s.reorder("C.k", "C.i", sums, lanes)
cleared, clear = s.split("C.init.j", LANES)
for loop in ("C.i", sums, "C.init.i", cleared, row, vector):
    s.unroll(loop)
for loop in (lanes, clear, lane):
    s.vectorize(loop)

# 3. Packing. A panel of B is 64 columns wide: 256 bytes here, then 4096 bytes further the next. Caches keep lines in sets by their address, and
#    addresses 4096 bytes apart compete for the same one; each row also lies on another page. Copied to one piece of memory the panel
#    (256 KiB) stays in the second-level cache while all rows of A pass by, and is read in order. That is why the panels are the outer loop.
s.cache_read("B", panel, "packed")
vectors, elements = s.split("packed.1", LANES)
s.unroll(vectors)
s.vectorize(elements)

# 4. Asking ahead. A step takes 12 cycles, the second-level cache some more to answer: rows of the panel are asked for 16 steps early.
s.prefetch("packed", "C.k", 16)

# 5. The tail. 1024 is no multiple of 6: the last tile would be cut by a condition in the innermost loop. Set apart, it leaves the others without.
if N % ROWS:
    s.partition(rows, N // ROWS)

print(f"{len(s.trace)} steps:\n")
print(s.trace)
f = tcomp.build(s, threads=1)

rng = np.random.default_rng(0)
a, b = rng.standard_normal((N, N), np.float32), rng.standard_normal((N, N), np.float32)
c = np.zeros((N, N), np.float32)
f(a, b, c)
assert np.allclose(c, a @ b, atol=1e-2)

# The peak is what a loop of nothing but multiply-adds reaches, in the same minute: clock rates change. Of each the best of several turns, in
# time of this thread: what other programs take is not counted.
peak, seconds = 0.0, []
for _ in range(8):
    peak = max(peak, peak_flops(target))
    for _ in range(5):
        start = time.thread_time()
        f(a, b, c)
        seconds.append(time.thread_time() - start)
speed = 2 * N**3 / min(seconds)
print(f"\n{speed / 1e9:.0f} GFLOP/s of {peak / 1e9:.0f} at one thread: {speed / peak:.0%} of the peak")
