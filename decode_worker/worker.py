"""A decode rank: takes prompts' state over and continues them; alone it is the colocated mode.

By default a request holds memory for all that it can ever need from its reservation on, so a
running answer is never interrupted for want of blocks. With `output_reserved` below 1 it holds
less, and grows; engine/room.py says who gives way when no block is left.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

from cluster.errors import Draining, NoRoom, ProtocolError
from cluster.messages import (
    Cancelled,
    Connect,
    DrainingNow,
    Generate,
    Hello,
    Load,
    NoRoomNow,
    OpenPush,
    Reserve,
    Reserved,
    Role,
    Started,
    Stop,
    WireMessage,
    unpack_ids,
)
from cluster.wire import Stream
from decode_worker.receiver import Receiver
from decode_worker.reservation import Reservation
from decode_worker.scheduler import schedule
from engine.choice import as_message
from engine.engine import Run
from engine.rank import Rank
from engine.request import Finished, check
from engine.schedule import Grant, Progress, Schedule
from engine.tasks import while_wanted
from kv_transfer.ring import ReceiveRing


@dataclass
class _Told:
    """How far an answer has been told: the next output index."""

    upto: int


class DecodeRank(Rank):
    role: ClassVar[Role] = "decode"

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    def _schedule(self, requests: Sequence[Progress]) -> list[Grant]:
        sizes = self.section
        return schedule(
            requests,
            chunk_tokens=sizes.chunk_tokens,
            beside_tokens=sizes.beside_tokens,
            max_rows=sizes.max_rows,
            neighbours_answer=self.lockstep is not None and self.lockstep.answers_beside,
        )

    @asynccontextmanager
    async def transfers(self) -> AsyncIterator[None]:
        self._stops = self._told_in_vain = 0
        sizes = self.config.transfer
        self.ring = ReceiveRing(
            sizes.ring_bytes, sizes.cell_bytes, sizes.cells, self.transport.cells
        )
        with Receiver(
            name=self.name,
            incarnation=self.incarnation,
            slab=self.slab,
            fields=self.fields,
            ring=self.ring,
            transport=self.transport,
            admission=self.admission,
            wire_form=self.wire_form,
            output_reserved=self.section.output_reserved,
        ) as self._receiver:
            yield

    def load(self) -> Load:
        load = super().load()
        return load.model_copy(update={"waiting": load.waiting + self._receiver.waiting})

    def status(self) -> dict[str, object]:
        return super().status() | {
            "ring": asdict(self.ring.ledger()),
            "reservations": self._receiver.waiting,
            "stops": self._stops,  # answers whose end the caller found
            "told_in_vain": self._told_in_vain,  # their tokens beyond it
        }

    async def answer(self, stream: Stream, first: WireMessage, peer: Hello) -> None:
        match first:
            case Connect():
                await self._receiver.connect(stream, first, peer)
            case OpenPush():
                await self._receiver.take_push(stream, first, peer)
            case Cancelled():
                self._receiver.hear_last_word(first, peer)
            case Reserve():
                await self._reserve(stream, first)
            case Generate():
                await self._generate(stream, first)
            case _:
                raise ProtocolError(f"{self.name} is a decode rank; it cannot answer {first.kind}")

    async def _reserve(self, stream: Stream, first: Reserve) -> None:
        check(first.request, self.limits, held=first.request.longest)
        told = _Told(first.request.output_length + 1)
        await while_wanted(stream, self._hold(stream, first, told), partial(self._hear, told))

    async def _hold(self, stream: Stream, first: Reserve, told: _Told) -> None:
        """A reservation, from its grant to the last token."""
        if self.draining:
            await stream.send(DrainingNow())
            return
        try:
            reservation = await self._receiver.reserve(first.request, whole=first.whole)
        except NoRoom:
            await stream.send(NoRoomNow(retry_after_s=self.config.router.retry_after_s))
            return
        try:
            if self.draining:  # it began while this one waited
                await stream.send(DrainingNow())
            else:
                await self._continue(stream, reservation, told)
        finally:
            await self._receiver.release(reservation)

    async def _continue(self, stream: Stream, reservation: Reservation, told: _Told) -> None:
        """Wait for the prompt's state, then go on from its first token."""
        await stream.send(Reserved(reservation=reservation.id, segment=reservation.segment.segment))
        first_token = await reservation.first_token
        so_far = reservation.request
        request = so_far.resume_after((*unpack_ids(so_far.output), first_token))
        check(request, self.limits, held=request.longest)
        async with self.engine.run(request, reservation.lease, done=reservation.length) as run:
            await _tell_tokens(stream, run, told)

    async def _generate(self, stream: Stream, first: Generate) -> None:
        check(first.request, self.limits, held=first.request.longest)
        if self.draining:
            raise Draining(f"{self.name} takes no new requests; ask for another worker")
        told = _Told(first.request.output_length)
        await while_wanted(stream, self._compute(stream, first, told), partial(self._hear, told))

    async def _compute(self, stream: Stream, first: Generate, told: _Told) -> None:
        """Prompt and answer, both here."""
        queued_at = time.monotonic()
        request = first.request
        length = request.longest if first.whole else request.held(self.section.output_reserved)
        async with (
            self.admission.lease(length) as lease,
            self.engine.run(request, lease) as run,
        ):
            await run.until(lambda: run.started)
            await stream.send(Started(queued_s=time.monotonic() - queued_at))
            async for scored in run.prompt_logprobs():
                await stream.send(scored)
            await _tell_tokens(stream, run, told)

    def _hear(self, told: _Told, message: WireMessage) -> None:
        if not isinstance(message, Stop):
            raise ProtocolError(f"{message.kind} does not belong to an answer")
        self._stops += 1
        self._told_in_vain += max(0, told.upto - message.index)


async def _tell_tokens(stream: Stream, run: Run, told: _Told) -> None:
    """New tokens from index `told.upto` on, as they come; several at once if the peer is slow."""
    async for choices in run.tokens():
        finish = run.end.reason if isinstance(run.end, Finished) else None
        await stream.send(as_message(told.upto, choices, finish))
        told.upto += len(choices)
