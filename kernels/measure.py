"""How a figure is measured on a GPU: the time of a call, and the limits of the same run."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGEST_ERROR = 1e-2


@dataclass(frozen=True)
class Row:
    """One line of the table; `ratio` is of the limit or peer called `against`."""

    name: str
    microseconds: float
    ratio: float
    against: str
    setting: str = ""


@dataclass(frozen=True)
class Limits:
    bytes_per_s: float
    flops: float

    def moved(self, name: str, nbytes: int, taken: float, setting: str = "") -> Row:
        """A row against the copy's rate; `nbytes` are what has to be read and written."""
        return Row(name, taken * 1e6, nbytes / taken / self.bytes_per_s, "BW", setting)

    def computed(self, name: str, flops: int, taken: float, setting: str = "") -> Row:
        return Row(name, taken * 1e6, flops / taken / self.flops, "PEAK", setting)


def measure_limits() -> Limits:
    """The copy is no part of a graph: there the copy engine makes it, at two thirds of the rate."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    copy = median(lambda: target.copy_(source), 5)
    one, other = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product = seconds(lambda: one @ other, 5)
    return Limits(2 * source.numel() * 4 / copy, 2 * 8192**3 / product)


def seconds(call: Callable[[], object], repeat: int = 20) -> float:
    """Median time of one call, from a captured graph, so that launching it counts for nothing."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay() -> None:
        for _ in range(5):
            graph.replay()

    return median(replay, repeat) / 5


def median(call: Callable[[], object], repeat: int) -> float:
    """Median seconds of one call as it is launched."""
    call()
    times = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(sorted(times)[len(times) // 2])


def check(name: str, found: Tensor, expected: Tensor) -> None:
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error < LARGEST_ERROR:
        raise SystemExit(f"{name} is wrong: its error is {error:.2g} of the result")


def fastest(settings: list[Any], call: Callable[[Any], object]) -> tuple[float, Any]:
    """Settings that do not fit the device are passed over."""
    best: tuple[float, Any] = (float("inf"), None)
    for setting in settings:
        try:
            taken = seconds(lambda setting=setting: call(setting))  # type: ignore[misc]
        except Exception as error:
            if "out of resource" not in str(error):
                raise
            continue
        best = min(best, (taken, setting), key=lambda one: one[0])
    return best
