"""What one rank has registered with its transport: sources, and at most one receive ring."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels.push_table import Integers


def in_host_memory(memory: Tensor) -> bool:
    return memory.device.type == "cpu"


class RegisteredMemory:
    """Holds the tensors, so that they live as long as anybody may write into them."""

    def __init__(self, takes: Callable[[Tensor], bool] = in_host_memory) -> None:
        """`takes` says whether a tensor lies where the transport can get at it."""
        self.ring: Tensor | None = None
        self._takes = takes
        self._all: list[Tensor] = []

    def add(self, memory: Tensor, *, source_only: bool) -> None:
        """Raises ValueError unless `memory` is contiguous uint8 [n], and for a second ring."""
        plain = memory.dtype == torch.uint8 and memory.dim() == 1 and memory.is_contiguous()
        if not plain or not self._takes(memory):
            raise ValueError(
                f"only contiguous uint8 [n] in this transport's memory can be registered, not "
                f"{memory.dtype} {tuple(memory.shape)} on {memory.device}"
            )
        if not source_only:
            if self.ring is not None:
                raise ValueError("this transport already has a receive ring")
            self.ring = memory
        self._all.append(memory)

    def check_source(self, source: Tensor) -> None:
        """Raises ValueError unless all of `source` is registered."""
        start, stop = source.data_ptr(), source.data_ptr() + source.numel()
        if start == stop:
            return
        for memory in self._all:
            if memory.data_ptr() <= start and stop <= memory.data_ptr() + memory.numel():
                return
        raise ValueError(f"{source.numel()} bytes to write are not in registered memory")

    def check_ranges(self, starts: Integers, nbytes: Integers) -> None:
        """The same for many runs of bytes by address, both [n]."""
        inside = np.zeros(len(starts), dtype=bool)
        for memory in self._all:
            begin = memory.data_ptr()
            inside |= (starts >= begin) & (starts + nbytes <= begin + memory.numel())
        if not inside.all():
            raise ValueError(f"{int((~inside).sum())} pieces to push are not in registered memory")

    def clear(self) -> None:
        self.ring = None
        self._all.clear()
