"""Folders of GPTQ and AWQ: the logits of the floats that their numbers stand for."""

import json

import numpy as np
import pytest

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.ir.interpreters.graph import evaluate_graph
from tests.language_models.reference import SMALL, logits, random_weights
from tests.language_models.test_decoder import IDS, empty

pytest.importorskip("safetensors", reason="pip install 'tcomp[generate]'")
from safetensors.numpy import save_file

from tcomp.frontends.language_models.folder import import_folder

CONFIG = {**SMALL, "model_type": "llama", "tie_word_embeddings": False}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the numbers of a word of AWQ, from its lowest bits on


def words(numbers, bits, order=None):
    """int32 of the numbers along the last axis."""
    each = 32 // bits
    parts = numbers.reshape(*numbers.shape[:-1], -1, each).astype(np.uint64)[..., order or range(each)]
    return np.bitwise_or.reduce(parts << (np.arange(each, dtype=np.uint64) * np.uint64(bits)), -1).astype(np.uint32).view(np.int32)


def write(path, how, shuffled=False):
    """A folder; returns the floats that it stands for."""
    rng, held, tensors, bits = np.random.default_rng(1), {}, {}, how["bits"]
    for name, array in random_weights(CONFIG).items():
        if "_proj" not in name:
            held[name] = tensors[name] = array
            continue
        out, size = array.shape
        block, base = size if how["group_size"] == -1 else how["group_size"], name.removesuffix(".weight")
        groups = np.arange(size) // block
        if shuffled:
            rng.shuffle(groups)
        numbers = rng.integers(0, 1 << bits, (size, out))
        zeros = rng.integers(1, 1 << bits, (size // block, out))
        scales = (rng.random((size // block, out)) * 0.1 + 0.01).astype(np.float16)
        held[name] = ((numbers - zeros[groups]) * scales[groups].astype(np.float32)).T.astype(np.float32)
        if how["quant_method"] == "awq":
            tensors |= {f"{base}.qweight": words(numbers, bits, ORDER), f"{base}.qzeros": words(zeros, bits, ORDER)}
        else:
            less = how.get("checkpoint_format", "gptq") == "gptq"
            tensors |= {f"{base}.qweight": np.ascontiguousarray(words(numbers.T, bits).T), f"{base}.qzeros": words(zeros - less, bits)}
            tensors[f"{base}.g_idx"] = groups.astype(np.int32)
        tensors[f"{base}.scales"] = scales
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": how}))
    return held


@pytest.mark.parametrize(
    ("how", "shuffled"),
    [
        (GPTQ, False),
        ({**GPTQ, "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}, False),
        ({**GPTQ, "desc_act": True}, True),
        (AWQ, False),
    ],
)
def test_models_are_those_of_their_floats(how, shuffled, tmp_path):
    held = write(tmp_path, how, shuffled)
    graph = import_folder(tmp_path)
    assert shuffled or {"block_product"} <= {node.op.name for node in graph.nodes}
    y = evaluate_graph(graph, {"ids": IDS[None], **empty(CONFIG)})["logits"]
    wanted = logits(CONFIG, held, IDS)
    np.testing.assert_allclose(y, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


def test_other_packings_are_refused(tmp_path):
    write(tmp_path, {**AWQ, "group_size": 32})
    for how, kind, what in (
        ({**AWQ, "version": "gemv"}, UnsupportedError, "awq"),
        ({"quant_method": "bitsandbytes"}, UnsupportedError, "bitsandbytes"),
        ({**AWQ, "group_size": 48}, ImportModelError, "groups of 48"),
        ({**GPTQ, "group_size": 32}, ImportModelError, "is expected"),
        (7, UnsupportedError, "None"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": how}))
        with pytest.raises(kind, match=what):
            import_folder(tmp_path)
