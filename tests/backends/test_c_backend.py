"""The backend of the tutorial, plain loops in C, on operators and networks: what the protocol asks for is enough for a target."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import tcomp
from tcomp.errors import CodegenError, InputError, IRError, OutOfRangeError, TargetError
from tcomp.ir import dtypes, expr as E
from tcomp.ir.dtypes import BITS, FLOATS, integer_range, is_float
from tcomp.ir.interpreters import semantics
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Accumulate, Buffer, Kernel, block, loop, store
from tcomp.ir.reducers import standard_reducers
from tcomp.ir.scalar_operators import BINARY, UNARY
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.runtime.native_code import open_library
from tests.codegen.test_checked import ONE_PLACE, QUOTIENT
from tests.conformance import report
from tests.conformance.suite import FIXED, PASSED, REFUSED, Arrays, Suite
from tests.models.test_small_nets import CASES, same

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)")

PAGE = Path(__file__).parents[2] / "tutorials" / "10_a_backend.py"
STRIDE = 10  # of the cases of the suite that have a C type for every element type, every so many
PARTS = 8  # tests that these are divided among
NARROW = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}


def c_backend(**options: str) -> Any:
    """The backend, from the tutorial as a module."""
    if "a_backend" not in sys.modules:
        spec = importlib.util.spec_from_file_location("a_backend", PAGE)
        assert spec is not None and spec.loader is not None
        sys.modules["a_backend"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["a_backend"])
    return sys.modules["a_backend"].CBackend(**options)


def by_c(model: onnx.ModelProto, inputs: Arrays, options: Mapping[str, Any]) -> Arrays:
    """The whole pipeline, for this backend."""
    return tcomp.Module.load(compile_model(model, CompileOptions(target=c_backend(), **options))[0]).run(dict(inputs))


def element_types(message: Any) -> Iterator[int]:
    """All element types that a model mentions."""
    for descriptor, value in message.ListFields():
        if (descriptor.name in ("elem_type", "data_type") and isinstance(value, int)) or (
            descriptor.name == "i" and message.name in ("to", "dtype")
        ):
            yield value
        elif descriptor.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from element_types(inner)


# ---------------------------------------------------------------- the page


@pytest.mark.parametrize("text", [ONE_PLACE[0], ONE_PLACE[4], ONE_PLACE[-1]])
def test_an_index_out_of_range_is_reported(text: str) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17]> g {text}')
    module = tcomp.Module(compile_model(model, CompileOptions(target=c_backend()))[0])
    given = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in module.inputs}
    for wrong in (1, -2):
        module.run(given)
        with pytest.raises(OutOfRangeError, match=f"the index is {wrong}, and there are 1 elements"):
            module.run(given | {"i": np.full_like(given["i"], wrong)})


def test_a_division_by_zero_is_reported() -> None:
    model = onnx.parser.parse_model(QUOTIENT.format(op="Div"))
    module, x = tcomp.Module(compile_model(model, CompileOptions(target=c_backend()))[0]), np.arange(1, 4, dtype=np.int32)
    np.testing.assert_array_equal(module.run({"x": x, "w": x})["y"], [4, 4, 4])
    with pytest.raises(InputError, match="out of range in half(.|\n)*divided by zero"):
        module.run({"x": x, "w": x - 2})


def test_the_backend_is_one_page() -> None:
    assert len(PAGE.read_text().splitlines()) <= 150


def test_a_missing_compiler_and_floats_of_16_bits_are_refused() -> None:
    buffer = Buffer("a", "float16", (4,))
    kernel = Kernel("f", (buffer,), (buffer,), (), store(buffer, [0], 1.0))
    with pytest.raises(CodegenError, match="no C type for float16"):
        c_backend().emit(kernel)
    wide = Buffer("a", "float32", (4,))
    with pytest.raises(TargetError, match="no C compiler `no-such-cc`"):
        c_backend(compiler="no-such-cc").link_kernel(Kernel("f", (wide,), (wide,), (), store(wide, [0], 1.0)), {})


# ---------------------------------------------------------------- scalar operators


def edges(dtype: str) -> np.ndarray:
    """Values at which operators differ."""
    if is_float(dtype):
        return np.array([0.0, -0.0, 1.0, -1.0, 0.3, -2.5, 7.0, -7.0, 127.9, 3e9, -3e9, 1e19, np.inf, -np.inf, np.nan], dtype)
    low, high = integer_range(dtype)
    values = {low, low + 1, high, high - 1, 0, 1, 2, 3, 7, 31, 63, *((-1, -2, -3, -7) if low < 0 else ())}
    return np.array(sorted(v for v in values if low <= v <= high), dtype)


def operations(a: E.Expr, b: E.Expr) -> dict[str, E.Expr]:
    """All that an expression can compute of two values of a type, by name."""
    one = semantics.literal(1, a.dtype)
    found = {}
    for op in (*BINARY, *UNARY):
        operands = (a, b) if op in BINARY else (a,)
        try:
            semantics.apply(op, a.dtype, [one] * len(operands))
        except IRError:
            continue
        found[op] = E.operation(op, *operands)
    found |= {f"to_{dtype}": E.cast(a, dtype) for dtype in BITS if FLOATS.get(dtype) != 16}
    found["select"] = E.select(a < b, a, b)
    found["nested"] = E.select(E.equal(E.select(a < b, E.const(70000), E.const(-5)) * 70000, E.const(70000 * 70000)), a, b)
    if is_float(a.dtype):
        found |= {"fma": E.fma(a, b, a), "ldexp": E.ldexp(a, b), "bits": E.bitcast(a, f"int{BITS[a.dtype]}")}
    large = a  # shared operands: as a tree, it has 2 ** 20 nodes
    for n in range(20):
        large = E.select(large < b, E.maximum(large, b), large) if n % 2 else E.binary("and" if a.dtype == "bool" else "add", large, large)
    return {**found, "large": large}


@pytest.mark.parametrize("dtype", [t for t in BITS if FLOATS.get(t) != 16 and t not in dtypes.NARROW])
def test_operators_mean_what_the_interpreter_says(dtype: str) -> None:
    a, b = (x.reshape(-1) for x in np.meshgrid(edges(dtype), edges(dtype)))
    left, right = (Buffer(name, dtype, a.shape) for name in ("exp", "double"))  # names that C has taken
    results = operations(left[E.loop_var("i", len(a))], right[E.loop_var("i", len(a))])
    outputs = tuple(Buffer(f"{name}.result", e.dtype, a.shape) for name, e in results.items())
    body = block(*(loop("i", len(a), lambda i, o=o, e=e: store(o, [i], e)) for o, e in zip(outputs, results.values(), strict=True)))
    kernel = Kernel("f", (left, right, *outputs), outputs, (), body)
    expected, found = ([np.zeros(a.shape, o.dtype) for o in outputs] for _ in range(2))
    run_kernel(kernel, dict(zip(kernel.buffers, (a.copy(), b.copy(), *expected), strict=True)))
    library = open_library(c_backend().link_kernel(kernel, {}))
    library["f"](None, *(ctypes.c_void_p(x.ctypes.data) for x in (a, b, *found)))
    for name, wanted, got in zip(results, expected, found, strict=True):
        rtol = 0.0 if not is_float(wanted.dtype.name) else 1e-6 if wanted.dtype.itemsize == 4 else 1e-14
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=0, err_msg=name)


def test_a_reduction_is_known_by_its_operator_not_by_its_name() -> None:
    A, total, k = Buffer("A", "float32", (3,)), Buffer("B", "float32", ()), np.array([2, 3, 4], np.float32)
    product = replace(standard_reducers("float32")["prod"], name="sum")
    update = loop("k", 3, lambda i: Accumulate(total, (), A[i], product))
    kernel, found = Kernel("f", (A, total), (total,), (), block(store(total, (), 1), update)), np.zeros((), np.float32)
    library = open_library(c_backend().link_kernel(kernel, {}))
    library["f"](None, *(ctypes.c_void_p(x.ctypes.data) for x in (k, found)))
    assert found == 24


# ---------------------------------------------------------------- models


@pytest.fixture(scope="module")
def suite() -> tuple[Suite, list[str]]:
    found, refused = Suite(), report.read_exclusions()
    models = {n: c.model for n, c in found.cases.items() if c.model is not None and n not in refused}
    return found, [n for n, model in models.items() if not NARROW.intersection(element_types(model))][::STRIDE]


@pytest.mark.parametrize("part", range(PARTS))
def test_operators(suite: tuple[Suite, list[str]], part: int) -> None:
    """Within the suite's tolerances."""
    cases, names = suite
    assert len(names) >= 150
    results = [cases.run(name, by_c, report.TOLERANCES.get(name, (0.0, 0.0))) for name in names[part::PARTS]]
    kept = [r for r in results if not (r.outcome == REFUSED and "cannot be compiled for `" in r.detail)]  # whose sizes depend on data
    assert len(kept) > 0.7 * len(results)
    assert not [f"{r.outcome} {r.case}: {r.detail}" for r in kept if r.outcome not in (PASSED, FIXED)]


@pytest.mark.parametrize("name", CASES)
def test_small_networks(name: str) -> None:
    from tcomp.frontends.onnx import import_model

    proto, inputs = CASES[name]
    graph, module = import_model(proto), tcomp.Module(compile_model(proto, CompileOptions(target=c_backend()))[0])
    for arrays in inputs:
        same(name, module.run(arrays), evaluate_graph(graph, arrays))
