"""Where the rows of one layer go in one step: from the counts of all ranks, without asking again.

Pure arrays. Every rank works out the same numbers, so nobody has to be told how much will come, nor
for which slots. How many tokens each copy of an expert gets depends on the counts alone; which
tokens they are makes no difference, because copies hold the same weights.

    R ranks   E experts   S slots a rank   P = R * S slots, rank after rank   T tokens   K choices
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cluster.expert_placement import Placement
from cluster.replica_dispatch import Ints, assign, quotas


class Routes(NamedTuple):
    """Of one rank; a choice is t * K + k."""

    order: Ints  # [sent] its choices, by the slot that they go to
    sizes: Ints  # [R, R] rows from the first rank to the second
    slots: Ints  # [received] this rank's slot for each row that comes


class LayerTable:
    """One layer of a placement, in the forms that a step needs."""

    def __init__(self, placement: Placement, layer: int) -> None:
        self.slots_RS = placement.slots[layer]
        self._alone = Placement(placement.slots[layer : layer + 1], placement.experts)
        self._copied_E = self._alone.copies()[0] > 1
        self._expert_P = self.slots_RS.ravel()
        self._slot_E = np.empty(placement.experts, np.int64)
        self._slot_E[self._expert_P[::-1]] = np.arange(self._expert_P.size)[::-1]  # the first copy
        self._by_expert_P = np.argsort(self._expert_P, kind="stable")

    def routes(self, chosen_TK: Ints, counts_RE: Ints, index: int) -> Routes:
        """For rank `index`, whose tokens choose `chosen`; `counts` are all ranks' choices."""
        ranks, slots = self.slots_RS.shape
        if counts_RE[:, self._copied_E].any():
            quota_P = quotas(counts_RE.sum(0)[None], self._alone)[0].ravel()
            earlier_E = counts_RE[:index].sum(0)
            slot_TK = assign(chosen_TK, self._expert_P, quota_P, earlier_E)
            from_RP = self._shares(counts_RE, quota_P)
        else:
            slot_TK = self._slot_E[chosen_TK]
            from_RP = counts_RE[:, self._expert_P]  # of experts with copies: zero
        arriving_RS = from_RP.reshape(ranks, ranks, slots)[:, index]
        return Routes(
            order=np.argsort(slot_TK, axis=None, kind="stable"),
            sizes=from_RP.reshape(ranks, ranks, slots).sum(-1),
            slots=np.repeat(np.tile(np.arange(slots), ranks), arriving_RS.ravel()),
        )

    def _shares(self, counts_RE: Ints, quota_P: Ints) -> Ints:
        """Rows [R, P] from each rank to each slot.

        Choices stand in one line, expert after expert and within it rank after rank; slots take
        their quotas from it in order of their experts. What a rank gives a slot is where the two
        stretches overlap.
        """
        ends_ER = np.cumsum(counts_RE.T).reshape(counts_RE.T.shape)
        ends_RP, begins_RP = (ends[self._expert_P].T for ends in (ends_ER, ends_ER - counts_RE.T))
        taken_P = np.empty_like(quota_P)
        taken_P[self._by_expert_P] = np.cumsum(quota_P[self._by_expert_P])
        overlap_RP = np.minimum(ends_RP, taken_P) - np.maximum(begins_RP, taken_P - quota_P)
        return np.asarray(np.maximum(overlap_RP, 0))
