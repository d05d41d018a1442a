"""Random pipelines of stages: windows with strides and dilation, padding by select, clamping, wrap-around, quotients of indices,
broadcasting, several consumers, reductions, at odd and symbolic extents. Every tensor is a stage of its own: nothing is inlined."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

from tcomp.ir import expr as E, te
from tcomp.ir.expr import Dim, Expr, as_expr, select
from tcomp.ir.loops import Kernel
from tcomp.ir.simplify import as_dim
from tcomp.ir.te import Tensor
from tcomp.schedules import lowering
from tests.schedules.dice import Dice
from tests.schedules.programs import Maker
from tests.schedules.subject import Subject

DTYPE = "int32"


def pipeline(dice: Dice, largest: int = 6) -> Subject:
    """Two to five stages over one or two inputs; the last is a result, and now and then another one."""
    m = Maker(dice, largest, 10**6, dice.one_in(3))
    rank = dice.pick(1, 1, 2, 2, 3)
    known = [m.input([m.extent(least=2) for _ in range(rank)], DTYPE)]
    for _ in range(dice.number(2, 4)):
        known.append(stage(m, known))
    outputs = [known[-1], *(t for t in known[1:-1] if dice.one_in(4))]
    return Subject(staged(*m.inputs, *outputs), m.dims)


def staged(*tensors: Tensor) -> Kernel:
    """The kernel of placeholders and then outputs, every computed tensor a stage."""
    inputs = [t for t in tensors if te.is_placeholder(t)]
    with patch.object(lowering, "_inline", lambda t, body, readers, uses: False):
        return lowering.lower("pipeline", inputs, [t for t in tensors if not te.is_placeholder(t)])


def stage(m: Maker, known: Sequence[Tensor]) -> Tensor:
    name, a = f"t{len(known)}", m.pick(*known[-2:], *known)
    match m.pick("map", "map", "window", "window", "fold", "fold", "pad", "clamp", "wrap", "grow", "transpose", "row", "pair", "product"):
        case "window":
            return window(m, a, name)
        case "fold" if a.shape:
            d, k = m.number(0, a.ndim - 1), te.reduce_axis(a.shape[d_ := a.ndim - 1], "k")
            return te.compute(a.shape[:d_], lambda *i: te.sum(a[(*i, k)], k) if d or m.flip() else te.max(a[(*i, k)], k), name)
        case "pad" if a.shape:
            n, low, high = as_expr(a.shape[0]), m.number(0, 2), m.number(0, 2)
            inside = lambda i: E.all_of([i >= low, i < n + low])
            shape = (as_dim(n + (low + high)), *a.shape[1:])
            return te.compute(shape, lambda i, *r: select(inside(i), a[(i - low, *r)], E.const(7, DTYPE)), name)
        case "clamp" if a.shape:
            n, shift = as_expr(a.shape[-1]), m.pick(-2, -1, 1, 2)
            return te.compute(a.shape, lambda *i: a[(*i[:-1], E.minimum(E.maximum(i[-1] + shift, 0), n - 1))] - a[i], name)
        case "wrap" if a.shape and isinstance(a.shape[0], int):
            n = a.shape[0]
            return te.compute(a.shape, lambda i, *r: a[((i + 1) % n, *r)] * 2, name)
        case "grow" if a.shape:
            factor = m.number(2, 3)
            return te.compute((as_dim(as_expr(a.shape[0]) * factor), *a.shape[1:]), lambda i, *r: a[(i // factor, *r)] + 1, name)
        case "transpose" if a.ndim > 1:
            return te.compute((a.shape[1], a.shape[0], *a.shape[2:]), lambda i, j, *r: a[(j, i, *r)], name)
        case "row" if a.ndim < 3:
            n = m.extent(3)
            return te.compute((*a.shape, n), lambda *i: a[i[:-1]] + E.cast(i[-1], DTYPE), name)
        case "pair":
            others = [t for t in known if t.shape == a.shape]
            b = m.pick(*others)
            return te.compute(a.shape, lambda *i: a[i] * 3 - b[i], name)
        case "product" if a.ndim == 2:
            b, k = m.input((a.shape[1], m.extent(4)), DTYPE), te.reduce_axis(a.shape[1], "k")
            return te.compute((a.shape[0], b.shape[1]), lambda i, j: te.sum(a[i, k] * b[k, j], k), name)
    return te.compute(a.shape, lambda *i: te.maximum(a[i], -3) + 1, name)


def window(m: Maker, a: Tensor, name: str) -> Tensor:
    """A sum or maximum over a window, as a reduction or written out."""
    stride, dilation, size = m.number(1, 3), m.number(1, 2), m.number(1, 3)
    d = m.number(0, max(0, a.ndim - 1))
    reach = dilation * (size - 1) + 1
    if not a.shape or E.bounds(as_expr(a.shape[d]))[0] < reach:
        return te.compute(a.shape, lambda *i: a[i] - 1, name)
    n: Dim = as_dim((as_expr(a.shape[d]) - reach) // stride + 1)
    shape = (*a.shape[:d], n, *a.shape[d + 1 :])

    def at(i: tuple[Expr, ...], offset: Expr | int) -> Expr:
        return a[(*i[:d], i[d] * stride + offset * dilation, *i[d + 1 :])]

    if m.flip():
        k = te.reduce_axis(size, "k")
        fold = m.pick(te.sum, te.max)
        return te.compute(shape, lambda *i: fold(at(i, k), k), name)
    return te.compute(shape, lambda *i: at(i, 0) + at(i, size - 1) * 2, name)
