"""What each op of a step took, beside the least it could have: a trace joined to floors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.slice.floors import Cost, Rates
from engine.slice.trace import Ran

_LAYER = re.compile(r"layer (\d+)")


@dataclass(frozen=True)
class Line:
    """One op of one layer; layer None: outside of all layers. An op without a floor has 0."""

    layer: int | None
    op: str
    kernels: int
    microseconds: float
    floor: float

    @property
    def ratio(self) -> float:
        """Floor over time."""
        return self.floor / self.microseconds if self.microseconds else 0.0


def place_of(ranges: Sequence[str]) -> tuple[int | None, str]:
    """Layer and op of what ran inside these named ranges: the innermost name is the op's."""
    layer, op = None, "(outside of all ranges)"
    for name in ranges:
        if found := _LAYER.fullmatch(name):
            layer, op = int(found[1]), "(between ops)"
        else:
            op = name
    return layer, op


def lines(ran: Sequence[Ran], costs: Sequence[Cost], rates: Rates) -> list[Line]:
    """In the order in which ops began; ops that have a floor and did not run come last."""
    times: dict[tuple[int | None, str], list[float]] = defaultdict(list)
    floors: dict[tuple[int | None, str], float] = defaultdict(float)
    for one in ran:
        times[place_of(one.ranges)].append(one.microseconds)
    for cost in costs:
        floors[cost.layer, cost.op] += cost.seconds(rates) * 1e6
    return [
        Line(*place, len(times.get(place, ())), sum(times.get(place, ())), floors.get(place, 0.0))
        for place in [*times, *(place for place in floors if place not in times)]
    ]


def missing(found: Sequence[Line]) -> list[Line]:
    """Ops that must have run and do not show: the table would be incomplete."""
    return [line for line in found if line.floor and not line.kernels]


def by_op(found: Sequence[Line]) -> list[Line]:
    """Each op over all layers, what is furthest from its floor first."""
    parts: dict[str, list[Line]] = defaultdict(list)
    for line in found:
        parts[line.op].append(line)
    joined = [_sum(None, op, some) for op, some in parts.items()]
    return sorted(joined, key=lambda line: line.floor - line.microseconds)


def by_layer(found: Sequence[Line]) -> list[Line]:
    parts: dict[int | None, list[Line]] = defaultdict(list)
    for line in found:
        parts[line.layer].append(line)
    return [
        _sum(layer, "outside" if layer is None else "all", some) for layer, some in parts.items()
    ]


def by_kernel(ran: Sequence[Ran], most: int = 30) -> list[str]:
    """Lines: which kernels, of which backend, an op's time goes to; the longest first."""
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in ran:
        times[place_of(one.ranges)[1], one.backend, one.name].append(one.microseconds)
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    return [
        f"{op:20}{backend:8}{len(some):5}{sum(some):10.1f} us  {name[:70]}"
        for (op, backend, name), some in ordered[:most]
    ]


def text(found: Sequence[Line]) -> list[str]:
    rows = [f"{'op':34}{'kernels':>8}{'us':>10}{'floor':>9}{'ratio':>7}{'gap us':>9}"]
    for line in found:
        name = line.op if line.layer is None else f"layer {line.layer}: {line.op}"
        rows.append(
            f"{name:34}{line.kernels:8}{line.microseconds:10.1f}{line.floor:9.1f}"
            f"{line.ratio:7.2f}{line.microseconds - line.floor:9.1f}"
        )
    return rows


def _sum(layer: int | None, op: str, some: Sequence[Line]) -> Line:
    return Line(
        layer,
        op,
        sum(line.kernels for line in some),
        sum(line.microseconds for line in some),
        sum(line.floor for line in some),
    )
