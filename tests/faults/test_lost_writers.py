"""A prefill rank is lost while it may write into decode's blocks: nobody has them until it cannot.

Real prefill processes that push directly; decode, its gates and the caller are in this process.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from cluster.generation import Timeline
from tests.faults.field_cases import LEDGER_S, settles
from tests.faults.gates import GatedCluster
from tests.plain_loop import straight
from tests.rank_process import RankProcess
from tests.tiny import load_tiny, make_prompt, make_request, tiny_config, until

pytestmark = pytest.mark.rank

T_DETECT_S = 1.0
CONFIG = tiny_config(
    transfer={"path": "direct", "cell_bytes": 65536},
    wire={"heartbeat_s": 0.2, "t_detect_s": T_DETECT_S},
)
REQUEST = make_request(make_prompt(70), "gated", max_tokens=5)
BLOCKS = 5  # of 16 positions, that the request needs

Writers = dict[str, RankProcess]


@pytest.fixture
async def cluster() -> AsyncIterator[GatedCluster]:
    straight(REQUEST)
    async with GatedCluster(prefill=0, decode=1, model=load_tiny(), config=CONFIG) as cluster:
        yield cluster


@pytest.fixture
async def writers(cluster: GatedCluster) -> AsyncIterator[Writers]:
    assert cluster.address is not None
    with ExitStack() as life:
        processes = [
            life.enter_context(RankProcess("prefill", number, CONFIG, cluster.address))
            for number in range(2)
        ]
        endpoints = [await asyncio.to_thread(process.ready) for process in processes]
        await until(lambda: len(cluster.router.members()) == 3)
        yield {one.name: process for one, process in zip(endpoints, processes, strict=True)}


async def _told_where(cluster: GatedCluster, writers: Writers, fault: signal.Signals) -> Timeline:
    """A writer suffers `fault` when it is about to hear where it may write; right answer anyway."""
    gate, timeline = cluster.gates.arm("push_opened"), Timeline()
    answer = asyncio.create_task(cluster.answer(REQUEST, timeline))
    await gate.reached()
    routed = timeline.last("routed")
    assert routed is not None
    writers[str(routed.detail["prefill"])].kill(fault)
    gate.open()
    async with asyncio.timeout(20):
        assert tuple(await answer) == straight(REQUEST), timeline.summary()
    handed_over = timeline.last("handed_over")
    assert handed_over is not None
    assert handed_over.detail["path"] == "host/cma"
    return timeline


@pytest.mark.full
async def test_a_writer_that_is_killed_frees_its_blocks_by_its_death(
    cluster: GatedCluster, writers: Writers
) -> None:
    await _told_where(cluster, writers, signal.SIGKILL)
    await settles(cluster)


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, pytest.param(signal.SIGCONT, marks=pytest.mark.full)]
)
async def test_a_writer_that_hangs_keeps_its_blocks_from_others_until_it_answers_or_dies(
    end: signal.Signals, cluster: GatedCluster, writers: Writers
) -> None:
    timeline = await _told_where(cluster, writers, signal.SIGSTOP)
    first = next(event for event in timeline.events if event.name == "routed")
    (decode,) = cluster.decode
    await until(lambda: decode.pool.ledger().blocks.leased == 0)
    assert decode.pool.ledger().blocks.quarantined == BLOCKS
    assert decode.pool.ledger().slots.quarantined == 1
    assert tuple(await cluster.answer(REQUEST)) == straight(REQUEST)  # others are served meanwhile
    assert decode.pool.ledger().blocks.quarantined == BLOCKS
    writers[str(first.detail["prefill"])].kill(end)
    await settles(cluster, LEDGER_S)
