"""Spans of requests for OpenTelemetry, where its API is installed and a program has set it up; else nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from tcomp.serve.served import ServedModel


@cache
def _api() -> Any:
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        return None
    # The API alone hands out spans that record nothing: a provider of the SDK is what makes traces.
    recording = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider)
    return (trace.get_tracer("tcomp.serve"), propagate) if recording else None


def span(name: str, headers: Mapping[str, str], model: ServedModel) -> AbstractContextManager[object]:
    """A span around one request; `headers` may carry that of the client (`traceparent`)."""
    if (api := _api()) is None:
        return nullcontext()
    tracer, propagate = api
    attributes = {"model": model.name, "version": model.version}
    entered: AbstractContextManager[object] = tracer.start_as_current_span(name, propagate.extract(dict(headers)), attributes=attributes)
    return entered
