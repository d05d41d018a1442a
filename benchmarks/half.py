"""Networks in float16 and bfloat16 against their peers: `python -m benchmarks.half [--only squeezenet,...] [--threads 1] [--seconds 3]`.

The models of `benchmarks.models` are converted by ONNX Runtime's converter (weights, inputs and outputs; bfloat16: the same nodes with the
other type). tcomp, ONNX Runtime and OpenVINO run them in turns; the least times count. ONNX Runtime has no bfloat16 on CPUs. Errors are
relative to the largest result of the float32 model. Shown too is the time that tcomp takes for the float32 model.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.version_converter
from onnx import TensorProto, numpy_helper

import tcomp
from benchmarks.contenders.worker import difference, load_onnxruntime, load_openvino
from benchmarks.models import MODELS, Arrays, load_arrays, obtain
from benchmarks.timing import Call, geomean, least_times

NETWORKS = (
    "squeezenet", "mobilenet_v2", "efficientnet_b0", "ppocr_cls", "mtcnn_onet", "unet", "yolov8n", "minilm", "lstm", "llama_block",
)  # fmt: skip
FLOATS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ROUNDS = 10  # turns of each contender
BFLOAT16_OPSET = 22  # the first in which convolutions and pooling take it


def converted(model: onnx.ModelProto, dtype: str) -> onnx.ModelProto:
    """The model with 16-bit floats in the place of float32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = convert_float_to_float16(model, keep_io_types=False, disable_shape_infer=True)
    if dtype == "bfloat16":
        model.ir_version = max(model.ir_version, 4)  # from which on constants need not be inputs
        model = onnx.version_converter.convert_version(model, BFLOAT16_OPSET)
        _to_bfloat16(model.graph)
    return model


def _to_bfloat16(graph: onnx.GraphProto) -> None:
    tensors = [*graph.initializer, *(a.t for node in graph.node for a in node.attribute if a.HasField("t"))]
    for tensor in tensors:
        if tensor.data_type == TensorProto.FLOAT16:
            numbers = numpy_helper.to_array(tensor).astype(np.float32).astype(ml_dtypes.bfloat16)
            tensor.CopyFrom(TensorProto(name=tensor.name, dims=tensor.dims, data_type=TensorProto.BFLOAT16, raw_data=numbers.tobytes()))
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.type.tensor_type.elem_type == TensorProto.FLOAT16:
            info.type.tensor_type.elem_type = TensorProto.BFLOAT16
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.BFLOAT16
            if attribute.HasField("g"):
                _to_bfloat16(attribute.g)


def measure(name: str, dtype: str, threads: int, seconds: float) -> tuple[dict[str, float], float]:
    """The least seconds by peer ("float32": tcomp with the model as it was), and the error of tcomp's results."""
    path = obtain(next(m for m in MODELS if m.name == name))
    wide = load_arrays(path, "inputs")
    inputs = {n: a.astype(FLOATS[dtype]) if a.dtype == np.float32 else a for n, a in wide.items()}
    shapes = {n: list(a.shape) for n, a in inputs.items()}
    with tempfile.TemporaryDirectory() as folder:
        half = Path(folder) / "half.onnx"
        onnx.save(converted(onnx.load(path), dtype), half)
        before = tcomp.compile(path, threads=threads, shapes=shapes)
        module = tcomp.compile(half, threads=threads, shapes=shapes)
        calls: dict[str, Call] = {"tcomp": module.bind(inputs).run, "float32": before.bind(wide).run}
        for peer, load in (("onnxruntime", load_onnxruntime), ("openvino", load_openvino)):
            try:
                run = load(half, half, threads, {"fixed": {}, "shapes": shapes}, inputs)
                calls[peer] = partial(run, openvino_tensors(inputs) if peer == "openvino" else inputs)
                calls[peer]()
            except Exception as error:  # noqa: BLE001  whatever a peer cannot do
                calls.pop(peer, None)
                print(f"{name} {dtype}: {peer} cannot run it: {str(error).splitlines()[0]:.100}")
        found = least_times(calls, seconds / ROUNDS / len(calls), ROUNDS)
    exact = before.run(wide)
    return found, difference({n: a.astype(exact[n].dtype) for n, a in module.run(inputs).items()}, exact)


def openvino_tensors(inputs: Arrays) -> dict[str, Any]:
    """Arrays of bfloat16 as tensors, whose type OpenVINO does not know from NumPy."""
    import openvino

    return {
        n: openvino.Tensor(a.view(np.uint8), a.shape, openvino.Type.bf16) if a.dtype == FLOATS["bfloat16"] else a for n, a in inputs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.half", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(NETWORKS))
    parser.add_argument("--dtypes", default=",".join(FLOATS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    for dtype in args.dtypes.split(","):
        ratios = []
        for name in args.only.split(","):
            try:
                found, error = measure(name, dtype, args.threads, args.seconds)
            except onnx.version_converter.ConvertError as problem:
                print(f"{name} {dtype}: ONNX's converter of versions fails: {problem}")
                continue
            best = min((found[peer] for peer in ("onnxruntime", "openvino") if peer in found), default=math.nan)
            ratios.append(found["tcomp"] / best)
            times = "  ".join(f"{peer} {seconds * 1e3:.3f} ms" for peer, seconds in found.items())
            print(
                f"{name:16} {dtype:8}  {times}  of the best peer {ratios[-1]:.2f}, of float32 {found['tcomp'] / found['float32']:.2f}  error {error:.1e}",
                flush=True,
            )
        known = [ratio for ratio in ratios if not math.isnan(ratio)]
        if known:
            print(f"{dtype}: geomean of {len(known)} networks {geomean(known):.3f} of the best peer", flush=True)


if __name__ == "__main__":
    main()
