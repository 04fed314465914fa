"""Where a rank's request state lies: in host memory or on a device, with one face to peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cluster.messages import Span
from kv_transfer.blocks import Blocks, Lease
from kv_transfer.device_cache import DeviceCache
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.layout import Layout
from kv_transfer.packed_cache import PackedCache
from kv_transfer.slab import Slab
from model.cache import Cache


class StateMemory(Protocol):
    """What moving state needs of a slab; rows are host bytes, uint8 [rows, row_bytes]."""

    layout: Layout

    def read_rows(self, span: Span, lease: Lease, out: Tensor | None = None) -> Tensor:
        """The span's rows; into `out` if given. Raises ValueError if not within the lease."""
        ...

    def write_rows(self, span: Span, lease: Lease, rows: Tensor) -> None:
        """Raises ValueError for a span that is not within the lease, or other rows than its."""


def open_memory(
    layout: Layout, num_blocks: int, num_slots: int, device: torch.device
) -> Slab | DeviceSlab:
    """Raises torch.OutOfMemoryError if a device does not have that much."""
    if device.type == "cpu":
        return Slab(layout, num_blocks, num_slots)
    return DeviceSlab(layout, num_blocks, num_slots, device)


def cache_over(memory: Slab | DeviceSlab, leases: Sequence[Blocks]) -> Cache:
    """The state of one batch, `leases` in the order of its requests."""
    if isinstance(memory, DeviceSlab):
        return DeviceCache(memory, leases)
    return PackedCache(memory, leases)
