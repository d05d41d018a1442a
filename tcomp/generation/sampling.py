"""How the next token is chosen from logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tcomp.errors import InputError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` 0 takes the likeliest token (the first of equals); other values divide the logits. Then only some tokens stay: the
    `top_k` likeliest (0: all), the fewest likeliest whose probabilities reach `top_p` (1: all), those at least `min_p` times as likely as
    the likeliest. `repetition_penalty` divides positive logits of tokens that occurred, and multiplies negative ones (Keskar et al. 2019,
    section 4.1). Of a token that occurred in what came after the prompt, `presence_penalty` is taken from the logit, and
    `frequency_penalty` as often as it did. `bias` is added to the logits of tokens. `seed` None: other numbers each time."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises `InputError` for values out of range."""
        limits = {"temperature": (0, 1e6), "top_k": (0, 1 << 40), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (1e-6, 1e6)}
        limits |= {"presence_penalty": (-1e6, 1e6), "frequency_penalty": (-1e6, 1e6)}
        for name, (low, high) in limits.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise InputError(f"{name} is {value}", hint=f"from {low:g} to {high:g}")

    def generator(self) -> np.random.Generator:
        """The source of random numbers of one sequence."""
        return np.random.default_rng(self.seed)


def log_probabilities(logits: npt.NDArray[np.float32]) -> Floats:
    """Logarithms of the softmax of a vector, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    result: Floats = wide - np.log(np.exp(wide).sum())
    return result


def adjusted(logits: npt.NDArray[np.float32], occurred: Sequence[int], prompt: int, how: Sampling) -> npt.NDArray[np.float32]:
    """The logits with penalties and bias, given the tokens so far, of which the first `prompt` are the prompt's. Raises `InputError` for a
    bias of a token that there is not."""
    result = logits.copy()
    if how.repetition_penalty != 1 and occurred:
        tokens = np.unique(np.asarray(occurred))
        some, penalty = result[tokens], np.float32(how.repetition_penalty)
        result[tokens] = np.where(some > 0, some / penalty, some * penalty)
    if (how.presence_penalty or how.frequency_penalty) and len(occurred) > prompt:
        tokens, counts = np.unique(np.asarray(occurred[prompt:]), return_counts=True)
        result[tokens] -= (how.presence_penalty + how.frequency_penalty * counts).astype(np.float32)
    for token, value in how.bias.items():
        if not 0 <= token < len(result):
            raise InputError(f"a bias for the token {token}", why=f"there are {len(result)}")
        result[token] += np.float32(value)
    return result


def choose(logits: npt.NDArray[np.float32], occurred: Sequence[int], prompt: int, how: Sampling, random: np.random.Generator) -> int:
    """The next token, given the logits of all [vocabulary], and the tokens so far, of which the first `prompt` are the prompt's. Raises
    `InputError` where logits are not finite."""
    logits = adjusted(logits, occurred, prompt, how)
    best = int(logits.argmax())  # that of a NaN, where there is one
    if not np.isfinite(logits[best]):
        raise InputError("the model computed logits that are not finite", why="its weights or state are damaged, or it overflowed")
    if how.temperature == 0:
        return best
    scaled = logits.astype(np.float64) / how.temperature
    order = np.arange(len(scaled))
    if 0 < how.top_k < len(scaled):
        order = np.argpartition(-scaled, how.top_k - 1)[: how.top_k]
    order = order[np.argsort(-scaled[order], kind="stable")]  # likeliest first
    weights = np.exp(scaled[order] - scaled[order[0]])
    weights /= weights.sum()
    keep = int(np.searchsorted(np.cumsum(weights), how.top_p)) + 1 if how.top_p < 1 else len(weights)
    if how.min_p > 0:
        keep = min(keep, int((weights >= how.min_p * weights[0]).sum()))
    weights = np.cumsum(weights[: max(1, keep)])
    return int(order[min(int(np.searchsorted(weights, random.random() * weights[-1], side="right")), len(weights) - 1)])
