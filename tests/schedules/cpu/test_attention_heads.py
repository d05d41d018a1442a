"""Heads of attention: joined without a copy, and sharing keys and values without repeating them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.ir import te
from tcomp.ir.expr import dim
from tcomp.ir.graph import KERNEL, Graph, GraphBuilder
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.loops import Allocate, walk
from tcomp.ops.elementwise import NEG
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import EXPAND, RESHAPE, TRANSPOSE
from tcomp.ops.reduction import SOFTMAX
from tcomp.options import CompileOptions
from tcomp.passes.partition import partition
from tcomp.pipeline import compile_graph
from tcomp.runtime import Module
from tcomp.schedules.cpu import default as cpu
from tcomp.schedules.lowering import lower
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST
from tests.schedules.programs import Program
from tests.schedules.running import expected, interpreted, native

ROWS = dim("rows", 1, 40)


def heads(batch: int, count: int, rows: int, width: int, keys: int, dtype: str, added: bool) -> Program:
    """join(a b) + c, in rows of count * width."""
    a = te.placeholder((batch, count, rows, keys), dtype, "A")
    b = te.placeholder((batch, keys, count * width), dtype, "B")
    c, k = te.placeholder((batch, rows, count * width), dtype, "C"), te.reduce_axis(keys, "k")
    products = te.compute((batch, count, rows, width), lambda n, h, i, j: te.sum(a[n, h, i, k] * b[n, k, h * width + j], axis=k), "P")

    def element(n: te.Expr, i: te.Expr, j: te.Expr) -> te.Expr:
        joined = products[n, j // width, i, j % width]
        return joined + c[n, i, j] if added else joined

    return Program((a, b, c), (te.compute((batch, rows, count * width), element, "R"),), {})


def shared(batch: int, groups: int, each: int, rows: int, width: int, keys: int, dtype: str, across: bool, joined: bool) -> Program:
    """Each of `groups` matrices B is a factor for `each` matrices A; its columns lie along rows of memory, or `across` them."""
    a = te.placeholder((batch, groups * each, rows, keys), dtype, "A")
    b, k = te.placeholder((batch, groups, *((width, keys) if across else (keys, width))), dtype, "B"), te.reduce_axis(keys, "k")

    def product(n: te.Expr, h: te.Expr, i: te.Expr, j: te.Expr) -> te.Expr:
        return te.sum(a[n, h, i, k] * b[(n, h // each, *((j, k) if across else (k, j)))], axis=k)

    p = te.compute((batch, groups * each, rows, width), product, "P")
    if joined:
        p = te.compute((batch, rows, groups * each * width), lambda n, i, j: p[n, j // width, i, j % width], "R")
    return Program((a, b), (p,), {})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 8), st.sampled_from([1, 1, 2, 9, 30]), st.sampled_from([1, 5, 16, 33, 64]),
    st.integers(1, 70), st.sampled_from(["float32", "float64"]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_the_meaning_of_shared_keys_stays(
    batch: int, groups: int, each: int, rows: int, width: int, keys: int, dtype: str, across: bool, joined: bool
) -> None:
    p = shared(batch, groups, each, rows, width, keys, dtype, across, joined)
    s = cpu.schedule(lower("p", p.inputs, p.outputs), HOST)
    for found in (interpreted(p, s.kernel, shuffle=1), native(p, s.kernel), native(p, s.kernel, threads=True)):
        for got, want in zip(found, expected(p), strict=True):
            p.same(got, want)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("across", [True, False])
def test_no_shared_keys_are_gathered(rows: int, across: bool) -> None:
    """By 4 heads and one token each: dot products; by more rows: turned, in panels."""
    target = CpuTarget.parse("cpu -march=x86_64 -mcpu=skylake-avx512")
    p = shared(1, 2, 4, rows, 64, 64, "float32", across, not across)
    s = cpu.schedule(lower("p", p.inputs, p.outputs), target)
    assert "gather" not in emit_kernel(s.kernel, target)
    assert not s.fallbacks


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.integers(1, 2), st.integers(1, 4), st.integers(1, 30), st.sampled_from([1, 3, 8, 16, 24, 33, 64]), st.integers(1, 40),
    st.sampled_from(["float32", "float64"]), st.booleans(),
)  # fmt: skip
def test_the_meaning_stays(batch: int, count: int, rows: int, width: int, keys: int, dtype: str, added: bool) -> None:
    p = heads(batch, count, rows, width, keys, dtype, added)
    s = cpu.schedule(lower("p", p.inputs, p.outputs), HOST)
    for found in (interpreted(p, s.kernel, shuffle=1), native(p, s.kernel), native(p, s.kernel, threads=True)):
        for got, want in zip(found, expected(p), strict=True):
            p.same(got, want)


@pytest.mark.parametrize("width, used, whole", [(24, 16, 64), (16, 16, 40), (16, 8, 32)])
def test_parts_of_rows_beside_each_other(width: int, used: int, whole: int) -> None:
    """Rows that are not read to their end, and a last one that there is no room for; and two products, one of them read so."""
    a, k = te.placeholder((8, 5, 7), "float32", "A"), te.reduce_axis(7, "k")
    b = te.placeholder((7, 8 * width), "float32", "B")
    p, q = (te.compute((8, 5, width), lambda h, i, j: te.sum(a[h, i, k] * b[k, h * width + j], axis=k), name) for name in "PQ")
    r = te.compute((5, whole), lambda i, c: p[c // used, i, c % used] + q[c // used, i, c % used] * 2.0, "R")
    program = Program((a, b), (r,), {})
    s = cpu.schedule(lower("p", program.inputs, program.outputs), HOST)
    for found in (interpreted(program, s.kernel), native(program, s.kernel)):
        for got, want in zip(found, expected(program), strict=True):
            program.same(got, want)


def test_nothing_is_stored_apart() -> None:
    p = heads(1, 12, 128, 64, 128, "float32", True)
    s = cpu.schedule(lower("p", p.inputs, p.outputs), CpuTarget.parse("cpu -march=x86_64 -mcpu=skylake-avx512"))
    assert {x.buffer.scope for x in walk(s.kernel.body) if isinstance(x, Allocate)} == {"register"}
    assert not s.fallbacks


def joined(
    rows: te.Dim = 5, batch: int = 1, perm: tuple[int, ...] = (0, 2, 1, 3), shape: tuple[te.Dim, ...] | None = None, also: bool = False
) -> Graph:
    b = GraphBuilder()
    x, y = b.input("x", "float32", (batch, 3, rows, 7)), b.input("y", "float32", (batch, 3, 7, 16))
    (mixed,) = b.add(MATMUL, [x, y])
    (turned,) = b.add(TRANSPOSE, [mixed], {"perm": perm})
    (result,) = b.add(RESHAPE, [turned], {"shape": shape or (batch, rows, 48)})
    return b.build([result, *(b.add(NEG, [mixed]) if also else ())])


@pytest.mark.parametrize("rows", [5, ROWS], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_one_kernel_for_a_product_and_the_join(rows: te.Dim, batch: int) -> None:
    before = joined(rows, batch)
    (kernel,) = partition(before).nodes
    assert [node.op.name for node in kernel.bodies[0].nodes] == ["matmul", "transpose", "reshape"]
    assert len(partition(before, halos=False).nodes) == 2
    rng = np.random.default_rng(1)
    feeds = {
        v.name: rng.standard_normal([9 if d is rows and rows is ROWS else d for d in v.shape]).astype(np.float32) for v in before.inputs
    }
    found = Module.load(compile_graph(before, CompileOptions(HOST, threads=2))).run(feeds)
    for name, want in evaluate_graph(before, feeds).items():
        np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"perm": (0, 1, 3, 2), "shape": (1, 3, 80)},  # columns of matrices
        {"batch": 2, "shape": (10, 48)},  # rows of several batches below each other, too
        {"also": True},  # what is read elsewhere
    ],
    ids=["columns", "below each other", "also"],
)  # fmt: skip
def test_what_stays_apart(options: dict[str, Any]) -> None:
    kernels = partition(joined(**options)).nodes
    assert [k for k in kernels if {"matmul", "reshape"} <= {node.op.name for node in k.bodies[0].nodes}] == []


def grouped(keys: te.Dim, rows: int) -> Graph:
    """Attention of 6 heads, of which each 3 share keys and values."""
    b = GraphBuilder()
    q, k, v = b.input("q", "float32", (1, 6, rows, 8)), *(b.input(name, "float32", (1, 2, keys, 8)) for name in "kv")
    repeated = []
    for x in (k, v):
        (apart,) = b.add(RESHAPE, [x], {"shape": (1, 2, 1, keys, 8)})
        (wide,) = b.add(EXPAND, [apart], {"shape": (1, 2, 3, keys, 8)})
        repeated += b.add(RESHAPE, [wide], {"shape": (1, 6, keys, 8)})
    scores = b.add(MATMUL, [q, *b.add(TRANSPOSE, repeated[:1], {"perm": (0, 1, 3, 2)})])
    (mixed,) = b.add(MATMUL, [*b.add(SOFTMAX, scores, {"axes": (3,)}), repeated[1]])
    (turned,) = b.add(TRANSPOSE, [mixed], {"perm": (0, 2, 1, 3)})
    return b.build(b.add(RESHAPE, [turned], {"shape": (1, rows, 48)}))


@pytest.mark.parametrize("keys", [33, ROWS], ids=str)
@pytest.mark.parametrize("rows", [1, 7])
def test_keys_are_not_repeated(keys: te.Dim, rows: int) -> None:
    before = grouped(keys, rows)
    made = [[n.op for n in partition(before, halos=halos).nodes].count(KERNEL) for halos in (True, False)]
    assert made[0] == 3 < made[1]
    rng = np.random.default_rng(2)
    feeds = {v.name: rng.standard_normal([17 if d is ROWS else d for d in v.shape]).astype(np.float32) for v in before.inputs}
    found = Module.load(compile_graph(before, CompileOptions(HOST, threads=2))).run(feeds)
    for name, want in evaluate_graph(before, feeds).items():
        np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-5)


def test_repeated_columns_are() -> None:
    """Only matrices as a whole are shared: lanes would gather columns."""
    b = GraphBuilder()
    x, y = b.input("x", "float32", (1, 2, 9, 8)), b.input("y", "float32", (1, 2, 8, 5, 1))
    (wide,) = b.add(RESHAPE, b.add(EXPAND, [y], {"shape": (1, 2, 8, 5, 3)}), {"shape": (1, 2, 8, 15)})
    assert len(partition(b.build(b.add(MATMUL, [x, wide]))).nodes) == 2


def test_a_vector_that_was_joined_is_copied() -> None:
    b = GraphBuilder()
    x, y = b.input("x", "float32", (3, 12)), b.input("y", "float32", (4, 3))
    (flat,) = b.add(RESHAPE, b.add(TRANSPOSE, [y], {"perm": (1, 0)}), {"shape": (12,)})
    assert len(partition(b.build(b.add(MATMUL, [x, flat]))).nodes) == 2
