"""How many groups a pool should have, by what its groups carry. Pure.

Serve's autoscaler asks `PoolPolicy` for each pool by itself, waits until the answer has been the
same for up_delay_s or down_delay_s, and keeps it between min_groups and max_groups. It runs in
Serve's controller, where nothing of ours can be imported: this file needs only Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.messages import Load

Measures = dict[str, float]
"""Of one group: requests, waiting_tokens, and used_blocks, a fraction."""


def measure(loads: Iterable[Load]) -> Measures:
    """What one group carries, by the loads of its ranks."""
    told = list(loads)
    total = sum(load.total_blocks for load in told)
    free = sum(load.free_blocks for load in told)
    return {
        "requests": float(sum(load.waiting + load.running for load in told)),
        "waiting_tokens": float(sum(load.waiting_tokens for load in told)),
        "used_blocks": (total - free) / total if total else 0.0,
    }


def wanted_groups(
    groups: int, carried: Iterable[Measures], targets: Mapping[str, float], slack: float
) -> int:
    """Groups that bring each measure to its target or below; the measure that wants most decides.

    Fewer than now only if they would stay `slack` below the targets, so that a load at the edge
    does not drop a group and start it again. `groups` (those running now) where nothing is known.
    """
    told = list(carried)
    wanted = [
        (
            _groups_for(total, target),
            _groups_for(total, target * (1 - slack)),
        )
        for name, target in targets.items()
        if target > 0 and told
        for total in (sum(one.get(name, 0.0) for one in told),)
    ]
    if not wanted:
        return groups
    up = max(groups_up for groups_up, _ in wanted)
    down = max(groups_down for _, groups_down in wanted)
    return up if up > groups else min(groups, down)


def _groups_for(total: float, target: float) -> int:
    return max(1, math.ceil(total / target - 1e-9))


class PoolPolicy:
    """Serve's form of it: made once with the targets, called with what Serve has measured."""

    def __init__(self, *, slack: float, **targets: float) -> None:
        self._slack = slack
        self._targets = targets

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        measured: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        carried: dict[Any, Measures] = {}
        for name, by_replica in measured.items():
            for replica, value in by_replica.items():
                carried.setdefault(replica, {})[name] = value
        groups: int = context.target_num_replicas
        return wanted_groups(groups, carried.values(), self._targets, self._slack), {}
