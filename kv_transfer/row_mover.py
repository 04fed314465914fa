"""Moves rows of one rank's state memory by kernel: into cells, out of them, or to a peer's blocks.

The same bytes and digests as staging.py and digest.py, for memory of any device; each call is one
launch or two. Knows nothing of cells' owners, peers' names or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from cluster.messages import Span
from kernels.push_table import Pieces
from kv_transfer.blocks import Lease
from kv_transfer.layout import Layout
from kv_transfer.reach import Move, Moves, Reach
from kv_transfer.row_pieces import Standing, between, landed, packed, standing
from kv_transfer.staging import check_push, push_bytes


class Records(Protocol):
    """State memory as records: Slab or DeviceSlab."""

    layout: Layout
    blocks: Tensor
    slots: Tensor


class RowMover:
    def __init__(self, memory: Records, reach: Reach) -> None:
        self._memory = memory
        self._reach = reach

    def pack(self, lease: Lease, spans: Sequence[Span], out: Tensor) -> tuple[int, list[int]]:
        """The spans' rows to the start of `out`, uint8 [cell]; bytes used, and their digests.

        Raises ValueError for spans not within the lease or exceeding `out`.
        """
        self._check(lease, spans)
        nbytes = push_bytes(self._memory.layout, spans)
        if nbytes > len(out):
            raise ValueError(f"a push of {nbytes} bytes exceeds a cell of {len(out)}")
        pieces = packed(spans, self._stands(lease), out.data_ptr(), out=True)
        return nbytes, self._reach.move(pieces, len(spans))

    def unpack(self, lease: Lease, spans: Sequence[Span], data: Tensor) -> list[int]:
        """Store a push, `data` uint8 [nbytes]; digests of what then stands in the lease's memory.

        Raises ProtocolError, and stores nothing, for what cannot be such a push.
        """
        check_push(self._memory.layout, lease.length, spans, len(data))
        pieces = packed(spans, self._stands(lease), data.data_ptr(), out=False)
        self._reach.move(pieces, len(spans))
        return self._reach.move(landed(pieces), len(spans), copy=False)

    def digests(self, lease: Lease, spans: Sequence[Span]) -> list[int]:
        """Of the rows as they stand. Raises ValueError for spans not within the lease."""
        self._check(lease, spans)
        return self._reach.move(standing(spans, self._stands(lease)), len(spans), copy=False)

    def planned_digests(self, lease: Lease, spans: Sequence[Span]) -> Callable[[], list[int]]:
        """The same, planned now, when a reservation is made; to be called when the rows stand."""
        self._check(lease, spans)
        pieces = standing(spans, self._stands(lease))
        moves = self._reach.plan([Move(pieces, copy=False)], len(spans))

        def found() -> list[int]:
            moves.start(0)
            return moves.digests()

        return found

    def packing(
        self,
        lease: Lease,
        pushes: Sequence[tuple[Sequence[Span], Tensor]],
        *,
        hashed: bool = True,
    ) -> Moves:
        """Of a whole request: move k packs pushes[k], its spans to the start of its cell; digests
        in the order of all spans, 0 unless `hashed`. Errors as of pack."""
        moves, spans_before = [], 0
        for spans, out in pushes:
            self._check(lease, spans)
            nbytes = push_bytes(self._memory.layout, spans)
            if nbytes > len(out):
                raise ValueError(f"a push of {nbytes} bytes exceeds a cell of {len(out)}")
            pieces = packed(spans, self._stands(lease), out.data_ptr(), out=True)
            pieces = pieces._replace(digest=pieces.digest + spans_before)
            moves.append(Move(pieces, hashed=hashed))
            spans_before += len(spans)
        return self._reach.plan(moves, spans_before)

    def unpacking(self, lease: Lease, pushes: Sequence[tuple[Sequence[Span], Tensor]]) -> Moves:
        """The other end: move 2k stores pushes[k] from its cell, uint8 [nbytes], move 2k + 1
        computes digests of what then stands in the lease's memory. Errors as of unpack."""
        moves, spans_before = [], 0
        for spans, data in pushes:
            check_push(self._memory.layout, lease.length, spans, len(data))
            pieces = packed(spans, self._stands(lease), data.data_ptr(), out=False)
            pieces = pieces._replace(digest=pieces.digest + spans_before)
            moves += [Move(pieces, hashed=False), Move(landed(pieces), copy=False)]
            spans_before += len(spans)
        return self._reach.plan(moves, spans_before)

    def pieces(self, lease: Lease, spans: Sequence[Span], there: Standing) -> Pieces:
        """What DirectTransport.push moves into another rank's memory; span k adds to digest k.

        Rows need not exist yet. Raises ValueError for spans not within the lease.
        """
        self._check(lease, spans)
        return between(spans, self._stands(lease), there)

    def _check(self, lease: Lease, spans: Sequence[Span]) -> None:
        for span in spans:
            self._memory.layout.check_span(span, lease.length)

    def _stands(self, lease: Lease) -> Standing:
        memory = self._memory
        return Standing(
            memory.layout,
            memory.blocks.data_ptr(),
            memory.slots.data_ptr(),
            lease.block_table,
            lease.slot,
        )
