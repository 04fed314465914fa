"""What the layers of one forward share: rows, cache, and what index sources chose for others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from model.cache import Cache
from model.rows import Rows

# T = padded rows, K = selected compressed rows of a row, d = head size


class Selected(NamedTuple):
    """The compressed rows that the last index source chose, for itself and the layers after it."""

    keys_TKd: Tensor
    mask_T1K: Tensor  # 0 or -inf


@dataclass
class Step:
    """`rows` shrink at the cut layer when a prefill is truncated.

    `candidates` are by the index of a group of requests (indexer.py): where a later index source
    may look, None for everywhere. `index_keys` are by KV source and group.
    """

    rows: Rows
    cache: Cache
    selected: Selected | None = None
    candidates: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    kept: Tensor | None = None  # which rows of the batch are left, if some have been dropped

    def drop_below_clip(self) -> Tensor:
        """Go on with the rows at or above their request's clip; where they were, padded [T]."""
        self.kept = torch.from_numpy(self.rows.above_clip)
        self.rows, index_T = self.rows.select(self.rows.above_clip)
        return index_T

    def places_of(self, rows: Tensor) -> Tensor:
        """Where rows of the batch, none of them dropped, are now."""
        return rows if self.kept is None else torch.searchsorted(self.kept, rows)
