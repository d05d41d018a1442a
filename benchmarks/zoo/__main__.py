"""Networks by name with random weights: is tcomp right, and how long do it, ONNX Runtime and OpenVINO take, in turns.

    python -m benchmarks.zoo                                        # all of them at batch 1
    python -m benchmarks.zoo --only 'resne*,swin*' --batches 1,8,32 --threads 2
    python -m benchmarks.zoo --report zoo.html                      # a page about the results there are

Every network is a process of its own, and models are written once to a folder. Results are JSON lines in a file; a later call does what is
missing there. Needs torch, timm, transformers, onnxruntime, openvino, for the page's plots matplotlib.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..models import cache_folder
from ..restartable import results_of, run_missing
from .networks import Network, networks

KEYS = ("name", "batch", "threads")


def _case(network: Network, batch: int, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    folder = cache_folder() / "zoo"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{network.name}-{batch}.onnx"
    if not path.exists():  # in a process of its own: PyTorch's threads and memory are no part of what is measured
        command = [sys.executable, "-m", "benchmarks.zoo", "--export", network.name, str(batch), str(path)]
        written = subprocess.run(command, capture_output=True, text=True, check=False)
        if written.returncode:
            return {"outcome": "no model", "detail": (written.stderr.strip().splitlines() or [""])[-1][:400]}
    from .case import measured

    with tempfile.TemporaryDirectory() as empty:
        os.environ["TCOMP_CACHE"] = empty  # compile times are those without a cache
        result = measured(path, threads, options.seconds, options.kernels)
    if not options.keep:
        path.unlink()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="names or glob patterns, comma-separated")
    parser.add_argument("--structure", default="*", help="structures or glob patterns, comma-separated")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="of measuring a network, all contenders together")
    parser.add_argument("--kernels", action="store_true", help="also predicted and measured times of every kernel")
    parser.add_argument("--keep", action="store_true", help="keep the models in the cache folder (some 10 GB for a batch)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of a network")
    parser.add_argument("--out", type=Path, default=Path("zoo.jsonl"))
    parser.add_argument("--report", type=Path, metavar="PAGE.html", help="write a page about the results in --out instead")
    parser.add_argument("--clock", choices=("wall", "own"), default="wall", help="of the page: time that passes, or the process's own")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--case", nargs=3, metavar=("NAME", "BATCH", "THREADS"), help="one network in this process")
    parser.add_argument("--export", nargs=3, metavar=("NAME", "BATCH", "PATH"), help="write one network as a model")
    options = parser.parse_args()
    known = networks()
    if options.export:
        from .export import export

        name, batch, path = options.export
        with redirect_stdout(io.StringIO()):
            export(known[name], int(batch), Path(path))
        return
    if options.case:
        name, batch, threads = options.case
        chatter = io.StringIO()
        with redirect_stdout(chatter), redirect_stderr(chatter):
            result = _case(known[name], int(batch), int(threads), options)
        print(json.dumps(result | {"structure": known[name].structure}))
        return
    if options.report:
        from .report import page

        options.report.write_text(page(results_of(options.out), options.clock), encoding="utf-8")
        return
    wanted = [
        n for n in known.values()
        if any(fnmatch(n.name, p) for p in options.only.split(",")) and any(fnmatch(n.structure, p) for p in options.structure.split(","))
    ]  # fmt: skip
    if options.list:
        for n in wanted:
            print(f"{n.name:34} {n.source:14} {n.structure}")
        print(len(wanted), "networks")
        return
    cases = [(n.name, batch, str(options.threads)) for batch in options.batches.split(",") for n in wanted]
    passed_on = [f"--seconds={options.seconds}", *(["--kernels"] if options.kernels else []), *(["--keep"] if options.keep else [])]
    for r in run_missing(options.out, "benchmarks.zoo", cases, KEYS, passed_on, options.timeout):
        times = r.get("wall_ms", {})
        ratio = times["tcomp"] / times["onnxruntime"] if "tcomp" in times else float("nan")
        spent = "  ".join(f"{name} {ms:.2f}" for name, ms in times.items())
        print(f"{r['name']:34} {r['batch']:>2} {r['outcome']:10} {ratio:5.2f}  {spent}  {r.get('detail', '')[:120]}", flush=True)


if __name__ == "__main__":
    main()
