"""Which rows to push when, and how they fill pushes. Pure: lengths in, spans out.

A per-token row is final as soon as its positions are computed; rings and tails change with every
position, so they go only with the last chunk. Spans come in declared order, then by layer: two
runs of one prompt make the same pushes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.messages import Span
from kv_transfer.layout import SPAN_ALIGNMENT, Layout, aligned
from model.state import PerToken, StateField


def spans_final_at(fields: Sequence[StateField], done: int, length: int, last: bool) -> list[Span]:
    """What becomes sendable when a sequence grows from `done` to `length` computed positions.

    With `last`, `length` is where decode will continue, and rings and tails come too. Called for
    chunk after chunk from done = 0, it names every row that a continuation needs exactly once.
    """
    if not 0 <= done <= length:
        raise ValueError(f"a sequence cannot grow from {done} to {length} positions")
    spans = []
    for field in fields:
        rows = field.growth.rows(length)
        if isinstance(field.growth, PerToken):
            rows = range(len(field.growth.rows(done)), rows.stop)
        elif not last:
            continue
        if rows:
            spans += [
                Span(field=field.name, layer=layer, start=rows.start, stop=rows.stop)
                for layer in field.layers
            ]
    return spans


def token_layers(fields: Sequence[StateField]) -> list[int]:
    """Layers with per-token rows, in the order in which a forward runs them."""
    per_token = [field for field in fields if isinstance(field.growth, PerToken)]
    return sorted({layer for field in per_token for layer in field.layers})


def spans_of_layer(fields: Sequence[StateField], layer: int, done: int, length: int) -> list[Span]:
    """Per-token rows of one layer that are new when a sequence grows from `done` to `length`."""
    spans = spans_final_at(fields, done, length, last=False)
    return [span for span in spans if span.layer == layer]


def pack_into_pushes(spans: Iterable[Span], layout: Layout, cell_bytes: int) -> list[list[Span]]:
    """Cut spans at row borders and fill pushes of at most `cell_bytes` each, in order.

    Raises ValueError if a cell is too small for one row.
    """
    pushes: list[list[Span]] = []
    limit = cell_bytes // SPAN_ALIGNMENT * SPAN_ALIGNMENT  # so that padding fits too
    used = limit  # of the last push
    for span in spans:
        row_bytes = layout.place(span.field, span.layer).row_bytes
        if row_bytes > limit:
            raise ValueError(f"a row of {span.field}, {row_bytes} bytes, exceeds a cell")
        start = span.start
        while start < span.stop:
            room = (limit - used) // row_bytes
            if room < 1:
                pushes.append([])
                used = 0
                continue
            stop = min(span.stop, start + room)
            pushes[-1].append(Span(field=span.field, layer=span.layer, start=start, stop=stop))
            used += aligned((stop - start) * row_bytes, SPAN_ALIGNMENT)
            start = stop
    return pushes
