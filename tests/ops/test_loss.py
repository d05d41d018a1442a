import numpy as np
import pytest

from tcomp.ops.loss import NLL_LOSS

RNG = np.random.default_rng(6)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore_index", [None, 1, -100])
def test_nll_loss(apply, reduction, weighted, ignore_index):
    log_prob = np.log(RNG.random((2, 3, 4)).astype(np.float32))
    target = RNG.integers(0, 3, (2, 4))
    if ignore_index == -100:
        target[0, 0] = -100
    weight = np.array([0.5, 2, 1], np.float32) if weighted else None
    counts = target != ignore_index
    safe = np.where(counts, target, 0)
    w = np.where(counts, 1.0 if weight is None else weight[safe], 0.0)
    losses = -np.take_along_axis(log_prob, safe[:, None], 1)[:, 0] * w
    expected = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / w.sum()}[reduction]
    found = apply(NLL_LOSS, log_prob, target, weight, ignore_index=ignore_index, reduction=reduction)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_an_ignored_impossible_class_does_not_make_nan(apply):
    log_prob = np.array([[-np.inf, -1.0]], np.float32)
    assert apply(NLL_LOSS, log_prob, np.array([0]), None, ignore_index=0, reduction="sum") == 0
