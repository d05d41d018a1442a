"""Confirmation: what loses in the whole model is rolled back, however it was measured; compilations obey that."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import tcomp
from tcomp.autotune.confirm import MAX_COMPARISONS, Confirmation, confirm
from tcomp.autotune.measurement.results import Comparison, Measurement, Outcome, Rounds
from tcomp.autotune.subject import ModelSubject
from tcomp.autotune.tasks import Task
from tcomp.errors import InputError
from tcomp.options import CompileOptions
from tcomp.schedules.knobs import Decisions
from tests.autotune.models import two_layers


class Pretended:
    """A model whose kernels take a second by default, and `factors` of that where they are tuned, by the number of the candidate where there
    are several; `visible` is whether profiles show it."""

    def __init__(
        self, factors: Mapping[str, float | tuple[float, ...]], visible: bool = True, noise: float = 0.0, reason: str = ""
    ) -> None:
        self.factors, self.visible, self.noise, self.reason = factors, visible, noise, reason
        self.tasks: list[tuple[Task, int]] = []
        self.rng = random.Random(1)
        self.asked: list[set[str]] = []

    def compare(self, decisions: Mapping[str, Decisions], seconds: float) -> Comparison:
        self.asked.append(set(decisions))
        if self.reason:
            return Comparison(failure=Measurement(Outcome.CRASH, reason=self.reason))

        def factor(key: str) -> float:
            found = self.factors[key]
            return found[decisions[key]["x"]] if isinstance(found, tuple) else found

        def times(tuned: bool) -> list[list[float]]:
            return [
                [(factor(k) if tuned and k in decisions else 1.0) * self.rng.uniform(1, 1 + self.noise) for k in self.factors]
                for _ in range(15)
            ]

        before, after = times(False), times(True)
        shown = after if self.visible else before
        kernels = {key: Rounds(*(tuple(row[n] for row in side) for side in (before, shown))) for n, key in enumerate(self.factors)}
        return Comparison(Rounds(*(tuple(map(sum, side)) for side in (before, after))), kernels)

    def seconds_by_task(self, seconds: float) -> dict[str, float]:
        return {}


def judged(subject: Pretended, deadline: float = float("inf")) -> Confirmation:
    return confirm(subject, {k: [{"x": 1}] for k in subject.factors}, 0.0, deadline)


def test_winners_are_kept() -> None:
    found = judged(Pretended({"a": 0.5, "b": 0.9}))
    assert found.kept.keys() == {"a", "b"} and not found.rolled_back
    assert found.ratio == pytest.approx(0.7) and found.after == pytest.approx(1.4)
    assert found.kernels["a"][1] == pytest.approx(0.5)


def test_kernels_that_lose_in_the_model_are_rolled_back() -> None:
    found = judged(Pretended({"a": 0.5, "b": 1.4, "c": 0.9}, noise=0.05))
    assert found.kept.keys() == {"a", "c"} and found.rolled_back == {"b"}
    assert found.comparisons == 2 and "1 of 3 kernels are slower" in found.notes[0]


def test_the_best_of_each_kernel_in_the_model_is_taken() -> None:
    factors = {"a": (1.3, 0.9, 0.6), "b": (0.8, 0.9), "c": (1.1, 1.2, 1.3), "d": (0.9,)}
    subject = Pretended(factors, noise=0.02)
    found = confirm(subject, {k: [{"x": n} for n in range(len(f))] for k, f in factors.items()}, 0.0)
    assert found.kept == {"a": {"x": 2}, "b": {"x": 0}, "d": {"x": 0}} and found.rolled_back == {"c"}
    assert found.comparisons == 4 and found.ratio == pytest.approx(3.3 / 4, rel=0.05)
    assert found.tried["a"] == [{"x": 0}, {"x": 1}, {"x": 2}] and found.kernels["a"][1] == pytest.approx(0.6, rel=0.05)
    hasty = confirm(Pretended(factors), {k: [{"x": n} for n in range(len(f))] for k, f in factors.items()}, 0.0, time.monotonic() - 1)
    assert hasty.comparisons == 1


def test_what_is_slower_is_rolled_back_though_others_make_up_for_it() -> None:
    """The model as a whole is faster with it, and there is no time to compare again."""
    factors = {"a": 0.5, "b": 1.3, "c": 1.0}
    for deadline in (time.monotonic() - 1, float("inf")):
        found = judged(Pretended(factors, noise=0.02), deadline)
        assert found.rolled_back >= {"b"} and "a" in found.kept and found.ratio < 1, found
        assert found.within_noise == found.kept.keys() - {"a"}
        assert found.kernels["b"][1] > found.kernels["b"][0] and any("slower in the model" in note for note in found.notes)


def test_where_all_that_won_is_slower_in_the_model_nothing_is_kept() -> None:
    """0.338 us became 11.5 us, and the model was faster by chance."""
    subject = Pretended({"a": 0.8})
    lucky = Comparison(Rounds((10.0,) * 11, (9.0,) * 11), {"a": Rounds((0.338,) * 11, (11.5,) * 11)})
    subject.compare = lambda decisions, seconds: lucky
    found = judged(subject)
    assert not found.kept and found.rolled_back == {"a"} and found.ratio == 1.0 and found.kernels["a"] == (0.338, 11.5)


def test_what_profiles_do_not_show_is_found_by_bisection() -> None:
    factors = {name: 0.8 for name in "abcdefg"} | {"bad": 4.0}
    subject = Pretended(factors, visible=False, noise=0.02)
    found = judged(subject)
    assert "bad" in found.rolled_back and len(found.kept) >= 4 and found.ratio < 1
    assert found.comparisons <= 10


def test_halving_ends() -> None:
    """Without a deadline, too, and where every kernel hides its loss."""
    found = judged(Pretended({str(n): 1.2 for n in range(40)}, visible=False, noise=0.02))
    assert not found.kept and found.comparisons <= MAX_COMPARISONS


def test_gains_that_drown_in_the_noise_of_others_are_seen() -> None:
    """The faster rounds of the model as a whole are faster, but too few of them; what was tuned is so in all."""
    whole = Rounds((1.0,) * 8 + (0.96,) * 3, (0.95,) * 4 + (1.2,) * 7)
    subject = Pretended({"a": 0.8})
    gained = Comparison(whole, {"a": Rounds((0.2,) * 11, (0.15,) * 11), "other": Rounds((0.8,) * 11, (0.8,) * 7 + (1.05,) * 4)})
    assert not whole.won and whole.ratio < 1
    subject.compare = lambda decisions, seconds: gained
    assert judged(subject).kept.keys() == {"a"} and judged(subject).ratio == pytest.approx(0.976, abs=0.01)
    unproved = Comparison(whole, {"a": Rounds((0.2,) * 8 + (0.15,) * 3, (0.15,) * 3 + (0.25,) * 8)})
    subject.compare = lambda decisions, seconds: unproved
    assert not judged(subject).kept


def test_where_nothing_gains_nothing_is_kept() -> None:
    for factors in ({"a": 1.2}, {"a": 1.2, "b": 1.1}, {"a": 1.0, "b": 1.0}):
        found = judged(Pretended(factors, noise=0.05))
        assert not found.kept and found.ratio == 1.0 and found.before == found.after


def test_what_there_is_no_time_to_prove_is_rolled_back() -> None:
    subject = Pretended({"a": 0.5, "b": 9.0}, visible=False)
    found = judged(subject, deadline=time.monotonic() - 1)
    assert not found.kept and len(subject.asked) == 1


def test_a_model_that_cannot_be_run_is_not_tuned() -> None:
    found = judged(Pretended({"a": 0.5, "b": 0.5}, reason="killed by SIGSEGV"))
    assert not found.kept and found.notes == ["crash: killed by SIGSEGV"]


def test_nothing_to_confirm() -> None:
    subject = Pretended({})
    assert judged(subject).ratio == 1.0 and not subject.asked


def test_chance() -> None:
    assert not Rounds((1.0,) * 9, (1.0,) * 9).won and not Rounds((1.0,) * 9, (1.0,) * 9).lost
    assert Rounds((2.0,) * 9, (1.0,) * 9).won and Rounds((1.0,) * 9, (2.0,) * 9).lost
    rng = random.Random(3)
    same = [Rounds(*(tuple(rng.uniform(1, 1.3) for _ in range(20)) for _ in range(2))) for _ in range(50)]
    assert sum(r.won for r in same) <= 12


def test_a_machine_that_is_slower_at_times_hides_no_gain() -> None:
    """Now and then everything takes a third longer, for several rounds; the tuned one takes 3 % less."""
    rng = random.Random(1)
    slow = [1.35 if n % 10 < 6 else 1.0 for n in range(40)]
    before, after = (tuple(t * s * rng.uniform(1, 1.02) for s in slow[k:] + slow[:k]) for t, k in ((1.0, 0), (0.97, 3)))
    assert Rounds(before, after).won and Rounds(after, before).lost
    assert Rounds(before, after).ratio == pytest.approx(0.97, abs=0.01)


# ---------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSubject:
    path = two_layers(tmp_path_factory.mktemp("model") / "net.onnx")
    return ModelSubject(path, CompileOptions("cpu", threads=1))


def test_shares_of_the_untuned_model(model: ModelSubject) -> None:
    shares = model.seconds_by_task(0.05)
    assert shares.keys() == {task.key for task, _ in model.tasks} and all(s > 0 for s in shares.values())


def slow(model: ModelSubject) -> dict[str, Decisions]:
    """The worst that the spaces of two kernels have, as a measurement that lies may call them best."""
    from tcomp.autotune.tasks import sample

    found: dict[str, Decisions] = {}
    for task, _ in model.tasks:
        rng = random.Random(5)
        made = [sample(task, rng).decisions for _ in range(6)]
        tiles = [d for d in made if any(name.endswith(".tile") for name in d)]
        if tiles:
            found[task.key] = {name: (1, 1) if name.endswith(".tile") else v for name, v in tiles[0].items()}
    return found


def test_a_lie_is_found_out(model: ModelSubject) -> None:
    found = confirm(model, {key: [decisions] for key, decisions in slow(model).items()}, 0.3)
    assert not found.kept and found.rolled_back and found.ratio == 1.0, found


def test_a_tuned_artifact_computes_the_same(model: ModelSubject) -> None:
    decisions = slow(model)
    x = np.random.default_rng(0).standard_normal((64, 96), np.float32)
    want = tcomp.runtime.Module.load(model.artifact({}), threads=1)(x)
    got = tcomp.runtime.Module.load(model.artifact(decisions), threads=1)(x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_open_sizes_are_asked_for(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "net.onnx", "batch")
    with pytest.raises(InputError, match="the size batch is open"):
        ModelSubject(path, CompileOptions("cpu", threads=1))
    with pytest.raises(InputError, match="no symbolic dim `sequence`"):
        ModelSubject(path, CompileOptions("cpu", threads=1), sizes={"batch": 4, "sequence": 3})
    model = ModelSubject(path, CompileOptions("cpu", threads=1), sizes={"batch": 4})
    assert all(dict(task.dims) in ({"batch": 4}, {}) for task, _ in model.tasks)
    assert model.inputs["x"].shape == (4, 96)
