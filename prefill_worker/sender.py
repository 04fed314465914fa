"""Finds the decode rank that a prompt's state shall go to, and pushes it there.

The caller of push() holds the lease; when push() is left, no write of ours can be in flight.
Knows nothing of callers and queues.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from cluster.errors import (
    ClusterError,
    ProtocolError,
    RequestCancelled,
    TransferError,
    WorkerLost,
    revive,
)
from cluster.messages import (
    Cancelled,
    Connect,
    Connected,
    Endpoint,
    Failed,
    HandedOver,
    OpenPush,
    Pairs,
    PushTo,
)
from cluster.wire import Peers
from engine.tasks import in_thread, together
from prefill_worker.outlet import Outlet
from prefill_worker.pair import Pair, StateThere
from prefill_worker.push import Prompt, Push

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0  # between two tries to say that writing is over
LEAVING_S = 2.0  # that a rank which leaves goes on trying


@dataclass(frozen=True)
class Moved:
    """What a rank has handed over since its start; `seconds` in gathering and writing, of which
    `hidden_s` while the prompt still ran."""

    handoffs: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    hidden_s: float = 0.0

    def plus(self, done: HandedOver) -> Moved:
        return Moved(
            self.handoffs + 1,
            self.nbytes + done.bytes_moved,
            self.seconds + done.push_s,
            self.hidden_s + done.hidden_s,
        )


class Sender:
    """All pushes of one prefill rank, and what it knows of the decode ranks they go to."""

    def __init__(self, *, outlet: Outlet, peers: Peers, wire_form: str) -> None:
        self._outlet = outlet
        self._peers = peers
        self._wire_form = wire_form
        self.moved: dict[str, Moved] = {}  # by path
        self.met: Counter[tuple[str, str]] = Counter()  # pairs by path, and how that came out
        self._pairs: dict[str, _Pairing] = {}  # by the decode rank's incarnation
        self._last_words: set[asyncio.Task[None]] = set()
        self._leaving = asyncio.Event()

    async def __aenter__(self) -> Sender:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._leaving.set()
        if self._last_words:
            await asyncio.wait(self._last_words, timeout=LEAVING_S)
        tasks = [*self._last_words, *(pairing.task for pairing in self._pairs.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._outlet.close()

    @property
    def paired_with(self) -> list[str]:
        """Names of the decode ranks that it is connected to."""
        return sorted(pairing.decode for pairing in self._pairs.values())

    def pairs(self) -> Pairs:
        """How it is connected to each of them, by name."""
        made = [one.ready for one in self._pairs.values()]
        found = [one.result().told() for one in made if one.done() and not one.exception()]
        return Pairs(pairs=tuple(sorted(found, key=lambda pair: pair.decode)))

    async def push(self, prompt: Prompt, place: PushTo) -> HandedOver:
        """Returns when decode has accepted the whole state; no write is in flight afterwards.

        Rejected when decode does not take it; WorkerLost or TransferError when it cannot get
        there, though it may be pushed elsewhere; the run's own error when it has one.
        """
        pair = await self._pair(place.decode)
        try:
            done = await self._push(prompt, place, pair)
        except BaseException:
            if pair.direct:  # until decode has heard it, it keeps what was named to us
                self._say_last_word(place, pair)
            raise
        self.moved[done.path] = self.moved.get(done.path, Moved()).plus(done)
        return done

    async def _push(self, prompt: Prompt, place: PushTo, pair: Pair) -> HandedOver:
        first = OpenPush(reservation=place.reservation, length=prompt.length, direct=pair.direct)
        async with await self._peers.open(place.decode, first) as stream:
            push = Push(self._outlet, prompt, place, pair, stream)
            try:
                await together(push.hear(), push.send())
            except BaseException:
                with suppress(ClusterError):
                    await stream.send(Cancelled())
                raise
            return push.report()

    # ---------------------------------------------------------------- the last word

    def _say_last_word(self, place: PushTo, pair: Pair) -> None:
        task = asyncio.create_task(self._last_word(place, pair))
        self._last_words.add(task)
        task.add_done_callback(self._last_words.discard)

    async def _last_word(self, place: PushTo, pair: Pair) -> None:
        """That no write of that push can land any more, until decode has heard it or has ended.

        On a stream of its own: that of the push may have taken it to nobody.
        """
        word, pause_s = Cancelled(reservation=place.reservation), FIRST_PAUSE_S
        while True:
            try:
                async with await self._peers.open(place.decode, word) as stream:
                    await stream.receive()  # it says nothing: its leaving is the answer
                    return
            except RequestCancelled:
                return  # this rank has left, and its process's end says the same
            except ClusterError:
                if self._has_ended(pair) or self._leaving.is_set():
                    return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _has_ended(self, pair: Pair) -> bool:
        try:
            self._outlet.transport.watch(pair.metadata).close()
        except (TransferError, ProtocolError):
            return True
        return False

    # ---------------------------------------------------------------- pairs

    async def _pair(self, decode: Endpoint) -> Pair:
        """With this incarnation; connects when it is first wanted."""
        pairing = self._pairs.get(decode.incarnation)
        if pairing is None:
            ready: asyncio.Future[Pair] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._be_paired(decode, ready))
            pairing = self._pairs[decode.incarnation] = _Pairing(decode.name, ready, task)
        return await asyncio.shield(pairing.ready)

    async def _be_paired(self, decode: Endpoint, ready: asyncio.Future[Pair]) -> None:
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
                peer = await in_thread(None, transport.add_peer, answer.metadata, answer.why_packed)
                try:
                    ready.set_result(await self._met(decode.name, peer, answer))
                    await stream.receive()  # nothing more is said: this is the end
                finally:
                    await in_thread(None, transport.remove_peer, peer)
        except ClusterError as error:
            _fail(ready, error)
        finally:
            del self._pairs[decode.incarnation]
            _fail(ready, WorkerLost(f"connecting to {decode.name} was given up"))

    async def _met(self, decode: str, peer: str, answer: Connected) -> Pair:
        """A direct path is measured before it is used; a packed one when it has a cell."""
        transport = self._outlet.transport
        path, why = transport.path_to(peer), transport.why(peer)
        pair = Pair(decode, peer, path, answer.metadata, why=why)
        outcome = "fallback" if why else "ok"
        if transport.is_direct(peer):
            offered = transport.offered(peer)
            pair.there = StateThere.of(self._outlet.fields, answer, offered)
            pair.report = await self._outlet.measure(peer)
            outcome = "slow" if pair.report.is_slow else "ok"
        self.met[path, outcome] += 1
        return pair


class _Pairing(NamedTuple):
    decode: str
    ready: asyncio.Future[Pair]
    task: asyncio.Task[None]  # lasts as long as the pair


def _fail(ready: asyncio.Future[Pair], error: ClusterError) -> None:
    if not ready.done():
        ready.set_exception(error)
        ready.exception()  # seen: those who waited for it may have gone
