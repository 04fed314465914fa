"""A request when nobody is there, and ranks when their caller has left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cluster.errors import (
    RequestCancelled,
    Unavailable,
)
from cluster.generation import Caller, Timeline
from cluster.journey import FORGIVE_AFTER
from cluster.messages import (
    PushTo,
    Request,
)
from cluster.wire import Stream
from tests.cluster.fakes import (
    AT_ONCE_S,
    CONFIG,
    SECRET,
    FakeDecode,
    FakePrefill,
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


async def test_requests_go_on_while_the_router_is_away() -> None:
    cluster, ranks = pool(decodes=2)
    async with running(cluster, *ranks) as caller:
        assert await read(caller, request()) == (answer(), "length")
        await cluster.stop_router()
        await until(lambda: caller._routes._router is None)
        for number in range(4):
            wanted = request(name=f"away-{number}")
            assert await read(caller, wanted) == (answer(), "length")
        await cluster.start_router()
        await until(lambda: caller._routes._router is not None)
        await until(lambda: len(caller.members()) == 3)
        assert await read(caller, request()) == (answer(), "length")


def held_after_a_loss(timeline: Timeline) -> bool:
    told = names(timeline)
    return "lost" in told and "held" in told[told.index("lost") :]


async def test_a_request_waits_for_a_pool_that_is_just_being_restarted() -> None:
    cluster, (prefill, decode) = pool()
    decode.before_token = once(decode.die, at_index=3)
    timeline = Timeline()
    async with running(cluster, prefill, decode) as caller:
        await until(lambda: len(caller.members()) == 2)
        reading = asyncio.create_task(read(caller, request(), timeline))
        await until(lambda: held_after_a_loss(timeline))
        await decode.restart()
        assert await reading == (answer(), "length")
        assert attempts(decode) == [("reserve", 1, []), ("reserve", 2, answer()[:3])]


async def test_who_dies_while_the_router_is_away_is_not_tried_again_and_again() -> None:
    """Not even when he would be forgiven: nobody has said that he lives."""
    cluster, (prefill, decode) = pool()
    decode.before_token = once(decode.die, at_index=3)
    wire = CONFIG.wire.model_copy(update={"t_detect_s": 0.2})
    config = with_generation(recovery_wait_s=LONG_S, max_attempts=2).model_copy(
        update={"wire": wire}
    )
    timeline = Timeline()
    async with running(cluster, prefill, decode, config=config) as caller:
        await until(lambda: len(caller.members()) == 2)
        await cluster.stop_router()
        await until(lambda: caller._routes._router is None)
        reading = asyncio.create_task(read(caller, request(), timeline))
        await until(lambda: held_after_a_loss(timeline))
        now = asyncio.get_running_loop().time
        held_at = now()
        await until(lambda: now() - held_at > 2 * FORGIVE_AFTER * wire.t_detect_s)
        assert not reading.done()
        await cluster.start_router()
        await decode.restart()
        assert await reading == (answer(), "length")


LONG_S = 30.0  # a patience that no test here comes to the end of


@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_a_new_request_hears_soon_that_a_pool_is_gone_and_one_that_runs_waits(
    lost: str,
) -> None:
    cluster, (prefill, decode) = pool()
    decode.before_token = once(decode.die, at_index=3)
    timeline = Timeline()
    config = with_generation(recovery_wait_s=LONG_S, new_request_wait_s=0.05)
    async with running(cluster, prefill, decode, config=config) as caller:
        await until(lambda: len(caller.members()) == 2)
        reading = asyncio.create_task(read(caller, request(), timeline))
        await until(lambda: held_after_a_loss(timeline))
        if lost == "prefill":
            await prefill.stop()
            await until(lambda: not caller.members())
            await decode.restart()
            await until(lambda: len(caller.members()) == 1)
        with pytest.raises(Unavailable, match=f"no {lost} worker is up") as raised:
            await read(caller, request(name="new"))
        assert raised.value.retry_after_s
        assert not reading.done()
        await (decode if lost == "decode" else prefill).restart()
        assert await reading == (answer(), "length")


async def test_a_new_request_is_held_for_a_moment() -> None:
    cluster, (prefill, decode) = pool()
    timeline = Timeline()
    config = with_generation(new_request_wait_s=LONG_S, recovery_wait_s=LONG_S)
    async with running(cluster, prefill, config=config) as caller:
        await until(lambda: len(caller.members()) == 1)
        reading = asyncio.create_task(read(caller, request(), timeline))
        await until(lambda: "held" in names(timeline))
        await cluster.add(decode)
        assert await reading == (answer(), "length")


async def test_a_new_request_waits_for_the_first_word_of_who_is_there() -> None:
    """Longer than for a pool that is known to be away; the first word may lack ranks, too."""
    cluster, ranks = pool()
    config = with_generation(new_request_wait_s=1.0, recovery_wait_s=LONG_S)
    timeline = Timeline()
    async with running(cluster, *ranks, config=config) as other:
        caller = Caller(config, SECRET, cluster.find_router)
        await cluster.stop_router()
        reading = asyncio.create_task(read(caller, request(), timeline))
        await until(lambda: "held" in names(timeline))
        waiting = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() - waiting > 1.1)
        assert not reading.done()
        await cluster.start_router()
        await until(lambda: len(other.members()) == 2)
        assert await reading == (answer(), "length")
        await caller.close()


async def test_a_prompt_that_is_computed_outlives_the_decode_pool() -> None:
    """Longer than ranks without room are asked, and nothing is computed again."""
    cluster, (prefill, decode) = pool()

    class Dying(FakeDecode):
        async def reserve(self, stream: Stream, wanted: Request) -> None:
            await self.die()

    dying = Dying(cluster, decode.name)
    config = with_generation(reserve_timeout_s=1.0, recovery_wait_s=LONG_S)
    async with running(cluster, prefill, dying, config=config) as caller:
        reading = asyncio.create_task(read(caller, request()))
        await until(lambda: dying.dying is not None and dying.dying.done())
        waiting = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() - waiting > 1.2)
        assert not reading.done()
        await cluster.add(decode)
        assert await reading == (answer(), "length")
        assert attempts(prefill) == [("prefill", 1, [])]


@pytest.mark.parametrize("up", ["nobody", "prefill", "decode"])
async def test_when_no_group_comes_up_there_is_exactly_one_unavailable(up: str) -> None:
    cluster, (prefill, decode) = pool()
    ranks = {"nobody": [], "prefill": [prefill], "decode": [decode]}[up]
    config = with_generation(recovery_wait_s=0.15)
    async with running(cluster, *ranks, config=config) as caller:
        lacking = "decode" if up == "prefill" else "prefill"
        expected = f"no {lacking} worker is up"
        with pytest.raises(Unavailable, match=expected) as raised:
            await read(caller, request())
        assert raised.value.retry_after_s


async def test_without_a_router_there_is_exactly_one_unavailable() -> None:
    async def nowhere() -> None:
        return None

    caller = Caller(with_generation(recovery_wait_s=0.1), b"s" * 32, nowhere)
    with pytest.raises(Unavailable):
        await read(caller, request())
    await caller.close()


async def test_a_lost_rank_that_was_not_dead_is_forgiven() -> None:
    """Its connection broke, and it is the only one there is."""
    cluster, (prefill, decode) = pool()
    wire = CONFIG.wire.model_copy(update={"t_detect_s": 0.2})
    config = CONFIG.model_copy(update={"wire": wire})

    async def cut() -> None:
        for connection in list(decode.server._connections):
            if connection.peer.role == "caller":
                connection.abort()

    decode.before_token = once(cut, at_index=3)
    async with running(cluster, prefill, decode, config=config) as caller:
        assert await read(caller, request()) == (answer(), "length")
        assert [attempt for _, attempt, _ in attempts(decode)] == [1, 2]


async def leave_by_closing(caller: Caller, after: int) -> None:
    deltas = caller.generate(request(max_tokens=1000))
    for _ in range(after):
        await anext(deltas)
    await deltas.aclose()


async def leave_by_cancelling(caller: Caller, after: int) -> None:
    seen = 0
    enough = asyncio.Event()

    async def consume() -> None:
        nonlocal seen
        async for _ in caller.generate(request(max_tokens=1000)):
            seen += 1
            if seen == after:
                enough.set()

    consuming = asyncio.create_task(consume())
    await enough.wait()
    consuming.cancel()
    await asyncio.wait([consuming])
    assert consuming.cancelled()


async def leave_by_forgetting(caller: Caller, after: int) -> None:
    deltas = caller.generate(request(max_tokens=1000))
    for _ in range(after):
        await anext(deltas)
    del deltas


@pytest.mark.parametrize("leave", [leave_by_closing, leave_by_cancelling, leave_by_forgetting])
@pytest.mark.parametrize("after", [1, 3])
async def test_a_caller_who_leaves_is_heard_by_both_ranks_at_once(
    leave: Callable[[Caller, int], Awaitable[None]], after: int
) -> None:
    cluster, (_, decode) = pool()
    ends = asyncio.Event()

    class Lingers(FakePrefill):
        async def push(self, stream: Stream, place: PushTo) -> bool:
            await super().push(stream, place)
            await ends.wait()
            return True

    async def slowly(index: int) -> None:
        await asyncio.sleep(0.005)

    lingers = Lingers(cluster, "prefill-0/0")
    decode.before_token = slowly
    async with running(cluster, lingers, decode) as caller:
        await leave(caller, after)
        await until(lambda: not lingers.open_streams and not decode.open_streams, AT_ONCE_S)
        ends.set()


async def test_a_caller_who_leaves_while_a_place_is_sought_leaves_nothing_reserved() -> None:
    cluster, (prefill, _) = pool()
    asked = asyncio.Event()

    class Slow(FakeDecode):
        async def reserve(self, stream: Stream, wanted: Request) -> None:
            asked.set()
            await asyncio.Event().wait()

    slow = Slow(cluster, "decode-0/0")
    async with running(cluster, prefill, slow) as caller:
        reading = asyncio.create_task(read(caller, request()))
        await asked.wait()
        reading.cancel()
        await until(lambda: not slow.open_streams and not prefill.open_streams, AT_ONCE_S)


async def test_closing_the_caller_ends_its_requests_with_one_error() -> None:
    cluster, (prefill, decode) = pool()
    decode.before_token = once(asyncio.Event().wait, at_index=2)
    async with running(cluster, prefill, decode) as caller:
        got: list[int] = []
        reading = asyncio.create_task(read(caller, request(), got=got))
        await until(lambda: len(got) == 2)
        await caller.close()
        with pytest.raises(RequestCancelled):
            await reading
