"""Long loops end soon after their run is stopped; short ones do not ask."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest

from tcomp.codegen.llvm.checkpoints import UNCHECKED, interval, work
from tcomp.codegen.llvm.entry import emit_program
from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import compile_ir
from tcomp.ir import expr as E, te
from tcomp.ir.loops import PARALLEL, VECTORIZED, Accumulate, Allocate, Buffer, For, Stmt, While, block, loop, store
from tcomp.ir.program import Call, Program, Ref, Repeat
from tcomp.runtime.native_code import Call as NativeCall
from tests.codegen.jit import HOST, kernel, load_objects
from tests.codegen.test_llvm import python_pool

N = E.dim("n", 0)
A, OUT, ROW = Buffer("a", "float32", (16,)), Buffer("out", "float32", (16,)), Buffer("row", "float32", (16,), "register")


def lanes(target: Buffer, source: Buffer) -> Stmt:
    return loop("v", 16, lambda v: store(target, (v,), target[v] + source[v]), VECTORIZED)


def endless(body: Stmt, name: str = "i") -> Stmt:
    return loop(name, N, lambda i: body)


SUM = te.sum(te.placeholder((4,), "float32")[0], te.reduce_axis(4)).attr[0]
BODIES = {
    "small iterations": endless(lanes(OUT, A)),
    "a register sum": loop("z", 1, lambda z: Allocate(ROW, block(endless(lanes(ROW, A)), lanes(OUT, ROW)))),
    "large iterations": endless(loop("j", 1 << 14, lambda j: lanes(OUT, A))),
    "nested": endless(endless(lanes(OUT, A), "k")),
    "an inner loop that is empty": endless(loop("j", N - N, lambda j: lanes(OUT, A))),
    "while": While(OUT[0] * OUT[0] >= 0.0, lanes(OUT, A)),
    "parallel": loop("p", 4, lambda p: endless(lanes(OUT, A)), PARALLEL),
    "a parallel loop again and again": endless(loop("p", 4, lambda p: store(OUT, (p,), OUT[p] + A[p]), PARALLEL)),
    "one element": endless(Accumulate(OUT, (E.as_expr(0),), A[0], SUM)),
}


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_a_long_loop_ends_when_its_run_is_stopped(name: str, pooled: bool) -> None:
    address = load_objects(compile_ir(emit_kernel(kernel("k", [A], [OUT], BODIES[name], [N]), HOST), HOST))("k")
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)
    pool, _, _keep = python_pool(2)
    call = NativeCall(pool=ctypes.addressof(pool) if pooled else None)
    a, out = np.ones(16, np.float32), np.zeros(16, np.float32)
    run = threading.Thread(target=function, args=(ctypes.byref(call), a.ctypes.data, out.ctypes.data, 1 << 50), daemon=True)
    run.start()
    time.sleep(0.02)
    assert run.is_alive()
    call.status = -1
    run.join(60)
    assert not run.is_alive()


def test_a_program_stops_between_its_kernels() -> None:
    one = Buffer("one", "int64", (1,))
    count = kernel("count", [], [one], store(one, (0,), one[0] + 1))
    i = E.loop_var("i", 1 << 62)
    steps = (Repeat(i, 1 << 62, (Call("count", (Ref("output", 0, 0),), (), "count"),), None),)
    objects = (compile_ir(emit_program(Program((), 0, ((1,),), steps), HOST), HOST), compile_ir(emit_kernel(count, HOST), HOST))
    entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(load_objects(*objects)("tcomp_run"))
    out = np.zeros(1, np.int64)
    outputs = (ctypes.c_void_p * 1)(out.ctypes.data)
    call, status = NativeCall(outputs=ctypes.addressof(outputs)), list[int]()
    run = threading.Thread(target=lambda: status.append(entry(ctypes.byref(call))), daemon=True)
    run.start()
    while not out[0]:
        time.sleep(0.001)
    call.status = -1
    run.join(60)
    assert status == [-1]


def test_loops_that_are_short_for_certain_do_not_ask() -> None:
    short = loop("i", 1000, lambda i: loop("j", 100, lambda j: lanes(OUT, A)))
    assert "volatile" not in emit_kernel(kernel("k", [A], [OUT], short), HOST)
    bounded = loop("i", E.dim("m", 0, 512), lambda i: lanes(OUT, A))
    assert isinstance(bounded, For) and interval(bounded) is None


def test_work_between_tests_is_bounded() -> None:
    body = lanes(OUT, A)
    each = work(body)
    assert each is not None
    long = endless(body)
    assert isinstance(long, For) and work(long) is None
    every = interval(long)
    assert every is not None and 1 < every and every * each <= UNCHECKED
    outer = endless(long)
    assert isinstance(outer, For) and interval(outer) == 1
