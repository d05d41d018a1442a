"""Servers under load: `tcomp serve`, FastAPI with ONNX Runtime, and MLServer with ONNX Runtime, on the same machine, in turns.

    pip install 'tcomp[serve,torch]' transformers onnxscript fastapi onnxruntime
    python -m benchmarks.serving [--models resnet18,minilm] [--clients 1,8,64] [--seconds 10] [--rounds 3] [--json FILE]
    python -m venv mls && mls/bin/pip install mlserver onnxruntime 'uvloop<0.22'           # MLServer 1.7.1 needs an older uvloop
    python -m benchmarks.serving --mlserver mls/bin/python
    python -m benchmarks.serving --perf-analyzer "$(command -v perf_analyzer)"             # of PyPI's perf-analyzer, which needs glibc 2.38
    python -m benchmarks.serving --overhead            # of a request over the run of a tiny model

Clients run in a closed loop, on the same cores, in this process or in that of perf_analyzer. Beside FastAPI, tensors are bytes, in the
binary extension of the Open Inference Protocol. Beside MLServer, which lacks that extension, they are JSON (not with perf_analyzer, which
asks MLServer for what it does not have by HTTP), and bytes by gRPC. In every round each server has its turn for so many seconds; of the
round in which other processes took the smallest share of the machine, printed are requests per second, latencies, the time of the processor
that the server took for a request (which says most where the machine has other work, too), that share, and the ratios of tcomp to the
other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.serving.clients import Elements, Outcome
from benchmarks.serving.models import obtain, sample
from benchmarks.serving.overhead import overhead
from benchmarks.serving.perf_analyzer import perf_analyzer
from benchmarks.serving.servers import THREADS, Server, busy_seconds, cpu_seconds, fastapi_server, mlserver, tcomp_server

WARM = 2.0  # seconds of load before the first turn


class Result(NamedTuple):
    model: str
    clients: int
    server: str
    protocol: str
    requests_per_second: float
    p50: float
    p99: float
    cpu: float
    others: float


async def ready(server: Server) -> Elements:
    """Wait until a server answers; an answer."""
    end = time.monotonic() + 120
    while True:
        try:
            return (await asyncio.wait_for(server.load(1, WARM), 30)).answer  # MLServer leaves some early requests without one
        except (OSError, RuntimeError):  # nobody is there, or says that the model is not
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.2)


def turn(model: str, server: Server, clients: int, seconds: float, client: Callable[[Server, int, float], Outcome]) -> Result:
    def clocks() -> tuple[float, float, float]:
        """Of the server, of all others but this process and what it has ended, and of the wall."""
        of_server, of_client = cpu_seconds(server.process), os.times()
        return of_server, busy_seconds() - of_server - sum(of_client[:4]), time.monotonic()

    before = clocks()
    rate, p50, p99, _ = client(server, clients, seconds)
    cpu, others, took = (now - then for now, then in zip(clocks(), before, strict=True))
    return Result(model, clients, server.label, server.protocol, rate, p50, p99, cpu / took / rate, max(0.0, others / took / THREADS))


def compare(
    name: str, counts: Sequence[int], seconds: float, rounds: int, options: Sequence[str], python: Path | None, analyzer: Path | None
) -> list[Result]:
    """All servers of one model, in turns."""
    onnx_path, artifact = obtain(name)
    inputs = sample(name)
    results = []

    def client(server: Server, clients: int, seconds: float) -> Outcome:
        if analyzer is None:
            return asyncio.run(server.load(clients, seconds))
        protocol = "grpc" if server.protocol == "gRPC" else "http"
        return perf_analyzer(analyzer, protocol, server.port, server.model, inputs, clients, seconds)

    with ExitStack() as stack:
        ours = {server.protocol: server for server in stack.enter_context(tcomp_server(artifact, inputs, *options))[0]}
        theirs = stack.enter_context(fastapi_server(onnx_path, inputs))
        if python is not None:
            theirs += stack.enter_context(mlserver(python, onnx_path, inputs))
        pairs = [(ours[server.protocol], server) for server in theirs if analyzer is None or server.protocol != "JSON"]
        for pair in pairs:
            expected, found = (asyncio.run(ready(server)) for server in reversed(pair))
            error = float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))
            if not error < 1e-3:
                raise RuntimeError(f"{name}: {pair[1].label} and tcomp disagree, by {error}")
        for clients in counts:
            turns = [[[turn(name, server, clients, seconds, client) for server in pair] for pair in pairs] for _ in range(rounds)]
            for number in range(len(pairs)):
                both = [min((t[number][n] for t in turns), key=lambda r: r.others) for n in range(2)]
                for r in both:
                    times = f"p50 {r.p50 * 1e3:8.2f} ms  p99 {r.p99 * 1e3:8.2f} ms  CPU {r.cpu * 1e3:7.2f} ms  others {r.others:4.0%}"
                    print(f"{name:10} {clients:3} clients  {r.server:24} {r.protocol:5} {r.requests_per_second:8.1f}/s  {times}")
                figures = [(r.requests_per_second, r.p50, r.p99, r.cpu) for r in both]
                ratios = [f"{what} x {a / b:.2f}" for what, a, b in zip(("throughput", "p50", "p99", "CPU"), *figures, strict=True)]
                print(f"{'':10} {', '.join(ratios)}", flush=True)
                results += both
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="resnet18,minilm")
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--options", default="", help="of tcomp serve, as in '--instances 2'")
    parser.add_argument("--mlserver", type=Path, metavar="PYTHON", help="the Python of an environment that has MLServer and ONNX Runtime")
    parser.add_argument("--perf-analyzer", type=Path, metavar="PROGRAM", help="NVIDIA's, to be the client")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--overhead", action="store_true")
    arguments = parser.parse_args()
    if arguments.overhead:
        found = overhead()
        for name, us in found.items():
            print(f"{name:34} {us:7.0f} us  {us - found['module.run']:+7.0f}")
        return
    results = []
    for name in arguments.models.split(","):
        counts = [int(n) for n in arguments.clients.split(",")]
        results += compare(
            name, counts, arguments.seconds, arguments.rounds, arguments.options.split(), arguments.mlserver, arguments.perf_analyzer
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([r._asdict() for r in results], indent=1))


if __name__ == "__main__":
    main()
