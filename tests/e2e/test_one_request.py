"""One request through a whole cluster in one process: it ends well, or it leaves nothing behind."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from cluster.errors import BadRequest, PromptTooLong, StartupError, Unavailable
from cluster.generation import Timeline
from tests.tiny import StateModel, TinyCluster, make_prompt, make_request, tiny_config, until


async def test_many_requests_at_once_give_the_answers_that_they_give_alone() -> None:
    requests = [
        make_request(make_prompt(3 + 11 * n, n), f"r{n}", max_tokens=2 + n % 5, temperature=n % 2)
        for n in range(7)
    ]
    async with TinyCluster(prefill=2, decode=2) as cluster:
        alone = [await cluster.answer(request) for request in requests]
        together = await asyncio.gather(*(cluster.answer(request) for request in requests))
        assert together == alone
        assert await cluster.settled()


async def test_colocated_and_disaggregated_answers_are_equal() -> None:
    requests = [make_request(make_prompt(length), f"r{length}") for length in (1, 2, 33, 64, 65)]
    answers = []
    for colocated in (False, True):
        config = tiny_config(router={"colocated": colocated})
        async with TinyCluster(config=config) as cluster:
            answers.append([await cluster.answer(request) for request in requests])
            assert bool(cluster.prefill[0].health().steps) is not colocated
    assert answers[0] == answers[1]


async def test_a_stop_id_ends_the_answer_on_either_rank() -> None:
    async with TinyCluster() as cluster:
        whole = make_request(make_prompt(20), max_tokens=12)
        answer = await cluster.answer(whole)
        for index in (0, 1, 5):
            stopping = make_request(
                make_prompt(20), max_tokens=12, ignore_stop=False, stop_token_ids=(answer[index],)
            )
            assert await cluster.answer(stopping) == answer[: answer.index(answer[index]) + 1]
        assert await cluster.settled()


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
async def test_a_client_that_leaves_gives_all_memory_back_on_both_sides(tokens: int) -> None:
    """Before the first token, and after the first one, in mid-handoff, and in mid-answer."""
    async with TinyCluster() as cluster:
        request = make_request(make_prompt(100), max_tokens=300)
        seen = list[int]()
        async with aclosing(cluster.caller.generate(request)) as deltas:
            if tokens:
                async for delta in deltas:
                    seen += delta.token_ids
                    if len(seen) >= tokens:
                        break
            else:
                waiting = asyncio.ensure_future(anext(deltas))
                await until(lambda: cluster.prefill[0].health().steps > 0)
                waiting.cancel()
                await asyncio.wait([waiting])
        assert await cluster.settled()
        steps = [rank.health().steps for rank in cluster.ranks]
        assert len(await cluster.answer(make_request(make_prompt(5), "next", max_tokens=2))) == 2
        assert [a.health().steps - b for a, b in zip(cluster.ranks, steps, strict=True)] == [1, 1]


async def test_requests_wait_for_room_on_decode_and_are_all_served() -> None:
    config = tiny_config(decode={"engine": {"num_blocks": 6, "num_slots": 8, "max_length": 512}})
    async with TinyCluster(config=config) as cluster:
        requests = [make_request(make_prompt(40, n), f"r{n}", max_tokens=40) for n in range(5)]
        timelines = [Timeline() for _ in requests]
        answers = await asyncio.gather(*map(cluster.answer, requests, timelines))
        assert [len(answer) for answer in answers] == [40] * 5
        names = [event.name for timeline in timelines for event in timeline.events]
        assert "refused" in names
        assert "lost" not in names  # waiting is no failure, and nothing was computed twice
        assert cluster.prefill[0].health().steps <= 10
        assert await cluster.settled()


async def test_no_room_for_too_long_is_one_error_that_says_when_to_come_back() -> None:
    config = tiny_config(
        decode={"engine": {"num_blocks": 22, "num_slots": 8, "max_length": 512}},
        generation={"reserve_timeout_s": 0.2},
    )
    async with TinyCluster(config=config) as cluster:
        long = make_request(make_prompt(20), "long", max_tokens=300)
        async with aclosing(cluster.caller.generate(long)) as deltas:
            await anext(deltas)
            with pytest.raises(Unavailable) as caught:
                await cluster.answer(make_request(make_prompt(30), "other"))
            assert caught.value.retry_after_s
        assert await cluster.settled()


async def test_decode_drains_while_it_answers_and_hands_the_rest_to_another() -> None:
    async with TinyCluster(decode=2) as cluster:
        request = make_request(make_prompt(30), max_tokens=60)
        expected = await cluster.answer(request)
        timeline, seen = Timeline(), list[int]()
        drained = None
        async for delta in cluster.deltas(request, timeline):
            seen += delta.token_ids
            if len(seen) > 5 and drained is None:
                taken = timeline.last("taken_over")
                assert taken is not None
                (rank,) = [one for one in cluster.decode if one.name == taken.detail["decode"]]
                drained = asyncio.create_task(rank.drain(timeout_s=0.0))
        assert seen == expected
        assert drained is not None
        await drained
        assert await cluster.settled()


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("prefill", {"engine": {"max_length": 5000}}, "4096"),
        ("transfer", {"cell_bytes": 16384 + 32}, "multiple of 64"),
    ],
)
async def test_sizes_that_do_not_fit_are_said_at_the_start(
    section: str, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(StartupError, match=said):
        async with TinyCluster(config=tiny_config(**{section: values})):
            pass


async def test_what_is_wrong_with_a_request_is_said_and_nobody_else_notices() -> None:
    async with TinyCluster() as cluster:
        good = make_request(make_prompt(50), "good", max_tokens=20)
        expected = await cluster.answer(good)
        running = asyncio.create_task(cluster.answer(good))
        for bad, error in (
            (make_request([5, 2048]), BadRequest),
            (make_request([5], stop_token_ids=(9999,)), BadRequest),
            (make_request([5] * 500, max_tokens=13), PromptTooLong),
            (make_request([5, StateModel.POISON]), Exception),
        ):
            with pytest.raises(error):
                await cluster.answer(bad)
        assert await running == expected
        assert await cluster.settled()
        assert all(rank.health().alive for rank in cluster.ranks)
