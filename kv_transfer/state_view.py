"""A slab as the packed forward sees it: bytes, and where the rows of each field begin in them."""

from __future__ import annotations

from kv_transfer.device_slab import DeviceSlab
from kv_transfer.slab import Slab
from model.packed.state import FieldView


class SlabView:
    """model.packed.state.StateView over all records of a slab; no copy is made."""

    def __init__(self, memory: Slab | DeviceSlab) -> None:
        self._layout = memory.layout
        self._views: dict[tuple[str, int], FieldView] = {}
        for key, place in self._layout.places.items():
            records = memory.blocks if place.in_blocks else memory.slots
            self._views[key] = FieldView(
                records.view(-1), records.shape[1], place.offset, place.rows, place.row_bytes
            )

    def field(self, name: str, layer: int) -> FieldView:
        """Raises ValueError for what is not declared."""
        place = self._layout.place(name, layer)
        return self._views[place.field.name, place.layer]


def view_of(memory: Slab | DeviceSlab) -> SlabView:
    """Made once: it is the same for every forward."""
    return SlabView(memory)
