"""Networks of the zoo that are written in torch: recurrent ones, diffusion, sound, small products."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from ..nets import UNet


class Recurrent(nn.Module):
    """Two recurrent layers and a linear one."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.layers, self.head = kind(64, 128, num_layers=2, batch_first=True), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])


class TimeBlock(nn.Module):
    """A residual block of a diffusion network, shifted by an embedding of the time."""

    def __init__(self, i: int, o: int, t: int) -> None:
        super().__init__()
        self.norm1, self.conv1, self.time = nn.GroupNorm(8, i), nn.Conv2d(i, o, 3, padding=1), nn.Linear(t, o)
        self.norm2, self.conv2 = nn.GroupNorm(8, o), nn.Conv2d(o, o, 3, padding=1)
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y = self.conv1(nn.functional.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        return self.skip(x) + self.conv2(nn.functional.silu(self.norm2(y)))


class Attention(nn.Module):
    """Self-attention over rows of tokens."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, s, d = x.shape
        q, k, v = self.qkv(x).reshape(n, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, s, d))


class DiffusionUNet(nn.Module):
    """The network of a small diffusion model (Ho et al. 2020): time embedding, group norms, attention at the lowest resolution."""

    def __init__(self, width: int = 32, time: int = 128) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, time), nn.SiLU(), nn.Linear(time, time))
        self.stem, self.down1 = nn.Conv2d(3, width, 3, padding=1), TimeBlock(width, width, time)
        self.half1, self.down2 = nn.Conv2d(width, 2 * width, 3, 2, 1), TimeBlock(2 * width, 2 * width, time)
        self.half2, self.middle = nn.Conv2d(2 * width, 4 * width, 3, 2, 1), TimeBlock(4 * width, 4 * width, time)
        self.norm, self.attention = nn.GroupNorm(8, 4 * width), Attention(4 * width)
        self.up1, self.up2 = TimeBlock(6 * width, 2 * width, time), TimeBlock(3 * width, width, time)
        self.out = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = self.time(t)
        first = self.down1(self.stem(x), t)
        second = self.down2(self.half1(first), t)
        y = self.middle(self.half2(second), t)
        y = y + self.attention(self.norm(y).flatten(2).transpose(1, 2)).transpose(1, 2).reshape(y.shape)
        y = self.up1(torch.cat([nn.functional.interpolate(y, scale_factor=2.0), second], 1), t)
        return self.out(self.up2(torch.cat([nn.functional.interpolate(y, scale_factor=2.0), first], 1), t))


class DiTBlock(nn.Module):
    """A block of a diffusion transformer (Peebles & Xie 2022): norms shifted and scaled by the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention, self.modulation = Attention(width), nn.Linear(width, 6 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        a, b, c, d, e, f = self.modulation(nn.functional.silu(t))[:, None].chunk(6, -1)
        x = x + c * self.attention(self.norm1(x) * (1 + a) + b)
        return x + f * self.mlp(self.norm2(x) * (1 + d) + e)


class DiT(nn.Module):
    """A small diffusion transformer on 32 x 32 x 4 latents."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(4, width, 2, 2), nn.ModuleList(DiTBlock(width) for _ in range(4))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            y = block(y, t)
        return self.head(y)


class TasNetBlock(nn.Module):
    """A dilated separable 1-D convolution between norms of all channels and times (Luo & Mesgarani 2019)."""

    def __init__(self, width: int, hidden: int, dilation: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(width, hidden, 1), nn.PReLU(), nn.GroupNorm(1, hidden),
            nn.Conv1d(hidden, hidden, 3, padding=dilation, dilation=dilation, groups=hidden), nn.PReLU(), nn.GroupNorm(1, hidden),
            nn.Conv1d(hidden, width, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class TasNet(nn.Module):
    """A small Conv-TasNet: separates the sources of a second of sound."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv1d(1, 128, 16, 8), nn.ConvTranspose1d(128, 1, 16, 8)
        self.blocks = nn.Sequential(*(TasNetBlock(128, 256, 1 << n) for n in range(6)), nn.Conv1d(128, 256, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.encoder(x))
        masks = torch.sigmoid(self.blocks(y)).chunk(2, 1)
        return torch.cat([self.decoder(y * m) for m in masks], 1)


def char_cnn() -> nn.Module:
    """Letters to classes by 1-D convolutions (Zhang et al. 2015)."""
    layers: list[nn.Module] = []
    for channels, width, pool in ((70, 7, 3), (256, 7, 3), (256, 3, 1), (256, 3, 1), (256, 3, 3)):
        layers += [nn.Conv1d(channels, 256, width, padding=width // 2), nn.ReLU(), *([nn.MaxPool1d(pool)] if pool > 1 else [])]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(18 * 256, 256), nn.ReLU(), nn.Linear(256, 14))


def tcn() -> nn.Module:
    """Dilated 1-D convolutions over a time series (Bai et al. 2018)."""
    layers: list[nn.Module] = [nn.Conv1d(7, 64, 1)]
    for n in range(6):
        layers += [nn.Conv1d(64, 64, 3, padding=1 << n, dilation=1 << n), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv1d(64, 7, 1))


def made(name: str, batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A network and its inputs."""
    match name:
        case "unet":
            return UNet(), {"x": torch.randn(batch, 3, 128, 128)}
        case "lstm" | "gru":
            return Recurrent(nn.LSTM if name == "lstm" else nn.GRU), {"x": torch.randn(batch, 32, 64)}
        case "diffusion_unet":
            return DiffusionUNet(), {"x": torch.randn(batch, 3, 32, 32), "t": torch.randn(batch, 32)}
        case "dit":
            return DiT(), {"x": torch.randn(batch, 4, 32, 32), "t": torch.randn(batch, 192)}
        case "conv_tasnet":
            return TasNet(), {"x": torch.randn(batch, 1, 8000)}
        case "char_cnn":
            return char_cnn(), {"x": torch.randn(batch, 70, 512)}
        case "tcn":
            return tcn(), {"x": torch.randn(batch, 7, 256)}
        case _:
            widths = (64, 64, 64, 64, 10)
            layers = [x for i, o in itertools.pairwise(widths) for x in (nn.Linear(i, o), nn.ReLU())]
            return nn.Sequential(*layers), {"x": torch.randn(batch, 64)}
