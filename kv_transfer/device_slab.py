"""The bytes of request state on a device: the same records as slab.py's, moved by torch.

Rows come and go as tensors of the device, or as host bytes on their way to and from peers.
There are two records more than were asked for. What must not be written goes into the last one,
so that no move depends on its values; the one before it is never written and holds no numbers,
so that reading what no lease covers shows. Knows nothing of number formats, batches or peers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.messages import Span
from kv_transfer.blocks import Lease
from kv_transfer.layout import Layout, Place

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_NO_NUMBER = 0xFF  # a byte that is a NaN in the formats with a scale, and as part of a float32


class DeviceSlab:
    """`blocks` [num_blocks + 2, block_bytes] and `slots` [num_slots + 2, slot_bytes], uint8."""

    def __init__(
        self, layout: Layout, num_blocks: int, num_slots: int, device: torch.device
    ) -> None:
        self.layout = layout
        self.device = device
        self.blocks = _records(num_blocks, layout.block_bytes, device)
        self.slots = _records(num_slots, layout.slot_bytes, device)
        self._words: dict[tuple[str, int], Tensor] = {}  # [words of the memory]
        self._steps: dict[int, Tensor] = {}  # 0, 1, ... by how many words a row has
        for key, place in layout.places.items():
            self._words[key] = self.memory(place).view(-1).view(_WORDS[place.word_bytes])
            count = place.row_bytes // place.word_bytes
            self._steps[count] = torch.arange(count, device=device)

    def memory(self, place: Place) -> Tensor:
        return self.blocks if place.in_blocks else self.slots

    def unread(self, place: Place) -> int:
        """The record that is never written."""
        return len(self.memory(place)) - 2

    def dump(self, place: Place) -> int:
        """The record that takes what must not be written."""
        return len(self.memory(place)) - 1

    # ---------------------------------------------------------------- of one sequence

    def read_rows(self, span: Span, lease: Lease, out: Tensor | None = None) -> Tensor:
        """The span's rows, uint8 [rows, row_bytes] on the host; into `out` if given.

        Waits for the device. Raises ValueError for a span that is not within the lease.
        """
        place = self.layout.check_span(span, lease.length)
        rows = self.gather(place, self._span_words(place, span, lease))
        if out is None:
            return rows.cpu()
        out.copy_(rows)
        return out

    def write_rows(self, span: Span, lease: Lease, rows: Tensor) -> None:
        """Store uint8 [rows, row_bytes]. Raises ValueError for a span not within the lease."""
        place = self.layout.check_span(span, lease.length)
        if rows.shape != (span.stop - span.start, place.row_bytes):
            raise ValueError(f"{tuple(rows.shape)} bytes are not the rows of {span}")
        self.scatter(place, self._span_words(place, span, lease), rows.to(self.device))

    def _span_words(self, place: Place, span: Span, lease: Lease) -> Tensor:
        rows = torch.arange(span.start, span.stop, device=self.device)
        if not place.in_blocks:
            return self.words(place, torch.full_like(rows, lease.slot), rows)
        table = torch.from_numpy(lease.block_table).to(self.device)
        return self.words(place, table[rows // place.rows], rows)

    # ---------------------------------------------------------------- of many

    def gather(self, place: Place, words: Tensor) -> Tensor:
        """uint8 [n, row_bytes]: the rows that begin at `words` [n]."""
        return self._words[place.field.name, place.layer][self._of(place, words)].view(torch.uint8)

    def scatter(self, place: Place, words: Tensor, rows: Tensor) -> None:
        """Store uint8 [n, row_bytes] as the rows that begin at `words` [n], all different."""
        target = self._words[place.field.name, place.layer]
        target[self._of(place, words)] = rows.contiguous().view(target.dtype)

    def words(self, place: Place, records: Tensor, rows: Tensor) -> Tensor:
        """Where rows begin, in words of `place.word_bytes` from the start of the memory.

        `records` [n] are block ids or slots, `rows` [n] the rows' numbers in the sequence.
        """
        record_words = self.memory(place).shape[1] // place.word_bytes
        row_words = place.row_bytes // place.word_bytes
        start = place.offset // place.word_bytes
        return records * record_words + (rows % place.rows * row_words + start)

    def _of(self, place: Place, words: Tensor) -> Tensor:
        """[n, words of a row]"""
        return words.unsqueeze(1) + self._steps[place.row_bytes // place.word_bytes]


def _records(count: int, nbytes: int, device: torch.device) -> Tensor:
    records = torch.zeros(count + 2, nbytes, dtype=torch.uint8, device=device)
    records[count] = _NO_NUMBER
    return records
