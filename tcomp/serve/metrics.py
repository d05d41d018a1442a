"""What a server measures: counters and histograms that Prometheus collects from /metrics, and a short history for the status page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HISTORY = 300  # seconds of which the status page has points
_RECENT = 1 << 12  # latencies of a second that are kept for its percentiles

_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Point:
    """One second of a model: requests answered, their latencies (seconds) at two percentiles, requests waiting at its end, rows of a batch
    on average, and the share of its instances that were busy."""

    requests: int
    p50: float
    p99: float
    waiting: int
    rows: float
    busy: float


class Metrics:
    """All figures of a server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        labels = ("model", "version")

        def histogram(name: str, what: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"tcomp_{name}", what, labels, buckets=buckets, registry=registry)

        self.requests = Counter("tcomp_requests", "Requests for inference, by status", (*labels, "protocol", "status"), registry=registry)
        self.latency = histogram("request_seconds", "From a request's arrival at the queue to its result")
        self.queued = histogram("queue_seconds", "How long requests waited")
        self.ran = histogram("run_seconds", "Runs of the model, of one batch each")
        self.rows = histogram("batch_rows", "Rows of a batch", _ROWS)
        self.waiting = Gauge("tcomp_queue_requests", "Requests that wait", labels, registry=registry)
        self.instances = Gauge("tcomp_instances", "Runs that there may be at the same time", labels, registry=registry)
        self.pending_bytes = Gauge("tcomp_pending_bytes", "Of requests being received, waiting and running", registry=registry)
        self.models = set[ModelMetrics]()  # that are served
        self.loads = Counter("tcomp_loads", "Loads of models, by their result", ("model", "result"), registry=registry)

    def of(self, model: str, version: str, instances: int) -> ModelMetrics:
        """The figures of one version of a model."""
        found = ModelMetrics(self, model, version, instances)
        self.models.add(found)
        return found

    def text(self) -> bytes:
        """In the text format of Prometheus."""
        for model in list(self.models):
            model.pass_on()
        return generate_latest(self.registry)


class ModelMetrics:
    """The figures of one version of a model, and its history by the second."""

    def __init__(self, metrics: Metrics, model: str, version: str, instances: int) -> None:
        self._metrics, self._labels, self._instances = metrics, (model, version), instances
        histograms = (metrics.latency, metrics.queued, metrics.ran, metrics.rows)
        self._latency, self._queued, self._ran, self._rows = (h.labels(model, version).observe for h in histograms)
        # For Prometheus's counters and histograms, which take 1 to 2 us each: they are told once a second, and before they are read.
        self._untold: deque[tuple[Callable[[float], None], float]] = deque()
        self._waiting = metrics.waiting.labels(model, version)
        metrics.instances.labels(model, version).set(instances)
        self._requests: dict[tuple[str, str], Counter] = {}
        self.history: deque[Point] = deque(maxlen=HISTORY)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._computed = self._batches = self._total_rows = 0  # requests, their batches, and the rows of these
        self._busy_seconds = self._queue_seconds = self._compute_seconds = 0.0
        self._answers = {"success": (0, 0.0), "fail": (0, 0.0)}  # how many, and seconds of all together
        self._sampled, self._since = (0, 0, 0, 0.0), time.monotonic()

    def answered(self, protocol: str, status: int, seconds: float) -> None:
        """A request was answered so long after it came."""
        key = protocol, str(status)
        if key not in self._requests:
            self._requests[key] = self._metrics.requests.labels(*self._labels, *key)
        self._untold.append((self._requests[key].inc, 1))
        kind = "success" if status < 400 else "fail"
        count, total = self._answers[kind]
        self._answers[kind] = count + 1, total + seconds

    def finished(self, queued: float, total: float) -> None:
        """A request has its result: how long (seconds) it waited, and took in all."""
        self._untold.append((self._queued, queued))
        self._untold.append((self._latency, total))
        self._recent.append(total)
        self._computed += 1
        self._queue_seconds += queued
        self._compute_seconds += total - queued

    def ran(self, rows: int, seconds: float) -> None:
        """A batch was computed."""
        self._untold.append((self._rows, rows))
        self._untold.append((self._ran, seconds))
        self._batches += 1
        self._total_rows += rows
        self._busy_seconds += seconds

    def pass_on(self) -> None:
        """Tell Prometheus's counters and histograms what they were not told yet. May be called in several threads."""
        with suppress(IndexError):  # nothing is left
            while True:
                told, value = self._untold.popleft()
                told(value)

    def sample(self, waiting: int) -> None:
        """The next second of the history begins."""
        self.pass_on()
        now = time.monotonic()
        latencies = sorted(self._recent)
        p50, p99 = (latencies[int(share * (len(latencies) - 1))] if latencies else 0.0 for share in (0.5, 0.99))
        totals = self._computed, self._batches, self._total_rows, self._busy_seconds
        computed, batches, rows, busy_seconds = (new - old for new, old in zip(totals, self._sampled, strict=True))
        busy = busy_seconds / max(1e-9, now - self._since) / self._instances
        self.history.append(Point(int(computed), p50, p99, waiting, rows / max(1, batches), min(1.0, busy)))
        self._recent.clear()
        self._sampled, self._since = totals, now
        self._waiting.set(waiting)

    def statistics(self) -> dict[str, Any]:
        """All counts and times (nanoseconds) since the model was loaded, by the names of Triton's statistics extension. A request computes
        from the moment when an instance takes it; reading and writing tensors is not told apart."""
        computed = {"queue": (self._computed, self._queue_seconds), "compute_infer": (self._computed, self._compute_seconds)}
        durations = self._answers | computed | dict.fromkeys(("compute_input", "compute_output"), (self._computed, 0.0))
        told = {name: {"count": count, "ns": round(seconds * 1e9)} for name, (count, seconds) in durations.items()}
        return {"inference_count": self._total_rows, "execution_count": self._batches, "inference_stats": told}

    def end(self, series: bool) -> None:
        """Nothing more will be measured. The series of the version end as well, but for the counters of requests, unless others go on with
        them."""
        self._metrics.models.discard(self)
        self.pass_on()
        for metric in ("latency", "queued", "ran", "rows", "waiting", "instances") if series else ():
            getattr(self._metrics, metric).remove(*self._labels)
