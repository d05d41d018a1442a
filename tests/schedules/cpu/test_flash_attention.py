"""Maxima and sums of exponentials in one pass: the same numbers in any state of the loops, whatever is infinite; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

import tcomp
from tcomp.errors import ScheduleError
from tcomp.ir import te
from tcomp.ir.dtypes import to_numpy
from tcomp.ir.expr import Dim, Expr, as_expr, evaluate_int
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Allocate, Kernel, Prefetch, walk
from tcomp.ir.te import Tensor, matmul
from tcomp.ir.verify.loops import verify_kernel
from tcomp.ops.matmul import softmax_product
from tcomp.schedules import Schedule
from tcomp.schedules.cpu import default as cpu
from tcomp.schedules.gpu.precision import with_precision
from tcomp.schedules.lowering import lower
from tcomp.schedules.trace import Step
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST
from tests.schedules.dice import Seeded
from tests.schedules.random_schedules import draw_step
from tests.schedules.shaped import kernel

Sizes = dict[str, int]
Arrays = list[np.ndarray]
HASWELL = CpuTarget.parse("cpu -march=x86_64 -mcpu=haswell -l1=32K -l2=256K")
ARM = CpuTarget.parse("cpu -march=aarch64 -mcpu=neoverse-n1")


def shapes(k: Kernel, sizes: Sizes) -> list[list[int]]:
    return [[evaluate_int(as_expr(d), {v: sizes[v.name] for v in k.scalars}) for d in b.shape] for b in k.buffers]


def arrays_for(source: Kernel, sizes: Sizes, k: Kernel) -> Arrays:
    """Numbers of which some are large, and rows in which nothing, one, or the first elements are finite: in `x` and masks; in the shapes
    that a kernel made of the source wants."""
    rng = np.random.default_rng(0)
    found = []
    for b, shape in zip(source.buffers, shapes(source, sizes), strict=True):
        array = rng.normal(size=shape).astype(to_numpy(b.dtype)) * (8 if b.name == "x" else 1)
        if b.name in ("x", "mask") and array.size:
            rows = array.reshape(-1, array.shape[-1])
            rows[rng.random(rows.shape) < 0.2] = -np.inf
            rows[0::7] = -np.inf  # as a softmax has it: NaN
            rows[1::7, : rows.shape[-1] - 1] = -np.inf
            rows[2::7, rows.shape[-1] // 2 :] = -np.inf
            rows[3::7, rows.shape[-1] // 3] = np.inf
            rows[4::7, -1] = np.nan
            rows[5::7] = np.finfo(array.dtype).min
        found.append(array)
    return [a.reshape(shape) for a, shape in zip(found, shapes(k, sizes), strict=True)]


def run(source: Kernel, sizes: Sizes, k: Kernel | None = None) -> Arrays:
    """The results of a kernel (by default of the source itself) in the interpreter."""
    k = k or source
    verify_kernel(k)
    arrays = arrays_for(source, sizes, k)
    with np.errstate(all="ignore"):
        run_kernel(k, dict(zip(k.buffers, arrays, strict=True)), {v: sizes[v.name] for v in k.scalars}, shuffle=1, garbage=True)
    return [a.reshape(-1) for a, b in zip(arrays, k.buffers, strict=True) if b in k.outputs]


def machine(s: Schedule, sizes: Sizes) -> Arrays:
    arrays = arrays_for(s.source, sizes, s.source)
    tcomp.build(s, HOST, threads=2)(*arrays)
    return [a.reshape(-1) for a, b in zip(arrays, s.source.buffers, strict=True) if b in s.source.outputs]


def close(found: Arrays, wanted: Arrays, rtol: float = 1e-5) -> None:
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


def unchanged(s: Schedule, native: bool = True, **sizes: int) -> None:
    wanted = run(s.source, sizes)
    close(run(s.source, sizes, s.kernel), wanted)
    if native:
        close(machine(s, sizes), wanted, 2e-5)
    assert str(Schedule(s.source).replay(s.trace)) == str(s.kernel)


def mean(rows: Dim = 9, keys: Dim = 13, columns: Dim = 3, dtype: str = "float32") -> Schedule:
    """softmax(x * 0.5) v, the exponentials in the sums."""
    x, v = te.placeholder((rows, keys), dtype, "x"), te.placeholder((keys, columns), dtype, "v")
    s = Schedule(softmax_product(te.compute(x.shape, lambda i, j: x[i, j] * 0.5, "scaled"), v))
    s.collapse()
    if "softmax.exp" in s.stages:
        s.inline("softmax.exp")
    return s


FOLD = "softmax.max.r1"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("factor", [1, 4, 5, 13, 64])
def test_all_lengths_of_blocks(factor: int, dtype: str) -> None:
    s = mean(dtype=dtype)
    names = s.online("softmax.max", FOLD, factor)
    assert names == (f"{FOLD}.o", "softmax.max.terms", "softmax.max.weights", "softmax.max.scale")
    assert s.stages["softmax.max.terms"].shape == (9, factor)
    unchanged(s, native=factor in (4, 13))
    s.clean()
    unchanged(s, native=False)


@pytest.mark.parametrize("rows, keys, columns", [(1, 1, 1), (8, 1, 2), (7, 4, 1), (21, 33, 5)])
def test_all_sizes(rows: int, keys: int, columns: int) -> None:
    s = mean(te.var("n"), te.var("m"), te.var("c"))
    s.online("softmax.max", FOLD, 4)
    unchanged(s, native=False, n=rows, m=keys, c=columns)
    s = mean(rows, te.var("m"), columns)
    s.online("softmax.max", next(x for x in s.loops if x.startswith("softmax.max.r")), 4)
    unchanged(s, m=keys)


@pytest.mark.parametrize("ahead", [-3, 0, 4])
@pytest.mark.parametrize("height", [0, 3, 4])
def test_blocks_behind_a_causal_mask_are_left_out(ahead: int, height: int) -> None:
    """Rows that see nothing are NaN, as before."""
    x, v = te.placeholder((9, 13), "float32", "x"), te.placeholder((13, 3), "float32", "v")
    s = Schedule(softmax_product(te.compute(x.shape, lambda i, j: te.select(j <= i + ahead, x[i, j], float("-inf")), "seen"), v))
    s.collapse()
    s.inline("softmax.exp")
    if height:
        in_rows(s, height)
    blocks, *_ = s.online("softmax.max", FOLD, 4)
    assert ("softmax_product.i0.o" in str(s.loops[blocks].extent)) if height else s.loops[blocks].extent == min(4, (8 + ahead) // 4 + 1)
    unchanged(s)
    s.clean()
    unchanged(s, native=False)


def test_no_element_at_all() -> None:
    s = mean(3, te.var("m", 0), 2)
    s.online("softmax.max", FOLD, 4)
    unchanged(s, m=0)
    unchanged(s, m=5)


def in_rows(s: Schedule, size: int) -> str:
    """All that is folded stands inside a block of rows, with guards where it is not whole."""
    outer, _ = s.split("softmax_product.i0", size)
    for stage in ("matmul", "softmax.sum", "softmax.max"):
        s.compute_at(stage, outer)
    return outer


PREPARED: dict[str, Callable[[Schedule], None]] = {
    "in blocks of rows": lambda s: in_rows(s, 3) and None,
    "in blocks that are not whole": lambda s: in_rows(s, 4) and None,
    "in parallel blocks": lambda s: s.parallel(in_rows(s, 4)),
    "another order": lambda s: s.reorder("matmul.k", "matmul.i1", "matmul.i0"),
    "rows in tiles": lambda s: s.split("matmul.i0", 4) and None,
}


@pytest.mark.parametrize("prepare", PREPARED.values(), ids=PREPARED.keys())
def test_in_any_state_of_the_loops(prepare: Callable[[Schedule], None]) -> None:
    s = mean()
    prepare(s)
    s.online("softmax.max", FOLD, 4)
    unchanged(s)
    s.clean()
    unchanged(s)


def test_what_is_folded_moves_into_the_loop_over_blocks() -> None:
    q, k, v = (te.placeholder((11, 6), name=n) for n in "qkv")
    scores = matmul(q, k, transpose_b=True)
    s = Schedule(softmax_product(scores, v))
    s.inline("softmax.exp")
    blocks, *_ = s.online("softmax.max", FOLD, 4)
    s.compute_at("matmul", blocks)
    assert s.stages["matmul"].shape == (11, 4)
    unchanged(s)


def test_a_maximum_that_is_a_result() -> None:
    """log(sum(exp)) needs both afterwards."""
    x, k = te.placeholder((8, 10), name="x"), te.reduce_axis(10, "k")
    top = te.compute((8,), lambda i: te.max(x[i, k], k), "top")
    total = te.compute((8,), lambda i: te.sum(te.exp(x[i, k] - top[i]), k), "total")
    s = Schedule([x, te.compute((8,), lambda i: te.log(total[i]) + top[i], "y"), top])
    s.online("top", "top.k", 4)
    unchanged(s)


STEPS = ("split", "reorder", "fuse", "compute_at", "partition", "set_kind", "clean", "inline")


@pytest.mark.parametrize("part", range(4))
def test_random_steps_around_it(part: int) -> None:
    """Before and after, on random shapes with several sums."""
    accepted = 0
    for case in range(25):
        dice = Seeded(f"online {part} {case}")
        keys, k = dice.number(1, 9), te.reduce_axis
        x = te.placeholder((dice.number(1, 6), keys), name="x")
        (a, b), rows = (k(keys, n) for n in "ab"), x.shape[0]
        top = te.compute((rows,), lambda i, x=x, a=a: te.max(x[i, a], a), "top")
        sums = []
        for n in range(dice.number(1, 3)):
            v = te.placeholder((keys, dice.number(1, 4)), name=f"v{n}")
            weight = lambda i, x=x, b=b, top=top: te.exp(x[i, b] - top[i])
            sums.append((v, te.compute((rows, v.shape[1]), lambda i, c, v=v, b=b, w=weight: te.sum(w(i) * v[b, c], b), f"sum{n}")))
        s = Schedule([x, *(v for v, _ in sums), *(t for _, t in sums), top])
        for count, online in ((dice.number(0, 2), False), (1, True), (dice.number(0, 4), False)):
            for _ in range(count):
                step = Step("online", ("top", "top.a", dice.number(1, 5))) if online else draw_step(dice, s.kernel, STEPS)
                with suppress(ScheduleError):
                    s.apply(step.primitive, *step.arguments, **dict(step.options))
                    accepted += online
        unchanged(s, native=False)
    assert accepted >= 12


# ---------------------------------------------------------------- what is refused

TWO = """
    kernel k(x: float32[8, 10], v: float32[10], top: float32[8], y: float32[8]) -> (top, y) {{
      for i0 in 0..8 {{
        top[i0] = {first}
      }}
      for i1 in 0..8 {{
        for k1 in 0..10 {{
          top[i1] {fold} x[i1, k1]
        }}
      }}
      for i2 in 0..8 {{
        y[i2] = {zero}
      }}
      {between}
      for i3 in 0..8 {{
        for k3 in 0..10 {{
          y[i3] += {term}
        }}
      }}
    }}
"""
RIGHT = {"first": "float32(-inf)", "fold": "max=", "zero": "0.0f", "between": "", "term": "exp(x[i3, k3] - top[i3]) * v[k3]"}
WRONG = {
    "a sum": ({"first": "0.0f", "fold": "+="}, "is not a maximum"),
    "a sum that starts elsewhere": ({"zero": "1.0f"}, "sets `y`"),
    "a maximum that starts elsewhere": ({"first": "0.0f"}, "sets `top`"),
    "another x": ({"term": "exp(x[i3, 9 - k3] - top[i3]) * v[k3]"}, "cannot see"),
    "another row": ({"term": "exp(x[i3, k3] - top[7 - i3]) * v[k3]"}, "cannot see"),
    "another maximum each time": ({"term": "exp(x[i3, k3] - top[k3 % 8]) * v[k3]"}, "cannot see"),
    "no product": ({"term": "exp(x[i3, k3] - top[i3]) + v[k3]"}, "not a sum of products"),
    "a square": ({"term": "exp(x[i3, k3] - top[i3]) * exp(x[i3, k3] - top[i3])"}, "not a sum of products"),
    "the maximum besides": ({"term": "exp(x[i3, k3] - top[i3]) * top[i3]"}, "more than one difference"),
    "a rounded product": ({"term": "float32(float16(exp(x[i3, k3] - top[i3]) * v[k3]))"}, "not a sum of products"),
    "no float": ({"term": "float32(int32(exp(x[i3, k3] - top[i3]))) * v[k3]"}, "not a sum of products"),
    "another power": ({"term": "exp(top[i3] - x[i3, k3]) * v[k3]"}, "not a sum of products"),
    "no reader": ({"term": "x[i3, k3]"}, "nothing next to"),
    "x changes": ({"between": "x[0, 0] = 1.0f"}, "uses x"),
    "v changes": ({"between": "v[0] = 1.0f"}, "uses v"),
    "the maximum is used": ({"between": "v[0] = top[0]"}, "uses top"),
}


def two(**parts: str) -> Schedule:
    return Schedule(kernel(TWO.format(**{**RIGHT, **parts})))


def test_what_is_right() -> None:
    s = two()
    s.online("top", "k1", 4)
    unchanged(s)


@pytest.mark.parametrize("precision, last", [("tf32", 2**-10), ("fp16", 2**-11), ("bf16", 2**-8)])
def test_weights_may_be_rounded(precision: str, last: float) -> None:
    """As tensor cores want them: those of a block relative to its own maximum."""
    x, v = te.placeholder((14, 13), "float32", "x"), te.placeholder((13, 3), "float32", "v")
    source = with_precision(lower("mean", [x, v], [softmax_product(x, v)]), precision)
    s = Schedule(source)
    s.inline("softmax.exp")
    s.online("softmax.max", FOLD, 4)
    close(run(source, {}, s.kernel), run(source, {}), 4 * last)


@pytest.mark.parametrize("parts, why", WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong(parts: dict[str, str], why: str) -> None:
    s = two(**parts)
    before = str(s.kernel)
    with pytest.raises(ScheduleError, match=why):
        s.online("top", "k1", 4)
    assert str(s.kernel) == before


def test_terms_that_are_left_out() -> None:
    """Where all are, a sum of nothing is 0, and not NaN."""
    s = Schedule(kernel(TWO.format(**RIGHT).replace("y[i3] +=", "if k3 <= i3 {\n y[i3] +=").replace("* v[k3]", "* v[k3]\n }")))
    with pytest.raises(ScheduleError, match="some terms of `y` are left out"):
        s.online("top", "k1", 3)


def test_what_is_refused() -> None:
    def refused(why: str, prepare: Callable[[Schedule], object], stage: str = "softmax.max", fold: str = FOLD, factor: int = 4) -> None:
        s = mean()
        prepare(s)
        with pytest.raises(ScheduleError, match=why):
            s.online(stage, fold, factor)

    refused("not positive", lambda s: None, factor=0)
    refused("is not a reduction loop of", lambda s: None, fold="softmax.max.i0")
    refused("is not a maximum", lambda s: None, stage="matmul", fold="matmul.k")
    refused("only reduction loop", lambda s: s.split(FOLD, 3), fold=f"{FOLD}.o")
    refused("vectorized", lambda s: s.vectorize("softmax.max.i0"))
    refused("unrolled", lambda s: s.unroll("matmul.k"))
    refused("around the maximum is block.x", lambda s: s.bind(in_rows(s, 4), "block.x"))
    x = te.placeholder((4, 6), name="x")
    s = Schedule(softmax_product(x, te.placeholder((6, 2), name="v")))  # the exponentials are a stage
    with pytest.raises(ScheduleError, match="`inline`"):
        s.online("softmax.max", FOLD, 2)


# ---------------------------------------------------------------- the default schedule


def attention(
    heads: Dim, rows: Dim, keys: Dim, size: Dim, width: Dim, dtype: str = "float32", mask: bool = True
) -> tuple[list[Tensor], Tensor]:
    """softmax(q k' / 8 + mask) v for each head."""
    q, k = te.placeholder((heads, rows, size), dtype, "q"), te.placeholder((heads, keys, size), dtype, "k")
    v, m = te.placeholder((heads, keys, width), dtype, "v"), te.placeholder((rows, keys), dtype, "mask")
    scores = matmul(q, k, transpose_b=True)

    def scaled(h: Expr, i: Expr, j: Expr) -> Expr:
        return scores[h, i, j] * 0.125 + m[i, j] if mask else scores[h, i, j] * 0.125

    return [q, k, v, m], softmax_product(te.compute(scores.shape, scaled, "scaled"), v)


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        x = q.astype("float64") @ k.swapaxes(1, 2) * 0.125 + mask
        weights = np.exp(x - x.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ v


CASES: list[tuple[tuple[int, int, int, int, int], str]] = [
    ((2, 64, 128, 64, 64), "float32"),
    ((1, 48, 96, 32, 32), "float64"),
    ((2, 61, 131, 40, 24), "float32"),  # nothing is whole
    ((3, 17, 300, 32, 80), "float32"),
    ((1, 129, 64, 128, 128), "float32"),
    ((2, 1, 40, 16, 16), "float32"),
    ((1, 40, 1, 16, 16), "float32"),
    ((1, 40, 50, 1, 8), "float32"),
    ((2, 40, 50, 8, 1), "float32"),
]


@pytest.mark.parametrize("sizes, dtype", CASES, ids=str)
def test_the_default_schedule(sizes: tuple[int, int, int, int, int], dtype: str) -> None:
    inputs, result = attention(*sizes, dtype)
    source = lower("attention", inputs, [result])
    s = cpu.schedule(source, HOST)
    assert not s.kernel.notes
    assert any(step.primitive == "online" for step in s.trace) == (min(sizes[1:3]) > 1 and sizes[-1] > 1)
    close(machine(s, {}), [reference(*arrays_for(source, {}, source)[:-1]).reshape(-1)], 2e-5)
    assert str(Schedule(source).replay(s.trace)) == str(s.kernel)


def test_scores_that_are_a_stage_of_their_own() -> None:
    """As those are whose computation takes long: in one pass they are computed once for each block."""
    q, k, v = (te.placeholder((2, n, 24), "float32", name) for n, name in ((40, "q"), (70, "k"), (70, "v")))
    scores = matmul(q, k, transpose_b=True)
    source = lower("capped", [q, k, v], [softmax_product(te.compute(scores.shape, lambda *i: te.tanh(scores[i] * 0.1) * 5.0, "capped"), v)])
    assert any(b.name == "capped" for b in Schedule(source).stages.values())
    s = cpu.schedule(source, HOST)
    assert not s.kernel.notes and any(step.primitive == "online" for step in s.trace)
    a, b, c, _ = arrays_for(source, {}, source)
    weights = np.exp(5 * np.tanh((a @ b.swapaxes(1, 2)).astype("float64") * 0.1))
    close(machine(s, {}), [(weights / weights.sum(-1, keepdims=True) @ c).reshape(-1)], 2e-5)


def test_the_default_schedule_of_symbolic_sizes() -> None:
    inputs, result = attention(2, te.var("n", 1, 4096), te.var("m", 1, 4096), 20, 24)
    source = lower("attention", inputs, [result])
    s = cpu.schedule(source, HOST)
    assert not s.kernel.notes and any(step.primitive == "online" for step in s.trace)
    function = tcomp.build(s, HOST, threads=2)
    for n, m in ((1, 1), (1, 300), (61, 131), (64, 128), (200, 5)):
        *arrays, found = arrays_for(source, {"n": n, "m": m}, source)
        function(*arrays, found)
        close([found], [reference(*arrays)], 2e-5)


def test_the_default_schedule_of_causal_attention() -> None:
    """Whole blocks are computed without conditions on sizes."""
    n, m = te.var("n", 1, 4096), te.var("m", 0, 4096)
    q, k, v = (te.placeholder((2, d, 20), "float32", name) for name, d in (("q", n), ("k", n + m), ("v", n + m)))
    scores = matmul(q, k, transpose_b=True)
    masked = te.compute(scores.shape, lambda h, i, j: te.select(j <= i + m, scores[h, i, j] * 0.125, float("-inf")), "masked")
    source = lower("attention", [q, k, v], [softmax_product(masked, v)])
    s = cpu.schedule(source, HOST)
    assert not s.kernel.notes and any(step.primitive == "promote" for step in s.trace)
    function = tcomp.build(s, HOST, threads=2)
    for rows, past in ((1, 0), (61, 0), (300, 0), (150, 131), (1, 299), (64, 64)):
        queries, keys, values, found = arrays_for(source, {"n": rows, "m": past}, source)
        function(queries, keys, values, found)
        close([found], [reference(queries, keys, values, np.where(np.tri(rows, rows + past, past), 0, -np.inf))], 2e-5)
    close(run(source, {"n": 37, "m": 5}, s.kernel), run(source, {"n": 37, "m": 5}))


@pytest.mark.parametrize("target", [HOST, HASWELL], ids=["host", "haswell"])
def test_heads_that_share_keys(target: CpuTarget) -> None:
    """As a new token has them: 7 heads are the only rows that read a key. Keys are packed where they are read, and not all of them before;
    of those from memory, the next ones are prefetched."""
    groups, heads, m, size = 2, 7, te.var("m", 1, 4096), 24
    q = te.placeholder((groups, heads, size), "float32", "q")
    k, v = (te.placeholder((m, groups, size), "float32", name) for name in "kv")
    by_group = [te.compute((groups, m, size), lambda g, j, d, x=x: x[j, g, d], f"{x.name}.by_group") for x in (k, v)]
    source = lower("attention", [q, k, v], [softmax_product(matmul(q, by_group[0], transpose_b=True), by_group[1])])
    s = cpu.schedule(source, target)
    assert not s.kernel.notes and any(step.primitive == "online" for step in s.trace)
    packed = [x.buffer for x in walk(s.kernel.body) if isinstance(x, Allocate) and "packed" in x.buffer.name]
    assert packed and all(isinstance(d, int) for b in packed for d in b.shape)
    assert {x.buffer.name for x in walk(s.kernel.body) if isinstance(x, Prefetch)} == {"k", "v"}
    close(run(source, {"m": 33}, s.kernel), run(source, {"m": 33}))
    function = tcomp.build(s, target) if target is HOST else None
    for n in (1, 64, 70) if function is not None else ():
        *arrays, found = arrays_for(source, {"m": n}, source)
        function(*arrays, found)
        a, b, c = (x.astype("float64") for x in arrays)
        weights = np.exp(np.einsum("ghd,jgd->ghj", a, b))
        close([found], [np.einsum("ghj,jgd->ghd", weights / weights.sum(-1, keepdims=True), c)], 2e-5)


@pytest.mark.parametrize("rows, keys", [(0, 40), (40, 0), (0, 0)])
def test_nothing_at_all(rows: int, keys: int) -> None:
    inputs, result = attention(2, rows, keys, 16, 16)
    source = lower("attention", inputs, [result])
    s = cpu.schedule(source, HOST)
    assert not any(step.primitive == "online" for step in s.trace)
    close(machine(s, {}), run(source, {}))


def test_wide_values() -> None:
    """Sums of a block stay near: fewer rows where there are many of them, and stages one after the other where there are too many."""
    for width, online in ((320, True), (1000, True), (40000, False)):
        inputs, result = attention(1, 20, 48, 4, width, "float64")
        source = lower("attention", inputs, [result])
        s = cpu.schedule(source, HOST)
        assert any(step.primitive == "online" for step in s.trace) == online == (not s.kernel.notes)
        close(machine(s, {}), [reference(*arrays_for(source, {}, source)[:-1]).reshape(-1)], 2e-5)


@pytest.mark.parametrize("target", [HOST, HASWELL, ARM], ids=["host", "haswell", "arm"])
@pytest.mark.parametrize("sizes", [(1, 19, 37, 8, 8), (2, 32, 64, 8, 12)], ids=str)
def test_the_default_schedule_in_the_interpreter(sizes: tuple[int, int, int, int, int], target: CpuTarget) -> None:
    """Which looks at bounds, undefined reads, and races."""
    inputs, result = attention(*sizes)
    source = lower("attention", inputs, [result])
    s = cpu.schedule(source, target)
    assert not s.kernel.notes
    close(run(source, {}, s.kernel), run(source, {}))
