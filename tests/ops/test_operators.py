import numpy as np

from tcomp.ir import te
from tcomp.ir.graph import Operator
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.simplify import as_dim
from tcomp.ops import OPERATORS, elementwise, movement, nn, recurrent


def test_every_operator_is_found_under_its_own_name():
    assert all(op.name == name for name, op in OPERATORS.items())
    for family in (elementwise, movement, nn, recurrent):
        for op in vars(family).values():
            assert not isinstance(op, Operator) or OPERATORS[op.name] is op


def test_sizes_as_a_tensor():
    n = te.var("n", 1, 100)
    x = te.placeholder((n,), "float32")
    t = movement.dims(dims=(n, as_dim(n * 2), 7), shape=(3,))
    total = te.compute((n,), lambda i: x[i], "y")
    (y, _) = evaluate([t, total], {x: np.zeros(5, np.float32)})
    assert y.tolist() == [5, 10, 7]
