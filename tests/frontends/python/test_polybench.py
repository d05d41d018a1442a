"""PolyBench's kernels at size MINI: right by formulas written another way, and the same in the interpreter and in machine code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.polybench import BENCHMARKS
from benchmarks.polybench.suite import Arrays
from tests.frontends.python.three_ways import check, plain

ALPHA, BETA = 1.5, 1.2


def symmetric(lower: np.ndarray) -> np.ndarray:
    return np.tril(lower) + np.tril(lower, -1).T


def gemver(A: Arrays) -> Arrays:
    matrix = A["A"] + np.outer(A["u1"], A["v1"]) + np.outer(A["u2"], A["v2"])
    x = BETA * matrix.T @ A["y"] + A["z"]
    return {"A": matrix, "x": x, "w": ALPHA * matrix @ x}


def symm(A: Arrays) -> Arrays:
    return {"C": ALPHA * symmetric(A["A"]) @ A["B"] + BETA * A["C"]}


def lower_update(product: Callable[[Arrays], np.ndarray]) -> Callable[[Arrays], Arrays]:
    """Only the lower triangle of C is updated."""
    return lambda A: {"C": np.triu(A["C"], 1) + np.tril(ALPHA * product(A) + BETA * A["C"])}


def trmm(A: Arrays) -> Arrays:
    return {"B": ALPHA * (np.tril(A["A"], -1) + np.eye(len(A["A"]))).T @ A["B"]}


def covariance(A: Arrays) -> Arrays:
    return {"cov": np.cov(A["data"].T), "mean": A["data"].mean(0)}


def correlation(A: Arrays) -> Arrays:
    """No column varies so little that its deviation would be taken for 1."""
    return {"corr": np.corrcoef(A["data"].T), "stddev": A["data"].std(0)}


def cholesky(A: Arrays) -> Arrays:
    return {"A": np.tril(np.linalg.cholesky(A["A"])) + np.triu(A["A"], 1)}


def durbin(A: Arrays) -> Arrays:
    r = A["r"]
    toeplitz = np.concatenate([r[-2::-1], [1.0], r[:-1]])  # element k - l at len(r) - 1 + k - l
    distance = np.subtract.outer(np.arange(len(r)), np.arange(len(r)))
    return {"y": np.linalg.solve(toeplitz[len(r) - 1 + distance], -r)}


def gramschmidt(A: Arrays) -> Arrays:
    """Q and R of the first columns; the others depend on them and are noise."""
    q, r = np.linalg.qr(A["A"][:, :2])
    signs = np.sign(np.diag(r))
    return {"Q": q * signs, "R": (r.T * signs).T}


def lu(A: Arrays) -> Arrays:
    work = A["A"].copy()
    for k in range(len(work)):
        work[k + 1 :, k] /= work[k, k]
        work[k + 1 :, k + 1 :] -= np.outer(work[k + 1 :, k], work[k, k + 1 :])
    return {"A": work}


def floyd_warshall(A: Arrays) -> Arrays:
    path = A["path"].copy()
    for k in range(len(path)):
        path = np.minimum(path, path[:, k : k + 1] + path[k])
    return {"path": path}


def nussinov(A: Arrays) -> Arrays:
    n, seq = len(A["seq"]), A["seq"]
    best = np.zeros((n + 1, n), np.int32)
    for span in range(1, n):
        for i in range(n - span):
            j = i + span
            pair = best[i + 1, j - 1] + (span > 1 and seq[i] + seq[j] == 3)
            best[i, j] = max(pair, *(best[i, k] + best[k + 1, j] for k in range(i, j)))
    return {"table": best[:n]}


def means(*offsets: tuple[int, ...], factor: float) -> Callable[[Arrays], Arrays]:
    """Jacobi's iteration, 20 steps there and back, over neighbours at the offsets."""

    def run(A: Arrays) -> Arrays:
        state = [A["A"].copy(), A["B"].copy()]
        inner = tuple(slice(1, -1) for _ in offsets[0])
        for step in range(40):
            source, target = state[step % 2], state[1 - step % 2]
            shifted = [source[tuple(slice(1 + d, n - 1 + d) for d, n in zip(o, source.shape, strict=True))] for o in offsets]
            target[inner] = factor * sum(shifted)
        return {"A": state[0], "B": state[1]}

    return run


def heat(A: Arrays) -> Arrays:
    state = [A["A"].copy(), A["B"].copy()]
    for step in range(40):
        source, target = state[step % 2], state[1 - step % 2]
        change = sum(
            np.diff(source, 2, axis=axis)[tuple(slice(None) if a == axis else slice(1, -1) for a in range(3))] for axis in range(3)
        )
        target[1:-1, 1:-1, 1:-1] = source[1:-1, 1:-1, 1:-1] + 0.125 * change
    return {"A": state[0], "B": state[1]}


def fdtd(A: Arrays) -> Arrays:
    ex, ey, hz = A["ex"].copy(), A["ey"].copy(), A["hz"].copy()
    for t in A["fict"]:
        ey[0] = t
        ey[1:] -= 0.5 * (hz[1:] - hz[:-1])
        ex[:, 1:] -= 0.5 * (hz[:, 1:] - hz[:, :-1])
        hz[:-1, :-1] -= 0.7 * (ex[:-1, 1:] - ex[:-1, :-1] + ey[1:, :-1] - ey[:-1, :-1])
    return {"ex": ex, "ey": ey, "hz": hz}


def seidel(A: Arrays) -> Arrays:
    """The values of a step as the solution of linear equations between its own and the old ones."""
    a, n = A["A"].copy(), len(A["A"])
    for _ in range(20):
        for i in range(1, n - 1):
            known = a[i - 1, :-2] + a[i - 1, 1:-1] + a[i - 1, 2:] + a[i, 1:-1] + a[i, 2:] + a[i + 1, :-2] + a[i + 1, 1:-1] + a[i + 1, 2:]
            matrix = 9 * np.eye(n - 2) - np.eye(n - 2, k=-1)
            known[0] += a[i, 0]
            a[i, 1:-1] = np.linalg.solve(matrix, known)
    return {"A": a}


def adi(A: Arrays) -> Arrays:
    """Each sweep solves tridiagonal systems whose ends are 1."""
    u, n, steps = A["u"].copy(), len(A["u"]), 20
    lam = [2.0 * n * n / steps, 1.0 * n * n / steps]

    def sweep(old: np.ndarray, implicit: float, explicit: float) -> np.ndarray:
        """One half step along axis 0 of `old`; its axis 1 is differenced explicitly."""
        matrix = (1 + implicit) * np.eye(n - 2) - implicit / 2 * (np.eye(n - 2, k=1) + np.eye(n - 2, k=-1))
        right = explicit / 2 * old[1:-1, :-2] + (1 - explicit) * old[1:-1, 1:-1] + explicit / 2 * old[1:-1, 2:]
        right[[0, -1]] += implicit / 2
        return np.linalg.solve(matrix, right)

    v = np.zeros_like(u)
    v[[0, -1], 1:-1] = 1
    for _ in range(steps):
        v[1:-1, 1:-1] = sweep(u, *lam)
        u[1:-1, [0, -1]] = 1
        u[1:-1, 1:-1] = sweep(v.T, lam[1], lam[0]).T
    return {"u": u, "v": v}


def deriche(A: Arrays) -> Arrays:
    """Two recursions along an axis, there and back, added; then along the other axis."""
    e, alpha = np.exp(-0.25), 0.25
    k = (1 - e) ** 2 / (1 + 2 * alpha * e - np.exp(2 * alpha))
    forward, backward = (k, k * e * (alpha - 1)), (k * e * (alpha + 1), -k * e * e)

    def both(rows: np.ndarray) -> np.ndarray:
        n = rows.shape[1]
        recursion = np.eye(n) - 2**-alpha * np.eye(n, k=-1) + e * e * np.eye(n, k=-2)
        there = forward[0] * rows + forward[1] * np.pad(rows, ((0, 0), (1, 0)))[:, :n]
        flipped = rows[:, ::-1]
        back = backward[0] * np.pad(flipped, ((0, 0), (1, 0)))[:, :n] + backward[1] * np.pad(flipped, ((0, 0), (2, 0)))[:, :n]
        return np.linalg.solve(recursion, there.T).T + np.linalg.solve(recursion, back.T).T[:, ::-1]

    return {"out": both(both(A["image"].astype(np.float64)).T).T}


FORMULAS: dict[str, Callable[[Arrays], Arrays]] = {
    "correlation": correlation,
    "covariance": covariance,
    "gemm": lambda A: {"C": ALPHA * A["A"] @ A["B"] + BETA * A["C"]},
    "gemver": gemver,
    "gesummv": lambda A: {"y": ALPHA * A["A"] @ A["x"] + BETA * A["B"] @ A["x"]},
    "symm": symm,
    "syr2k": lower_update(lambda A: A["A"] @ A["B"].T + A["B"] @ A["A"].T),
    "syrk": lower_update(lambda A: A["A"] @ A["A"].T),
    "trmm": trmm,
    "2mm": lambda A: {"D": ALPHA * A["A"] @ A["B"] @ A["C"] + BETA * A["D"]},
    "3mm": lambda A: {"G": A["A"] @ A["B"] @ A["C"] @ A["D"]},
    "atax": lambda A: {"y": A["A"].T @ (A["A"] @ A["x"])},
    "bicg": lambda A: {"s": A["A"].T @ A["r"], "q": A["A"] @ A["p"]},
    "doitgen": lambda A: {"A": A["A"] @ A["C4"]},
    "mvt": lambda A: {"x1": A["x1"] + A["A"] @ A["y1"], "x2": A["x2"] + A["A"].T @ A["y2"]},
    "cholesky": cholesky,
    "durbin": durbin,
    "gramschmidt": gramschmidt,
    "lu": lu,
    "ludcmp": lambda A: {"x": np.linalg.solve(A["A"], A["b"])},
    "trisolv": lambda A: {"x": np.linalg.solve(A["L"], A["b"])},
    "deriche": deriche,
    "floyd-warshall": floyd_warshall,
    "nussinov": nussinov,
    "adi": adi,
    "fdtd-2d": fdtd,
    "heat-3d": heat,
    "jacobi-1d": means((-1,), (0,), (1,), factor=0.33333),
    "jacobi-2d": means((0, 0), (0, -1), (0, 1), (1, 0), (-1, 0), factor=0.2),
    "seidel-2d": seidel,
}


def test_all_thirty() -> None:
    assert list(BENCHMARKS) == list(FORMULAS) and len(BENCHMARKS) == 30


@pytest.mark.parametrize("name", FORMULAS)
def test_computes_what_its_definition_says(name: str) -> None:
    benchmark = BENCHMARKS[name]
    sizes = benchmark.sizes("mini")
    arrays = benchmark.arrays(sizes)
    results = plain(benchmark.program, arrays, {**sizes, **benchmark.constants})
    tolerance = 1e-4 if name == "deriche" else 1e-9
    for output, expected in FORMULAS[name](arrays).items():
        found = results[output][tuple(slice(n) for n in expected.shape)]
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max(), err_msg=output)


@pytest.mark.parametrize("fix", [False, True], ids=["symbolic", "fixed"])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_runs_the_same_everywhere(name: str, fix: bool) -> None:
    benchmark = BENCHMARKS[name]
    sizes = benchmark.sizes("mini")
    numbers = {**sizes, **benchmark.constants}
    arrays = benchmark.arrays(sizes)
    rtol = 2e-4 if name == "deriche" else 1e-9
    check(benchmark.program, arrays, numbers, numbers if fix else benchmark.constants, rtol, benchmark.results)
