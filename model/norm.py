"""The root-mean-square norm with its weight."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.rms_norm import rms_norm
from model.spec import ModelSpec
from model.weight_source import WeightSource


class RMSNorm:
    def __init__(self, weights: WeightSource, name: str, spec: ModelSpec) -> None:
        self._weight_D = weights[f"{name}.weight"]
        self._eps = torch.tensor(spec.rms_norm_eps, device=self._weight_D.device)

    def __call__(self, x_D: Tensor) -> Tensor:
        """Over the last dimension."""
        return rms_norm(x_D, self._weight_D, self._eps)
