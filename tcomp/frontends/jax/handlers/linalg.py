"""Linear algebra that a few loops compute, and Fourier transforms, as functions of JAX; of real and of complex matrices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax import linalg

from tcomp.errors import UnsupportedError
from tcomp.frontends.jax.context import Table, decomposed

MAX_LENGTH = 1024  # of a Fourier transform, which is a product with a matrix


def _cholesky(x: Any, **params: Any) -> Any:
    """Column by column; NaNs where a matrix is not positive definite. What is above the diagonal stays, as in LAPACK."""
    n = x.shape[-1]
    rows = jnp.arange(n)

    def column(j: Any, found: Any) -> Any:
        row = lax.dynamic_index_in_dim(found, j, -2, False)
        rest = lax.dynamic_index_in_dim(x, j, -1, False) - jnp.einsum("...ik,...k->...i", found, jnp.conj(row))
        pivot = jnp.sqrt(jnp.real(lax.dynamic_index_in_dim(rest, j, -1, True))).astype(x.dtype)
        new = jnp.where(rows >= j, rest / pivot, 0)
        return jnp.where(rows == j, new[..., None], found)

    if not x.size:
        return x
    found = lax.fori_loop(0, n, column, jnp.zeros_like(x))
    failed = jnp.any(jnp.isnan(jnp.abs(found)), (-2, -1), keepdims=True)
    return jnp.where(failed, jnp.nan, jnp.where(rows[:, None] >= rows, found, x))


def _triangular_solve(
    a: Any, b: Any, *, left_side: bool, lower: bool, transpose_a: bool, conjugate_a: bool, unit_diagonal: bool, **params: Any
) -> Any:
    """By substitution, row by row."""
    a = jnp.conj(a) if conjugate_a else a
    if transpose_a:
        a, lower = jnp.swapaxes(a, -1, -2), not lower
    if not left_side:  # x a = b, transposed
        a, b, lower = jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2), not lower
    n = a.shape[-1]
    places = jnp.arange(n)

    def row(step: Any, x: Any) -> Any:
        i = step if lower else n - 1 - step
        known = places < i if lower else places > i
        line = jnp.where(known, lax.dynamic_index_in_dim(a, i, -2, False), 0)
        rest = lax.dynamic_index_in_dim(b, i, -2, False) - jnp.einsum("...k,...kn->...n", line, x)
        if not unit_diagonal:
            rest = rest / lax.dynamic_index_in_dim(lax.dynamic_index_in_dim(a, i, -2, False), i, -1, True)
        return jnp.where(places[:, None] == i, rest[..., None, :], x)

    x = lax.fori_loop(0, n, row, jnp.zeros_like(b)) if b.size else b
    return x if left_side else jnp.swapaxes(x, -1, -2)


def _waves(n: int, sign: int, dtype: Any) -> Any:
    """exp(sign 2 pi i j k / n)."""
    turns = np.outer(np.arange(n), np.arange(n)) % n
    return np.exp(sign * 2j * np.pi * turns / n).astype(dtype)


def _fft(x: Any, fft_type: Any, fft_lengths: Any, **params: Any) -> Any:
    """By matrices of roots of unity, axis by axis."""
    kind, lengths = str(getattr(fft_type, "name", fft_type)).upper(), [int(n) for n in fft_lengths]
    if max(lengths, default=0) > MAX_LENGTH:
        raise UnsupportedError(f"JAX's primitive `fft` is not supported for more than {MAX_LENGTH} elements")
    inverse, count = "I" in kind, len(lengths)
    dtype = jnp.result_type(x.dtype, jnp.complex64)
    if "IRFFT" in kind and lengths:  # the other half of the last axis is the mirrored conjugate, in all axes
        last = lengths[-1]
        for n, axis in zip(lengths[:-1], range(-count, -1), strict=True):
            x = _along(x, _waves(n, 1, dtype) / n, axis)
        k = np.arange(last // 2 + 1)
        weight = np.where((k == 0) | (2 * k == last), 1, 2) / last
        angle = 2 * np.pi * (np.outer(k, np.arange(last)) % last) / last
        real = jnp.real(x).dtype
        cosine, sine = ((weight[:, None] * f(angle)).astype(real) for f in (np.cos, np.sin))
        x = lax.slice_in_dim(x, 0, last // 2 + 1, axis=-1)
        return jnp.real(x) @ cosine - jnp.imag(x) @ sine
    x = x.astype(dtype)
    for n, axis in zip(lengths, range(-count, 0), strict=True):
        waves = _waves(n, 1 if inverse else -1, dtype) / (n if inverse else 1)
        x = _along(x, waves[:, : n // 2 + 1] if "RFFT" in kind and axis == -1 else waves, axis)
    return x


def _along(x: Any, matrix: Any, axis: int) -> Any:
    """The product with a matrix along an axis."""
    return jnp.moveaxis(jnp.moveaxis(x, axis, -1) @ jnp.asarray(matrix, x.dtype), -1, axis)


TABLE: Table = {
    "cholesky": decomposed(_cholesky), "triangular_solve": decomposed(_triangular_solve), "fft": decomposed(_fft),
    "lu": decomposed(linalg._lu_python),
    "lu_pivots_to_permutation": decomposed(linalg._generic_lu_pivots_to_permutation),
}  # fmt: skip
