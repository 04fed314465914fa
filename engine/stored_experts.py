"""Experts in slots as a checkpoint stores them. Apart from other forms: it needs Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.packed_experts import Fp4Matrices, packed_experts
from model.options import ModelOptions
from model.packed.weights import PackedWeights
from model.spec import ModelSpec

# N = rows, each for one slot, D = hidden size


class StoredForm:
    """Codes and scales of gate and up, then of down, as they are stored: 0.53 bytes a weight."""

    def __init__(self, weights: PackedWeights, spec: ModelSpec, options: ModelOptions) -> None:
        self._weights = weights
        self._dims = spec.hidden_size
        self._limit, self._fp8 = spec.swiglu_limit, options.activations == "fp8"

    def read(self, name: str) -> tuple[Tensor, ...]:
        gate_up, down = self._weights.expert(name)
        return (*gate_up, *down)

    def compute(
        self, x_ND: Tensor, slots_N1: Tensor, shares_N1: Tensor, stacked: tuple[Tensor, ...]
    ) -> Tensor:
        gate_up, down = Fp4Matrices(*stacked[:2]), Fp4Matrices(*stacked[2:])
        given = (x_ND.to(self._weights.dtype), slots_N1, shares_N1.float(), gate_up, down)
        return packed_experts(*given, limit=self._limit, fp8=self._fp8)

    def no_rows(self, stacked: tuple[Tensor, ...]) -> Tensor:
        # what ranks send each other is wide enough for shares
        return torch.empty(0, self._dims, device=stacked[0].device)
