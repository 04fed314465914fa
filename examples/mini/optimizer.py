"""Muon for matrices inside the network, Adam for the rest; both over stacks of layers.

Muon replaces a matrix's momentum by the nearest matrix with orthonormal rows or columns (by
Newton-Schulz steps), so that all directions are learned at one pace.
Source: K. Jordan and others, Muon: an optimizer for hidden layers, 2024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_STEPS = 5
_A, _B, _C = 3.4445, -4.775, 2.0315  # of the Newton-Schulz polynomial


@dataclass
class Muon:
    """`parameters` are stacks [members, out, in]."""

    parameters: Mapping[str, Tensor]
    rate: float = 0.02
    momentum: float = 0.95
    decay: float = 0.05
    _moments: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for name, value in self.parameters.items():
            if value.grad is None:  # had no part in this step
                continue
            moment = self._moments.setdefault(name, torch.zeros_like(value))
            moment.lerp_(value.grad, 1 - self.momentum)
            update = orthogonal(value.grad.lerp(moment, self.momentum))
            rate = self.rate * scale
            value.mul_(1 - rate * self.decay)
            value.add_(update, alpha=-rate * max(1.0, value.shape[-2] / value.shape[-1]) ** 0.5)


def orthogonal(stack: Tensor) -> Tensor:
    """Singular values [..., out, in] of each matrix pulled to about 1."""
    x = stack.bfloat16() if stack.is_cuda else stack
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    found: Tensor = x.mT if tall else x
    return found.to(stack.dtype)


@dataclass
class Adam:
    """`rates` by name."""

    parameters: Mapping[str, Tensor]
    rates: Mapping[str, float]
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-10
    _first: dict[str, Tensor] = field(default_factory=dict)
    _second: dict[str, Tensor] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        names = [name for name, value in self.parameters.items() if value.grad is not None]
        values = [self.parameters[name] for name in names]
        grads = [value.grad for value in values if value.grad is not None]
        for name, value in zip(names, values, strict=True):
            self._first.setdefault(name, torch.zeros_like(value))
            self._second.setdefault(name, torch.zeros_like(value))
            self._counts[name] = self._counts.get(name, 0) + 1
        means = [self._first[name] for name in names]
        squares = [self._second[name] for name in names]
        first, second = self.betas
        torch._foreach_lerp_(means, grads, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, grads, grads, 1 - second)
        sizes = torch._foreach_sqrt(squares)
        torch._foreach_add_(sizes, self.eps)
        for name, value, mean, size in zip(names, values, means, sizes, strict=True):
            count = self._counts[name]
            correct = math.sqrt(1 - second**count) / (1 - first**count)
            value.addcdiv_(mean, size, value=-self.rates[name] * scale * correct)
