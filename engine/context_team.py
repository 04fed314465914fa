"""Ranks that compute the prompts of one of them together: context parallelism, on the exchange.

The first rank of a team leads: it alone takes requests, schedules, samples and hands over. In each
step it tells the others the batch and the blocks; all run the same forward, each with its own
rows, and fill the same blocks of their own slabs. The others never lease a block themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.context_step import ContextStep, Ints, image_width, num_rows
from engine.expert_exchange import Collectives
from kv_transfer.blocks import Blocks
from model.batch import ForwardBatch
from model.cache import Cache
from model.spec import ModelSpec
from model.vision import VisionEncoder

_NOTHING = np.zeros(0, np.int64)


class Shareable(Protocol):
    """model.transformer.Transformer is one."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def vision(self) -> VisionEncoder | None: ...

    @property
    def forward(self) -> Callable[..., Tensor]:
        """Of a batch, a cache, and the ranks that share it."""
        ...


class TeamModel:
    """The model as a team computes it; engine.executor.Model."""

    def __init__(self, model: Shareable, team: ContextTeam) -> None:
        self._forward = model.forward
        self._team = team
        self.spec, self.vision = model.spec, model.vision

    def forward(self, batch: ForwardBatch, cache: Cache) -> Tensor:
        found: Tensor = self._forward(batch, cache, self._team)
        return found


class ContextTeam:
    """One rank's end; model.context_parallel.Gather for the forwards."""

    def __init__(self, ranks: Collectives, device: torch.device, dtype: torch.dtype) -> None:
        """`ranks` are those of this team alone; rows of images are of `dtype`."""
        self.index, self.size = ranks.index, ranks.size
        self._ranks, self._device, self._dtype = ranks, device, dtype

    @property
    def leads(self) -> bool:
        return self.index == 0

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        sizes_RR = np.repeat(np.array(counts, np.int64)[:, None], self.size, 1)
        if not sizes_RR.any():
            return rows
        flat = rows.flatten(1)
        found = self._ranks.dispatch(torch.cat([flat] * self.size), sizes_RR)
        return found.view(-1, *rows.shape[1:])

    # ---------------------------------------------------------------- the leader

    def tell(self, batch: ForwardBatch, leases: Sequence[Blocks]) -> None:
        """Before its forward of a step."""
        step = ContextStep(batch, leases)
        self._share(step.numbers())
        if batch.embeddings_TD is not None:
            shown_TD = batch.embeddings_TD.to(self._device, self._dtype)
            self(shown_TD, [len(shown_TD), *[0] * (self.size - 1)])

    def tell_nothing(self) -> None:
        """The step's batch could not be made: there is no forward."""
        self._share(_NOTHING)

    # ---------------------------------------------------------------- the others

    def hear(self) -> ContextStep | None:
        """Waits for the leader; None where there is no forward."""
        numbers = self._share(_NOTHING)
        if not len(numbers):
            return None
        if not (width := image_width(numbers)):
            return ContextStep.of(numbers)
        nothing = torch.zeros(0, width, device=self._device, dtype=self._dtype)
        shown_TD = self(nothing, [num_rows(numbers), *[0] * (self.size - 1)])
        return ContextStep.of(numbers, shown_TD)

    def _share(self, numbers: Ints) -> Ints:
        """The leader's, at all ranks."""
        length = int(self._ranks.share_counts(np.array([len(numbers)], np.int64))[0, 0])
        told = np.zeros(length, np.int64)
        told[: len(numbers)] = numbers
        found: Ints = self._ranks.share_counts(told)[0] if length else told
        return found
