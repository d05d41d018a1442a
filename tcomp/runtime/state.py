"""State that a model continues from run to run: in one place what grows, as a cache of keys and values does, and in two places, one of
which each run reads while it writes the other, what is replaced."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
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
    """The state of one sequence of runs of a model that was compiled with `state`: arrays that grow, and arrays that each run replaces.

    model: Module
    length: int, rows that the state holds: of the first array that grows, and of those that grow by the same size; 0 where none grows
    capacity: int, rows that these have room for; more is made when it is needed
    rewinds: bool, whether it can forget the last rows alone: nothing is replaced

    One thread at a time uses it; a model may have any number of states.
    """

    def __init__(self, model: Module, capacity: int = 256, dims: Mapping[str, int] | None = None) -> None:
        """An empty state; what is replaced is zeros. `dims` has the sizes, by name, of other symbolic axes of it (a batch). Raises
        InputError for a model without state or with host steps, or where a size is missing."""
        grown, pairs = model.manifest.state, (*model.manifest.state, *model.manifest.replaced)
        if not pairs:
            raise InputError("the model has no state", hint='compile it with state="auto"')
        if model.manifest.host is not None:
            raise InputError("a model with host steps cannot keep its state in place", hint="give it to `run`, and take it from there")
        if not 1 <= capacity <= 1 << 40:
            raise InputError(f"a state for {capacity} rows")
        self.model, self.rewinds = model, len(grown) == len(pairs)
        inputs = {spec.name: spec for spec in model.inputs}
        specs = [inputs[pair.input] for pair in pairs]
        self._inputs = {spec.name: n for n, spec in enumerate(specs)}
        self._outputs = {[o.name for o in model.outputs].index(pair.output): n for n, pair in enumerate(pairs)}
        self._axes = [next((n for n, d in enumerate(spec.shape) if d != 1), 0) for spec in specs[: len(grown)]]
        self._sizes = [str(spec.shape[axis]) for spec, axis in zip(specs, self._axes, strict=False)]  # by which arrays grow
        wanted = list[tuple[Sequence[int], np.dtype[Any]]]()
        for n, spec in enumerate(specs):
            shape: list[Any] = [(dims or {}).get(d, d) if isinstance(d, str) else d for d in spec.shape]
            if n < len(grown):
                shape[self._axes[n]] = capacity
            if unknown := [d for d in shape if isinstance(d, str)]:
                raise InputError(f"the size {unknown[0]} of the state is not known", hint=f"dims={{'{unknown[0]}': 1}}, say")
            wanted.append((shape, numpy_dtype(spec.dtype)))
        self._buffers = _arrays(wanted)  # where the next run writes
        # The rows that there are, and what was written last.
        self._views = [self._first(buffer, n, 0) for n, buffer in enumerate(self._buffers[: len(grown)])] + _arrays(wanted[len(grown) :])

    @property
    def length(self) -> int:
        """See the class."""
        return int(self._views[0].shape[self._axes[0]]) if self._axes else 0

    @property
    def capacity(self) -> int:
        """See the class."""
        return int(self._buffers[0].shape[self._axes[0]]) if self._axes else 0

    def run(self, inputs: Mapping[str, object], timeout: float | None = None) -> dict[str, Array]:
        """Run the model once more: `inputs` are those besides the state, and so are the outputs returned. Raises as `Module.run`; the state
        is then as it was."""
        given: dict[str, object] = {**inputs, **self.values()}
        if overlap := [name for name in inputs if name in self._inputs]:
            raise InputError(f"the input `{overlap[0]}` is state", hint="leave it out")
        values = self.model._ordered(given)
        outputs = self.model._execute([*values], timeout=timeout, ready=self._ready)
        for index, n in self._outputs.items():
            if n >= len(self._axes):
                self._buffers[n] = self._views[n]
            self._views[n] = outputs[index]
        return {spec.name: a for n, (spec, a) in enumerate(zip(self.model.outputs, outputs, strict=True)) if n not in self._outputs}

    def truncate(self, length: int) -> None:
        """Forget what is behind the first rows; with 0 rows everything, also what is replaced and what grows by other sizes. Raises
        InputError for more rows than there are, or where what is replaced would have to be as it was."""
        if not 0 <= length <= self.length:
            raise InputError(f"{length} rows of a state that holds {self.length}")
        if 0 < length < self.length and not self.rewinds:
            raise InputError("the state cannot go back by some rows", why="each run replaces a part of it", hint="truncate(0)")
        for n in range(len(self._views)):
            if n >= len(self._axes):
                if not length:
                    self._views[n][...] = 0
            elif not length or self._sizes[n] == self._sizes[0]:
                self._views[n] = self._first(self._views[n], n, length)

    def extend(self, length: int) -> dict[str, Array]:
        """Hold so many rows, the new ones being zeros, and return `values`, for the caller to write to. Raises InputError for fewer rows
        than there are."""
        held = self.length
        if not held <= length <= 1 << 40:
            raise InputError(f"{length} rows in place of {held}")
        self._reserve({size: length for size in self._sizes[:1]})
        for n in self._growing(self._sizes[:1]):
            old, new = self._views[n], self._first(self._buffers[n], n, length)
            if not np.shares_memory(kept := self._first(new, n, held), old):
                kept[...] = old
            new[(slice(None),) * self._axes[n] + (slice(held, length),)] = 0
            self._views[n] = new
        return self.values()

    def values(self) -> dict[str, Array]:
        """What the state holds, by the names of inputs: views that the next run may change."""
        return {name: self._views[n] for name, n in self._inputs.items()}

    def _growing(self, sizes: Container[str]) -> list[int]:
        """The numbers of the arrays that grow by these."""
        return [n for n, size in enumerate(self._sizes) if size in sizes]

    def _first(self, array: Array, number: int, length: int) -> Array:
        """The first rows of an array of state."""
        return array[(slice(None),) * self._axes[number] + (slice(0, length),)]

    def _reserve(self, rows: Mapping[str, int]) -> None:
        """Have room for so many rows by each size: in other buffers, if they do not fit, which hold nothing yet."""
        for size, count in rows.items():
            numbers = self._growing((size,))
            held = [(self._buffers[n], self._axes[n]) for n in numbers]
            room = min(buffer.shape[axis] for buffer, axis in held)
            if count > room:
                shapes = [(*b.shape[:axis], max(GROWTH * room, count), *b.shape[axis + 1 :]) for b, axis in held]
                more = _arrays([(shape, b.dtype) for shape, (b, _) in zip(shapes, held, strict=True)])
                for n, buffer in zip(numbers, more, strict=True):
                    self._buffers[n] = buffer

    def _ready(self, plan: Plan) -> list[Array]:
        """The outputs of a run: what is not state is new, and state lies in its buffers."""
        rows = dict[str, int]()
        for index, n in self._outputs.items():
            if n < len(self._axes):
                rows[self._sizes[n]] = max(rows.get(self._sizes[n], 0), plan.outputs[index][0][self._axes[n]])
        self._reserve(rows)  # the run copies the old rows
        found, fresh = list[Array](), iter(new_arrays(wanted for index, wanted in enumerate(plan.outputs) if index not in self._outputs))
        for index, (shape, _, _) in enumerate(plan.outputs):
            n = self._outputs.get(index, -1)
            if n < 0:
                found.append(next(fresh))
            else:
                found.append(self._buffers[n] if n >= len(self._axes) else self._first(self._buffers[n], n, shape[self._axes[n]]))
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
