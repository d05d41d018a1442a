"""Programs of every kind run the same as plain Python, in the interpreter and as machine code, with symbolic and with fixed sizes."""

from __future__ import annotations

import math
from math import sqrt

import numpy as np
import pytest

import tcomp
from tcomp.frontends.python import program
from tcomp.ir.loops import Accumulate, Allocate, For, Kernel, Store, While, walk
from tcomp.ir.text.parser import parse_kernel
from tcomp.schedules import Schedule
from tests.frontends.python.three_ways import check

SIZE = 7
rng = np.random.default_rng(0)
A = rng.integers(-9, 10, (SIZE, SIZE)).astype(np.float64)
B = rng.integers(-9, 10, (SIZE, SIZE)).astype(np.float64)
x, y = A[0].copy(), B[0].copy()


def stmts(kernel: Kernel, kind: type) -> list:
    return [s for s in walk(kernel.body) if isinstance(s, kind)]


def loops(kernel: Kernel) -> list[str]:
    return [f.var.name for f in stmts(kernel, For)]


# ---------------------------------------------------------------- whole programs


@program(A="float64[n, n]")
def seidel(steps, n, A):
    for _ in range(steps):
        for i in range(1, n - 1):
            for j in range(1, n - 1):
                A[i, j] = (A[i - 1, j] + A[i, j - 1] + A[i, j] + A[i, j + 1] + A[i + 1, j]) * 0.25


@program(A="int32[n]")
def odd_even_sort(n, A):
    for step in range(n):
        for i in range(step % 2, n - 1, 2):
            if A[i] > A[i + 1]:
                A[i], A[i + 1] = A[i + 1], A[i]


@program(A="float32[n]")
def insertion_sort(n, A):
    for i in range(1, n):
        key = A[i]
        j = i
        while j > 0 and A[j - 1] > key:
            A[j] = A[j - 1]
            j -= 1
        A[j] = key


@program(x="int64[n]")
def prefix_sums(n, x):
    for i in range(1, n):
        x[i] += x[i - 1]


@program(x="float64[n]", y="float64[n]")
def recurrence(n, x, y):
    state = 0.0
    for i in range(n - 1, -1, -1):
        state = 0.5 * state + x[i]
        y[i] = state


@program(boxes="float32[n, 4]", scores="float32[n]", keep="bool[n]", order="int32[n]")
def nms(n, boxes, scores, keep, order, threshold: float):
    """Boxes (x0, y0, x1, y1), best first, that overlap no better one by more than the threshold."""
    for i in range(n):
        order[i] = i
    for i in range(n):
        best = i
        for j in range(i + 1, n):
            if scores[order[j]] > scores[order[best]]:
                best = j
        order[i], order[best] = order[best], order[i]
    for i in range(n):
        a = order[i]
        keep[a] = True
        for j in range(i):
            b = order[j]
            if keep[b]:
                width = min(boxes[a, 2], boxes[b, 2]) - max(boxes[a, 0], boxes[b, 0])
                height = min(boxes[a, 3], boxes[b, 3]) - max(boxes[a, 1], boxes[b, 1])
                if width > 0 and height > 0:
                    common = width * height
                    area = (boxes[a, 2] - boxes[a, 0]) * (boxes[a, 3] - boxes[a, 1])
                    other = (boxes[b, 2] - boxes[b, 0]) * (boxes[b, 3] - boxes[b, 1])
                    if common > threshold * (area + other - common):
                        keep[a] = False


@program(start="int32[n + 1]", column="int32[k]", value="float64[k]", x="float64[m]", y="float64[n]")
def sparse_product(start, column, value, x, y):
    for i in range(y.shape[0]):
        total = 0.0
        for p in range(start[i], start[i + 1]):
            total += value[p] * x[column[p]]
        y[i] = total


@program(x="float64[n]")
def collatz(n, x):
    for i in range(n):
        steps = 0
        k = i + 1
        while k != 1:
            k = k // 2 if k % 2 == 0 else 3 * k + 1
            steps += 1
        x[i] = steps


@program(A="float64[n, n]", x="float64[n]")
def by_columns(n, A, x):
    """Local arrays: one for the whole program, one for an iteration."""
    sums = np.zeros(n)
    for i in range(n):
        for j in range(n):
            sums[j] += A[i, j]
    for j in range(n):
        pair = np.empty(2, np.float32)
        pair[0] = sums[j]
        pair[1] = sums[n - 1 - j]
        x[j] = max(pair[0], pair[1])


@program(x="int32[n]")
def bubble_sort(n, x):
    """A flag, and a table of integers."""
    moves = np.zeros((2, n), dtype="int32")
    changed = True
    while changed:
        changed = False
        for i in range(1, n):
            if x[i - 1] > x[i]:
                x[i - 1], x[i] = x[i], x[i - 1]
                moves[1, i] += 1
                changed = True
    for i in range(n):
        x[i] += moves[1, i] * 100 + moves[0, i]


@program(A="float64[n, n]")
def cholesky(n, A):
    for i in range(n):
        for j in range(i):
            for k in range(j):
                A[i, j] -= A[i, k] * A[j, k]
            A[i, j] /= A[j, j]
        for k in range(i):
            A[i, i] -= A[i, k] * A[i, k]
        A[i, i] = sqrt(A[i, i])


CASES = {
    "seidel": (seidel, {"A": A}, {"steps": 3, "n": SIZE}, 1e-13),
    "odd_even_sort": (odd_even_sort, {"A": A[1].astype(np.int32)}, {"n": SIZE}, 0),
    "insertion_sort": (insertion_sort, {"A": A[2].astype(np.float32)}, {"n": SIZE}, 0),
    "prefix_sums": (prefix_sums, {"x": A[3].astype(np.int64)}, {"n": SIZE}, 0),
    "bubble_sort": (bubble_sort, {"x": A[4].astype(np.int32)}, {"n": SIZE}, 0),
    "recurrence": (recurrence, {"x": x, "y": y}, {"n": SIZE}, 1e-14),
    "sparse_product": (
        sparse_product,
        {
            "start": np.array([0, 2, 2, 5], np.int32), "column": np.array([0, 3, 1, 2, 6], np.int32), "value": y[:5], "x": x,
            "y": np.full(3, np.nan),
        },
        {"n": 3, "k": 5, "m": SIZE},
        0,
    ),
    "collatz": (collatz, {"x": np.zeros(30)}, {"n": 30}, 0),
    "by_columns": (by_columns, {"A": A, "x": x}, {"n": SIZE}, 0),
    "cholesky": (cholesky, {"A": A @ A.T + 40 * np.eye(SIZE)}, {"n": SIZE}, 1e-13),
}  # fmt: skip


@pytest.mark.parametrize("fix", [False, True], ids=["symbolic", "fixed"])
@pytest.mark.parametrize("name", CASES)
def test_runs_the_same_everywhere(name: str, fix: bool) -> None:
    function, arrays, numbers, rtol = CASES[name]
    kernel = check(function, arrays, numbers, numbers if fix else None, rtol)
    assert len(kernel.scalars) == (0 if fix else len(numbers))
    assert str(parse_kernel(str(kernel))) == str(kernel)


@pytest.mark.parametrize("seed", range(3))
def test_non_maximum_suppression(seed: int) -> None:
    rng = np.random.default_rng(seed)
    corner, size = rng.uniform(0, 10, (12, 2)), rng.uniform(1, 8, (12, 2))
    arrays = {
        "boxes": np.hstack([corner, corner + size]).astype(np.float32),
        "scores": rng.permutation(12).astype(np.float32),
        "keep": np.zeros(12, bool),
        "order": np.zeros(12, np.int32),
    }
    numbers = {"n": 12, "threshold": 0.3}
    kernel = check(nms, arrays, numbers, {"threshold": 0.3})
    assert [b.name for b in kernel.outputs] == ["keep", "order"]


def test_the_public_name_and_a_schedule_of_a_program() -> None:
    assert tcomp.program is program
    s = Schedule(seidel.kernel(n=SIZE))
    s.split("i", 2)
    assert "for i.o in 0..3" in str(s)


# ---------------------------------------------------------------- loops


@program(x="float64[n]")
def ranges(n, x):
    for i in range(2, n):
        x[i] += 1
    for i in range(n - 1, 0, -2):
        x[i] += 10
    for i in range(1, n, 3):
        for j in range(i, min(i + 2, n)):
            x[j] += 100
    for i in range(5, 2):
        x[i] += 1000
    for i in range(-3, 0):
        x[i + 3] += 10000


@pytest.mark.parametrize("n", [5, 6, 7])
def test_ranges_start_at_zero_in_the_kernel(n: int) -> None:
    for fixed in ({}, {"n": n}):
        kernel = check(ranges, {"x": np.zeros(n)}, {"n": n}, fixed)
        assert loops(kernel) == ["i", "i_1", "i_2", "j", "i_3", "i_4"]


@program(x="float64[n]")
def numbered(n, x):
    for i in range(n):
        x[i] += 1
    for i in range(n):
        x[i] *= 2
    for i_1 in range(n):
        x[i_1] += i_1


def test_a_name_of_the_function_may_look_like_a_numbered_one() -> None:
    assert loops(check(numbered, {"x": np.zeros(5)}, {"n": 5})) == ["i", "i_1", "i_1_1"]


@program(A="float64[n, n]")
def triangle(n, A):
    for i in range(n - 1, -1, -1):
        for j in range(i + 1, n):
            A[i, j] += A[i, j - 1]


def test_bounds_may_depend_on_outer_variables() -> None:
    kernel = check(triangle, {"A": A}, {"n": SIZE})
    inner = stmts(kernel, For)[1]
    assert str(inner.extent) == "i"


@program(x="int64[n]")
def growing(n, x):
    for i in range(x[0], x[1]):
        x[0] = 100
        x[1] = 100
        x[2] += i


def test_a_range_is_read_once() -> None:
    check(growing, {"x": np.array([2, 5, 0])}, {"n": 3})


# ---------------------------------------------------------------- local variables


@program(A="float64[n, n]", x="float64[n]")
def private(n, A, x):
    for i in range(n):
        w = A[i, 0]
        for j in range(1, n):
            w -= A[i, j]
        x[i] = w
    for i in range(n):
        w = x[i]
        x[i] = w * w


def test_a_local_lives_in_the_innermost_block_of_each_of_its_values() -> None:
    kernel = check(private, {"A": A, "x": x}, {"n": SIZE})
    first, second = (f for f in stmts(kernel, For) if f.var.name in ("i", "i_1"))
    assert isinstance(first.body, Allocate) and first.body.buffer.name == "w"
    assert isinstance(second.body, Allocate) and second.body.buffer.name == "w_1"


@program(x="float64[n]")
def carried(n, x):
    before = x[0]
    for i in range(n):
        now = x[i]
        x[i] = now - before
        before = now


def test_a_local_that_is_carried_lives_outside_of_the_loop() -> None:
    kernel = check(carried, {"x": x}, {"n": SIZE})
    assert isinstance(kernel.body, Allocate) and kernel.body.buffer.name == "before"


@program(x="float64[n]", y="float64[n]")
def named_expressions(n, x, y):
    half = n // 2
    scale = 2.0
    for i in range(half):
        opposite = n - 1 - i
        y[i] = x[opposite] * scale
        y[opposite] = x[i]


def test_names_of_sizes_and_constants_are_no_variables() -> None:
    kernel = check(named_expressions, {"x": x, "y": y}, {"n": SIZE})
    assert not stmts(kernel, Allocate)
    assert "y[n - i - 1] = x[i]" in str(kernel)


@program(x="float64[n]")
def branches(n, x):
    for i in range(n):
        if x[i] > 0:
            sign = 1
        elif x[i] < 0:
            sign = -1
        else:
            sign = 0
        x[i] = sign


def test_a_local_assigned_in_every_branch() -> None:
    check(branches, {"x": np.array([3.0, -2, 0, 5])}, {"n": 4})


# ---------------------------------------------------------------- accumulation


@program(A="float64[n]", s="float64[]", flags="bool[n]", c="int32[n]")
def updates(n, A, s, flags, c):
    for i in range(n):
        s[()] += A[i]
        s[()] = s[()] - 2 * A[i]
        s[()] = min(s[()], A[i])
        s[()] = max(A[i], s[()], 3.0)
        A[i] *= 2
        A[i] = A[i] + A[i]
        A[i] /= 4
        c[i] -= 1
        flags[i] = flags[i] or A[i] > 3
        flags[i] &= A[i] < 7


def test_updates_by_the_old_value_are_accumulations() -> None:
    arrays = {"A": x, "s": np.array(2.0), "flags": np.zeros(SIZE, bool), "c": np.arange(SIZE, dtype=np.int32)}
    kernel = check(updates, arrays, {"n": SIZE})
    assert [s.reducer.name for s in stmts(kernel, Accumulate)] == ["sum", "sum", "min", "max", "prod", "sum", "all"]
    assert len(stmts(kernel, Store)) == 3  # A[i] + A[i] and A[i] / 4; an `or` that reads only where it must


@program(A="float32[n]", B="float64[n]")
def mixed(n, A, B):
    for i in range(n):
        A[i] += B[i]


def test_an_update_that_rounds_in_another_type_is_a_store() -> None:
    kernel = check(mixed, {"A": np.float32(x / 3), "B": y / 7}, {"n": SIZE})
    assert not stmts(kernel, Accumulate)


# ---------------------------------------------------------------- values


@program(f="float32[n]", d="float64[n]", i8="int8[n]", i32="int32[n]", out="float64[n, 12]")
def types(n, f, d, i8, i32, out):
    for i in range(n):
        out[i, 0] = f[i] * 0.1
        out[i, 1] = f[i] * d[i]
        out[i, 2] = i32[i] * 0.5
        out[i, 3] = i / n
        out[i, 4] = i32[i] / 3
        out[i, 5] = i8[i] + i32[i]
        out[i, 6] = i32[i] // 3 + i32[i] % 3
        out[i, 7] = np.float32(d[i]) * f[i]
        out[i, 8] = int(d[i] * 0.7)
        out[i, 9] = np.sqrt(abs(f[i]))
        out[i, 10] = math.floor(d[i] / 2) if d[i] > 0 and not (i == 1 or i == 4) else SIZE
        out[i, 11] = (i << 2 | 1) ^ ~i & 7


def test_numbers_have_the_types_of_numpy() -> None:
    ints = np.array([-100, -3, -1, 0, 1, 5, 100])
    arrays = {"f": np.float32(x / 3), "d": y / 7, "i8": ints.astype(np.int8), "i32": ints.astype(np.int32), "out": np.zeros((SIZE, 12))}
    check(types, arrays, {"n": SIZE})


@program(f="float32[n]", s="float32[n]")
def weak_sum(n, f, s):
    total = 0.0
    for i in range(n):
        total += f[i]
        s[i] = total


def test_a_local_takes_the_type_of_what_is_added_to_it() -> None:
    kernel = check(weak_sum, {"f": rng.random(SIZE, np.float32), "s": np.zeros(SIZE, np.float32)}, {"n": SIZE})
    assert stmts(kernel, Allocate)[0].buffer.dtype == "float32"


@program(d="float64[n]")
def functions(n, d):
    for i in range(n):
        u = abs(d[i]) / 10
        d[i] = np.exp(u) + np.log(u + 1) + np.tanh(u) + np.arctan(u) + math.sin(u) + math.cos(u) + np.maximum(u, 0.5) ** 2 + math.erf(u)


def test_functions() -> None:
    check(functions, {"d": x}, {"n": SIZE}, rtol=1e-12)


@program(x="float64[n]")
def constants(n, x):
    k = (1.0 - math.exp(-0.25)) ** 2
    for i in range(n):
        x[i] = k * SIZE


def test_constants_are_computed_by_python() -> None:
    kernel = check(constants, {"x": x}, {"n": SIZE})
    assert repr((1.0 - math.exp(-0.25)) ** 2 * SIZE) in str(kernel)


@program(x="float64[n]")
def guarded(n, x):
    for i in range(n):
        if i > 0 and x[i - 1] > 0 or i + 1 < n and x[i + 1] < 0:
            x[i] = 0 if 0 <= x[i] < 5 else -x[i]


def test_conditions_read_only_what_they_need() -> None:
    check(guarded, {"x": x}, {"n": SIZE})


@program(x="float64[n]")
def specialised(n, x, mode: bool, power, scale: float = 2.5):
    if mode:
        x[0] = power
    else:
        while x[0] < 100:
            x[0] *= scale


def test_fixed_parameters_choose_branches() -> None:
    assert not stmts(specialised.kernel(mode=True), While)
    assert stmts(specialised.kernel(mode=False), While)
    assert "2.5" in str(specialised.kernel(mode=False))
    assert [v.name for v in specialised.kernel(mode=True, n=3).scalars] == ["power"]


def test_sizes_may_be_bounded() -> None:
    kernel = seidel.kernel(n=(3, 4000))
    assert str(kernel).startswith("kernel seidel<steps{..}, n{3..4000}>")


@program(A="float64[n, 2 * m + 1]", B="float32[n // 2, 3]")
def shapes(n, m, A, B):
    for i in range(A.shape[1]):
        A[0, i] = len(B)


def test_shapes_are_expressions_of_sizes() -> None:
    kernel = check(shapes, {"A": np.zeros((5, 9)), "B": np.zeros((2, 3), np.float32)}, {"n": 5, "m": 4})
    assert [b.name for b in kernel.outputs] == ["A"]
    assert shapes.kernel(n=7, m=2).buffers[0].shape == (7, 5)
