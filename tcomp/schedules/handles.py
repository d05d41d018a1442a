"""Handles, the results of primitives: names (`str`) of loops or buffers, with the names of related loops and buffers as attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from tcomp.ir.expr import Expr
from tcomp.ir.te import Tensor

Loop = str | Expr  # its name, or an axis of a tensor that has one loop
Stage = str | Tensor  # the name of a buffer, or the tensor that is computed into it
Size = int | str | Expr  # a number of iterations, or the text of one ("n // 4")


class Handle(str):
    """A name with related names as attributes."""

    def __new__(cls, name: str, **others: Any) -> Self:
        self = super().__new__(cls, name)
        vars(self).update(others)
        return self


class LoopCopy(Handle):
    """The name of a loop that copies another one; `copies` names the copy of each loop and buffer inside of the original."""

    copies: Mapping[str, str]


class BufferCopy(Handle):
    """The name of a buffer that stands for another one, with the loops of the nest that fills it (`loads`) and of the nest that copies
    it back (`stores`), outermost first; empty if the step made no such nest."""

    loads: Sequence[str] = ()
    stores: Sequence[str] = ()


class PartialResults(Handle):
    """The name of a stage of partial results, with its loops: over the lanes where they are initialised (`init_lane`), accumulated
    (`lane`) and reduced to the result (`final_lane`), and over what is left of the reduction (`outer`)."""

    init_lane: str
    lane: str
    final_lane: str
    outer: str
