"""NumPy's broadcasting with symbolic dims, the types in which operands are computed, and element-by-element operators built on both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, ExprLike, as_expr, cast, select
from tcomp.ir.simplify import same_dim
from tcomp.ir.te import Tensor

HALF = ("float16", "bfloat16")
BYTES = ("int8", "uint8")
_HINT = (
    "where symbolic sizes must agree: fix them (--dim n=4), bound them (--dim n=1..512), or give a shape in multiples (--shape x=n,h*32)"
)


def require_same(a: Dim, b: Dim, what: str) -> None:
    """Raises `IRError` unless the extents are equal for sure."""
    if not same_dim(a, b):
        raise IRError(f"{what}: {a} and {b} are not the same extent", hint=_HINT)


def broadcast_shape(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """The common shape under NumPy's rules. Raises `IRError` where two extents are neither equal for sure nor 1."""
    result: list[Dim] = []
    for position in range(-max(map(len, shapes), default=0), 0):
        extent: Dim = 1
        for other in (shape[position] for shape in shapes if -position <= len(shape)):
            if extent == 1:
                extent = other
            elif other != 1 and not same_dim(extent, other):
                listed = " and ".join(f"[{', '.join(map(str, s))}]" for s in shapes)
                raise IRError(f"shapes {listed} do not broadcast: {extent} against {other}", hint=_HINT)
        result.append(extent)
    return tuple(result)


def broadcast_read(tensor: Tensor, indices: Sequence[ExprLike]) -> Expr:
    """The element of `tensor` at `indices` of a shape that it broadcasts to (aligned at the last axis)."""
    own = indices[len(indices) - tensor.ndim :]
    return tensor[tuple(0 if d == 1 else i for i, d in zip(own, tensor.shape, strict=True))]


def pick(number: Expr, values: Sequence[Expr]) -> Expr:
    """values[number]; which one is known where the loop over numbers is unrolled."""
    *others, found = values
    for n in reversed(range(len(others))):
        found = select(te.equal(number, n), others[n], found)
    return found


def widened(value: Expr) -> Expr:
    """16-bit floats as float32, in which they are computed; all else as it is."""
    return cast(value, "float32") if value.dtype in HALF else value


def rounded(x: Tensor, dtype: str) -> Tensor:
    """The tensor in another type, usually that of an operator's input; itself where it has this type."""
    return x if x.dtype == dtype else te.compute(x.shape, lambda *i: cast(x[i], dtype), f"{x.name}.round")


def factor(value: Expr) -> Expr:
    """An operand of a contraction, in the type of the sums: as `widened`, and 8-bit integers as int32."""
    return cast(value, "int32") if value.dtype in BYTES else widened(value)


def product_dtype(dtype: str) -> str:
    """The type of a contraction of operands of this type: sums of 8-bit integers stay int32, those of 16-bit floats are rounded."""
    return "int32" if dtype in BYTES else dtype


def elementwise(name: str, function: Callable[..., Expr], *tensors: Tensor) -> Tensor:
    """`function` of the elements of broadcast tensors; 16-bit floats are computed in float32 and rounded once."""
    half = next((t.dtype for t in tensors if t.dtype in HALF), None)

    def element(*i: Expr) -> Expr:
        result = as_expr(function(*(widened(broadcast_read(t, i)) for t in tensors)))
        return cast(result, half) if half is not None and result.dtype == "float32" else result

    return te.compute(broadcast_shape(*(t.shape for t in tensors)), element, name)
