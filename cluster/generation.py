"""One request, whole: the caller owns it, from route to last token, over every loss on the way.

    async for delta in caller.generate(request): ...

Prefill ranks never talk to the router and never choose a decode rank; only the caller does, and
only the caller tries again. There is one idea of recovery: prefill again from what was emitted.
Knows nothing of text, HTTP or Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from cluster.attempt import Attempt
from cluster.config import ClusterConfig
from cluster.errors import Draining, NoRoom, Rejected, TransferError, Unavailable, WorkerLost
from cluster.journey import Journey
from cluster.limits import check_request
from cluster.messages import Member, Request, Route, Routed
from cluster.router_link import FindRouter
from cluster.routes import Routes
from cluster.timeline import Timeline
from cluster.token_order import Delta
from cluster.wire import Identity, Peers, new_incarnation

__all__ = ["Caller", "Delta", "Timeline"]

logger = logging.getLogger(__name__)


class Caller:
    """Generates with the ranks of one cluster; belongs to the event loop in which it is used."""

    def __init__(self, config: ClusterConfig, secret: bytes, find_router: FindRouter) -> None:
        identity = Identity("caller", new_incarnation(), secret)
        self._config = config
        self._peers = Peers(identity, config.wire)
        self._routes = Routes(find_router, identity, config)

    async def generate(
        self, request: Request, timeline: Timeline | None = None, *, colocated: bool = False
    ) -> AsyncGenerator[Delta, None]:
        """Prefill, hand over, decode; on a lost worker, prefill again from what was emitted.

        Yields tokens in order of index, each once, the last of them with `finish`. Raises one
        ClusterError, once, when the request cannot go on. Leaving it cancels everywhere at once.
        `colocated`: a decode rank shall do it all, without a handoff.
        """
        self._check(request)
        with Journey(request, timeline or Timeline(), self._config) as journey:
            while True:
                attempt = await self._attempt(journey, colocated)
                try:
                    async with aclosing(attempt.run()) as deltas:
                        async for delta in deltas:
                            journey.emit(delta)
                            yield delta
                    return
                except (WorkerLost, TransferError, Rejected, Draining, NoRoom) as error:
                    if not journey.try_again(error):
                        raise
                    logger.warning("%s: %s; trying again", request.request_id, error)

    def members(self) -> tuple[Member, ...]:
        """Ranks that the router heard of within the detection time, draining ones included."""
        return self._routes.members()

    async def close(self) -> None:
        """Ends the watch and every connection; running requests end with RequestCancelled."""
        await self._routes.close()
        await self._peers.close()

    def _check(self, request: Request) -> None:
        check_request(request, self._routes.longest, self._routes.vocab_size)

    async def _attempt(self, journey: Journey, colocated: bool) -> Attempt:
        route = await self._route(journey, colocated)
        return Attempt(journey, route, self._peers, self._routes, self._config.generation)

    async def _route(self, journey: Journey, colocated: bool) -> Routed:
        """Where to go; held while no rank can take it, because a dead one is soon replaced.

        Unavailable after recovery_wait_s; NoRoom at once when the queues of all are full.
        """
        request = journey.remaining()
        now = asyncio.get_running_loop().time
        deadline = now() + self._config.generation.recovery_wait_s
        while True:
            news = self._routes.news
            answer = await self._routes.ask(
                Route(
                    request_id=request.request_id,
                    length=request.prompt_length + request.output_length,
                    longest=request.longest,
                    avoid=journey.avoided(),
                    colocated=colocated,
                )
            )
            if isinstance(answer, Routed):
                prefill = answer.prefill.name if answer.prefill else None
                journey.timeline.record(
                    "routed", attempt=journey.attempt, prefill=prefill, decode=answer.decode.name
                )
                return answer
            self._check(request)  # no rank was known when it came
            if journey.no_room is not None:
                raise journey.no_room
            left_s = deadline - now()
            if left_s <= 0:
                raise Unavailable(
                    f"{request.request_id}: {answer.message}", retry_after_s=answer.retry_after_s
                )
            journey.held(answer.message)
            await self._routes.wait(news, min(left_s, answer.retry_after_s))
