"""Chains of stencils: recognised by their accesses, computed in overlapped tiles, and still what the tensor expressions say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import pytest

from tcomp.ir import expr as E, te
from tcomp.ir.expr import Dim, Expr, dim
from tcomp.ir.loops import PARALLEL, STACK_LIMIT, VECTORIZED, Allocate, For, Kernel, Store, walk
from tcomp.ir.simplify import as_dim
from tcomp.ir.te import Tensor
from tcomp.schedules.cpu import stencils
from tcomp.schedules.cpu.default import schedule
from tcomp.schedules.lowering import lower
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST
from tests.schedules import pipelines as random_pipelines
from tests.schedules.dice import Seeded
from tests.schedules.programs import Program
from tests.schedules.running import expected, interpreted, native
from tests.schedules.subject import compare, interpreted as run

HASWELL = CpuTarget.parse("cpu -march=x86_64 -mcpu=haswell -cores=2")


def stencil(t: Tensor, name: str, *offsets: tuple[int, ...]) -> Tensor:
    """A weighted sum over places around an element, where all of them exist."""
    low = [min(o[d] for o in offsets) for d in range(t.ndim)]
    high = [max(o[d] for o in offsets) for d in range(t.ndim)]
    shape = [as_dim(n - (h - lo)) for n, lo, h in zip(t.shape, low, high, strict=True)]

    def at(*i: Expr) -> Expr:
        terms = [t[tuple(x + o - lo for x, o, lo in zip(i, offset, low, strict=True))] * (k + 1.5) for k, offset in enumerate(offsets)]
        return sum(terms[1:], terms[0])

    return te.compute(shape, at, name)


ROW = [(0, k) for k in range(5)]
COLUMN = [(k, 0) for k in range(5)]
CROSS = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]


def blurred(t: Tensor) -> Tensor:
    return stencil(stencil(t, "across", *ROW), "down", *COLUMN)


def sharpened(h: Dim, w: Dim) -> list[Tensor]:
    a = te.placeholder((h, w), name="A")
    soft = blurred(a)
    return [a, te.compute(soft.shape, lambda y, x: a[y + 2, x + 2] * 2.0 - soft[y, x], "sharp")]


def corners(h: Dim, w: Dim) -> list[Tensor]:
    a = te.placeholder((h, w), name="A")
    dx = stencil(a, "dx", *[(r, c) for r in range(3) for c in (0, 2)])
    dy = stencil(a, "dy", *[(r, c) for r in (0, 2) for c in range(3)])
    products = [te.compute(dx.shape, lambda *i, p=p, q=q: p[i] * q[i], "product") for p, q in ((dx, dx), (dy, dy), (dx, dy))]
    xx, yy, xy = (stencil(p, "box", *[(r, c) for r in range(3) for c in range(3)]) for p in products)
    return [a, te.compute(xx.shape, lambda *i: xx[i] * yy[i] - xy[i] * xy[i] - (xx[i] + yy[i]) * 0.04, "response")]


def clamped(h: Dim, w: Dim, steps: int = 3) -> list[Tensor]:
    a = t = te.placeholder((h, w), name="A")
    for k in range(steps):

        def at(y: Expr, x: Expr, t: Tensor = t) -> Expr:
            up, down = te.maximum(y - 1, 0), te.minimum(y + 1, h - 1)
            left, right = te.maximum(x - 1, 0), te.minimum(x + 1, w - 1)
            return (t[y, x] + t[up, x] + t[down, x] + t[y, left] + t[y, right]) * 0.25

        t = te.compute((h, w), at, f"step{k}")
    return [a, t]


def fixed_border(h: Dim, w: Dim) -> list[Tensor]:
    a = t = te.placeholder((h, w), name="A")
    for k in range(3):

        def at(y: Expr, x: Expr, t: Tensor = t) -> Expr:
            inside = E.all_of([y >= 1, y < h - 1, x >= 1, x < w - 1])
            return te.select(inside, (t[y - 1, x] + t[y + 1, x] + t[y, x - 1] + t[y, x + 1] + t[y, x]) * 0.25, t[y, x])

        t = te.compute((h, w), at, f"step{k}")
    return [a, t]


def folded(h: Dim, w: Dim) -> list[Tensor]:
    """Windows as reductions, over weights that are an input."""
    a, k = te.placeholder((h, w), name="A"), te.placeholder((3, 3), name="K")
    t = a
    for name in ("first", "second"):
        r, c = te.reduce_axis(3, "r"), te.reduce_axis(3, "c")
        t = te.compute(
            (as_dim(t.shape[0] - 2), as_dim(t.shape[1] - 2)), lambda y, x, t=t, r=r, c=c: te.sum(t[y + r, x + c] * k[r, c], [r, c]), name
        )
    return [a, k, te.compute(t.shape, lambda *i: te.maximum(t[i], 0.0), "positive")]


def several(h: Dim, w: Dim) -> list[Tensor]:
    """Results that share stages, one of them read by another."""
    a = te.placeholder((h, w), name="A")
    soft = blurred(a)
    (across,) = soft.inputs
    sharp = te.compute(soft.shape, lambda y, x: a[y + 2, x + 2] * 2.0 - soft[y, x], "sharp")
    edges = te.compute(soft.shape, lambda y, x: across[y + 3, x] - across[y + 1, x], "edges")
    return [a, soft, sharp, edges]


def unequal(h: Dim, w: Dim) -> list[Tensor]:
    """Results of different shapes."""
    a = te.placeholder((h, w), name="A")
    soft = blurred(a)
    return [a, soft, stencil(soft, "more", *CROSS)]


def halved(h: Dim, w: Dim) -> list[Tensor]:
    a = te.placeholder((h, w), name="A")
    soft = blurred(a)
    half = te.compute(
        (as_dim((soft.shape[0] - 3) // 2), as_dim((soft.shape[1] - 3) // 2)),
        lambda y, x: soft[y * 2, x * 2] + soft[y * 2 + 3, x * 2 + 3],
        "half",
    )
    return [a, stencil(half, "small", *CROSS, *[(2, 2), (-2, -2)])]


def batched(h: Dim, w: Dim) -> list[Tensor]:
    a = te.placeholder((3, h, w), name="A")
    return [a, stencil(stencil(a, "across", *[(0, *o) for o in ROW]), "down", *[(0, *o) for o in COLUMN])]


def line(h: Dim, w: Dim) -> list[Tensor]:
    a = t = te.placeholder((as_dim(h * w),), name="A")
    for k in range(4):
        t = stencil(t, f"step{k}", *[(o,) for o in range(5)])
    return [a, t]


def volume(h: Dim, w: Dim) -> list[Tensor]:
    a = t = te.placeholder((17, h, w), name="A")
    star = [(0, 0, 0), *[tuple(s * (d == e) for e in range(3)) for d in range(3) for s in (-1, 1)]]
    for k in range(3):
        t = stencil(t, f"step{k}", *star)
    return [a, t]


PIPELINES: list[Callable[[Dim, Dim], list[Tensor]]] = [
    sharpened, corners, clamped, fixed_border, folded, several, unequal, halved, batched, line, volume,
]  # fmt: skip
NAMES = [p.__name__ for p in PIPELINES]


def program(tensors: Sequence[Tensor], **dims: int) -> Program:
    inputs = [t for t in tensors if te.is_placeholder(t)]
    return Program(tuple(inputs), tuple(t for t in tensors if not te.is_placeholder(t)), {dim(n, 16): v for n, v in dims.items()})


def lowered(p: Program) -> Kernel:
    return lower("pipeline", p.inputs, p.outputs)


def tiled(p: Program, target: CpuTarget, monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """The default schedule, of images of any size; asserts that tiles were made."""
    monkeypatch.setattr(stencils, "MIN_ELEMENTS", 1)
    kernel = lowered(p)
    s = schedule(kernel, target)
    assert not s.kernel.notes
    assert "compute_at" in str(s.trace)
    assert str(Schedule(kernel).replay(s.trace)) == str(s.kernel)
    return s


@pytest.mark.parametrize("pipeline", PIPELINES, ids=NAMES)
def test_tiles_compute_what_the_expressions_say(pipeline: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """At odd sizes, by the interpreter (which checks bounds, undefined reads and races) and by machine code."""
    p = program(pipeline(37, 53))
    reference = expected(p)
    for made in (
        interpreted(p, tiled(p, HASWELL, monkeypatch).kernel, shuffle=1),
        native(p, tiled(p, HOST, monkeypatch).kernel, threads=True),
    ):
        for got, want in zip(made, reference, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(24, 40), (37, 53), (41, 300)])
@pytest.mark.parametrize("pipeline", [sharpened, folded, several, batched, line], ids=lambda p: p.__name__)
def test_tiles_of_symbolic_extents(pipeline: Callable, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    p = program(pipeline(dim("h", 16), dim("w", 16)), h=size[0], w=size[1])
    for got, want in zip(native(p, tiled(p, HOST, monkeypatch).kernel, threads=True), expected(p), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_results_that_share_stages_share_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    s = tiled(program(several(40, 64)), HASWELL, monkeypatch)
    assert {x.var.name for x in walk(s.kernel.body) if isinstance(x, For) and x.kind == PARALLEL} == {"down.i0.o"}
    assert str(s.trace).count("fuse_loops") >= 2


def test_what_a_tile_keeps_is_a_tile_with_its_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    s = tiled(program(corners(4096, 4096)), HASWELL, monkeypatch)
    rows, columns = next(x.extent for x in s.loops.values() if x.var.name == "response.i0.i"), 256
    kept = [x.buffer for x in walk(s.kernel.body) if isinstance(x, Allocate) and x.buffer.name in ("dx", "dy")]
    assert len(kept) == 2
    for b in kept:
        assert b.shape[0] == rows + 2 and columns <= b.shape[1] and prod(b.shape) * 4 <= STACK_LIMIT
    assert {x.kind for x in s.loops.values()} >= {PARALLEL, VECTORIZED}


def test_windows_over_windows_are_not_computed_again_for_each_place() -> None:
    """Inlined into each other, ten steps would read some hundred places for each element."""
    kernel = lowered(program(clamped(64, 64, 10)))
    assert max(len(E.reads(x.value)) for x in walk(kernel.body) if isinstance(x, Store)) <= 25


def test_cheap_windows_and_what_only_moves_are_still_inlined() -> None:
    a = te.placeholder((40, 40), name="A")
    pair = stencil(a, "pair", (0, 0), (0, 1))
    padded = te.compute((42, 42), lambda y, x: te.select(E.all_of([y >= 1, y < 41, x >= 1, x < 41]), a[y - 1, x - 1], 0.0), "padded")
    for t, count in ((stencil(pair, "twice", (0, 0), (1, 0)), 4), (stencil(padded, "all", *CROSS), 5)):
        kernel = lowered(program([a, t]))
        assert not any(isinstance(x, Allocate) for x in walk(kernel.body))
        assert max(len(E.reads(x.value)) for x in walk(kernel.body) if isinstance(x, Store)) == count


def test_no_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reductions over whole rows, products and convolutions over channels, transposes: the other structures keep their schedules."""
    monkeypatch.setattr(stencils, "MIN_ELEMENTS", 1)
    a, b = te.placeholder((64, 64), name="A"), te.placeholder((64, 64), name="B")
    k = te.reduce_axis(64, "k")
    most = te.compute((64,), lambda i: te.max(a[i, k], k), "most")
    shifted = te.compute((64, 64), lambda i, j: te.exp(a[i, j] - most[i]), "shifted")
    product = te.compute((64, 64), lambda i, j: te.sum(a[i, k] * b[k, j], k), "product")
    turned = te.compute((64, 64), lambda i, j: te.exp(product[j, i]) + te.exp(product[i, j]), "turned")
    for t in (shifted, turned):
        inputs = [p for p in te.tensors([t]) if te.is_placeholder(p)]
        assert stencils.chains(lowered(program([*inputs, t]))) == []


def test_small_images_are_computed_stage_by_stage() -> None:
    s = schedule(lowered(program(sharpened(40, 40))), HASWELL)
    assert "compute_at" not in str(s.trace)


@pytest.mark.parametrize("steps", [3, 8])
def test_free_sizes_with_indices_held_inside(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few steps are seen to have a constant size; more steps, whose indices are held inside once more each, are computed one by
    one, and a note says so."""
    monkeypatch.setattr(stencils, "MIN_ELEMENTS", 1)
    programs = [program(clamped(dim("h", 16), dim("w", 16), steps), h=h, w=w) for h, w in ((24, 40), (16, 16), (17, 33), (130, 257))]
    s = schedule(lowered(programs[0]), HOST)
    one_by_one = any("is computed stage by stage: the part of" in note for note in s.kernel.notes)
    assert one_by_one == ("compute_at" not in str(s.trace)) == (steps == 8)
    for p in programs:
        for got, want in zip(native(p, s.kernel), expected(p), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_tiles_of_random_pipelines(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides, dilation, padding, wrap-around, folds, several consumers and results, symbolic extents: whatever is tiled stays right."""
    monkeypatch.setattr(stencils, "MIN_ELEMENTS", 1)
    chained = 0
    for seed in range(first, first + 50):
        subject = random_pipelines.pipeline(Seeded(seed), 24)
        if stencils.chains(subject.kernel):
            chained += 1
            s = schedule(subject.kernel, HASWELL)
            compare("tiles", s.kernel, run(subject, s.kernel), subject.plain)
    assert chained
