"""Algorithms of convolutions as decisions: timed in whole models, kept in the database, followed by compilations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import tcomp
from tcomp.api import with_records
from tcomp.autotune.database.store import Database
from tcomp.autotune.measurement.results import Comparison, Rounds
from tcomp.autotune.subject import ModelSubject, title
from tcomp.autotune.tasks import Algorithm, task_from_json
from tcomp.autotune.tuner import tune
from tcomp.errors import DatabaseError, ScheduleError
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.schedules.knobs import Decisions, Knobs, encode
from tcomp.target import Target
from tests.autotune.models import convolutions

HOST = Target.host()


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("tcomp.calibration.measure", lambda target: target.core)
        patch.setattr("tcomp.autotune.subject._ALGORITHM_DOUBT", 100.0)  # which ones are in doubt depends on the machine
        yield


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convolutions(tmp_path_factory.mktemp("model") / "net.onnx")


@pytest.fixture(scope="module")
def model(net: Path) -> ModelSubject:
    return ModelSubject(net, CompileOptions(HOST, threads=1))


def kernels(module: tcomp.Module) -> str:
    return " ".join(name for name, _ in module.profile({"x": np.zeros((1, 3, 16, 16), np.float32)}, runs=1))


def test_alternatives_are_compared_in_the_model(model: ModelSubject) -> None:
    assert {task.text for task, _ in model.algorithms} == {"3x3 convolution 1x32 -> 32x16x16"} == {title(t) for t, _ in model.algorithms}
    assert len(model.algorithms) == 2 and not any(isinstance(task, Algorithm) for task, _ in model.tasks)
    for task, decisions in model.algorithms:
        comparison = model.compare({task.key: decisions}, 0.05)
        assert comparison.failure is None and len(comparison.kernels[task.key].before) == len(comparison.kernels[task.key].after) > 0


def test_kernels_are_those_of_the_chosen_algorithm(model: ModelSubject) -> None:
    before = {task.key for task, _ in model.tasks}
    for task, decisions in model.algorithms:
        model.choose_algorithms({task.key: decisions})
        assert {task.key for task, _ in model.tasks} != before
        assert model.seconds_by_task(0.05).keys() == {task.key for task, _ in model.tasks}
    model.choose_algorithms({})
    assert {task.key for task, _ in model.tasks} == before


def test_there_is_nothing_to_choose_among_direct_sums(net: Path) -> None:
    assert ModelSubject(net, CompileOptions(HOST, threads=1, direct=True)).algorithms == []


@pytest.mark.parametrize("wins", (True, False))
def test_what_wins_is_compiled(net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wins: bool) -> None:
    """Comparisons say that one alternative is twice as fast, or as slow."""

    def compare(self: ModelSubject, decisions: Mapping[str, Decisions], seconds: float) -> Comparison:
        chosen = [task for task, d in self.algorithms if decisions.get(task.key) == d == self.algorithms[-1][1]]
        rounds = Rounds((2.0,) * 9, ((1.0 if chosen and wins else 4.0),) * 9)
        return Comparison(rounds, {key: rounds for key in decisions})

    monkeypatch.setattr(ModelSubject, "compare", compare)
    result = tune(net, trials=10, database=tmp_path / "t.db", threads=1)
    found = {t.title: t for t in result.tasks}["3x3 convolution 1x32 -> 32x16x16"]
    assert found.trials == 2 and (found.task.key in result.confirmation.kept) == wins and result.trials == 10
    with Database(tmp_path / "t.db") as database:
        assert next(r.decisions for r in database.records(found.task.key)) == "{}" and len(database.records(found.task.key)) == 3
        other = Database(tmp_path / "copy.db")
        other.merge(database)
        assert other.choice(found.task.key) == database.choice(found.task.key) and (database.choice(found.task.key) != "{}") == wins
        other.close()
    x = np.random.default_rng(0).standard_normal((1, 3, 16, 16), np.float32)
    plain, tuned = tcomp.compile(net, threads=1), tcomp.compile(net, threads=1, database=tmp_path / "t.db")
    assert (kernels(plain) != kernels(tuned)) == wins
    for name, want in plain.run({"x": x}).items():
        np.testing.assert_allclose(tuned.run({"x": x})[name], want, rtol=1e-3, atol=1e-3)


def test_a_tile_that_is_none_is_passed_over(model: ModelSubject, net: Path, tmp_path: Path) -> None:
    task, _ = model.algorithms[0]
    assert task_from_json(task.to_json()) == task and task_from_json(task.to_json()).key == task.key
    with pytest.raises(ScheduleError, match="no one kernel"):
        task.make(Knobs())
    for n, tile in enumerate((3, "4", True, 1 << 40)):
        lines = ['{"tcomp": "tuning", "format": 1}', _line("task", key=task.key, task=task.to_json())]
        lines.append(_line("verdict", task=task.key, decisions={"tile": tile}, kept=1, before=2.0, after=1.0, environment={}, time=1.0))
        (tmp_path / "lines").write_text("\n".join(lines) + "\n")
        with Database(tmp_path / f"{n}.db") as database:
            assert database.import_(tmp_path / "lines") == 2
        _, report = compile_model(net, with_records(CompileOptions(HOST, threads=1, emit=("graph",)), tmp_path / f"{n}.db"))
        _, plain = compile_model(net, CompileOptions(HOST, threads=1, emit=("graph",)))
        assert report.stages["graph"] == plain.stages["graph"]
    (tmp_path / "lines").write_text(lines[0] + "\n" + lines[1].replace('"kind": "algorithm"', '"kind": "other"') + "\n")
    with Database(tmp_path / "bad.db") as database, pytest.raises(DatabaseError, match="`kind`: it is 'other', not one that is known"):
        database.import_(tmp_path / "lines")


def _line(kind: str, **fields: object) -> str:
    import json

    return json.dumps({"kind": kind, **fields})


def test_decisions_are_written_the_same_way_each_time() -> None:
    assert encode({Algorithm.NAME: 4}) == '{"tile":4}'
