"""What a config.json says of a decoder, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.language_models.families import FAMILIES
from tcomp.frontends.language_models.values import MAX_LAYERS, MAX_SIZE, Values

MAX_EXPERTS = 1 << 12  # likewise: each is a tensor of its own in files


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """Longer contexts by slower rotations, as Llama 3.1 has them: wavelengths above `original / low` positions are `factor` times as long,
    those below `original / high` as they were, and in between something in between. Where `low` is 0, all are `factor` times as long."""

    factor: float
    low: float = 0.0
    high: float = 0.0
    original: int = 0


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a layer: `count` of them, of which each token has `chosen`, with `size` elements inside; `normalised`: whether the shares
    of those chosen are made to sum to 1; `shared`: the elements inside of one that all tokens have, 0 without it; `layers`: which layers
    have experts."""

    count: int
    chosen: int
    size: int
    normalised: bool
    shared: int
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder: `heads` of queries, `kv_heads` of keys and values, each of `head_size`; `positions`: the longest context; and
    what it does otherwise than Llama."""

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
    windowed: frozenset[int] | None = None  # layers that have the window; None: all
    window_theta: float | None = None  # `theta` of these, without scaling; None: they turn as the others do
    rotated: int | None = None  # elements of a head that are turned by positions, the first ones; None: all
    alibi: bool = False  # positions are biases of scores (Press et al. 2021)
    positions_from: int | None = None  # positions are vectors, the first of which stands in this row of a table
    layer_norm: bool = False  # else norms by the root mean square
    unit_offset: bool = False  # scales of norms are those stored, and 1
    activation: str = "silu"
    gated: bool = True
    output_bias: bool = False  # of what attention gives
    mlp_bias: bool = False
    head_bias: bool = False  # of logits
    parallel: bool = False  # the MLP reads what attention does, and both are added
    shared_norm: bool = False  # they even have one norm
    post_norms: bool = False  # what attention and the MLP give is normalised, too
    normalised_embedding: bool = False
    scaled_embedding: bool = False  # by the root of the hidden size
    query_scalar: float | None = None  # scores are divided by the root of it; None: of the size of a head
    score_cap: float = 0.0  # scores s are cap * tanh(s / cap); 0: as they are
    logit_cap: float = 0.0
    experts: Experts | None = None


def decoder_config(found: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """The decoder that a config describes. Raises `UnsupportedError` for another architecture, `ImportModelError` for impossible sizes."""
    name = found.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise UnsupportedError(f"models of the type {name!r:.40} are not read from their config", where=where, hint=_hint())
    said = {key: value for key, value in found.items() if value is not None}
    given = {**family.defaults, **said, **{ours: said[theirs] for ours, theirs in family.keys.items() if theirs in said}}
    if other := [key for key, value in family.neutral.items() if found.get(key, value) not in (value, None)]:
        raise UnsupportedError(f"`{other[0]}` is {found[other[0]]!r:.40}", where=where, why="there is no code for it", hint=_hint())

    values = Values(given, where)
    number, real, flag = values.number, values.real, values.flag
    features = dict(family.features)
    heads, hidden, layers = number("num_attention_heads"), number("hidden_size"), number("num_hidden_layers", most=MAX_LAYERS)
    kv_heads, size = number("num_key_value_heads", heads), number("head_dim", max(1, hidden // heads))
    if name == "falcon":
        kv_heads = number("num_kv_heads", heads) if flag("new_decoder_architecture") else 1 if given.get("multi_query", True) else heads
        both = given.get("num_ln_in_parallel_attn", 2 if flag("new_decoder_architecture") else 1) == 2
        features |= {"shared_norm": flag("parallel") and not both, **dict.fromkeys(("bias", "output_bias", "mlp_bias"), flag("bias"))}
    if name == "opt":
        features |= dict.fromkeys(("bias", "output_bias", "mlp_bias"), given.get("enable_bias", True) is True)
    if name in ("llama", "mistral", "qwen3"):
        features |= {"bias": flag("attention_bias"), "output_bias": flag("attention_bias"), "mlp_bias": flag("mlp_bias")}
    elif flag("mlp_bias"):
        raise UnsupportedError("biases of projections", where=where, hint=_hint())
    if heads % kv_heads or size % 2:
        raise ImportModelError(f"{heads} heads of {size} do not divide into groups for {kv_heads} of keys", where=where)
    if given.get("word_embed_proj_dim", hidden) != hidden:
        raise UnsupportedError("embeddings of another size than the layers", where=where, hint=_hint())
    parameters = given.get("rope_parameters") or given.get("rope_scaling") or {}
    window_theta = real("rope_local_base_freq", 10000.0) if name == "gemma3_text" else None
    if isinstance(parameters, Mapping) and "full_attention" in parameters:  # those of each type of layers
        window_theta, scaled = _rotation(parameters.get("sliding_attention"), {}, values)
        if scaled is not None:
            raise UnsupportedError("rotary positions that are scaled in layers with a window", where=where)
        parameters = parameters["full_attention"]
    theta, scaling = _rotation(parameters, given, values)
    share = real("partial_rotary_factor", 1.0, parameters if "partial_rotary_factor" in parameters else given)
    rotated = int(size * share)
    if not 0 < share <= 1 or rotated % 2:
        raise ImportModelError(f"{share:g} of the elements of a head are turned", where=where)
    window, windowed = 0, None
    if given.get("sliding_window") is not None and given.get("use_sliding_window", not str(name).startswith("qwen")):
        window = number("sliding_window")
        windowed = _windowed(given, str(name), layers, where)
    elif window_theta is not None:
        raise UnsupportedError("layers without a window whose positions turn otherwise", where=where, hint=_hint())
    return DecoderConfig(
        family=str(name),
        vocabulary=number("vocab_size"),
        hidden=hidden,
        intermediate=number("intermediate_size", None if "intermediate_size" in given or features.get("gated", True) else 4 * hidden),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        positions=number("max_position_embeddings", 2048),
        epsilon=real("rms_norm_eps", 1e-6),
        theta=theta,
        tied=bool(given.get("tie_word_embeddings", False)),
        scaling=scaling,
        window=window,
        windowed=windowed,
        window_theta=window_theta,
        rotated=rotated,
        activation=values.activation("hidden_act", "silu"),
        parallel=flag("parallel"),
        query_scalar=real("query_scalar") if "query_scalar" in given else None,
        score_cap=real("attn_logit_softcapping", 0.0),
        logit_cap=real("final_logit_softcapping", 0.0),
        experts=_experts(given, layers, number) if "expert_size" in family.keys else None,
        **features,
    )


def _rotation(parameters: object, given: Mapping[str, Any], values: Values) -> tuple[float, RotaryScaling | None]:
    """(theta, scaling) of rotary positions that have these parameters."""
    where, real = values.where, values.real
    if not isinstance(parameters, Mapping):
        raise ImportModelError("the parameters of rotary positions are not a JSON object", where=where)
    theta = real("rope_theta", 10000.0, parameters if "rope_theta" in parameters else given)
    kind, scaling = parameters.get("rope_type", parameters.get("type", "default")), None
    if kind == "llama3":
        low, high = real("low_freq_factor", source=parameters), real("high_freq_factor", source=parameters)
        original = parameters.get("original_max_position_embeddings")
        if not isinstance(original, int) or not 1 <= original <= MAX_SIZE or not 0 < low < high:
            raise ImportModelError("the scaling of rotary positions has impossible parameters", where=where)
        scaling = RotaryScaling(real("factor", source=parameters), low, high, original)
    elif kind == "linear":
        scaling = RotaryScaling(real("factor", source=parameters))
    elif kind != "default":
        raise UnsupportedError(f"rotary positions of the type {kind!r:.40}", where=where, hint="default, linear and llama3 are supported")
    if scaling is not None and scaling.factor < 1:
        raise ImportModelError("the scaling of rotary positions is less than 1", where=where)
    return theta, scaling


def _windowed(given: Mapping[str, Any], name: str, layers: int, where: str) -> frozenset[int] | None:
    """The layers that have a window."""
    kinds = given.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or {*map(str, kinds)} - {"sliding_attention", "full_attention"}:
            raise UnsupportedError("layers of other types than full_attention and sliding_attention", where=where)
        return frozenset(n for n, kind in enumerate(kinds) if kind == "sliding_attention")
    if name == "gemma2":
        return frozenset(range(0, layers, 2))
    if name == "gemma3_text":
        step = given.get("sliding_window_pattern", 6)
        if not isinstance(step, int) or step < 1:
            raise ImportModelError(f"`sliding_window_pattern` is {step!r:.40}", where=where)
        return frozenset(n for n in range(layers) if (n + 1) % step)
    if name.startswith("qwen"):
        first = given.get("max_window_layers", 0)
        return frozenset(range(first, layers)) if isinstance(first, int) else frozenset()
    return None


def _experts(given: Mapping[str, Any], layers: int, number: Callable[..., int]) -> Experts:
    count, step, dense = number("num_experts", most=MAX_EXPERTS), number("decoder_sparse_step", 1), given.get("mlp_only_layers")
    own = frozenset(n for n in range(layers) if (n + 1) % step == 0 and not (isinstance(dense, list) and n in dense))
    shared = number("shared_expert_intermediate_size") if "shared_expert_intermediate_size" in given else 0
    chosen = number("num_experts_per_tok", most=count)
    return Experts(count, chosen, number("expert_size"), given.get("norm_topk_prob") is True, shared, own)


def _hint() -> str:
    return f"{', '.join(FAMILIES)} are supported; others through ONNX or PyTorch's exporter"
