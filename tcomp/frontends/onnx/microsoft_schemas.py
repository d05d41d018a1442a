"""Schemas for the operators of ONNX Runtime, which the `onnx` package does not know: the domain `com.microsoft`, and an addition to the
standard one. Source: ONNX Runtime's own schemas (docs/ContribOperators.md).

A signature is a line of text: inputs, number of outputs (one where nothing is said), attributes. An input is `name`, or `name:type` where
it is not of the floating-point type T; `?` marks optional ones, `*` the last one if it may be repeated. Inputs whose type is the same
capital letter have the same type. An attribute is `name=default`, `name:type` (no default), or `name!type` (required).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from onnx import helper
from onnx.defs import OpSchema

FLOATS = ["float16", "bfloat16", "float", "double"]
BYTES = ["int8", "uint8"]
ALL = [*FLOATS, "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
NIBBLES = ["int4", "uint4"]
TYPES: Mapping[str, list[str]] = {  # by the letter of a type variable
    "T": FLOATS, "U": FLOATS, "V": FLOATS, "A": ALL, "Q": BYTES, "R": BYTES, "S": BYTES, "M": [*BYTES, "float"],
    "I": ["int32", "int64"], "K": ["uint8", *NIBBLES], "L": [*BYTES, *NIBBLES, "int16", "uint16", "int32"],
    "N": [*BYTES, "float", "float16", "bfloat16"], "O": [*BYTES, *NIBBLES, "int16", "uint16"],
    "P": ["int16", "int32", "int64", "float", "double"],
}  # fmt: skip

_WINDOW = "kernel_shape:ints pads:ints strides:ints dilations:ints auto_pad=NOTSET"
_ATTENTION = "num_heads!int scale:float unidirectional=0 mask_filter_value:float"
_FUSED = "activation:string activation_alpha:float activation_beta:float activation_gamma:float"
_BINARY = "a:Q a_scale:float a_zero:Q? b:Q b_scale:float b_zero:Q? y_scale:float y_zero:Q?"
_UNARY = "x:Q x_scale:float x_zero:Q? y_scale:float y_zero:Q?"
_PRODUCT = "alpha=1.0 transA=0 transB=0"
_LSTM = "activations:strings activation_alpha:floats activation_beta:floats clip:float direction=forward hidden_size:int input_forget=0"
_EXPERTS = (
    "k=1 activation_type=relu activation_alpha=1.0 activation_beta=0.0 swiglu_limit:float swiglu_fusion=0 normalize_routing_weights=0 "
    "use_sparse_mixer=0 swiglu_limit_after_activation=0"
)
STANDARD: Mapping[str, str] = {"SimplifiedLayerNormalization": "x:U scale -> 2 axis=-1 epsilon=1e-5 stash_type=1"}
MICROSOFT: Mapping[str, str] = {
    "Attention": f"x weights bias? mask:int32? past? attention_bias? past_length:int32? -> 2 {_ATTENTION} do_rotary=0 "
    "past_present_share_buffer=0 qkv_hidden_sizes:ints rotary_embedding_dim=0",
    "BiasAdd": "x bias skip",
    "BiasGelu": "a b",
    "BiasSplitGelu": "x bias",
    "CDist": "a b -> 1 metric=sqeuclidean",
    "ComplexMul": "a b",
    "ComplexMulConj": "a b",
    "CropAndResize": "x rois batch:int32 size:int32 -> 1 mode=bilinear extrapolation_value=0.0",
    "DequantizeLinear": "x:L scale zero:L? -> 1 axis:int",
    "DynamicQuantizeLSTM": "x w:Q r:Q bias? lengths:int32? h? c? peephole? w_scale w_zero:Q r_scale r_zero:Q -> 3 " + _LSTM,
    "DynamicQuantizeMatMul": "a b:Q b_scale b_zero:Q? bias?",
    "EmbedLayerNormalization": "ids:int32 segments:int32? words positions segment_table? gamma beta mask:int32? position_ids:int32? -> 3 "
    "epsilon=1e-12 mask_index_type:int",
    "ExpandDims": "x:A axis:int32",
    "FastGelu": "x bias?",
    "FusedConv": f"x w bias? z? -> 1 group=1 activation:string activation_params:floats {_WINDOW}",
    "FusedGemm": f"a b c? -> 1 {_PRODUCT} beta=1.0 {_FUSED}",
    "FusedMatMul": f"a b -> 1 {_PRODUCT} transBatchA=0 transBatchB=0",
    "GatherBlockQuantized": "x:K indices:I scales zeros:K? -> 1 bits=4 block_size=128 quantize_axis=1 gather_axis=0",
    "GatherND": "x:A indices:I",
    "Gelu": "x",
    "GemmFastGelu": "x w bias?",
    "GridSample": "x grid -> 1 mode=bilinear padding_mode=zeros align_corners=0",
    "GroupNorm": "x gamma:U beta:U -> 1 groups!int activation!int channels_last=1 epsilon=1e-5",
    "GroupQueryAttention": "q k? v? past_key:N? past_value:N? lengths:int32 total:int32 cos? sin? position_ids:int64? attention_bias? "
    "sink? k_scale:float? v_scale:float? q_norm? k_norm? query_lengths:int32? -> 4 num_heads!int kv_num_heads!int scale:float softcap=0.0 "
    "causal=1 do_rotary=0 rotary_interleaved=0 local_window_size=-1 smooth_softmax=-1 qk_output=0 sliding_window_cache=0 "
    "k_quant_type=NONE v_quant_type=NONE kv_cache_bit_width:int qk_norm_epsilon=1e-6 q_norm_epsilon:float k_norm_epsilon:float",
    "Inverse": "x",
    "Irfft": "x -> 1 signal_ndim!int onesided=1 normalized=0",
    "MatMulIntegerToFloat": "a:Q b:R a_scale b_scale a_zero:Q? b_zero:R? bias?",
    "MatMulNBits": "a b:uint8 scales zeros:N? g_idx:int32? bias? -> 1 K!int N!int bits=4 block_size!int accuracy_level=0 "
    "weight_prepacked=0",
    "MoE": f"x router w1 b1? w2 b2? w3? b3? -> 1 {_EXPERTS}",
    "MultiHeadAttention": "q k? v? bias? mask:int32? attention_bias? past_key? past_value? past_length:int32? beams:int32? -> 4 "
    + _ATTENTION,
    "NhwcConv": f"x w bias? -> 1 group=1 {_WINDOW}",
    "NhwcMaxPool": "x:Q -> 1 ceil_mode=0 " + _WINDOW.replace(":", "!", 1),
    "Pad": "x pads:int64 value? -> 1 mode=constant",
    "QAttention": f"x:Q w:R bias x_scale w_scale mask:int32? x_zero:Q? w_zero:R? past? -> 2 {_ATTENTION} do_rotary=0 "
    "past_present_share_buffer=0",
    "QEmbedLayerNormalization": "ids:int32 segments:int32? words:Q positions:Q segment_table:Q? gamma:Q beta:Q mask:int32? "
    "s0 s1 s2? s3 s4 z0:Q z1:Q z2:Q? z3:Q z4:Q -> 2 epsilon=1e-12",
    "QGemm": f"a:Q a_scale a_zero:Q b:R b_scale b_zero:R c:int32? y_scale? y_zero:S? -> 1 {_PRODUCT}",
    "QLinearAdd": _BINARY,
    "QLinearAveragePool": f"{_UNARY} -> 1 kernel_shape!ints pads:ints strides:ints auto_pad=NOTSET ceil_mode=0 count_include_pad=0 "
    "channels_last=0",
    "QLinearConcat": "y_scale:float y_zero:Q parts:M* -> 1 axis!int",
    "QLinearConv": "x:Q x_scale:float x_zero:Q w:R w_scale:float w_zero:R y_scale:float y_zero:S bias:int32? -> 1 group=1 channels_last=0 "
    + _WINDOW,
    "QLinearGlobalAveragePool": "x:Q x_scale:float x_zero:Q y_scale:float y_zero:Q -> 1 channels_last=0",
    "QLinearLeakyRelu": f"{_UNARY} -> 1 alpha=0.01",
    "QLinearMul": _BINARY,
    "QLinearReduceMean": f"{_UNARY} -> 1 axes!ints keepdims!int",
    "QLinearSigmoid": _UNARY,
    "QLinearSoftmax": "x:Q x_scale:float x_zero:Q? y_scale:float y_zero:Q -> 1 opset!int axis=-1",
    "QLinearWhere": "condition:bool x:Q x_scale:float x_zero:Q y:Q y_scale:float y_zero:Q z_scale:float z_zero:Q",
    "QMoE": "x router w1:uint8 s1? b1? w2:uint8 s2? b2? w3:uint8? s3? b3? z1:uint8? z2:uint8? z3:uint8? router_weights? g1:float? "
    f"g2:float? a1:float? a2:float? c1? c2? -> 1 {_EXPERTS} expert_weight_bits=4 fc1_expert_weight_bits:int fc2_expert_weight_bits:int "
    "fc3_expert_weight_bits:int block_size=0 quant_type=int weights_prepacked=-1 accuracy_level=0",
    "QuantizeLinear": "x scale zero:O? -> 1 axis:int",
    "QuickGelu": "x -> 1 alpha=1.702",
    "Range": "start:P limit:P delta:P?",
    "Rfft": "x -> 1 signal_ndim=1 onesided=1 normalized=0",
    "RotaryEmbedding": "x position_ids:int64 cos sin -> 1 num_heads=0 rotary_embedding_dim=0 interleaved=0 is_packed_batching=0 scale=1.0",
    "SkipGroupNorm": "x gamma:U beta:U skip bias? -> 2 groups!int activation!int channels_last=1 epsilon=1e-5",
    "SkipLayerNormalization": "x skip gamma beta? bias? -> 4 epsilon=1e-12",
    "SkipSimplifiedLayerNormalization": "x skip gamma bias? -> 4 epsilon=1e-12",
    "TransposeMatMul": f"a b -> 1 {_PRODUCT}",
    "Trilu": "x:A k:int64? -> 1 upper=1",
    "Unique": "x:A -> 3",
}  # fmt: skip


@lru_cache(maxsize=256)
def find_signature(op_type: str, domain: str) -> OpSchema | None:
    """The schema of an operator of ONNX Runtime (all of them have one version); None where there is no signature for it."""
    signature = {"": STANDARD, "com.microsoft": MICROSOFT}.get(domain, {}).get(op_type)
    if signature is None:
        return None
    taken, _, rest = signature.partition(" -> ")
    count, *attributes = rest.split() or ["1"]
    inputs = [_input(word) for word in taken.split()]
    outputs = [OpSchema.FormalParameter(f"y{n}", "T", param_option=OpSchema.FormalParameterOption.Optional) for n in range(int(count))]
    constraints = [(v, [f"tensor({t})" for t in TYPES[v]], "") for v in sorted({"T", *(i.type_str for i in inputs)} & TYPES.keys())]
    made = [_attribute(word) for word in attributes]
    return OpSchema(op_type, domain, 1, inputs=inputs, outputs=outputs, type_constraints=constraints, attributes=made)


def _input(word: str) -> OpSchema.FormalParameter:
    name, _, dtype = word.rstrip("?*").partition(":")
    options = OpSchema.FormalParameterOption
    option = {"?": options.Optional, "*": options.Variadic}.get(word[-1], options.Single)
    kind = f"tensor({dtype})" if len(dtype) > 1 else dtype or "T"
    return OpSchema.FormalParameter(name, kind, param_option=option, is_homogeneous=option != options.Variadic)


def _attribute(word: str) -> OpSchema.Attribute:
    name, mark, text = re.split("([!:=])", word, maxsplit=1)
    if mark != "=":
        return OpSchema.Attribute(name, getattr(OpSchema.AttrType, text.upper()), required=mark == "!")
    number = re.fullmatch(r"-?\d+(\.?\d*(e-\d+)?)", text)
    default = text if number is None else float(text) if number[1] else int(text)
    return OpSchema.Attribute(name, helper.make_attribute(name, default))
