"""Chains of stencils: recognised by their accesses, computed in overlapped tiles, and still what the tensor expressions say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from jit import HOST
from programs import Program
from running import expected, interpreted, native

from tcomp.ir import expr as E
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, as_dim, dim
from tcomp.ir.loops import Kernel
from tcomp.ir.te import Tensor
from tcomp.schedules import stencils
from tcomp.schedules.cpu import schedule
from tcomp.schedules.lower import lower
from tcomp.schedules.schedule import Schedule, replay
from tcomp.target import Target

HASWELL = Target.parse("cpu -march=x86_64 -mcpu=haswell -cores=2")


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


def tiled(p: Program, target: Target, monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """The default schedule, of images of any size; asserts that tiles were made."""
    monkeypatch.setattr(stencils, "WORTHWHILE", 1)
    kernel = lowered(p)
    s = schedule(kernel, target)
    assert not s.kernel.notes
    assert "compute_at" in str(s.trace)
    assert str(replay(kernel, s.trace)) == str(s.kernel)
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
