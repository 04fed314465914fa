"""Ranks as plain objects in this process, each with its engine's thread, on one device.

Ranks that share no experts share one copy of the weights; ranks of a group exchange rows within the
process. No Ray: router and ranks talk over loopback, as in a cluster.
"""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

from cluster.config import ClusterConfig, PoolSection
from cluster.errors import StartupError
from cluster.generation import Caller
from cluster.messages import Address
from cluster.router import Router
from decode_worker.worker import DecodeRank
from engine.expert_exchange import local_exchanges
from engine.expert_group import ExpertGroup
from engine.packed_runner import AnyModel
from model.spec import ModelSpec
from prefill_worker.worker import PrefillRank

SPARE_THREADS = 4  # beside one a rank, for files that are read
KNOWN_S = 30.0  # until the router knows every rank; each reports at once


class RankThreads:
    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._secret = secrets.token_bytes(32)
        self._address: Address | None = None
        self._life = AsyncExitStack()
        self._whole: AnyModel | None = None  # for ranks that share no experts

    async def start(self) -> Caller:
        pools = (self._config.decode, self._config.prefill)
        ranks = sum(pool.groups * pool.ranks for pool in pools)
        # a rank that loads or leaves keeps a thread while it waits for all others of its group
        threads = ThreadPoolExecutor(ranks + SPARE_THREADS, thread_name_prefix="ranks")
        asyncio.get_running_loop().set_default_executor(threads)
        router = Router(self._config, self._secret)
        self._address = await router.start()
        self._life.push_async_callback(router.stop)
        caller = Caller(self._config, self._secret, self._find_router)
        self._life.push_async_callback(caller.close)
        for pool in pools:
            for number in range(pool.groups):
                await self._start(pool, number)
        await until_known(router, ranks)
        return caller

    async def _start(self, pool: PoolSection, number: int) -> None:
        """One group; its ranks start, and leave, together."""
        kind = DecodeRank if pool is self._config.decode else PrefillRank
        group = f"{kind.role}-{number}"
        shared = self._experts(pool, group) if pool.shares_experts else [None] * pool.ranks
        ranks: list[DecodeRank | PrefillRank] = [
            kind(
                config=self._config,
                name=f"{group}/{index}",
                secret=self._secret,
                find_router=self._find_router,
                model=None if experts else self._whole,
                experts=experts,
            )
            for index, experts in enumerate(shared)
        ]

        async def stop() -> None:
            await asyncio.gather(*(rank.stop() for rank in ranks))

        self._life.push_async_callback(stop)
        await asyncio.gather(*(rank.start() for rank in ranks))
        if not pool.shares_experts:
            self._whole = ranks[0].model

    def _experts(self, pool: PoolSection, group: str) -> list[ExpertGroup]:
        spec = ModelSpec.load(self._config.model.path)
        ends = local_exchanges(pool.ranks, timeout_s=self._config.life.stuck_after_s)
        return [ExpertGroup.first(end, group, spec, pool.extra_experts) for end in ends]

    async def stop(self) -> None:
        await self._life.aclose()

    async def _find_router(self) -> Address | None:
        return self._address


async def until_known(router: Router, ranks: int) -> None:
    """StartupError if the router has not heard of so many within KNOWN_S."""
    try:
        async with asyncio.timeout(KNOWN_S):
            while len(router.members()) < ranks:
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise StartupError(
            f"{len(router.members())} of {ranks} ranks have reported within {KNOWN_S:g} s"
        ) from None
