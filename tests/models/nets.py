"""Small networks with random weights that have the structure of real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str]


class Net:
    """Builds a model node by node; weights are scaled so that activations stay near one."""

    def __init__(self, name: str, seed: int = 0, opset: int = 18) -> None:
        self.name, self.opset, self.rng = name, opset, np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.count = 0

    def input(self, name: str, shape: Shape, dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def weight(self, *shape: int, fan: int | None = None) -> str:
        fan = fan or int(np.prod(shape[1:])) or 1
        return self.constant(self.rng.standard_normal(shape, np.float32) * (fan**-0.5))

    def constant(self, array: Any, dtype: Any = None) -> str:
        self.count += 1
        name = f"w{self.count}"
        self.weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def __call__(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        self.count += 1
        names = [f"{op.lower()}{self.count}.{n}" if outputs > 1 else f"{op.lower()}{self.count}" for n in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, f"{op}_{self.count}", **attributes))
        return names if outputs > 1 else names[0]

    def conv(self, x: str, ci: int, co: int, k: int = 3, stride: int = 1, group: int = 1, bias: bool = True) -> str:
        w = self.weight(co, ci // group, k, k)
        return self("Conv", x, w, *([self.weight(co, fan=4)] if bias else []), pads=[k // 2] * 4, strides=[stride] * 2, group=group)

    def batch_norm(self, x: str, c: int) -> str:
        scale, shift, mean = (self.constant(self.rng.standard_normal(c).astype(np.float32) * 0.2 + m) for m in (1, 0, 0))
        return self("BatchNormalization", x, scale, shift, mean, self.constant(self.rng.random(c).astype(np.float32) + 0.5))

    def linear(self, x: str, i: int, o: int) -> str:
        return self("Add", self("MatMul", x, self.constant(self.rng.standard_normal((i, o)).astype(np.float32) * i**-0.5)), self.weight(o))

    def layer_norm(self, x: str, n: int) -> str:
        return self("LayerNormalization", x, self.constant(np.ones(n), np.float32), self.weight(n), axis=-1)

    def build(self, *outputs: str) -> onnx.ModelProto:
        results = [helper.make_value_info(name, helper.make_tensor_type_proto(TensorProto.FLOAT, None)) for name in outputs]
        graph = helper.make_graph(self.nodes, self.name, self.inputs, results, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=9)


def residual_net() -> onnx.ModelProto:
    """Convolutions with batch normalisation, shortcuts with and without a projection, a classifier."""
    net = Net("residual")
    x = net.input("image", ("n", 3, 33, 33))
    x = net("Relu", net.batch_norm(net.conv(x, 3, 16, 7, 2, bias=False), 16))
    x = net("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for ci, co, stride in ((16, 16, 1), (16, 40, 2)):
        y = net("Relu", net.batch_norm(net.conv(x, ci, co, 3, stride, bias=False), co))
        y = net.batch_norm(net.conv(y, co, co, 3, bias=False), co)
        x = net("Relu", net("Add", y, x if ci == co else net.batch_norm(net.conv(x, ci, co, 1, stride, bias=False), co)))
    x = net("Flatten", net("GlobalAveragePool", x))
    return net.build(net("Gemm", x, net.weight(10, 40), net.weight(10), transB=1))


def separable_net() -> onnx.ModelProto:
    """Depthwise-separable convolutions with clipped activations, squeeze and excitation, hard swish."""
    net = Net("separable")
    x = net.input("image", (1, 3, "h", "w"))
    x = net("HardSwish", net.conv(x, 3, 16, 3, 2))
    for ci, co, stride in ((16, 24, 2), (24, 24, 1)):
        wide = ci * 3
        y = net("Clip", net.conv(x, ci, wide, 1), net.constant(0, np.float32), net.constant(6, np.float32))
        y = net("Clip", net.conv(y, wide, wide, 3, stride, group=wide), net.constant(0, np.float32), net.constant(6, np.float32))
        s = net("ReduceMean", y, net.ints(2, 3), keepdims=1)
        s = net("HardSigmoid", net.conv(net("Relu", net.conv(s, wide, 8, 1)), 8, wide, 1), alpha=1 / 6)
        y = net.conv(net("Mul", y, s), wide, co, 1)
        x = net("Add", x, y) if ci == co else y
    return net.build(net("Softmax", net.linear(net("Flatten", net("GlobalAveragePool", x)), 24, 7), axis=1))


def transformer() -> onnx.ModelProto:
    """Token embedding, two encoder blocks with several heads and a mask, any batch and length."""
    net, width, heads = Net("transformer"), 32, 4
    tokens = net.input("tokens", ("batch", "length"), TensorProto.INT64)
    mask = net.input("mask", ("batch", "length"))
    x = net.layer_norm(net("Gather", net.weight(50, width, fan=1), tokens), width)
    blocked = net("Unsqueeze", net("Mul", net("Sub", net.constant(1, np.float32), mask), net.constant(-1e4, np.float32)), net.ints(1, 2))
    for _ in range(2):
        parts = []
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
            part = net("Reshape", net.linear(x, width, width), net.ints(0, 0, heads, width // heads))
            parts.append(net("Transpose", part, perm=perm))
        q, k, v = parts
        scores = net("Add", net("Div", net("MatMul", q, k), net.constant((width / heads) ** 0.5, np.float32)), blocked)
        mixed = net("Transpose", net("MatMul", net("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        x = net.layer_norm(net("Add", x, net.linear(net("Reshape", mixed, net.ints(0, 0, width)), width, width)), width)
        hidden = net.linear(x, width, 2 * width)  # gelu, written out as exporters do
        erf = net("Add", net("Erf", net("Mul", hidden, net.constant(0.5**0.5, np.float32))), net.constant(1, np.float32))
        gelu = net("Mul", net("Mul", hidden, erf), net.constant(0.5, np.float32))
        x = net.layer_norm(net("Add", x, net.linear(gelu, 2 * width, width)), width)
    first = net("Gather", x, net.constant(0, np.int64), axis=1)
    return net.build(x, net("Tanh", net.linear(first, width, width)))


def recurrent(kind: str) -> onnx.ModelProto:
    """Two layers, the first in both directions; any number of steps."""
    net, gates = Net(kind), {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    x = net.input("x", ("steps", 2, 6))
    states = 3 if kind == "LSTM" else 2
    y, *_ = net(
        kind, x, net.weight(2, gates * 5, 6, fan=6), net.weight(2, gates * 5, 5, fan=5), net.weight(2, gates * 10, fan=9),
        outputs=states, hidden_size=5, direction="bidirectional",
    )  # fmt: skip
    y = net("Reshape", net("Transpose", y, perm=[0, 2, 1, 3]), net.ints(0, 0, 10))
    z, last, *_ = net(kind, y, net.weight(1, gates * 7, 10, fan=10), net.weight(1, gates * 7, 7, fan=7), outputs=states, hidden_size=7)
    return net.build(net("Squeeze", z, net.ints(1)), last)


def unet() -> onnx.ModelProto:
    """Two levels down and up again: a transposed convolution, a resize, concatenated skips, padding that crops."""
    net = Net("unet")
    x = net.input("image", (1, 2, 20, 28))
    a = net("Relu", net.conv(x, 2, 8))
    b = net("LeakyRelu", net.conv(net("MaxPool", a, kernel_shape=[2, 2], strides=[2, 2]), 8, 12), alpha=0.1)
    c = net("Relu", net.conv(net("AveragePool", b, kernel_shape=[2, 2], strides=[2, 2]), 12, 16))
    up = net("ConvTranspose", c, net.weight(16, 12, 2, 2, fan=16), strides=[2, 2])
    d = net("InstanceNormalization", net.conv(net("Concat", up, b, axis=1), 24, 8), net.constant(np.ones(8), np.float32), net.weight(8))
    up = net("Resize", net("Relu", d), "", net.constant([1, 1, 2, 2], np.float32), mode="linear")
    e = net("Concat", up, a, axis=1)
    return net.build(net("Sigmoid", net.conv(net("Relu", net.conv(e, 16, 8)), 8, 1, 1)))


def pixel_shuffler() -> onnx.ModelProto:
    """Super resolution: grouped convolutions, depth to space, slices, a nearest resize of the input added at the end."""
    net = Net("shuffle")
    x = net.input("image", ("n", 3, "h", "w"))
    y = net("PRelu", net.conv(x, 3, 12), net.constant(np.full((12, 1, 1), 0.2), np.float32))
    left, right = net("Split", net.conv(y, 12, 12, group=4), outputs=2, axis=1, num_outputs=2)
    y = net.conv(net("Concat", net("Mul", left, net("Sigmoid", right)), left, axis=1), 12, 12, 3)
    y = net("DepthToSpace", y, blocksize=2)
    up = net(
        "Resize",
        x,
        "",
        net.constant([1, 1, 2, 2], np.float32),
        mode="nearest",
        nearest_mode="floor",
        coordinate_transformation_mode="asymmetric",
    )
    return net.build(net("Add", y, up))


def quantized() -> onnx.ModelProto:
    """Quantise, convolve in 8 bits through dequantised operands, multiply matrices of integers."""
    net = Net("quantized", opset=21)
    x = net.input("x", (2, 4, 9, 9))

    def scale(s: float, zero: int, dtype: Any) -> tuple[str, str]:
        return net.constant(s, np.float32), net.constant(zero, dtype)

    q = net("QuantizeLinear", x, *scale(0.05, 128, np.uint8))
    w = net.constant(
        net.rng.integers(-63, 64, (6, 4, 3, 3)), np.int8
    )  # of 7 bits: without VNNI ONNX Runtime saturates sums of two products
    conv = net("Conv", net("DequantizeLinear", q, *scale(0.05, 128, np.uint8)), net("DequantizeLinear", w, *scale(0.004, 0, np.int8)))
    y = net("DequantizeLinear", net("QuantizeLinear", conv, *scale(0.04, 100, np.uint8)), *scale(0.04, 100, np.uint8))
    pooled = net("Flatten", net("MaxPool", net("Relu", y), kernel_shape=[7, 7]))
    p = net("QuantizeLinear", pooled, *scale(0.03, 0, np.uint8))
    m = net("MatMulInteger", p, net.constant(net.rng.integers(-9, 9, (6, 5)), np.int8), net.constant(0, np.uint8))
    return net.build(net("Mul", net("Cast", m, to=TensorProto.FLOAT), net.constant(0.01, np.float32)))


def detector() -> onnx.ModelProto:
    """Boxes and scores: a head over two scales, the best few gathered in order, control flow at the end."""
    net = Net("detector")
    x = net.input("image", (1, 3, 16, 16))
    a = net("Relu", net.conv(x, 3, 8, 3, 2))
    b = net("Relu", net.conv(a, 8, 8, 3, 2))
    heads = [net("Reshape", net("Transpose", net.conv(f, 8, 5, 1), perm=[0, 2, 3, 1]), net.ints(-1, 5)) for f in (a, b)]
    boxes, scores = net("Split", net("Concat", *heads, axis=0), net.ints(4, 1), outputs=2, axis=1)
    best, where = net("TopK", net("Sigmoid", net("Squeeze", scores, net.ints(1))), net.ints(6), outputs=2)
    chosen = net("Gather", boxes, where, axis=0)
    total = net("ReduceSum", best, keepdims=0)
    branches = []
    for op in ("Neg", "Exp"):
        node = helper.make_node(op, [chosen], [f"{op}_out"])
        branches.append(helper.make_graph([node], op, [], [helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, None)]))
    high = net("Greater", total, net.constant(3.0, np.float32))
    return net.build(best, net("If", high, then_branch=branches[0], else_branch=branches[1]))
