"""Networks of the zoo as ONNX models: one file for each network and batch, written once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

from ..nets import First
from .networks import TRANSFORMERS, Network
from .timm_alone import import_timm
from .written import made

SEQUENCE, SOUND, SIDE = 128, 8000, 224  # tokens, samples, pixels


def _inputs(kind: str, batch: int) -> dict[str, Tensor]:
    match kind:
        case "ids":
            return {
                "input_ids": torch.randint(3, 2000, (batch, SEQUENCE)),
                "attention_mask": torch.ones(batch, SEQUENCE, dtype=torch.int64),
            }
        case "image":
            return {"pixel_values": torch.randn(batch, 3, SIDE, SIDE)}
        case "sound":
            return {"input_values": torch.randn(batch, SOUND)}
        case "spectrogram":
            return {"input_values": torch.randn(batch, 256, 128)}
        case "mel":
            return {"input_features": torch.randn(batch, 80, 600)}
        case _:
            return {"past_values": torch.randn(batch, 256, 7)}


def _made(network: Network, batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """(the network, its inputs by name)."""
    if network.source == "timm":
        model = import_timm().create_model(network.name, pretrained=False, exportable=True)
        size = model.default_cfg.get("test_input_size") if model.default_cfg.get("fixed_input_size") else None
        return model, {"x": torch.randn(batch, *(size or model.default_cfg["input_size"]))}
    if network.source == "written":
        return made(network.name, batch)
    import transformers

    _, config, model_class, arguments, kind = TRANSFORMERS[network.name.removesuffix("_hf")]
    settings = getattr(transformers, config)(**arguments)
    settings._attn_implementation = "eager"
    model = getattr(transformers, model_class)(settings)
    model = model.get_encoder() if model_class == "WhisperModel" else model
    inputs = _inputs(kind, batch)
    return First(model, [*inputs]), inputs


def _randomise(model: nn.Module) -> None:
    """Weights as initialised, but no layer scale, norm or bias that is zero or one: these would hide branches, or let them be left out."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            with torch.no_grad():
                if p.ndim <= 1 or p.abs().max() < 1e-4:
                    p.normal_(1.0 if "weight" in name or "gamma" in name else 0.0, 0.1)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None and module.running_var is not None:
            module.running_mean.normal_(0.0, 0.1)
            module.running_var.uniform_(0.8, 1.2)


def export(network: Network, batch: int, path: Path) -> str:
    """Write a network as an ONNX model by one of the exporters of PyTorch; which one. Raises whatever these raise."""
    torch.manual_seed(0)
    model, inputs = _made(network, batch)
    model = model.eval()
    _randomise(model)
    if network.source != "transformers" and len(inputs) == 1:
        inputs = {"x": next(iter(inputs.values()))}
    common: dict[str, Any] = {"input_names": [*inputs], "output_names": ["result"]}
    partial = path.with_suffix(".partial")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(model, tuple(inputs.values()), partial, dynamo=False, opset_version=17, **common)
            onnxruntime.InferenceSession(str(partial), providers=["CPUExecutionProvider"])
            exporter = "torchscript"
        except Exception:  # noqa: BLE001  what one cannot write, or writes wrongly, the other may
            torch.onnx.export(model, tuple(inputs.values()), partial, dynamo=True, external_data=False, **common)
            exporter = "dynamo"
    partial.rename(path)
    return exporter
