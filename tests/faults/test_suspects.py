"""A suspect is killed by its head, when it does not answer, and let alone when it does.

Real processes; the head is in this one, without Ray: it asks the rank over a pipe and kills by
signal, where the real one asks by an actor call.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from cluster.generation import Timeline
from cluster.guard import Guard
from cluster.wire import Identity, new_incarnation
from tests.faults.gates import GatedCluster
from tests.plain_loop import straight
from tests.rank_process import RankProcess
from tests.tiny import SECRET, load_tiny, make_prompt, make_request, tiny_config, until

pytestmark = pytest.mark.rank

T_DETECT_S = 1.0
CONFIG = tiny_config(
    transfer={"transport": "nixl", "cell_bytes": 65536},
    wire={"heartbeat_s": 0.2, "t_detect_s": T_DETECT_S},
)
REQUEST = make_request(make_prompt(70), "suspect", max_tokens=5)


class Head:
    """Of one group with one rank, a process of its own."""

    def __init__(self, cluster: GatedCluster, number: int) -> None:
        assert cluster.address is not None
        self.process = RankProcess("decode", number, CONFIG, cluster.address)
        self.endpoint = self.process.ready()
        self.asked = 0
        self.killed = asyncio.Event()
        self.why = ""
        self.guarding = asyncio.ensure_future(
            Guard(
                {self.endpoint.incarnation: self.endpoint.name},
                answers=self._answers,
                kill=self._kill,
                find_router=cluster.find_router,
                identity=Identity("head", new_incarnation(), SECRET),
                wire=CONFIG.wire,
            ).run()
        )

    async def _answers(self, name: str) -> bool:
        self.asked += 1
        await asyncio.to_thread(self.process.held)
        return True

    async def _kill(self, name: str, why: str) -> None:
        self.why = why
        self.process.kill()
        self.killed.set()

    async def close(self) -> None:
        self.guarding.cancel()
        await asyncio.gather(self.guarding, return_exceptions=True)
        with suppress(ProcessLookupError):
            self.process.kill(signal.SIGCONT)
        self.process.__exit__()


@pytest.fixture
async def cluster() -> AsyncIterator[GatedCluster]:
    straight(REQUEST)
    async with GatedCluster(prefill=1, decode=0, model=load_tiny(), config=CONFIG) as cluster:
        yield cluster


async def _heads(cluster: GatedCluster, number: int) -> list[Head]:
    heads = [Head(cluster, one) for one in range(number)]
    await until(lambda: len(cluster.router.members()) == 1 + number)
    await until(lambda: len(cluster.router._guards) == number)
    return heads


async def test_a_stopped_rank_is_killed_and_its_memory_at_the_peers_is_free(
    cluster: GatedCluster,
) -> None:
    """Stopped in mid-push: the peers notice, the head asks in vain, and death is proven."""
    heads = await _heads(cluster, 2)
    try:
        timeline, gate = Timeline(), cluster.gates.arm("write 1")
        answer = asyncio.create_task(cluster.answer(REQUEST, timeline))
        await gate.reached()
        reserved = timeline.last("reserved")
        assert reserved is not None
        (hung,) = [head for head in heads if head.endpoint.name == reserved.detail["decode"]]
        (well,) = [head for head in heads if head is not hung]
        hung.process.kill(signal.SIGSTOP)
        stopped_at = time.monotonic()
        gate.open()
        async with asyncio.timeout(20):
            await hung.killed.wait()
            took_s = time.monotonic() - stopped_at
            assert tuple(await answer) == straight(REQUEST), timeline.summary()
        print(f"stopped -> proven dead: {took_s:.2f} s")
        assert took_s < 2 * T_DETECT_S + 2.0
        assert "has said nothing" in hung.why
        assert not await asyncio.to_thread(hung.process.alive)
        assert not well.killed.is_set()
        assert await cluster.settled()
    finally:
        for head in heads:
            await head.close()


async def test_a_rank_that_answers_its_head_lives_on_whatever_others_say(
    cluster: GatedCluster,
) -> None:
    """Only the way from prefill to it is broken: the caller complains, and is wrong."""
    heads = await _heads(cluster, 2)
    try:
        cluster.gates.part(heads[0].endpoint.name)
        async with asyncio.timeout(20):
            for _ in range(4):
                assert tuple(await cluster.answer(REQUEST)) == straight(REQUEST)
            await until(lambda: heads[0].asked > 0)
        assert not heads[0].killed.is_set()
        assert await asyncio.to_thread(heads[0].process.alive)
    finally:
        for head in heads:
            await head.close()
