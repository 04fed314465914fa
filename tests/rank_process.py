"""Ranks in processes of their own, to be killed. No Ray.

Processes are forked from a zygote that has imported torch once; a rank's NIXL agent is made after
the fork. The zygote is the standard library's fork server. One that needs an environment of its
own, to see one GPU of several, starts from nothing.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from socket import socket

from cluster.config import ClusterConfig
from cluster.messages import Address, Endpoint, Role
from cluster.seat import Seat, listen
from decode_worker.worker import DecodeRank
from prefill_worker.worker import PrefillRank
from tests.timed_ranks import TimedDecode, TimedPrefill
from tests.tiny import SECRET, Rank

_STARTING = multiprocessing.get_context("spawn")
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload([__name__])


class RankProcess:
    """`with RankProcess(...) as process: process.endpoint`; it is gone afterwards."""

    def __init__(
        self,
        role: Role,
        number: int,
        config: ClusterConfig,
        router: Address,
        seat: Seat | None = None,
        listener: socket | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        timed: bool = False,
    ) -> None:
        """`seat`: in a group that shares its experts; `listener` is for its first rank. `environ`
        is added to this process's own; `timed` is for times()."""
        context = _STARTING if environ else _FORKING
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_live,
            args=(role, f"{role}-{number}/{seat.index if seat else 0}", config, router, theirs),
            kwargs={"seat": seat, "listener": listener, "timed": timed},
            daemon=True,
        )
        before = dict(os.environ)
        os.environ.update(environ or {})
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()
        self.started = False

    def ready(self) -> Endpoint:
        """Waits until it serves. EOFError if it has died."""
        if not self.started:
            self.endpoint: Endpoint = self._pipe.recv()
            self.started = True
        return self.endpoint

    def all_free(self) -> bool:
        """Asks it whether all its memory is free."""
        return not self.held()

    def held(self) -> str:
        """Asks it what of its memory is not free, and what it has to do: "" if nothing."""
        self._pipe.send("what is held?")
        answer: str = self._pipe.recv()
        return answer

    def times(self) -> list[float]:
        """What a timed rank has noted: see tests/timed_ranks.py."""
        self._pipe.send("times")
        answer: list[float] = self._pipe.recv()
        return answer

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, how)

    def alive(self, within_s: float = 2.0) -> bool:
        """Whether the process still exists after that time."""
        self._process.join(within_s)
        return self._process.is_alive()

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()


def group_of_processes(
    role: Role, number: int, size: int, config: ClusterConfig, router: Address
) -> list[RankProcess]:
    """They meet each other; what Ray's group would do at a death is the test's affair."""
    with listen(config.wire.host) as listener:
        address = Address(host=config.wire.host, port=listener.getsockname()[1])
        return [
            RankProcess(
                role,
                number,
                config,
                router,
                Seat(index, size, address),
                None if index else listener,
            )
            for index in range(size)
        ]


def _live(
    role: str,
    name: str,
    config: ClusterConfig,
    router: Address,
    pipe: Connection,
    *,
    seat: Seat | None,
    listener: socket | None,
    timed: bool,
) -> None:
    if seat is not None and listener is not None:
        seat = seat.with_listener(listener)
    asyncio.run(_serve(role, name, config, router, pipe, seat, timed))


async def _serve(
    role: str,
    name: str,
    config: ClusterConfig,
    router: Address,
    pipe: Connection,
    seat: Seat | None,
    timed: bool,
) -> None:
    async def find_router() -> Address | None:
        return router

    kind: type[Rank] = PrefillRank if role == "prefill" else DecodeRank
    if timed:
        kind = TimedPrefill if role == "prefill" else TimedDecode
    rank = kind(config=config, name=name, secret=SECRET, find_router=find_router, seat=seat)
    pipe.send(await rank.start())
    while await asyncio.to_thread(pipe.poll, None):
        match pipe.recv(), rank:
            case "times", TimedPrefill(times=times) | TimedDecode(times=times):
                pipe.send(times)
            case _:
                pipe.send(_held(rank))


def _held(rank: Rank) -> str:
    pool = rank.pool.ledger()
    pool.check()
    books = {"blocks": pool.blocks, "slots": pool.slots}
    if isinstance(rank, DecodeRank):
        books["segments"] = rank.ring.ledger()
    held = [f"{kind}: {book}" for kind, book in books.items() if book.free != book.total]
    if pending := rank.health().pending:
        held.append(f"{pending} requests in the engine")
    return ", ".join(held)
