"""Small tensors on their way to a device and back, so that neither side waits for the other.

A plain copy from ordinary memory waits for all that the device was asked for before it; these go
through pinned memory. Knows nothing of what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(
    values: Sequence[Any], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """The values on the device; what is queued there later finds them."""
    device = torch.device(device)
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class Milestone:
    """A point in a device's work: reached when all that was queued before it is done."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type != "cpu":  # whose work is done when it has been asked for
            self._event = torch.get_device_module(device).Event()
            self._event.record()

    def wait(self) -> None:
        """Returns when it is reached; again at once."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class Arriving:
    """A tensor's values as of now; the tensor itself may change at once."""

    def __init__(self, values: Tensor) -> None:
        if values.device.type == "cpu":
            self._values = values.clone()
        else:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
        self._there = Milestone(values.device)

    def wait(self) -> Tensor:
        """The values on the host, when the device has done all that was queued before them."""
        self._there.wait()
        return self._values
