"""What a benchmark is: a loop program, its sizes, and the arrays it starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tcomp.frontends.python import Program
from tcomp.ir.loops import Kernel

Arrays = dict[str, np.ndarray]
Sizes = Mapping[str, int]
SCALE = {"alpha": 1.5, "beta": 1.2}  # the factors of the BLAS-like kernels


@dataclass(frozen=True)
class Benchmark:
    """One kernel of the suite. `init` makes the arrays that are not all zero at the start, from the sizes, by name.

    `sizes` holds the published MINI, SMALL and LARGE data sets in the order of `names`; where a naive build takes more than some ten
    seconds at LARGE, `large` is smaller, and `published` says what it was. `results` makes of the arrays what does not depend on rounding.
    """

    name: str
    program: Program
    names: tuple[str, ...]
    mini: tuple[int, ...]
    small: tuple[int, ...]
    large: tuple[int, ...]
    init: Callable[..., Arrays]
    constants: Mapping[str, float] = field(default_factory=dict)
    published: tuple[int, ...] | None = None
    results: Callable[[Arrays], Arrays] = lambda arrays: arrays

    def sizes(self, dataset: str) -> dict[str, int]:
        """The sizes of `mini`, `small` or `large`."""
        return dict(zip(self.names, getattr(self, dataset), strict=True))

    def kernel(self, sizes: Sizes) -> Kernel:
        """The loop program for these sizes, unscheduled."""
        return self.program.kernel(**sizes, **self.constants)

    def arrays(self, sizes: Sizes) -> Arrays:
        """Fresh arrays for the parameters of the kernel, in their order."""
        given = self.init(**sizes)
        return {
            b.name: np.ascontiguousarray(given[b.name], b.dtype) if b.name in given else np.zeros(b.shape, b.dtype)
            for b in self.kernel(sizes).buffers
        }


def indices(*shape: int) -> tuple[np.ndarray, ...]:
    """The index arrays of a shape, as float64 integers: exact in the products that the initialisations need."""
    return tuple(np.indices(shape, np.float64, sparse=True))
