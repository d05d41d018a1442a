"""`tcomp.operator`: functions of tensor expressions as operators of NumPy's arrays, of ONNX models and of PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tcomp
from tcomp import te
from tcomp.errors import InputError, IRError, TcompError

RNG = np.random.default_rng(0)
X, W = (RNG.normal(size=shape).astype(np.float32) for shape in ((3, 4), (4, 5)))


@tcomp.operator
def gated(x: Any, w: Any) -> Any:
    """A product, times its sigmoid, and the largest element of each row."""
    y = x @ w
    k = te.reduce_axis(w.shape[1], "k")
    return y * te.sigmoid(y), te.compute((x.shape[0],), lambda i: te.max(y[i, k], k))


def wanted(x: Any, w: Any) -> tuple[Any, Any]:
    y = x @ w
    return y / (1 + np.exp(-y)), y.max(1)


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def test_arrays_and_expressions():
    same(gated(X, W), wanted(X, W))
    x, w = te.placeholder(X.shape, name="x"), te.placeholder(W.shape, name="w")
    same(tcomp.build([x, w, *gated(x, w)])(X, W), wanted(X, W))
    assert "sigmoid" in gated.__doc__ and repr(gated) == "<tcomp operator gated>"


def test_mistakes():
    with pytest.raises(InputError, match="cannot be called `a b`"):
        tcomp.operator(lambda x: x, name="a b")
    with pytest.raises(IRError, match="`bad` returns 3"):
        tcomp.operator(lambda x: 3, name="bad")(X)
    with pytest.raises(TcompError, match="contraction"):
        gated(X, X)


def test_nodes_of_onnx_models():
    graph = helper.make_graph(
        [helper.make_node("gated", ["x", "w"], ["y", "m"], domain="tcomp"), helper.make_node("Neg", ["y"], ["z"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4]), helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 5])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 5]), helper.make_tensor_value_info("m", TensorProto.FLOAT, ["n"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("tcomp", 1)])
    module = tcomp.compile(onnx.ModelProto.FromString(model.SerializeToString()), operators=[gated], threads=1)
    y, m = wanted(X, W)
    same(module(X, W), (-y, m))
    same(module(X[:1], W), (-y[:1], m[:1]))
    with pytest.raises(TcompError, match="unknown operator `gated`"):
        tcomp.compile(model)


def test_an_operator_of_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")
    from tcomp.torch_backend import tcomp_backend

    def by_torch(x: Any, w: Any) -> Any:
        y = x @ w
        return y * torch.sigmoid(y), y.amax(1)

    def loss(function: Any) -> Any:
        return lambda x, w: sum((y**2).sum() for y in function(torch.sin(x), w))

    x, w = (torch.tensor(a, requires_grad=True) for a in (X, W))
    same([t.detach() for t in gated(x, w)], wanted(X, W))
    expected = torch.autograd.grad(loss(by_torch)(x, w), (x, w))
    same(torch.autograd.grad(loss(gated)(x, w), (x, w)), expected)
    torch._dynamo.reset()
    compiled = torch.compile(loss(gated), backend=tcomp_backend, options={"strict": True, "threads": 1}, fullgraph=True, dynamic=True)
    same(torch.autograd.grad(compiled(x, w), (x, w)), expected)
    batches = torch.tensor(np.stack([X, X + 1]))
    same(torch.func.vmap(gated, (0, None))(batches, w.detach()), torch.func.vmap(by_torch, (0, None))(batches, w.detach()))
