"""What the tests of operators share: applying one to arrays through the NumPy reference of tensor expressions. On the way every access of
the operator is proved to be in range, for the shapes of the test: operators of the library are not proved again when they are compiled.
"""

import pytest

from tcomp.ir import te
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.polyhedral.in_range import safe_tensors

# Their indices are positions that they store themselves, which takes an invariant: a pivot is a row; of two runs that are merged, as many
# elements are taken as there are slots, whatever the comparisons say.
NOT_PROVED = ("det", "lu", "row_order", "top_k", "sort_by")


@pytest.fixture(scope="session")
def apply():
    """apply(op, *arrays, **attrs): the result (a list of them for several), None for an input left out.

    With `symbolic=True` every extent above 1 is a symbolic size (equal ones share a symbol), bound by the arrays.
    """

    def run(op, *arrays, symbolic=False, **attrs):
        def extent(n):
            return te.var(f"n{n}") if symbolic and n > 1 else n

        tensors = [None if a is None else te.placeholder([extent(n) for n in a.shape], a.dtype.name, f"x{i}") for i, a in enumerate(arrays)]
        outputs = op.apply(tensors, attrs)
        safe, required = safe_tensors(outputs)
        assert safe == list(outputs) or op.name in NOT_PROVED, "an access is not proved to be in range"
        assert not required, [str(r.condition) for r in required]
        results = evaluate(outputs, {t: a for t, a in zip(tensors, arrays, strict=True) if t is not None})
        for t, r in zip(outputs, results, strict=True):
            assert r.dtype.name == t.dtype
        return results[0] if len(results) == 1 else results

    return run
