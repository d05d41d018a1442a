"""The queue of a model: what runs together, what is refused, what is dropped."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

import numpy as np
import pytest

from tcomp.errors import InputError, StoppedError
from tcomp.serve.batch_sizes import BatchSizes, measure
from tcomp.serve.batching import QUICK, Batcher
from tcomp.serve.metrics import Metrics
from tcomp.serve.options import ModelOptions
from tcomp.serve.refusals import Refusal


class Doubling:
    """y = 2 x, for as long as the gate is closed not at all. A row that begins with a negative number is refused."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.batches: list[list[float]] = []
        self.timeouts: list[float | None] = []
        self.gate, self.seconds = threading.Event(), seconds
        self.gate.set()

    def run(self, inputs: Any, out: Any = None, timeout: float | None = None) -> dict[str, np.ndarray]:
        x = inputs["x"]
        self.batches.append(x[:, 0].tolist())
        self.timeouts.append(timeout)
        if not self.gate.wait(timeout):
            raise StoppedError("the run was stopped")
        time.sleep(self.seconds)
        if np.any(x[:, 0] < 0):
            raise InputError("an index is out of range")
        return {"y": 2 * x}


def row(*first: float, width: int = 3) -> dict[str, np.ndarray]:
    return {"x": np.array([[value] * width for value in first], np.float32)}


def with_batcher(
    work: Callable[[Batcher, Doubling], Coroutine[Any, Any, None]],
    model: Doubling,
    crowded: Doubling | None = None,
    sizes: BatchSizes | None = None,
    **options: Any,
) -> None:
    async def main() -> None:
        settings = ModelOptions(**{"instances": 1, **options})
        batcher = Batcher(
            "m", (model, crowded or model), sizes or BatchSizes(settings.max_batch), settings.instances, settings, Metrics().of("m", "1", 1)
        )
        batcher._mean = 1.0  # no run is so quick that the event loop computes it
        try:
            await asyncio.wait_for(work(batcher, model), 20)
        finally:
            model.gate.set()
            await batcher.close()
        assert not any(thread.is_alive() for thread in batcher._threads)

    asyncio.run(main())


async def held(
    batcher: Batcher, model: Doubling, *requests: dict[str, np.ndarray], deadline: float | None = None
) -> list[asyncio.Task[Any]]:
    """Requests that wait behind one which runs, the first."""
    model.gate.clear()
    first = asyncio.create_task(batcher.infer(row(100)))
    while not model.batches:
        await asyncio.sleep(0.001)
    others = [asyncio.create_task(batcher.infer(r, deadline)) for r in requests]
    while batcher.waiting < len(requests):
        await asyncio.sleep(0.001)
    return [first, *others]


def test_what_waits_runs_together() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        tasks = await held(batcher, model, row(1), row(2, 3), row(4))
        model.gate.set()
        results = await asyncio.gather(*tasks)
        assert [r["y"][:, 0].tolist() for r in results] == [[200], [2], [4, 6], [8]]
        assert model.batches == [[100], [1, 2, 3, 4]]

    with_batcher(work, Doubling())


def test_batches_have_limits_and_one_shape() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        tasks = await held(batcher, model, row(1), row(2, width=4), row(3, 4, 5), row(6, width=4), row(7), row(*range(8, 15)))
        model.gate.set()
        await asyncio.gather(*tasks)
        assert model.batches == [[100], [1, 3, 4, 5], [2, 6], [7], [*range(8, 15)]]

    with_batcher(work, Doubling(), max_batch=4)


def test_batches_are_as_large_as_their_rows_allow() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        wide = [row(n, width=300) for n in range(1, 6)]
        tasks = await held(batcher, model, *wide, *(row(n) for n in range(6, 14)))
        model.gate.set()
        await asyncio.gather(*tasks)
        assert model.batches == [[100], [1, 2], [3, 4], [5], [*range(6, 14)]]

    with_batcher(work, Doubling(), sizes=BatchSizes(32, ((12, 8), (1000, 2))))


def test_sizes_of_batches_are_measured_by_what_a_row_has() -> None:
    """A row takes a time of its own, and more where a batch has more than 1000 bytes."""

    def run(scale: int, rows: int) -> tuple[float, int]:
        if scale == 5:
            raise InputError("no such size")
        size = scale * rows
        return 1.0 + size / 100 + max(0, size - 1000), scale

    sizes = measure(32, 1, (5, 100, 500, 2000), run)
    assert sizes.measured == ((100, 8), (500, 2), (2000, 1)) and sizes.largest == 8
    assert [sizes.rows(n) for n in (1, 90, 200, 300, 900, 1100, 1 << 30)] == [8, 8, 8, 2, 2, 1, 1]
    assert measure(32, 1, (5,), run) == BatchSizes(32) and BatchSizes(32).rows(7) == 32
    assert measure(24, 4, (1,), lambda scale, rows: (1.0, 4)).rows(4) == 24  # the larger, the better


def test_batches_are_cut_to_preferred_sizes() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        tasks = await held(batcher, model, *(row(n) for n in range(1, 8)))
        model.gate.set()
        await asyncio.gather(*tasks)
        assert model.batches == [[100], [1, 2, 3, 4], [5, 6], [7]]

    with_batcher(work, Doubling(), preferred=(1, 2, 4))


def test_a_request_waits_for_others_no_longer_than_it_may() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        start = time.monotonic()
        await asyncio.gather(batcher.infer(row(1)), batcher.infer(row(2)))
        assert model.batches == [[1, 2]] and time.monotonic() - start < 0.2  # full
        await batcher.infer(row(3))
        assert model.batches[1:] == [[3]] and time.monotonic() - start > 0.25

    with_batcher(work, Doubling(), max_batch=2, max_delay_us=250_000)


def test_only_who_is_wrong_is_refused() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        tasks = await held(batcher, model, row(1), row(-1), row(2))
        model.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results] == [dict, dict, InputError, dict] and results[3]["y"][0, 0] == 4
        assert (await batcher.infer(row(3)))["y"][0, 0] == 6

    with_batcher(work, Doubling())


def test_requests_of_other_ranks_harm_nobody() -> None:
    """The model refuses them, each alone."""

    async def work(batcher: Batcher, model: Doubling) -> None:
        odd = [{"x": np.array(1, np.float32)}, {"x": np.zeros((0, 3), np.float32)}, {"x": np.array(1, np.float32)}]
        tasks = await held(batcher, model, row(1), *odd, row(2))
        model.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results] == [dict, dict, IndexError, dict, IndexError, dict]
        assert results[3]["y"].shape == (0, 3) and results[5]["y"][0, 0] == 4

    with_batcher(work, Doubling())


def test_too_many_are_refused_with_a_time_to_come_again() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        tasks = await held(batcher, model, row(1), row(2))
        with pytest.raises(Refusal, match="too many requests wait: 2") as caught:
            await batcher.infer(row(3))
        assert caught.value.status == HTTPStatus.TOO_MANY_REQUESTS and caught.value.retry_after
        model.gate.set()
        await asyncio.gather(*tasks)

    with_batcher(work, Doubling(), max_queue=2)


def test_deadlines_and_cancelled_requests_leave_the_queue() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        tasks = await held(batcher, model, row(1), deadline=time.monotonic() + 0.05)
        tasks += [asyncio.create_task(batcher.infer(row(2)))]
        while batcher.waiting < 2:
            await asyncio.sleep(0.001)
        tasks[2].cancel()
        with pytest.raises(Refusal) as caught:
            await tasks[1]
        assert caught.value.status == HTTPStatus.GATEWAY_TIMEOUT
        await asyncio.sleep(0)
        assert batcher.waiting == 0
        model.gate.set()
        await tasks[0]
        assert model.batches == [[100]]

    with_batcher(work, Doubling())


def test_a_deadline_stops_the_run() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        model.gate.clear()
        with pytest.raises(Refusal, match="deadline"):
            await batcher.infer(row(1), time.monotonic() + 0.05)
        while batcher._busy:  # the instance is free again, though the gate is closed
            await asyncio.sleep(0.005)
        assert model.timeouts[0] is not None and 0 < model.timeouts[0] <= 0.05

    with_batcher(work, Doubling())


def test_the_default_deadline() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        model.gate.clear()
        with pytest.raises(Refusal, match="deadline"):
            await batcher.infer(row(1))

    with_batcher(work, Doubling(), timeout_ms=30)


def test_instances_run_at_the_same_time() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        model.gate.clear()
        tasks = [asyncio.create_task(batcher.infer(row(n))) for n in range(4)]
        while len(model.batches) < 3:
            await asyncio.sleep(0.001)
        assert batcher.waiting == 1
        model.gate.set()
        await asyncio.gather(*tasks)

    with_batcher(work, Doubling(), max_batch=1, instances=3)


def test_what_waits_is_shared_out_among_instances() -> None:
    """Runs at the same time are those of the second model, of fewer threads; one that is alone has all."""
    crowded = Doubling()

    async def work(batcher: Batcher, model: Doubling) -> None:
        await batcher.infer(row(0))
        assert (model.batches, crowded.batches) == ([[0]], [])
        model.gate.clear()
        crowded.gate.clear()
        first = [asyncio.create_task(batcher.infer(row(n))) for n in (1, 2)]
        while len(model.batches) + len(crowded.batches) < 3:
            await asyncio.sleep(0.001)
        tasks = [asyncio.create_task(batcher.infer(row(n))) for n in range(3, 9)]
        while batcher.waiting < 6:
            await asyncio.sleep(0.001)
        model.gate.set()
        crowded.gate.set()
        await asyncio.gather(*first, *tasks)
        batches = model.batches + crowded.batches
        assert sorted(n for batch in batches for n in batch) == [*range(9)] and crowded.batches

    with_batcher(work, Doubling(), crowded, instances=2)


def test_closing_answers_what_waits() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        tasks = await held(batcher, model, row(1), row(2))
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0.01)
        model.gate.set()
        await closing
        assert [r["y"][0, 0] for r in await asyncio.gather(*tasks)] == [200, 2, 4]

    with_batcher(work, Doubling())


def test_a_quick_model_runs_on_the_event_loop() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        batcher._mean = 1e-6
        threads = []
        original = model.run
        model.run = lambda *a, **k: (threads.append(threading.current_thread()), original(*a, **k))[1]
        assert (await batcher.infer(row(5)))["y"][0, 0] == 10
        assert threads == [threading.current_thread()]
        with pytest.raises(Refusal, match="deadline"):
            await batcher.infer(row(5), time.monotonic() - 1)

    with_batcher(work, Doubling())


def test_one_slow_run_does_not_make_a_model_slow() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        batcher._mean = 1e-6
        batcher._ran(1, 5.0)  # it was interrupted
        assert batcher._mean < QUICK
        for _ in range(20):
            batcher._ran(1, 5.0)
        assert batcher._mean > QUICK

    with_batcher(work, Doubling())
