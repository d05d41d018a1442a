"""Which part of a product, or of a long sum, each core computes: rows in order where what is stored weighs more than what all cores read,
columns otherwise."""

from __future__ import annotations

import pytest

from tcomp.ir import te
from tcomp.ir.loops import PARALLEL, Allocate, For, If, Kernel, walk
from tcomp.schedules.cpu.default import schedule
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.lowering import lower
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget
from tests.schedules.programs import Program
from tests.schedules.running import expected, interpreted, native


def product(m: int, k: int, n: int) -> Program:
    a, b, r = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B"), te.reduce_axis(k, "k")
    return Program((a, b), (te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], r), name="C"),), {})


def depthwise(size: int, channels: int) -> Program:
    x, w = te.placeholder((size + 2, size + 2, channels), name="x"), te.placeholder((3, 3, channels), name="w")
    p, q = te.reduce_axis(3, "p"), te.reduce_axis(3, "q")
    body = te.compute((size, size, channels), lambda i, j, c: te.sum(x[i + p, j + q, c] * w[p, q, c], [p, q]), name="y")
    return Program((x, w), (body,), {})


def columns(rows: int, count: int) -> Program:
    x, r = te.placeholder((rows, count), name="x"), te.reduce_axis(rows, "r")
    return Program((x,), (te.compute((count,), lambda c: te.sum(x[r, c], r), name="y"),), {})


def scheduled(p: Program, cores: int, l2: str = "1M", **decisions: bool) -> Schedule:
    target = CpuTarget.parse(f"cpu -march=x86_64 -mcpu=haswell -l1=32K -l2={l2} -cores={cores}")
    return schedule(lower("p", p.inputs, p.outputs), target, Knobs(decisions))


def shared(kernel: Kernel) -> list[tuple[str, int]]:
    """The loops over threads that compute the result: (name, iterations)."""
    loops = [(str(s.var), s.extent) for s in walk(kernel.body) if isinstance(s, For) and s.kind == PARALLEL and isinstance(s.extent, int)]
    return [(name, n) for name, n in loops if name[:2] in ("C.", "y.")]


def test_each_core_has_a_part_of_the_rows_where_these_weigh_more() -> None:
    for p in (product(1024, 64, 256), depthwise(56, 64)):
        for cores in (2, 4):
            ((axis, parts),) = shared(scheduled(p, cores).kernel)
            assert parts == cores and axis in ("C.0.o", "y.0.o")


def test_cores_share_columns_where_the_weights_weigh_more_than_few_rows() -> None:
    ((axis, _), *_) = shared(scheduled(product(32, 512, 1024), 2).kernel)
    assert axis.startswith("C.1.o")


def test_rows_that_cannot_be_divided_come_one_after_the_other() -> None:
    ((axis, _), *_) = shared(scheduled(product(1023, 64, 256), 2).kernel)
    assert axis.startswith("C.0.o")


def test_a_column_alone_does_not_keep_the_rows_from_the_threads() -> None:
    """They used to share a loop of one iteration, that over columns, which stood outside of the rows."""
    assert ("C.0.o", 964) in shared(scheduled(product(12541, 32, 8), 2, **{"C.acc.rows_in_order": False}).kernel)


@pytest.mark.parametrize("cores", [1, 2])
def test_rows_that_no_cache_holds_come_in_parts(cores: int) -> None:
    """Of 512 elements: 1024 of them are 2 MiB, of which a part takes no more than 0.6 of the second-level cache."""
    ((axis, parts),) = shared(scheduled(product(1024, 512, 256), cores).kernel)
    assert (axis, parts) == ("C.0.o", 4)
    ((axis, _), *_) = shared(scheduled(product(1024, 512, 256), cores, l2="8M").kernel)
    assert axis == ("C.0.o" if cores > 1 else "C.1.o")


@pytest.mark.parametrize(("rows", "parts"), [(25088, 98), (2688, 8), (2 * 2401, 14)])
def test_rows_are_not_only_cut_into_halves(rows: int, parts: int) -> None:
    """Of 448 elements, of which the second-level cache holds 351 rows: halves of 12544 would be 392, and stayed as they were."""
    assert shared(scheduled(product(rows, 448, 256), 2).kernel) == [("C.0.o", parts)]


def test_rows_that_nothing_divides_come_in_parts_of_which_the_last_is_smaller() -> None:
    """361 pixels of 8 images, of 728 channels: no tile of 6 to 16 rows divides a part but all of them. 11 parts of 252 rows, and 116."""
    s = scheduled(product(2888, 728, 728), 1)
    loops = [(str(x.var), x.extent) for x in walk(s.kernel.body) if isinstance(x, For) and str(x.var).startswith("C.0.o")]
    assert loops == [("C.0.o", 11)] and not s.kernel.notes
    for p in (product(2888, 728, 40), product(300, 728, 728)):
        assert "C.0.o" not in [name for name, _ in shared(scheduled(p, 1).kernel)]


@pytest.mark.parametrize(("l3", "parts"), [("4M", 8), ("64M", 2)])
def test_rows_of_which_too_few_are_cached_come_in_parts_from_memory(l3: str, parts: int) -> None:
    """256 rows of 1024 elements would be 1 MiB: in parts, they stay in the last-level cache, unless all of them do."""
    target = CpuTarget.parse(f"cpu -march=x86_64 -mcpu=haswell -l1=32K -l2=1M -l3={l3} -cores=2")
    p = product(2048, 1024, 256)
    assert shared(schedule(lower("p", p.inputs, p.outputs), target).kernel) == [("C.0.o", parts)]


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(
    "p", [product(512, 32, 40), product(512, 32, 37), product(1022, 16, 40), product(1680, 16, 40), product(2021, 17, 101)]
)
def test_parts_of_rows_compute_the_same(p: Program, cores: int) -> None:
    s = scheduled(p, cores, l2="64K")
    assert not s.kernel.notes and shared(s.kernel)[0][1] >= 2
    for got, want in zip(native(p, s.kernel), expected(p), strict=True):
        p.same(got, want)


@pytest.mark.parametrize(("depth", "tile", "waiting"), [(64, (4, 24), []), (888, (6, 2, 8), [(98, 16)])])
def test_a_part_may_have_a_tail(depth: int, tile: tuple[int, ...], waiting: list[tuple[int, ...]]) -> None:
    """98 rows of each core: tiles that divide them, of 14 or 7 rows and one vector, load more than they multiply where there are 16
    registers. Sums that wait for the next block of a long reduction are those of a part: no test is left inside of the sum."""
    p = product(196, depth, 336)
    s = scheduled(p, 2, l2="512K")
    assert not s.kernel.notes and shared(s.kernel)[0] == ("C.0.o", 2)
    _, *found = (x.buffer for x in walk(s.kernel.body) if isinstance(x, Allocate))  # the first one are the packed columns
    assert [b.shape for b in found if b.scope == "register"] == [tile, tile] and [b.shape for b in found if b.scope == "global"] == waiting
    assert not waiting or not any(isinstance(x, If) for x in walk(s.kernel.body))
    for got, want in zip(native(p, s.kernel), expected(p), strict=True):
        p.same(got, want)


@pytest.mark.parametrize("cores", [2, 4])
@pytest.mark.parametrize("count", [1, 40, 96])
def test_each_core_sums_up_the_rows_that_it_stored(cores: int, count: int) -> None:
    """Columns shared among cores came from the caches of each other, to which the next kernel then wrote slowly."""
    p = columns(1 << 14, count)
    s = scheduled(p, cores)
    if count > 1:
        assert shared(s.kernel)[0] == ("y.p.0.o", cores)
    for got, want in zip(native(p, s.kernel), expected(p), strict=True):
        p.same(got, want)


def test_sums_that_cannot_be_divided_among_cores_or_are_short() -> None:
    for p, cores in ((columns((1 << 14) + 1, 96), 2), (columns(1 << 14, 96), 1), (columns(64, 96), 2)):
        assert "y.p" not in str(scheduled(p, cores).kernel)


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("p", [product(30, 7, 40), product(13, 5, 50), depthwise(6, 20), depthwise(7, 9)])
def test_all_ways_compute_the_same(p: Program, in_order: bool, cores: int) -> None:
    s = scheduled(p, cores, **{"C.acc.rows_in_order": in_order, "y.acc.rows_in_order": in_order})
    assert not s.kernel.notes
    for run in (interpreted, native):
        for got, want in zip(run(p, s.kernel), expected(p), strict=True):
            p.same(got, want)
