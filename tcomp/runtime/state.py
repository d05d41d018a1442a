"""State that a model continues from run to run in one place: a cache of keys and values, say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tcomp.errors import InputError
from tcomp.runtime.arrays import Array
from tcomp.runtime.frame import Plan, new_arrays
from tcomp.runtime.manifest import numpy_dtype
from tcomp.runtime.workspace import new_memory

if TYPE_CHECKING:
    from tcomp.runtime.module import Module

_LINE = 64  # bytes of a cache line, to which each array of state is aligned
GROWTH = 2  # times the rows that there is room for, when there is no more


class State:
    """The state of one sequence of runs of a model that was compiled with `state`.

    model: Module
    length: int, rows that the state holds
    capacity: int, rows that there is room for; more is made when it is needed

    One thread at a time uses it; a model may have any number of states.
    """

    def __init__(self, model: Module, capacity: int = 256, dims: Mapping[str, int] | None = None) -> None:
        """An empty state. `dims` has the sizes, by name, of other symbolic axes of it (a batch). Raises InputError for a model without
        state or with host steps, or where a size is missing."""
        pairs = model.manifest.state
        if not pairs:
            raise InputError("the model has no state", hint='compile it with state="auto"')
        if model.manifest.host is not None:
            raise InputError("a model with host steps cannot keep its state in place", hint="give it to `run`, and take it from there")
        if not 1 <= capacity <= 1 << 40:
            raise InputError(f"a state for {capacity} rows")
        self.model, self.length, self.capacity = model, 0, capacity
        inputs = {spec.name: spec for spec in model.inputs}
        specs = [inputs[pair.input] for pair in pairs]
        self._inputs = {spec.name: n for n, spec in enumerate(specs)}
        self._outputs = {[o.name for o in model.outputs].index(pair.output): n for n, pair in enumerate(pairs)}
        self._axes: list[int] = []
        wanted = list[tuple[Sequence[int], np.dtype[Any]]]()
        for spec in specs:
            axis = next((n for n, d in enumerate(spec.shape) if d != 1), 0)
            shape: list[Any] = [(dims or {}).get(d, d) if isinstance(d, str) else d for d in spec.shape]
            shape[axis] = capacity
            if unknown := [d for d in shape if isinstance(d, str)]:
                raise InputError(f"the size {unknown[0]} of the state is not known", hint=f"dims={{'{unknown[0]}': 1}}, say")
            self._axes.append(axis)
            wanted.append((shape, numpy_dtype(spec.dtype)))
        self._buffers = _arrays(wanted)  # where the next run writes
        self._views = [self._first(buffer, n, 0) for n, buffer in enumerate(self._buffers)]  # the rows that there are

    def run(self, inputs: Mapping[str, object], timeout: float | None = None) -> dict[str, Array]:
        """Run the model once more: `inputs` are those besides the state, and so are the outputs returned. Raises as `Module.run`; the state
        is then as it was."""
        given: dict[str, object] = {**inputs, **self.values()}
        if overlap := [name for name in inputs if name in self._inputs]:
            raise InputError(f"the input `{overlap[0]}` is state", hint="leave it out")
        values = self.model._ordered(given)
        outputs = self.model._execute([*values], timeout=timeout, ready=self._ready)
        self._views = [outputs[index] for index in self._outputs]
        self.length = self._views[0].shape[self._axes[0]]
        return {spec.name: a for n, (spec, a) in enumerate(zip(self.model.outputs, outputs, strict=True)) if n not in self._outputs}

    def truncate(self, length: int) -> None:
        """Forget what is behind the first rows. Raises InputError for more rows than there are."""
        if not 0 <= length <= self.length:
            raise InputError(f"{length} rows of a state that holds {self.length}")
        self.length = length
        self._views = [self._first(view, n, length) for n, view in enumerate(self._views)]

    def extend(self, length: int) -> dict[str, Array]:
        """Hold so many rows, the new ones being zeros, and return `values`, for the caller to write to. Raises InputError for fewer rows
        than there are."""
        if not self.length <= length <= 1 << 40:
            raise InputError(f"{length} rows in place of {self.length}")
        old = self._views
        self._reserve(length)
        self._views = [self._first(buffer, n, length) for n, buffer in enumerate(self._buffers)]
        for n, (view, before) in enumerate(zip(self._views, old, strict=True)):
            kept = self._first(view, n, self.length)
            if not np.shares_memory(kept, before):
                kept[...] = before
            view[(slice(None),) * self._axes[n] + (slice(self.length, length),)] = 0
        self.length = length
        return self.values()

    def values(self) -> dict[str, Array]:
        """What the state holds, by the names of inputs: views that the next run may change."""
        return {name: self._views[n] for name, n in self._inputs.items()}

    def _first(self, array: Array, number: int, length: int) -> Array:
        """The first rows of an array of state."""
        return array[(slice(None),) * self._axes[number] + (slice(0, length),)]

    def _reserve(self, rows: int) -> None:
        """Have room for so many rows: in other buffers, if they do not fit, which hold nothing yet."""
        if rows > self.capacity:
            capacity, old = max(GROWTH * self.capacity, rows), list(zip(self._buffers, self._axes, strict=True))
            self._buffers = _arrays([([capacity if d == axis else n for d, n in enumerate(b.shape)], b.dtype) for b, axis in old])
            self.capacity = capacity

    def _ready(self, plan: Plan) -> list[Array]:
        """The outputs of a run: what is not state is new, and state lies in its buffers."""
        self._reserve(max(plan.outputs[index][0][self._axes[n]] for index, n in self._outputs.items()))  # the run copies the old rows
        found, fresh = list[Array](), iter(new_arrays(wanted for index, wanted in enumerate(plan.outputs) if index not in self._outputs))
        for index, (shape, _, _) in enumerate(plan.outputs):
            number = self._outputs.get(index)
            found.append(next(fresh) if number is None else self._first(self._buffers[number], number, shape[self._axes[number]]))
        return found


def _arrays(wanted: Sequence[tuple[Sequence[int], np.dtype[Any]]]) -> list[Array]:
    """Arrays of these shapes and types in one memory, so that together they are in huge pages: attention walks all of a cache, whose
    addresses no table of small pages in a core holds. Raises InputError if there is no memory."""
    sizes = [-(-prod(shape) * dtype.itemsize // _LINE) * _LINE for shape, dtype in wanted]
    memory, _, offset = new_memory(sum(sizes), "state")
    found = list[Array]()
    for (shape, dtype), size in zip(wanted, sizes, strict=True):
        found.append(np.ndarray(shape, dtype, memory, offset))
        offset += size
    return found
