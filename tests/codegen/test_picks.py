"""Reads at places that depend on the lane alone: one contiguous load and a shuffle, and never an element outside of the buffer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.ir import expr as E
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Buffer, If, Kernel, block, loop, store
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST, compile_kernel
from tests.runtime.guarded import between_guards

AVX512 = CpuTarget.parse("cpu -mcpu=skylake-avx512")


def picking(
    size: int, lanes: int, steps: int, element: Callable[[E.Expr], E.Expr], limit: int | None = None, dtype: str = "float32"
) -> Kernel:
    """y[step, lane] = x[element of step * lanes + lane] in vectors, for places below `limit` alone if there is one."""
    x, y = Buffer("x", dtype, (size,)), Buffer("y", dtype, (steps * lanes,))

    def body(step: E.Expr) -> object:
        def one(lane: E.Expr) -> object:
            place = step * lanes + lane
            stored = store(y, (place,), x[element(place)])
            return stored if limit is None else If(place < limit, stored)

        return loop("lane", lanes, one, "vectorized")

    clear = loop("z", steps * lanes, lambda i: store(y, (i,), 0))
    return Kernel("picks", (x, y), (y,), (), block(clear, loop("step", steps, body)))


CASES = [
    picking(64, 16, 4, lambda i: i // 4 * 4),
    picking(64, 16, 4, lambda i: i // 4 * 4 + 3),
    picking(64, 8, 8, lambda i: i // 2 * 2 + 1),
    picking(61, 16, 4, lambda i: i // 4 * 4),  # the last vector is not all inside
    picking(48, 16, 3, lambda i: i // 8 * 8 + 7 - i % 8),
    picking(27, 16, 3, lambda i: i // 4 * 2 + 3),  # fewer elements than lanes are picked
    picking(5, 16, 1, lambda i: i % 5),
    picking(64, 16, 4, lambda i: i // 4 * 4 + 1, limit=50),  # the last vector is not all wanted
    picking(50, 16, 4, lambda i: i // 4 * 4 + 1, limit=50),
    picking(64, 16, 4, lambda i: i // 4 * 4, dtype="float16"),
    picking(32, 8, 4, lambda i: i // 4 * 4 + 2, dtype="float64"),
    picking(64, 16, 4, lambda i: i // 4 * 4 + 2, dtype="uint8"),
    picking(226, 16, 4, lambda i: i % 16 * (i % 16)),  # too far apart for one vector
]


@pytest.mark.parametrize("kernel", CASES, ids=range(len(CASES)))
def test_picks_read_what_the_interpreter_reads_and_nothing_else(kernel: Kernel) -> None:
    rng, (x, y) = np.random.default_rng(0), kernel.buffers
    arrays = {b: rng.integers(0, 99, b.shape).astype(b.dtype) for b in (x, y)}
    given, native = {b.name: a.copy() for b, a in arrays.items()}, compile_kernel(kernel)
    run_kernel(kernel, arrays, {})
    for at_start in (False, True):
        with between_guards(given, at_start) as (placed, faults):
            native(*placed)
            np.testing.assert_array_equal(placed[1], arrays[y])
        assert not faults


def test_vectors_inside_of_the_buffer_are_loaded_once_for_all_picks() -> None:
    x, y = Buffer("x", "float32", (64,)), Buffer("y", "float32", (64,))

    def body(step: E.Expr) -> object:
        def one(lane: E.Expr) -> object:
            group = (step * 16 + lane) // 4 * 4
            return store(y, (step * 16 + lane,), x[group] + x[group + 1] * x[group + 2] - x[group + 3])

        return loop("lane", 16, one, "vectorized")

    text = emit_kernel(Kernel("k", (x, y), (y,), (), loop("step", 4, body)), AVX512)
    assert "gather" not in text and "masked.load" not in text
    assert text.count("= load <16 x float>") == 1 and text.count("shufflevector") >= 4


def test_on_this_machine_as_well() -> None:
    assert "gather" not in emit_kernel(CASES[0], HOST)


def looking_up(extent: int, lanes: int, dtype: str, limit: int | None = None) -> Kernel:
    """y[row, lane] = t[row, i[row * lanes + lane]] for three rows, for places below `limit` alone if there is one."""
    t, i, y = Buffer("t", dtype, (3, extent)), Buffer("i", "int64", (3 * lanes,)), Buffer("y", dtype, (3 * lanes,))

    def body(row: E.Expr) -> object:
        def one(lane: E.Expr) -> object:
            place = row * lanes + lane
            at = E.maximum(E.minimum(i[place], extent - 1), 0)
            stored = store(y, (place,), t[row, at])
            return stored if limit is None else If(place < limit, stored)

        return loop("lane", lanes, one, "vectorized")

    clear = loop("z", 3 * lanes, lambda n: store(y, (n,), 0))
    return Kernel("looks", (t, i, y), (y,), (), block(clear, loop("row", 3, body)))


@pytest.mark.parametrize("limit", [None, 37])
@pytest.mark.parametrize("lanes", [16, 64])
@pytest.mark.parametrize(
    "extent, dtype", [(1, "float32"), (9, "int32"), (16, "float32"), (30, "float32"), (47, "int32"), (64, "float32"), (65, "float32")]
)
def test_short_rows_are_looked_up_in_registers(extent: int, dtype: str, lanes: int, limit: int | None) -> None:
    kernel, rng = looking_up(extent, lanes, dtype, limit), np.random.default_rng(extent)
    t, i, y = kernel.buffers
    arrays = {t: rng.integers(0, 99, t.shape).astype(dtype), i: rng.integers(0, extent, i.shape), y: np.zeros(y.shape, dtype)}
    given, native = {b.name: a.copy() for b, a in arrays.items()}, compile_kernel(kernel)
    run_kernel(kernel, arrays, {})
    for at_start in (False, True):
        with between_guards(given, at_start) as (placed, faults):
            native(*placed)
            np.testing.assert_array_equal(placed[2], arrays[y])
        assert not faults
    code = emit_kernel(kernel, AVX512)
    assert ("vpermi2var" in code or "permvar" in code) == (extent <= 64) and ("masked.gather" in code) == (extent > 64)
    assert "permvar" not in emit_kernel(kernel, CpuTarget.parse("cpu -mcpu=haswell"))
