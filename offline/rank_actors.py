"""Ranks as Ray actors, each with a process and, where it asks for one, a GPU of its own.

Joins the Ray cluster that RAY_ADDRESS names, or that of `tandem up --local`; where there is none,
a head of our own is started and ended. The router stays in this process. No Serve: these ranks end
with the program.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from cluster import local_ray
from cluster.config import ClusterConfig, PoolSection
from cluster.errors import StartupError
from cluster.generation import Caller
from cluster.router import Router
from cluster.seat import Seat
from offline.model_folder import ROOT
from offline.rank_threads import until_known

T = TypeVar("T")

LOCAL_CPUS = 4  # what a head of our own hands out
STOP_S = 10.0


class RankActors:
    def __init__(self, config: ClusterConfig, *, machines: int = 1) -> None:
        """`machines`: how many the Ray cluster must have at least."""
        self._config = config.model_copy(update={"name": f"offline-{secrets.token_hex(4)}"})
        self._machines = machines
        self._actors: list[Any] = []
        self._life = AsyncExitStack()

    async def start(self) -> Caller:
        await asyncio.to_thread(self._join)
        from cluster.rank_actor import on_this_node
        from cluster.ray_services import ApplicationKeys, RouterRecord

        keys = ApplicationKeys(self._config.name)
        self._life.push_async_callback(asyncio.to_thread, keys.delete_all)
        secret = await asyncio.to_thread(keys.make_secret)
        here = on_this_node(self._config)
        router = Router(here, secret)
        address = await router.start()
        self._life.push_async_callback(router.stop)
        record = RouterRecord(incarnation=router.incarnation, address=address)
        await asyncio.to_thread(keys.publish_router, record)
        caller = Caller(here, secret, keys.find_router)
        self._life.push_async_callback(caller.close)
        self._life.push_async_callback(self._end_actors)
        pools = (self._config.decode, self._config.prefill)
        await asyncio.gather(
            *(self._start(pool, number) for pool in pools for number in range(pool.groups))
        )
        await until_known(router, sum(pool.groups * pool.ranks for pool in pools))
        return caller

    async def stop(self) -> None:
        await self._life.aclose()

    async def _end_actors(self) -> None:
        """Together: ranks of a group leave as one."""
        await asyncio.gather(*map(_end, self._actors))

    def _join(self) -> None:
        """Ray reads its settings when it is imported, so where to go is decided before."""
        joined = "ray" in sys.modules and sys.modules["ray"].is_initialized()
        local_ray.prefer()
        if not joined and "RAY_ADDRESS" not in os.environ:
            if self._machines > 1:
                raise StartupError(
                    f"WORLD_SIZE is {self._machines}: RAY_ADDRESS must name the Ray cluster of "
                    "these machines"
                )
            head = local_ray.start(cpus=LOCAL_CPUS)
            self._life.push_async_callback(asyncio.to_thread, head.stop)
            head.enter_environment()
        from cluster.application import connect, disconnect

        connect()
        if not joined:  # a program that is connected already stays so
            self._life.push_async_callback(asyncio.to_thread, disconnect)
        import ray

        alive = sum(node["Alive"] for node in ray.nodes())
        if alive < self._machines:
            raise StartupError(
                f"WORLD_SIZE is {self._machines}, but the Ray cluster has {alive} nodes; start Ray "
                "on the others: ray start --address=..."
            )

    async def _start(self, pool: PoolSection, number: int) -> None:
        """One group: its ranks meet at the first one, if they share experts."""
        role = "decode" if pool is self._config.decode else "prefill"
        names = [f"{role}-{number}/{index}" for index in range(pool.ranks)]
        actors = [self._actor(pool, name) for name in names]
        limit_s = self._config.life.start_timeout_s
        seats: list[Seat | None] = [None] * pool.ranks
        if pool.shares_experts:
            address = await _told(names[0], pool, limit_s, actors[0].open_group.remote())
            seats = [Seat(index, pool.ranks, address) for index in range(pool.ranks)]
        await asyncio.gather(
            *(
                _told(name, pool, limit_s, actor.start.remote(seat))
                for name, actor, seat in zip(names, actors, seats, strict=True)
            )
        )

    def _actor(self, pool: PoolSection, name: str) -> Any:
        import ray

        from cluster.rank_actor import RankActor, actor_options

        options = actor_options(pool, host=self._config.wire.host)
        options |= {"name": name, "namespace": self._config.name}
        options["runtime_env"]["env_vars"]["PYTHONPATH"] = str(ROOT)  # where actors find our code
        make = ray.remote(RankActor).options(**options)
        actor = make.remote(rank=pool.rank, config=self._config, name=name)
        self._actors.append(actor)
        return actor


async def _told(name: str, pool: PoolSection, limit_s: float, answer: Awaitable[T]) -> T:
    """What a rank answers while it starts, or StartupError."""
    import ray

    try:
        return await asyncio.wait_for(answer, limit_s)
    except TimeoutError:
        raise StartupError(
            f"{name} did not start within {limit_s:g} s; each rank asks Ray for {pool.cpus:g} CPUs "
            f"and {pool.gpus:g} GPUs"
        ) from None
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise StartupError(f"{name} failed to start: {cause}") from error


async def _end(actor: Any) -> None:
    """In order, if it still can."""
    import ray

    with suppress(ray.exceptions.RayError, TimeoutError):
        await asyncio.wait_for(actor.stop.remote(), STOP_S)
    ray.kill(actor)
