"""How many rows of a model are computed together: as many as make a row take no less time, measured when the model is loaded.

Small batches read weights for few rows, large ones leave the caches. Where other extents are free as well (the length of a text, the
size of a picture), it is how much a row has that decides: of MiniLM batches of 64 to 256 tokens are best, however many rows these are, and
32 rows of 128 take 15 % longer for each. So batches are measured for several of these sizes, and a request takes what was best for its
like.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from tcomp.errors import TcompError

_SECONDS = 3.0  # after which no further batch is tried
_WORSE, _ALIKE = 1.15, 1.03  # times of a row, in those of the best, that end the search, and that are as good


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Rows of a batch, for requests of any size.

    most: int, where nothing was measured
    measured: tuple of (bytes of a row's inputs, rows), for which sizes of rows which batch was best
    """

    most: int
    measured: tuple[tuple[int, int], ...] = ()

    def rows(self, row_bytes: int) -> int:
        """How many rows whose inputs have so many bytes are computed together, at most."""
        if not self.measured:
            return self.most
        return min(self.measured, key=lambda known: abs(math.log(max(1, known[0]) / max(1, row_bytes))))[1]

    @property
    def largest(self) -> int:
        """The most rows of any request."""
        return max((rows for _, rows in self.measured), default=self.most)


def measure(most: int, least: int, scales: tuple[int, ...], run: Callable[[int, int], tuple[float, int]]) -> BatchSizes:
    """The sizes of batches of `least` to `most` rows for which a row takes the least time, or nearly. `run(scale, rows)` runs the model on
    rows whose other extents have this scale: the seconds it took, and the bytes of a row. It may raise TcompError: such sizes are left
    out."""
    measured = []
    sizes = [1 << n for n in range(most.bit_length()) if 1 << n >= max(1, least)]
    begin = time.monotonic()
    for number, scale in enumerate(scales, 1):
        found, row_bytes = dict[int, float](), 0
        for rows in sizes:
            try:
                seconds, row_bytes = run(scale, rows)
            except TcompError:
                break
            found[rows] = seconds / rows
            if time.monotonic() > begin + _SECONDS * number / len(scales) or found[rows] > _WORSE * min(found.values()):
                break
        if found:
            chosen = next(rows for rows, seconds in found.items() if seconds <= _ALIKE * min(found.values()))
            measured.append((row_bytes, most if chosen == sizes[-1] else chosen))
    return BatchSizes(most, tuple(measured))
