"""Packed pushes of one state, out of their cells into its blocks, with digests of what then stands.

Two ways: by the host, push by push; or by a device, planned when the sender says what will come,
so that a push is two launches and the digests are read once. Knows nothing of streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from cluster.errors import ProtocolError
from cluster.messages import Pushed, Segment, Span
from kv_transfer.blocks import Lease
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.digest import RunningDigest
from kv_transfer.reach import Moves, Reach
from kv_transfer.ring import ReceiveRing
from kv_transfer.row_mover import RowMover
from kv_transfer.slab import Slab
from kv_transfer.staging import push_bytes, unpack_push

Pushes = Sequence[Sequence[Span]]


class Unpacking(Protocol):
    """All of it blocks; `digest` has taken in everything once finish() has returned."""

    def plan(self, pushes: Pushes) -> None:
        """What will come. Raises ProtocolError for what cannot be."""

    def unpack(self, push: Pushed) -> None:
        """Its cell is free when this returns. Raises ProtocolError as plan()."""

    def finish(self) -> None: ...


class _Cells:
    """One reservation's part of the ring, and what was planned to come through it."""

    def __init__(
        self,
        slab: Slab | DeviceSlab,
        lease: Lease,
        digest: RunningDigest,
        ring: ReceiveRing,
        segment: Segment,
    ) -> None:
        self.slab, self.lease, self.digest = slab, lease, digest
        self._ring, self._segment = ring, segment

    def cell(self, seq: int, spans: Sequence[Span]) -> Tensor:
        return self._ring.view(self._segment, seq, push_bytes(self.slab.layout, spans))


class HostUnpacking:
    def __init__(self, cells: _Cells) -> None:
        self._cells = cells
        self._planned: Pushes | None = None

    def plan(self, pushes: Pushes) -> None:
        self._planned = pushes

    def unpack(self, push: Pushed) -> None:
        spans = push.spans if self._planned is None else _planned(self._planned, push)
        cells = self._cells
        cell = cells.cell(push.seq, spans)
        unpack_push(cells.slab, cells.lease, spans, cell)
        cells.digest.add(spans)

    def finish(self) -> None:
        pass


class DeviceUnpacking:
    def __init__(self, cells: _Cells, reach: Reach) -> None:
        self._cells = cells
        self._mover = RowMover(cells.slab, reach)
        self._planned: Pushes = ()
        self._moves: Moves | None = None

    def plan(self, pushes: Pushes) -> None:
        parts = [(spans, self._cells.cell(seq, spans)) for seq, spans in enumerate(pushes)]
        self._moves = self._mover.unpacking(self._cells.lease, parts)
        self._planned = pushes

    def unpack(self, push: Pushed) -> None:
        if self._moves is None:  # its sender packs by the host, and plans nothing
            cells = self._cells
            cell = cells.cell(push.seq, push.spans)
            cells.digest.add_known(push.spans, self._mover.unpack(cells.lease, push.spans, cell))
            return
        _planned(self._planned, push)
        stored = self._moves.start(2 * push.seq)
        self._moves.start(2 * push.seq + 1)
        stored.synchronize()

    def finish(self) -> None:
        if self._moves is not None:
            spans = [span for some in self._planned for span in some]
            self._cells.digest.add_known(spans, self._moves.digests())


def _planned(pushes: Pushes, push: Pushed) -> Sequence[Span]:
    if push.spans or push.seq >= len(pushes):
        raise ProtocolError(f"push {push.seq} is not as {len(pushes)} pushes were planned")
    return pushes[push.seq]


def open_unpacking(
    slab: Slab | DeviceSlab,
    lease: Lease,
    digest: RunningDigest,
    ring: ReceiveRing,
    segment: Segment,
    reach: Reach | None,
) -> Unpacking:
    """`reach`: of the device that has both the state and the ring, if one has."""
    cells = _Cells(slab, lease, digest, ring, segment)
    return HostUnpacking(cells) if reach is None else DeviceUnpacking(cells, reach)
