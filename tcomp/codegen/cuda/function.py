"""A `__global__` function under construction: what the emitters of statements, copies and warp instructions know of it and add to it."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.codegen.cuda.expressions import Expressions
from tcomp.ir import expr as E
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim, Expr
from tcomp.ir.loops import Buffer, Kernel, Stmt
from tcomp.ir.simplify import from_linear, linear, simplify
from tcomp.target import CudaTarget


class FunctionBuilder(Expressions):
    """The text of a function and what it declares.

    `block`: threads of a block along x, y, z. `shared`: buffers in shared memory, with the elements of each. `written`: buffers that it
    stores to. `copies`: the phases that only start copies in the background.
    """

    def __init__(self, kernel: Kernel, target: CudaTarget, helpers: set[str]) -> None:
        super().__init__(kernel, helpers)
        self.target = target
        self.declarations: list[str] = []
        self.block = [1, 1, 1]
        self.shared: dict[Buffer, int] = {}
        self.written: set[Buffer] = set()
        self.copies: set[Stmt] = set()
        self.variables: dict[Expr, None] = {}

    def share(self, buffer: Buffer, size: int) -> None:
        """Give a buffer of so many elements a name and a place in shared memory."""
        self.names[buffer] = self.fresh(buffer.name)
        self.shared[buffer] = max(1, size)

    def constant(self, buffer: Buffer, extent: Dim) -> int:
        """An extent of a temporary. Raises `CodegenError` for a symbolic one."""
        if not isinstance(extent, int):
            raise self.fail(f"temporary `{buffer.name}` has no constant shape: {extent}", hint="pass it as a workspace buffer")
        return extent

    def declare(self, var: Expr, source: str) -> None:
        """Declare a loop variable whose value is known, such as `threadIdx.x`."""
        self.names[var] = self.fresh(var.name)
        self.variables[var] = None
        self.line(f"const {self.index_type(var)} {self.names[var]} = {source};")

    def vector_start(self, buffer: Buffer, indices: Sequence[Expr], lane: Expr, lanes: int) -> Expr | None:
        """The position of the first lane where the lanes are contiguous and certainly aligned to the size of the vector."""
        if lanes * itemsize(buffer.dtype) not in (2, 4, 8, 16) or lanes == 1:
            return None
        terms = dict(linear(self.linear(buffer, indices)))
        if terms.pop((lane,), 0) != 1 or any(lane in E.variables(*m) for m in terms) or any(c % lanes for c in terms.values()):
            return None
        return simplify(from_linear(terms))
