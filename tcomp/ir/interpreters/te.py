"""The NumPy reference of tensor expressions. Bodies are evaluated on index grids, one NumPy dimension per axis; operators mean what
`semantics.py` says. Sums and products of floats are accumulated in float64 and rounded once at the end. Sums of products (convolutions of
every kind) become float64 matrix products of strided views, with the same value up to float64 rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tcomp.errors import InputError, IRError
from tcomp.ir import expr as E
from tcomp.ir.access import affine
from tcomp.ir.dims import bind_dims, extent_of
from tcomp.ir.dtypes import is_float, to_numpy
from tcomp.ir.expr import Dim, Expr, const, evaluate_int
from tcomp.ir.interpreters import semantics
from tcomp.ir.interpreters.loops import run_stmt
from tcomp.ir.interpreters.semantics import Array, literal
from tcomp.ir.reducers import Reducer
from tcomp.ir.simplify import simplify
from tcomp.ir.te import Extern, Tensor

CHUNK = 1 << 24  # elements of the largest temporary of a reduction
WINDOW = 128  # elements: smaller windows are reduced element by element, for all results at once, which walks along memory

Value = tuple[Array, Array | None]  # elements, and where they are undefined (None: nowhere)
Range = tuple[int, int]  # first value of an axis, and number of values


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

    def __init__(self, axes: Sequence[tuple[Expr, int, int]], parent: Grid | None = None) -> None:
        """`axes` lists (variable, first value, number of values)."""
        self.parent = parent
        self.rank: int = len(axes) + (parent.rank if parent else 0)
        self.axes = {v: (n - self.rank, start, size) for n, (v, start, size) in enumerate(axes)}
        self.memo: dict[Expr, Value] = {}

    def find(self, v: Expr) -> tuple[int, int, int] | None:
        """(dimension, first value, size) of an axis."""
        return self.axes[v] if v in self.axes else None if self.parent is None else self.parent.find(v)

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
        externs, grid = dict[Extern, list[Array]](), None
        for tensor in E.postorder(outputs, lambda t: () if t in self.values else t.inputs):
            if tensor in self.values:
                continue
            if (program := tensor.extern) is not None:
                if program not in externs:
                    results = externs[program] = [np.zeros(self.shape(b.shape), to_numpy(b.dtype)) for b in program.results]
                    arrays = *(self.values[t] for t in program.inputs), *results
                    buffers = dict(zip((*program.parameters, *program.results), arrays, strict=True))
                    run_stmt(program.body, buffers, self.dims, undefined=program.results)
                self.values[tensor] = externs[program][tensor.index]
                continue
            if tensor.body is None:
                raise IRError(f"the placeholder `{tensor.name}` has no value", hint="give an array for it in `inputs`")
            shape = self.shape(tensor.shape)
            axes = [(v, 0, n) for v, n in zip(tensor.axes, shape, strict=True)]
            if grid is None or list(grid.axes) != list(tensor.axes) or [a[2] for a in grid.axes.values()] != list(shape):
                grid = Grid(axes)  # else: another output of the same compute shares its sub-expressions
            array, undefined = self.value(E.substitute(tensor.body, self.constants), grid)
            if prod(shape) and undefined is not None and undefined.any():
                element = tuple(map(int, np.argwhere(np.broadcast_to(undefined, shape))[0]))
                raise IRError(f"element {element} of `{tensor.name}` reads outside of a tensor", where=str(tensor.body))
            self.values[tensor] = np.array(np.broadcast_to(array, shape))
        return [self.values[t] for t in outputs]

    def shape(self, shape: Sequence[Dim]) -> tuple[int, ...]:
        """The extents of a shape, as numbers."""
        return tuple(max(0, evaluate_int(d, self.dims)) for d in shape)

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
                if (found := grid.find(e)) is None:
                    raise IRError(f"the variable `{e.attr.name}` has no value", hint="give symbolic dims in `dims`")
                dimension, start, size = found
                return np.arange(start, start + size).reshape((-1,) + (1,) * (-dimension - 1)), None
            case "read":
                return self._read(e, grid)
            case "reduce":
                return self._reduce(e, grid)
        args = [grid.home(self.free(a)).memo[a] for a in e.args]
        result = semantics.apply(e.op, e.dtype, [a for a, _ in args])
        undefined = [where for _, where in args]
        if e.op == "select" and (undefined[1] is not None or undefined[2] is not None):
            undefined[1:] = [np.where(args[0][0], *(False if where is None else where for where in undefined[1:]))]
        if e.op == "checked" and (outside := (args[0][0] < 0) | (args[0][0] >= args[1][0])).any():
            undefined.append(outside)
        return result, reduce(_either, undefined)

    def _read(self, e: Expr, grid: Grid) -> Value:
        if (view := self._strided_view(e, grid)) is not None:
            return view, None
        array, undefined, indices = self.values[e.attr], None, []
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

    def _strided_view(self, e: Expr, grid: Grid) -> Array | None:
        """A read whose indices are affine in axes and always in range, without a copy."""
        array = self.values[e.attr]
        axes = {v: found for v in self.free(e) if (found := grid.find(v))}
        if array.size == 0 or any(size == 0 for _, _, size in axes.values()):
            return None
        first, strides = list[slice](), dict[Expr, int]()
        for index, extent, stride in zip(e.args, array.shape, array.strides, strict=True):
            if (form := affine(simplify(index), axes)) is None:
                return None
            begin = sum(c * axes[v][1] for v, c in form.terms.items())
            low, high = form.span({v: size for v, (_, _, size) in axes.items()})
            if low + begin < 0 or high + begin >= extent:
                return None
            first.append(slice(form.constant + begin, None))
            for v, c in form.terms.items():
                strides[v] = strides.get(v, 0) + c * stride
        at = {axes[v][0]: v for v in strides}
        order = [at.get(d) for d in range(min(at, default=0), 0)]
        shape = [1 if v is None else axes[v][2] for v in order]
        part = array[tuple(first)] if first else array
        octets = part.view(np.uint8) if part.itemsize == 1 else part  # NumPy has no name for some types of ml_dtypes, and would ask for it
        return as_strided(octets, shape, [0 if v is None else strides[v] for v in order], writeable=False).view(part.dtype)

    def _reduce(self, e: Expr, grid: Grid) -> Value:
        reducer, axes = e.attr
        extents = [extent_of(v, self.dims) for v in axes]
        identity = literal(reducer.identity.attr, e.dtype)
        if 0 in extents:
            return identity, None
        if self.structural and grid.parent is None and (total := self._sum_of_products(e, grid, extents)) is not None:
            return total, None
        body, function = e.args[0], _UFUNCS.get(reducer.op)
        wide = is_float(e.dtype) and reducer.combine.op in ("add", "mul")
        others = [found[2] for v in self.free(body).difference(axes) if (found := grid.find(v))]
        combine = partial(self._combined, reducer) if function is None else function
        total, undefined = None, None
        for box in _boxes(extents, max(1, CHUNK // max(1, prod(others)))):
            array, where = self.value(body, Grid([(v, *side) for v, side in zip(axes, box, strict=True)], grid))
            sizes = [size for _, size in box]
            part = _over_leading(array, sizes, grid.rank)
            if where is not None:
                where = _over_leading(where, sizes, grid.rank)
                undefined = _either(undefined, np.asarray(where.any(axis=tuple(range(len(axes))))))
            if function is None:
                part = part.reshape((-1, *part.shape[len(axes) :]))
                while len(part) > 1:  # a balanced tree of neighbours, which keeps their order
                    paired = combine(part[0 : len(part) // 2 * 2 : 2], part[1::2])
                    part = paired if len(part) % 2 == 0 else np.concatenate([paired, part[-1:]])
                part = np.asarray(part[0])
            else:
                part = _reduced(function, part, len(axes), np.dtype(np.float64) if wide else part.dtype)
            total = part if total is None else combine(total, part)
        assert total is not None
        with np.errstate(all="ignore"):
            return np.asarray(combine(identity.astype(total.dtype), total)).astype(identity.dtype, copy=False), undefined

    def _combined(self, reducer: Reducer, left: Array, right: Array) -> Array:
        grid = Grid([])
        grid.memo = {reducer.lhs: (left, None), reducer.rhs: (right, None)}
        return self.value(E.substitute(reducer.combine, self.constants), grid)[0]

    def _sum_of_products(self, e: Expr, grid: Grid, extents: Sequence[int]) -> Array | None:
        """The value with the rank of the grid, by matrix products; None if it is not a sum of products, or a factor is undefined anywhere
        (perhaps only where no element needs it)."""
        (reducer, axes), body = e.attr, e.args[0]
        ranges: dict[Expr, Range] = {v: side[1:] for v, side in grid.axes.items()} | {v: (0, n) for v, n in zip(axes, extents, strict=True)}
        free = self.free(body)
        # A 16-bit product rounds before it is added, which a matrix product would not do.
        sums = _UFUNCS.get(reducer.op) is np.add and reducer.identity.attr == 0 and e.dtype not in ("float16", "bfloat16", "bool")
        if not sums or not set(axes) <= free <= set(ranges) or any(n == 0 for _, n in ranges.values()):
            return None
        parts = {v: [v] for v in grid.axes}
        body = _split_axes(body, ranges, parts)
        guard, factors = self._factors(body, ranges)
        if len(factors) != 2:
            return None
        outer = [part for v in grid.axes for part in parts[v]]
        order = [*outer, *(v for v in ranges if v not in outer)]
        # Matrices are made for one slab of the longest axis at a time, so that unfolded images do not fill the memory.
        large = max(map(self.free, factors), key=lambda used: prod(ranges[v][1] for v in used))
        longest = max((v for v in outer if v in large), key=lambda v: ranges[v][1], default=order[-1])
        start, count = ranges[longest]
        elements = prod(ranges[v][1] for v in large)
        step = max(1, count * CHUNK // elements) if longest in outer else count
        slabs = []
        for begin in range(start, start + count, step):
            slab = Grid([(v, *((begin, min(step, start + count - begin)) if v is longest else ranges[v])) for v in order])
            values = [self.value(factor, slab) for factor in factors]
            if any(where is not None and where.any() for _, where in values):
                return None
            if guard is not None and not all(np.isfinite(array).all() for array, _ in values):
                return None
            a, b = (array.reshape((1,) * (len(order) - array.ndim) + array.shape) for array, _ in values)
            if any(max(a.shape[d], b.shape[d]) != ranges[order[d]][1] for d in range(len(outer), len(order))):
                return None  # an axis that a factor names, as in k // 4, though it does not vary along it
            slabs.append(_product(a, b, len(outer), e.dtype))
        total = slabs[0] if len(slabs) == 1 else np.concatenate(slabs, axis=order.index(longest))
        if all(len(pieces) == 1 for pieces in parts.values()):
            return total  # its size is 1 along an axis on which it does not depend
        return np.broadcast_to(total, [ranges[v][1] for v in outer]).reshape([size for _, _, size in grid.axes.values()])

    def _factors(self, e: Expr, ranges: Mapping[Expr, Range]) -> tuple[Expr | None, list[Expr]]:
        """At most two factors where possible: one whose axes another has too is multiplied into it.

        Those of `select(guard, a * b, 0)` are `select(guard, a, 0)` and `b`, right if `b` is finite: then the guard is returned, too.
        """
        guard = None
        if e.op == "select" and e.args[1].op == "mul" and e.args[2].op == "const" and e.args[2].attr == 0:
            guard, e, zero = e.args
        factors = _flat(e)
        if guard is not None:
            if (n := next((n for n, f in enumerate(factors) if self.free(guard) <= self.free(f)), None)) is None:
                return None, [E.select(guard, e, zero)]
            factors[n] = E.select(guard, factors[n], zero)
        while len(factors) > 2:
            pairs = [(a, b) for a, b in itertools.permutations(factors, 2) if self.free(a) <= self.free(b)]
            if not pairs:
                break
            small, large = min(pairs, key=lambda pair: prod(ranges[v][1] for v in self.free(pair[1])))
            factors.remove(small)
            factors.remove(large)
            factors.append(large * small)
        return guard, factors


def _flat(e: Expr) -> list[Expr]:
    return [f for a in e.args for f in _flat(a)] if e.op == "mul" else [e]


def _split_axes(body: Expr, ranges: dict[Expr, Range], parts: dict[Expr, list[Expr]]) -> Expr:
    """The body with axes that are cut by // and % (groups of a convolution) split into two, so that reads are affine in these."""
    for _ in range(8):
        cuts = [x.args for x in E.walk(body) if x.op in ("floordiv", "mod") and x.args[0] in ranges and x.args[1].op == "const"]
        cut = next(((v, c.attr) for v, c in cuts if ranges[v][0] == ranges[v][1] % c.attr == 0 and 1 < c.attr < ranges[v][1]), None)
        if cut is None:
            break
        (v, by), number = cut, len(ranges)  # the number makes the names unique
        count = ranges.pop(v)[1] // by
        outer, inner = E.var(f"{v.name}/{by}#{number}", 0, count - 1), E.var(f"{v.name}%{by}#{number}", 0, by - 1)
        ranges |= {outer: (0, count), inner: (0, by)}
        for pieces in parts.values():
            if v in pieces:
                pieces[pieces.index(v) : pieces.index(v) + 1] = [outer, inner]
        body = simplify(E.substitute(body, {v: outer * by + inner}))
    return body


def _product(a: Array, b: Array, outer: int, dtype: str) -> Array:
    """The sum of a * b over all dimensions but the first `outer`; where one of them does not vary its size is 1."""
    exact: Any = np.float64
    if not is_float(dtype):  # 64-bit integers are right modulo 2**64
        limit = prod(max(abs(int(x.min())), abs(int(x.max()))) for x in (a, b))
        exact = np.float64 if limit * prod(np.broadcast_shapes(a.shape, b.shape)[outer:]) < 1 << 53 else np.int64
    varies = [(m > 1, n > 1) for m, n in zip(a.shape, b.shape, strict=True)]
    a, b = (
        x.sum(axis=alone, keepdims=True, dtype=exact) if (alone := tuple(d for d in range(outer, x.ndim) if varies[d] == only)) else x
        for x, only in ((a, (True, False)), (b, (False, True)))
    )
    both = [d for d in range(outer) if varies[d] == (True, True)]
    columns = [d for d in range(outer) if varies[d] == (False, True)]
    rows = [d for d in range(outer) if d not in both + columns]
    summed = list(range(outer, a.ndim))

    def matrices(x: Array, order: list[int], alone: list[int], shape: tuple[list[int], list[int]]) -> Array:
        x = np.ascontiguousarray(x.transpose([*order, *alone]), exact)
        return x.reshape(prod(x.shape[: len(both)]), *(prod(x.shape[d] for d in map(order.index, group)) for group in shape))

    left = matrices(a, both + rows + summed, columns, (rows, summed))
    right = matrices(b, both + summed + columns, rows, (summed, columns))
    order = both + rows + columns
    with np.errstate(all="ignore"):
        total: Array = np.matmul(left, right).astype(to_numpy(dtype), copy=False)
    return total.reshape([max(a.shape[d], b.shape[d]) for d in order]).transpose([order.index(d) for d in range(outer)])


def _reduced(function: np.ufunc, part: Array, count: int, dtype: np.dtype[Any]) -> Array:
    window = part.shape[:count]
    with np.errstate(all="ignore"):
        if prod(window) > min(WINDOW, prod(part.shape[count:])):
            return np.asarray(function.reduce(part, axis=tuple(range(count)), dtype=dtype))
        total: Array = part[(0,) * count].astype(dtype)
        for offset in itertools.islice(np.ndindex(window), 1, None):
            total = function(total, part[offset])
        return total


def _either(a: Array | None, b: Array | None) -> Array | None:
    return b if a is None else a if b is None else a | b


def _over_leading(array: Array, sizes: Sequence[int], rank: int) -> Array:
    """The array with all reduction dimensions (leading, before `rank` others) at full size."""
    array = array.reshape((1,) * (rank + len(sizes) - array.ndim) + array.shape)
    return np.broadcast_to(array, (*sizes, *array.shape[len(sizes) :]))


def _boxes(extents: Sequence[int], budget: int) -> Iterator[tuple[Range, ...]]:
    """Boxes of (start, size) per axis, at most `budget` elements each, contiguous in row-major order."""
    ranges: list[list[Range]] = []
    for extent in reversed(extents):
        step = min(extent, budget)
        budget = max(1, budget // step) if step == extent else 1
        ranges.insert(0, [(start, min(step, extent - start)) for start in range(0, extent, step)])
    return itertools.product(*ranges)


_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip
