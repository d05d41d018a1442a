"""Random imperative programs on float64 arrays: nested and triangular loops, updates in place, branches on data, temporaries, indices from data.

python -m tests.ir.transforms.random_programs 1000 [first seed]
"""

import numpy as np

from tcomp.ir import expr as E, loops as L, te
from tcomp.ir.reducers import standard_reducers
from tests.ir.transforms.differences import check_somewhere, run_seeds

N = 4
FUNCTIONS = [te.sin, te.tanh, te.atan, lambda v: v * v, lambda v: -v, lambda v: te.exp(-v * v)]
PAIRS = [lambda a, b: a + b, lambda a, b: a * b, lambda a, b: a - b, lambda a, b: te.select(a < b, a * 0.5, te.sin(b)), te.maximum]


class Maker:
    def __init__(self, seed, inputs, outputs):
        self.rng = np.random.default_rng(seed)
        *self.inputs, self.places = inputs
        self.outputs = list(outputs)
        self.count = 0

    def pick(self, options):
        return options[self.rng.integers(len(options))]

    def name(self, prefix):
        self.count += 1
        return f"{prefix}{self.count}"

    def index(self, loops):
        kinds = [E.const(int(self.rng.integers(N)))]
        for v in loops:
            kinds += [v, v, N - 1 - v, te.maximum(v - 1, 0), (v + 1) % N]
            if self.rng.random() < 0.3:
                kinds.append(te.maximum(te.minimum(self.places[v], N - 1), 0))
        return self.pick(kinds)

    def read(self, buffers, loops):
        b = self.pick(buffers)
        return b[tuple(self.index(loops) for _ in b.shape)]

    def value(self, buffers, loops, depth=2):
        if depth == 0 or self.rng.random() < 0.25:
            return self.read(buffers, loops)
        if self.rng.random() < 0.4:
            return self.pick(FUNCTIONS)(self.value(buffers, loops, depth - 1))
        return self.pick(PAIRS)(self.value(buffers, loops, depth - 1), self.value(buffers, loops, depth - 1))

    def store(self, buffers, written, loops):
        b = self.pick(written)
        at = tuple(self.index(loops) for _ in b.shape)
        value = te.tanh(self.value(buffers, loops))
        if self.rng.random() < 0.3:
            name = self.pick(["sum", "sum", "prod", "max"])
            return L.Accumulate(b, tuple(map(E.as_expr, at)), value, standard_reducers("float64")[name])
        return L.store(b, at, value)

    def statement(self, buffers, written, loops, depth):
        kind = self.rng.random()
        if depth == 0 or kind < 0.3:
            return self.store(buffers, written, loops)
        if kind < 0.6:
            extent = loops[-1] + 1 if loops and self.rng.random() < 0.3 else N
            return L.loop(self.name("i"), extent, lambda v: self.statement(buffers, written, (*loops, v), depth - 1))
        if kind < 0.7:
            cond = self.read(buffers, loops) < self.read(buffers, loops)
            other = self.statement(buffers, written, loops, depth - 1) if self.rng.random() < 0.5 else None
            return L.If(cond, self.statement(buffers, written, loops, depth - 1), other)
        if kind < 0.8:
            own = L.Buffer(self.name("t"), "float64", self.pick([(1,), (N,)]), "register")
            clear = L.over(
                own.shape, lambda i: L.store(own, i, te.tanh(self.value(buffers, loops, 1))), self.name("z").__add__("{}").format
            )
            body = L.block(*(self.statement([*buffers, own], [*written, own], loops, depth - 1) for _ in range(2)))
            fixed = L.redirect(body, lambda b, i: (b, (E.const(0),)) if b is own and own.shape == (1,) else None)
            return L.Allocate(own, L.block(clear, fixed))
        return L.block(*(self.statement(buffers, written, loops, depth - 1) for _ in range(2)))


def program(seed):
    """(outputs, inputs) of a random program."""
    rng = np.random.default_rng(seed)
    shapes = [(N,), (N, N)]
    tensors = [te.placeholder(s, "float64", f"x{n}") for n, s in enumerate(shapes)] + [te.placeholder((N,), "int64", "p")]

    def write(inputs, outputs):
        maker = Maker(seed, inputs, outputs)
        start = [L.over(b.shape, lambda i, b=b, s=s: L.store(b, i, s[i]), "c{}".format) for b, s in zip(outputs, inputs, strict=False)]
        buffers = [*maker.inputs, *outputs]
        return L.block(*start, *(maker.statement(buffers, list(outputs), (), 4) for _ in range(3)))

    outputs = te.externs([(s, "float64") for s in shapes], tensors, write, "random")
    return list(outputs), dict(zip(tensors, [*(rng.normal(size=s) for s in shapes), rng.integers(0, N, N)], strict=True))


def compare(seed):
    """Raises `AssertionError` where derivatives of a random program are wrong."""
    check_somewhere(*program(seed))


if __name__ == "__main__":
    run_seeds(compare, "programs")
