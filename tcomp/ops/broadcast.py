"""Shapes that meet: NumPy broadcasting with symbolic dims, and element-by-element operators built on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, ExprLike, as_expr, cast
from tcomp.ir.simplify import same_dim

HALF = ("float16", "bfloat16")
BYTES = ("int8", "uint8")
AGREE = (
    "where symbolic sizes must agree: fix them (--dim n=4), bound them (--dim n=1..512), or give a shape in multiples (--shape x=n,h*32)"
)


def require_same(a: Dim, b: Dim, what: str) -> None:
    """Raises `IRError` unless the extents are equal for sure."""
    if not same_dim(a, b):
        raise IRError(f"{what}: {a} and {b} are not the same extent", hint=AGREE)


def broadcast_shape(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """The common shape under NumPy's rules. Raises `IRError` where two extents are neither equal for sure nor 1."""
    rank = max(map(len, shapes), default=0)
    result: list[Dim] = []
    for position in range(-rank, 0):
        extent: Dim = 1
        for shape in shapes:
            other = shape[position] if -position <= len(shape) else 1
            if isinstance(extent, int) and extent == 1:
                extent = other
            elif not (isinstance(other, int) and other == 1) and not same_dim(extent, other):
                listed = " and ".join(f"[{', '.join(map(str, s))}]" for s in shapes)
                raise IRError(f"shapes {listed} do not broadcast: {extent} against {other}", hint=AGREE)
        result.append(extent)
    return tuple(result)


def read(tensor: te.Tensor, indices: Sequence[ExprLike]) -> Expr:
    """The element of `tensor` that meets `indices` of the broadcast shape (aligned at the last axis)."""
    own = indices[len(indices) - tensor.ndim :]
    return tensor[tuple(0 if isinstance(d, int) and d == 1 else i for i, d in zip(own, tensor.shape, strict=True))]


def widened(value: Expr) -> Expr:
    """16-bit floats as float32, in which they are computed; all else as it is."""
    return cast(value, "float32") if value.dtype in HALF else value


def factor(value: Expr) -> Expr:
    """An operand of a contraction, in the type of the sums: as `widened`, and 8-bit integers as int32."""
    return cast(value, "int32") if value.dtype in BYTES else widened(value)


def product_dtype(dtype: str) -> str:
    """The type of a contraction of operands of this type: sums of 8-bit integers stay int32, those of 16-bit floats are rounded."""
    return "int32" if dtype in BYTES else dtype


def elementwise(name: str, function: Callable[..., Expr], *tensors: te.Tensor) -> te.Tensor:
    """`function` of the elements of broadcast tensors; 16-bit floats are computed in float32 and rounded once."""
    half = next((t.dtype for t in tensors if t.dtype in HALF), None)

    def element(*i: Expr) -> Expr:
        result = as_expr(function(*(widened(read(t, i)) for t in tensors)))
        return cast(result, half) if half is not None and result.dtype == "float32" else result

    return te.compute(broadcast_shape(*(t.shape for t in tensors)), element, name)
