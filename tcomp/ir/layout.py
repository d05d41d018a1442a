"""Layout: how the elements of a tensor are ordered in memory, as an index map from logical to physical indices.

A physical dimension is a piece of a logical axis, `(index // div) % mod`; the last physical dimension is contiguous.

    NCHW    identity
    NHWC    (n, c, h, w) -> (n, h, w, c)
    NCHW16c (n, c, h, w) -> (n, c // 16, h, w, c % 16)      sizes that 16 does not divide are padded up

An axis that is not cut may have a *halo*: elements before and behind it that hold zeros, so that a window may reach over its edges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from tcomp.ir.expr import Dim, Expr, ExprLike, as_expr
from tcomp.ir.simplify import as_dim, simplify

LINE = 64  # bytes of a line of the cache


@dataclass(frozen=True, slots=True)
class Piece:
    """One physical dimension: `(index[axis] // div) % mod`; `mod` None means no upper cut.

    `before` and `after` are the numbers of zeros around a whole axis (div 1, mod None).
    """

    axis: int
    div: int = 1
    mod: int | None = None
    before: int = 0
    after: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Physical dimensions of a tensor, outermost first. Every logical index has exactly one physical place."""

    rank: int
    pieces: tuple[Piece, ...]

    @staticmethod
    @cache
    def identity(rank: int) -> Layout:
        """The row-major layout."""
        return Layout.permuted(range(rank))

    @staticmethod
    def permuted(order: Sequence[int]) -> Layout:
        """Physical dimension d holds logical axis `order[d]`."""
        return Layout(len(order), tuple(Piece(axis) for axis in order))

    @staticmethod
    def blocked(order: Sequence[int], axis: int, block: int) -> Layout:
        """`order` (a permutation of the axes) with `axis` cut into blocks whose inside comes last."""
        pieces = [Piece(a, block if a == axis else 1) for a in order]
        return Layout(len(order), (*pieces, Piece(axis, 1, block)))

    @property
    def is_identity(self) -> bool:
        """Whether this is the row-major layout, without a halo."""
        return self == Layout.identity(self.rank)

    def indices(self, logical: Sequence[ExprLike]) -> tuple[Expr, ...]:
        """Physical indices of a logical element, simplified."""
        quotients = [as_expr(logical[p.axis]) // p.div + p.before for p in self.pieces]
        return tuple(simplify(q if p.mod is None else q % p.mod) for q, p in zip(quotients, self.pieces, strict=True))

    def shape(self, logical: Sequence[Dim]) -> tuple[Dim, ...]:
        """Physical extents, padding included."""
        return tuple(as_dim(p.mod or (as_expr(logical[p.axis]) + (p.div - 1)) // p.div + (p.before + p.after)) for p in self.pieces)

    def logical(self, physical: Sequence[ExprLike]) -> tuple[Expr, ...]:
        """The logical indices stored at physical indices (>= the logical extent inside padding)."""
        result: list[Expr] = [as_expr(0)] * self.rank
        for index, p in zip(physical, self.pieces, strict=True):
            result[p.axis] = result[p.axis] + as_expr(index) * p.div - p.before
        return tuple(simplify(e) for e in result)

    @property
    def pads(self) -> bool:
        """Whether some extents leave unused elements behind the end of an axis."""
        return any(p.mod is not None for p in self.pieces)

    @property
    def has_halo(self) -> bool:
        """Whether some axis has zeros around it."""
        return any(p.before or p.after for p in self.pieces)

    def with_halo(self, widths: Mapping[int, tuple[int, int]]) -> Layout:
        """The layout with (before, after) zeros around the axes given, none around the others."""
        return Layout(self.rank, tuple(replace(p, before=b, after=a) for p in self.pieces for b, a in [widths.get(p.axis, (0, 0))]))

    def to_physical(self, array: np.ndarray) -> np.ndarray:
        """The array in this layout (C-contiguous, padding filled with zeros)."""
        if not self.pads:
            return np.ascontiguousarray(_padded(array.transpose([p.axis for p in self.pieces]), [(p.before, p.after) for p in self.pieces]))
        # Cut each axis into its pieces, slowest first, after padding it to whole blocks; then bring the pieces into order.
        order = sorted(range(len(self.pieces)), key=lambda n: (self.pieces[n].axis, -self.pieces[n].div))
        extents = [int(d) for d in self.shape(array.shape)]
        whole = [math.prod(n for n, p in zip(extents, self.pieces, strict=True) if p.axis == axis) for axis in range(self.rank)]
        cut = _padded(array, [(0, n - size) for n, size in zip(whole, array.shape, strict=True)]).reshape([extents[n] for n in order])
        return np.ascontiguousarray(cut.transpose(np.argsort(order)))

    def from_physical(self, array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The logical array of the given shape out of a physical one."""
        grids = np.meshgrid(*(np.arange(n) for n in shape), indexing="ij", sparse=True)
        pieces = [grids[p.axis] // p.div + p.before if p.mod is None else grids[p.axis] // p.div % p.mod for p in self.pieces]
        return np.ascontiguousarray(array[tuple(pieces)]) if pieces else array.copy()

    def __str__(self) -> str:
        axes = ["abcdefghijklmnop"[p.axis] for p in self.pieces]
        cuts = [(f"/{p.div}" if p.div != 1 else "") + ("" if p.mod is None else f"%{p.mod}") for p in self.pieces]
        halos = [f"+{p.before}+{p.after}" if p.before or p.after else "" for p in self.pieces]
        return f"({','.join(map(''.join, zip(axes, cuts, halos, strict=True)))})"


def _padded(array: np.ndarray, widths: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.pad(array, widths) if any(before or after for before, after in widths) else array
