"""Contractions: matrix products with broadcast batches, and Einstein sums."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr
from tcomp.ir.graph import Operator
from tcomp.ir.simplify import same_dim
from tcomp.ops.broadcast import broadcast_shape, factor, product_dtype, require_same, widened
from tcomp.ops.reduction import rounded


def matmul(a: te.Tensor, b: te.Tensor, transpose_a: bool = False, transpose_b: bool = False) -> te.Tensor:
    """Matrix product of the last two axes; the axes before them broadcast.

    [..., m, k] x [..., k, n] -> [..., m, n]; a vector is a row on the left ([k]) and a column on the right, and its axis is
    missing in the result. `transpose_a` ([..., k, m]) and `transpose_b` ([..., n, k]) need matrices. 16-bit floats are
    accumulated in float32; 8-bit integers, which may differ in sign, in int32, which is the type of the result.
    """
    if a.ndim == 0 or b.ndim == 0:
        raise IRError("a matrix product of a scalar", hint="use a product by elements")
    row, column = a.ndim == 1, b.ndim == 1
    if (transpose_a and row) or (transpose_b and column):
        raise IRError("a vector cannot be transposed in a matrix product")
    inner_a = a.shape[-2] if transpose_a else a.shape[-1]
    inner_b = b.shape[-1] if transpose_b or column else b.shape[-2]
    require_same(inner_a, inner_b, f"contraction of {a!r} with {b!r}")
    batch = broadcast_shape(a.shape[:-2], b.shape[:-2])
    rows = () if row else (a.shape[-1] if transpose_a else a.shape[-2],)
    columns = () if column else (b.shape[-2] if transpose_b else b.shape[-1],)
    k = te.reduce_axis(inner_a, "k")

    def element(*index: Expr) -> Expr:
        outer, rest = index[: len(batch)], list(index[len(batch) :])
        i = [] if row else [rest.pop(0)]
        at_a = [k, *i] if transpose_a else [*i, k]
        at_b = [*rest, k] if transpose_b else [k, *rest]
        left, right = factor(a[(*_batch(a, outer), *at_a)]), factor(b[(*_batch(b, outer), *at_b)])
        return te.sum(left * right, k)

    return rounded(te.compute((*batch, *rows, *columns), element, "matmul"), product_dtype(a.dtype))


def _batch(x: te.Tensor, outer: Sequence[Expr]) -> list[Expr | int]:
    """Batch indices of an operand whose batch axes broadcast."""
    own = x.shape[:-2]
    return [0 if isinstance(d, int) and d == 1 else i for d, i in zip(own, outer[len(outer) - len(own) :], strict=True)]


def einsum(*operands: te.Tensor, equation: str) -> te.Tensor:
    """Sum of products in Einstein's notation; letters repeated within an operand take its diagonal, `...` broadcasts.

    Without `->` the result has the letters that occur once, in alphabetical order, after the broadcast axes.
    """
    terms, output = _parsed(equation, [t.ndim for t in operands])
    extents: dict[str, Dim] = {}
    for term, tensor in zip(terms, operands, strict=True):
        for letter, extent in zip(term, tensor.shape, strict=True):
            known = extents.setdefault(letter, extent)
            if isinstance(known, int) and known == 1:
                extents[letter] = extent
            elif not (isinstance(extent, int) and extent == 1) and not same_dim(known, extent):
                raise IRError(f"einsum `{equation}`: index `{letter}` is {known} in one place and {extent} in another")
    summed = {letter: te.reduce_axis(d, f"k{n}") for n, (letter, d) in enumerate(extents.items()) if letter not in output}

    def element(*index: Expr) -> Expr:
        at = {**summed, **dict(zip(output, index, strict=True))}
        product: Expr | None = None
        for term, tensor in zip(terms, operands, strict=True):
            own = [0 if d == 1 else at[letter] for letter, d in zip(term, tensor.shape, strict=True)]
            factor = widened(tensor[tuple(own)])
            product = factor if product is None else product * factor
        assert product is not None
        return te.sum(product, tuple(summed.values())) if summed else product

    return rounded(te.compute(tuple(extents[letter] for letter in output), element, "einsum"), operands[0].dtype)


def _parsed(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Letters of each operand and of the result; axes under `...` become the letters "0", "1", ... counted from the right."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    sources = left.split(",")
    if len(sources) != len(ranks):
        raise IRError(f"einsum `{equation}` names {len(sources)} operands, {len(ranks)} are given")
    terms, hidden = [], 0
    for source, rank in zip(sources, ranks, strict=True):
        before, dots, after = source.partition("...")
        unnamed = rank - len(before) - len(after)
        if unnamed < 0 or (unnamed and not dots) or not (before + after).isalpha() and before + after:
            raise IRError(f"einsum `{equation}`: `{source}` does not name the axes of an operand of rank {rank}")
        hidden = max(hidden, unnamed)
        terms.append(before + _hidden(unnamed) + after)
    if arrow:
        result = right.replace("...", _hidden(hidden))
    else:
        letters = "".join(terms)
        result = _hidden(hidden) + "".join(sorted(c for c in set(letters) if c.isalpha() and letters.count(c) == 1))
    unknown = set(result) - set("".join(terms))
    if unknown or len(set(result)) != len(result):
        raise IRError(f"einsum `{equation}`: the result `{right}` must name operand indices, each once")
    return terms, result


def _hidden(count: int) -> str:
    if count > 10:
        raise IRError("einsum: `...` stands for more than 10 axes")
    return "".join(str(n) for n in range(count - 1, -1, -1))


MATMUL, EINSUM = Operator("matmul", matmul), Operator("einsum", einsum)
