"""The machine model: counts against programs counted by hand, estimates where more work must take more time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from tcomp import te
from tcomp.calibration import bandwidth, peak_flops
from tcomp.codegen.llvm.math import ELEMENTARY
from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr
from tcomp.ir.loops import Buffer, If, Kernel, loop, store
from tcomp.ops.bilinear import winograd_input, winograd_output
from tcomp.schedules import Schedule
from tcomp.schedules.cost.cpu import estimate
from tcomp.schedules.cost.roofline import cost_of, cpu_roof, gpu_roof, operations, work
from tcomp.schedules.cpu import default as cpu
from tcomp.schedules.instructions import fma_tile
from tcomp.target import CpuTarget, CudaTarget
from tests.codegen.jit import expand
from tests.schedules.programs import programs

TARGET = CpuTarget.parse("cpu -mcpu=skylake-avx512")


def gemm(m: int, n: int, k: int) -> Schedule:
    a, b = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B")
    x = te.reduce_axis(k, name="k")
    return Schedule([a, b, te.compute((m, n), lambda i, j: te.sum(a[i, x] * b[x, j], axis=x), name="C")])


def tiled(rows: int, vectors: int, n: int = 256) -> Schedule:
    s = gemm(n, n, n)
    s.cache_write("C", "T")
    outer, row = s.split("C.0", rows)
    panel, columns = s.split("C.1", 16 * vectors)
    vector, lane = s.split(columns, 16)
    s.reorder(panel, outer, row, vector, lane)
    s.compute_at("T", outer, "register")
    sums, sum_lane = s.split("C.j", 16)
    s.reorder("C.k", "C.i", sums, sum_lane)
    for x in ("C.i", sums, row, vector):
        s.unroll(x)
    for x in (sum_lane, lane):
        s.vectorize(x)
    return s


# ---------------------------------------------------------------- counted by hand


def test_product() -> None:
    kernel = gemm(6, 10, 7).kernel
    assert operations(kernel) == {"fma": 6 * 10 * 7, "add": 0, "mul": 0, "div": 0, "special": 0, "other": 0}
    todo = work(kernel)
    assert (todo.flops, todo.slots, todo.divisions, todo.bytes) == (2 * 420, 420, 0, 4 * (6 * 7 + 7 * 10 + 6 * 10))
    assert todo.narrow == 0


@pytest.mark.parametrize(
    ("left", "right", "total", "share"),
    [("uint8", "int8", "int32", 4), ("int16", "int8", "int32", 2), ("bfloat16", "bfloat16", "float32", 2)],
)
def test_products_of_narrow_numbers_have_slots_of_their_own(left: str, right: str, total: str, share: int) -> None:
    a, b, k = te.placeholder((6, 8), left, name="A"), te.placeholder((8, 10), right, name="B"), te.reduce_axis(8, name="k")
    c = te.compute((6, 10), lambda i, j: te.sum(E.cast(a[i, k], total) * E.cast(b[k, j], total), axis=k), name="C")
    todo, size = work(Schedule([a, b, c]).kernel), {"uint8": 1, "int8": 1}
    assert (todo.flops, todo.slots, todo.narrow) == (2 * 480, 0, 480 // share)
    assert todo.bytes == 48 * size.get(left, 2) + 80 * size.get(right, 2) + 4 * 60
    lanes, tiles = (cpu_roof(CpuTarget.parse(f"cpu -mcpu={name}")) for name in ("cascadelake", "sapphirerapids"))
    assert lanes.narrow == lanes.slots and tiles.narrow == 8 * tiles.slots  # of AMX: 16 x 16 sums of four products in 16 cycles


def test_strided_convolution_reads_what_its_windows_cover() -> None:
    x, w = te.placeholder((3, 11, 11), name="X"), te.placeholder((5, 3, 2, 2), name="W")
    c, r, s = (te.reduce_axis(n, name=name) for n, name in ((3, "c"), (2, "r"), (2, "s")))
    y = te.compute((5, 4, 4), lambda o, i, j: te.sum(x[c, i * 3 + r, j * 3 + s] * w[o, c, r, s], axis=(c, r, s)), name="Y")
    todo = work(Schedule([x, w, y]).kernel)
    assert todo.flops == 2 * 5 * 4 * 4 * 3 * 2 * 2
    assert todo.bytes == 4 * (3 * 8 * 8 + 5 * 3 * 2 * 2 + 5 * 4 * 4)  # in each direction two of three pixels


def test_softmax() -> None:
    x, (m, n) = te.placeholder((4, 9), name="X"), (4, 9)
    k, l = te.reduce_axis(n, name="k"), te.reduce_axis(n, name="l")
    top = te.compute((m,), lambda i: te.max(x[i, k], axis=k), name="top")
    e = te.compute((m, n), lambda i, j: te.exp(x[i, j] - top[i]), name="e")
    total = te.compute((m,), lambda i: te.sum(e[i, l], axis=l), name="total")
    kernel = Schedule([x, te.compute((m, n), lambda i, j: e[i, j] / total[i], name="Y")]).kernel
    exp = 29
    assert operations(kernel) == {"fma": 0, "add": 3 * m * n, "mul": 0, "div": m * n, "special": m * n, "other": 0}
    todo = work(kernel)
    assert (todo.flops, todo.divisions, todo.bytes) == (m * n * (3 + 1 + exp), m * n, 2 * 4 * m * n)


def test_cases_count_what_they_have_in_common_once() -> None:
    x = te.placeholder((8, 2), name="X")

    def case(p: Expr, i: Expr) -> Expr:
        """The sum, the difference and the first of two products."""
        a, b = x[i, 0] * 3.0, x[i, 1] * 5.0
        return E.select(te.equal(p, 0), a + b, E.select(te.equal(p, 1), a - b, a))

    each = Schedule([x, te.compute((3, 8), case, name="Y")]).kernel
    within = Schedule([x, te.compute((24,), lambda j: case(j % 3, j // 3), name="Y")]).kernel
    apart = Schedule([x, te.compute((24,), lambda j: case(j // 8, j % 8), name="Y")]).kernel
    for kernel in (each, within, apart):
        todo = work(kernel)
        assert (todo.flops, todo.slots, todo.bytes) == (8 * 4, 8 * 4, 4 * (16 + 24))
    of_itself = Schedule([x, te.compute((8, 2), lambda i, j: E.select(te.equal(j, 0), x[i, j] * 3.0, x[i, j] * 5.0), name="Y")]).kernel
    assert work(of_itself).flops == 8 * 2
    together = te.compute((8, 2), lambda i, j: E.select(te.equal(i, 0), x[i, j], x[i, j] * 3.0) + x[(i + j) % 8, 1] * 5.0, name="Y")
    assert work(Schedule([x, together]).kernel).flops == 8 * 2 * 3 - 2
    k = te.reduce_axis(2, name="k")
    summed = te.compute((8,), lambda i: te.sum(E.select(te.equal(i % 2, 0), x[i, k], x[i, k] * 3.0), axis=k), name="Y")
    assert work(Schedule([x, summed]).kernel).flops == 8 * 2 + 4 * 2
    of_data = Schedule(
        [x, te.compute((8, 2), lambda i, j: E.select(te.equal(x[i, j], 0.0), x[i, j] * 3.0, x[i, j] * 5.0), name="Y")]
    ).kernel
    assert work(of_data).flops == 8 * 2 * 2


def test_the_transforms_of_winograd_take_the_operations_of_their_matrices() -> None:
    """B' x B of F(2, 3), of four sums in each direction for 4 points, and A' x A, of four sums for 2 pixels."""
    x, p = te.placeholder((1, 8, 10, 10), name="X"), te.placeholder((4, 4, 1, 4, 4, 8), name="P")
    tiles = work(Schedule([x, winograd_input(x, 2, (3, 3))]).kernel)
    assert tiles.flops == 16 * 8 * (4 * 4 + 4 * 4)
    pixels = work(Schedule([p, winograd_output(p, 2, (8, 8))]).kernel)
    assert pixels.flops == 16 * 8 * (4 * 4 + 2 * 4)


def test_triangular_stencil_under_a_condition() -> None:
    a, b = Buffer("A", "float64", (20, 20)), Buffer("B", "float64", (20, 20))

    def cell(i: Expr, j: Expr) -> If:
        return If(0 < j, store(b, (i, j), a[i, j] + a[i, j - 1]))

    kernel = Kernel("stencil", (a, b), (b,), (), loop("i", 20, lambda i: loop("j", i + 1, lambda j: cell(i, j))))
    pairs = 20 * 19 // 2
    assert operations(kernel)["add"] == pairs
    todo = work(kernel)
    assert (todo.flops, todo.slots, todo.bytes) == (pairs, 2 * pairs, 8 * (pairs + 19 + pairs))


def test_symbolic_dims_stay_symbolic() -> None:
    m = te.var("m")
    a, b = te.placeholder((m, 8), name="A"), te.placeholder((8, 4), name="B")
    k = te.reduce_axis(8, name="k")
    kernel = Schedule([a, b, te.compute((m, 4), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")]).kernel
    todo = work(kernel)
    assert str(todo.flops) == "m * 64" and str(todo.bytes) == "m * 48 + 128"
    for n in (1, 7, 300):
        assert estimate(kernel, TARGET, {m: n}).counts["flops"] == 64 * n


def test_rows_of_a_table_count_as_often_as_they_are_asked_for() -> None:
    table, ids = te.placeholder((5000, 16), name="table"), te.placeholder((6,), "int64", name="ids")
    kernel = Schedule([table, ids, te.compute((6, 16), lambda i, j: table[ids[i], j], name="Y")]).kernel
    assert work(kernel).bytes == 6 * 16 * 4 + 6 * 8 + 6 * 16 * 4


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", sorted(ELEMENTARY))
def test_costs_of_functions_are_those_of_their_polynomials(op: str, dtype: str) -> None:
    x, y = (E.var(name, dtype=dtype) for name in "xy")
    e = E.binary(op, x, y) if op == "pow" else E.unary(op, x)
    cost = cost_of(e)
    expanded = [n for n in E.walk(expand(e, CpuTarget.parse("cpu -mcpu=haswell"))) if n.args]
    assert cost is not None and cost.kind == "special"
    if (op, dtype) == ("pow", "float32"):  # partly in float32, which the table does not know
        assert len(expanded) < cost.flops < 1.5 * len(expanded)
        return
    assert cost.flops == pytest.approx(len(expanded), abs=3)
    divisions = sum(1 for n in expanded if n.op in ("div", "sqrt"))
    assert cost.divisions == divisions * (2 if any(n.dtype == "float64" for n in expanded) else 1)


# ---------------------------------------------------------------- scheduled


def test_instructions_of_a_register_tile() -> None:
    """Four rows of two vectors: in each step along k two vectors and four scalars are loaded for eight multiply-adds."""
    counts = estimate(tiled(4, 2).kernel, TARGET).counts
    tiles, steps = 256 * 256 // (4 * 32), 256
    assert counts["operations.fma"] == 256**3
    assert counts["loads.vector"] == tiles * steps * 2 and counts["loads.scalar"] == tiles * steps * 4
    assert counts["stores.vector"] == 256 * 256 / 16 and counts["accumulators"] == 8 and counts["spills"] == 0


def test_machine_instructions_count_as_what_they_are() -> None:
    """The same tile as one instruction: its loops are lanes and copies, whatever their kind."""
    s = gemm(24, 64, 32)
    s.cache_write("C", "acc")
    rows, row = s.split("C.0", 6)
    columns, column = s.split("C.1", 32)
    s.reorder(rows, columns, row, column)
    s.compute_at("acc", columns, "register")
    _, inner = s.split("C.k", 4)
    s.reorder("C.k.o", inner, "C.i", "C.j")
    s.tensorize(inner, fma_tile(6, 2, 4, "avx512"))
    counts = estimate(s.kernel, TARGET).counts
    assert counts["loads.vector"] == 8 * 32 * 2 and counts["operations.fma"] == 24 * 64 * 32
    assert counts["accumulators"] == 12


def test_a_tile_beyond_the_registers_spills() -> None:
    assert estimate(tiled(16, 4).kernel, TARGET).features["spills"] > 0
    assert estimate(tiled(8, 2).kernel, TARGET).features["spills"] == 0
    assert estimate(tiled(8, 2).kernel, CpuTarget.parse("cpu -mcpu=haswell")).features["spills"] > 0


def test_reuse_in_registers_and_lanes_is_predicted_to_pay() -> None:
    times = [estimate(s.kernel, TARGET).time for s in (tiled(8, 2), tiled(2, 1), tiled(1, 1), gemm(256, 256, 256))]
    assert times == sorted(times)


@pytest.mark.parametrize("larger", [(512, 256, 256), (256, 512, 256), (256, 256, 512)])
def test_more_work_takes_more_time(larger: tuple[int, int, int]) -> None:
    small, large = (estimate(gemm(*size).kernel, TARGET) for size in ((256, 256, 256), larger))
    assert small.bound < large.bound and small.time < large.time
    assert all(small.seconds[name] <= large.seconds[name] for name in small.seconds)


def test_a_better_machine_takes_no_more_time() -> None:
    kernel = gemm(300, 300, 300).kernel
    base = estimate(kernel, TARGET)
    for better in ("-l1=64K", "-l2=4M", "-l3=64M"):
        assert estimate(kernel, CpuTarget.parse(f"{TARGET} {better}")).time <= base.time
    assert estimate(kernel, CpuTarget.parse("cpu -mcpu=haswell")).bound > base.bound


def test_threads_divide_the_work_as_far_as_it_can_be_divided() -> None:
    s = tiled(8, 2)
    s.parallel("C.1.o")  # 8 panels
    one, two, three, eight = (estimate(s.kernel, TARGET, threads=n) for n in (1, 2, 3, 8))
    assert one.time > two.time > three.time > eight.time
    assert two.counts["balance"] == 1 and three.counts["balance"] == pytest.approx(8 / 9)
    assert one.bound == pytest.approx(8 * eight.bound, rel=0.5)


def test_features_have_stable_names_and_are_finite() -> None:
    first, second = (estimate(s.kernel, TARGET).features for s in (tiled(4, 2), Schedule(gemm(3, 5, 7).kernel)))
    assert list(first) == list(second)
    assert all(math.isfinite(x) and x >= 0 for x in (*first.values(), *second.values()))


@settings(max_examples=40, deadline=None)
@given(programs())
def test_any_program_has_an_estimate(program) -> None:
    """Before and after the default schedule; the bound is never above the time."""
    from tcomp.schedules.lowering import lower

    plain = lower("kernel", program.inputs, program.outputs)
    for kernel in (plain, cpu.schedule(plain, TARGET).kernel):
        found = estimate(kernel, TARGET, program.dims, threads=4)
        assert 0 <= found.bound <= found.time and math.isfinite(found.time)
        assert "predicted" in str(found)


# ---------------------------------------------------------------- machines


def test_every_processor_has_rates() -> None:
    from tcomp.machines import CORES, CUDA_ARCHITECTURES, FEATURES

    assert CORES.keys() == {cpu for cpus in FEATURES.values() for cpu in cpus}
    for arch in CUDA_ARCHITECTURES:
        gpu = gpu_roof(CudaTarget.parse(f"cuda -arch={arch}"))
        assert gpu.slots > 1e11 and gpu.memories[-1][1] > 1e11
    for line in ("cpu -mcpu=haswell", "aarch64", "cpu -march=aarch64 -mcpu=neoverse-v2"):
        top = cpu_roof(CpuTarget.parse(line), 2)
        rates = [rate for _, rate in top.memories]
        assert rates == sorted(rates, reverse=True)


def test_a_roof_is_arithmetic_or_memory() -> None:
    top = cpu_roof(TARGET)
    assert top.seconds(1e9, 0, 1e3)[1] == "arithmetic" and top.seconds(1e3, 0, 1e9)[1] == "memory"
    assert top.seconds(1e6, 1e6, 0)[0] == 1e6 / top.divisions


def test_the_machine_measures_itself() -> None:
    host = CpuTarget.host()
    assert 1e8 < peak_flops(host, 1e-4) < 1e13
    assert 1e7 < bandwidth(host, host.l1 // 2) < 1e13
    assert np.isfinite(bandwidth(host, 1 << 16, 2))


def test_prefetches_cost_what_they_ask_for_in_vain() -> None:
    plain, near, far = tiled(6, 2), tiled(6, 2), tiled(6, 2)
    near.prefetch("B", "C.k", 4)
    far.prefetch("B", "C.k", 128)
    none, few, many = (estimate(s.kernel, TARGET).features for s in (plain, near, far))
    times = 256 * 256 / 6 / 32 * 256 * 2  # tiles, iterations, vectors
    assert none["prefetches"] == 0 and few["prefetches"] == many["prefetches"] == pytest.approx(times, rel=0.02)
    assert few["prefetches.missed"] == pytest.approx(times * 4 / 256, rel=0.02) and many["prefetches.missed"] == pytest.approx(
        times / 2, rel=0.02
    )
    assert none["seconds.registers"] < few["seconds.registers"] < many["seconds.registers"] and none["seconds"] <= many["seconds"]


def test_prefetches_of_symbolic_sizes_cost_what_those_of_known_ones_do() -> None:
    def prefetched(rows: Dim) -> Schedule:
        A, k = te.placeholder((rows, 8), name="A"), te.reduce_axis(rows, "k")
        s = Schedule(te.compute((8,), lambda i: te.sum(A[k, i], k), name="B"))
        s.reorder("B.k", "B.i")
        s.vectorize("B.i")
        s.prefetch("A", "B.k", 4)
        return s

    n = te.var("n")
    assert estimate(prefetched(n).kernel, TARGET, {n: 64}).features == estimate(prefetched(64).kernel, TARGET).features
