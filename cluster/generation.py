"""One request, whole: the caller owns it, from route to last token, over every loss on the way.

    async for delta in caller.generate(request): ...

or, if the reader finds the end himself, for instance a stop string:

    async with aclosing(caller.generate(request)) as answer:
        async for delta in answer:
            if enough(delta):
                await answer.stop(index)
                break

Prefill ranks never talk to the router and never choose a decode rank; only the caller does, and
only the caller tries again. There is one idea of recovery: prefill again from what was emitted.
Knows nothing of text, HTTP or Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from cluster.answer import Answer
from cluster.attempt import Attempt
from cluster.config import ClusterConfig
from cluster.errors import (
    Draining,
    NoRoom,
    Preempted,
    Rejected,
    TransferError,
    Unavailable,
    WorkerLost,
)
from cluster.image_rules import ImageRules
from cluster.journey import Journey
from cluster.limits import NoEncoder, check_pictures, check_request, images_served
from cluster.messages import Member, Request, Role, Route, Routed
from cluster.router_link import FindRouter
from cluster.routes import Routes
from cluster.timeline import Timeline
from cluster.token_order import Delta
from cluster.wire import Identity, Peers, new_incarnation

__all__ = ["Answer", "Caller", "Delta", "Timeline"]

LOSSES = (WorkerLost, TransferError, Rejected, Draining, NoRoom, Preempted)
"""What an attempt can end with so that another one may follow."""

logger = logging.getLogger(__name__)


class Caller:
    """Generates with the ranks of one cluster; belongs to the event loop in which it is used."""

    def __init__(self, config: ClusterConfig, secret: bytes, find_router: FindRouter) -> None:
        identity = Identity("caller", new_incarnation(), secret)
        self._config = config
        self._peers = Peers(identity, config.wire)
        self._routes = Routes(find_router, identity, config)

    def generate(
        self, request: Request, timeline: Timeline | None = None, *, colocated: bool = False
    ) -> Answer:
        """Prefill, hand over, decode; on a lost worker, prefill again from what was emitted.

        Yields tokens in order of index, each once, the last of them with `finish`. Raises one
        ClusterError, once, when the request cannot go on. Leaving it cancels everywhere at once.
        `colocated`: a decode rank shall do it all, without a handoff.
        """
        journey = Journey(request, timeline or Timeline(), self._config)
        return Answer(self._generate(journey, colocated), journey.stop)

    def members(self) -> tuple[Member, ...]:
        """Ranks that the router heard of within the detection time, draining ones included."""
        return self._routes.members()

    async def image_rules(self) -> ImageRules:
        """What images are to the model that is served. BadRequest if it takes none; Unavailable
        if no rank that would run prompts is heard of for as long as a new request waits."""
        role: Role = "decode" if self._config.router.colocated else "prefill"
        now = asyncio.get_running_loop().time
        began = now()
        while True:
            known, rules = images_served(self._routes.members(), role)
            if rules is not None:
                return rules
            if known:
                raise NoEncoder(role)
            if now() - began > self._patience_s(begun=False):
                raise Unavailable(f"images: no {role} rank is up, so it is not known what it takes")
            await self._routes.wait(self._routes.news, self._config.router.retry_after_s)

    def reconfigure(self, config: ClusterConfig) -> None:
        """Patience and retries of requests that come from now on; connections keep the wire's."""
        self._config = config
        self._routes.reconfigure(config)

    async def close(self) -> None:
        """Ends the watch and every connection; running requests end with RequestCancelled."""
        await self._routes.close()
        await self._peers.close()

    async def _generate(self, journey: Journey, colocated: bool) -> AsyncGenerator[Delta, None]:
        request = journey.request
        self._check(request, colocated)
        with journey:
            while True:
                attempt = await self._attempt(journey, colocated)
                try:
                    async with aclosing(attempt.run()) as deltas:
                        async for delta in deltas:
                            journey.emit(delta)
                            yield delta
                    return
                except LOSSES as error:
                    if not journey.try_again(error):
                        raise
                    logger.warning("%s: %s; trying again", request.request_id, error)

    def _check(self, request: Request, colocated: bool) -> None:
        check_request(request, self._routes.longest, self._routes.vocab_size)
        alone = colocated or self._config.router.colocated
        check_pictures(request, self._routes.members(), "decode" if alone else "prefill")

    async def _attempt(self, journey: Journey, colocated: bool) -> Attempt:
        route = await self._route(journey, colocated)
        return Attempt(journey, route, self._peers, self._routes, self._config.generation)

    async def _route(self, journey: Journey, colocated: bool) -> Routed:
        """Where to go; held while no rank can take it, because a dead one is soon replaced.

        Unavailable when its patience is at an end; NoRoom at once when the queues of all are full.
        """
        request = journey.remaining()
        now = asyncio.get_running_loop().time
        began = now()
        while True:
            news = self._routes.news
            answer = await self._routes.ask(
                Route(
                    request_id=request.request_id,
                    length=request.prompt_length + request.output_length,
                    longest=request.longest,
                    avoid=journey.avoided(),
                    colocated=colocated,
                    whole=journey.whole,
                    images=bool(request.images),
                )
            )
            if isinstance(answer, Routed):
                self._record(journey, answer, colocated or self._config.router.colocated)
                return answer
            self._check(request, colocated)  # no rank was known when it came
            if journey.no_room is not None:
                raise journey.no_room
            left_s = began + self._patience_s(begun=journey.begun) - now()
            if left_s <= 0:
                raise Unavailable(
                    f"{request.request_id}: {answer.message}", retry_after_s=answer.retry_after_s
                )
            journey.held(answer.message)
            await self._routes.wait(news, min(left_s, answer.retry_after_s))

    def _patience_s(self, *, begun: bool) -> float:
        """For a pool without a rank. What runs already outlives it; who is new hears soon that he
        should come again, or go elsewhere, once it is known that nobody is there."""
        generation = self._config.generation
        if begun or not self._routes.told:
            return generation.recovery_wait_s
        return min(generation.new_request_wait_s, generation.recovery_wait_s)

    @staticmethod
    def _record(journey: Journey, routed: Routed, colocated: bool) -> None:
        """`path`: how the prompt's state comes to where it is decoded."""
        alone = "colocated" if colocated else "local"
        journey.timeline.record(
            "routed",
            attempt=journey.attempt,
            prefill=routed.prefill.name if routed.prefill else None,
            decode=routed.decode.name,
            path="handoff" if routed.prefill else alone,
        )
