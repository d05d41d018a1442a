"""Barriers and waits of GPU programs: where they stand, and that no program, followed thread by thread, races with them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.barriers import MAX_TRACKED, Placement, phases, place, unproved
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.ir import te
from tcomp.ir.expr import Expr, as_expr
from tcomp.ir.loops import Accumulate, Allocate, Buffer, For, If, Kernel, Stmt, block, loop, store
from tcomp.target import CudaTarget
from tests.codegen.cuda.block_races import Block
from tests.codegen.cuda.test_cuda import needs_nvrtc

SUM = te.sum(te.placeholder((4,), "float32")[0], te.reduce_axis(4)).attr[0]
THREADS = 4
X, OUT = Buffer("x", "float32", (64, THREADS)), Buffer("out", "float32", (THREADS,))
SIZE, FEW = te.var("n", 0, 100), te.var("few", 0, 9)  # of many iterations nobody tells each from the others


def copy(name: str, ring: Buffer, slot: Expr | int, row: Expr | int) -> Stmt:
    return loop(name, THREADS, lambda t: store(ring, (slot, t), X[as_expr(row) % 64, t]), "thread.x")


def use(name: str, ring: Buffer, slot: Expr | int) -> Stmt:
    """Each thread reads what its neighbour has copied."""
    return loop(name, THREADS, lambda t: Accumulate(OUT, (t,), ring[slot, (t + 1) % THREADS], SUM), "thread.x")


def loop_name(s: Stmt) -> str:
    assert isinstance(s, For)
    return s.var.name


def placed(body: Stmt) -> tuple[Placement, set[Stmt]]:
    copies = {s for s in phases(body) if isinstance(getattr(s, "body", None), type(store(OUT, (0,), 0.0))) and "copy" in loop_name(s)}
    return place(body, copies), copies


def races(body: Stmt, sizes: range = range(1)) -> set[str]:
    placement, copies = placed(body)
    found: set[str] = set()
    for n in sizes:
        blk = Block(placement, copies, {SIZE: n, FEW: n})
        blk.run(body)
        found |= blk.races
    return found


# ---------------------------------------------------------------- rings


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("steps", [SIZE, FEW, 40])
def test_a_ring_takes_one_barrier_and_waits_for_all_but_what_runs_ahead(stages: int, steps: Expr | int) -> None:
    """What `pipeline` makes: `stages - 1` groups before the loop, then one an iteration; the barrier stands before the copy."""
    ring = Buffer("ring", "float32", (stages, THREADS), "shared")
    ahead = stages - 1
    prologue = loop("p", ahead, lambda p: copy("pcopy", ring, p, p))
    steady = loop("k", steps, lambda k: block(copy("copy", ring, (k + ahead) % stages, k + ahead), use("use", ring, k % stages)))
    body = block(prologue, steady)
    placement, copies = placed(body)
    assert list(placement.before.values()) == [stages - 2] and set(placement.before) < copies and placement.groups == copies
    assert not races(body, range(min(3 * stages, 10)))


def test_copies_that_stand_together_are_one_group() -> None:
    a, b = (Buffer(name, "float32", (2, THREADS), "shared") for name in "ab")
    body = loop("k", SIZE, lambda k: block(copy("copy_a", a, 0, k), copy("copy_b", b, 0, k), use("use_a", a, 0), use("use_b", b, 0)))
    placement, _ = placed(body)
    assert [loop_name(s) for s in placement.groups] == ["copy_b"]
    assert sorted(placement.before.values(), key=str) == [0, None]  # before the use, and before the copy: others may still read
    assert not races(body, range(4))


def test_rows_copied_by_a_loop_are_told_apart() -> None:
    """Each row is a group: those of the next step may be under way."""
    ring = Buffer("ring", "float32", (2, 3, THREADS), "shared")

    def rows(name: str, step: Expr) -> Stmt:
        row = lambda i: loop(f"copy_{name}", THREADS, lambda t: store(ring, (step % 2, i, t), X[i, t]), "thread.x")
        return loop(f"row_{name}", 3, row)

    def turned(name: str, step: Expr) -> Stmt:
        value = lambda i, t: ring[step % 2, i, (t + 1) % THREADS]
        return loop(f"use_{name}", THREADS, lambda t: loop(f"i_{name}", 3, lambda i: Accumulate(OUT, (t,), value(i, t), SUM)), "thread.x")

    body = block(rows("p", as_expr(0)), loop("k", SIZE, lambda k: block(rows("k", k + 1), turned("k", k))))
    placement, _ = placed(body)
    assert sorted(placement.before.values(), key=str) == [3, None]
    assert not races(body, range(6))


def test_a_copy_of_what_was_copied_ends_the_group() -> None:
    """The second copy overwrites the first."""
    a = Buffer("a", "float32", (2, THREADS), "shared")
    body = block(copy("copy_1", a, 0, 1), copy("copy_2", a, 0, 2), use("use", a, 0))
    placement, copies = placed(body)
    assert placement.groups == copies and list(placement.before.values()) == [0, 0]
    assert not races(body)


@pytest.mark.parametrize("stages", [2, 3])
def test_rings_of_different_length(stages: int) -> None:
    a, b = Buffer("a", "float32", (stages, THREADS), "shared"), Buffer("b", "float32", (stages + 1, THREADS), "shared")

    def step(k: Expr) -> Stmt:
        copies = copy("copy_a", a, (k + stages - 1) % stages, k), copy("copy_b", b, (k + stages) % (stages + 1), k)
        return block(*copies, use("use_a", a, k % stages), use("use_b", b, k % (stages + 1)))

    body = loop("k", SIZE, step)
    assert not races(body, range(20))


def test_groups_beyond_those_that_are_told_apart() -> None:
    """More groups are under way than are followed one by one: an old one is waited for as if it were the newest of them."""
    ring = Buffer("ring", "float32", (1, THREADS), "shared")
    others = [Buffer(f"r{n}", "float32", (1, THREADS), "shared") for n in range(MAX_TRACKED + 3)]
    more = [block(copy(f"copy{n}", b, 0, n), use(f"use{n}", X, n)) for n, b in enumerate(others)]
    body = block(copy("copy", ring, 0, 1), use("between", X, 0), *more, use("use", ring, 0))
    placement, _ = placed(body)
    assert list(placement.before.values()) == [MAX_TRACKED - 1]
    assert not races(body)


# ---------------------------------------------------------------- ways through the program


def test_a_barrier_in_a_loop_that_may_not_run_is_none() -> None:
    """Without iterations nothing stands between the first and the last phase."""
    a, b = (Buffer(name, "float32", (1, THREADS), "shared") for name in "ab")
    inner = loop("k", SIZE, lambda k: block(use("use_a", a, 0), loop("set_b", THREADS, lambda t: store(b, (0, t), 0.0), "thread.x")))
    body = block(loop("set_a", THREADS, lambda t: store(a, (0, t), 1.0), "thread.x"), inner, use("last", a, 0))
    placement, _ = placed(body)
    assert len(placement.before) == 2
    assert not races(body, range(3))


def test_a_barrier_in_one_branch_is_none_in_the_other() -> None:
    a, b = (Buffer(name, "float32", (1, THREADS), "shared") for name in "ab")

    def branches(other: Buffer) -> Stmt:
        return block(
            loop("set_a", THREADS, lambda t: store(a, (0, t), 1.0), "thread.x"),
            If(SIZE < 2, use("then", a, 0), use("else", other, 0)),
            If(SIZE < 1, use("again", a, 0)),
            loop("set", THREADS, lambda t: store(a, (0, t), 2.0), "thread.x"),
        )

    for other, expected in (
        (b, ["For", "For", "For"]),
        (a, ["For", "If"]),
    ):  # before both branches, if both need it; before a is overwritten
        placement, _ = placed(branches(other))
        assert sorted(type(s).__name__ for s in placement.before) == expected
        assert not races(branches(other), range(3))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_copies_of_two_kinds_take_one_barrier(stages: int) -> None:
    """Full tiles and those over an edge: one of two copies in each step."""
    ring = Buffer("ring", "float32", (stages, THREADS), "shared")
    ahead = stages - 1

    def either(name: str, slot: Expr, row: Expr) -> Stmt:
        return If(SIZE < 20, copy(f"copy_{name}", ring, slot, row), copy(f"copy_{name}_e", ring, slot, row))

    prologue = loop("p", ahead, lambda p: either("p", p, p))
    body = block(prologue, loop("k", SIZE, lambda k: block(either("k", (k + ahead) % stages, k + ahead), use("use", ring, k % stages))))
    placement, copies = placed(body)
    assert [(type(s), n) for s, n in placement.before.items()] == [(If, stages - 2)] and placement.groups == copies
    assert not races(body, range(min(3 * stages, 10)))


def test_a_loop_whose_length_other_threads_have_written() -> None:
    count = Buffer("count", "int64", (1,), "shared")
    a = Buffer("a", "float32", (1, THREADS), "shared")
    body = block(store(count, (0,), 3), loop("k", count[0], lambda k: use("use", a, 0)))
    text, _ = emit_kernel(Kernel("k", (X, OUT), (OUT,), (), Allocate(count, Allocate(a, body))), CudaTarget.parse("cuda"))
    assert text.index("__syncthreads();") < text.index("for (")


# ---------------------------------------------------------------- random programs


@st.composite
def programs(draw: st.DrawFn) -> Stmt:
    """Rings filled and read at random places, in loops, under conditions, some of a length that is not known."""
    rings = [Buffer(f"r{n}", "float32", (draw(st.integers(1, 4)), THREADS), "shared") for n in range(draw(st.integers(1, 2)))]
    number = 0

    def name(kind: str) -> str:
        nonlocal number
        number += 1
        return f"{kind}{number}"

    def slot(ring: Buffer, loops: tuple[Expr, ...]) -> Expr | int:
        stages = ring.shape[0]
        assert isinstance(stages, int)
        if not loops or draw(st.integers(0, 4)) == 0:
            return draw(st.integers(0, stages - 1))
        v, offset = draw(st.sampled_from(loops)), draw(st.integers(0, stages))
        return (draw(st.sampled_from([v, v, v, v * 2, v // 2])) + offset) % stages

    def statement(depth: int, loops: tuple[Expr, ...]) -> Stmt:
        kind = draw(st.integers(0, 7 if depth < 3 else 5))
        ring = draw(st.sampled_from(rings))
        if kind < 2:
            return copy(name("copy"), ring, slot(ring, loops), draw(st.integers(0, 9)))
        if kind == 2:
            at = slot(ring, loops)
            return loop(name("set"), THREADS, lambda t: store(ring, (at, t), 1.0), "thread.x")
        if kind < 6:
            return use(name("use"), ring, slot(ring, loops))
        if kind == 6 and loops:
            otherwise = sequence(depth + 1, loops) if draw(st.booleans()) else None
            return If(loops[-1] < draw(st.integers(0, 4)), sequence(depth + 1, loops), otherwise)
        extent = draw(st.sampled_from([0, 1, 2, 3, 5, 20, SIZE, SIZE, SIZE]))
        return loop(name("k"), extent, lambda k: sequence(depth + 1, (*loops, k)))

    def sequence(depth: int, loops: tuple[Expr, ...]) -> Stmt:
        return block(*(statement(depth, loops) for _ in range(draw(st.integers(1, 4)))))

    return sequence(0, ())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs())
def test_no_program_races(body: Stmt) -> None:
    assert not races(body, range(7))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(programs())
def test_races_would_be_found(body: Stmt) -> None:
    """Without any barrier or wait that was placed there is a race: none is placed in vain for all sizes, taken together."""
    placement, copies = placed(body)
    if placement.before:
        bare = Block(Placement({}, placement.groups), copies, {SIZE: 7})
        bare.run(body)
        assert bare.races


# ---------------------------------------------------------------- the check of what was placed


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs(), st.data())
def test_a_barrier_that_is_missing_is_not_proved(body: Stmt, data: st.DataObject) -> None:
    """What is placed is proved. Without one of its barriers or waits, whatever races is not; nor is a wait for too few groups."""
    placement, copies = placed(body)
    assert not unproved(body, copies, placement)
    if not placement.before:
        return
    left_out = data.draw(st.sampled_from(list(placement.before)))
    fewer = Placement({s: n for s, n in placement.before.items() if s is not left_out}, placement.groups)
    late = Placement({s: MAX_TRACKED if s is left_out else n for s, n in placement.before.items()}, placement.groups)
    for changed in (fewer, late):
        if not unproved(body, copies, changed):
            for n in range(7):
                blk = Block(changed, copies, {SIZE: n})
                blk.run(body)
                assert not blk.races


def test_a_barrier_that_some_threads_pass_by_is_not_proved() -> None:
    """Under a condition that each thread decides for itself."""
    mine, a = Buffer("mine", "int64", (1,), "register"), Buffer("a", "float32", (1, THREADS), "shared")
    first = loop("set_a", THREADS, lambda t: store(a, (0, t), 1.0), "thread.x")
    body = block(first, If(mine[0] < 1, use("use", a, 0)))
    placement, copies = placed(body)
    assert len(placement.before) == 1 and unproved(body, copies, placement) == list(placement.before)


# ---------------------------------------------------------------- what threads exchange through global memory


@needs_nvrtc
def test_what_another_thread_writes_is_read_behind_the_barrier() -> None:
    """The compiler may move loads of `__restrict__` pointers across barriers, and did: on a GPU some threads read an old mean."""
    mean, y = Buffer("mean", "float32", (1,)), Buffer("y", "float32", (64,))
    first = If(as_expr(SIZE) > 5, store(mean, (0,), X[0, 0] * 2.0))
    then = loop("t", 64, lambda t: store(y, (t,), X[t, 1] - mean[0]), "thread.x")
    text, _ = emit_kernel(Kernel("k", (X, mean, y), (mean, y), (SIZE,), block(first, then)), CudaTarget.parse("cuda"))
    assert "const float* __restrict__ x" in text and "float* mean" in text and "float* __restrict__ y" in text
    ptx = nvrtc.compile_text(text, "sm_80").ptx.decode()
    assert ptx.index("bar.sync") < ptx.index("ld.global.f32")
