"""What was measured of each request, and what it amounts to. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

PERCENTILES = (50, 90, 99)


@dataclass
class Record:
    """One request; times in seconds since the run began."""

    asked_s: float  # when it was due, sent or not
    event_s: list[float] = field(default_factory=list)  # of each event with text
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.event_s[0] - self.asked_s if self.event_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.output_tokens < 2 or not self.event_s:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between events, each of which may hold several tokens."""
        return [after - before for before, after in pairwise(self.event_s)]


@dataclass(frozen=True)
class Goal:
    """What a request must keep to count for goodput, in seconds; None: anything will do."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met(self, record: Record) -> bool:
        if record.error is not None:
            return False
        late = self.ttft_s is not None and (record.ttft_s or 0.0) > self.ttft_s
        slow = self.tpot_s is not None and (record.tpot_s or 0.0) > self.tpot_s
        return not (late or slow)


@dataclass(frozen=True)
class Summary:
    requests: int
    errors: dict[str, int]  # how often, by message
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float  # requests that met the goal
    ttft_ms: dict[str, float]  # mean, p50, p90, p99
    tpot_ms: dict[str, float]
    gap_ms: dict[str, float]
    total_ms: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(records: Sequence[Record], goal: Goal) -> Summary:
    """Of at least one record."""
    good = [record for record in records if record.error is None]
    begun = min(record.asked_s for record in records)
    duration_s = max(record.ended_s for record in records) - begun
    output_tokens = sum(record.output_tokens for record in good)
    return Summary(
        requests=len(records),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        duration_s=duration_s,
        prompt_tokens=sum(record.prompt_tokens for record in good),
        output_tokens=output_tokens,
        requests_per_s=len(good) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        goodput_per_s=sum(map(goal.met, records)) / duration_s,
        ttft_ms=_spread([one.ttft_s for one in good if one.ttft_s is not None]),
        tpot_ms=_spread([one.tpot_s for one in good if one.tpot_s is not None]),
        gap_ms=_spread([gap for one in good for gap in one.gaps_s]),
        total_ms=_spread([one.ended_s - one.asked_s for one in good]),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds; nothing if there is nothing."""
    if not seconds:
        return {}
    mean = sum(seconds) / len(seconds)
    spread = {"mean": mean} | {f"p{one}": percentile(seconds, one) for one in PERCENTILES}
    return {name: value * 1e3 for name, value in spread.items()}
