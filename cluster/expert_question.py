"""What is asked about one group's experts, and the answer: a better placement, or why none.

A question holds all that its answer needs, so it can be answered in another thread or process.
Pure; knows nothing of when it is asked or of what becomes of the answer.

    L layers   E experts   R ranks   S slots a rank
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.config import ExpertsSection
from cluster.expert_placement import Placement, place, worthwhile
from cluster.placement_file import GroupPlacement

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Answer:
    """`wanted` is None where the group had better keep what it has.

    Of the newest window: busiest rank over mean [L] before, and after with what was found,
    whether it is wanted or not; and the slots [L] that it moves.
    """

    asked_of: GroupPlacement
    wanted: Placement | None
    why: str
    before: Floats
    after: Floats
    moved: Ints


@dataclass(frozen=True, eq=False)
class Question:
    """Loads a step [L, E] of the windows of one group, newest last."""

    placed: GroupPlacement
    windows: tuple[Floats, ...]
    settings: ExpertsSection
    fixed: Placement | None = None  # the answer, whatever the loads are
    why_fixed: str = ""

    def answer(self) -> Answer:
        """Milliseconds for a real model's 40 layers of 384 experts."""
        old = self.placed.placement
        if self.fixed is not None:
            return self._answer(self.fixed, self.why_fixed, take=True)
        settings = self.settings
        layers, ranks, slots = old.shape
        new = place(
            np.stack(self.windows),
            ranks=ranks,
            slots_per_rank=slots,
            previous=old,
            most_moves=int(settings.most_moved_share * layers * ranks * slots),
        )
        newest = self.windows[-1]
        saved = old.rank_loads(newest).max(-1).sum() - new.rank_loads(newest).max(-1).sum()
        saved_s = float(saved) * settings.seconds_a_token
        fetched = int(new.moves_from(old).sum(0).max()) * settings.expert_bytes
        take = fetched > 0 and worthwhile(
            seconds_saved_a_step=saved_s,
            steps_until_next=settings.window_steps,
            bytes_of_busiest_rank=fetched,
            bytes_a_second=settings.bytes_a_second,
        )
        saved_ms, megabytes = saved_s * settings.window_steps * 1e3, fetched / 1e6
        if take:
            why = f"it saves {saved_ms:.3g} ms a window and moves {megabytes:.3g} MB to one rank"
        else:
            why = (
                f"another placement would save {saved_ms:.3g} ms a window and move "
                f"{megabytes:.3g} MB to one rank"
            )
        return self._answer(new, why, take=take)

    def _answer(self, found: Placement, why: str, *, take: bool) -> Answer:
        old = self.placed.placement
        newest = self.windows[-1] if self.windows else np.zeros((old.shape[0], old.experts))
        return Answer(
            asked_of=self.placed,
            wanted=found if take else None,
            why=why,
            before=old.imbalance(newest),
            after=found.imbalance(newest),
            moved=found.moves_from(old).sum(-1),
        )
