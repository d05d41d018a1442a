"""Special functions: those of `ops/special.py`, and what JAX computes by loops, by its own definitions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax._src.lax import special

from tcomp.frontends.jax.context import Handler, Table, decomposed
from tcomp.frontends.jax.handlers.elementwise import forward
from tcomp.ops import special as ops


def _typed(function: Any) -> Handler:
    return decomposed(lambda *xs, **params: function(*jnp.broadcast_arrays(*xs), dtype=xs[0].dtype))


TABLE: Table = {
    "erf_inv": forward(ops.ERF_INV), "erfc": forward(ops.ERFC), "lgamma": forward(ops.LGAMMA),
    "digamma": forward(ops.DIGAMMA), "zeta": forward(ops.ZETA), "polygamma": forward(ops.POLYGAMMA),
    "bessel_i0e": forward(ops.BESSEL_I0E), "bessel_i1e": forward(ops.BESSEL_I1E), "igamma": _typed(special.igamma_impl),
    "igammac": _typed(special.igammac_impl), "igamma_grad_a": _typed(special.igamma_grad_a_impl),
    "random_gamma_grad": _typed(special.random_gamma_grad_impl),
    "regularized_incomplete_beta": _typed(special.regularized_incomplete_beta_impl),
}  # fmt: skip
