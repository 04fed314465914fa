"""Gates: the hand-over stops at a named step, and goes on, or not, as the test says.

Wrappers around the streams and the transports of a cluster in this process; the product knows
nothing of them. A step is named for what is about to happen:

    reserve  reserved  push_to  open_push  push_opened      messages, by their kind
    write 0  pushed 0  unpacked 0                           push number 0, likewise all others
                                                            (a direct push is not unpacked)
    commit  accepted  handed_over                           messages
    token 0  token 1                                        Tokens that hold that index
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, Literal, cast

from torch import Tensor

from cluster.connection import Connection
from cluster.errors import TransferError, WorkerLost
from cluster.messages import Commit, Endpoint, Hello, Pushed, Tokens, Unpacked, WireMessage
from cluster.wire import Peers, Stream
from decode_worker.worker import DecodeRank
from engine.packed_runner import AnyModel
from engine.rank import Rank
from kernels.push_table import Pieces
from kv_transfer.chosen_transport import ChosenTransport
from kv_transfer.open_transport import open_paths
from kv_transfer.transport import PreparedWrite
from prefill_worker.worker import PrefillRank
from tests.tiny import OpenTransport, TinyCluster, until

Verdict = Literal["pass", "fail", "drop", "corrupt", "swap"]
"""fail: a write raises. drop: it does not happen, and nobody is told. swap: after the next one."""

HELD_S = 30.0  # a test that forgets to open a gate fails by this, not by hanging


def steps_of(message: WireMessage) -> list[str]:
    """Several for Tokens: a busy loop sends what it has, in one message."""
    match message:
        case Pushed(seq=number) | Unpacked(seq=number):
            return [f"{message.kind} {number}"]
        case Tokens(first=first, token_ids=token_ids):
            return [f"token {index}" for index in range(first, first + len(token_ids))]
    return [message.kind]


class Gate:
    """Closes behind the first who reaches its step, for as long as the test wants."""

    def __init__(self, step: str) -> None:
        self.step = step
        self._reached: Future[None] = Future()
        self._verdict: Future[Verdict] = Future()

    async def reached(self) -> None:
        async with asyncio.timeout(HELD_S):
            await asyncio.shield(asyncio.wrap_future(self._reached))

    def open(self, verdict: Verdict = "pass") -> None:
        if not self._verdict.done():
            self._verdict.set_result(verdict)

    def hold(self) -> Future[Verdict]:
        """For the one that stands before it: what it shall do, once the test has said so."""
        self._reached.set_result(None)
        return self._verdict


class Gates:
    """All gates of one cluster."""

    def __init__(self) -> None:
        self._armed: dict[str, Gate] = {}
        self._writes = count()
        self._apart: set[str] = set()

    def part(self, decode: str) -> None:
        """No prefill rank reaches that decode rank from now on."""
        self._apart.add(decode)

    def reaches(self, opener: str, endpoint: Endpoint) -> bool:
        return opener != "prefill" or endpoint.name not in self._apart

    def arm(self, step: str, verdict: Verdict | None = None) -> Gate:
        """Stops the next one at that step; with a verdict it does not even stop.

        Writes are counted from here on.
        """
        gate = self._armed[step] = Gate(step)
        if verdict is not None:
            gate.open(verdict)
        self._writes = count()
        return gate

    def disarm(self) -> None:
        """Gates that nobody has reached are gone."""
        self._armed.clear()

    async def at(self, message: WireMessage) -> Verdict:
        armed = [step for step in steps_of(message) if step in self._armed]
        gate = self._armed.pop(armed[0]) if armed else None
        return await asyncio.shield(asyncio.wrap_future(gate.hold())) if gate else "pass"

    def at_write(self) -> Verdict:
        """As at(), for a thread that is about to write."""
        gate = self._armed.pop(f"write {next(self._writes)}", None)
        return gate.hold().result(HELD_S) if gate else "pass"


class GatedStream:
    """A stream whose messages pass the gates as they are sent."""

    def __init__(self, stream: Stream, gates: Gates) -> None:
        self._stream = stream
        self._gates = gates
        self._late: list[WireMessage] = []

    async def send(self, message: WireMessage) -> None:
        match await self._gates.at(message):
            case "drop":
                return
            case "swap":
                self._late.append(message)
                return
            case "corrupt" if isinstance(message, Commit):
                first, *others = message.pieces
                wrong = first.model_copy(update={"digest": first.digest ^ 1})
                message = message.model_copy(update={"pieces": (wrong, *others)})
        await self._stream.send(message)
        while self._late:
            await self._stream.send(self._late.pop())

    def __aiter__(self) -> GatedStream:
        return self

    async def __anext__(self) -> WireMessage:
        return await self._stream.__anext__()

    async def __aenter__(self) -> GatedStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class GatedPeers:
    """Peers that open gated streams; the first message of each passes the gates too."""

    def __init__(self, peers: Peers, gates: Gates) -> None:
        self._peers = peers
        self._gates = gates

    async def open(self, endpoint: Endpoint, first: WireMessage) -> GatedStream:
        await self._gates.at(first)
        if not self._gates.reaches(self._peers._identity.role, endpoint):
            for connection in self.connections():
                if connection.label == endpoint.name:
                    connection.abort()
            raise WorkerLost(f"{endpoint.name} cannot be reached: no route to host")
        return GatedStream(await self._peers.open(endpoint, first), self._gates)

    async def close(self) -> None:
        await self._peers.close()

    def connections(self) -> Iterator[Connection]:
        for connecting in self._peers._connections.values():
            if connecting.done() and not connecting.cancelled() and not connecting.exception():
                yield connecting.result()


class GatedWrite:
    """A write that passes the gates when it is started."""

    def __init__(self, write: PreparedWrite, transport: GatedTransport, source: Tensor) -> None:
        self._write = write
        self._transport = transport
        self._source = source

    def start(self) -> None:
        if self._transport.lets_through(self._source):
            self._write.start()

    def done(self) -> bool:
        return self._write.done()

    def close(self) -> None:
        self._write.close()


class GatedTransport:
    """A transport whose writes and pushes pass the gates, in the thread that makes them."""

    def __init__(self, transport: ChosenTransport, gates: Gates) -> None:
        self._transport = transport
        self._gates = gates

    def write(self, peer: str, source: Tensor, remote_offset: int) -> None:
        if self.lets_through(source):
            self._transport.write(peer, source, remote_offset)

    def lets_through(self, source: Tensor) -> bool:
        """Waits at the gate; what is written may be something else afterwards."""
        match self._gates.at_write():
            case "fail":
                raise TransferError("this write fails, because the test says so")
            case "drop":
                return False
            case "corrupt":
                source[source.numel() // 2] ^= 4
        return True

    def prepare_write(self, peer: str, source: Tensor, remote_offset: int) -> PreparedWrite:
        return GatedWrite(self._transport.prepare_write(peer, source, remote_offset), self, source)

    def push(self, peer: str, pieces: Pieces, digests: int, *, after: Any = None) -> list[int]:
        push = partial(self._transport.push, peer, pieces, digests, after=after)
        match self._gates.at_write():
            case "fail":
                raise TransferError("this push fails, because the test says so")
            case "drop":
                return [0] * digests
            case "corrupt":  # of what is pushed only: the sender's own rows stay right
                byte = ctypes.c_uint8.from_address(int(pieces.source[len(pieces.source) // 2]))
                byte.value ^= 4
                try:
                    return push()
                finally:
                    byte.value ^= 4
        return push()

    def prepare_push(self, peer: str, pieces: Pieces, digests: int) -> Callable[[], list[int]]:
        return partial(self.push, peer, pieces, digests)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


# ------------------------------------------------------------------ a cluster with gates


class _GatedRank(Rank):
    """Either kind of rank, with gates, and with the means to be cut off."""

    gates: Gates

    def _build(self, model: AnyModel) -> None:
        super()._build(model)
        self._accepted: set[Connection] = set()
        self.gated_peers = GatedPeers(self.peers, self.gates)
        self.peers = cast(Peers, self.gated_peers)

    async def _serve(self, stream: Stream, first: WireMessage, peer: Hello) -> None:
        self._accepted.add(stream._connection)
        await super()._serve(cast(Stream, GatedStream(stream, self.gates)), first, peer)

    def cut(self) -> None:
        """Every connection of this process breaks at once, as when its host loses the network."""
        for connection in (*self._accepted, *self.gated_peers.connections()):
            connection.abort()


class GatedPrefill(_GatedRank, PrefillRank):
    pass


class GatedDecode(_GatedRank, DecodeRank):
    pass


class GatedCluster(TinyCluster):
    """`cluster.gates.arm("commit")`; ranks can be cut off, killed and replaced."""

    def __init__(self, *, transport: OpenTransport = open_paths, **options: Any) -> None:
        self.gates = Gates()

        def gated(*args: Any, **settings: Any) -> ChosenTransport:
            return cast(ChosenTransport, GatedTransport(transport(*args, **settings), self.gates))

        self._gated = gated
        super().__init__(open_transport=gated, **options)
        self.gated_peers = GatedPeers(self.caller._peers, self.gates)
        self.caller._peers = cast(Peers, self.gated_peers)

    def _rank(self, kind: type[Any], number: int, open_transport: OpenTransport) -> Any:
        rank = super()._rank(
            GatedPrefill if kind is PrefillRank else GatedDecode, number, open_transport
        )
        rank.gates = self.gates
        return rank

    def named(self, name: str) -> _GatedRank:
        (rank,) = [rank for rank in self.ranks if rank.name == name]
        assert isinstance(rank, _GatedRank)
        return rank

    def cut(self, name: str) -> None:
        """The rank lives on and connects anew."""
        rank = self.named(name)
        rank.cut()
        if report := self.router._reports.get(rank.incarnation):
            report._connection.abort()

    async def kill(self, name: str) -> None:
        """All its connections break, then it stops; a new life of the same name takes over."""
        rank = self.named(name)
        self.cut(name)
        await rank.stop()
        ranks = cast(list[Any], self.prefill if rank.role == "prefill" else self.decode)
        kind = PrefillRank if rank.role == "prefill" else DecodeRank
        number = ranks.index(rank)
        ranks[number] = fresh = self._rank(kind, number, self._gated)
        await fresh.start()
        await until(lambda: fresh.incarnation in self.router._reports)
        self._life.push_async_callback(fresh.stop)
