"""What both schedulers share: how rows of one step are handed out. Pure; it runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where request number `index` of the engine stands, in order of arrival."""

    index: int
    done: int  # positions whose state is in the blocks
    length: int  # positions whose token id is known
    turn: int = 0  # grows with each grant to anyone; this is the number of its last one
    alone: bool = False  # must not share a step

    @property
    def remaining(self) -> int:
        return self.length - self.done


@dataclass(frozen=True)
class Grant:
    """Positions start .. start + count - 1 of request `index` run in this step."""

    index: int
    start: int
    count: int
    samples: bool  # they reach the last known position: its logits give the next token


Schedule = Callable[[Sequence[Progress]], list[Grant]]


def fill(requests: Sequence[Progress], rows: int) -> list[Grant]:
    """Hand `rows` rows out in the order given, to each as many as it still needs."""
    grants = []
    for request in requests:
        count = min(request.remaining, rows)
        if count < 1:
            break
        rows -= count
        samples = count == request.remaining
        grants.append(Grant(request.index, request.done, count, samples))
    return grants


def isolated(requests: Sequence[Progress], rows: int) -> list[Grant]:
    """A step for the first request that must run alone; nothing if there is none."""
    return fill([request for request in requests if request.alone][:1], rows)
