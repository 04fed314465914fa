"""One prompt's state on its way to one reservation: rows as they become final, then a promise.

Knows nothing of how the peer was found, or of what becomes of the state there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.errors import ProtocolError, Rejected, WorkerLost, revive
from cluster.messages import (
    Accepted,
    Cancel,
    Commit,
    Failed,
    HandedOver,
    Pushed,
    PushOpened,
    PushTo,
    RejectedNow,
    Span,
    Unpacked,
)
from cluster.wire import Stream
from engine.engine import Run
from engine.tasks import in_thread
from kv_transfer.blocks import Lease
from kv_transfer.digest import RunningDigest
from kv_transfer.plan import pack_into_pushes, spans_final_at
from kv_transfer.staging import pack_push
from kv_transfer.state_memory import StateMemory
from kv_transfer.transport import Transport
from model.state import StateField


@dataclass(frozen=True)
class Prompt:
    """What is pushed: `length` positions whose state appears in `lease` as `run` goes on."""

    request_id: str
    length: int
    lease: Lease
    run: Run


class Outlet:
    """What all pushes of a rank share: its slab, its transport, and staging cells between them.

    Each write blocks a thread and uses a cell. There are as many of both as `cells`, so that a
    peer that answers slowly, or no more, does not hold up the pushes to others.
    """

    def __init__(
        self,
        *,
        slab: StateMemory,
        fields: Sequence[StateField],
        transport: Transport,
        cell_bytes: int,
        cells: int,
    ) -> None:
        self.slab = slab
        self.fields = tuple(fields)
        self.transport = transport
        self.cell_bytes = cell_bytes
        self._threads = ThreadPoolExecutor(cells, thread_name_prefix="sender")
        self._cells: asyncio.Queue[Tensor] = asyncio.Queue()
        staging = torch.zeros(cells * cell_bytes, dtype=torch.uint8)
        transport.register(staging, source_only=True)
        for number in range(cells):
            self._cells.put_nowait(staging[number * cell_bytes :][:cell_bytes])

    async def write(
        self, spans: Sequence[Span], lease: Lease, digest: RunningDigest, peer: str, offset: int
    ) -> int:
        """Gather the rows and put them into the peer's ring; how many bytes.

        Also when it is cancelled, the write is over when this is left.
        """
        cell = await self._cells.get()

        def gather_and_write() -> int:
            size = pack_push(self.slab, lease, spans, cell)
            digest.add_packed(spans, cell)  # while these bytes are in cache
            self.transport.write(peer, cell[:size], offset)
            return size

        try:
            return await in_thread(self._threads, gather_and_write)
        finally:
            self._cells.put_nowait(cell)

    def close(self) -> None:
        self._threads.shutdown()


class Push:
    """Run hear() and send() together; when both are done, decode has taken the state over."""

    def __init__(
        self, outlet: Outlet, prompt: Prompt, place: PushTo, peer: str, stream: Stream
    ) -> None:
        self._outlet = outlet
        self._prompt = prompt
        self._place = place
        self._peer = peer
        self._stream = stream
        self._digest = RunningDigest(outlet.slab, prompt.lease)
        self._opened = False
        self._credits = asyncio.Semaphore(0)  # decode gives its cells: first all, then one by one
        self._bytes = 0
        self._pushes = 0
        self._push_s = 0.0
        self._accepted_at = 0.0

    async def hear(self) -> None:
        """Takes decode's answers until it accepts; raises what else it decides."""
        who = f"{self._prompt.request_id}: {self._place.decode.name}"
        async for message in self._stream:
            match message:
                case PushOpened():
                    self._opened = True
                    for _ in range(self._place.segment.cells):
                        self._credits.release()
                case Unpacked():
                    self._credits.release()
                case Accepted():
                    self._accepted_at = time.monotonic()
                    return
                case RejectedNow() if self._opened:
                    raise Rejected(f"{who} rejected the state: {message.why}")
                case RejectedNow() | Cancel():  # the state has no fault: it may go elsewhere
                    raise WorkerLost(f"{who} has no reservation for it any more")
                case Failed():
                    raise revive(message.error, message.message)
                case _:
                    raise ProtocolError(f"{who} answered a push with {message.kind}")
        raise WorkerLost(f"{who} has left the push")

    async def send(self) -> None:
        """Pushes rows as they become final, then commits to them."""
        prompt, outlet = self._prompt, self._outlet
        cell_bytes = min(self._place.segment.cell_bytes, outlet.cell_bytes)
        pushed = 0
        while pushed < prompt.length:
            done = await prompt.run.computed_beyond(pushed)
            spans = spans_final_at(outlet.fields, pushed, done, done == prompt.length)
            for some in pack_into_pushes(spans, outlet.slab.layout, cell_bytes):
                await self._push(some)
            pushed = done
        pieces = tuple(self._digest.pieces(outlet.fields, prompt.length))
        first_token = prompt.run.new_ids[0]
        await self._stream.send(
            Commit(length=prompt.length, first_token=first_token, pieces=pieces)
        )

    async def _push(self, spans: Sequence[Span]) -> None:
        await self._credits.acquire()
        segment = self._place.segment
        offset = segment.offset + self._pushes % segment.cells * segment.cell_bytes
        started = time.monotonic()
        self._bytes += await self._outlet.write(
            spans, self._prompt.lease, self._digest, self._peer, offset
        )
        self._push_s += time.monotonic() - started
        await self._stream.send(Pushed(seq=self._pushes, spans=tuple(spans)))
        self._pushes += 1

    def report(self) -> HandedOver:
        return HandedOver(
            reservation=self._place.reservation,
            bytes_moved=self._bytes,
            pushes=self._pushes,
            push_s=self._push_s,
            tail_s=self._accepted_at - self._prompt.run.ended_at,
            path=self._outlet.transport.path,
        )
