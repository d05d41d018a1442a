"""Decompositions and solvers of linear systems."""

from __future__ import annotations

import math

import numpy as np

from tcomp.frontends.python import program

from .suite import Arrays, Benchmark, indices


@program(A="float64[n, n]")
def cholesky(n, A):
    """A = L L', L in the lower triangle"""
    for i in range(n):
        for j in range(i):
            for k in range(j):
                A[i, j] -= A[i, k] * A[j, k]
            A[i, j] /= A[j, j]
        for k in range(i):
            A[i, i] -= A[i, k] * A[i, k]
        A[i, i] = math.sqrt(A[i, i])


def init_positive(n: int) -> Arrays:
    """A positive definite matrix."""
    i, j = indices(n, n)
    lower = np.where(j < i, 1 - j / n, i == j)
    return {"A": lower @ lower.T}


@program(r="float64[n]", y="float64[n]")
def durbin(n, r, y):
    """Solves the Yule-Walker equations by recursion over their order"""
    z = np.empty(n)
    y[0] = -r[0]
    beta = 1.0
    alpha = -r[0]
    for k in range(1, n):
        beta = (1.0 - alpha * alpha) * beta
        total = 0.0
        for i in range(k):
            total += r[k - i - 1] * y[i]
        alpha = -(r[k] + total) / beta
        for i in range(k):
            z[i] = y[i] + alpha * y[k - i - 1]
        for i in range(k):
            y[i] = z[i]
        y[k] = alpha


def init_durbin(n: int) -> Arrays:
    (i,) = indices(n)
    return {"r": n + 1 - i}


@program(A="float64[m, n]", R="float64[n, n]", Q="float64[m, n]")
def gramschmidt(m, n, A, R, Q):
    """A = Q R by the modified Gram-Schmidt process"""
    for k in range(n):
        norm = 0.0
        for i in range(m):
            norm += A[i, k] * A[i, k]
        R[k, k] = math.sqrt(norm)
        for i in range(m):
            Q[i, k] = A[i, k] / R[k, k]
        for j in range(k + 1, n):
            R[k, j] = 0.0
            for i in range(m):
                R[k, j] += Q[i, k] * A[i, j]
            for i in range(m):
                A[i, j] -= Q[i, k] * R[k, j]


def init_gramschmidt(m: int, n: int) -> Arrays:
    i, j = indices(m, n)
    return {"A": i * j % m / m * 100 + 10}


@program(A="float64[n, n]")
def lu(n, A):
    """A = L U in place, without pivoting"""
    for i in range(n):
        for j in range(i):
            for k in range(j):
                A[i, j] -= A[i, k] * A[k, j]
            A[i, j] /= A[j, j]
        for j in range(i, n):
            for k in range(i):
                A[i, j] -= A[i, k] * A[k, j]


@program(A="float64[n, n]", b="float64[n]", x="float64[n]", y="float64[n]")
def ludcmp(n, A, b, x, y):
    """Solves A x = b by an LU decomposition"""
    for i in range(n):
        for j in range(i):
            w = A[i, j]
            for k in range(j):
                w -= A[i, k] * A[k, j]
            A[i, j] = w / A[j, j]
        for j in range(i, n):
            w = A[i, j]
            for k in range(i):
                w -= A[i, k] * A[k, j]
            A[i, j] = w
    for i in range(n):
        w = b[i]
        for j in range(i):
            w -= A[i, j] * y[j]
        y[i] = w
    for i in range(n - 1, -1, -1):
        w = y[i]
        for j in range(i + 1, n):
            w -= A[i, j] * x[j]
        x[i] = w / A[i, i]


def init_ludcmp(n: int) -> Arrays:
    (i,) = indices(n)
    return {**init_positive(n), "b": (i + 1) / n / 2 + 4}


@program(L="float64[n, n]", x="float64[n]", b="float64[n]")
def trisolv(n, L, x, b):
    """Solves L x = b with a lower triangular L"""
    for i in range(n):
        x[i] = b[i]
        for j in range(i):
            x[i] -= L[i, j] * x[j]
        x[i] /= L[i, i]


def init_trisolv(n: int) -> Arrays:
    (i, j), (k,) = indices(n, n), indices(n)
    return {"L": np.where(j <= i, (i + n - j + 1) * 2 / n, 0), "x": np.full(n, -999.0), "b": k}


def product_of_factors(arrays: Arrays) -> Arrays:
    """There are more columns than rows: the last of Q, and what is left of A, are rounding errors, but Q R is the matrix."""
    return {"QR": arrays["Q"] @ arrays["R"]}


BENCHMARKS = (
    Benchmark("cholesky", cholesky, ("n",), (40,), (120,), (2000,), init_positive),
    Benchmark("durbin", durbin, ("n",), (40,), (120,), (2000,), init_durbin),
    Benchmark("gramschmidt", gramschmidt, ("m", "n"), (20, 30), (60, 80), (1000, 1200), init_gramschmidt, results=product_of_factors),
    Benchmark("lu", lu, ("n",), (40,), (120,), (2000,), init_positive),
    Benchmark("ludcmp", ludcmp, ("n",), (40,), (120,), (2000,), init_ludcmp),
    Benchmark("trisolv", trisolv, ("n",), (40,), (120,), (2000,), init_trisolv),
)
