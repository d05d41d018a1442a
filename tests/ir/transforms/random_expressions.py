"""Random tensor expressions in float64: chains of element-wise stages, reductions, affine and data-dependent reads, and programs.

    python -m tests.ir.transforms.random_expressions 1000 [first seed]

compares the derivatives of so many with finite differences.
"""

import numpy as np

from tcomp.ir import te
from tcomp.ir.expr import cast, const
from tcomp.ops import OPERATORS
from tests.ir.transforms.differences import check_somewhere, run_seeds

FUNCTIONS = [
    te.sin, te.cos, te.tanh, te.erf, te.atan, te.asinh, te.sigmoid, te.abs, lambda v: te.exp(-v * v), lambda v: te.log(v * v + 1.0),
    lambda v: te.sqrt(v * v + 0.5), lambda v: v * v, lambda v: te.maximum(v, 0.0), lambda v: te.power(v * v + 0.3, 1.5), lambda v: -v, te.floor,
]  # fmt: skip
PAIRS = [
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, te.maximum, te.minimum, lambda a, b: a / (b * b + 1.0),
    lambda a, b: te.select(a < b, te.sin(a), a * b), lambda a, b: te.power(a * a + 0.5, te.tanh(b)), lambda a, b: te.fma(a, b, a),
]  # fmt: skip


class Maker:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.inputs = {}
        self.tensors = [self.array(self.shape(n)) for n in (1, 2, 2)]

    def pick(self, options):
        return options[self.rng.integers(len(options))]

    def shape(self, rank):
        return tuple(int(n) for n in self.rng.choice([1, 3, 4, 5], rank))

    def array(self, shape):
        t = te.placeholder(shape, "float64", f"x{len(self.inputs)}")
        self.inputs[t] = self.rng.normal(size=shape)
        return t

    def positions(self, shape, extent):
        t = te.placeholder(shape, "int64", f"p{len(self.inputs)}")
        self.inputs[t] = self.rng.integers(0, extent, shape)
        return t

    def index(self, axes, shape, extent):
        """An index within an extent, made of one axis or two, of a constant, or of data; and the condition for it to be inside."""
        n = int(self.rng.integers(len(axes))) if axes else 0
        v, size = (axes[n], shape[n]) if axes else (const(0), 1)
        m = self.rng.integers(len(axes)) if axes else 0
        w = axes[m] if axes else const(0)
        kinds = [
            v, size - 1 - v, v + 1, v - 2, v * 2, v // 2, v % 2, v + w, v - w, te.minimum(v, 2), te.select(v < 2, v, 3 - v), const(0),
            (v * 2 + w) // 3, (v + 1) % extent,
        ]  # fmt: skip
        if axes and self.rng.random() < 0.15:
            return self.positions((size,), extent)[v], None
        found = self.pick(kinds)
        return found, (found >= 0) & (found < extent)

    def read(self, t, axes, shape):
        at, inside = [], []
        for extent in t.shape:
            own = [n for n, d in enumerate(shape) if d == extent]
            if own and self.rng.random() < 0.5:
                at.append(axes[self.pick(own)])
                continue
            index, condition = self.index(axes, shape, extent)
            at.append(index)
            inside += [] if condition is None else [condition]
        return te.select(te.all_of(inside), t[tuple(at)], self.pick([0.0, 0.7]))

    def value(self, axes, shape, depth=2):
        if depth == 0 or self.rng.random() < 0.2:
            return self.read(self.pick(self.tensors), axes, shape)
        if self.rng.random() < 0.45:
            return self.pick(FUNCTIONS)(self.value(axes, shape, depth - 1))
        return self.pick(PAIRS)(self.value(axes, shape, depth - 1), self.value(axes, shape, depth - 1))

    def stage(self, number):
        shape, kind = self.shape(self.rng.integers(0, 3)), self.rng.random()
        name = f"t{number}"
        if kind < 0.12:
            t = self.pick([u for u in self.tensors if u.ndim])
            program = self.pick(["cum_sum", "cum_prod"])
            return OPERATORS[program].apply(
                [t], {"axis": 0, "exclusive": bool(self.rng.integers(2)), "reverse": bool(self.rng.integers(2))}
            )[0]
        if kind < 0.5:
            return te.compute(shape, lambda *i: te.tanh(self.value(i, shape)) * 2.0, name)
        extents = [int(n) for n in self.rng.choice([2, 3, 4], self.rng.integers(1, 3))]
        reduced = [te.reduce_axis(n, f"k{m}") for m, n in enumerate(extents)]
        reducer = self.pick([te.sum, te.sum, te.max, te.min, te.prod])

        def body(*i):
            total = reducer(te.tanh(self.value((*i, *reduced), (*shape, *extents))) + cast(reduced[0], "float64") * 0.01, reduced)
            return total if self.rng.random() < 0.6 else te.sin(total) + self.value(i, shape, 1)

        return te.compute(shape, body, name)


def expression(seed):
    """(outputs, inputs) of a random expression."""
    maker = Maker(seed)
    for number in range(maker.rng.integers(2, 6)):
        maker.tensors.append(maker.stage(number))
    return maker.tensors[-2:], maker.inputs


def compare(seed):
    """Raises `AssertionError` where derivatives of a random expression are wrong."""
    outputs, inputs = expression(seed)
    inputs = {t: a for t, a in inputs.items() if any(t is u for u in te.tensors(outputs))}
    if any(a.dtype == np.float64 for a in inputs.values()):
        check_somewhere(outputs, inputs)


if __name__ == "__main__":
    run_seeds(compare, "expressions")
