"""Where a forward keeps request state: one seam, a dense and a packed side.

The forward names rows by (field, layer, request of the batch, row number) and never learns how
they are stored. The dense one, dense_cache.py, keeps fake-quantised values and lets gradients
through; the packed one, over a slab of bytes, is kv_transfer/packed_cache.py. Both give back the
same values, because the packed form is lossless.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Cache(Protocol):
    """State of the requests of one batch; `requests` index the batch, not the slab."""

    def write(self, field: str, layer: int, requests: Tensor, rows: Tensor, values: Tensor) -> None:
        """Store values [n, dim] as rows [n] of requests [n]; a negative row is skipped.

        Values are unquantised or fake-quantised: storing quantises to the field's format, which
        leaves fake-quantised values as they are.
        """

    def read(self, field: str, layer: int, requests: Tensor, rows: Tensor) -> Tensor:
        """Values [..., dim] of rows [...] of requests [...]; a negative row reads as zeros."""
        ...

    def rows_are_final(self, layer: int) -> None:
        """All per-token rows of a layer that this forward completes have been written.

        Said while later layers still have to run; not of a layer where it completes none.
        """
