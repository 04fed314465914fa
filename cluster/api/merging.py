"""Several streams as one, in the order in which things happen. Knows nothing of what flows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(index of its source, item). The first error of any ends all of them; so does leaving.

    No source runs more than one item ahead of the reader, and none waits for another's second.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for one in only:
                yield 0, one
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
    places = [asyncio.Semaphore(1) for _ in sources]  # in the queue, one a source

    async def follow(index: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for one in items:
                    await places[index].acquire()
                    queue.put_nowait((index, one))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(follow(*one)) for one in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                places[item[0]].release()
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
