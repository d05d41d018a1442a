"""How the next token is chosen from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tcomp.errors import InputError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` 0 takes the likeliest token (the first of equals); other values divide the logits. Then only some tokens stay: the
    `top_k` likeliest (0: all), the fewest likeliest whose probabilities reach `top_p` (1: all), those at least `min_p` times as likely as
    the likeliest. `repetition_penalty` divides positive logits of tokens that occurred, and multiplies negative ones (Keskar et al. 2019,
    section 4.1). `seed` None: other numbers each time."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises `InputError` for values out of range."""
        limits = {"temperature": (0, 1e6), "top_k": (0, 1 << 40), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (1e-6, 1e6)}
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


def penalised(logits: npt.NDArray[np.float32], occurred: Sequence[int], penalty: float) -> npt.NDArray[np.float32]:
    """The logits, those of tokens that occurred being less likely."""
    if penalty == 1 or not occurred:
        return logits
    result, tokens = logits.copy(), np.unique(np.asarray(occurred))
    some = result[tokens]
    result[tokens] = np.where(some > 0, some / np.float32(penalty), some * np.float32(penalty))
    return result


def choose(logits: npt.NDArray[np.float32], occurred: Sequence[int], how: Sampling, random: np.random.Generator) -> int:
    """The next token, given the logits of all [vocabulary], and the tokens so far. Raises `InputError` where logits are not finite."""
    logits = penalised(logits, occurred, how.repetition_penalty)
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
