"""The bytes of request state: block records and slot records, and moving rows in and out.

Rows move as whole words: the rows of one sequence record by record, rows of many sequences by
index arithmetic. What was never written since a lease began may hold another sequence's old
bytes: readers never ask for such rows. Knows nothing of number formats, batches or peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.messages import Span
from kv_transfer.blocks import Lease
from kv_transfer.layout import Layout, Place

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class _Run(NamedTuple):
    """A part of a span that lies in one record, or in several whole ones."""

    records: slice  # numbers in the sequence; record n has rows n * place.rows and on
    inside: slice  # words of the record, if it is one
    outside: slice  # words of the span


class Slab:
    """`blocks` [num_blocks, block_bytes] and `slots` [num_slots, slot_bytes], uint8.

    Both are filled once here, so that no request pays for first touching them.
    """

    def __init__(self, layout: Layout, num_blocks: int, num_slots: int) -> None:
        self.layout = layout
        self.blocks = torch.empty(num_blocks, layout.block_bytes, dtype=torch.uint8).fill_(0)
        self.slots = torch.empty(num_slots, layout.slot_bytes, dtype=torch.uint8).fill_(0)
        places = layout.places.items()
        self._parts = {key: _part_of_records(self._memory(place), place) for key, place in places}
        self._rows = {
            key: _rows_from_every_word(self._memory(place), place) for key, place in places
        }

    # ---------------------------------------------------------------- of one sequence

    def read_rows(self, span: Span, lease: Lease, out: Tensor | None = None) -> Tensor:
        """The span's rows, uint8 [rows, row_bytes]; into `out` of that shape if given.

        Raises ValueError for a span that is not within the lease.
        """
        place = self.layout.check_span(span, lease.length)
        if out is None:
            out = torch.empty(span.stop - span.start, place.row_bytes, dtype=torch.uint8)
        part = self._parts[span.field, span.layer]
        words = out.view(part.dtype).view(-1)
        for run in _runs(place, span):
            target = words[run.outside]
            if run.records.stop - run.records.start == 1:
                target.copy_(part[_record(place, run, lease), run.inside])
            else:
                records = lease.block_table[run.records]
                torch.index_select(part, 0, records, out=target.view(len(records), -1))
        return out

    def write_rows(self, span: Span, lease: Lease, rows: Tensor) -> None:
        """Store uint8 [rows, row_bytes]. Raises ValueError for a span not within the lease."""
        place = self.layout.check_span(span, lease.length)
        if rows.shape != (span.stop - span.start, place.row_bytes):
            raise ValueError(f"{tuple(rows.shape)} bytes are not the rows of {span}")
        part = self._parts[span.field, span.layer]
        words = rows.view(part.dtype).view(-1)
        for run in _runs(place, span):
            source = words[run.outside]
            if run.records.stop - run.records.start == 1:
                part[_record(place, run, lease), run.inside] = source
            else:
                records = lease.block_table[run.records]
                part.index_copy_(0, records, source.view(len(records), -1))

    # ---------------------------------------------------------------- of many

    def gather(self, place: Place, words: Tensor) -> Tensor:
        """uint8 [n, row_bytes]: the rows that begin at `words` [n]."""
        rows = self._rows[place.field.name, place.layer]
        return rows.index_select(0, words).view(torch.uint8)

    def scatter(self, place: Place, words: Tensor, rows: Tensor) -> None:
        """Store uint8 [n, row_bytes] as the rows that begin at `words` [n], all different."""
        target = self._rows[place.field.name, place.layer]
        target.index_copy_(0, words, rows.view(target.dtype))

    def words(self, place: Place, records: Tensor, rows: Tensor) -> Tensor:
        """Where rows begin, in words of `place.word_bytes` from the start of the memory.

        `records` [n] are block ids or slots, `rows` [n] the rows' numbers in the sequence.
        """
        record_words = self._memory(place).shape[1] // place.word_bytes
        row_words = place.row_bytes // place.word_bytes
        start = place.offset // place.word_bytes
        return records * record_words + (rows % place.rows) * row_words + start

    def _memory(self, place: Place) -> Tensor:
        return self.blocks if place.in_blocks else self.slots


def _part_of_records(memory: Tensor, place: Place) -> Tensor:
    """[records, words]: a view of one field's and layer's part of every record."""
    stop = place.offset + place.rows * place.row_bytes
    return memory[:, place.offset : stop].view(_WORDS[place.word_bytes])


def _rows_from_every_word(memory: Tensor, place: Place) -> Tensor:
    """[n, words of a row]: item k is the row that would begin at word k of `memory`.

    A view whose rows overlap; it makes "rows at any places" one index_select, which copies whole
    rows and is several times quicker than indexing by record and row.
    """
    flat = memory.view(-1).view(_WORDS[place.word_bytes])
    row_words = place.row_bytes // place.word_bytes
    return flat.as_strided((max(flat.numel() - row_words + 1, 0), row_words), (1, 1))


def _runs(place: Place, span: Span) -> Iterator[_Run]:
    """At most three: the end of a record, whole records, the beginning of one.

    Of a ring a record is one time round.
    """
    row_words = place.row_bytes // place.word_bytes
    row = span.start
    while row < span.stop:
        record, first = divmod(row, place.rows)
        whole = 0 if first else (span.stop - row) // place.rows
        count = whole * place.rows or min(place.rows - first, span.stop - row)
        outside = (row - span.start) * row_words
        yield _Run(
            records=slice(record, record + max(whole, 1)),
            inside=slice(first * row_words, (first + count) * row_words),
            outside=slice(outside, outside + count * row_words),
        )
        row += count


def _record(place: Place, run: _Run, lease: Lease) -> int:
    """The block of a run, or for rings and tails the slot."""
    return lease.block_ids[run.records.start] if place.in_blocks else lease.slot
