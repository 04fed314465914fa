"""What the ranks of one group say, brought together: a placement that all have, and their counts.

A rank's word alone says little: a group has a placement once every rank has it, and its load in
a step is the sum over its ranks. Knows nothing of streams or of decisions.

    L layers   E experts
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cluster.expert_messages import ExpertReport
from cluster.expert_placement import Placement
from cluster.expert_tables import counts_of, placement_of
from cluster.placement_file import GroupPlacement

Floats = npt.NDArray[np.float64]


@dataclass(eq=False)
class RankWord:
    """What one rank has said: its placement, and its counts that are not taken yet."""

    version: int
    placement: Placement
    preparing: str = ""
    stall_s: float = 0.0  # of its last switch
    moved_bytes: int = 0  # for its last switch
    counts: Floats = field(default_factory=lambda: np.zeros(()))  # [L, E] once there are steps
    steps: int = 0


class GroupWords:
    """The words of one group's ranks, by index. Ranks come, go and are replaced."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.ranks: dict[int, RankWord] = {}

    def hear(self, report: ExpertReport) -> None:
        """ValueError for a report that no rank of this group can have sent; nothing is kept of it.

        A first report without a table, a rank beyond the table's, a table that is no placement,
        counts of other experts.
        """
        known = self.ranks.get(report.index)
        word = known or RankWord(-1, self._placement(report))
        placement = word.placement
        if report.version != word.version or report.table is not None:
            placement = self._placement(report)
        counts = self._counts(report, placement)
        if known is not None and placement.shape != known.placement.shape:
            word = RankWord(-1, placement)  # another model under an old name
        if report.switch is not None:
            word.stall_s = report.switch.stall_s
            word.moved_bytes = report.switch.moved_bytes
        word.version, word.placement, word.preparing = report.version, placement, report.preparing
        if counts is not None and report.counts is not None:
            word.counts = word.counts + counts
            word.steps += report.counts.steps
        self.ranks[report.index] = word

    def forget(self, index: int) -> None:
        """The rank has left."""
        self.ranks.pop(index, None)

    @property
    def placed(self) -> GroupPlacement | None:
        """What the whole group has; None while a rank is missing or they differ."""
        words = list(self.ranks.values())
        if not words or len(words) < words[0].placement.shape[1]:
            return None
        first = words[0]
        for word in words[1:]:
            if word.version != first.version or not np.array_equal(
                word.placement.slots, first.placement.slots
            ):
                return None
        return GroupPlacement(self.group, first.version, first.placement)

    @property
    def preparing(self) -> str:
        """What a rank does for another placement; "" if none does anything."""
        return next((word.preparing for word in self.ranks.values() if word.preparing), "")

    @property
    def stall_s(self) -> float:
        """The longest that a rank's step loop stood still at the last switch."""
        return max((word.stall_s for word in self.ranks.values()), default=0.0)

    @property
    def moved_bytes(self) -> int:
        """By all ranks, for the last switch."""
        return sum(word.moved_bytes for word in self.ranks.values())

    def take(self) -> tuple[Floats, int] | None:
        """Tokens [L, E] of the whole group, and in how many steps; None before all have counted.

        Ranks step together but report at different times, so each rank's load a step counts: the
        sum of these, over as many steps as the most that a rank has reported.
        """
        if self.placed is None:
            return None
        counted = [(word.counts, word.steps) for word in self.ranks.values() if word.steps]
        if len(counted) < len(self.ranks):
            return None
        longest = max(steps for _, steps in counted)
        total = sum(counts * (longest / steps) for counts, steps in counted)
        for word in self.ranks.values():
            word.counts, word.steps = np.zeros(()), 0
        return np.asarray(total), longest

    def _placement(self, report: ExpertReport) -> Placement:
        if report.table is None:
            raise ValueError(f"rank {report.index} of {report.group} has not told its placement")
        placement = placement_of(report.table)
        if report.index >= placement.shape[1]:
            raise ValueError(
                f"rank {report.index} of {report.group} is none of {placement.shape[1]}"
            )
        return placement

    def _counts(self, report: ExpertReport, placement: Placement) -> Floats | None:
        if report.counts is None:
            return None
        counts = counts_of(report.counts).astype(np.float64)
        if counts.shape != (placement.shape[0], placement.experts):
            raise ValueError(
                f"{report.group}: counts {counts.shape} are not of {placement.experts} experts in "
                f"{placement.shape[0]} layers"
            )
        return counts
