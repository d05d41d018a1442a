"""How families of decoders differ from Llama: in what their configs call things, in what a layer does, and in how their files hold weights.

The decoder asks for weights by Llama's names; `stored_weights` finds them under those of a family's files, in which several may be one
matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from tcomp.errors import UnsupportedError
from tcomp.frontends.language_models.stored import StoredBlocks


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    keys: what its config calls sizes, by Llama's names
    features: fields of `DecoderConfig` that are the same in all of its models
    defaults: values of the config that its files may leave out
    neutral: values of the config for which the decoder has no code if they are others
    names: the last parts of the names of tensors, by Llama's; several that are one matrix have the same
    others: names that some of its files have instead
    layers, outer: what stands in front of those of a layer ({} is its number), and of the others
    fused: how the rows of queries, keys and values lie in one matrix: all of each ("rows"), or by heads of keys ("groups")
    transposed: whether matrices of products are [in, out]
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers.{}."
    outer: str = ""
    fused: Literal["", "rows", "groups"] = ""
    transposed: bool = False


def _qkv(name: str) -> dict[str, str]:
    return {f"self_attn.{part}_proj": name for part in "qkv"}


_DENSE = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
_FUSED = {**_qkv("self_attention.query_key_value"), "self_attn.o_proj": "self_attention.dense", **_DENSE}
_OUTER = {"model.embed_tokens": "word_embeddings", "model.embed_norm": "word_embeddings_layernorm", "model.norm": "ln_f"}
_LAYER_NORM = {"layer_norm": True, "gated": False}
_BIASED = {"bias": True, "output_bias": True, "mlp_bias": True}
_GEMMA = {"unit_offset": True, "scaled_embedding": True}
_TIED = {"tie_word_embeddings": True}
_GEMMA_NORMS: dict[str, Any] = {
    "keys": {"hidden_act": "hidden_activation", "query_scalar": "query_pre_attn_scalar"},
    "features": {**_GEMMA, "post_norms": True},
    "defaults": {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "query_scalar": 256, **_TIED},
    "neutral": {"use_bidirectional_attention": False, "attention_bias": False},
    "names": {
        "self_attn.norm": "post_attention_layernorm", "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp.norm": "post_feedforward_layernorm",
    },
}  # fmt: skip
_QWEN_MOE = {"num_experts": "num_local_experts", "expert_size": "moe_intermediate_size"}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(features={"bias": True}),
    "qwen3": Family(features={"normalised_heads": True}),
    "gemma": Family(
        features=_GEMMA, defaults={"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, **_TIED},
        neutral={"use_bidirectional_attention": False},
    ),
    "gemma2": Family(**_GEMMA_NORMS),
    "gemma3_text": Family(**{
        **_GEMMA_NORMS, "features": {**_GEMMA_NORMS["features"], "normalised_heads": True},
        "defaults": {**_GEMMA_NORMS["defaults"], "rope_theta": 1e6},
    }),
    "phi": Family(
        keys={"rms_norm_eps": "layer_norm_eps"},
        features={**_LAYER_NORM, **_BIASED, "shared_norm": True, "head_bias": True},
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "parallel": True},
        neutral={"qk_layernorm": False, "tie_word_embeddings": False},
        names={
            "self_attn.o_proj": "self_attn.dense", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2", "model.norm": "final_layernorm",
        },
        outer="model.",
    ),
    "phi3": Family(
        names={**_qkv("self_attn.qkv_proj"), "mlp.gate_proj": "mlp.gate_up_proj", "mlp.up_proj": "mlp.gate_up_proj"}, fused="rows",
    ),
    "gpt2": Family(
        keys={
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions", "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon",
        },
        features={**_LAYER_NORM, **_BIASED, "positions_from": 0},
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, **_TIED},
        neutral={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        names={
            **_qkv("attn.c_attn"), "self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
            "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "model.embed_tokens": "wte", "model.positions": "wpe",
            "model.norm": "ln_f",
        },
        layers="transformer.h.{}.", outer="transformer.", fused="rows", transposed=True,
    ),
    "gpt_neox": Family(
        keys={"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct",
              "parallel": "use_parallel_residual"},
        features={**_LAYER_NORM, **_BIASED},
        defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "parallel": True},
        neutral={"attention_bias": True},
        names={**_qkv("attention.query_key_value"), "self_attn.o_proj": "attention.dense", **_DENSE, "model.embed_tokens": "embed_in",
               "model.norm": "final_layer_norm", "lm_head": "embed_out"},
        layers="gpt_neox.layers.{}.", outer="gpt_neox.", fused="groups",
    ),
    "falcon": Family(
        keys={"rms_norm_eps": "layer_norm_epsilon", "intermediate_size": "ffn_hidden_size", "hidden_act": "activation",
              "parallel": "parallel_attn"},
        features=_LAYER_NORM,
        defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-5, "parallel": True, **_TIED},
        neutral={"alibi": False},
        names={**_FUSED, **_OUTER}, others={"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"},
        layers="transformer.h.{}.", outer="transformer.", fused="groups",
    ),
    "opt": Family(
        keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        features={**_LAYER_NORM, "positions_from": 2},
        defaults={"hidden_act": "relu", "rms_norm_eps": 1e-5, **_TIED},
        neutral={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
        names={
            "self_attn.o_proj": "self_attn.out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2",
            "input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm",
            "model.embed_tokens": "embed_tokens", "model.positions": "embed_positions",
            "model.norm": "final_layer_norm",
        },
        layers="model.decoder.layers.{}.", outer="model.decoder.",
    ),
    "bloom": Family(
        keys={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "rms_norm_eps": "layer_norm_epsilon",
              "max_position_embeddings": "seq_length"},
        features={**_LAYER_NORM, **_BIASED, "alibi": True, "normalised_embedding": True},
        defaults={"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5, **_TIED},
        neutral={"apply_residual_connection_post_layernorm": False},
        names={**_FUSED, **_OUTER}, layers="transformer.h.{}.", outer="transformer.", fused="groups",
    ),
    "mixtral": Family(
        keys={"num_experts": "num_local_experts", "expert_size": "intermediate_size"},
        defaults={"norm_topk_prob": True, "rms_norm_eps": 1e-5},
        names={
            "mlp.gate": "block_sparse_moe.gate", "mlp.experts.gate_proj": "block_sparse_moe.experts.{}.w1",
            "mlp.experts.up_proj": "block_sparse_moe.experts.{}.w3", "mlp.experts.down_proj": "block_sparse_moe.experts.{}.w2",
        },
    ),
    "qwen2_moe": Family(keys=_QWEN_MOE, features={"bias": True}, neutral={"qkv_bias": True}),
    "qwen3_moe": Family(keys=_QWEN_MOE, features={"normalised_heads": True}, neutral={"attention_bias": False}),
}  # fmt: skip


class Sizes(Protocol):
    """What `DecoderConfig` says of how weights are divided."""

    @property
    def heads(self) -> int:
        """Of queries."""

    @property
    def kv_heads(self) -> int:
        """Of keys and values."""

    @property
    def head_size(self) -> int:
        """Elements of each."""


Matrix = np.ndarray | StoredBlocks
Read = Callable[[str, tuple[int, ...]], Matrix]  # (name, shape) -> weights


def stored_weights(family: Family, sizes: Sizes, names: Mapping[str, object], read: Read) -> Read:
    """Weights by Llama's names and shapes, of a family's files that have tensors of these names, which `read` gives by name and shape."""

    def found(name: str, other: str = "") -> str:
        """The name that there is; files may leave out the first part of it."""
        return next((n for n in (name, name.partition(".")[2], other) if n in names), name)

    def get(name: str, shape: tuple[int, ...]) -> Matrix:
        base, _, kind = name.rpartition(".")
        if base.startswith("model.layers."):
            _, _, layer, part = base.split(".", 3)
            start = family.layers.format(layer)
        else:
            part, start = base, family.outer if base in family.names and base != "lm_head" else ""
        theirs = family.names.get(part, part.replace("experts.", "experts.{}."))
        if len(shape) == 3:
            return _stacked([read(found(f"{start}{theirs.format(n)}.{kind}"), shape[1:]) for n in range(shape[0])])
        own = found(f"{start}{theirs}.{kind}", f"{start}{family.others.get(part, part)}.{kind}")
        sharing = [p for p in family.names if family.names[p] == theirs and p.partition(".")[0] == part.partition(".")[0] != "model"]
        rows = _rows(family, sizes, part, shape[0], sharing) if len(sharing) > 1 else None
        whole = shape if rows is None else (rows[1], *shape[1:])
        matrix = _turned(read(own, whole[::-1])) if family.transposed and part.endswith("_proj") else read(own, whole)
        return matrix if rows is None else matrix[rows[0]]

    return get


def _rows(family: Family, sizes: Sizes, part: str, count: int, sharing: Sequence[str]) -> tuple[np.ndarray, int]:
    """The rows of a matrix that several share which belong to one of them, and how many it has."""
    if part.startswith("mlp."):
        return np.arange(count) + sharing.index(part) * count, len(sharing) * count
    group, total = sizes.heads // sizes.kv_heads, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_size
    which, rows = "qkv".index(part[len("self_attn.")]), np.arange(total)
    if family.fused == "rows":
        first = (0, sizes.heads, sizes.heads + sizes.kv_heads)[which] * sizes.head_size
        return rows[first : first + count], total
    inside = (slice(0, group), slice(group, group + 1), slice(group + 1, None))[which]
    return rows.reshape(sizes.kv_heads, group + 2, sizes.head_size)[:, inside].reshape(-1), total


def _stacked(matrices: Sequence[Matrix]) -> Matrix:
    """Those of all experts as one."""
    if blocks := [m for m in matrices if isinstance(m, StoredBlocks)]:
        if len(blocks) < len(matrices):
            raise UnsupportedError("some experts in few bits, and some in floats")
        numbers, scales, zeros = (np.stack([getattr(m, part) for m in blocks]) for part in ("numbers", "scales", "zeros"))
        return StoredBlocks(numbers, scales, zeros, blocks[0].bits, blocks[0].block)
    return np.stack([m for m in matrices if isinstance(m, np.ndarray)])


def _turned(matrix: Matrix) -> np.ndarray:
    if isinstance(matrix, StoredBlocks):
        raise UnsupportedError("matrices in few bits whose rows are columns")
    return matrix.T
