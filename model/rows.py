"""Where the rows of a forward stand: requests, positions, rotations.

Rows are padded to a multiple that keeps CPU ops row-invariant (kernels/op.py); padding rows see
no key, are never written and never leave the forward. Knows no layer and no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from kernels.op import padded
from kernels.ops.rope import rotations
from model.batch import ForwardBatch

# T = padded rows, R = requests, P = rotated pairs

X = TypeVar("X")
A = ParamSpec("A")


@dataclass(frozen=True)
class Rows:
    """`count` rows, request after request, padded to T. Those of request r begin at row
    first_R[r] and stand at positions starts_R[r] onwards; below position clips_R[r] layers from
    the cut on see no window rows.
    """

    count: int
    positions_T: Tensor
    requests_T: Tensor
    images_T: Tensor  # bool
    starts_R: Tensor
    counts_R: Tensor
    clips_R: Tensor
    frequencies: Mapping[bool, Tensor]  # [P] float64; of layers with compressed rows, or without
    rollback: int  # positions that may be taken back after this forward
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, batch: ForwardBatch, frequencies: Mapping[bool, Tensor], rollback: int) -> Rows:
        return cls(
            batch.num_rows,
            pad_rows(batch.positions_T),
            pad_rows(batch.requests_T),
            pad_rows(batch.images_T),
            batch.starts_R,
            batch.counts_R,
            batch.window_starts_R,
            frequencies,
            rollback,
        )

    def plan(self, make: Callable[Concatenate[Rows, A], X], *args: A.args, **kwargs: A.kwargs) -> X:
        """make(self, ...), once a forward: many layers need the same."""
        key = (make, args, tuple(kwargs.items()))
        if key not in self.plans:
            self.plans[key] = make(self, *args, **kwargs)
        found: X = self.plans[key]
        return found

    def turns(self, ratio: int) -> Tensor:
        """Rotation of each row's position, complex [T, P], in layers of this ratio."""
        return self._turns[ratio > 0]

    @cached_property
    def _turns(self) -> dict[bool, Tensor]:
        return {key: rotations(self.positions_T, f) for key, f in self.frequencies.items()}

    @cached_property
    def first_R(self) -> Tensor:
        return self.counts_R.cumsum(0) - self.counts_R

    @cached_property
    def has_images(self) -> bool:
        return bool(self.images_T.any())

    @cached_property
    def above_clip(self) -> Tensor:
        """bool [T]: rows that stand at or above their request's clip; no padding row does."""
        above_T = self.positions_T >= self.clips_R[self.requests_T]
        above_T[self.count :] = False
        return above_T

    def newest(self, window: int, clips_R: Tensor) -> Tensor:
        """Rows at or above `clips` that stay within a window after this forward, with room for
        a draft to be taken back.
        """
        ends_R = self.starts_R + self.counts_R - window - self.rollback
        first_R = torch.maximum(ends_R, clips_R)
        positions = self.positions_T[: self.count]
        return (positions >= first_R[self.requests_T[: self.count]]).nonzero().squeeze(1)

    @cached_property
    def any_below_clip(self) -> bool:
        return not bool(self.above_clip[: self.count].all())

    @cached_property
    def any_clip(self) -> bool:
        return bool(self.clips_R.any())

    def select(self, index: Tensor) -> tuple[Rows, Tensor]:
        """Rows `index`, which are the last ones of each request, and `index` padded."""
        index_T = pad_rows(index)
        if len(index) == self.count:
            return self, index_T
        counts_R = torch.bincount(self.requests_T[index], minlength=len(self.counts_R))
        rows = Rows(
            len(index),
            self.positions_T[index_T],
            self.requests_T[index_T],
            self.images_T[index_T],
            self.starts_R + self.counts_R - counts_R,
            counts_R,
            self.clips_R,
            self.frequencies,
            self.rollback,
        )
        return rows, index_T


def pad_rows(rows: Tensor, value: int = 0) -> Tensor:
    """Rows [n, ...] with padding rows of `value` up to the multiple of kernels/op.py."""
    extra = padded(len(rows)) - len(rows)
    if not extra:
        return rows
    return torch.cat([rows, rows.new_full((extra, *rows.shape[1:]), value)])
