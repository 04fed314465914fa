"""Runs the rows of a step on request state where it lies, launch by launch.

What only decode rows allow, graphs and steps begun ahead, is in decode_steps.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.images import Encode
from engine.runner import Model
from engine.step_batch import StepBatches
from engine.step_loop import Work
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.slab import Slab
from kv_transfer.state_view import view_of
from model.batch import ForwardBatch
from model.options import ModelOptions
from model.packed.place_rows import chunk_rows, decode_rows
from model.packed.rows import Extras, OnLayer, PackedRows, Shape
from model.packed.state import StateView
from model.spec import ModelSpec
from model.vision import VisionEncoder


@runtime_checkable
class PackedModel(Protocol):
    """What an engine needs of a model that works in place; model.packed.forward has one."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def options(self) -> ModelOptions: ...

    @property
    def vision(self) -> VisionEncoder | None: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def looks_up_on_device(self) -> bool:
        """Whether a forward needs no PackedRows.engram."""
        ...

    def host_engram(self, ngrams_TN: Tensor) -> Mapping[int, Tensor]:
        """PackedRows.engram of rows with these n-grams; all on the host."""
        ...

    def forward(
        self,
        rows: PackedRows,
        shape: Shape,
        state: StateView,
        extras: Extras | None = None,
        on_layer: OnLayer | None = None,
    ) -> Tensor:
        """Logits float32 of the rows that the extras name, or of all rows."""
        ...


AnyModel = Model | PackedModel
"""What a rank can compute with."""


class PackedRunner:
    """engine.runner.Runner over blocks and slots in place."""

    def __init__(
        self,
        model: PackedModel,
        slab: Slab | DeviceSlab,
        *,
        keep: int = 0,
        encode: Encode | None = None,
    ) -> None:
        """`keep` and `encode` as in StepBatches."""
        self._model, self.device = model, model.device
        self._state = view_of(slab)
        self._batches = StepBatches(model.spec, keep=keep, encode=encode)

    def __call__(self, work: Sequence[Work]) -> Tensor:
        batch = self._batches.of(work)
        leases = [one.running.lease for one in work]
        if _is_decode(work, batch):
            count, widest = len(work), max(len(lease.block_table) for lease in leases)
            shape = Shape(count, count, widest, in_place=True)
            rows = decode_rows(batch, leases, shape, self.device)
            return self._model.forward(self._with_engram(rows, batch), shape, self._state)
        chunks = chunk_rows(batch, leases, self._model.spec, self._model.options, self.device)
        return self._model.forward(
            self._with_engram(chunks.rows, batch),
            chunks.shape,
            self._state,
            chunks.extras,
            self._teller(work),
        )

    def abandon(self) -> None:
        """Nobody waits for this rank's forward."""

    def _with_engram(self, rows: PackedRows, batch: ForwardBatch) -> PackedRows:
        if self._model.looks_up_on_device:
            return rows
        values = self._model.host_engram(batch.ngrams_Tn)
        return replace(rows, engram={layer: one.to(self.device) for layer, one in values.items()})

    def _teller(self, work: Sequence[Work]) -> OnLayer | None:
        """Those who want to know hear of a layer's rows when they are there, not after the step."""
        told = [
            (on_rows, one.grant.start + one.grant.count)
            for one in work
            if (on_rows := one.running.on_rows) is not None
        ]
        if not told:
            return None

        def tell(layer: int) -> None:
            event = None
            if self.device.type != "cpu":
                event = torch.get_device_module(self.device).Event()
                event.record()
            for on_rows, positions in told:
                on_rows(layer, positions, event)

        return tell


def _is_decode(work: Sequence[Work], batch: ForwardBatch) -> bool:
    """A row and its logits of each request, no pictures: rows that go into the ring at once."""
    return batch.embeddings_TD is None and all(
        one.grant.count == 1 and one.grant.samples and one.running.on_rows is None for one in work
    )
