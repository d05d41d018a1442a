"""9. An image pipeline as tensor expressions: stages that read windows of each other, computed tile by tile.

Run me:  python tutorials/09_image_pipeline.py
"""

import time
from collections.abc import Callable

import numpy as np

import tcomp
from tcomp import te
from tcomp.schedules.cpu import default as cpu
from tcomp.schedules.schedule import kernel_of
from tcomp.target import CpuTarget

# An unsharp mask: the image is blurred along its rows, then along its columns, and what the blur took away is added once more.
H, W = 1080, 1920
WEIGHTS = (1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16)
image = te.placeholder((H, W), name="image")


def clamped(i: te.Expr, n: int) -> te.Expr:
    """Beyond its edges, an image goes on as it ends."""
    return te.minimum(te.maximum(i, 0), n - 1)


def weighted(at: Callable[[int], te.Expr]) -> te.Expr:
    terms = [at(k - 2) * w for k, w in enumerate(WEIGHTS)]
    return sum(terms[1:], terms[0])


blur_x = te.compute((H, W), lambda y, x: weighted(lambda k: image[y, clamped(x + k, W)]), name="blur_x")
blur_y = te.compute((H, W), lambda y, x: weighted(lambda k: blur_x[clamped(y + k, H), x]), name="blur_y")
mask = te.compute((H, W), lambda y, x: te.maximum(image[y, x] * 2.0 - blur_y[y, x], 0.0), name="mask")

# Lowered, stages that are read at several places are kept in buffers; what is read at one place only (`blur_y`) is computed there.
kernel = kernel_of(mask)
print(kernel)

# Stage by stage, `blur_x` would go to memory and come back. The default schedule sees that `mask` reads a window of it, and computes the
# part that a tile of `mask` needs just before: `compute_at` finds out how large that part is. Rows of tiles run in parallel.
schedule = cpu.schedule(kernel, CpuTarget.parse("cpu -mcpu=skylake-avx512 -cores=2"))
print(schedule.trace)
print("parallel loops:", [name for name, loop in schedule.loops.items() if loop.kind == "parallel"])
print("kept of blur_x at a time:", next(b for name, b in schedule.stages.items() if name == "blur_x").shape)

# The same pipeline, each stage as a whole, by hand: every step is one that anybody may take.
stages = tcomp.Schedule(kernel)
for stage in ("blur_x", "mask"):
    stages.vectorize(f"{stage}.x", 16)
    stages.parallel(f"{stage}.y")

pixels = np.random.default_rng(0).random((H, W), dtype=np.float32)
padded = np.pad(pixels, 2, mode="edge")
rows = np.sum([w * padded[:, k : k + W] for k, w in enumerate(WEIGHTS)], axis=0)
expected = np.maximum(pixels * 2 - np.sum([w * rows[k : k + H] for k, w in enumerate(WEIGHTS)], axis=0), 0)

best = {}
for name, f in (("tiles", tcomp.build(mask)), ("stages", tcomp.build(stages))):
    result = np.zeros((H, W), np.float32)
    best[name] = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        f(pixels, result)
        best[name] = min(best[name], time.perf_counter() - start)
    np.testing.assert_allclose(result, expected, atol=1e-5)
print("right; " + ", ".join(f"{name}: {1e3 * seconds:.2f} ms" for name, seconds in best.items()))
