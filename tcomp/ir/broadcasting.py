"""NumPy's rules for shapes of several tensors, and the types in which elements are computed: 16-bit floats in float32, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from tcomp.errors import IRError
from tcomp.ir.dtypes import BITS, NARROW_FLOATS, is_integer
from tcomp.ir.expr import Dim, Expr, as_expr, bounds, cast
from tcomp.ir.simplify import same_dim

HALF = ("float16", "bfloat16")
BYTES = ("int8", "uint8")
HINT = "where symbolic sizes must agree: fix them (--dim n=4), bound them (--dim n=1..512), or give a shape in multiples (--shape x=n,h*32)"


class SizeMismatch(IRError):
    """Two extents, `sizes`, have to be equal and are not provably so."""

    def __init__(self, what: str, sizes: tuple[Dim, Dim] = (0, 0), **parts: str) -> None:
        hint = HINT if any(isinstance(d, Expr) for d in sizes) else ""
        super().__init__(what, **{"hint": hint, **parts})
        self.sizes = sizes


class BroadcastMismatch(SizeMismatch):
    """Two extents that neither are provably equal, nor is one of them provably 1."""


def require_same(a: Dim, b: Dim, what: str) -> None:
    """Raises `SizeMismatch` unless the extents are provably equal."""
    if not same_dim(a, b):
        raise SizeMismatch(f"{what}: {a} and {b} are not the same extent", (a, b))


def require_same_shape(a: Sequence[Dim], b: Sequence[Dim], what: str) -> None:
    """Raises `SizeMismatch` unless the shapes are provably equal."""
    if len(a) != len(b):
        raise SizeMismatch(f"{what}: {len(a)} and {len(b)} axes")
    for d, e in zip(a, b, strict=True):
        require_same(d, e, what)


def broadcast_shape(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """The common shape under NumPy's rules. Raises `BroadcastMismatch` where two extents are neither provably equal nor 1."""
    result: list[Dim] = []
    for aligned in zip_longest(*map(reversed, shapes), fillvalue=1):  # from the last axis on
        extent: Dim = next((d for d in aligned if d != 1), 1)
        if other := [d for d in aligned if d != 1 and not same_dim(extent, d)]:
            listed = " and ".join(f"[{', '.join(map(str, s))}]" for s in shapes)
            sizes = next(((d, 1) for d in (extent, other[0]) if _at_most_one(d)), (extent, other[0]))
            raise BroadcastMismatch(f"shapes {listed} do not broadcast: {extent} against {other[0]}", sizes)
        result.append(extent)
    return tuple(reversed(result))


def _at_most_one(extent: Dim) -> bool:
    """Whether an extent is 1 unless it is 0, as that of the last row of an image: where it meets another one, it is to be stretched."""
    return bounds(as_expr(extent))[1] == 1


def require_broadcast(shape: Sequence[Dim], to: Sequence[Dim]) -> None:
    """Raises `SizeMismatch` unless `shape` provably broadcasts to `to` under NumPy's rules."""
    if len(shape) > len(to):
        raise SizeMismatch(f"{len(shape)} axes do not broadcast to {len(to)}")
    for own, extent in zip(reversed(shape), reversed(to), strict=False):
        if own != 1:
            what = f"[{', '.join(map(str, shape))}] broadcast to [{', '.join(map(str, to))}]"
            require_same(own, 1 if _at_most_one(own) else extent, what)


def widened(value: Expr) -> Expr:
    """The operand type of arithmetic: floats of 16 bits and fewer are converted to float32, other types are unchanged."""
    return cast(value, "float32") if value.dtype in HALF or value.dtype in NARROW_FLOATS else value


def term(a: Expr, b: Expr, dtype: str | None = None) -> Expr:
    """A product that a contraction sums, in the type of the sums: operands are `widened`, integers to `dtype` where that holds more, and
    8-bit ones to int32 at least."""

    def operand(value: Expr) -> Expr:
        integers = dtype is not None and is_integer(dtype) and is_integer(value.dtype)
        if dtype is not None and integers and BITS[dtype] > BITS[value.dtype]:
            return cast(value, dtype)
        return cast(value, "int32") if value.dtype in BYTES else widened(value)

    return operand(a) * operand(b)


def product_dtype(dtype: str) -> str:
    """The type of a contraction of operands of this type: sums of 8-bit integers stay int32, those of 16-bit floats are rounded."""
    return "int32" if dtype in BYTES else dtype
