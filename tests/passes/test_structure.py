"""What passes ask of tensor expressions."""

import numpy as np

from tcomp import te
from tcomp.ir.graph import Value
from tcomp.ir.interpreters.te import evaluate
from tcomp.passes.structure import Body, inlined, scales_with
from tests.schedules.dice import Dice, Seeded

ROWS, COLUMNS, TERMS = 3, 4, 5
RNG = np.random.default_rng(0)


def element(dice: Dice, leaves, i, j, terms, depth):
    """A random element of row i: of reads in that row, at columns that are loop variables or data."""
    if depth == 0 or dice.one_in(6):
        column = dice.pick(j, *terms, te.cast(leaves[-1][i, 0] * 0.0, "int64"))
        return dice.pick(*leaves)[i, column] if dice.number(0, 4) else te.const(dice.pick(0.0, 0.5, 2.0), "float64")
    a, b = (element(dice, leaves, i, j, terms, depth - 1) for _ in range(2))
    match dice.number(0, 9):
        case 0 | 1:
            return a + b
        case 2:
            return a - b
        case 3 | 4:
            return a * b
        case 5:
            return a / (b + 3.0) if dice.flip() else a / dice.pick(*leaves)[i, j]
        case 6:
            return te.select(dice.pick(leaves[0][i, j] > 1.0, j > 1), a, b)
        case 7:
            return dice.pick(te.maximum(a, b), te.exp(-te.abs(a)), -a)
        case 8 if not terms:
            k = te.reduce_axis(TERMS, "k")
            return dice.pick(te.sum, te.sum, te.max)(element(dice, leaves, i, j, [k], depth - 1), [k])
    return -a


def test_factors_of_operands_are_factors_of_the_output():
    """Random expressions, all choices of operands: where it says so, a factor for each row of theirs is one for each row of the output."""
    scaling = 0
    for number in range(400):
        dice = Seeded(f"scales {number}")
        values = [Value(name, "float64", (ROWS, max(COLUMNS, TERMS))) for name in "xyz"]
        leaves = [v.placeholder() for v in values]
        tensor = te.compute((ROWS, COLUMNS), lambda i, j, d=dice, of=leaves: element(d, of, i, j, [], d.number(1, 4)), "out")
        body = Body(tensor, inlined(tensor), dict(zip(values, leaves, strict=True)))
        arrays = [RNG.uniform(0.5, 2, v.shape) for v in values]
        factors = RNG.uniform(-3, 3, (ROWS, 1))
        (before,) = evaluate([tensor], dict(zip(leaves, arrays, strict=True)))
        for chosen in range(1, 8):
            if scales_with(body, [v for n, v in enumerate(values) if chosen >> n & 1]):
                scaled = [a * factors if chosen >> n & 1 else a for n, a in enumerate(arrays)]
                (after,) = evaluate([tensor], dict(zip(leaves, scaled, strict=True)))
                np.testing.assert_allclose(after, before * factors, rtol=1e-9, atol=1e-12, err_msg=str(body.expr))
                scaling += 1
    assert scaling > 200
