"""model.cache.Cache over a slab: packs what a forward writes, unpacks what it reads.

One object serves one batch. Knows nothing of the model; rows come by number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.formats import pack, unpack
from kv_transfer.blocks import Blocks
from kv_transfer.layout import Place
from kv_transfer.slab import Integers, Slab

_MANY = 256  # rows of one read from which on looking for repetitions pays


class PackedCache:
    """State of the requests of one batch, `leases` in the order of its requests.

    Of a ring only the last rows exist: a forward that writes more rows of a request than the
    ring holds (window + slack) leaves the newest, and must not read older ones.
    """

    def __init__(self, slab: Slab, leases: Sequence[Blocks]) -> None:
        self._slab = slab
        widest = max((len(lease.block_ids) for lease in leases), default=0)
        # an entry that no lease has points past the end: using it is an IndexError, never
        # another request's block
        self._tables = np.full((len(leases), widest), len(slab.blocks), dtype=np.int64)
        for table, lease in zip(self._tables, leases, strict=True):
            table[: len(lease.block_ids)] = lease.block_table
        self._slots = np.array([lease.slot for lease in leases], dtype=np.int64)

    def write(self, field: str, layer: int, requests: Tensor, rows: Tensor, values: Tensor) -> None:
        """Store values [n, dim] as rows [n] of requests [n]; a negative row is skipped.

        No row comes twice in one call. Rows of one request that go into a ring or tail are
        neighbours; if they are more than it holds, the last ones stay.
        """
        place = self._slab.layout.place(field, layer)
        owners, numbers = requests.numpy(), rows.numpy()
        kept = numbers >= 0
        if not place.in_blocks and len(numbers) * place.stride > place.rows:
            newest = np.full_like(self._slots, -1)
            np.maximum.at(newest, owners, numbers)
            kept &= numbers > newest[owners] - place.rows
        if not kept.all():
            owners, numbers = owners[kept], numbers[kept]
            values = values[torch.from_numpy(kept)]
        if len(numbers):
            words = self._words(place, owners, numbers)
            self._slab.scatter(place, words, pack(values, place.field.row_format))

    def read(self, field: str, layer: int, requests: Tensor, rows: Tensor) -> Tensor:
        """Values [..., dim] of rows [...] of requests [...]; a negative row reads as zeros."""
        place = self._slab.layout.place(field, layer)
        if not rows.numel():
            return torch.empty(*rows.shape, place.field.dim)
        numbers = rows.numpy().reshape(-1)
        owners = np.broadcast_to(requests.numpy(), rows.shape).reshape(-1)
        values = self._values(place, self._words(place, owners, np.maximum(numbers, 0)))
        dead = numbers < 0
        if dead.any():
            values[torch.from_numpy(dead)] = 0.0
        return values.view(*rows.shape, place.field.dim)

    def rows_are_final(self, layer: int) -> None:
        """Nobody waits for them: see watched_cache.py."""

    def _values(self, place: Place, words: Integers) -> Tensor:
        """float32 [n, dim] of the rows at `words` [n]."""
        if len(words) > _MANY:  # neighbouring queries ask for mostly the same rows
            distinct, which = np.unique(words, return_inverse=True)
            if 2 * len(distinct) < len(words):
                return self._unpacked(place, distinct).index_select(0, torch.from_numpy(which))
        return self._unpacked(place, words)

    def _unpacked(self, place: Place, words: Integers) -> Tensor:
        packed = self._slab.gather(place, words)
        return unpack(packed, place.field.row_format, place.field.dim)

    def _words(self, place: Place, requests: Integers, rows: Integers) -> Integers:
        if place.in_blocks:
            records = self._tables[requests, rows // place.rows]
        else:
            records = self._slots[requests]
        return self._slab.words(place, records, rows)
