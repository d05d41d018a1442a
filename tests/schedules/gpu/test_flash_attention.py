"""Attention on a GPU: in one pass over each row of scores, whatever the sizes; by the interpreter, on a device played by the host, and as
machine code within the limits of a multiprocessor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import pytest

from benchmarks.cuda.kernels import SPILLED
from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, select
from tcomp.ir.loops import hoist_temporaries
from tcomp.ir.te import matmul
from tcomp.ops.matmul import softmax_product
from tcomp.schedules.gpu.default import schedule
from tcomp.schedules.gpu.precision import with_precision
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.schedule import Schedule, prove
from tcomp.target import CudaTarget
from tests.schedules.gpu.test_default import emulated, lowered, needs_compiler, nvrtc_missing
from tests.schedules.gpu.test_pipeline import races
from tests.schedules.programs import Program
from tests.schedules.running import expected, interpreted

TARGET = CudaTarget.parse("cuda")
OLD = CudaTarget.parse("cuda -arch=sm_75")
INF = float("inf")
LAST = {"fp32": 0, "tf32": 2**-10, "fp16": 2**-11, "bf16": 2**-8}  # the last bit of a factor: those of the scores are small integers
needs_nvrtc = pytest.mark.skipif(bool(nvrtc_missing()), reason=nvrtc_missing())


def attention(
    heads: Dim,
    rows: Dim,
    keys: Dim,
    size: Dim,
    width: Dim,
    mask: str = "add",
    dtype: str = "float32",
    transposed: str = "",
    shared: bool = False,
    **dims: int,
) -> Program:
    """softmax(q k' / 8 + mask) v for each head, or all with the same k and v (`shared`). The mask is an input to `add`, or it leaves to each
    row the keys up to its own (`causal`), or only some (`some`: whole blocks are left out, and all of a row). `transposed`: "k", "v", the
    operand that lies in memory the other way."""
    n = () if shared else (heads,)
    q = te.placeholder((heads, rows, size), dtype, "q")
    k = te.placeholder((*n, size, keys) if "k" in transposed else (*n, keys, size), dtype, "k")
    v = te.placeholder((*n, width, keys) if "v" in transposed else (*n, keys, width), dtype, "v")
    m = te.placeholder((rows, keys), dtype, "mask")
    values = te.compute((*n, keys, width), lambda *i: v[(*i[:-2], i[-1], i[-2])], "turned") if "v" in transposed else v
    scores = matmul(q, k, transpose_b="k" not in transposed)

    def element(h: Expr, i: Expr, j: Expr) -> Expr:
        x = scores[h, i, j] * 0.125
        kept = {"causal": j <= i, "some": (j >= 70) & (i > 2)}.get(mask)
        return x + m[i, j] if mask == "add" else x if kept is None else select(kept, x, -INF)

    y = softmax_product(te.compute(scores.shape, element, "scaled"), values)
    return Program((q, k, v, *([m] if mask == "add" else [])), (y,), {d: dims[d.name] for d in (rows, keys) if isinstance(d, Expr)})


def weighted(rows: int, keys: int, width: int) -> Program:
    """Of scores that are in memory."""
    x, v = te.placeholder((2, rows, keys), "float32", "x"), te.placeholder((2, keys, width), "float32", "v")
    return Program((x, v), (softmax_product(x, v),), {})


def of_one_array(rows: int, size: int) -> Program:
    """Queries, keys and values beside each other, as one product makes them."""
    x = te.placeholder((rows, 3 * size), "float32", "x")
    q, k, v = (te.compute((rows, size), lambda i, j, n=n: x[i, j + n * size], name) for n, name in enumerate("qkv"))
    return Program((x,), (softmax_product(matmul(q, k, transpose_b=True), v),), {})


FAMILIES = {
    "whole": attention(1, 64, 128, 32, 64),
    "odd": attention(2, 37, 131, 20, 24),
    "prime": attention(1, 61, 67, 33, 41, "causal"),
    "one-block": attention(3, 17, 16, 16, 16, ""),
    "two-blocks": attention(1, 17, 70, 16, 16),
    "nothing-left": attention(1, 20, 150, 16, 16, "some"),
    "wide": attention(1, 33, 70, 16, 200, ""),
    "wide-odd": attention(1, 17, 70, 40, 131),
    "transposed": attention(2, 40, 50, 17, 20, transposed="kv"),
    "shared-heads": attention(3, 19, 70, 16, 16, shared=True),
    "double": attention(1, 35, 70, 16, 16, dtype="float64"),
    "scores-in-memory": weighted(37, 131, 24),
    "one-array": of_one_array(45, 20),
}
n, m = te.var("n", 1, 4096), te.var("m", 1, 4096)


def near(program: Program, found: Sequence[np.ndarray], precision: str = "fp32") -> None:
    """Values are up to 4, and so are their means."""
    with np.errstate(invalid="ignore"):
        for got, want in zip(found, expected(program), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=max(1e-5, 4 * LAST[precision]))


def in_one_pass(s: Schedule) -> bool:
    return not s.kernel.notes and [step.primitive for step in s.trace].count("online") == 1


def on_tensor_cores(s: Schedule) -> int:
    """How many of the products."""
    return [step.primitive for step in s.trace].count("tensorize")


def test_whole_blocks_may_hold_nothing() -> None:
    (found,) = expected(FAMILIES["nothing-left"])
    assert np.isnan(found[0, :3]).all() and not np.isnan(found[0, 3:]).any()


@needs_compiler
@pytest.mark.parametrize("name", FAMILIES)
def test_families_on_the_host(name: str) -> None:
    program = FAMILIES[name]
    kernel = lowered(program)
    s = schedule(kernel, TARGET)
    assert in_one_pass(s) and not on_tensor_cores(s) and str(Schedule(kernel).replay(s.trace)) == str(s.kernel)
    for descending in (False, True):
        near(program, emulated(program, s.kernel, descending))


TENSOR = [(name, "tf32") for name in FAMILIES if name != "double"] + [
    (name, p) for name in ("odd", "prime", "wide-odd") for p in ("fp16", "bf16")
]


@needs_compiler
@pytest.mark.parametrize("name, precision", TENSOR)
def test_families_on_tensor_cores(name: str, precision: str) -> None:
    program = FAMILIES[name]
    kernel = with_precision(lowered(program), precision)
    s = schedule(kernel, TARGET)
    assert (
        in_one_pass(s) and on_tensor_cores(s) == 2 - (name == "scores-in-memory") and str(Schedule(kernel).replay(s.trace)) == str(s.kernel)
    )
    for descending in (False, True):
        near(program, emulated(program, s.kernel, descending), precision)


@needs_compiler
@pytest.mark.parametrize("dtype, target", [("float16", TARGET), ("bfloat16", TARGET), ("float16", OLD)], ids=str)
def test_models_of_16_bits(dtype: str, target: CudaTarget) -> None:
    """On tensor cores, where there are some; the results are rounded once more."""
    program = attention(2, 37, 131, 20, 24, dtype=dtype)
    s = schedule(lowered(program), target)
    assert in_one_pass(s) and on_tensor_cores(s) == 2 * (target is TARGET)
    last = LAST["fp16" if dtype == "float16" else "bf16"]
    (got,), (want,) = emulated(program, s.kernel, target=target), expected(program)
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0, atol=8 * last)


@needs_compiler
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("rows, keys", [(1, 1), (1, 200), (70, 3), (33, 129)])
def test_symbolic_lengths(rows: int, keys: int, precision: str) -> None:
    program = attention(2, n, m, 20, 24, n=rows, m=keys)
    s = schedule(with_precision(lowered(program), precision), TARGET)
    assert in_one_pass(s)
    near(program, emulated(program, s.kernel), precision)


@needs_compiler
@pytest.mark.parametrize("target, precision", [(TARGET, "fp32"), (OLD, "fp32"), (TARGET, "fp16")], ids=str)
def test_other_tiles(target: CudaTarget, precision: str) -> None:
    program, asked = attention(1, 70, 140, 24, 40), Knobs()
    kernel = with_precision(lowered(program), precision)
    schedule(kernel, target, asked)
    (tile,) = (name for name in asked.asked if name.endswith(".tile"))
    assert len(asked.asked[tile].options) >= 6
    for option in asked.asked[tile].options[1::4]:
        s = schedule(kernel, target, Knobs({tile: option}))
        assert in_one_pass(s) and ("pipeline" in {step.primitive for step in s.trace}) == (target is TARGET)
        near(program, emulated(program, s.kernel, target=target), precision)


@pytest.mark.parametrize("name, precision", [("one-block", "fp32"), ("two-blocks", "fp32"), ("two-blocks", "tf32")])
def test_by_the_interpreter_and_thread_by_thread(name: str, precision: str) -> None:
    """Which look at bounds, undefined reads, and races."""
    program = FAMILIES[name]
    kernel = schedule(with_precision(lowered(program), precision), TARGET).kernel
    near(program, interpreted(program, kernel, shuffle=1), precision)
    assert not races(kernel, {})


def test_schedules_are_proved() -> None:
    kernel = lowered(FAMILIES["one-block"])
    proof = prove(kernel, schedule(kernel, TARGET).trace)
    assert proof.ok, proof.refused


@needs_compiler
def test_missing_barriers_would_be_found() -> None:
    program = FAMILIES["odd"]
    kernel = schedule(lowered(program), TARGET).kernel
    for descending in (False, True):
        with pytest.raises(AssertionError):
            near(program, emulated(program, kernel, descending, barriers=False))


def test_one_launch_that_stores_nothing_but_the_result() -> None:
    kernel, temporaries = hoist_temporaries(schedule(lowered(attention(12, 1024, 1024, 64, 64)), TARGET).kernel)
    text, launches = emit_kernel(kernel, TARGET)
    assert not temporaries and len(launches) == 1 and launches[0].grid[0] == 12 * 1024 // 64
    assert "start_copy<16>" in text and "wait_for_copies<1>" in text, "values of the next block are under way while sums are added up"


@pytest.mark.parametrize(
    "program, why",
    [
        (attention(1, 40, 50, 20, m), "the number of columns"),
        (attention(1, 40, 50, 20, 4000), "too many"),
        (attention(1, 40, 50, 20, 8), "not a product of matrices"),
        (attention(1, 40, 50, 8, 20), "not a product of matrices"),
    ],
    ids=["symbolic columns", "too many columns", "few columns", "short scores"],
)
def test_what_is_computed_stage_by_stage(program: Program, why: str) -> None:
    s = schedule(lowered(program), TARGET)
    (note,) = s.kernel.notes
    assert "is computed stage by stage" in note and why in note and "online" not in {step.primitive for step in s.trace}


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "half"])
@pytest.mark.parametrize(
    "sizes", [(12, 512, 512, 64, 64), (8, 1024, 1024, 128, 128), (1, 4096, 4096, 256, 256), (2, 1021, 777, 33, 41)], ids=str
)
def test_machine_code_fits(sizes: tuple[int, int, int, int, int], precision: str, arch: str) -> None:
    """Registers that the assembler gives up for more warps at most, room for two blocks on a multiprocessor unless rows are very wide, few
    barriers."""
    half = precision == "half"
    s = schedule(with_precision(lowered(attention(*sizes, dtype="float16" if half else "float32")), "fp32" if half else precision), TARGET)
    text, (launch,) = emit_kernel(hoist_temporaries(s.kernel)[0], TARGET)
    assert in_one_pass(s) and on_tensor_cores(s) == 2 * (precision != "fp32")
    usage = nvrtc.compile_text(text, arch).usage[launch.function]
    blocks = 2 if sizes[-1] <= 128 else 1
    assert usage.spilled <= SPILLED and usage.registers * prod(launch.block) * blocks <= 1 << 16
    assert (usage.shared + launch.shared) * blocks <= TARGET.shared_per_block and launch.barriers <= 8
