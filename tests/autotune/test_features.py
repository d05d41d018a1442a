"""Features: as many for every candidate, under stable names; those of like candidates are alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tcomp.autotune.features import DECISIONS, NAMES, decision_vector, features, fingerprint
from tcomp.autotune.tasks import Program, instantiate
from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.machines import CORES
from tcomp.schedules.cost import cpu, gpu
from tcomp.target import CpuTarget, CudaTarget
from tests.autotune.spaces import product, scaled, split_scaled

HASWELL = CpuTarget.parse("cpu -march=x86_64 -mcpu=haswell")
SM80 = CudaTarget.parse("cuda -arch=sm_80")
PRODUCT = Program.of(product(), HASWELL, 1)
ON_GPU = Program.of(product(128, 128, 64), SM80, 1)
SCALED = Program.of(scaled(), HASWELL, 1, schedule=split_scaled)


def test_names_are_those_of_the_analytic_model() -> None:
    found = cpu.estimate(instantiate(PRODUCT, {}).schedule.kernel, HASWELL).features
    assert set(found) == {*cpu.COUNTS, *(f"seconds.{name}" for name in cpu.SECONDS), "seconds", "bound"}
    found = gpu.estimate(instantiate(ON_GPU, {}).schedule.kernel, SM80).features
    assert set(found) == {*gpu.COUNTS, *(f"seconds.{name}" for name in gpu.SECONDS), "seconds", "bound"}
    assert len(gpu.COUNTS) <= len(cpu.COUNTS) and len(gpu.SECONDS) == len(cpu.SECONDS)  # as they share places


@pytest.mark.parametrize(
    ("task", "decisions"), [(PRODUCT, {}), (PRODUCT, {"C.acc.tile": (2, 2)}), (SCALED, {}), (SCALED, {"factor": 1}), (ON_GPU, {})]
)
def test_features_are_finite_and_as_many(task: Program, decisions: dict) -> None:
    found = features(instantiate(task, decisions))
    assert found.vector.shape == (len(NAMES),) and found.vector.dtype == np.float32
    assert np.isfinite(found.vector).all() and found.seconds > 0
    np.testing.assert_array_equal(found.vector, features(instantiate(task, decisions)).vector)


def test_each_part_tells_candidates_apart() -> None:
    one, other = (features(instantiate(PRODUCT, {"C.acc.tile": tile})).vector for tile in ((2, 2), (6, 1)))
    parts = np.split(one != other, [len(cpu.COUNTS) + len(cpu.SECONDS) + 1, len(NAMES) - DECISIONS])
    assert all(part.any() for part in parts)


def test_tiles_of_a_gpu_differ_in_what_is_counted() -> None:
    options = instantiate(ON_GPU, {}).answers["C.acc.tile"].options
    found = [features(instantiate(ON_GPU, {"C.acc.tile": tile})).vector[: len(gpu.COUNTS)] for tile in options]
    assert len({v.tobytes() for v in found}) == len(options) > 3


def test_features_do_not_depend_on_where_a_value_came_from() -> None:
    """The default, asked for by name, is the default."""
    default = instantiate(SCALED, {}).answers["factor"].default
    np.testing.assert_array_equal(features(instantiate(SCALED, {"factor": default})).vector, features(instantiate(SCALED, {})).vector)


def test_decisions_alone() -> None:
    values = [("A.tile", "tile", (4, 2)), ("A.folds", "folds", ("A.k", "A.j")), ("A.pack", "pack", True), ("how", "how", "fast")]
    found = decision_vector(values)
    assert found.shape == (DECISIONS,) and found.sum() == 2 * (4 + 2 + 1 + 1 + 1 + 1)  # by full name and by kind
    np.testing.assert_array_equal(found, decision_vector(reversed(values)))
    assert (found != decision_vector([*values, ("A.folds", "folds", ("A.j", "A.k"))])).any()
    assert not decision_vector([]).any()


def test_symbolic_sizes_are_those_at_which_the_task_is_measured() -> None:
    n = te.var("n")
    a = te.placeholder((n, 64), name="A")
    tensors = [a, te.compute((n, 64), lambda i, j: a[i, j] * 2.0, name="B")]
    few, many = (features(instantiate(Program.of(tensors, HASWELL, 1, {"n": size}), {})) for size in (8, 800))
    assert few.seconds < many.seconds


def test_where_the_analytic_model_cannot_tell_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise IRError("no")

    whole = features(instantiate(SCALED, {})).vector
    monkeypatch.setattr(cpu, "estimate", failing)
    found = features(instantiate(SCALED, {}))
    first = len(cpu.COUNTS) + len(cpu.SECONDS) + 1
    assert found.seconds == 1.0 and not found.vector[:first].any()
    np.testing.assert_array_equal(found.vector[first:], whole[first:])


def test_the_fingerprint_is_of_what_features_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    first = fingerprint()
    assert fingerprint.__wrapped__() == first
    for rates, same in (({"spill": 3.0}, True), ({"tlb_miss": 80.0}, False)):  # of the machine model; nothing is spilled
        monkeypatch.setitem(CORES, "skylake-avx512", replace(CORES["skylake-avx512"], **rates))
        assert (fingerprint.__wrapped__() == first) == same
    monkeypatch.undo()
    monkeypatch.setattr("tcomp.autotune.features.STEPS", 33)
    assert fingerprint.__wrapped__() != first
