"""Kernels of statistics."""

from __future__ import annotations

import math

from tcomp.frontends.python import program

from .suite import Arrays, Benchmark, indices


@program(data="float64[n, m]", corr="float64[m, m]", mean="float64[m]", stddev="float64[m]")
def correlation(m, n, data, corr, mean, stddev):
    """The correlations of the columns; `data` is centred and scaled"""
    for j in range(m):
        mean[j] = 0.0
        for i in range(n):
            mean[j] += data[i, j]
        mean[j] /= n
    for j in range(m):
        stddev[j] = 0.0
        for i in range(n):
            stddev[j] += (data[i, j] - mean[j]) * (data[i, j] - mean[j])
        stddev[j] /= n
        stddev[j] = math.sqrt(stddev[j])
        stddev[j] = 1.0 if stddev[j] <= 0.1 else stddev[j]
    for i in range(n):
        for j in range(m):
            data[i, j] -= mean[j]
            data[i, j] /= math.sqrt(n) * stddev[j]
    for i in range(m - 1):
        corr[i, i] = 1.0
        for j in range(i + 1, m):
            corr[i, j] = 0.0
            for k in range(n):
                corr[i, j] += data[k, i] * data[k, j]
            corr[j, i] = corr[i, j]
    corr[m - 1, m - 1] = 1.0


def init_correlation(m: int, n: int) -> Arrays:
    i, j = indices(n, m)
    return {"data": i * j / m + i}


@program(data="float64[n, m]", cov="float64[m, m]", mean="float64[m]")
def covariance(m, n, data, cov, mean):
    """The covariances of the columns; `data` is centred"""
    for j in range(m):
        mean[j] = 0.0
        for i in range(n):
            mean[j] += data[i, j]
        mean[j] /= n
    for i in range(n):
        for j in range(m):
            data[i, j] -= mean[j]
    for i in range(m):
        for j in range(i, m):
            cov[i, j] = 0.0
            for k in range(n):
                cov[i, j] += data[k, i] * data[k, j]
            cov[i, j] /= n - 1
            cov[j, i] = cov[i, j]


def init_covariance(m: int, n: int) -> Arrays:
    i, j = indices(n, m)
    return {"data": i * j / m}


BENCHMARKS = (
    Benchmark("correlation", correlation, ("m", "n"), (28, 32), (80, 100), (1200, 1400), init_correlation),
    Benchmark("covariance", covariance, ("m", "n"), (28, 32), (80, 100), (1200, 1400), init_covariance),
)
