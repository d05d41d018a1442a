"""A loaded model with host steps: those before, the machine code, those after."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tcomp.errors import ArtifactError, InputError, StoppedError
from tcomp.runtime.arrays import admit
from tcomp.runtime.bound import Call
from tcomp.runtime.host_steps.prepared import PreparedStep
from tcomp.runtime.host_steps.steps import ANY_SHAPE, STRING, Array, strings
from tcomp.runtime.loaded_model import KernelFacts, LoadedModel
from tcomp.runtime.manifest import HostSteps, TensorSpec, numpy_dtype


class HostedModel(LoadedModel):
    """A compiled model of which the runtime performs some steps itself, in NumPy: before the machine code, and after.

    Strings are NumPy's arrays of `object` whose elements are `str`; arrays of NumPy's own strings and lists of `str` are taken as well. A
    `timeout` is looked at between steps. `profile` has a line for each step.
    """

    def __init__(self, inner: LoadedModel, host: HostSteps) -> None:
        """Prefer `Module.load`. Raises ArtifactError for steps that are malformed."""
        super().__init__(inner.artifact, inner.max_memory)
        self.inner, self.threads = inner, inner.threads
        self.inputs, self.outputs = host.inputs, host.outputs
        self._names, self._output_names = ([spec.name for spec in specs] for specs in (self.inputs, self.outputs))
        self._admission = [(spec, _dtype(spec)) for spec in self.inputs]
        self._before, self._after = (
            [PreparedStep(step, ("manifest", "host", kind, n)) for n, step in enumerate(steps)]
            for kind, steps in (("before", host.before), ("after", host.after))
        )
        self._check_names()
        self._constants: dict[str, Array] = {}  # of all runs
        for constant in (p for stage in (self._before, self._after) for p in stage if p.step.operator == "Constant"):
            constant.perform(self._constants)
        self._before, self._after = ([p for p in s if p.step.operator != "Constant"] for s in (self._before, self._after))

    @property
    def machine_code(self) -> LoadedModel:
        """The model without host steps."""
        return self.inner

    def _check_names(self) -> None:
        known = {*self._names}
        for stage, outputs in ((self._before, self.inner.outputs), (self._after, ())):
            for prepared in stage:
                if missing := [name for name in prepared.step.inputs if name not in known]:
                    raise ArtifactError(f"a host step reads {missing[0]!r}, which is not there", where=prepared.label)
                made = prepared.step.outputs
                if twice := [name for n, name in enumerate(made) if name in known or name in made[:n]]:
                    raise ArtifactError(f"two values of the artifact's host steps are called {twice[0]!r}", where=prepared.label)
                known.update(made)
            if stage is self._before and (missing := [spec.name for spec in self.inner.inputs if spec.name not in known]):
                raise ArtifactError(f"no host step makes the input {missing[0]!r} of the machine code")
            known.update(spec.name for spec in outputs)
        if missing := [name for name in self._output_names if name not in known]:
            raise ArtifactError(f"no host step makes the output {missing[0]!r}")

    def _execute(self, values: list[Any], out: Mapping[str, object] | None = None, timeout: float | None = None) -> list[Any]:
        start = time.perf_counter()
        found = self._computed(values, out, timeout)
        outputs = [found[name] for name in self._output_names]
        inputs = [found[name] for name in self._names]
        self._tell(start, time.perf_counter() - start, inputs, outputs, 0)
        return outputs

    def _computed(
        self,
        values: Sequence[Any],
        out: Mapping[str, object] | None = None,
        timeout: float | None = None,
        times: list[tuple[str, float]] | None = None,
    ) -> dict[str, Array]:
        """All values of a run; the times of its steps are appended to `times`."""
        admitted = [_admitted(v, *admission) for v, admission in zip(values, self._admission, strict=True)]
        _check_shapes(self.inputs, admitted)
        given = dict(out or {})
        mine = {spec.name for spec in self.inner.outputs}
        if hosted := [name for name in given if name not in mine]:
            what = f"`out` has an array for {hosted[0]!r}, which is not an output of the machine code"
            raise InputError(what, hint="leave it out: results of host steps are new arrays")
        known = self._constants | dict(zip(self._names, admitted, strict=True))
        end = None if timeout is None else time.perf_counter() + timeout
        self._perform(self._before, known, end, times)
        arrays = [known[spec.name] for spec in self.inner.inputs]
        left = None if end is None else max(end - time.perf_counter(), 1e-6)
        results = self.inner._execute(arrays, given or None, left)
        known.update((spec.name, array) for spec, array in zip(self.inner.outputs, results, strict=True))
        self._perform(self._after, known, end, times)
        return known

    def _perform(
        self, steps: Sequence[PreparedStep], known: dict[str, Array], end: float | None, times: list[tuple[str, float]] | None
    ) -> None:
        for prepared in steps:
            start = time.perf_counter()
            if end is not None and start > end:
                raise StoppedError("the run was stopped", why="it took longer than its timeout", where=prepared.label)
            prepared.perform(known)
            if times is not None:
                times.append((prepared.label, time.perf_counter() - start))

    def cancel(self) -> None:
        """Stop all runs that are under way in other threads; what host steps compute comes to its end before."""
        self.inner.cancel()

    def _prepared(self, values: list[Any], out: Mapping[str, object] | None) -> tuple[list[Array], list[Array], Call]:
        arrays = [_admitted(v, *admission, copy=False) for v, admission in zip(values, self._admission, strict=True)]
        if out:
            raise InputError("a model with host steps cannot be bound to given outputs", hint="use run")
        return arrays, self._execute([*arrays]), lambda: self._execute([*arrays])

    def _profile(self, inputs: Mapping[str, object], runs: int) -> list[tuple[str, float]]:
        values = self._ordered(inputs)
        totals: dict[str, float] = {}
        for _ in range(runs):
            times: list[tuple[str, float]] = []
            known = self._computed(values, times=times)
            for name, seconds in times:
                totals[name] = totals.get(name, 0.0) + seconds / runs
        split = len({p.label for p in self._before})
        kernels = self.inner._profile({spec.name: known[spec.name] for spec in self.inner.inputs}, runs)
        return [*[*totals.items()][:split], *kernels, *[*totals.items()][split:]]

    def facts(self, inputs: Mapping[str, object]) -> list[KernelFacts]:
        """See `LoadedModel.facts`; of the work of host steps nothing is known."""
        known = self._computed(self._ordered(inputs))
        before, after = (
            [KernelFacts(label, None, "", ()) for label in dict.fromkeys(p.label for p in s)] for s in (self._before, self._after)
        )
        return [*before, *self.inner.facts({spec.name: known[spec.name] for spec in self.inner.inputs}), *after]


def _dtype(spec: TensorSpec) -> np.dtype[Any]:
    return np.dtype(object) if spec.dtype == STRING else numpy_dtype(spec.dtype)


def _admitted(value: object, spec: TensorSpec, dtype: np.dtype[Any], copy: bool = True) -> Array:
    """As `arrays.admit`, also strings."""
    if spec.dtype != STRING:
        return admit(value, spec, dtype, copy)
    if isinstance(value, str):
        return strings([value], ())
    try:
        array = np.asarray(value, object) if isinstance(value, list | tuple) else np.asarray(value)
    except ValueError as problem:
        raise InputError(f"input {spec.name!r} is not a rectangular list of strings", why=str(problem)) from None
    if array.dtype.kind in "UT":
        array = array.astype(object)
    if array.dtype != object or not all(isinstance(element, str) for element in array.flat):
        found = array.dtype if array.dtype != object else next(type(e).__name__ for e in array.flat if not isinstance(e, str))
        raise InputError(f"input {spec.name!r} is not an array of strings", why=f"expected str, got {found}")
    return strings(map(str, array.flat), array.shape)


def _check_shapes(specs: Sequence[TensorSpec], arrays: Sequence[Array]) -> None:
    """Raises InputError where an array has not the shape of its input, or a dim has two sizes."""
    sizes: dict[str, tuple[int, str]] = {}
    for spec, array in zip(specs, arrays, strict=True):
        expected = f"({', '.join(map(str, spec.shape))})"
        what = f"input {spec.name!r} has the wrong shape: expected {expected}, got {array.shape}"
        if spec.shape == (ANY_SHAPE,):
            continue
        if len(spec.shape) != array.ndim:
            raise InputError(what, why=f"it has {array.ndim} axes instead of {len(spec.shape)}")
        for axis, (extent, size) in enumerate(zip(spec.shape, array.shape, strict=True)):
            if isinstance(extent, int) and extent != size:
                raise InputError(what, why=f"axis {axis} has {size} elements instead of {extent}")
            if isinstance(extent, str) and sizes.setdefault(extent, (size, spec.name))[0] != size:
                raise InputError(what, why=f"{extent} is {size} here, but {sizes[extent][0]} in input {sizes[extent][1]!r}")
