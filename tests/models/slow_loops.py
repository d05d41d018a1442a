"""Folds that a default schedule left to be done one element at a time, in the listing of a compiled model."""

from __future__ import annotations

import re
from math import prod

from tcomp.ir.loops import UNROLLED, VECTORIZED, Accumulate, Call, For, Stmt, children
from tcomp.ir.text.parser import parse_kernel

FEW = 1 << 17  # elements that may be folded one by one


def slow_folds(listing: str) -> list[str]:
    """The names of kernels of which some fold of more elements has neither lanes nor instructions; `listing` is that of the stage "loops"."""
    kernels = [parse_kernel(text) for text in re.split(r"(?m)^;.*\n", listing) if text.strip()]
    return [k.name for k in kernels if _slow(k.body, ())]


def _slow(s: Stmt, around: tuple[For, ...]) -> bool:
    if isinstance(s, Call):
        return False
    if isinstance(s, Accumulate):
        count = prod(x.extent if isinstance(x.extent, int) else 1 for x in around)
        return count > FEW and not any(x.kind in (VECTORIZED, UNROLLED) for x in around)
    return any(_slow(c, (*around, s) if isinstance(s, For) else around) for c in children(s))
