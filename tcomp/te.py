"""Tensor expressions as users write them: those of `tcomp.ir.te`, and what is made of them, derivatives among that.

x, w = te.placeholder((32, 64), name="x"), te.placeholder((64, 10), name="w")
y = te.tanh(x @ w)
dx, dw = te.vjp(y, [x, w])
f = tcomp.build([x, w, y, dx, dw])
"""

from __future__ import annotations

from tcomp.ir import te as _te
from tcomp.ir.te import *
from tcomp.ir.transforms.jvp import jvp
from tcomp.ir.transforms.vjp import vjp
from tcomp.ir.transforms.vmap import vmap
from tcomp.ops.matmul import einsum as _einsum

__all__ = ["einsum", "jvp", "vjp", "vmap"]
__all__ += _te.__all__


def einsum(equation: str, *operands: _te.Tensor) -> _te.Tensor:
    """The sum of products that Einstein's notation says, as NumPy's: `te.einsum("bij,bjk->bik", A, B)`.

    Letters repeated within an operand take its diagonal, `...` broadcasts, without `->` the result has the letters that occur once, in
    alphabetical order. The result has the dtype of the first operand; 16-bit floats are added in float32. Raises `IRError` where the
    equation does not name the axes of the operands.
    """
    return _einsum(*operands, equation=equation)
