"""What all pushes of a rank share: its state memory, its transport, and staging cells.

A push goes one of two ways: packed into a cell that is written into the peer's ring, or from
blocks to blocks. Knows nothing of prompts, and of peers only how they are reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from cluster.messages import Span
from engine.tasks import in_thread
from kv_transfer.blocks import Lease
from kv_transfer.chosen_transport import ChosenTransport
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.digest import RunningDigest
from kv_transfer.path_probe import PathReport
from kv_transfer.reach import Reach
from kv_transfer.row_mover import RowMover
from kv_transfer.row_pieces import Standing
from kv_transfer.slab import Slab
from kv_transfer.staging import pack_push
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
    ) -> None:
        self.slab = slab
        self.fields = tuple(fields)
        self.transport = transport
        self.cell_bytes = cell_bytes
        self._on_device = isinstance(slab, DeviceSlab)
        # On a CPU as much as stays in its cache between being hashed and being written.
        self.direct_bytes = _DEVICE_PUSH if self._on_device else cell_bytes
        self._threads = ThreadPoolExecutor(cells, thread_name_prefix="sender")
        self._cells: asyncio.Queue[Tensor] = asyncio.Queue()
        staging = torch.zeros(cells * cell_bytes, dtype=torch.uint8)
        transport.register(staging, source_only=True)
        for number in range(cells):
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
