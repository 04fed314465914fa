"""A rank's side of the router: says what it has to do and what it has left, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from cluster.config import ClusterConfig
from cluster.messages import Member, Report
from cluster.router_link import FindRouter, follow_router
from cluster.wire import Connection, Identity


class Reporter:
    """Reports `member()` every report_s to whichever router there is. Each report is complete."""

    def __init__(
        self,
        find_router: FindRouter,
        identity: Identity,
        config: ClusterConfig,
        member: Callable[[], Member],
    ) -> None:
        self._find_router = find_router
        self._identity = identity
        self._config = config
        self._member = member
        self._due = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled; the end of the connection tells the router that the rank is gone."""
        await follow_router(self._find_router, self._identity, self._config.wire, self._report)

    def reconfigure(self, config: ClusterConfig) -> None:
        """Reports as often as this says, after the pause under way."""
        self._config = config

    def report_now(self) -> None:
        """What the router should know at once, such as that the rank drains."""
        self._due.set()

    async def _report(self, connection: Connection) -> None:
        connection.gone.add_done_callback(lambda _: self._due.set())
        async with await connection.open(Report(member=self._member())) as stream:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._config.router.report_s):
                        await self._due.wait()
                self._due.clear()
                await stream.send(Report(member=self._member()))
