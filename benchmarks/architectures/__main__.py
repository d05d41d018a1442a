"""Architectures that nobody prepared, as PyTorch's two exporters write them, at sizes left free: `python -m benchmarks.architectures`.

    python -m benchmarks.architectures --only 'bert,llama*' --exporters dynamo --out architectures.jsonl

Small models of `transformers`, `timm` and `diffusers` with random weights are exported with symbolic batch, sequence, height and width,
compiled with no option, and run at three sizes; results are compared with ONNX Runtime's. A case is "right" if all three sizes are. One whose
exported model ONNX Runtime does not run at all three is "export of fewer sizes": PyTorch wrote sizes of the example into it. Each case runs
in a process of its own with a time limit; results are lines of JSON, and what is there already is not done again.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from ..restartable import results_of, run_missing
from .cases import CASES, SIZES, inputs_of

EXPORTERS = ("dynamo", "torchscript")
TOLERANCE = 2e-3  # of the largest magnitude of a result


def exported(name: str, exporter: str, path: Path) -> None:
    """Write an architecture as an ONNX model. Raises whatever PyTorch raises."""
    import torch

    from ..nets import First

    make, shapes = CASES[name]
    torch.manual_seed(0)
    tensors = {n: torch.from_numpy(a) for n, a in inputs_of(shapes, 0, seed=0).items()}
    axes = {n: {i: d for i, d in enumerate(shape) if isinstance(d, str)} for n, shape in shapes.items()}
    model = make().eval()
    of_timm = [*tensors] == ["x"]  # one argument in, one tensor out
    first = model if of_timm else First(model, [*tensors])
    common: dict[str, Any] = {"input_names": [*tensors], "output_names": ["result"]}
    with torch.no_grad():
        if exporter == "dynamo":
            free = tuple({i: torch.export.Dim.AUTO for i in axes[n]} for n in tensors)
            dynamic = free if of_timm else (free,)  # the others are taken as one sequence
            torch.onnx.export(first, tuple(tensors.values()), path, dynamo=True, dynamic_shapes=dynamic, external_data=False, **common)
        else:
            torch.onnx.export(first, tuple(tensors.values()), path, dynamo=False, dynamic_axes=axes, opset_version=17, **common)


def judged(name: str, exporter: str) -> dict[str, Any]:
    """What becomes of a case: "right", or what failed, and why."""
    import onnxruntime

    import tcomp

    result: dict[str, Any] = {"name": name, "exporter": exporter, "outcome": "right", "detail": "", "sizes": 0}
    samples = [inputs_of(CASES[name][1], n, seed=1) for n in range(len(SIZES["batch"]))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            exported(name, exporter, path)
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001  PyTorch and ONNX Runtime raise what they like
            return result | {"outcome": "no model", "detail": shortened(error)}
        wanted: list[np.ndarray | None] = []
        for arrays in samples:
            try:
                wanted += session.run(None, {i.name: arrays[i.name] for i in session.get_inputs()})
            except Exception as error:  # noqa: BLE001
                wanted.append(None)
                result |= {"outcome": "export of fewer sizes", "detail": shortened(error)}
        if all(w is None for w in wanted):
            return result | {"outcome": "no model"}
        start = time.perf_counter()
        try:
            module = tcomp.compile(path, threads=1)
            result["seconds"] = round(time.perf_counter() - start, 2)
            result["inputs"] = [str(spec) for spec in module.inputs]
            for n, (arrays, w) in enumerate(zip(samples, wanted, strict=True)):
                if w is None:
                    continue
                found = module.run({spec.name: arrays[spec.name] for spec in module.inputs})["result"]
                scale = max(np.abs(w).max(), 1e-6)
                if found.shape != w.shape or not np.abs(found - w).max() <= TOLERANCE * scale:
                    return result | {"outcome": "wrong", "detail": f"size {n}: {found.shape} for {w.shape}"}
                result["sizes"] += 1
        except Exception as error:  # noqa: BLE001  every failure is a finding
            return result | {"outcome": type(error).__name__, "detail": shortened(error)}
    return result


def shortened(error: Exception) -> str:
    """The message of an error in one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]


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
        done = f"{r.get('sizes', 0)} of 3 sizes  {r.get('seconds', '')} s  {r.get('detail', '')[:150]}"
        print(f"{r['name']:16} {r['exporter']:12} {r['outcome']:16} {done}", flush=True)
    results = results_of(options.out)
    print(", ".join(f"{n} {outcome}" for outcome, n in Counter(r["outcome"] for r in results).most_common()))


if __name__ == "__main__":
    main()
