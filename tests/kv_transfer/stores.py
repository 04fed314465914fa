"""Request state for tests: slabs with pools over them, and sequences of random rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cluster.messages import Span
from kv_transfer.blocks import BlockPool, Lease
from kv_transfer.layout import Layout
from kv_transfer.slab import Slab
from model.spec import ModelSpec
from model.state import StateField, state_fields

_MODELS = Path(__file__).parents[2] / "deploy" / "models"
TINY = state_fields(ModelSpec.load(_MODELS / "tiny"))
REAL = state_fields(ModelSpec.load(_MODELS / "deepseek-v41-flash"))
FIELDS = {"tiny": TINY, "real": REAL}

POISON = 0xA5
Rows = dict[tuple[str, int], Tensor]  # by field and layer


class Store:
    """The state memory of one rank, full of old bytes."""

    def __init__(
        self,
        fields: Sequence[StateField],
        *,
        block_tokens: int = 16,
        ring_slack: int = 0,
        length: int = 300,
        sequences: int = 3,
    ) -> None:
        self.layout = Layout(tuple(fields), block_tokens, ring_slack)
        num_blocks = sequences * -(-length // block_tokens)
        self.pool = BlockPool(num_blocks, sequences, block_tokens)
        self.slab = Slab(self.layout, num_blocks, sequences)
        self.slab.blocks.fill_(POISON)
        self.slab.slots.fill_(POISON)

    def lease(self, length: int) -> Lease:
        """A lease whose memory is as another sequence might have left it."""
        lease = self.pool.lease(length)
        self.slab.blocks[torch.from_numpy(lease.block_table)] = POISON
        self.slab.slots[lease.slot] = POISON
        return lease

    def fill(self, lease: Lease, rows: Rows, length: int) -> None:
        for span in needed(self.layout.fields, length):
            self.slab.write_rows(span, lease, rows[span.field, span.layer])

    def rows(self, lease: Lease, length: int) -> Rows:
        return {
            (span.field, span.layer): self.slab.read_rows(span, lease)
            for span in needed(self.layout.fields, length)
        }


def needed(fields: Sequence[StateField], length: int) -> list[Span]:
    """All rows of a sequence, straight from the declaration, a span for each field and layer."""
    return [
        Span(field=field.name, layer=layer, start=rows.start, stop=rows.stop)
        for field in fields
        for layer in field.layers
        if (rows := field.growth.rows(length))
    ]


def random_rows(fields: Sequence[StateField], length: int, seed: int) -> Rows:
    """Random bytes for each row that a continuation after `length` positions needs."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {field.name: field.row_bytes for field in fields}
    return {
        (span.field, span.layer): torch.randint(
            256, (span.stop - span.start, sizes[span.field]), generator=generator
        ).byte()
        for span in needed(fields, length)
    }


def equal(one: Rows, other: Rows) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
