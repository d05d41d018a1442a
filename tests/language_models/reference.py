"""A decoder in NumPy, written from the papers, and small ones with random weights."""

import json

import numpy as np

SMALL = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1000.0,
    "tie_word_embeddings": True,
}  # fmt: skip


def random_weights(config, seed=0):
    """Tensors under the names of Hugging Face's files."""
    rng = np.random.default_rng(seed)
    hidden, size = config["hidden_size"], config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    q, kv, inner = config["num_attention_heads"] * size, config["num_key_value_heads"] * size, config["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}"
        shapes |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}
        shapes |= {f"{at}.self_attn.{p}_proj.weight": (rows, hidden) for p, rows in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"{at}.self_attn.o_proj.weight": (hidden, q), f"{at}.mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{at}.mlp.{p}_proj.weight": (inner, hidden) for p in ("gate", "up")}
        if config["model_type"] == "qwen2":
            shapes |= {f"{at}.self_attn.{p}_proj.bias": (rows,) for p, rows in (("q", q), ("k", kv), ("v", kv))}
        if config["model_type"] == "qwen3":
            shapes |= {f"{at}.self_attn.{p}_norm.weight": (size,) for p in "qk"}
    return {n: (rng.normal(size=s) * (0.3 if len(s) > 1 else 1) + (len(s) == 1)).astype(np.float32) for n, s in shapes.items()}


def logits(config, w, ids):
    """Those of the last of the tokens, in float64."""
    w = {n: a.astype(np.float64) for n, a in w.items()}
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    n = len(ids)
    angles = np.arange(n)[:, None] / config["rope_theta"] ** (np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotated(x):
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][ids]
    seen = np.tril(np.ones((n, n), bool))
    if config["model_type"] == "mistral" and config.get("sliding_window"):
        seen &= ~np.tril(np.ones((n, n), bool), -config["sliding_window"])
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm")
        q, k, v = (linear(h, f"{at}.self_attn.{p}_proj").reshape(n, -1, size) for p in "qkv")
        if config["model_type"] == "qwen3":
            q, k = norm(q, f"{at}.self_attn.q_norm"), norm(k, f"{at}.self_attn.k_norm")
        q, k = rotated(q), rotated(k)
        k, v = np.repeat(k, heads // kv, 1), np.repeat(v, heads // kv, 1)
        scores = np.where(seen, np.einsum("shd,thd->hst", q, k) / np.sqrt(size), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + linear(np.einsum("hst,thd->shd", weights, v).reshape(n, -1), f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm")
        gate = linear(h, f"{at}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    y = norm(x[-1:], "model.norm")
    return y @ w["model.embed_tokens.weight"].T if config.get("tie_word_embeddings") else linear(y, "lm_head")


def write_folder(path, config, weights):
    """As Hugging Face has it, in two files."""
    from safetensors.numpy import save_file

    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({n: weights[n] for n in part}, path / f"model-{number}.safetensors")
