"""GGUF files: numbers are those of the `gguf` package, and models compute what they do from floats."""

import struct

import numpy as np
import pytest

import tcomp
from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.ir.graph import GraphBuilder
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.options import CompileOptions
from tcomp.pipeline import check_graph, examine_model
from tests.language_models.reference import SMALL, logits, random_weights
from tests.language_models.test_decoder import IDS, empty

gguf = pytest.importorskip("gguf", reason="pip install 'tcomp[generate]'")
from tcomp.frontends.language_models.gguf_file import STORED, _rows, import_gguf, stored_blocks
from tcomp.ops.quantization import BLOCK_PRODUCT

CONFIG = {**SMALL, "model_type": "llama", "tie_word_embeddings": False, "num_hidden_layers": 1}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write(path, weights, kind, architecture="llama", leave_out=""):
    """A file as converters write it; returns the floats that it holds, under the names of Hugging Face."""
    writer, held = gguf.GGUFWriter(path, architecture), {}
    writer.add_context_length(64)
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_block_count(1)
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_key_length(CONFIG["head_dim"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    for name, array in weights.items():
        base = name.removesuffix(".weight")
        layer = base.startswith("model.layers.")
        theirs = ("blk.0." if layer else "") + NAMES[base.split(".", 3)[3] if layer else base] + ".weight"
        if theirs == leave_out:
            continue
        heads = {"attn_q": CONFIG["num_attention_heads"], "attn_k": CONFIG["num_key_value_heads"]}.get(theirs.split(".")[-2])
        order = np.argsort(_rows(len(array), heads)) if heads else slice(None)
        data, of = array[order], kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(data, of)
        held[name] = gguf.dequantize(data, of)[np.argsort(order) if heads else slice(None)].astype(np.float32)
        writer.add_tensor(theirs, data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.mark.parametrize("kind", STORED)
def test_blocks_are_those_of_the_package(kind):
    of, rng = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)
    size = 256 if kind.endswith("K") else 96
    if size == 96:
        data = gguf.quantize(rng.normal(size=(6, size)).astype(np.float32), of)
    else:  # which the package does not write
        parts = [rng.integers(0, 256, (12, n), np.uint8) for n in STORED[kind]]
        parts = [rng.normal(size=(12, 1)).astype(np.float16).view(np.uint8) if p.shape[1] == 2 else p for p in parts]
        parts[2][0] = 0  # scales and what is subtracted are zeros
        parts[2][1, :4] = 0  # the first scales alone
        data, size = np.concatenate(parts, 1).reshape(6, -1), 512
    blocks, b = stored_blocks(data, kind), GraphBuilder()
    given = [b.constant(a, n) for n, a in {"w": blocks.numbers, "s": blocks.scales, "z": blocks.zeros}.items()]
    unit = b.input("x", "float32", (size, size))  # rows of the unit matrix: the product is the matrix
    graph = b.build(b.add(BLOCK_PRODUCT, [unit, *given, None], {"bits": blocks.bits, "block": blocks.block}, "y"))
    (found,) = evaluate_graph(graph, {"x": np.eye(size, dtype=np.float32)}).values()
    wanted = gguf.dequantize(data, of)
    np.testing.assert_allclose(found.T, wanted, rtol=0, atol=0 if kind != "Q4_K" and kind != "Q5_K" else 1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_models_are_those_of_their_floats(kind, tmp_path):
    held = write(tmp_path / "m.gguf", random_weights(CONFIG), gguf.GGMLQuantizationType[kind])
    (y, *_) = evaluate_graph(import_gguf(tmp_path / "m.gguf"), {"ids": IDS[None], **empty(CONFIG)}).values()
    np.testing.assert_allclose(y, logits(CONFIG, held, IDS), rtol=1e-4, atol=1e-3)


def test_a_file_is_compiled(tmp_path):
    held = write(tmp_path / "m.gguf", random_weights(CONFIG), gguf.GGMLQuantizationType.Q4_0)
    y = tcomp.compile(tmp_path / "m.gguf").run({"ids": IDS[None], **empty(CONFIG)})["logits"]
    wanted = logits(CONFIG, held, IDS)
    assert np.abs(y - wanted).max() < 1e-3 * np.abs(wanted).max()


def test_a_file_is_checked(tmp_path):
    write(tmp_path / "m.gguf", random_weights(CONFIG), gguf.GGMLQuantizationType.Q8_0)
    graph, records = examine_model(tmp_path / "m.gguf", options := CompileOptions())
    assert graph is not None and records == []
    check_graph(graph, options)


def test_what_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 40)
    with pytest.raises(ImportModelError, match="not a GGUF file"):
        tcomp.compile(path)
    array = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8, 1 << 40)  # of so many elements, none of which is there
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + array)
    with pytest.raises(ImportModelError, match="it ends too early"):
        tcomp.compile(path)
    write(path, random_weights(CONFIG), gguf.GGMLQuantizationType.F32, "falcon")
    with pytest.raises(UnsupportedError, match="falcon"):
        tcomp.compile(path)
    write(path, random_weights(CONFIG), gguf.GGMLQuantizationType.F32, leave_out="blk.0.ffn_up.weight")
    with pytest.raises(ImportModelError, match=r"lacks `blk.0.ffn_up.weight`"):
        tcomp.compile(path)
