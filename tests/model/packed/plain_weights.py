"""Weights of any precision behind the interface of packed ones: in float64 only a mistake separates
two ways to compute a model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.ops.route import Routed
from model.moe import LocalExperts
from model.options import ModelOptions
from model.spec import ModelSpec
from model.weights import Weights


class PlainLinear:
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.t().contiguous()

    def __call__(self, x_TK: Tensor) -> Tensor:
        return x_TK @ self._weight


class PlainTable(NamedTuple):
    codes: Tensor
    scales: Tensor


class PlainWeights:
    """Each tensor as plain values on the CPU."""

    device = torch.device("cpu")

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self._weights, self.dtype = weights, dtype

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].to(self.dtype)

    def linear(self, *names: str) -> PlainLinear:
        return PlainLinear(torch.cat([self[name] for name in names]))

    def vector(self, name: str) -> Tensor:
        return self[name]

    def matrix(self, name: str) -> Tensor:
        return self[name]

    def fp32(self, name: str) -> Tensor:
        return self[name]

    def grouped(self, name: str, groups: int) -> Tensor:
        weight = self[name]
        return weight.view(groups, len(weight) // groups, -1).transpose(1, 2).contiguous()

    def table(self, name: str) -> PlainTable:
        stored = self._weights.stored(name)
        assert stored.scale is not None
        return PlainTable(stored.tensor.view(torch.uint8), stored.scale.view(torch.uint8))


class PlainExperts:
    """model/moe.py's, over such weights."""

    def __init__(
        self,
        weights: PlainWeights,
        prefix: str,
        count: int,
        spec: ModelSpec,
        options: ModelOptions,
    ) -> None:
        source: Any = weights
        self._experts = LocalExperts(source, prefix, count, spec, options)

    def __call__(self, x_TD: Tensor, routed: Routed, count: int) -> Tensor:
        return self._experts(x_TD, routed, count)
