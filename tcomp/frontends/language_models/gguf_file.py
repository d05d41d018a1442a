"""A GGUF file, read by the `gguf` package. Matrices of the types below keep their numbers; all others become floats.

Q8_0    blocks of 32: a float16 scale, numbers int8
Q4_0    blocks of 32: a float16 scale, bytes of two numbers 0 .. 15, of which 8 is zero: elements j in the low, 16 + j in the high bits
Q4_K    256 elements, 8 blocks of 32: float16 factors of scales and of what is subtracted, both of 6 bits; numbers of 4 bits
Q5_K    likewise, with a fifth bit of each number
Q6_K    256 elements, 16 blocks of 16: numbers of 6 bits, of which 32 is zero, scales int8 and a float16 factor of these
"""

from __future__ import annotations

import os
from typing import Any

import gguf
import numpy as np

from tcomp.errors import ImportModelError, TcompError, UnsupportedError
from tcomp.frontends.language_models.config import DecoderConfig, decoder_config
from tcomp.frontends.language_models.decoder import decoder_graph
from tcomp.frontends.language_models.stored import StoredBlocks
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Graph
from tcomp.ops.quantization import packed

STORED = {  # the bytes of the parts of a block, or of 256 elements
    "Q8_0": (2, 32), "Q4_0": (2, 16), "Q4_K": (2, 2, 12, 128), "Q5_K": (2, 2, 12, 32, 128), "Q6_K": (128, 64, 16, 2),
}  # fmt: skip
TINY = 1e-20  # a scale for blocks of one value, which is zeros times it
_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class _Reader(gguf.GGUFReader):
    """That of the package, for which there are empty arrays behind the end of a file, so that a false length lets it append without end."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        found = super()._get(offset, dtype, count, override_order)
        if found.size != count:
            raise ValueError("it ends too early")
        return found


def import_gguf(path: str | os.PathLike[str], batch: Dim = 1, drafts: int = 0) -> Graph:
    """The decoder in a file, with the inputs and outputs of `decoder`, for a `batch` of sequences or with `drafts`. Raises
    `ImportModelError` for what is damaged or does not fit, `UnsupportedError` for another architecture."""
    where = os.fspath(path)
    try:
        reader = _Reader(where)
        tensors = {t.name: t for t in reader.tensors}
        config = _config(reader, tensors, where)
        return decoder_graph(config, lambda name, shape: _weights(config, tensors, name, shape, where), batch, drafts)
    except TcompError:
        raise
    except Exception as error:  # noqa: BLE001  the package does not say what it raises for damaged files
        raise ImportModelError(
            "this is not a GGUF file that can be read", where=where, why=f"{type(error).__name__}: {error}"[:200]
        ) from None


def _config(reader: Any, tensors: dict[str, Any], where: str) -> DecoderConfig:
    def field(name: str) -> Any:
        found = reader.get_field(name)
        return None if found is None else found.contents()

    family = field("general.architecture")
    if family not in _FAMILIES:
        hint = f"{', '.join(_FAMILIES)} are supported"
        raise UnsupportedError(f"GGUF files of the architecture {family!r:.40} are not read", where=where, hint=hint)
    if "rope_freqs.weight" in tensors or field(f"{family}.rope.scaling.type") not in (None, "none"):
        raise UnsupportedError("scaled rotary positions of GGUF files", where=where, hint="compile the folder that the file was made of")
    keys = {
        "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length", "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
    }  # fmt: skip
    given: dict[str, Any] = {ours: value for ours, theirs in keys.items() if (value := field(f"{family}.{theirs}")) is not None}
    table = tensors.get("token_embd.weight")
    given |= {"vocab_size": None if table is None else int(table.shape[-1]), "tie_word_embeddings": "output.weight" not in tensors}
    return decoder_config({"model_type": _FAMILIES[family], **given}, where)


def _weights(config: DecoderConfig, tensors: dict[str, Any], name: str, shape: tuple[int, ...], where: str) -> np.ndarray | StoredBlocks:
    """The tensor that Hugging Face calls by a name."""
    base, _, kind = name.rpartition(".")
    theirs = _OUTER.get(base)
    if theirs is None:
        _, _, layer, rest = base.split(".", 3)
        theirs = f"blk.{layer}.{_LAYER[rest]}"
    tensor = tensors.get(f"{theirs}.{kind}")
    if tensor is None:
        raise ImportModelError(f"the file lacks `{theirs}.{kind}`", where=where)
    found = tuple(int(n) for n in reversed(tensor.shape))
    if found != shape:
        raise ImportModelError(f"`{tensor.name}` has the shape {list(found)}", where=where, why=f"{list(shape)} is expected")
    heads = {"self_attn.q_proj": config.heads, "self_attn.k_proj": config.kv_heads}.get(base.split(".", 3)[-1]) if "." in base else None
    order = _rows(shape[0], heads) if heads is not None and config.family == "llama" else None
    if len(shape) == 2 and theirs != "token_embd" and tensor.tensor_type.name in STORED:
        blocks = stored_blocks(np.asarray(tensor.data), tensor.tensor_type.name)
        return blocks if order is None else blocks[order]
    floats = np.asarray(gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type), np.float32).reshape(shape)
    return floats if order is None else floats[order]


def stored_blocks(data: np.ndarray, kind: str) -> StoredBlocks:
    """The numbers, scales and zeros in bytes uint8 [rows, bytes] of one of `STORED`."""
    rows = data.shape[0]
    parts = np.split(np.ascontiguousarray(data).view(np.uint8).reshape(-1, sum(STORED[kind])), np.cumsum(STORED[kind])[:-1], axis=1)
    halves = [np.ascontiguousarray(p).view(np.float16) for p in parts if p.shape[1] == 2]
    if kind == "Q8_0":
        return _blocks(rows, parts[1] ^ 128, 8, 32, halves[0], 128)  # as unsigned bytes around 128
    if kind == "Q4_0":
        return _blocks(rows, np.concatenate([parts[1] & 15, parts[1] >> 4], -1), 4, 32, halves[0], 8)
    scale = halves[0].astype(np.float32)
    if kind == "Q6_K":
        low = (parts[0].reshape(-1, 2, 1, 64) >> np.array([[0], [4]], np.uint8)) & 15
        high = (parts[1].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)) & 3
        return _blocks(rows, low.reshape(-1, 256) | high.reshape(-1, 256) << 4, 8, 16, scale * parts[2].view(np.int8), 32)
    scales, least = (a.astype(np.float32) for a in gguf.quants.Q4_K.get_scale_min(np.ascontiguousarray(parts[2])))
    scales, least = scale * scales, halves[1].astype(np.float32) * least  # numbers * scales - least
    scales[(scales == 0) & (least != 0)] = TINY
    zeros = np.divide(least, scales, out=np.zeros_like(least), where=scales != 0)
    numbers = ((parts[-1].reshape(-1, 4, 1, 32) >> np.array([[0], [4]], np.uint8)) & 15).reshape(-1, 8, 32)
    if kind == "Q5_K":
        numbers |= ((parts[3][:, None] >> np.arange(8, dtype=np.uint8)[:, None]) & 1) << 4
    return _blocks(rows, numbers, 4 if kind == "Q4_K" else 8, 32, scales, zeros)


def _blocks(rows: int, numbers: np.ndarray, bits: int, block: int, scales: np.ndarray, zeros: np.ndarray | int) -> StoredBlocks:
    scales = scales.reshape(rows, -1)
    points = np.full(scales.shape, zeros, np.uint8) if isinstance(zeros, int) else zeros.reshape(rows, -1)
    return StoredBlocks(packed(numbers.reshape(rows, -1), bits), scales, points, bits, block)


def _rows(rows: int, heads: int) -> np.ndarray:
    """Where the rows of a projection lie in files of the architecture llama, which pair neighbours instead of halves."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
