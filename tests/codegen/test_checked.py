"""Indices out of range are reported: the first one, by the kernel that uses it, and never one that is not wanted."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import tcomp
from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import assembly, compile_ir
from tcomp.errors import InputError, OutOfRangeError
from tcomp.ir import expr as E
from tcomp.ir.expr import Expr, cast, checked, maximum, minimum, select
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import PARALLEL, SERIAL, VECTORIZED, Buffer, If, Kernel, Stmt, block, loop, store
from tcomp.runtime.native_code import Call
from tcomp.target import CpuTarget, Target
from tests.codegen.jit import HOST, kernel, load_objects
from tests.codegen.test_llvm import python_pool

N, COUNT = 10, 32
X, INDEX, OUT = Buffer("x", "float32", (N,)), Buffer("index", "int32", (COUNT,)), Buffer("out", "float32", (COUNT,))


def picked(i: Expr) -> Expr:
    at = cast(INDEX[i], "int64")
    return X[maximum(minimum(checked(at, N), N - 1), 0)]


KERNELS = {
    "serial": loop("i", COUNT, lambda i: store(OUT, (i,), picked(i)), SERIAL),
    "parallel": loop("i", COUNT, lambda i: store(OUT, (i,), picked(i)), PARALLEL),
    "vectorized": loop("i", COUNT // 8, lambda i: loop("v", 8, lambda v: store(OUT, (i * 8 + v,), picked(i * 8 + v)), VECTORIZED)),
}
HALF = {  # only the first 16 results are wanted
    "a branch": loop("i", COUNT, lambda i: If(i < 16, store(OUT, (i,), picked(i)), None)),
    "a selection": loop("i", COUNT, lambda i: store(OUT, (i,), select(i < 16, picked(i), 0.0))),
    "lanes of a selection": loop("v", COUNT, lambda v: store(OUT, (v,), select(v < 16, picked(v), 0.0)), VECTORIZED),
    "lanes of a branch": loop("v", COUNT, lambda v: If(v < 16, store(OUT, (v,), picked(v)), None), VECTORIZED),
    "one index for all lanes": loop(
        "v", 16, lambda v: store(OUT, (v,), select(v < cast(INDEX[31], "int64"), picked(E.as_expr(16)), 0.0)), VECTORIZED
    ),
}


def run(k: Kernel, index: np.ndarray) -> tuple[Call, np.ndarray]:
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(load_objects(compile_ir(emit_kernel(k, HOST), HOST))(k.name))
    pool, _, _keep = python_pool(2)
    call, out = Call(pool=ctypes.addressof(pool)), np.zeros(COUNT, np.float32)
    function(ctypes.byref(call), np.arange(N, dtype=np.float32).ctypes.data, index.ctypes.data, out.ctypes.data)
    return call, out


@pytest.mark.parametrize("wrong", [N, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("name", KERNELS)
def test_the_index_is_reported(name: str, wrong: int) -> None:
    k = kernel("k", [X, INDEX], [OUT], KERNELS[name])
    index = np.arange(COUNT, dtype=np.int32) % N
    call, out = run(k, index)
    assert call.status == 0
    np.testing.assert_array_equal(out, index)
    index[13] = wrong
    call, _ = run(k, index)
    assert (call.status, call.index, call.extent) == (1, wrong, N)
    arrays = {X: np.arange(N, dtype=np.float32), INDEX: index, OUT: np.zeros(COUNT, np.float32)}
    with pytest.raises(InputError, match=f"index {wrong} is out of range(.|\n)*{N} elements"):
        run_kernel(k, arrays, {})


@pytest.mark.parametrize("name", HALF)
def test_what_is_not_wanted_is_not_reported(name: str) -> None:
    k = kernel("k", [X, INDEX], [OUT], HALF[name])
    index = np.where(np.arange(COUNT) < 16, np.arange(COUNT) % N, 99).astype(np.int32)
    index[31] = -5
    call, out = run(k, index)
    assert call.status == 0
    arrays = {X: np.arange(N, dtype=np.float32), INDEX: index, OUT: np.zeros(COUNT, np.float32)}
    run_kernel(k, arrays, {})
    np.testing.assert_array_equal(out, arrays[OUT])
    index[:] = 99
    assert run(k, index)[0].status == 1


@pytest.mark.parametrize("moving", [False, True])
def test_what_stays_the_same_is_checked_once(moving: bool) -> None:
    """Checks leave the loops in which their index stays the same, and only these."""

    def row(i: Expr) -> Stmt:
        return loop("j", 8, lambda j: block(store(OUT, (i * 8 + j,), picked(i)), *[store(INDEX, (i,), INDEX[i] + 1)] * moving))

    k = Kernel("k", (X, INDEX, OUT), (INDEX, OUT) if moving else (OUT,), (), loop("i", COUNT // 8, row))
    lines = emit_kernel(k, HOST).splitlines()
    before = lines[: next(n for n, line in enumerate(lines) if "call void @tcomp_outside" in line)]
    assert sum(line.startswith("loop") for line in before) == (2 if moving else 1)
    index = np.full(COUNT, 2, np.int32)
    call, out = run(k, index)
    assert call.status == 0
    np.testing.assert_array_equal(out.reshape(-1, 8), np.broadcast_to(np.arange(2, 10) if moving else np.full(8, 2), (COUNT // 8, 8)))
    index[:] = 3 if moving else N  # in range at first, then not
    call, _ = run(k, index)
    assert (call.status, call.index, call.extent) == (1, N, N)


def test_short_loops_with_checks_are_unrolled() -> None:
    texts = {name: emit_kernel(kernel("k", [X, INDEX], [OUT], body), HOST) for name, body in KERNELS.items()}
    assert {name: "llvm.loop.unroll.count" in text for name, text in texts.items()} == {
        "serial": True,
        "parallel": True,
        "vectorized": False,
    }
    asm = assembly(texts["serial"], HOST)
    assert asm[: asm.index("tcomp_outside:")].count("tcomp_outside") >= 4


def test_no_check_where_the_range_is_known() -> None:
    i = E.loop_var("i", 10)
    assert checked(i, 10) is i
    assert checked(i + 1, 10) is not i + 1


@pytest.mark.parametrize("wrong", [5, -6, 2**40])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_model_says_where_and_which(wrong: int, threads: int) -> None:
    nodes = [helper.make_node("Gather", ["table", "ids"], ["rows"], "embed"), helper.make_node("Relu", ["rows"], ["y"], "act")]
    table = numpy_helper.from_array(np.arange(20, dtype=np.float32).reshape(5, 4), "table")
    ids, y = helper.make_tensor_value_info("ids", 7, ["n"]), helper.make_tensor_value_info("y", 1, ["n", 4])
    graph = helper.make_graph(nodes, "g", [ids], [y], [table])
    module = tcomp.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), threads=threads)
    right = np.array([0, 4, -5, -1, 2])
    np.testing.assert_array_equal(module.run({"ids": right})["y"], np.arange(20).reshape(5, 4)[right])
    with pytest.raises(InputError, match=f"out of range in embed(.|\n)*the index is {wrong}, and there are 5 elements"):
        module.run({"ids": np.array([0, 1, wrong, 2])})
    np.testing.assert_array_equal(module.run({"ids": right})["y"], np.arange(20).reshape(5, 4)[right])


ONE_PLACE = [
    "(float[1,4] t, int64[3] i) => (float[3,4] y) { y = Gather(t, i) }",
    "(float[1] t, int64 i) => (float y) { y = Gather(t, i) }",
    "(float[3,1,8] t, int64[5] i) => (float[3,5,8] y) { y = Gather<axis: int = 1>(t, i) }",
    "(float[4,1] t, int64[4,1] i) => (float[4,1] y) { y = GatherElements<axis: int = 1>(t, i) }",
    "(float[4,1] t, int64[3,2] i) => (float[3] y) { y = GatherND(t, i) }",
    "(float[1,4] t, int64[1,1] i, float[1,4] u) => (float[1,4] y) { y = ScatterND(t, i, u) }",
    "(float[1,4] t, int64[1,4] i, float[1,4] u) => (float[1,4] y) { y = ScatterElements(t, i, u) }",
    "(float[1,16] t, int64[32] i, float[16,16] w) => (float[32,16] y) { z = Gather(t, i) y = MatMul(z, w) }",
    "(float[1,16,8,8] t, int64[2] i, float[32,16,3,3] w) => (float[2,32,6,6] y) { z = Gather(t, i) y = Conv(z, w) }",
    "(float[1,16] t, int64[32] i) => (float[1,1] y) { z = Gather(t, i) y = ReduceSum(z) }",
]


@pytest.mark.parametrize("text", ONE_PLACE)
def test_there_is_one_place_only(text: str) -> None:
    """An axis of extent 1, of which all code that does not report takes the first place."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17]> g {text}')
    module = tcomp.compile(model)
    given = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in module.inputs}
    module.run(given)
    for wrong in (1, -2):
        given["i"] = np.full_like(given["i"], wrong)
        with pytest.raises(OutOfRangeError, match=f"the index is {wrong}, and there are 1 elements"):
            module.run(given)


QUOTIENT = """
<ir_version: 10, opset_import: ["" : 17]>
quotient (int32[n] x, int32[n] w) => (int32[n] y) {{
    [scale] two = Constant<value: tensor = int32 {{2}}>()
    [double] d = Mul(x, two)
    [half] q = {op}(d, w)
    [square] y = Mul(q, q)
}}"""


@pytest.mark.parametrize("op", ["Div", "Mod", "Mod<fmod: int = 1>"])
@pytest.mark.parametrize("count", [1, 37])
def test_a_division_by_zero_is_reported(op: str, count: int) -> None:
    head, _, attributes = op.partition("<")
    text = QUOTIENT.format(op=head).replace(f"{head}(", f"{head}{'<' * bool(attributes)}{attributes}(")
    model = onnx.parser.parse_model(text)
    module = tcomp.compile(model)
    x, w = np.arange(-5, count - 5, dtype=np.int32), np.arange(1, count + 1, dtype=np.int32)
    right = {"Div": np.trunc(2 * x / w), "Mod": np.mod(2 * x, w)}.get(op, np.fmod(2 * x, w)).astype(np.int32) ** 2
    np.testing.assert_array_equal(module.run({"x": x, "w": w})["y"], right)
    w[count // 2] = 0
    with pytest.raises(InputError, match="out of range in half(.|\n)*divided by zero") as caught:
        module.run({"x": x, "w": w})
    assert not isinstance(caught.value, OutOfRangeError)


def test_sizes_that_are_divided_stay_sizes() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 17]>
        g (float[n, m] x) => (float[a] y) {
            s = Shape(x)
            zero = Constant<value: tensor = int64[1] {0}>()
            one = Constant<value: tensor = int64[1] {1}>()
            three = Constant<value: tensor = float[1] {3.0}>()
            n1 = Gather(s, zero)
            m1 = Gather(s, one)
            q = Div(n1, m1)
            r = Mod(n1, m1)
            t = Add(q, r)
            y = Expand(three, t)
        }""")
    assert tcomp.compile(model).run({"x": np.zeros((7, 3), np.float32)})["y"].shape == (3,)


def test_gathers_do_not_wait_for_the_check() -> None:
    """With AVX-512, a mask of ones is made of k0, whatever it holds: what is written there last is waited for."""
    target = CpuTarget.parse("cpu -mcpu=znver4")
    text = assembly(emit_kernel(kernel("picked", [X, INDEX], [OUT], KERNELS["vectorized"]), target), target)
    assert re.search(r"kxnor\w\s+%k0, %k0, %k\d", text) and re.search(r"vpcmp\w*u[dq]\s.*%k[1-7]\n", text)
    assert not re.search(r"vpcmp\w+\s.*%k0\n", text)


def test_unchecked_code_clamps_and_tells_nothing() -> None:
    table = numpy_helper.from_array(np.arange(20, dtype=np.float32).reshape(5, 4), "table")
    ids, y = helper.make_tensor_value_info("ids", 7, ["n"]), helper.make_tensor_value_info("y", 1, ["n", 4])
    graph = helper.make_graph([helper.make_node("Gather", ["table", "ids"], ["y"])], "g", [ids], [y], [table])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    module = tcomp.compile(model, unchecked=True)
    np.testing.assert_array_equal(module.run({"ids": np.array([7, 1])})["y"], np.arange(20).reshape(5, 4)[[4, 1]])
    for checked_target in (Target.host(), Target.parse("cuda -arch=sm_80")):
        target = Target.parse(f"{checked_target} -unchecked")
        assert (str(target), Target.parse(str(target))) == (f"{checked_target} -unchecked", target)
