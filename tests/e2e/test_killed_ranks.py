"""Ranks are killed while they work; the client sees the same tokens, once each, with no seam."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from cluster.generation import Caller, Timeline
from cluster.messages import Address, Request, Role
from cluster.router import Router
from tests.rank_process import RankProcess
from tests.tiny import SECRET, make_prompt, make_request, tiny_config, until

pytestmark = pytest.mark.rank

CONFIG = tiny_config(transfer={"transport": "nixl"}, wire={"t_detect_s": 3.0})


@dataclass
class Processes:
    """1P2D, and a caller in this process."""

    router: Address
    caller: Caller
    ranks: dict[str, RankProcess]  # by name

    async def stream(self, request: Request, timeline: Timeline) -> AsyncIterator[int]:
        index = request.output_length
        async for delta in self.caller.generate(request, timeline):
            assert delta.first == index
            index += len(delta.token_ids)
            for token in delta.token_ids:
                yield token

    async def answer(self, request: Request, timeline: Timeline | None = None) -> list[int]:
        return [token async for token in self.stream(request, timeline or Timeline())]

    @staticmethod
    def decode_of(timeline: Timeline, event: str = "taken_over") -> str:
        """The decode rank's name in the latest event of that name."""
        found = timeline.last(event)
        assert found is not None
        return str(found.detail["decode"])


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    router = Router(CONFIG, SECRET)
    address = await router.start()

    async def find_router() -> Address | None:
        return address

    caller = Caller(CONFIG, SECRET, find_router)
    with ExitStack() as life:
        wanted: list[tuple[Role, int]] = [("prefill", 0), ("decode", 0), ("decode", 1)]
        started = [
            life.enter_context(RankProcess(role, number, CONFIG, address))
            for role, number in wanted
        ]
        endpoints = [await asyncio.to_thread(process.ready) for process in started]
        await until(lambda: len(router.members()) == 3)
        ranks = {one.name: process for one, process in zip(endpoints, started, strict=True)}
        yield Processes(address, caller, ranks)
        await caller.close()
    await router.stop()


async def gives_all_back(rank: RankProcess) -> bool:
    """All memory of that rank is free, or will be before long."""
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(rank.all_free):
            await asyncio.sleep(0.02)
    return True


async def test_decode_is_killed_in_mid_stream_and_the_client_sees_no_seam(
    processes: Processes,
) -> None:
    request = make_request(make_prompt(40), max_tokens=24, temperature=1.2, seed=7)
    expected = await processes.answer(request)
    timeline, seen, killed = Timeline(), list[int](), ""
    async for token in processes.stream(request, timeline):
        seen.append(token)
        if len(seen) == 6:
            killed = processes.decode_of(timeline)
            processes.ranks[killed].kill()
    assert seen == expected
    assert [event.name for event in timeline.events].count("lost") == 1
    assert processes.decode_of(timeline) != killed
    for name in set(processes.ranks) - {killed}:
        assert await gives_all_back(processes.ranks[name])


async def test_prefill_is_killed_after_its_part_and_in_mid_prompt_and_decode_lives_on(
    processes: Processes,
) -> None:
    request = make_request(make_prompt(33), max_tokens=12)
    expected = await processes.answer(request)
    timeline, seen = Timeline(), list[int]()
    async for token in processes.stream(request, timeline):
        seen.append(token)
        if len(seen) == 4:
            processes.ranks["prefill-0/0"].kill()
    assert seen == expected
    assert timeline.last("lost") is None

    with RankProcess("prefill", 0, CONFIG, processes.router) as second:
        await asyncio.to_thread(second.ready)
        assert await processes.answer(request) == expected
        timeline, long = Timeline(), make_request(make_prompt(400), max_tokens=2)
        answer = asyncio.create_task(processes.answer(long, timeline))
        await until(lambda: timeline.last("reserved") is not None)
        second.kill()
        await until(lambda: timeline.last("held") is not None)
        with RankProcess("prefill", 0, CONFIG, processes.router) as third:
            assert len(await answer) == 2
            assert await processes.answer(long) == await answer
            assert await gives_all_back(third)
    for name in ("decode-0/0", "decode-1/0"):  # same processes, and nothing is held for the dead
        assert await gives_all_back(processes.ranks[name])


async def test_decode_stops_answering_in_mid_push_and_the_state_goes_elsewhere(
    processes: Processes,
) -> None:
    """It hangs rather than dies, so nothing but its silence tells."""
    request = make_request(make_prompt(200), max_tokens=4)
    expected = await processes.answer(request)
    timeline = Timeline()
    seen, stopped = list[int](), ""
    async for token in processes.stream(request, timeline):
        seen.append(token)
        if not stopped:
            stopped = processes.decode_of(timeline, "reserved")
            processes.ranks[stopped].kill(signal.SIGSTOP)
    assert seen == expected
    assert processes.decode_of(timeline) != stopped
