"""A kernel before any schedule, at certain sizes, and what it computes: what the fuzzer compares everything with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tcomp.ir.dtypes import UNSIGNED, to_numpy
from tcomp.ir.expr import Expr, as_expr, bounds, evaluate_int, substitute
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import For, Kernel, Stmt, children

MOST_ITERATIONS = 10**7
Arrays = list[np.ndarray]  # of the parameters of a kernel, in order


class Failure(Exception):
    """What went wrong with a case: `kind` is what stays the same while the case is made smaller."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class TooLong(Exception):
    """A kernel with more iterations than the interpreter can walk: strange factors may be taken several times."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A kernel before any schedule, at certain sizes."""

    kernel: Kernel
    dims: dict[Expr, int]

    def arrays(self) -> Arrays:
        """Small integers, the same for the same shapes; outputs hold such too, which they keep where they are not written."""
        rng = np.random.default_rng(1)
        found = []
        for b in self.kernel.buffers:
            low = 0 if b.dtype == "bool" or b.dtype in UNSIGNED else -4
            shape = [evaluate_int(as_expr(d), self.dims) for d in b.shape]
            found.append(rng.integers(low, 2 if b.dtype == "bool" else 5, shape).astype(to_numpy(b.dtype)))
        return found

    @cached_property
    def plain(self) -> Arrays:
        """The results, flat. Raises `IRError` where the program itself is wrong: out of bounds, an undefined read."""
        return interpreted(self, self.kernel, strict=True)


def interpreted(subject: Subject, kernel: Kernel, strict: bool = False) -> Arrays:
    if iterations(kernel.body, subject.dims) > MOST_ITERATIONS:
        raise TooLong
    arrays = dict(zip(kernel.buffers, shaped(kernel, subject.arrays(), subject.dims), strict=True))
    run_kernel(kernel, arrays, subject.dims, shuffle=None if strict else 1, garbage=not strict)
    return [arrays[b].reshape(-1) for b in kernel.outputs]


def iterations(stmt: Stmt, dims: dict[Expr, int]) -> int:
    """At most so many times a statement is executed; each round of a `while` counts as one."""
    if isinstance(stmt, For):
        most = bounds(substitute(as_expr(stmt.extent), dims))[1]
        return (1 if most is None else max(most, 0)) * iterations(stmt.body, dims)
    return max(1, sum(iterations(s, dims) for s in children(stmt)))


def shaped(kernel: Kernel, arrays: Arrays, dims: dict[Expr, int]) -> Arrays:
    """The arrays in the shapes that a schedule gave the parameters."""
    return [a.reshape([evaluate_int(as_expr(d), dims) for d in b.shape]) for b, a in zip(kernel.buffers, arrays, strict=True)]


def compare(kind: str, kernel: Kernel, found: Arrays, expected: Arrays) -> None:
    for b, got, want in zip(kernel.outputs, found, expected, strict=True):
        if not np.array_equal(got, want, equal_nan=got.dtype.kind == "f"):
            raise Failure(kind, f"{b.name} is {got.tolist()} instead of {want.tolist()}")
