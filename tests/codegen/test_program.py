"""The entry functions, run with kernels made by hand, do what the interpreter of programs does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.codegen.llvm import entry
from tcomp.codegen.llvm.entry import emit_copy, emit_program
from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import compile_ir
from tcomp.errors import IRError
from tcomp.ir import expr as E
from tcomp.ir.expr import Expr, cast
from tcomp.ir.loops import Buffer, Kernel, loop, store
from tcomp.ir.program import Branch, Call, Copy, Program, Ref, Repeat, SetIndex, calls
from tcomp.runtime.native_code import Call as NativeCall
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST, kernel, load_objects
from tests.ir.program_interpreter import interpreted, run_program

N = E.dim("n", 1, 1000)


@pytest.fixture(autouse=True, params=[entry.MANY_CALLS, 1], ids=["code", "tables"])
def many_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From how many calls in a row on they are tables."""
    monkeypatch.setattr(entry, "MANY_CALLS", request.param)


def elementwise(name: str, inputs: int, function: Any, dtype: str = "float32") -> Kernel:
    """out[i] = function(*inputs[i]) for i < n."""
    ins, out = [Buffer(f"a{k}", dtype, (N,)) for k in range(inputs)], Buffer("out", dtype, (N,))
    return kernel(name, ins, [out], loop("i", N, lambda i: store(out, (i,), function(*(b[i] for b in ins)))), [N])


ADD, DOUBLE = elementwise("add", 2, lambda a, b: a + b), elementwise("double", 1, lambda a: a * 2.0)
_count = Buffer("count", "int64", (1,)), Buffer("go", "bool", (1,))
BELOW = kernel("below", _count[:1], _count[1:], store(_count[1], (0,), _count[0][0] < N), [N])
_dim = Buffer("x", "float32", (N,)), Buffer("dim", "int64", (1,))
MEASURE = kernel("measure", _dim[:1], _dim[1:], store(_dim[1], (0,), cast(_dim[0][0], "int64")), [N])


class Model:
    def __init__(self, program: Program, kernels: Sequence[Kernel]) -> None:
        objects = [compile_ir(emit_kernel(k, HOST), HOST) for k in kernels]
        address = load_objects(compile_ir(emit_program(program, HOST), HOST, 0), compile_ir(emit_copy(HOST), HOST), *objects)
        self.program = program
        self.interpreted = {k.name: interpreted(k) for k in kernels}
        self.entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(address("tcomp_run"))
        self.profiled = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 3)(address("tcomp_run_profiled"))
        self.plan_entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(address("tcomp_plan"))

    def plan(self, *dims: int) -> list[int]:
        sizes = np.full(1 + sum(map(len, self.program.output_shapes)), -7, np.int64)
        self.plan_entry(np.array(dims, np.int64).ctypes.data, sizes.ctypes.data)
        return sizes.tolist()

    def run(
        self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], dims: Sequence[int] = (), ticks: np.ndarray | None = None
    ) -> list[int]:
        values = np.array([*dims, 0], np.int64)
        wanted = [a.copy() for a in outputs]
        after = run_program(self.program, self.interpreted, inputs, wanted, np.arange(16, dtype=np.float32), dims)
        workspace = np.zeros(self.plan(*dims)[0] + 64, np.uint8)
        weights = np.arange(16, dtype=np.float32)
        arrays = [(ctypes.c_void_p * (len(a) + 1))(*(x.ctypes.data for x in a), None) for a in (inputs, outputs)]
        parts = [ctypes.addressof(a) for a in arrays] + [a.ctypes.data for a in (weights, workspace, values)]
        call = ctypes.byref(NativeCall(*parts))
        self.status = self.entry(call) if ticks is None else self.profiled(call, ticks.ctypes.data, None)
        for got, array in zip(outputs, wanted, strict=True):
            np.testing.assert_array_equal(got, array)
        assert after == tuple(values[: len(dims)])
        return values[: len(dims)].tolist()


def out(index: int = 0, offset: E.Dim = 0) -> Ref:
    return Ref("output", index, offset)


def data(index: int = 0, offset: E.Dim = 0) -> Ref:
    return Ref("input", index, offset)


def work(offset: E.Dim) -> Ref:
    return Ref("workspace", 0, offset)


def floats(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal(n).astype(np.float32)


def test_calls_with_symbolic_offsets_and_weights() -> None:
    steps = (
        Call("double", (data(), work(0)), (N,), "first"),
        Call("add", (work(0), data(1), work(N * 4)), (N,), "second"),
        Call("add", (work(N * 4), Ref("weights", 0, 8), out()), (E.const(3),), "third"),
    )
    model = Model(Program((N,), N * 8, ((N, 2), (7,)), steps), [ADD, DOUBLE])
    assert model.plan(5) == [40, 5, 2, 7]
    a, b, y = floats(5), floats(5) + 1, np.zeros(5, np.float32)
    model.run([a, b], [y], [5])
    assert model.status == 0
    np.testing.assert_array_equal(y, np.concatenate([(a * 2 + b)[:3] + np.arange(2, 5, dtype=np.float32), np.zeros(2, np.float32)]))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_copy(size: int) -> None:
    model = Model(Program((N,), 0, ((N,),), (Copy(out(0, 1), data(0, 2), N),)), [])
    x, y = np.random.default_rng(0).integers(0, 256, size + 2).astype(np.uint8), np.full(size + 3, 99, np.uint8)
    model.run([x], [y], [size])
    np.testing.assert_array_equal(y, np.concatenate([[99], x[2:], [99, 99]]))


def test_branch() -> None:
    n = E.const(4)
    steps = (Branch(data(1, 2), (Call("double", (data(), out()), (n,), "yes"),), (Branch(data(1), (Copy(out(), data(), 8),), ()),)),)
    model = Model(Program((), 0, ((4,),), steps), [DOUBLE])
    x = floats(4)
    for flags, expected in (([0, 0, 7], x * 2), ([1, 1, 0], np.array([x[0], x[1], 0, 0])), ([0, 1, 0], np.zeros(4))):
        y = np.zeros(4, np.float32)
        model.run([x, np.array(flags, np.uint8)], [y])
        np.testing.assert_array_equal(y, expected.astype(np.float32))


def test_repeat_finds_slices_and_counts() -> None:
    """Row i of the output: row trips - 1 - i of the input, doubled; then the iteration number as bytes."""
    i = E.loop_var("i", N)
    row = 8
    steps = (
        Repeat(
            i,
            N,
            (Call("double", (data(0, (N - 1 - i) * row), out(0, i * row)), (E.const(2),), "row"), SetIndex(out(1, i * 8), i * 3)),
            None,
        ),
    )
    model = Model(Program((N,), 0, ((N, 2), (N,)), steps), [DOUBLE])
    for n in (0, 1, 5):
        x, y, z = floats(n * 2).reshape(n, 2), np.zeros((n, 2), np.float32), np.zeros(n, np.int64)
        model.run([x], [y, z], [n])
        np.testing.assert_array_equal(y, x[::-1] * 2)
        np.testing.assert_array_equal(z, np.arange(n) * 3)


def test_repeat_ends_when_its_condition_does() -> None:
    i = E.loop_var("i", N)
    body = (SetIndex(work(0), i + 1), Call("below", (work(0), work(8)), (E.const(3),), "go on"), SetIndex(out(), i))
    model = Model(Program((N,), 16, ((1,),), (Repeat(i, N, body, work(8)),)), [BELOW])
    for trips, last in ((1, 0), (2, 1), (3, 2), (100, 2)):
        y = np.full(1, -1, np.int64)
        model.run([], [y], [trips])
        assert y[0] == last


def test_dims_written_by_a_kernel_are_read_again() -> None:
    m = E.dim("m", 0, 50)
    steps = (
        Call("add", (data(), data(), work(0)), (m,), "before"),
        Call("measure", (data(1), Ref("dims", 0, 8)), (N,), "measure"),
        Call("double", (data(), out()), (m,), "after"),
    )
    model = Model(Program((N, m), 200, ((m, m + N),), steps, counted=((m, 50),)), [ADD, DOUBLE, MEASURE])
    assert model.plan(5, -1) == [200, 50, 55]
    assert model.plan(5, 3) == [200, 3, 8]
    x, y = floats(5), np.zeros(5, np.float32)
    assert model.run([x, np.full(5, 3, np.float32)], [y], [5, 1]) == [5, 3]
    np.testing.assert_array_equal(y, np.where(np.arange(5) < 3, x * 2, 0))


def test_profile() -> None:
    i = E.loop_var("i", 10)
    big = Call("double", (data(), out()), (E.const(1000),), "in a loop")
    skipped = Call("double", (data(), out()), (E.const(1000),), "skipped")
    last = Call("add", (data(), data(), out()), (E.const(1),), "last")
    steps = (Branch(data(1), (skipped,), ()), Repeat(i, 10, (big,), None), last)
    assert [c.label for c in calls(steps)] == ["skipped", "in a loop", "last"]
    model = Model(Program((), 0, ((1000,),), steps), [ADD, DOUBLE])
    ticks = np.zeros(3, np.int64)
    x, y = floats(1000), np.zeros(1000, np.float32)
    model.run([x, np.zeros(1, np.uint8)], [y], ticks=ticks)
    assert ticks[0] == 0 and ticks[1] > ticks[2] > 0
    before = ticks.copy()
    model.run([x, np.zeros(1, np.uint8)], [y], ticks=ticks)
    assert (ticks[1:] > before[1:]).all()


def test_tables_are_cut_where_slots_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets that only the run knows, more of them than a table has slots."""
    monkeypatch.setattr(entry, "SLOTS", 4)
    steps = [Call("double", (data(), work(N * 4 * (k % 3))), (N,), "work") for k in range(5)]
    steps += [Call("add", (work(N * 4 * (k % 3)), data(1, k * 4), out(k % 2, N * 4 * k)), (N,), "out") for k in range(7)]
    model = Model(Program((N,), N * 12, ((N, 7), (N, 7)), tuple(steps)), [ADD, DOUBLE])
    a, b = floats(5), floats(12)
    y, z = np.zeros((7, 5), np.float32), np.zeros((7, 5), np.float32)
    ticks = np.zeros(len(steps), np.int64)
    for counted in (None, ticks):
        model.run([a, b], [y, z], [5], counted)
        for k in range(7):
            np.testing.assert_array_equal((y, z)[k % 2][k], a * 2 + b[k : k + 5])
    assert (ticks > 0).all()


@pytest.mark.parametrize("target", ["aarch64", "cpu -mcpu=x86-64"])
def test_other_targets(target: str) -> None:
    steps = (Copy(out(), data(), N), Call("k", (data(),), (N,), "k"))
    assert (
        compile_ir(emit_program(Program((N,), N * 4, ((N,),), steps), CpuTarget.parse(target)), CpuTarget.parse(target))[:4] == b"\x7fELF"
    )


def test_refusals() -> None:
    unknown: Expr = E.dim("unknown")
    for steps, message in (
        ((Copy(Ref("heap", 0, 0), data(), 4),), "unknown memory `heap`"),
        ((Copy(out(), data(), unknown),), "`unknown`"),
        ((Call("k", (), (), "a"), Call("k", (data(),), (), "b")), "different parameters"),
    ):
        with pytest.raises(IRError, match=message):
            emit_program(Program((N,), 0, ((N,),), steps), HOST)


_BIG = E.dim("rows", 0), E.dim("columns", 0)
SIZES = Program(_BIG, _BIG[0] * 8, (), (), (_BIG[0] - 7, _BIG[0] * _BIG[1] * 4))


@pytest.fixture(scope="module")
def sizes() -> Model:
    return Model(SIZES, [])


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_sizes_that_do_not_fit_are_told(sizes: Model, rows: int, columns: int) -> None:
    fits = all(size < 2**63 for size in (rows * 8, rows * columns * 4))
    expected = -2 if not fits else -1 if rows < 7 else rows * 8
    assert sizes.plan(rows, columns) == [expected]
