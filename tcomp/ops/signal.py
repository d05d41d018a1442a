"""Signal processing and small linear algebra: discrete Fourier transforms, framing, determinants."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.ir import loops as L
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, ExprLike, as_expr, const, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor
from tcomp.ops.broadcast import require_same


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


def det(x: Tensor) -> Tensor:
    """Determinants of the matrices in the last two axes, by elimination with partial pivoting (in the type of `x`)."""
    require_same(x.shape[-1], x.shape[-2], "determinant of a matrix that is not square")
    n = as_expr(x.shape[-1])

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        (source,), (target,) = inputs, outputs
        work = L.Buffer("work", x.dtype, (n, n))
        pivot, held = L.Buffer("pivot", "int64", (1,), "register"), L.Buffer("held", x.dtype, (1,), "register")

        def eliminate(k: Expr, outer: Sequence[ExprLike]) -> L.Stmt:
            def search(row: Expr) -> L.Stmt:
                larger = te.abs(work[row, k]) > te.abs(work[pivot[0], k])
                return L.If((k < row) & larger, L.store(pivot, (0,), row))

            def swap(c: Expr) -> L.Stmt:
                row = pivot[0]
                return L.block(L.store(held, (0,), work[k, c]), L.store(work, (k, c), work[row, c]), L.store(work, (row, c), held[0]))

            def subtract(row: Expr) -> L.Stmt:
                ratio = L.store(held, (0,), work[row, k] / work[k, k])
                line = L.loop("c2", n, lambda c: L.If(k <= c, L.store(work, (row, c), work[row, c] - held[0] * work[k, c])))
                return L.If(k < row, L.block(ratio, line))

            result = target[tuple(outer)]
            return L.block(
                L.store(pivot, (0,), k),
                L.loop("r1", n, search),
                L.If(te.not_equal(pivot[0], k), L.block(L.loop("c1", n, swap), L.store(target, outer, -result))),
                L.store(target, outer, result * work[k, k]),
                L.If(te.not_equal(work[k, k], 0), L.loop("r2", n, subtract)),
            )

        def matrix(outer: tuple[Expr, ...]) -> L.Stmt:
            copy = L.over((n, n), lambda at: L.store(work, at, source[(*outer, *at)]), "copy{}".format)
            return L.block(copy, L.store(target, outer, const(1, x.dtype)), L.loop("k", n, lambda k: eliminate(k, outer)))

        return L.Allocate(work, L.Allocate(pivot, L.Allocate(held, L.over(x.shape[:-2], matrix))))

    return te.extern((x.shape[:-2], x.dtype), [x], program, "det")


DFT, FRAMES, DET = Operator("dft", dft), Operator("frames", frames), Operator("det", det)
