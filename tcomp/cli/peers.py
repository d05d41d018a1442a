"""Other runtimes, as far as they are installed, to compare with: each is a function from a model to a function that runs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tcomp.errors import InputError

Arrays = Mapping[str, np.ndarray]
Run = Callable[[Arrays], Arrays]


def onnxruntime(path: Path, threads: int, inputs: Arrays) -> Run:
    """ONNX Runtime on the CPU."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))


def openvino(path: Path, threads: int, inputs: Arrays) -> Run:
    """OpenVINO on the CPU."""
    import openvino as ov

    core = ov.Core()
    model = core.read_model(str(path))
    model.reshape({name: list(array.shape) for name, array in inputs.items()})
    config = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    names = [(name, n) for n, port in enumerate(compiled.outputs) for name in port.get_names()]  # with aliases

    def run(feeds: Arrays) -> Arrays:
        results = request.infer(dict(feeds), share_inputs=True, share_outputs=True)
        return {name: results[n] for name, n in names}

    return run


def torch(path: Path, threads: int, inputs: Arrays) -> Run:
    """PyTorch, through onnx2torch, on the CPU."""
    import onnx
    import onnx2torch
    import torch as pytorch

    proto = onnx.load(str(path))
    module, names = onnx2torch.convert(proto).eval(), [o.name for o in proto.graph.output]

    def run(feeds: Arrays) -> Arrays:
        pytorch.set_num_threads(threads)
        with pytorch.inference_mode():
            results: Any = module(*(pytorch.from_numpy(feeds[name]) for name in inputs))
        several = results if isinstance(results, tuple | list) else (results,)
        return {name: r.numpy() for name, r in zip(names, several, strict=True)}

    return run


LOADERS: Mapping[str, Callable[[Path, int, Arrays], Run]] = {"onnxruntime": onnxruntime, "openvino": openvino, "torch": torch}
_NEEDS = {"onnxruntime": ("onnxruntime",), "openvino": ("openvino",), "torch": ("torch", "torchvision", "onnx2torch")}


def is_installed(peer: str) -> bool:
    """Whether the packages of a peer are installed."""
    return all(importlib.util.find_spec(package) is not None for package in _NEEDS[peer])


def how_to_install(peer: str) -> str:
    """The command that installs them."""
    return f"pip install {' '.join(_NEEDS[peer])}"


def check_installed(peer: str) -> None:
    """Raises `InputError` where a peer is not installed."""
    if not is_installed(peer):
        raise InputError(f"{peer} is not installed", where="--against", hint=how_to_install(peer))
