"""A model that is served: loaded, tried, with its queue."""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tcomp.errors import InputError, TcompError
from tcomp.generation import Generator
from tcomp.generation.folder import TOKENIZER
from tcomp.generation.slots import is_language_model
from tcomp.runtime import LoadedModel, Manifest, load, numpy_dtype
from tcomp.runtime.loaded_model import random_array
from tcomp.serve.batch_sizes import BatchSizes, measure
from tcomp.serve.batching import Arrays, Batcher
from tcomp.serve.metrics import Metrics
from tcomp.serve.options import ModelOptions
from tcomp.serve.refusals import bad_request
from tcomp.serve.text.queue import TextQueue
from tcomp.serve.tracing import trace_kernels
from tcomp.serve.wire import WireType

_log = logging.getLogger("tcomp.serve")
_TRIAL_SECONDS = 60.0  # that a run of a trial may take
_TRIAL_SIZE = 8  # of dims that are free, where the model allows it
_TRIAL_MEMORY, _TRIAL_ELEMENTS = 1 << 30, 1 << 24  # bytes of a run, and elements of its inputs, for which batches are measured
_SCALES = (8, 32, 128)  # of other free dims, for which sizes of batches are measured
_INSTANCES = 8  # of a model, unless options say more: each has memory of its own
_TRACE_EVERY = 60.0  # seconds between two traces of slow runs
_TRACED_KERNELS = 10  # of a slow run, the longest, are logged


class Loaded:
    """A model that was loaded and tried, in any thread, before it is served.

    model: LoadedModel, for runs that are alone; crowded: the same with fewer threads, for several runs at the same time
    instances: how many these are at most
    inputs, outputs: by name, as clients see them
    batched: whether rows of several requests are computed together; `not_batched` says why they are not
    sizes: how many
    generator: what writes text with a language model whose tokenizer lies beside it; None for other models
    """

    def __init__(self, path: Path, options: ModelOptions, trusted: Path | None) -> None:
        """Raises ArtifactError for a file that is damaged, not signed by the key, or cannot be served."""
        self.options = options
        writes = (path.parent / TOKENIZER).is_file()
        # Weights of language models are read, not mapped: see `Generator.load`.
        self.model: LoadedModel = load(path, options.threads, verify=True, max_memory=options.max_memory, mmap=not writes, trusted=trusted)
        self.generator = Generator.load(path.parent, self.model) if writes and is_language_model(self.model) else None
        self.instances = options.instances or min(self.model.threads, _INSTANCES)
        share = max(1, self.model.threads // self.instances)
        one = share == self.model.threads
        self.crowded = self.model if one else load(self.model.artifact, share, max_memory=options.max_memory)
        self.inputs = {spec.name: WireType(spec) for spec in self.model.inputs}
        self.outputs = {spec.name: WireType(spec) for spec in self.model.outputs}
        self.not_batched = self._why_not_batched()
        if self.not_batched:
            self._warm()
        elif not options.independent_rows:
            self.not_batched = self._trial()
        self.batched = not self.not_batched
        self.sizes = self._best_sizes() if self.batched and not options.preferred else BatchSizes(options.max_batch)

    @property
    def rows(self) -> int:
        """How many rows are computed together at most."""
        return self.sizes.largest if self.batched else 1

    @property
    def batching(self) -> dict[str, Any]:
        """What was found out about it, for logs and clients."""
        return {"batched": self.batched, "why_not": self.not_batched, "rows": self.rows, "instances": self.instances}

    def _why_not_batched(self) -> str:
        if self.options.max_batch == 1 or self.options.independent_rows is False:
            return "the configuration says so"
        if self.model.manifest.host is not None:
            return "the runtime computes steps of it, on strings or images"
        if self.generator is not None:
            return "texts grow together instead"
        return "" if batch_dim(self.model.manifest) else "inputs and outputs do not all begin with one free axis, the same for all"

    def _trial(self) -> str:
        """Why rows cannot be computed together, by running some."""
        dim = batch_dim(self.model.manifest)
        assert dim is not None
        try:
            return "" if rows_are_independent(self.model, dim) else "rows of a batch have an effect on each other"
        except TcompError as problem:
            return f"the trial failed: {problem.what}"

    def _best_sizes(self) -> BatchSizes:
        """Measured is the time of this thread's processor, which says the same where other models run at the same time."""
        model, batch = self.model, batch_dim(self.model.manifest)
        dims = {d.name: d for d in model.manifest.dims if not d.data_dependent and not d.what}
        if batch is None:  # that rows are independent, the configuration says
            return BatchSizes(self.options.max_batch)
        most = min(self.options.max_batch, dims[batch].max or self.options.max_batch)
        generator = np.random.default_rng(0)
        memory = _TRIAL_MEMORY if self.options.max_memory is None else min(_TRIAL_MEMORY, self.options.max_memory)
        alone = load(model.artifact, 1, max_memory=memory)

        def run(scale: int, rows: int) -> tuple[float, int]:
            sizes = {d.name: max(d.min, scale if d.max is None else min(scale, d.max)) for d in model.manifest.dims} | {batch: rows}
            if sum(map(math.prod, _trial_shapes(model, sizes).values())) > _TRIAL_ELEMENTS:
                raise InputError("the inputs of a trial are too large")
            inputs = _trial_inputs(model, sizes, generator)
            alone.run(inputs, timeout=_TRIAL_SECONDS)
            return min(_thread_seconds(alone, inputs) for _ in range(2)), sum(a.nbytes for a in inputs.values()) // rows

        return measure(most, dims[batch].min, (_TRIAL_SIZE,) if len(dims) == 1 else _SCALES, run)

    def _warm(self) -> None:
        """One run, so that the first request does not wait for pages and plans. Whether the model likes the inputs does not matter."""
        code = self.model.machine_code
        with suppress(InputError):
            code.run(_trial_inputs(code, {}, np.random.default_rng(0)), timeout=_TRIAL_SECONDS)


def _thread_seconds(model: LoadedModel, inputs: Arrays) -> float:
    start = time.thread_time()
    model.run(inputs, timeout=_TRIAL_SECONDS)
    return time.thread_time() - start


def batch_dim(manifest: Manifest) -> str | None:
    """The dim that is the first axis of all inputs and outputs, and no other; None where there is none."""
    firsts = {spec.shape[0] if spec.shape else None for spec in (*manifest.inputs, *manifest.outputs)}
    dim = firsts.pop() if len(firsts) == 1 else None
    known = {d.name for d in manifest.dims if not d.data_dependent and not d.what}
    others = [extent for spec in (*manifest.inputs, *manifest.outputs) for extent in spec.shape[1:]]
    if not isinstance(dim, str) or dim not in known or any(isinstance(e, str) and dim in e for e in others):
        return None
    return dim


def rows_are_independent(model: LoadedModel, dim: str) -> bool:
    """Whether two runs of random inputs have the same results as one run of both: of three rows, and of a fourth. What mixes rows (a mean
    over the batch, a softmax along it) shows. Raises TcompError where the model cannot be run so."""
    generator = np.random.default_rng(0)
    parts = [_trial_inputs(model, {dim: rows}, generator) for rows in (3, 1)]
    apart = [model.run(part, timeout=_TRIAL_SECONDS) for part in parts]
    joined = model.run({n: np.concatenate([p[n] for p in parts]) for n in parts[0]}, timeout=_TRIAL_SECONDS)
    return all(_alike(np.concatenate([part[name] for part in apart]), array) for name, array in joined.items())


def _alike(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether arrays differ by rounding at most: versions of kernels for other sizes may add in another order."""
    if one.dtype.kind in "iub":
        return bool(np.mean(one != other) < 0.01) if one.size else True
    a, b = one.astype(np.float64), other.astype(np.float64)
    scale = np.max(np.abs(a), initial=0.0, where=np.isfinite(a))
    return bool(np.allclose(a, b, rtol=1e-2, atol=1e-3 * scale, equal_nan=True))


def _trial_shapes(model: LoadedModel, sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    dims = {d.name: sizes.get(d.name, max(d.min, min(_TRIAL_SIZE, _TRIAL_SIZE if d.max is None else d.max))) for d in model.manifest.dims}
    return {spec.name: tuple(dims[e] if isinstance(e, str) else e for e in spec.shape) for spec in model.inputs}


def _trial_inputs(model: LoadedModel, sizes: dict[str, int], generator: np.random.Generator) -> Arrays:
    shapes = _trial_shapes(model, sizes)
    return {spec.name: random_array(generator, shapes[spec.name], numpy_dtype(spec.dtype)) for spec in model.inputs}


class ServedModel:
    """One version of a model that answers requests.

    name, version: as clients ask for it
    loaded: what was loaded; options: how it is served
    texts: the queue of texts that it writes; None for models that write none
    users: how many requests have it now; it is closed when it was replaced and there are none
    since: when it was loaded, by time.monotonic
    """

    def __init__(self, name: str, version: str, loaded: Loaded, metrics: Metrics, slow: float | None = None) -> None:
        """Starts the instances; in the event loop that serves. `slow` (seconds): longer runs are logged with their kernels."""
        self.name, self.version, self.loaded, self.options = name, version, loaded, loaded.options
        self.inputs, self.outputs = loaded.inputs, loaded.outputs
        self.metrics = metrics.of(name, version, loaded.instances)
        sizes, how = loaded.sizes if loaded.batched else BatchSizes(1), (loaded.model, loaded.crowded)
        self.batcher = Batcher(f"{name}-{version}", how, sizes, loaded.instances, loaded.options, self.metrics)
        self.texts = None if loaded.generator is None else TextQueue(f"{name}-{version}", loaded.generator, loaded.options, self.metrics)
        self.users, self.since = 0, time.monotonic()
        self._slow, self._traced = slow, -_TRACE_EVERY
        if slow is not None:
            self.batcher.on_slow = self._trace_slow

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self.batcher.waiting + (0 if self.texts is None else self.texts.waiting)

    async def close(self) -> None:
        """Answer what waits, and end all threads."""
        await self.batcher.close()
        if self.texts is not None:
            await self.texts.close()

    def ordered(self, inputs: Arrays) -> Arrays:
        """The inputs in the order of the model. Raises Refusal where they are not just those that it takes."""
        if inputs.keys() != self.inputs.keys():
            lacking, unknown = (", ".join(sorted(map(str, names))) for names in (self.inputs.keys() - inputs, inputs.keys() - self.inputs))
            why = "; ".join(f"{what} {names}" for what, names in (("missing", lacking), ("unknown", unknown)) if names)
            raise bad_request(f"the inputs do not match model {self.name!r}", why=why)
        return {name: inputs[name] for name in self.inputs}

    async def infer(self, inputs: Arrays, deadline: float | None = None) -> Arrays:
        """The outputs for these inputs: see `Batcher.infer`."""
        return await self.batcher.infer(self.ordered(inputs), deadline)

    def _trace_slow(self, inputs: Arrays, seconds: float) -> None:
        assert self._slow is not None
        now = time.monotonic()
        if seconds < self._slow or now < self._traced + _TRACE_EVERY:
            return
        self._traced = now
        try:
            kernels = self.loaded.model.profile(inputs, runs=1)
        except TcompError as problem:
            _log.warning("a slow run could not be profiled", extra={"model": self.name, "why": problem.what})
            return
        trace_kernels(kernels, seconds)
        longest = sorted(kernels, key=lambda kernel: -kernel[1])[:_TRACED_KERNELS]
        shown = {name: round(spent * 1e6) for name, spent in longest}
        fields = {"model": self.name, "version": self.version, "run_us": round(seconds * 1e6), "kernels_us": shown}
        _log.warning("slow run", extra=fields)
