"""Partial results, initial values, and masks of reductions, in any state of the loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from tcomp.errors import ScheduleError
from tcomp.ir import te
from tcomp.ir.expr import Dim
from tcomp.ir.loops import If, walk
from tcomp.schedules import Schedule
from tests.schedules.dice import Seeded
from tests.schedules.programs import Program
from tests.schedules.running import expected, native
from tests.schedules.shaped import FOLDS, check, kernel, unchanged


def matmul(n: Dim = 6, m: Dim = 5, depth: Dim = 7) -> Schedule:
    a, b = te.placeholder((n, depth), name="A"), te.placeholder((depth, m), name="B")
    k = te.reduce_axis(depth, "k")
    return Schedule(te.compute((n, m), lambda i, j: te.sum(a[i, k] * b[k, j], k), "C"))


@pytest.mark.parametrize("part", range(4))
def test_random_steps_of_random_programs(part: int) -> None:
    accepted = Counter[str]()
    for case in range(60):
        accepted += check(Seeded(f"folds {part} {case}"), FOLDS, 4)
    assert set(accepted) >= {*FOLDS, "refused"}


PREPARED: dict[str, Callable[[Schedule], None]] = {
    "as lowered": lambda s: None,
    "split": lambda s: s.split("C.i", 4) and None,
    "tiled": lambda s: s.tile("C.i", "C.j", 4, 2) and None,
    "fold outside": lambda s: s.reorder("C.k", "C.i", "C.j"),
    "fold in the middle": lambda s: s.reorder("C.i", "C.k", "C.j"),
    "parallel": lambda s: s.parallel("C.i"),
    "vectorized": lambda s: s.vectorize("C.j", 4),
    "fused": lambda s: s.fuse("C.i", "C.j") and None,
    "decomposed": lambda s: s.decompose_reduction("C", "C.k"),
    "in two parts": lambda s: s.split("C.i", 4, "peel") and None,
}


@pytest.mark.parametrize("prepare", PREPARED.values(), ids=PREPARED.keys())
@pytest.mark.parametrize("lanes", [1, 3, 4])
def test_partial_results_in_any_state_of_the_loops(prepare: Callable[[Schedule], None], lanes: int) -> None:
    s = matmul()
    prepare(s)
    assert s.rfactor("C", "C.k", lanes) == "C.p"
    unchanged(s)
    s.clean()
    unchanged(s)


def test_partial_results_of_symbolic_and_triangular_folds() -> None:
    s = matmul(te.var("n"), 3, te.var("d"))
    s.rfactor("C", "C.k", 4)
    unchanged(s, n=3, d=6)
    s = Schedule(
        kernel("""
        kernel k<n{1..}>(x: int64[n, n], y: int64[n]) -> (y) {
          for i in 0..n {
            for k in 0..(i + 1) {
              if k != 2 {
                y[i] += x[i, k]
              }
            }
          }
        }
    """)
    )
    s.rfactor("y", "k", 2)
    unchanged(s, n=5)
    assert list(s.loops) == ["y.p.init.i", "y.p.init.lane", "y.p.i", "y.p.lane", "k.o", "i", "y.lane"]


def test_partial_results_stand_in_the_loop_around_their_nest() -> None:
    """Each iteration of a parallel loop has its own."""
    s = Schedule(
        kernel("""
        kernel k(x: int64[4, 3, 5], y: int64[4, 3]) -> (y) {
          parallel b in 0..4 {
            for c in 0..3 {
              y[b, c] = 0
            }
            for i in 0..3 {
              for k in 0..5 {
                y[b, i] += x[b, i, k]
              }
            }
          }
        }
    """)
    )
    s.rfactor("y", "k", 2)
    unchanged(s)
    assert str(s.kernel.body).startswith("parallel b in 0..4 {\n  alloc y.p: int64[4, 3, 2]\n")


@pytest.mark.parametrize("loop", ["C.i.o", "C.j.o", "C.i.i", "C.j.i", "C.k"])
@pytest.mark.parametrize("size", ["constant", "symbolic"])
def test_initial_values_at_every_loop_of_a_tile(loop: str, size: str) -> None:
    s = matmul(*((te.var("n"), te.var("m"), te.var("d")) if size == "symbolic" else (6, 5, 7)))
    s.tile("C.i", "C.j", 4, 2)
    s.decompose_reduction("C", loop)
    unchanged(s, **({"n": 6, "m": 5, "d": 3} if size == "symbolic" else {}))
    place = str(s.kernel.body).splitlines()
    assert sum("= 0.0f" in line for line in place) == 1
    s.parallel("C.i.o")
    s.clean()
    unchanged(s, **({"n": 6, "m": 5, "d": 3} if size == "symbolic" else {}))


def test_initial_values_in_machine_code() -> None:
    a, k = te.placeholder((9, 6), name="A"), te.reduce_axis(6, "k")
    program = Program((a,), (te.compute((9,), lambda i: te.max(a[i, k], k), "C"),), {})
    s = Schedule(program.outputs[0])
    s.split("C.i", 4)
    s.decompose_reduction("C", "C.i.i")
    s.reorder("C.k", "C.i.i", reassociate=True)
    s.vectorize("C.i.i")
    np.testing.assert_array_equal(native(program, s.kernel)[0], expected(program)[0])
    assert list(s.loops) == ["C.i.o", "C.init.i.i", "C.k", "C.i.i"]


def test_initial_values_that_are_computed() -> None:
    s = Schedule(
        kernel("""
        kernel k(x: int64[4, 5], b: int64[5], y: int64[4, 5]) -> (y) {
          for p in 0..4 {
            for q in 0..5 {
              y[p, q] = b[q] + p
            }
          }
          for i in 0..4 {
            for j in 0..5 {
              for k in 0..4 {
                y[i, j] += x[k, j]
              }
            }
          }
        }
    """)
    )
    s.decompose_reduction("y", "j")
    assert "y[i, y.init.j] = i + b[y.init.j]" in str(s)
    unchanged(s)


def test_a_mask_leaves_what_keeps_places_in_range() -> None:
    s = matmul()
    s.split("C.i", 4)
    s.split("C.k", 4)
    s.mask("C")
    (left,) = [x for x in walk(s.kernel.body) if isinstance(x, If)]
    assert str(left.cond) == "C.i.i + C.i.o * 4 < 6"
    unchanged(s)


# ---------------------------------------------------------------- refusals

PROGRAMS = {
    "histogram": """
        kernel k(x: int64[5, 4], y: int64[8]) -> (y) {
          for i in 0..5 {
            for j in 0..4 {
              for k in 0..3 {
                y[i + j] += x[i, j]
              }
            }
          }
        }
    """,
    "in place": """
        kernel k(y: int64[5]) -> (y) {
          for i in 0..5 {
            for k in 0..4 {
              y[i] += y[4 - i]
            }
          }
        }
    """,
    "two statements": """
        kernel k(x: int64[5], y: int64[5], z: int64[5]) -> (y, z) {
          for i in 0..5 {
            for k in 0..4 {
              y[i] += x[k]
              z[i] = x[k]
            }
          }
        }
    """,
    "outer fold": """
        kernel k(x: int64[5], y: int64[5]) -> (y) {
          for c in 0..5 {
            y[c] = 0
          }
          for k in 0..5 {
            for i in 0..(k + 1) {
              y[i] += x[k]
            }
          }
        }
    """,
    "place depends on the fold": """
        kernel k(x: int64[5], y: int64[3]) -> (y) {
          for i in 0..5 {
            for k in 0..5 {
              if (i + k < 3) {
                y[i] += x[k]
              }
            }
          }
        }
    """,
    "part of the buffer": """
        kernel k(x: int64[5], y: int64[9]) -> (y) {
          for c in 0..9 {
            y[c] = 0
          }
          for i in 0..5 {
            for k in 0..5 {
              y[i] += x[k]
            }
          }
        }
    """,
    "not initialised": """
        kernel k(x: int64[5], y: int64[5]) -> (y) {
          for i in 0..5 {
            for k in 0..5 {
              y[i] += x[k]
            }
          }
        }
    """,
    "read in between": """
        kernel k(x: int64[5], y: int64[5], z: int64[5]) -> (y, z) {
          for c in 0..5 {
            y[c] = x[c]
          }
          for d in 0..5 {
            z[d] = y[4 - d]
          }
          for i in 0..5 {
            for k in 0..5 {
              y[i] += x[k]
            }
          }
        }
    """,
    "changed in between": """
        kernel k(x: int64[5], y: int64[5]) -> (x, y) {
          for c in 0..5 {
            y[c] = x[c]
          }
          for d in 0..5 {
            x[d] = 1
          }
          for i in 0..5 {
            for k in 0..5 {
              y[i] += x[k]
            }
          }
        }
    """,
    "once for two": """
        kernel k(x: int64[8], y: int64[4]) -> (y) {
          for c in 0..4 {
            y[c] = 0
          }
          for i in 0..8 {
            for k in 0..2 {
              y[i % 4] += x[i]
            }
          }
        }
    """,
    "guarded place": """
        kernel k(x: int64[8], y: int64[4]) -> (y) {
          for i in 0..8 {
            if i < 4 {
              y[i] += x[i]
            }
          }
        }
    """,
    "threads": """
        kernel k(x: int64[8], y: int64[8]) -> (y) {
          parallel i in 0..8 {
            for j in 0..8 {
              if i == j {
                y[j] += x[i]
              }
            }
          }
        }
    """,
    "lanes": """
        kernel k(x: int64[8], y: int64[2]) -> (y) {
          for i in 0..2 {
            vectorized k in 0..8 {
              y[i] += x[k]
            }
          }
        }
    """,
}


@pytest.mark.parametrize(
    ("program", "step", "arguments", "why"),
    [
        ("histogram", "rfactor", ("y", "k", 2), "iterations of i, j may accumulate into one element of `y`"),
        ("histogram", "rfactor", ("y", "j", 2), "`j` is not a reduction loop of `y`"),
        ("histogram", "rfactor", ("y", "k", 0), "number of lanes 0 is not positive"),
        ("histogram", "rfactor", ("y", "k", 2**70), "number of lanes 1180591620717411303424 is more than 2147483648"),
        ("histogram", "rfactor", ("x", "k", 2), "`i` does more with `x` than to accumulate into it once"),
        ("in place", "rfactor", ("y", "k", 2), "`i` does more with `y` than to accumulate into it once"),
        ("two statements", "rfactor", ("y", "k", 2), "`y` is not all that is computed in `i`"),
        ("outer fold", "rfactor", ("y", "k", 2), "the extent of `i` depends on a reduction loop: k + 1"),
        ("place depends on the fold", "rfactor", ("y", "k", 2), "which elements of `y` are accumulated into depends on the reduction"),
        ("lanes", "rfactor", ("y", "k", 2), "the reduction loop `k` is vectorized already"),
        (
            "outer fold",
            "decompose_reduction",
            ("y", "i"),
            "`k`, a reduction loop of `y`, stands around `i`: each iteration would clear the elements again",
        ),
        ("part of the buffer", "decompose_reduction", ("y", "k"), "reach every element of `y` once"),
        ("not initialised", "decompose_reduction", ("y", "k"), "the loops that initialise `y` do not stand next to `i`"),
        ("read in between", "decompose_reduction", ("y", "k"), "the loops that initialise `y` have been changed already"),
        ("changed in between", "decompose_reduction", ("y", "k"), "what `y` is initialised with changes before"),
        ("once for two", "decompose_reduction", ("y", "k"), "iterations of i may accumulate into one element of `y`"),
        ("in place", "decompose_reduction", ("y", "k"), "`i` does more with `y` than to accumulate into it once"),
        ("outer fold", "decompose_reduction", ("y", "c"), "`c` does more with `y` than to accumulate into it once"),
        ("guarded place", "mask", ("y",), "`i < 4` keeps places of `y` in range"),
        ("threads", "mask", ("y",), "or separates concurrent iterations: it has to stay an `If`"),
        ("threads", "mask", ("z",), "there is no buffer `z`"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_refused(program: str, step: str, arguments: tuple[str | int, ...], why: str) -> None:
    s = Schedule(kernel(PROGRAMS[program]))
    with pytest.raises(ScheduleError) as refusal:
        s.apply(step, *arguments)
    assert why in refusal.value.why
    assert s.kernel is s.source and not s.trace


def test_initial_values_move_once() -> None:
    s = matmul()
    s.decompose_reduction("C", "C.j")
    with pytest.raises(ScheduleError, match="the loops that initialise `C` have been changed already"):
        s.decompose_reduction("C", "C.k")
