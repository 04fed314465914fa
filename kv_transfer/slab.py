"""The bytes of request state: block records and slot records, and moving rows in and out.

Rows move as whole words: the rows of one sequence record by record, rows of many sequences by
index arithmetic. What was never written since a lease began may hold another sequence's old
bytes: readers never ask for such rows. Knows nothing of number formats, batches or peers.

Moves are done by NumPy over the tensors' memory: for this its indexing costs less a call than
torch's, and stores whole rows several times as quickly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.messages import Span
from kv_transfer.blocks import Lease
from kv_transfer.layout import Layout, Place

Integers = npt.NDArray[np.int64]
Words = npt.NDArray[Any]  # of a place's own width

_WORDS = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}


class _Run(NamedTuple):
    """A part of a span: whole records, or rows of a single one."""

    records: Integers | int
    inside: slice  # words of each record
    outside: slice  # words of the span


class Slab:
    """`blocks` [num_blocks, block_bytes] and `slots` [num_slots, slot_bytes], uint8, on the CPU.

    Both are filled once here, so that no request pays for first touching them.
    """

    def __init__(self, layout: Layout, num_blocks: int, num_slots: int) -> None:
        self.layout = layout
        self.blocks = torch.empty(num_blocks, layout.block_bytes, dtype=torch.uint8).fill_(0)
        self.slots = torch.empty(num_slots, layout.slot_bytes, dtype=torch.uint8).fill_(0)
        self._parts: dict[tuple[str, int], Words] = {}
        self._rows: dict[tuple[str, int], Words] = {}
        for key, place in layout.places.items():
            memory = self.blocks if place.in_blocks else self.slots
            self._parts[key] = _part_of_records(memory.numpy(), place)
            self._rows[key] = _rows_from_every_word(memory.numpy(), place)

    # ---------------------------------------------------------------- of one sequence

    def read_rows(self, span: Span, lease: Lease, out: Tensor | None = None) -> Tensor:
        """The span's rows, uint8 [rows, row_bytes]; into `out` of that shape if given.

        Raises ValueError for a span that is not within the lease.
        """
        place = self.layout.check_span(span, lease.length)
        if out is None:
            out = torch.empty(span.stop - span.start, place.row_bytes, dtype=torch.uint8)
        part = self._parts[span.field, span.layer]
        words = out.numpy().view(part.dtype).reshape(-1)
        for run in _runs(place, span, lease):
            if isinstance(run.records, int):
                words[run.outside] = part[run.records, run.inside]
                continue
            targets = words[run.outside].reshape(len(run.records), -1)
            for target, record in zip(targets, run.records.tolist(), strict=True):
                target[:] = part[record]  # one index for all would copy twice
        return out

    def write_rows(self, span: Span, lease: Lease, rows: Tensor) -> None:
        """Store uint8 [rows, row_bytes]. Raises ValueError for a span not within the lease."""
        place = self.layout.check_span(span, lease.length)
        if rows.shape != (span.stop - span.start, place.row_bytes):
            raise ValueError(f"{tuple(rows.shape)} bytes are not the rows of {span}")
        part = self._parts[span.field, span.layer]
        words = rows.numpy().view(part.dtype).reshape(-1)
        for run in _runs(place, span, lease):
            width = run.inside.stop - run.inside.start
            part[run.records, run.inside] = words[run.outside].reshape(-1, width)

    # ---------------------------------------------------------------- of many

    def gather(self, place: Place, words: Integers) -> Tensor:
        """uint8 [n, row_bytes]: the rows that begin at `words` [n]."""
        found = self._rows[place.field.name, place.layer][words]
        return torch.from_numpy(found.view(np.uint8))

    def scatter(self, place: Place, words: Integers, rows: Tensor) -> None:
        """Store uint8 [n, row_bytes] as the rows that begin at `words` [n], all different."""
        target = self._rows[place.field.name, place.layer]
        target[words] = rows.numpy().view(target.dtype)

    def words(self, place: Place, records: Integers, rows: Integers) -> Integers:
        """Where rows begin, in words of `place.word_bytes` from the start of the memory.

        `records` [n] are block ids or slots, `rows` [n] the rows' numbers in the sequence.
        """
        memory = self.blocks if place.in_blocks else self.slots
        record_words = memory.shape[1] // place.word_bytes
        row_words = place.row_bytes // place.word_bytes
        start = place.offset // place.word_bytes
        return records * record_words + (rows % place.rows * row_words + start)


def _part_of_records(memory: Words, place: Place) -> Words:
    """[records, words]: a view of one field's and layer's part of every record."""
    stop = place.offset + place.rows * place.row_bytes
    return memory[:, place.offset : stop].view(_WORDS[place.word_bytes])


def _rows_from_every_word(memory: Words, place: Place) -> Words:
    """[n, words of a row]: item k is the row that would begin at word k of `memory`.

    A view whose rows overlap; with it "rows at any places" is one index, and copies whole rows.
    """
    flat = memory.reshape(-1).view(_WORDS[place.word_bytes])
    return np.lib.stride_tricks.sliding_window_view(
        flat, place.row_bytes // place.word_bytes, writeable=True
    )


def _runs(place: Place, span: Span, lease: Lease) -> Iterator[_Run]:
    """At most three: the end of a record, whole records, the beginning of one.

    Of a ring a record is one time round.
    """
    row_words = place.row_bytes // place.word_bytes
    row, stop = span.start, span.stop
    while row < stop:
        number, first = divmod(row, place.rows)
        whole = 0 if first else (stop - row) // place.rows
        count = whole * place.rows or min(place.rows - first, stop - row)
        outside = (row - span.start) * row_words
        yield _Run(
            _records(place, lease, number, whole),
            slice(first * row_words, (first + min(count, place.rows)) * row_words),
            slice(outside, outside + count * row_words),
        )
        row += count


def _records(place: Place, lease: Lease, number: int, whole: int) -> Integers | int:
    """Where the sequence's records from `number` on are: in its blocks, or all in its slot."""
    if not place.in_blocks:
        return lease.slot
    if whole < 2:
        return lease.block_ids[number]
    return lease.block_table[number : number + whole]
