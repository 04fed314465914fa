"""Ranks in processes of their own, to be killed. No Ray.

Processes are forked from a zygote that has imported torch once; a rank's NIXL agent is made after
the fork. The zygote is the standard library's fork server.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

from cluster.config import ClusterConfig
from cluster.messages import Address, Endpoint, Role
from decode_worker.worker import DecodeRank
from prefill_worker.worker import PrefillRank
from tests.tiny import SECRET, Rank

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
    ) -> None:
        self._pipe, theirs = _FORKING.Pipe()
        self._process = _FORKING.Process(
            target=_live, args=(role, f"{role}-{number}/0", config, router, theirs), daemon=True
        )
        self._process.start()
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


def _live(role: str, name: str, config: ClusterConfig, router: Address, pipe: Connection) -> None:
    asyncio.run(_serve(role, name, config, router, pipe))


async def _serve(
    role: str, name: str, config: ClusterConfig, router: Address, pipe: Connection
) -> None:
    async def find_router() -> Address | None:
        return router

    kind: type[Rank] = PrefillRank if role == "prefill" else DecodeRank
    rank = kind(config=config, name=name, secret=SECRET, find_router=find_router)
    pipe.send(await rank.start())
    while await asyncio.to_thread(pipe.poll, None):
        pipe.recv()
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
