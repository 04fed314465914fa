"""The Ray actor around one rank: it imports the rank in its own process and passes calls on.

Ranks are plain classes that know nothing of Ray; this file knows nothing of what they do.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from collections.abc import Callable
from typing import Any

import ray

from cluster.config import ClusterConfig, PoolSection
from cluster.errors import StartupError
from cluster.health import Health
from cluster.log import log_as
from cluster.messages import Address, Endpoint, Load
from cluster.metric_samples import rank_samples
from cluster.ray_metrics import export
from cluster.ray_services import ApplicationKeys
from cluster.seat import Seat, listen


class RankActor:
    """One process, one rank. Every method is an actor call; all run on one event loop.

    drain() and stop() may come before start() has ended.
    """

    def __init__(self, *, rank: str, config: ClusterConfig, name: str) -> None:
        self._rank_class = rank
        self._config = on_this_node(config)
        self._name = name
        self._rank: Any = None
        self._exporting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    async def open_group(self) -> Address:
        """On the first rank, before any starts: where the others of its group will meet it."""
        self._listener = listen(self._config.wire.host)
        return Address(host=self._config.wire.host, port=self._listener.getsockname()[1])

    async def start(self, seat: Seat | None = None) -> Endpoint:
        """Imports, loads, listens. `seat`: with the ranks of its group. Raises what the rank does.

        Where ranks share nothing, a rank is not told of its seat.
        """
        if seat is not None and self._listener is not None:
            seat = seat.with_listener(self._listener)
        log_as(self._config.log)
        make = await asyncio.to_thread(resolve, self._rank_class)  # importing torch takes seconds
        keys = ApplicationKeys(self._config.name)
        self._rank = make(
            config=self._config,
            name=self._name,
            secret=await asyncio.to_thread(keys.secret),
            find_router=keys.find_router,
            **({} if seat is None else {"seat": seat}),
        )
        endpoint: Endpoint = await self._rank.start()
        self._exporting = asyncio.create_task(export(lambda: rank_samples(self._rank.status())))
        return endpoint

    async def live(self) -> None:
        """Never returns: whoever awaits this call hears of the process's death within ms."""
        await asyncio.Event().wait()

    async def process(self) -> tuple[str, int]:
        """Its node, as Ray calls it, and its number there."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def health(self) -> Health:
        health: Health = self._rank.health()
        return health

    async def load(self) -> Load:
        load: Load = self._rank.load()
        return load

    async def reconfigure(self, config: ClusterConfig) -> None:
        """Live settings; the others of the configuration are as they were."""
        log_as(config.log)
        self._config = on_this_node(config)
        self._rank.reconfigure(self._config)

    async def status(self) -> dict[str, object]:
        status: dict[str, object] = self._rank.status()
        return status

    async def drain(self, timeout_s: float) -> None:
        if self._rank is not None:
            await self._rank.drain(timeout_s)

    async def stop(self) -> None:
        if self._exporting is not None:
            self._exporting.cancel()
        if self._rank is not None:
            await self._rank.stop()


def on_this_node(config: ClusterConfig) -> ClusterConfig:
    """With `wire.host` "auto" made the address by which Ray's nodes know this one."""
    if config.wire.host != "auto":
        return config
    here = ray.get_runtime_context().get_node_id()
    host = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
    return config.model_copy(update={"wire": config.wire.model_copy(update={"host": host})})


def resolve(rank: str) -> Callable[..., Any]:
    """The class that `package.module:Class` names; StartupError says what is missing."""
    module_name, _, class_name = rank.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise StartupError(f"cannot import rank {rank!r}: {error}") from error
    return found


def actor_options(pool: PoolSection, *, host: str) -> dict[str, Any]:
    """What one rank asks of Ray. Threads are set before torch is imported, or it ignores them."""
    threads = str(pool.engine.threads)
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if host == "localhost" or host.startswith("127."):
        # UCX authenticates nobody and listens on every interface unless it is told
        variables["UCX_NET_DEVICES"] = "lo"
    return {
        "num_cpus": pool.cpus,
        "num_gpus": pool.gpus,
        "max_restarts": 0,  # a restartable actor's death is heard of only after its restart, ~2 s
        "runtime_env": {"env_vars": variables},
    }
