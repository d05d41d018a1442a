"""Derivatives of tensor expressions beside finite differences, in float64."""

import sys

import numpy as np

from tcomp.ir import te
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.transforms.jvp import jvp
from tcomp.ir.transforms.vjp import vjp

STEP = 1e-5  # of central differences: errors are about STEP ** 2 times the third derivative, and 1e-16 / STEP
TOLERANCE = 1e-6  # of the largest derivative
NOISE = 5e-11  # of values of about 1: their rounding errors, by STEP


def placeholders(*arrays):
    """A placeholder for each array, None for None."""
    return [None if a is None else te.placeholder(a.shape, a.dtype.name, f"x{n}") for n, a in enumerate(arrays)]


def check(outputs, inputs, seed=0, directions=2, forward=True):
    """Compares both modes with differences along random directions. `inputs` maps placeholders to arrays; those of float64 count."""
    rng = np.random.default_rng(seed)
    outputs = [t for t in outputs if t.dtype == "float64"]
    wrt = [t for t, a in inputs.items() if t.dtype == "float64" and a.size]
    assert outputs and wrt
    seeds = [te.placeholder(t.shape, t.dtype, f"g{n}") for n, t in enumerate(outputs)]
    dots = [te.placeholder(t.shape, t.dtype, f"v{n}") for n, t in enumerate(wrt)]
    adjoints = vjp(outputs, wrt, seeds)
    for t, a in zip(wrt, adjoints, strict=True):
        assert a.dtype == t.dtype and a.shape == t.shape
    values = evaluate(outputs, inputs)
    given = dict(inputs) | {g: rng.normal(size=v.shape) for g, v in zip(seeds, values, strict=True)}
    gradients = evaluate(adjoints, given)
    changes = jvp(outputs, wrt, dots) if forward else None
    for _ in range(directions):
        along = {v: rng.normal(size=inputs[t].shape) for t, v in zip(wrt, dots, strict=True)}
        sides = []
        for sign in (1, -1):
            moved = dict(inputs) | {t: inputs[t] + sign * STEP * along[v] for t, v in zip(wrt, dots, strict=True)}
            sides.append(evaluate(outputs, moved))
        differences = [(a - b) / (2 * STEP) for a, b in zip(*sides, strict=True)]
        expected = sum(np.sum(d * given[g]) for d, g in zip(differences, seeds, strict=True))
        scale = sum(np.sum(np.abs(d * given[g])) for d, g in zip(differences, seeds, strict=True))
        scale += sum(np.sum(np.abs(d * along[v])) for d, v in zip(gradients, dots, strict=True))
        found = sum(np.sum(d * along[v]) for d, v in zip(gradients, dots, strict=True))
        noise = NOISE * sum(np.sum(np.abs(given[g])) * max(1, np.abs(v).max(initial=0)) for g, v in zip(seeds, values, strict=True))
        assert abs(found - expected) <= TOLERANCE * scale + noise, (found, expected, scale)
        if changes is not None:
            for tangent, d, v in zip(evaluate(changes, dict(inputs) | along), differences, values, strict=True):
                noise = NOISE * max(1, np.abs(v).max(initial=0))
                np.testing.assert_allclose(tangent, d, rtol=TOLERANCE, atol=TOLERANCE * np.abs(d).max(initial=0) + noise)


def check_somewhere(outputs, inputs):
    """As `check` in one direction; raises only if that fails for three sets of values: a difference may span a place without a derivative."""
    for trial in range(3):
        try:
            check(outputs, inputs, trial, directions=1)
            return
        except AssertionError:
            if trial == 2:
                raise
            rng = np.random.default_rng(trial)
            inputs = {t: rng.normal(size=a.shape) if a.dtype == np.float64 else a for t, a in inputs.items()}


def run_seeds(compare, what):
    """The command line of random tests: how many, and the first seed."""
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for seed in range(first, first + count):
        try:
            compare(seed)
        except Exception:
            print(f"seed {seed}", flush=True)
            raise
    print(f"{count} random {what}: derivatives are right")
