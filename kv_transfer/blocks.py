"""Which blocks and slots of a slab belong to which sequence. Knows nothing of their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.errors import PromptTooLong
from kv_transfer.holding import Holding, Ledger, Stock

_BLOCKS, _SLOTS = "blocks", "slots"


@dataclass(frozen=True)
class PoolLedger:
    blocks: Ledger
    slots: Ledger

    def check(self) -> None:
        """Raises AssertionError when a block or slot was lost or counted twice."""
        self.blocks.check()
        self.slots.check()


class Blocks(Protocol):
    """Where one sequence's state lies in a slab."""

    @property
    def block_ids(self) -> tuple[int, ...]: ...

    @property
    def block_table(self) -> npt.NDArray[np.int64]:
        """block_ids as [num_blocks]."""
        ...

    @property
    def slot(self) -> int: ...


class Lease(Holding):
    """Memory for one sequence of up to `length` positions: its blocks in order, and one slot."""

    def __init__(self, stock: Stock, length: int, block_tokens: int) -> None:
        super().__init__(stock, {_BLOCKS: -(-length // block_tokens), _SLOTS: 1})
        self.length = length
        self._block_tokens = block_tokens
        self._table: npt.NDArray[np.int64] | None = None

    def extend(self, length: int) -> None:
        """Room for `length` positions; nothing if there is that much already.

        Raises NoRoom, and holds what it held before; see Holding.grow for what that means to
        others.
        """
        if length <= self.length:
            return
        more = -(-length // self._block_tokens) - len(self.block_ids)
        if more > 0:
            self.grow(_BLOCKS, more)
            self._table = None
        self.length = length

    @property
    def room(self) -> int:
        """Positions that its blocks hold: `length`, or some more."""
        return len(self.block_ids) * self._block_tokens

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self.units[_BLOCKS]

    @property
    def slot(self) -> int:
        return self.units[_SLOTS][0]

    @property
    def block_table(self) -> npt.NDArray[np.int64]:
        """block_ids as [num_blocks]; made once a growth, long sequences have thousands."""
        if self._table is None:
            self._table = np.array(self.block_ids, dtype=np.int64)
        return self._table


class BlockPool:
    """Leases over `num_blocks` blocks of `block_tokens` positions and `num_slots` slots."""

    def __init__(self, num_blocks: int, num_slots: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._num_blocks = num_blocks
        self._stock = Stock({_BLOCKS: num_blocks, _SLOTS: num_slots})

    def lease(self, length: int) -> Lease:
        """Room for `length` positions, all of it now; the lease may be extended later.

        Raises NoRoom if that much is not free, PromptTooLong if it never can be.
        """
        if length < 1:
            raise ValueError(f"a sequence has at least one position, not {length}")
        if length > self._num_blocks * self.block_tokens:
            raise PromptTooLong(
                f"{length} positions do not fit this rank's {self._num_blocks} blocks "
                f"of {self.block_tokens}; shorten the prompt or lower max_tokens"
            )
        return Lease(self._stock, length, self.block_tokens)

    def clear(self, owner: str) -> int:
        """`owner` will write no more: free what it had in quarantine; how many leases that was."""
        return self._stock.clear(owner)

    def ledger(self) -> PoolLedger:
        return PoolLedger(self._stock.ledger(_BLOCKS), self._stock.ledger(_SLOTS))
