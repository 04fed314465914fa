"""Who runs the rows of a step: the seam between an executor and a model over request state.

`DenseRunner` unpacks what a forward needs of the state, on any device and with any model of
model/cache.py's kind; packed_runner.py has one that reads state where it lies. Neither knows what
becomes of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.context_team import ContextTeam
from engine.images import Encode
from engine.step_batch import StepBatches
from engine.step_loop import Work
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.slab import Slab
from kv_transfer.state_memory import cache_over
from kv_transfer.watched_cache import WatchedCache
from model.batch import ForwardBatch
from model.cache import Cache
from model.spec import ModelSpec
from model.vision import VisionEncoder


class Model(Protocol):
    """What an engine needs of a model; model.transformer.Transformer is one."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def vision(self) -> VisionEncoder | None:
        """What images are to it; None: it takes none."""
        ...

    def forward(self, batch: ForwardBatch, cache: Cache) -> Tensor:
        """Logits [len(batch.logit_rows), V] float32; every row's state goes into the cache."""
        ...


class Runner(Protocol):
    """Used in the engine's thread only."""

    @property
    def device(self) -> torch.device:
        """Whose work a call asks for."""
        ...

    def __call__(self, work: Sequence[Work]) -> Tensor:
        """Logits float32 [rows, V] of the rows that each part wants, in their order, wherever they
        are made; nobody waits for the device. Raises whatever the forward raises."""
        ...

    def abandon(self) -> None:
        """This step has no forward after all; instead of a call."""
        ...


class DenseRunner:
    """A model over a cache of its own form; with a `team`, this rank leads it."""

    def __init__(
        self,
        model: Model,
        slab: Slab | DeviceSlab,
        *,
        keep: int = 0,
        encode: Encode | None = None,
        team: ContextTeam | None = None,
    ) -> None:
        """`keep` and `encode` as in StepBatches. `team`: the ranks that run each forward together;
        the first calls this, the others `follow`."""
        self._model, self._slab, self._team = model, slab, team
        self.device = slab.device if isinstance(slab, DeviceSlab) else torch.device("cpu")
        self._batches = StepBatches(model.spec, keep=keep, encode=encode)

    def __call__(self, work: Sequence[Work]) -> Tensor:
        leases = [one.running.lease for one in work]
        try:
            batch = self._batches.of(work)
        except Exception:
            self.abandon()
            raise
        if self._team is not None:
            self._team.tell(batch, leases)
        cache = self._watched(cache_over(self._slab, leases), work)
        return self._model.forward(batch, cache)

    def abandon(self) -> None:
        if self._team is not None:
            self._team.tell_nothing()

    @torch.inference_mode()
    def follow(self) -> None:
        """This rank's part of a step that another one leads."""
        assert self._team is not None
        if (step := self._team.hear()) is not None:
            self._model.forward(step.batch, cache_over(self._slab, step.leases))

    def _watched(self, cache: Cache, work: Sequence[Work]) -> Cache:
        """Those who want to know hear of a layer's rows when they are there, not after the step."""
        told = [
            (on_rows, one.grant.start + one.grant.count)
            for one in work
            if (on_rows := one.running.on_rows) is not None
        ]
        if not told:
            return cache

        def final(layer: int) -> None:
            event = self._event()
            for on_rows, positions in told:
                on_rows(layer, positions, event)

        return WatchedCache(cache, final)

    def _event(self) -> Any:
        """Happens when the device has done what it was asked for so far; None on a CPU."""
        if self.device.type == "cpu":
            return None
        event = torch.get_device_module(self.device).Event()
        event.record()
        return event
