"""Special functions, by JAX's own definitions where it has them, else by those that XLA computes them by."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax import special

from tcomp.frontends.jax.context import Table, decomposed

# Lanczos' approximation of the gamma function with g = 7 (P. Godfrey, 2001).
LANCZOS = (
    676.520368121885098567009190444019, -1259.13921672240287047156078755283, 771.3234287776530788486528258894,
    -176.61502916214059906584551354, 12.507343278686904814458936853, -0.13857109526572011689554707, 9.984369578019570859563e-6,
    1.50563273514931155834e-7,
)  # fmt: skip
# Cephes (S. Moshier), ndtr.c and ndtrf.c: erfc(x) exp(x^2) below 8 (2 for float32) by P / Q, above by R / S.
ERFC64 = (
    ((2.46196981473530512524e-10, 5.64189564831068821977e-1, 7.46321056442269912687, 4.86371970985681366614e1, 1.96520832956077098242e2,
      5.26445194995477358631e2, 9.34528527171957607540e2, 1.02755188689515710272e3, 5.57535335369399327526e2),
     (1.0, 1.32281951154744992508e1, 8.67072140885989742329e1, 3.54937778887819891062e2, 9.75708501743205489753e2, 1.82390916687909736289e3,
      2.24633760818710981792e3, 1.65666309194161350182e3, 5.57535340817727675546e2)),
    ((5.64189583547755073984e-1, 1.27536670759978104416, 5.01905042251180477414, 6.16021097993053585195, 7.40974269950448939160,
      2.97886665372100240670),
     (1.0, 2.26052863220117276590, 9.39603524938001434673, 1.20489539808096656605e1, 1.70814450747565897222e1, 9.60896809063285878198,
      3.36907645100081516050)),
)  # fmt: skip
ERFC32 = (
    (2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1, -5.824733027278666e-1, 6.210004621745983e-1, -4.944515323274145e-1,
     3.404879937665872e-1, -2.741127028184656e-1, 5.638259427386472e-1),
    (-1.047766399936249e1, 1.297719955372516e1, -7.495518717768503, 2.921019019210786, -1.015265279202700, 4.218463358204948e-1,
     -2.820767439740514e-1, 5.641895067754075e-1),
)  # fmt: skip
# M. Giles, Approximating the erfinv function, 2010: polynomials in w - 2.5 and sqrt(w) - 3 for float32, w = -log(1 - x^2);
# in w - 3.125, sqrt(w) - 3.25 and sqrt(w) - 5 for float64.
ERF_INV32 = (
    (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164, 0.246640727,
     1.50140941),
    (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)  # fmt: skip
ERF_INV64 = (
    (-3.6444120640178196996e-21, -1.685059138182016589e-19, 1.2858480715256400167e-18, 1.115787767802518096e-17,
     -1.333171662854620906e-16, 2.0972767875968561637e-17, 6.6376381343583238325e-15, -4.0545662729752068639e-14,
     -8.1519341976054721522e-14, 2.6335093153082322977e-12, -1.2975133253453532498e-11, -5.4154120542946279317e-11,
     1.051212273321532285e-09, -4.1126339803469836976e-09, -2.9070369957882005086e-08, 4.2347877827932403518e-07,
     -1.3654692000834678645e-06, -1.3882523362786468719e-05, 0.0001867342080340571352, -0.00074070253416626697512,
     -0.0060336708714301490533, 0.24015818242558961693, 1.6536545626831027356),
    (2.2137376921775787049e-09, 9.0756561938885390979e-08, -2.7517406297064545428e-07, 1.8239629214389227755e-08,
     1.5027403968909827627e-06, -4.013867526981545969e-06, 2.9234449089955446044e-06, 1.2475304481671778723e-05,
     -4.7318229009055733981e-05, 6.8284851459573175448e-05, 2.4031110387097893999e-05, -0.0003550375203628474796,
     0.00095328937973738049703, -0.0016882755560235047313, 0.0024914420961078508066, -0.0037512085075692412107, 0.005370914553590063617,
     1.0052589676941592334, 3.0838856104922207635),
    (-2.7109920616438573243e-11, -2.5556418169965252055e-10, 1.5076572693500548083e-09, -3.7894654401267369937e-09,
     7.6157012080783393804e-09, -1.4960026627149240478e-08, 2.9147953450901080826e-08, -6.7711997758452339498e-08,
     2.2900482228026654717e-07, -9.9298272942317002539e-07, 4.5260625972231537039e-06, -1.9681778105531670567e-05,
     7.5995277030017761139e-05, -0.00021503011930044477347, -0.00013871931833623122026, 1.0103004648645343977, 4.8499064014085844221),
)  # fmt: skip


def _polynomial(x: Any, coefficients: Any) -> Any:
    """By Horner's rule, the highest power first."""
    found = jnp.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        found = found * x + np.asarray(c, x.dtype)
    return found


def _erf_inv(x: Any, **params: Any) -> Any:
    w = -jnp.log1p(-x * x)
    root = jnp.sqrt(w)
    if x.dtype == jnp.float64:
        small, middle, large = ERF_INV64
        p = jnp.where(w < 16, _polynomial(root - 3.25, middle), _polynomial(root - 5, large))
        p = jnp.where(w < 6.25, _polynomial(w - 3.125, small), p)
    else:
        p = jnp.where(w < 5, _polynomial(w - 2.5, ERF_INV32[0]), _polynomial(root - 3, ERF_INV32[1]))
    return jnp.where(jnp.abs(x) == 1, x * jnp.inf, p * x)


def _erfc(x: Any, **params: Any) -> Any:
    a = jnp.abs(x)
    z = jnp.exp(-x * x)
    if x.dtype == jnp.float64:
        (p, q), (r, s) = ERFC64
        y = z * jnp.where(a < 8, _polynomial(a, p) / _polynomial(a, q), _polynomial(a, r) / _polynomial(a, s))
    else:
        inverse = 1 / jnp.where(a < 1, 1, a)
        square = inverse * inverse
        y = z * inverse * jnp.where(a < 2, _polynomial(square, ERFC32[0]), _polynomial(square, ERFC32[1]))
    y = jnp.where(z == 0, 0, y)
    return jnp.where(a < 1, 1 - lax.erf(x), jnp.where(x < 0, 2 - y, y))


def _series(z: Any) -> tuple[Any, Any, Any]:
    """Of Lanczos' sum: the sum, its derivative without sign, and the logarithm of z + 7.5."""
    total, slope = jnp.full_like(z, 0.99999999999980993227684700473478), jnp.zeros_like(z)
    for n, c in enumerate(LANCZOS):
        total = total + np.asarray(c, z.dtype) / (z + (n + 1))
        slope = slope + np.asarray(c, z.dtype) / ((z + (n + 1)) * (z + (n + 1)))
    return total, slope, math.log(7.5) + jnp.log1p(z / 7.5)


def _lgamma(x: Any) -> Any:
    """Below 1/2 by the reflection gamma(x) gamma(1 - x) = pi / sin(pi x)."""
    reflect = x < 0.5
    z = jnp.where(reflect, -x, x - 1)
    total, _, log_t = _series(z)
    value = math.log(math.sqrt(2 * math.pi)) + (z + 0.5 - (z + 7.5) / log_t) * log_t + jnp.log(total)
    a = jnp.abs(x)
    part = a - jnp.floor(a)
    sine = jnp.log(jnp.sin(math.pi * jnp.where(part > 0.5, 1 - part, part)))
    reflected = jnp.where(jnp.isfinite(sine), math.log(math.pi) - sine - value, -sine)
    return jnp.where(jnp.isinf(x), jnp.inf, jnp.where(reflect, reflected, value))


def _digamma(x: Any) -> Any:
    reflect = x < 0.5
    z = jnp.where(reflect, -x, x - 1)
    total, slope, log_t = _series(z)
    value = log_t - slope / total - 7 / (z + 7.5)
    near = x + jnp.abs(jnp.floor(x + 0.5))
    reflected = value - math.pi * jnp.cos(math.pi * near) / jnp.sin(math.pi * near)
    return jnp.where((x <= 0) & (x == jnp.floor(x)), jnp.nan, jnp.where(reflect, reflected, value))


def _zeta(x: Any, q: Any) -> Any:
    """Hurwitz' zeta function: the first terms, and the others by Euler and Maclaurin's formula."""
    total = sum(((q + k) ** -x for k in range(ZETA_TERMS)), jnp.zeros_like(x + q))
    a = q + ZETA_TERMS
    total, factor = total + a ** (1 - x) / (x - 1) + a**-x / 2, x * a ** (-x - 1)
    for j, b in enumerate(BERNOULLI, 1):
        total = total + b / math.factorial(2 * j) * factor
        factor = factor * (x + (2 * j - 1)) * (x + 2 * j) / (a * a)
    return jnp.where(x == 1, jnp.inf, jnp.where((x < 1) | (q <= 0), jnp.nan, total))


def _polygamma(n: Any, x: Any) -> Any:
    sign = jnp.where(n % 2 == 0, -1, 1)
    value = sign * jnp.exp(lax.lgamma(n + 1)) * _zeta(jnp.where(n == 0, 2, n + 1), x)
    return jnp.where(n == 0, lax.digamma(x), jnp.where((n < 0) | (n != jnp.floor(n)), jnp.nan, value))


def _typed(function: Any) -> Any:
    return decomposed(lambda *xs, **params: function(*jnp.broadcast_arrays(*xs), dtype=xs[0].dtype))


# Cephes, i1.c and i1f.c: Chebyshev coefficients of exp(-x) I1(x) / x in x / 2 - 2, and of exp(-x) sqrt(x) I1(x) in 32 / x - 2.
I1E_SMALL = (
    2.77791411276104639959e-18, -2.11142121435816608115e-17, 1.55363195773620046921e-16, -1.10559694773538630805e-15,
    7.60068429473540693410e-15, -5.04218550472791168711e-14, 3.22379336594557470981e-13, -1.98397439776494371520e-12,
    1.17361862988909016308e-11, -6.66348972350202774223e-11, 3.62559028155211703701e-10, -1.88724975172282928790e-9,
    9.38153738649577178388e-9, -4.44505912879632808065e-8, 2.00329475355213526229e-7, -8.56872026469545474066e-7,
    3.47025130813767847674e-6, -1.32731636560394358279e-5, 4.78156510755005422638e-5, -1.61760815825896745588e-4,
    5.12285956168575772895e-4, -1.51357245063125314899e-3, 4.15642294431288815669e-3, -1.05640848946261981558e-2,
    2.47264490306265168283e-2, -5.29459812080949914269e-2, 1.02643658689847095384e-1, -1.76416518357834055153e-1,
    2.52587186443633654823e-1,
)  # fmt: skip
I1E_LARGE = (
    7.51729631084210481353e-18, 4.41434832307170791151e-18, -4.65030536848935832153e-17, -3.20952592199342395980e-17,
    2.96262899764595013876e-16, 3.30820231092092828324e-16, -1.88035477551078244854e-15, -3.81440307243700780478e-15,
    1.04202769841288027642e-14, 4.27244001671195135429e-14, -2.10154184277266431302e-14, -4.08355111109219731823e-13,
    -7.19855177624590851209e-13, 2.03562854414708950722e-12, 1.41258074366137813316e-11, 3.25260358301548823856e-11,
    -1.89749581235054123450e-11, -5.58974346219658380687e-10, -3.83538038596423702205e-9, -2.63146884688951950684e-8,
    -2.51223623787020892529e-7, -3.88256480887769039346e-6, -1.10588938762623716291e-4, -9.76109749136146840777e-3,
    7.78576235018280120474e-1,
)  # fmt: skip


def _chebyshev(x: Any, coefficients: Any) -> Any:
    b0, b1, b2 = (jnp.zeros_like(x) for _ in range(3))
    for c in coefficients:
        b2, b1 = b1, b0
        b0 = x * b1 - b2 + np.asarray(c, x.dtype)
    return (b0 - b2) / 2


def _bessel_i1e(x: Any) -> Any:
    a = jnp.abs(x)
    large = jnp.where(a > 8, a, 8)
    y = jnp.where(a <= 8, a * _chebyshev(a / 2 - 2, I1E_SMALL), _chebyshev(32 / large - 2, I1E_LARGE) / jnp.sqrt(large))
    return jnp.where(x < 0, -y, y)


BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)  # of even index, from 2 on
ZETA_TERMS = 10
TABLE: Table = {
    "erf_inv": decomposed(_erf_inv), "erfc": decomposed(_erfc), "lgamma": decomposed(_lgamma), "digamma": decomposed(_digamma),
    "bessel_i0e": decomposed(special.bessel_i0e_impl), "bessel_i1e": decomposed(_bessel_i1e), "igamma": _typed(special.igamma_impl),
    "igammac": _typed(special.igammac_impl), "igamma_grad_a": _typed(special.igamma_grad_a_impl),
    "zeta": decomposed(_zeta), "polygamma": decomposed(_polygamma), "random_gamma_grad": _typed(special.random_gamma_grad_impl),
    "regularized_incomplete_beta": _typed(special.regularized_incomplete_beta_impl),
}  # fmt: skip
