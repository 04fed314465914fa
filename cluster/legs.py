"""The streams of one attempt, merged into one row of events, and ended together.

A leg is the attempt's stream to one rank. Knows nothing of what is said on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType

from cluster.errors import ClusterError
from cluster.messages import Endpoint, Reserved, WireMessage
from cluster.wire import Peers, Stream


@dataclass(frozen=True)
class Leg:
    endpoint: Endpoint
    stream: Stream


@dataclass(frozen=True)
class Said:
    """A rank sent a message."""

    leg: Leg
    message: WireMessage


@dataclass(frozen=True)
class Left:
    """A leg is over: lost with an error, or closed by its rank."""

    leg: Leg
    error: ClusterError | None


@dataclass(frozen=True)
class Found:
    """The search has a reservation; its leg is one of ours from now on."""

    leg: Leg
    reserved: Reserved


@dataclass(frozen=True)
class NotFound:
    error: ClusterError


LegEvent = Said | Left | Found | NotFound


class Legs:
    """`async with`: whatever happens, every rank hears at once that the attempt is over."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        # Unbounded, yet small: a reader slower than its ranks leaves max_tokens here at most, and
        # the log-probabilities of one prompt.
        self._events: asyncio.Queue[LegEvent] = asyncio.Queue()
        self._legs: list[Leg] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, endpoint: Endpoint, first: WireMessage) -> Leg:
        leg = Leg(endpoint, await self._peers.open(endpoint, first))
        self._adopt(leg)
        return leg

    def search(self, search: Callable[[], Awaitable[Found]]) -> None:
        """Run it beside the legs; what it finds, or why it does not, is an event too."""
        self._run(self._search(search))

    async def next(self, within_s: float | None) -> LegEvent:
        """TimeoutError when nothing happens for that long."""
        if not self._events.empty():
            return self._events.get_nowait()
        async with asyncio.timeout(within_s):
            return await self._events.get()

    async def __aenter__(self) -> Legs:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for leg in self._legs:
            await leg.stream.close()  # never waits
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _adopt(self, leg: Leg) -> None:
        self._legs.append(leg)
        self._run(self._listen(leg))

    def _run(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _listen(self, leg: Leg) -> None:
        error: ClusterError | None = None
        try:
            async for message in leg.stream:
                self._events.put_nowait(Said(leg, message))
        except ClusterError as lost:
            error = lost
        self._events.put_nowait(Left(leg, error))

    async def _search(self, search: Callable[[], Awaitable[Found]]) -> None:
        try:
            found = await search()
        except ClusterError as error:
            self._events.put_nowait(NotFound(error))
            return
        self._events.put_nowait(found)  # before anything that its rank says
        self._adopt(found.leg)
