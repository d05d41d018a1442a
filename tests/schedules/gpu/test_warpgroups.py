"""Schedules of products by `wgmma`, which a decision chooses: any sizes, as the loops say, as the emitted text does on the host, and as
machine code."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.codegen.cuda.launch_plan import kernel_code
from tcomp.ir import te
from tcomp.ir.expr import Expr
from tcomp.ir.loops import Call, hoist_temporaries, walk
from tcomp.schedules.gpu.default import schedule
from tcomp.schedules.knobs import Knobs, Option, decode, encode
from tcomp.schedules.schedule import Schedule
from tcomp.target import CudaTarget
from tests.codegen.cuda import cuda_host
from tests.codegen.cuda.test_cuda import needs_nvrtc
from tests.schedules.gpu.test_default import agree, emulated, lowered
from tests.schedules.gpu.test_pipeline import races, stages_of
from tests.schedules.gpu.test_warps import FAMILIES, image, product, wide
from tests.schedules.programs import Program
from tests.schedules.running import interpreted

HOPPER = CudaTarget.parse("cuda -arch=sm_90a")
needs_compiler = pytest.mark.skipif(cuda_host.compiler() is None, reason="there is no C++ compiler")


def grouped(options: Sequence[Option]) -> list[Option]:
    return [o for o in options if isinstance(o, tuple) and o[-1] == "wgmma"]


def by_groups(program: Program, wanted: Callable[[Option], bool] = lambda option: True, stages: int = 3) -> tuple[Schedule, Knobs]:
    """The schedule with the first tile of `wgmma` that is wanted, or the first one."""

    def pick(name: str, options: Sequence[Option], default: Option) -> Option:
        if name.endswith(".tile"):
            return next((o for o in grouped(options) if wanted(o)), grouped(options)[0])
        return min(options, key=lambda o: abs(int(str(o)) - stages)) if name.endswith(".stages") else default

    knobs = Knobs(pick=pick)
    return schedule(lowered(program), HOPPER, knobs), knobs


def batches(n: int, rows: int, depth: int, columns: int) -> Program:
    a, b = te.placeholder((n, rows, depth), "bfloat16", "a"), te.placeholder((n, columns, depth), "bfloat16", "b")
    k = te.reduce_axis(depth, "k")
    return Program((a, b), (te.compute((n, rows, columns), lambda z, i, j: te.sum(wide(a[z, i, k]) * wide(b[z, j, k]), k), "c"),), {})


def channels_last(size: int, channels: int, features: int, dtype: str) -> Program:
    """A convolution whose rows are pixels, along two axes, and whose channels lie side by side."""
    x, w = te.placeholder((size + 2, size + 2, channels), dtype, "x"), te.placeholder((features, 3, 3, channels), dtype, "w")
    c, p, q = te.reduce_axis(channels, "c"), te.reduce_axis(3, "p"), te.reduce_axis(3, "q")

    def at(i: Expr, j: Expr, o: Expr) -> Expr:
        return te.sum(wide(x[i + p, j + q, c]) * wide(w[o, p, q, c]), [p, q, c])

    return Program((x, w), (te.compute((size, size, features), at, "y"),), {})


PROGRAMS = FAMILIES | {
    "batches": batches(3, 70, 40, 50),
    "pixels": channels_last(12, 24, 40, "float16"),
    "pixels-of-bytes": channels_last(9, 20, 33, "int8"),
    "wide-image": image(16, 20, 70, 3, 1, "bfloat16"),
}


@needs_compiler
@pytest.mark.parametrize("name", PROGRAMS)
def test_families_on_the_host(name: str) -> None:
    program = PROGRAMS[name]
    s, knobs = by_groups(program)
    assert not s.kernel.notes and any(isinstance(x, Call) and x.instruction.name.startswith("wgmma") for x in walk(s.kernel.body))
    assert str(Schedule(lowered(program)).replay(s.trace)) == str(s.kernel)
    again = schedule(lowered(program), HOPPER, Knobs(decode(encode(knobs.decisions))))  # a record of the tuner
    assert str(again.kernel) == str(s.kernel)
    for descending in (False, True):
        agree(program, emulated(program, s.kernel, descending, target=HOPPER))


SHAPES: dict[str, tuple[str, Callable[[Any], bool]]] = {  # a program, and of (axes, warpgroups, elements of each) of rows, and of columns
    "two axes of rows": ("pixels", lambda o: len(o[0]) == 2),
    "two axes of columns": ("half-image", lambda o: len(o[3]) == 2),
    "two instructions of rows": ("bytes", lambda o: o[2] == 128),
    "two groups of rows": ("half-odd", lambda o: o[1] == 2),
    "two groups of columns": ("pixels", lambda o: o[4] == 2),
    "many columns": ("tf32", lambda o: o[5] >= 64),
    "a square, whose factors are told apart by the sum": ("half-image", lambda o: o[2] == o[5] == 64),
}


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_on_the_host(shape: str) -> None:
    name, wanted = SHAPES[shape]
    s, knobs = by_groups(PROGRAMS[name], wanted, 2)
    assert not s.kernel.notes and any(wanted(o) for name, o in knobs.decisions.items() if name.endswith(".tile"))
    agree(PROGRAMS[name], emulated(PROGRAMS[name], s.kernel, True, target=HOPPER))


@needs_compiler
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.integers(16, 150), st.integers(16, 150), st.integers(16, 90), st.sampled_from(["float16", "float32", "int8"]), st.booleans(),
    st.integers(0, 7), st.integers(1, 4), st.booleans(),
)  # fmt: skip
def test_any_sizes_on_the_host(
    rows: int, columns: int, depth: int, dtype: str, transposed: bool, tile: int, stages: int, symbolic: bool
) -> None:
    if symbolic:
        size, b, k = te.var("n", 1, None), te.placeholder((columns, depth), dtype, "b"), te.reduce_axis(depth, "k")
        a = te.placeholder((size, depth), dtype, "a")
        program = Program((a, b), (te.compute((size, columns), lambda i, j: te.sum(wide(a[i, k]) * wide(b[j, k]), k), "c"),), {size: rows})
    else:
        program = product(rows, depth, columns, dtype, transposed)
    seen = iter(range(8))
    s, _ = by_groups(program, lambda option: next(seen) == tile, stages)
    assert not s.kernel.notes and "wgmma" in str(s.kernel)
    agree(program, emulated(program, s.kernel, stages % 2 == 0, target=HOPPER))


def test_by_the_interpreter_and_thread_by_thread() -> None:
    program = product(17, 33, 16, "float32", True)
    s, _ = by_groups(program)
    agree(program, interpreted(program, s.kernel, shuffle=1))
    assert stages_of(s) == [2] and not races(s.kernel, {})


def test_it_is_the_default_of_its_architecture_alone() -> None:
    program = product(1024, 64, 1024, "float16", True)
    knobs = Knobs()
    assert "wgmma" in str(schedule(lowered(program), HOPPER, knobs).kernel)
    (tiles,) = (a.options for name, a in knobs.asked.items() if name.endswith(".tile"))
    assert 0 < len(grouped(tiles)) < len(tiles)
    for other in ("cuda", "cuda -arch=sm_80", "cuda -arch=sm_90", "cuda -arch=sm_100"):
        knobs = Knobs()
        schedule(lowered(program), CudaTarget.parse(other), knobs)
        assert not any(grouped(a.options) for a in knobs.asked.values())


@needs_nvrtc
def test_its_code_is_of_one_architecture() -> None:
    """What an artifact keeps as portable code runs on no newer GPU, and says so."""
    program = product(64, 64, 64, "float16", True)
    for s, arch in ((by_groups(program)[0], "sm_90a"), (schedule(lowered(program), HOPPER), "sm_90")):
        entry = json.loads(kernel_code(hoist_temporaries(s.kernel)[0], HOPPER))
        assert list(entry["cubin"]) == ["sm_90a"]
        assert f".target {arch}\n" in base64.b64decode(entry["ptx"]).decode()


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "uint8"])
def test_the_best_tiles_of_a_large_product_fit(dtype: str) -> None:
    """Sums stay in registers, slices are copied in the background, one barrier and one wait a slice; no instruction waits for another."""
    program = product(4096, 4096, 4096, dtype, True)
    _, knobs = by_groups(program)
    for wanted in grouped(next(a.options for name, a in knobs.asked.items() if name.endswith(".tile")))[:3]:
        s, _ = by_groups(program, wanted.__eq__)
        text, (launch,) = emit_kernel(hoist_temporaries(s.kernel)[0], HOPPER)
        binary = nvrtc.compile_text(text, "sm_90a")
        usage, ptx = binary.usage[launch.function], binary.ptx.decode()
        assert usage.spilled == usage.stack == 0 and usage.registers * prod(launch.block) <= 1 << 16
        assert usage.shared + launch.shared <= HOPPER.shared_per_block
        steps = ptx.count("wgmma.wait_group")
        assert ptx.count("wgmma.mma_async") >= 4 * steps > 0
        assert ptx.count("bar.sync") == ptx.count("fence.proxy.async") <= steps + 1  # of a loop, maybe one in front of it as well
        assert "cp.async.cg" in ptx and "st.shared" not in ptx and "mma.sync" not in ptx
