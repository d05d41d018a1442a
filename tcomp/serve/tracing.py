"""Spans of requests, and of the kernels of slow ones, for OpenTelemetry, where its API is installed and a program has set it up; else
nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any


@cache
def _api() -> Any:
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        return None
    # The API alone hands out spans that record nothing: a provider of the SDK is what makes traces.
    recording = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider)
    return (trace.get_tracer("tcomp.serve"), propagate) if recording else None


def span(headers: Mapping[str, str], model: str, version: str) -> AbstractContextManager[object]:
    """A span around one request for a model; `headers` may carry that of the client (`traceparent`)."""
    if (api := _api()) is None:
        return nullcontext()
    tracer, propagate = api
    attributes = {"model": model, "version": version}
    entered: AbstractContextManager[object] = tracer.start_as_current_span("infer", propagate.extract(dict(headers)), attributes=attributes)
    return entered


def trace_kernels(kernels: Iterable[tuple[str, float]], run_seconds: float) -> None:
    """Spans of a slow run's kernels, (name, seconds) in their order, below one that says how long it took, within the span of this context.
    Times of kernels are those of a second run, and the spans begin now."""
    if (api := _api()) is None:
        return
    tracer, _ = api
    begin = time.time_ns()
    with tracer.start_as_current_span("slow run", attributes={"run_us": round(run_seconds * 1e6)}):
        for name, seconds in kernels:
            kernel = tracer.start_span(name, start_time=begin)
            begin += round(seconds * 1e9)
            kernel.end(begin)
