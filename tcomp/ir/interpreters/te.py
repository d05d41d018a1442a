"""The NumPy reference of tensor expressions: `evaluate(outputs, inputs)`.

Each body is evaluated on index grids (one NumPy dimension per axis, broadcast), shared sub-expressions once. Scalar operators
mean what `semantics.py` says. Reductions go over chunks of the reduction grid, so that no temporary grows beyond about
`CHUNK` elements. As this is the reference, sums and products of floats are accumulated in float64 and rounded once at the end.

Sums of products (matrix products, convolutions of every kind) and sliding windows are recognised by their structure and
computed through strided views: as float64 matrix products (the products of a contraction are not rounded either), or window
offset by window offset. Both paths give the same value up to float64 rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tcomp.errors import InputError, IRError
from tcomp.ir import expr as E
from tcomp.ir.access import Affine, affine
from tcomp.ir.dims import bind_dims, extent_of
from tcomp.ir.dtypes import is_float, to_numpy
from tcomp.ir.expr import COMPARISON, INDEX, Dim, Expr, Reducer, const, evaluate_int
from tcomp.ir.interpreters import semantics
from tcomp.ir.interpreters.loops import run_stmt
from tcomp.ir.interpreters.semantics import Array, literal
from tcomp.ir.simplify import simplify
from tcomp.ir.te import Tensor

CHUNK = 1 << 24  # elements of the largest temporary of a reduction
WINDOW = 128  # reductions over fewer elements than this, of strided views, go offset by offset

Value = tuple[Array, Array | None]  # elements, and where they are undefined (None: nowhere)


def evaluate(outputs: Sequence[Tensor], inputs: Mapping[Tensor, Any], dims: Mapping[Expr, int] | None = None) -> list[Array]:
    """The values of `outputs`, each of exactly its tensor's dtype and shape.

    `inputs` gives arrays for the placeholders (or for any other tensor, which is then not computed). Symbolic dims are bound by
    the shapes of the inputs, or given in `dims`. Raises `InputError` if an array does not fit its tensor, `IRError` if an element
    that counts is undefined (an out-of-range read that no `select` hides) or a placeholder or dim has no value.
    """
    return Evaluator(inputs, dims).run(outputs)


class Grid:
    """Index arrays of some axes. An axis has a fixed NumPy dimension counted from the right, so that the axes of an inner
    reduction, which come further left, broadcast against everything computed outside of it."""

    __slots__ = ("axes", "memo", "parent", "rank")
    rank: int

    def __init__(self, axes: Sequence[tuple[Expr, int, int]], parent: Grid | None = None) -> None:
        """`axes` lists (variable, first value, number of values)."""
        self.parent = parent
        self.rank = len(axes) + (parent.rank if parent else 0)
        self.axes = {v: (n - self.rank, start, size) for n, (v, start, size) in enumerate(axes)}
        self.memo: dict[Expr, Value] = {}

    def find(self, v: Expr) -> tuple[int, int, int] | None:
        """(dimension, first value, size) of an axis."""
        grid: Grid | None = self
        while grid is not None:
            if v in grid.axes:
                return grid.axes[v]
            grid = grid.parent
        return None

    def home(self, free: frozenset[Expr]) -> Grid:
        """The outermost grid on which an expression with these variables can be evaluated."""
        grid = self
        while grid.parent is not None and free.isdisjoint(grid.axes):
            grid = grid.parent
        return grid


class Evaluator:
    """One evaluation: the arrays of tensors, the values of dims, memos."""

    def __init__(self, inputs: Mapping[Tensor, Any], dims: Mapping[Expr, int] | None = None, structural: bool = True) -> None:
        self.values: dict[Tensor, Array] = {}
        for tensor, given in inputs.items():
            array = np.asarray(given)
            if array.dtype != to_numpy(tensor.dtype):
                raise InputError(f"`{tensor.name}` is {array.dtype.name} instead of {tensor.dtype}")
            self.values[tensor] = array
        self.dims = bind_dims([(t.name, t.shape, a.shape) for t, a in self.values.items()], dims)
        self.constants = {v: const(n, v.dtype) for v, n in self.dims.items()}
        self.structural = structural
        self.free_memo: dict[Expr, frozenset[Expr]] = {}

    def run(self, outputs: Sequence[Tensor]) -> list[Array]:
        """The arrays of tensors."""
        externs: dict[int, list[Array]] = {}
        grid = None
        for tensor in self._order(outputs):
            if tensor.extern is not None:
                key = id(tensor.extern)
                if key not in externs:
                    externs[key] = self._extern(tensor)
                self.values[tensor] = externs[key][tensor.index]
                continue
            if tensor.body is None:
                raise IRError(f"the placeholder `{tensor.name}` has no value", hint="give an array for it in `inputs`")
            shape = self.shape(tensor.shape)
            axes = [(v, 0, n) for v, n in zip(tensor.axes, shape, strict=True)]
            if grid is None or list(grid.axes) != list(tensor.axes) or [a[2] for a in grid.axes.values()] != list(shape):
                grid = Grid(axes)  # else: another output of the same compute shares its sub-expressions
            body = E.substitute(tensor.body, self.constants)
            array, undefined = self.value(body, grid)
            if prod(shape) and undefined is not None and undefined.any():
                element = tuple(map(int, np.argwhere(np.broadcast_to(undefined, shape))[0]))
                raise IRError(f"element {element} of `{tensor.name}` reads outside of a tensor", where=str(tensor.body))
            self.values[tensor] = np.array(np.broadcast_to(array, shape))
        return [self.values[t] for t in outputs]

    def shape(self, shape: Sequence[Dim]) -> tuple[int, ...]:
        """The extents of a shape, as numbers."""
        return tuple(max(0, evaluate_int(d, self.dims)) for d in shape)

    def _order(self, outputs: Sequence[Tensor]) -> Iterator[Tensor]:
        """The tensors to compute, producers first."""
        stack = list(reversed(outputs))
        while stack:
            missing = [t for t in stack[-1].inputs if t not in self.values]
            if stack[-1] not in self.values and missing:
                stack.extend(missing)
                continue
            tensor = stack.pop()
            if tensor not in self.values:
                yield tensor

    def _extern(self, tensor: Tensor) -> list[Array]:
        program = tensor.extern
        assert program is not None
        results = [np.zeros(self.shape(b.shape), to_numpy(b.dtype)) for b in program.results]
        buffers = {b: self.values[t] for b, t in zip(program.parameters, program.inputs, strict=True)}
        buffers.update(zip(program.results, results, strict=True))
        run_stmt(program.body, buffers, self.dims, undefined=program.results)
        return results

    # ------------------------------------------------------------ expressions

    def free(self, root: Expr) -> frozenset[Expr]:
        """The axes and dims that an expression depends on."""
        return E.free_variables(root, self.free_memo)

    def value(self, root: Expr, grid: Grid) -> Value:
        """The array of an expression; it broadcasts to the shape of the grid."""
        stack = [root]
        while stack:
            e = stack[-1]
            home = grid.home(self.free(e))
            # A reduction evaluates its body on a grid of its own, a read its indices only if it is not a strided view.
            args = () if e.op in ("reduce", "read") else e.args
            missing = [a for a in args if a not in grid.home(self.free(a)).memo]
            if e not in home.memo and missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if e not in home.memo:
                home.memo[e] = self._node(e, home)
        return grid.home(self.free(root)).memo[root]

    def _node(self, e: Expr, grid: Grid) -> Value:
        match e.op:
            case "const":
                return literal(e.attr, e.dtype), None
            case "var":
                found = grid.find(e)
                if found is None:
                    raise IRError(f"the variable `{e.attr.name}` has no value", hint="give symbolic dims in `dims`")
                dimension, start, size = found
                return np.arange(start, start + size).reshape((-1,) + (1,) * (-dimension - 1)), None
            case "read":
                return self._read(e, grid)
            case "reduce":
                return self._reduce(e, grid)
        args = [grid.home(self.free(a)).memo[a] for a in e.args]
        result = semantics.apply(e.op, e.dtype, [a for a, _ in args])
        if e.op == "select":
            (cond, outer), (_, first), (_, second) = args
            chosen = None
            if first is not None or second is not None:
                chosen = np.where(cond, False if first is None else first, False if second is None else second)
            return result, _either(outer, chosen)
        undefined = None
        for _, where in args:
            undefined = _either(undefined, where)
        return result, undefined

    # ------------------------------------------------------------ reads

    def _read(self, e: Expr, grid: Grid) -> Value:
        array = self.values[e.attr]
        view = self._affine_view(e, {v: (g[1], g[2]) for v in self.free(e) if (g := grid.find(v))})
        if view is not None:
            places = sorted((found[0], v) for v in view.strides if (found := grid.find(v)))
            rank = -places[0][0] if places else 0
            at = {dimension: v for dimension, v in places}
            order = [at.get(d - rank) for d in range(rank)]
            return view.strided(order, {v: found[2] for v in view.strides if (found := grid.find(v))}), None
        undefined, indices = None, []
        for index, extent in zip(e.args, array.shape, strict=True):
            position, unknown = self.value(index, grid)
            outside = (position < 0) | (position >= extent)
            if outside.any():
                unknown = _either(unknown, outside)
                position = np.clip(position, 0, max(extent - 1, 0))
            undefined = _either(undefined, unknown)
            indices.append(position)
        if array.size == 0:
            return np.zeros((1,) * grid.rank, array.dtype), np.ones((1,) * grid.rank, bool)
        return array[tuple(indices)], undefined

    def _affine_view(self, e: Expr, ranges: Mapping[Expr, tuple[int, int]]) -> View | None:
        """A strided view of a read whose indices are affine in axes with (first value, size) and always in range."""
        array, start = self.values[e.attr], []
        strides: dict[Expr, int] = {}
        if any(size == 0 for _, size in ranges.values()) or array.size == 0:
            return None
        for index, extent, stride in zip(e.args, array.shape, array.strides, strict=True):
            form = affine(simplify(index), ranges)
            if form is None:
                return None
            begin = sum(c * ranges[v][0] for v, c in form.terms.items())
            low, high = form.span({v: size for v, (_, size) in ranges.items()})
            if low + begin < 0 or high + begin >= extent:
                return None
            start.append(form.constant + begin)
            for v, c in form.terms.items():
                strides[v] = strides.get(v, 0) + c * stride
        return View(array, tuple(start), strides)

    # ------------------------------------------------------------ reductions

    def _reduce(self, e: Expr, grid: Grid) -> Value:
        reducer, axes = e.attr
        extents = [extent_of(v, self.dims) for v in axes]
        identity = literal(reducer.identity.attr, e.dtype)
        if 0 in extents:
            return identity, None
        if self.structural and grid.parent is None:
            result = _Contraction(self, e, grid, extents).compute()
            if result is not None:
                return result, None
        body, count = e.args[0], len(axes)
        function, wide = _ufunc(reducer), _accumulates_wide(reducer)
        others = [found[2] for v in self.free(body).difference(axes) if (found := grid.find(v))]
        total, undefined = None, None
        for box in _boxes(extents, max(1, CHUNK // max(1, prod(others)))):
            inner = Grid([(v, start, size) for v, (start, size) in zip(axes, box, strict=True)], grid)
            array, where = self.value(body, inner)
            part = _over_leading(array, [size for _, size in box], grid.rank)
            if where is not None:
                where = _over_leading(where, [size for _, size in box], grid.rank)
                undefined = _either(undefined, np.asarray(where.any(axis=tuple(range(count)))))
            with np.errstate(all="ignore"):
                if function is not None:
                    part = function.reduce(part, axis=tuple(range(count)), dtype=np.float64 if wide else part.dtype)
                    total = part if total is None else function(total, part)
                else:
                    part = self._fold(reducer, part.reshape((-1, *part.shape[count:])))
                    total = part if total is None else self._combined(reducer, total, part)
        assert total is not None
        if function is None:
            return self._combined(reducer, identity, total), undefined
        with np.errstate(all="ignore"):
            total = np.asarray(function(identity.astype(total.dtype), total))
            return total.astype(identity.dtype, copy=False), undefined

    def _fold(self, reducer: Reducer, items: Array) -> Array:
        """Fold along axis 0 as a balanced tree of neighbours, which keeps their order."""
        while len(items) > 1:
            paired = self._combined(reducer, items[0 : len(items) // 2 * 2 : 2], items[1::2])
            items = paired if len(items) % 2 == 0 else np.concatenate([paired, items[-1:]])
        return np.asarray(items[0])

    def _combined(self, reducer: Reducer, left: Array, right: Array) -> Array:
        grid = Grid([])
        grid.memo = {reducer.lhs: (left, None), reducer.rhs: (right, None)}
        return self.value(E.substitute(reducer.combine, self.constants), grid)[0]


def _either(a: Array | None, b: Array | None) -> Array | None:
    return b if a is None else a if b is None else a | b


def _over_leading(array: Array, sizes: Sequence[int], rank: int) -> Array:
    """The array with all reduction dimensions (leading, before `rank` others) at full size."""
    array = array.reshape((1,) * (rank + len(sizes) - array.ndim) + array.shape)
    return np.broadcast_to(array, (*sizes, *array.shape[len(sizes) :]))


def _boxes(extents: Sequence[int], budget: int) -> Iterator[list[tuple[int, int]]]:
    """Boxes of (start, size) per axis, at most `budget` elements each, contiguous in row-major order."""
    steps = []
    for extent in reversed(extents):
        steps.append(min(extent, budget))
        budget = max(1, budget // steps[-1]) if steps[-1] == extent else 1
    ranges = [
        [(start, min(step, extent - start)) for start in range(0, extent, step)]
        for extent, step in zip(extents, reversed(steps), strict=True)
    ]
    for box in itertools.product(*ranges):
        yield list(box)


_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip


def _ufunc(reducer: Reducer) -> np.ufunc | None:
    """The ufunc that reduces like the reducer, if its combination is a single operator."""
    combine = reducer.combine
    return _UFUNCS.get(combine.op) if set(combine.args) == {reducer.lhs, reducer.rhs} else None


def _accumulates_wide(reducer: Reducer) -> bool:
    return is_float(reducer.identity.dtype) and reducer.combine.op in ("add", "mul")


# ---------------------------------------------------------------- structural path


@dataclass(frozen=True, slots=True)
class View:
    """Elements of an array at affine positions: it starts at `start` and moves by `strides` bytes per unit of an axis."""

    array: Array
    start: tuple[int, ...]
    strides: Mapping[Expr, int]

    def strided(self, order: Sequence[Expr | None], sizes: Mapping[Expr, int]) -> Array:
        """One dimension per axis of `order` (None: of size 1); axes the view does not depend on get stride 0."""
        origin = self.array[tuple(slice(s, None) for s in self.start)] if self.start else self.array
        shape = [1 if v is None else sizes[v] for v in order]
        strides = [0 if v is None else self.strides.get(v, 0) for v in order]
        return as_strided(origin, shape, strides, writeable=False)


class _Contraction:
    """A reduction of a product of factors that read at affine indices: two strided views and a matrix product.

    A factor need not be a plain read: any expression of affine index forms, such as a read guarded against the padding, is
    first tabulated over the ranges of these forms (which gives the padded array). Axes cut by // and % (groups) are split.
    """

    def __init__(self, evaluator: Evaluator, e: Expr, grid: Grid, extents: Sequence[int]) -> None:
        self.evaluator, self.e, self.grid = evaluator, e, grid
        self.reducer, axes = e.attr
        self.sizes = {v: size for v, (_, _, size) in grid.axes.items()} | dict(zip(axes, extents, strict=True))
        self.parts: dict[Expr, list[Expr]] = {v: [v] for v in self.sizes}
        self.outer, self.reduced = list(grid.axes), list(axes)

    def compute(self) -> Array | None:
        """The value with the rank of the grid; None when the structure does not fit, or gains nothing."""
        function = _ufunc(self.reducer)
        body = self.e.args[0]
        work = prod(self.sizes[v] for v in self.evaluator.free(body) if v in self.sizes)
        if function is None or work == 0 or 0 in self.sizes.values() or not self.evaluator.free(body) <= set(self.sizes):
            return None
        body = self._split_axes(body)
        # A 16-bit product rounds before it is added, which a matrix product would not do.
        sums = function is np.add and self.reducer.identity.attr == 0 and self.e.dtype not in ("float16", "bfloat16", "bool")
        guard, factors = self._guarded_factors(body) if sums else (None, [body])
        factors = self._merged(factors)
        if len(factors) > 2:
            return None
        views = []
        for factor in factors:
            view = self._view(factor, work // 2 if len(factors) == 1 else max(work, CHUNK))
            if view is None:
                return None
            views.append(view)
        if guard is not None and not all(np.isfinite(v.array).all() for v in views):
            return None
        outer = [p for v in self.outer for p in self.parts[v]]
        reduced = [p for v in self.reduced for p in self.parts[v]]
        if len(views) == 1:
            return self._joined(self._windows(views[0], outer, reduced, function))
        if any(v not in views[0].strides and v not in views[1].strides for v in reduced):
            return None
        return self._joined(self._matmul(views[0], views[1], outer, reduced))

    def _guarded_factors(self, e: Expr) -> tuple[Expr | None, list[Expr]]:
        """The factors; of `select(guard, a * b, 0)` they are `select(guard, a, 0)` and `b`, right if `b` is finite."""
        if e.op == "select" and e.args[1].op == "mul" and e.args[2].op == "const" and e.args[2].attr == 0:
            guard, factors = e.args[0], _factors(e.args[1])
            for n, factor in enumerate(factors):
                if self.evaluator.free(guard) <= self.evaluator.free(factor):
                    factors[n] = E.select(guard, factor, e.args[2])
                    return guard, factors
        return None, _factors(e)

    def _split_axes(self, body: Expr) -> Expr:
        for _ in range(8):
            cut = next(
                (
                    (x.args[0], int(x.args[1].attr))
                    for x in E.walk(body)
                    if x.op in ("floordiv", "mod") and x.args[0] in self.sizes and x.args[1].op == "const"
                    and 1 < x.args[1].attr < self.sizes[x.args[0]] and self.sizes[x.args[0]] % x.args[1].attr == 0
                ),
                None,
            )  # fmt: skip
            if cut is None:
                break
            v, by = cut
            number = len(self.sizes)  # makes the names unique
            outer = E.var(f"{v.name}/{by}#{number}", 0, self.sizes[v] // by - 1)
            inner = E.var(f"{v.name}%{by}#{number}", 0, by - 1)
            self.sizes |= {outer: self.sizes.pop(v) // by, inner: by}
            for parts in self.parts.values():
                if v in parts:
                    parts[parts.index(v) : parts.index(v) + 1] = [outer, inner]
            body = simplify(E.substitute(body, {v: outer * by + inner}))
        return body

    def _merged(self, factors: list[Expr]) -> list[Expr]:
        """At most two factors where possible: one whose axes another has too is multiplied into it."""
        factors = list(factors)
        while len(factors) > 2:
            free = {f: self.evaluator.free(f) for f in factors}
            pairs = [(a, b) for a, b in itertools.permutations(range(len(factors)), 2) if free[factors[a]] <= free[factors[b]]]
            if not pairs:
                break
            small, large = min(pairs, key=lambda p: prod(self.sizes[v] for v in free[factors[p[1]]]))
            product = factors[large] * factors[small]
            factors = [f for n, f in enumerate(factors) if n not in (small, large)] + [product]
        return factors

    def _view(self, factor: Expr, limit: int) -> View | None:
        free = self.evaluator.free(factor)
        if factor.op == "read":
            view = self.evaluator._affine_view(factor, {v: (0, self.sizes[v]) for v in free})
            if view is not None:
                return view
        table = min((_Forms(factor, self.sizes, free, whole) for whole in (False, True)), key=lambda t: t.size)
        if table.size > limit:
            return None
        inner = Evaluator({}, {})
        inner.values, inner.dims = self.evaluator.values, self.evaluator.dims
        grid = Grid([(u, lo, hi - lo + 1) for _, u, lo, hi in table.forms])
        array, undefined = inner.value(table.body, grid)
        if undefined is not None and undefined.any():
            return None  # perhaps only where no element needs it: the general path knows
        array = np.array(np.broadcast_to(array, [hi - lo + 1 for _, _, lo, hi in table.forms]), order="C")
        strides: dict[Expr, int] = {}
        for (form, _, _, _), stride in zip(table.forms, array.strides, strict=True):
            for v, c in form:
                strides[v] = strides.get(v, 0) + c * stride
        return View(array, tuple(-lo for _, _, lo, _ in table.forms), strides)

    def _windows(self, view: View, outer: list[Expr], reduced: list[Expr], function: np.ufunc) -> Array:
        shown = [v if v in view.strides else None for v in outer]
        array = view.strided([*shown, *reduced], self.sizes)
        dtype = np.float64 if _accumulates_wide(self.reducer) else array.dtype
        total = np.full(array.shape[: len(outer)], self.reducer.identity.attr, dtype)
        with np.errstate(all="ignore"):
            if prod(array.shape[len(outer) :]) <= min(WINDOW, total.size):
                for offset in np.ndindex(array.shape[len(outer) :]):
                    function(total, array[(..., *offset)], out=total, casting="unsafe")
            else:
                total = function(total, function.reduce(array, axis=tuple(range(len(outer), array.ndim)), dtype=dtype))
            return total.astype(to_numpy(self.e.dtype), copy=False)

    def _matmul(self, left: View, right: View, outer: list[Expr], reduced: list[Expr]) -> Array:
        sizes = self.sizes
        if prod(sizes[v] for v in left.strides) < prod(sizes[v] for v in right.strides):
            left, right = right, left  # the larger one is taken slice by slice
        both = [v for v in outer if v in left.strides and v in right.strides]
        rows = [v for v in outer if v in left.strides and v not in right.strides]
        columns = [v for v in outer if v in right.strides and v not in left.strides]
        inner = [v for v in reduced if v in left.strides and v in right.strides]
        dtype = self._accumulator(left, right, prod(sizes[v] for v in reduced))

        def matrix(view: View, free: list[Expr], start: Mapping[Expr, int], size: Mapping[Expr, int], last: bool) -> Array:
            summed = [v for v in reduced if v in view.strides and v not in inner]
            order = [*both, *free, *inner] if last else [*both, *inner, *free]
            array = view.strided(order + summed, sizes)
            array = array[tuple(slice(start[v], start[v] + size[v]) if v in start else slice(None) for v in order)]
            array = array.sum(axis=tuple(range(len(order), array.ndim)), dtype=dtype) if summed else array.astype(dtype)
            extent = {**sizes, **size}
            edges = (prod(extent[v] for v in group) for group in (both, *((free, inner) if last else (inner, free))))
            return array.reshape(tuple(edges))

        order = both + rows + columns
        result = np.empty([sizes[v] for v in order], to_numpy(self.e.dtype))
        # Matrices are built slice by slice of the longest outer axis, so that unfolded images do not fill the memory.
        longest = max(both + rows, key=lambda v: sizes[v], default=None)
        elements = prod(sizes[v] for v in both + rows + inner)
        step = 1 if longest is None else max(1, sizes[longest] * CHUNK // max(elements, 1) if elements > CHUNK else sizes[longest])
        fixed = None
        for begin in range(0, 1 if longest is None else sizes[longest], step):
            start, size = ({}, {}) if longest is None else ({longest: begin}, {longest: min(step, sizes[longest] - begin)})
            a = matrix(left, rows, start, size, last=True)
            if longest in both or fixed is None:
                fixed = matrix(right, columns, start if longest in both else {}, size if longest in both else {}, last=False)
            with np.errstate(all="ignore"):
                part = np.matmul(a, fixed).astype(result.dtype, copy=False)
            place = tuple(slice(start[v], start[v] + size[v]) if v in start else slice(None) for v in order)
            result[place] = part.reshape(result[place].shape)
        shown = [v for v in outer if v in order]
        result = result.transpose([order.index(v) for v in shown])
        return result.reshape([sizes[v] if v in order else 1 for v in outer])

    def _accumulator(self, left: View, right: View, count: int) -> type:
        """float64 where that is exact (or the type is a float); else 64-bit integers, right modulo 2**64."""
        if is_float(self.e.dtype):
            return np.float64
        largest = [max(abs(int(v.array.min())), abs(int(v.array.max()))) for v in (left, right)]
        return np.float64 if largest[0] * largest[1] * count < 1 << 53 else np.int64

    def _joined(self, array: Array) -> Array:
        """Split axes put together again."""
        axis, shape, full = 0, [], list(array.shape)
        for v in self.outer:
            count = len(self.parts[v])
            if count > 1:
                full[axis : axis + count] = [self.sizes[p] for p in self.parts[v]]
            shape.append(prod(full[axis : axis + count]))
            axis += count
        return np.broadcast_to(array, full).reshape(shape)


def _factors(e: Expr) -> list[Expr]:
    return [f for a in e.args for f in _factors(a)] if e.op == "mul" else [e]


class _Forms:
    """A factor rewritten over its index forms: affine combinations of axes, up to a factor and a constant.

    `forms` lists (terms, variable, lo, hi); `whole` takes every axis as a form of its own instead.
    """

    def __init__(self, factor: Expr, sizes: Mapping[Expr, int], free: frozenset[Expr], whole: bool) -> None:
        self.sizes, self.axes = sizes, free
        self.forms: list[tuple[tuple[tuple[Expr, int], ...], Expr, int, int]] = []
        self.found: dict[tuple[tuple[Expr, int], ...], Expr] = {}
        self.memo: dict[Expr, Expr] = {}
        whole = whole or any(x.op == "reduce" for x in E.walk(factor))
        if whole:
            for v in sorted(free, key=lambda v: v.name):
                self._variable(((v, 1),), v)
        self.body = factor if whole else self._rewritten(factor)
        self.size = prod(hi - lo + 1 for _, _, lo, hi in self.forms)

    def _variable(self, form: tuple[tuple[Expr, int], ...], u: Expr | None = None) -> Expr:
        if form not in self.found:
            lo, hi = Affine(dict(form), 0).span(self.sizes)
            u = E.var(f"u{len(self.forms)}", lo, hi) if u is None else u
            self.found[form] = u
            self.forms.append((form, u, lo, hi))
        return self.found[form]

    def _rewritten(self, e: Expr) -> Expr:
        if e not in self.memo:
            short = None
            if e.dtype == INDEX:
                short = self._affine(e)
            elif e.op in COMPARISON and e.args[0].dtype == INDEX:
                short = self._affine(e.args[1] - e.args[0])
            if short is None:
                self.memo[e] = E.with_args(e, tuple(self._rewritten(a) for a in e.args))
            else:
                self.memo[e] = short if e.dtype == INDEX else E.binary(e.op, 0, short)
        return self.memo[e]

    def _affine(self, e: Expr) -> Expr | None:
        """An index in terms of one index form; None if it is not affine in the axes."""
        found = affine(simplify(e), self.axes)
        if found is None or not found.terms:
            return None if found is None else const(found.constant)
        moving = sorted(found.terms.items(), key=lambda term: term[0].name)
        scale = gcd(*found.terms.values()) * (1 if moving[0][1] > 0 else -1)
        return self._variable(tuple((v, c // scale) for v, c in moving)) * scale + found.constant
