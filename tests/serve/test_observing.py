"""What a server tells of slow runs, of traces, and of how it batches."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import numpy as np
import pytest

from tcomp.serve import served, tracing
from tcomp.serve.logs import JsonFormatter
from tcomp.serve.metrics import Metrics
from tcomp.serve.options import ModelOptions
from tests.serve.servers import running
from tests.serve.test_http import X, binary


def test_a_slow_run_is_logged_with_its_kernels(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    body, headers = binary(X)
    with caplog.at_level(logging.WARNING, "tcomp.serve"), running(models, slow_ms=0.0) as server:
        for _ in range(3):
            assert server.ask("POST", "/v2/models/mlp/infer", body, headers)[0] == 200
        end = time.monotonic() + 20
        while not [r for r in caplog.records if r.message == "slow run"] and time.monotonic() < end:
            time.sleep(0.01)
    (record,) = [r for r in caplog.records if r.message == "slow run"]  # one a minute
    line = json.loads(JsonFormatter().format(record))
    assert line["model"] == "mlp" and line["level"] == "warning" and line["run_us"] > 0
    assert line["kernels_us"] and all(microseconds >= 0 for microseconds in line["kernels_us"].values())


def test_requests_are_spans(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
    tracing._api.cache_clear()
    try:
        with running(models, slow_ms=0.0) as server:
            body, headers = binary(X)
            parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            assert server.ask("POST", "/v2/models/mlp/infer", body, headers | {"traceparent": parent})[0] == 200
            end = time.monotonic() + 20
            while not any(span.name == "slow run" for span in exporter.get_finished_spans()) and time.monotonic() < end:
                time.sleep(0.01)
    finally:
        tracing._api.cache_clear()
    spans = exporter.get_finished_spans()
    (span,), (slow,) = ([span for span in spans if span.name == name] for name in ("infer", "slow run"))
    assert span.name == "infer" and span.attributes == {"model": "mlp", "version": "1"}
    assert f"{span.context.trace_id:032x}" == parent.split("-")[1] and f"{span.parent.span_id:016x}" == parent.split("-")[2]
    kernels = [each for each in spans if each not in (span, slow)]
    assert slow.parent.span_id == span.context.span_id and slow.attributes["run_us"] > 0
    assert kernels and all(kernel.parent.span_id == slow.context.span_id for kernel in kernels)


@pytest.mark.parametrize(
    ("seconds", "rows"),
    [({1: 10, 2: 15, 4: 24, 8: 80}, 4), ({1: 10, 2: 20, 4: 40, 8: 80, 16: 160, 32: 320}, 1), ({n: 10 for n in (1, 2, 4, 8, 16, 32)}, 32)],
)
def test_a_batch_is_as_large_as_pays(artifacts, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, int], rows: int) -> None:
    monkeypatch.setattr(served, "_thread_seconds", lambda model, inputs: seconds[len(inputs["x"])])
    assert served.Loaded(artifacts["mlp"], ModelOptions(), None).rows == rows
    assert served.Loaded(artifacts["mlp"], ModelOptions(preferred=(1, 16)), None).rows == 32
    assert not served.Loaded(artifacts["mixed"], ModelOptions(), None).batched


def test_the_history_is_that_of_seconds() -> None:
    metrics = Metrics().of("m", "1", 2)
    for latency in (0.1, 0.2, 0.3):
        metrics.finished(0.0, latency)
    metrics.ran(6, 0.5)
    metrics.sample(waiting=4)
    (point,) = metrics.history
    assert (point.requests, point.p50, point.p99, point.waiting, point.rows) == (3, 0.2, 0.2, 4, 6) and 0 < point.busy <= 1
    metrics.sample(0)
    assert metrics.history[1].requests == 0 and np.isclose(metrics.history[1].busy, 0)


def test_a_version_that_is_replaced_is_forgotten_but_its_series_go_on() -> None:
    """Else a server into which models are loaded all day long keeps the latencies of each."""
    metrics = Metrics()
    before, after = (metrics.of("net", "1", 1) for _ in range(2))
    for one in (before, after):
        one.ran(2, 0.5)
    before.end(series=False)
    assert metrics.models == {after} and b'tcomp_run_seconds_count{model="net",version="1"} 2.0' in metrics.text()
    after.end(series=True)
    assert not metrics.models and b"tcomp_run_seconds_count{" not in metrics.text()
