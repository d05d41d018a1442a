"""The cases of the ONNX backend test suite, and what becomes of one.

A case is a model with data sets of inputs and expected outputs. It is compiled and run. Shape operands (an axis, a pad width, a slice's
start) are inputs in many one-node cases, and are known before a run; where one is needed earlier, or inputs are sequences or optionals, of
which the file does not say how many tensors they hold, and the case is refused for it, it is compiled once more as a user would have to
do: with those inputs fixed to the values of the data set, and with the shapes of those tensors.
"""

from __future__ import annotations

import glob
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from tcomp.errors import InputError, UnsupportedError

KINDS = ("real", "simple", "pytorch-converted", "pytorch-operator", "node")
PASSED, FIXED, REFUSED, WRONG, ERROR, CRASHED, HUNG = "passed", "fixed", "refused", "wrong", "error", "crashed", "hung"
OUTCOMES = {
    PASSED: "passed",
    FIXED: "passed with shape operands fixed",
    REFUSED: "refused",
    WRONG: "wrong",
    ERROR: "failed with another error",
    CRASHED: "crashed",
    HUNG: "hung",
}

Arrays = Mapping[str, np.ndarray]
Execute = Callable[[ModelProto, Arrays, Mapping[str, Any]], Arrays]  # (model, inputs, options of compiling it) -> outputs by name

# Operands that must be known when the model is compiled: (operator, positions).
SHAPE_OPERANDS: Mapping[str, tuple[int, ...]] = {
    "Loop": (0, 1), "MelWeightMatrix": (0, 1, 2, 3, 4), "SequenceInsert": (2,), "SequenceErase": (1,), "SplitToSequence": (1,),
}  # fmt: skip

# Operators whose numbers are those of the reference only where a random mask keeps everything: ONNX leaves the generator open.
RANDOM = {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


@dataclass(frozen=True)
class Result:
    """What became of a case: one of `OUTCOMES`, why, and the seconds it took."""

    case: str
    outcome: str
    detail: str
    seconds: float


class Suite:
    """All cases by name, real models first (they take longest)."""

    def __init__(self) -> None:
        with np.errstate(all="ignore"):  # making the expected values overflows on purpose
            self.cases: dict[str, TestCase] = {case.name: case for kind in KINDS for case in load_model_tests(kind=kind)}

    def run(self, name: str, execute: Execute, tolerance: tuple[float, float] = (0.0, 0.0)) -> Result:
        """Compile and run one case by `execute`, and compare within the suite's tolerances or wider ones (rtol, atol)."""
        start = time.perf_counter()
        try:
            outcome, detail = _run(self.cases[name], execute, tolerance)
        except AssertionError as error:
            outcome, detail = WRONG, " ".join(str(error).split())[:300]
        except UnsupportedError as error:
            outcome, detail = REFUSED, _refusal(error)
        except Exception:  # noqa: BLE001  whatever else a compiler can throw is a finding, not the end of the run
            outcome, detail = ERROR, "".join(traceback.format_exc().splitlines(True)[-9:])
        return Result(name, outcome, detail, time.perf_counter() - start)


def _run(case: TestCase, execute: Execute, tolerance: tuple[float, float]) -> tuple[str, str]:
    model = case.model if case.model is not None else onnx.load(_model_path(case))
    outcome = PASSED
    for inputs, expected in _data_sets(case, model):
        try:
            found = execute(model, inputs, {})
        except (UnsupportedError, InputError) as error:
            dims = _empty_dims(model, inputs)
            if isinstance(error, InputError) and not dims:
                raise
            fixed = {n: inputs[n] for n in _shape_operands(model) if isinstance(inputs.get(n), np.ndarray)}
            held = _held(model, inputs)
            if not fixed and not held and not dims:
                raise
            given = {n: x for n, x in inputs.items() if n not in fixed and isinstance(x, np.ndarray)} | held
            found = execute(model, given, {"values": fixed, "shapes": {n: x.shape for n, x in held.items()}, "dims": dims})
            outcome = FIXED
        outputs = [x for o, e in zip(model.graph.output, expected, strict=True) for x in _output(o.name, e, found)]
        expected = [x for e in expected for x in (e if isinstance(e, list) else [e])]
        try:
            Runner.assert_similar_outputs(expected, outputs, max(case.rtol, tolerance[0]), max(case.atol, tolerance[1]))
        except AssertionError:
            if not RANDOM.intersection(node.op_type for node in model.graph.node):
                raise
            _assert_equal_where_kept(expected, outputs)
    return outcome, ""


def _held(model: ModelProto, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors in inputs that are sequences or optionals, by the names of the inputs that stand for them."""
    found = {i.name: inputs.get(i.name) for i in model.graph.input if not i.type.HasField("tensor_type")}
    tensors = {n: x for n, x in found.items() if isinstance(x, np.ndarray)}
    return tensors | {f"{name}.{n}": x for name, items in found.items() if isinstance(items, list) for n, x in enumerate(items)}


def _empty_dims(model: ModelProto, inputs: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Dims that are 0 in the data, with a range that has it: by default they are 1 or more."""
    sizes = ((d.dim_param, n) for i in model.graph.input if isinstance(x := inputs.get(i.name), np.ndarray)
             for d, n in zip(i.type.tensor_type.shape.dim, x.shape, strict=False))  # fmt: skip
    return {name: (0, 1 << 20) for name, size in sizes if name and size == 0}


def _output(name: str, expected: Any, found: Mapping[str, Any]) -> list[Any]:
    """The tensors of an output, which is a sequence where the suite has a list."""
    if not isinstance(expected, list):
        return [found[name]]
    assert f"{name}.{len(expected)}" not in found, f"more than {len(expected)} elements of {name}"
    return [found[f"{name}.{n}"] for n in range(len(expected))]


def _assert_equal_where_kept(expected: list[Any], found: list[Any]) -> None:
    """What zeros and other values, drawn by two generators, have in common: types, and the values where neither drew a zero."""
    for e, f in zip(expected, found, strict=True):
        assert (f.dtype, f.shape) == (e.dtype, e.shape), f"{f.dtype}{f.shape} instead of {e.dtype}{e.shape}"
        kept = (e != 0) & (f != 0)
        np.testing.assert_allclose(f[kept], e[kept], rtol=1e-3)


def _shape_operands(model: ModelProto) -> set[str]:
    """Inputs that shape operands are made of: directly, or by arithmetic on scalars and integers (in expanded function bodies)."""
    needed: set[str] = set()
    direct: set[str] = set()
    for node in reversed(model.graph.node):
        operands = {node.input[i] for i in SHAPE_OPERANDS.get(node.op_type, ()) if i < len(node.input)}
        direct |= operands
        needed |= operands
        if needed.intersection(node.output) and node.op_type not in ("Shape", "Size"):
            needed.update(node.input)
    small = set()
    for info in model.graph.input:
        rank, kind = len(info.type.tensor_type.shape.dim), info.type.tensor_type.elem_type
        if rank == 0 or (rank == 1 and kind in (TensorProto.INT64, TensorProto.INT32)):
            small.add(info.name)
    return direct | (needed & small)


def _refusal(error: UnsupportedError) -> str:
    """One line: what was refused, and why."""
    text = error.where if "nodes cannot be compiled" in error.what else error.what + (f": {error.why}" if error.why else "")
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return lines[0][:200] if lines else error.what


# ---------------------------------------------------------------- data


def _model_path(case: TestCase) -> str:
    if case.model_dir is not None:
        return os.path.join(case.model_dir, "model.onnx")
    # "onnx/backend/test/data/light/..." inside of the installed package; nothing is downloaded
    return os.path.join(os.path.dirname(os.path.dirname(onnx.__file__)), case.url)


def _data_sets(case: TestCase, model: ModelProto) -> Iterator[tuple[Arrays, list[Any]]]:
    initializers = {t.name for t in model.graph.initializer}
    infos = [i for i in model.graph.input if i.name not in initializers]
    if case.data_sets is not None:
        for inputs, outputs in case.data_sets:
            names = [i.name for i in model.graph.input]
            given = {n: _array(x) for n, x in zip(names, inputs, strict=False)}
            yield given, [_array(x) for x in outputs]
    elif case.model_dir is None:
        prefix = os.path.splitext(_model_path(case))[0]
        data = {i.name: Runner.generate_dummy_data(i) for i in infos}
        yield data, [_load(f"{prefix}_output_{n}.pb", o.type) for n, o in enumerate(model.graph.output)]
    else:
        for folder in sorted(glob.glob(os.path.join(case.model_dir, "test_data_set*"))):
            yield (
                {i.name: _load(path, i.type) for n, i in enumerate(model.graph.input)
                 if os.path.exists(path := os.path.join(folder, f"input_{n}.pb"))},
                [_load(os.path.join(folder, f"output_{n}.pb"), o.type) for n, o in enumerate(model.graph.output)],
            )  # fmt: skip


def _array(x: Any) -> Any:
    if isinstance(x, TensorProto):
        return numpy_helper.to_array(x)
    return np.asarray(x) if isinstance(x, np.generic) else x


def _load(path: str, kind: onnx.TypeProto) -> Any:
    with open(path, "rb") as file:
        content = file.read()
    if kind.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(content))
    if kind.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(content))
    return numpy_helper.to_array(TensorProto.FromString(content))


# ---------------------------------------------------------------- the two levels


def by_interpreter(model: ModelProto, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """Import, then the NumPy reference of the graph."""
    from tcomp.frontends.onnx.importer import import_model
    from tcomp.ir.interpreters.graph import evaluate_graph

    graph = import_model(model, **options)
    return evaluate_graph(graph, {v.name: inputs[v.name] for v in graph.inputs})


def by_native_code(model: ModelProto, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """The whole pipeline."""
    import tcomp

    return tcomp.compile(model, **options).run(dict(inputs))


def between_guards(model: ModelProto, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """The whole pipeline; every buffer ends at an inaccessible page, then starts at one, with the same results."""
    import tcomp
    from tests.runtime.guarded import run_guarded, spread

    with spread() as regions:
        module = tcomp.compile(model, threads=1, **options)
    outputs, faults = run_guarded(module, inputs, False, regions)
    again, more = run_guarded(module, inputs, True, regions)
    different = [name for name, array in outputs.items() if array.tobytes() != again[name].tobytes()]
    assert not faults and not more and not different, f"out of bounds: {'; '.join([*faults, *more])}; not the same: {different}"
    return outputs


LEVELS: Mapping[str, Execute] = {"interpreter": by_interpreter, "native": by_native_code, "guarded": between_guards}
