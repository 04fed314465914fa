"""A caller's side of the router: where a request may go, also while the router is away.

The router decides, because it sees everybody's requests. When it does not answer, the same policy
decides on the membership that it last told. Knows nothing of what becomes of a request.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from cluster.config import ClusterConfig
from cluster.errors import ClusterError, ProtocolError, RequestCancelled
from cluster.limits import longest_served, vocabulary_served
from cluster.membership import Roster
from cluster.messages import Endpoint, Member, Membership, NoWorkers, Route, Routed, Suspect, Watch
from cluster.policy import decide
from cluster.router_link import FindRouter, follow_router
from cluster.wire import Connection, Identity

MOST_SUSPECTED = 256  # lives of ranks, the last ones; of a dead one nobody minds to hear again


class Routes:
    """Watches the membership from the first use on; needs a running event loop from then."""

    def __init__(self, find_router: FindRouter, identity: Identity, config: ClusterConfig) -> None:
        self._find_router = find_router
        self._identity = identity
        self._config = config
        self._roster = Roster()
        self._told_at = 0.0  # by the router, on the loop's clock
        self._router: Connection | None = None
        self._watching: asyncio.Task[None] | None = None
        self._closed = False
        self._suspected: dict[str, Suspect] = {}  # by incarnation; every router hears of each once
        self._telling: set[asyncio.Task[None]] = set()
        self.news = asyncio.Event()  # set, and replaced, on every membership that comes

    def reconfigure(self, config: ClusterConfig) -> None:
        self._config = config

    def members(self) -> tuple[Member, ...]:
        """The ranks that the router told of; none once it has been silent for t_detect_s."""
        self._watch()
        silent_s = asyncio.get_running_loop().time() - self._told_at
        return self._roster.members if silent_s < self._config.wire.t_detect_s else ()

    @property
    def told(self) -> bool:
        """Whether a router has ever said who is there."""
        return self._told_at > 0.0

    @property
    def longest(self) -> int | None:
        """Positions of the longest sequence served; None while no rank is known."""
        return longest_served(self._roster.members)

    @property
    def vocab_size(self) -> int | None:
        """Token ids below this are known to every rank; None while no rank is known."""
        return vocabulary_served(self._roster.members)

    async def ask(self, route: Route) -> Routed | NoWorkers:
        """The router's answer; without one, that of the policy on what it last told.

        RequestCancelled after close().
        """
        if self._closed:
            raise RequestCancelled("this caller was closed; its requests end here")
        self._watch()
        if self._router is None and not self._roster.heard:
            await self.wait(self.news, self._config.router.retry_after_s)  # it is just being found
        if self._router is not None:
            with suppress(ClusterError, TimeoutError):
                async with asyncio.timeout(self._config.wire.t_detect_s):
                    return await self._ask_router(self._router, route)
        answer, self._roster = decide(self._roster, route, self._config.router)
        return answer

    async def wait(self, news: asyncio.Event, within_s: float) -> None:
        """Until `news`, taken before the last question, has come, or that long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await news.wait()

    def suspect(self, rank: Endpoint, why: str) -> None:
        """Tell the router that this life of a rank was waited for in vain; the next one too, which
        may find the head that this one has not found."""
        if self._router is None:  # who else would say so, until there is one that knows better?
            self._roster = self._roster.forget(rank.incarnation)
        if rank.incarnation in self._suspected:
            return
        suspicion = Suspect(incarnation=rank.incarnation, why=why)
        self._suspected[rank.incarnation] = suspicion
        if len(self._suspected) > MOST_SUSPECTED:
            del self._suspected[next(iter(self._suspected))]
        if self._router is not None:
            self._tell_soon(self._router, suspicion)

    def _tell_soon(self, router: Connection, suspicion: Suspect) -> None:
        task = asyncio.get_running_loop().create_task(self._tell(router, suspicion))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, router: Connection, suspicion: Suspect) -> None:
        with suppress(ClusterError):
            async with await router.open(suspicion) as stream:
                await stream.receive()  # its end: the router has heard

    async def close(self) -> None:
        self._closed = True
        self.news.set()
        tasks = [*self._telling, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_router(self, router: Connection, route: Route) -> Routed | NoWorkers:
        async with await router.open(route) as stream:
            answer = await stream.receive()
        if not isinstance(answer, Routed | NoWorkers):
            raise ProtocolError(f"the router answered a route with {answer}")
        return answer

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(
                follow_router(self._find_router, self._identity, self._config.wire, self._follow)
            )

    async def _follow(self, router: Connection) -> None:
        self._router = router
        for suspicion in self._suspected.values():
            self._tell_soon(router, suspicion)
        try:
            async with await router.open(Watch()) as stream:
                async for message in stream:
                    if isinstance(message, Membership):
                        self._told_at = asyncio.get_running_loop().time()
                        self._roster = Roster.of(message.members, self._told_at)
                        self.news.set()
                        self.news = asyncio.Event()
        finally:
            self._router = None
