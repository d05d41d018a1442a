"""CUDA C++ of loop programs: every operator and type against the interpreter, the structure of functions, and NVRTC where it is installed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.codegen.cuda.math import literal
from tcomp.errors import CodegenError, TargetError
from tcomp.ir import expr as E, te
from tcomp.ir.dtypes import BITS, FLOATS, NARROW, SIGNED, UNSIGNED, integer_range, is_float, is_integer, to_numpy
from tcomp.ir.expr import Expr, cast, select
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Accumulate, Allocate, Buffer, If, Kernel, Stmt, While, block, loop, store
from tcomp.ir.scalar_operators import COMPARISON, UNARY
from tcomp.target import CudaTarget
from tests.codegen.cuda import cuda_host

TARGET = CudaTarget.parse("cuda")
needs_compiler = pytest.mark.skipif(cuda_host.compiler() is None, reason="there is no C++ compiler")


def installed() -> str:
    try:
        nvrtc.version()
    except TargetError as problem:
        return problem.why
    return ""


needs_nvrtc = pytest.mark.skipif(bool(installed()), reason=installed())


def kernel(body: Stmt, buffers: Sequence[Buffer], outputs: Sequence[Buffer], scalars: Sequence[Expr] = (), name: str = "k") -> Kernel:
    return Kernel(name, tuple(buffers), tuple(outputs), tuple(scalars), body)


def run(k: Kernel, arrays: Sequence[np.ndarray], scalars: Sequence[int] = (), descending: bool = False) -> None:
    """Run the emitted text in place."""
    text, launches = emit_kernel(k, TARGET)
    values = dict(zip(k.scalars, scalars, strict=True))
    for launch in launches:
        grid = [E.evaluate_int(d, values) for d in launch.grid]
        args = [arrays[n].ctypes.data for n in launch.buffers] + [scalars[n] for n in launch.scalars]
        cuda_host.launch(text, launch.function, grid, launch.block, args, descending)


# ---------------------------------------------------------------- operators


def special(dtype: str, seed: int) -> np.ndarray:
    """Values at the edges of a type, and between them."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, 64).astype(bool)
    if is_float(dtype):
        edges = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, np.inf, -np.inf, np.nan, 6e-8, 1e-40, 300.0, -7.75, 65504.0, 1e20]
        return rng.permutation(np.concatenate([edges, rng.standard_normal(48) * 4])).astype(to_numpy(dtype))
    if dtype in NARROW:
        return rng.permutation(256).astype(np.uint8)[:64].view(to_numpy(dtype))
    lo, hi = integer_range(dtype)
    edges = [0, 1, 2, 3, 7, hi, hi - 1, lo, lo + 1, hi // 2] + ([-1, -2, -7] if lo < 0 else [])
    between = [int(v) for v in rng.integers(max(lo, -100), min(hi, 100), 64 - len(edges))]
    return rng.permutation(np.array([*edges, *between], to_numpy(dtype)))


def operators(dtype: str) -> dict[str, Callable[[Expr, Expr], Expr]]:
    casts = {f"cast-{other}": lambda a, b, other=other: cast(a, other) for other in BITS if other != dtype}
    if dtype in NARROW:
        return casts
    binary = [*COMPARISON, "min", "max"]
    unary: list[str] = []
    if dtype == "bool":
        binary += ["and", "or", "xor", "mul", "add"]
        unary = ["not", "abs"]
    elif is_integer(dtype):
        binary += ["add", "sub", "mul", "floordiv", "mod", "truncdiv", "truncmod", "and", "or", "xor", "shl", "shr", "pow"]
        unary = ["neg", "abs", "not", "popcount"]
    else:
        binary += ["add", "sub", "mul", "div", "floordiv", "mod", "truncdiv", "truncmod"]
        unary = ["neg", "abs", "floor", "ceil", "round", "trunc", "sqrt", "isnan", "isinf"]
    found: dict[str, Callable[[Expr, Expr], Expr]] = {op: lambda a, b, op=op: E.binary(op, a, b) for op in binary}
    found |= {op: lambda a, b, op=op: E.unary(op, a) for op in unary}
    found |= casts
    found["select"] = lambda a, b: select(E.equal(a, b), a, b)
    if is_float(dtype):
        found["fma"] = lambda a, b: E.fma(a, b, a)
    return found


def compared(got: np.ndarray, want: np.ndarray, what: str) -> None:
    if is_float(want.dtype.name):
        got, want = got.astype(np.float64), want.astype(np.float64)
    elif want.dtype.name in NARROW:
        got, want = got.view(np.uint8), want.view(np.uint8)
    np.testing.assert_array_equal(got, want, err_msg=what)


@needs_compiler
@pytest.mark.parametrize("dtype", BITS)
def test_operators_mean_what_the_interpreter_says(dtype: str) -> None:
    a, b = Buffer("a", dtype, (64,)), Buffer("b", dtype, (64,))
    i = E.loop_var("i", 64)
    results = {name: make(a[i], b[i]) for name, make in operators(dtype).items()}
    outs = {name: Buffer(f"out_{n}", e.dtype, (64,)) for n, (name, e) in enumerate(results.items())}
    body = loop(
        "i", 64, lambda v: block(*(store(outs[name], (v,), make(a[v], b[v])) for name, make in operators(dtype).items())), "thread.x"
    )
    k = kernel(body, [a, b, *outs.values()], list(outs.values()))
    given = [special(dtype, 0), special(dtype, 1)]
    wanted = [np.zeros(64, to_numpy(o.dtype)) for o in outs.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_kernel(k, dict(zip(k.buffers, [*given, *wanted], strict=True)))
    found = [np.full(64, 77).astype(w.dtype) for w in wanted]
    run(k, [*given, *found])
    for name, got, want in zip(outs, found, wanted, strict=True):
        compared(got, want, f"{name} of {dtype}")


@needs_compiler
@pytest.mark.parametrize("dtype", FLOATS)
def test_elementary_functions(dtype: str) -> None:
    """The host's functions stand for CUDA's here: this shows that the right ones are called, rounded to the type."""
    functions = [*UNARY[UNARY.index("exp") : UNARY.index("isnan")], "pow"]
    x, outs = Buffer("x", dtype, (40,)), [Buffer(f"out_{f}", dtype, (40,)) for f in functions]

    def applied(f: str, v: Expr) -> Expr:
        return E.binary("pow", x[v], E.const(1.5, dtype)) if f == "pow" else E.unary(f, x[v])

    body = loop("i", 40, lambda v: block(*(store(o, (v,), applied(f, v)) for f, o in zip(functions, outs, strict=True))), "thread.x")
    k = kernel(body, [x, *outs], outs)
    given = np.linspace(0.05, 1.9, 40).astype(to_numpy(dtype))
    wanted, found = ([np.zeros(40, to_numpy(dtype)) for _ in outs] for _ in range(2))
    run_kernel(k, dict(zip(k.buffers, [given, *wanted], strict=True)))
    run(k, [given, *found])
    tolerance = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-6, "float64": 1e-13}[dtype]
    for f, got, want in zip(functions, found, wanted, strict=True):
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance, err_msg=f)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_is_read_and_written_unchanged(dtype: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    x, y = Buffer("x", dtype, (1 << 16,)), Buffer("y", dtype, (1 << 16,))
    k = kernel(loop("i", 1 << 16, lambda i: store(y, (i,), cast(cast(x[i], "float32"), dtype)), "block.x"), [x, y], [y])
    given, found = bits.view(to_numpy(dtype)), np.zeros(1 << 16, to_numpy(dtype))
    run(k, [given, found])
    numbers = ~np.isnan(given.astype(np.float32))
    np.testing.assert_array_equal(found.view(np.uint16)[numbers], bits[numbers])
    assert np.isnan(found.astype(np.float32)[~numbers]).all()


@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED])
def test_literals_of_integers(dtype: str) -> None:
    lo, hi = integer_range(dtype)
    assert literal(hi, dtype).rstrip("LUu") == str(hi)
    assert eval(literal(lo, dtype).replace("LL", "").replace("u", ""), {}) == lo if lo < 0 else literal(lo, dtype).rstrip("LUu") == "0"


# ---------------------------------------------------------------- structure


SUM = te.sum(te.placeholder((4,), "float32")[0], te.reduce_axis(4)).attr[0]


@needs_compiler
def test_a_select_does_not_evaluate_the_other_side() -> None:
    """The row beyond the end lies outside of the memory of the process."""
    x, y = Buffer("x", "float32", (8,)), Buffer("y", "float32", (16,))

    def value(i: Expr) -> Expr:
        far = x[i * 10**9 - 8 * 10**9 + i]
        return select(i < 8, x[i], select(i < 0, far * far + far, E.const(-1.0, "float32")))

    k = kernel(loop("i", 16, lambda i: store(y, (i,), value(i)), "thread.x"), [x, y], [y])
    given, found = np.arange(8, dtype=np.float32), np.zeros(16, np.float32)
    run(k, [given, found])
    np.testing.assert_array_equal(found, [*range(8), *[-1] * 8])


@needs_compiler
def test_values_read_before_a_store_are_not_used_after_it() -> None:
    x = Buffer("x", "float32", (4,))
    body = loop("i", 4, lambda i: block(store(x, (i,), x[i] * x[i] + 1.0), store(x, (i,), x[i] * x[i] + x[i])), "thread.x")
    found = np.arange(4, dtype=np.float32)
    run(kernel(body, [x], [x]), [found])
    want = np.arange(4.0) ** 2 + 1
    np.testing.assert_array_equal(found, want * want + want)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 5, 32, 100, 256])
@pytest.mark.parametrize("descending", [False, True])
def test_threads_that_meet_in_one_element(threads: int, descending: bool) -> None:
    x, y = Buffer("x", "float32", (3, threads)), Buffer("y", "float32", (3,))

    def row(r: Expr) -> Stmt:
        meet = loop(f"t{threads}", threads, lambda t: Accumulate(y, (r,), x[r, t], SUM), "thread.x")
        return block(store(y, (r,), 0.0), meet)

    k = kernel(loop("r", 3, row, "block.x"), [x, y], [y])
    given, found = np.arange(3 * threads, dtype=np.float32).reshape(3, threads), np.zeros(3, np.float32)
    run(k, [given, found], descending=descending)
    np.testing.assert_array_equal(found, given.sum(axis=1))


@needs_compiler
def test_phases_of_different_width_and_serial_loops_around_them() -> None:
    """Each round, 8 threads write what 24 threads read at other places: two barriers a round."""
    x, y, tile = Buffer("x", "float32", (4, 8)), Buffer("y", "float32", (24,)), Buffer("tile", "float32", (8,), "shared")

    def round_(r: Expr) -> Stmt:
        fill = loop("a", 8, lambda a: store(tile, (a,), x[r, a]), "thread.x")
        use = loop("b", 24, lambda b: Accumulate(y, (b,), tile[(b + 1) % 8], SUM), "thread.x")
        return block(fill, use)

    body = loop("blk", 1, lambda _: block(loop("z", 24, lambda z: store(y, (z,), 0.0), "thread.x"), loop("r", 4, round_)), "block.x")
    k = kernel(Allocate(tile, body), [x, y], [y])
    text, _ = emit_kernel(k, TARGET)
    assert text.count("__syncthreads();") == 2
    given = np.arange(32, dtype=np.float32).reshape(4, 8)
    for descending in (False, True):
        found = np.zeros(24, np.float32)
        run(k, [given, found], descending=descending)
        np.testing.assert_array_equal(found, [given[:, (b + 1) % 8].sum() for b in range(24)])


@needs_compiler
def test_imperative_programs_run_on_one_thread() -> None:
    """Collatz steps: a while loop on values in memory, with a buffer of its own."""
    x, y, n = Buffer("x", "int64", (10,)), Buffer("y", "int64", (10,)), Buffer("n", "int64", (1,), "register")
    zero = E.const(0, "int64")

    def steps(i: Expr) -> Stmt:
        odd = E.equal(n[zero] % 2, 1)
        body = block(store(n, (zero,), select(odd, n[zero] * 3 + 1, n[zero] // 2)), store(y, (i,), y[i] + 1))
        return Allocate(n, block(store(y, (i,), 0), store(n, (zero,), x[i]), While(n[zero] > 1, body)))

    k = kernel(loop("i", 10, lambda i: If(i < 9, steps(i), store(y, (i,), -1))), [x, y], [y])
    given, found = np.arange(1, 11), np.zeros(10, np.int64)
    run(k, [given, found])
    np.testing.assert_array_equal(found, [0, 1, 7, 2, 5, 8, 16, 3, 19, -1])


@needs_compiler
def test_symbolic_sizes_and_empty_grids_of_one() -> None:
    n = te.var("n", 0, 1000)
    x, y = Buffer("x", "float32", (n,)), Buffer("y", "float32", (n,))
    body = loop("b", (n + 31) // 32, lambda b: loop("t", 32, lambda t: If(b * 32 + t < n, store(y, (b * 32 + t,), x[b * 32 + t] + 1.0)),
                "thread.x"), "block.x")  # fmt: skip
    k = kernel(body, [x, y], [y], [n])
    given, found = np.arange(70, dtype=np.float32), np.zeros(70, np.float32)
    run(k, [given, found], [70])
    np.testing.assert_array_equal(found, given + 1)


def test_index_arithmetic_is_as_wide_as_needed() -> None:
    def text(extent: int) -> str:
        x = Buffer("x", "float32", (extent, 1024))
        body = loop("i", extent, lambda i: loop("j", 1024, lambda j: store(x, (i, j), 0.0), "thread.x"), "block.x")
        return emit_kernel(kernel(body, [x], [x]), TARGET)[0]

    assert "long long" not in text(1024)
    assert "(long long)" in text(1 << 22)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (lambda x: loop("t", 2048, lambda t: store(x, (t,), 0.0), "thread.x"), "2048 threads"),
        (lambda x: loop("t", te.var("m", 1, None), lambda t: store(x, (t,), 0.0), "thread.x"), "symbolic extent"),
        (lambda x: Allocate(b := Buffer("big", "float32", (1 << 17,), "shared"),
                            loop("t", 32, lambda t: store(b, (t,), x[t]), "thread.x")), "shared memory"),
        (lambda x: loop("t", 32, lambda t: loop("b", 2, lambda b: store(x, (t,), 0.0), "block.x"), "thread.x"), "inside a thread"),
    ],
)  # fmt: skip
def test_what_a_gpu_cannot_do_is_refused(body: Callable[[Buffer], Stmt], complaint: str) -> None:
    x = Buffer("x", "float32", (4096,))
    with pytest.raises(CodegenError, match=complaint):
        emit_kernel(kernel(body(x), [x], [x]), TARGET)


# ---------------------------------------------------------------- NVRTC


@needs_compiler
def test_registers_are_divided_by_the_digits_of_a_thread() -> None:
    """A thread has elements of its own where their indices tell it from all others."""
    x, y, own = Buffer("x", "float32", (64,)), Buffer("y", "float32", (64,)), Buffer("own", "float32", (8, 4, 2), "register")

    def phases(*digits: Callable[[Expr], Expr]) -> Kernel:
        def place(t: Expr, e: Expr) -> tuple[Expr, ...]:
            return (*(digit(t) for digit in digits), e)

        fill = loop("t", 32, lambda t: loop("e", 2, lambda e: store(own, place(t, e), x[t * 2 + e])), "thread.x")
        use = loop("u", 32, lambda u: loop("e", 2, lambda e: store(y, (u * 2 + e,), own[place(u, 1 - e)])), "thread.x")
        return kernel(Allocate(own, block(fill, use)), [x, y], [y])

    divided = phases(lambda t: t // 4, lambda t: t % 4)
    assert "float own[2];" in emit_kernel(divided, TARGET)[0]
    given, found = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    for descending in (False, True):
        run(divided, [given, found], descending=descending)
        np.testing.assert_array_equal(found, given.reshape(32, 2)[:, ::-1].reshape(-1))
    with pytest.raises(CodegenError, match="threads that it does not belong to"):
        emit_kernel(phases(lambda t: t // 4, lambda t: t % 2), TARGET)


def test_registers_of_other_threads_are_refused() -> None:
    """Phases have to agree on which thread has which element."""
    own, y = Buffer("own", "float32", (8, 8), "register"), Buffer("y", "float32", (8, 8))

    def turned(first: Callable[[Expr, Expr], tuple[Expr, ...]], second: Callable[[Expr, Expr], tuple[Expr, ...]]) -> Kernel:
        fill = loop("a", 8, lambda a: loop("b", 8, lambda b: store(own, first(a, b), 1.0), "thread.x"), "thread.y")
        use = loop("c", 8, lambda c: loop("d", 8, lambda d: store(y, (c, d), own[second(c, d)]), "thread.x"), "thread.y")
        return kernel(Allocate(own, block(fill, use)), [y], [y])

    def straight(y: Expr, x: Expr) -> tuple[Expr, ...]:
        return y, x

    assert "float own[1];" in emit_kernel(turned(straight, straight), TARGET)[0]
    for other in (lambda y, x: (x, y), lambda y, x: (y, 7 - x)):
        with pytest.raises(CodegenError, match="divided among the threads in several ways"):
            emit_kernel(turned(straight, other), TARGET)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", BITS)
def test_nvrtc_accepts_every_operator(dtype: str, arch: str) -> None:
    a, b = Buffer("a", dtype, (64,)), Buffer("b", dtype, (64,))
    i = E.loop_var("i", 64)
    outs = [Buffer(f"out_{n}", make(a[i], b[i]).dtype, (64,)) for n, make in enumerate(operators(dtype).values())]
    pairs = list(zip(outs, operators(dtype).values(), strict=True))
    body = loop("i", 64, lambda v: block(*(store(o, (v,), make(a[v], b[v])) for o, make in pairs)), "thread.x")
    binary = nvrtc.compile_text(emit_kernel(kernel(body, [a, b, *outs], outs), TARGET)[0], arch)
    assert binary.cubin.startswith(b"\x7fELF") and b".entry k_0" in binary.ptx
    assert binary.usage["k_0"].registers > 0


@needs_nvrtc
def test_nvrtc_says_what_it_refuses() -> None:
    with pytest.raises(CodegenError, match="undefined"):
        nvrtc.compile_text('extern "C" __global__ void k() { undefined(); }', "sm_80")
    with pytest.raises(TargetError, match="sm_1"):
        nvrtc.compile_text("", "sm_1")


def test_a_missing_compiler_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    nvrtc._nvrtc.cache_clear()
    try:
        with pytest.raises(TargetError, match=r"tcomp\[cuda\]"):
            nvrtc.compile_text("", "sm_80")
    finally:
        nvrtc._nvrtc.cache_clear()
