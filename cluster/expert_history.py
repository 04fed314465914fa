"""What the router remembers of its decisions about experts: the last ones, and totals.

Knows nothing of how they are made. Totals are by pool, and grow with the router's life only.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from cluster.expert_messages import ExpertDecision
from cluster.pools import pool_of

KEPT = 16  # decisions of one group: several hours of a busy one

POOLS = ("prefill", "decode")
OUTCOMES = ("arrived", "given_up", "kept")


class ExpertHistory:
    def __init__(self) -> None:
        self._of_group: dict[str, deque[ExpertDecision]] = defaultdict(lambda: deque(maxlen=KEPT))
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by pool and outcome
        self.moved_bytes: Counter[str] = Counter()  # by pool
        self.stalled_s: dict[str, float] = defaultdict(float)  # by pool

    def note(self, group: str, decision: ExpertDecision, *, moved_bytes: int = 0) -> None:
        """`moved_bytes`: by all ranks of the group, for a placement that has arrived."""
        self._of_group[group].append(decision)
        pool = pool_of(group)
        if decision.outcome in OUTCOMES:
            self.outcomes[pool, decision.outcome] += 1
        self.moved_bytes[pool] += moved_bytes
        self.stalled_s[pool] += decision.stall_s

    def of(self, group: str) -> tuple[ExpertDecision, ...]:
        """Oldest first."""
        return tuple(self._of_group.get(group, ()))

    def keep_only(self, groups: Iterable[str]) -> None:
        """Those of other groups are over."""
        for gone in self._of_group.keys() - set(groups):
            del self._of_group[gone]
