"""What the layers of one forward share: rows, cache, and what index sources chose for others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from model.cache import Cache
from model.rows import Ints, Rows

# T = padded rows, K = selected compressed rows of a row, d = head size


class Selected(NamedTuple):
    """The compressed rows that the last index source chose, for itself and the layers after it."""

    keys_TKd: Tensor
    mask_T1K: Tensor  # 0 or -inf


@dataclass
class Step:
    """`rows` shrink at the cut layer to `going_on`, those of the whole that later layers need.

    `candidates` are by the index of a group of requests (indexer.py): where a later index source
    may look, None for everywhere. `index_keys` are by KV source and group.
    """

    rows: Rows
    cache: Cache
    going_on: Ints
    selected: Selected | None = None
    candidates: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    kept: Ints | None = None  # which rows of the batch are left, if some have been dropped

    def drop_others(self) -> Tensor:
        """Leave the rows that do not go on; where the others were, padded [T]."""
        self.kept = self.going_on
        self.rows, index_T = self.rows.keep(self.going_on)
        return index_T

    def places_of(self, rows: Ints) -> Ints:
        """Where rows of the whole, none of them dropped, are now."""
        return rows if self.kept is None else self.kept.searchsorted(rows)
