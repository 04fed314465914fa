"""Request state for measurements: a slab full of random rows, and requests that hold parts of it.

Rows are packed from normal values, so that every byte is one that the model could have written.
Blocks of a request lie anywhere in the slab, as they do after hours of serving.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from kernels.formats import pack
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.layout import Layout
from kv_transfer.slab import Slab
from kv_transfer.state_memory import open_memory
from model.spec import ModelSpec
from model.state import state_fields

_AT_ONCE = 1 << 26  # values that are drawn together


@dataclass(frozen=True)
class Held:
    """Blocks and the slot of one request, as kv_transfer.blocks.Blocks."""

    block_ids: tuple[int, ...]
    slot: int

    @cached_property
    def block_table(self) -> npt.NDArray[np.int64]:
        return np.array(self.block_ids, dtype=np.int64)


@dataclass(frozen=True)
class SliceState:
    """`memory` has room for `requests` requests of `length` positions."""

    memory: Slab | DeviceSlab
    requests: int
    length: int

    @classmethod
    def random(
        cls,
        spec: ModelSpec,
        device: torch.device,
        *,
        requests: int,
        length: int,
        block_tokens: int,
        ring_slack: int = 0,
        seed: int = 0,
    ) -> SliceState:
        layout = Layout(state_fields(spec), block_tokens, ring_slack)
        blocks = requests * -(-length // block_tokens)
        memory = open_memory(layout, blocks, requests, device)
        _fill(memory, blocks, requests, seed)
        return cls(memory, requests, length)

    def held(self, requests: int, length: int, seed: int = 0) -> tuple[Held, ...]:
        """Of `requests` requests, room for `length` positions each, no block of which is shared."""
        assert requests <= self.requests
        assert length <= self.length
        each = -(-length // self.memory.layout.block_tokens)
        blocks = self.requests * -(-self.length // self.memory.layout.block_tokens)
        order = np.random.default_rng(seed).permutation(blocks)[: requests * each]
        tables = order.reshape(requests, each)
        return tuple(Held(tuple(table.tolist()), slot) for slot, table in enumerate(tables))


def _fill(memory: Slab | DeviceSlab, blocks: int, slots: int, seed: int) -> None:
    device = memory.blocks.device
    draw = torch.Generator(device).manual_seed(seed)
    for place in memory.layout.places.values():
        records = memory.blocks if place.in_blocks else memory.slots
        count = blocks if place.in_blocks else slots
        dim, nbytes = place.field.dim, place.rows * place.row_bytes
        each = max(1, _AT_ONCE // (place.rows * dim))
        for first in range(0, count, each):
            some = min(each, count - first)
            values = torch.randn(some * place.rows, dim, generator=draw, device=device)
            packed = pack(values, place.field.row_format).view(some, nbytes)
            records[first : first + some, place.offset : place.offset + nbytes] = packed
