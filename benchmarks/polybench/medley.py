"""An image filter, shortest paths, and RNA folding."""

from __future__ import annotations

import math

import numpy as np

from tcomp.frontends.python import program

from .suite import Arrays, Benchmark, indices


@program(image="float32[w, h]", out="float32[w, h]", y1="float32[w, h]", y2="float32[w, h]")
def deriche(w, h, alpha: float, image, out, y1, y2):
    """The recursive smoothing filter of Deriche, along the rows and then along the columns, each in both directions"""
    e = math.exp(-alpha)
    k = (1.0 - e) * (1.0 - e) / (1.0 + 2.0 * alpha * e - math.exp(2.0 * alpha))
    a2 = k * e * (alpha - 1.0)
    a3 = k * e * (alpha + 1.0)
    a4 = -k * math.exp(-2.0 * alpha)
    b1 = math.pow(2.0, -alpha)
    b2 = -math.exp(-2.0 * alpha)
    for i in range(w):
        before = 0.0
        last = 0.0
        second = 0.0
        for j in range(h):
            y1[i, j] = k * image[i, j] + a2 * before + b1 * last + b2 * second
            before = image[i, j]
            second = last
            last = y1[i, j]
    for i in range(w):
        before = 0.0
        earlier = 0.0
        last = 0.0
        second = 0.0
        for j in range(h - 1, -1, -1):
            y2[i, j] = a3 * before + a4 * earlier + b1 * last + b2 * second
            earlier = before
            before = image[i, j]
            second = last
            last = y2[i, j]
    for i in range(w):
        for j in range(h):
            out[i, j] = y1[i, j] + y2[i, j]
    for j in range(h):
        before = 0.0
        last = 0.0
        second = 0.0
        for i in range(w):
            y1[i, j] = k * out[i, j] + a2 * before + b1 * last + b2 * second
            before = out[i, j]
            second = last
            last = y1[i, j]
    for j in range(h):
        before = 0.0
        earlier = 0.0
        last = 0.0
        second = 0.0
        for i in range(w - 1, -1, -1):
            y2[i, j] = a3 * before + a4 * earlier + b1 * last + b2 * second
            earlier = before
            before = out[i, j]
            second = last
            last = y2[i, j]
    for i in range(w):
        for j in range(h):
            out[i, j] = y1[i, j] + y2[i, j]


def init_deriche(w: int, h: int) -> Arrays:
    i, j = indices(w, h)
    return {"image": (313 * i + 991 * j) % 65536 / 65535}


@program(path="int32[n, n]")
def floyd_warshall(n, path):
    """The lengths of the shortest paths between all pairs"""
    for k in range(n):
        for i in range(n):
            for j in range(n):
                path[i, j] = min(path[i, j], path[i, k] + path[k, j])


def init_floyd_warshall(n: int) -> Arrays:
    i, j = indices(n, n)
    far = ((i + j) % 13 == 0) | ((i + j) % 7 == 0) | ((i + j) % 11 == 0)
    return {"path": np.where(far, 999, i * j % 7 + 1)}


@program(seq="int8[n]", table="int32[n, n]")
def nussinov(n, seq, table):
    """The largest number of pairs in which the bases of an RNA sequence can bond without crossing"""
    for i in range(n - 1, -1, -1):
        for j in range(i + 1, n):
            if j - 1 >= 0:
                table[i, j] = max(table[i, j], table[i, j - 1])
            if i + 1 < n:
                table[i, j] = max(table[i, j], table[i + 1, j])
            if j - 1 >= 0 and i + 1 < n:
                if i < j - 1:
                    table[i, j] = max(table[i, j], table[i + 1, j - 1] + (1 if seq[i] + seq[j] == 3 else 0))
                else:
                    table[i, j] = max(table[i, j], table[i + 1, j - 1])
            for k in range(i + 1, j):
                table[i, j] = max(table[i, j], table[i, k] + table[k + 1, j])


def init_nussinov(n: int) -> Arrays:
    (i,) = indices(n)
    return {"seq": (i + 1) % 4}


BENCHMARKS = (
    Benchmark("deriche", deriche, ("w", "h"), (64, 64), (192, 128), (4096, 2160), init_deriche, {"alpha": 0.25}),
    Benchmark("floyd-warshall", floyd_warshall, ("n",), (60,), (180,), (1800,), init_floyd_warshall, published=(2800,)),
    Benchmark("nussinov", nussinov, ("n",), (60,), (180,), (2500,), init_nussinov),
)
