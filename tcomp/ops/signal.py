"""Signal processing and small linear algebra: discrete Fourier transforms, framing, determinants."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, ExprLike, as_expr, const, select
from tcomp.ir.graph import Operator
from tcomp.ir.loops import Allocate, Buffer, If, Stmt, block, loop, over, store
from tcomp.ops.broadcast import require_same


def dft(x: te.Tensor, cosines: te.Tensor, sines: te.Tensor, axis: int, real: bool) -> te.Tensor:
    """The transform sum over n of x[..., n, ...] * (cosines[k, n] + i * sines[k, n]) along `axis`.

    The last axis of `x` holds the real part, or real and imaginary part; that of the result both, or the real part if `real`.
    The tables [k, n] carry direction, scale and cut of the transform.
    """
    n = te.reduce_axis(x.shape[axis], "n")
    outer = (*x.shape[:axis], cosines.shape[0], *x.shape[axis + 1 : -1])

    def part(own: te.Tensor, other: te.Tensor, sign: int, name: str) -> te.Tensor:
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


def frames(x: te.Tensor, window: te.Tensor | None, length: int, step: int, count: Dim) -> te.Tensor:
    """Overlapping frames of a signal: [batch, time, parts] -> [batch, count, length, parts], times `window` [length]."""
    if window is not None:
        require_same(window.shape[0], length, "window of a framed signal")

    def element(b: Expr, f: Expr, t: Expr, c: Expr) -> Expr:
        value = x[b, f * step + t, c]
        return value if window is None else value * window[t]

    return te.compute((x.shape[0], count, length, x.shape[2]), element, "frames")


def det(x: te.Tensor) -> te.Tensor:
    """Determinants of the matrices in the last two axes, by elimination with partial pivoting (in the type of `x`)."""
    require_same(x.shape[-1], x.shape[-2], "determinant of a matrix that is not square")
    n = as_expr(x.shape[-1])

    def program(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        (source,), (target,) = inputs, outputs
        work = Buffer("work", x.dtype, (n, n))
        pivot, held = Buffer("pivot", "int64", (1,), "register"), Buffer("held", x.dtype, (1,), "register")

        def eliminate(k: Expr, outer: Sequence[ExprLike]) -> Stmt:
            def search(row: Expr) -> Stmt:
                larger = te.abs(work[row, k]) > te.abs(work[pivot[0], k])
                return If((k < row) & larger, store(pivot, (0,), row))

            def swap(c: Expr) -> Stmt:
                row = pivot[0]
                return block(store(held, (0,), work[k, c]), store(work, (k, c), work[row, c]), store(work, (row, c), held[0]))

            def subtract(row: Expr) -> Stmt:
                ratio = store(held, (0,), work[row, k] / work[k, k])
                line = loop("c2", n, lambda c: If(k <= c, store(work, (row, c), work[row, c] - held[0] * work[k, c])))
                return If(k < row, block(ratio, line))

            result = target[tuple(outer)]
            return block(
                store(pivot, (0,), k),
                loop("r1", n, search),
                If(te.not_equal(pivot[0], k), block(loop("c1", n, swap), store(target, outer, -result))),
                store(target, outer, result * work[k, k]),
                If(te.not_equal(work[k, k], 0), loop("r2", n, subtract)),
            )

        def matrix(outer: tuple[Expr, ...]) -> Stmt:
            copy = over((n, n), lambda at: store(work, at, source[(*outer, *at)]), "copy{}".format)
            start = store(target, outer, const(1, x.dtype))
            return block(copy, start, loop("k", n, lambda k: eliminate(k, outer)))

        body = over(x.shape[:-2], matrix)
        return Allocate(work, Allocate(pivot, Allocate(held, body)))

    return te.extern((x.shape[:-2], x.dtype), [x], program, "det")


DFT, FRAMES, DET = Operator("dft", dft), Operator("frames", frames), Operator("det", det)
