"""What primitives return: names, with the names of what else was made. A handle is a `str`, so it may stand wherever a name does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self


class LoopCopy(str):
    """The name of a loop that copies another one; `copies` names the copy of each loop and buffer inside of the original."""

    copies: Mapping[str, str]

    def __new__(cls, name: str, copies: Mapping[str, str]) -> Self:
        self = super().__new__(cls, name)
        self.copies = copies
        return self


class BufferCopy(str):
    """The name of a buffer that stands for another one, with the loops of the nest that fills it (`loads`) and of the nest that copies
    it back (`stores`), outermost first, as far as the step made such nests."""

    loads: Sequence[str]
    stores: Sequence[str]

    def __new__(cls, name: str, loads: Sequence[str] = (), stores: Sequence[str] = ()) -> Self:
        self = super().__new__(cls, name)
        self.loads, self.stores = loads, stores
        return self


class PartialResults(str):
    """The name of a stage of partial results, with its loops: over the lanes where they are initialised (`init_lane`), accumulated
    (`lane`) and reduced to the result (`final_lane`), and over what is left of the reduction (`outer`)."""

    init_lane: str
    lane: str
    final_lane: str
    outer: str

    def __new__(cls, name: str, init_lane: str, lane: str, final_lane: str, outer: str) -> Self:
        self = super().__new__(cls, name)
        self.init_lane, self.lane, self.final_lane, self.outer = init_lane, lane, final_lane, outer
        return self
