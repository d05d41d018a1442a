"""Shapes and attributes that do not fit each other: no operator reads or writes outside of an array for that."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conformance.misfits import FAILED, INSIDE, OUTSIDE, REFUSED, judged
from tests.conformance.suite import Suite

CASES = (
    "test_affine_grid_2d", "test_basic_deform_conv_without_padding", "test_batchnorm_example", "test_gather_elements_0",
    "test_gather_elements_1", "test_instancenorm_example", "test_layer_normalization_3d_axis1_epsilon", "test_nllloss_NC",
    "test_nllloss_NCd1d2_with_weight", "test_reduce_prod_do_not_keepdims_example", "test_reversesequence_time",
    "test_sce_mean_weight_ii_3d", "test_scatter_elements_with_axis", "test_scatternd_add",
    "test_rms_normalization_4d_axis1", "test_tensorscatter",
)  # fmt: skip
"""Each of them once read outside of an array."""


@pytest.fixture(scope="module")
def suite() -> Suite:
    return Suite()


@pytest.mark.parametrize("free", [False, True], ids=["fixed", "symbolic"])
def test_nothing_outside_of_an_array_is_touched(suite: Suite, free: bool) -> None:
    names = sorted(name for name, case in suite.cases.items() if case.kind == "node")
    found = [one for name in (*CASES[free::2], *names[free::193]) for one in judged(suite, name, free)]
    assert not [what for outcome, what in found if outcome in (OUTSIDE, FAILED)]
    counts = Counter(outcome for outcome, _ in found)
    assert counts[REFUSED] >= 50 and counts[INSIDE] >= 50
