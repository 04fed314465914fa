"""What one rank has registered with its transport: sources, and at most one receive ring."""

from __future__ import annotations

import torch
from torch import Tensor


class RegisteredMemory:
    """Holds the tensors, so that they live as long as anybody may write into them."""

    def __init__(self) -> None:
        self.ring: Tensor | None = None
        self._all: list[Tensor] = []

    def add(self, memory: Tensor, *, source_only: bool) -> None:
        """Raises ValueError unless `memory` is contiguous uint8 [n], and for a second ring."""
        plain = memory.dtype == torch.uint8 and memory.dim() == 1 and memory.is_contiguous()
        if not plain or memory.device.type != "cpu":
            raise ValueError(
                f"only contiguous uint8 [n] in host memory can be registered, not "
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

    def clear(self) -> None:
        self.ring = None
        self._all.clear()
