"""Where the rows of request state lie in memory, as the packed forward reads and writes them.

Knows nothing of leases, pools or what a field means.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class FieldView:
    """The rows of one field of one layer, in the records (blocks or slots) of all requests.

    Row n of record r begins at byte r * record_bytes + n * row_bytes of `part`: two layers that
    share a kind of record differ in `part` alone, and addresses serve them both.
    """

    memory: Tensor  # uint8 [bytes], flat: all blocks, or all slots
    record_bytes: int  # from one record to the next
    offset: int  # bytes from a record's start; a multiple of 64
    rows: int  # in a record; of a ring, position p is row p % rows
    row_bytes: int

    @cached_property
    def part(self) -> Tensor:
        """uint8 [bytes] from this field's first row on."""
        return self.memory[self.offset :]


class StateView(Protocol):
    """The request state of a rank. kv_transfer/state_view.py has one over a slab."""

    def field(self, name: str, layer: int) -> FieldView:
        """Raises ValueError for what is not declared in model/state.py."""
        ...
