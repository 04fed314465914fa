"""What the layers need of weights, wherever these come from."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Weights by logical name, as float32 matrices [out, in] (model/weights.py is one)."""

    def __getitem__(self, name: str, /) -> Tensor: ...

    def table_rows(self, name: str, rows: Tensor, /) -> Tensor:
        """Rows [...] of an Engram table, [..., dim], on any device; `rows` are on the host."""
        ...
