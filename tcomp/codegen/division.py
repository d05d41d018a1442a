"""Division by a constant in two operations, rounded as a division is: a vector divider takes one vector in 8 to 24 cycles.

    x / c = fma(x, high, x * low)        high = 1 / c rounded towards zero, low = 1 / c - high

(Brisebarre, Muller, Raina, "Accelerating Correctly Rounded Floating-Point Division When the Divisor Is Known in Advance", 2004; both
products have one sign, for infinities.) Only quotients within `SLACK` of the middle of two floats can be rounded wrongly: these few are
tried. Quotients below 2**-100 (2**-900 in float64) may be off by one unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from math import frexp, ldexp

DIGITS = {"float32": 24, "float64": 53}  # bits of a significand (IEEE 754)
SLACK = Fraction(1, 1 << 21)  # of a unit in the last place, in float32; by far less in float64
MAX_EXPONENT = 60  # the exponent of divisors, up or down: 1 / c and its parts are normal numbers


@cache
def reciprocal(divisor: float, dtype: str) -> tuple[float, float] | None:
    """(high, low) for a divisor, `low` being 0 where its reciprocal is a float; None if x * 1 / c is not always x / c rounded."""
    digits = DIGITS[dtype]
    fraction, exponent = frexp(abs(divisor))
    if not 0.5 <= fraction < 1 or abs(exponent) > MAX_EXPONENT:  # 0, NaN, infinite or far away
        return None
    c = int(ldexp(fraction, digits))
    exact = Fraction(1 << digits, c)  # the reciprocal of `fraction`, above 1
    high = Fraction(int(exact * (1 << digits - 1)), 1 << digits - 1)
    low = _rounded(exact - high, digits)
    for x in _critical(c, digits):
        if _rounded(x * high + _rounded(x * low, digits), digits) != _rounded(x * exact, digits):
            return None
    sign = -1.0 if divisor < 0 else 1.0
    return sign * ldexp(float(high), -exponent), sign * ldexp(float(low), -exponent)


def _critical(c: int, digits: int) -> Iterator[int]:
    """The x of `digits` bits whose quotients x / c lie within `SLACK` of the middle between two floats: x 2**s = c m + k for an odd m of
    one bit more and a small k."""
    most, trailing = int(2 * c * SLACK * Fraction(2) ** (24 - digits)), (c & -c).bit_length() - 1
    for k in range(-most, most + 1):
        if k == 0 or (k & -k).bit_length() - 1 != trailing:
            continue  # c m has as many trailing zeros as c
        for s in (digits, digits + 1):
            modulus = 1 << s - trailing
            m = -(k >> trailing) * pow(c >> trailing, -1, modulus) % modulus
            first = m + -(-((1 << digits) - m) // modulus) * modulus
            for middle in range(first, 1 << digits + 1, modulus):
                x = (c * middle + k) >> s
                if x.bit_length() == digits and (x >= c) == (s == digits):
                    yield x


def _rounded(value: Fraction, digits: int) -> Fraction:
    """Rounded to the nearest number of `digits` bits, ties to even."""
    if not value:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length() - digits
    unit = Fraction(2) ** exponent
    if value / unit >= 1 << digits:
        unit *= 2
    return round(value / unit) * unit
