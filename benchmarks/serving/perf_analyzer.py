"""NVIDIA's perf_analyzer as the client, and what it asks of a server besides inference."""

from __future__ import annotations

import base64
import csv
import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.clients import Outcome
from tcomp.serve.wire import TRITON_TYPES

WINDOWS = 3  # of a measurement: perf_analyzer makes no fewer
DATATYPES = {np.dtype(np.float32): "FP32", np.dtype(np.int64): "INT64"}


def perf_analyzer(
    program: Path, protocol: str, port: int, model: str, inputs: Mapping[str, np.ndarray], clients: int, seconds: float
) -> Outcome:
    """What perf_analyzer measures with so many requests under way, always, for so many seconds in all. `protocol` is http or grpc. Raises
    RuntimeError where it finds fault with the server."""
    with tempfile.TemporaryDirectory() as folder:
        data, report = Path(folder) / "data.json", Path(folder) / "report.csv"
        data.write_text(json.dumps({"data": [{name: {"b64": base64.b64encode(a.tobytes()).decode()} for name, a in inputs.items()}]}))
        options = {
            "-m": model,
            "-i": protocol,
            "-u": f"127.0.0.1:{port}",
            "--input-data": data,
            "--concurrency-range": clients,
            "--measurement-interval": int(seconds * 1e3 / WINDOWS),  # milliseconds
            "--max-trials": WINDOWS,
            "--stability-percentage": 999,  # the windows together are the result, however they differ
            "-f": report,
        }
        command = [str(program), "--async", *(str(word) for option in options.items() for word in option)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode or not report.exists():
            raise RuntimeError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
        (row,) = csv.DictReader(report.open())
    p50, p99 = (float(row[f"{name} latency"]) / 1e6 for name in ("p50", "p99"))
    return Outcome(float(row["Inferences/Second"]), p50, p99, np.empty(0))


def tensors(inputs: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Name, shape and datatype of each, as the protocol has them."""
    return [{"name": name, "shape": list(array.shape), "datatype": DATATYPES[array.dtype]} for name, array in inputs.items()]


def metadata(name: str, onnx_path: Path, inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Of a model whose first axis is free, and whose outputs are float32."""
    import onnx

    outputs = onnx.load(onnx_path, load_external_data=False).graph.output
    made = [(o.name, [-1, *(d.dim_value for d in o.type.tensor_type.shape.dim[1:])]) for o in outputs]
    ends = {
        "inputs": [tensor | {"shape": [-1, *tensor["shape"][1:]]} for tensor in tensors(inputs)],
        "outputs": [{"name": n, "shape": shape, "datatype": "FP32"} for n, shape in made],
    }
    return {"name": name, "versions": ["1"], "platform": "onnxruntime", **ends}


def configuration(described: Mapping[str, Any]) -> dict[str, Any]:
    """The model's, by the names of Triton, from its metadata."""
    ends = {
        end: [{"name": t["name"], "data_type": f"TYPE_{t['datatype']}", "dims": t["shape"][1:]} for t in described[f"{end}s"]]
        for end in ("input", "output")
    }
    return {"name": described["name"], "platform": described["platform"], "max_batch_size": 32, **ends}


def as_message(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with numbers for names, as messages of gRPC have them."""
    ends = {end: [t | {"data_type": TRITON_TYPES.index(t["data_type"])} for t in config[end]] for end in ("input", "output")}
    return {**config, **ends}


def statistics(name: str) -> dict[str, Any]:
    """Of a server that counts nothing."""
    nothing = {"count": 0, "ns": 0}
    kinds = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    counts = {"inference_count": 0, "execution_count": 0, "inference_stats": dict.fromkeys(kinds, nothing)}
    return {"model_stats": [{"name": name, "version": "1", **counts}]}
