"""Random loop programs: native code == the scalar interpreter, bit for bit, between inaccessible pages."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.ir import expr as E, te
from tcomp.ir.expr import Expr, cast, select
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Accumulate, Allocate, Buffer, For, If, Kernel, Stmt, block, store, walk
from tcomp.ir.reducers import Reducer
from tcomp.target import CpuTarget, Target
from tests.codegen.jit import BODY, HOST, PARALLEL_FOR, compile_kernel
from tests.runtime.guarded import between_guards

N = E.dim("n", 1, 9)  # the symbolic size, also an extent of loops
SIZE = 40  # elements of an input


@PARALLEL_FOR
def parallel_for(pool: int, body: int, closure: int, extent: int) -> None:
    for begin in reversed(range(0, extent, 2)):
        BODY(body)(closure, begin, min(begin + 2, extent))


POOL = (ctypes.c_void_p * 1)(ctypes.cast(parallel_for, ctypes.c_void_p))


class Programs:
    """Draws a kernel. Lanes and threads never touch each other's results, so that any order gives the same."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw, self.names, self.vectorized = draw, 0, False
        self.dtype = draw(st.sampled_from(["float32", "int32", "int64", "uint8", "float16", "bool"]))
        self.inputs = [Buffer(f"in{n}", self.dtype, (SIZE,)) for n in range(2)]
        self.outputs: list[Buffer] = []
        self.reducers = [te.max, te.min] if self.dtype != "bool" else [te.any, te.all]
        if self.dtype not in ("bool", "float16"):
            self.reducers.append(te.sum)

    def kernel(self) -> Kernel:
        body = self.nest((), self.draw(st.integers(1, 3)))
        return Kernel("random", (*self.inputs, *self.outputs), tuple(self.outputs), (N,), body)

    def pick(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def nest(self, loops: tuple[tuple[Expr, int, str], ...], depth: int) -> Stmt:
        """Statements inside `loops`, each (variable, largest extent, kind)."""
        if depth == 0:
            return block(*(self.guarded(loops) for _ in range(self.draw(st.integers(1, 2)))))
        kinds = ["serial", "unrolled", "parallel"] + ["vectorized"] * (not self.vectorized) * 2
        kind = str(self.pick(*kinds))
        extent: E.Dim = self.pick(1, 2, 4, 8, 16) if kind == "vectorized" else self.pick(1, 2, 3, 5)
        if kind in ("serial", "parallel") and self.draw(st.booleans()):
            extent = N
        if kind == "vectorized":
            self.vectorized = True
        self.names += 1
        v = E.loop_var(f"i{self.names}", extent)
        return For(v, extent, self.nest((*loops, (v, extent if isinstance(extent, int) else 9, kind)), depth - 1), kind)

    def guarded(self, loops: tuple[tuple[Expr, int, str], ...]) -> Stmt:
        s = self.update(loops)
        match self.pick("plain", "if", "else"):
            case "if":
                return If(self.condition(loops), s)
            case "else":
                return If(self.condition(loops), s, If(self.condition(loops), self.update(loops), self.update(loops)))
        return s

    def update(self, loops: tuple[tuple[Expr, int, str], ...]) -> Stmt:
        """A store or an accumulation into an output of its own, in which every iteration of a vectorized or parallel loop has its place."""
        kept = [item for item in loops if item[2] in ("vectorized", "parallel") or self.draw(st.booleans())]
        kept = self.draw(st.permutations(kept))
        scale, shift = self.draw(st.integers(1, 3)), self.draw(st.integers(0, 2))
        shape = [extent * scale + shift for _, extent, _ in kept] or [1]
        out = Buffer(f"out{len(self.outputs)}", self.dtype, shape)
        self.outputs.append(out)
        indices = tuple(v * scale + shift for v, _, _ in kept) or (E.const(0),)
        reducer = self.reducer()
        match self.pick("store", "accumulate", "temporary", "moved"):
            case "store":
                return store(out, indices, self.value(loops, 2))
            case "accumulate":
                return Accumulate(out, indices, self.value(loops, 2), reducer)
            case "moved":
                return self.moved(loops, out, indices)
        self.names += 1
        t, k = Buffer(f"t{self.names}", self.dtype, (3,), "register"), E.loop_var(f"k{self.names}", 3)
        inner = (*loops, (k, 3, "serial"))
        return Allocate(
            t,
            block(
                For(k, 3, store(t, (k,), self.value(inner, 1)), str(self.pick("serial", "unrolled"))),
                For(k, 3, Accumulate(t, (E.const(1),), self.value(inner, 1), reducer), str(self.pick("serial", "unrolled"))),
                store(out, indices, self.combine(t[0], t[1])),
            ),
        )

    def moved(self, loops: tuple[tuple[Expr, int, str], ...], out: Buffer, indices: tuple[Expr, ...]) -> Stmt:
        """What is read at a place that is changed where something holds of what was there before."""
        self.names += 1
        at = Buffer(f"at{self.names}", "int64", (1,), "register")
        place = sum((v for v, _, _ in loops if self.draw(st.booleans())), at[0])  # within SIZE
        test = E.not_equal(self.inputs[0][place], self.inputs[1][place])
        read = self.combine(self.inputs[0][place], self.inputs[1][place])
        first, then = (store(at, (E.const(0),), E.const(self.draw(st.integers(0, 3)))) for _ in range(2))
        return Allocate(at, block(first, If(test, then), store(out, indices, read)))

    def reducer(self) -> Reducer:
        function = self.pick(*self.reducers)
        return function(te.placeholder((4,), self.dtype)[0], te.reduce_axis(4)).attr[0]

    def index(self, loops: tuple[tuple[Expr, int, str], ...]) -> Expr:
        total: Expr = E.const(self.draw(st.integers(-3, 20)))
        for v, _, _ in loops:
            total = total + v * self.draw(st.integers(-2, 3))
        match self.pick("affine", "affine", "divided", "symbolic"):
            case "divided":
                return total // self.draw(st.integers(1, 5)) + total % self.draw(st.integers(1, 5))
            case "symbolic":
                return total * N - N
        return total

    def read(self, loops: tuple[tuple[Expr, int, str], ...]) -> Expr:
        """In bounds by a guard, by a remainder, or by clamping."""
        i, buffer = self.index(loops), self.pick(*self.inputs)
        assert isinstance(buffer, Buffer)
        match self.pick("guard", "remainder", "clamp", "indirect"):
            case "guard":
                return select(E.all_of([0 <= i, i < SIZE]), buffer[i], E.const(3, self.dtype))
            case "remainder":
                return buffer[i % SIZE]
            case "clamp":
                return buffer[E.maximum(E.minimum(i, SIZE - 1), 0)]
        place = cast(self.inputs[0][i % SIZE], "int64") + 1
        return select(E.all_of([0 <= place, place < SIZE]), buffer[place], E.const(1, self.dtype))

    def combine(self, a: Expr, b: Expr) -> Expr:
        if self.dtype == "bool":
            return E.binary(str(self.pick("and", "or", "xor")), a, b)
        return E.binary(str(self.pick("add", "sub", "min", "max")), a, b)

    def value(self, loops: tuple[tuple[Expr, int, str], ...], depth: int) -> Expr:
        if depth == 0:
            return self.read(loops)
        a, b = self.value(loops, depth - 1), self.value(loops, depth - 1)
        match self.pick("combine", "select", "cast"):
            case "select":
                return select(self.condition(loops), a, b)
            case "cast" if loops and self.dtype != "bool":
                return self.combine(a, cast(loops[-1][0], self.dtype))
        return self.combine(a, b)

    def condition(self, loops: tuple[tuple[Expr, int, str], ...]) -> Expr:
        match self.pick("index", "symbolic", "data"):
            case "index":
                return self.index(loops) < self.draw(st.integers(-2, 12))
            case "symbolic":
                return self.index(loops) <= N
        return E.not_equal(self.read(loops), self.read(loops))


@st.composite
def kernels(draw: st.DrawFn) -> Kernel:
    return Programs(draw).kernel()


def compare(kernel: Kernel, n: int, target: Target, pool: int | None) -> None:
    rng = np.random.default_rng(n)
    arrays = {b: rng.integers(0, 2 if b.dtype == "bool" else 50, [int(d) for d in b.shape]).astype(b.dtype) for b in kernel.buffers}
    given, native = {b.name: a.copy() for b, a in arrays.items()}, compile_kernel(kernel, target)
    run_kernel(kernel, arrays, {N: n})
    for at_start in (False, True):
        with between_guards(given, at_start) as (placed, faults):
            native(*placed, n, pool=pool)
            found = [a.copy() for a in placed]
        assert not faults, f"{faults}, n = {n}\n{kernel}"
        for b, array in zip(kernel.buffers, found, strict=True):
            if b in kernel.outputs:
                np.testing.assert_array_equal(array, arrays[b], err_msg=f"{b.name}, n = {n}\n{kernel}")


@settings(max_examples=120, deadline=None, derandomize=True)
@given(kernels(), st.integers(1, 9), st.booleans())
def test_native_equals_interpreter(kernel: Kernel, n: int, threads: bool) -> None:
    compare(kernel, n, HOST, ctypes.addressof(POOL) if threads else None)


@pytest.mark.skipif(HOST.arch != "x86_64", reason="compiles for older processors of this architecture and runs the code")
@settings(max_examples=25, deadline=None, derandomize=True)
@given(kernels(), st.integers(1, 9), st.sampled_from(["cpu -mcpu=x86-64", "cpu -mcpu=haswell"]))
def test_native_equals_interpreter_on_older_processors(kernel: Kernel, n: int, line: str) -> None:
    target = CpuTarget.parse(line)
    if target.runs_on(HOST):
        compare(kernel, n, target, None)


def test_random_programs_are_varied() -> None:
    """The generator reaches every loop kind, masks and temporaries."""
    seen: set[str] = set()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(kernels())
    def look(kernel: Kernel) -> None:
        seen.update(s.kind for s in walk(kernel.body) if isinstance(s, For))
        seen.update(type(s).__name__ for s in walk(kernel.body))

    look()
    assert {"serial", "unrolled", "parallel", "vectorized", "If", "Allocate", "Store", "Accumulate"} <= seen
