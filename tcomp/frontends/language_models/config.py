"""What a config.json says of a decoder, checked: Llama, Mistral, Qwen2 and Qwen3, which differ in little."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tcomp.errors import ImportModelError, UnsupportedError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
MAX_CONFIG_BYTES = 1 << 20
MAX_SIZE = 1 << 24  # of anything that is counted: of more, a file is no config
MAX_LAYERS = 1 << 10  # each of them has inputs and outputs of the graph, before any weight is looked for


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """Longer contexts by slower rotations, as Llama 3.1 has them: wavelengths above `original / low` positions are `factor` times as long,
    those below `original / high` as they were, and in between something in between. Where `low` is 0, all are `factor` times as long."""

    factor: float
    low: float = 0.0
    high: float = 0.0
    original: int = 0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder: `heads` of queries, `kv_heads` of keys and values, each of `head_size`; `positions`: the longest context."""

    family: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    positions: int
    epsilon: float
    theta: float
    tied: bool
    bias: bool = False  # of queries, keys and values
    normalised_heads: bool = False
    scaling: RotaryScaling | None = None
    window: int = 0  # positions that a query sees, its own included; 0: all


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `ImportModelError` where there is none."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ImportModelError("this is no config", where=str(path), why=f"it has more than {MAX_CONFIG_BYTES} bytes")
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ImportModelError("the config cannot be read", where=str(path), why=str(error)) from None
    if not isinstance(found, dict):
        raise ImportModelError("the config is no JSON object", where=str(path))
    return found


def decoder_config(given: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """The decoder that a config describes. Raises `UnsupportedError` for another architecture, `ImportModelError` for impossible sizes."""
    family = given.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedError(f"models of the type {family!r:.40} are not read from their config", where=where, hint=_hint())

    def number(name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = given.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ImportModelError(f"`{name}` is {value!r:.40}", where=where, why=f"a number from 1 to {most} is needed")
        return value

    def real(source: Mapping[str, Any], name: str, default: float | None = None) -> float:
        value = source.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1e12:
            raise ImportModelError(f"`{name}` is {value!r:.40}", where=where, why="a positive number is needed")
        return float(value)

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    kv_heads, size = number("num_key_value_heads", heads), number("head_dim", max(1, hidden // heads))
    if heads % kv_heads or size % 2:
        raise ImportModelError(f"{heads} heads of {size} do not divide into groups for {kv_heads} of keys", where=where)
    if given.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"the activation {given['hidden_act']!r:.40}", where=where, hint="silu is supported")
    if given.get("mlp_bias") or (given.get("attention_bias") and family != "qwen2"):
        raise UnsupportedError("biases of projections", where=where, hint=_hint())
    parameters = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ImportModelError("the parameters of rotary positions are no JSON object", where=where)
    theta = real(parameters if "rope_theta" in parameters else given, "rope_theta", 10000.0)
    kind, scaling = parameters.get("rope_type", parameters.get("type", "default")), None
    if kind == "llama3":
        low, high = real(parameters, "low_freq_factor"), real(parameters, "high_freq_factor")
        original = parameters.get("original_max_position_embeddings")
        if not isinstance(original, int) or not 1 <= original <= MAX_SIZE or not 0 < low < high:
            raise ImportModelError("the scaling of rotary positions has impossible parameters", where=where)
        scaling = RotaryScaling(real(parameters, "factor"), low, high, original)
    elif kind == "linear":
        scaling = RotaryScaling(real(parameters, "factor"))
    elif kind != "default":
        raise UnsupportedError(f"rotary positions of the type {kind!r:.40}", where=where, hint="default, linear and llama3 are supported")
    if scaling is not None and scaling.factor < 1:
        raise ImportModelError("the scaling of rotary positions is less than 1", where=where)
    windowed = family == "mistral" or bool(given.get("use_sliding_window"))
    window = number("sliding_window") if windowed and given.get("sliding_window") is not None else 0
    if window and family != "mistral":
        raise UnsupportedError("windows that only some layers have", where=where, hint="set use_sliding_window to false")
    return DecoderConfig(
        family=str(family),
        vocabulary=number("vocab_size"),
        hidden=hidden,
        intermediate=number("intermediate_size"),
        layers=number("num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        positions=number("max_position_embeddings", 2048),
        epsilon=real(given, "rms_norm_eps", 1e-6),
        theta=theta,
        tied=bool(given.get("tie_word_embeddings", False)),
        bias=family == "qwen2",
        normalised_heads=family == "qwen3",
        scaling=scaling,
        window=window,
    )


def _hint() -> str:
    return f"{', '.join(FAMILIES)} are supported; others through ONNX or PyTorch's exporter"
