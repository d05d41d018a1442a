"""How a random node of each operator is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from tests.fuzz_graphs.graph import FLOATS, INTEGERS, NUMBERS, SIGNED, Graph, Unfit, Value

Maker = Callable[[Graph], Any]
SINGLE = ("float32", "float32", "float64")  # types of what is too inexact in float16, or lacks it in ONNX Runtime


def unary(op: str, kinds: Any = FLOATS, exact: bool = False, needs_exact: bool = False, **choices: Any) -> Maker:
    """One operand; attributes are drawn from `choices`. `needs_exact`: it is not continuous."""

    def make(g: Graph) -> None:
        attrs = {name: g.rng.choice(options) for name, options in choices.items() if g.chance(0.7)}
        g.add(op, [g.some(kinds, exact=needs_exact)], exact=exact, **attrs)

    return make


def binary(op: str, kinds: Any = NUMBERS, exact: bool = True, needs_exact: bool = False, low: int = -4, high: int = 4) -> Maker:
    """Two operands that broadcast; the second between `low` and `high`."""

    def make(g: Graph) -> None:
        a = g.some(kinds, exact=needs_exact)
        b = g.like(a, low, high)
        if needs_exact and not b.exact:
            raise Unfit
        g.add(op, [a, b] if low != -4 or g.chance(0.6) else [b, a], exact=exact)

    return make


def division(g: Graph) -> None:
    a = g.some(NUMBERS)
    divisor = g.like(a, 1, 7)
    g.add("Div", [a, divisor], exact=a.dtype not in FLOATS)


def remainder(g: Graph) -> None:
    a = g.some(NUMBERS, exact=True)
    fmod = int(a.dtype in FLOATS or g.chance(0.5))
    g.add("Mod", [a, g.like(a, 1, 7)], fmod=fmod)


def power(g: Graph) -> None:
    a = g.some(SINGLE)
    g.add("Pow", [a, g.constant(g.rng.choice((2, 3, 1)), a.dtype)], exact=False)


def several(op: str, kinds: Any = FLOATS, exact: bool = True) -> Maker:
    def make(g: Graph) -> None:
        a = g.some(kinds)
        g.add(op, [a, *(g.like(a) for _ in range(g.rng.randrange(3)))], exact=exact)

    return make


def reduction(op: str, exact: bool, kinds: Any = (*SINGLE, "int32", "int64")) -> Maker:
    def make(g: Graph) -> None:
        v = g.some(kinds, least=1)
        if 0 in v.shape:
            raise Unfit
        axes = g.rng.sample(range(len(v.shape)), g.rng.randint(0, len(v.shape)))
        axes = [a - len(v.shape) * g.chance(0.3) for a in axes]
        given = [v] if not axes and g.chance(0.5) else [v, g.constant(axes)]
        # Of no axes, the reference adds up squares and magnitudes, and ONNX Runtime returns the input: the standard can be read both ways.
        noop = {"noop_with_empty_axes": 1} if op in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean") and g.chance(0.3) else {}
        g.add(op, given, exact=exact or v.dtype in INTEGERS, keepdims=int(g.chance(0.5)), **noop)

    return make


def arg(op: str) -> Maker:
    def make(g: Graph) -> None:
        v = g.some(("float32", "int32", "float64"), least=1, exact=True)
        if 0 in v.shape:
            raise Unfit
        g.add(op, [v], axis=g.axis(v), keepdims=int(g.chance(0.5)), select_last_index=int(g.chance(0.5)))

    return make


def along(op: str, kinds: Any = SINGLE, exact: bool = False, needs_exact: bool = False, **choices: Any) -> Maker:
    """An operator along one axis."""

    def make(g: Graph) -> None:
        v = g.some(kinds, least=1, exact=needs_exact)
        if 0 in v.shape:
            raise Unfit
        g.add(op, [v], exact=exact, axis=g.axis(v), **{name: g.rng.choice(options) for name, options in choices.items()})

    return make


def clip(g: Graph) -> None:
    v = g.some(NUMBERS)
    low, high = (g.constant(n, v.dtype) if g.chance(0.8) else None for n in (g.rng.randint(0, 1), g.rng.randint(2, 4)))
    g.add("Clip", [v, low, high])


def where(g: Graph) -> None:
    a = g.some((*NUMBERS, "bool"))
    g.add("Where", [g.new("bool", tuple(1 if g.chance(0.3) else d for d in a.shape)), a, g.like(a)])


def cast(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"), exact=True)
    to = g.rng.choice(("float32", "float64", "float16", "int32", "int64", "bool", "int8"))
    if to == "int8" and v.array.size and np.abs(v.array.astype(np.float64)).max() > 127:
        raise Unfit  # what is out of range is not defined
    g.add("Cast", [v], to=helper.np_dtype_to_tensor_dtype(np.dtype(to)))


# Movement


def transpose(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"))
    perm = list(range(len(v.shape)))
    g.rng.shuffle(perm)
    g.add("Transpose", [v], **({"perm": perm} if perm and g.chance(0.8) else {}))


def reshape(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"))
    size, dims = v.array.size, list[int]()
    for _ in range(g.rng.randint(0, 3)):
        dims.append(g.rng.choice([d for d in range(1, max(size, 1) + 1) if size % d == 0] or [1]))
        size //= dims[-1]
    dims.append(size)
    if v.array.size and g.chance(0.5):
        dims[g.rng.randrange(len(dims))] = -1
    g.add("Reshape", [v, g.constant(dims)])


def squeeze(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"))
    ones = [axis for axis, d in enumerate(v.shape) if d == 1]
    if not ones:
        raise Unfit
    g.add("Squeeze", [v, g.constant(g.rng.sample(ones, g.rng.randint(1, len(ones))))] if g.chance(0.7) else [v])


def unsqueeze(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"))
    rank = len(v.shape) + g.rng.randint(1, 2)
    g.add("Unsqueeze", [v, g.constant(g.rng.sample(range(rank), rank - len(v.shape)))])


def concat(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"), least=1)
    axis, parts = g.axis(v), [v]
    for _ in range(g.rng.randint(1, 2)):
        shape = list(v.shape)
        shape[axis] = g.rng.randint(0, 3)
        fits = [w for w in g.values if w.dtype == v.dtype and len(w.shape) == len(v.shape)]
        fits = [w for w in fits if all(a == b for n, (a, b) in enumerate(zip(w.shape, v.shape, strict=True)) if n != axis % len(shape))]
        parts.append(g.rng.choice(fits) if fits and g.chance(0.5) else g.new(v.dtype, shape))
    g.rng.shuffle(parts)
    g.add("Concat", parts, axis=axis)


def split(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"), least=1)
    axis = g.axis(v)
    first = g.rng.randint(0, v.shape[axis])
    g.add("Split", [v, g.constant([first, v.shape[axis] - first])], outputs=2, axis=axis)


def slices(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"), least=1)
    axes = g.rng.sample(range(len(v.shape)), g.rng.randint(1, len(v.shape)))
    starts, ends = ([g.rng.randint(-6, 6) for _ in axes] for _ in range(2))
    steps = [g.rng.choice((1, 1, 2, -1, -2, 3)) for _ in axes]
    g.add("Slice", [v, *map(g.constant, (starts, ends, axes, steps))])


def gather(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"), least=1)
    axis = g.axis(v)
    if not v.shape[axis]:
        raise Unfit
    index = g.new(g.rng.choice(("int64", "int32")), g.shape(g.rng.randint(0, 2)), -v.shape[axis], v.shape[axis] - 1)
    g.add("Gather", [v, index], axis=axis)


def gather_elements(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"), least=1)
    axis = g.axis(v)
    if 0 in v.shape:
        raise Unfit
    shape = [g.rng.randint(1, d) for d in v.shape]
    shape[axis] = g.rng.randint(1, 6)
    g.add("GatherElements", [v, g.new("int64", shape, -v.shape[axis], v.shape[axis] - 1)], axis=axis)


def gather_nd(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"), least=1)
    width = g.rng.randint(1, len(v.shape))
    if 0 in v.shape:
        raise Unfit
    least = min(v.shape[:width])
    indices = g.new("int64", (*g.shape(g.rng.randint(0, 2)), width), -least, least - 1)
    g.tuples.add(indices.name)
    g.add("GatherND", [v, indices])


def scatter_elements(g: Graph) -> None:
    v = g.some(("float32", "int32", "int64", "float64"), least=1)
    axis = g.axis(v)
    if 0 in v.shape:
        raise Unfit
    how = g.rng.choice(("none", "add", "mul", "max", "min"))
    shape = [g.rng.randint(1, d) for d in v.shape]
    rows = np.argsort([[g.rng.random() for _ in range(v.shape[axis])] for _ in range(int(np.prod(shape)) // shape[axis])], -1)[
        :, : shape[axis]
    ]
    moved = [d for n, d in enumerate(shape) if n != axis % len(shape)]
    index = np.moveaxis(rows.reshape(*moved, shape[axis]), -1, axis)  # no element twice, as the order is not defined
    g.add("ScatterElements", [v, g.constant(index), g.new(v.dtype, shape)], axis=axis, reduction=how)


def scatter_nd(g: Graph) -> None:
    v = g.some(("float32", "int32", "int64"), least=1)
    if 0 in v.shape:
        raise Unfit
    width, count = g.rng.randint(1, len(v.shape)), g.rng.randint(1, 3)
    places = np.stack(np.unravel_index(np.arange(int(np.prod(v.shape[:width]))), v.shape[:width]), -1)
    index = places[g.rng.sample(range(len(places)), min(count, len(places)))]
    how = g.rng.choice(("none", "add", "mul", "max", "min"))
    g.add("ScatterND", [v, g.constant(index), g.new(v.dtype, (len(index), *v.shape[width:]))], reduction=how)


def expand(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"))
    shape = [g.rng.randint(1, 4) if d == 1 else g.rng.choice((1, d)) for d in v.shape]
    g.add("Expand", [v, g.constant([2] * g.chance(0.3) + shape)])


def tile(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"))
    g.add("Tile", [v, g.constant([g.rng.randint(0, 3) or 1 for _ in v.shape])])


def pad(g: Graph) -> None:
    v = g.some(("float32", "int32", "float64", "int64"), least=1)
    mode = g.rng.choice(("constant", "constant", "edge", "reflect", "wrap"))
    if 0 in v.shape and mode != "constant":
        raise Unfit
    most = [2 if mode in ("constant", "edge") else max(0, min(2, d - 1)) for d in v.shape]
    pads = [g.rng.randint(0, m) for m in most + most]
    if mode == "constant" and g.chance(0.2) and v.shape[0] > 1:
        pads[0] = -1
    g.add(
        "Pad",
        [v, g.constant(pads), *([g.constant(g.rng.randint(-2, 2), v.dtype)] if mode == "constant" and g.chance(0.5) else [])],
        mode=mode,
    )


def blocks(op: str) -> Maker:
    def make(g: Graph) -> None:
        if op == "DepthToSpace":
            v = g.new("float32", (g.rng.randint(1, 2), 4 * g.rng.randint(1, 3), *g.shape(2)))
            g.add(op, [v], blocksize=2, mode=g.rng.choice(("DCR", "CRD")))
        else:
            n, c, h, w = g.shape(4, high=3)
            g.add(op, [g.new("float32", (n, c, 2 * h, 2 * w))], blocksize=2)

    return make


def trilu(g: Graph) -> None:
    v = g.some(("float32", "int64", "float64"), least=2)
    g.add("Trilu", [v, *([g.constant(g.rng.randint(-3, 3))] if g.chance(0.7) else [])], upper=int(g.chance(0.5)))


def cumulative(op: str) -> Maker:
    def make(g: Graph) -> None:
        v = g.some(("float32", "int32", "int64", "float64"), least=1)
        g.add(op, [v, g.constant(g.axis(v))], exclusive=int(g.chance(0.4)), reverse=int(g.chance(0.4)))

    return make


def one_hot(g: Graph) -> None:
    depth = g.rng.randint(1, 5)
    index = g.new("int64", g.shape(g.rng.randint(0, 2)), -depth, depth - 1)
    g.add("OneHot", [index, g.constant(depth), g.constant([g.rng.randint(-1, 0), g.rng.randint(1, 3)], g.rng.choice(("float32", "int32")))],
          axis=g.rng.randint(-1, len(index.shape)))  # fmt: skip


def eye_like(g: Graph) -> None:
    g.add("EyeLike", [g.some(("float32", "int64"), rank=2)], exact=True, k=g.rng.randint(-2, 2))


def top_k(g: Graph) -> None:
    v = g.some(("float32", "int64", "int32"), least=1, exact=True)
    axis = g.axis(v)
    if not v.shape[axis] or any(len(np.unique(row)) < len(row) for row in np.moveaxis(v.array, axis, -1).reshape(-1, v.shape[axis])):
        raise Unfit  # which of equal elements comes first is another question
    g.add("TopK", [v, g.constant([g.rng.randint(1, v.shape[axis])])], outputs=2, axis=axis, largest=int(g.chance(0.5)))


def shape_of(g: Graph) -> None:
    v = g.some((*NUMBERS, "bool"))
    g.add(g.rng.choice(("Shape", "Size")), [v], exact=True)


def shaped(g: Graph) -> None:
    value = helper.make_tensor("value", TensorProto.FLOAT, [1], [g.rng.randint(-3, 3)])
    g.add("ConstantOfShape", [g.constant(g.shape())], value=value)


def reverse_sequence(g: Graph) -> None:
    v = g.some(("float32", "int64"), least=2)
    if 0 in v.shape:
        raise Unfit
    time = g.rng.randrange(2)
    g.add(
        "ReverseSequence",
        [v, g.constant([g.rng.randint(1, v.shape[time]) for _ in range(v.shape[1 - time])])],
        time_axis=time,
        batch_axis=1 - time,
    )


# Products, windows, normalisation


def matmul(g: Graph) -> None:
    a = g.some(("float32", "float64", "int32", "float16"), least=1)
    k = a.shape[-1]
    shape = (*(1 if g.chance(0.5) else d for d in a.shape[:-2]), k, g.shape(1)[0]) if g.chance(0.9) else (k,)
    g.add("MatMul", [a, g.new(a.dtype, shape, -2, 2)])


def gemm(g: Graph) -> None:
    a = g.some(SINGLE, rank=2)
    turned, n = g.chance(0.5), g.shape(1)[0]
    flipped = g.chance(0.5)
    m, k = a.shape[::-1] if turned else a.shape
    c = [g.new(a.dtype, g.rng.choice(((n,), (m, n), (1, n), ())))] if g.chance(0.7) else []
    scales = {"alpha": g.rng.choice((0.5, 2.0)), "beta": g.rng.choice((0.25, 1.0))} if g.chance(0.5) else {}
    g.add("Gemm", [a, g.new(a.dtype, (n, k) if flipped else (k, n), -2, 2), *c], transA=int(turned), transB=int(flipped), **scales)


def matmul_integer(g: Graph) -> None:
    a = g.some(("uint8", "int8"), rank=2)
    b = g.new(g.rng.choice(("uint8", "int8")), (a.shape[1], g.shape(1)[0]))
    zeros = [g.constant(g.rng.randint(0, 3), a.dtype), g.constant(g.rng.randint(0, 3), b.dtype)][: g.rng.randrange(3)]
    g.add("MatMulInteger", [a, b, *zeros])


def einsum(g: Graph) -> None:
    sizes = {letter: g.shape(1)[0] for letter in "ijkl"}
    left, right = ("".join(g.rng.sample("ijkl", g.rng.randint(1, 3))) for _ in range(2))
    both = sorted(set(left + right))
    result = "".join(g.rng.sample(both, g.rng.randint(0, len(both))))
    operands = [g.new("float32", [sizes[c] for c in term], -2, 2) for term in (left, right)]
    g.add("Einsum", operands, equation=f"{left},{right}->{result}")


def image(g: Graph, kinds: Any = ("float32",), channels: int | None = None) -> Value:
    """A value of rank 3 or 4 with a spatial extent."""
    fits = [v for v in g.values if v.dtype in kinds and len(v.shape) in (3, 4) and 0 not in v.shape and channels in (None, v.shape[1])]
    if fits and g.chance(0.6):
        return g.rng.choice(fits)
    rank = g.rng.choice((1, 2, 2))
    shape = (g.rng.randint(1, 2), channels or g.rng.randint(1, 6), *(g.rng.randint(3, 9) for _ in range(rank)))
    return g.new(g.dtype(kinds), shape)


def window(g: Graph, v: Value) -> dict[str, Any]:
    """Attributes of an operator with windows that are no larger than the padded input."""
    rank = len(v.shape) - 2
    kernel = [g.rng.randint(1, min(3, d)) for d in v.shape[2:]]
    attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": [g.rng.randint(1, 2) for _ in range(rank)]}
    if g.chance(0.3):
        attrs["auto_pad"] = g.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
        attrs["strides"] = [min(s, k) for s, k in zip(attrs["strides"], kernel, strict=True)]  # or padding would be negative
    else:
        attrs["pads"] = [g.rng.randint(0, k - 1) for k in kernel * 2]
    return attrs


def conv(g: Graph) -> None:
    v = image(g, ("float32", "float32", "float64"))
    attrs, channels = window(g, v), v.shape[1]
    group = g.rng.choice([n for n in range(1, channels + 1) if channels % n == 0])
    outputs = group * g.rng.randint(1, 4)
    if "pads" in attrs and g.chance(0.3):
        attrs["dilations"] = [2 if 2 * (k - 1) < d else 1 for k, d in zip(attrs["kernel_shape"], v.shape[2:], strict=True)]
    weights = g.new(v.dtype, (outputs, channels // group, *attrs["kernel_shape"]), -2, 2)
    g.add("Conv", [v, weights, *([g.new(v.dtype, (outputs,))] if g.chance(0.5) else [])], group=group, **attrs)


def conv_transpose(g: Graph) -> None:
    v = image(g)
    attrs, channels = window(g, v), v.shape[1]
    attrs.pop("auto_pad", None)
    g.add("ConvTranspose", [v, g.new("float32", (channels, g.rng.randint(1, 3), *attrs["kernel_shape"]), -2, 2)], **attrs)


def conv_integer(g: Graph) -> None:
    v = image(g, ("uint8",))
    attrs = window(g, v)
    attrs.pop("auto_pad", None)
    g.add(
        "ConvInteger",
        [v, g.new("int8", (g.rng.randint(1, 3), v.shape[1], *attrs["kernel_shape"])), g.constant(g.rng.randint(0, 3), "uint8")],
        **attrs,
    )


def pool(op: str, exact: bool, **choices: Any) -> Maker:
    def make(g: Graph) -> None:
        v = image(g)
        extra = {name: g.rng.choice(options) for name, options in choices.items()}
        attrs = window(g, v)
        if "auto_pad" in attrs:
            extra.pop("ceil_mode", None)  # with both, ONNX Runtime and the reference fail in ways of their own
        g.add(op, [v], exact=exact, **attrs, **extra)

    return make


def global_pool(op: str, exact: bool) -> Maker:
    return lambda g: g.add(op, [image(g)], exact=exact)


def batch_normalization(g: Graph) -> None:
    v = image(g)
    c = v.shape[1]
    parts = [g.new(v.dtype, (c,)) for _ in range(3)]
    g.add("BatchNormalization", [v, *parts, g.new(v.dtype, (c,), 1, 4)], exact=False)


def instance_normalization(g: Graph) -> None:
    v = image(g)
    g.add("InstanceNormalization", [v, *(g.new(v.dtype, (v.shape[1],)) for _ in range(2))], exact=False, epsilon=0.1)


def group_normalization(g: Graph) -> None:
    v = image(g)
    c = v.shape[1]
    groups = g.rng.choice([n for n in range(1, c + 1) if c % n == 0])
    g.add("GroupNormalization", [v, *(g.new(v.dtype, (c,)) for _ in range(2))], exact=False, num_groups=groups, epsilon=0.1)


def layer_normalization(g: Graph) -> None:
    v = g.some(SINGLE, least=1)
    if 0 in v.shape:
        raise Unfit
    axis = g.axis(v)
    shape = v.shape[axis:]
    g.add(
        "LayerNormalization",
        [v, g.new(v.dtype, shape), *([g.new(v.dtype, shape)] if g.chance(0.5) else [])],
        exact=False,
        axis=axis,
        epsilon=0.1,
    )


def lrn(g: Graph) -> None:
    g.add("LRN", [image(g)], exact=False, size=g.rng.choice((1, 3, 5)))


def mean_variance(g: Graph) -> None:
    v = image(g)
    if len(v.shape) != 4 or v.array.std() < 0.5:
        raise Unfit
    g.add("MeanVarianceNormalization", [v], exact=False, axes=[0, 2, 3])


def prelu(g: Graph) -> None:
    v = g.some(FLOATS)
    shape = tuple(1 if g.chance(0.5) else d for d in v.shape)
    g.add("PRelu", [v, g.new(v.dtype, shape)])


def resize(g: Graph) -> None:
    v = image(g)
    mode = g.rng.choice(("nearest", "linear", "linear"))
    scales = [1.0, 1.0, *(g.rng.choice((0.5, 1.0, 2.0, 1.5)) for _ in v.shape[2:])]
    how = g.rng.choice(("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"))
    g.add("Resize", [v, None, g.constant(scales, "float32")], exact=False, mode=mode, coordinate_transformation_mode=how,
          nearest_mode=g.rng.choice(("round_prefer_floor", "floor", "ceil")))  # fmt: skip


def recurrent(op: str, gates: int, states: int) -> Maker:
    def make(g: Graph) -> None:
        steps, batch, features, hidden = g.shape(4, high=3)
        both = g.chance(0.3)
        x = g.new("float32", (steps, batch, features))
        w, r = (g.new("float32", (1 + both, gates * hidden, k), -1, 1) for k in (features, hidden))
        more = [g.new("float32", (1 + both, 2 * gates * hidden), -1, 1)] if g.chance(0.6) else []
        direction = "bidirectional" if both else g.rng.choice(("forward", "reverse"))
        extra = {"linear_before_reset": int(g.chance(0.5))} if op == "GRU" else {}
        g.add(op, [x, w, r, *more], outputs=states, exact=False, hidden_size=hidden, direction=direction, **extra)

    return make


def quantize(g: Graph) -> None:
    v = g.some(("float32",), exact=True)
    g.add("QuantizeLinear", [v, g.constant(0.5, "float32"), g.constant(g.rng.randint(0, 9), g.rng.choice(("uint8", "int8")))])


def dequantize(g: Graph) -> None:
    v = g.some(("uint8", "int8"))
    g.add("DequantizeLinear", [v, g.constant(0.25, "float32"), g.constant(g.rng.randint(0, 9), v.dtype)])


def qlinear_matmul(g: Graph) -> None:
    a = g.some(("uint8",), rank=2)
    b = g.new("uint8", (a.shape[1], g.shape(1)[0]))
    g.add("QLinearMatMul", [a, g.constant(0.5, "float32"), g.constant(1, "uint8"), b, g.constant(0.5, "float32"), g.constant(2, "uint8"),
                            g.constant(1.0, "float32"), g.constant(3, "uint8")])  # fmt: skip


def grid_sample(g: Graph) -> None:
    n, c, h, w = g.rng.randint(1, 2), g.rng.randint(1, 3), *(g.rng.randint(2, 5) for _ in range(2))
    grid = g.constant(np.array([g.rng.uniform(-1.1, 1.1) for _ in range(n * 6 * 2)]).reshape(n, 2, 3, 2), "float32")
    g.add("GridSample", [g.new("float32", (n, c, h, w)), grid], exact=False, align_corners=int(g.chance(0.5)),
          padding_mode=g.rng.choice(("zeros", "border")))  # fmt: skip


def bitwise(op: str) -> Maker:
    return binary(op, INTEGERS)


def shifted(g: Graph) -> None:
    v = g.some(("uint8",))
    g.add("BitShift", [v, g.like(v, 0, 3)], direction=g.rng.choice(("LEFT", "RIGHT")))


def logical(op: str) -> Maker:
    return binary(op, ("bool",))


def branch(g: Graph) -> None:
    v = g.some(SINGLE)
    outs = [helper.make_graph([helper.make_node(op, [v.name], [out])], op, [], [helper.make_empty_tensor_value_info(out)])
            for op, out in ((g.rng.choice(("Neg", "Relu")), g.fresh()), (g.rng.choice(("Abs", "Identity")), g.fresh()))]  # fmt: skip
    condition = g.new("bool", ())
    chosen = outs[0 if condition.array else 1].node[0]
    (made,) = g.add(chosen.op_type, [v])  # computed by the reference; then the node is replaced
    g.nodes[-1] = helper.make_node("If", [condition.name], [made.name], then_branch=outs[0], else_branch=outs[1])


def small(op: str) -> Maker:
    return lambda g: g.add(op, [g.new("float32", g.shape(), 0, 1)], exact=False)


def loss(g: Graph) -> None:
    n, c = g.rng.randint(1, 3), g.rng.randint(2, 5)
    labels = g.new("int64", (n,), 0, c - 1)
    g.add("SoftmaxCrossEntropyLoss", [g.new("float32", (n, c)), labels], exact=False, reduction=g.rng.choice(("none", "mean", "sum")))


_EXACT = ("Abs", "Neg", "Identity", "Relu")
_ROUNDING = ("Floor", "Ceil", "Round", "Sign")
_SMOOTH = ("Exp", "Sin", "Cos", "Tanh", "Sigmoid", "Erf", "Softplus", "Softsign", "Atan", "Asinh", "Sinh", "Cosh", "Mish", "HardSwish")

OPERATORS: Mapping[str, Maker] = {
    **{op: unary(op, (*FLOATS, *SIGNED), True) for op in ("Abs", "Neg")},
    **{op: unary(op, FLOATS, True) for op in ("Relu",)},
    "Identity": unary("Identity", (*NUMBERS, "bool"), True),
    **{op: unary(op, FLOATS, True, needs_exact=True) for op in _ROUNDING},
    **{op: unary(op, SINGLE) for op in _SMOOTH},
    "Elu": unary("Elu", SINGLE, alpha=(0.5, 2.0)), "Selu": unary("Selu", SINGLE), "Celu": unary("Celu", ("float32",), alpha=(0.5, 2.0)),
    "LeakyRelu": unary("LeakyRelu", SINGLE, alpha=(0.25, 0.5)), "HardSigmoid": unary("HardSigmoid", SINGLE, alpha=(0.25,)),
    "Gelu": unary("Gelu", SINGLE, approximate=("none", "tanh")), "ThresholdedRelu": unary("ThresholdedRelu", SINGLE, needs_exact=True, alpha=(0.5,)),
    "Shrink": unary("Shrink", SINGLE, needs_exact=True, lambd=(1.5,), bias=(0.5,)), "Swish": lambda g: g.add("Mul", [v := g.some(SINGLE), g.add("Sigmoid", [v], exact=False)[0]]),
    "Sqrt": lambda g: g.add("Sqrt", g.add("Abs", [g.some(SINGLE, exact=True)]), exact=False),
    "Log": lambda g: g.add("Log", [g.new("float32", g.shape(), 1, 9)], exact=False),
    "Reciprocal": lambda g: g.add("Reciprocal", [g.new("float32", g.shape(), 1, 9)], exact=False),
    **{op: small(op) for op in ("Asin", "Acos", "Tan")},
    "Atanh": lambda g: g.add("Atanh", [g.constant(np.linspace(-0.9, 0.9, 7), "float32")], exact=False),
    "Acosh": lambda g: g.add("Acosh", [g.new("float32", g.shape(), 1, 9)], exact=False),
    "IsNaN": unary("IsNaN", FLOATS, True), "IsInf": unary("IsInf", ("float32", "float64"), True), "Not": unary("Not", ("bool",), True),
    "BitwiseNot": unary("BitwiseNot", INTEGERS, True),
    **{op: binary(op) for op in ("Add", "Sub", "Mul")}, "Div": division, "Mod": remainder, "Pow": power,
    **{op: bitwise(op) for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")}, "BitShift": shifted,
    **{op: logical(op) for op in ("And", "Or", "Xor")},
    **{op: binary(op, NUMBERS, True, True) for op in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")},
    "Max": several("Max", (*FLOATS, "int32", "int64")), "Min": several("Min", (*FLOATS, "int32", "int64")), "Sum": several("Sum"), "Mean": several("Mean", SINGLE, False),
    "Clip": clip, "Where": where, "Cast": cast, "PRelu": prelu,
    **{op: reduction(op, True) for op in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceSumSquare")},
    **{op: reduction(op, False, SINGLE) for op in ("ReduceMean", "ReduceL2", "ReduceLogSumExp")}, "ReduceProd": reduction("ReduceProd", True),
    "ArgMax": arg("ArgMax"), "ArgMin": arg("ArgMin"),
    "Softmax": along("Softmax"), "LogSoftmax": along("LogSoftmax"), "Hardmax": along("Hardmax", exact=True, needs_exact=True), "LpNormalization": along("LpNormalization", p=(1, 2)),
    "Transpose": transpose, "Reshape": reshape, "Squeeze": squeeze, "Unsqueeze": unsqueeze, "Flatten": lambda g: g.add("Flatten", [v := g.some((*NUMBERS, "bool"), least=1)], axis=g.rng.randint(0, len(v.shape))),
    "Concat": concat, "Split": split, "Slice": slices, "Gather": gather, "GatherElements": gather_elements, "GatherND": gather_nd,
    "ScatterElements": scatter_elements, "ScatterND": scatter_nd, "Expand": expand, "Tile": tile, "Pad": pad,
    "DepthToSpace": blocks("DepthToSpace"), "SpaceToDepth": blocks("SpaceToDepth"), "Trilu": trilu, "CumSum": cumulative("CumSum"),
    "OneHot": one_hot, "EyeLike": eye_like, "TopK": top_k, "Shape": shape_of, "ConstantOfShape": shaped, "ReverseSequence": reverse_sequence,
    "MatMul": matmul, "Gemm": gemm, "MatMulInteger": matmul_integer, "Einsum": einsum, "Conv": conv, "ConvTranspose": conv_transpose, "ConvInteger": conv_integer,
    "MaxPool": pool("MaxPool", True, ceil_mode=(0, 1)), "AveragePool": pool("AveragePool", False, count_include_pad=(0, 1)), "LpPool": pool("LpPool", False, p=(1, 2)),
    "GlobalAveragePool": global_pool("GlobalAveragePool", False), "GlobalMaxPool": global_pool("GlobalMaxPool", True), "GlobalLpPool": global_pool("GlobalLpPool", False),
    "BatchNormalization": batch_normalization, "InstanceNormalization": instance_normalization, "GroupNormalization": group_normalization,
    "LayerNormalization": layer_normalization, "LRN": lrn, "MeanVarianceNormalization": mean_variance, "Resize": resize, "GridSample": grid_sample,
    "RNN": recurrent("RNN", 1, 2), "GRU": recurrent("GRU", 3, 2), "LSTM": recurrent("LSTM", 4, 3),
    "QuantizeLinear": quantize, "DequantizeLinear": dequantize, "QLinearMatMul": qlinear_matmul, "DynamicQuantizeLinear": lambda g: g.add("DynamicQuantizeLinear", [g.some(("float32",), least=1, exact=True)], outputs=3, exact=False),
    "If": branch, "SoftmaxCrossEntropyLoss": loss, "Det": lambda g: g.add("Det", [g.new("float32", (*g.shape(1), 3, 3))], exact=False),
}  # fmt: skip
