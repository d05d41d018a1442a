"""Machine code between inaccessible pages: a fault is found and named, and models have none. The whole conformance suite so:
`python -m tests.conformance --guarded`."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import tcomp
from tcomp.ir import expr as E
from tcomp.ir.loops import Buffer, For, store
from tests.codegen.jit import compile_kernel, kernel
from tests.conformance.suite import between_guards as execute
from tests.models import nets
from tests.runtime.guarded import between_guards, run_guarded, spread


@pytest.mark.parametrize(("shift", "at_start", "what"), [(1, False, "a read 4 bytes behind x"), (-1, True, "a read 4 bytes before x")])
def test_a_stray_read_is_named(shift: int, at_start: bool, what: str) -> None:
    x, y, i = Buffer("x", "float32", (5,)), Buffer("y", "float32", (5,)), E.loop_var("i", 5)
    straying = compile_kernel(kernel("k", [x], [y], For(i, 5, store(y, (i,), x[i + shift]))))
    with between_guards({"x": np.arange(5, dtype=np.float32), "y": np.zeros(5, np.float32)}, at_start) as (placed, faults):
        straying(*placed)
        assert placed[1].tolist() == [0, 1, 2, 3, 4][shift:] + [0] if shift > 0 else [0, 0, 1, 2, 3]
    assert [fault.partition(" (")[0] for fault in faults] == [what.replace("4 bytes behind", "1 bytes behind")]


def test_a_stray_write_is_named_even_in_the_padding() -> None:
    memset = ctypes.CDLL(None).memset
    memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    with between_guards({"b": np.zeros(100, np.uint8)}) as (placed, faults):
        memset(placed[0].ctypes.data, 1, 101)
    assert faults == ["a write 1 bytes behind b (100 bytes)"]
    with between_guards({"b": np.zeros(100, np.uint8)}, at_start=True) as (placed, faults):
        memset(placed[0].ctypes.data, 1, 101)
    assert faults == ["a write beside b (100 bytes), in its padding"]


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
@pytest.mark.parametrize("stride", [-1, 1, 2, 3, 4, 5])
def test_strided_vectors_read_nothing_but_what_lies_between_their_elements(lanes: int, stride: int) -> None:
    count = (lanes - 1) * abs(stride) + 1
    x, y, i = Buffer("x", "float32", (count,)), Buffer("y", "float32", (lanes,)), E.loop_var("i", lanes)
    read = x[i * stride] if stride > 0 else x[lanes - 1 - i]
    strided = compile_kernel(kernel("k", [x], [y], For(i, lanes, store(y, (i,), read), "vectorized")))
    given = {"x": np.arange(count, dtype=np.float32), "y": np.zeros(lanes, np.float32)}
    for at_start in (False, True):
        with between_guards(given, at_start) as (placed, faults):
            strided(*placed)
            assert placed[1].tolist() == [*range(count)][::stride]
        assert not faults


def test_a_model_stays_inside() -> None:
    model = nets.residual_net()
    rng = np.random.default_rng(0)
    with spread() as regions:
        module = tcomp.compile(model, dims={"n": 1}, threads=1)
    assert regions
    inputs = {spec.name: rng.standard_normal([int(d) for d in spec.shape]).astype(spec.dtype) for spec in module.inputs}
    wanted = module.run(inputs)
    for at_start in (False, True):
        outputs, faults = run_guarded(module, inputs, at_start, regions)
        assert not faults and all(np.array_equal(wanted[name], outputs[name]) for name in wanted)


def test_the_level_of_the_conformance_suite() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    from onnx import TensorProto, helper

    nodes = [helper.make_node("CumSum", ["x", "a"], ["y"])]
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3]), helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])]
    axis = helper.make_tensor("a", TensorProto.INT64, [], [1])
    model = helper.make_model(helper.make_graph(nodes, "g", infos[:1], infos[1:], [axis]), opset_imports=[helper.make_opsetid("", 17)])
    np.testing.assert_array_equal(execute(model, {"x": x}, {})["y"], np.cumsum(x, 1))
