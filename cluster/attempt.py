"""One try of a request: prefill, a place to decode, the handoff, the tokens.

    Started      from prefill: seek a place, beside everything else
    Found        a reservation: tell prefill where to push
    PromptLogprobs  from whoever runs the prompt, before any token
    Tokens       the first from prefill, at once; all later ones from decode
    HandedOver   decode has accepted; prefill is no longer needed
    a loss       decode, or the way to it, before it accepted: seek another place for the same
                 state. Anything else ends the attempt.

Knows nothing of other attempts; what lasts longer is in the journey.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial

from cluster.config import GenerationSection
from cluster.errors import ClusterError, Draining, NoRoom, ProtocolError, WorkerLost, revive
from cluster.journey import Journey
from cluster.legs import Found, Left, Leg, LegEvent, Legs, NotFound, Said
from cluster.lifecycle import (
    Begun,
    Decoding,
    PlaceLost,
    Placing,
    Prefilling,
    Pushing,
    RoomFound,
    SentToDecode,
    SentToPrefill,
    TakenOver,
)
from cluster.messages import (
    Endpoint,
    Failed,
    Generate,
    HandedOver,
    Prefill,
    PromptLogprobs,
    PushFailed,
    PushTo,
    Reserved,
    Routed,
    Started,
    Stop,
    Tokens,
    WireMessage,
)
from cluster.place_search import PlaceSearch
from cluster.prompt_order import PromptOrder
from cluster.routes import Routes
from cluster.token_order import Delta, TokenOrder
from cluster.wire import Peers


class Attempt:
    def __init__(
        self,
        journey: Journey,
        route: Routed,
        peers: Peers,
        routes: Routes,
        settings: GenerationSection,
    ) -> None:
        self._journey = journey
        self._route = route
        self._peers = peers
        self._routes = routes
        self._settings = settings
        self._request = journey.remaining()
        self._order = TokenOrder(
            first=self._request.output_length,
            limit=self._request.sampling.max_tokens,
            colocated=route.prefill is None,
        )
        self._prompt_order = PromptOrder(self._request.scored, journey.scored)
        self._legs = Legs(peers)
        self._prefill: Leg | None = None
        self._decode: Leg | None = None
        self._places_lost = 0

    async def run(self) -> AsyncGenerator[Delta, None]:
        """To the last token, or to the error that ends it. Leaving it closes every leg at once."""
        async with self._legs:
            await self._dispatch()
            while True:
                for delta in await self._hear(await self._next()):
                    try:
                        yield delta
                    except GeneratorExit:
                        await self._tell_stop()
                        raise
                    if delta.finish is not None:
                        return

    async def _hear(self, event: LegEvent) -> list[Delta]:
        """What is new for the reader. Raises what ends the attempt."""
        match event:
            case Said(leg, Tokens() as tokens):
                return self._in_order(leg, tokens)
            case Said(leg, PromptLogprobs() as scored):
                return self._scored(leg, scored)
            case Said(leg, Failed() as failed):
                self._on_loss(leg, revive(failed.error, failed.message, failed.retry_after_s))
            case Said(_, PushFailed() as failed):
                await self._on_push_failed(failed)
            case Said(leg, message):
                self._on_message(leg, message)
            case Found(leg, reserved):
                await self._push_to(leg, reserved)
            case Left(leg, lost):
                self._on_left(leg, lost)
            case NotFound(error):
                raise error
        return []

    async def _tell_stop(self) -> None:
        """If the reader has left because he found the end; closing the legs tells the rest."""
        index, decode = self._journey.stopped_at, self._decode
        if index is not None and decode is not None:
            with suppress(ClusterError):  # then it has ended by itself
                await decode.stream.send(Stop(index=index))

    async def _dispatch(self) -> None:
        attempt, prefill, decode = self._journey.attempt, self._route.prefill, self._route.decode
        if prefill is None:
            self._decode = await self._open(
                decode,
                Generate(request=self._request, attempt=attempt, whole=self._journey.whole),
            )
            self._journey.advance(SentToDecode(decode))
        else:
            self._prefill = await self._open(
                prefill, Prefill(request=self._request, attempt=attempt)
            )
            self._journey.advance(SentToPrefill(prefill))

    async def _open(self, endpoint: Endpoint, first: WireMessage) -> Leg:
        try:
            return await self._legs.open(endpoint, first)
        except WorkerLost as lost:
            self._avoid(endpoint, str(lost))
            raise

    def _avoid(self, endpoint: Endpoint, why: str) -> None:
        self._journey.avoid(endpoint)
        self._routes.suspect(endpoint, why)

    async def _next(self) -> LegEvent:
        """The last guard: a rank that lives but says nothing for step_timeout_s is lost to us."""
        searching = isinstance(self._journey.state, Placing)  # which has a deadline of its own
        limit_s = None if searching else self._settings.step_timeout_s
        try:
            return await self._legs.next(limit_s)
        except TimeoutError:
            silent = self._needed()
            for endpoint in silent:
                self._avoid(endpoint, f"it said nothing to a request for {limit_s:g} s")
            names = " and ".join(endpoint.name for endpoint in silent)
            raise WorkerLost(f"{names} said nothing for {limit_s:g} s") from None

    def _needed(self) -> tuple[Endpoint, ...]:
        match self._journey.state:
            case Prefilling(prefill):
                return (prefill,)
            case Pushing(prefill, decode):
                return (prefill, decode)
            case Decoding(decode):
                return (decode,)
            case state:
                raise AssertionError(f"nobody is waited for in {state}")

    # ------------------------------------------------------------ what ranks say

    def _scored(self, leg: Leg, scored: PromptLogprobs) -> list[Delta]:
        if self._prefill is not None and leg is not self._prefill:
            raise ProtocolError(f"{leg.endpoint.name} scored a prompt that it does not run")
        return self._prompt_order.take(scored)

    def _in_order(self, leg: Leg, tokens: Tokens) -> list[Delta]:
        if leg is self._prefill:
            deltas = self._order.from_prefill(tokens)
        else:
            if isinstance(self._journey.state, Pushing):
                self._taken_over(leg.endpoint)
            deltas = self._order.from_decode(tokens)
        if deltas:
            self._prompt_order.check_complete()
        return deltas

    def _on_message(self, leg: Leg, message: WireMessage) -> None:
        match message, self._journey.state:
            case Started(queued_s=queued_s), Prefilling() | Decoding():
                self._journey.begun = True
                self._journey.timeline.record("started", queued_s=queued_s)
                one_token_left = (
                    self._request.output_length + 1 == self._request.sampling.max_tokens
                )
                if leg is self._prefill and not one_token_left:
                    self._journey.advance(Begun())
                    self._seek(self._route.decode)
            case HandedOver(reservation=reservation), Pushing() as pushing:
                if reservation not in ("", pushing.reservation):
                    raise _accepted_by_a_lost_rank(leg.endpoint)
                self._record_handoff(message)
                self._taken_over(pushing.decode)
            case HandedOver(), Decoding():
                self._record_handoff(message)
            case HandedOver(), Placing():
                raise _accepted_by_a_lost_rank(leg.endpoint)
            case _, state:
                raise ProtocolError(f"{leg.endpoint.name} said {message.kind!r} in {state}")

    def _taken_over(self, decode: Endpoint) -> None:
        self._journey.advance(TakenOver())
        self._journey.timeline.record("taken_over", decode=decode.name)

    def _record_handoff(self, done: WireMessage) -> None:
        assert isinstance(done, HandedOver)
        self._journey.timeline.record(
            "handed_over",
            bytes=done.bytes_moved,
            pushes=done.pushes,
            push_s=done.push_s,
            hidden_s=done.hidden_s,
            tail_s=done.tail_s,
            path=done.path,
        )

    # ------------------------------------------------------------ losses

    def _on_left(self, leg: Leg, lost: ClusterError | None) -> None:
        if isinstance(lost, WorkerLost):
            self._avoid(leg.endpoint, str(lost))
        name = leg.endpoint.name
        self._on_loss(leg, lost or WorkerLost(f"{name} left before the answer was complete"))

    def _on_loss(self, leg: Leg, error: ClusterError) -> None:
        """Goes on if it can, else raises `error`."""
        state = self._journey.state
        if leg is not self._prefill and leg is not self._decode:
            return  # given up already
        if leg is self._prefill and isinstance(state, Decoding) and self._order.first_is_here:
            return  # it has done its part
        if isinstance(error, Draining):
            self._journey.avoid(leg.endpoint)
        if isinstance(error, NoRoom):
            self._journey.refused(leg.endpoint, error)
        replaceable = leg is self._decode and isinstance(state, Pushing)
        if not replaceable or not isinstance(error, WorkerLost | Draining):
            raise error
        self._replace(leg, error)

    async def _on_push_failed(self, failed: PushFailed) -> None:
        """The decode rank itself may well live: it is only asked last."""
        leg, state = self._decode, self._journey.state
        if leg is None or not isinstance(state, Pushing) or state.reservation != failed.reservation:
            return  # that place is lost already, or has all of it nevertheless
        await leg.stream.close()
        self._routes.suspect(leg.endpoint, failed.why)
        self._replace(leg, WorkerLost(failed.why), last=leg.endpoint)

    def _replace(self, leg: Leg, error: ClusterError, last: Endpoint | None = None) -> None:
        self._places_lost += 1
        if self._places_lost >= self._settings.max_attempts:
            raise error
        self._journey.advance(PlaceLost())
        self._journey.timeline.record("place_lost", decode=leg.endpoint.name, error=str(error))
        self._decode = None
        self._seek(None, last=last)

    # ------------------------------------------------------------ a place to decode

    def _seek(self, decode: Endpoint | None, last: Endpoint | None = None) -> None:
        """Ask `decode` first, `last` only when nobody else has room.

        A preempted request is not refused but waits in turn, so its patience is that for silence.
        """
        settings, whole = self._settings, self._journey.whole
        search = PlaceSearch(
            self._journey,
            self._request,
            self._peers,
            self._routes,
            settings.step_timeout_s if whole else settings.reserve_timeout_s,
            recovery_wait_s=settings.recovery_wait_s,
            last=last,
        )
        self._legs.search(partial(search.find, decode))

    async def _push_to(self, leg: Leg, reserved: Reserved) -> None:
        assert self._prefill is not None
        self._decode = leg
        self._journey.advance(RoomFound(leg.endpoint, reserved.reservation))
        self._journey.timeline.record(
            "reserved", decode=leg.endpoint.name, reservation=reserved.reservation
        )
        with suppress(WorkerLost):  # then the leg's own end is on its way to us, and says why
            await self._prefill.stream.send(
                PushTo(
                    reservation=reserved.reservation,
                    segment=reserved.segment,
                    decode=leg.endpoint,
                )
            )


def _accepted_by_a_lost_rank(prefill: Endpoint) -> WorkerLost:
    return WorkerLost(
        f"{prefill.name} has handed over to a decode worker that was lost since; the state is gone "
        "and the prompt will be prefilled again"
    )
