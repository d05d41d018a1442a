"""Affine orders: random programs in random orders compute the same, and what is refused says why."""

from __future__ import annotations

import islpy as isl
import pytest

from tcomp.errors import ScheduleError
from tcomp.ir.loops import Allocate, Buffer, For, Kernel, Stmt, block, loop, store, walk
from tcomp.ir.polyhedral.model import Instance, model
from tcomp.ir.text.parser import parse_kernel
from tcomp.ir.verify.loops import verify_kernel
from tcomp.schedules import Schedule
from tests.schedules.dice import Dice, Seeded
from tests.schedules.random_loops import imperative
from tests.schedules.subject import Subject, compare, interpreted

A, B, C = (Buffer(name, "float32", (20, 20)) for name in "ABC")


def kernel(body: Stmt) -> Kernel:
    return Kernel("k", (A, B, C), (B, C), (), body)


def random_order(dice: Dice, instances: tuple[Instance, ...]) -> tuple[str, str]:
    """The order of the text with its loops interchanged, skewed, shifted, reversed and tiled; sometimes the places as well."""
    depth = instances[0].order.dim(isl.dim_type.out)
    times = [f"t{d}" for d in range(depth)]
    loops = list(range(1, depth, 2))
    moved = dice.shuffled(loops) if dice.flip() else loops
    new = list(times)
    for d, source in zip(loops, moved, strict=True):
        new[d] = f"{dice.pick(1, 1, 1, -1)} t{source}"
        if dice.one_in(3):
            new[d] += f" + {dice.pick(-1, 1, 2)} t{dice.pick(*loops)}"
        if dice.one_in(3):
            new[d] += f" + {dice.pick(-1, 1)} t0"
    tiled = [f"floor(({new[d]}) / {dice.number(2, 3)})" if dice.one_in(2) else "0" for d in loops]
    if dice.flip():
        new = [*new[1:2], new[0], *new[2:]]
    order = isl.Map(f"{{ [{', '.join(times)}] -> [{', '.join([*tiled, *new])}] }}")
    text = isl.UnionMap("{}")
    for x in instances:
        text = text.union(isl.UnionMap.from_map(x.order.apply_range(order)))
    return str(text), " ".join(f"c{d}" for d in range(len(tiled) + len(new)))


def test_random_programs_in_random_orders() -> None:
    accepted = 0
    for seed in range(200):
        dice = Seeded(f"affine {seed}")
        subject = Subject(*imperative(dice))
        verify_kernel(subject.kernel)
        instances = model(subject.kernel.body).instances
        if not instances or instances[0].order.dim(isl.dim_type.out) < 3:
            continue
        s = Schedule(subject.kernel)
        try:
            s.affine(None, *random_order(dice, instances))
        except ScheduleError:
            assert s.kernel is subject.kernel
            continue
        accepted += 1
        verify_kernel(s.kernel)
        compare(f"seed {seed}", s.kernel, interpreted(subject, s.kernel), subject.plain)
        again = Schedule(subject.kernel)
        again.replay(s.trace)
        assert str(again) == str(s)
    assert accepted > 30


def test_a_temporary_of_an_iteration_is_shared_by_none() -> None:
    """The temporary gets a dimension for each loop that comes between its definition and its use."""
    t = Buffer("t", "float32", (1,))
    body = loop("i", 6, lambda i: Allocate(t, block(store(t, (0,), A[i, 0]), loop("j", 5, lambda j: store(B, (i, j), t[0] + A[i, j])))))
    s = Schedule(kernel(body))
    s.affine(None, "{ S0[i] -> [0, i, 0]; S1[i, j] -> [1, j, i] }", "S0: _ i _; S1: _ j i")
    (made,) = (x.buffer for x in walk(s.kernel.body) if isinstance(x, Allocate))
    assert made.shape == (6, 1)
    s = Schedule(kernel(body))
    s.affine(None, "{ S0[i] -> [-i, 0, 0]; S1[i, j] -> [-i, 1, j] }", "i _ j", parallel="i")
    assert [x.buffer.shape for x in walk(s.kernel.body) if isinstance(x, Allocate)] == [(1,)]
    assert isinstance(s.kernel.body, For) and s.kernel.body.kind == "parallel"


NEST = loop("i", 8, lambda i: loop("j", 8, lambda j: store(B, (i + 1, j + 1), B[i, j + 1] + B[i + 1, j])))


@pytest.mark.parametrize(
    ("order", "names", "why"),
    [
        ("{ S0[i, j] -> [i, -j] }", "a b", "touch B"),
        ("{ S0[i, j] -> [i - j, j] }", "a b", "touch B"),
        ("{ S0[i, j] -> [i] }", "a", "same time vector"),
        ("{ S0[i, j] -> [i, j] : i < 7 }", "a b", "not a function of all instances"),
        ("{ S0[i, j] -> [i, j]; S0[i, j] -> [i, j + 1] }", "a b", "not a function of all instances"),
        ("{ S1[i, j] -> [i, j] }", "a b", "0 time vectors for S0"),
        ("{ S0[i, j] -> [i, j] }", "a", "names"),
        ("nonsense", "a b", "not a relation"),
    ],
)
def test_orders_that_are_refused(order: str, names: str, why: str) -> None:
    s = Schedule(kernel(NEST))
    with pytest.raises(ScheduleError, match=why):
        s.affine(None, order, names)
    assert str(s.kernel) == str(kernel(NEST))


@pytest.mark.parametrize("name", ["front", "i"])
def test_parallel_loops_are_proved(name: str) -> None:
    s = Schedule(kernel(NEST))
    with pytest.raises(ScheduleError, match="parallel"):
        s.affine(None, "{ S0[i, j] -> [i + j, j] }", "front j", parallel=name)
    s.affine(None, "{ S0[i, j] -> [i + j, j] }", "front j", parallel="j")
    assert [x.kind for x in walk(s.kernel.body) if isinstance(x, For)] == ["serial", "parallel"]


def pair(first: int, second: int) -> Kernel:
    """Two statements: the second reads what the first wrote `first - second` iterations ago."""
    return kernel(loop("i", 8, lambda i: block(store(B, (i + first, 0), A[i, 0]), store(C, (i, 0), B[i + second, 0]))))


def test_fission_and_fusion() -> None:
    s = Schedule(pair(1, 1))
    first, second = s.fission("i")
    assert (first, second) == ("i", "i.1")
    s.fuse_loops(first, second)
    assert str(s) == str(pair(1, 1))
    with pytest.raises(ScheduleError, match="change places"):
        Schedule(pair(0, 1)).fission("i")
    s = Schedule(kernel(block(loop("i", 8, lambda i: store(B, (i, 0), A[i, 0])), loop("j", 8, lambda j: store(C, (j, 0), B[j + 1, 0])))))
    with pytest.raises(ScheduleError, match="change places"):
        s.fuse_loops("i", "j")


def test_shift_and_skew() -> None:
    s = Schedule(pair(0, 1))
    with pytest.raises(ScheduleError, match="touch B"):
        s.shift("i", "C", 1)
    s = Schedule(pair(1, 0))
    with pytest.raises(ScheduleError, match="touch B"):
        s.shift("i", "C", -2)
    s.shift("i", "C", 2)
    s = Schedule(kernel(NEST))
    s.skew("i", "j", -1)
    subject = Subject(kernel(NEST), {})
    compare("skewed", s.kernel, interpreted(subject, s.kernel), subject.plain)
    with pytest.raises(ScheduleError, match="does not stand inside"):
        s.skew("j", "i", 1)


@pytest.mark.parametrize("otherwise", [" else {\n B[i] = 1u8\n }", ""])
def test_a_condition_that_its_own_statements_change_is_tested_once(otherwise: str) -> None:
    """`affine` gives each statement the condition for itself: the second would see what the first wrote."""
    text = "kernel k(A: uint8[8], B: uint8[8]) -> (B) {\n for i in 0..8 {\n if B[i] < 2u8 {\n B[i] = A[i]\n A2 }OTHERWISE\n }\n}"
    text = text.replace("OTHERWISE", otherwise).replace("A2", "" if otherwise else "B[i] = B[i] + 3u8\n")
    s = Schedule(parse_kernel(text))
    with pytest.raises(ScheduleError, match="each statement gets the condition for itself"):
        s.shift("i", "B", 1)
    s = Schedule(parse_kernel(text.replace("B[i] < 2u8", "A[i] < 2u8")))
    s.shift("i", "B", 1)
