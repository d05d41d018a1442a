"""`wgmma`: emitted text run by a host that reads shared memory through the descriptors, as machine code, and where it is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.errors import CodegenError, IRError, ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.expr import Expr
from tcomp.ir.instruction import ELEMENT, match
from tcomp.ir.loops import Accumulate, Allocate, Buffer, Call, Kernel, Stmt, block, over, store, walk
from tcomp.ir.text.parser import parse_kernel
from tcomp.ir.verify.loops import verify_kernel
from tcomp.schedules.instructions import mma, wgmma
from tcomp.target import CudaTarget
from tests.codegen.cuda import cuda_host
from tests.codegen.cuda.test_cuda import needs_nvrtc
from tests.codegen.cuda.warp_products import product_of_groups
from tests.codegen.test_instructions import needs_compiler, operands, run_on_host

HOPPER = CudaTarget.parse("cuda -arch=sm_90a")
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int8": 1, "uint8": 1}
ALL = list(BYTES)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "m", "n", "depth", "width", "steps", "stages"),
    [
        ("float16", 256, 128, 128, 64, 2, 3), ("float16", 150, 70, 75, 8, 1, 2), ("bfloat16", 100, 40, 100, 24, 4, 2),
        ("float32", 150, 70, 75, 40, 2, 3), ("int8", 150, 70, 150, 32, 2, 2), ("uint8", 130, 10, 100, 16, 1, 1), ("float16", 128, 256, 64, 256, 2, 1),
    ],
)  # fmt: skip
def test_a_product_by_warpgroups(dtype: str, m: int, n: int, depth: int, width: int, steps: int, stages: int) -> None:
    """Small integers, whose sums are exact in any order."""
    kernel = product_of_groups(dtype, m, n, depth, width, steps, stages).kernel
    verify_kernel(kernel)
    assert str(parse_kernel(str(kernel))) == str(kernel)
    a, b, c = arrays = operands(kernel, 1)
    want = a.astype(c.dtype) @ b.T.astype(c.dtype)
    for descending in (False, True):
        c.fill(77)
        run_on_host(kernel, arrays, HOPPER, descending)
        np.testing.assert_array_equal(c, want)


@needs_compiler
@pytest.mark.parametrize("line", ["finish_products();", "__syncthreads();", "wait_for_copies<0>();"])
def test_the_host_sees_who_does_not_wait(line: str) -> None:
    """Whoever uses the sums before they are added, or multiplies what has not arrived, gets wrong results there."""
    kernel = product_of_groups("float16", 128, 64, 64, 64, 1, 2).kernel
    text, (launch,) = emit_kernel(kernel, HOPPER)
    a, b, c = arrays = operands(kernel, 1)
    head, body = text.split("__global__")
    assert line in body
    args = [arrays[n].ctypes.data for n in launch.buffers]
    cuda_host.launch(f"{head}__global__{body.replace(line, '')}", launch.function, [int(n) for n in launch.grid], launch.block, args)
    assert (c != a.astype(c.dtype) @ b.T.astype(c.dtype)).any()


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("width", [16, 64])
def test_descriptors_say_where_each_element_lies(dtype: str, width: int) -> None:
    """The addresses that the PTX ISA computes from the start, for rows of this size, are those of the buffer's layout, before swizzling."""
    size, steps, stages = BYTES[dtype], 2, 3
    row = 16 // size
    depth = 2 * row
    kernel = product_of_groups(dtype, 256, 2 * width, 8 * depth, width, steps, stages).kernel
    text, _ = emit_kernel(kernel, HOPPER)
    found = re.findall(r'"l"\(matrix<(\d)>\((\w+) \+ (.+?)\)\)(?=, "l"|\);)', text)
    assert [(pieces, name) for pieces, name, _ in found] == [("4", "A_shared"), ("4", "B_shared")]
    for (_, _, start), rows, groups in zip(found, (64, width), (2, 1), strict=True):
        shape = (stages, groups * rows, steps * depth)
        for step, many, group in np.ndindex(8 // steps, steps, groups):
            first = eval(start, {"C_i_o": group, "C_k_i_o": many, "C_k_o": step})
            for r, k in np.ndindex(rows, depth):
                place = (step % stages, group * rows + r, many * depth + k)
                assert first + r * 64 // size + k == np.ravel_multi_index(place, shape)


@pytest.mark.parametrize("n", [8, 24, 64, 256])
def test_fragments_are_those_of_the_manual(n: int) -> None:
    """Of the figure of D in the PTX ISA: 16 rows a warp, two neighbours in each of two rows, every 8 columns."""
    i = wgmma("float16", n)
    f = i.fragment(i.result)
    found = set()
    for t in range(128):
        for e in range(n // 2):
            high, low, column, pair = (E.evaluate_int(x, {f.lane: t, ELEMENT: e}) for x in f.indices)
            at = (high * 8 + low, column * 8 + pair)
            assert at == (16 * (t // 32) + t % 32 // 4 + 8 * (e // 2 % 2), e // 4 * 8 + t % 4 * 2 + e % 2)
            found.add(at)
    assert len(found) == 64 * n


def test_barriers_publish_and_phases_wait() -> None:
    kernel = product_of_groups("float16", 128, 32, 160, 32, 2, 3).kernel
    text, _ = emit_kernel(kernel, HOPPER)
    body = text.split("__global__")[1]
    assert body.count("__syncthreads();") == body.count("publish();\n    __syncthreads();") == 1
    assert re.search(
        r"complete_group\(\);\s+\{\s+settle\(acc\);\s+begin_products\(\);(?:(?!finish|settle|__sync)[^!])*complete_products\(\);\s+\}\s+finish_products\(\);\s+settle\(acc\);",
        body,
    )


@needs_nvrtc
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("width", [16, 128, 256])
def test_wgmma_compiles(dtype: str, width: int) -> None:
    text, _ = emit_kernel(product_of_groups(dtype, 512, 512, 512, width, 2, 3 if width < 256 else 2).kernel, HOPPER)
    binary = nvrtc.compile_text(text, "sm_90a")
    ((_, usage),) = binary.usage.items()
    ptx = binary.ptx.decode()
    assert usage.spilled == usage.stack == 0
    phases = ptx.count("wgmma.fence")  # the compiler may unroll the loop over slices
    assert ptx.count(wgmma(dtype, width).emission.code) == 2 * phases > 0
    assert phases == ptx.count("wgmma.commit_group") == ptx.count("wgmma.wait_group")
    assert phases == ptx.count("bar.sync") == ptx.count("fence.proxy.async.shared::cta")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_80,sm_90a", "sm_90,sm_90a", "sm_100a"])
def test_other_architectures_refuse(arch: str) -> None:
    kernel = product_of_groups("float16", 128, 64, 64, 64).kernel
    with pytest.raises(CodegenError, match=r"has no instruction `wgmma(?s:.)*it needs sm_90a alone"):
        emit_kernel(kernel, CudaTarget.parse(f"cuda -arch={arch}"))


@pytest.mark.parametrize(
    ("dtype", "n", "why"),
    [
        ("float64", 64, "wgmma of float64"), ("float16", 12, "with 12 columns"), ("float16", 264, "with 264 columns"),
        ("float16", "x", "with x columns"), ("int8", 40, "with 40 columns"), ("uint8", 0, "with 0 columns"),
    ],
)  # fmt: skip
def test_shapes_that_there_are_not(dtype: str, n: int, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        wgmma(dtype, n)


@needs_nvrtc
def test_the_assembler_has_just_these_shapes() -> None:
    """One instruction each; NVRTC's assembler refuses the others."""

    def exists(make: Callable[[], object]) -> bool:
        try:
            make()
        except (ScheduleError, CodegenError):
            return False
        return True

    def assembled(dtype: str, n: int) -> nvrtc.Binary:
        text, _ = emit_kernel(product_of_groups(dtype, 128, 64, 64, 64).kernel, HOPPER)
        registers = wgmma(dtype, 64).emission.code
        outputs = ", ".join(f'"+{"r" if BYTES[dtype] == 1 else "f"}"(acc[{i % 32}])' for i in range(n // 2))
        listed = ", ".join(f"%{i}" for i in range(n // 2))
        text = re.sub(r"\{%0[^}]*\}, %32, %33", f"{{{listed}}}, %{n // 2}, %{n // 2 + 1}", text)
        text = re.sub(r'" : "\+[fr]".*? : "l"', f'" : {outputs} : "l"', text)
        return nvrtc.compile_text(text.replace(registers, registers.replace("n64", f"n{n}")), "sm_90a")

    for dtype in ("bfloat16", "int8"):
        for n in (8, 16, 24, 40, 48, 256):
            assert exists(lambda d=dtype, n=n: assembled(d, n)) == exists(lambda d=dtype, n=n: wgmma(d, n))


# ---------------------------------------------------------------- where it cannot stand


def by_hand(position: Callable[..., Expr], inside: bool = False, beside: bool = False) -> Kernel:
    """One instruction, whose factor `a` lies at `position` of [i, k, r, c]."""
    i = wgmma("float16", 8)
    acc = Buffer("acc", "float32", (8, 8, 1, 8), "register")
    a, b = Buffer("a", "float16", (4096,), "shared"), Buffer("b", "float16", (1, 8, 2, 8), "shared")
    out = Buffer("out", "float32", (128,))
    leaf = i.leaf
    assert isinstance(leaf, Accumulate)

    def term(at: tuple[Expr, ...]) -> Stmt:
        x, r, j, s, k, c = at
        value = E.cast(a[position(x, k, r, c)], "float32") * E.cast(b[j, s, k, c], "float32")
        return Accumulate(acc, (x, r, j, s), value, leaf.reducer)

    call: Stmt = Call(i, over((8, 8, 1, 8, 2, 8), term))
    if beside:
        other = mma("int8")
        both = block(call, Call(other, other.meaning.body))
        call = over((1,), lambda _: both)
    body: Stmt = (
        Allocate(acc, call) if inside else Allocate(acc, block(call, replace(over((128,), lambda t: store(out, t, 0.0)), kind="thread.x")))
    )
    extra = mma("int8").meaning.buffers if beside else ()
    return Kernel("k", (out, *extra), (out,), (), Allocate(a, Allocate(b, body)))


def usual(i: Expr, k: Expr, r: Expr, c: Expr) -> Expr:
    return i * 128 + k * 8 + r * 16 + c


def test_rows_have_a_size_that_is_swizzled() -> None:
    for bytes_, position in (
        (32, usual),
        (64, lambda i, k, r, c: i * 256 + k * 8 + r * 32 + c + 16),
        (128, lambda i, k, r, c: i * 512 + k * 8 + r * 64 + c),
    ):
        text, _ = emit_kernel(by_hand(position), HOPPER)
        assert f"matrix<{bytes_ // 16}>(a + {16 if bytes_ == 64 else 0})" in text
    for position in (
        lambda i, k, r, c: usual(i, k, r, c) + 64 * i,
        lambda i, k, r, c: i * 384 + k * 8 + r * 48 + c,
        lambda i, k, r, c: usual(i, k, r, c) + 16,
        lambda i, k, r, c: i * 256 + k * 8 + r * 32 + c + 4,
    ):
        with pytest.raises(CodegenError, match=r"`a` cannot be described to `wgmma\(float16, 8\)`"):
            emit_kernel(by_hand(position), HOPPER)


def test_what_stands_around() -> None:
    with pytest.raises(CodegenError, match="`acc` is allocated in one phase with the instructions that add to it in the background"):
        emit_kernel(by_hand(usual, inside=True), HOPPER)
    with pytest.raises(CodegenError, match=r"`wgmma\(float16, 8\)`, `mma\(int8\)` are in one phase"):
        emit_kernel(by_hand(usual, beside=True), HOPPER)


def test_pieces_of_a_row_follow_each_other() -> None:
    s = next(x for x in walk(by_hand(lambda i, k, r, c: i * 128 + k * 64 + r * 8 + c).body) if isinstance(x, Call))
    with pytest.raises(IRError, match="elements along `i.`, `a` must move by 8 along `k`"):
        match(s.instruction, s.body)


def test_a_block_of_other_threads() -> None:
    kernel = by_hand(usual)
    out = Buffer("wide", "float32", (192,))
    wide = replace(over((192,), lambda t: store(out, t, 0.0)), kind="thread.x")
    with pytest.raises(CodegenError, match="a block is 192 threads wide"):
        emit_kernel(replace(kernel, buffers=(*kernel.buffers, out), outputs=(*kernel.outputs, out), body=block(wide, kernel.body)), HOPPER)
