"""4. Write a schedule: shape the loops of a program yourself, be kept from changing what it computes, save the steps, prove them anew.

Run me:  python tutorials/04_schedules.py
"""

import tempfile
import time
from pathlib import Path

import numpy as np

import tcomp
from tcomp import te
from tcomp.schedules.schedule import prove

# A blur of three neighbours, down the columns and then across the rows. What is computed says nothing about how.
H, W = 1200, 1600
image = te.placeholder((H + 2, W + 2), name="image")
p, q = te.reduce_axis(3, name="p"), te.reduce_axis(3, name="q")
down = te.compute((H, W + 2), lambda y, x: te.sum(image[y + p, x], axis=p), name="down")
across = te.compute((H, W), lambda y, x: te.sum(down[y, x + q], axis=q), name="across")
blur = te.compute((H, W), lambda y, x: across[y, x] * (1 / 9), name="blur")

# 1. The loops before any schedule: the sums of the whole image are stored, and read again when they have left every cache.
plain = tcomp.Schedule(blur)
print(plain)

# 2. Every step is a method; its `help` says when it is legal and what it is good for. Loops are named by their variables, stages by their
#    buffers. Names last: no step on one loop changes the name of another.
s = tcomp.Schedule(blur)
bands, row = s.split("blur.y", 8)
s.parallel(bands)  # bands of eight rows, shared among the threads
print("\nThe loops now:", ", ".join(f"{name} ({loop.kind}, {loop.extent})" for name, loop in s.loops.items()))

# 3. A step that would change the result is refused, with two iterations that show why; the schedule stays as it was.
try:
    s.parallel("across.q")
except tcomp.ScheduleError as error:
    print("\nRefused:", error.why)

# 4. The sums of a row are computed when the row is, so that they are still in the first cache; 16 neighbours at a time.
s.compute_at("across", row)
s.compute_at("down", row)
for stage in ("down.init", "down", "across.init", "across", "blur"):
    _, lanes = s.split(f"{stage}.x", 16, tail="mask")
    s.vectorize(lanes)
s.unroll("down.p")
s.unroll("across.q")
print("\nThe row of a band:", s.loops[row], sep="\n")

# 5. The steps are data. They print as the Python that repeats them, and compare.
other = tcomp.Schedule(blur)
other.split("blur.y", 16)
other.replay(s.trace[1:4])
print("\nThe first four steps, and those of another schedule:", s.trace[:4].diff(other.trace, "s", "other"), sep="\n")

# 6. They are saved with the plain loops that they start from, and proved anew: isl judges every step.
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "blur.json"
    path.write_text(s.to_json())
    again = tcomp.Schedule.from_json(path.read_text())
    assert str(again) == str(s)
    proof = prove(again.source, again.trace)  # in a shell: tcomp verify --proofs blur.json
    print(f"\n{proof.proved} of {proof.steps} steps proved in {1000 * proof.seconds:.0f} ms")

# 7. Machine code of a schedule works on arrays in place, in the order of the kernel's buffers.
x = np.random.default_rng(0).random((H + 2, W + 2), np.float32)
results = [np.zeros((H, W), np.float32) for _ in range(2)]
for title, schedule, y in (("plain", plain, results[0]), ("scheduled", s, results[1])):
    f, seconds = tcomp.build(schedule), list[float]()
    for _run in range(6):
        start = time.perf_counter()
        f(x, y)
        seconds.append(time.perf_counter() - start)
    print(f"{title}: {1000 * min(seconds):.1f} ms")
print("The same bits:", np.array_equal(results[0], results[1]))
