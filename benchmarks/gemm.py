"""Square matrix products by the default schedule against NumPy's BLAS, one thread each, interleaved.

    python -m benchmarks.gemm [--sizes 512,1024,2048] [--rounds 15]

Prints GFLOP/s (best of the rounds; median in brackets) and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # read when NumPy is imported

import numpy as np

import tcomp
from tcomp import te


def product(n: int) -> Callable[..., np.ndarray]:
    a, b = te.placeholder((n, n), name="A"), te.placeholder((n, n), name="B")
    k = te.reduce_axis(n, name="k")
    c = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    return tcomp.build([a, b, c], threads=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", default="512,1024,2048")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print("   n    tcomp            NumPy's BLAS     tcomp / BLAS")
    for n in map(int, args.sizes.split(",")):
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((n, n), np.float32), rng.standard_normal((n, n), np.float32)
        contenders = [product(n), np.matmul]
        results = [f(a, b) for f in contenders]
        assert np.allclose(*results, atol=1e-3 * n**0.5)
        seconds: list[list[float]] = [[], []]
        for _ in range(args.rounds):
            for f, times in zip(contenders, seconds, strict=True):
                start = time.perf_counter()
                f(a, b)
                times.append(time.perf_counter() - start)
        work = 2e-9 * n**3
        rows = [f"{work / min(t):5.0f} ({work / np.median(t):5.0f})" for t in seconds]
        print(f"{n:5}   {rows[0]}    {rows[1]}    {np.median(seconds[1]) / np.median(seconds[0]):.2f}")


if __name__ == "__main__":
    main()
