"""A decode group of two processes over gloo: the same tokens, also when one of them is killed."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

import pytest

from cluster.generation import Caller, Timeline
from cluster.messages import Address, Request
from cluster.router import Router
from tests.plain_loop import straight
from tests.rank_process import RankProcess, group_of_processes
from tests.tiny import SECRET, make_prompt, make_request, tiny_config, until

pytestmark = pytest.mark.rank

CONFIG = tiny_config(
    decode={"ranks": 2, "extra_experts": 1},
    transfer={"transport": "nixl"},
    wire={"t_detect_s": 3.0},
    generation={"recovery_wait_s": 60.0},
)


async def test_a_group_answers_and_when_a_rank_is_killed_the_other_lets_go_at_once() -> None:
    """Their answers go on at a rank that is no part of it, long before any call's own limit."""
    requests = [make_request(make_prompt(n), f"r{n}", max_tokens=12) for n in (20, 35, 9)]
    expected = [straight(one) for one in requests]
    router = Router(CONFIG, SECRET)
    address = await router.start()

    async def find_router() -> Address | None:
        return address

    caller = Caller(CONFIG, SECRET, find_router)
    with ExitStack() as life:
        group = group_of_processes("decode", 0, 2, CONFIG, address)
        others = [RankProcess("prefill", 0, CONFIG, address)]
        for rank in (*group, *others):
            life.enter_context(rank)
            await asyncio.to_thread(rank.ready)
        await until(lambda: len(router.members()) == 3)
        timelines = [Timeline() for _ in requests]
        answers = [
            asyncio.create_task(_answer(caller, *pair))
            for pair in zip(requests, timelines, strict=True)
        ]
        await until(lambda: all(one.last("taken_over") is not None for one in timelines), 60)
        began = time.monotonic()
        group[1].kill()
        await until(lambda: all(one.last("lost") is not None for one in timelines), 60)
        assert time.monotonic() - began < CONFIG.life.stuck_after_s / 2
        group[0].kill()  # its head would
        alone = life.enter_context(RankProcess("decode", 1, CONFIG, address))
        await asyncio.to_thread(alone.ready)
        assert [await one for one in answers] == expected
        await caller.close()
    await router.stop()


async def _answer(caller: Caller, request: Request, timeline: Timeline) -> tuple[int, ...]:
    tokens: list[int] = []
    async for delta in caller.generate(request, timeline):
        tokens += delta.token_ids
    return tuple(tokens)
