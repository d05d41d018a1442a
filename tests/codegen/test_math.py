"""Elementary functions, native, against NumPy in higher precision: the errors stated in `tcomp.codegen.llvm.math` are measured here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import assembly
from tcomp.codegen.llvm.math import ELEMENTARY
from tcomp.ir import expr as E, te
from tcomp.ir.dtypes import to_numpy
from tcomp.ir.expr import Expr
from tcomp.ir.interpreters import semantics
from tcomp.ir.loops import Buffer, block, loop, store
from tcomp.ir.scalar_operators import wrap
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST, compile_kernel, expand, kernel

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")  # NumPy warns of NaN, which are meant here

BASELINE = CpuTarget.parse("cpu -mcpu=x86-64")  # neither FMA nor rounding nor half-precision instructions
HASWELL = CpuTarget.parse("cpu -mcpu=haswell")
NAMES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh"}
FUNCTIONS = sorted(ELEMENTARY - {"pow"})
SINGLE = {"exp": 0.95, "log": 0.9, "tanh": 4.7, "erf": 5.5}  # ulp; all others of float32 are correctly rounded but for rare near-ties
DOUBLE = {
    "exp": 1.8, "log": 1.0, "tanh": 1.5, "erf": 4.2, "sin": 1.5, "cos": 1.5, "tan": 3.0, "asin": 2.2, "acos": 1.5, "atan": 1.2,
    "sinh": 2.2, "cosh": 2.2, "asinh": 3.7, "acosh": 3.2, "atanh": 1.5,
}  # fmt: skip


def apply(function: Callable[..., Expr], *arrays: np.ndarray, target: CpuTarget = HOST, lanes: int = 16) -> np.ndarray:
    """`function` of whole arrays, by a vectorized kernel."""
    size, dtype = len(arrays[0]), arrays[0].dtype.name
    ins, out = [Buffer(f"a{n}", dtype, (size,)) for n in range(len(arrays))], Buffer("out", dtype, (size,))

    def point(i: Expr) -> Expr:
        return function(*(b[i] for b in ins))

    body = loop("i", size // lanes, lambda i: loop("v", lanes, lambda v: store(out, (i * lanes + v,), point(i * lanes + v)), "vectorized"))
    result = np.zeros_like(arrays[0])
    compile_kernel(kernel("k", ins, [out], body), target)(*arrays, result)
    return result


def elementary(name: str) -> Callable[[Expr], Expr]:
    return lambda x: E.unary(name, x)


def samples(dtype: str, count: int) -> np.ndarray:
    """All exponents, the range where functions vary, and special values."""
    rng = np.random.default_rng(0)
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    anything = np.linspace(0, np.iinfo(bits).max - 2048, count // 2, dtype=np.float64).astype(bits).view(dtype)
    usual = rng.uniform(-1, 1, count - len(anything)) * 10.0 ** rng.uniform(-3, 3, count - len(anything))
    values = np.concatenate([anything, usual.astype(dtype)])
    info = np.finfo(dtype)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, info.tiny, -info.tiny, info.smallest_subnormal, info.max, -info.max, 0.5, -0.5]
    values[: len(special)] = special
    return values


def exact(name: str, x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = x.astype(np.float64 if x.dtype == np.float32 else np.longdouble)
    with np.errstate(all="ignore"):
        if name == "erf":
            return np.array([math.erf(v) for v in wide.tolist()], wide.dtype)
        return getattr(np, NAMES.get(name, name))(wide)


def check(got: np.ndarray, want: np.ndarray, limit: float) -> None:
    """Within `limit` ulp of the exact results; infinities, NaN and signs of zeros as they should be."""
    with np.errstate(all="ignore"):
        rounded = want.astype(got.dtype)
        finite = np.isfinite(rounded) & np.isfinite(got)
        np.testing.assert_array_equal(got[~finite], rounded[~finite])
        zero = (rounded == 0) & (got == 0)
        np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(rounded[zero]))
        error = abs(got[finite].astype(want.dtype) - want[finite]) / np.spacing(abs(rounded[finite])).astype(want.dtype)
    assert error.max() <= limit, f"{error.max()} ulp: {got[finite][error.argmax()]} for {want[finite][error.argmax()]}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32(name: str) -> None:
    x = samples("float32", 1 << 20)
    if name in ("sin", "cos", "tan"):
        x = x[~(abs(x) >= 2.0**50) | np.isinf(x)]
    if name == "erf":
        x = np.concatenate([x[:64], np.random.default_rng(0).choice(x, 1 << 17)])
    x = x[: len(x) // 16 * 16]
    check(apply(elementary(name), x), exact(name, x), SINGLE.get(name, 0.501))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64(name: str) -> None:
    x = samples("float64", 1 << 17)
    if name in ("sin", "cos", "tan"):
        x = x[~(abs(x) >= 2.0**29) | np.isinf(x)]
    x = x[: len(x) // 16 * 16]
    check(apply(elementary(name), x), exact(name, x), DOUBLE[name])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_fused_multiply_add(name: str, dtype: str) -> None:
    x = samples(dtype, 1 << 13)
    if name in ("sin", "cos", "tan"):
        x = x[~(abs(x) >= 2.0**29) | np.isinf(x)]
    x = x[: len(x) // 16 * 16]
    limit = SINGLE.get(name, 0.501) if dtype == "float32" else DOUBLE[name]
    check(apply(elementary(name), x, target=BASELINE, lanes=4), exact(name, x), limit + 0.8)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_16_bit_floats(name: str) -> None:
    for dtype in ("float16", "bfloat16"):
        x = np.arange(1 << 16, dtype=np.uint16).view(to_numpy(dtype))
        y = apply(elementary(name), x)
        with np.errstate(all="ignore"):
            want = exact(name, x.astype(np.float32)).astype(to_numpy(dtype)).astype(np.float32)
        if name in ("sin", "cos", "tan"):
            keep = ~(abs(x.astype(np.float64)) > 2.0**29)
            y, want = y[keep], want[keep]
        got = y.astype(np.float32)
        near = (
            (got == want)
            | (np.isnan(got) & np.isnan(want))
            | (abs(got.view(np.int32) - want.view(np.int32)) <= 1 << (13 if dtype == "float16" else 16))
        )
        tiny = abs(want) < 2.0**-14  # subnormal float16: one unit is more than that
        assert (near | (tiny & (abs(got - want) <= 2.0**-24))).all()


@pytest.mark.parametrize("target", [HOST, HASWELL, BASELINE], ids=["host", "haswell", "baseline"])
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scaling_by_powers_of_two_rounds_once(dtype: str, lanes: int, target: CpuTarget) -> None:
    """Into subnormal numbers, to zero, to infinity: whole vectors by one instruction where there is one."""
    least, most = (-151, 129) if dtype == "float32" else (-1076, 1025)
    n = np.arange(least, most + 1).astype(dtype).repeat(32)
    x = np.random.default_rng(0).uniform(-2, 2, len(n)).astype(dtype)
    x[::32], x[1::32], x[2::32], x[3::32] = 0.0, -0.0, np.inf, np.nan
    with np.errstate(all="ignore"):
        want = np.ldexp(x, n.astype(np.int32))
    got = apply(E.ldexp, x, n, target=target, lanes=lanes)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
    np.testing.assert_array_equal(semantics.apply("ldexp", dtype, [x, n]), want)


@pytest.mark.parametrize(
    "line", ["cpu -mcpu=x86-64", "cpu -mcpu=haswell", "cpu -mcpu=sapphirerapids", "aarch64", "cpu -march=aarch64 -mcpu=neoverse-v1"]
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_extrema_are_instructions_everywhere(dtype: str, line: str) -> None:
    target = CpuTarget.parse(line)
    a, b, out = (Buffer(name, dtype, (128,)) for name in ("a", "b", "out"))
    body = [
        loop(f"v{lanes}", lanes, lambda v: store(out, (v,), E.binary("max", a[v], E.binary("min", b[v], a[v]))), kind)
        for lanes, kind in ((1, "serial"), (16, "vectorized"), (64, "vectorized"))
    ]
    text = assembly(emit_kernel(kernel("k", [a, b], [out], block(*body)), target), target)
    assert not re.search(r"\b(callq?|bl)\s", text)


def test_huge_angles_stay_bounded() -> None:
    x = np.concatenate([10.0 ** np.linspace(9, 38, 64), [np.inf] * 16]).astype(np.float32)
    for name in ("sin", "cos"):
        y = apply(elementary(name), x)
        assert np.isnan(y[64:]).all() and (abs(y[:64]) <= 1).all()
        np.testing.assert_allclose(y[x < 1e15], exact(name, x[x < 1e15]), atol=1e-7)


@pytest.mark.parametrize("target", [HOST, BASELINE], ids=["host", "baseline"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_power(dtype: str, target: CpuTarget) -> None:
    rng = np.random.default_rng(0)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 2, -2, 0.5, -0.5, 3, -3, 1e30, -1e30, 1e-30], dtype)
    pairs = np.array(np.meshgrid(special, special)).reshape(2, -1).astype(dtype)
    x = np.concatenate([pairs[0], samples(dtype, 4096), abs(rng.normal(size=8192)) * 10, rng.normal(size=4096) * 5]).astype(dtype)
    y = np.concatenate([pairs[1], rng.permutation(samples(dtype, 4096)), rng.normal(size=8192) * 30, rng.integers(-40, 40, 4096)]).astype(
        dtype
    )
    with np.errstate(all="ignore"):
        want = np.power(
            x.astype(np.float64 if dtype == "float32" else np.longdouble), y.astype(np.float64 if dtype == "float32" else np.longdouble)
        )
    check(apply(lambda a, b: E.binary("pow", a, b), x, y, target=target, lanes=4), want, 0.51 if dtype == "float32" else 3.0)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 7, 8, -1, -2, 0.5, -0.5, 2.5, 13])
def test_constant_exponents(exponent: float) -> None:
    x = samples("float32", 4096)
    with np.errstate(all="ignore"):
        check(apply(lambda a: E.binary("pow", a, exponent), x), np.power(x.astype(np.float64), np.full(4096, exponent)), 2.5)


def test_integer_powers_wrap_around() -> None:
    rng = np.random.default_rng(0)
    for dtype in ("int32", "int64", "uint8"):
        x = rng.integers(0 if dtype == "uint8" else -9, 9, 256).astype(dtype)
        y = rng.integers(0 if dtype == "uint8" else -4, 70, 256).astype(dtype)
        want = [
            wrap(int(a) ** int(b) if b >= 0 else int(a) if a in (1, -1) and b % 2 else int(abs(a) == 1), dtype)
            for a, b in zip(x, y, strict=True)
        ]
        np.testing.assert_array_equal(apply(lambda a, b: E.binary("pow", a, b), x, y), np.array(want, dtype))
        np.testing.assert_array_equal(apply(lambda a: E.binary("pow", a, 5), x), x**5)


@pytest.mark.parametrize("target", [HOST, BASELINE], ids=["host", "baseline"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_quotients_and_remainders(dtype: str, target: CpuTarget) -> None:
    rng = np.random.default_rng(0)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 2.5, -2.5, 7, -7, 0.1, -0.1, 1e9, 3, -3], dtype)
    pairs = np.array(np.meshgrid(special, special)).reshape(2, -1)
    x = np.concatenate([pairs[0], rng.normal(size=1024) * 100]).astype(dtype)
    y = np.concatenate([pairs[1], rng.normal(size=1024)]).astype(dtype)
    for op, reference in (("floordiv", np.floor_divide), ("mod", np.remainder), ("truncmod", np.fmod)):
        with np.errstate(all="ignore"):
            want = reference(x, y)
        got = apply(lambda a, b, op=op: E.binary(op, a, b), x, y, target=target, lanes=4)
        np.testing.assert_array_equal(got, want, err_msg=op)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_fused_multiply_add_without_the_instruction(dtype: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=4096).astype(dtype) for _ in range(2))
    c = (-(a.astype(np.float64) * b.astype(np.float64)) * (1 + rng.normal(size=4096) * 2.0 ** rng.integers(-60, 1, 4096))).astype(dtype)
    native, emulated = (apply(E.fma, a, b, c, target=t, lanes=4) for t in (HOST, BASELINE))
    np.testing.assert_array_equal(native, emulated)


@pytest.mark.parametrize("target", [BASELINE, HASWELL], ids=["baseline", "haswell"])
def test_half_precision_conversion(target: CpuTarget) -> None:
    """Every float16, and floats on and next to every boundary between two of them."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    size, out = Buffer("a", "float16", (1 << 16,)), Buffer("o", "float32", (1 << 16,))
    body = loop(
        "i", 1 << 12, lambda i: loop("v", 16, lambda v: store(out, (i * 16 + v,), E.cast(size[i * 16 + v], "float32")), "vectorized")
    )
    wide = np.zeros(1 << 16, np.float32)
    compile_kernel(kernel("k", [size], [out], body), target)(halves, wide)
    np.testing.assert_array_equal(wide, halves.astype(np.float32))
    with np.errstate(all="ignore"):
        ties = (np.nextafter(halves, np.float16(np.inf)).astype(np.float64) + halves.astype(np.float64)) / 2
        for source in ("float32", "float64"):
            x = np.concatenate([ties, ties * (1 + 1e-7), ties * (1 - 1e-7), ties * (1 + 1e-15), ties * 1.3]).astype(source)
            a, o = Buffer("a", source, (len(x),)), Buffer("o", "float16", (len(x),))
            body = loop(
                "i",
                len(x) // 16,
                lambda i, a=a, o=o: loop("v", 16, lambda v: store(o, (i * 16 + v,), E.cast(a[i * 16 + v], "float16")), "vectorized"),
            )
            narrow = np.zeros(len(x), np.float16)
            compile_kernel(kernel("k", [a], [o], body), target)(x, narrow)
            np.testing.assert_array_equal(narrow, x.astype(np.float16))


def test_sigmoid_and_gelu() -> None:
    x = samples("float32", 1 << 16)
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        want = 1 / (1 + np.exp(-wide))
        normal = ~(want < np.finfo(np.float32).tiny)  # below, exp(-x) is infinite and the result 0
        check(apply(te.sigmoid, x)[normal], want[normal], 2.6)
    y = apply(lambda a: a * 0.5 * (1.0 + te.erf(a * math.sqrt(0.5))), x)
    reference = np.array([v * 0.5 * math.erfc(-v * math.sqrt(0.5)) if math.isfinite(v) else v for v in wide.tolist()])
    finite = np.isfinite(wide)
    np.testing.assert_allclose(y[finite], reference[finite], rtol=2e-6, atol=2e-6)


def test_lowering_leaves_only_basic_operators() -> None:
    x, y = E.var("x", dtype="float64"), E.var("y", dtype="float16")
    for target in (HOST, HASWELL, BASELINE):
        for name in FUNCTIONS:
            for v in (x, y):
                ops = {e.op for e in E.walk(expand(E.unary(name, v) + E.unary(name, E.unary(name, v)), target))}
                assert not ops & ELEMENTARY
                assert target.fma or "fma" not in ops
                assert target is not BASELINE or not ops & {"floor", "ceil", "round", "trunc"}
