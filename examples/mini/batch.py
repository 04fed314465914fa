"""What one training step sees: rows of tokens, each packed with documents one after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


# B = rows, S = positions of each
@dataclass(frozen=True)
class PackedBatch:
    """Documents begin at even positions, so that pairs of positions never span two of them."""

    ids_BS: Tensor  # int64
    starts_BS: Tensor  # int64, position where the document of each position begins
    clips_BS: Tensor  # int64, first window position that layers from the cut on may see
    weights_BS: Tensor  # float32, of predicting the NEXT token

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.ids_BS, self.starts_BS, self.clips_BS, self.weights_BS

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(*(tensor.to(device, non_blocking=True) for tensor in self.tensors()))

    def drawn(self, count: int) -> Tensor:
        """Positions [B, count], drawn by how much their prediction counts."""
        return torch.multinomial(self.weights_BS + 1e-3, count, replacement=True)
