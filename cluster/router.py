"""The router: ranks report to it, callers ask it where to go. Everything it knows is soft.

A restarted router knows all again within one report_s. No request's stream goes through it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from cluster.config import ClusterConfig
from cluster.errors import ClusterError, ProtocolError, WorkerLost
from cluster.expert_desk import ExpertDesk
from cluster.membership import Roster
from cluster.messages import (
    Address,
    AskExperts,
    ExpertReport,
    Guard,
    Hello,
    Member,
    Membership,
    NoWorkers,
    Report,
    Route,
    Routed,
    Suspect,
    Watch,
    WireMessage,
)
from cluster.policy import decide
from cluster.wire import Identity, Server, Stream, new_incarnation, serve

MOST_UNTOLD = 256  # suspicions; most are of ranks that have died with their heads


class Router:
    """A server of Report, Route and Watch on a socket of its own; experts have a desk there."""

    def __init__(self, config: ClusterConfig, secret: bytes) -> None:
        self.incarnation = new_incarnation()
        self._config = config
        self._identity = Identity("router", self.incarnation, secret)
        self._roster = Roster()
        self._reports: dict[str, Stream] = {}  # by incarnation: who speaks for it
        self._guards: dict[Stream, frozenset[str]] = {}  # heads, and the incarnations they guard
        self._untold: dict[str, Suspect] = {}  # by incarnation, whose head is not here (yet)
        self.experts = ExpertDesk(config.experts)
        self._news = asyncio.Event()  # set, and replaced, when the roster changes its shape

    async def start(self) -> Address:
        """Listen on any free port; returns where."""
        await self.experts.open()
        self._server: Server = await serve(self._converse, self._identity, self._config.wire)
        work = (self._expire(), self.experts.run())
        self._working = [asyncio.get_running_loop().create_task(one) for one in work]
        return self._server.address

    async def stop(self) -> None:
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        await self._server.close()

    def reconfigure(self, config: ClusterConfig) -> None:
        """Decides by these settings from now on; connections keep the wire's."""
        self._config = config
        self.experts.reconfigure(config.experts)

    def members(self) -> tuple[Member, ...]:
        """Ranks heard of within the detection time, draining ones included."""
        return self._roster.members

    def route(self, route: Route) -> Routed | NoWorkers:
        """The policy's choice, which counts as load of the chosen ranks until they next report."""
        answer, self._roster = decide(self._roster, route, self._config.router)
        return answer

    async def _converse(self, stream: Stream, first: WireMessage, peer: Hello) -> None:
        match first:
            case Route():
                await stream.send(self.route(first))
            case Report():
                await self._listen(stream, first)
            case Watch():
                await self._show(stream)
            case Suspect():
                await self._suspect(first)
            case Guard():
                await self._warn(stream, first)
            case ExpertReport():
                await self.experts.follow(stream, first)
            case AskExperts():
                await stream.send(self.experts.balance())
            case _:
                raise ProtocolError(f"{peer.role} asked the router for {first.kind!r}")

    async def _listen(self, stream: Stream, report: Report) -> None:
        """One life of one rank, from its first report to the end of its stream."""
        incarnation = report.member.endpoint.incarnation
        try:
            await self._follow(stream, report, incarnation)
        except WorkerLost as lost:  # it fell silent, or died; only its head can tell which
            await self._suspect(Suspect(incarnation=incarnation, why=str(lost)))
            raise

    async def _follow(self, stream: Stream, report: Report, incarnation: str) -> None:
        self._reports[incarnation] = stream
        try:
            message: WireMessage | None = report
            while isinstance(message, Report):
                self._become(self._roster.hear(message.member, self._now()))
                message = await stream.receive()
        finally:
            if self._reports.get(incarnation) is stream:  # else it reports on a newer connection
                del self._reports[incarnation]
                self._become(self._roster.forget(incarnation))

    async def _warn(self, head: Stream, guard: Guard) -> None:
        """For as long as the head is there it hears of every suspicion against its ranks."""
        self._guards[head] = frozenset(guard.incarnations)
        try:
            for incarnation in self._untold.keys() & self._guards[head]:
                await self._suspect(self._untold.pop(incarnation))
            await head.receive()
        finally:
            del self._guards[head]

    async def _suspect(self, suspicion: Suspect) -> None:
        """Its head hears of it: now, or as soon as it has found this router."""
        for head, ranks in list(self._guards.items()):
            if suspicion.incarnation in ranks:
                with suppress(ClusterError):
                    return await head.send(suspicion)
        self._untold[suspicion.incarnation] = suspicion
        if len(self._untold) > MOST_UNTOLD:
            del self._untold[next(iter(self._untold))]

    async def _show(self, stream: Stream) -> None:
        """The whole membership: on every change of shape at once, new loads every report_s."""
        shown: Roster | None = None
        while not stream.closed:
            news = self._news
            if self._roster is not shown:
                shown = self._roster
                await stream.send(Membership(members=shown.members))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.router.report_s):
                    await news.wait()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._config.wire.heartbeat_s)
            self._become(self._roster.expire(self._now(), self._config.wire.t_detect_s))

    def _become(self, roster: Roster) -> None:
        changed = roster.shape != self._roster.shape
        self._roster = roster
        if changed:
            self.experts.see(roster.members)
            self._news.set()
            self._news = asyncio.Event()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
