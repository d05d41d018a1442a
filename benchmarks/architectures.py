"""Architectures that nobody prepared, as PyTorch's two exporters write them, at sizes left free: `python -m benchmarks.architectures`.

    python -m benchmarks.architectures --only 'bert,llama*' --exporters dynamo --out architectures.jsonl

Small models of `transformers` with random weights are exported with symbolic batch, sequence, height and width, compiled with no option, and
run at three sizes; results are compared with ONNX Runtime's. Each case runs in a process of its own with a time limit; results are lines of
JSON, and what is there already is not done again.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from .restartable import results_of, run_missing

EXPORTERS = ("dynamo", "torchscript")
TOLERANCE = 2e-3  # of the largest magnitude of a result
Inputs = dict[str, Any]

TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
LLAMA = TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
IMAGE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8}

# By name: (class of the configuration and of the model, arguments of the configuration, kind of the inputs).
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bert": ("BertConfig", "BertModel", TEXT, "ids"),
    "roberta": ("RobertaConfig", "RobertaModel", TEXT | {"max_position_embeddings": 64}, "ids"),
    "distilbert": ("DistilBertConfig", "DistilBertModel", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 99}, "ids"),
    "albert": ("AlbertConfig", "AlbertModel", TEXT | {"embedding_size": 16}, "ids"),
    "electra": ("ElectraConfig", "ElectraModel", TEXT | {"embedding_size": 16}, "ids"),
    "deberta_v2": ("DebertaV2Config", "DebertaV2Model", TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "ids"),
    "mpnet": ("MPNetConfig", "MPNetModel", TEXT, "ids"),
    "squeezebert": ("SqueezeBertConfig", "SqueezeBertModel", TEXT | {"embedding_size": 32}, "ids"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "use_cache": False}, "ids"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", TEXT | {"use_cache": False}, "ids"),
    "opt": ("OPTConfig", "OPTForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 99, "word_embed_proj_dim": 32, "use_cache": False}, "ids"),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "use_cache": False}, "ids"),
    "falcon": ("FalconConfig", "FalconForCausalLM", TEXT | {"use_cache": False}, "ids"),
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA, "ids"),
    "mistral": ("MistralConfig", "MistralForCausalLM", LLAMA | {"sliding_window": 8}, "ids"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", LLAMA, "ids"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", LLAMA | {"head_dim": 8}, "ids"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", LLAMA | {"head_dim": 8}, "ids"),
    "phi": ("PhiConfig", "PhiForCausalLM", LLAMA, "ids"),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", LLAMA, "ids"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}, "ids"),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 99, "use_cache": False}, "ids"),
    "t5_encoder": ("T5Config", "T5EncoderModel", {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64, "d_kv": 8, "vocab_size": 99}, "ids"),
    "bart": ("BartConfig", "BartModel", {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 99, "use_cache": False}, "ids"),
    "vit": ("ViTConfig", "ViTModel", IMAGE, "batch of images"),
    "deit": ("DeiTConfig", "DeiTModel", IMAGE, "batch of images"),
    "dinov2": ("Dinov2Config", "Dinov2Model", IMAGE, "batch of images"),
    "swin": ("SwinConfig", "SwinModel", {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}, "batch of images"),
    "convnext": ("ConvNextConfig", "ConvNextModel", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}, "images"),
    "resnet": ("ResNetConfig", "ResNetModel", {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}, "images"),
    "regnet": ("RegNetConfig", "RegNetModel", {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "groups_width": 8}, "images"),
    "mobilenet_v2": ("MobileNetV2Config", "MobileNetV2Model", {"depth_multiplier": 0.25}, "images"),
    "efficientnet": ("EfficientNetConfig", "EfficientNetModel", {"width_coefficient": 0.25, "depth_coefficient": 0.25}, "images"),
    "segformer": ("SegformerConfig", "SegformerForSemanticSegmentation", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16}, "images"),
    "poolformer": ("PoolFormerConfig", "PoolFormerModel", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}, "images"),
    "levit": ("LevitConfig", "LevitModel", {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "key_dim": [8, 8, 8], "depths": [1, 1, 1]}, "batch of 64"),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2Model", TEXT | {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}, "sound"),
    "whisper_encoder": ("WhisperConfig", "WhisperModel", {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "num_mel_bins": 16, "max_source_positions": 40, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}, "mel"),
}  # fmt: skip


def sizes(kind: str) -> list[dict[str, int]]:
    """Three sizes of the inputs; the first is that of the export."""
    match kind:
        case "ids":
            return [{"batch": b, "sequence": s} for b, s in ((2, 7), (1, 16), (3, 33))]
        case "images":
            return [{"batch": b, "height": h, "width": w} for b, h, w in ((2, 64, 96), (1, 128, 64), (3, 96, 96))]
        case "sound":
            return [{"batch": b, "length": n} for b, n in ((2, 400), (1, 1000), (3, 640))]
        case _:
            return [{"batch": b} for b in (2, 1, 5)]


def inputs_of(kind: str, given: dict[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Arrays of a kind of inputs."""
    b = given["batch"]
    match kind:
        case "ids":
            shape = b, given["sequence"]
            return {"input_ids": rng.integers(3, 99, shape), "attention_mask": np.ones(shape, np.int64)}
        case "images":
            return {"pixel_values": rng.standard_normal((b, 3, given["height"], given["width"])).astype(np.float32)}
        case "sound":
            return {"input_values": rng.standard_normal((b, given["length"])).astype(np.float32)}
        case "mel":
            return {"input_features": rng.standard_normal((b, 16, 80)).astype(np.float32)}
        case _:
            side = 64 if kind == "batch of 64" else 32
            return {"pixel_values": rng.standard_normal((b, 3, side, side)).astype(np.float32)}


AXES = {"ids": ("batch", "sequence"), "images": ("batch", "", "height", "width"), "sound": ("batch", "length")}


def exported(name: str, exporter: str, path: Path) -> None:
    """Write an architecture as an ONNX model. Raises whatever PyTorch raises."""
    import torch
    import transformers

    from .nets import First

    config, model_class, arguments, kind = CASES[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config)(**arguments)).eval()
    model = model.get_encoder() if name == "whisper_encoder" else model
    first = inputs_of(kind, sizes(kind)[0], np.random.default_rng(0))
    tensors = {n: torch.from_numpy(a) for n, a in first.items()}
    axes = {n: {i: axis for i, axis in enumerate(AXES.get(kind, ("batch",))) if axis} for n in tensors}

    first_of = First(model, [*tensors])
    common: dict[str, Any] = {"input_names": [*tensors], "output_names": ["result"]}
    with torch.no_grad():
        if exporter == "dynamo":
            dynamic = (tuple({i: torch.export.Dim.AUTO for i in axes[n]} for n in tensors),)
            torch.onnx.export(first_of, tuple(tensors.values()), path, dynamo=True, dynamic_shapes=dynamic, external_data=False, **common)
        else:
            torch.onnx.export(first_of, tuple(tensors.values()), path, dynamo=False, dynamic_axes=axes, opset_version=17, **common)


def judged(name: str, exporter: str) -> dict[str, Any]:
    """What becomes of a case: "right", or what failed, and why."""
    import onnxruntime

    import tcomp

    result: dict[str, Any] = {"name": name, "exporter": exporter, "outcome": "right", "detail": ""}
    kind = CASES[name][3]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            exported(name, exporter, path)
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001  PyTorch and ONNX Runtime raise what they like
            return result | {"outcome": "no model", "detail": str(error).strip().splitlines()[-1][:200]}
        start = time.perf_counter()
        try:
            module = tcomp.compile(path, threads=1)
            result["seconds"] = round(time.perf_counter() - start, 2)
            result["inputs"] = [str(spec) for spec in module.inputs]
            for given in sizes(kind):
                arrays = inputs_of(kind, given, np.random.default_rng(1))
                feeds = {i.name: arrays[i.name] for i in session.get_inputs()}
                try:
                    (wanted, *_) = session.run(None, feeds)
                except Exception:  # noqa: BLE001, S112  the model is one of other sizes
                    continue
                found = module.run({spec.name: arrays[spec.name] for spec in module.inputs})["result"]
                scale = max(np.abs(wanted).max(), 1e-6)
                if found.shape != wanted.shape or not np.abs(found - wanted).max() <= TOLERANCE * scale:
                    return result | {"outcome": "wrong", "detail": f"{given}: {found.shape} for {wanted.shape}"}
                result["sizes"] = result.get("sizes", 0) + 1
        except Exception as error:  # noqa: BLE001  every failure is a finding
            return result | {"outcome": type(error).__name__, "detail": " ".join(str(error).split())[:400]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names or glob patterns, comma-separated")
    parser.add_argument("--exporters", default=",".join(EXPORTERS))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of a case")
    parser.add_argument("--out", type=Path, default=Path("architectures.jsonl"))
    parser.add_argument("--case", nargs=2, metavar=("NAME", "EXPORTER"), help="judge one case in this process")
    options = parser.parse_args()
    if options.case:
        chatter = io.StringIO()
        with warnings.catch_warnings(), redirect_stdout(chatter), redirect_stderr(chatter):
            warnings.simplefilter("ignore")
            result = judged(*options.case)
        print(json.dumps(result))
        return
    wanted = [n for n in CASES if any(fnmatch(n, p) for p in options.only.split(","))]
    cases = [(n, e) for n in wanted for e in options.exporters.split(",")]
    for r in run_missing(options.out, "benchmarks.architectures", cases, ("name", "exporter"), timeout=options.timeout):
        done = f"{r.get('sizes', 0)} sizes  {r.get('seconds', '')} s  {r.get('detail', '')[:150]}"
        print(f"{r['name']:16} {r['exporter']:12} {r['outcome']:16} {done}", flush=True)
    results = results_of(options.out)
    print(f"{sum(r['outcome'] == 'right' for r in results)} of {len(results)} right")


if __name__ == "__main__":
    main()
