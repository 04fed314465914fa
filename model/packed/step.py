"""What the layers of one packed forward share: rows, memory, and what index sources chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kernels.ops.packed_attention import Located
from model.packed.geometry import Geometry
from model.packed.rows import Leaving, OnLayer, PackedRows
from model.packed.state import StateView

# T = rows, C = candidate blocks of a row, X = pages of them


class Candidates(NamedTuple):
    """Blocks of compressed rows where index sources after the candidate source look."""

    blocks_TC: Tensor  # int32 numbers, ascending, then -1
    pages_TX: Tensor  # int64 where their index keys begin, in pages of `page` rows
    seen_T: Tensor  # int32 rows of them that are complete
    page: int

    def select(self, index_T: Tensor) -> Candidates:
        return Candidates(
            self.blocks_TC.index_select(0, index_T),
            self.pages_TX.index_select(0, index_T),
            self.seen_T.index_select(0, index_T),
            self.page,
        )


@dataclass
class Step:
    """`geometry` and the rows change at the cut layer, where some may leave."""

    geometry: Geometry
    after_cut: Geometry | None  # None: nobody leaves
    leaving: Leaving | None
    state: StateView
    images_T: Tensor  # bool: rows at which there is an image
    on_layer: OnLayer | None
    selected: Located | None = None  # compressed rows that the last index source chose
    candidates: Candidates | None = None  # None: index sources look everywhere

    @property
    def rows(self) -> PackedRows:
        return self.geometry.rows

    def leave(self) -> Tensor:
        """Go on without the rows that leave; the numbers of the others [T]."""
        assert self.leaving is not None
        assert self.after_cut is not None
        index_T = self.leaving.going_on_T
        self.geometry, self.images_T = self.after_cut, self.images_T.index_select(0, index_T)
        if self.candidates is not None:
            self.candidates = self.candidates.select(index_T)
        return index_T
