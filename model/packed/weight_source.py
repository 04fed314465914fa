"""What the packed forward needs of weights, and of whoever has the routed experts.

weights.py has those of a checkpoint as they are stored; tests bring plain ones of any precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from model.moe import Experts
from model.options import ModelOptions
from model.spec import ModelSpec

Linear = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out] in the dtype of x; sums are float32 at least"""


class Table(Protocol):
    """Rows in FP8 as kernels/formats.py encodes them, uint8, wherever they are."""

    @property
    def codes(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor: ...


class PackedWeightSource(Protocol):
    """By logical name (model/catalogue.py); each is asked for once."""

    @property
    def dtype(self) -> torch.dtype:
        """What the forward computes in."""
        ...

    @property
    def device(self) -> torch.device: ...

    def linear(self, *names: str) -> Linear:
        """One layer with the outputs of several matrices side by side."""
        ...

    def vector(self, name: str) -> Tensor:
        """In float32, or in the dtype if that is wider: norms, sinks, biases, scales."""
        ...

    def matrix(self, name: str) -> Tensor:
        """[out, in] in the dtype."""
        ...

    def fp32(self, name: str) -> Tensor:
        """The same in float32, or in the dtype if that is wider."""
        ...

    def grouped(self, name: str, groups: int) -> Tensor:
        """[groups, in, out / groups] in the dtype: each group has inputs of its own."""
        ...

    def table(self, name: str) -> Table: ...


Source = TypeVar("Source", bound=PackedWeightSource)
MakeExperts = Callable[[Source, str, int, ModelSpec, ModelOptions], Experts]
"""(weights, prefix of the names, number of experts, spec, options) -> Experts"""
