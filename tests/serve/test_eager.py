"""Coroutines that begin at once: what they do before the first wait is done when `begun` returns, and a task does the rest."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest

from tcomp.serve.grpc.eager import begun

PLACE: ContextVar[str] = ContextVar("place", default="outside")


def test_what_waits_for_nothing_needs_no_task() -> None:
    async def main() -> None:
        done = list[str]()

        async def work() -> None:
            PLACE.set("inside")
            done.append(PLACE.get())

        assert begun(work(), asyncio.get_running_loop()) is None and done == ["inside"]
        assert PLACE.get() == "outside"

    asyncio.run(main())


def test_a_task_does_the_rest_in_the_same_context() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        answers, seen = [loop.create_future() for _ in range(3)], list[str]()

        async def work() -> None:
            PLACE.set("inside")
            await asyncio.sleep(0)
            for answer in answers:
                try:
                    seen.append(await answer)
                except ValueError as error:
                    seen.append(str(error))
            seen.append(PLACE.get())

        task = begun(work(), loop)
        assert task is not None and not seen
        answers[0].set_result("first")  # before the task has run
        await asyncio.sleep(0.01)
        answers[1].set_exception(ValueError("second"))
        answers[2].set_result("third")
        await task
        assert seen == ["first", "second", "third", "inside"]

    asyncio.run(main())


@pytest.mark.parametrize("soon", [True, False])
def test_a_cancelled_one_learns_of_it(soon: bool) -> None:
    async def main() -> None:
        cleaned = list[str]()

        async def work() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                cleaned.append("up")
                raise

        task = begun(work(), asyncio.get_running_loop())
        assert task is not None
        if not soon:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cleaned == ["up"]

    asyncio.run(main())
