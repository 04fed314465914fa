"""A decode rank: takes prompts' state over and continues them; alone it is the colocated mode.

A request holds memory for all that it can ever need from its reservation on, so a running answer
is never interrupted for want of blocks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import ClassVar

from cluster.config import EngineSection
from cluster.errors import Draining, NoRoom, ProtocolError
from cluster.messages import (
    Connect,
    DrainingNow,
    Generate,
    Hello,
    Load,
    NoRoomNow,
    OpenPush,
    Request,
    Reserve,
    Reserved,
    Role,
    Started,
    WireMessage,
    unpack_ids,
)
from cluster.wire import Stream
from decode_worker.receiver import Receiver, Reservation
from decode_worker.scheduler import schedule
from engine.choice import as_message
from engine.engine import Run
from engine.rank import Rank
from engine.request import Finished, check
from engine.schedule import Schedule
from engine.tasks import while_wanted
from kv_transfer.ring import ReceiveRing


class DecodeRank(Rank):
    role: ClassVar[Role] = "decode"

    @property
    def section(self) -> EngineSection:
        return self.config.decode.engine

    @property
    def schedule(self) -> Schedule:
        sizes = self.section
        return partial(schedule, chunk_tokens=sizes.chunk_tokens, max_rows=sizes.max_rows)

    @asynccontextmanager
    async def transfers(self) -> AsyncIterator[None]:
        sizes = self.config.transfer
        self.ring = ReceiveRing(sizes.ring_bytes, sizes.cell_bytes, sizes.cells)
        with Receiver(
            name=self.name,
            incarnation=self.incarnation,
            slab=self.slab,
            fields=self.fields,
            ring=self.ring,
            transport=self.transport,
            admission=self.admission,
            wire_form=self.wire_form,
        ) as self._receiver:
            yield

    def load(self) -> Load:
        load = super().load()
        return load.model_copy(update={"waiting": load.waiting + self._receiver.waiting})

    def status(self) -> dict[str, object]:
        return super().status() | {
            "ring": asdict(self.ring.ledger()),
            "reservations": self._receiver.waiting,
        }

    async def answer(self, stream: Stream, first: WireMessage, peer: Hello) -> None:
        match first:
            case Connect():
                await self._receiver.connect(stream, first, peer)
            case OpenPush():
                await self._receiver.take_push(stream, first, peer)
            case Reserve():
                await self._reserve(stream, first.request)
            case Generate():
                await self._generate(stream, first.request)
            case _:
                raise ProtocolError(f"{self.name} is a decode rank; it cannot answer {first.kind}")

    async def _reserve(self, stream: Stream, request: Request) -> None:
        check(request, self.limits, held=request.longest)
        if self.draining:
            await stream.send(DrainingNow())
            return
        try:
            reservation = self._receiver.reserve(request)
        except NoRoom:
            await stream.send(NoRoomNow(retry_after_s=self.config.router.retry_after_s))
            return
        try:
            await while_wanted(stream, self._continue(stream, reservation), _nothing_more)
        finally:
            await self._receiver.release(reservation)

    async def _continue(self, stream: Stream, reservation: Reservation) -> None:
        """Wait for the prompt's state, then go on from its first token."""
        await stream.send(Reserved(reservation=reservation.id, segment=reservation.segment.segment))
        first_token = await reservation.first_token
        so_far = reservation.request
        request = so_far.resume_after((*unpack_ids(so_far.output), first_token))
        check(request, self.limits, held=request.longest)
        async with self.engine.run(request, reservation.lease, done=reservation.length) as run:
            await _tell_tokens(stream, run, request.output_length)

    async def _generate(self, stream: Stream, request: Request) -> None:
        check(request, self.limits, held=request.longest)
        if self.draining:
            raise Draining(f"{self.name} takes no new requests; ask for another worker")
        await while_wanted(stream, self._compute(stream, request), _nothing_more)

    async def _compute(self, stream: Stream, request: Request) -> None:
        """Prompt and answer, both here."""
        queued_at = time.monotonic()
        async with (
            self.admission.lease(request.longest) as lease,
            self.engine.run(request, lease) as run,
        ):
            await run.until(lambda: run.started)
            await stream.send(Started(queued_s=time.monotonic() - queued_at))
            async for scored in run.prompt_logprobs():
                await stream.send(scored)
            await _tell_tokens(stream, run, request.output_length)


async def _tell_tokens(stream: Stream, run: Run, first: int) -> None:
    """New tokens from index `first` on, as they come; several at once if the peer is slow."""
    async for choices in run.tokens():
        finish = run.end.reason if isinstance(run.end, Finished) else None
        await stream.send(as_message(first, choices, finish))
        first += len(choices)


def _nothing_more(message: WireMessage) -> None:
    raise ProtocolError(f"{message.kind} does not belong to an answer")
