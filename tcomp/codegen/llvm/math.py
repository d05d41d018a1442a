"""Elementary functions, and whatever else a target lacks, in operations that every target has, so that no object calls libm.

float32 `exp`, `log`, `tanh`, `erf` have float32 algorithms; the other functions of float32 go through float64, those of 16 bits through
float32. Largest errors in ulp, measured with FMA over 2**20 (float64: 2**17) arguments across all exponents:

    float32   exp 0.9   log 0.8   tanh 4.4   erf 5.3   all others, pow included, 0.5; constant integer powers up to 4: 2
    float64   exp 1.7   log 0.8   tanh 1.4   erf 4.0   sin, cos 1.4   tan 2.9   asin 2.1   acos 1.1   atan 1.0   sinh, cosh 2.0
              asinh 3.5   acosh 3.0   atanh 1.3   pow 2.1

NaN, infinities, signed zeros and subnormal numbers as in C99 annex F. `sin`, `cos`, `tan` reduce |x| < 2**50 (2**29 without FMA) exactly
enough. Sources: S. L. Moshier, Cephes; Sun fdlibm (log, sin, cos, asin, acos of float64); W. J. Cody 1969 (erf of float64); Eigen (tanh
and erf of float32); F. Giesen (float16 conversion).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

from tcomp.codegen.division import reciprocal
from tcomp.codegen.llvm import coefficients as C
from tcomp.ir import expr as E
from tcomp.ir.dtypes import BITS, UNSIGNED, is_integer
from tcomp.ir.expr import Expr, bitcast, cast, const, equal, fma, maximum, minimum, not_equal, select, unary as apply
from tcomp.ir.interpreters.semantics import ERF_MIDDLE, ERF_SMALL, ERF_TAIL
from tcomp.ir.scalar_operators import COMPARISON, UNARY
from tcomp.target import CpuTarget

ELEMENTARY = frozenset(UNARY[UNARY.index("exp") : UNARY.index("isnan")]) | {"pow"}
_IN_FLOAT32 = frozenset({"exp", "log", "tanh", "erf"})  # the other functions of float32 go through float64
_NOT_IN_HALF = ELEMENTARY | {"floordiv", "mod", "truncdiv", "truncmod"}
_LOGICAL = {"min": "and", "mul": "and", "max": "or", "add": "or"}


def lower(e: Expr, target: CpuTarget) -> Expr | None:
    """One operator in terms of simpler ones, which may need lowering in turn; None if the target computes it directly."""
    if not e.args or e.op in ("read", "select", "bitcast", "reduce"):
        return None
    source = e.args[0].dtype
    if e.op == "cast":
        return _cast(e.args[0], e.dtype, target)
    if source in ("float16", "bfloat16") and not (source == "float16" and target.half_arithmetic and e.op not in _NOT_IN_HALF):
        return _through_float32(e)
    if source == "bool":
        return E.binary(_LOGICAL[e.op], *e.args) if e.op in _LOGICAL else e.args[0] if e.op == "abs" else None
    if is_integer(source):
        return _integer_power(*e.args) if e.op == "pow" else None
    f = _Float(source, target)
    match e.op:
        case "fma" if not target.fma:
            return f.emulated_fma(*e.args)
        case "ldexp" if not f.scales:
            return f.scaled(e.args[0], e.args[1], cast(e.args[1], f.int))
        case "floor" | "ceil" | "round" | "trunc" if not target.rounding:
            return f.rounded(e.op, e.args[0])
        case "floordiv" | "mod" | "truncdiv" | "truncmod":
            return f.division(e.op, *e.args)
        case "div" if e.args[1].op == "const":
            return f.by_constant(*e.args)
        case "pow":
            return f.power(*e.args)
    if e.op not in ELEMENTARY:
        return None
    if source == "float32" and e.op not in _IN_FLOAT32:
        return cast(apply(e.op, cast(e.args[0], "float64")), "float32")
    function: Callable[[Expr], Expr] = getattr(f, e.op)
    return function(e.args[0])


def _through_float32(e: Expr) -> Expr:
    """A 16-bit operator in float32, then rounded: correctly so for + - * / sqrt, as 24 >= 2 * 11 + 2 bits (Figueroa 1995)."""
    if e.op in ("neg", "abs"):
        bits = bitcast(e.args[0], "uint16")
        return bitcast(bits ^ 0x8000 if e.op == "neg" else bits & 0x7FFF, e.dtype)
    if e.op == "fma":  # of a product and a sum, float32 would round twice
        a, b, c = (cast(a, "float64") for a in e.args)
        return cast(a * b + c, e.dtype)
    result = E.operation(e.op, *(cast(a, "float32") for a in e.args))
    return result if e.op in COMPARISON or e.dtype == "bool" else cast(result, e.dtype)


def _cast(a: Expr, dtype: str, target: CpuTarget) -> Expr | None:
    """Conversions from and to 16-bit floats."""
    source = a.dtype
    match source, dtype:
        case (("float16" | "bfloat16"), "bool"):
            return not_equal(bitcast(a, "uint16") & 0x7FFF, 0)
        case "bfloat16", "float32" if a.op == "cast" and a.args[0].dtype == "float32":  # a rounding, which stays in registers of its size
            return bitcast(_rounded_bits(a.args[0]) & 0xFFFF0000, "float32")
        case "bfloat16", "float32":
            return bitcast(cast(bitcast(a, "uint16"), "uint32") << 16, "float32")
        case ("float16", "float32") | ("float32", "float16") if target.half_conversion:
            return None
        case "float16", "float32":
            bits = cast(bitcast(a, "uint16"), "uint32")
            magnitude = (bits & 0x7FFF) << 13
            scaled = bitcast(bitcast(magnitude, "float32") * 2.0**112, "uint32")  # moves the exponent, and normalises subnormal numbers
            special = select(magnitude < 0x0F800000, scaled, scaled | 0x7F800000)
            return bitcast(special | ((bits & 0x8000) << 16), "float32")
        case "float32", "bfloat16":
            return bitcast(cast(_rounded_bits(a) >> 16, "uint16"), "bfloat16")
        case "float32", "float16":
            bits = bitcast(a, "uint32")
            size = bits & 0x7FFFFFFF
            small = bitcast(bitcast(size, "float32") + 0.5, "uint32") - 0x3F000000  # the sum is a multiple of the least subnormal number
            normal = (size + (((size >> 13) & 1) + 0xC8000FFF)) >> 13  # exponent rebased by 15 - 127, wrapping around
            special = select(const(0x7F800000, "uint32") < size, const(0x7E00, "uint32"), 0x7C00)
            half = select(size < 0x38800000, small, select(size < 0x47800000, normal, special))
            return bitcast(cast(half | ((bits >> 16) & 0x8000), "uint16"), "float16")
        case "float64", ("float16" | "bfloat16"):  # inexact results made odd are rounded again as `a` would be (Boldo, Melquiond 2008)
            single = cast(a, "float32")
            back = cast(single, "float64")
            bits = bitcast(single, "uint32") - cast(abs(a) < abs(back), "uint32")
            return cast(bitcast(bits | cast(not_equal(back, a), "uint32"), "float32"), dtype)
    return cast(cast(a, "float32"), dtype) if {source, dtype} & {"float16", "bfloat16"} else None


def _rounded_bits(a: Expr) -> Expr:
    """The bits of a float32 of which the upper half are those of the nearest bfloat16, ties to even; a NaN stays one."""
    bits = bitcast(a, "uint32")
    return select(apply("isnan", a), bits | 0x400000, bits + (((bits >> 16) & 1) + 0x7FFF))


def _integer_power(x: Expr, y: Expr) -> Expr:
    """x ** y by repeated squaring, wrapping around; a negative power of anything but 1 and -1 is 0."""
    one = const(1, x.dtype)
    if y.op == "const" and 0 <= y.attr <= 64:
        return _power(x, int(y.attr))
    result, square = one, x
    for bit in range(BITS[y.dtype]):
        result = result * select(equal((y >> bit) & 1, 0), one, square)  # not a choice of results: their cost would double
        square = square * square
    if y.dtype in UNSIGNED:
        return result
    return select(y < 0, select(equal(x, 1), one, select(equal(x, -1), select(equal(y & 1, 0), one, -1), 0)), result)


def _power(x: Expr, n: int) -> Expr:
    """x ** n by few multiplications, n >= 0."""
    if n <= 1:
        return x if n else const(1, x.dtype)
    half = _power(x, n // 2)
    return half * half * x if n % 2 else half * half


class _Float:
    """The functions of one float type on one target."""

    def __init__(self, dtype: str, target: CpuTarget) -> None:
        self.dtype, self.target = dtype, target
        self.int, self.mantissa, self.bias = ("int32", 23, 127) if dtype == "float32" else ("int64", 52, 1023)
        self.scales = target.has("avx512f") and target.has("avx512vl")  # whether `ldexp` is an instruction

    def c(self, value: float) -> Expr:
        return const(value, self.dtype)

    def mad(self, a: Expr, b: Expr | float, c: Expr | float) -> Expr:
        """a * b + c, fused where that is an instruction."""
        b, c = (x if isinstance(x, Expr) else self.c(x) for x in (b, c))
        return fma(a, b, c) if self.target.fma else a * b + c

    def polynomial(self, x: Expr, coefficients: Sequence[float]) -> Expr:
        """Highest power first."""
        return reduce(lambda result, c: self.mad(result, x, c), coefficients[1:], self.c(coefficients[0]))

    def ratio(self, x: Expr, numerator: Sequence[float], denominator: Sequence[float]) -> Expr:
        return self.polynomial(x, numerator) / self.polynomial(x, denominator)

    def odd(self, x: Expr, limit: float, coefficients: tuple[Sequence[float], Sequence[float]], large: Expr) -> Expr:
        """An odd function: x + x**3 * P(x**2) / Q(x**2), which loses the sign of zero, where |x| < limit, else `large` with the sign of
        x."""
        square = x * x
        return self.with_sign(select(abs(x) < limit, self.mad(x * square, self.ratio(square, *coefficients), x), large), x)

    def bits(self, x: Expr) -> Expr:
        return bitcast(x, self.int)

    def with_sign(self, size: Expr, sign: Expr) -> Expr:
        """|size| with the sign bit of `sign`."""
        low = (1 << (BITS[self.int] - 1)) - 1
        return bitcast((self.bits(size) & low) | (self.bits(sign) & ~low), self.dtype)

    def negative(self, x: Expr) -> Expr:
        return self.bits(x) < 0

    def nearest(self, x: Expr, scale: float) -> tuple[Expr, Expr]:
        """round(x * scale) as a float and as an integer, for results well below 2 ** mantissa."""
        magic = self.c(1.5 * 2.0**self.mantissa)  # the sum has its last bit at 1
        shifted = self.mad(x, scale, magic)
        return shifted - magic, self.bits(shifted) - self.bits(magic)

    def rounded(self, op: str, x: Expr) -> Expr:
        """`floor`, `ceil`, `round` or `trunc` without an instruction for it."""
        big = 2.0**self.mantissa  # from here on every number is an integer
        size = abs(x)
        whole = self.with_sign((size + big) - big, x)
        if op in ("floor", "ceil"):
            whole = whole - select(x < whole, self.c(1), 0.0) if op == "floor" else whole + select(whole < x, self.c(1), 0.0)
        elif op == "trunc":
            whole = abs(whole) - select(size < abs(whole), self.c(1), 0.0)
        return select(size < big, self.with_sign(whole, x), x)

    def by_constant(self, x: Expr, y: Expr) -> Expr | None:
        """Division by a constant without a divider; None where that is not exact."""
        parts = reciprocal(float(y.attr), self.dtype)
        if parts is None or not (self.target.fma or parts[1] == 0):
            return None
        high, low = map(self.c, parts)
        return fma(x, high, x * low) if parts[1] else x * high

    def division(self, op: str, x: Expr, y: Expr) -> Expr:
        """Quotients rounded down and remainders; exact while |x / y| < 2**53 (2**29 for float32 without FMA)."""
        if op == "truncdiv":
            return apply("trunc", x / y)
        if self.dtype == "float32":
            return cast(E.binary(op, cast(x, "float64"), cast(y, "float64")), "float32")
        rest, size = fma(-apply("trunc", x / y), y, x), abs(y)
        # x / y may have been rounded to the next integer: then the remainder has the wrong sign.
        wrong = not_equal(self.negative(rest), self.negative(x)) & not_equal(rest, 0.0)
        rest = select(wrong, rest + self.with_sign(size, x), rest)
        rest = self.with_sign(select((abs(x) < math.inf) & equal(size, math.inf), x, rest), x)
        if op == "truncmod":
            return rest
        opposite = not_equal(rest, 0.0) & not_equal(self.negative(rest), self.negative(y))
        if op == "mod":
            return select(opposite, rest + y, select(equal(rest, 0.0), self.with_sign(rest, y), rest))
        down = apply("round", (x - rest) / y) - select(opposite, self.c(1), 0.0)
        return select(equal(y, 0.0) | (abs(x / y) < 1e-300) & ~opposite, x / y, down)

    def emulated_fma(self, a: Expr, b: Expr, c: Expr) -> Expr:
        """a * b + c rounded once, by error-free transformations (float64: but for ties, and where the product overflows)."""
        if self.dtype == "float32":
            x, y, z = (cast(v, "float64") for v in (a, b, c))
            total, error = _two_sum(x * y, z)  # the product is exact
            bits = bitcast(total, "int64")
            step = select(equal(const(0.0, "float64") < error, const(0.0, "float64") < total), const(1), -1)
            fix = not_equal(error, 0.0) & equal(bits & 1, 0) & (abs(total) < math.inf)
            return cast(select(fix, bitcast(bits + step, "float64"), total), "float32")
        product, below = self.two_product(a, b)
        total, error = _two_sum(product, c)
        exact = total + (error + below)
        return select(abs(exact) < math.inf, exact, product + c)

    def two_product(self, a: Expr, b: Expr) -> tuple[Expr, Expr]:
        """a * b rounded, and the rounding error (Dekker)."""
        product = a * b
        if self.target.fma:
            return product, fma(a, b, -product)
        (a_hi, a_lo), (b_hi, b_lo) = _halves(a), _halves(b)
        return product, a_lo * b_lo - (((product - a_hi * b_hi) - a_lo * b_hi) - a_hi * b_lo)

    def scaled(self, x: Expr, n: Expr, integer: Expr) -> Expr:
        """x * 2 ** n, for n as a float and as an integer: in two steps, which reach subnormal numbers and overflow, if not in one."""
        if self.scales:
            return E.ldexp(x, n)
        half = integer >> 1
        low, high = (bitcast((power + self.bias) << self.mantissa, self.dtype) for power in (half, integer - half))
        return x * low * high

    def exp(self, x: Expr, shift: int = 0) -> Expr:
        """2**shift * exp(x), where shift is 0, or of float64 also -1."""
        single = self.dtype == "float32"
        steps, limit, high, low = (
            (150, 89.0, -0.693359375, 2.12194440e-4) if single else (1075, 711.0, -0.693145751953125, -1.42860682030941723212e-6)
        )

        def result(x: Expr) -> Expr:
            x = minimum(x, limit)  # beyond: infinity
            n, integer = self.nearest(x, math.log2(math.e))
            r = self.mad(n, low, self.mad(n, high, x))
            if single:
                return self.scaled(self.polynomial(r, C.EXP32), n, integer)
            square = r * r
            p = r * self.polynomial(square, C.EXP[0])
            p = p / (self.polynomial(square, C.EXP[1]) - p)
            return self.scaled(p + p + 1.0, n + shift if shift else n, integer + shift)

        # 0 below 2 ** -steps. Processors take a hundred cycles for a vector with a number that underflows, as masked elements of a softmax
        # do: there another number is computed with, or the last step, if one instruction, is masked.
        tiny, zero = x < -steps * math.log(2), self.c(0)
        return select(~tiny, result(x), zero) if self.scales else select(tiny, zero, result(select(tiny, zero, x)))

    def fraction(self, x: Expr) -> tuple[Expr, Expr]:
        """(m, n) with x = m * 2**n and sqrt(1/2) <= m < sqrt(2), for positive finite x; n is an integer-valued float."""
        tiny = x < 2.0 ** (1 - self.bias)
        bits = self.bits(select(tiny, x * 2.0 ** (self.mantissa + 1), x))
        n = (bits - self.bits(self.c(math.sqrt(0.5)))) >> self.mantissa
        m = bitcast(bits - (n << self.mantissa), self.dtype)
        return m, cast(n, self.dtype) - select(tiny, self.c(self.mantissa + 1), 0.0)

    def log_of_special(self, x: Expr, result: Expr) -> Expr:
        """`result` for positive finite x; elsewhere -inf, inf or NaN."""
        special = select(equal(x, 0.0), self.c(-math.inf), select(x < 0.0, self.c(math.nan), x))
        return select((self.c(0) < x) & (x < math.inf), result, special)

    def log(self, x: Expr) -> Expr:
        m, n = self.fraction(x)
        f = m - 1.0
        if self.dtype == "float32":
            square = f * f
            y = f * square * self.polynomial(f, C.LOG32)
            y = self.mad(square, -0.5, self.mad(n, -2.12194440e-4, y))
            return self.log_of_special(x, self.mad(n, 0.693359375, f + y))
        s = f / (f + 2.0)
        z = s * s
        half = f * f * 0.5
        rest = self.mad(n, C.LN2[1], s * self.mad(z, self.polynomial(z, C.LOG), half))
        return self.log_of_special(x, self.mad(n, C.LN2[0], f - (half - rest)))

    def log_twice(self, x: Expr) -> tuple[Expr, Expr]:
        """log(x) as the sum of two numbers, to about 2**-60, for positive finite x."""
        m, n = self.fraction(x)
        f = m - 1.0
        d, d_lo = _two_sum(f, self.c(2.0))
        s = f / d
        product, below = self.two_product(s, d)
        s_lo = (((f - product) - below) - s * d_lo) / d
        z = s * s
        cubic = s * z * self.polynomial(z, C.LOG)
        hi, lo = _two_sum(n * C.LN2[0], s + s)
        return _two_sum(hi, lo + self.mad(n, C.LN2[1], s_lo + s_lo + cubic))

    def power(self, x: Expr, y: Expr) -> Expr:
        if y.op == "const":
            n = float(y.attr)
            if n.is_integer() and 0 <= n <= 4:
                return _power(x, int(n))
            if n in (-1.0, -2.0):
                return _power(1.0 / x, int(-n))
            if n in (0.5, -0.5):
                root = select(equal(x, -math.inf), self.c(math.inf), apply("sqrt", x) + 0.0)  # pow(-0, 0.5) is +0
                return root if n > 0 else 1.0 / root
        size = abs(x)
        single = self.dtype == "float32"
        result = (
            self.power64(size, y) if not single else cast(apply("exp", cast(y, "float64") * apply("log", cast(size, "float64"))), "float32")
        )
        result = select(equal(size, 1.0), select(apply("isnan", y), y, 1.0), result)
        whole = equal(apply("trunc", y), y)
        odd = whole & not_equal(apply("trunc", y * 0.5), y * 0.5)
        result = select(odd & self.negative(x), -result, result)
        result = select((x < 0.0) & (self.c(-math.inf) < x) & ~whole, self.c(math.nan), result)
        return select(equal(y, 0.0) | equal(x, 1.0), self.c(1.0), result)

    def power64(self, size: Expr, y: Expr) -> Expr:
        """size ** y of float64, for size >= 0."""
        hi, lo = self.log_twice(size)
        plain = self.log_of_special(size, hi)
        product, error = self.two_product(y, hi)
        regular = (abs(product) < 1000.0) & equal(plain, hi)
        result = apply("exp", select(regular, product, y * plain))
        # Infinities and NaN are settled: the correction must not turn them into NaN.
        return select(regular & (result < math.inf), self.mad(result, self.mad(y, lo, error), result), result)

    def tanh(self, x: Expr) -> Expr:
        if self.dtype == "float64":
            return self.odd(x, 0.625, C.TANH, 1.0 - 2.0 / (apply("exp", abs(x) + abs(x)) + 1.0))
        y = maximum(minimum(x, 7.90531110763549805), -7.90531110763549805)  # beyond, the result rounds to 1
        square = y * y
        return select(abs(x) < 0.0004, x, y * self.polynomial(square, C.TANH32[0]) / self.polynomial(square, C.TANH32[1]))

    def erf(self, x: Expr) -> Expr:
        if self.dtype == "float32":
            y = maximum(minimum(x, 4.0), -4.0)
            return y * self.ratio(y * y, *C.ERF32)
        y = minimum(abs(x), 6.0)
        square = y * y
        power = apply("exp", -square)
        small = x * self.ratio(square, *ERF_SMALL)
        middle = 1.0 - power * self.ratio(minimum(y, 4.0), *ERF_MIDDLE)
        inverse = 1.0 / maximum(square, 1.0)
        tail = 1.0 - power / maximum(y, 1.0) * (0.5641895835477562869 - inverse * self.ratio(inverse, *ERF_TAIL))
        return select(y <= 0.46875, small, self.with_sign(select(y <= 4.0, middle, tail), x))

    def sinh(self, x: Expr) -> Expr:
        half = self.exp(abs(x), -1)
        return self.odd(x, 1.0, C.SINH, half - 0.25 / half)

    def cosh(self, x: Expr) -> Expr:
        half = self.exp(abs(x), -1)  # so that it overflows late
        return half + 0.25 / half

    def asinh(self, x: Expr) -> Expr:
        size = abs(x)
        return self.odd(x, 0.5, C.ASINH, self.area(size, size + apply("sqrt", x * x + 1.0)))

    def acosh(self, x: Expr) -> Expr:
        z = x - 1.0
        near = apply("sqrt", z) * self.ratio(z, *C.ACOSH)
        large = self.area(x, x + apply("sqrt", z * (x + 1.0)))
        return select(x < 1.0, self.c(math.nan), select(z < 0.5, near, large))

    def area(self, size: Expr, total: Expr) -> Expr:
        """log(total), about 2 * size, whose square may overflow."""
        huge = self.c(1e8) < size
        return apply("log", select(huge, size, total)) + select(huge, self.c(math.log(2)), 0.0)

    def atanh(self, x: Expr) -> Expr:
        return self.odd(x, 0.5, C.ATANH, 0.5 * apply("log", (1.0 + abs(x)) / (1.0 - abs(x))))

    def quadrant(self, x: Expr) -> tuple[Expr, Expr, Expr]:
        """(sin r, cos r, n) for x = r + n * pi / 2 with |r| <= pi / 4 (Cody, Waite 1980)."""
        n, integer = self.nearest(x, 2 / math.pi)
        r = reduce(lambda r, part: self.mad(n, -part, r), C.PI_2_FUSED if self.target.fma else C.PI_2, x)
        r = maximum(minimum(r, 1.0), -1.0)  # of arguments too large to be reduced nothing is left but the bounds
        z = r * r
        sine = self.mad(r * z, self.polynomial(z, C.SIN), r)
        half = z * 0.5
        whole = 1.0 - half
        cosine = whole + ((1.0 - whole) - half + z * z * self.polynomial(z, C.COS))
        sine, cosine = (select(equal(abs(x), math.inf), self.c(math.nan), value) for value in (sine, cosine))
        return sine, cosine, integer

    def sin(self, x: Expr) -> Expr:
        sine, cosine, n = self.quadrant(x)
        value = select(equal(n & 1, 0), sine, cosine)
        return select(equal(x, 0.0), x, select(equal(n & 2, 0), value, -value))

    def cos(self, x: Expr) -> Expr:
        sine, cosine, n = self.quadrant(x)
        value = select(equal(n & 1, 0), cosine, sine)
        return select(equal((n + 1) & 2, 0), value, -value)

    def tan(self, x: Expr) -> Expr:
        sine, cosine, n = self.quadrant(x)
        even = equal(n & 1, 0)
        return select(equal(x, 0.0), x, select(even, sine, -cosine) / select(even, cosine, sine))

    def arcsine_parts(self, x: Expr) -> tuple[Expr, Expr, Expr]:
        """(size, root, tail): for size < 1/2, asin(size) = root + tail, else acos(size) / 2 = root + tail."""
        size = abs(x)
        small, rest = size < 0.5, (1.0 - size) * 0.5
        z = select(small, size * size, rest)
        root = select(small, size, apply("sqrt", z))
        return size, root, root * z * self.ratio(z, *C.ASIN)

    def asin(self, x: Expr) -> Expr:
        size, root, tail = self.arcsine_parts(x)
        large = C.PI_2_FUSED[0] - (2.0 * (root + tail) - C.PI_2_FUSED[1])
        return select(size <= 1.0, self.with_sign(select(size < 0.5, root + tail, large), x), self.c(math.nan))

    def acos(self, x: Expr) -> Expr:
        size, root, tail = self.arcsine_parts(x)
        value = root + tail
        near_one = select(self.negative(x), math.pi - (2.0 * value - 2 * C.PI_2_FUSED[1]), 2.0 * value)
        near_zero = C.PI_2_FUSED[0] - (self.with_sign(value, x * value) - C.PI_2_FUSED[1])
        return select(size <= 1.0, select(size < 0.5, near_zero, near_one), self.c(math.nan))

    def atan(self, x: Expr) -> Expr:
        size = abs(x)
        large, middle = self.c(2.41421356237309504880) < size, self.c(0.66) < size  # tan(3 pi / 8)
        y = select(large, -1.0 / size, select(middle, (size - 1.0) / (size + 1.0), size))
        start = select(large, self.c(math.pi / 2), select(middle, self.c(math.pi / 4), 0.0))
        below = select(large, self.c(C.PI_2_FUSED[1]), select(middle, self.c(C.PI_2_FUSED[1] / 2), 0.0))
        square = y * y
        value = start + (self.mad(y * square, self.ratio(square, *C.ATAN), y) + below)
        return select(apply("isnan", x), x, self.with_sign(value, x))


def _two_sum(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """a + b rounded, and the rounding error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _halves(x: Expr) -> tuple[Expr, Expr]:
    """Upper and lower half of the digits of a float64 (Veltkamp)."""
    scaled = x * 134217729.0
    high = scaled - (scaled - x)
    return high, x - high
