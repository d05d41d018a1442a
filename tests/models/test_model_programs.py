"""The programs of whole models: their text reads back, and their interpreter, calling the same kernels, gives the same bits as the model."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import tcomp
from tcomp import pipeline
from tcomp.ir.dims import bind_dims
from tcomp.ir.expr import evaluate_int
from tcomp.ir.graph import Graph
from tcomp.ir.program import Branch, Program, Repeat, walk
from tcomp.ir.text.parser import parse_program
from tcomp.ir.verify.program import verify_program
from tcomp.packaging import assemble, collect_weights
from tcomp.runtime.native_code import Call
from tests.codegen.jit import BODY, PARALLEL_FOR, load_objects
from tests.ir.program_interpreter import run_program
from tests.models.test_small_nets import CASES


@PARALLEL_FOR
def parallel_for(pool: int, body: int, closure: int, extent: int) -> None:
    BODY(body)(closure, 0, extent)


POOL = (ctypes.c_void_p * 1)(ctypes.cast(parallel_for, ctypes.c_void_p))


def native(address: int) -> Callable[[Sequence[np.ndarray], Sequence[int]], None]:
    """A compiled kernel as the interpreter calls it."""

    def code(memory: Sequence[np.ndarray], scalars: Sequence[int]) -> None:
        types = [ctypes.c_void_p] * (1 + len(memory)) + [ctypes.c_int64] * len(scalars)
        ctypes.CFUNCTYPE(None, *types)(address)(ctypes.byref(Call(pool=ctypes.addressof(POOL))), *(m.ctypes.data for m in memory), *scalars)

    return code


def aligned(size: int) -> np.ndarray:
    """Bytes that start where vector accesses want them."""
    memory = np.zeros(size + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:size]


@pytest.mark.parametrize(("name", "kinds"), [("residual", set()), ("gru", {Repeat}), ("detector", {Branch}), ("transformer", set())])
def test_the_interpreter_does_what_the_model_does(name: str, kinds: set[type], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    weights: list[Any] = []

    def captured(*args: Any) -> Program:
        given[:] = [*args, assemble(*args)]
        return given[-1]

    def collected(graph: Graph) -> Any:
        weights[:] = collect_weights(graph)
        return weights

    monkeypatch.setattr(pipeline, "assemble", captured)
    monkeypatch.setattr(pipeline, "collect_weights", collected)
    proto, cases = CASES[name]
    module = tcomp.compile(proto)
    graph, _, compiled, _, _, program = given
    assert kinds <= {type(step) for step in walk(program.steps)}
    verify_program(program)
    again = parse_program(str(program))
    assert again == program and str(again) == str(program)

    address = load_objects(*{k.symbol: k.code for k in compiled.values()}.values())
    kernels = {k.symbol: native(address(k.symbol)) for k in compiled.values()}
    section = aligned(max((end for _, (_, end) in placed(*weights)), default=0))
    for weight, (begin, end) in placed(*weights):
        section[begin:end] = np.ascontiguousarray(weight).reshape(-1).view(np.uint8)
    for arrays in cases:
        inputs = [np.ascontiguousarray(arrays[v.name]) for v in graph.inputs]
        dims = bind_dims([(v.name, v.shape, a.shape) for v, a in zip(graph.inputs, inputs, strict=True)])
        shapes = [[evaluate_int(d, dims) for d in shape] for shape in program.output_shapes]
        outputs = [np.zeros(shape, v.dtype) for v, shape in zip(graph.outputs, shapes, strict=True)]
        run_program(again, kernels, inputs, outputs, section, [dims[d] for d in program.dims])
        wanted = module.run(arrays)
        for v, output in zip(graph.outputs, outputs, strict=True):
            assert output.tobytes() == wanted[v.name].tobytes()


def placed(named: Any, offsets: Any) -> list[tuple[np.ndarray, tuple[int, int]]]:
    """The elements of each weight, and where its bytes lie."""
    return [(np.asarray(w), (offset, offset + w.nbytes)) for (_, w), offset in zip(named, offsets.values(), strict=True)]
