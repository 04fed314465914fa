"""Tasks that end before the block that started them does. Knows nothing of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from cluster.errors import WorkerLost
from cluster.messages import Cancel, Stop, WireMessage
from cluster.stream import Stream

T = TypeVar("T")


async def together(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until all are done; the first error stops the others and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await _end(tasks)


async def while_wanted(
    stream: Stream, work: Coroutine[Any, Any, None], hear: Callable[[WireMessage], None]
) -> None:
    """Do `work` for the caller at the other end of `stream`; stop it as soon as he has gone.

    He goes by Cancel or Stop, by leaving the stream, or with his connection. What he says is given
    to `hear`, except Cancel; it may raise, which ends the work too.
    """
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_listen(stream, hear))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _end((working, listening))
    for task in (working, listening):
        if not task.cancelled():
            task.result()


async def _listen(stream: Stream, hear: Callable[[WireMessage], None]) -> None:
    """Returns when the caller is gone."""
    try:
        async for message in stream:
            if isinstance(message, Cancel):
                return
            hear(message)
            if isinstance(message, Stop):
                return
    except WorkerLost:
        return


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """A task for as long as the block lasts; await it inside to have its result or its error."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        await _end((task,))


async def in_thread(executor: Executor | None, function: Callable[..., T], *arguments: Any) -> T:
    """Even if it is cancelled it waits for the thread to end: the thread uses our memory."""
    task = asyncio.ensure_future(
        asyncio.get_running_loop().run_in_executor(executor, function, *arguments)
    )
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        task.exception()  # it has been seen; the cancellation is what counts
        raise asyncio.CancelledError
    return task.result()


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel and wait until the last has cleaned up, even if the waiting is cancelled."""
    for task in tasks:
        task.cancel()
    cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen, so that asyncio does not warn of it
    if cancelled:
        raise asyncio.CancelledError
