"""Derivatives of all operators that have one, at odd sizes."""

import numpy as np
import pytest

from tcomp import te
from tcomp.ir.interpreters.te import evaluate
from tcomp.ops import OPERATORS
from tests.ir.transforms.differences import check, placeholders

RNG = np.random.default_rng(7)


def x(*shape, low=-1.5, high=1.5):
    return RNG.uniform(low, high, shape)


def positive(*shape):
    return RNG.uniform(0.3, 2.0, shape)


def gram(n):
    """A matrix that is positive definite."""
    rows = x(n, n)
    return rows @ rows.T + 4 * np.eye(n)


def ints(*shape, below):
    return RNG.integers(0, below, shape)


S = (5, 7)
RELU, TANH, SIGMOID = (("relu", 0.0, 0.0), ("tanh", 0.0, 0.0), ("sigmoid", 0.0, 0.0))
SIMPLE = [
    "abs",
    "neg",
    "asinh",
    "atan",
    "cos",
    "cosh",
    "sin",
    "sinh",
    "tan",
    "tanh",
    "exp",
    "erf",
    "sigmoid",
    "softplus",
    "relu",
    "mish",
    "hard_swish",
    "softsign",
    "sign",
    "ceil",
    "floor",
    "round",
    "probit",
    "expm1",
    "log1p",
    "trunc",
    "reciprocal",
    "log",
    "sqrt",
    "acos",
    "asin",
    "atanh",
    "acosh",
    "angle",
    "exp2",
    "log2",
    "log10",
    "rsqrt",
    "cbrt",
    "round_away",
]
UNARY = {
    **{name: {} for name in SIMPLE},
    "leaky_relu": {"alpha": 0.1}, "thresholded_relu": {"alpha": 0.3}, "elu": {"alpha": 1.5}, "celu": {"alpha": 0.7},
    "selu": {"alpha": 1.6, "gamma": 1.05}, "gelu": {"approximate": "none"}, "swish": {"alpha": 1.3}, "hard_sigmoid": {"alpha": 0.2, "beta": 0.5},
    "shrink": {"lambd": 0.4, "bias": 0.1}, "scale": {"factor": 1.7}, "clip_const": {"low": -0.5, "high": 0.8},
}  # fmt: skip
DOMAIN = {
    "log": (0.3, 2),
    "log1p": (-0.7, 2),
    "log2": (0.3, 2),
    "log10": (0.3, 2),
    "rsqrt": (0.3, 2),
    "sqrt": (0.3, 2),
    "reciprocal": (0.4, 2),
    "acosh": (1.2, 3),
    "probit": (0.1, 0.9),
} | dict.fromkeys(["acos", "asin", "atanh"], (-0.9, 0.9))
AXES = {"axes": (1,), "keepdims": False}
CASES = [(name, [x(*S, low=lo, high=hi)], attrs) for name, attrs in UNARY.items() for lo, hi in [DOMAIN.get(name, (-1.5, 1.5))]]
CASES += [("gelu", [x(*S)], {"approximate": "tanh"})]
BINARY = ("add", "sub", "mul", "max", "min", "sum", "mean", "prelu", "atan2", "hypot", "fmax", "fmin", "copy_sign")
CASES += [(name, [x(*S), x(7)], {}) for name in BINARY]
CASES += [
    ("div", [x(*S), positive(5, 1)], {}),
    ("pow", [positive(*S), x(7)], {}),
    ("fmod", [x(*S), positive(7)], {}),
    ("mod", [x(*S), positive(7)], {}),
    ("floor_divide", [x(*S), positive(7)], {}),
    ("trunc_divide", [x(*S), positive(7)], {}),
]
CASES += [
    ("where", [RNG.random(S) < 0.5, x(*S), x(7)], {}), ("clip", [x(*S), np.array(-0.4), np.array(0.6)], {}), ("cast", [x(*S)], {"dtype": "float64"}),
    ("with_shape", [x(*S)], {"shape": S}),
    *[(f"reduce_{n}", [x(3, 5, 7)], {"axes": (0, 2), "keepdims": True}) for n in ("sum", "mean", "max", "min", "l1", "l2", "sum_square", "log_sum_exp", "prod")],
    *[(f"reduce_{n}", [positive(*S)], AXES) for n in ("prod", "log_sum", "mean")],
    ("softmax", [x(3, 5, 7)], {"axes": (2,)}), ("safe_softmax", [x(3, 5, 7)], {"axes": (2,)}),
    ("log_softmax", [x(3, 5, 7)], {"axes": (1,)}), ("hardmax", [x(*S)], {"axes": (1,)}),
    *[(n, [x(*S)], {"axis": 1, "exclusive": e, "reverse": r}) for n in ("cum_sum", "cum_prod") for e, r in ((False, False), (True, True))],
    ("nll_loss", [x(5, 3, 2), ints(5, 2, below=3), positive(3)], {"ignore_index": 1, "reduction": "mean"}),
    ("nll_loss", [x(5, 3), ints(5, below=3), None], {"ignore_index": None, "reduction": "sum"}),
    ("batch_scale", [x(5), positive(5)], {"epsilon": 1e-5}), ("batch_shift", [x(5), x(5), x(5)], {}), ("scale_shift", [x(3, 5, 7), x(5), x(5)], {}),
    ("batch_moments", [x(3, 5, 7)], {}), ("running", [x(5), x(5)], {"momentum": 0.9}),
    ("instance_norm", [x(2, 3, 5, 3), x(3), x(3)], {"epsilon": 1e-3}), ("group_norm", [x(2, 6, 5), x(6), x(6)], {"groups": 3, "epsilon": 1e-3}),
    ("layer_norm", [x(3, 5, 7), x(7), x(5, 7)], {"axis": 1, "epsilon": 1e-3}), ("rms_norm", [x(3, 7), x(7)], {"axis": 1, "epsilon": 1e-3}),
    ("lrn", [x(2, 7, 3)], {"size": 3, "alpha": 0.1, "beta": 0.75, "bias": 1.0}), ("lp_normalize", [x(*S)], {"axis": 1, "p": 2}),
    ("matmul", [x(5, 3, 7), x(7, 3)], {}), ("matmul", [x(7, 5), x(2, 3, 7)], {"transpose_a": True, "transpose_b": True}), ("matmul", [x(5), x(5)], {}),
    ("einsum", [x(3, 5, 5), x(5, 7)], {"equation": "bii,ij->bj"}), ("det", [x(2, 3, 3)], {}), ("inverse", [x(2, 3, 3) + 3 * np.eye(3)], {}),
    ("softmax_product", [x(2, 5, 7), x(2, 7, 3)], {}),
    ("conv", [x(1, 4, 9, 7), x(6, 2, 3, 3)], {"strides": (2, 1), "dilations": (1, 2), "group": 2}), ("conv", [x(2, 3, 9), x(3, 1, 2)], {"strides": (3,), "dilations": (1,), "group": 3}),
    ("conv_transpose", [x(1, 4, 3, 5), x(4, 3, 3, 2)], {"strides": (2, 2), "dilations": (1, 1), "group": 2, "before": (1, 0), "shape": (5, 10)}),
    ("deform_conv", [x(1, 2, 5, 5), x(3, 2, 3, 3), x(1, 18, 3, 3), x(1, 9, 3, 3)], {"strides": (1, 1), "dilations": (1, 1), "before": (0, 0), "group": 1, "offset_group": 1}),
    ("add_channels", [x(2, 3, 5), x(3)], {}), ("expert_dense", [x(5, 2, 3), x(4, 7, 3), ints(5, 2, below=4)], {}),
    ("causal_mask", [x(2, 3, 5), ints(3, below=5), ints(2, below=2)], {"window": 2}),
    ("max_pool", [x(1, 2, 7, 5)], {"kernel": (3, 2), "strides": (2, 1), "dilations": (1, 2)}),
    ("average_pool", [x(1, 2, 7, 5)], {"kernel": (3, 2), "strides": (2, 1), "dilations": (1, 1), "counted": ((1, 6), None)}),
    ("lp_pool", [x(1, 2, 7, 5)], {"kernel": (3, 2), "strides": (2, 1), "dilations": (1, 1), "p": 3}), ("global_lp_pool", [x(2, 3, 5)], {"p": 2}),
    ("max_unpool", [x(1, 2, 3), np.array([[[1, 4, 2], [8, 6, 9]]])], {"shape": (1, 2, 5), "source": (1, 2, 5)}),
    ("transpose", [x(2, 3, 5)], {"perm": (2, 0, 1)}), ("reshape", [x(2, 3, 5)], {"shape": (5, 6)}), ("view", [x(3, 5)], {"shape": (1, 15, 1)}),
    ("expand", [x(3, 1)], {"shape": (2, 3, 5)}), ("broadcast_to", [x(3, 1)], {"shape": (2, 3, 5)}), ("tile", [x(3, 5)], {"repeats": (2, 3)}),
    ("slice", [x(9, 7)], {"starts": (7, 1), "steps": (-2, 3), "shape": (3, 2)}), ("concat", [x(3, 2), x(3, 5), x(3, 1)], {"axis": 1}),
    *[("pad", [x(5, 7), None if m else np.array(0.7)], {"before": (2, 3), "after": (1, 2), "mode": m or "constant"}) for m in ("", "edge", "reflect", "wrap")],
    ("depth_to_space", [x(1, 8, 3, 5)], {"block": 2, "channels_first": True}), ("space_to_depth", [x(1, 3, 4, 6)], {"block": 2, "channels_first": False}),
    ("reverse_sequence", [x(5, 3), np.array([2, 5, 1])], {"batch_axis": 1, "time_axis": 0}), ("trilu", [x(5, 7), None], {"diagonal": 1, "upper": True}),
    ("arange_from", [np.array(0.3), np.array(1.7)], {"count": 5}), ("identity", [x(3)], {}), ("stack", [x(3, 5), x(3, 5), x(3, 5)], {"axis": 1}),
    ("part", [x(3, 5)], {"index": 1}), ("gather", [x(3, 5, 2), ints(2, 3, below=5) - 2], {"axis": 1}), ("gather_elements", [x(3, 5), ints(4, 5, below=3)], {"axis": 0}),
    ("gather_nd", [x(3, 5, 2), ints(3, 4, 1, below=5)], {"batch_dims": 1}),
    *[("scatter_elements", [x(5, 3), ints(4, 3, below=5), x(4, 3)], {"axis": 0, "reduction": r}) for r in ("none", "add", "mul", "max", "min")],
    *[("scatter_nd", [x(5, 3), ints(4, 1, below=5), x(4, 3)], {"reduction": r}) for r in ("none", "add", "mul")],
    ("tensor_scatter", [x(2, 5, 3), x(2, 2, 3), np.array([1, 3])], {"axis": 1, "circular": True}), ("one_hot", [ints(5, below=3), x(2)], {"depth": 3, "axis": 1}),
    ("top_k", [x(3, 7)], {"k": 3, "axis": 1, "largest": True}), ("repeat", [x(3, 5)], {"factor": 3, "axis": 1}),
    ("resample", [x(3, 5), ints(7, 2, below=5), x(7, 2)], {"axis": 1}),
    *[("grid_sample", [x(1, 2, 5, 4), x(1, 3, 2, 2, low=-1.2, high=1.2)], {"mode": m, "padding": p, "align_corners": a}) for m, p, a in (("linear", "zeros", False), ("cubic", "border", True), ("linear", "reflection", False), ("nearest", "zeros", True))],
    ("affine_grid", [x(2, 2, 3)], {"spatial": (3, 5), "align_corners": True}),
    *[("roi_align", [x(2, 2, 7, 5), np.array([[0.3, 0.4, 3.1, 4.9], [1.1, 0.2, 4.3, 3.3]]), np.array([1, 0])], {"size": (2, 3), "samples": 2, "scale": 0.9, "mode": m, "half_pixel": True}) for m in ("avg", "max")],
    ("crop_and_resize", [x(2, 2, 7, 5), np.array([[0.1, 0.2, 0.7, 0.9], [0.3, 0.1, 0.8, 0.6]]), np.array([1, 0])], {"size": (2, 3), "mode": "linear", "outside": 0.5}),
    ("col2im", [x(1, 12, 6)], {"image": (4, 3), "block": (2, 2), "dilations": (1, 1), "pads": (0, 0, 0, 0), "strides": (1, 1), "channels": 3}),
    ("lstm_cell", [x(3, 20), x(3, 20), x(3, 5), x(15)], {"activations": (SIGMOID, TANH, TANH), "clip": 2.0, "input_forget": False}),
    ("gru_reset", [x(3, 15), x(3, 10), x(3, 5)], {"activation": SIGMOID, "clip": None}),
    ("gru_cell", [x(3, 15), x(3, 10), x(3, 5), None, x(3, 5)], {"activations": (SIGMOID, TANH), "clip": None}),
    ("gru_cell", [x(3, 15), x(3, 15), None, x(5), x(3, 5)], {"activations": (SIGMOID, RELU), "clip": None}),
    ("rnn_cell", [x(3, 5), x(3, 5)], {"activation": TANH, "clip": None}),
    ("within", [x(3, 5), x(3, 5), np.array([2, 1, 3]), np.array(1)], {"count": 3}),
    ("dft", [x(2, 5, 2), x(3, 5), x(3, 5)], {"axis": 1, "real": False}), ("frames", [x(2, 11, 1), x(3)], {"length": 3, "step": 2, "count": 5}),
    ("adagrad", [np.array(0.1), np.array(2), x(3, 5), x(3, 5), positive(3, 5)], {"norm_coefficient": 0.1, "decay_factor": 0.2, "epsilon": 0.1}),
    ("adam", [np.array(0.1), np.array(2), x(3), x(3), x(3), positive(3)], {"alpha": 0.9, "beta": 0.99, "norm_coefficient": 0.1, "norm_coefficient_post": 0.1, "epsilon": 0.1}),
    ("momentum", [np.array(0.1), np.array(2), x(3), x(3), x(3)], {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.1, "mode": "nesterov"}),
    ("squared_distances", [x(5, 3), x(4, 3)], {}), ("softmax_zero", [x(5, 3)], {}),
    ("winograd_input", [x(1, 2, 6, 6)], {"tile": 2, "taps": (3, 3)}), ("winograd_product", [x(4, 4, 1, 2, 2, 3), x(4, 4, 3, 5)], {}),
    ("winograd_output", [x(4, 4, 1, 2, 2, 3)], {"tile": 2, "shape": (4, 3)}),
    ("strassen_rows", [x(5, 4)], {}), ("strassen_input", [x(5, 4), positive(5)], {}), ("strassen_output", [x(7, 3, 2), positive(5)], {}),
    ("strassen_pixels", [x(1, 4, 3)], {"rows": 2}), ("strassen_image", [x(7, 2, 2)], {"shape": (1, 4, 3), "rows": 2}),
    ("dropout", [np.array([3, 4], np.uint32), x(5, 7), None, np.array(True)], {"probability": 0.4}),
    ("dequantize", [ints(3, 5, below=9), positive(5), x(5)], {"axis": 1, "block": 0, "dtype": "float64"}),
    ("block_product", [x(3, 8), ints(5, 4, below=255).astype(np.uint8), positive(5, 2), x(5, 2), None], {"bits": 4, "block": 4}),
    ("gather_windows", [x(5, 3, 6), np.array([[1, 0], [4, 3], [0, 2]])], {"offset_dims": (1, 2), "collapsed": (0,), "batching": (), "index_batching": (), "index_map": (0, 2), "sizes": (1, 3, 2), "fill": 0.5}),
    *[("scatter_windows", [x(5, 3), np.array([[1], [4], [1]]), x(3, 3)], {"window_dims": (1,), "inserted": (0,), "batching": (), "index_batching": (), "index_map": (0,), "reduction": r, "clip": True}) for r in ("none", "add", "sub")],
    ("slice_at", [x(5, 7), np.array(1), np.array(9)], {"shape": (3, 2)}), ("store_at", [x(5, 7), x(3, 2), np.array(1), np.array(9)], {}),
    *[("integer_pow", [positive(*S)], {"exponent": n}) for n in (-2, 0, 5)], ("select_n", [ints(*S, below=3), x(*S), x(*S), x(*S)], {}),
    ("dilate", [x(3, 5), np.array(0.7)], {"steps": (2, 3)}), ("quotient", [x(*S), positive(7)], {}), ("remainder", [x(*S), positive(7)], {}),
    *[("reduce_windows", [x(5, 7)], {"kernel": (3, 2), "strides": (2, 1), "dilations": (1, 2), "reduction": r}) for r in ("sum", "max", "prod")],
    ("scatter_to_argmax", [ints(3, 2, below=4), x(3, 2)], {"shape": (5, 3), "kernel": (2, 2), "strides": (2, 1), "before": (1, 0)}),
    ("gather_argmax", [ints(3, 2, below=4), x(5, 3)], {"kernel": (2, 2), "strides": (2, 1), "dilations": (1, 1), "before": (1, 0)}),
    ("cum_max", [x(*S)], {"axis": 1, "exclusive": False, "reverse": True}), ("cum_min", [x(*S)], {"axis": 0, "exclusive": False, "reverse": False}),
    ("sort_by", [x(*S), x(*S)], {"axis": 1, "keys": 1}),
    ("look_up", [ints(3, 5, below=4), np.arange(4), x(4), np.array(0.3), np.array(0.1)], {}),
    *[(name, [positive(*S)], {}) for name in ("bessel_i0", "bessel_i0e", "bessel_i1", "bessel_i1e", "digamma", "lgamma")],
    *[(name, [x(*S, low=-0.9, high=0.9)], {}) for name in ("erf_inv", "erfc", "erfcx")],
    ("digamma_derivative", [positive(*S)], {"order": 1}), ("zeta", [positive(*S) + 1.5, positive(*S)], {}),
    ("cum_log_sum_exp", [x(*S)], {"axis": 1, "exclusive": False, "reverse": True}), ("lu", [x(4, 4)], {}),
    ("cholesky", [gram(4)], {"upper": False}), ("triangular_solve", [gram(4), x(4, 3)], {"upper": True, "unit": False}),
    ("leaf_scores", [ints(5, 3, below=7), x(7, 2)], {"aggregate": "SUM"}), ("leaf_scores", [ints(5, 3, below=7), x(7, 2)], {"aggregate": "MAX"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arrays", "attrs"), CASES, ids=[f"{n}-{c[0]}" for n, c in enumerate(CASES)])
def test_derivative(name, arrays, attrs):
    tensors = placeholders(*arrays)
    outputs = OPERATORS[name].apply(tensors, attrs)
    check(outputs, {t: a for t, a in zip(tensors, arrays, strict=True) if t is not None})


WITHOUT = [
    "if",
    "kernel",
    "loop",
    "size",
    "and",
    "or",
    "xor",
    "not",
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "isnan",
    "isinf",
    "sign_bit",
    "shift_left",
    "shift_right",
    "bitcast",
    "bernoulli",
    "arg_max",
    "arg_min",
    "max_pool_indices",
    "at_most",
    "ends",
    "positions",
    "unravelled",
    "unique",
    "non_max_suppression",
    "multinomial",
    "tree_leaves",
    "count_grams",
    "one_hot_of",
    "arange",
    "dims",
    "eye",
    "full",
    "dft_table",
    "resize_table",
    "random_uniform",
    "random_normal",
    "quantize",
    "requantize",
    "centred",
    "dynamic_range",
    "swap_sign",
    "unpack",
    "round_to",
    "tree_scores",
    "couple",
    "shift_bits_left",
    "shift_bits_right",
    "popcount",
    "shift_right_logical",
    "high_product",
    "leading_zeros",
    "is_finite",
    "next_after",
    "total_order",
    "reduce_precision",
    "bitcast_parts",
    "window_argmax",
    "stop",
    "append",
    "byte_blocks",
    "byte_block_product",
    "wide_product",
    "expression",
    "required",
    "row_order",
    "polygamma",
]
"""What has no derivative: graphs in graphs; bools and bits; positions and counts; numbers of no inputs of floats; roundings. `tree_scores` is
`leaf_scores` of `tree_leaves`; `couple` iterates until it has converged, which is refused;
products of bytes, and of narrow numbers in a wider type, are what passes make of others; `expression` is what its text says; `polygamma`
has one along one of its two inputs alone."""


def test_no_operator_is_left_out():
    assert sorted(set(OPERATORS) - {name for name, _, _ in CASES}) == sorted(WITHOUT)


def test_derivatives_of_torch():
    """Also where there are several: equal maxima, zeros of products, the border of an activation."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    F = torch.nn.functional
    ties = np.array([[1.0, 3.0, 3.0, -1.0], [2.0, 2.0, 2.0, 0.0], [0.0, 1.0, 0.0, 2.0]])
    image, weights = x(1, 4, 7, 6), x(6, 2, 3, 2)
    cases = [
        ("reduce_max", [ties], {"axes": (1,), "keepdims": False}, lambda t: t.amax(1)),
        ("reduce_min", [ties], {"axes": (0, 1), "keepdims": False}, lambda t: t.amin((0, 1))),
        ("reduce_prod", [ties], {"axes": (1,), "keepdims": False}, lambda t: t.prod(1)),
        ("max", [ties, ties[::-1].copy()], {}, torch.maximum),
        ("relu", [ties], {}, torch.relu),
        ("abs", [ties], {}, torch.abs),
        ("gelu", [ties], {"approximate": "tanh"}, lambda t: F.gelu(t, approximate="tanh")),
        ("log_softmax", [ties], {"axes": (1,)}, lambda t: F.log_softmax(t, 1)),
        ("conv", [image, weights], {"strides": (2, 1), "dilations": (1, 2), "group": 2}, lambda a, w: F.conv2d(a, w, stride=(2, 1), dilation=(1, 2), groups=2)),
        ("layer_norm", [ties, x(4), x(4)], {"axis": 1, "epsilon": 1e-5}, lambda t, s, b: F.layer_norm(t, (4,), s, b)),
        ("einsum", [x(3, 5, 5), x(5, 7)], {"equation": "bii,ij->bj"}, lambda a, b: torch.einsum("bii,ij->bj", a, b)),
    ]  # fmt: skip
    for name, arrays, attrs, function in cases:
        tensors = placeholders(*arrays)
        y = OPERATORS[name].apply(tensors, attrs)[0]
        seed = te.placeholder(y.shape, y.dtype, "seed")
        leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
        expected = function(*leaves)
        given = RNG.normal(size=tuple(expected.shape))
        expected.backward(torch.tensor(given))
        found = evaluate(te.vjp(y, tensors, seed), {**dict(zip(tensors, arrays, strict=True)), seed: given})
        for gradient, leaf in zip(found, leaves, strict=True):
            np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-9, atol=1e-12, err_msg=name)
