"""Products of matrices and vectors."""

from __future__ import annotations

from tcomp.frontends.python import program

from .suite import SCALE, Arrays, Benchmark, indices


@program(tmp="float64[ni, nj]", A="float64[ni, nk]", B="float64[nk, nj]", C="float64[nj, nl]", D="float64[ni, nl]")
def two_products(ni, nj, nk, nl, alpha: float, beta: float, tmp, A, B, C, D):
    """D = alpha A B C + beta D"""
    for i in range(ni):
        for j in range(nj):
            tmp[i, j] = 0.0
            for k in range(nk):
                tmp[i, j] += alpha * A[i, k] * B[k, j]
    for i in range(ni):
        for j in range(nl):
            D[i, j] *= beta
            for k in range(nj):
                D[i, j] += tmp[i, k] * C[k, j]


def init_two_products(ni: int, nj: int, nk: int, nl: int) -> Arrays:
    a, b, c, d = indices(ni, nk), indices(nk, nj), indices(nj, nl), indices(ni, nl)
    return {
        "A": (a[0] * a[1] + 1) % ni / ni,
        "B": b[0] * (b[1] + 1) % nj / nj,
        "C": (c[0] * (c[1] + 3) + 1) % nl / nl,
        "D": d[0] * (d[1] + 2) % nk / nk,
    }


@program(
    E="float64[ni, nj]", A="float64[ni, nk]", B="float64[nk, nj]", F="float64[nj, nl]", C="float64[nj, nm]", D="float64[nm, nl]",
    G="float64[ni, nl]",
)  # fmt: skip
def three_products(ni, nj, nk, nl, nm, E, A, B, F, C, D, G):
    """E = A B; F = C D; G = E F"""
    for i in range(ni):
        for j in range(nj):
            E[i, j] = 0.0
            for k in range(nk):
                E[i, j] += A[i, k] * B[k, j]
    for i in range(nj):
        for j in range(nl):
            F[i, j] = 0.0
            for k in range(nm):
                F[i, j] += C[i, k] * D[k, j]
    for i in range(ni):
        for j in range(nl):
            G[i, j] = 0.0
            for k in range(nj):
                G[i, j] += E[i, k] * F[k, j]


def init_three_products(ni: int, nj: int, nk: int, nl: int, nm: int) -> Arrays:
    a, b, c, d = indices(ni, nk), indices(nk, nj), indices(nj, nm), indices(nm, nl)
    return {
        "A": (a[0] * a[1] + 1) % ni / (5 * ni),
        "B": (b[0] * (b[1] + 1) + 2) % nj / (5 * nj),
        "C": c[0] * (c[1] + 3) % nl / (5 * nl),
        "D": (d[0] * (d[1] + 2) + 2) % nk / (5 * nk),
    }


@program(A="float64[m, n]", x="float64[n]", y="float64[n]", tmp="float64[m]")
def atax(m, n, A, x, y, tmp):
    """y = A' (A x)"""
    for i in range(n):
        y[i] = 0.0
    for i in range(m):
        tmp[i] = 0.0
        for j in range(n):
            tmp[i] += A[i, j] * x[j]
        for j in range(n):
            y[j] += A[i, j] * tmp[i]


def init_atax(m: int, n: int) -> Arrays:
    (i, j), (k,) = indices(m, n), indices(n)
    return {"x": 1 + k / n, "A": (i + j) % n / (5 * m)}


@program(A="float64[n, m]", s="float64[m]", q="float64[n]", p="float64[m]", r="float64[n]")
def bicg(m, n, A, s, q, p, r):
    """s = A' r; q = A p"""
    for i in range(m):
        s[i] = 0.0
    for i in range(n):
        q[i] = 0.0
        for j in range(m):
            s[j] += r[i] * A[i, j]
            q[i] += A[i, j] * p[j]


def init_bicg(m: int, n: int) -> Arrays:
    (i, j), (k,), (h,) = indices(n, m), indices(m), indices(n)
    return {"p": k / m, "r": h / n, "A": i * (j + 1) % n / n}


@program(A="float64[nr, nq, np]", C4="float64[np, np]", sum="float64[np]")
def doitgen(nr, nq, np, A, C4, sum):
    """A[r, q, :] = C4' A[r, q, :]"""
    for r in range(nr):
        for q in range(nq):
            for p in range(np):
                sum[p] = 0.0
                for s in range(np):
                    sum[p] += A[r, q, s] * C4[s, p]
            for p in range(np):
                A[r, q, p] = sum[p]


def init_doitgen(nr: int, nq: int, np: int) -> Arrays:
    (i, j, k), (p, q) = indices(nr, nq, np), indices(np, np)
    return {"A": (i * j + k) % np / np, "C4": p * q % np / np}


@program(x1="float64[n]", x2="float64[n]", y1="float64[n]", y2="float64[n]", A="float64[n, n]")
def mvt(n, x1, x2, y1, y2, A):
    """x1 += A y1; x2 += A' y2"""
    for i in range(n):
        for j in range(n):
            x1[i] += A[i, j] * y1[j]
    for i in range(n):
        for j in range(n):
            x2[i] += A[j, i] * y2[j]


def init_mvt(n: int) -> Arrays:
    (i, j), (k,) = indices(n, n), indices(n)
    return {"x1": k / n, "x2": (k + 1) % n / n, "y1": (k + 3) % n / n, "y2": (k + 4) % n / n, "A": i * j % n / n}


BENCHMARKS = (
    Benchmark(
        "2mm", two_products, ("ni", "nj", "nk", "nl"), (16, 18, 22, 24), (40, 50, 70, 80), (800, 900, 1100, 1200), init_two_products, SCALE
    ),
    Benchmark(
        "3mm", three_products, ("ni", "nj", "nk", "nl", "nm"), (16, 18, 20, 22, 24), (40, 50, 60, 70, 80), (800, 900, 1000, 1100, 1200),
        init_three_products,
    ),
    Benchmark("atax", atax, ("m", "n"), (38, 42), (116, 124), (1900, 2100), init_atax),
    Benchmark("bicg", bicg, ("m", "n"), (38, 42), (116, 124), (1900, 2100), init_bicg),
    Benchmark("doitgen", doitgen, ("nq", "nr", "np"), (8, 10, 12), (20, 25, 30), (140, 150, 160), init_doitgen),
    Benchmark("mvt", mvt, ("n",), (40,), (120,), (2000,), init_mvt),
)  # fmt: skip
