"""Seeks a decode rank with room for one request, while its prompt is being prefilled."""

from __future__ import annotations

import asyncio

from cluster.errors import (
    ClusterError,
    Draining,
    NoRoom,
    ProtocolError,
    Unavailable,
    WorkerLost,
    revive,
)
from cluster.journey import Journey
from cluster.legs import Found, Leg
from cluster.messages import (
    DrainingNow,
    Endpoint,
    Failed,
    NoRoomNow,
    Request,
    Reserve,
    Reserved,
    Route,
    Routed,
)
from cluster.routes import Routes
from cluster.wire import Peers

RETRY_AFTER_S = 1.0  # for the client, if no rank has said when to come again
RETRY_S = 0.2  # before the same two ranks are tried again, when only the way was lost


class PlaceSearch:
    """One search of one attempt. A full or draining rank costs no attempt."""

    def __init__(
        self,
        journey: Journey,
        request: Request,
        peers: Peers,
        routes: Routes,
        within_s: float,
        *,
        recovery_wait_s: float,
        last: Endpoint | None = None,
    ) -> None:
        """`within_s`: patience while ranks have no room; `recovery_wait_s`: from when there is no
        rank at all. `last` is asked when nobody else has room."""
        self._journey = journey
        self._request = request.without_pixels()  # decode goes on from state
        self._peers = peers
        self._routes = routes
        self._within_s = within_s
        self._recovery_wait_s = recovery_wait_s
        self._full_for = f"no decode worker had room within {within_s:g} s"
        self._why_not = self._full_for
        self._outlives = False  # the pool was without a rank, and the patience is for that
        self._full: dict[str, float] = {}  # incarnation: when to ask it again, in seconds
        if last is not None:
            self._full[last.incarnation] = RETRY_S
        self._retry_after_s = RETRY_AFTER_S

    async def find(self, decode: Endpoint | None) -> Found:
        """A reservation on `decode`, or on any other rank as soon as one has room.

        Unavailable when none has had any for so long. Cancelled: a pending Reserve is withdrawn.
        """
        try:
            async with asyncio.timeout(self._within_s) as patience:
                while True:
                    decode = decode or await self._another(patience)
                    try:
                        return await self._reserve(decode)
                    except NoRoom as refusal:
                        self._why_not = self._full_for
                        self._full[decode.incarnation] = refusal.retry_after_s or 0.0
                        self._refused(decode, refusal)
                    except (Draining, WorkerLost) as refusal:
                        self._journey.avoid(decode)
                        self._refused(decode, refusal)
                    decode = None
        except TimeoutError:
            raise Unavailable(
                f"{self._request.request_id}: {self._why_not}; try again later",
                retry_after_s=self._retry_after_s,
            ) from None

    async def _another(self, patience: asyncio.Timeout) -> Endpoint:
        """One that has not refused yet; when all have, those that are full once more."""
        while True:
            news = self._routes.news
            route = Route(
                request_id=self._request.request_id,
                length=self._request.prompt_length + self._request.output_length,
                longest=self._request.longest,
                avoid=(*self._journey.avoided(), *self._full),
                decode_only=True,
                whole=self._journey.whole,
            )
            answer = await self._routes.ask(route)
            if isinstance(answer, Routed):
                return answer.decode
            self._retry_after_s = min(self._full.values(), default=answer.retry_after_s)
            if self._full:
                await asyncio.sleep(self._retry_after_s)
                self._full.clear()
            else:
                self._outlive_the_pool(patience, answer.message)
                await self._routes.wait(news, self._retry_after_s)

    def _outlive_the_pool(self, patience: asyncio.Timeout, why: str) -> None:
        """Once a search: ranks that die of this very request shall not make it wait for ever."""
        self._why_not = why
        if not self._outlives:
            self._outlives = True
            ends_at, now = patience.when(), asyncio.get_running_loop().time()
            assert ends_at is not None
            patience.reschedule(max(ends_at, now + self._recovery_wait_s))

    async def _reserve(self, decode: Endpoint) -> Found:
        """NoRoom or Draining when it says so; any other error that it has with the request."""
        journey = self._journey
        reserve = Reserve(request=self._request, attempt=journey.attempt, whole=journey.whole)
        stream = await self._peers.open(decode, reserve)
        try:
            match await stream.receive():
                case Reserved() as reserved:
                    return Found(Leg(decode, stream), reserved)
                case NoRoomNow(retry_after_s=retry_after_s):
                    raise NoRoom(f"{decode.name} is full", retry_after_s=retry_after_s)
                case DrainingNow():
                    raise Draining(f"{decode.name} takes no new work")
                case Failed() as failed:
                    raise revive(failed.error, failed.message, failed.retry_after_s)
                case None:
                    raise WorkerLost(f"{decode.name} left a Reserve without an answer")
                case other:
                    raise ProtocolError(f"{decode.name} answered Reserve with {other.kind!r}")
        except BaseException:
            await stream.close()
            raise

    def _refused(self, decode: Endpoint, refusal: ClusterError) -> None:
        self._journey.timeline.record("refused", decode=decode.name, why=str(refusal))
