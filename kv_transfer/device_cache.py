"""model.cache.Cache over a slab on a device: nothing in it waits for the device.

Shapes depend on what is asked, never on the values of row numbers: what is not to be stored is
stored where nobody looks. One object serves one batch. Knows nothing of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.formats import pack, unpack
from kv_transfer.blocks import Blocks
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.layout import Place


class DeviceCache:
    """State of the requests of one batch, `leases` in the order of its requests.

    Of a ring only the last rows exist, as in packed_cache.py.
    """

    def __init__(self, slab: DeviceSlab, leases: Sequence[Blocks]) -> None:
        self._slab = slab
        widest = max((len(lease.block_ids) for lease in leases), default=0)
        nobody = len(slab.blocks) - 2
        tables = torch.full((len(leases), max(widest, 1)), nobody, dtype=torch.int64)
        for table, lease in zip(tables, leases, strict=True):
            table[: len(lease.block_ids)] = torch.from_numpy(lease.block_table)
        slots = torch.tensor([lease.slot for lease in leases], dtype=torch.int64)
        self._tables = tables.to(slab.device, non_blocking=True)
        self._slots = slots.to(slab.device, non_blocking=True)

    def write(self, field: str, layer: int, requests: Tensor, rows: Tensor, values: Tensor) -> None:
        """Store values [n, dim] as rows [n] of requests [n]; a negative row is skipped.

        No row comes twice in one call. Rows of one request that go into a ring or tail are
        neighbours; if they are more than it holds, the last ones stay.
        """
        if not rows.numel():
            return
        place = self._slab.layout.place(field, layer)
        requests, rows = self._here(requests), self._here(rows)
        kept = rows >= 0
        if not place.in_blocks and len(rows) * place.stride > place.rows:
            newest = torch.full_like(self._slots, -1)
            newest.scatter_reduce_(0, requests, rows, "amax")
            kept &= rows > newest[requests] - place.rows
        records = self._records(place, requests, rows.clamp(min=0))
        kept &= records != self._slab.unread(place)
        records = torch.where(kept, records, self._slab.dump(place))
        words = self._slab.words(place, records, rows.clamp(min=0))
        self._slab.scatter(place, words, pack(values, place.field.row_format))

    def read(self, field: str, layer: int, requests: Tensor, rows: Tensor) -> Tensor:
        """Values [..., dim] of rows [...] of requests [...]; a negative row reads as zeros.

        Rows that the lease does not cover read as NaN.
        """
        place = self._slab.layout.place(field, layer)
        dim = place.field.dim
        if not rows.numel():
            return torch.empty(*rows.shape, dim, device=self._slab.device)
        requests, rows = self._here(requests), self._here(rows)
        numbers = rows.reshape(-1)
        owners = requests.broadcast_to(rows.shape).reshape(-1)
        records = self._records(place, owners, numbers.clamp(min=0))
        words = self._slab.words(place, records, numbers.clamp(min=0))
        values = unpack(self._slab.gather(place, words), place.field.row_format, dim)
        values = values.masked_fill((numbers < 0).unsqueeze(1), 0.0)
        return values.view(*rows.shape, dim)

    def rows_are_final(self, layer: int) -> None:
        """Nobody waits for them: see watched_cache.py."""

    def _records(self, place: Place, requests: Tensor, rows: Tensor) -> Tensor:
        if not place.in_blocks:
            return self._slots[requests]
        numbers = rows // place.rows
        within = numbers < self._tables.shape[1]
        found = self._tables[requests, numbers.clamp(max=self._tables.shape[1] - 1)]
        return torch.where(within, found, self._slab.unread(place))

    def _here(self, numbers: Tensor) -> Tensor:
        return numbers.to(self._slab.device, non_blocking=True)
