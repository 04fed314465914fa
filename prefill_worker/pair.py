"""One decode rank that this rank is connected to: how it is reached, where rows stand there.

Whatever it says of its memory is checked here, before an address is made of it. Knows no prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.errors import ProtocolError
from cluster.messages import Connected, PairPath, PushOpened
from kv_transfer.direct_transport import Area
from kv_transfer.layout import Layout
from kv_transfer.path_probe import PathReport
from kv_transfer.row_pieces import Standing
from model.state import StateField


@dataclass(frozen=True)
class StateThere:
    """A decode rank's state memory as this rank addresses it."""

    layout: Layout
    blocks: Area
    slots: Area

    @classmethod
    def of(
        cls, fields: tuple[StateField, ...], told: Connected, offered: tuple[Area, ...]
    ) -> StateThere:
        """Raises ProtocolError for sizes that cannot be."""
        if len(offered) != 2:
            raise ProtocolError(f"blocks and slots are offered, not {len(offered)} memories")
        try:
            layout = Layout(fields, told.block_tokens, told.ring_slack)
        except ValueError as error:
            raise ProtocolError(f"a decode rank's memory cannot be: {error}") from error
        return cls(layout, *offered)

    def standing(self, opened: PushOpened, length: int) -> Standing:
        """Where the rows of `length` positions shall be, in a reservation's blocks and slot.

        Raises ProtocolError for blocks and slots that are not there, are named twice, or are less
        than so many positions need.
        """
        blocks = np.frombuffer(opened.blocks[: len(opened.blocks) // 4 * 4], dtype="<i4")
        blocks = blocks.astype(np.int64)
        total = self.blocks.nbytes // self.layout.block_bytes
        needed = -(-length // self.layout.block_tokens)
        if len(blocks) < needed or len(np.unique(blocks)) < len(blocks):
            raise ProtocolError(f"{len(blocks)} blocks were named for {length} positions, or twice")
        if blocks.min() < 0 or blocks.max() >= total:
            raise ProtocolError(f"a block was named that is not among {total}")
        if not 0 <= opened.slot < self.slots.nbytes // max(1, self.layout.slot_bytes):
            raise ProtocolError(f"slot {opened.slot} was named, and is not there")
        return Standing(self.layout, self.blocks.address, self.slots.address, blocks, opened.slot)


@dataclass
class Pair:
    """`peer` is the transport's name for the decode rank's life."""

    decode: str  # its name
    peer: str
    path: str
    metadata: bytes  # what its transport says of it
    there: StateThere | None = None  # if rows are pushed into its blocks
    why: str = ""  # they are not, because
    report: PathReport | None = None  # once it was measured

    @property
    def direct(self) -> bool:
        return self.there is not None

    def told(self) -> PairPath:
        measured = self.report
        return PairPath(
            decode=self.decode,
            path=self.path,
            direct=self.direct,
            why=self.why,
            latency_s=measured.latency_s if measured else 0.0,
            gb_per_s=measured.gb_per_s if measured else 0.0,
            expected_gb_per_s=measured.expected_gb_per_s if measured else 0.0,
        )
