"""Reservations and the pushes that fill them: nothing is continued that was not proved whole.

Peers write into the receive ring only; what stands there counts once it is unpacked into the
reservation's blocks, and the whole once its digests, computed from the blocks, match. Whoever of
caller and sender leaves last frees the memory. Knows nothing of engines and answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count

from cluster.errors import (
    ClusterError,
    ProtocolError,
    Rejected,
    StartupError,
    WorkerLost,
)
from cluster.messages import (
    Accepted,
    Cancel,
    Cancelled,
    Commit,
    Connect,
    Connected,
    Hello,
    OpenPush,
    Pushed,
    PushOpened,
    RejectedNow,
    Request,
    Unpacked,
)
from cluster.wire import Stream
from engine.admission import Admission
from engine.tasks import in_thread
from kv_transfer.blocks import Lease
from kv_transfer.digest import RunningDigest, check_pieces
from kv_transfer.ring import ReceiveRing, SegmentLease
from kv_transfer.staging import push_bytes, unpack_push
from kv_transfer.state_memory import StateMemory
from kv_transfer.transport import Transport
from model.state import StateField


class Reservation:
    """Memory that waits for one prompt's state; `id` is never used twice.

    Two sides hold on to it: its caller, from reserve() to release(), and the sender while a push
    is open.
    """

    def __init__(self, id: str, request: Request, lease: Lease, segment: SegmentLease) -> None:
        self.id = id
        self.request = request
        self.length = request.prompt_length + request.output_length
        self.lease = lease
        self.segment = segment
        self.first_token: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.push: Stream | None = None  # while a sender may write into the segment

    @property
    def open(self) -> bool:
        """Its caller still waits for the state."""
        return not self.first_token.done()

    def fail(self, error: ClusterError) -> None:
        if self.open:
            self.first_token.set_exception(error)
            self.first_token.exception()  # the caller may have gone: then nobody asks for it


class Receiver:
    """All reservations of one decode rank, and the sender's end of each push."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: str,
        slab: StateMemory,
        fields: Sequence[StateField],
        ring: ReceiveRing,
        transport: Transport,
        admission: Admission,
        wire_form: str,
        output_reserved: float = 1.0,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._slab = slab
        self._fields = fields
        self._ring = ring
        self._transport = transport
        self._admission = admission
        self._wire_form = wire_form
        self._output_reserved = output_reserved
        self._serials = count(1)
        self._reservations: dict[str, Reservation] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="receiver")

    def __enter__(self) -> Receiver:
        self._transport.register(self._ring.memory)
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    @property
    def waiting(self) -> int:
        """Reservations that are not filled yet."""
        return sum(reservation.open for reservation in self._reservations.values())

    # ---------------------------------------------------------------- for the caller's side

    async def reserve(self, request: Request, *, whole: bool = False) -> Reservation:
        """Memory to begin with, at once, or `whole`: for all that it can need, in its turn.

        Raises NoRoom. Give it to release().
        """
        if whole:
            lease = await self._admission.lease_in_turn(request.longest)
        else:
            lease = self._admission.lease_now(request.held(self._output_reserved))
        try:
            segment = self._ring.lease()
        except ClusterError:
            self._admission.release(lease)
            raise
        id = f"{self._incarnation}:{next(self._serials)}"
        reservation = self._reservations[id] = Reservation(id, request, lease, segment)
        return reservation

    async def release(self, reservation: Reservation) -> None:
        """The caller needs it no more. What a sender may still write to is kept in quarantine."""
        del self._reservations[reservation.id]
        reservation.first_token.cancel()
        if reservation.push is None:
            reservation.segment.release()
            self._admission.release(reservation.lease)
            return
        reservation.segment.quarantine(reservation.id)
        reservation.lease.quarantine(reservation.id)
        with suppress(ClusterError):
            await reservation.push.send(Cancel())

    # ---------------------------------------------------------------- for the sender's side

    async def connect(self, stream: Stream, first: Connect, peer: Hello) -> None:
        """Introduces this rank to a sender, for as long as it stays connected."""
        if first.wire_form != self._wire_form:
            raise StartupError(
                f"{self._name} and {peer.role} {peer.incarnation} cannot exchange state: they "
                f"hold different models or different state\n{self._name}: {self._wire_form}\n"
                f"{peer.incarnation}: {first.wire_form}"
            )
        await stream.send(
            Connected(metadata=self._transport.metadata(), ring_bytes=len(self._ring.memory))
        )
        with suppress(WorkerLost):
            await stream.receive()

    async def take_push(self, stream: Stream, first: OpenPush, peer: Hello) -> None:
        """Serves one push to its end, which is also the end of the sender's writes."""
        reservation = self._reservations.get(first.reservation)
        if refusal := _refusal(reservation, first):
            await stream.send(RejectedNow(why=refusal))
            return
        assert reservation is not None
        sender = f"{peer.role} {peer.incarnation}"
        reservation.push = stream
        try:
            await stream.send(PushOpened())
            await self._fill(stream, reservation)
        except WorkerLost as error:
            reservation.fail(WorkerLost(f"{sender} was lost while it pushed: {error}"))
        except (Rejected, ProtocolError) as error:
            reservation.fail(Rejected(f"{reservation.request.request_id}: {error}"))
            with suppress(ClusterError):
                await stream.send(RejectedNow(why=str(error)))
                await _last_write(stream)
        finally:
            reservation.push = None
            reservation.fail(WorkerLost(f"{sender} has given up the push of {reservation.id}"))
            reservation.segment.release()
            self._end_quarantine(reservation)

    async def _fill(self, stream: Stream, reservation: Reservation) -> None:
        """Until the state is accepted or the sender has ended. Raises Rejected."""
        pushes = 0
        digest = RunningDigest(self._slab, reservation.lease)
        async for message in stream:
            match message:
                case Cancelled():
                    return
                case _ if not reservation.open:
                    continue  # its caller has gone: only the sender's end matters now
                case Pushed() if message.seq == pushes:
                    await in_thread(self._thread, self._unpack, reservation, message, digest)
                    await stream.send(Unpacked(seq=pushes))
                    pushes += 1
                case Commit() if message.length == reservation.length:
                    check_pieces(digest.pieces(self._fields, reservation.length), message.pieces)
                    reservation.push = None  # a commit comes after the sender's last write
                    reservation.first_token.set_result(message.first_token)
                    await stream.send(Accepted())
                    return
                case _:
                    raise ProtocolError(f"{message.kind} does not belong after {pushes} pushes")

    def _unpack(self, reservation: Reservation, push: Pushed, digest: RunningDigest) -> None:
        """In the receiver's thread. Raises ProtocolError for spans that cannot be."""
        size = push_bytes(self._slab.layout, push.spans)
        cell = self._ring.view(reservation.segment.segment, push.seq, size)
        unpack_push(self._slab, reservation.lease, push.spans, cell)
        digest.add(push.spans)

    def _end_quarantine(self, reservation: Reservation) -> None:
        reservation.segment.clear()
        reservation.lease.clear()
        self._admission.admit()


def _refusal(reservation: Reservation | None, push: OpenPush) -> str:
    if reservation is None:
        return f"reservation {push.reservation} is not open, or no more"
    if reservation.push is not None or not reservation.open:
        return f"reservation {push.reservation} has its push already"
    if reservation.length != push.length:
        return (
            f"reservation {push.reservation} waits for {reservation.length} positions, "
            f"not for {push.length}"
        )
    return ""


async def _last_write(stream: Stream) -> None:
    """Until the sender says that none of its writes can land any more, by word or by leaving."""
    async for message in stream:
        if isinstance(message, Cancelled):
            return
