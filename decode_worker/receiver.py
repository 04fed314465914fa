"""Reservations and the pushes that fill them: nothing is continued that was not proved whole.

Packed pushes come into the receive ring; what stands there counts once it is unpacked into the
reservation's blocks. Direct ones come into the blocks themselves, under the stricter rules of
writers.py. Either way the whole counts once its digests, computed from the blocks, match. Knows
nothing of engines and answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from cluster.errors import (
    ClusterError,
    ProtocolError,
    Rejected,
    StartupError,
    TransferError,
    WorkerLost,
)
from cluster.messages import (
    Accepted,
    Cancelled,
    Commit,
    Connect,
    Connected,
    Hello,
    OpenPush,
    Planned,
    Pushed,
    PushOpened,
    RejectedNow,
    Request,
    Span,
    Unpacked,
)
from cluster.wire import Stream
from decode_worker.reservation import Reservation
from decode_worker.unpacking import open_unpacking
from decode_worker.writers import Writers
from engine.admission import Admission
from engine.tasks import in_thread
from kv_transfer.chosen_transport import ChosenTransport
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.digest import RunningDigest, check_pieces
from kv_transfer.plan import spans_final_at
from kv_transfer.ring import ReceiveRing
from kv_transfer.row_mover import RowMover
from kv_transfer.slab import Slab
from kv_transfer.staging import check_push, push_bytes
from model.state import StateField

logger = logging.getLogger(__name__)


class _Ends(NamedTuple):
    spans: tuple[Span, ...]
    digests: Callable[[], list[int]]


class Receiver:
    """All reservations of one decode rank, and the sender's end of each push."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: str,
        slab: Slab | DeviceSlab,
        fields: Sequence[StateField],
        ring: ReceiveRing,
        transport: ChosenTransport,
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
        self._transport.offer(self._slab.blocks, self._slab.slots)
        self._writers = Writers()
        return self

    def __exit__(self, *error: object) -> None:
        self._writers.close()
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
        if await reservation.left():
            self._admission.release(reservation.lease)

    # ---------------------------------------------------------------- for the sender's side

    async def connect(self, stream: Stream, first: Connect, peer: Hello) -> None:
        """Introduces this rank to a sender, for as long as it stays connected."""
        if first.wire_form != self._wire_form:
            raise StartupError(
                f"{self._name} and {peer.role} {peer.incarnation} cannot exchange state: they "
                f"hold different models or different state\n{self._name}: {self._wire_form}\n"
                f"{peer.incarnation}: {first.wire_form}"
            )
        why = self._met(peer.incarnation, first.metadata)
        try:
            await stream.send(
                Connected(
                    metadata=self._transport.metadata(direct=not why),
                    ring_bytes=len(self._ring.memory),
                    block_tokens=self._slab.layout.block_tokens,
                    ring_slack=self._slab.layout.ring_slack,
                    why_packed=why,
                )
            )
            with suppress(WorkerLost):
                await stream.receive()
        finally:
            if not why:
                self._writers.parted(peer.incarnation)

    def _met(self, incarnation: str, metadata: bytes) -> str:
        """Why it is not offered the blocks; "" if it is. Only whose end can be seen may have them.

        What is configured on both sides alike is no reason that anybody has to hear of.
        """
        if self._transport.direct is None:
            return self._transport.why_packed or "direct pushes are switched off here"
        try:
            self._writers.met(incarnation, self._transport.watch(metadata))
        except (TransferError, ProtocolError) as error:
            return str(error)
        return ""

    async def take_push(self, stream: Stream, first: OpenPush, peer: Hello) -> None:
        """Serves one push to its end. What a direct one may still write into stays in quarantine
        until its sender has said that it is over, or has ended."""
        reservation = self._reservations.get(first.reservation)
        if refusal := self._refusal(reservation, first, peer):
            await stream.send(RejectedNow(why=refusal))
            return
        assert reservation is not None
        sender = f"{peer.role} {peer.incarnation}"
        reservation.begin_writing(peer.incarnation, stream, direct=first.direct)
        over = partial(self._writing_is_over, reservation, sender)
        if first.direct:
            self._writers.begin(peer.incarnation, reservation.id, over)
        said = False  # by the sender, that it writes no more
        try:
            await stream.send(_where(reservation, first))
            said = await self._fill(stream, reservation, first)
        except WorkerLost as error:
            reservation.fail(WorkerLost(f"{sender} was lost while it pushed: {error}"))
        except (Rejected, ProtocolError) as error:
            reservation.fail(Rejected(f"{reservation.request.request_id}: {error}"))
            with suppress(ClusterError):
                await stream.send(RejectedNow(why=str(error)))
                said = await _last_write(stream)
        finally:
            reservation.stream_ended()
            reservation.fail(WorkerLost(f"{sender} has given up the push of {reservation.id}"))
            if not first.direct:
                over()
            elif said:
                self._writers.said(peer.incarnation, reservation.id)

    def hear_last_word(self, word: Cancelled, peer: Hello) -> None:
        """Of a direct push whose stream broke off: no write of it can land any more."""
        self._writers.said(peer.incarnation, word.reservation)

    async def _fill(self, stream: Stream, reservation: Reservation, push: OpenPush) -> bool:
        """Until the state is accepted or the sender has ended; whether it has said that it writes
        no more. Raises Rejected."""
        pushes = 0
        digest = RunningDigest(self._slab, reservation.lease)
        unpacking = open_unpacking(
            self._slab,
            reservation.lease,
            digest,
            self._ring,
            reservation.segment.segment,
            self._transport.reach,
        )
        planned = False
        ends = _Ends((), list)
        if push.direct and isinstance(self._slab, DeviceSlab):
            ends = await in_thread(self._thread, self._planned_ends, reservation)
        look = partial(self._look_at, reservation, digest, ends)
        async for message in stream:
            match message:
                case Cancelled():
                    return True
                case _ if not reservation.open:
                    continue  # its caller has gone: only the sender's end matters now
                case Planned() if not (planned or pushes or push.direct):
                    await in_thread(self._thread, unpacking.plan, message.pushes)
                    planned = True
                case Pushed() if message.seq == pushes:
                    if push.direct:
                        await in_thread(self._thread, look, message)
                    else:
                        await in_thread(self._thread, unpacking.unpack, message)
                        await stream.send(Unpacked(seq=pushes))
                    pushes += 1
                case Commit() if message.length == reservation.length:
                    if not push.direct:
                        await in_thread(self._thread, unpacking.finish)
                    check_pieces(digest.pieces(self._fields, reservation.length), message.pieces)
                    reservation.first_token.set_result(message.first_token)
                    # a commit comes after the sender's last write
                    self._writers.said(reservation.writer or "", reservation.id)
                    reservation.writer = None
                    await stream.send(Accepted())
                    return True
                case _:
                    raise ProtocolError(f"{message.kind} does not belong after {pushes} pushes")
        return False

    def _planned_ends(self, reservation: Reservation) -> _Ends:
        """Digests, planned now, of the rows that come last: somebody waits for those."""
        length = reservation.length
        spans = tuple(spans_final_at(self._fields, length, length, last=True))
        return _Ends(spans, self._mover.planned_digests(reservation.lease, spans))

    @property
    def _mover(self) -> RowMover:
        assert self._transport.direct is not None
        return RowMover(self._slab, self._transport.direct.reach)

    def _look_at(
        self, reservation: Reservation, digest: RunningDigest, ends: _Ends, push: Pushed
    ) -> None:
        """In the receiver's thread, at rows that stand in the blocks. Raises ProtocolError."""
        layout, lease, spans = self._slab.layout, reservation.lease, push.spans
        check_push(layout, lease.length, spans, push_bytes(layout, spans))
        if isinstance(self._slab, Slab):
            digest.add(spans)
            return
        if ends.spans == spans:
            digest.add_known(spans, ends.digests())
        else:
            digest.add_known(spans, self._mover.digests(lease, spans))

    def _writing_is_over(self, reservation: Reservation, sender: str) -> None:
        reservation.fail(WorkerLost(f"{sender} has given up the push of {reservation.id}"))
        reservation.end_writing()
        self._admission.admit()

    def _refusal(self, reservation: Reservation | None, push: OpenPush, peer: Hello) -> str:
        if reservation is None:
            return f"reservation {push.reservation} is not open, or no more"
        if reservation.writer is not None or not reservation.open:
            return f"reservation {push.reservation} has its push already"
        if reservation.length != push.length:
            return (
                f"reservation {push.reservation} waits for {reservation.length} positions, "
                f"not for {push.length}"
            )
        if push.direct and not self._writers.knows(peer.incarnation):
            return f"{peer.role} {peer.incarnation} has not been offered any blocks"
        return ""


def _where(reservation: Reservation, push: OpenPush) -> PushOpened:
    if not push.direct:
        return PushOpened()
    blocks = np.array(reservation.lease.block_ids, dtype="<i4").tobytes()
    return PushOpened(blocks=blocks, slot=reservation.lease.slot)


async def _last_write(stream: Stream) -> bool:
    """Until the sender says that none of its writes can land any more, or leaves without."""
    async for message in stream:
        if isinstance(message, Cancelled):
            return True
    return False
