"""`torch.compile` with tcomp and with inductor, side by side: `python -m benchmarks.torch_compile [--training] [--only bert,resnet]`.

Each network runs in a process of its own with empty caches: the time to the first result (compiling included), then runs of all contenders
in turns, least times. Results are compared with eager PyTorch's first. A ratio below 1 says that tcomp is faster. Weights are random;
`transformers` is needed for most networks, and a C++ compiler for inductor. With `--training`, a step is forward, loss, backward and SGD,
all compiled.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import nets
from benchmarks.timing import geomean, least_times

Made = tuple[nn.Module, tuple[Tensor, ...]]
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
GPT = {"n_embd": 256, "n_layer": 4, "n_head": 4}


def text(config: str, model: str, **sizes: Any) -> Callable[[], Made]:
    """A model of transformers on 64 tokens."""

    def make() -> Made:
        import transformers

        settings = getattr(transformers, config)(**sizes)
        ids = torch.randint(0, min(1000, settings.vocab_size), (1, 64))
        return nets.First(getattr(transformers, model)(settings), ["input_ids"]), (ids,)

    return make


def image(config: str, model: str, size: int = 224, **sizes: Any) -> Callable[[], Made]:
    """A model of transformers on a picture."""

    def make() -> Made:
        import transformers

        net = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        return nets.First(net, ["pixel_values"]), (torch.randn(1, 3, size, size),)

    return make


def mobilenet() -> Made:
    stages = [
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 32, 3, 2, 3),
        (6, 64, 4, 2, 3),
        (6, 96, 3, 1, 3),
        (6, 160, 3, 2, 3),
        (6, 320, 1, 1, 3),
    ]
    return nets.mobile_net(stages, 32, 1280, nn.ReLU6, se=False), (torch.randn(1, 3, 224, 224),)


def efficientnet() -> Made:
    stages = [
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    ]
    return nets.mobile_net(stages, 32, 1280, nn.SiLU, se=True), (torch.randn(1, 3, 224, 224),)


def llama_block() -> Made:
    past = torch.randn(1, 4, 128, 64)
    return nets.LlamaBlock(), (torch.randn(1, 1, 1024), torch.tensor([[128]]), past, past.flip(2))


def mlp() -> Made:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)), (torch.randn(16, 256),)


INFERENCE: dict[str, Callable[[], Made]] = {
    "mlp": mlp, "mobilenet_v2": mobilenet, "efficientnet_b0": efficientnet, "llama_block": llama_block,
    "unet": lambda: (nets.UNet(), (torch.randn(1, 3, 192, 192),)), "lstm": lambda: (nets.TagLSTM(), (torch.randn(1, 32, 128),)),
    "bert": text("BertConfig", "BertModel", **SMALL), "roberta": text("RobertaConfig", "RobertaModel", **SMALL),
    "electra": text("ElectraConfig", "ElectraModel", **SMALL), "albert": text("AlbertConfig", "AlbertModel", **SMALL),
    "mpnet": text("MPNetConfig", "MPNetModel", **SMALL), "distilbert": text("DistilBertConfig", "DistilBertModel", dim=256, n_layers=4, n_heads=4),
    "gpt2": text("GPT2Config", "GPT2Model", use_cache=False, **GPT), "opt": text("OPTConfig", "OPTModel", use_cache=False, ffn_dim=1024, **SMALL),
    "gpt_neox": text("GPTNeoXConfig", "GPTNeoXModel", use_cache=False, **SMALL),
    "llama": text("LlamaConfig", "LlamaModel", use_cache=False, num_key_value_heads=2, **SMALL),
    "qwen2": text("Qwen2Config", "Qwen2Model", use_cache=False, num_key_value_heads=2, **SMALL),
    "mistral": text("MistralConfig", "MistralModel", use_cache=False, num_key_value_heads=2, **SMALL),
    "gemma": text("GemmaConfig", "GemmaModel", use_cache=False, num_key_value_heads=1, head_dim=64, **SMALL),
    "phi": text("PhiConfig", "PhiModel", use_cache=False, **SMALL), "bloom": text("BloomConfig", "BloomModel", use_cache=False, hidden_size=256, n_layer=4, n_head=4),
    "vit": image("ViTConfig", "ViTForImageClassification", **SMALL), "deit": image("DeiTConfig", "DeiTForImageClassification", **SMALL),
    "beit": image("BeitConfig", "BeitModel", **SMALL), "resnet18": image("ResNetConfig", "ResNetForImageClassification", layer_type="basic",
                                                                        depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512]),
    "resnet50": image("ResNetConfig", "ResNetForImageClassification"), "regnet": image("RegNetConfig", "RegNetModel"),
    "convnext": image("ConvNextConfig", "ConvNextForImageClassification"), "swin": image("SwinConfig", "SwinForImageClassification"),
    "poolformer": image("PoolFormerConfig", "PoolFormerForImageClassification"),
}  # fmt: skip


class Tagger(nn.Module):
    """The first result of a model, as scores."""

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, classes)

    def forward(self, *args: Tensor) -> Tensor:
        return self.head(self.body(*args))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(1000, 128), nn.LSTM(128, 128, batch_first=True), nn.Linear(128, 1000)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(ids))[0])


def of_batch(make: Callable[[], Made], batch: int, width: int = 0, classes: int = 1000) -> Callable[[], Made]:
    def batched() -> Made:
        module, (x, *_) = make()
        inputs = torch.randint(0, 1000, (batch, *x.shape[1:])) if x.dtype == torch.int64 else torch.randn(batch, *x.shape[1:])
        return Tagger(module, width, classes) if width else module, (inputs,)

    return batched


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TINY = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
TRAINING: dict[str, Callable[[], Made]] = {
    "resnet18": of_batch(image("ResNetConfig", "ResNetForImageClassification", 64, layer_type="basic", depths=[2, 2, 2, 2],
                               hidden_sizes=[64, 128, 256, 512], num_labels=10), 8),
    "vit_tiny": of_batch(image("ViTConfig", "ViTForImageClassification", 64, image_size=64, patch_size=8, num_labels=10, **TINY, **NO_DROPOUT), 8),
    "bert_small": of_batch(text("BertConfig", "BertModel", **SMALL, **NO_DROPOUT), 8, 256),
    "lstm": lambda: (Recurrent(), (torch.randint(0, 1000, (16, 32)),)),
    "gpt_nano": of_batch(text("GPT2Config", "GPT2LMHeadModel", use_cache=False, n_embd=48, n_layer=3, n_head=3, vocab_size=1000,
                              resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), 16),
}  # fmt: skip


class Pieces(logging.Handler):
    """How often the backend says that something runs in PyTorch."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def stepper(module: nn.Module, args: Sequence[Tensor], backend: str) -> Callable[[], float]:
    """A step of training: the loss and what updates the parameters are one graph each (and the derivatives another one)."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def loss_of(*args: Tensor) -> Tensor:
        scores = module(*args)
        scores = scores.reshape(-1, scores.shape[-1])
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)) % scores.shape[-1])

    compiled, update = (f if backend == "eager" else torch.compile(f, backend=backend) for f in (loss_of, optimizer.step))

    def step() -> float:
        optimizer.zero_grad()
        loss = compiled(*args)
        loss.backward()
        update()
        return float(loss.item())

    return step


def with_recurrences(backend: str, run: Callable[[], Any]) -> Callable[[], Any]:
    """Have Dynamo hand over LSTMs to tcomp alone: inductor would write out all their steps, and compile them for minutes."""

    def call() -> Any:
        torch._dynamo.config.allow_rnn = backend == "tcomp"
        return run()

    return call


def measured(name: str, training: bool, threads: int, seconds: float, rounds: int, eager: bool) -> dict[str, Any]:
    """One network in this process."""
    torch.set_num_threads(threads)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # loads what all contenders need
    heard, make = Pieces(logging.WARNING), (TRAINING if training else INFERENCE)[name]
    logging.getLogger("tcomp").addHandler(heard)
    calls: dict[str, Callable[[], Any]] = {}
    record: dict[str, Any] = {"name": name, "threads": threads}
    wanted: Any = None
    for backend in ("eager", "tcomp", "inductor"):
        torch.manual_seed(0)
        module, args = make()
        module.train(training)
        torch._dynamo.reset_code_caches()
        run = module if backend == "eager" else torch.compile(module, backend=backend)
        step = with_recurrences(backend, stepper(module, args, backend) if training else lambda run=run, args=args: run(*args))
        start = time.perf_counter()
        with torch.set_grad_enabled(training):
            found: Any = [step() for _ in range(20)] if training else step()
        record[f"first_{backend}"] = time.perf_counter() - start
        result = torch.tensor(found) if training else (found if isinstance(found, Tensor) else found[0])
        wanted = result if wanted is None else wanted
        record[f"error_{backend}"] = ((result - wanted).abs().max() / wanted.abs().max()).item()
        if eager or backend != "eager":
            calls[backend] = step
    record["pieces"] = heard.count
    with torch.set_grad_enabled(training):
        return record | {f"ms_{k}": v * 1e3 for k, v in least_times(calls, seconds, rounds).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names or glob patterns, comma-separated")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--eager", action="store_true", help="time eager PyTorch as well")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each contender in each round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one network")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one, options.training, int(options.threads), options.seconds, options.rounds, options.eager)))
        return
    chosen = [n for n in (TRAINING if options.training else INFERENCE) if any(fnmatch.fnmatch(n, p) for p in options.only.split(","))]
    for threads in options.threads.split(","):
        records = []
        for name in chosen:
            with tempfile.TemporaryDirectory() as folder:
                caches = {"TCOMP_CACHE": f"{folder}/tcomp", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
                command = [sys.executable, "-m", "benchmarks.torch_compile", *sys.argv[1:], "--one", name, "--threads", threads]
                try:
                    done = subprocess.run(
                        command, check=False, env=os.environ | caches, capture_output=True, text=True, timeout=options.timeout
                    )
                    records.append(record := json.loads(done.stdout.splitlines()[-1]))
                except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
                    print(f"{name:18} failed: {type(error).__name__} {done.stderr[-300:] if 'done' in locals() else ''}", flush=True)
                    continue
            times = "  ".join(f"{k[3:]} {v:8.3f} ms" for k, v in record.items() if k.startswith("ms_"))
            first = f"first {record['first_tcomp']:6.2f} / {record['first_inductor']:6.2f} s"
            ratio = record["ms_tcomp"] / record["ms_inductor"]
            errors = f"error {record['error_tcomp']:.0e} / {record['error_inductor']:.0e}"
            print(f"{name:18} {threads} threads: {times}  ratio {ratio:.3f}  {first}  {errors}  pieces {record['pieces']}", flush=True)
        if records:
            ratios, firsts = ([r[f"{k}_tcomp"] / r[f"{k}_inductor"] for r in records] for k in ("ms", "first"))
            print(
                f"{threads} threads, {len(records)} networks: geomean {geomean(ratios):.3f}, worst {max(ratios):.3f}; first {geomean(firsts):.3f}"
            )


if __name__ == "__main__":
    main()
