"""Tasks that end with their block: errors, cancellation and threads leave nothing running."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.tasks import beside, in_thread, together


async def test_the_first_error_stops_the_others_and_is_raised() -> None:
    stopped = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def fails() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await together(waits(), fails())
    assert stopped.is_set()


async def test_a_task_beside_a_block_has_cleaned_up_when_the_block_is_left() -> None:
    steps: list[str] = []

    async def slow_to_leave() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    async with beside(slow_to_leave()):
        await asyncio.sleep(0)
        steps.append("left")
    assert steps == ["left", "cleaned up"]


async def test_a_cancelled_caller_still_waits_for_the_thread() -> None:
    inside, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def copy() -> None:
        inside.set()
        assert go_on.wait(10)
        done.append("copied")

    with ThreadPoolExecutor(1) as executor:
        task = asyncio.create_task(in_thread(executor, copy))
        await asyncio.to_thread(inside.wait, 10)
        for _ in range(3):  # impatience changes nothing
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert done == ["copied"]


async def test_an_error_in_the_thread_reaches_the_caller() -> None:
    def fails() -> None:
        raise OSError("link down")

    with ThreadPoolExecutor(1) as executor, pytest.raises(OSError, match="link down"):
        await in_thread(executor, fails)
