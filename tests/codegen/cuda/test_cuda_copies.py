"""Copies from global to shared memory in the background: what becomes one, of which size, and that it copies what it should."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.copies import without_lane
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.ir import expr as E
from tcomp.ir.dtypes import BITS, to_numpy
from tcomp.ir.expr import Expr, cast, evaluate_int, select
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import VECTORIZED, Allocate, Buffer, For, If, Kernel, Stmt, block, loop, store
from tcomp.target import CudaTarget
from tests.codegen.cuda import cuda_host
from tests.codegen.cuda.test_cuda import needs_nvrtc

TARGET = CudaTarget.parse("cuda")
needs_compiler = pytest.mark.skipif(cuda_host.compiler() is None, reason="there is no C++ compiler")
ROWS, THREADS = 3, 8
Body = Callable[[Buffer, Buffer, Expr, Expr], Stmt]


def staged(body: Body, dtype: str = "float32", columns: int = 64, clear: bool = False) -> Kernel:
    """Rows of `x`, one after the other, by way of shared memory into `y`, where they are turned around; `body(tile, x, row, thread)`
    copies. With `clear` the tile is zero before."""
    x, y = Buffer("x", dtype, (ROWS, columns)), Buffer("y", dtype, (ROWS, columns))
    tile = Buffer("tile", dtype, (columns,), "shared")
    width = columns // THREADS

    def row(r: Expr) -> Stmt:
        zero = loop("z", columns, lambda i: store(tile, (i,), E.const(0, dtype)), "thread.x")
        fill = loop("t", THREADS, lambda t: body(tile, x, r, t), "thread.x")

        def out(t: Expr) -> Stmt:
            return loop("j", width, lambda j: store(y, (r, t * width + j), tile[columns - 1 - t * width - j]))

        return block(*([zero] if clear else []), fill, loop("u", THREADS, out, "thread.x"))

    return Kernel("k", (x, y), (y,), (), Allocate(tile, loop("r", ROWS, row)))


def lanes(count: int, body: Callable[[Expr], Stmt], name: str = "v") -> Stmt:
    return loop(name, count, body, VECTORIZED)


def given(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    bits = np.random.default_rng(0).integers(0, 256, (*shape, 8), np.uint8)
    return bits[..., 0].astype(bool) if dtype == "bool" else (bits[..., 0] % 100).astype(to_numpy(dtype))


def checked(kernel: Kernel, target: CudaTarget = TARGET) -> str:
    """The text, after it has computed what the interpreter has."""
    x, y = kernel.buffers
    shape = tuple(evaluate_int(n, {}) for n in x.shape)
    array, want = given(x.dtype, shape), np.zeros(shape, to_numpy(y.dtype))
    run_kernel(kernel, {x: array, y: want})
    text, (launch,) = emit_kernel(kernel, target)
    for descending in (False, True):
        got = np.full(shape, 77).astype(want.dtype)
        cuda_host.launch(text, launch.function, (1, 1, 1), launch.block, [array.ctypes.data, got.ctypes.data], descending)
        np.testing.assert_array_equal(*(x.view(f"u{x.itemsize}") for x in (got, want)))  # not every NaN is one to NumPy
    return text


def sizes(text: str) -> list[str]:
    return re.findall(r"start_copy<(\d+)>\(", text.split("__global__", 1)[1])


def whole_rows(count: int) -> Body:
    return lambda tile, x, r, t: lanes(count, lambda v: store(tile, (t * count + v,), x[r, t * count + v]))


@needs_compiler
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_sizes(dtype: str, count: int) -> None:
    """Lanes side by side of 4, 8 or 16 bytes together; single elements of 4 or 8 bytes where they are more; nothing else."""
    bits = BITS[dtype]
    kernel = staged(whole_rows(count), dtype, THREADS * count)
    text = checked(kernel)
    size = max(bits, 8) // 8
    together = size * count if count > 1 and size * count in (4, 8, 16) else size
    assert sizes(text) == ([str(together)] if together in (4, 8, 16) else [])
    assert ("wait_for_copies<0>" in text) == (together in (4, 8, 16))


@needs_compiler
@pytest.mark.parametrize(
    ("target", "expected"),
    [("cuda -arch=sm_75", []), ("cuda -arch=sm_90a,sm_75", []), ("cuda -arch=sm_80", ["16"]), ("cuda -scalar", ["4"])],
)
def test_targets(target: str, expected: list[str]) -> None:
    """From sm_80 on, for all architectures together; by element where buffers need not be aligned."""
    assert sizes(checked(staged(whole_rows(4), columns=32), CudaTarget.parse(target))) == expected


def odd(tile: Buffer, x: Buffer, r: Expr, t: Expr) -> Stmt:
    """Positions that are not divisible by the lanes."""
    return lanes(4, lambda v: store(tile, (t * 4 + v,), x[r, (t * 4 + v + 1) % 32]))


def turned(tile: Buffer, x: Buffer, r: Expr, t: Expr) -> Stmt:
    """Lanes side by side in global memory alone."""
    return lanes(4, lambda v: store(tile, (v * THREADS + t,), x[r, t * 4 + v]))


def converted(tile: Buffer, x: Buffer, r: Expr, t: Expr) -> Stmt:
    return lanes(4, lambda v: store(tile, (t * 4 + v,), cast(cast(x[r, t * 4 + v], "float16"), "float32")))


def guarded(limit: int) -> Body:
    return lambda tile, x, r, t: lanes(4, lambda v: If(t * 4 + v < limit, store(tile, (t * 4 + v,), x[r, t * 4 + v])))


def zeros(limit: int, zero: float = 0.0) -> Body:
    def body(tile: Buffer, x: Buffer, r: Expr, t: Expr) -> Stmt:
        def lane(v: Expr) -> Stmt:
            return store(tile, (t * 4 + v,), select(t * 4 + v < limit, x[r, t * 4 + v], E.const(zero, "float32")))

        return lanes(4, lane)

    return body


def beyond(tile: Buffer, x: Buffer, r: Expr, t: Expr) -> Stmt:
    """Zeros where there is nothing to copy: the place copied from does not exist."""
    return lanes(4, lambda v: store(tile, (t * 4 + v,), select(t < 6, x[r, t * 4 + v + 8], E.const(0.0, "float32"))))


def with_more(tile: Buffer, x: Buffer, r: Expr, t: Expr) -> Stmt:
    """Not all that the phase does is to copy."""
    return lanes(4, lambda v: store(tile, (t * 4 + v,), x[r, t * 4 + v] + 1.0))


def on_values(tile: Buffer, x: Buffer, r: Expr, t: Expr) -> Stmt:
    """A condition on what is in memory."""
    return lanes(4, lambda v: store(tile, (t * 4 + v,), select(x[r, t * 4] < 50.0, x[r, t * 4 + v], E.const(0.0, "float32"))))


@needs_compiler
@pytest.mark.parametrize(
    ("body", "expected", "fragment"),
    [
        (odd, ["4"], ""),
        (turned, ["4"], ""),
        (converted, [], ""),
        (with_more, [], ""),
        (on_values, [], ""),
        (guarded(12), ["16"], "if ("),  # all lanes or none
        (guarded(13), ["4"], "if ("),
        (zeros(12), ["16"], "? 16 : 0"),
        (zeros(13), ["4"], "? 4 : 0"),
        (zeros(12, -0.0), [], ""),
        (zeros(12, 1.0), [], ""),
        (beyond, ["16"], "? 16 : 0"),
    ],
)
def test_what_is_copied(body: Body, expected: list[str], fragment: str) -> None:
    text = checked(staged(body, columns=32, clear=True))
    assert sizes(text) == expected and fragment in text


def test_conditions_of_whole_vectors() -> None:
    v, i = E.loop_var("v", 4), E.loop_var("i", 100)
    lane = For(v, 4, store(Buffer("x", "float32", (4,)), (v,), 0.0), VECTORIZED)
    for condition in (
        i * 4 + v < 12,
        i * 4 + v <= 11,
        8 <= i * 4 + v,
        7 < i * 4 + v,
        E.binary("and", i < 3, i * 8 + v < 40),
        -v + i * 4 > 0,
    ):
        found = without_lane(condition, lane)
        assert v not in E.variables(found), condition
        for at in range(30):
            for n in range(4):
                values = {i: E.const(at), v: E.const(n)}
                assert E.substitute(found, values).attr == E.substitute(condition, values).attr
    for condition in (i * 4 + v < 13, i * 4 + v < i, i * 3 + v < 12, 9 <= i * 4 + v, v < 2, i * 4 + v * 2 < 16, E.equal(i, v)):
        assert v in E.variables(without_lane(condition, lane)), condition


@needs_compiler
def test_a_missing_wait_would_be_found() -> None:
    kernel = staged(whole_rows(4), columns=32)
    text, (launch,) = emit_kernel(kernel, TARGET)
    array, got = given("float32", (ROWS, 32)), np.zeros((ROWS, 32), np.float32)
    bare = text.replace("wait_for_copies<0>();", "")
    assert bare != text
    cuda_host.launch(bare, launch.function, (1, 1, 1), launch.block, [array.ctypes.data, got.ctypes.data])
    assert not np.array_equal(got, array[:, ::-1])


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_machine_code(arch: str) -> None:
    """The instructions, in the order of the text."""
    for body, expected in ((whole_rows(4), "cg.shared.global 16"), (odd, "ca.shared.global 4"), (zeros(12), "cg.shared.global 16")):
        text, _ = emit_kernel(staged(body, columns=32), TARGET)
        binary = nvrtc.compile_text(text, arch)
        found = re.findall(
            r"cp\.async\.(c[ag]\.shared\.global|commit_group|wait_group)(?: \[[^]]+\], \[[^]]+\],)?( \d+)?", binary.ptx.decode()
        )
        kinds = list(dict.fromkeys(name + (size or "") for name, size in found))
        assert kinds == [expected, "commit_group", "wait_group 0"]
        (usage,) = binary.usage.values()
        assert usage.spilled == usage.stack == 0 and usage.shared == 128
