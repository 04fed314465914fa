"""The plain form of model.cache.Cache: fake-quantised float rows, all of them, one batch.

It forgets nothing: after a draft was taken back one simply goes on from an earlier position.
Gradients pass through what is written and read. Rows lie on the device that they come from. For
tests, examples and training; engines use the packed form in kv_transfer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.formats import fake_quant
from model.state import StateField


class DenseCache:
    """Rows of `requests` requests.

    With `positions` there is room for so many of each from the start; else it grows with the
    highest row number, which on a GPU makes the host wait at every read and write.
    """

    def __init__(
        self, fields: Sequence[StateField], requests: int, positions: int | None = None
    ) -> None:
        self._formats = {field.name: field.row_format for field in fields}
        self._dims = {field.name: field.dim for field in fields}
        self._requests, self._positions = requests, positions
        self._held_rows: dict[tuple[str, int], Tensor] = {}  # [requests, capacity + 2, dim]

    def write(self, field: str, layer: int, requests: Tensor, rows: Tensor, values: Tensor) -> None:
        """Store values [n, dim] as rows [n] of requests [n]; a negative row is skipped."""
        held = self._held(field, layer, rows)
        # the last row takes what is skipped; the one before it stays zero
        places = torch.where(rows < 0, held.shape[1] - 1, rows) + requests * held.shape[1]
        held.view(-1, held.shape[2]).index_copy_(
            0, places, fake_quant(values, self._formats[field])
        )

    def read(self, field: str, layer: int, requests: Tensor, rows: Tensor) -> Tensor:
        """Values [..., dim] of rows [...] of requests [...]; a negative row reads as zeros."""
        held = self._held(field, layer, rows)
        places = torch.where(rows < 0, held.shape[1] - 2, rows) + requests * held.shape[1]
        flat = held.view(-1, held.shape[2]).index_select(0, places.flatten())
        return flat.view(*rows.shape, held.shape[2])

    def rows_are_final(self, layer: int) -> None:
        """Nobody waits for them."""

    def rows(self) -> dict[tuple[str, int], Tensor]:
        """Values [requests, capacity, dim] by field and layer; rows never written are zero."""
        return {place: held[:, :-2] for place, held in self._held_rows.items()}

    def _held(self, field: str, layer: int, rows: Tensor) -> Tensor:
        """With room for `rows`."""
        held = self._held_rows.get((field, layer))
        if self._positions is not None:
            highest = self._positions - 1
        else:
            highest = int(rows.max()) if rows.numel() else -1
        if held is None or held.shape[1] < highest + 3:
            capacity = self._positions or max(64, 2 * highest)
            shape = (self._requests, capacity + 2, self._dims[field])
            grown = torch.zeros(shape, device=rows.device)
            if held is not None:
                grown[:, : held.shape[1] - 2] = held[:, :-2]
            held = self._held_rows[field, layer] = grown
        return held
