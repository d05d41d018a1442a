"""Damage to files of language models: GGUF files as bytes, and config.json of a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from random import Random

import gguf
import numpy as np

from tcomp.errors import ImportModelError
from tcomp.frontends.language_models.architectures import OTHERS, model_graph
from tcomp.frontends.language_models.families import FAMILIES
from tcomp.frontends.language_models.gguf_file import import_gguf
from tcomp.frontends.language_models.values import read_config
from tcomp.ir.verify.graph import verify_graph
from tests.fuzz.mutations import damaged_bytes, damaged_json
from tests.fuzz.target import Folders, packed, unpacked
from tests.language_models.reference import SMALL, random_weights
from tests.language_models.test_gguf import CONFIG, write

NAME, CONFIG_NAME = "fuzz.gguf", "config.json"


class GgufFiles(Folders):
    """A GGUF file, damaged mostly where it does not hold weights."""

    @cached_property
    def corpus(self) -> Sequence[bytes]:
        found = []
        for kind in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.F16):
            write(self.folder / NAME, random_weights(CONFIG), kind)
            found.append(packed({NAME: (self.folder / NAME).read_bytes()}))
        return found

    def damage(self, rng: Random, data: bytes) -> bytes:
        content = unpacked(data)[NAME]
        head = 2048 if rng.randrange(4) else len(content)
        return packed({NAME: damaged_bytes(rng, content[:head]) + content[head:]})

    def read(self, data: bytes) -> None:
        self.write(data)
        verify_graph(import_gguf(self.folder / NAME))


class Configs(Folders):
    """The config.json of a decoder, and the graph of weights of the sizes that it says, if they are small."""

    @cached_property
    def corpus(self) -> Sequence[bytes]:
        scaling = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
        sizes = dict.fromkeys(("d_model", "d_ff", "num_heads", "encoder_ffn_dim", "decoder_ffn_dim"), 16)
        sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "encoder_layers", "decoder_layers"), 2)
        others: list[dict[str, object]] = [{"model_type": family, **experts} for family in FAMILIES]
        others += [{"model_type": family, **sizes} for family in OTHERS]
        others += [{"model_type": "llama", "rope_scaling": scaling}, {"model_type": "mistral", "sliding_window": 3}]
        return [packed({CONFIG_NAME: json.dumps({**SMALL, **other}).encode()}) for other in others]

    def damage(self, rng: Random, data: bytes) -> bytes:
        return packed({CONFIG_NAME: damaged_json(rng, unpacked(data)[CONFIG_NAME])})

    def read(self, data: bytes) -> None:
        self.write(data)
        given = read_config(self.folder / CONFIG_NAME)
        left = 1 << 20

        def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
            nonlocal left
            left -= max(4096, int(np.prod(shape, dtype=float)))
            if left < 0:
                raise ImportModelError(f"there is no `{name}`")
            return np.zeros(shape, np.float32)

        verify_graph(model_graph(given, weights, {}, CONFIG_NAME))
