"""A request's whole way, over real sockets, with ranks that do as the test says."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from cluster.errors import (
    BadRequest,
    ClusterError,
    NoRoom,
    PromptTooLong,
    Unavailable,
    WorkerLost,
)
from cluster.generation import Timeline
from cluster.messages import (
    Prefill,
    Request,
    Sampling,
    Started,
    Tokens,
    WireMessage,
    pack_ids,
)
from cluster.wire import Stream
from tests.cluster.fakes import (
    AT_ONCE_S,
    CONFIG,
    FIRST_TOKEN,
    LOAD,
    Cluster,
    FakeDecode,
    FakePrefill,
    Places,
    answer,
    attempts,
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


async def test_an_answer_comes_from_both_ranks_in_order() -> None:
    cluster, ranks = pool()
    timeline = Timeline()
    async with running(cluster, *ranks) as caller:
        assert await read(caller, request(), timeline) == (answer(), "length")
        assert attempts(*ranks) == [("prefill", 1, []), ("reserve", 1, [])]
        await until(lambda: not any(rank.open_streams for rank in ranks))
    assert set(names(timeline)) == {
        "routed",
        "started",
        "reserved",
        "handed_over",
        "taken_over",
        "finished",
    }
    assert len(timeline.token_times) == 6


async def test_many_requests_at_once() -> None:
    cluster, ranks = pool(prefills=2, decodes=3)
    async with running(cluster, *ranks) as caller:
        wanted = [request(max_tokens=2 + n % 7, name=f"r{n}") for n in range(50)]
        got = await asyncio.gather(*(read(caller, one) for one in wanted))
        assert got == [(answer(one.sampling.max_tokens), "length") for one in wanted]


async def test_the_first_token_does_not_wait_for_a_place() -> None:
    cluster, (prefill, decode) = pool()
    assert isinstance(decode, FakeDecode)
    decode.full = True
    async with running(cluster, prefill, decode) as caller:
        async with aclosing(caller.generate(request())) as deltas:
            first = await anext(deltas)
            assert (first.first, first.token_ids) == (0, (FIRST_TOKEN,))
            decode.full = False
            rest = [delta async for delta in deltas]
        assert [token for delta in rest for token in delta.token_ids] == answer()[1:]


async def test_tokens_of_decode_that_come_before_the_first_one_wait_for_it() -> None:
    cluster, (_, decode) = pool()
    may_speak = asyncio.Event()

    class Slow(FakePrefill):
        """Says its token last, as if its own way to the caller were slow."""

        async def serve(self, stream: Stream, first: WireMessage, places: Places) -> None:
            assert isinstance(first, Prefill)
            await stream.send(Started(queued_s=0.0))
            await self.push(stream, await places.get())
            await may_speak.wait()
            await stream.send(Tokens(first=0, token_ids=(FIRST_TOKEN,)))

    async with running(cluster, Slow(cluster, "prefill-0/0"), decode) as caller:
        reading = asyncio.create_task(read(caller, request()))
        await until(lambda: decode.heard and not decode.open_streams)
        assert not reading.done()
        may_speak.set()
        assert await reading == (answer(), "length")


async def test_a_first_token_that_ends_the_answer_makes_no_handoff() -> None:
    """What decode has reserved meanwhile is given back at once."""
    cluster, (_, decode) = pool()

    class Stops(FakePrefill):
        def first_token(self, index: int, wanted: Request) -> Tokens:
            return Tokens(first=index, token_ids=(7,), finish="stop")

    prefill = Stops(cluster, "prefill-0/0")
    prefill.before_token = once(lambda: until(lambda: cluster.pushed), at_index=0)
    async with running(cluster, prefill, decode) as caller:
        assert await read(caller, request()) == ([7], "stop")
        await until(lambda: not decode.open_streams, AT_ONCE_S)
        assert not any(pushed.is_set() for pushed in cluster.pushed.values())


async def test_one_token_needs_no_decode_rank() -> None:
    cluster, (prefill, decode) = pool()
    async with running(cluster, prefill, decode) as caller:
        assert await read(caller, request(max_tokens=1)) == (answer(1), "length")
        assert decode.heard == []


async def test_colocated_requests_go_to_one_decode_rank() -> None:
    cluster, (prefill, decode) = pool()
    router = CONFIG.router.model_copy(update={"colocated": True})
    cluster.config = CONFIG.model_copy(update={"router": router})
    timeline = Timeline()
    async with running(cluster, prefill, decode) as caller:
        assert await read(caller, request(), timeline) == (answer(), "length")
        assert attempts(prefill, decode) == [("generate", 1, [])]
    assert names(timeline) == ["routed", "started", "finished"]


async def test_a_request_that_has_output_already_goes_on_after_it() -> None:
    cluster, ranks = pool()
    async with running(cluster, *ranks) as caller:
        resumed = request().resume_after([50, 51])
        assert await read(caller, resumed) == (answer()[2:], "length")
        assert attempts(*ranks) == [("prefill", 1, [50, 51]), ("reserve", 1, [50, 51])]


@pytest.mark.parametrize("why", ["full", "leaving"])
async def test_another_decode_rank_is_asked_when_one_has_no_room(why: str) -> None:
    cluster, (prefill, refusing, other) = pool(decodes=2)
    timeline = Timeline()
    async with running(cluster, prefill, refusing, other) as caller:
        setattr(refusing, why, True)
        assert await read(caller, request(), timeline) == (answer(), "length")
        assert attempts(prefill) == [("prefill", 1, [])], "a refusal costs no attempt"
    refused = timeline.last("refused")
    reserved = timeline.last("reserved")
    assert refused is not None
    assert refused.detail["decode"] == "decode-0/0"
    assert reserved is not None
    assert reserved.detail["decode"] == "decode-1/0"


async def test_a_full_rank_is_asked_again() -> None:
    cluster, (prefill, decode) = pool()
    assert isinstance(decode, FakeDecode)
    decode.full = True
    async with running(cluster, prefill, decode) as caller:
        reading = asyncio.create_task(read(caller, request()))
        await until(lambda: len(decode.heard) >= 3)
        decode.full = False
        assert await reading == (answer(), "length")


async def test_without_room_in_time_there_is_one_error_and_prefill_hears_of_it() -> None:
    cluster, (prefill, decode) = pool()
    assert isinstance(decode, FakeDecode)
    decode.full = True
    got: list[int] = []
    config = with_generation(reserve_timeout_s=0.1)
    async with running(cluster, prefill, decode, config=config) as caller:
        with pytest.raises(Unavailable, match="had room within") as raised:
            await read(caller, request(), got=got)
        assert raised.value.retry_after_s
        await until(lambda: not prefill.open_streams, AT_ONCE_S)
        assert len(prefill.heard) == 1
    assert got == [FIRST_TOKEN]


async def test_a_request_that_decode_refuses_is_not_tried_again() -> None:
    cluster, (prefill, _) = pool()

    class Picky(FakeDecode):
        async def reserve(self, stream: Stream, wanted: Request) -> None:
            raise BadRequest("logit_bias: token id 7 is not in the vocabulary")

    async with running(cluster, prefill, Picky(cluster, "decode-0/0")) as caller:
        with pytest.raises(BadRequest, match="vocabulary"):
            await read(caller, request())
        await until(lambda: not prefill.open_streams, AT_ONCE_S)
        assert len(prefill.heard) == 1


class FullPrefill(FakePrefill):
    async def serve(self, stream: Stream, first: WireMessage, places: Places) -> None:
        raise NoRoom(f"{self.name} has 64 prompts waiting", retry_after_s=2.0)


async def test_a_prefill_rank_with_a_full_queue_sends_the_request_to_another() -> None:
    cluster, (_, other, decode) = pool(prefills=2)
    full = FullPrefill(cluster, "prefill-0/0")
    config = with_generation(max_attempts=1)
    async with running(cluster, full, other, decode, config=config) as caller:
        assert await read(caller, request()) == (answer(), "length")
        assert len(full.heard) == 1


async def test_when_every_queue_is_full_there_is_one_no_room_at_once() -> None:
    cluster, (decode,) = pool(prefills=0)
    full = [FullPrefill(cluster, f"prefill-{n}/0") for n in range(3)]
    async with running(cluster, *full, decode) as caller:
        with pytest.raises(NoRoom, match="64 prompts waiting") as raised:
            await read(caller, request())
        assert raised.value.retry_after_s == 2.0
        assert [len(rank.heard) for rank in full] == [1, 1, 1]


@pytest.mark.parametrize(
    ("wanted", "error", "complaint"),
    [
        (request(prompt=()), BadRequest, "empty"),
        (request(prompt=(1, -1)), BadRequest, "-1 is negative"),
        (request().resume_after(list(range(6))), BadRequest, "6 tokens have been generated"),
        (request(max_tokens=1022), PromptTooLong, r"3 tokens.*1022.*1025; at most 1024"),
        (
            Request(request_id="r", prompt=b"\0" * 5, sampling=Sampling()),
            BadRequest,
            "multiple of 4",
        ),
        (
            Request(request_id="r", prompt=pack_ids([1]), sampling=Sampling(stop_token_ids=(-2,))),
            BadRequest,
            "stop_token_ids",
        ),
    ],
    ids=["empty", "negative", "complete", "too-long", "bytes", "stop-ids"],
)
async def test_what_cannot_be_served_is_refused_before_any_rank_hears_of_it(
    wanted: Request, error: type[ClusterError], complaint: str
) -> None:
    cluster, ranks = pool()
    async with running(cluster, *ranks) as caller:
        with pytest.raises(error, match=complaint):
            await read(caller, wanted)
        assert not any(rank.heard for rank in ranks)


async def test_the_longest_request_that_fits_is_served() -> None:
    cluster, ranks = pool()
    async with running(cluster, *ranks) as caller:
        wanted = request(max_tokens=4, prompt=tuple(range(1020)))
        assert await read(caller, wanted) == (answer(4), "length")


async def test_the_smaller_limit_of_two_pools_rules() -> None:
    cluster = Cluster()
    prefill = FakePrefill(cluster, "p", LOAD.model_copy(update={"max_length": 256}))
    decode = FakeDecode(cluster, "d", LOAD.model_copy(update={"max_length": 512}))
    async with running(cluster, prefill, decode) as caller:
        with pytest.raises(PromptTooLong, match="at most 256"):
            await read(caller, request(max_tokens=10, prompt=tuple(range(300))))
        assert not prefill.heard
        assert not decode.heard


async def test_a_lost_worker_is_named() -> None:
    cluster, (prefill, decode) = pool()
    decode.before_token = once(decode.die, at_index=2)
    config = with_generation(max_attempts=1)
    async with running(cluster, prefill, decode, config=config) as caller:
        with pytest.raises(WorkerLost, match="decode-0/0"):
            await read(caller, request())
