"""Decoders from the folders of Hugging Face: the numbers of a plain one in NumPy, of one token or many, with and without a cache."""

import json

import numpy as np
import pytest

import tcomp
from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.language_models.config import RotaryScaling, decoder_config
from tcomp.frontends.language_models.decoder import decoder_graph
from tcomp.ir.expr import dim
from tcomp.ir.interpreters.graph import evaluate_graph
from tests.language_models.reference import SMALL, logits, random_weights, write_folder

LLAMA = {**SMALL, "model_type": "llama", "tie_word_embeddings": False}
FAMILIES = {
    "llama": LLAMA,
    "qwen2": {**SMALL, "model_type": "qwen2", "num_key_value_heads": 1},
    "mistral": {**SMALL, "model_type": "mistral", "sliding_window": 3, "num_key_value_heads": 4},
}
IDS = np.array([5, 17, 93, 0, 17, 40, 8], np.int64)


def empty(config, rows=0):
    shape = (rows, config["num_key_value_heads"], config["head_dim"])
    return {f"past.{n}.{kind}": np.zeros(shape, np.float32) for n in range(config["num_hidden_layers"]) for kind in ("key", "value")}


def step_by_step(run, config, *lengths):
    """The logits after parts of IDS of these lengths."""
    past, at, found = empty(config), 0, []
    for n in lengths:
        out = run({"ids": IDS[None, at : at + n], **past})
        past, at = {name.replace("present", "past"): a for name, a in out.items() if name != "logits"}, at + n
        found.append(out["logits"])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_compute_what_the_papers_say(family):
    config = FAMILIES[family]
    w = random_weights(config)
    graph = decoder_graph(decoder_config(config), lambda name, shape: w[name].reshape(shape))
    found = step_by_step(lambda inputs: evaluate_graph(graph, inputs), config, 4, 1, 2)
    for number, y in zip((4, 5, 7), found, strict=True):
        np.testing.assert_allclose(y, logits(config, w, IDS[:number]), rtol=1e-4, atol=1e-3)


def test_sequences_of_a_batch_are_computed_as_if_alone():
    config = FAMILIES["mistral"]
    w = random_weights(config)
    graph = decoder_graph(decoder_config(config), lambda name, shape: w[name].reshape(shape), dim("batch", 1, 4))
    past = {name: np.zeros((5, 2, *array.shape[1:]), np.float32) for name, array in empty(config).items()}
    for column, number in enumerate((5, 2)):  # both end at row 5
        alone = decoder_graph(decoder_config(config), lambda name, shape: w[name].reshape(shape))
        for name, array in evaluate_graph(alone, {"ids": IDS[None, :number], **empty(config)}).items():
            if name != "logits":
                past[name.replace("present", "past")][5 - number :, column] = array
    out = evaluate_graph(graph, {"ids": np.array([[IDS[5], IDS[6]], [IDS[2], IDS[3]]]), "starts": np.array([0, 3]), **past})
    for row, number in zip(out["logits"], (7, 4), strict=True):
        np.testing.assert_allclose(row, logits(config, w, IDS[:number])[0], rtol=1e-4, atol=1e-3)


def test_a_folder_is_compiled(tmp_path):
    pytest.importorskip("safetensors", reason="pip install 'tcomp[generate]'")
    config = {**SMALL, "num_hidden_layers": 1}
    w = random_weights(config)
    write_folder(tmp_path, config, w)
    for kind, tolerance in ((None, 1e-5), ("int8", 4e-2)):  # few elements, whose rounding errors hardly cancel
        model = tcomp.compile(tmp_path, weights=kind)
        for number, y in zip((6, 7), step_by_step(model.run, config, 6, 1), strict=True):
            wanted = logits(config, w, IDS[:number])
            assert np.abs(y - wanted).max() < tolerance * np.abs(wanted).max()


def test_what_a_folder_lacks_is_named(tmp_path):
    pytest.importorskip("safetensors", reason="pip install 'tcomp[generate]'")
    with pytest.raises(ImportModelError, match="config"):
        tcomp.compile(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    with pytest.raises(ImportModelError, match="there are no weights"):
        tcomp.compile(tmp_path)
    w = random_weights(SMALL)
    missing = w.pop("model.layers.1.mlp.up_proj.weight")
    write_folder(tmp_path, SMALL, w)
    with pytest.raises(ImportModelError, match="the weights lack `model.layers.1.mlp.up_proj.weight`"):
        tcomp.compile(tmp_path)
    write_folder(tmp_path, SMALL, {**w, "model.layers.1.mlp.up_proj.weight": missing[:-1].copy()})
    with pytest.raises(ImportModelError, match=r"F32 \[127, 64\]"):
        tcomp.compile(tmp_path)
    (tmp_path / "model-0.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(ImportModelError, match="not a file of safetensors"):
        tcomp.compile(tmp_path)


@pytest.mark.parametrize(
    ("change", "kind", "what"),
    [
        ({"model_type": "rwkv"}, UnsupportedError, "rwkv"),
        ({"hidden_act": "tanh"}, UnsupportedError, "tanh"),
        ({"model_type": "falcon", "alibi": True}, UnsupportedError, "alibi"),
        ({"model_type": "gemma2", "sliding_window": 4, "layer_types": ["full_attention"]}, UnsupportedError, "types"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, ImportModelError, "num_experts_per_tok"),
        ({"model_type": "gemma3_text"}, UnsupportedError, "without a window"),
        ({"model_type": "gemma3_text", "sliding_window": 4, "sliding_window_pattern": 0}, ImportModelError, "sliding_window_pattern"),
        ({"model_type": "phi", "qk_layernorm": True}, UnsupportedError, "qk_layernorm"),
        ({"num_key_value_heads": 3}, ImportModelError, "groups"),
        ({"vocab_size": 10**12}, ImportModelError, "vocab_size"),
        ({"num_hidden_layers": 1 << 24}, ImportModelError, "num_hidden_layers"),
        ({"hidden_size": "64"}, ImportModelError, "hidden_size"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, UnsupportedError, "yarn"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 1}},
            ImportModelError,
            "impossible",
        ),
        ({"rope_theta": float("nan")}, ImportModelError, "rope_theta"),
    ],
)
def test_other_configs_are_refused(change, kind, what):
    with pytest.raises(kind, match=what):
        decoder_config({**LLAMA, **change})


def test_layers_with_a_window_turn_by_angles_of_their_own():
    """As configs of Gemma 3 had it before each type of layer got parameters."""
    old = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "sliding_window": 4,
    }
    found = decoder_config({**old, "use_bidirectional_attention": False, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert (found.theta, found.window_theta, found.scaling) == (1e6, 1e4, RotaryScaling(8.0))
    assert found.windowed == frozenset(range(12)) - {5, 11}
    assert decoder_config({**old, "rope_local_base_freq": 500.0, "sliding_window_pattern": 12}).window_theta == 500
    parameters = {"full_attention": {"rope_theta": 1e5}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(UnsupportedError, match="scaled in layers with a window"):
        decoder_config({**old, "rope_parameters": parameters})
