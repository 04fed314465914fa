"""Traces of a step in Chrome's trace-event format: written by torch's profiler, and read back.

What a GPU ran is found by the call that launched it, and that call by the named ranges around it,
so each kernel has its layer, its op and its backend. `python -m engine.slice.trace FILE` prints
what took longest. Knows no model: a range is whatever was named.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_RAN = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHED = ("cuda_runtime", "cuda_driver")
_LIBRARIES = re.compile(r"cutlass|cublas|nvjet|xmma|gemm|gemv|splitK", re.IGNORECASE)


@dataclass(frozen=True)
class Ran:
    """One kernel or copy; on a CPU, the time of a named range that is in no range inside it."""

    name: str
    microseconds: float
    ranges: tuple[str, ...]  # around it, the outermost first

    @property
    def backend(self) -> str:
        """triton: a kernel of ours; torch: one of torch's own; cublas: of a library; cpu: a range
        that had no kernels.
        """
        if self.name in self.ranges:
            return "cpu"
        if self.name.startswith(("Memcpy", "Memset")):
            return "copy"
        if "at::" in self.name or "at_cuda" in self.name:
            return "torch"
        if _LIBRARIES.search(self.name):
            return "cublas"
        return "triton" if re.fullmatch(r"\w+", self.name) else "torch"


def record(step: Callable[[], object], device: torch.device, path: Path) -> None:
    """One step, after one that is not recorded, into `path`."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    step()
    with profile(activities=activities) as found:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))


def read(path: Path) -> list[Ran]:
    """In the order in which they began."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    named = _Ranges([event for event in spans if event.get("cat") == "user_annotation"])
    kernels = sorted(
        (event for event in spans if event.get("cat") in _RAN), key=lambda event: event["ts"]
    )
    if not kernels:
        return named.own_times()
    launches = {
        event["args"]["correlation"]: event
        for event in spans
        if event.get("cat") in _LAUNCHED and "correlation" in event.get("args", {})
    }
    found = []
    for kernel in kernels:
        launch = launches.get(kernel["args"].get("correlation"))
        ranges = named.around(launch) if launch else ()
        found.append(Ran(kernel["name"], float(kernel["dur"]), ranges))
    return found


class _Ranges:
    """Named ranges of each thread; those of one thread nest."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self._of: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            if not event["name"].startswith("ProfilerStep"):
                self._of[event["tid"]].append(event)
        self._starts = {tid: [event["ts"] for event in ranges] for tid, ranges in self._of.items()}

    def around(self, event: dict[str, Any]) -> tuple[str, ...]:
        """The names of the ranges of its thread that were open when it began."""
        tid, at = event["tid"], event["ts"]
        before = self._of.get(tid, [])[: bisect_right(self._starts.get(tid, []), at)]
        return tuple(one["name"] for one in before if one["ts"] + one["dur"] >= at)

    def own_times(self) -> list[Ran]:
        """Each range's time without that of the ranges inside it."""
        found = []
        for ranges in self._of.values():
            open_: list[tuple[dict[str, Any], list[float]]] = []
            for event in ranges:
                while open_ and open_[-1][0]["ts"] + open_[-1][0]["dur"] <= event["ts"]:
                    open_.pop()
                inside = [0.0]
                if open_:
                    open_[-1][1][0] += event["dur"]
                names = tuple(one["name"] for one, _ in open_)
                found.append((event, inside, names))
                open_.append((event, inside))
        return [
            Ran(event["name"], max(0.0, event["dur"] - inside[0]), (*names, event["name"]))
            for event, inside, names in sorted(found, key=lambda one: one[0]["ts"])
        ]


def summary(ran: Sequence[Ran], most: int = 25) -> list[str]:
    """Lines for people: what took longest, by range and kernel."""
    total = sum(one.microseconds for one in ran)
    kinds: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in ran:
        kinds[" / ".join(one.ranges), one.name, one.backend].append(one.microseconds)
    ordered = sorted(kinds.items(), key=lambda item: -sum(item[1]))
    lines = [f"{total:10.1f} us in {len(ran)} kernels"]
    for (ranges, name, backend), times in ordered[:most]:
        lines.append(f"{sum(times):10.1f} us  {len(times):4}  [{backend}] {ranges}: {name[:60]}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="engine.slice.trace", description=__doc__)
    parser.add_argument("file", type=Path, help="a trace that torch's profiler wrote")
    parser.add_argument("--most", type=int, default=25, help="lines to print")
    options = parser.parse_args(arguments)
    print("\n".join(summary(read(options.file), options.most)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
