"""Hands samples to Ray's metrics, which every node's agent exports for Prometheus.

The only file that knows Ray's metrics; what is told is decided in metric_samples.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from ray.util import metrics

from cluster.metric_samples import Metric, Sample

logger = logging.getLogger(__name__)

EVERY_S = 1.0


class RayMetrics:
    """One process's metrics. Ray adds labels of its own that tell its processes apart."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}

    def take(self, samples: Iterable[Sample]) -> None:
        """Gauges as they are; of counters what has been added since the last time."""
        for sample in samples:
            metric = sample.metric
            tags = dict(zip(metric.labels, sample.labels, strict=True))
            if metric.kind == "gauge":
                self._of(metric).set(sample.value, tags=tags)
                continue
            key = metric.name, sample.labels
            added = sample.value - self._counted.get(key, 0.0)
            if added > 0:
                self._of(metric).inc(added, tags=tags)
                self._counted[key] = sample.value

    def _of(self, metric: Metric) -> Any:
        if metric.name not in self._made:
            kind = metrics.Gauge if metric.kind == "gauge" else metrics.Counter
            self._made[metric.name] = kind(
                metric.name, description=metric.meaning, tag_keys=metric.labels
            )
        return self._made[metric.name]


async def export(read: Callable[[], Iterable[Sample]], every_s: float = EVERY_S) -> None:
    """Until cancelled. What `read` or Ray cannot do is logged, and tried again."""
    told = RayMetrics()
    failed = False
    while True:
        try:
            told.take(read())
            failed = False
        except Exception:
            if not failed:  # once, not once a second
                logger.exception("metrics cannot be exported; trying again")
            failed = True
        await asyncio.sleep(every_s)
