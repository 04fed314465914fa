"""A group head's guard over its ranks: whoever is suspected is asked, and killed if it is silent.

Peers that wait for a rank in vain only suspect: it may be slow, or the way to it broken. The head
asks it and, where no answer comes either, makes its death certain: then every connection to it is
closed, what it may have been writing cannot land any more, and a new one can take its place. Knows
nothing of Ray, and of what ranks do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from cluster import messages
from cluster.config import WireSection
from cluster.router_link import FindRouter, follow_router
from cluster.wire import Connection, Identity

logger = logging.getLogger(__name__)


class Guard:
    """Run run() for as long as the ranks shall be guarded."""

    def __init__(
        self,
        ranks: Mapping[str, str],
        *,
        answers: Callable[[str], Awaitable[bool]],
        kill: Callable[[str, str], Awaitable[None]],
        find_router: FindRouter,
        identity: Identity,
        wire: WireSection,
    ) -> None:
        """`ranks`: names by incarnation. `answers(name)`: whether the rank's own loop turns; it may
        take as long as it likes. `kill(name, why)` is called once a rank."""
        self._ranks = dict(ranks)
        self._answers = answers
        self._kill = kill
        self._find_router = find_router
        self._identity = identity
        self._wire = wire
        self._asked: dict[str, asyncio.Task[None]] = {}  # by incarnation, while it is asked

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await follow_router(self._find_router, self._identity, self._wire, self._listen)
        finally:
            for task in self._asked.values():
                task.cancel()

    async def _listen(self, router: Connection) -> None:
        first = messages.Guard(incarnations=tuple(self._ranks))
        async with await router.open(first) as stream:
            async for message in stream:
                if isinstance(message, messages.Suspect):
                    self._suspect(message)

    def _suspect(self, suspicion: messages.Suspect) -> None:
        """Asks once at a time, however many complain."""
        name = self._ranks.get(suspicion.incarnation)
        if name is None or suspicion.incarnation in self._asked:
            return
        task = asyncio.ensure_future(self._ask(name, suspicion))
        self._asked[suspicion.incarnation] = task
        task.add_done_callback(lambda _: self._asked.pop(suspicion.incarnation, None))

    async def _ask(self, name: str, suspicion: messages.Suspect) -> None:
        limit_s = self._wire.t_detect_s
        try:
            async with asyncio.timeout(limit_s):
                if await self._answers(name):
                    logger.info("%s is suspected (%s), but answers", name, suspicion.why)
                    return
        except TimeoutError:
            pass
        del self._ranks[suspicion.incarnation]
        await self._kill(name, f"{suspicion.why}; and its head had no answer in {limit_s:g} s")
