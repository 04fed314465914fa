"""Where the rows of a forward stand: requests, positions, rotations.

Rows are padded to a multiple that keeps CPU ops row-invariant (kernels/op.py); padding rows see
no key, are never written and never leave the forward. Geometry is worked out on the host, in
NumPy: it is small, and a NumPy call costs a fifth of a torch call. What the forward needs of it
goes to the device of the weights. Knows no layer and no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.op import padded
from kernels.ops.rope import rotations
from model.batch import ForwardBatch

if TYPE_CHECKING:
    from model.context_parallel import Share

# T = padded rows, R = requests, P = rotated pairs

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
X = TypeVar("X")
A = ParamSpec("A")


@dataclass(frozen=True)
class Rows:
    """`count` rows, request after request, padded to T. Those of request r begin at row
    first_R[r] and stand at positions starts_R[r] onwards; below position clips_R[r] layers from
    the cut on see no window rows. With a `share`, these are some of the `whole` rows, and what is
    said of requests is said of those.
    """

    count: int
    positions_T: Ints
    requests_T: Ints
    images_T: Bools
    starts_R: Ints
    counts_R: Ints
    clips_R: Ints
    floors_R: Ints  # no row below this position has window rows here: it has left this forward
    frequencies: Mapping[bool, Tensor]  # [P] float64; of layers with compressed rows, or without
    rollback: int  # positions that may be taken back after this forward
    device: torch.device  # of the weights; the fields above are on the host
    share: Share | None = None  # where several ranks do one forward
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        batch: ForwardBatch,
        frequencies: Mapping[bool, Tensor],
        rollback: int,
        device: torch.device,
    ) -> Rows:
        return cls(
            batch.num_rows,
            pad_rows(batch.positions_T.numpy()),
            pad_rows(batch.requests_T.numpy()),
            pad_rows(batch.images_T.numpy()),
            batch.starts_R.numpy(),
            batch.counts_R.numpy(),
            batch.window_starts_R.numpy(),
            np.zeros_like(batch.starts_R.numpy()),
            frequencies,
            rollback,
            device,
        )

    def tensor(self, values: npt.NDArray[Any]) -> Tensor:
        """Geometry for the forward, on its device."""
        return torch.from_numpy(values).to(self.device)

    def plan(self, make: Callable[Concatenate[Rows, A], X], *args: A.args, **kwargs: A.kwargs) -> X:
        """make(self, ...), once a forward: many layers need the same."""
        key = (make, args, tuple(kwargs.items()))
        if key not in self.plans:
            self.plans[key] = make(self, *args, **kwargs)
        found: X = self.plans[key]
        return found

    @property
    def whole(self) -> Rows:
        """The rows of all ranks that do this forward."""
        return self if self.share is None else self.share.whole

    def collect(self, x: Tensor, wanted: Ints | None = None) -> Tensor:
        """Rows `wanted` of the whole (ascending; None: all), padded; `x` are those of this rank."""
        if self.share is not None:
            return self.share.collect(x, wanted)
        return x if wanted is None else x.index_select(0, self.tensor(pad_rows(wanted)))

    def keep(self, going_on: Ints) -> tuple[Rows, Tensor]:
        """Of the whole only rows `going_on`; which of these they are, padded."""
        return self.select(going_on) if self.share is None else self.share.keep(self, going_on)

    @cached_property
    def runs(self) -> tuple[Ints, Ints]:
        """Where rows of a request stand at positions one after another: first row, and count."""
        positions, requests = self.positions_T[: self.count], self.requests_T[: self.count]
        follows = (np.diff(positions) == 1) & (np.diff(requests) == 0)
        edges = np.concatenate([[0], (~follows).nonzero()[0] + 1, [self.count]])
        first, counts = edges[:-1], np.diff(edges)
        return first[counts > 0], counts[counts > 0]

    def turns(self, ratio: int) -> Tensor:
        """Rotation of each row's position, complex [T, 1, P], in layers of this ratio."""
        return self._turns[ratio > 0]

    @cached_property
    def _turns(self) -> dict[bool, Tensor]:
        return {ratio: self.turns_of(self.positions_T, ratio) for ratio in self.frequencies}

    def turns_of(self, positions_N: Ints, has_rows: bool) -> Tensor:
        """Rotations of any positions, complex [N, 1, P]; angles are made on the host."""
        turns_N1P = rotations(torch.from_numpy(positions_N), self.frequencies[has_rows])
        return turns_N1P.to(self.device)

    @cached_property
    def first_R(self) -> Ints:
        first_R: Ints = self.counts_R.cumsum() - self.counts_R
        return first_R

    @cached_property
    def image_rows(self) -> Tensor | None:
        """bool [T], where there is any image."""
        return self.tensor(self.images_T) if self.images_T.any() else None

    @cached_property
    def any_clip(self) -> bool:
        return bool(self.clips_R.any())

    @cached_property
    def above_clip(self) -> Ints:
        """Rows that stand at or above their request's clip."""
        count = self.count
        above = self.positions_T[:count] >= self.clips_R[self.requests_T[:count]]
        return above.nonzero()[0]

    def last(self, counts_R: Ints) -> Ints:
        """The last so many rows of each request, or all that it has."""
        first_R = self.starts_R + self.counts_R - counts_R
        count = self.count
        return (self.positions_T[:count] >= first_R[self.requests_T[:count]]).nonzero()[0]

    def newest(self, window: int, clipped: bool) -> Ints:
        """Rows that stay within a window after this forward, with room for a draft to be taken
        back; if clipped, none below the clip.
        """
        counts_R = np.full_like(self.counts_R, window + self.rollback)
        if clipped:
            counts_R = np.minimum(counts_R, self.starts_R + self.counts_R - self.clips_R)
        return self.last(counts_R)

    def select(self, index: Ints) -> tuple[Rows, Tensor]:
        """Rows `index`, which are the last ones of each request, and `index` padded."""
        index_T = pad_rows(index)
        if len(index) == self.count:
            return self, self.tensor(index_T)
        counts_R = np.bincount(self.requests_T[index], minlength=len(self.counts_R))
        starts_R = self.starts_R + self.counts_R - counts_R
        rows = replace(
            self,
            count=len(index),
            positions_T=self.positions_T[index_T],
            requests_T=self.requests_T[index_T],
            images_T=self.images_T[index_T],
            starts_R=starts_R,
            counts_R=counts_R,
            floors_R=np.where(counts_R < self.counts_R, starts_R, self.floors_R),
            plans={},
        )
        return rows, self.tensor(index_T)


def pad_rows(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows [n, ...] with zero rows up to the multiple of kernels/op.py."""
    extra = padded(len(rows)) - len(rows)
    if not extra:
        return rows
    return np.concatenate([rows, np.zeros((extra, *rows.shape[1:]), rows.dtype)])


def pad_tensor(rows: Tensor) -> Tensor:
    """The same for a tensor."""
    extra = padded(rows.shape[0]) - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(extra, *rows.shape[1:])]) if extra else rows
