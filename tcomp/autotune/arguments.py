"""The buffers that a scheduled kernel takes when it is measured, as plain data that processes send to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, evaluate_int
from tcomp.ir.layout import Layout, Piece
from tcomp.ir.loops import Accumulate, Buffer, Kernel, Store, expressions, walk


@dataclass(frozen=True, slots=True)
class Argument:
    """A buffer that a scheduled kernel takes, at the sizes at which it is measured.

    `shape` is the logical one, `layout` None for row-major. `given`: it holds data at the start; `written`: it is a result; `constant`:
    it is the same in every run of the model. `below`: its elements serve as indices and are drawn from 0 to below that.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout | None
    given: bool
    written: bool
    constant: bool
    below: int | None

    @property
    def physical_shape(self) -> tuple[int, ...]:
        """The shape in memory."""
        return self.shape if self.layout is None else tuple(int(d) for d in self.layout.shape(self.shape))

    def to_json(self) -> list[Any]:
        """The fields in order, which `from_json` reads."""
        return list(astuple(self))

    @classmethod
    def from_json(cls, record: Sequence[Any]) -> Argument:
        """The argument that `to_json` wrote."""
        name, dtype, shape, layout, *rest = record
        return cls(name, dtype, tuple(shape), layout and Layout(layout[0], tuple(Piece(*p) for p in layout[1])), *rest)


def kernel_arguments(
    kernel: Kernel,
    sizes: Mapping[Expr, int],
    layouts: Mapping[int, Layout | None],
    shapes: Sequence[Sequence[Dim]],
    constants: Sequence[int] = (),
) -> tuple[Argument, ...]:
    """The buffers of a kernel before scheduling. A result that the program also reads holds data at the start."""
    below = _index_limits(kernel, sizes)
    read = {r.attr for s in walk(kernel.body) for r in E.reads(*expressions(s))}
    return tuple(
        Argument(b.name, b.dtype, tuple(evaluate_int(d, sizes) for d in shape), layouts.get(n), b not in kernel.outputs or b in read,
                 b in kernel.outputs, n in constants, below.get(b))
        for n, (b, shape) in enumerate(zip(kernel.buffers, shapes, strict=True))
    )  # fmt: skip


def _index_limits(kernel: Kernel, sizes: Mapping[Expr, int]) -> dict[Buffer, int]:
    """For each buffer whose elements serve as indices, directly or through other buffers, the least extent that they index."""
    stores = [s for s in walk(kernel.body) if isinstance(s, Store | Accumulate)]
    accesses = [(r.attr, r.args) for s in walk(kernel.body) for r in E.reads(*expressions(s))] + [(s.buffer, s.indices) for s in stores]
    indexed = [x for buffer, indices in accesses for x in zip(indices, buffer.shape, strict=True)]
    waiting = [(r.attr, evaluate_int(extent, sizes)) for index, extent in indexed for r in E.reads(index)]
    found: dict[Buffer, int] = {}
    while waiting:
        buffer, extent = waiting.pop()
        if extent < found.get(buffer, extent + 1):
            found[buffer] = extent
            waiting += [(r.attr, extent) for s in stores if s.buffer is buffer for r in E.reads(s.value)]
    return found
