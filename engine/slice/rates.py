"""What this machine can do, measured in the run whose times are compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.slice.floors import Rates
from kernels import measure

_LINKED = 1 << 28  # bytes


def measure_rates(device: torch.device) -> Rates:
    """On a CPU of one core in float32: enough to make a table, not to judge by it."""
    if device.type != "cuda":
        source, square = torch.rand(1 << 22), torch.rand(512, 512)
        copy = _best(lambda: source.clone())
        product = _best(lambda: square @ square)
        moved = 8 * source.numel() / copy
        return Rates(moved, 2 * 512**3 / product, moved)
    limits = measure.measure_limits()
    torch.cuda.empty_cache()
    host = torch.empty(_LINKED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    taken = measure.median(lambda: there.copy_(host, non_blocking=True), 5)
    return Rates(limits.bytes_per_s, limits.flops, _LINKED / taken)


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)
