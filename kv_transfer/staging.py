"""One push as bytes: rows gathered from a slab into a cell, and scattered into another slab.

The spans of a push stand one after another, each from the next multiple of SPAN_ALIGNMENT bytes.
What comes from a peer is checked whole before the first byte of it is stored.
Knows nothing of cells' owners or transports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import Tensor

from cluster.errors import ProtocolError
from cluster.messages import Span
from kv_transfer.blocks import Lease
from kv_transfer.layout import SPAN_ALIGNMENT, Layout, aligned
from kv_transfer.state_memory import StateMemory


def push_bytes(layout: Layout, spans: Sequence[Span]) -> int:
    """Size of a push. Raises ProtocolError for a span that is not declared."""
    try:
        return sum(aligned(layout.span_bytes(span), SPAN_ALIGNMENT) for span in spans)
    except ValueError as error:
        raise ProtocolError(f"a push names what cannot be: {error}") from error


def pack_push(slab: StateMemory, lease: Lease, spans: Sequence[Span], out: Tensor) -> int:
    """Copy the spans' rows to the start of `out` (uint8 [cell]); how many bytes they take.

    Raises ValueError for spans that are not within the lease or exceed `out`, whose start must
    be a multiple of SPAN_ALIGNMENT within its storage.
    """
    nbytes = push_bytes(slab.layout, spans)
    if nbytes > len(out):
        raise ValueError(f"a push of {nbytes} bytes exceeds a cell of {len(out)}")
    for span, rows in rows_of_push(slab.layout, spans, out):
        slab.read_rows(span, lease, out=rows)
    return nbytes


def unpack_push(slab: StateMemory, lease: Lease, spans: Sequence[Span], data: Tensor) -> None:
    """Store a push that a peer wrote, `data` uint8 [nbytes], into the lease's memory.

    Raises ProtocolError, and stores nothing, for a span that is not declared, not within the
    lease, repeated in part or whole, or for spans that are not just as long as `data`.
    """
    check_push(slab.layout, lease.length, spans, len(data))
    for span, rows in rows_of_push(slab.layout, spans, data):
        slab.write_rows(span, lease, rows)


def check_push(layout: Layout, length: int, spans: Sequence[Span], nbytes: int) -> None:
    """Raises ProtocolError unless `spans` can be a push of `nbytes` into `length` positions."""
    try:
        for span in spans:
            layout.check_span(span, length)
    except ValueError as error:
        raise ProtocolError(f"a push names what cannot be: {error}") from error
    ordered = sorted(spans, key=lambda span: (span.field, span.layer, span.start))
    for one, other in pairwise(ordered):
        same = (one.field, one.layer) == (other.field, other.layer)
        if same and other.start < one.stop:
            raise ProtocolError(f"a push names row {other.start} of {one.field} twice")
    if push_bytes(layout, spans) != nbytes:
        raise ProtocolError(
            f"spans of {push_bytes(layout, spans)} bytes were announced for {nbytes} bytes"
        )


def rows_of_push(
    layout: Layout, spans: Sequence[Span], data: Tensor
) -> Iterator[tuple[Span, Tensor]]:
    """Each span with its part of a push's bytes, a view uint8 [rows, row_bytes]."""
    start = 0
    for span in spans:
        place = layout.place(span.field, span.layer)
        stop = start + layout.span_bytes(span)
        yield span, data[start:stop].view(-1, place.row_bytes)
        start = aligned(stop, SPAN_ALIGNMENT)
