"""The graph of a model, by the type that its config says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tcomp.errors import InputError
from tcomp.frontends.language_models.config import decoder_config
from tcomp.frontends.language_models.decoder import decoder_graph
from tcomp.frontends.language_models.families import FAMILIES, stored_weights
from tcomp.frontends.language_models.layers import Weights
from tcomp.frontends.language_models.mamba import MAMBAS, mamba_graph
from tcomp.frontends.language_models.mamba2 import mamba2_graph
from tcomp.frontends.language_models.t5 import T5S, t5_graph
from tcomp.frontends.language_models.whisper import whisper_graph
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Graph

# Those that are no decoder with a cache alone: (config, weights, the names that there are, where it is) -> graph.
OTHERS: Mapping[str, Callable[[Mapping[str, Any], Weights, Mapping[str, object], str], Graph]] = {
    **dict.fromkeys(MAMBAS, mamba_graph),
    "mamba2": mamba2_graph,
    **dict.fromkeys(T5S, t5_graph),
    "whisper": whisper_graph,
}


def model_graph(
    given: Mapping[str, Any], weights: Weights, names: Mapping[str, object], where: str, batch: Dim = 1, drafts: int = 0
) -> Graph:
    """The graph that a config describes, of weights of files that have tensors of these names; a decoder for a `batch` of sequences or
    with `drafts`. Raises `UnsupportedError` for another architecture, `ImportModelError` for impossible sizes, `InputError` for a batch of
    what has none, and what `weights` raises."""
    kind = given.get("model_type")
    other = OTHERS.get(kind) if isinstance(kind, str) else None
    if other is None:
        config = decoder_config(given, where)
        return decoder_graph(config, stored_weights(FAMILIES[config.family], config, names, weights), batch, drafts)
    if batch != 1 or drafts:
        raise InputError(f"models of the type {kind} continue one sequence, without drafts", hint="leave out the dims `batch` and `drafts`")
    return other(given, weights, names, where)
