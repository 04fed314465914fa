"""Which experts rows go to, by order instead of by the gate: even, or heavy on the first rank.

With random weights or random prompts a gate's own choice says nothing of real traffic, and the
load of experts decides how quick a step is. Shares stay the gate's; only the experts are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.ops.route import Routed
from model.moe import Experts, MakeExperts
from model.options import ModelOptions
from model.spec import ModelSpec
from model.weight_source import WeightSource

# T = rows, A = experts of a row, E = experts


@dataclass(frozen=True)
class Routing:
    """skewed: the first of `groups` equal parts of the experts gets `ratio` x the average."""

    kind: Literal["natural", "balanced", "skewed"] = "natural"
    ratio: float = 1.0
    groups: int = 8

    def __post_init__(self) -> None:
        if self.kind == "skewed" and not 1 <= self.ratio <= self.groups:
            raise ValueError(
                f"an imbalance of {self.ratio} cannot be: it must be in 1 to {self.groups}, the "
                "number of ranks that experts are thought to be on"
            )

    def __str__(self) -> str:
        return f"skewed {self.ratio:g} over {self.groups}" if self.kind == "skewed" else self.kind


def forced(routing: Routing, rows: int, chosen: int, experts: int) -> Tensor:
    """int64 [T, A], all of a row different; the same for the same arguments.

    balanced: each expert gets as many rows as any other, give or take one. skewed: the first part
    gets its share of the rows over all of them, give or take one row, others evenly; ValueError
    where that part has too few experts for it.
    """
    if routing.kind == "balanced":
        return (torch.arange(rows * chosen) % experts).view(rows, chosen)
    hot = max(1, experts // routing.groups)
    share = routing.ratio * hot / experts
    if share * chosen > hot or (1 - share) * chosen > experts - hot:
        raise ValueError(
            f"an imbalance of {routing.ratio} over {routing.groups} ranks would need more than "
            f"{hot} experts of the first one for a row of {chosen}"
        )
    ends_T = (torch.arange(rows + 1, dtype=torch.float64) * share * chosen).floor().long()
    hot_T = (ends_T[1:] - ends_T[:-1]).clamp(max=min(hot, chosen))
    cold_T = chosen - hot_T
    first_hot_T = hot_T.cumsum(0) - hot_T
    first_cold_T = cold_T.cumsum(0) - cold_T
    place_TA = torch.arange(chosen).expand(rows, chosen)
    hot_TA = (first_hot_T[:, None] + place_TA) % hot
    cold_TA = hot + (first_cold_T[:, None] + place_TA - hot_T[:, None]) % (experts - hot)
    return torch.where(place_TA < hot_T[:, None], hot_TA, cold_TA)


def with_routing(make: MakeExperts, routing: Routing) -> MakeExperts:
    """Experts as `make` makes them, told where to send rows."""
    if routing.kind == "natural":
        return make

    def made(
        weights: WeightSource, prefix: str, count: int, spec: ModelSpec, options: ModelOptions
    ) -> Experts:
        return _Told(make(weights, prefix, count, spec, options), routing, count)

    return made


class _Told:
    def __init__(self, experts: Experts, routing: Routing, count: int) -> None:
        self._experts, self._routing, self._count = experts, routing, count
        self._known: dict[tuple[int, int], Tensor] = {}  # by shape

    def __call__(self, x_TD: Tensor, routed: Routed, count: int) -> Tensor:
        rows, chosen = routed.experts.shape
        if (rows, chosen) not in self._known:
            told_TA = forced(self._routing, rows, chosen, self._count)
            self._known[rows, chosen] = told_TA.to(routed.experts)
        return self._experts(x_TD, routed._replace(experts=self._known[rows, chosen]), count)
