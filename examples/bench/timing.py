"""How long a step takes, on a device that runs behind its host. Knows nothing of what it does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kernels.accelerator import Accelerator

Clock = Literal["wall", "cpu"]
"""cpu: what this process has of the processor, for a CPU that others use as well."""


@dataclass(frozen=True)
class Times:
    """Of one step, in seconds, over several."""

    median: float
    best: float
    worst: float
    steps: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        ordered = sorted(seconds)
        return cls(ordered[len(ordered) // 2], ordered[0], ordered[-1], len(ordered))


def timed(
    step: Callable[[], object],
    accelerator: Accelerator,
    *,
    warmup: int,
    steps: int,
    clock: Clock = "wall",
    together: Callable[[], object] = lambda: None,
) -> Times:
    """From the host's first work to the device's last; `together` is waited for after the warm-up,
    so that ranks measure at the same time."""
    now = time.perf_counter if clock == "wall" else time.process_time
    for _ in range(warmup):
        step()
    accelerator.synchronize()
    together()
    seconds = []
    for _ in range(steps):
        began = now()
        step()
        accelerator.synchronize()
        seconds.append(now() - began)
    return Times.of(seconds)
