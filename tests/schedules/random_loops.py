"""Random imperative loop programs: triangular and tiled bounds, stencils in place under time loops, guards, folds with several
reducers, temporaries, places that depend on data. Every access is in bounds for all sizes, so that a proof has something to prove.
"""

from __future__ import annotations

from typing import Any

from tcomp.ir import expr as E, te
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim, Expr, as_expr, bounds, cast, select
from tcomp.ir.loops import Accumulate, Allocate, Buffer, For, If, Kernel, Stmt, block, store
from tcomp.ir.reducers import Reducer
from tcomp.ir.simplify import as_dim, prove
from tests.schedules.dice import Dice

VOLUME = 60  # instances of one statement, about
LARGEST = 7

Loops = tuple[Expr, ...]  # variables, outermost first


def reducer(fold: Any, dtype: str) -> Reducer:
    """The reducer of te.sum, te.max, ..."""
    return fold(te.placeholder((1,), dtype)[0], te.reduce_axis(1)).attr[0]


def most(extent: Dim) -> int:
    """The largest value of an extent, at least 1."""
    return max(1, bounds(as_expr(extent))[1] or LARGEST)


class LoopPrograms:
    def __init__(self, dice: Dice) -> None:
        self.dice, self.pick, self.number, self.one_in = dice, dice.pick, dice.number, dice.one_in
        self.dtype = self.pick("int32", "int32", "float64", "float32", "int64", "uint8")
        self.size = E.dim("n", self.pick(1, 2, 2, 3), LARGEST) if dice.flip() else None
        lengths: list[Dim] = [self.number(2, LARGEST), self.number(1, LARGEST), *([self.size] * 2 if self.size is not None else [])]
        self.lengths = [self.pick(*lengths) for _ in range(self.pick(1, 2))]  # few, so that loops and buffers often match
        self.loops = 0
        self.inputs = [Buffer(f"x{n}", self.dtype, self.shape()) for n in range(self.number(1, 2))]
        self.results = [Buffer(f"y{n}", self.dtype, self.shape()) for n in range(self.number(1, 3))]
        self.readable = [*self.inputs, *self.results]
        self.folds = [te.sum, te.sum, te.max, te.min] + [te.prod] * (not is_float(self.dtype))

    def kernel(self) -> Kernel:
        """Results are read and written: what they hold at the start matters."""
        scalars = () if self.size is None else (self.size,)
        body = self.temporary() if self.one_in(3) else block(*(self.nest((), VOLUME) for _ in range(self.number(1, 3))))
        return Kernel("loops", (*self.inputs, *self.results), tuple(self.results), scalars, body)

    # ------------------------------------------------------------ sizes

    def shape(self) -> tuple[Dim, ...]:
        return tuple(self.side() for _ in range(self.pick(1, 1, 2, 2, 2, 3)))

    def side(self) -> Dim:
        return self.number(1, 9) if self.one_in(8) else as_dim(as_expr(self.pick(*self.lengths)) + self.pick(0, 0, 1, 2))

    def loop(self, outer: Loops, volume: int) -> tuple[Expr, Dim]:
        """A new variable and its extent, which may depend on the loops around it."""
        extent: Dim = as_dim(as_expr(self.pick(*self.lengths)) - self.pick(0, 0, 0, 1, 2))
        shape = self.number(1, 12)
        if shape <= 3 or (isinstance(extent, int) and extent < 1) or (most(extent) > volume):
            extent = self.number(1, max(1, min(4, volume)))
        elif outer and shape <= 5:
            v = self.pick(*outer)
            extent = self.pick(as_dim(v + self.number(0, 2)), as_dim(E.maximum(self.limit(v) - v, 0)), as_dim(v // 2 + 1))
        elif outer and shape == 6:
            v, tile = self.pick(*outer), self.number(2, 4)
            extent = as_dim(E.minimum(tile, E.maximum(0, as_expr(LARGEST if self.size is None else self.size) - v * tile)))
        self.loops += 1
        return E.loop_var(f"i{self.loops}", extent), extent

    def limit(self, v: Expr) -> Expr:
        """What a variable stays below."""
        return v.attr.extent if v.attr.extent is not None else as_expr(v.attr.hi + 1)

    # ------------------------------------------------------------ statements

    def nest(self, outer: Loops, volume: int) -> Stmt:
        match self.pick("loop", "loop", "loop", "statement", "imperfect", "time", "cleared", "scratch"):
            case "time" if not outer:
                v, extent = self.loop((), 3)
                inside = volume // 3
                return For(v, extent, block(*(self.nest((v,), inside) for _ in range(self.number(1, 2)))))
            case "cleared" if outer:
                return self.cleared(outer, volume)
            case "imperfect" if len(outer) < 3 and volume > 4:
                v, extent = self.loop(outer, volume)
                parts = [self.statement((*outer, v)), self.nest((*outer, v), volume // 4), self.statement((*outer, v))]
                return For(v, extent, block(*parts[: self.number(1, 3)]))
            case "scratch" if outer:
                return self.scratch(outer)
            case "statement" if outer:
                return block(*(self.statement(outer) for _ in range(self.number(1, 3))))
        if len(outer) == 3 or (outer and volume < 3):
            return self.statement(outer)
        v, extent = self.loop(outer, volume)
        return For(v, extent, self.nest((*outer, v), volume // most(extent)))

    def cleared(self, outer: Loops, volume: int) -> Stmt:
        """y = identity, then y folded over loops of its own: a matrix product, a row sum."""
        target = self.pick(*self.results)
        places, fold = self.places(target, outer), reducer(self.pick(*self.folds), self.dtype)
        v, extent = self.loop(outer, min(volume, 4))
        update = self.guarded((*outer, v), Accumulate(target, places, self.value((*outer, v), target), fold))
        return block(store(target, places, fold.identity), For(v, extent, update))

    def scratch(self, outer: Loops) -> Stmt:
        """A temporary inside the loops: filled, then used."""
        extent = self.number(1, 4)
        self.loops += 2
        t = Buffer(f"t{self.loops}", self.dtype, (extent,), self.pick("global", "register"))
        v, w = (E.loop_var(f"i{self.loops - n}", extent) for n in (1, 0))
        fill = For(v, extent, store(t, (v,), self.value((*outer, v))))
        self.readable.append(t)
        use = For(w, extent, self.statement((*outer, w)))
        self.readable.remove(t)
        return Allocate(t, block(fill, use))

    def temporary(self) -> Stmt:
        """A temporary of the whole program: computed by one nest, read by the others."""
        t = Buffer("t", self.dtype, self.shape())
        places: list[Expr] = []
        for extent in t.shape:
            self.loops += 1
            places.append(E.loop_var(f"i{self.loops}", extent))
        fold = reducer(self.pick(*self.folds), self.dtype)
        fill: Stmt = store(t, places, self.value(tuple(places)))
        if self.one_in(2):
            v, extent = self.loop(tuple(places), 3)
            update = For(v, extent, Accumulate(t, tuple(places), self.value((*places, v)), fold))
            fill = block(store(t, places, fold.identity), update)
        for v, extent in zip(reversed(places), reversed(t.shape), strict=True):
            fill = For(v, extent, fill)
        self.readable += [t, t]
        return Allocate(t, block(fill, *(self.nest((), VOLUME) for _ in range(self.number(1, 2)))))

    def statement(self, loops: Loops) -> Stmt:
        target = self.pick(*self.results)
        places = self.places(target, loops)
        if self.one_in(3):
            return self.guarded(loops, Accumulate(target, places, self.value(loops, target), reducer(self.pick(*self.folds), self.dtype)))
        if self.one_in(6):
            return self.shifted(target, loops)
        return self.guarded(loops, store(target, places, self.value(loops, target)))

    def guarded(self, loops: Loops, s: Stmt) -> Stmt:
        match self.number(1, 12):
            case 1:
                return If(self.condition(loops), s)
            case 2 if not isinstance(s, Accumulate):
                target = self.pick(*self.results)
                return If(self.condition(loops), s, store(target, self.places(target, loops), self.value(loops, target)))
        return s

    def shifted(self, target: Buffer, loops: Loops) -> Stmt:
        """A statement at a place next to another one, where that exists."""
        places = list(self.places(target, loops))
        d = self.number(0, len(places) - 1)
        shifted = [*places[:d], places[d] + self.pick(-2, -1, 1, 2), *places[d + 1 :]]
        inside = E.all_of([shifted[d] >= 0, shifted[d] < as_expr(target.shape[d])])
        return If(inside, store(target, shifted, self.bounded(target[tuple(places)] + 1, target)))

    def condition(self, loops: Loops) -> Expr:
        if self.one_in(5):
            b = self.pick(*self.readable)
            return b[self.places(b, loops)] < as_expr(2, self.dtype)
        v = self.pick(*loops)
        w = self.pick(*loops, as_expr(self.number(0, 4)), self.limit(v) - self.number(1, 2))
        return self.pick(v <= w, w < v, E.not_equal(v, w), E.equal(v % 2, 0), E.all_of([v <= w, self.pick(*loops) > 0]))

    # ------------------------------------------------------------ values

    def value(self, loops: Loops, target: Buffer | None = None) -> Expr:
        """A value of small size where floats would be rounded."""
        terms = [self.term(loops, target) for _ in range(self.pick(1, 1, 2))]
        total = terms[0]
        for t in terms[1:]:
            total = E.binary(self.pick("add", "add", "sub", "min", "max", "mul"), total, t)
        return self.bounded(total, target)

    def bounded(self, value: Expr, target: Buffer | None) -> Expr:
        if is_float(self.dtype) or self.one_in(8):
            return E.minimum(E.maximum(value, as_expr(0 if self.dtype == "uint8" else -9, self.dtype)), as_expr(9, self.dtype))
        return value

    def term(self, loops: Loops, target: Buffer | None) -> Expr:
        match self.number(1, 14):
            case 1:
                return as_expr(self.number(0, 3), self.dtype)
            case 2:
                return cast(self.pick(*loops), self.dtype)
            case 3:
                a, b = self.pick(*self.readable), self.pick(*self.readable)
                return select(self.condition(loops), a[self.places(a, loops)], b[self.places(b, loops)])
            case 4:
                b = self.pick(*self.readable)
                places = tuple(p + self.pick(-1, 0, 1) for p in self.places(b, loops))
                inside = E.all_of([c for p, n in zip(places, b.shape, strict=True) for c in (p >= 0, p < as_expr(n))])
                return select(inside, b[places], as_expr(1, self.dtype))
        b = target if target is not None and self.one_in(3) else self.pick(*self.readable)
        return b[self.places(b, loops)]

    def places(self, b: Buffer, loops: Loops) -> tuple[Expr, ...]:
        """Often one loop for each dimension, in order."""
        rank = len(b.shape)
        order = list(loops) if self.one_in(2) else self.dice.shuffled(loops)
        chosen = [*order[-rank:], *(self.pick(*loops) for _ in range(rank - len(order)))]
        return tuple(self.place(as_expr(n), v, loops) for n, v in zip(b.shape, chosen, strict=True))

    def place(self, n: Expr, v: Expr, loops: Loops) -> Expr:
        """An index, mostly affine, that is provably inside of a dimension of extent `n`."""
        match self.number(1, 12):
            case 1:
                return as_expr(0)
            case 2:
                w: Expr = v * self.number(1, 2) + self.pick(*loops)
            case 3:
                w = v * self.pick(1, 2, 3) + self.number(0, 2)
            case 4:
                w = n - 1 - v
            case 5:
                w = v // 2
            case 6 if self.one_in(3):
                b = self.pick(*self.inputs)
                return cast(b[self.places(b, loops[:1])], "int64") % n
            case _:
                w = v + self.pick(0, 0, 0, 1, 1, -1, 2, -2)
        for candidate in self.dice.shuffled([w, v]):
            if prove(candidate >= 0) and prove(candidate < n):
                return candidate
        return self.pick(w % n, E.maximum(E.minimum(v, n - 1), 0))


def imperative(dice: Dice) -> tuple[Kernel, dict[Expr, int]]:
    """A kernel and the value of its size."""
    made = LoopPrograms(dice)
    return made.kernel(), {} if made.size is None else {made.size: dice.number(made.size.attr.lo, LARGEST)}
