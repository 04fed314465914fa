"""What all pushes of a rank share: its state memory, its transport, and staging cells.

A push goes one of three ways: packed into a cell by the host, or by a device as planned before,
and written into the peer's ring; or from blocks to blocks. Knows nothing of prompts, and of peers
only how they are reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cluster.messages import Segment, Span
from engine.tasks import in_thread
from kv_transfer.blocks import Lease
from kv_transfer.cell_writer import CellWriter, Leave, Told
from kv_transfer.chosen_transport import ChosenTransport
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.digest import RunningDigest
from kv_transfer.layout import REQUESTS_ON_A_DEVICE
from kv_transfer.path_probe import PathReport
from kv_transfer.reach import Reach
from kv_transfer.row_mover import RowMover
from kv_transfer.row_pieces import Standing
from kv_transfer.slab import Slab
from kv_transfer.staging import pack_push, push_bytes
from model.state import StateField

_LOOK_S = 2e-4  # between looks at an event of the device; a chunk's layers are milliseconds apart
_DEVICE_PUSH = 64 << 20  # bytes of one push: far above what a launch costs, milliseconds of wire


class Outlet:
    """Each push blocks a thread. There are as many as `cells`, and of cells too, so that a peer
    that answers slowly, or no more, does not hold up the pushes to others.
    """

    def __init__(
        self,
        *,
        slab: Slab | DeviceSlab,
        fields: Sequence[StateField],
        transport: ChosenTransport,
        cell_bytes: int,
        cells: int,
        chunk_tokens: int = 0,
    ) -> None:
        """`chunk_tokens`: what a prompt mostly grows by; 0: it is there at once."""
        self.slab = slab
        self.fields = tuple(fields)
        self.transport = transport
        self.cell_bytes = cell_bytes
        self._on_device = isinstance(slab, DeviceSlab)
        # On a CPU as much as stays in its cache between being hashed and being written.
        self.direct_bytes = _DEVICE_PUSH if self._on_device else cell_bytes
        self.planned = transport.reach is not None  # a device packs into cells of its own memory
        self.chunk_tokens = chunk_tokens
        self._most = cells  # of one request
        self._threads = ThreadPoolExecutor(cells, thread_name_prefix="sender")
        total = cells * REQUESTS_ON_A_DEVICE if self.planned else cells
        # Whoever has a cell has a thread too: see planned_writes.
        self._writers = ThreadPoolExecutor(total, thread_name_prefix="cell-writer")
        self._cells: asyncio.Queue[Tensor] = asyncio.Queue()
        staging = torch.zeros(total * cell_bytes, dtype=torch.uint8, device=transport.cells)
        transport.register(staging, source_only=True)
        for number in range(total):
            self._cells.put_nowait(staging[number * cell_bytes :][:cell_bytes])
        transport.push_from(slab.blocks, slab.slots)

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

    @asynccontextmanager
    async def planned_writes(
        self, lease: Lease, pushes: Sequence[Sequence[Span]], peer: str, segment: Segment
    ) -> AsyncIterator[CellWriter]:
        """Everything about a request's packed pushes that can be done before their rows exist.

        It holds a cell, and others that nobody wants just now, until it is left; nothing may be
        under way then. Raises TransferError.
        """
        cells = [await self._cells.get()]
        while len(cells) < min(len(pushes), self._most) and not self._cells.empty():
            cells.append(self._cells.get_nowait())

        def plan() -> CellWriter:
            assert self.transport.reach is not None, "cells are packed by the host"
            parts = [
                cells[number % len(cells)][: push_bytes(self.slab.layout, spans)]
                for number, spans in enumerate(pushes)
            ]
            mover = RowMover(self.slab, self.transport.reach)
            packing = mover.packing(lease, list(zip(pushes, parts, strict=True)))
            writes = [
                self.transport.prepare_write(
                    peer, part, segment.offset + number % segment.cells * segment.cell_bytes
                )
                for number, part in enumerate(parts)
            ]
            return CellWriter(packing, writes, len(cells))

        try:
            writer = await in_thread(self._writers, plan)
            try:
                yield writer
            finally:
                writer.close()
        finally:
            for cell in cells:
                self._cells.put_nowait(cell)

    async def run(self, writer: CellWriter, leave: Leave, told: Told) -> list[int]:
        """Writes all planned pushes as CellWriter.run does; digests of their spans."""

        def work() -> list[int]:
            writer.run(leave, told)
            return writer.digests()

        return await in_thread(self._writers, work)

    async def push(
        self,
        spans: Sequence[Span],
        lease: Lease,
        digest: RunningDigest,
        peer: str,
        there: Standing,
        after: Any = None,
    ) -> int:
        """Put the rows where they shall stand at the peer, once `after` has happened; how many
        bytes. They can be seen there when this returns, and also when it is cancelled, nothing is
        under way any more when it is left."""
        while after is not None and not after.query():
            # Not by the transport's stream: the pushes of others would wait in it too.
            await asyncio.sleep(_LOOK_S)

        def move() -> int:
            pieces = self._mover.pieces(lease, spans, there)
            if self._on_device:
                found = self.transport.push(peer, pieces, len(spans))
                digest.add_known(spans, found)
            else:
                digest.add(spans)  # brings the rows into the cache
                self.transport.push(peer, pieces, 0)
            return sum(self.slab.layout.span_bytes(span) for span in spans)

        return await in_thread(self._threads, move)

    async def prepare_push(
        self,
        spans: Sequence[Span],
        lease: Lease,
        digest: RunningDigest,
        peer: str,
        there: Standing,
    ) -> Callable[[], Awaitable[int]]:
        """As push, of rows that do not exist yet: on a device everything is planned now."""
        if not self._on_device:
            return partial(self.push, spans, lease, digest, peer, there)

        def plan() -> Callable[[], list[int]]:
            pieces = self._mover.pieces(lease, spans, there)
            return self.transport.prepare_push(peer, pieces, len(spans))

        prepared = await in_thread(self._threads, plan)

        async def push() -> int:
            digest.add_known(spans, await in_thread(self._threads, prepared))
            return sum(self.slab.layout.span_bytes(span) for span in spans)

        return push

    async def measure(self, peer: str, offset: int | None = None) -> PathReport:
        """What the pair gets; `offset` is of a cell of ours in the peer's ring, if it is not
        direct. Errors as of a push."""
        if offset is None:
            return await in_thread(self._threads, self.transport.measure, peer)
        cell = await self._cells.get()
        try:
            return await in_thread(self._threads, self.transport.measure, peer, cell, offset)
        finally:
            self._cells.put_nowait(cell)

    @property
    def _mover(self) -> RowMover:
        direct = self.transport.direct
        assert direct is not None, "only pairs with a direct path are pushed to"
        reach: Reach = direct.reach
        return RowMover(self.slab, reach)

    def close(self) -> None:
        self._threads.shutdown()
        self._writers.shutdown()
