"""Ranks that die, hang, drain or talk nonsense under a request."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import (
    ClusterError,
    Draining,
    ProtocolError,
    Rejected,
    TransferError,
)
from cluster.generation import Timeline
from cluster.messages import (
    PushFailed,
    PushTo,
    Request,
    Tokens,
    Unpacked,
)
from cluster.wire import Stream
from tests.cluster.fakes import (
    AT_ONCE_S,
    FIRST_TOKEN,
    FakeDecode,
    FakePrefill,
    answer,
    attempts,
    handed_over,
    names,
    once,
    pool,
    read,
    request,
    running,
    until,
    with_generation,
)
from tests.cluster.strictness import STRICT

pytestmark = STRICT


async def test_decode_dies_before_it_accepted_and_nothing_is_computed_again() -> None:
    cluster, (_, _, other) = pool(decodes=2)

    class Dies(FakeDecode):
        async def wait_for_state(self, pushed: asyncio.Event) -> None:
            await pushed.wait()
            await self.die()

    class Patient(FakePrefill):
        """Learns from the next place that the first one was lost."""

        async def push(self, stream: Stream, place: PushTo) -> bool:
            self.cluster.pushed[place.reservation].set()
            if place.decode.name == "decode-0/0":
                return False
            await stream.send(handed_over(place.reservation))
            return True

    patient = Patient(cluster, "prefill-0/0")
    timeline = Timeline()
    async with running(cluster, patient, Dies(cluster, "decode-0/0"), other) as caller:
        assert await read(caller, request(), timeline) == (answer(), "length")
        assert attempts(patient) == [("prefill", 1, [])]
    assert "place_lost" in names(timeline)
    assert "lost" not in names(timeline)


@pytest.mark.parametrize("decodes", [1, 2])
async def test_prefill_cannot_reach_a_place_and_nothing_is_computed_again(decodes: int) -> None:
    """Another decode rank gets the state; the same one, once more, if there is no other."""
    cluster, (_, *decode) = pool(decodes=decodes)
    places: list[str] = []

    class CutOff(FakePrefill):
        async def push(self, stream: Stream, place: PushTo) -> bool:
            places.append(place.decode.name)
            if len(places) == 1:
                for reservation in (place.reservation, "of another time"):
                    await stream.send(PushFailed(reservation=reservation, why="no route"))
                return False
            return await super().push(stream, place)

    cut_off = CutOff(cluster, "prefill-0/0")
    timeline = Timeline()
    async with running(cluster, cut_off, *decode) as caller:
        assert await read(caller, request(), timeline) == (answer(), "length")
        assert attempts(cut_off) == [("prefill", 1, [])]
    assert len(set(places)) == decodes
    assert names(timeline).count("place_lost") == 1
    assert "lost" not in names(timeline)


async def test_decode_dies_between_accepting_and_prefills_word_for_it() -> None:
    """The state went with it: prefill's word for the lost rank is not taken for the new one."""
    cluster, (_, _, other) = pool(decodes=2)

    class Dies(FakeDecode):
        async def wait_for_state(self, pushed: asyncio.Event) -> None:
            await self.die()

    class Late(FakePrefill):
        lost: PushTo | None = None

        async def push(self, stream: Stream, place: PushTo) -> bool:
            if self.lost is None:
                self.lost = place
                return False
            if place.decode.name == "decode-1/0" and len(self.heard) == 1:
                await stream.send(handed_over(self.lost.reservation))
                return True
            return await super().push(stream, place)

    late = Late(cluster, "prefill-0/0")
    timeline = Timeline()
    async with running(cluster, late, Dies(cluster, "decode-0/0"), other) as caller:
        assert await read(caller, request(), timeline) == (answer(), "length")
        assert attempts(late) == [("prefill", 1, []), ("prefill", 2, [FIRST_TOKEN])]
    lost = timeline.last("lost")
    assert lost is not None
    assert "prefilled again" in lost.detail["error"]


@pytest.mark.parametrize("index", [1, 3, 5])
async def test_decode_dies_midway_and_the_caller_sees_no_seam(index: int) -> None:
    cluster, (prefill, first, other) = pool(decodes=2)
    first.before_token = once(first.die, at_index=index)
    timeline = Timeline()
    async with running(cluster, prefill, first, other) as caller:
        assert await read(caller, request(), timeline) == (answer(), "length")
        emitted = answer()[:index]
        assert attempts(prefill) == [("prefill", 1, []), ("prefill", 2, emitted)]
        assert attempts(other) == ([("reserve", 2, emitted)] if index < 5 else [])
    assert "lost" in names(timeline)


async def test_prefill_dies_before_its_token_and_another_one_starts_over() -> None:
    cluster, (first, other, decode) = pool(prefills=2)
    first.before_token = once(first.die, at_index=0)
    async with running(cluster, first, other, decode) as caller:
        assert await read(caller, request()) == (answer(), "length")
        assert attempts(other) == [("prefill", 2, [])]
        await until(lambda: not decode.open_streams, AT_ONCE_S)


async def test_prefill_dies_after_its_token_and_before_the_handoff() -> None:
    cluster, (_, other, decode) = pool(prefills=2)

    class Dies(FakePrefill):
        async def push(self, stream: Stream, place: PushTo) -> bool:
            await self.die()
            return True

    async with running(cluster, Dies(cluster, "prefill-0/0"), other, decode) as caller:
        assert await read(caller, request()) == (answer(), "length")
        assert attempts(other) == [("prefill", 2, [FIRST_TOKEN])]


async def test_prefill_may_die_once_decode_has_everything() -> None:
    cluster, (prefill, decode) = pool()
    decode.before_token = once(prefill.stop, at_index=2)
    async with running(cluster, prefill, decode) as caller:
        assert await read(caller, request()) == (answer(), "length")
        assert attempts(decode) == [("reserve", 1, [])]


@pytest.mark.parametrize("error", [Rejected("digest"), TransferError("write")])
async def test_state_that_did_not_arrive_is_computed_again_on_the_same_ranks(
    error: ClusterError,
) -> None:
    cluster, (_, decode) = pool()

    class Fails(FakePrefill):
        async def push(self, stream: Stream, place: PushTo) -> bool:
            if len(self.heard) == 1:
                raise error
            return await super().push(stream, place)

    fails = Fails(cluster, "prefill-0/0")
    async with running(cluster, fails, decode) as caller:
        assert await read(caller, request()) == (answer(), "length")
        assert attempts(fails) == [("prefill", 1, []), ("prefill", 2, [FIRST_TOKEN])]


async def test_a_rank_that_drains_gives_a_request_back_without_costing_an_attempt() -> None:
    cluster, (prefill, leaving, other) = pool(decodes=2)

    async def leave() -> None:
        leaving.draining = True
        raise Draining("decode-0/0 leaves and hands r1 back")

    leaving.before_token = once(leave, at_index=3)
    config = with_generation(max_attempts=1)
    async with running(cluster, prefill, leaving, other, config=config) as caller:
        assert await read(caller, request()) == (answer(), "length")
        assert attempts(other) == [("reserve", 2, answer()[:3])]


async def test_when_every_attempt_is_lost_there_is_exactly_one_error() -> None:
    cluster, (_, decode) = pool()

    class Fails(FakePrefill):
        async def push(self, stream: Stream, place: PushTo) -> bool:
            raise Rejected("digest of window_ring differs")

    fails = Fails(cluster, "prefill-0/0")
    got: list[int] = []
    async with running(cluster, fails, decode) as caller:
        with pytest.raises(Rejected, match="window_ring"):
            await read(caller, request(max_tokens=9), got=got)
        assert [attempt for _, attempt, _ in attempts(fails)] == [1, 2, 3]
    assert got == [FIRST_TOKEN, FIRST_TOKEN + 1, FIRST_TOKEN + 2], "each attempt adds its token"


async def test_a_rank_that_lives_but_says_nothing_is_given_up() -> None:
    cluster, (prefill, stuck, other) = pool(decodes=2)
    stuck.before_token = once(asyncio.Event().wait, at_index=2)
    config = with_generation(step_timeout_s=0.1)
    async with running(cluster, prefill, stuck, other, config=config) as caller:
        assert await read(caller, request()) == (answer(), "length")
        assert attempts(other) == [("reserve", 2, answer()[:2])]
        await until(lambda: not stuck.open_streams, AT_ONCE_S)


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        (Tokens(first=1, token_ids=(101,)), "index 2 is next"),
        (Tokens(first=4, token_ids=(104,)), "index 2 is next"),
        (Tokens(first=2, token_ids=(1, 2, 3, 4, 5)), "6 the limit"),
    ],
    ids=["double", "gap", "too-many"],
)
async def test_tokens_that_cannot_be_right_end_the_request(tokens: Tokens, complaint: str) -> None:
    cluster, (prefill, _) = pool()

    class Confused(FakeDecode):
        async def send_tokens(self, stream: Stream, wanted: Request, start: int) -> None:
            await stream.send(Tokens(first=1, token_ids=(101,)))
            await stream.send(tokens)

    async with running(cluster, prefill, Confused(cluster, "decode-0/0")) as caller:
        with pytest.raises(ProtocolError, match=complaint):
            await read(caller, request())


async def test_a_message_that_does_not_belong_ends_the_request() -> None:
    cluster, (prefill, _) = pool()

    class Confused(FakeDecode):
        async def wait_for_state(self, pushed: asyncio.Event) -> None:
            raise AssertionError

        async def reserve(self, stream: Stream, wanted: Request) -> None:
            await stream.send(Unpacked(seq=1))

    async with running(cluster, prefill, Confused(cluster, "decode-0/0")) as caller:
        with pytest.raises(ProtocolError, match="'unpacked'"):
            await read(caller, request())
