"""tensorize: which nests an instruction takes the place of, which it does not, and why."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import assembly
from tcomp.errors import IRError, ScheduleError
from tcomp.ir import te
from tcomp.ir.expr import Expr
from tcomp.ir.instruction import Instruction, Operand, VectorOp, match
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Accumulate, Buffer, Call, Kernel, block, loop, store, walk
from tcomp.ir.simplify import as_dim
from tcomp.ir.text.parser import parse_kernel
from tcomp.ir.verify.loops import verify_kernel
from tcomp.schedules import Schedule
from tcomp.schedules.instructions import fma_tile, mma, mma_fill, named, text_of, vpdpbusd
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST, ISA, compile_kernel, spill_count

LANES = fma_tile(1, 1, 1, ISA).result.shape[1]
assert isinstance(LANES, int)
VNNI = CpuTarget.parse("cpu -mcpu=cascadelake")


def matmul(m: int, n: int, depth: int, dtype: str = "float32", swapped: bool = False) -> Schedule:
    a, b = te.placeholder((m, depth), dtype, "A"), te.placeholder((depth, n), dtype, "B")
    k = te.reduce_axis(depth, "k")
    both = lambda i, j: b[k, j] * a[i, k] if swapped else a[i, k] * b[k, j]
    return Schedule([a, b, te.compute((m, n), lambda i, j: te.sum(both(i, j), k), "C")])


def tiled(s: Schedule, rows: int, vectors: int, unroll: int) -> str:
    """A register tile inside of the loops over tiles and k; returns its outermost loop."""
    s.cache_write("C", "acc")
    i, i_ = s.split("C.0", rows)
    j, j_ = s.split("C.1", vectors * LANES)
    s.reorder(i, j, i_, j_)
    s.compute_at("acc", j, "register")
    for down, across in ((i_, j_), ("C.init.i", "C.init.j")):  # at constant places, which lets the tile live in registers
        parts, lanes = s.split(across, LANES)
        s.vectorize(lanes)
        s.unroll(parts)
        s.unroll(down)
    k, k_ = s.split("C.k", unroll)
    s.reorder(k, k_, "C.i", "C.j")
    s.clean()
    return k_


def integers(kernel: Kernel, seed: int = 0) -> list[np.ndarray]:
    """Floats that are integers, so that sums are exact."""
    rng = np.random.default_rng(seed)
    found = []
    for b in kernel.buffers:
        limits = (-4, 5) if b.dtype[0] in "fi" and b.dtype != "int8" else (np.iinfo(b.dtype).min, np.iinfo(b.dtype).max + 1)
        found.append(rng.integers(*limits, [int(n) for n in b.shape]).astype(b.dtype))
    return found


def interpreted(kernel: Kernel, arrays: Sequence[np.ndarray]) -> np.ndarray:
    copies = [a.copy() for a in arrays]
    run_kernel(kernel, dict(zip(kernel.buffers, copies, strict=True)), garbage=True)
    return copies[-1]


# ---------------------------------------------------------------- what is replaced


@pytest.mark.parametrize("swapped", [False, True])
def test_a_tiled_product(swapped: bool) -> None:
    s, rows = matmul(12, 4 * LANES, 8, swapped=swapped), 6 if HOST.vector_registers == 32 else 4
    before = s.kernel
    s.tensorize(tiled(s, rows, 2, 4), fma_tile(rows, 2, 4, ISA))
    verify_kernel(s.kernel)
    assert str(parse_kernel(str(s.kernel))) == str(s.kernel)
    arrays = integers(before)
    want = interpreted(before, arrays)
    np.testing.assert_array_equal(interpreted(s.kernel, arrays), want)
    run, found = compile_kernel(s.kernel), arrays[-1]
    found.fill(-1)
    run(*arrays)
    np.testing.assert_array_equal(found, want)
    asm = assembly(emit_kernel(s.kernel, HOST), HOST)
    assert spill_count(asm) == 0  # accumulators stay in registers over the whole fold


def test_steps_after_it_and_traces() -> None:
    """Loops around an instruction go on being scheduled; a trace says it by name, and is proved again from its JSON."""
    s = matmul(12, 2 * LANES, 8)
    s.tensorize(tiled(s, 3, 1, 2), fma_tile(3, 1, 2, ISA))
    s.fuse("C.0.o", "C.1.o")
    s.parallel("C.0.o_o") if "C.0.o_o" in s.loops else s.parallel(next(iter(s.loops)))
    assert f's.tensorize("C.k.i", "fma_tile(3, 1, 2, {ISA}, float32)")' in str(s.trace)
    assert str(Schedule.from_json(s.to_json()).kernel) == str(s.kernel)
    arrays = integers(s.kernel)
    want = arrays[0] @ arrays[1]
    np.testing.assert_array_equal(interpreted(s.kernel, arrays), want)
    compile_kernel(s.kernel)(*arrays)
    np.testing.assert_array_equal(arrays[-1], want)


def bytes_product(m: int, n: int, depth: int, left: str = "uint8", right: str = "int8") -> Schedule:
    """B lies in groups of four rows."""
    a, b = te.placeholder((m, depth), left, "A"), te.placeholder((depth // 4, n, 4), right, "B")
    k = te.reduce_axis(depth, "k")
    body = lambda i, j: te.sum(te.cast(a[i, k], "int32") * te.cast(b[k // 4, j, k % 4], "int32"), k)
    s = Schedule([a, b, te.compute((m, n), body, "C")])
    s.split("C.k", 4)
    return s


def test_a_product_of_bytes() -> None:
    s = bytes_product(6, 32, 16)
    s.split("C.k.o", 2)
    s.reorder("C.k.o.o", "C.i", "C.k.i", "C.k.o.i", "C.j", reassociate=True)
    s.tensorize("C.i", vpdpbusd(6, 2, 2))
    verify_kernel(s.kernel)
    arrays = integers(s.kernel)
    want = arrays[0].astype(np.int32) @ arrays[1].transpose(0, 2, 1).reshape(16, 32)
    np.testing.assert_array_equal(interpreted(s.kernel, arrays), want)
    assert assembly(emit_kernel(s.kernel, VNNI), VNNI).count("vpdpbusd") == 6 * 2 * 2
    if not VNNI.runs_on(HOST):
        pytest.skip("this machine has no AVX-512 VNNI")
    compile_kernel(s.kernel, VNNI)(*arrays)
    np.testing.assert_array_equal(arrays[-1], want)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_any_order_of_the_loops(order: tuple[int, ...]) -> None:
    """Sums of integers do not depend on their order: the roles are found wherever the loops stand."""
    s = bytes_product(2, 16, 8)
    s.reorder(*(("C.i", "C.j", "C.k.o", "C.k.i")[n] for n in order), reassociate=True)
    s.tensorize(("C.i", "C.j", "C.k.o", "C.k.i")[order[0]], vpdpbusd(2, 1, 2))
    call = next(x for x in walk(s.kernel.body) if isinstance(x, Call))
    assert {a.name: b.name for a, b in match(call.instruction, call.body).loops.items()} == {
        "r": "C.i",
        "j": "C.j",
        "k": "C.k.o",
        "g": "C.k.i",
    }


def test_floats_are_added_in_the_order_of_the_meaning() -> None:
    """Two loops fold: nested the other way, the sums would round differently."""
    a, b, acc = Buffer("a", F, (4, 2)), Buffer("b", F, (4, 2, 16)), Buffer("acc", F, (16,))
    nested = lambda x, y: loop(
        x[0], x[1], lambda p: loop(y[0], y[1], lambda q: loop("j", 16, lambda j: leaf(*((p, q) if x[0] == "k" else (q, p)), j)))
    )
    leaf = lambda k, g, j: Accumulate(acc, (j,), a[k, g] * b[k, g, j], SUM)
    kernel = lambda body: Kernel("meaning", (acc, a, b), (acc,), (), body)
    emission = VectorOp("llvm.fma.v16f32", ("a", "b", "acc"), 16)
    operands = (Operand((1,)), Operand((None, None)), Operand((None, None, 1)))
    i = Instruction("twice", kernel(nested(("k", 4), ("g", 2))), operands, emission, ("avx512f",), 4.0, 8)
    match(i, nested(("k", 4), ("g", 2)))
    with pytest.raises(IRError, match="sums of float32 depend on their order: the reduction loops must be nested as k, g"):
        match(i, nested(("g", 2), ("k", 4)))
    match(replace(i, reassociates=True), nested(("g", 2), ("k", 4)))


def test_loops_that_run_once_need_no_role() -> None:
    s = matmul(1, LANES, 6)
    s.reorder("C.k", "C.i", "C.j")
    s.tensorize("C.i", fma_tile(1, 1, 1, ISA))
    assert any(isinstance(x, Call) for x in walk(s.kernel.body))
    s.clean()
    verify_kernel(s.kernel)
    arrays = integers(s.kernel)
    want = arrays[0] @ arrays[1]
    compile_kernel(s.kernel)(*arrays)
    np.testing.assert_array_equal(arrays[-1], want)


def test_both_operands_from_one_buffer() -> None:
    a = te.placeholder((LANES, LANES), name="A")
    k = te.reduce_axis(LANES, "k")
    s = Schedule([a, te.compute((LANES, LANES), lambda i, j: te.sum(a[i, k] * a[k, j], k), "C")])
    s.split("C.i", 2)
    s.split("C.k", 4)
    s.reorder("C.i.o", "C.k.o", "C.k.i", "C.i.i", "C.j")
    s.tensorize("C.k.i", fma_tile(2, 1, 4, ISA))
    arrays = integers(s.kernel)
    compile_kernel(s.kernel)(*arrays)
    np.testing.assert_array_equal(arrays[1], arrays[0] @ arrays[0])


def test_symbolic_sizes() -> None:
    """Strides may be symbolic: only those that the instruction fixes must be known."""
    n, depth = te.var("n", 1, 64), te.var("d", 1, 64)
    columns = as_dim(n * LANES)
    a, b = te.placeholder((as_dim(n * 2), depth), name="A"), te.placeholder((depth, columns), name="B")
    k = te.reduce_axis(depth, "k")
    s = Schedule([a, b, te.compute((as_dim(n * 2), columns), lambda i, j: te.sum(a[i, k] * b[k, j], k), "C")])
    s.split("C.i", 2)
    s.split("C.j", LANES)
    s.reorder("C.i.o", "C.j.o", "C.k", "C.i.i", "C.j.i")
    s.clean()
    s.tensorize("C.i.i", fma_tile(2, 1, 1, ISA))
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((6, 5), (5, 3 * LANES)))
    found = np.full((6, 3 * LANES), -1, np.float32)
    compile_kernel(s.kernel)(x, y, found, *({"n": 3, "d": 5}[v.name] for v in s.kernel.scalars))
    np.testing.assert_array_equal(found, x @ y)


# ---------------------------------------------------------------- what is refused

Made = tuple[Schedule, str, Instruction]


def plain(rows: int = 2, columns: int = 16, depth: int = 4, dtype: str = "float32") -> Schedule:
    s = matmul(rows, columns, depth, dtype)
    s.reorder("C.k", "C.i", "C.j")
    return s


def by_hand(body: Callable[..., Any], *buffers: tuple[Sequence[int], str]) -> Schedule:
    """A program of loops over a, b, c, ..., of which the last is written."""
    made = [Buffer(name, dtype, shape) for name, (shape, dtype) in zip("abcd", buffers, strict=False)]
    return Schedule(Kernel("k", tuple(made), (made[-1],), (), body(*made)))


SUM = fma_tile(1, 1).leaf.reducer
F = "float32"


def nest(leaf: Callable[[Expr, Expr, Expr], Any], rows: int = 2, columns: int = 16, depth: int = 4) -> Any:
    return loop("k", depth, lambda k: loop("i", rows, lambda i: loop("j", columns, lambda j: leaf(i, j, k))))


def polynomial() -> Made:
    """Rows of the result overlap: c[i + j]."""
    s = by_hand(
        lambda a, b, c: nest(lambda i, j, k: Accumulate(c, (i + j,), a[i, k] * b[k, j], SUM)), ((2, 4), F), ((4, 16), F), ((17,), F)
    )
    return s, "k", fma_tile(2, 1, 4)


def triangle() -> Made:
    body = lambda a, b, c: loop(
        "k", 4, lambda k: loop("i", 2, lambda i: loop("j", 16, lambda j: Accumulate(c, (i, j), a[i, k * k] * b[k, j], SUM)))
    )
    return by_hand(body, ((2, 16), F), ((4, 16), F), ((2, 16), F)), "k", fma_tile(2, 1, 4)


def two_statements() -> Made:
    leaf = lambda a, b, c: lambda i, j, k: block(Accumulate(c, (i, j), a[i, k] * b[k, j], SUM), store(c, (i, j), 0.0))
    return by_hand(lambda a, b, c: nest(leaf(a, b, c)), ((2, 4), F), ((4, 16), F), ((2, 16), F)), "k", fma_tile(2, 1, 4)


def itself() -> Made:
    s = by_hand(lambda a, c: nest(lambda i, j, k: Accumulate(c, (i, j), a[i, k] * c[k, j], SUM)), ((2, 4), F), ((4, 16), F))
    return s, "k", fma_tile(2, 1, 4)


def indirect() -> Made:
    body = lambda a, b, c, d: nest(lambda i, j, k: Accumulate(d, (i, j), a[i, k] * b[c[k], j], SUM))
    return by_hand(body, ((2, 4), F), ((9, 16), F), ((4,), "int64"), ((2, 16), F)), "k", fma_tile(2, 1, 4)


def guarded() -> Made:
    s = matmul(3, 16, 4)
    s.split("C.i", 2)
    s.reorder("C.i.o", "C.k", "C.i.i", "C.j")
    return s, "C.k", fma_tile(2, 1, 4)


def folded_with(fold: Callable[..., Expr]) -> Made:
    a, b, k = te.placeholder((2, 4), name="A"), te.placeholder((4, 16), name="B"), te.reduce_axis(4, "k")
    s = Schedule([a, b, te.compute((2, 16), lambda i, j: fold(a[i, k] * b[k, j], k), "C")])
    s.reorder("C.k", "C.i", "C.j")
    return s, "C.k", fma_tile(2, 1, 4)


def with_kind(kind: str) -> Made:
    s = plain()
    s.set_kind("C.j", kind)
    return s, "C.k", fma_tile(2, 1, 4)


def packed(body: Callable[[Any, Any, Expr, Expr, Expr], Expr], left: str = "uint8", right: str = "int8") -> Made:
    a, b, k = te.placeholder((1, 4), left, "A"), te.placeholder((1, 16, 4), right, "B"), te.reduce_axis(4, "k")
    s = Schedule([a, b, te.compute((1, 16), lambda i, j: te.sum(body(a, b, i, j, k), k), "C")])
    return s, "C.i", vpdpbusd(1, 1)


def wide(x: Expr, dtype: str = "int32") -> Expr:
    return te.cast(x, dtype)


REFUSED: dict[str, tuple[Callable[[], Made], str]] = {
    "dtype of an operand": (lambda: (plain(dtype="float64"), "C.k", fma_tile(2, 1, 4)), "reduces by `sum` of float64, the instruction by `sum` of float32"),
    "a loop too long": (lambda: (plain(columns=32), "C.k", fma_tile(2, 1, 4)), "loop `C.j` runs 32 times, `j` of the instruction 16 times"),
    "a loop too short": (lambda: (plain(depth=3), "C.k", fma_tile(2, 1, 4)), "loop `C.k` runs 3 times, `k` of the instruction 4 times"),
    "a loop missing": (lambda: (plain(), "C.i", fma_tile(2, 1, 4)), r"its loops that run more than once are C.i \(2\), C.j \(16\); those of the instruction k \(4\)"),
    "a loop too many": (lambda: (plain(depth=4), "C.k", fma_tile(2, 1)), "its loops that run more than once are C.k"),
    "a strided operand": (
        lambda: (by_hand(lambda a, b, c: nest(lambda i, j, k: Accumulate(c, (i, j), a[i, k] * b[j, k], SUM)), ((2, 4), F), ((16, 4), F), ((2, 16), F)), "k", fma_tile(2, 1, 4)),
        "`b` moves by 4 elements along `j`, `b` must move by 1 along `j`",
    ),
    "a strided result": (
        lambda: (by_hand(lambda a, b, c: nest(lambda i, j, k: Accumulate(c, (i, j * 2), a[i, k] * b[k, j], SUM)), ((2, 4), F), ((4, 16), F), ((2, 32), F)), "k", fma_tile(2, 1, 4)),
        "`c` moves by 2 elements along `j`, `acc` must move by 1 along `j`",
    ),
    "rows that overlap": (polynomial, r"`c\[i \+ j\]` is the same element in several iterations"),
    "steps that differ": (triangle, "`a` does not move by equal steps along `k`"),
    "another reducer": (lambda: folded_with(te.max), "reduces by `max` of float32, the instruction by `sum`"),
    "a product of sums": (
        lambda: (by_hand(lambda a, b, c: nest(lambda i, j, k: Accumulate(c, (i, j), a[i, k] + b[k, j], SUM)), ((2, 4), F), ((4, 16), F), ((2, 16), F)), "k", fma_tile(2, 1, 4)),
        r"`a\[i, k\] \+ b\[k, j\]` of float32 stands where the instruction has `a\[r, k\] \* b\[k, j\]`",
    ),
    "an extra factor": (
        lambda: (by_hand(lambda a, b, c: nest(lambda i, j, k: Accumulate(c, (i, j), a[i, k] * b[k, j] * 2, SUM)), ((2, 4), F), ((4, 16), F), ((2, 16), F)), "k", fma_tile(2, 1, 4)),
        "stands where the instruction has",
    ),
    "an extra statement": (two_statements, r"inside the loops is not one store but `c\[i, j\] \+="),
    "a guard inside": (guarded, "inside the loops is not one store but `if"),
    "the result as an operand": (itself, "`b` is written and read, `acc` and `b` are different buffers"),
    "an indirect operand": (indirect, "`b` does not move by equal steps along `k`"),
    "a vectorized loop": (lambda: with_kind("vectorized"), "loop `C.j` is vectorized, those of an instruction are serial"),
    "a store for a fold": (lambda: (plain(), "C.init.i", fma_tile(2, 1)), "it stores, the instruction accumulates"),
    "a fold for a store": (lambda: (plain(), "C.k", mma_fill()), "it accumulates, the instruction stores"),
    "signed bytes": (lambda: packed(lambda a, b, i, j, k: wide(a[i, k]) * wide(b[0, j, k]), "int8"), r"`A\[C.i, C.k\]` is int8, `a\[r, k, g\]` is uint8"),
    "operands exchanged": (
        lambda: packed(lambda a, b, i, j, k: wide(a[i, k]) * wide(b[0, j, k]), "int8", "uint8"), r"loop `C.j` moves B and C, `j` of the instruction would move A and C",
    ),
    "a narrower product": (lambda: packed(lambda a, b, i, j, k: wide(wide(a[i, k], "int16") * wide(b[0, j, k], "int16"))), "of int32 stands where the instruction has"),
    "a group that is not dense": (lambda: packed(lambda a, b, i, j, k: wide(a[i, 3 - k]) * wide(b[0, j, k])), "`A` moves by -1 elements along `C.k`, `a` must move by 1 along `g`"),
    "sums of floats in another order": (lambda: (product_for_mma(), "C.i", mma("float16")), "`mma.float16.` adds floats in an order of its own"),
    "the wrong scope": (lambda: (by_hand(lambda c: loop("i", 16, lambda i: loop("j", 8, lambda j: store(c, (i, j), 0.0))), ((16, 8), F)), "i", mma_fill()), "`a` is in global memory, `acc` must be in register memory"),
}  # fmt: skip


def product_for_mma() -> Schedule:
    a, b, k = te.placeholder((16, 16), "float16", "A"), te.placeholder((16, 8), "float16", "B"), te.reduce_axis(16, "k")
    return Schedule([a, b, te.compute((16, 8), lambda i, j: te.sum(wide(a[i, k], F) * wide(b[k, j], F), k), "C")])


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, message = REFUSED[case]
    s, outer, instruction = make()
    before, steps = s.kernel, len(s.trace)
    with pytest.raises(ScheduleError, match=message) as refusal:
        s.tensorize(outer, instruction)
    assert s.kernel is before and len(s.trace) == steps
    assert "`tensorize` does not apply to kernel" in refusal.value.what
    if "order" not in case:  # both sides are shown
        assert str(instruction.meaning.body) in refusal.value.why and "is not `" in refusal.value.why


def test_what_is_executed_stays_what_it_is() -> None:
    """Steps that would take a nest apart that an instruction executes are refused; those that keep its meaning are not."""
    s = plain()
    s.tensorize("C.k", fma_tile(2, 1, 4))
    for step, message in (
        (
            lambda: s.split("C.j", 4),
            r"it would change what `fma_tile\(2, 1, 4, avx512, float32\)` executes: its loops that run more than once",
        ),
        (lambda: s.vectorize("C.j"), "loop `C.j` is vectorized"),
        (lambda: s.cache_read("A", "C.i", "near"), "inside the loops is not one store"),
        (lambda: s.tensorize("C.k", fma_tile(2, 1, 4)), "loop `C.k` is executed by an instruction already"),
        (lambda: s.tensorize("C.i", fma_tile(2, 1, 4)), "loop `C.i` is executed by an instruction already"),
    ):
        before = s.kernel
        with pytest.raises(ScheduleError, match=message):
            step()
        assert s.kernel is before
    s.reorder("C.j", "C.i")
    verify_kernel(s.kernel)


def test_dependences_are_those_of_the_meaning() -> None:
    """An instruction is to the judge of a step what it computes: no step becomes legal by it, or refused."""
    s = plain(depth=8)
    s.split("C.k", 4)
    s.tensorize("C.k.i", fma_tile(2, 1, 4))
    with pytest.raises(ScheduleError, match="may touch the same element of `C`") as refusal:
        s.parallel("C.k.o")
    assert refusal.value.witness is not None
    with pytest.raises(ScheduleError, match="an instruction executes some of the loops"):
        s.affine("C.k.o", "{ S0[k, l, i, j] -> [k, l, i, j] }", "k l i j")
    s = matmul(4, 16, 4)
    s.split("C.i", 2)
    s.reorder("C.i.o", "C.k", "C.i.i", "C.j")
    s.tensorize("C.k", fma_tile(2, 1, 4))
    s.parallel("C.i.o")


def test_relayout_under_an_instruction() -> None:
    """The layout of an operand is part of the match: a change that the instruction cannot follow is refused."""
    s = plain()
    s.cache_read("B", None, "near")
    s.tensorize("C.k", fma_tile(2, 1, 4))
    with pytest.raises(ScheduleError, match="it would change what"):
        s.relayout("near", "(b,a)")
    s.relayout("near", "(a,b%33)")  # another pitch
    arrays = integers(s.kernel)
    np.testing.assert_array_equal(interpreted(s.kernel, arrays), arrays[0] @ arrays[1])


# ---------------------------------------------------------------- names


def test_names() -> None:
    for i in (fma_tile(2, 3), vpdpbusd(1, 1, 1, 256), mma("int8"), mma_fill("int32")):
        assert text_of(i) == i.name and str(named(i.name)) == str(i)
    own = replace(fma_tile(2, 1, 4), name="mine", cycles=9.0)
    assert text_of(own) == str(own) and str(named(text_of(own))) == str(own)
    assert text_of(replace(own, name="fma_tile(2, 1, 4, avx512, float32)")).startswith("instruction")
    s = plain()
    s.tensorize("C.k", own)
    assert str(Schedule.from_json(s.to_json()).kernel) == str(s.kernel)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic(1, 2)", "there is no instruction `magic"), ("fma_tile(1)", "there is no instruction `fma_tile"), ("fma_tile(0, 1)", "is not a tile"),
        ("fma_tile(1, 1, 1, avx3)", "for one of avx512, avx2, neon"), ("fma_tile(1, 1, 1, avx2, int8)", "fma_tile of int8"),
        ("vpdpbusd(1, 1, 1, 128)", "512 or 256"), ("mma(float64)", "mma of float64"), ("mma_fill(float16)", "an mma does not sum float16"),
        ("fma_tile(one, 1)", "there is no instruction"), ("instruction x(", "expected"), ("", "expected `instruction`"),
    ],
)  # fmt: skip
def test_names_of_no_instruction(text: str, message: str) -> None:
    with pytest.raises((ScheduleError, IRError), match=message):
        named(text)
    with pytest.raises(ScheduleError, match=message):
        plain().tensorize("C.k", text)
