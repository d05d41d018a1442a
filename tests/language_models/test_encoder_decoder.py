"""Models with an encoder: T5 and Whisper give the logits and the greedy text of transformers, and run the encoder once."""

import json
from functools import cache

import numpy as np
import pytest
from typer.testing import CliRunner

import tcomp
from tcomp.cli.app import app
from tcomp.errors import ImportModelError, InputError, UnsupportedError
from tcomp.frontends.language_models.t5 import t5_graph
from tcomp.frontends.language_models.whisper import whisper_graph
from tcomp.generation import Generator, SequenceToSequence
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_graph

RNG = np.random.default_rng(3)
T5 = {
    "model_type": "t5", "vocab_size": 64, "d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6, "eos_token_id": 63, "pad_token_id": 62,
    "decoder_start_token_id": 1,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "vocab_size": 64, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 40, "encoder_ffn_dim": 48, "max_source_positions": 12, "max_target_positions": 20,
    "num_mel_bins": 10, "pad_token_id": 62, "bos_token_id": 62, "eos_token_id": 63, "decoder_start_token_id": 1,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
TOKENS = RNG.integers(0, 60, (1, 9))
FEATURES = RNG.normal(size=(1, 10, 24)).astype(np.float32)
CASES = {
    "t5": (T5, TOKENS),
    "t5 with gates, and halves of different depths": (
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 1},
        TOKENS,
    ),
    "mt5": ({**T5, "model_type": "mt5"}, TOKENS),
    "umt5": ({**T5, "model_type": "umt5"}, TOKENS),
    "umt5 without scaled outputs": ({**T5, "model_type": "umt5", "tie_word_embeddings": False}, TOKENS),
    "whisper": (WHISPER, FEATURES),
    "whisper with another activation": ({**WHISPER, "activation_function": "relu"}, FEATURES),
}
IDS = np.array([[1, 7, 3, 22, 5]])


@cache
def weights(name, shape):
    rng = np.random.default_rng(sum(name.encode()))
    return (rng.normal(size=shape) * (0.3 if len(shape) > 1 else 0.2) + (len(shape) == 1 and "norm" in name)).astype(np.float32)


def small_graph(whisper=False):
    return whisper_graph(WHISPER, weights, ()) if whisper else t5_graph(T5, weights, ())


@cache
def small_model(whisper=False):
    return tcomp.Module.load(compile_graph(small_graph(whisper), CompileOptions(state="auto")), threads=2)


def random_model(transformers, torch, config):
    torch.manual_seed(1)
    kind = transformers.WhisperForConditionalGeneration if config["model_type"] == "whisper" else transformers.AutoModelForSeq2SeqLM
    given = transformers.AutoConfig.for_model(**config)
    model = (kind(given) if config["model_type"] == "whisper" else kind.from_config(given)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.ndim == 1 else 0.3))
    return model


def test_folders_give_what_transformers_does(tmp_path):
    """All in one test: loading transformers takes longer."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    torch = pytest.importorskip("torch", reason="pip install torch")
    pytest.importorskip("safetensors", reason="pip install 'tcomp[generate]'")
    from tcomp.frontends.language_models.folder import import_folder

    for case, (config, source) in CASES.items():
        theirs = random_model(transformers, torch, config)
        name = "input_features" if config["model_type"] == "whisper" else "input_ids"
        with torch.no_grad():
            wanted = theirs(**{name: torch.tensor(source)}, decoder_input_ids=torch.tensor(IDS)).logits[0].numpy()
        folder = tmp_path / case
        theirs.save_pretrained(folder)
        graph, rest, at = import_folder(folder), source, 0
        past = {v.name: np.zeros((0, *v.shape[1:]), np.float32) for v in graph.inputs if v.name.startswith("past")}
        for count in (3, 1, 1):
            out = evaluate_graph(graph, {"source": rest, "ids": IDS[:, at : at + count], **past})
            at, rest = at + count, rest[..., :0]
            np.testing.assert_allclose(out["logits"][0], wanted[at - 1], rtol=2e-4, atol=2e-4 * np.abs(wanted).max(), err_msg=case)
            past = {name.replace("present", "past"): array for name, array in out.items() if name != "logits"}


@pytest.mark.parametrize("config", [T5, WHISPER], ids=["t5", "whisper"])
def test_greedy_text_is_that_of_transformers(config, tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    torch = pytest.importorskip("torch", reason="pip install torch")
    pytest.importorskip("safetensors", reason="pip install 'tcomp[generate]'")
    theirs, whisper = random_model(transformers, torch, config), config["model_type"] == "whisper"
    theirs.save_pretrained(tmp_path)
    sources = (FEATURES, FEATURES[..., ::-1].copy()) if whisper else (TOKENS, TOKENS[:, :4])
    generator = SequenceToSequence.load(tmp_path, tcomp.compile(tmp_path, state="auto"))
    assert (generator.start_tokens, [*generator.end_tokens]) == ((1,), [63])
    for source in sources:
        tokens, ids = [], torch.tensor([[1]])
        with torch.no_grad():  # their `generate` has rules of its own for Whisper
            while len(tokens) < 12 and 63 not in tokens:
                found = theirs(**{"input_features" if whisper else "input_ids": torch.tensor(source)}, decoder_input_ids=ids)
                tokens.append(int(found.logits[0, -1].argmax()))
                ids = torch.tensor([[1, *tokens]])
        assert [p.token for p in generator.complete(source if whisper else source[0], 12).pieces] == tokens


@pytest.mark.parametrize("whisper", [False, True], ids=["t5", "whisper"])
def test_compiled_models_compute_what_their_graphs_do(whisper):
    graph, model, source = small_graph(whisper), small_model(whisper), FEATURES if whisper else TOKENS
    past = {v.name: np.zeros((0, *v.shape[1:]), np.float32) for v in graph.inputs if v.name.startswith("past")}
    state, rest, at = tcomp.State(model, capacity=2), source, 0
    for count in (2, 1, 1):
        given = {"source": rest, "ids": IDS[:, at : at + count]}
        out, found = evaluate_graph(graph, {**given, **past}), state.run(given)
        np.testing.assert_allclose(found["logits"], out["logits"], rtol=1e-4, atol=1e-4)
        past = {name.replace("present", "past"): array for name, array in out.items() if name != "logits"}
        at, rest = at + count, rest[..., :0]
        for name, array in past.items():
            np.testing.assert_allclose(state.values()[name], array, rtol=1e-4, atol=1e-4)
    rows = 12 if whisper else 9
    assert state.length == 4 and state.values()["past.1.source_key"].shape[0] == rows
    state.truncate(2)
    assert state.length == 2 and state.values()["past.1.source_key"].shape[0] == rows
    state.truncate(0)
    assert state.length == 0 and state.values()["past.1.source_key"].shape[0] == 0
    again = state.run({"source": source, "ids": IDS[:, :4]})["logits"]
    np.testing.assert_allclose(again, found["logits"], rtol=1e-4, atol=1e-4)


def test_the_encoder_runs_once_for_a_source():
    generator, sources = SequenceToSequence(small_model()), []
    run = generator._state.run
    generator._state.run = lambda inputs, timeout=None: (sources.append(np.shape(inputs["source"])), run(inputs, timeout))[1]
    first = [p.token for p in generator.complete(TOKENS[0], 5).pieces]
    assert sources == [(1, 9), *[(1, 0)] * 4]
    assert [p.token for p in generator.stream([4, 5], 3)] != first[:3]
    assert [p.token for p in generator.complete(TOKENS[0].tolist(), 5).pieces] == first
    longer = generator.complete(TOKENS[0], 3, prompt=[*generator.start_tokens, *first[:2]])
    assert ([p.token for p in longer.pieces], longer.prompt_tokens) == (first[2:], 3)


def test_the_command_continues_sources(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'tcomp[generate]'")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(64)}, "w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"decoder_start_token_id": 0}), encoding="utf-8")
    small_model().artifact.save(tmp_path / "t5.tcomp")
    given = ["generate", str(tmp_path), "--artifact", str(tmp_path / "t5.tcomp"), "--max-tokens", "4", "--prompt", "w5 w6 w7"]
    found = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)
    wanted = SequenceToSequence(small_model()).complete([5, 6, 7], 4).pieces
    assert [t["token"] for t in found["tokens"]] == [p.token for p in wanted]
    refused = CliRunner().invoke(app, [*given, "--chat"])
    assert refused.exit_code != 0 and "no chats" in refused.output


def test_what_does_not_fit_is_refused():
    generator = SequenceToSequence(small_model(True))
    for source, what in (([1, 2], r"shape \[2\]"), (FEATURES[..., :0], r"\[1, 10, 0\]"), ("text", "no tokenizer")):
        with pytest.raises(InputError, match=what):
            generator.complete(source)
    with pytest.raises(InputError, match="expected"):
        generator.complete(np.zeros((1, 9, 24)))
    with pytest.raises(InputError, match="language model"):
        Generator(small_model())


@pytest.mark.parametrize(
    ("graph", "config", "kind", "what"),
    [
        (t5_graph, {**T5, "feed_forward_proj": "gated-tanh"}, UnsupportedError, "tanh"),
        (t5_graph, {**T5, "feed_forward_proj": "other-gelu"}, ImportModelError, "other-gelu"),
        (t5_graph, {**T5, "relative_attention_num_buckets": 6}, ImportModelError, "6 buckets"),
        (t5_graph, {**T5, "d_model": None}, ImportModelError, "d_model"),
        (whisper_graph, {**WHISPER, "decoder_attention_heads": 2}, ImportModelError, "both halves"),
        (whisper_graph, {**WHISPER, "encoder_layers": 1 << 20}, ImportModelError, "encoder_layers"),
    ],
)
def test_other_configs_are_refused(graph, config, kind, what):
    with pytest.raises(kind, match=what):
        graph(config, weights, ())
