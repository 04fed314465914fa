"""Real ranks on GPUs, whose state goes from the blocks of one GPU into the blocks of another.

Two GPUs if there are two, else two processes on one. The ranks of this process, and what they say,
are on the first; those in processes of their own on the last.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import cache

import pytest
import torch

from cluster.config import ClusterConfig
from cluster.generation import Timeline
from cluster.messages import Request, Role
from model.load import load_model
from model.transformer import Transformer
from tests.faults.gates import GatedCluster
from tests.rank_process import RankProcess
from tests.tiny import MODEL, TinyCluster, make_prompt, make_request, tiny_config, until

pytestmark = [pytest.mark.gpu, pytest.mark.rank, pytest.mark.timeout(180)]

T_DETECT_S = 1.0
PATHS = {"direct": "nvlink/cuda_ipc", "packed": "nixl/UCX"}
REQUESTS = [
    make_request(make_prompt(length), f"{length}", max_tokens=6)
    for length in (1, 33, 64, 130, 257, 1500)
]
LONG = REQUESTS[-1]


def config_of(path: str, **sections: dict[str, object]) -> ClusterConfig:
    engine = {"num_blocks": 512, "num_slots": 8, "chunk_tokens": 128, "max_length": 2048}
    pool = {"engine": engine, "accelerator": "nvidia", "gpus": 1.0}
    return tiny_config(
        prefill=pool,
        decode=pool,
        transfer={"path": path, "transport": "nixl", "cell_bytes": 65536},
        wire={"heartbeat_s": 0.2, "t_detect_s": T_DETECT_S},
        **sections,
    )


@cache
def model_here() -> Transformer:
    torch.set_num_threads(1)
    return load_model(MODEL, weights="random", seed=0, device=torch.device("cuda", 0))


async def _here(request: Request) -> list[int]:
    """One colocated rank on this GPU: prompt and answer in one place."""
    config = config_of("direct", router={"colocated": True})
    async with TinyCluster(prefill=0, model=model_here(), config=config) as cluster:
        return await cluster.answer(request)


class Ranks:
    """A gated cluster of ranks in this process, and others in processes that can be killed."""

    def __init__(self, cluster: GatedCluster) -> None:
        self.cluster = cluster
        self.processes: dict[str, RankProcess] = {}
        self._life = AsyncExitStack()

    async def start(self, role: Role, numbers: range) -> None:
        assert self.cluster.address is not None
        config, last = self.cluster.config, str(torch.cuda.device_count() - 1)
        made = [
            self._life.enter_context(
                RankProcess(
                    role,
                    number,
                    config,
                    self.cluster.address,
                    environ={"CUDA_VISIBLE_DEVICES": last},
                )
            )
            for number in numbers
        ]
        for process in made:
            self.processes[(await asyncio.to_thread(process.ready)).name] = process
        known = len(self.cluster.ranks) + len(self.processes)
        await until(lambda: len(self.cluster.router.members()) == known)

    async def all_give_back(self, *but: str) -> None:
        async with asyncio.timeout(5):
            assert await self.cluster.settled()
            for name, process in self.processes.items():
                while name not in but and not await asyncio.to_thread(process.all_free):
                    await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self._life.aclose()


async def _ranks(path: str, prefill: int, decode: int) -> AsyncIterator[Ranks]:
    """The given numbers are here, two of the other kind are not."""
    config = config_of(path)
    cluster = GatedCluster(prefill=prefill, decode=decode, model=model_here(), config=config)
    async with cluster:
        ranks = Ranks(cluster)
        try:
            await ranks.start("decode" if prefill else "prefill", range(2))
            yield ranks
        finally:
            await ranks.close()


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def receivers(path: str) -> AsyncIterator[Ranks]:
    async for ranks in _ranks(path, 1, 0):
        yield ranks


@pytest.fixture
async def writers(path: str) -> AsyncIterator[Ranks]:
    async for ranks in _ranks(path, 0, 1):
        yield ranks


def _took(timeline: Timeline, path: str) -> dict[str, float]:
    """Seconds of what a handoff is made of, and to the first token that decode has made."""
    handed_over = timeline.last("handed_over")
    assert handed_over is not None
    assert handed_over.detail["path"] == PATHS[path]
    return {name: float(str(handed_over.detail[name])) for name in ("push_s", "hidden_s", "tail_s")}


async def test_same_tokens_as_in_one_place_and_a_decode_rank_killed_in_mid_push(
    receivers: Ranks, path: str
) -> None:
    cluster = receivers.cluster
    for turn in range(3):  # the first one compiles
        for request in REQUESTS:
            timeline = Timeline()
            assert await cluster.answer(request, timeline) == await _expected(request)
            if turn == 2:
                handed = timeline.last("handed_over")
                assert handed is not None
                print(request.request_id, handed.detail, f"TTFT.. {timeline.summary()[-200:]}")
    pairs = cluster.prefill[0].status()["pairs"]
    print(pairs)
    assert isinstance(pairs, list)
    assert {pair["path"] for pair in pairs} == {PATHS[path]}
    assert {pair["direct"] for pair in pairs} == {path == "direct"}
    assert all(pair["gb_per_s"] > 0 for pair in pairs)
    assert cluster.prefill[0].transport.fallbacks == 0
    assert _took(timeline, path)["hidden_s"] > 0
    await receivers.all_give_back()

    gate, timeline = cluster.gates.arm("write 3"), Timeline()
    answer = asyncio.create_task(cluster.answer(LONG, timeline))
    await gate.reached()
    reserved = timeline.last("reserved")
    assert reserved is not None
    dead = str(reserved.detail["decode"])
    receivers.processes[dead].kill(signal.SIGKILL)
    gate.open()
    async with asyncio.timeout(20):
        assert await answer == await _expected(LONG), timeline.summary()
    taken_over = timeline.last("taken_over")
    assert taken_over is not None
    assert taken_over.detail["decode"] != dead
    _took(timeline, path)
    await receivers.all_give_back(dead)


async def test_a_prefill_rank_killed_or_stopped_in_mid_push_leaves_no_wrong_token_and_no_leak(
    writers: Ranks, path: str
) -> None:
    cluster = writers.cluster
    (decode,) = cluster.decode
    for _ in range(4):  # both have compiled, and both are paired
        assert await cluster.answer(LONG) == await _expected(LONG)
    gate, timeline = cluster.gates.arm("push_opened"), Timeline()
    answer = asyncio.create_task(cluster.answer(LONG, timeline))
    await gate.reached()
    routed = timeline.last("routed")
    assert routed is not None
    writer = str(routed.detail["prefill"])
    gate.open()  # it pushes from now on
    writers.processes[writer].kill(signal.SIGSTOP)
    async with asyncio.timeout(20):
        assert await answer == await _expected(LONG), timeline.summary()
    _took(timeline, path)
    quarantined = decode.pool.ledger().blocks.quarantined
    print(f"{quarantined} blocks are kept for a writer that hangs")
    writers.processes[writer].kill(signal.SIGKILL)
    await writers.all_give_back(writer)
    assert await cluster.answer(LONG) == await _expected(LONG)
    await writers.all_give_back(writer)


_KNOWN: dict[str, list[int]] = {}


async def _expected(request: Request) -> list[int]:
    if request.request_id not in _KNOWN:
        _KNOWN[request.request_id] = await _here(request)
    return _KNOWN[request.request_id]
