# ruff: noqa: B007 (time steps that are only counted)
"""Stencils: grids that are updated from their neighbourhoods, time step after time step."""

from __future__ import annotations

from tcomp.frontends.python import program

from .suite import Arrays, Benchmark, indices


@program(u="float64[n, n]", v="float64[n, n]", p="float64[n, n]", q="float64[n, n]")
def adi(tsteps, n, u, v, p, q):
    """The heat equation by alternating directions: tridiagonal systems along the columns, then along the rows"""
    mul1 = 2.0 * (1.0 / tsteps) / ((1.0 / n) * (1.0 / n))
    mul2 = 1.0 * (1.0 / tsteps) / ((1.0 / n) * (1.0 / n))
    a = -mul1 / 2.0
    b = 1.0 + mul1
    d = -mul2 / 2.0
    e = 1.0 + mul2
    for t in range(tsteps):
        for i in range(1, n - 1):
            v[0, i] = 1.0
            p[i, 0] = 0.0
            q[i, 0] = v[0, i]
            for j in range(1, n - 1):
                p[i, j] = -a / (a * p[i, j - 1] + b)
                q[i, j] = (-d * u[j, i - 1] + (1.0 + 2.0 * d) * u[j, i] - d * u[j, i + 1] - a * q[i, j - 1]) / (a * p[i, j - 1] + b)
            v[n - 1, i] = 1.0
            for j in range(n - 2, 0, -1):
                v[j, i] = p[i, j] * v[j + 1, i] + q[i, j]
        for i in range(1, n - 1):
            u[i, 0] = 1.0
            p[i, 0] = 0.0
            q[i, 0] = u[i, 0]
            for j in range(1, n - 1):
                p[i, j] = -d / (d * p[i, j - 1] + e)
                q[i, j] = (-a * v[i - 1, j] + (1.0 + 2.0 * a) * v[i, j] - a * v[i + 1, j] - d * q[i, j - 1]) / (d * p[i, j - 1] + e)
            u[i, n - 1] = 1.0
            for j in range(n - 2, 0, -1):
                u[i, j] = p[i, j] * u[i, j + 1] + q[i, j]


def init_adi(tsteps: int, n: int) -> Arrays:
    i, j = indices(n, n)
    return {"u": (i + n - j) / n}


@program(ex="float64[nx, ny]", ey="float64[nx, ny]", hz="float64[nx, ny]", fict="float64[tmax]")
def fdtd_2d(tmax, nx, ny, ex, ey, hz, fict):
    """Maxwell's equations in two dimensions by finite differences in the time domain"""
    for t in range(tmax):
        for j in range(ny):
            ey[0, j] = fict[t]
        for i in range(1, nx):
            for j in range(ny):
                ey[i, j] -= 0.5 * (hz[i, j] - hz[i - 1, j])
        for i in range(nx):
            for j in range(1, ny):
                ex[i, j] -= 0.5 * (hz[i, j] - hz[i, j - 1])
        for i in range(nx - 1):
            for j in range(ny - 1):
                hz[i, j] -= 0.7 * (ex[i, j + 1] - ex[i, j] + ey[i + 1, j] - ey[i, j])


def init_fdtd_2d(tmax: int, nx: int, ny: int) -> Arrays:
    (i, j), (t,) = indices(nx, ny), indices(tmax)
    return {"fict": t, "ex": i * (j + 1) / nx, "ey": i * (j + 2) / ny, "hz": i * (j + 3) / nx}


@program(A="float64[n, n, n]", B="float64[n, n, n]")
def heat_3d(tsteps, n, A, B):
    """The heat equation in three dimensions"""
    for t in range(tsteps):
        for i in range(1, n - 1):
            for j in range(1, n - 1):
                for k in range(1, n - 1):
                    B[i, j, k] = (
                        0.125 * (A[i + 1, j, k] - 2.0 * A[i, j, k] + A[i - 1, j, k])
                        + 0.125 * (A[i, j + 1, k] - 2.0 * A[i, j, k] + A[i, j - 1, k])
                        + 0.125 * (A[i, j, k + 1] - 2.0 * A[i, j, k] + A[i, j, k - 1])
                        + A[i, j, k]
                    )
        for i in range(1, n - 1):
            for j in range(1, n - 1):
                for k in range(1, n - 1):
                    A[i, j, k] = (
                        0.125 * (B[i + 1, j, k] - 2.0 * B[i, j, k] + B[i - 1, j, k])
                        + 0.125 * (B[i, j + 1, k] - 2.0 * B[i, j, k] + B[i, j - 1, k])
                        + 0.125 * (B[i, j, k + 1] - 2.0 * B[i, j, k] + B[i, j, k - 1])
                        + B[i, j, k]
                    )


def init_heat_3d(tsteps: int, n: int) -> Arrays:
    i, j, k = indices(n, n, n)
    return {name: (i + j + (n - k)) * 10 / n for name in "AB"}


@program(A="float64[n]", B="float64[n]")
def jacobi_1d(tsteps, n, A, B):
    """Means of three neighbours"""
    for t in range(tsteps):
        for i in range(1, n - 1):
            B[i] = 0.33333 * (A[i - 1] + A[i] + A[i + 1])
        for i in range(1, n - 1):
            A[i] = 0.33333 * (B[i - 1] + B[i] + B[i + 1])


def init_jacobi_1d(tsteps: int, n: int) -> Arrays:
    (i,) = indices(n)
    return {"A": (i + 2) / n, "B": (i + 3) / n}


@program(A="float64[n, n]", B="float64[n, n]")
def jacobi_2d(tsteps, n, A, B):
    """Means of five neighbours"""
    for t in range(tsteps):
        for i in range(1, n - 1):
            for j in range(1, n - 1):
                B[i, j] = 0.2 * (A[i, j] + A[i, j - 1] + A[i, j + 1] + A[i + 1, j] + A[i - 1, j])
        for i in range(1, n - 1):
            for j in range(1, n - 1):
                A[i, j] = 0.2 * (B[i, j] + B[i, j - 1] + B[i, j + 1] + B[i + 1, j] + B[i - 1, j])


def init_jacobi_2d(tsteps: int, n: int) -> Arrays:
    i, j = indices(n, n)
    return {"A": (i * (j + 2) + 2) / n, "B": (i * (j + 3) + 3) / n}


@program(A="float64[n, n]")
def seidel_2d(tsteps, n, A):
    """Means of nine neighbours, in place"""
    for t in range(tsteps):
        for i in range(1, n - 1):
            for j in range(1, n - 1):
                A[i, j] = (
                    A[i - 1, j - 1] + A[i - 1, j] + A[i - 1, j + 1]
                    + A[i, j - 1] + A[i, j] + A[i, j + 1]
                    + A[i + 1, j - 1] + A[i + 1, j] + A[i + 1, j + 1]
                ) / 9.0  # fmt: skip


def init_seidel_2d(tsteps: int, n: int) -> Arrays:
    i, j = indices(n, n)
    return {"A": (i * (j + 2) + 2) / n}


BENCHMARKS = (
    Benchmark("adi", adi, ("tsteps", "n"), (20, 20), (40, 60), (200, 1000), init_adi, published=(500, 1000)),
    Benchmark("fdtd-2d", fdtd_2d, ("tmax", "nx", "ny"), (20, 20, 30), (40, 60, 80), (500, 1000, 1200), init_fdtd_2d),
    Benchmark("heat-3d", heat_3d, ("tsteps", "n"), (20, 10), (40, 20), (500, 120), init_heat_3d),
    Benchmark("jacobi-1d", jacobi_1d, ("tsteps", "n"), (20, 30), (40, 120), (500, 2000), init_jacobi_1d),
    Benchmark("jacobi-2d", jacobi_2d, ("tsteps", "n"), (20, 30), (40, 90), (500, 1300), init_jacobi_2d),
    Benchmark("seidel-2d", seidel_2d, ("tsteps", "n"), (20, 40), (40, 120), (100, 2000), init_seidel_2d, published=(500, 2000)),
)
