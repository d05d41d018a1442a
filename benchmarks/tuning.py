"""The tuner's parts against the clock: what its search finds, how well its model ranks, and where the shipped model comes from.

    python -m benchmarks.tuning quality [--samples 2000] [--trials 64] [--only 'conv*']
    python -m benchmarks.tuning record --database tune.db [--candidates 40]
    python -m benchmarks.tuning train --database tune.db

`quality` tunes kernels and draws as many schedules of each at random as asked for; all are measured beside the default schedule, so
that a busy machine disturbs both. `record` measures candidates of other kernels, `train` makes a model of them and says how well it
ranks those of kernels that it has not seen. One thread.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tcomp.autotune.database import Database, Record, environment
from tcomp.autotune.measure import Measurer
from tcomp.autotune.space import Candidate, Space
from tcomp.autotune.workload import Task, workloads
from tcomp.driver import Report, graph_passes
from tcomp.frontends.onnx import import_model
from tcomp.passes.runner import run_passes
from tcomp.schedules.knobs import encode
from tcomp.target import Target

HOST = Target.host()
BATCH = 8  # candidates that are measured together

# ---------------------------------------------------------------- kernels

Layer = tuple[str, list[np.ndarray], Mapping[str, Any]]  # ONNX operator, weights, attributes


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def conv(channels: int, filters: int, kernel: int, stride: int = 1, group: int = 1) -> Layer:
    attributes = {"strides": [stride] * 2, "pads": [kernel // 2] * 4, "group": group}
    return "Conv", [weights(filters, channels // group, kernel, kernel)], attributes


RELU: Layer = ("Relu", [], {})


def kernel(number: int, shape: Sequence[int], *layers: Layer) -> Task:
    """Kernel `number` of a chain of layers."""
    nodes, constants, last = [], [], "x"
    for n, (op, arrays, attributes) in enumerate(layers):
        names = [f"w{n}.{i}" for i in range(len(arrays))]
        constants += [numpy_helper.from_array(a, name) for a, name in zip(arrays, names, strict=True)]
        nodes.append(helper.make_node(op, [last, *names], [f"y{n}"], **attributes))
        last = f"y{n}"
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, s) for name, s in (("x", shape), (last, None))]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    return workloads(run_passes(import_model(model), graph_passes(HOST, Report()))[0], HOST, 1)[number][0]


def within(channels: int, filters: int, size: int, *layer: Any) -> Task:
    """A convolution between two others, as in a network: its input and result lie as these like it."""
    return kernel(1, (1, 16, size, size), conv(16, channels, 1), RELU, conv(channels, filters, *layer), RELU, conv(filters, 16, 1))


def product(rows: int, depth: int, columns: int) -> Task:
    return kernel(0, (rows, depth), ("MatMul", [weights(depth, columns)], {}), RELU)


def softmax(rows: int, columns: int) -> Task:
    return kernel(0, (rows, columns), ("Softmax", [], {"axis": -1}))


def normalization(rows: int, columns: int) -> Task:
    return kernel(0, (rows, columns), ("LayerNormalization", [weights(columns), weights(columns)], {"axis": -1}))


def pooling(channels: int, size: int) -> Task:
    pool: Layer = ("MaxPool", [], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]})
    return kernel(1, (1, 16, size, size), conv(16, channels, 1), pool, conv(channels, 16, 1))


JUDGED: Mapping[str, Callable[[], Task]] = {  # `quality`; a model is never trained on these
    "conv3x3": lambda: within(128, 128, 28, 3),
    "conv1x1": lambda: within(256, 64, 28, 1),
    "conv3x3_stride2": lambda: within(96, 128, 28, 3, 2),
    "depthwise": lambda: within(144, 144, 28, 3, 1, 144),
    "gemm": lambda: product(128, 768, 768),
    "gemm_row": lambda: product(1, 1024, 2048),
    "gemm_skinny": lambda: product(8, 768, 768),
    "softmax": lambda: softmax(256, 512),
    "layernorm": lambda: normalization(128, 768),
}

LEARNT: Mapping[str, Callable[[], Task]] = {  # `record`
    "conv3x3": lambda: within(64, 64, 28, 3),
    "conv3x3_tail": lambda: within(40, 56, 20, 3),
    "conv3x3_small": lambda: within(192, 192, 7, 3),
    "conv1x1": lambda: within(64, 256, 20, 1),
    "conv1x1_small": lambda: within(320, 96, 14, 1),
    "conv5x5_stride2": lambda: within(32, 64, 32, 5, 2),
    "stem": lambda: kernel(1, (1, 3, 96, 96), conv(3, 32, 7, 2), RELU, conv(32, 16, 1)),
    "depthwise_stride2": lambda: within(96, 96, 28, 3, 2, 96),
    "depthwise5x5": lambda: within(64, 64, 20, 5, 1, 64),
    "gemm_wide": lambda: product(64, 512, 1024),
    "gemm_tall": lambda: product(196, 384, 96),
    "gemm_row": lambda: product(1, 512, 1000),
    "gemm_skinny": lambda: product(16, 640, 512),
    "softmax": lambda: softmax(128, 768),
    "layernorm": lambda: normalization(64, 512),
    "pooling": lambda: pooling(64, 32),
}


def chosen(kernels: Mapping[str, Callable[[], Task]], only: str) -> Iterator[tuple[str, Task]]:
    for name, make in kernels.items():
        if any(fnmatchcase(name, pattern) for pattern in only.split(",")):
            yield name, make()


# ---------------------------------------------------------------- record


def record(path: str, candidates: int, only: str, seed: int) -> None:
    """Measure candidates of the kernels: two in three at random, the others near the default schedule."""
    with Measurer() as measurer, Database(path) as database:
        for name, task in chosen(LEARNT, only):
            begin, space = time.perf_counter(), Space(task, random.Random(seed))
            default = space.realise({})
            assert default is not None
            found = [default]
            for n in range(4 * candidates):
                if len(found) < candidates and (new := space.sample() if n % 3 else space.mutate(default)) is not None:
                    found.append(new)
            records = [r for start in range(0, len(found), BATCH) for r in measured(measurer, found[start : start + BATCH])]
            for r in records:
                database.add(r)
            failed = sum(not r.ok for r in records)
            print(f"{name:<20}{len(records):>4} candidates, {failed} failed, {time.perf_counter() - begin:.0f} s", flush=True)


def measured(measurer: Measurer, candidates: Sequence[Candidate]) -> list[Record]:
    """Records whose cost is a multiple of the default schedule's time."""
    task, records = candidates[0].task, []
    for c, m in zip(candidates, measurer.measure(task, [c.decisions for c in candidates]), strict=True):
        cost = m.ratio if m.status == "ok" else None
        records.append(Record(task, encode(c.decisions), c.schedule.trace.to_json(), m, cost, None, environment(HOST), time.time()))
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="measure candidates")
    recording.add_argument("--database", required=True)
    recording.add_argument("--candidates", type=int, default=40, help="of each kernel")
    recording.add_argument("--only", default="*", help="kernels, by comma-separated patterns")
    recording.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.command == "record":
        record(args.database, args.candidates, args.only, args.seed)


if __name__ == "__main__":
    main()
