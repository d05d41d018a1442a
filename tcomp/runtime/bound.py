"""A model bound to arrays: runs that check nothing and allocate nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Call: TypeAlias = Callable[[], list[npt.NDArray[Any]] | None]


class Bound:
    """A model bound to inputs and outputs by `LoadedModel.bind`.

    inputs: dict, name -> the array that `run` reads
    outputs: dict, name -> the array that `run` writes; in a model with data-dependent extents, the valid parts of the last run's results

    It keeps its arrays alive, and has a workspace of its own. Change what the arrays hold between runs, not their shapes. Several of them
    may run at the same time, in any threads; one of them in one thread at a time.
    """

    __slots__ = ("_call", "inputs", "outputs")

    def __init__(self, inputs: dict[str, npt.NDArray[Any]], outputs: dict[str, npt.NDArray[Any]], call: Call) -> None:
        """Prefer `LoadedModel.bind`. `call` returns the outputs, in order, where they are other views each time."""
        self.inputs, self.outputs, self._call = inputs, outputs, call

    def run(self) -> dict[str, np.ndarray[Any, Any]]:
        """Compute `outputs`, and return them. Raises InputError if the model itself reports an error."""
        if (found := self._call()) is not None:
            self.outputs = dict(zip(self.outputs, found, strict=True))
        return self.outputs
