"""Operators of classical machine learning: kernels of support vectors, coupled probabilities, look-up tables, transforms of scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tcomp.ir import loops as L, te
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Expr, as_expr, cast, checked, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor, elementwise
from tcomp.ops.movement import clamped
from tcomp.ops.reduction import reduce, reduce_at

ZERO = 1e-7  # scores as small as this are none: SOFTMAX_ZERO (as in ONNX Runtime) leaves them out
CERTAIN = 1e-7  # the least probability of one class against another (libsvm)
MAX_ROUNDS, TOLERANCE = 100, 0.005  # of coupling: rounds, and the error of a probability times the number of classes (libsvm)


def squared_distances(x: Tensor, centres: Tensor) -> Tensor:
    """[rows, centres]: the sum of (x[n] - centres[m])^2 over the features."""

    def element(n: Expr, m: Expr) -> Expr:
        f = te.reduce_axis(x.shape[1], "f")
        return te.sum((x[n, f] - centres[m, f]) * (x[n, f] - centres[m, f]), f)

    return te.compute((x.shape[0], centres.shape[0]), element, "squared_distances")


def softmax_zero(x: Tensor) -> Tensor:
    """Softmax along the last axis over the scores that are not 0; those stay 0."""
    axes = (x.ndim - 1,)
    top = reduce(x, axes, True, te.max, "softmax_zero.max")

    def weight(at: Sequence[Expr]) -> Expr:
        return select(te.abs(x[tuple(at)]) <= ZERO, 0.0, te.exp(x[tuple(at)] - top[*at[:-1], 0]))

    total = reduce_at(x.shape, axes, True, te.sum, "softmax_zero.sum", weight)
    return te.compute(x.shape, lambda *i: weight(i) / total[*i[:-1], 0], "softmax_zero")


def _probit(x: Expr) -> Expr:
    """sqrt(2) times the inverse error function of 2 x - 1, by Winitzki's formula, as ONNX Runtime has it."""
    y = x * 2.0 - 1.0
    log = te.log((1.0 - y) * (1.0 + y))
    v = 2.0 / (3.14159 * 0.147) + log * 0.5
    size = te.sqrt(te.sqrt(v * v - log * (1.0 / 0.147)) - v)
    return select(y < 0, -size, size) * math.sqrt(2.0)


def couple(pairs: Tensor, classes: int) -> Tensor:
    """[rows, classes]: probabilities from those of the first of each two classes, [rows, classes (classes - 1) / 2] in the order (0, 1),
    (0, 2), ..., (1, 2), ... By the second method of Wu, Lin and Weng, "Probability estimates for multi-class classification by pairwise
    coupling" (2004), in as many rounds as libsvm takes.
    """
    k = classes

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        (source,), (p,) = inputs, outputs
        q, r = (L.Buffer(name, pairs.dtype, (k, k)) for name in ("q", "r"))
        qp = L.Buffer("qp", pairs.dtype, (k,))
        total, error, diff = (L.Buffer(name, pairs.dtype, (1,), "register") for name in ("total", "error", "diff"))
        rounds = L.Buffer("rounds", "int64", (1,), "register")

        def row(n: Expr) -> L.Stmt:
            def fill(i: Expr, j: Expr) -> L.Stmt:
                low, high = minimum(i, j), maximum(i, j)
                column = clamped(low * (2 * k - 1 - low) // 2 + high - low - 1, pairs.shape[1])
                value = minimum(maximum(source[n, column], CERTAIN), 1.0 - CERTAIN)
                return L.store(r, (i, j), select(i < j, value, select(te.equal(i, j), 0.0, 1.0 - value)))

            def add(buffer: L.Buffer, at: tuple[Expr | int, ...], value: Expr) -> L.Stmt:
                return L.store(buffer, at, buffer[at] + value)

            def prepare(t: Expr) -> L.Stmt:
                entry = L.loop("j", k, lambda j: L.block(
                    L.store(q, (t, j), -(r[j, t] * r[t, j])),
                    add(diff, (0,), r[j, t] * r[j, t]),
                ))  # fmt: skip
                return L.block(L.store(diff, (0,), 0.0), entry, L.store(q, (t, t), diff[0]), L.store(p, (n, t), 1.0 / k))

            def products(t: Expr) -> L.Stmt:
                entry = L.loop("pj", k, lambda j: add(qp, (t,), q[t, j] * p[n, j]))
                return L.block(L.store(qp, (t,), 0.0), entry, add(total, (0,), p[n, t] * qp[t]))

            def update(t: Expr) -> L.Stmt:
                d = diff[0]
                scale = L.loop("sj", k, lambda j: L.block(
                    L.store(qp, (j,), (qp[j] + d * q[t, j]) / (d + 1.0)), L.store(p, (n, j), p[n, j] / (d + 1.0))
                ))  # fmt: skip
                return L.block(
                    L.store(diff, (0,), (total[0] - qp[t]) / q[t, t]),
                    add(p, (n, t), d),
                    L.store(total, (0,), (total[0] + d * (d * q[t, t] + qp[t] * 2.0)) / (d + 1.0) / (d + 1.0)),
                    scale,
                )

            again = L.block(
                L.store(total, (0,), 0.0),
                L.loop("m", k, products),
                L.store(error, (0,), 0.0),
                L.loop("e", k, lambda t: L.store(error, (0,), maximum(error[0], te.abs(qp[t] - total[0])))),
                L.store(rounds, (0,), rounds[0] + 1),
                L.If(error[0] < TOLERANCE / k, L.store(rounds, (0,), MAX_ROUNDS), L.loop("u", k, update)),
            )
            return L.block(
                L.over((k, k), lambda at: fill(*at), "r{}".format),
                L.loop("t", k, prepare),
                L.store(rounds, (0,), 0),
                L.While(rounds[0] < MAX_ROUNDS, again),
            )

        return L.loop("row", pairs.shape[0], lambda n: L.allocated([q, r, qp, total, error, diff, rounds], row(n)))

    return te.extern(((pairs.shape[0], k), pairs.dtype), [pairs], program, "couple")


def look_up(x: Tensor, keys: Tensor, values: Tensor, default: Tensor, missing: Tensor) -> Tensor:
    """values[k] where x equals keys[k], `missing` where it is NaN, else `default` (both scalars). `keys` [count >= 1] increase."""
    count = keys.shape[0]
    assert isinstance(count, int)

    def element(*i: Expr) -> Expr:
        place: Expr = as_expr(0)
        for bit in reversed(range(count.bit_length())):  # the last key that is not above x
            further = minimum(place + (1 << bit), count - 1)
            place = select(keys[further] <= x[i], further, place)
        found = select(te.equal(keys[place], x[i]), values[place], default[()])
        return select(te.isnan(x[i]), missing[()], found) if is_float(x.dtype) else found

    return te.compute(x.shape, element, "look_up")


def one_hot_of(x: Tensor, keys: Tensor, required: bool) -> Tensor:
    """[..., keys]: 1 where x equals the key, else 0 (float32). With `required` the run ends with an error where x equals none of them."""
    count = keys.shape[0]

    def element(*i: Expr) -> Expr:
        found = te.equal(x[i[:-1]], keys[i[-1]])
        if not required:
            return cast(found, "float32")
        k = te.reduce_axis(count, "k")
        place = te.min(select(te.equal(x[i[:-1]], keys[k]), k, as_expr(count)), k)
        return cast(te.equal(clamped(checked(place, count), count), i[-1]), "float32")

    return te.compute((*x.shape, count), element, "one_hot_of")


SQUARED_DISTANCES, SOFTMAX_ZERO = Operator("squared_distances", squared_distances), Operator("softmax_zero", softmax_zero)
PROBIT = Operator("probit", lambda x: elementwise("probit", _probit, x))
COUPLE, LOOK_UP, ONE_HOT_OF = Operator("couple", couple), Operator("look_up", look_up), Operator("one_hot_of", one_hot_of)
