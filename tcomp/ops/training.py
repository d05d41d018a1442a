"""Steps of optimisers: the new values of one tensor of parameters, as ONNX's domain `ai.onnx.preview.training` defines them.

`rate` (the learning rate) and `step` (how many steps were made before) have one element. `norm_coefficient` times the
parameter is added to gradients.
"""

from __future__ import annotations

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.broadcasting import require_same
from tcomp.ir.expr import Expr, cast, const, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor


def _scalar(x: Tensor, dtype: str) -> Expr:
    for extent in x.shape:
        require_same(extent, 1, "a learning rate or number of steps")
    return cast(x[(0,) * x.ndim], dtype)


def _like(x: Tensor, *others: Tensor) -> None:
    for other in others:
        require_same(other.ndim, x.ndim, "the rank of a parameter and of its gradient or state")
        for a, b in zip(x.shape, other.shape, strict=True):
            require_same(a, b, "a parameter and its gradient or state")


def _regularised(x: Tensor, gradient: Tensor, norm_coefficient: float) -> Tensor:
    return te.compute(x.shape, lambda *i: gradient[i] + x[i] * norm_coefficient, "gradient")


def adagrad(
    rate: Tensor, step: Tensor, x: Tensor, gradient: Tensor, squares: Tensor, norm_coefficient: float, decay_factor: float, epsilon: float
) -> tuple[Tensor, Tensor]:
    """(parameters, sums of squares) after a step (Duchi, Hazan, Singer 2011)."""
    _like(x, gradient, squares)
    g = _regularised(x, gradient, norm_coefficient)
    r = _scalar(rate, x.dtype) / (_scalar(step, x.dtype) * decay_factor + 1.0)
    total = te.compute(x.shape, lambda *i: squares[i] + g[i] * g[i], "squares")
    return te.compute(x.shape, lambda *i: x[i] - r * g[i] / (te.sqrt(total[i]) + epsilon), "adagrad"), total


def adam(
    rate: Tensor, step: Tensor, x: Tensor, gradient: Tensor, mean: Tensor, squares: Tensor,
    alpha: float, beta: float, norm_coefficient: float, norm_coefficient_post: float, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(parameters, mean of gradients, mean of their squares) after a step (Kingma, Ba 2015); at step 0 the means are taken as they are."""
    _like(x, gradient, mean, squares)
    g, r, t = _regularised(x, gradient, norm_coefficient), _scalar(rate, x.dtype), _scalar(step, x.dtype)
    first = te.compute(x.shape, lambda *i: mean[i] * alpha + g[i] * (1 - alpha), "mean")
    second = te.compute(x.shape, lambda *i: squares[i] * beta + g[i] * g[i] * (1 - beta), "squares")
    share, rest = (1.0 - te.power(const(base, x.dtype), t) for base in (alpha, beta))
    adjusted = te.compute((), lambda: select(t > 0.0, r * te.sqrt(rest) / share, r), "rate")

    def element(*i: Expr) -> Expr:
        return (x[i] - adjusted[()] * first[i] / (te.sqrt(second[i]) + epsilon)) * (1 - norm_coefficient_post)

    return te.compute(x.shape, element, "adam"), first, second


def momentum(
    rate: Tensor, step: Tensor, x: Tensor, gradient: Tensor, velocity: Tensor,
    alpha: float, beta: float, norm_coefficient: float, mode: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(parameters, velocity) after a step of gradient descent with momentum, or (mode "nesterov") with that of Nesterov; at step 0 `beta`
    is 1."""
    if mode not in ("nesterov", "standard"):
        raise IRError(f"attribute `mode` is {mode!r}; ONNX has nesterov and standard")
    _like(x, gradient, velocity)
    g, r = _regularised(x, gradient, norm_coefficient), _scalar(rate, x.dtype)
    factor = select(_scalar(step, "int64") > 0, const(beta, x.dtype), 1.0)
    new = te.compute(x.shape, lambda *i: velocity[i] * alpha + g[i] * factor, "velocity")
    return te.compute(x.shape, lambda *i: x[i] - r * (g[i] + new[i] * alpha if mode == "nesterov" else new[i]), "momentum"), new


ADAGRAD, ADAM, MOMENTUM = Operator("adagrad", adagrad), Operator("adam", adam), Operator("momentum", momentum)
