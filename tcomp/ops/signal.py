"""Signals: Fourier transforms and overlapping frames."""

from __future__ import annotations

from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor
from tcomp.ops.elementwise import require_same


def dft(x: Tensor, cosines: Tensor, sines: Tensor, axis: int, real: bool) -> Tensor:
    """The transform sum over n of x[..., n, ...] * (cosines[k, n] + i * sines[k, n]) along `axis`.

    The last axis of `x` holds the real part, or real and imaginary part; that of the result both, or the real part if `real`.
    The tables [k, n] carry direction, scale and cut of the transform.
    """
    n = te.reduce_axis(x.shape[axis], "n")
    outer = (*x.shape[:axis], cosines.shape[0], *x.shape[axis + 1 : -1])

    def part(own: Tensor, other: Tensor, sign: int, name: str) -> Tensor:
        def element(*i: Expr) -> Expr:
            at, k = (*i[:axis], n, *i[axis + 1 :]), i[axis]
            total = x[(*at, 0)] * own[k, n]
            if x.shape[-1] == 2:
                total = total + x[(*at, 1)] * other[k, n] * sign
            return te.sum(total, n)

        return te.compute(outer, element, name)

    re = part(cosines, sines, -1, "dft.re")
    if real:
        return te.compute((*outer, 1), lambda *i: re[i[:-1]], "dft")
    im = part(sines, cosines, 1, "dft.im")
    return te.compute((*outer, 2), lambda *i: select(te.equal(i[-1], 0), re[i[:-1]], im[i[:-1]]), "dft")


def frames(x: Tensor, window: Tensor | None, length: int, step: int, count: Dim) -> Tensor:
    """Overlapping frames of a signal: [batch, time, parts] -> [batch, count, length, parts], times `window` [length]."""
    if window is not None:
        require_same(window.shape[0], length, "window of a framed signal")

    def element(b: Expr, f: Expr, t: Expr, c: Expr) -> Expr:
        value = x[b, f * step + t, c]
        return value if window is None else value * window[t]

    return te.compute((x.shape[0], count, length, x.shape[2]), element, "frames")


DFT, FRAMES = Operator("dft", dft), Operator("frames", frames)
