"""Special functions of real numbers, element by element: error functions, gamma functions, Bessel functions, zeta functions.

Approximations are chosen by the element type: those for float32 are shorter. 16-bit floats are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import mul

from tcomp.ir import te
from tcomp.ir.expr import Expr, const, maximum, select
from tcomp.ops.elementwise import log1p, pointwise

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


# Cephes, i0.c: the same for I0.
I0E_SMALL = (
    -4.41534164647933937950E-18, 3.33079451882223809783E-17, -2.43127984654795469359E-16, 1.71539128555513303061E-15,
    -1.16853328779934516808E-14, 7.67618549860493561688E-14, -4.85644678311192946090E-13, 2.95505266312963983461E-12,
    -1.72682629144155570723E-11, 9.67580903537323691224E-11, -5.18979560163526290666E-10, 2.65982372468238665035E-9,
    -1.30002500998624804212E-8, 6.04699502254191894932E-8, -2.67079385394061173391E-7, 1.11738753912010371815E-6,
    -4.41673835845875056359E-6, 1.64484480707288970893E-5, -5.75419501008210370398E-5, 1.88502885095841655729E-4,
    -5.76375574538582365885E-4, 1.63947561694133579842E-3, -4.32430999505057594430E-3, 1.05464603945949983183E-2,
    -2.37374148058994688156E-2, 4.93052842396707084878E-2, -9.49010970480476444210E-2, 1.71620901522208775349E-1,
    -3.04682672343198398683E-1, 6.76795274409476084995E-1,
)  # fmt: skip
I0E_LARGE = (
    -7.23318048787475395456E-18, -4.83050448594418207126E-18, 4.46562142029675999901E-17, 3.46122286769746109310E-17,
    -2.82762398051658348494E-16, -3.42548561967721913462E-16, 1.77256013305652638360E-15, 3.81168066935262242075E-15,
    -9.55484669882830764870E-15, -4.15056934728722208663E-14, 1.54008621752140982691E-14, 3.85277838274214270114E-13,
    7.18012445138366623367E-13, -1.79417853150680611778E-12, -1.32158118404477131188E-11, -3.14991652796324136454E-11,
    1.18891471078464383424E-11, 4.94060238822496958910E-10, 3.39623202570838634515E-9, 2.26666899049817806459E-8,
    2.04891858946906374183E-7, 2.89137052083475648297E-6, 6.88975834691682398426E-5, 3.36911647825569408990E-3, 8.04490411014108831608E-1,
)  # fmt: skip
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)  # of even index, from 2 on
ZETA_TERMS = 10
LONGEST_PRODUCT = 16  # of a power that is computed by multiplications


def _polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """By Horner's rule, the highest power first."""
    found = const(coefficients[0], x.dtype)
    for c in coefficients[1:]:
        found = found * x + const(c, x.dtype)
    return found


def _chebyshev(x: Expr, coefficients: Sequence[float]) -> Expr:
    """By Clenshaw's recurrence; x is twice the argument of the polynomials."""
    zero = const(0.0, x.dtype)
    b0, b1, b2 = zero, zero, zero
    for c in coefficients:
        b2, b1 = b1, b0
        b0 = x * b1 - b2 + const(c, x.dtype)
    return (b0 - b2) * 0.5


def erf_inv(x: Expr) -> Expr:
    """The inverse of erf: infinite at -1 and 1, NaN outside."""
    w = -log1p(-x * x)
    root = te.sqrt(w)
    if x.dtype == "float64":
        small, middle, large = ERF_INV64
        p = select(w < 16.0, _polynomial(root - 3.25, middle), _polynomial(root - 5.0, large))
        p = select(w < 6.25, _polynomial(w - 3.125, small), p)
    else:
        p = select(w < 5.0, _polynomial(w - 2.5, ERF_INV32[0]), _polynomial(root - 3.0, ERF_INV32[1]))
    return select(te.equal(te.abs(x), 1.0), x * math.inf, p * x)


def _scaled_erfc(a: Expr) -> Expr:
    """exp(a^2) erfc(a) for a >= 1."""
    if a.dtype == "float64":
        (p, q), (r, s) = ERFC64
        far = select(a < 1e7, _polynomial(a, r) / _polynomial(a, s), 1 / math.sqrt(math.pi) / a)
        return select(a < 8.0, _polynomial(a, p) / _polynomial(a, q), far)
    inverse = 1.0 / a
    square = inverse * inverse
    return inverse * select(a < 2.0, _polynomial(square, ERFC32[0]), _polynomial(square, ERFC32[1]))


def erfc(x: Expr) -> Expr:
    """1 - erf(x), without cancellation where x is large."""
    a = te.abs(x)
    far = te.exp(-x * x)
    far = select(te.equal(far, 0.0), 0.0, far * _scaled_erfc(maximum(a, 1.0)))
    return select(a < 1.0, 1.0 - te.erf(x), select(x < 0.0, 2.0 - far, far))


def erfcx(x: Expr) -> Expr:
    """exp(x^2) erfc(x)."""
    a, square = te.abs(x), te.exp(x * x)
    far = _scaled_erfc(maximum(a, 1.0))
    return select(a < 1.0, square * (1.0 - te.erf(x)), select(x < 0.0, 2.0 * square - far, far))


def _series(z: Expr) -> tuple[Expr, Expr, Expr]:
    """Of Lanczos' sum: the sum, its derivative without sign, and the logarithm of z + 7.5."""
    total, slope = const(0.99999999999980993227684700473478, z.dtype), const(0.0, z.dtype)
    for n, c in enumerate(LANCZOS):
        inverse = 1.0 / (z + float(n + 1))
        total, slope = total + c * inverse, slope + c * (inverse * inverse)
    return total, slope, math.log(7.5) + log1p(z / 7.5)


def lgamma(x: Expr) -> Expr:
    """log(abs(gamma(x))); below 1/2 by the reflection gamma(x) gamma(1 - x) = pi / sin(pi x)."""
    reflect = x < 0.5
    z = select(reflect, -x, x - 1.0)
    total, _, log_t = _series(z)
    value = math.log(math.sqrt(2 * math.pi)) + (z + 0.5 - (z + 7.5) / log_t) * log_t + te.log(total)
    part = te.abs(x) - te.floor(te.abs(x))
    sine = te.log(te.sin(math.pi * select(part > 0.5, 1.0 - part, part)))
    reflected = select(te.isinf(sine), -sine, math.log(math.pi) - sine - value)
    return select(te.isinf(x), math.inf, select(reflect, reflected, value))


def digamma(x: Expr) -> Expr:
    """The derivative of lgamma; NaN where x is -1, -2 and so on, and at 0."""
    reflect = x < 0.5
    z = select(reflect, -x, x - 1.0)
    total, slope, log_t = _series(z)
    value = log_t - slope / total - 7.0 / (z + 7.5)
    near = math.pi * (x + te.abs(te.floor(x + 0.5)))
    reflected = value - math.pi * te.cos(near) / te.sin(near)
    pole = (x <= 0.0) & te.equal(x, te.floor(x))
    return select(pole, math.nan, select(reflect, reflected, value))


def _inverse_power(a: Expr, x: Expr) -> Expr:
    """a^-x; a product, where x is a small whole number that is known."""
    if x.op == "const" and 0 < x.attr <= LONGEST_PRODUCT and x.attr == int(x.attr):
        return reduce(mul, [1.0 / a] * int(x.attr))
    return te.power(a, -x)


def zeta(x: Expr, q: Expr) -> Expr:
    """Hurwitz' zeta function: the first terms, and the others by Euler and Maclaurin's formula."""
    total = const(0.0, x.dtype)
    for k in range(ZETA_TERMS):
        total = total + _inverse_power(q + float(k), x)
    a = q + float(ZETA_TERMS)
    last = _inverse_power(a, x)
    total, factor = total + last * a / (x - 1.0) + last * 0.5, x * last / a
    for j, b in enumerate(BERNOULLI, 1):
        total = total + b / math.factorial(2 * j) * factor
        factor = factor * (x + float(2 * j - 1)) * (x + float(2 * j)) / (a * a)
    return select(te.equal(x, 1.0), math.inf, select((x < 1.0) | (q <= 0.0), math.nan, total))


def polygamma(n: Expr, x: Expr) -> Expr:
    """Derivative n of digamma; NaN where n is no whole number, or negative."""
    sign = select(te.equal(n % 2.0, 0.0), const(-1.0, n.dtype), 1.0)
    first = te.equal(n, 0.0)
    value = sign * te.exp(lgamma(n + 1.0)) * zeta(select(first, 2.0, n + 1.0), x)
    return select(first, digamma(x), select((n < 0.0) | te.not_equal(n, te.floor(n)), math.nan, value))


def digamma_derivative(x: Expr, order: int) -> Expr:
    """Derivative `order` > 0 of digamma; below 1/2 by the derivative of digamma(1 - x) - digamma(x) = pi cot(pi x), that of cot being
    -(1 + cot^2)."""
    reflect = x < 0.5
    sign = -1.0 if order % 2 == 0 else 1.0
    value = zeta(const(order + 1.0, x.dtype), select(reflect, 1.0 - x, x)) * (sign * math.factorial(order))
    near = math.pi * (x - te.round(x))
    cotangent = te.cos(near) / te.sin(near)
    powers = [0.0, 1.0]  # coefficients of the powers of the cotangent
    for _ in range(order):
        slope = [n * c for n, c in enumerate(powers)][1:]
        powers = [-(a + b) for a, b in zip([*slope, 0.0, 0.0], [0.0, 0.0, *slope], strict=True)]
    return select(reflect, -sign * value - math.pi ** (order + 1) * _polynomial(cotangent, powers[::-1]), value)


def bessel_i0e(x: Expr) -> Expr:
    """exp(-abs(x)) times the modified Bessel function of order 0."""
    a = te.abs(x)
    large = maximum(a, 8.0)
    return select(a <= 8.0, _chebyshev(a * 0.5 - 2.0, I0E_SMALL), _chebyshev(32.0 / large - 2.0, I0E_LARGE) / te.sqrt(large))


def bessel_i1e(x: Expr) -> Expr:
    """exp(-abs(x)) times the modified Bessel function of order 1."""
    a = te.abs(x)
    large = maximum(a, 8.0)
    y = select(a <= 8.0, a * _chebyshev(a * 0.5 - 2.0, I1E_SMALL), _chebyshev(32.0 / large - 2.0, I1E_LARGE) / te.sqrt(large))
    return select(x < 0.0, -y, y)


def bessel_i0(x: Expr) -> Expr:
    """The modified Bessel function of order 0."""
    return bessel_i0e(x) * te.exp(te.abs(x))


def bessel_i1(x: Expr) -> Expr:
    """The modified Bessel function of order 1."""
    return bessel_i1e(x) * te.exp(te.abs(x))


ERF_INV, ERFC, ERFCX = (pointwise(f.__name__, f) for f in (erf_inv, erfc, erfcx))
LGAMMA, DIGAMMA, POLYGAMMA, ZETA = (pointwise(f.__name__, f) for f in (lgamma, digamma, polygamma, zeta))
BESSEL_I0, BESSEL_I0E, BESSEL_I1, BESSEL_I1E = (pointwise(f.__name__, f) for f in (bessel_i0, bessel_i0e, bessel_i1, bessel_i1e))
DIGAMMA_DERIVATIVE = pointwise("digamma_derivative", digamma_derivative)
