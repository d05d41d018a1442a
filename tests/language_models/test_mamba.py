"""Mamba, whose state each run replaces: a loop in NumPy written from the paper, transformers, and text that goes on or begins anew."""

import numpy as np
import pytest

import tcomp
from tcomp.errors import ImportModelError, InputError, UnsupportedError
from tcomp.frontends.language_models.mamba import mamba_config, mamba_graph
from tcomp.frontends.language_models.mamba2 import mamba2_config
from tcomp.generation import Generator
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_graph

SIZES = {"vocab_size": 96, "hidden_size": 24, "state_size": 8, "num_hidden_layers": 2, "conv_kernel": 3, "time_step_rank": 5}
CONFIG = {**SIZES, "model_type": "mamba", "tie_word_embeddings": False, "use_bias": True}
HEADS = {"num_heads": 6, "head_dim": 8}  # of Mamba-2
INNER = 48
PROMPT = [5, 17, 93, 0, 17]


def random_weights():
    rng = np.random.default_rng(4)
    shapes = {"backbone.embeddings.weight": (96, 24), "lm_head.weight": (96, 24), "backbone.norm_f.weight": (24,)}
    for n in range(2):
        at = f"backbone.layers.{n}"
        shapes |= {f"{at}.norm.weight": (24,), f"{at}.mixer.D": (INNER,), f"{at}.mixer.A_log": (INNER, 8)}
        shapes |= {
            f"{at}.mixer.conv1d.weight": (INNER, 1, 3),
            f"{at}.mixer.conv1d.bias": (INNER,),
            f"{at}.mixer.x_proj.weight": (21, INNER),
        }
        for name, rows, columns in (("in_proj", 2 * INNER, 24), ("out_proj", 24, INNER), ("dt_proj", INNER, 5)):
            shapes |= {f"{at}.mixer.{name}.weight": (rows, columns), f"{at}.mixer.{name}.bias": (rows,)}
    return {name: (rng.normal(size=shape) * 0.4).astype(np.float32) for name, shape in shapes.items()}


WEIGHTS = random_weights()


def logits(ids):
    """Those of the last of the tokens, one token after the other, in float64."""
    w = {name: a.astype(np.float64) for name, a in WEIGHTS.items()}

    def norm(x, name):
        return x / np.sqrt((x * x).mean() + 1e-5) * w[f"{name}.weight"]

    def silu(x):
        return x / (1 + np.exp(-x))

    past, states = np.zeros((2, 3, INNER)), np.zeros((2, INNER, 8))
    for token in ids:
        x = w["backbone.embeddings.weight"][token]
        for n in range(2):
            at = f"backbone.layers.{n}"
            layer = {name.removeprefix(f"{at}.mixer."): a for name, a in w.items() if name.startswith(f"{at}.mixer.")}
            both = layer["in_proj.weight"] @ norm(x, f"{at}.norm") + layer["in_proj.bias"]
            past[n] = [*past[n, 1:], both[:INNER]]
            u = silu((past[n].T * layer["conv1d.weight"][:, 0]).sum(1) + layer["conv1d.bias"])
            step, into, out = np.split(layer["x_proj.weight"] @ u, [5, 13])
            step = np.log1p(np.exp(layer["dt_proj.weight"] @ step + layer["dt_proj.bias"]))[:, None]
            states[n] = np.exp(-np.exp(layer["A_log"]) * step) * states[n] + step * into * u[:, None]
            y = (states[n] @ out + u * layer["D"]) * silu(both[INNER:])
            x = x + layer["out_proj.weight"] @ y + layer["out_proj.bias"]
    return norm(x, "backbone.norm_f") @ w["lm_head.weight"].T


def greedy(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(tokens).argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def model():
    graph = mamba_graph(CONFIG, lambda name, shape: WEIGHTS[name].reshape(shape))
    return tcomp.Module.load(compile_graph(graph, CompileOptions(state="auto")), threads=2)


def test_the_graph_computes_what_the_paper_says():
    graph = mamba_graph(CONFIG, lambda name, shape: WEIGHTS[name].reshape(shape))
    past = {v.name: np.zeros(v.shape, np.float32) for v in graph.inputs if v.name != "ids"}
    for part in ([5, 17, 93], [0], [17, 40]):
        out = evaluate_graph(graph, {"ids": np.array([part]), **past})
        past = {name.replace("present", "past"): a for name, a in out.items() if name != "logits"}
    np.testing.assert_allclose(out["logits"][0], logits([5, 17, 93, 0, 17, 40]), rtol=1e-4, atol=1e-5)


def test_a_prompt_is_what_its_tokens_are_one_by_one(model):
    whole, parts = tcomp.State(model), tcomp.State(model)
    wanted = whole.run({"ids": np.array([PROMPT])})["logits"]
    for token in PROMPT:
        found = parts.run({"ids": np.array([[token]])})["logits"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    for name, array in whole.values().items():
        np.testing.assert_allclose(parts.values()[name], array, rtol=1e-5, atol=1e-5)
    assert (whole.length, whole.capacity, whole.rewinds) == (0, 0, False)
    whole.truncate(0)
    np.testing.assert_array_equal(whole.run({"ids": np.array([PROMPT])})["logits"], wanted)


def test_a_run_that_fails_leaves_what_is_replaced_as_it_was(model, monkeypatch):
    state = tcomp.State(model)
    state.run({"ids": np.array([PROMPT])})
    before = {name: array.copy() for name, array in state.values().items()}
    with monkeypatch.context() as patch, pytest.raises(InputError, match="stopped"):
        run = vars(tcomp.runtime.module)["run_frame"]

        def stopped(*arguments):
            run(*arguments)
            raise InputError("stopped")

        patch.setattr(tcomp.runtime.module, "run_frame", stopped)
        state.run({"ids": np.array([[3]])})
    for name, array in state.values().items():
        np.testing.assert_array_equal(array, before[name])


def test_texts_go_on_or_begin_anew(model):
    generator = Generator(model)
    first = [p.token for p in generator.complete(PROMPT, 12).pieces]
    assert first == greedy(PROMPT, 12) and len({*first}) > 2
    longer = [*PROMPT, *first, 9]
    assert [p.token for p in generator.complete(longer, 3).pieces] == greedy(longer, 3)
    assert [p.token for p in generator.complete(PROMPT, 4).pieces] == first[:4]  # which forgets
    both = generator.complete_all([PROMPT, [9]], 4)
    assert [[p.token for p in c.pieces] for c in both] == [first[:4], greedy([9], 4)]


def test_pairs_that_replace_each_other_may_be_given():
    graph = mamba_graph(CONFIG, lambda name, shape: WEIGHTS[name].reshape(shape))
    pairs = {f"past.{n}.{kind}": f"present.{n}.{kind}" for n in range(2) for kind in ("conv", "ssm")}
    with pytest.raises(InputError, match="does not continue"):
        compile_graph(graph, CompileOptions(state={"past.0.ssm": "present.0.conv"}))
    with pytest.raises(InputError, match="cannot continue two"):
        compile_graph(graph, CompileOptions(state={"past.0.ssm": "present.0.ssm", "past.1.ssm": "present.0.ssm"}))
    artifact = compile_graph(graph, CompileOptions(state=pairs))
    assert {pair.input: pair.output for pair in artifact.manifest.replaced} == pairs and not artifact.manifest.state


@pytest.mark.parametrize(
    ("change", "kind", "what"),
    [
        ({"hidden_act": "tanh"}, UnsupportedError, "tanh"),
        ({"state_size": 0}, ImportModelError, "state_size"),
        ({"conv_kernel": 1000}, ImportModelError, "conv_kernel"),
        ({"expand": 0.001}, ImportModelError, "intermediate_size"),
        ({"time_step_rank": "many"}, ImportModelError, "time_step_rank"),
    ],
)
def test_other_configs_are_refused(change, kind, what):
    with pytest.raises(kind, match=what):
        mamba_config({**CONFIG, **change}, "config.json")


@pytest.mark.parametrize(
    ("change", "what"), [({"n_groups": 4}, "in 4 groups"), ({"head_dim": 7}, "6 heads"), ({"time_step_limit": 3}, "time_step_limit")]
)
def test_other_heads_are_refused(change, what):
    with pytest.raises(ImportModelError, match=what):
        mamba2_config({**CONFIG, **HEADS, "n_groups": 2, **change}, "config.json")


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("mamba", {}),
        ("falcon_mamba", {}),
        ("mamba2", {**HEADS, "n_groups": 2}),
        ("mamba2", {**HEADS, "n_groups": 1, "tie_word_embeddings": True, "use_bias": True, "use_conv_bias": False}),
    ],
)
def test_folders_give_the_text_of_transformers(family, more, tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    torch = pytest.importorskip("torch", reason="pip install torch")
    pytest.importorskip("safetensors", reason="pip install 'tcomp[generate]'")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES, **more, eos_token_id=95, pad_token_id=95)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.ndim == 1 else 0.4))
        theirs.get_input_embeddings().weight.mul_(4)
        wanted = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)[0, len(PROMPT) :].tolist()
        after = theirs(torch.tensor([[*PROMPT, 3]])).logits[0, -1].numpy()
    theirs.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="one sequence"):
        tcomp.compile(tmp_path, dims={"batch": (1, 4)})
    generator = Generator(tcomp.compile(tmp_path, state="auto"))
    assert [p.token for p in generator.complete(PROMPT, 16).pieces] == wanted
    np.testing.assert_allclose(generator.logits([*PROMPT, 3]), after, rtol=2e-4, atol=2e-4 * np.abs(after).max())
