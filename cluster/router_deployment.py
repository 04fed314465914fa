"""The Serve deployment of the router: its life, and who leads where there are several.

Knows nothing of what a router decides.
"""

from __future__ import annotations

import asyncio
import sys

from cluster.config import ClusterConfig, parse_config
from cluster.expert_samples import expert_samples
from cluster.live_settings import Json, take_over
from cluster.log import log_as
from cluster.messages import Address
from cluster.metric_samples import RouterSamples, Sample
from cluster.rank_actor import on_this_node
from cluster.ray_metrics import export
from cluster.ray_services import ApplicationKeys, RouterRecord
from cluster.router import Router

GIL_TURN_S = 0.0005  # for which a thread that places experts may keep a route waiting
LEADER_CHECK_S = 1.0  # how often a standby router looks whether the leader still listens


class RouterDeployment:
    """Holds the router and sees to it that the newest living one is the one that others find."""

    def __init__(self) -> None:
        self._config: ClusterConfig | None = None

    async def reconfigure(self, tree: Json) -> None:
        """Serve's way to hand over settings: once before anything else, and at every change."""
        wanted = parse_config(tree)
        if self._config is None:
            self._config = wanted
            await self._start(wanted)
        else:
            self._config = take_over(self._config, wanted)
            self._router.reconfigure(self._config)
        log_as(self._config.log)

    def check_health(self) -> None:
        if self._standing_by.done():
            self._standing_by.result()

    async def __del__(self) -> None:
        if hasattr(self, "_standing_by"):
            self._standing_by.cancel()
            self._exporting.cancel()
            await asyncio.to_thread(self._keys.withdraw_router, self._own.incarnation)
            await self._router.stop()

    async def _start(self, config: ClusterConfig) -> None:
        self._keys = ApplicationKeys(config.name)
        sys.setswitchinterval(GIL_TURN_S)
        self._connect_timeout_s = config.wire.connect_timeout_s
        self._router = Router(on_this_node(config), await asyncio.to_thread(self._keys.secret))
        address = await self._router.start()
        self._own = RouterRecord(incarnation=self._router.incarnation, address=address)
        await asyncio.to_thread(self._keys.publish_router, self._own)
        self._standing_by = asyncio.create_task(self._stand_by())
        self._ranks_met = RouterSamples()
        self._exporting = asyncio.create_task(export(self._samples))

    def _samples(self) -> list[Sample]:
        experts = self._router.experts
        told = self._ranks_met.of(self._router.members())
        return [*told, *expert_samples(experts.imbalance(), experts.history)]

    async def _stand_by(self) -> None:
        """Whoever starts last leads. Where the leader has gone, any other takes its place."""
        while True:
            await asyncio.sleep(LEADER_CHECK_S)
            leader = await asyncio.to_thread(self._keys.router)
            if leader == self._own:
                continue
            if leader is None or not await self._listens(leader.address):
                await asyncio.to_thread(self._keys.publish_router, self._own)

    async def _listens(self, address: Address) -> bool:
        try:
            _, writer = await asyncio.wait_for(
                asyncio.open_connection(address.host, address.port), self._connect_timeout_s
            )
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True
