"""The tuner: it keeps to its budget, loses nothing, goes on where it was, and compilations follow what it found. See also `killing.py`."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

import tcomp
from tcomp.api import with_records
from tcomp.autotune.database.entries import Record, Verdict
from tcomp.autotune.database.store import Database
from tcomp.autotune.features import CandidateSummary
from tcomp.autotune.measurement.results import Measurement, Outcome
from tcomp.autotune.progress import Status
from tcomp.autotune.subject import ModelSubject
from tcomp.autotune.tasks import Task, instantiate
from tcomp.autotune.tuner import tune
from tcomp.errors import DatabaseError, DeviceError, InputError, TargetError
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.runtime import Module
from tcomp.schedules.knobs import Decisions, decode, encode
from tests.autotune.killing import children, outlived
from tests.autotune.models import two_layers
from tests.autotune.spaces import product, scaled, split_scaled

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("TCOMP_CACHE", str(folder))
        patch.setattr("tcomp.calibration.measure", lambda target: target.core)
        yield folder


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_layers(tmp_path_factory.mktemp("model") / "net.onnx")


# ---------------------------------------------------------------- programs


def test_a_program_is_tuned(tmp_path: Path) -> None:
    statuses: list[Status] = []
    result = tune(product(), trials=5, database=tmp_path / "t.db", threads=1, progress=lambda s: statuses.append(s))
    assert result.trials == 5 and not result.interrupted and 0 < result.ratio <= 1
    assert {s.phase for s in statuses} == {"compile", "search", "confirm", "done"}
    with Database(tmp_path / "t.db") as database:
        (task,) = database.tasks()
        records = database.records(task.key)
        assert [r.decisions for r in records].count("{}") == 1 and len({r.decisions for r in records}) == len(records) == 6
        (session,) = database.sessions()
        assert session.state == "finished" and session.trials == 5 and session.summary["ratio"] == result.ratio
    f = tcomp.build(result.schedule, threads=1)
    rng = np.random.default_rng(0)
    a, b, c = rng.random((32, 24), np.float32), rng.random((24, 48), np.float32), np.zeros((32, 48), np.float32)
    f(a, b, c)
    np.testing.assert_allclose(c, a @ b, rtol=1e-5)
    assert "5 trials of 1 kernel in" in str(result)


def test_a_space_of_ones_own_is_searched_to_its_end(tmp_path: Path) -> None:
    result = tune(scaled(), trials=100, database=tmp_path / "t.db", threads=1, schedule=split_scaled)
    assert 5 <= result.trials <= 16 and result.tasks[0].stopped in ("nothing new is found", "at its bound")


def test_mistakes(tmp_path: Path, net: Path) -> None:
    def fails(match: str, model: Any, **options: Any) -> None:
        with pytest.raises(InputError, match=match):
            tune(model, database=tmp_path / "t.db", **options)

    fails("budget is to be positive", net, budget=-1)
    fails("a schedule function is for a program", net, schedule=split_scaled)
    fails("nothing to resume", product(), resume=True, threads=1)
    with pytest.raises((TargetError, DeviceError)):  # no compiler, no GPU, or another one
        tune(net, database=tmp_path / "t.db", target="cuda -arch=sm_75")
    (tmp_path / "bad.db").write_text("no database")
    with pytest.raises(DatabaseError, match=r"bad\.db"):
        tune(product(), database=tmp_path / "bad.db")


# ---------------------------------------------------------------- models


def test_the_budget_is_kept(tmp_path: Path, net: Path) -> None:
    budget, start = 12.0, time.monotonic()
    result = tune(net, budget=budget, database=tmp_path / "t.db", threads=1)
    took = time.monotonic() - start
    assert took < 1.25 * budget, (took, result.seconds)  # on a machine that is busy with other tests
    assert sum(result.seconds.values()) == pytest.approx(took, abs=0.5)
    assert result.ratio <= 1


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    result = tune(product(), trials=3, database=tmp_path / "t.db", threads=1, target="cpu -march=aarch64", workers=1)
    assert result.trials == 0 and result.ratio == 1.0 and any("not tuned: " in note for note in result.confirmation.notes), result


class Liar:
    """In the place of `Measurer`: whatever is slow is called fast."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def summarize(self, task: Task, wanted: list[Decisions]) -> list[CandidateSummary]:
        return [CandidateSummary.of(instantiate(task, decisions)) for decisions in wanted]

    def measure(self, task: Any, candidates: list[Decisions], incumbent: Decisions | None = None) -> list[Measurement]:
        return list(self.measure_each(task, candidates, incumbent))

    def measure_each(self, task: Any, candidates: list[Decisions], incumbent: Decisions | None = None) -> Iterator[Measurement]:
        for decisions in candidates:
            bad = any(name.endswith(".tile") and value == (1, 1) for name, value in decisions.items())
            yield Measurement(Outcome.OK, (1e-9 if bad else 1e-3,), "", (1e-3,))


def test_a_measurement_that_lies_makes_nothing_worse(tmp_path: Path, net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcomp.autotune.tuner.Measurer", Liar)
    worst: dict[str, list[Decisions]] = {}

    def proposed(self: Any, task: Any, records: Any, count: int, rng: Any, hints: Any) -> list[Decisions]:
        from tcomp.schedules.knobs import Knobs

        knobs = Knobs()
        task.make(knobs)
        names = [name for name in knobs.asked if name.endswith(".tile")]
        worst[task.key] = [{name: (1, 1) for name in names if (1, 1) in knobs.asked[name].options}]
        return [d for d in worst[task.key] if d]

    monkeypatch.setattr("tcomp.autotune.search.Search.__call__", proposed)
    result = tune(net, trials=4, database=tmp_path / "t.db", threads=1)
    assert any(t.gain < 0.01 for t in result.tasks)  # so it was told
    kept = result.confirmation.kept.keys()  # on a busy machine, a kernel that takes as long as before may be among them
    assert result.confirmation.rolled_back and kept <= result.confirmation.within_noise and (kept or result.ratio == 1.0)
    _, report = compile_model(net, with_records(CompileOptions(threads=1), tmp_path / "t.db"))
    assert report.tuned <= len(kept)
    with Database(tmp_path / "t.db") as database:
        assert any(not v.kept for v in database.verdicts())


class Truthful(Liar):
    """Costs by decisions, seen through a machine that is now faster, now slower."""

    rng = random.Random(3)

    def measure_each(self, task: Any, candidates: list[Decisions], incumbent: Decisions | None = None) -> Iterator[Measurement]:
        for decisions in candidates:
            speed = self.rng.uniform(0.5, 2.0)
            yield Measurement(Outcome.OK, (speed * true_cost(decisions),), "", (speed * true_cost(incumbent or {}),))


def true_cost(decisions: Decisions) -> float:
    return 0.5 + random.Random(encode(decisions)).random()


def test_costs_are_on_one_scale_whatever_the_incumbent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcomp.autotune.tuner.Measurer", Truthful)
    tune(product(), trials=24, database=tmp_path / "t.db", threads=1)
    with Database(tmp_path / "t.db") as database:
        costs = {r.decisions: r.cost or 0.0 for r in database.records()}
    assert len(costs) == 25
    unit = costs["{}"] / true_cost({})
    for text, cost in costs.items():
        assert cost == pytest.approx(unit * true_cost(decode(text)))


# ---------------------------------------------------------------- compilations


@pytest.fixture(scope="module")
def tasks(net: Path) -> ModelSubject:
    return ModelSubject(net, CompileOptions("cpu", threads=1))


def wide(model: ModelSubject) -> tuple[Any, dict[str, Any]]:
    """A task and decisions for it that are not the default."""
    from tcomp.autotune.tasks import sample

    for task, _ in model.tasks:
        for seed in range(10):
            found = sample(task, random.Random(seed)).decisions
            if any(name.endswith(".tile") for name in found):
                return task, found
    raise AssertionError


def test_compilations_follow_records(tmp_path: Path, net: Path, tasks: ModelSubject) -> None:
    task, decisions = wide(tasks)
    plain, none = compile_model(net, CompileOptions(threads=1))
    with Database(tmp_path / "t.db") as database:
        database.add(Record(task, encode(decisions), "", Measurement(Outcome.OK, (1e-6,)), 1e-6, None, {}, 1.0))
    tuned, report = compile_model(net, with_records(CompileOptions(threads=1, emit=["schedule"]), tmp_path / "t.db"))
    assert (none.tuned, report.tuned, report.not_followed) == (0, 1, [])
    kinds = [json.dumps(s["schedule"]) for a in (plain, tuned) for s in a.notes["schedules"]]
    assert len(set(kinds)) == len(plain.notes["schedules"]) + 1
    x = np.random.default_rng(0).standard_normal((64, 96), np.float32)
    np.testing.assert_allclose(Module.load(tuned, threads=1)(x), Module.load(plain, threads=1)(x), rtol=1e-4, atol=1e-6)
    with Database(tmp_path / "t.db") as database:
        database.add(Verdict(task, encode(decisions), False, 1.0, 2.0, {}, 2.0))
    assert compile_model(net, with_records(CompileOptions(threads=1), tmp_path / "t.db"))[1].tuned == 0


@pytest.mark.parametrize("text", ['{"no such knob":1}', '{"{tile}":[999,999]}'])
def test_what_cannot_be_followed_is_said(tmp_path: Path, net: Path, tasks: ModelSubject, text: str) -> None:
    task, decisions = wide(tasks)
    name = next(name for name in decisions if name.endswith(".tile"))
    record = Record(task, encode(decode(text.replace("{tile}", name))), "", Measurement(Outcome.OK, (1e-6,)), 1e-6, None, {}, 1.0)
    with Database(tmp_path / "t.db") as database:
        database.add(record)
    for _ in range(2):  # the second time it is remembered
        _, report = compile_model(net, with_records(CompileOptions(threads=1), tmp_path / "t.db"))
        assert report.tuned == 0 and len(report.not_followed) == 1
        assert "recorded decisions are refused: there is no such choice any more" in report.not_followed[0][1]
        assert any("recorded decisions are refused" in line for lines in report.notes.lines.values() for line in lines)


def test_records_for_other_numbers_of_threads_are_said(tmp_path: Path, net: Path, tasks: ModelSubject) -> None:
    task, decisions = wide(tasks)
    with Database(tmp_path / "t.db") as database:
        database.add(Record(task, encode(decisions), "", Measurement(Outcome.OK, (1e-6,)), 1e-6, None, {}, 1.0))
    _, report = compile_model(net, with_records(CompileOptions(threads=3), tmp_path / "t.db"))
    assert report.tuned == 0 and "records are for 1 threads, not for 3" in report.not_followed[0][1]


def test_records_of_one_size_serve_kernels_of_open_size(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "open.onnx", "batch")
    task, decisions = wide(ModelSubject(path, CompileOptions("cpu", threads=1), sizes={"batch": 8}))
    with Database(tmp_path / "t.db") as database:
        database.add(Record(task, encode(decisions), "", Measurement(Outcome.OK, (1e-6,)), 1e-6, None, {}, 1.0))
    assert compile_model(path, with_records(CompileOptions(threads=1), tmp_path / "t.db"))[1].tuned == 1


# ---------------------------------------------------------------- interruptions


PROGRAM = """
import sys
from tests.autotune.spaces import product
import tcomp, tcomp.calibration
tcomp.calibration.measure = lambda target: target.core
told = 0
def tell(status):
    global told
    if status.phase == "search" and status.trials != told:
        told = status.trials
        print("trial", told, flush=True)
result = tcomp.tune(product(), trials=int(sys.argv[2]), database=sys.argv[1], threads=1, workers=1, resume=sys.argv[3] == "resume", progress=tell)
print("done", result.trials, result.interrupted, flush=True)
"""


def start(path: Path, trials: int, resume: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(path), str(trials), "resume" if resume else "new"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def told(line: str) -> int:
    words = line.split()
    return int(words[1]) if words[:1] == ["trial"] else 0


def killed(path: Path, moments: int, seed: int, patience: float = 60.0) -> tuple[int, int]:
    """Tune, kill at random moments, resume; (records that were told of, records that are there)."""
    rng, total = random.Random(seed), 0
    for n in range(moments):
        process = start(path, 1000, resume=n > 0 and path.exists() and session_exists(path))
        assert process.stdout is not None
        reported = 0
        after, begin = rng.randrange(0, 4), time.monotonic()
        while reported < total + after and time.monotonic() - begin < patience:
            line = process.stdout.readline()
            assert line, f"the tuner ended by itself: {process.wait()}"
            assert line.startswith("trial"), line + process.stdout.read()
            reported = told(line)
        time.sleep(rng.uniform(0, 1.0))
        offspring = children(process.pid)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.wait()
        total = max([total, reported, *map(told, rest.splitlines())])
        assert not outlived(offspring), "processes are left behind"
        if path.exists():
            assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with Database(path, create=False) as database:
        return total, sum(r.decisions != "{}" for r in database.records())


def session_exists(path: Path) -> bool:
    with Database(path, create=False) as database:
        return bool(database.sessions())


def test_killed_at_random_moments(tmp_path: Path) -> None:
    said, found = killed(tmp_path / "t.db", 2, 1)
    assert said <= found


def test_what_was_killed_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path / "t.db", 6)
    assert process.stdout is not None
    while told(process.stdout.readline()) < 2:
        pass
    process.kill()
    process.wait()
    with Database(tmp_path / "t.db") as database:
        before = database.records()
    again = start(tmp_path / "t.db", 1, resume=True)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0 and "done" in output, output
    with Database(tmp_path / "t.db") as database:
        after = database.records()
        kept = [replace(r, trace=b.trace) for r, b in zip(after, before, strict=False)]  # which is entered for winners, at the end
        assert kept == before and len(after) >= len(before) + 1
        (session,) = database.sessions()
        assert session.state == "finished" and session.trials == len(after) - 1


def test_ctrl_c_keeps_the_best_so_far(tmp_path: Path) -> None:
    process = start(tmp_path / "t.db", 1000)
    assert process.stdout is not None
    while told(process.stdout.readline()) < 2:
        pass
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "True" in output.splitlines()[-1], output
    with Database(tmp_path / "t.db") as database:
        (session,) = database.sessions()
        assert session.state == "interrupted" and session.trials >= 2
