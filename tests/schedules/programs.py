"""Random tensor-expression programs: the structures that schedules look at, at small and odd sizes, some of them symbolic.

Values are small integers in any element type, so that sums do not depend on their order and results can be compared exactly;
only programs with exp or a division (`exact` is False) are compared with a tolerance, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tcomp.ir import expr as E, te
from tcomp.ir.dtypes import is_float, to_numpy
from tcomp.ir.expr import Dim, Expr, as_expr, cast, evaluate_int, select
from tcomp.ir.layout import Layout
from tcomp.ir.loops import Accumulate, Kernel, block, loop, store
from tcomp.ir.simplify import as_dim
from tcomp.ir.te import Tensor
from tests.schedules.dice import Dice, Hypothesis


@dataclass(frozen=True)
class Program:
    """Placeholders, results, and the values of the symbolic dims."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    dims: dict[Expr, int]
    exact: bool = True

    def __repr__(self) -> str:
        from tcomp.ir.te import print_te

        return f"{print_te(self.outputs)}with {', '.join(f'{v.name} = {n}' for v, n in self.dims.items())}"

    def arrays(self, seed: int = 0) -> dict[Tensor, np.ndarray]:
        """Inputs of small integers."""
        rng = np.random.default_rng(seed)
        found = {}
        for t in self.inputs:
            low = 0 if t.dtype in ("bool", "uint8") else -4
            found[t] = rng.integers(low, 2 if t.dtype == "bool" else 5, self.shape(t)).astype(to_numpy(t.dtype))
        return found

    def shape(self, t: Tensor) -> list[int]:
        return [evaluate_int(as_expr(d), self.dims) for d in t.shape]

    def same(self, got: np.ndarray, expected: np.ndarray) -> None:
        if self.exact:
            np.testing.assert_array_equal(got, expected)
        else:
            np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-11)


class Maker:
    """Draws the parts of a program; every extent is at most `largest`, the product of those of one nest at most `volume`."""

    def __init__(self, dice: Dice, largest: int, volume: int, symbolic: bool) -> None:
        self.dice, self.largest, self.volume, self.symbolic = dice, largest, volume, symbolic
        self.pick, self.flip, self.number = dice.pick, dice.flip, dice.number
        self.dims: dict[Expr, int] = {}
        self.inputs: list[Tensor] = []

    def extent(self, most: int | None = None, least: int = 1, fixed: bool = False) -> Dim:
        """A size, out of the volume that is left."""
        most = max(least, min(most or self.largest, self.volume))
        n = self.number(least, most)
        self.volume = max(1, self.volume // n)
        if self.symbolic and not fixed and self.flip():
            v = te.var(f"n{len(self.dims)}", least, self.pick(None, most, 1000))
            self.dims[v] = n
            return v
        return n

    def shape(self, rank: int) -> tuple[Dim, ...]:
        return tuple(self.extent() for _ in range(rank))

    def input(self, shape: Sequence[Dim], dtype: str) -> Tensor:
        self.inputs.append(te.placeholder(shape, dtype, f"x{len(self.inputs)}"))
        return self.inputs[-1]

    def done(self, *outputs: Tensor, exact: bool = True) -> Program:
        return Program(tuple(self.inputs), outputs, self.dims, exact)

    def epilogue(self, t: Tensor, dtype: str) -> Tensor:
        """Elementwise work on a result: nothing, a bias and relu, a residual."""
        match self.pick("none", "bias", "residual"):
            case "bias":
                bias = self.input(t.shape[-1:], dtype)
                return te.compute(t.shape, lambda *i: te.maximum(t[i] + bias[i[-1]], 0), "out")
            case "residual":
                other = self.input(t.shape, dtype)
                return te.compute(t.shape, lambda *i: t[i] * 2 + other[i], "out")
        return t


NUMBERS = ("float32", "float64", "int32", "int64", "float16")


def elementwise(m: Maker) -> Program:
    dtype = m.pick(*NUMBERS, "uint8")
    shape = m.shape(m.number(0, 3))
    a = m.input(shape, dtype)
    kept = [m.flip() for _ in shape]
    b = m.input([n if k else 1 for n, k in zip(shape, kept, strict=True)], dtype)
    at = lambda i: tuple(v if k else 0 for v, k in zip(i, kept, strict=True))
    t = te.compute(shape, lambda *i: te.maximum(a[i], b[at(i)]) * 2 + b[at(i)], "t")
    if m.flip() and shape:
        t = te.compute(shape, lambda *i: select(i[-1] < 3, t[i], cast(i[0], dtype) - t[i]), "u")
    return m.done(t)


def dear_elementwise(m: Maker) -> Program:
    shape = m.shape(m.number(1, 3))
    a = m.input(shape, "float64")
    t = te.compute(shape, lambda *i: te.exp(a[i] * 0.125) + te.sqrt(te.abs(a[i])), "t")
    u = te.compute(shape, lambda *i: t[i] / (1.0 + t[i]), "u")
    return m.done(u, exact=False)


def movement(m: Maker) -> Program:
    dtype = m.pick(*NUMBERS, "bool", "uint8")
    shape = m.shape(m.number(1, 3))
    a = m.input(shape, dtype)
    order = m.dice.shuffled(range(len(shape)))
    inverse = [order.index(d) for d in range(len(shape))]
    t = te.compute([shape[d] for d in order], lambda *i: a[tuple(i[d] for d in inverse)], "transposed")
    match m.pick("none", "flip", "pad", "flatten", "repeat"):
        case "flip":
            first, u = as_expr(t.shape[0]), t
            t = te.compute(t.shape, lambda *i: u[(first - 1 - i[0], *i[1:])], "flipped")
        case "pad":
            last, v = as_expr(t.shape[-1]), t
            padded = (*t.shape[:-1], as_dim(last + 3))
            t = te.compute(
                padded, lambda *i: select((i[-1] >= 1) & (i[-1] < last + 1), v[(*i[:-1], i[-1] - 1)], E.const(0, dtype)), "padded"
            )
        case "flatten" if t.ndim > 1:
            inner, w = as_expr(t.shape[1]), t
            flat = (as_dim(as_expr(t.shape[0]) * inner), *t.shape[2:])
            t = te.compute(flat, lambda *i: w[(i[0] // inner, i[0] % inner, *i[1:])], "flat")
        case "repeat":
            z = t
            t = te.compute((*t.shape, 3), lambda *i: z[i[:-1]], "repeated")
    return m.done(t)


def reduction(m: Maker) -> Program:
    dtype = m.pick(*NUMBERS)
    shape = m.shape(m.number(1, 4))
    a = m.input(shape, dtype)
    folded = [m.flip() for _ in shape]
    axes = [te.reduce_axis(n, f"k{d}") for d, n in enumerate(shape) if folded[d]]
    kept = [n for d, n in enumerate(shape) if not folded[d]]
    reducer: Callable[..., Expr] = m.pick(te.sum, te.max, te.min, te.comm_reducer(lambda x, y: x + y + x * 0, lambda _: 0, "mine"))
    small = dtype == "float16"  # sums must stay exact

    def body(*i: Expr) -> Expr:
        outer, inner = iter(i), iter(axes)
        x = a[tuple(next(inner) if f else next(outer) for f in folded)]
        x = cast(x, "float64") if small else x
        return reducer(x * x - x, axes) if axes else x

    t = te.compute(kept, body, "folded")
    if axes and m.flip():  # read back by every element: x - max(x)
        u = t
        t = te.compute(shape, lambda *i: cast(a[i], u.dtype) - u[tuple(v for v, f in zip(i, folded, strict=True) if not f)], "centred")
    return m.done(t)


def truth(m: Maker) -> Program:
    shape = m.shape(2)
    a = m.input(shape, "bool")
    k = te.reduce_axis(shape[m_axis := m.number(0, 1)], "k")
    fold = m.pick(te.any, te.all)
    t = te.compute((shape[1 - m_axis],), lambda i: fold(a[(k, i) if m_axis == 0 else (i, k)], k), "t")
    return m.done(t)


def matmul(m: Maker) -> Program:
    dtype, accumulator = m.pick(("float32", "float32"), ("float64", "float64"), ("int32", "int32"), ("int8", "int32"), ("uint8", "int64"))
    batch = m.shape(m.number(0, 1))
    depth, rows, columns = m.extent(), m.extent(), m.extent()
    left, right = m.flip(), m.flip()  # transposed operands
    a = m.input((*batch, depth, rows) if left else (*batch, rows, depth), dtype)
    b = m.input((columns, depth) if right else (depth, columns), dtype)
    k = te.reduce_axis(depth, "k")

    def body(*i: Expr) -> Expr:
        *lead, r, c = i
        x, y = a[(*lead, k, r) if left else (*lead, r, k)], b[(c, k) if right else (k, c)]
        return te.sum(cast(x, accumulator) * cast(y, accumulator), k)

    return m.done(m.epilogue(te.compute((*batch, rows, columns), body, "product"), accumulator))


def matvec(m: Maker) -> Program:
    depth, rows = m.extent(), m.extent()
    transposed = m.flip()
    a, x = m.input((depth, rows) if transposed else (rows, depth), "float32"), m.input((depth,), "float32")
    k = te.reduce_axis(depth, "k")
    return m.done(m.epilogue(te.compute((rows,), lambda i: te.sum(a[(k, i) if transposed else (i, k)] * x[k], k), "y"), "float32"))


def convolution(m: Maker) -> Program:
    dtype = m.pick("float32", "float64", "int32")
    kh, kw, stride, dilation, pad = m.number(1, 3), m.number(1, 3), m.number(1, 2), m.number(1, 2), m.number(0, 2)
    groups = m.pick(1, 1, 2, 3)
    ci, co = m.extent(6, fixed=True), m.extent(fixed=groups > 1)
    reach = max(kh, kw) * dilation
    n, h, w = m.extent(2), m.extent(least=reach), m.extent(least=reach)
    x = m.input((n, as_dim(as_expr(ci) * groups), h, w), dtype)
    f = m.input((as_dim(as_expr(co) * groups), ci, kh, kw), dtype)
    oh, ow = (as_dim((as_expr(s) + 2 * pad - dilation * (size - 1) - 1) // stride + 1) for s, size in ((h, kh), (w, kw)))
    c, p, q = te.reduce_axis(ci, "c"), te.reduce_axis(kh, "p"), te.reduce_axis(kw, "q")

    def body(b: Expr, o: Expr, i: Expr, j: Expr) -> Expr:
        y, z = i * stride + p * dilation - pad, j * stride + q * dilation - pad
        channel = o // co * ci + c if groups > 1 else c
        inside = E.all_of([y >= 0, y < as_expr(h), z >= 0, z < as_expr(w)]) if pad else E.all_of([])
        return te.sum(select(inside, x[b, channel, y, z], E.const(0, dtype)) * f[o, c, p, q], [c, p, q])

    return m.done(m.epilogue(te.compute((n, f.shape[0], oh, ow), body, "conv"), dtype))


def depthwise(m: Maker) -> Program:
    size, stride = m.number(2, 3), m.number(1, 2)
    c, h, w = m.extent(), m.extent(least=size), m.extent(least=size)
    x, f = m.input((h, w, c), "float32"), m.input((size, size, c), "float32")
    p, q = te.reduce_axis(size, "p"), te.reduce_axis(size, "q")
    shape = [as_dim((as_expr(s) - size) // stride + 1) for s in (h, w)]
    t = te.compute((*shape, c), lambda i, j, k: te.sum(x[i * stride + p, j * stride + q, k] * f[p, q, k], [p, q]), "depthwise")
    return m.done(m.epilogue(t, "float32"))


def pooling(m: Maker) -> Program:
    dtype = m.pick("float32", "int32")
    size, stride = m.number(2, 3), m.number(1, 3)
    c, h, w = m.extent(), m.extent(least=size), m.extent(least=size)
    last = m.flip()
    x = m.input((h, w, c) if last else (c, h, w), dtype)
    p, q = te.reduce_axis(size, "p"), te.reduce_axis(size, "q")
    fold = m.pick(te.max, te.sum)
    oh, ow = (as_dim((as_expr(s) - size) // stride + 1) for s in (h, w))

    def body(*index: Expr) -> Expr:
        i, j, k = index if last else (*index[1:], index[0])
        y, z = i * stride + p, j * stride + q
        return fold(x[(y, z, k) if last else (k, y, z)], [p, q])

    return m.done(te.compute((oh, ow, c) if last else (c, oh, ow), body, "pool"))


def softmax(m: Maker) -> Program:
    shape = m.shape(m.number(1, 3))
    a = m.input(shape, "float64")
    axis = m.number(0, len(shape) - 1)
    rows = [n for d, n in enumerate(shape) if d != axis]
    k, j = te.reduce_axis(shape[axis], "k"), te.reduce_axis(shape[axis], "j")
    put = lambda i, v: (*i[:axis], v, *i[axis:])
    drop = lambda i: (*i[:axis], *i[axis + 1 :])
    top = te.compute(rows, lambda *i: te.max(a[put(i, k)], k), "top")
    e = te.compute(shape, lambda *i: te.exp(a[i] - top[drop(i)]), "e")
    total = te.compute(rows, lambda *i: te.sum(e[put(i, j)], j), "total")
    return m.done(te.compute(shape, lambda *i: e[i] / total[drop(i)], "softmax"), exact=False)


def layernorm(m: Maker) -> Program:
    rows, n = m.shape(m.number(0, 2)), m.extent()
    a, scale = m.input((*rows, n), "float64"), m.input((n,), "float64")
    k, j = te.reduce_axis(n, "k"), te.reduce_axis(n, "j")
    count = cast(as_expr(n), "float64")
    mean = te.compute(rows, lambda *i: te.sum(a[(*i, k)], k) / count, "mean")
    square = te.compute(rows, lambda *i: te.sum((a[(*i, j)] - mean[i]) * (a[(*i, j)] - mean[i]), j) / count, "var")
    t = te.compute((*rows, n), lambda *i: (a[i] - mean[i[:-1]]) / te.sqrt(square[i[:-1]] + 1e-3) * scale[i[-1]], "norm")
    return m.done(t, exact=False)


def attention(m: Maker) -> Program:
    """Two products in one program, an elementwise stage between them."""
    rows, depth, columns, width = m.extent(), m.extent(), m.extent(), m.extent()
    a, b, c = m.input((rows, depth), "int32"), m.input((depth, columns), "int32"), m.input((columns, width), "int32")
    k, j = te.reduce_axis(depth, "k"), te.reduce_axis(columns, "j")
    s = te.compute((rows, columns), lambda i, n: te.sum(a[i, k] * b[k, n], k), "scores")
    r = te.compute((rows, columns), lambda i, n: te.maximum(s[i, n], 1), "kept")
    return m.done(te.compute((rows, width), lambda i, n: te.sum(r[i, j] * c[j, n], j), "mixed"))


def several(m: Maker) -> Program:
    """Several outputs: over the same axes, one that another reads, one that is an input, a reduction."""
    shape = m.shape(2)
    a = m.input(shape, "float32")
    p, q = te.compute(shape, lambda i, j: (a[i, j] + 1, a[i, j] * 2), "pair")
    k = te.reduce_axis(shape[1], "k")
    r = te.compute(shape[:1], lambda i: te.sum(p[i, k], k), "r")
    s = te.compute(shape, lambda i, j: r[i] + q[i, j], "s")
    return m.done(*m.dice.shuffled([p, q, r, s])[: m.number(1, 4)])


def imperative(m: Maker) -> Program:
    """Prefix sums, then elementwise."""
    shape = m.shape(2)
    a = m.input(shape, "int32")

    def plain(ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        (x,), (y,) = ins, outs
        before = lambda i, j: select(as_expr(j) > 0, y[i, j - 1], 0)
        return loop("i", shape[0], lambda i: loop("j", shape[1], lambda j: store(y, (i, j), before(i, j) + x[i, j])))

    def body(ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        (x,), (y,) = ins, outs
        rows, columns = map(as_expr, shape)
        add = te.sum(a[0, 0], te.reduce_axis(1)).attr[0]
        first = loop("i", shape[0], lambda i: store(y, (i, 0), x[i, 0]))
        rest = loop(
            "i2",
            as_dim(rows),
            lambda i: loop(
                "j2", as_dim(columns - 1), lambda j: block(store(y, (i, j + 1), y[i, j]), Accumulate(y, (i, j + 1), x[i, j + 1], add))
            ),
        )
        return block(first, rest)

    t = te.extern((shape, "int32"), [a], m.pick(plain, body), "prefix")
    return m.done(te.compute(shape, lambda i, j: t[i, j] * 2, "twice"))


KINDS = (
    elementwise, dear_elementwise, movement, reduction, truth, matmul, matvec, convolution, depthwise, pooling, softmax, layernorm,
    attention, several, imperative,
)  # fmt: skip


EXACT = tuple(k for k in KINDS if k not in (dear_elementwise, softmax, layernorm))  # nothing is rounded


@st.composite
def programs(draw: st.DrawFn, largest: int = 5, volume: int = 200, symbolic: bool | None = None, kinds: Sequence[Any] = KINDS) -> Program:
    symbolic = draw(st.booleans()) if symbolic is None else symbolic
    return draw(st.sampled_from(kinds))(Maker(Hypothesis(draw), largest, volume, symbolic))


@st.composite
def layouts(draw: st.DrawFn, rank: int) -> Layout:
    """A permutation of the axes, one of them perhaps in blocks."""
    order = draw(st.permutations(range(rank)))
    if rank and draw(st.booleans()):
        return Layout.blocked(order, draw(st.integers(0, rank - 1)), draw(st.sampled_from([2, 4, 8])))
    return Layout.permuted(order)


def bound(kernel: Kernel, arrays: Sequence[np.ndarray], dims: dict[Expr, int]) -> dict[Any, np.ndarray]:
    """Arrays for the parameters, in order, as views of the shapes that the kernel gives them; outputs are filled with garbage."""
    found = {}
    for b, array in zip(kernel.buffers, arrays, strict=True):
        found[b] = array.reshape([evaluate_int(as_expr(d), dims) for d in b.shape])
        if b in kernel.outputs:
            found[b].fill(np.nan if is_float(b.dtype) else 1)
    return found
