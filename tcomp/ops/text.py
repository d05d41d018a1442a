"""Text as numbers of words."""

from __future__ import annotations

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.broadcasting import require_same
from tcomp.ir.expr import Expr, all_of, const, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor

MAX_GRAM = 64  # words: each is a comparison in the expression


def count_grams(x: Tensor, grams: Tensor, lengths: Tensor, skips: int) -> Tensor:
    """[rows, grams], float32: the number of occurrences of each gram in a row of words `x` [rows, words]. Gram g is the first `lengths[g]`
    words of `grams[g]` (none of them: it is found nowhere), next to each other in `x` or with 1 to `skips` words between each and the
    next."""
    (rows, words), (count, longest) = x.shape, grams.shape
    if not isinstance(longest, int) or longest > MAX_GRAM:
        raise IRError(f"grams of {longest} words", why=f"at most {MAX_GRAM} are supported")
    require_same(lengths.shape[0], count, "a length for each gram")
    start, skip = te.reduce_axis(words, "start"), te.reduce_axis(skips + 1, "skip")

    def element(row: Expr, g: Expr) -> Expr:
        length = lengths[g]

        def fits(n: int) -> Expr:
            at = start + (skip + 1) * n
            return (length <= n) | ((at < words) & te.equal(x[row, minimum(at, words - 1)], grams[g, n]))

        once = (skip < 1) | (length > 1)  # a single word has no words between
        found = all_of([once, length > 0, *(fits(n) for n in range(longest))])
        return te.sum(select(found, const(1.0, "float32"), 0.0), (start, skip))

    return te.compute((rows, count), element, "count_grams")


COUNT_GRAMS = Operator("count_grams", count_grams)
