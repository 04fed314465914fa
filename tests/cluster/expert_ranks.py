"""Fake ranks that share experts: they report to a real router, and switch when they are told to.

A test decides what a rank has counted and when its group switches; nothing here computes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.config import ClusterConfig
from cluster.expert_placement import first_placement
from cluster.messages import Address, Endpoint, Member, Role
from cluster.placement_file import GroupPlacement
from cluster.reporter import Reporter
from cluster.router_link import FindRouter
from cluster.wire import new_incarnation
from engine.expert_reporting import ExpertReporting
from tests.cluster.fakes import LOAD, identity

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FakeSwitch:
    version: int
    nbytes: int
    fetch_s: float
    stall_s: float


class FakeSlots:
    """What an ExpertSlots is to those who report of it."""

    def __init__(self, placed: GroupPlacement) -> None:
        self.placed = placed
        self.last_switch: FakeSwitch | None = None
        self.offered: list[GroupPlacement] = []
        self.refuse: str | None = None
        layers, _, _ = placed.placement.shape
        self.counts: Ints = np.zeros((layers, placed.placement.experts), np.int64)
        self.steps = 0

    def count(self, counts: npt.ArrayLike, steps: int) -> None:
        self.counts = self.counts + np.asarray(counts)
        self.steps += steps

    def take_counts(self) -> tuple[Ints, int]:
        taken = self.counts, self.steps
        self.counts, self.steps = np.zeros_like(self.counts), 0
        return taken

    def offer(self, wanted: GroupPlacement) -> None:
        if self.refuse:
            raise ValueError(self.refuse)
        self.offered.append(wanted)

    def preparing(self) -> str | None:
        waits = self.offered and self.offered[-1].version > self.placed.version
        return f"version {self.offered[-1].version}" if waits else None

    def switch(self, nbytes: int = 1000, stall_s: float = 0.002) -> None:
        """To what was offered last."""
        self.placed = self.offered[-1]
        self.last_switch = FakeSwitch(self.placed.version, nbytes, 0.5, stall_s)


class FakeExpertRank:
    """Reports its load and its experts; answers nobody."""

    def __init__(
        self,
        group: str,
        index: int,
        placed: GroupPlacement,
        find_router: FindRouter,
        config: ClusterConfig,
    ) -> None:
        role: Role = "prefill" if group.startswith("prefill") else "decode"
        self.slots = FakeSlots(placed)
        self.draining = False
        self._endpoint = Endpoint(
            name=f"{group}/{index}",
            role=role,
            incarnation=new_incarnation(),
            address=Address(host="127.0.0.1", port=1),
        )
        me = identity(role)
        self.loads = Reporter(find_router, me, config, self.member)
        self.experts = ExpertReporting(
            self.slots, index=index, find_router=find_router, identity=me, config=config
        )
        self._tasks: list[asyncio.Task[None]] = []

    def member(self) -> Member:
        return Member(endpoint=self._endpoint, load=LOAD, draining=self.draining, balanced=True)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(work.run()) for work in (self.loads, self.experts)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class FakeGroup:
    """Ranks that step together, and switch when all of them have been offered the same."""

    def __init__(
        self,
        name: str,
        find_router: FindRouter,
        config: ClusterConfig,
        *,
        layers: int = 1,
        experts: int = 8,
        ranks: int = 2,
        slots: int = 5,
        version: int = 0,
    ) -> None:
        self.name = name
        placement = first_placement(layers, experts, ranks, slots)
        self.first = GroupPlacement(name, version, placement)
        self.ranks = [
            FakeExpertRank(name, index, self.first, find_router, config) for index in range(ranks)
        ]

    def start(self) -> None:
        for rank in self.ranks:
            rank.start()

    async def stop(self) -> None:
        await asyncio.gather(*(rank.stop() for rank in self.ranks))

    def count(self, counts: npt.ArrayLike, steps: int) -> None:
        """Tokens [L, E] of the whole group, dealt out to its ranks."""
        left = np.asarray(counts)
        for number, rank in enumerate(self.ranks):
            share = left // (len(self.ranks) - number)
            rank.slots.count(share, steps)
            left = left - share

    @property
    def version(self) -> int:
        return self.ranks[0].slots.placed.version

    @property
    def offered(self) -> int | None:
        """The version that every rank has been offered last."""
        offered = {rank.slots.offered[-1].version for rank in self.ranks if rank.slots.offered}
        whole = all(rank.slots.offered for rank in self.ranks)
        return offered.pop() if whole and len(offered) == 1 else None

    def switch(self) -> None:
        for rank in self.ranks:
            rank.slots.switch()
