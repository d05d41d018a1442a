"""Text from a small model: greedy tokens are those of the reference, sampling follows its rules, text grows by whole characters."""

import json
import re
from functools import cache

import numpy as np
import pytest
from typer.testing import CliRunner

import tcomp
from tcomp.cli.app import app
from tcomp.errors import InputError
from tcomp.frontends.language_models.config import decoder_config
from tcomp.frontends.language_models.decoder import decoder_graph
from tcomp.generation import Generator, Grammar, Request, Sampling, Scheduler
from tcomp.generation.drafts import from_text
from tcomp.generation.folder import end_tokens
from tcomp.generation.sampling import choose, log_probabilities
from tcomp.generation.text import GrowingText
from tcomp.ir.expr import dim
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_graph
from tests.language_models.reference import SMALL, logits, random_weights, write_folder

CONFIG = {**SMALL, "num_hidden_layers": 1, "vocab_size": 256, "eos_token_id": 3}
WEIGHTS = random_weights(CONFIG)
PROMPT = [5, 17, 93]


class Bytes:
    """Tokens are bytes of UTF-8."""

    def encode(self, text):
        return type("Encoding", (), {"ids": list(text.encode())})

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode(errors="replace")


@cache
def small_model(batch=1, drafts=0):
    graph = decoder_graph(decoder_config(CONFIG), lambda name, shape: WEIGHTS[name], batch, drafts)
    return tcomp.Module.load(compile_graph(graph, CompileOptions(state="auto")), threads=2)


@pytest.fixture
def model():
    return small_model()


def byte_generator():
    """Whose tokens are bytes, but for one that ends texts."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'tcomp[generate]'")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:-1]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return Generator(small_model(), tokenizer, [255])


def greedy(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(CONFIG, WEIGHTS, tokens)[0].argmax()))
    return tokens[len(prompt) :]


def test_greedy_tokens_are_those_of_the_reference(model):
    generator = Generator(model)
    found = generator.complete(PROMPT, 20, top_logprobs=2)
    assert [p.token for p in found.pieces] == greedy(PROMPT, 20)
    assert (found.text, found.prompt_tokens, found.finish) == ("", 3, "length")
    first = log_probabilities(logits(CONFIG, WEIGHTS, PROMPT)[0].astype(np.float32))
    assert found.pieces[0].logprob == pytest.approx(first.max(), abs=1e-3)
    assert [t for t, _ in found.pieces[0].top] == np.argsort(-first)[:2].tolist()


def test_a_prompt_that_goes_on_computes_what_is_new(model):
    generator, lengths = Generator(model), []
    state = generator._slot._state
    run = state.run
    state.run = lambda inputs, timeout=None: (lengths.append(np.asarray(inputs["ids"]).shape[1]), run(inputs, timeout))[1]
    first = [p.token for p in generator.complete(PROMPT, 4).pieces]
    longer = [*PROMPT, *first, 9, 9]
    assert [p.token for p in generator.complete(longer, 2).pieces] == greedy(longer, 2)
    assert [p.token for p in generator.complete(PROMPT, 1).pieces] == first[:1]
    assert lengths == [3, 1, 1, 1, 3, 1, 1]


@pytest.mark.parametrize("batch", [1, dim("batch", 1, 3)])
def test_texts_at_the_same_time_are_as_alone(batch):
    model = small_model(batch)
    prompts = [[5, 17, 93], [9], [5, 17, 93, 40, 41, 42], [8, 8]]
    scheduler, pieces, runs = Scheduler(model, 3), {}, []
    requests = [Request(prompt, most) for prompt, most in zip(prompts, (9, 4, 6, 5), strict=True)]
    for number, request in enumerate(requests):
        scheduler.add(request)
        if number % 2:
            for progress in scheduler.step():
                pieces.setdefault(progress.request, []).append(progress.piece.token)
    model.hook = runs.append
    while scheduler.running:
        assert len(scheduler.running) <= 3
        for progress in scheduler.step():
            pieces.setdefault(progress.request, []).append(progress.piece.token)
    model.hook = None
    assert [pieces[r] for r in requests] == [greedy(p, n) for p, n in zip(prompts, (9, 4, 6, 5), strict=True)]
    assert [r.finish for r in requests] == ["length"] * 4
    assert len(runs) == (19 if batch == 1 else 8)
    longer = Request([*requests[2].tokens, 1], 2)  # goes on from what a slot holds, though it was in a batch
    scheduler.add(longer)
    scheduler.step()  # brings the rows of slots back from the batch
    assert max(slot.common(longer.prompt) for slot in scheduler._slots) == len(longer.prompt)
    scheduler.step()
    assert longer.tokens[-2:] == greedy(longer.prompt, 2)
    assert [c.pieces[-1].token for c in Generator(model).complete_all(prompts, 3)] == [greedy(p, 3)[-1] for p in prompts]


def test_guessed_tokens_leave_the_text_as_it_is():
    plain, model, runs = Generator(small_model()), small_model(1, 3), []
    generator = Generator(model)
    text, wrong = greedy(PROMPT, 12), Sampling(temperature=1.5, seed=4)
    drafts = {
        "right": (lambda tokens, most: text[len(tokens) - 3 :][:most], 1 + 3),
        "wrong": (lambda tokens, most: [7] * most, 12),
        "half": (lambda tokens, most: [*text[len(tokens) - 3 :][:1], 7, 7, 7], None),
        "none": (lambda tokens, most: [], 12),
    }
    model.hook = runs.append
    for draft, count in drafts.values():
        generator.logits([1])
        runs.clear()
        assert [p.token for p in generator.complete(PROMPT, 12, draft=draft).pieces] == text
        assert count is None or len(runs) == count
    model.hook = None
    assert [p.token for p in generator.complete(PROMPT, 12, draft=plain.guess, sampling=wrong).pieces] == [
        p.token for p in plain.complete(PROMPT, 12, sampling=wrong).pieces
    ]
    assert [p.token for p in generator.complete(PROMPT, 99).pieces] == [p.token for p in plain.complete(PROMPT, 99).pieces]
    assert from_text([1, 2, 3, 4, 9, 2, 3], 2) == [4, 9] and from_text([5, 6], 3) == [] and from_text([4, 4], 3) == [4]
    with pytest.raises(InputError, match="cannot have drafts"):
        small_model(dim("batch", 1, 2), 3)


def test_text_ends_at_stop_strings_and_end_tokens(model):
    tokens = greedy(PROMPT, 12)
    ended = Generator(model, end_tokens=[tokens[4]]).complete(PROMPT, 12)
    place = tokens.index(tokens[4])
    assert ended.finish == "stop" and [p.token for p in ended.pieces] == tokens[: place + 1]
    with pytest.raises(InputError, match="has no tokens"):
        Generator(model).complete([], 1)
    with pytest.raises(InputError, match="the context of the model has 64"):
        Generator(model).complete([1] * 64, 1)
    with pytest.raises(InputError, match="no tokenizer"):
        Generator(model).complete("text", 1)
    full = Generator(model, context=8).complete(PROMPT, 99)
    assert len(full.pieces) == 5 and full.finish == "length"


def grown(data, stop=(), before=b""):
    text = GrowingText(Bytes(), list(before), stop)
    parts = []
    for token in data:
        parts.append(text.add(token))
        if text.stopped:
            break
    else:
        parts.append(text.finish())
    return parts, text


def test_text_grows_by_whole_characters():
    parts, text = grown("añ→😀b".encode())
    assert [p for p in parts if p] == ["a", "ñ", "→", "😀", "b"] and text.text == "añ→😀b"
    parts, _ = grown(b"\xff\xfe ok", before=b"x")
    assert "".join(parts).endswith(" ok")


def test_nothing_of_a_stop_string_is_given():
    parts, text = grown(b"one END two", ["END"])
    assert parts[-1] == "" and text.text == "one " and text.stopped
    parts, text = grown(b"one EN", ["END"])
    assert text.text == "one EN" and parts[-1] == "EN" and not text.stopped
    assert grown(b"abcabd", ["abd", "never"])[1].text == "abc"


def test_sampling_keeps_to_its_rules():
    values = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))

    def drawn(**how):
        sampling = Sampling(temperature=1.0, seed=0, **how)
        random = sampling.generator()
        return [choose(values, [], 0, sampling, random) for _ in range(400)]

    counts = np.bincount(drawn(), minlength=4) / 400
    np.testing.assert_allclose(counts, [0.5, 0.25, 0.15, 0.1], atol=0.08)
    assert set(drawn(top_k=2)) == {0, 1} and set(drawn(top_p=0.7)) == {0, 1} and set(drawn(min_p=0.25)) == {0, 1, 2}
    assert set(drawn(top_p=0.0)) == {0} and drawn() == drawn()
    assert choose(values, [0], 1, Sampling(repetition_penalty=100.0), Sampling().generator()) == 1
    assert choose(values, [0], 1, Sampling(), Sampling().generator()) == 0
    penalised = Sampling(presence_penalty=0.5, frequency_penalty=0.4)
    assert [choose(values, [0, *[0] * n], 1, penalised, Sampling().generator()) for n in (0, 1, 2)] == [0, 1, 1]
    assert choose(values, [1, 0], 2, penalised, Sampling().generator()) == 0  # a prompt does not count
    assert choose(values, [], 0, Sampling(bias={3: 5.0}), Sampling().generator()) == 3
    with pytest.raises(InputError, match="not finite"):
        choose(np.array([1, np.nan], np.float32), [], 0, Sampling(), Sampling().generator())
    with pytest.raises(InputError, match="top_p is 2"):
        Sampling(top_p=2)


def test_grammars_are_kept_to():
    pytest.importorskip("llguidance", reason="pip install 'tcomp[generate]'")
    generator = byte_generator()
    for grammar, whole in ((Grammar.regex("[0-9]{3}-[a-c]+z"), r"[0-9]{3}-[a-c]+z"), (Grammar.lark('start: "yes" | "no"'), "yes|no")):
        found = generator.complete("a", 60, sampling=Sampling(temperature=3.0, seed=2), grammar=grammar)
        assert re.fullmatch(whole, found.text) and found.finish == "stop"
    for wrong in (
        Grammar.regex("[0-"),
        Grammar.json_schema({"type": "nothing"}),
        Grammar("json_schema", "{"),
        Grammar.lark("start: other"),
    ):
        with pytest.raises(InputError, match="grammar"):
            generator.complete("a", 1, grammar=wrong)
    with pytest.raises(InputError, match="no tokenizer"):
        Generator(small_model()).complete([1], 1, grammar=Grammar.regex("a"))


def test_models_of_another_kind_are_refused(model, tmp_path):
    graph = decoder_graph(decoder_config(CONFIG), lambda name, shape: WEIGHTS[name])
    with pytest.raises(InputError, match="not a language model with state"):
        Generator(tcomp.Module.load(compile_graph(graph), threads=1))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    assert end_tokens(tmp_path) == [3]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}', encoding="utf-8")
    assert end_tokens(tmp_path) == [4, 5]
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    assert end_tokens(tmp_path) == [3]


def test_the_command(model, tmp_path):
    pytest.importorskip("safetensors", reason="pip install 'tcomp[generate]'")
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'tcomp[generate]'")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(256)}, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    write_folder(tmp_path, CONFIG, WEIGHTS)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model.save(tmp_path / "model.tcomp")
    arguments = ["generate", str(tmp_path), "--artifact", str(tmp_path / "model.tcomp"), "--prompt", "w5 w17 w93", "--max-tokens", "6"]
    wanted = " ".join(f"w{t}" for t in greedy(PROMPT, 6))
    plain, as_json = (CliRunner().invoke(app, [*arguments, *extra]) for extra in ([], ["--json"]))
    assert plain.exit_code == as_json.exit_code == 0, plain.output
    assert plain.stdout.strip() == json.loads(as_json.stdout)["text"].strip() == wanted
    refused = CliRunner().invoke(app, [*arguments, "--weights", "int8"])
    assert refused.exit_code == 2 and "leave out --artifact" in refused.stderr
