"""The analytic model of the machine against the clock: schedules of one matrix product and of one stencil, ranked by both.

    python -m benchmarks.model [--size 512] [--rounds 7]

For each schedule the predicted and the measured time at one thread (the least of the rounds, which take turns, in time of the thread);
then Spearman's rank correlation of the two. The model is given the rates measured by `tcomp.calibration`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

import tcomp
from tcomp import Schedule, te
from tcomp.calibration import measured
from tcomp.ir.expr import Expr
from tcomp.schedules.cost.cpu import estimate
from tcomp.target import Target

from .timing import least_by_clocks, rank_correlation

LANES = Target.host().lanes(32)


def products(n: int) -> Iterator[tuple[str, Schedule]]:
    """An n x n matrix product: loop orders, vector lanes, register tiles."""
    for order in ("ijk", "ikj", "jki"):
        s = product(n)
        s.reorder(*(f"C.{x}" for x in order))
        yield f"order {order}", s
    s = product(n)
    _, lane = s.split("C.j", LANES)
    s.reorder("C.i", "C.k", "C.j.o", lane)
    s.vectorize(lane)
    yield "order ikj, vectors", s
    for rows, vectors in ((1, 1), (2, 1), (4, 1), (1, 4), (4, 2), (8, 2), (4, 4), (16, 1), (8, 4), (16, 4)):
        yield f"tile {rows} x {vectors}", tiled(n, rows, vectors)
    for rows, vectors in ((1, 1), (4, 2), (8, 2), (4, 4), (16, 1), (8, 4)):
        s = tiled(n, rows, vectors)
        s.cache_read("B", "C.1.o", "packed")
        _, lane = s.split("packed.1", LANES)
        s.vectorize(lane)
        yield f"tile {rows} x {vectors}, packed", s


def product(n: int) -> Schedule:
    a, b = te.placeholder((n, n), name="A"), te.placeholder((n, n), name="B")
    k = te.reduce_axis(n, name="k")
    return Schedule([a, b, te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")])


def tiled(n: int, rows: int, vectors: int) -> Schedule:
    """Sums of `rows` x `vectors` vectors in registers; the tutorial on SGEMM explains the steps."""
    s = product(n)
    s.cache_write("C", "T")
    outer, row = s.split("C.0", rows)
    panel, columns = s.split("C.1", vectors * LANES)
    vector, lane = s.split(columns, LANES)
    s.reorder(panel, outer, row, vector, lane)
    s.compute_at("T", outer, "register")
    sums, sum_lane = s.split("C.j", LANES)
    s.reorder("C.k", "C.i", sums, sum_lane)
    cleared, clear_lane = s.split("C.init.j", LANES)
    for x in ("C.i", sums, "C.init.i", cleared, row, vector):
        s.unroll(x)
    for x in (sum_lane, clear_lane, lane):
        s.vectorize(x)
    return s


def stencils(n: int) -> Iterator[tuple[str, Schedule]]:
    """The mean of five neighbours in an n x n image: orders, vectors, tiles, unrolling."""
    yield "rows", stencil(n)
    s = stencil(n)
    s.reorder("B.j", "B.i")
    yield "columns", s
    for lanes in (4, LANES, 4 * LANES):
        yield f"{lanes} lanes", vectorized(n, lanes)
    for height in (2, 4, 8):
        s = vectorized(n, LANES)
        outer, inner = s.split("B.i", height)
        s.reorder(outer, "B.j.o", inner, "B.j.i")
        s.unroll(inner)
        yield f"{height} rows unrolled", s
    for tile in (8, 64):
        s = vectorized(n, LANES)
        outer, inner = s.split("B.j.o", tile)
        s.reorder(outer, "B.i", inner, "B.j.i")
        yield f"strips of {tile} vectors", s
    s = vectorized(n, LANES)
    s.reorder("B.j.o", "B.i", "B.j.i")
    yield "columns of vectors", s
    s = stencil(n)
    _, lane = s.split("B.i", LANES)
    s.reorder("B.i.o", "B.j", lane)
    s.vectorize(lane)
    yield "lanes down", s


def stencil(n: int) -> Schedule:
    a = te.placeholder((n + 2, n + 2), name="A")

    def mean(i: Expr, j: Expr) -> Expr:
        return (a[i, j + 1] + a[i + 1, j] + a[i + 1, j + 1] + a[i + 1, j + 2] + a[i + 2, j + 1]) * 0.2

    return Schedule([a, te.compute((n, n), mean, name="B")])


def vectorized(n: int, lanes: int) -> Schedule:
    s = stencil(n)
    _, lane = s.split("B.j", lanes)
    s.vectorize(lane)
    return s


def compare(title: str, candidates: Sequence[tuple[str, Schedule]], rounds: int) -> None:
    target, core = Target.host(), measured()
    estimates = [estimate(s.kernel, target, core=core) for _, s in candidates]
    functions = [tcomp.build(s, threads=1) for _, s in candidates]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([int(n) for n in b.shape], np.float32) for b in candidates[0][1].kernel.buffers]
    calls = {str(n): partial(f, *arrays) for n, f in enumerate(functions)}
    least = [found for (found,) in least_by_clocks(calls, [time.thread_time], rounds).values()]
    print(f"\n{title:<32}{'predicted':>12}{'measured':>12}{'of bound':>10}")
    for (name, _), e, seconds in sorted(zip(candidates, estimates, least, strict=True), key=lambda row: row[2]):
        print(f"{name:<32}{e.time * 1e3:>9.3f} ms{seconds * 1e3:>9.3f} ms{e.bound / seconds:>10.0%}")
    print(f"rank correlation {rank_correlation([e.time for e in estimates], least):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", type=int, default=512, help="of the matrices; images are four times as wide")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    compare(f"product of {args.size} x {args.size}", list(products(args.size)), args.rounds)
    compare(f"stencil on {4 * args.size} x {4 * args.size}", list(stencils(4 * args.size)), args.rounds)


if __name__ == "__main__":
    main()
