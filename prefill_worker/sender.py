"""Finds the decode rank that a prompt's state shall go to, and pushes it there.

The caller of push() holds the lease; when push() is left, no write of ours can be in flight.
Knows nothing of callers and queues.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from cluster.errors import ClusterError, ProtocolError, WorkerLost, revive
from cluster.messages import (
    Cancelled,
    Connect,
    Connected,
    Endpoint,
    Failed,
    HandedOver,
    OpenPush,
    PushTo,
)
from cluster.wire import Peers
from engine.tasks import in_thread, together
from prefill_worker.push import Outlet, Prompt, Push


@dataclass(frozen=True)
class Moved:
    """What a rank has handed over since its start; `seconds` in gathering and writing."""

    handoffs: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def plus(self, done: HandedOver) -> Moved:
        return Moved(self.handoffs + 1, self.nbytes + done.bytes_moved, self.seconds + done.push_s)


class Sender:
    """All pushes of one prefill rank, and what it knows of the decode ranks they go to."""

    def __init__(self, *, outlet: Outlet, peers: Peers, wire_form: str) -> None:
        self._outlet = outlet
        self._peers = peers
        self._wire_form = wire_form
        self.moved = Moved()
        self._pairs: dict[str, _Pair] = {}  # by the decode rank's incarnation

    async def __aenter__(self) -> Sender:
        return self

    async def __aexit__(self, *error: object) -> None:
        pairs = list(self._pairs.values())
        for pair in pairs:
            pair.task.cancel()
        await asyncio.gather(*(pair.task for pair in pairs), return_exceptions=True)
        self._outlet.close()

    @property
    def paired_with(self) -> list[str]:
        """Names of the decode ranks that it is connected to."""
        return sorted(pair.decode for pair in self._pairs.values())

    async def push(self, prompt: Prompt, place: PushTo) -> HandedOver:
        """Returns when decode has accepted the whole state; no write is in flight afterwards.

        Rejected when decode does not take it; WorkerLost or TransferError when it cannot get
        there, though it may be pushed elsewhere; the run's own error when it has one.
        """
        peer = await self._peer(place.decode)
        first = OpenPush(reservation=place.reservation, length=prompt.length)
        async with await self._peers.open(place.decode, first) as stream:
            push = Push(self._outlet, prompt, place, peer, stream)
            try:
                await together(push.hear(), push.send())
            except BaseException:
                with suppress(ClusterError):
                    await stream.send(Cancelled())
                raise
            done = push.report()
            self.moved = self.moved.plus(done)
            return done

    async def _peer(self, decode: Endpoint) -> str:
        """The transport's name for this incarnation; connects when it is first wanted."""
        pair = self._pairs.get(decode.incarnation)
        if pair is None:
            ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            pair = _Pair(decode.name, ready, asyncio.create_task(self._be_paired(decode, ready)))
            self._pairs[decode.incarnation] = pair
        return await asyncio.shield(pair.ready)

    async def _be_paired(self, decode: Endpoint, ready: asyncio.Future[str]) -> None:
        """Lasts as long as the two incarnations are connected, and forgets the peer after."""
        transport = self._outlet.transport
        try:
            own = Connect(wire_form=self._wire_form, metadata=transport.metadata())
            async with await self._peers.open(decode, own) as stream:
                answer = await stream.receive()
                if isinstance(answer, Failed):
                    raise revive(answer.error, answer.message)
                if not isinstance(answer, Connected):
                    raise ProtocolError(f"{decode.name} answered Connect with {answer!r}")
                peer = await in_thread(None, transport.add_peer, answer.metadata)
                try:
                    ready.set_result(peer)
                    await stream.receive()  # nothing more is said: this is the end
                finally:
                    await in_thread(None, transport.remove_peer, peer)
        except ClusterError as error:
            _fail(ready, error)
        finally:
            del self._pairs[decode.incarnation]
            _fail(ready, WorkerLost(f"connecting to {decode.name} was given up"))


class _Pair(NamedTuple):
    decode: str
    ready: asyncio.Future[str]  # the transport's name for the peer
    task: asyncio.Task[None]  # lasts as long as the pair


def _fail(ready: asyncio.Future[str], error: ClusterError) -> None:
    if not ready.done():
        ready.set_exception(error)
        ready.exception()  # seen: those who waited for it may have gone
