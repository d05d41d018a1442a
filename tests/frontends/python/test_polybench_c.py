"""The C text that other compilers get: natural loops, and the same results."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.polybench import BENCHMARKS
from benchmarks.polybench.contenders import GCC, aligned, compiled_c, contender
from benchmarks.polybench.measure import deviation
from tcomp.codegen.c import CText, c_text
from tcomp.errors import CodegenError
from tests.frontends.python.three_ways import plain

VARIED = ("adi", "deriche", "doitgen", "durbin", "floyd-warshall", "ludcmp", "nussinov")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
@pytest.mark.parametrize("name", VARIED)
def test_c_computes_the_same(name: str, tmp_path: Path) -> None:
    benchmark = BENCHMARKS[name]
    sizes = benchmark.sizes("mini")
    kernel, start = benchmark.kernel(sizes), benchmark.arrays(sizes)
    expected = plain(benchmark.program, start, {**sizes, **benchmark.constants})
    for run in (compiled_c(kernel, (GCC[0], "-O1"), tmp_path, "gcc", 1).run, contender(kernel, 1)):
        arrays = [aligned(b) for b in kernel.buffers]
        for array, initial in zip(arrays, start.values(), strict=True):
            np.copyto(array, initial)
        run(arrays)
        found = {b.name: a for b, a in zip(kernel.buffers, arrays, strict=True)}
        assert deviation(found, expected) < (1e-4 if name == "deriche" else 1e-12)


def test_loops_start_where_indices_do() -> None:
    jacobi, lu = BENCHMARKS["jacobi-2d"], BENCHMARKS["ludcmp"]
    text = c_text(jacobi.kernel(jacobi.sizes("mini")))
    assert "for (long i = 1; i < 29; i++) {" in text
    assert "B[i][j] = 0.2 * (A[i][j] + A[i][j - 1] + A[i][j + 1] + A[i + 1][j] + A[i - 1][j]);" in text
    text = c_text(lu.kernel(lu.sizes("mini")))
    assert "void ludcmp(double A[restrict 40][40], const double b[restrict 40], double x[restrict 40], double y[restrict 40]) {" in text
    assert "for (long i_2 = 39; i_2 > (-1); i_2--) {" in text
    assert "w_3 -= A[i_2][j_3] * x[j_3];" in text


def test_symbolic_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CodegenError, match="`seidel_2d` has symbolic sizes"):
        compiled_c(BENCHMARKS["seidel-2d"].program.kernel(), GCC, tmp_path, "gcc", 1)


def test_deviations_are_relative_and_see_what_is_not_finite() -> None:
    a = np.array([1.0, 200.0])
    assert deviation({"x": a + [0, 1]}, {"x": a}) == pytest.approx(1 / 200)
    assert not deviation({"x": np.array([1.0, np.nan])}, {"x": a}) <= 1


def test_names_become_identifiers() -> None:
    text = CText()
    found = [text.fresh(name) for name in ("1", "1", "1.x", "1-x", "int", "_", "__x", "a.b", "a b", "")]
    assert len(set(found)) == len(found) and all(name.isidentifier() and not name.startswith("__") and name != "int" for name in found)
