"""What the router's desk for experts tells Ray's metrics. Pure; labels are pool and outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cluster.expert_history import OUTCOMES, POOLS, ExpertHistory
from cluster.metric_samples import Metric, Sample

IMBALANCE = Metric(
    "tandem_expert_imbalance", "gauge", "busiest rank over mean in the newest window"
)
REBALANCES = Metric(
    "tandem_expert_rebalances",
    "counter",
    "expert placements that arrived, were given up, or were not worth it",
    ("pool", "outcome"),
)
EXPERTS_MOVED = Metric("tandem_expert_bytes", "counter", "weights fetched for other placements")
SWITCHING = Metric(
    "tandem_expert_switch_seconds", "counter", "by which steps stood still for a switch"
)

EXPERT_METRICS = (IMBALANCE, REBALANCES, EXPERTS_MOVED, SWITCHING)


def expert_samples(imbalance: Mapping[str, float], history: ExpertHistory) -> Iterator[Sample]:
    """Imbalance only of pools in which a window has been counted."""
    for pool in POOLS:
        if pool in imbalance:
            yield Sample(IMBALANCE, imbalance[pool], (pool,))
        for outcome in OUTCOMES:
            yield Sample(REBALANCES, history.outcomes[pool, outcome], (pool, outcome))
        yield Sample(EXPERTS_MOVED, history.moved_bytes[pool], (pool,))
        yield Sample(SWITCHING, history.stalled_s[pool], (pool,))
