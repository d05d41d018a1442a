"""Families of decoders: the logits of transformers, in float32, from the files that it writes."""

import numpy as np
import pytest

from tcomp.frontends.language_models.families import FAMILIES
from tcomp.ir.interpreters.graph import evaluate_graph

IDS = np.array([[5, 17, 93, 0, 17, 40, 8]])
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FALCON = {"vocab_size": 96, "hidden_size": 32, "ffn_hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA3 = ["sliding_attention", "full_attention", "sliding_attention"]
LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
CASES = [
    ("llama", {**GROUPED, "rope_parameters": SCALING}),
    ("llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {**GROUPED, "sliding_window": 3}),
    ("qwen2", {**GROUPED, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ("qwen3", {**GROUPED, "head_dim": 16}),
    ("gemma", {**GROUPED, "head_dim": 16}),
    (
        "gemma2",
        {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": 3,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.0,
        },
    ),
    (
        "gemma3_text",
        {**GROUPED, "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 3, "layer_types": GEMMA3, "rope_parameters": LOCAL},
    ),
    ("gemma3_text", {**GROUPED, "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 3, "sliding_window_pattern": 2}),
    ("phi", {**GROUPED, "intermediate_size": 40}),
    (
        "phi3",
        {**GROUPED, "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    ("gpt2", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    ("gpt_neox", SIZES),
    ("gpt_neox", {**SIZES, "use_parallel_residual": False, "hidden_act": "gelu_fast"}),
    ("falcon", {**FALCON, "bias": True}),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {**FALCON, "parallel_attn": False, "multi_query": False}),
    (
        "opt",
        {
            "vocab_size": 96,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    ("bloom", {"vocab_size": 96, "hidden_size": 48, "n_layer": 2, "n_head": 6}),
    ("mixtral", {**GROUPED, "num_local_experts": 4}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]}),
    ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 16}),
]


def test_logits_are_those_of_transformers(tmp_path):
    """All families in one test: loading transformers takes longer."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    torch = pytest.importorskip("torch", reason="pip install torch")
    pytest.importorskip("safetensors", reason="pip install 'tcomp[generate]'")
    from tcomp.frontends.language_models.folder import import_folder

    assert {family for family, _ in CASES} == set(FAMILIES)
    for number, (family, sizes) in enumerate(CASES):
        torch.manual_seed(number)
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **sizes)).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.ndim == 1 else 0.2))
            wanted = theirs(torch.tensor(IDS)).logits[0].numpy()
        folder = tmp_path / str(number)
        theirs.save_pretrained(folder)
        graph = import_folder(folder)
        inputs = {v.name: np.zeros([0 if d is v.shape[0] else d for d in v.shape], np.float32) for v in graph.inputs if v.name != "ids"}
        at = 0
        for count in (6, 1):
            out = evaluate_graph(graph, {"ids": IDS[:, at : at + count], **inputs})
            at += count
            np.testing.assert_allclose(
                out["logits"][0], wanted[at - 1], rtol=2e-4, atol=2e-4 * np.abs(wanted).max(), err_msg=f"{family} {sizes}"
            )
            inputs = {name.replace("present", "past"): array for name, array in out.items() if name != "logits"}
