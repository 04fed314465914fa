"""Context parallelism: the rows of a forward over several ranks, and brought together again.

Rows meet in few places only: window keys, what the compressor takes, what the drafter observes,
the rows whose logits are wanted. There every rank collects the rows of all, and so writes the
complete state: any of them can hand it over. All else is done for a rank's own rows.

Each request's rows are cut in twice as many pieces as there are ranks, and rank r takes piece r
from the front and piece r from the back: late rows see more keys, so this evens the work out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from model.rows import Ints, Rows, pad_rows, pad_tensor

# T = padded rows of this rank, N = rows wanted, R = requests


class Gather(Protocol):
    """The ranks that share a forward."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int:
        """Of this rank."""
        ...

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows [sum(counts), ...] of all ranks, in their order; this one's are
        [counts[index], ...]. All ranks call it equally often, with equal counts.
        """
        ...


@dataclass(frozen=True)
class Share:
    """What each rank has of the `whole` rows: their numbers, ascending."""

    whole: Rows
    owned: tuple[Ints, ...]
    gather: Gather

    @property
    def mine(self) -> Ints:
        return self.owned[self.gather.index]

    @property
    def taken(self) -> Ints:
        """`mine`, or one row that only fills the place of rows, as padding does."""
        return self.mine if len(self.mine) or not self.whole.count else np.zeros(1, np.int64)

    def rows(self) -> Rows:
        """This rank's, of the whole."""
        index_T = pad_rows(self.taken)
        return replace(
            self.whole,
            count=len(self.mine),
            positions_T=self.whole.positions_T[index_T],
            requests_T=self.whole.requests_T[index_T],
            images_T=self.whole.images_T[index_T],
            share=self,
            plans={},
        )

    def collect(self, x: Tensor, wanted: Ints | None) -> Tensor:
        """[padded N, ...]: rows `wanted` (ascending numbers of whole rows; None: all), from
        whoever has them. `x` are this rank's.
        """
        if wanted is None:
            wanted = np.arange(self.whole.count)
        brought = [np.isin(rows, wanted, assume_unique=True).nonzero()[0] for rows in self.owned]
        counts = [len(places) for places in brought]
        given = x.index_select(0, self.whole.tensor(brought[self.gather.index]))
        together = self.gather(given.contiguous(), counts)
        numbers = np.concatenate(
            [rows[places] for rows, places in zip(self.owned, brought, strict=True)]
        )
        return pad_tensor(together.index_select(0, self.whole.tensor(numbers.argsort())))

    def keep(self, rows: Rows, going_on: Ints) -> tuple[Rows, Tensor]:
        """This rank's rows among `going_on`, which are of the whole, and their places, padded.

        Rows stay where they are. At the cut the last ones of each request go on: few, or spread
        over pieces as evenly as all were.
        """
        whole, _ = self.whole.select(going_on)
        stay = [np.isin(owned, going_on, assume_unique=True) for owned in self.owned]
        owned = tuple(
            going_on.searchsorted(mine[kept]) for mine, kept in zip(self.owned, stay, strict=True)
        )
        share = Share(whole, owned, self.gather)
        places = stay[self.gather.index].nonzero()[0] if len(share.mine) else share.taken
        return share.rows(), rows.tensor(pad_rows(places))


def shared(whole: Rows, gather: Gather) -> Share:
    """What this rank has of a forward that `gather`'s ranks do together."""
    return Share(whole, mirrored(whole.counts_R, gather.size), gather)


def mirrored(counts_R: Ints, ranks: int) -> tuple[Ints, ...]:
    """Numbers of each rank's rows, where request r has counts_R[r] rows, one after another."""
    owned: list[list[Ints]] = [[] for _ in range(ranks)]
    first = 0
    for count in counts_R.tolist():
        piece = -(-count // (2 * ranks))
        for rank, rows in enumerate(owned):
            for place in (rank, 2 * ranks - 1 - rank):
                begin, end = min(place * piece, count), min((place + 1) * piece, count)
                rows.append(np.arange(first + begin, first + end))
        first += count
    return tuple(np.concatenate([np.empty(0, np.int64), *rows]) for rows in owned)
