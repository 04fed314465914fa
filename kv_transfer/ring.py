"""The receive ring: the only memory of a rank that its peers may write.

Each reservation gets a segment of its own, cells in a row; what stands in a cell counts for
nothing until it has been unpacked. Knows nothing of fields or transports.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.errors import ProtocolError
from cluster.messages import Segment
from kv_transfer.holding import Holding, Ledger, Stock
from kv_transfer.layout import ALIGNMENT

_SEGMENTS = "segments"
_HOST = torch.device("cpu")


class SegmentLease(Holding):
    """One reservation's segment. If the reservation ends while its writer may still write, it
    goes into quarantine under the writer's name; see Holding."""

    def __init__(self, stock: Stock, cell_bytes: int, cells: int) -> None:
        super().__init__(stock, {_SEGMENTS: 1})
        (number,) = self.units[_SEGMENTS]
        self.segment = Segment(
            offset=number * cells * cell_bytes, cell_bytes=cell_bytes, cells=cells
        )


class ReceiveRing:
    """`ring_bytes` of memory in segments of `cells` cells of `cell_bytes`.

    `memory` [bytes of all segments] uint8 is what a transport registers; it is filled once here,
    so that no transfer pays for first touching it.
    """

    def __init__(
        self, ring_bytes: int, cell_bytes: int, cells: int, device: torch.device = _HOST
    ) -> None:
        if cell_bytes % ALIGNMENT:
            raise ValueError(f"cell_bytes {cell_bytes} is not a multiple of {ALIGNMENT}")
        segments = ring_bytes // (cell_bytes * cells)
        if segments < 1:
            raise ValueError(
                f"a ring of {ring_bytes} bytes is less than {cells} cells of {cell_bytes}"
            )
        self.cell_bytes = cell_bytes
        self.cells = cells
        nbytes = segments * cells * cell_bytes
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(0)
        self._stock = Stock({_SEGMENTS: segments})

    def lease(self) -> SegmentLease:
        """A segment for one reservation. Raises NoRoom."""
        return SegmentLease(self._stock, self.cell_bytes, self.cells)

    def view(self, segment: Segment, seq: int, nbytes: int) -> Tensor:
        """The first `nbytes` of push `seq`'s cell, uint8 [nbytes], not copied.

        Raises ProtocolError for what no cell can hold: both numbers come from a peer.
        """
        if seq < 0 or not 0 <= nbytes <= segment.cell_bytes:
            raise ProtocolError(
                f"push {seq} of {nbytes} bytes does not fit a cell of {segment.cell_bytes}"
            )
        start = segment.offset + seq % segment.cells * segment.cell_bytes
        return self.memory[start : start + nbytes]

    def clear(self, owner: str) -> int:
        """`owner` will write no more: free its quarantined segments; how many there were."""
        return self._stock.clear(owner)

    def ledger(self) -> Ledger:
        """In segments."""
        return self._stock.ledger(_SEGMENTS)
