"""What happened to one request, and when. A record only: nothing decides by it.

Events of a request, in the order in which they usually come (times in seconds since its start):

    held          no rank can take it now: why
    routed        attempt, prefill, decode; path: "handoff", "local" (a short prompt, by the decode
                  rank itself) or "colocated"
    started       queued_s at the prefill rank (or, colocated, at the decode rank)
    refused       decode, why: no room there, or it drains
    reserved      decode, reservation
    handed_over   bytes, pushes, push_s, hidden_s, tail_s, path
    taken_over    decode: it has accepted the state
    place_lost    decode, error: lost before it had accepted; another one gets the same state
    lost          attempt, error: the attempt is over; what was emitted is kept
    preempted     attempt, error: the same, and no rank is to blame: an older request needed room
    finished      outcome
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TimelineEvent:
    name: str
    at_s: float  # since the request began
    detail: dict[str, Any]  # values that JSON can hold


class Timeline:
    """Filled while a request runs; readable at any time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.events: list[TimelineEvent] = []
        self.token_times: list[float] = []  # one for each token that the caller got, s since start
        self._clock = clock
        self._begun = clock()

    def record(self, name: str, **detail: Any) -> None:
        self.events.append(TimelineEvent(name, self._clock() - self._begun, detail))

    def tokens(self, count: int) -> None:
        """So many tokens have just reached the caller."""
        self.token_times += [self._clock() - self._begun] * count

    def last(self, name: str) -> TimelineEvent | None:
        """The latest event of that name."""
        return next((event for event in reversed(self.events) if event.name == name), None)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.token_times[0] if self.token_times else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "events": [
                {"event": event.name, "at_s": round(event.at_s, 6), **event.detail}
                for event in self.events
            ],
            "token_times_s": [round(at_s, 6) for at_s in self.token_times],
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
        }

    def summary(self) -> str:
        """For people: one line an event, then the figures."""
        moments = [(event.at_s, event.name, _spell(event.detail)) for event in self.events]
        if self.token_times:
            moments.append((self.token_times[0], "first_token", "index 0"))
        lines = [
            f"{at_s * 1e3:9.1f} ms  {name:<11}  {spelled}".rstrip()
            for at_s, name, spelled in sorted(moments, key=lambda moment: moment[0])
        ]
        figures = [f"{len(self.token_times)} tokens"]
        if self.ttft_s is not None:
            figures.append(f"TTFT {self.ttft_s * 1e3:.1f} ms")
        if self.tpot_s is not None:
            figures.append(f"TPOT {self.tpot_s * 1e3:.2f} ms")
        return "\n".join([*lines, ", ".join(figures)])


def _spell(detail: dict[str, Any]) -> str:
    return "  ".join(_pair(key, value) for key, value in detail.items())


def _pair(key: str, value: Any) -> str:
    if isinstance(value, float) and key.endswith("_s"):
        return f"{key.removesuffix('_s')} {value * 1e3:.1f} ms"
    return f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}"
