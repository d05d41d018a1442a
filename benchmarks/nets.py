"""Networks with seeded random weights, written in plain torch (and transformers), and their export to ONNX.

Weights are random, but not degenerate: batch-norm statistics are calibrated on a random batch, norm scales and
biases are drawn instead of left at one and zero, so that a wrong scale, bias or permutation changes the output.
Imported only when such a model has to be made; needs torch, and transformers for BERT, GPT-2, ViT and MiniLM.
"""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

OPSET = 17


def randomise(model: nn.Module, sample: Tensor | None = None) -> nn.Module:
    """Draws scales and biases, sets batch-norm statistics to those seen on `sample`; returns the model in eval mode."""
    with torch.no_grad():
        for module in model.modules():
            is_norm = "Norm" in type(module).__name__
            for name, p in module.named_parameters(recurse=False):
                if p.dim() <= 1:
                    p.uniform_(0.5, 1.5) if is_norm and name == "weight" else p.normal_(0, 0.1)
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        if sample is not None:
            model.train()(sample)
    return model.eval()


def export(
    model: nn.Module,
    args: tuple[Tensor, ...],
    inputs: list[str],
    outputs: list[str],
    path: Path,
    axes: dict[str, dict[int, str]] | None = None,
    dynamo: bool = False,
) -> None:
    chatter = io.StringIO()
    with torch.no_grad(), warnings.catch_warnings(), redirect_stdout(chatter), redirect_stderr(chatter):
        warnings.simplefilter("ignore")
        common: dict[str, Any] = {"input_names": inputs, "output_names": outputs, "dynamic_axes": axes}
        if dynamo:
            torch.onnx.export(model, args, path, **common, opset_version=20, dynamo=True, external_data=False)
        else:
            torch.onnx.export(model, args, path, **common, opset_version=OPSET, dynamo=False)


class ConvBN(nn.Sequential):
    def __init__(self, i: int, o: int, k: int = 3, s: int = 1, groups: int = 1, act: Callable[[], nn.Module] | None = nn.ReLU6) -> None:
        super().__init__(nn.Conv2d(i, o, k, s, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o))
        if act:
            self.append(act())


class SqueezeExcite(nn.Module):
    def __init__(self, c: int, r: int) -> None:
        super().__init__()
        self.pool, self.down, self.up = nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, r, 1), nn.Conv2d(r, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(nn.functional.silu(self.down(self.pool(x)))))


class InvertedResidual(nn.Module):
    """MBConv: expand 1x1, depthwise kxk, optional squeeze-excite, project 1x1 (MobileNetV2, EfficientNet)."""

    def __init__(self, i: int, o: int, k: int, s: int, expand: int, act: Callable[[], nn.Module], se: bool) -> None:
        super().__init__()
        mid = i * expand
        layers: list[nn.Module] = [ConvBN(i, mid, 1, act=act)] if expand > 1 else []
        layers.append(ConvBN(mid, mid, k, s, groups=mid, act=act))
        if se:
            layers.append(SqueezeExcite(mid, max(1, i // 4)))
        self.body = nn.Sequential(*layers, ConvBN(mid, o, 1, act=None))
        self.residual = s == 1 and i == o

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def mobile_net(stages: list[tuple[int, int, int, int, int]], stem: int, head: int, act: Callable[[], nn.Module], se: bool) -> nn.Module:
    """`stages`: (expansion, channels, repeats, stride, kernel)."""
    layers: list[nn.Module] = [ConvBN(3, stem, 3, 2, act=act)]
    c = stem
    for t, o, n, s, k in stages:
        for j in range(n):
            layers.append(InvertedResidual(c, o, k, s if j == 0 else 1, t, act, se))
            c = o
    layers += [ConvBN(c, head, 1, act=act), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(head, 1000)]
    return nn.Sequential(*layers)


def mobilenet_v2(path: Path, dynamic: bool = False) -> None:
    stages = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3), (6, 96, 3, 1, 3),
              (6, 160, 3, 2, 3), (6, 320, 1, 1, 3)]  # fmt: skip
    model = randomise(mobile_net(stages, 32, 1280, nn.ReLU6, se=False), torch.randn(4, 3, 128, 128))
    axes = {"input": {0: "batch"}, "logits": {0: "batch"}} if dynamic else None
    export(model, (torch.randn(1, 3, 224, 224),), ["input"], ["logits"], path, axes)


def efficientnet_b0(path: Path) -> None:
    stages = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5),
              (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)]  # fmt: skip
    model = randomise(mobile_net(stages, 32, 1280, nn.SiLU, se=True), torch.randn(4, 3, 128, 128))
    export(model, (torch.randn(1, 3, 224, 224),), ["input"], ["logits"], path)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of NCHW."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.dw, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c))
        self.scale = nn.Parameter(torch.empty(c))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.dw(x).permute(0, 2, 3, 1))) * self.scale
        return x + y.permute(0, 3, 1, 2)


def convnext_tiny(path: Path) -> None:
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96, eps=1e-6)]
    for c, depth in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if c > 96:
            layers += [ChannelNorm(c // 2, eps=1e-6), nn.Conv2d(c // 2, c, 2, 2)]
        layers += [ConvNeXtBlock(c) for _ in range(depth)]
    layers += [nn.AdaptiveAvgPool2d(1), ChannelNorm(768, eps=1e-6), nn.Flatten(1), nn.Linear(768, 1000)]
    model = randomise(nn.Sequential(*layers))
    for m in model.modules():
        if isinstance(m, ConvNeXtBlock):
            nn.init.normal_(m.scale, 0, 1)  # the published 1e-6 would hide the whole branch
    export(model, (torch.randn(1, 3, 224, 224),), ["input"], ["logits"], path, dynamo=True)


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256), classes: int = 4) -> None:
        super().__init__()

        def double(i: int, o: int) -> nn.Module:
            return nn.Sequential(ConvBN(i, o, act=nn.ReLU), ConvBN(o, o, act=nn.ReLU))

        pairs = list(itertools.pairwise(widths))
        self.stem, self.pool = double(3, widths[0]), nn.MaxPool2d(2)
        self.down = nn.ModuleList(double(i, o) for i, o in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(o, i, 2, 2) for i, o in reversed(pairs))
        self.merge = nn.ModuleList(double(2 * i, i) for i, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.stem(x)]
        for block in self.down:
            skips.append(block(self.pool(skips[-1])))
        y = skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            y = merge(torch.cat([skips.pop(), up(y)], 1))
        return self.head(y)


def unet(path: Path) -> None:
    export(randomise(UNet(), torch.randn(2, 3, 64, 64)), (torch.randn(1, 3, 192, 192),), ["image"], ["mask"], path)


class TagLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(128, 256, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(512, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def lstm(path: Path) -> None:
    export(randomise(TagLSTM()), (torch.randn(1, 64, 128),), ["features"], ["tags"], path)


class RMSNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions and a KV cache, then SwiGLU (the layer of Llama models)."""

    def __init__(self, d: int = 1024, heads: int = 16, kv: int = 4, hidden: int = 2816, positions: int = 2048) -> None:
        super().__init__()
        self.heads, self.kv, self.hd = heads, kv, d // heads
        self.norm1, self.norm2 = RMSNorm(d), RMSNorm(d)
        self.q, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.k, self.v = (nn.Linear(d, kv * self.hd, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(d, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, d, bias=False)
        frequency = 10000.0 ** (-torch.arange(0, self.hd, 2) / self.hd)
        angle = (torch.arange(positions)[:, None] * frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos[position][:, None] + torch.cat([-b, a], -1) * self.sin[position][:, None]

    def forward(self, x: Tensor, position: Tensor, past_k: Tensor, past_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, s, d = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(n, s, -1, self.hd).transpose(1, 2) for f in (self.q, self.k, self.v))
        k = torch.cat([past_k, self.rotate(k, position)], 2)
        v = torch.cat([past_v, v], 2)
        group = self.heads // self.kv
        scores = self.rotate(q, position) @ k.repeat_interleave(group, 1).transpose(2, 3) * self.hd**-0.5
        y = torch.softmax(scores, -1) @ v.repeat_interleave(group, 1)
        x = x + self.o(y.transpose(1, 2).reshape(n, s, d))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h)), k, v


def llama_block(path: Path) -> None:
    past = torch.randn(1, 4, 128, 64)
    args = (torch.randn(1, 1, 1024), torch.tensor([[128]]), past, past.flip(2))
    names = ["x", "position", "past_k", "past_v"], ["y", "present_k", "present_v"]
    export(randomise(LlamaBlock()), args, *names, path)


class First(nn.Module):
    """Calls a transformers model with its tensors by name and returns the first tensor of its outputs only."""

    def __init__(self, model: nn.Module, names: list[str], **options: Any) -> None:
        super().__init__()
        self.model, self.names, self.options = model, names, options

    def forward(self, *args: Tensor) -> Tensor:
        result = self.model(**dict(zip(self.names, args, strict=True)), **self.options, return_dict=False)
        while isinstance(result, list | tuple):
            result = result[0]
        return result


def tokens(length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    return torch.randint(vocabulary, (1, length)), torch.ones(1, length, dtype=torch.int64)


def bert_base(path: Path, dynamic: bool = False) -> None:
    from transformers import BertConfig, BertModel

    names = ["input_ids", "attention_mask"]
    config = BertConfig(attn_implementation="eager")
    model = First(randomise(BertModel(config, add_pooling_layer=False)), names, use_cache=False)
    axes = {n: {0: "batch", 1: "seq"} for n in [*names, "hidden"]} if dynamic else None
    export(model, tokens(128, config.vocab_size), names, ["hidden"], path, axes)


def gpt2(path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    names = ["input_ids", "attention_mask"]
    config = GPT2Config(attn_implementation="eager")
    model = First(randomise(GPT2LMHeadModel(config)), names, use_cache=False)
    export(model, tokens(64, config.vocab_size), names, ["logits"], path)


def vit_b16(path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_labels=1000, attn_implementation="eager")
    model = First(randomise(ViTForImageClassification(config)), ["pixel_values"])
    export(model, (torch.randn(1, 3, 224, 224),), ["pixel_values"], ["logits"], path)


class Embedder(nn.Module):
    """Sentence embedding: mean of the token states under the mask, normalised."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = First(bert, ["input_ids", "attention_mask"], use_cache=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        weight = mask[:, :, None].float()
        mean = (self.bert(ids, mask) * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=1)


def minilm(path: Path, folder: Path) -> None:
    """`folder`: the trained model as transformers saves it."""
    from transformers import BertModel

    bert = BertModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="eager", local_files_only=True)
    args = tokens(128, bert.config.vocab_size)
    export(Embedder(bert.eval()), args, ["input_ids", "attention_mask"], ["embedding"], path)
