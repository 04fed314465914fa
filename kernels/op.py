"""What an op is: a reference that is its specification, and faster forms held to it.

Calling an op with CPU tensors runs `cpu` where there is one and no gradient is asked for, with
CUDA tensors `cuda`, else the reference. Also what all CPU ops must know to be row-invariant: to
give a row the same bits alone and in any batch. Knows no op and no model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Op(Generic[P, R]):
    """A computation on tensors under one name."""

    name: str
    reference: Callable[P, R]
    cpu: Callable[P, R] | None = None
    cuda: str | None = None  # "module:function", imported by its first call: it needs Triton

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        backend = self.backend(args[0])
        if backend == "cpu" and self.cpu is not None:
            return self.cpu(*args, **kwargs)
        if backend == "triton" and self.cuda is not None:
            form: Callable[P, R] = _imported(self.cuda)
            return form(*args, **kwargs)
        return self.reference(*args, **kwargs)

    def backend(self, first: object) -> Literal["torch", "cpu", "triton"]:
        """Which form runs where `first` is the first argument; for traces.

        On a CPU in float32 alone, on a GPU up to it; other precisions are for comparisons.
        """
        if torch.is_grad_enabled() or not isinstance(first, Tensor):
            return "torch"
        if self.cpu is not None and first.is_cpu and first.dtype == torch.float32:
            return "cpu"
        if self.cuda is not None and first.is_cuda and first.dtype != torch.float64:
            return "triton"
        return "torch"


@cache
def _imported(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(module), name)


ROW_MULTIPLE = 8
"""CPU ops give a row the same bits in any batch only if the rows are a multiple of this: products
of a few rows take other BLAS kernels."""

AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""With AVX2 both BLAS libraries, torch's and NumPy's, treat a row by its place in a product."""

if not AVX512:
    # In this mode MKL does not. It is read at MKL's first use, and would cost small products half
    # their speed where it is not needed.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

_VECTOR = 32
"""Elements that a vectorised loop of torch takes at a time, in float32 with AVX-512; others take
a part of it. What is left over takes a scalar form, which rounds differently."""


def padded(count: int) -> int:
    """The smallest multiple of ROW_MULTIPLE that holds `count` rows."""
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def elementwise(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """A transcendental function of each element, rounded the same at any place of any tensor."""
    if values.shape[-1] % _VECTOR == 0 or not values.is_cpu:
        return function(values)
    extra = -values.numel() % _VECTOR
    if not extra:
        return function(values.contiguous())
    whole = torch.cat([values.flatten(), values.new_zeros(extra)])
    return function(whole)[: values.numel()].view(values.shape)
