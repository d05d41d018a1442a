"""Native kernels against NumPy: every loop kind, masks, addresses, dtypes, safety, and what the machine code must look like."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import re
from textwrap import dedent
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import assembly, compile_ir
from tcomp.codegen.llvm.math import ELEMENTARY
from tcomp.errors import CodegenError
from tcomp.ir import expr as E, te
from tcomp.ir.dtypes import BITS, FLOATS, NARROW, SIGNED, UNSIGNED, is_float, to_numpy
from tcomp.ir.expr import Expr, as_expr, cast, const, select
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Accumulate, Allocate, Buffer, If, Kernel, Stmt, While, block, loop, store
from tcomp.ir.reducers import Reducer
from tcomp.ir.scalar_operators import wrap
from tcomp.ir.text.parser import parse_kernel
from tcomp.target import CpuTarget
from tests.codegen.jit import BODY, HOST, PARALLEL_FOR, compile_kernel, kernel, spill_count

rng = np.random.default_rng(0)


def reducer(function: Any, dtype: str = "float32") -> Reducer:
    return function(te.placeholder((4,), dtype)[0], te.reduce_axis(4)).attr[0]


SUM, MAX = reducer(te.sum), reducer(te.max)


def vec(n: int, body: Any, name: str = "l") -> Stmt:
    return loop(name, n, body, "vectorized")


def unroll(n: int, body: Any, name: str) -> Stmt:
    return loop(name, n, body, "unrolled")


def floats(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def assert_same(got: np.ndarray, expected: np.ndarray, message: str = "") -> None:
    """Equal values, NaN equal to NaN, for every dtype (NumPy knows no NaN of bfloat16)."""
    if got.dtype == ml_dtypes.bfloat16:
        got, expected = got.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(got, expected, err_msg=message)


def undefined_symbols(data: bytes) -> list[str]:
    """Names of the symbols that an ELF64 object leaves to others, from its .symtab."""
    import struct

    (shoff,) = struct.unpack_from("<Q", data, 40)
    entry, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, shoff + n * entry) for n in range(count)]
    names = []
    for section in sections:
        if section[1] != 2:
            continue
        strings = sections[section[6]][4]
        for at in range(section[4] + 24, section[4] + section[5], 24):
            name, _, _, index = struct.unpack_from("<IBBH", data, at)
            if index == 0:
                start = strings + name
                names.append(data[start : data.index(b"\0", start)].decode())
    return names


# ---------------------------------------------------------------- loops


def test_serial_loop_with_symbolic_extent() -> None:
    n = E.dim("n", 0)
    a, b = Buffer("a", "float32", (n,)), Buffer("b", "float32", (n,))
    f = compile_kernel(kernel("k", [a], [b], loop("i", n, lambda i: store(b, (i,), a[i] * 2.0 + 1.0)), [n]))
    for size in (0, 1, 7):
        x, y = floats(size + 1), np.full(size + 1, 5, np.float32)
        f(x, y, size)
        np.testing.assert_array_equal(y[:size], x[:size] * 2 + 1)
        assert y[size] == 5


def test_strides_follow_symbolic_shapes() -> None:
    n, m = E.dim("n"), E.dim("m")
    a, b = Buffer("a", "float32", (n, m)), Buffer("b", "float32", (m, n))
    body = loop("i", n, lambda i: loop("j", m, lambda j: store(b, (j, i), a[i, j])))
    f = compile_kernel(kernel("k", [a], [b], body, [n, m]))
    x, y = floats(5, 3), np.zeros((3, 5), np.float32)
    f(x, y, 5, 3)
    np.testing.assert_array_equal(y, x.T)


def test_unrolled_conditions_are_decided_at_compile_time() -> None:
    a, b = Buffer("a", "float32", (4,)), Buffer("b", "float32", (8,))
    body = unroll(8, lambda i: store(b, (i,), select((i < 2) | (6 <= i), 0.0, a[i - 2])), "i")
    k = kernel("k", [a], [b], body)
    assert "br " not in emit_kernel(k, HOST)
    x, y = floats(4), np.zeros(8, np.float32)
    compile_kernel(k)(x, y)
    np.testing.assert_array_equal(y, np.pad(x, 2))


def test_while_reads_its_condition_anew() -> None:
    s, out = Buffer("s", "int64", (1,), "register"), Buffer("out", "int64", (1,))
    n = E.dim("n", 0)
    step = block(Accumulate(s, (E.const(0),), E.const(3), reducer(te.sum, "int64")), store(out, (0,), s[0]))
    body = Allocate(s, block(store(s, (0,), 0), store(out, (0,), 0), While(s[0] < n, step)))
    f = compile_kernel(kernel("k", [], [out], body, [n]))
    y = np.zeros(1, np.int64)
    for limit, expected in ((0, 0), (1, 3), (9, 9), (10, 12)):
        f(y, limit)
        assert y[0] == expected


def test_loop_carried_values_are_read_again() -> None:
    """out[i + 1] = out[i] * x[i]: what is read must not be remembered across the store."""
    x, out = Buffer("x", "float32", (8,)), Buffer("out", "float32", (9,))
    for kind in ("serial", "unrolled"):
        body = block(store(out, (0,), 1.0), loop("i", 8, lambda i: store(out, (i + 1,), out[i] * x[i]), kind))
        a, b = floats(8), np.zeros(9, np.float32)
        compile_kernel(kernel("k", [x], [out], body))(a, b)
        np.testing.assert_array_equal(b[1:], np.cumprod(a, dtype=np.float32))


def test_an_address_is_found_anew_where_part_of_its_index_was_written() -> None:
    n = E.dim("n")
    x, at, out = Buffer("x", "float32", (n, 2)), Buffer("at", "int64", (1,)), Buffer("out", "float32", (n,))

    def row(i: Expr) -> Stmt:
        further = If(x[i, at[0]] < x[i, 1], store(at, (0,), 1))
        return Allocate(at, block(store(at, (0,), 0), further, store(out, (i,), x[i, at[0]])))

    native, a, got = compile_kernel(kernel("k", [x], [out], loop("i", n, row), [n])), floats(6, 2), np.zeros(6, np.float32)
    native(a, got, 6)
    assert_same(got, a.max(axis=1))


@pytest.mark.parametrize("chain", [True, False])
def test_an_accumulation_that_waits_for_itself_waits_for_no_multiplication(chain: bool) -> None:
    """sums[0] += x[i] y[i] in a loop of its own adds; with other elements in between, the multiply-add is shorter."""
    x, y, sums = Buffer("x", "float32", (64,)), Buffer("y", "float32", (64,)), Buffer("sums", "float32", (64,))
    k = kernel("k", [x, y], [sums], loop("i", 64, lambda i: Accumulate(sums, (const(0) if chain else i,), x[i] * y[i], SUM)))
    assert ("llvm.fma" in emit_kernel(k, CpuTarget.parse("cpu -mcpu=haswell"))) is not chain
    a, b, got = floats(64), floats(64), np.ones(64, np.float32)
    compile_kernel(k)(a, b, got)
    np.testing.assert_allclose(got[0], 1 + a @ b if chain else 1 + a[0] * b[0], rtol=1e-5)


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32, 64])
def test_vectorized_loop(lanes: int) -> None:
    a, b, c = (Buffer(n, "float32", (4, 64)) for n in "abc")
    body = loop(
        "i",
        4,
        lambda i: loop("j", 64 // lanes, lambda j: vec(lanes, lambda v: store(c, (i, j * lanes + v), a[i, j * lanes + v] - b[i, 0]))),
    )
    x, y, z = floats(4, 64), floats(4, 64), np.zeros((4, 64), np.float32)
    compile_kernel(kernel("k", [a, b], [c], body))(x, y, z)
    np.testing.assert_array_equal(z, x - y[:, :1])


def test_masked_tail_stays_inside_the_buffers() -> None:
    n = E.dim("n", 0)
    a, b = Buffer("a", "float32", (n,)), Buffer("b", "float32", (n,))
    body = loop("i", (n + 15) // 16, lambda i: vec(16, lambda v: If(i * 16 + v < n, store(b, (i * 16 + v,), a[i * 16 + v] + 1.0))))
    f = compile_kernel(kernel("k", [a], [b], body, [n]))
    for size in (0, 1, 15, 16, 17, 100):
        x, y = at_page_end(floats(size)), at_page_end(np.zeros(size, np.float32))
        f(x, y, size)
        np.testing.assert_array_equal(y, x + 1)


def test_if_else_and_nested_masks() -> None:
    a, b = Buffer("a", "int32", (64,)), Buffer("b", "int32", (64,))
    n = E.dim("n", 0)

    def lane(v: Expr) -> Stmt:
        x = a[v]
        return If(x < 0, store(b, (v,), -x), If(v < n, store(b, (v,), x * 2), store(b, (v,), x + 1)))

    f = compile_kernel(kernel("k", [a], [b], vec(64, lane), [n]))
    x, y = rng.integers(-5, 5, 64, dtype=np.int32), np.zeros(64, np.int32)
    for limit in (0, 10, 64, 1000):
        f(x, y, limit)
        np.testing.assert_array_equal(y, np.where(x < 0, -x, np.where(np.arange(64) < limit, x * 2, x + 1)))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("slope", [-3, -1, 1, 2])
def test_lane_conditions(slope: int, strict: bool, flip: bool) -> None:
    for n in (E.dim("n", -(1 << 62)), E.dim("n", -50, 1000)):
        check_lane_conditions(n, slope, strict, flip)


def check_lane_conditions(n: Expr, slope: int, strict: bool, flip: bool) -> None:
    out = Buffer("o", "int32", (16,))

    def lane(v: Expr) -> Stmt:
        a, b = (n, v * slope) if flip else (v * slope, n)
        return store(out, (v,), select(a < b if strict else a <= b, E.const(1, "int32"), E.const(0, "int32")))

    f = compile_kernel(kernel("k", [], [out], vec(16, lane), [n]))
    v, y = np.arange(16) * slope, np.zeros(16, np.int32)
    lo, hi = E.bounds(n)
    for limit in (lo or 0, -50, -3, -2, -1, 0, 1, 2, 3, 15, 16, 17, hi or 1 << 62):
        f(y, limit)
        a, b = (limit, v) if flip else (v, limit)
        np.testing.assert_array_equal(y, a < b if strict else a <= b)


def test_serial_loop_inside_lanes_with_a_temporary_per_lane() -> None:
    a, out, t = Buffer("a", "float32", (16, 5)), Buffer("o", "float32", (16,)), Buffer("t", "float32", (2,), "register")

    def lane(v: Expr) -> Stmt:
        sums = loop("k", 5, lambda k: Accumulate(t, (k % 2,), a[v, k], SUM))
        return Allocate(t, block(store(t, (0,), 0.0), store(t, (1,), 0.0), sums, store(out, (v,), t[0] - t[1])))

    x, y = floats(16, 5), np.zeros(16, np.float32)
    compile_kernel(kernel("k", [a], [out], vec(16, lane)))(x, y)
    np.testing.assert_allclose(y, x[:, ::2].sum(1) - x[:, 1::2].sum(1), rtol=1e-5, atol=1e-6)


def test_lanes_that_meet_in_one_element() -> None:
    """The sum is a tree of halves; lanes that may meet (by index) go in order, and the last store wins."""
    a, index = Buffer("a", "float32", (16,)), Buffer("i", "int64", (16,))
    total, histogram, last = Buffer("t", "float32", (1,)), Buffer("h", "float32", (4,)), Buffer("l", "float32", (1,))

    def lane(v: Expr) -> Stmt:
        use = block(Accumulate(total, (E.const(0),), a[v], SUM), Accumulate(histogram, (index[v],), a[v], SUM), store(last, (0,), a[v]))
        return If(a[v] < 0.5, use)

    x, i = floats(16), rng.integers(0, 4, 16)
    t, h, last_value = np.zeros(1, np.float32), np.zeros(4, np.float32), np.zeros(1, np.float32)
    compile_kernel(kernel("k", [a, index], [total, histogram, last], vec(16, lane)))(x, i, t, h, last_value)
    expected, bins = np.where(x < 0.5, x, 0), np.zeros(4, np.float32)
    while len(expected) > 1:
        expected = np.add(*np.split(expected, 2))
    for value, place in zip(x, i, strict=True):
        if value < 0.5:
            bins[place] += value
    assert t[0] == expected[0] and last_value[0] == x[x < 0.5][-1]
    np.testing.assert_array_equal(h, bins)


@pytest.mark.parametrize("stride", [-2, -1, 2, 3, 4, 5])
def test_strided_access(stride: int) -> None:
    first = 0 if stride > 0 else 15 * -stride
    size = 15 * abs(stride) + 1
    a, b, c = Buffer("a", "int16", (size,)), Buffer("b", "int16", (16,)), Buffer("c", "int16", (size,))
    body = vec(
        16,
        lambda v: block(
            store(b, (v,), a[v * stride + first]), Accumulate(c, (v * stride + first,), a[v * stride + first], reducer(te.sum, "int16"))
        ),
    )
    x = at_page_end(rng.integers(-99, 99, size, dtype=np.int16))
    y, z = np.zeros(16, np.int16), np.ones(size, np.int16)
    expected = z.copy()
    compile_kernel(kernel("k", [a], [b, c], body))(x, y, z)
    picked = slice(None, None, stride)
    np.testing.assert_array_equal(y, x[picked])
    expected[picked] += x[picked]
    np.testing.assert_array_equal(z, expected)


def test_gather_scatter_and_symbolic_stride() -> None:
    n = E.dim("n")
    table, index, out = Buffer("t", "float32", (n, 3)), Buffer("i", "int32", (16,)), Buffer("o", "float32", (3, n))
    body = vec(16, lambda v: unroll(3, lambda c: store(out, (c, cast(index[v], "int64")), table[cast(index[v], "int64"), c] * 2.0), "c"))
    x, i, y = floats(20, 3), rng.permutation(20)[:16].astype(np.int32), np.zeros((3, 20), np.float32)
    compile_kernel(kernel("k", [table, index], [out], body, [n]))(x, i, y, 20)
    expected = np.zeros((20, 3), np.float32)
    expected[i] = x[i] * 2
    np.testing.assert_array_equal(y.T, expected)


# ---------------------------------------------------------------- select must not fault


def at_page_end(values: np.ndarray) -> np.ndarray:
    """A copy that ends where the mapped memory ends."""
    page = mmap.PAGESIZE
    pages = -(-values.nbytes // page) if values.nbytes else 1
    area = mmap.mmap(-1, (pages + 1) * page)
    base = np.frombuffer(area, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(base.ctypes.data + pages * page), ctypes.c_size_t(page), 0) == 0
    start = pages * page - values.nbytes
    copy = base[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


@pytest.mark.parametrize("kind", ["serial", "vectorized"])
def test_select_guards_reads(kind: str) -> None:
    """Padding as a select; the buffer ends at a page that must not be touched."""
    a, b = Buffer("a", "float32", (40,)), Buffer("b", "float32", (64,))

    def point(i: Expr) -> Stmt:
        return store(b, (i,), select(E.all_of([i < 40]), a[i], 0.25))

    body = loop("i", 64, point) if kind == "serial" else loop("o", 4, lambda o: vec(16, lambda v: point(o * 16 + v)))
    x, y = at_page_end(floats(40)), np.zeros(64, np.float32)
    compile_kernel(kernel("k", [a], [b], body))(x, y)
    np.testing.assert_array_equal(y, np.concatenate([x, np.full(24, 0.25, np.float32)]))


def test_nested_select_with_indirect_reads() -> None:
    index, a, b = Buffer("i", "int64", (16,)), Buffer("a", "float32", (8,)), Buffer("b", "float32", (16,))
    for kind in ("serial", "vectorized"):
        body = loop("l", 16, lambda v: store(b, (v,), select(0 <= index[v], select(index[v] < 8, a[index[v]], 1.0), -1.0)), kind)
        i = rng.integers(-(1 << 40), 1 << 40, 16)
        i[:8] = rng.permutation(8)
        x, y = at_page_end(floats(8)), np.zeros(16, np.float32)
        compile_kernel(kernel("k", [index, a], [b], body))(i, x, y)
        np.testing.assert_array_equal(y, np.where(i < 0, -1, np.where(i < 8, x[np.clip(i, 0, 7)], 1)).astype(np.float32))


def test_scalar_read_under_an_empty_mask_does_not_fault() -> None:
    n = E.dim("n", 0)
    a, b = Buffer("a", "float32", (n,)), Buffer("b", "float32", (16,))
    f = compile_kernel(kernel("k", [a], [b], vec(16, lambda v: If(v < n, store(b, (v,), a[n - 1 + 5000 * 0]))), [n]))
    y = np.zeros(16, np.float32)
    f(at_page_end(floats(0)), y, 0)
    assert not y.any()
    x = floats(3)
    f(x, y, 3)
    np.testing.assert_array_equal(y, [x[2]] * 3 + [0] * 13)


def test_provably_safe_select_needs_no_mask() -> None:
    a, b = Buffer("a", "float32", (16,)), Buffer("b", "float32", (16,))
    text = emit_kernel(kernel("k", [a], [b], vec(16, lambda v: store(b, (v,), select(a[v] < 0.0, 0.0, a[v])))), HOST)
    assert "masked" not in text


# ---------------------------------------------------------------- parallel loops


def python_pool(parts: int) -> tuple[ctypes.Array[ctypes.c_void_p], list[tuple[int, int]], Any]:
    """A pool whose `parallel_for` runs chunks one after the other, last first."""
    chunks: list[tuple[int, int]] = []

    @PARALLEL_FOR
    def parallel_for(pool: int, body: int, closure: int, extent: int) -> None:
        edges = [extent * p // parts for p in range(parts + 1)]
        for begin, end in reversed(list(itertools.pairwise(edges))):
            chunks.append((begin, end))
            BODY(body)(closure, begin, end)

    pool = (ctypes.c_void_p * 1)(ctypes.cast(parallel_for, ctypes.c_void_p))
    return pool, chunks, parallel_for


def test_parallel_loop_through_the_pool_and_without() -> None:
    n = E.dim("n", 0)
    a, b, row = Buffer("a", "float32", (n, 32)), Buffer("b", "float32", (n, 32)), Buffer("r", "float32", (32,), "register")

    def body(i: Expr) -> Stmt:
        copy = loop("j", 32, lambda j: store(row, (j,), a[i, 31 - j]), "parallel")  # nested: serial
        out = loop("k", 2, lambda k: vec(16, lambda v: store(b, (i, k * 16 + v), row[k * 16 + v] + cast(n, "float32"))))
        return Allocate(row, block(copy, out))

    f = compile_kernel(kernel("k", [a], [b], loop("i", n, body, "parallel"), [n]))
    pool, chunks, _keep = python_pool(3)
    for size in (0, 1, 2, 10):
        for address in (None, ctypes.addressof(pool)):
            x, y = floats(size, 32), np.zeros((size, 32), np.float32)
            chunks.clear()
            f(x, y, size, pool=address)
            np.testing.assert_array_equal(y, x[:, ::-1] + np.float32(size))
            assert bool(chunks) == (address is not None and size > 1)


def test_parallel_loop_inside_serial_and_unrolled_loops() -> None:
    a = Buffer("a", "int64", (3, 2, 8))
    body = loop("i", 3, lambda i: unroll(2, lambda u: loop("p", 8, lambda p: store(a, (i, u, p), i * 100 + u * 10 + p), "parallel"), "u"))
    pool, chunks, _keep = python_pool(4)
    y = np.zeros((3, 2, 8), np.int64)
    compile_kernel(kernel("k", [], [a], body))(y, pool=ctypes.addressof(pool))
    i, u, p = np.indices(y.shape)
    np.testing.assert_array_equal(y, i * 100 + u * 10 + p)
    assert len(chunks) == 3 * 2 * 4


# ---------------------------------------------------------------- dtypes


def elementwise(function: Any, dtypes: tuple[str, ...], out: str, lanes: int, size: int = 64) -> Kernel:
    ins, o = [Buffer(f"a{n}", d, (size,)) for n, d in enumerate(dtypes)], Buffer("o", out, (size,))
    body = loop(
        "i",
        size // lanes,
        lambda i: loop("l", lanes, lambda v: store(o, (i * lanes + v,), function(*(b[i * lanes + v] for b in ins))), "vectorized"),
    )
    return kernel("k", ins, [o], body)


def special_values(dtype: str, size: int = 64) -> np.ndarray:
    if dtype == "bool":
        return rng.integers(0, 2, size).astype(np.bool_)
    if not is_float(dtype):
        info = np.iinfo(dtype)
        values = rng.integers(info.min, info.max, size, dtype=dtype, endpoint=True)
        values[:6] = [info.min, info.max, 0, 1, info.max - 1, info.min + 1]
        return values
    values = (rng.standard_normal(size) * 10.0 ** rng.integers(-12, 30, size)).astype(np.float64)
    values[:12] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 65504, 65520, 1e-7, 3e38, 127.5, -128.5]
    with np.errstate(all="ignore"):
        return values.astype(to_numpy(dtype))


def reference_cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """Saturating, NaN to 0."""
    if dtype == "bool":
        return x != 0
    if x.dtype.kind not in "iub" and not is_float(dtype):
        lo, hi = (int(v) for v in (np.iinfo(dtype).min, np.iinfo(dtype).max))
        wide = [float(v) for v in x]
        return np.array([0 if math.isnan(v) else hi if v >= hi else lo if v <= lo else int(v) for v in wide], dtype)
    return x.astype(np.float64 if is_float(dtype) and x.dtype.kind == "b" else x.dtype).astype(to_numpy(dtype))


WIDE = [dtype for dtype in BITS if dtype not in NARROW]


@pytest.mark.parametrize("source", WIDE)
def test_casts(source: str) -> None:
    x = special_values(source)
    for dtype in WIDE:
        if dtype == source:
            continue
        with np.errstate(all="ignore"):
            expected = reference_cast(x, dtype)
        for lanes in (1, 16):
            y = np.zeros(64, to_numpy(dtype))
            compile_kernel(elementwise(lambda a, dtype=dtype: cast(a, dtype), (source,), dtype, lanes))(x, y)
            assert_same(y, expected, f"{source} -> {dtype}")


@pytest.mark.parametrize("source", BITS)
def test_casts_of_narrow_types(source: str) -> None:
    """Bit for bit what the interpreter gives: every code, and floats near their ties (NaN with any sign and payload)."""
    if source in NARROW:
        x = np.arange(256, dtype=np.uint8).view(to_numpy(source))
    else:
        x = np.resize(special_values(source), 256)
        if is_float(source):
            halves = np.arange(-64, 64) / 16 * 2.0 ** rng.integers(-8, 8, 128)
            x[128:] = halves.astype(x.dtype)
    for dtype in BITS if source in NARROW else NARROW:
        if dtype == source:
            continue
        for lanes in (1, 16):
            program = elementwise(lambda a, dtype=dtype: cast(a, dtype), (source,), dtype, lanes, 256)
            y, expected = np.zeros(256, to_numpy(dtype)), np.zeros(256, to_numpy(dtype))
            run_kernel(program, dict(zip(program.buffers, (x, expected), strict=True)))
            compile_kernel(program)(x, y)
            if not is_float(dtype):
                y, expected = y.view(np.uint8), expected.view(np.uint8)
            assert_same(y, expected, f"{source} -> {dtype}, {lanes} lanes")


@pytest.mark.parametrize("target", [HOST, CpuTarget.parse("cpu -march=x86_64 -mcpu=haswell")], ids=["host", "haswell"])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
@pytest.mark.parametrize("zero", [0, 100, -7])
def test_quantisation_in_lanes(dtype: str, zero: int, target: CpuTarget) -> None:
    """Rounded, moved, saturated; and back to floats without integers between."""
    near = np.concatenate([np.arange(-300, 300), [65535, 65536, -32768, -32769]])[:, None] + np.array([-0.5, -0.25, 0, 0.25, 0.5])
    x = np.concatenate([special_values("float32"), near.reshape(-1)[: 64 * 47 - 64].astype(np.float32)])
    with np.errstate(all="ignore"):
        quantized = reference_cast((np.rint(x) + np.float32(zero)).astype(np.float32), dtype)
    function = lambda a: cast(E.unary("round", a) + float(zero), dtype)
    for lanes in (1, 16):
        y = np.zeros(x.size, dtype)
        compile_kernel(elementwise(function, ("float32",), dtype, lanes, x.size), target)(x, y)
        assert_same(y, quantized, f"{lanes} lanes")
        for shift in (0, -zero, 3):
            back = np.zeros(x.size, np.float32)
            whole = lambda a, shift=shift: cast(cast(function(a), "int32") + shift, "float32")
            compile_kernel(elementwise(whole, ("float32",), "float32", lanes, x.size), target)(x, back)
            assert_same(back, (quantized.astype(np.int32) + shift).astype(np.float32), f"{lanes} lanes, {shift}")


@pytest.mark.parametrize("dtype", list(FLOATS))
def test_float_arithmetic(dtype: str) -> None:
    x, y = special_values(dtype), special_values(dtype)[::-1].copy()
    np_max, np_min = np.maximum, np.minimum
    cases = [
        (lambda a, b: a + b, np.add), (lambda a, b: a - b, np.subtract), (lambda a, b: a * b, np.multiply), (lambda a, b: a / b, np.divide),
        (E.maximum, np_max), (E.minimum, np_min), (lambda a, b: E.maximum(a, 0.5), lambda a, b: np_max(a, a.dtype.type(0.5))),
        (lambda a, b: E.unary("neg", a), lambda a, b: -a), (lambda a, b: E.unary("abs", b), lambda a, b: abs(b)),
        (lambda a, b: E.unary("sqrt", a), lambda a, b: np.sqrt(a)), (lambda a, b: E.unary("floor", a), lambda a, b: np.floor(a)),
        (lambda a, b: E.unary("ceil", a), lambda a, b: np.ceil(a)), (lambda a, b: E.unary("round", a), lambda a, b: np.rint(a)),
        (lambda a, b: E.unary("trunc", a), lambda a, b: np.trunc(a)),
    ]  # fmt: skip
    for function, reference in cases:
        with np.errstate(all="ignore"):
            expected = reference(x, y)
        for lanes in (1, 16):
            z = np.zeros(64, to_numpy(dtype))
            compile_kernel(elementwise(function, (dtype, dtype), dtype, lanes))(x, y, z)
            assert_same(z, expected)
            zero = (z == 0) & (expected == 0)
            if reference not in (np_max, np_min):
                np.testing.assert_array_equal(np.signbit(z[zero]), np.signbit(expected[zero]))


@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "uint64"])
def test_predicates_and_comparisons(dtype: str) -> None:
    x = special_values(dtype)
    y = np.where(rng.random(64) < 0.5, x, special_values(dtype)[::-1]).astype(x.dtype)
    cases = [(lambda a, b: a < b, np.less), (lambda a, b: a <= b, np.less_equal), (E.equal, np.equal), (E.not_equal, np.not_equal)]
    if is_float(dtype):
        cases += [(lambda a, b: te.isnan(a), lambda a, b: np.isnan(a)), (lambda a, b: te.isinf(a), lambda a, b: np.isinf(a))]
    for function, reference in cases:
        for lanes in (1, 16):
            z = np.zeros(64, np.bool_)
            compile_kernel(elementwise(function, (dtype, dtype), "bool", lanes))(x, y, z)
            with np.errstate(invalid="ignore"):
                np.testing.assert_array_equal(z, reference(x, y))


def c_divide(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED])
def test_integer_arithmetic(dtype: str) -> None:
    x, y = special_values(dtype), special_values(dtype)[::-1].copy()
    y[3:20] = rng.integers(0, 5, 17)
    y[20] = -1 if dtype in SIGNED else 7
    x[20] = np.iinfo(dtype).min
    bits = BITS[dtype]
    y[21:24] = [0, bits - 1, min(bits, np.iinfo(dtype).max)]
    cases = {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "min": min, "max": max,
        "floordiv": lambda a, b: a // b if b else 0, "mod": lambda a, b: a % b if b else 0,
        "truncdiv": c_divide, "truncmod": lambda a, b: a - c_divide(a, b) * b if b else 0,
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    }  # fmt: skip
    for op, reference in cases.items():
        expected = [wrap(reference(int(a), int(b)), dtype) for a, b in zip(x, y, strict=True)]
        for lanes in (1, 16):
            z = np.zeros(64, dtype)
            compile_kernel(elementwise(lambda a, b, op=op: E.binary(op, a, b), (dtype, dtype), dtype, lanes))(x, y, z)
            np.testing.assert_array_equal(z, np.array(expected, dtype), err_msg=op)
    for op in ("floordiv", "mod", "truncdiv", "truncmod"):
        for c in (1, 3, 8) + ((-1, -3, -8) if dtype in SIGNED else ()):
            expected = [wrap(cases[op](int(a), c), dtype) for a in x]
            z = np.zeros(64, dtype)
            compile_kernel(elementwise(lambda a, op=op, c=c: E.binary(op, a, c), (dtype,), dtype, 16))(x, z)
            np.testing.assert_array_equal(z, np.array(expected, dtype), err_msg=f"{op} {c}")


def test_bits_of_bools() -> None:
    x, y, z = rng.integers(0, 2, 64).astype(np.bool_), np.zeros(64, np.uint8), np.zeros(64, np.bool_)
    compile_kernel(elementwise(lambda a: E.bitcast(a, "uint8"), ("bool",), "uint8", 16))(x, y)
    np.testing.assert_array_equal(y, x.view(np.uint8))
    compile_kernel(elementwise(lambda a: E.bitcast(a, "bool"), ("uint8",), "bool", 16))(y, z)
    np.testing.assert_array_equal(z, x)


def test_shifts_and_bits() -> None:
    x, s = special_values("int32"), rng.integers(0, 40, 64).astype(np.int32)
    for lanes in (1, 16):
        for op in ("shl", "shr"):
            z = np.zeros(64, np.int32)
            compile_kernel(elementwise(lambda a, b, op=op: E.binary(op, a, b), ("int32", "int32"), "int32", lanes))(x, s, z)
            expected = [
                wrap(int(a) << int(b) if op == "shl" and b < 32 else 0 if op == "shl" else int(a) >> int(b), "int32")
                for a, b in zip(x, s, strict=True)
            ]
            np.testing.assert_array_equal(z, np.array(expected, np.int32))
        z = np.zeros(64, np.int32)
        compile_kernel(elementwise(lambda a: E.unary("popcount", a), ("int32",), "int32", lanes))(x, z)
        np.testing.assert_array_equal(z, np.bitwise_count(x.view(np.uint32)))


def test_index_arithmetic_in_lanes() -> None:
    """Flattened index back to coordinates, odd sizes: // and % by constants on vectors of 64-bit integers."""
    o = Buffer("o", "int64", (6 * 64,))
    body = loop(
        "i", 6, lambda i: vec(64, lambda v: store(o, (i * 64 + v,), (i * 64 + v) // 7 % 5 * 1000 + (i * 64 + v) % 7 - (i * 64 - v) // 3))
    )
    y = np.zeros(6 * 64, np.int64)
    compile_kernel(kernel("k", [], [o], body))(y)
    n = np.arange(6 * 64)
    i, v = n // 64, n % 64
    np.testing.assert_array_equal(y, n // 7 % 5 * 1000 + n % 7 - (i * 64 - v) // 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "bool", "uint8"])
def test_reductions_of_every_width(dtype: str) -> None:
    fold = te.any if dtype == "bool" else te.max
    r = reducer(fold, dtype)
    a, o = Buffer("a", dtype, (8, 32)), Buffer("o", dtype, (32,))
    body = vec(32, lambda v: block(store(o, (v,), r.identity), loop("k", 8, lambda k: Accumulate(o, (v,), a[k, v], r))))
    x = special_values(dtype, 256).reshape(8, 32)
    y = np.zeros(32, to_numpy(dtype))
    compile_kernel(kernel("k", [a], [o], body))(x, y)
    assert_same(y, x.any(0) if dtype == "bool" else np.max(x, axis=0))


def test_bfloat16_sum_rounds_each_step() -> None:
    r = reducer(te.sum, "bfloat16")
    a, o = Buffer("a", "bfloat16", (8, 16)), Buffer("o", "bfloat16", (16,))
    body = vec(16, lambda v: block(store(o, (v,), r.identity), loop("k", 8, lambda k: Accumulate(o, (v,), a[k, v], r))))
    x, y = floats(8, 16).astype(ml_dtypes.bfloat16), np.zeros(16, ml_dtypes.bfloat16)
    compile_kernel(kernel("k", [a], [o], body))(x, y)
    expected = np.zeros(16, ml_dtypes.bfloat16)
    for row in x:
        expected = expected + row
    np.testing.assert_array_equal(y, expected)


def test_long_expression_chains() -> None:
    def chain(a: Expr) -> Expr:
        for _ in range(3000):
            a = E.unary("abs", a) + 1.0
        return a

    x, y = floats(64), np.zeros(64, np.float32)
    compile_kernel(elementwise(chain, ("float32",), "float32", 16))(x, y)
    np.testing.assert_allclose(y, abs(x) + 3000, rtol=1e-4)


# ---------------------------------------------------------------- machine code


def gemm(mr: int, nv: int, lanes: int = 16, unrolled: int = 1) -> Kernel:
    """C[48, 64] += A B with an accumulator tile of mr x nv vectors over a serial k loop, of which so many steps are unrolled."""
    m, n, k = mr * 4, nv * lanes * 2, 64
    a, b, c = Buffer("A", "float32", (m, k)), Buffer("B", "float32", (k, n)), Buffer("C", "float32", (m, n))
    acc = Buffer("acc", "float32", (mr, nv, lanes), "register")

    def tile(name: str, body: Any) -> Stmt:
        return unroll(mr, lambda i: unroll(nv, lambda j: vec(lanes, lambda v: body(i, j, v), f"l{name}"), f"j{name}"), f"i{name}")

    def at(io: Expr, jo: Expr) -> Stmt:
        def update(k: Expr, i: Expr, j: Expr, v: Expr) -> Stmt:
            return Accumulate(acc, (i, j, v), a[io * mr + i, k] * b[k, (jo * nv + j) * lanes + v], SUM)

        def step(outer: Expr) -> Stmt:
            return unroll(unrolled, lambda inner: tile("1", lambda i, j, v: update(outer * unrolled + inner, i, j, v)), "s")

        steps = loop("k", k // unrolled, step)
        done = tile("2", lambda i, j, v: store(c, (io * mr + i, (jo * nv + j) * lanes + v), acc[i, j, v]))
        return Allocate(acc, block(tile("0", lambda i, j, v: store(acc, (i, j, v), 0.0)), steps, done))

    return kernel("gemm", [a, b], [c], loop("io", 4, lambda io: loop("jo", 2, lambda jo: at(io, jo)), "parallel"))


@pytest.mark.parametrize(
    "target, mr, nv, lanes",
    [("cpu -mcpu=skylake-avx512", 6, 4, 16), ("cpu -mcpu=skylake-avx512", 14, 2, 16), ("cpu -mcpu=haswell", 6, 2, 8), ("cpu -mcpu=neoverse-n1", 6, 4, 4)],
)  # fmt: skip
@pytest.mark.parametrize("unrolled", [1, 2, 4])
def test_register_tiles_stay_in_registers(target: str, mr: int, nv: int, lanes: int, unrolled: int) -> None:
    """Also where LLVM would bring loads of neighbours together, which belong to several unrolled steps."""
    t = CpuTarget.parse(target)
    text = emit_kernel(gemm(mr, nv, lanes, unrolled), t)
    asm = assembly(text, t)
    assert spill_count(asm) == 0
    multiply_adds = asm.count("vfmadd") + asm.count("fmla")
    assert multiply_adds == mr * nv * unrolled
    assert undefined_symbols(compile_ir(text, t)) == []


def test_register_tile_result() -> None:
    x, y, z = floats(24, 64), floats(64, 128), np.zeros((24, 128), np.float32)
    compile_kernel(gemm(6, 4))(x, y, z)
    np.testing.assert_allclose(z, x @ y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32"])
def test_vectors_of_floats_saturate_as_integers(source: str, dtype: str) -> None:
    """... without scalar code."""
    ends = [float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)]
    values = [0.0, -0.0, 1.5, -1.5, 1e-40, np.inf, -np.inf, np.nan, 1e30, -1e30, 2147483520.0, 2147483648.0, -2147483904.0]
    values += [np.nextafter(np.array(e + d, source), np.array(to, source)) for e in ends for d in (-1, 0, 1) for to in (-np.inf, e, np.inf)]
    x = np.array((values * 2)[: len(values) // 16 * 32], source)
    a, b = Buffer("a", source, x.shape), Buffer("b", dtype, x.shape)
    lanes = 16 if source == "float32" else 8
    body = loop("i", x.size // lanes, lambda i: vec(lanes, lambda l: store(b, (i * lanes + l,), cast(a[i * lanes + l], dtype))))
    k, found = kernel("k", [a], [b], body), np.empty(x.shape, dtype)
    compile_kernel(k)(x, found)
    with np.errstate(all="ignore"):
        expected = np.clip(np.trunc(np.where(np.isnan(x), 0, x).astype(np.float64)), *ends).astype(dtype)
    assert_same(found, expected)
    skylake = CpuTarget.parse("cpu -mcpu=skylake-avx512")
    assert "cvttss2si" not in assembly(emit_kernel(k, skylake), skylake) and "cvttsd2si" not in assembly(emit_kernel(k, skylake), skylake)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
@pytest.mark.parametrize("columns", [17, 18, 31])
def test_a_masked_store_leaves_the_next_elements(dtype: str, columns: int) -> None:
    """LLVM writes four bytes where a constant mask leaves one lane of narrow integers. Rows are stored last to first. Wide elements are
    stored by several stores, as processors let reads behind a masked one wait."""
    a, b = Buffer("a", "float32", (4, columns)), Buffer("b", dtype, (4, columns))

    def element(i: Expr, o: Expr, l: Expr) -> Stmt:
        return If(as_expr(o * 16 + l < columns), store(b, (3 - i, o * 16 + l), cast(a[3 - i, o * 16 + l], dtype)))

    k = kernel("k", [a], [b], loop("i", 4, lambda i: unroll(2, lambda o: vec(16, lambda l: element(i, o, l)), "o")))
    x, found = rng.integers(0, 100, (4, columns)).astype(np.float32), np.zeros((4, columns), to_numpy(dtype))
    compile_kernel(k)(x, found)
    assert_same(found, x.astype(dtype))
    assert dtype != "float32" or "masked.store" not in emit_kernel(k, HOST)


def test_lanes_behind_a_temporary_compute_with_zeros() -> None:
    """What lay on the stack there were often subnormal numbers (upper halves of addresses), and each product of these took 150 cycles."""
    a, b, row = (Buffer(n, "float32", (20,)) for n in ("a", "b", "row"))

    def whole(target: Buffer, value: Any, name: str) -> Stmt:
        return unroll(2, lambda o: vec(16, lambda l: If(as_expr(o * 16 + l < 20), store(target, (o * 16 + l,), value(o * 16 + l)))), name)

    k = kernel("k", [a], [b], Allocate(row, block(whole(row, lambda i: a[i], "p"), whole(b, lambda i: row[i] * 2.0, "q"))))
    ir = emit_kernel(k, HOST)
    (end,) = re.findall(r"(%\S+) = getelementptr float, ptr %a\d+, i64 20$", ir, re.MULTILINE)
    assert f"store <64 x float> zeroinitializer, ptr {end}, align 4" in ir
    x, found = floats(20), np.zeros(20, np.float32)
    compile_kernel(k)(x, found)
    assert_same(found, x * 2)


def test_spills_are_counted() -> None:
    t = CpuTarget.parse("cpu -mcpu=haswell")
    assert spill_count(assembly(emit_kernel(gemm(10, 4, 8), t), t)) > 20


@pytest.mark.parametrize("target", ["cpu -mcpu=x86-64", "cpu -mcpu=haswell", "cpu -mcpu=skylake-avx512", "cpu -mcpu=sapphirerapids", "aarch64", "cpu -mcpu=neoverse-v1"])  # fmt: skip
def test_objects_import_nothing(target: str) -> None:
    t = CpuTarget.parse(target)
    kernels = [elementwise(lambda a, d=d: cast(a, d), (s,), d, lanes) for s in WIDE for d in WIDE if s != d for lanes in (1, 16)]
    kernels += [elementwise(lambda a, d=d: cast(a, d), (s,), d, 16) for n in NARROW for s, d in ((n, "float32"), ("float64", n))]
    for dtype in FLOATS:
        for op in ("floor", "ceil", "round", "trunc", "sqrt"):
            kernels.append(elementwise(lambda a, op=op: E.unary(op, a), (dtype,), dtype, 8))
        kernels.append(elementwise(lambda a, b, c: E.fma(a, b, c), (dtype,) * 3, dtype, 8))
        kernels.append(elementwise(lambda a, b: E.binary("mod", a, b) + E.binary("truncmod", a, b), (dtype,) * 2, dtype, 8))
        kernels += [elementwise(lambda a, name=name: E.unary(name, a), (dtype,), dtype, 4, size=4) for name in sorted(ELEMENTARY - {"pow"})]
        kernels.append(elementwise(lambda a, b: E.binary("pow", a, b), (dtype,) * 2, dtype, 4, size=4))
    kernels += [elementwise(lambda a, b: E.binary("floordiv", a, b), (d, d), d, 8) for d in (*SIGNED, *UNSIGNED)]
    copy = Buffer("a", "float32", (4096,)), Buffer("b", "float32", (4096,))
    kernels.append(kernel("k", copy[:1], copy[1:], loop("i", 4096, lambda i: store(copy[1], (i,), copy[0][i]))))
    kernels.append(kernel("k", [], copy[1:], loop("i", 4096, lambda i: store(copy[1], (i,), 0.0))))
    modules = []
    for n, k in enumerate(kernels):
        text = emit_kernel(k, t)
        modules.append(text.replace('@"k"', f'@"k{n}"'))
    assert undefined_symbols(compile_ir(merged(modules), t)) == []


def merged(modules: list[str]) -> str:
    """One module of many: compiling each alone takes longer."""
    head, body, seen = modules[0].splitlines()[0], [], set()
    for text in modules:
        for line in text.splitlines()[1:]:
            if line.startswith(("declare", "attributes")):
                if line in seen:
                    continue
                seen.add(line)
            body.append(line)
    return "\n".join([head, *body])


def test_emission_is_fast() -> None:
    """A tile of 28 vectors with k unrolled 24 times: 672 multiply-adds."""
    import time

    a, b, c = Buffer("A", "float32", (14, 256)), Buffer("B", "float32", (256, 32)), Buffer("C", "float32", (14, 32))
    body = loop(
        "ko",
        10,
        lambda ko: unroll(
            24,
            lambda ki: unroll(
                14,
                lambda i: unroll(
                    2,
                    lambda j: vec(16, lambda v: Accumulate(c, (i, j * 16 + v), a[i, ko * 24 + ki] * b[ko * 24 + ki, j * 16 + v], SUM)),
                    "j",
                ),
                "i",
            ),
            "ki",
        ),
    )
    k = kernel("k", [a, b], [c], body)
    best = 1.0
    for _ in range(5):
        start = time.process_time()
        emit_kernel(k, HOST)
        best = min(best, time.process_time() - start)
    assert best < 0.15  # 0.02 s on an idle machine


# ---------------------------------------------------------------- refusals


def test_refusals_name_the_culprit() -> None:
    n = E.dim("n")
    a = Buffer("a", "float32", (64,))
    big = Buffer("big", "float32", (1 << 20,))
    symbolic = Buffer("t", "float32", (n,), "register")
    cases = [
        (loop("i", n, lambda i: store(a, (i,), 0.0), "unrolled"), "unrolled loop `i`"),
        (loop("i", 12, lambda i: store(a, (i,), 0.0), "vectorized"), "12 iterations"),
        (loop("i", 8, lambda i: vec(8, lambda v: store(a, (i * 8 + v,), 0.0)), "vectorized"), "inside vectorized loop `i`"),
        (loop("i", 8, lambda i: store(a, (i,), 0.0), "block.x"), "`block.x`"),
        (Allocate(big, store(big, (0,), 0.0)), "`big`"),
        (Allocate(symbolic, store(symbolic, (0,), 0.0)), "`t`"),
        (store(big, (0,), 0.0), "`big`"),
        (vec(16, lambda v: loop("k", v, lambda k: store(a, (k,), 0.0))), "extent of loop `k`"),
        (store(a, (0,), cast(E.var("m"), "float32")), "`m`"),
    ]
    for body, message in cases:
        with pytest.raises(CodegenError, match=message):
            emit_kernel(kernel("k", [], [a], body, [n]), HOST)


def test_llvm_errors_are_codegen_errors() -> None:
    with pytest.raises(CodegenError, match="LLVM refused"):
        compile_ir("define void @f() {\n  %x = add i32 %y, 1\n  ret void\n}", HOST)


def test_inactive_lanes_do_not_look_beyond_the_stack() -> None:
    text = """
    kernel k(x: float64[4], y: float64[1, 4]) -> (y) {
      vectorized i in 0..2 {
        for j in 0..4 {
          alloc t: float64[1, 4000]
          for m in 0..4 {
            if i < 1 {
              t[i, m * j] = x[j]
            }
          }
          for m in 0..1 {
            if i < 1 {
              y[i, j] = t[i, m * 3 + j] * 2.0
            }
          }
        }
      }
    }
    """
    ir = emit_kernel(parse_kernel(dedent(text).strip()), HOST)
    gathers = [line for line in ir.splitlines() if "call" in line and "masked.gather" in line]
    assert gathers and not any("splat (i1 true)" in line for line in gathers)
