"""The Serve deployments of one application, except the HTTP one.

A replica of `Group` is one group of ranks: placement group bundle 0 holds this head, each further
bundle one rank. Serve places, shows, scales, health-checks and replaces groups; the head starts
the ranks and tells Serve the truth about them. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import ClusterConfig, PoolSection
from cluster.errors import StartupError, WorkerLost
from cluster.messages import Address, Role
from cluster.rank_actor import RankActor, actor_options, on_this_node
from cluster.ray_services import ApplicationKeys, RouterRecord
from cluster.router import Router

logger = logging.getLogger(__name__)

STOP_MARGIN_S = 5.0  # for a rank to hand back its streams and end; less than Serve grants us
LEADER_CHECK_S = 1.0  # how often a standby router looks whether the leader still listens


class Group:
    """Head of one group. Ranks live and die together: the first death ends the others at once."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, role: Role, config: ClusterConfig
    ) -> None:
        self._config = config
        self._actors: dict[str, Any] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._failure: str | None = None
        self._leaving = False
        # Serve's tag, not its rank: ranks are dealt anew while their first owner still lives.
        self._name = f"{role}-{serve.get_replica_context().replica_tag}"
        pool = config.prefill if role == "prefill" else config.decode
        for index in range(pool.ranks):
            name = f"{self._name}/{index}"
            self._actors[name] = self._place(name, index + 1, pool)
        try:
            await asyncio.gather(*(self._start(name) for name in self._actors))
        except StartupError as error:
            self._fail(str(error))
            raise
        self._watching = [
            asyncio.create_task(watch(name))
            for name in self._actors
            for watch in (self._watch_life, self._watch_health)
        ]

    def check_health(self) -> None:
        """Serve replaces the group as soon as this raises."""
        if self._failure is not None:
            raise WorkerLost(self._failure)

    async def __del__(self) -> None:
        """Serve's shutdown hook. A healthy group drains; of a failed one nothing is left to do."""
        self._leaving = True
        for task in self._watching:
            task.cancel()
        if self._failure is None:
            await asyncio.gather(*(self._drain(name) for name in self._actors))
        self._kill_all()

    def _place(self, name: str, bundle: int, pool: PoolSection) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            get_current_placement_group(), placement_group_bundle_index=bundle
        )
        return (
            ray.remote(RankActor)
            .options(
                name=name,
                namespace=self._config.name,
                scheduling_strategy=strategy,
                **actor_options(pool, host=self._config.wire.host),
            )
            .remote(rank=pool.rank, config=self._config, name=name)
        )

    async def _start(self, name: str) -> None:
        limit_s = self._config.life.start_timeout_s
        try:
            await asyncio.wait_for(self._actors[name].start.remote(), limit_s)
        except TimeoutError as error:
            raise StartupError(f"{name} did not start within {limit_s} s") from error
        except RayTaskError as error:
            cause = error.cause or error
            raise StartupError(
                f"{name} failed to start: {type(cause).__name__}: {cause}"
            ) from error
        except RayActorError as error:
            raise StartupError(f"{name} died while it started: {error}") from error

    async def _watch_life(self, name: str) -> None:
        with suppress(RayActorError, RayTaskError):
            await self._actors[name].live.remote()
        self._fail(f"{name} died")

    async def _watch_health(self, name: str) -> None:
        life = self._config.life
        while True:
            await asyncio.sleep(life.health_period_s)
            try:
                health = await asyncio.wait_for(
                    self._actors[name].health.remote(), life.stuck_after_s
                )
            except TimeoutError:
                return self._fail(f"{name} has not answered for {life.stuck_after_s} s")
            except RayActorError:
                return None  # _watch_life says so
            except RayTaskError as error:
                return self._fail(f"{name} cannot tell its health: {error.cause or error}")
            if not health.alive:
                return self._fail(f"the engine of {name} has ended")
            if health.stuck_s > life.stuck_after_s:
                return self._fail(
                    f"{name} has {health.pending} requests and has made no step for "
                    f"{health.stuck_s:.0f} s"
                )

    def _fail(self, why: str) -> None:
        if self._failure is None and not self._leaving:
            logger.error("group %s failed: %s", self._name, why)
            self._failure = why
            self._kill_all()

    async def _drain(self, name: str) -> None:
        limit_s = self._config.life.drain_timeout_s
        actor = self._actors[name]
        try:
            await asyncio.wait_for(actor.drain.remote(limit_s), limit_s + STOP_MARGIN_S / 2)
            await asyncio.wait_for(actor.stop.remote(), STOP_MARGIN_S / 2)
        except (RayActorError, RayTaskError, TimeoutError) as error:
            logger.warning("%s did not drain in order: %s", name, error)

    def _kill_all(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)


class RouterDeployment:
    """Holds the router and sees to it that the newest living one is the one that others find."""

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]
        self._keys = ApplicationKeys(config.name)
        self._connect_timeout_s = config.wire.connect_timeout_s
        self._router = Router(on_this_node(config), await asyncio.to_thread(self._keys.secret))
        address = await self._router.start()
        self._own = RouterRecord(incarnation=self._router.incarnation, address=address)
        await asyncio.to_thread(self._keys.publish_router, self._own)
        self._standing_by = asyncio.create_task(self._stand_by())

    def check_health(self) -> None:
        if self._standing_by.done():
            self._standing_by.result()

    async def __del__(self) -> None:
        if hasattr(self, "_standing_by"):
            self._standing_by.cancel()
            await asyncio.to_thread(self._keys.withdraw_router, self._own.incarnation)
            await self._router.stop()

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
