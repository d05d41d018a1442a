"""BLAS-like kernels."""

from __future__ import annotations

import numpy as np

from tcomp.frontends.python import program

from .suite import SCALE, Arrays, Benchmark, indices


@program(C="float64[ni, nj]", A="float64[ni, nk]", B="float64[nk, nj]")
def gemm(ni, nj, nk, alpha: float, beta: float, C, A, B):
    """C = alpha A B + beta C"""
    for i in range(ni):
        for j in range(nj):
            C[i, j] *= beta
        for k in range(nk):
            for j in range(nj):
                C[i, j] += alpha * A[i, k] * B[k, j]


def init_gemm(ni: int, nj: int, nk: int) -> Arrays:
    (i, j), (p, q), (r, s) = indices(ni, nj), indices(ni, nk), indices(nk, nj)
    return {"C": (i * j + 1) % ni / ni, "A": p * (q + 1) % nk / nk, "B": r * (s + 2) % nj / nj}


@program(
    A="float64[n, n]", u1="float64[n]", v1="float64[n]", u2="float64[n]", v2="float64[n]", w="float64[n]", x="float64[n]", y="float64[n]",
    z="float64[n]",
)  # fmt: skip
def gemver(n, alpha: float, beta: float, A, u1, v1, u2, v2, w, x, y, z):
    """A += u1 v1' + u2 v2'; x = beta A' y + z; w = alpha A x"""
    for i in range(n):
        for j in range(n):
            A[i, j] = A[i, j] + u1[i] * v1[j] + u2[i] * v2[j]
    for i in range(n):
        for j in range(n):
            x[i] += beta * A[j, i] * y[j]
    for i in range(n):
        x[i] += z[i]
    for i in range(n):
        for j in range(n):
            w[i] += alpha * A[i, j] * x[j]


def init_gemver(n: int) -> Arrays:
    (i, j), (k,) = indices(n, n), indices(n)
    scaled = {name: (k + 1) / n / by for name, by in {"u2": 2, "v1": 4, "v2": 6, "y": 8, "z": 9}.items()}
    return {"A": i * j % n / n, "u1": k, **scaled}


@program(A="float64[n, n]", B="float64[n, n]", tmp="float64[n]", x="float64[n]", y="float64[n]")
def gesummv(n, alpha: float, beta: float, A, B, tmp, x, y):
    """y = alpha A x + beta B x"""
    for i in range(n):
        tmp[i] = 0.0
        y[i] = 0.0
        for j in range(n):
            tmp[i] += A[i, j] * x[j]
            y[i] += B[i, j] * x[j]
        y[i] = alpha * tmp[i] + beta * y[i]


def init_gesummv(n: int) -> Arrays:
    (i, j), (k,) = indices(n, n), indices(n)
    return {"x": k / n, "A": (i * j + 1) % n / n, "B": (i * j + 2) % n / n}


@program(C="float64[m, n]", A="float64[m, m]", B="float64[m, n]")
def symm(m, n, alpha: float, beta: float, C, A, B):
    """C = alpha A B + beta C with a symmetric A, of which the lower triangle is stored"""
    for i in range(m):
        for j in range(n):
            total = 0.0
            for k in range(i):
                C[k, j] += alpha * B[i, j] * A[i, k]
                total += B[k, j] * A[i, k]
            C[i, j] = beta * C[i, j] + alpha * B[i, j] * A[i, i] + alpha * total


def init_symm(m: int, n: int) -> Arrays:
    (i, j), (p, q) = indices(m, n), indices(m, m)
    return {"C": (i + j) % 100 / m, "B": (n + i - j) % 100 / m, "A": np.where(q <= p, (p + q) % 100 / m, -999)}


@program(C="float64[n, n]", A="float64[n, m]", B="float64[n, m]")
def syr2k(n, m, alpha: float, beta: float, C, A, B):
    """C = alpha (A B' + B A') + beta C, lower triangle"""
    for i in range(n):
        for j in range(i + 1):
            C[i, j] *= beta
        for k in range(m):
            for j in range(i + 1):
                C[i, j] += A[j, k] * alpha * B[i, k] + B[j, k] * alpha * A[i, k]


def init_syr2k(n: int, m: int) -> Arrays:
    (i, j), (p, q) = indices(n, m), indices(n, n)
    return {"A": (i * j + 1) % n / n, "B": (i * j + 2) % m / m, "C": (p * q + 3) % n / m}


@program(C="float64[n, n]", A="float64[n, m]")
def syrk(n, m, alpha: float, beta: float, C, A):
    """C = alpha A A' + beta C, lower triangle"""
    for i in range(n):
        for j in range(i + 1):
            C[i, j] *= beta
        for k in range(m):
            for j in range(i + 1):
                C[i, j] += alpha * A[i, k] * A[j, k]


def init_syrk(n: int, m: int) -> Arrays:
    (i, j), (p, q) = indices(n, m), indices(n, n)
    return {"A": (i * j + 1) % n / n, "C": (p * q + 2) % m / m}


@program(A="float64[m, m]", B="float64[m, n]")
def trmm(m, n, alpha: float, A, B):
    """B = alpha A' B with a lower triangular A whose diagonal is 1"""
    for i in range(m):
        for j in range(n):
            for k in range(i + 1, m):
                B[i, j] += A[k, i] * B[k, j]
            B[i, j] = alpha * B[i, j]


def init_trmm(m: int, n: int) -> Arrays:
    (i, j), (p, q) = indices(m, m), indices(m, n)
    return {"A": np.where(j < i, (i + j) % m / m, i == j), "B": (n + p - q) % n / n}


BENCHMARKS = (
    Benchmark("gemm", gemm, ("ni", "nj", "nk"), (20, 25, 30), (60, 70, 80), (1000, 1100, 1200), init_gemm, SCALE),
    Benchmark("gemver", gemver, ("n",), (40,), (120,), (2000,), init_gemver, SCALE),
    Benchmark("gesummv", gesummv, ("n",), (30,), (90,), (1300,), init_gesummv, SCALE),
    Benchmark("symm", symm, ("m", "n"), (20, 30), (60, 80), (1000, 1200), init_symm, SCALE),
    Benchmark("syr2k", syr2k, ("m", "n"), (20, 30), (60, 80), (1000, 1200), init_syr2k, SCALE),
    Benchmark("syrk", syrk, ("m", "n"), (20, 30), (60, 80), (1000, 1200), init_syrk, SCALE),
    Benchmark("trmm", trmm, ("m", "n"), (20, 30), (60, 80), (1000, 1200), init_trmm, {"alpha": SCALE["alpha"]}),
)
