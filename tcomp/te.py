"""Tensor expressions as users write them: those of `tcomp.ir.te`, and what is made of them, derivatives among that.

x, w = te.placeholder((32, 64), name="x"), te.placeholder((64, 10), name="w")
k = te.reduce_axis(64, name="k")
y = te.compute((32, 10), lambda i, j: te.sum(x[i, k] * w[k, j], axis=k), name="y")
dx, dw = te.vjp(y, [x, w])
f = tcomp.build([x, w, y, dx, dw])
"""

from __future__ import annotations

from tcomp.ir import te as _te
from tcomp.ir.te import *
from tcomp.ir.transforms.jvp import jvp
from tcomp.ir.transforms.vjp import vjp

__all__ = ["jvp", "vjp"]
__all__ += _te.__all__
