"""The tuner's parts against the clock: what its search finds, how well its model ranks, and where the shipped model comes from.

    python -m benchmarks.tuning quality [--samples 2000] [--seconds 600] [--trials 64] [--only 'conv*'] [--database random.db]
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tcomp.autotune.cost_model import SAME, CostModel, Sample, accuracy, shipped
from tcomp.autotune.database.entries import Record, environment
from tcomp.autotune.database.store import Database
from tcomp.autotune.features import CandidateSummary
from tcomp.autotune.measurement.measurer import Measurer
from tcomp.autotune.search import Search
from tcomp.autotune.tasks import Task, sample, workloads
from tcomp.backends import backend_of
from tcomp.errors import ScheduleError
from tcomp.frontends.onnx import import_model
from tcomp.options import CompileOptions, Report
from tcomp.passes.runner import run_passes
from tcomp.pipeline import graph_passes
from tcomp.schedules.knobs import Decisions, decode, encode
from tcomp.target import Target

HOST = Target.host()
BATCH = 8  # candidates that are measured together
RANKED = 120  # samples by which a model is judged
PASSES = 3  # of measuring these again
SURE = 2.0  # standard deviations of a difference that is one
FINALISTS, REPEATED = 8, 7  # candidates that are measured again at the end, and how often
FEWEST = 10  # candidates of a kernel by which a model is judged

# ---------------------------------------------------------------- kernels

Layer = tuple[str, list[np.ndarray], Mapping[str, Any]]  # ONNX operator, weights, attributes


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def conv(channels: int, filters: int, kernel: int, stride: int = 1, group: int = 1) -> Layer:
    attributes = {"strides": [stride] * 2, "pads": [kernel // 2] * 4, "group": group}
    return "Conv", [weights(filters, channels // group, kernel, kernel)], attributes


RELU: Layer = ("Relu", [], {})


def kernel(number: int, shape: Sequence[int], *layers: Layer) -> Task:
    """Kernel `number` of a chain of layers; convolutions are direct sums."""
    nodes, constants, last = [], [], "x"
    for n, (op, arrays, attributes) in enumerate(layers):
        names = [f"w{n}.{i}" for i in range(len(arrays))]
        constants += [numpy_helper.from_array(a, name) for a, name in zip(arrays, names, strict=True)]
        nodes.append(helper.make_node(op, [last, *names], [f"y{n}"], **attributes))
        last = f"y{n}"
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, s) for name, s in (("x", shape), (last, None))]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    return workloads(run_passes(import_model(model), graph_passes(CompileOptions(HOST, direct=True), Report()))[0], HOST, 1)[number][0]


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


# ---------------------------------------------------------------- quality


def quality(samples: int, trials: int, only: str, seed: int, path: str | None, seconds: float) -> None:
    """Random samples against the search, kernel by kernel; `path` names a database that keeps the samples for the next time. Each kernel's
    samples take `seconds` at most."""
    print(
        f"{'':<18}{'random':>14}{'search':>14}{'':>9}{'trials to be within 5 %':>27}{'':>8}{'pairs ranked rightly':>40}{'by the':>10}{'more':>8}"
    )
    print(f"{'kernel':<18}{'n':>6}{'best':>8}{'n':>6}{'best':>8}{'random/s.':>9}{'random':>12}{'search':>12}{'ratio':>11}"
          f"{'analytic':>12}{'shipped':>12}{f'after {trials}':>12}{'clock':>10}{'than':>8}")  # fmt: skip
    rows = []
    with Measurer() as measurer, ExitStack() as stack:
        database = stack.enter_context(Database(path)) if path else None
        for name, task in chosen(JUDGED, only):
            drawn = at_random(measurer, task, samples, seed, database, seconds)
            judges = Judges.of(measurer, task, drawn[:RANKED])
            search = Search(HOST, summarize=measurer.summarize)
            zero = [judges.judge(model) for model in (CostModel(), search.model)]
            tried = searched(measurer, search, task, trials, seed)
            after = judges.judge(search.model, {r.decisions for r in tried})
            final = finals(measurer, task, drawn, tried)
            enough = 1.05 * final[0]
            needed = next((n for n, r in enumerate(tried, 1) if cost_of(r) <= enough), None)
            usual = (len(drawn) + 1) / (1 + sum(cost_of(r) <= enough for r in drawn))  # the mean number of draws without replacement
            rows.append((final[0] / final[1], usual / (needed or 2 * trials), *zero, after, judges.clock, judges.same))
            print(f"{name:<18}{len(drawn):>6}{final[0]:>8.3f}{len(tried):>6}{final[1]:>8.3f}{rows[-1][0]:>9.3f}{usual:>12.1f}{needed or '-':>12}"
                  f"{rows[-1][1]:>11.1f}{zero[0]:>12.3f}{zero[1]:>12.3f}{after:>12.3f}{judges.clock:>10.3f}{judges.same:>8.3f}", flush=True)  # fmt: skip
    means = [float(np.exp(np.mean(np.log(column)))) for column in zip(*rows, strict=True)]
    print(
        f"{'geometric mean':<52}{means[0]:>9.3f}{'':>24}{means[1]:>11.1f}"
        + "".join(f"{m:>12.3f}" for m in means[2:5])
        + f"{means[5]:>10.3f}{means[6]:>8.3f}"
    )
    print("\nbest: time over that of the default schedule, measured anew. random/s.: above 0.95 is as good as the random samples"
          "\npairs are those that differ by more than repeated measurements of the same; by the clock: ranked by a single measurement")  # fmt: skip


def at_random(measurer: Measurer, task: Task, count: int, seed: int, database: Database | None, seconds: float = inf) -> list[Record]:
    """Measured samples; all of the space, where that is smaller; those for which there was time, but a batch."""
    found = [r for r in (database.records(task.key) if database else []) if r.ok]
    rng, known, loops, end = random.Random(seed), {r.decisions for r in found}, set[str](), time.monotonic() + seconds
    misses = 0
    while len(found) < count and misses < 4 * count and (time.monotonic() < end or not found):
        batch: list[Decisions] = []
        while len(batch) < BATCH and misses < 4 * count:
            try:
                new = sample(task, rng)
            except ScheduleError:
                misses += 1
                continue
            misses += new.identity in loops
            if new.identity not in loops and encode(new.decisions) not in known:
                batch.append(new.decisions)
            loops.add(new.identity)
        for r in measured(measurer, task, batch):
            found.append(r)
            if database:
                database.add(r)
    return [r for r in found[:count] if r.ok]


@dataclass(frozen=True)
class Judges:
    """Samples by which models are judged, by decisions. Each was measured in several passes; the median counts. `same`: what differs by
    less, these passes do not tell apart. `clock`: how well a single measurement ranks the samples."""

    samples: Mapping[str, Sample]
    same: float
    clock: float

    @classmethod
    def of(cls, measurer: Measurer, task: Task, records: Sequence[Record]) -> Judges:
        passes = np.array([[cost_of(r) for r in measured(measurer, task, [decode(r.decisions) for r in records])] for _ in range(PASSES)])
        sound = np.isfinite(passes).all(axis=0)
        texts, passes = [r.decisions for r, s in zip(records, sound, strict=True) if s], passes[:, sound]
        costs, first = np.median(passes, axis=0), np.array([cost_of(r) for r in records])[sound]
        noise = float(np.sqrt(np.log(passes).var(axis=0, ddof=1).mean() / PASSES))  # of the logarithm of a sample's cost
        same = max(SAME, SURE * sqrt(2) * noise)
        return cls(samples_of(measurer, task, dict(zip(texts, costs.tolist(), strict=True))), same, accuracy(np.log(first), costs, same))

    def judge(self, model: CostModel, without: Collection[str] = ()) -> float:
        """The share of pairs that a model orders rightly; of all samples, where too few are left."""
        left = [s for text, s in self.samples.items() if text not in without]
        return ranking(model, left if len(left) >= FEWEST else [*self.samples.values()], self.same)


def searched(measurer: Measurer, search: Search, task: Task, trials: int, seed: int) -> list[Record]:
    """The records of a search, in order."""
    records, rng = measured(measurer, task, [{}]), random.Random(seed)
    while len(records) < trials and (batch := search(task, records, min(BATCH, trials - len(records)), rng)):
        records += measured(measurer, task, batch)
    search(task, records, 1, rng)  # learns from the last ones
    return records


def cost_of(record: Record) -> float:
    return inf if record.cost is None else record.cost


def samples_of(measurer: Measurer, task: Task, costs: Mapping[str, float]) -> dict[str, Sample]:
    """By decisions, what a model learns from or is judged by; what is refused by now is left out."""
    made = measurer.summarize(task, [decode(text) for text in costs])
    return {
        text: Sample(task.key, m.features, cost)
        for (text, cost), m in zip(costs.items(), made, strict=True)
        if isinstance(m, CandidateSummary)
    }


def ranking(model: CostModel, samples: Sequence[Sample], same: float = SAME) -> float:
    """The share of pairs that a model orders rightly."""
    return accuracy(model.scores([s.features for s in samples]), np.array([s.cost for s in samples]), same)


def finals(measurer: Measurer, task: Task, *found: Sequence[Record]) -> list[float]:
    """The least cost of each way when its best few are measured again, in turns, the median of several times: the best of many was lucky as
    well. The default schedule is in each final: it is had for nothing."""
    best = [[decode(r.decisions) for r in sorted(records, key=cost_of)[:FINALISTS]] for records in found]
    everyone = list({encode(d): d for d in ({}, *(d for few in best for d in few))}.values())
    columns = zip(*([cost_of(r) for r in measured(measurer, task, everyone)] for _ in range(REPEATED)), strict=True)
    cost = {encode(d): float(np.median(column)) for d, column in zip(everyone, columns, strict=True)}
    return [min(cost[encode(d)] for d in ({}, *few)) for few in best]


# ---------------------------------------------------------------- record


def record(path: str, candidates: int, only: str, seed: int) -> None:
    """Measure candidates of the kernels: one half at random, the other as a search comes upon them."""
    with Measurer() as measurer, Database(path) as database:
        for name, task in chosen(LEARNT, only):
            begin = time.perf_counter()
            records = at_random(measurer, task, candidates // 2, seed, None)
            records += searched(measurer, Search(HOST, CostModel(), measurer.summarize), task, candidates - len(records), seed)
            for r in records:
                database.add(r)
            print(
                f"{name:<20}{len(records):>4} candidates, {sum(not r.ok for r in records)} failed, {time.perf_counter() - begin:.0f} s",
                flush=True,
            )


def measured(measurer: Measurer, task: Task, candidates: Sequence[Decisions]) -> list[Record]:
    """Records whose cost is a multiple of the default schedule's time; without traces, which the decisions stand for."""
    found = measurer.measure(task, candidates)
    return [
        Record(task, encode(d), "", m, m.ratio if m.status == "ok" else None, None, environment(backend_of(HOST)), time.time())
        for d, m in zip(candidates, found, strict=True)
    ]


# ---------------------------------------------------------------- train


def train(path: str, output: str | None) -> None:
    """Learn from a database; say how well kernels are ranked that the model did not see. The model is written where it ranks them better
    than the analytic one."""
    made, names, columns = list[Sample](), dict[str, str](), list[tuple[float, float]]()
    with Database(path) as database, Measurer() as measurer:
        for name, task in chosen(LEARNT, "*"):
            found: dict[str, list[float]] = {}
            for r in database.records(task.key):
                if r.ok:
                    found.setdefault(r.decisions, []).append(cost_of(r))
            names[task.key] = name
            made += samples_of(measurer, task, {text: float(np.median(costs)) for text, costs in found.items()}).values()
    print(f"{'kernel left out':<22}{'candidates':>12}{'analytic':>12}{'learnt':>12}")
    for key in dict.fromkeys(s.task for s in made):
        unseen = [s for s in made if s.task == key]
        if len(unseen) < FEWEST:
            continue
        model = CostModel()
        analytic = ranking(model, unseen)
        model.fit([s for s in made if s.task != key], thorough=True)
        columns.append((analytic, ranking(model, unseen)))
        print(f"{names[key]:<22}{len(unseen):>12}{analytic:>12.3f}{columns[-1][1]:>12.3f}", flush=True)
    analytic, learnt = np.mean(columns, axis=0).tolist()
    print(f"{'mean':<22}{len(made):>12}{analytic:>12.3f}{learnt:>12.3f}")
    if learnt <= analytic:
        print("nothing is written: it does not rank better than the analytic model")
        return
    model = CostModel()
    model.fit(made, thorough=True)
    place = Path(output) if output else shipped(HOST)
    facts = {"measurements": len(made), "kernels": [names[k] for k in dict.fromkeys(s.task for s in made)], "processor": environment(backend_of(HOST))["processor"], "threads": 1,
             "accuracy on kernels left out": {"analytic": round(analytic, 3), "learnt": round(learnt, 3)}}  # fmt: skip
    place.parent.mkdir(exist_ok=True)
    model.save(place, facts)
    print(f"{place}: {place.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    judging = commands.add_parser("quality", help="the search against random samples")
    judging.add_argument("--samples", type=int, default=2000)
    judging.add_argument("--trials", type=int, default=64)
    judging.add_argument("--database", help="keeps random samples")
    judging.add_argument("--seconds", type=float, default=inf, help="for the random samples of each kernel")
    recording = commands.add_parser("record", help="measure candidates")
    recording.add_argument("--database", required=True)
    recording.add_argument("--candidates", type=int, default=40, help="of each kernel")
    for command in (judging, recording):
        command.add_argument("--only", default="*", help="kernels, by comma-separated patterns")
        command.add_argument("--seed", type=int, default=0)
    training = commands.add_parser("train", help="make a model of what was recorded")
    training.add_argument("--database", required=True)
    training.add_argument("--output", help="default: the place of the shipped model of this machine's family")
    args = parser.parse_args()
    if args.command == "quality":
        quality(args.samples, args.trials, args.only, args.seed, args.database, args.seconds)
    elif args.command == "record":
        record(args.database, args.candidates, args.only, args.seed)
    else:
        train(args.database, args.output)


if __name__ == "__main__":
    main()
