"""The Serve deployment of a pool: each replica is one group of ranks.

Of its placement group bundle 0 holds this head, each further bundle one rank. Serve places,
shows, scales, health-checks and replaces groups; the head starts the ranks, tells those that share
experts where to meet, and tells Serve the truth about them. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.autoscale import measure
from cluster.config import ClusterConfig, LifeSection, PoolSection, parse_config
from cluster.errors import StartupError, WorkerLost
from cluster.guard import Guard
from cluster.live_settings import Json, take_over
from cluster.log import log_as
from cluster.messages import Role
from cluster.processes import Family, born, send
from cluster.rank_actor import RankActor, actor_options
from cluster.ray_services import ApplicationKeys
from cluster.seat import Seat
from cluster.wire import Identity, new_incarnation

logger = logging.getLogger(__name__)

STOP_MARGIN_S = 5.0  # for a rank to hand back its streams and end; less than Serve grants us
T = TypeVar("T")


class Group:
    """Head of one group. Ranks live and die together: the first death ends the others at once."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._config: ClusterConfig | None = None
        self._actors: dict[str, Any] = {}
        self._incarnations: dict[str, str] = {}  # names of ranks by this life of theirs
        self._processes: Family = {}  # of its ranks, those on this node
        self._watching: list[asyncio.Task[None]] = []
        self._failure: str | None = None
        self._leaving = False
        # Serve's tag, not its rank: ranks are dealt anew while their first owner still lives.
        self._name = f"{role}-{serve.get_replica_context().replica_tag}"

    async def reconfigure(self, tree: Json) -> None:
        """Serve's way to hand over settings: once before anything else, and at every change."""
        wanted = parse_config(tree)
        if self._config is None:
            self._config = wanted
            log_as(wanted.log)
            await self._start_all(wanted)
            return
        self._config = take_over(self._config, wanted)
        log_as(self._config.log)
        for name, actor in self._actors.items():
            limit_s = self._config.wire.t_detect_s
            try:
                await asyncio.wait_for(actor.reconfigure.remote(self._config), limit_s)
            except (RayActorError, RayTaskError, TimeoutError) as error:  # the watchers judge it
                logger.warning("%s keeps its settings: %s", name, error)

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
            await asyncio.gather(*(self._stop(name) for name in self._actors))  # they step together
        self._kill_all()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What cluster/autoscale.py decides by; Serve asks while its autoscaler is on."""
        told = await asyncio.gather(*(actor.load.remote() for actor in self._actors.values()))
        return measure(told)

    async def _start_all(self, config: ClusterConfig) -> None:
        pool = config.prefill if self._role == "prefill" else config.decode
        for index in range(pool.ranks):
            name = f"{self._name}/{index}"
            self._actors[name] = self._place(name, index + 1, pool, config)
        try:
            limit_s = config.life.start_timeout_s
            seats = await self._seats(pool, limit_s)
            await asyncio.gather(
                *(self._start(name, seats.get(name), limit_s) for name in self._actors)
            )
        except StartupError as error:
            self._fail(str(error))
            raise
        self._watching = [
            asyncio.create_task(watch(name))
            for name in self._actors
            for watch in (self._watch_life, self._watch_health)
        ]
        self._watching.append(asyncio.create_task((await self._guard(config)).run()))

    async def _guard(self, config: ClusterConfig) -> Guard:
        """Hears from the router whom others wait for in vain."""
        keys = ApplicationKeys(config.name)
        secret = await asyncio.to_thread(keys.secret)
        return Guard(
            self._incarnations,
            answers=self._answers,
            kill=self._kill_suspect,
            find_router=keys.find_router,
            identity=Identity("head", new_incarnation(), secret),
            wire=config.wire,
        )

    async def _answers(self, name: str) -> bool:
        with suppress(RayActorError, RayTaskError):
            await self._actors[name].health.remote()
            return True
        return False

    async def _kill_suspect(self, name: str, why: str) -> None:
        self._fail(f"{name} does not answer: {why}")

    def _place(self, name: str, bundle: int, pool: PoolSection, config: ClusterConfig) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            get_current_placement_group(), placement_group_bundle_index=bundle
        )
        return (
            ray.remote(RankActor)
            .options(
                name=name,
                namespace=config.name,
                scheduling_strategy=strategy,
                **actor_options(pool, host=config.wire.host),
            )
            .remote(rank=pool.rank, config=config, name=name)
        )

    async def _seats(self, pool: PoolSection, limit_s: float) -> dict[str, Seat]:
        """By name; none where ranks share nothing. The first rank is where all meet."""
        if not pool.shares_experts:
            return {}
        first, *_ = self._actors
        address = await self._asked(first, self._actors[first].open_group.remote(), limit_s)
        return {name: Seat(index, pool.ranks, address) for index, name in enumerate(self._actors)}

    async def _start(self, name: str, seat: Seat | None, limit_s: float) -> None:
        actor = self._actors[name]
        endpoint = await self._asked(name, actor.start.remote(seat), limit_s)
        self._incarnations[endpoint.incarnation] = name
        node, pid = await self._asked(name, actor.process.remote(), limit_s)
        if node == ray.get_runtime_context().get_node_id() and (birth := born(pid)):
            self._processes[pid] = birth

    async def _asked(self, name: str, answer: Awaitable[T], limit_s: float) -> T:
        """What the rank answers while it starts, or StartupError."""
        try:
            return await asyncio.wait_for(answer, limit_s)
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
        while True:
            life = self._life
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

    @property
    def _life(self) -> LifeSection:
        assert self._config is not None
        return self._config.life

    def _fail(self, why: str) -> None:
        if self._failure is None and not self._leaving:
            logger.error("group %s failed: %s", self._name, why)
            self._failure = why
            self._kill_all()
            send(self._processes, signal.SIGKILL)  # Ray lets a stopped one live for 5 s more

    async def _drain(self, name: str) -> None:
        limit_s = self._life.drain_timeout_s
        actor = self._actors[name]
        try:
            await asyncio.wait_for(actor.drain.remote(limit_s), limit_s + STOP_MARGIN_S / 2)
        except (RayActorError, RayTaskError, TimeoutError) as error:
            logger.warning("%s did not drain in order: %s", name, error)

    async def _stop(self, name: str) -> None:
        try:
            await asyncio.wait_for(self._actors[name].stop.remote(), STOP_MARGIN_S / 2)
        except (RayActorError, RayTaskError, TimeoutError) as error:
            logger.warning("%s did not stop in order: %s", name, error)

    def _kill_all(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
