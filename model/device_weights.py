"""Weights on their way to a device: matrices go there, Engram's tables stay on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from model.weight_source import WeightSource


class DeviceWeights:
    """`weights`, each matrix copied to `device` when it is asked for."""

    def __init__(self, weights: WeightSource, device: torch.device) -> None:
        self._weights = weights
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].to(self._device)

    def table_rows(self, name: str, rows: Tensor) -> Tensor:
        """Rows of a table that is too large for a device, where they are: on the host."""
        return self._weights.table_rows(name, rows)
