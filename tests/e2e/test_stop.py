"""A reader finds the end of an answer himself: decode stops at once, and the request ended well."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from cluster.generation import Timeline
from cluster.messages import Stop
from tests.faults.gates import GatedCluster
from tests.tiny import TinyCluster, make_prompt, make_request, tiny_config, until


def outcome_of(timeline: Timeline) -> str:
    finished = timeline.last("finished")
    assert finished is not None
    return str(finished.detail["outcome"])


@pytest.mark.parametrize("colocated", [False, True], ids=["disaggregated", "colocated"])
async def test_decode_stops_at_once_and_gives_its_memory_back(colocated: bool) -> None:
    config = tiny_config(router={"colocated": colocated})
    async with TinyCluster(config=config) as cluster:
        (rank,) = cluster.decode
        request = make_request(make_prompt(40), max_tokens=400)
        timeline, seen = Timeline(), list[int]()
        async with aclosing(cluster.caller.generate(request, timeline)) as answer:
            async for delta in answer:
                seen += delta.token_ids
                if len(seen) >= 6:
                    await answer.stop(6)
                    break
        assert outcome_of(timeline) == "stop"
        assert await cluster.settled()
        steps = rank.health().steps
        assert rank.status()["stops"] == 1
        assert steps < 300  # far from the end
        assert len(await cluster.answer(make_request(make_prompt(5), "next", max_tokens=3))) == 3
        assert rank.health().steps - steps <= 3  # nothing of the old one ran beside it


async def test_a_stop_at_the_first_token_reaches_a_decode_rank_that_has_only_a_reservation() -> (
    None
):
    async with GatedCluster(config=tiny_config(transfer={"cell_bytes": 4096})) as cluster:
        token, gate = cluster.gates.arm("token 0"), cluster.gates.arm("write 1")
        timeline = Timeline()
        request = make_request(make_prompt(70), max_tokens=50)
        async with aclosing(cluster.caller.generate(request, timeline)) as answer:
            reading = asyncio.ensure_future(anext(answer))
            await gate.reached()
            token.open()
            (first,) = (await reading).token_ids
            await answer.stop(1)
        assert outcome_of(timeline) == "stop"
        gate.open()
        assert await cluster.settled()
        await until(lambda: cluster.decode[0].status()["stops"] == 1)
        assert (await cluster.answer(request))[0] == first


async def test_leaving_without_a_stop_is_a_cancelled_request() -> None:
    async with TinyCluster() as cluster:
        timeline = Timeline()
        request = make_request(make_prompt(20), max_tokens=200)
        async with aclosing(cluster.caller.generate(request, timeline)) as answer:
            await anext(answer)
        assert outcome_of(timeline) == "cancelled"
        assert await cluster.settled()
        assert cluster.decode[0].status()["stops"] == 0


async def test_a_stop_after_the_last_token_changes_nothing() -> None:
    async with TinyCluster() as cluster:
        timeline = Timeline()
        request = make_request(make_prompt(20), max_tokens=3)
        async with aclosing(cluster.caller.generate(request, timeline)) as answer:
            async for delta in answer:
                if delta.finish is not None:
                    await answer.stop(2)
                    break
        assert outcome_of(timeline) == "length"
        assert await cluster.settled()


async def test_tokens_that_were_told_beyond_the_end_are_counted_by_the_rank() -> None:
    """What a caller's late finding costs: for people, nothing depends on it."""
    async with TinyCluster() as cluster:
        request = make_request(make_prompt(20), max_tokens=300)
        async with aclosing(cluster.caller.generate(request)) as answer:
            seen = 0
            async for delta in answer:
                seen += len(delta.token_ids)
                if seen >= 10:
                    await answer.stop(4)
                    break
        assert await cluster.settled()
        wasted = cluster.decode[0].status()["told_in_vain"]
        assert isinstance(wasted, int)
        assert wasted >= 6


def test_a_stop_names_an_index() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        Stop(index=-1)
