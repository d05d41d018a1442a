"""Attention over long rows: the same numbers as operator by operator, and no array of queries x keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tcomp.options import CompileOptions, Report
from tcomp.passes import algorithms
from tcomp.pipeline import compile_model
from tcomp.runtime import Module
from tcomp.target import CpuTarget

TARGET = CpuTarget.parse("cpu")
FLOAT = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}


def attention(
    rows: Any, keys: Any, heads: int = 2, size: int = 32, mask: str | None = None, dtype: str = "float32", repeated: int = 1
) -> onnx.ModelProto:
    """As exporters write it: heads taken apart, q k' / sqrt(size), a mask, softmax, product with v, heads together. With a mask to `add`
    (1, 1, 1, keys), or a condition `where` scores are kept (rows, keys); `repeated` queries' heads share one of keys and values."""
    t, nodes, ends = FLOAT[dtype], [], []
    constants = [numpy_helper.from_array(np.array(size**0.5, dtype), "root"), numpy_helper.from_array(np.array(-np.inf, dtype), "out")]

    def node(op: str, sources: list[str], result: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, sources, [result], **attributes))
        return result

    def shaped(x: str, shape: list[int], result: str) -> str:
        constants.append(numpy_helper.from_array(np.array(shape), f"{result}.shape"))
        return node("Reshape", [x, f"{result}.shape"], result)

    def taken_apart(x: str, length: Any, count: int, perm: list[int]) -> str:
        ends.append(helper.make_tensor_value_info(x, t, [1, length, count * size]))
        return node("Transpose", [shaped(x, [1, -1, count, size], f"{x}.heads")], f"{x}.apart", perm=perm)

    q = taken_apart("q", rows, heads, [0, 2, 1, 3])
    k, v = taken_apart("k", keys, heads // repeated, [0, 2, 3, 1]), taken_apart("v", keys, heads // repeated, [0, 2, 1, 3])
    scores = node("Div", [node("MatMul", [q, k], "products"), "root"], "scores")
    if mask == "add":
        ends.append(helper.make_tensor_value_info("mask", t, [1, 1, 1, keys]))
        scores = node("Add", [scores, "mask"], "masked")
    if mask == "where":
        ends.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, [rows, keys]))
        scores = node("Where", ["mask", scores, "out"], "masked")
    mean = node("MatMul", [node("Softmax", [scores], "weights", axis=-1), v], "mean")
    together = node("Transpose", [mean], "turned", perm=[0, 2, 1, 3])
    y = shaped(together, [1, -1, heads * size], "y")
    graph = helper.make_graph(nodes, "attention", ends, [helper.make_tensor_value_info(y, t, None)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def inputs(model: onnx.ModelProto, **sizes: int) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(5), {}
    for v in model.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in v.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type)
        found[v.name] = np.tril(np.ones(shape, bool), shape[1] - shape[0]) if dtype == bool else rng.normal(size=shape).astype(dtype)
    if "mask" in found and found["mask"].dtype != bool:
        found["mask"][..., : found["mask"].shape[-1] // 3] = -np.inf  # the first blocks hold nothing
    return found


def reference(heads: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Any = None) -> np.ndarray:
    size = q.shape[-1] // heads
    q, k, v = (x[0].reshape(x.shape[1], -1, size).transpose(1, 0, 2).astype("float64") for x in (q, k, v))
    x = q @ k.transpose(0, 2, 1) / size**0.5
    if mask is not None:
        x = np.where(mask, x, -np.inf) if mask.dtype == bool else x + mask[0]
    with np.errstate(invalid="ignore"):  # rows of which nothing is kept
        weights = np.exp(x - x.max(-1, keepdims=True))
    return ((weights / weights.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(1, q.shape[1], -1)


def compiled(model: onnx.ModelProto, **options: Any) -> tuple[Module, Report]:
    artifact, report = compile_model(model, CompileOptions(TARGET, threads=2, emit=["graph", "schedule"], **options))
    return Module.load(artifact, threads=2), report


def in_one_pass(report: Report) -> bool:
    return "s.online(" in report.stages["schedule"]


@pytest.mark.parametrize(
    "rows, keys, options",
    [
        (1024, 1024, {"size": 64}),
        (1024, 1024, {"mask": "add"}),
        (1536, 1000, {"mask": "where", "heads": 1}),
        (1021, 2048, {"mask": "where", "heads": 1, "size": 40}),
        (1024, 1030, {"dtype": "float64", "mask": "add", "heads": 1}),
        (2048, 4096, {"size": 16, "heads": 1}),
        (1024, 1024, {"heads": 3, "repeated": 3}),  # all heads share their keys and values
    ],
    ids=str,
)
def test_long_rows(monkeypatch: pytest.MonkeyPatch, rows: int, keys: int, options: dict[str, Any]) -> None:
    model = attention(rows, keys, **options)
    arrays = inputs(model)
    tiled, report = compiled(model)
    wanted = reference(options.get("heads", 2), *arrays.values())
    assert in_one_pass(report)
    np.testing.assert_allclose(tiled(*arrays.values()), wanted, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(algorithms, "join_attention", lambda graph, *options: graph)
    plain, report = compiled(model)
    assert not in_one_pass(report)
    np.testing.assert_allclose(plain(*arrays.values()), wanted, rtol=1e-4, atol=1e-5)


def test_no_scores_are_stored() -> None:
    model = attention(2048, 2048)
    _, report = compiled(model)
    assert report.kernels == 2 and isinstance(report.arena, int)  # the heads are put together in the second one
    linear = 4 * 2048 * 64  # bytes of queries, or keys, or values, of all heads
    assert report.arena <= 3 * linear < 4 * 2048 * 2048


def test_short_rows_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attention(256, 256)
    _, report = compiled(model)
    monkeypatch.setattr(algorithms, "join_attention", lambda graph, *options: graph)
    _, before = compiled(model)
    assert report.stages == before.stages and report.kernels == 3  # scores, softmax, and the product with it


def test_symbolic_lengths() -> None:
    """The upper bounds decide; the kernel is for all lengths."""
    model = attention("n", "m", mask="add")
    _, report = compiled(model)
    assert not in_one_pass(report)
    module, report = compiled(model, dims={"n": (1, 4096), "m": (1, 4096)})
    assert in_one_pass(report)
    for n, m in ((1, 1), (1, 300), (57, 3), (130, 257), (300, 640)):
        arrays = inputs(model, n=n, m=m)
        np.testing.assert_allclose(module(*arrays.values()), reference(2, *arrays.values()), rtol=1e-4, atol=1e-5)


def test_explain_says_so(tmp_path: Any) -> None:
    from typer.testing import CliRunner

    from tcomp.cli import app

    path = tmp_path / "attention.onnx"
    onnx.save(attention(1024, 1024), path)
    shown = CliRunner().invoke(app.app, ["explain", str(path), "--schedules"])
    assert shown.exit_code == 0, shown.output
    assert "one_pass: applied" in shown.output and "s.online(" in shown.output
    onnx.save(attention(64, 64), path)
    assert "one_pass: the scores stay in the cache" in CliRunner().invoke(app.app, ["explain", str(path)]).output


def test_any_number_of_threads() -> None:
    """The same bits."""
    model = attention(1024, 777, heads=3)
    arrays = inputs(model)
    artifact, _ = compile_model(model, CompileOptions(TARGET))
    found = [Module.load(artifact, threads=n)(*arrays.values()) for n in (1, 2)]
    np.testing.assert_array_equal(*found)
