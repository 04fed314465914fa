"""Who gets blocks, and when: those who can wait get them in order of arrival.

Used from the asyncio thread only. Knows nothing of what the blocks are for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.errors import NoRoom
from kv_transfer.blocks import BlockPool, Lease


@dataclass(frozen=True, eq=False)
class _Waiting:
    length: int
    lease: asyncio.Future[Lease]


class Admission:
    """The only one that takes leases from the pool, so that no release goes unnoticed.

    While `is_open()` is false those who wait go on waiting; whoever makes it true again calls
    `admit()`. `on_release` hears of memory that came back: leases that want to grow come before
    those who wait here.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_waiting: int,
        is_open: Callable[[], bool] = lambda: True,
        on_release: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool = pool
        self._max_waiting = max_waiting
        self._is_open = is_open
        self._on_release = on_release
        self._queue: deque[_Waiting] = deque()

    def reconfigure(self, max_waiting: int) -> None:
        """For those who come from now on."""
        self._max_waiting = max_waiting

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        return sum(one.length for one in self._queue)

    @asynccontextmanager
    async def lease(self, length: int) -> AsyncIterator[Lease]:
        """Blocks for `length` positions, in turn. Raises NoRoom if too many wait already."""
        lease = await self.lease_in_turn(length)
        try:
            yield lease
        finally:
            self.release(lease)

    async def lease_in_turn(self, length: int) -> Lease:
        """As lease(), for whoever gives it to `release` himself."""
        if len(self._queue) >= self._max_waiting:
            raise NoRoom(f"{len(self._queue)} requests wait for blocks already", retry_after_s=1.0)
        mine = _Waiting(length, asyncio.get_running_loop().create_future())
        self._queue.append(mine)
        self.admit()
        try:
            return await mine.lease
        except BaseException:
            self._leave(mine)
            raise

    def lease_now(self, length: int) -> Lease:
        """At once, or NoRoom: also when somebody waits who came earlier. Give it to `release`."""
        if self._queue:
            raise NoRoom(f"{len(self._queue)} requests wait for blocks already")
        return self._pool.lease(length)

    def release(self, lease: Lease) -> None:
        lease.release()
        self.admit()

    def admit(self) -> None:
        """Memory may be back: serve those who wait, first come first, as far as there is room."""
        self._on_release()
        while self._queue and self._is_open():
            first = self._queue[0]
            if not first.lease.cancelled():  # its task is about to leave
                try:
                    first.lease.set_result(self._pool.lease(first.length))
                except NoRoom:
                    return
            self._queue.popleft()

    def _leave(self, mine: _Waiting) -> None:
        if mine in self._queue:
            self._queue.remove(mine)
        if mine.lease.done() and not mine.lease.cancelled():
            mine.lease.result().release()
        self.admit()
