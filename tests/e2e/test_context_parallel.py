"""Prefill groups whose ranks run each prompt together hand over what one rank would."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from cluster.errors import StartupError
from cluster.generation import Caller
from cluster.messages import Address
from cluster.router import Router
from tests.groups import GroupedCluster
from tests.plain_loop import straight
from tests.rank_process import RankProcess, group_of_processes
from tests.tiny import SECRET, make_prompt, make_request, tiny_config, until

REQUESTS = [
    make_request(make_prompt(length), f"r{length}", max_tokens=5) for length in (1, 33, 100, 17)
]


@pytest.mark.parametrize(
    ("ranks", "cp"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.full), (4, 4)]
)
async def test_prompts_that_ranks_run_together_have_the_answers_of_a_plain_loop(
    ranks: int, cp: int
) -> None:
    config = tiny_config(prefill={"ranks": ranks, "cp": cp})
    async with GroupedCluster(config, prefill=(ranks,), decode=(1,), extra=1) as cluster:
        answers = await asyncio.gather(*(cluster.answer(one) for one in REQUESTS))
        assert [tuple(answer) for answer in answers] == [straight(one) for one in REQUESTS]
        leading = [rank.follows for rank in cluster.prefill].count(False)
        assert leading == ranks // cp
        assert [rank.engine.tokens > 0 for rank in cluster.prefill if rank.follows] == [False] * (
            ranks - leading
        )
        assert await cluster.settled()


@pytest.mark.rank
@pytest.mark.full
async def test_a_team_of_processes_runs_prompts_together_over_gloo() -> None:
    config = tiny_config(prefill={"ranks": 2, "cp": 2}, transfer={"transport": "nixl"})
    router = Router(config, SECRET)
    address = await router.start()

    async def find_router() -> Address | None:
        return address

    caller = Caller(config, SECRET, find_router)
    with ExitStack() as life:
        team = group_of_processes("prefill", 0, 2, config, address)
        for rank in (*team, RankProcess("decode", 0, config, address)):
            life.enter_context(rank)
            await asyncio.to_thread(rank.ready)
        await until(lambda: len(router.members()) == 3)
        assert [member.follows for member in router.members()].count(True) == 1
        for request in REQUESTS:
            tokens = [
                token async for delta in caller.generate(request) for token in delta.token_ids
            ]
            assert tuple(tokens) == straight(request)
        await caller.close()
    await router.stop()


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"prefill": {"ranks": 4, "cp": 3}}, "cp 3 does not divide the 4 ranks"),
        ({"prefill": {"ranks": 2, "ep": 1, "cp": 2}}, "cp 2 needs ranks that step together"),
        ({"decode": {"ranks": 2, "cp": 2}}, "decode.cp 2: state arrives at one rank"),
    ],
)
def test_teams_that_cannot_be_are_refused(sections: dict[str, dict[str, int]], why: str) -> None:
    with pytest.raises(StartupError, match=why):
        tiny_config(**sections)
