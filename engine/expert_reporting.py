"""A rank's tie to the router about experts: what it holds and counts goes there, placements come.

Each report to a new router is complete. Knows nothing of how weights come or of when ranks switch:
that is ExpertSlots' part.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.config import ClusterConfig
from cluster.expert_messages import ExpertPlacement, ExpertReport, ExpertSwitch
from cluster.expert_tables import packed_counts, placement_of, table_of
from cluster.placement_file import GroupPlacement
from cluster.router_link import FindRouter, follow_router
from cluster.wire import Connection, Identity, Stream
from engine.tasks import beside

logger = logging.getLogger(__name__)


class Switched(Protocol):
    """A rank's last change of placement."""

    @property
    def version(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def fetch_s(self) -> float: ...
    @property
    def stall_s(self) -> float: ...


class Slots(Protocol):
    """What is needed of engine/expert_slots.py; its methods may be called from any thread."""

    @property
    def placed(self) -> GroupPlacement: ...
    @property
    def last_switch(self) -> Switched | None: ...
    def take_counts(self) -> tuple[npt.NDArray[np.int64], int]: ...
    def offer(self, wanted: GroupPlacement) -> None: ...
    def preparing(self) -> str | None: ...


class ExpertReporting:
    """Of rank `index` of its group, for as long as `run` runs."""

    def __init__(
        self,
        slots: Slots,
        *,
        index: int,
        find_router: FindRouter,
        identity: Identity,
        config: ClusterConfig,
    ) -> None:
        self._slots = slots
        self._index = index
        self._find_router = find_router
        self._identity = identity
        self._config = config

    async def run(self) -> None:
        """Until cancelled; the end of the connection tells the router that the rank is gone."""
        await follow_router(self._find_router, self._identity, self._config.wire, self._converse)

    def reconfigure(self, config: ClusterConfig) -> None:
        """Reports as often as this says, after the pause under way."""
        self._config = config

    async def _converse(self, connection: Connection) -> None:
        report = self._report(told=None)
        async with (
            await connection.open(report) as stream,
            beside(self._listen(stream)) as listening,
        ):
            while True:
                await asyncio.wait((listening,), timeout=self._config.experts.report_s)
                if listening.done():
                    return listening.result()
                report = self._report(told=report.version)
                await stream.send(report)

    async def _listen(self, stream: Stream) -> None:
        async for message in stream:
            if isinstance(message, ExpertPlacement):
                try:
                    self._slots.offer(
                        GroupPlacement(message.group, message.version, placement_of(message.table))
                    )
                except ValueError as error:  # the router gives it up in time
                    logger.warning("placement %d is refused: %s", message.version, error)

    def _report(self, told: int | None) -> ExpertReport:
        """`told` is the version whose table the router has."""
        placed = self._slots.placed
        fresh = placed.version != told
        counts, steps = self._slots.take_counts()
        switch = self._slots.last_switch if fresh else None
        return ExpertReport(
            group=placed.group,
            index=self._index,
            version=placed.version,
            table=table_of(placed.placement) if fresh else None,
            counts=packed_counts(counts, steps) if steps else None,
            preparing=self._slots.preparing() or "",
            switch=_told(switch) if switch and switch.version == placed.version else None,
        )


def _told(switch: Switched) -> ExpertSwitch:
    return ExpertSwitch(fetch_s=switch.fetch_s, stall_s=switch.stall_s, moved_bytes=switch.nbytes)
