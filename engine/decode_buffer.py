"""The integers of decode steps: written into pinned host memory, brought over by one copy.

They always lie in the same memory of the device, where graphs find them. Tables are most of them
and seldom change: they are written, and copied, only when requests or their blocks have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.messages import Sampling
from engine.device_copies import Milestone
from engine.request import Running
from engine.step_batch import window_start
from model.packed.rows import PackedRows, Shape, buffer_size, rows_in
from model.spec import ModelSpec

# T = rows, N = longest n-gram

Ints = npt.NDArray[np.int64]
Seat = tuple[Running, int]  # a request, and how many blocks of it are in its table


class Row(NamedTuple):
    """One request's row of a decode step: the token at `position` goes in, the next comes out."""

    running: Running
    position: int
    token: int = 0  # at that position, if it is known
    source: int = -1  # else the row of the step before that makes it
    draw: Sampling | None = None  # how the next one is drawn; None: it is the best


@dataclass(frozen=True)
class StepRows:
    """Of one shape, in the device's memory."""

    sources_T: Tensor  # int64
    rows: PackedRows


class DecodeBuffer:
    def __init__(self, largest: Shape, spec: ModelSpec, device: torch.device, keep: int) -> None:
        """For shapes up to `largest`; `keep` as in engine/step_batch.py."""
        self._ngram = spec.engram_max_ngram_size
        size = largest.rows + buffer_size(largest, self._ngram)
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        # two, so that one can be written while the copy of the other is still on its way
        self._hosts = [_HostBuffer(size, spec, device, keep) for _ in range(2)]
        self._there: tuple[Shape, Sequence[Seat]] | None = None  # whose tables the device has

    def on_device(self, shape: Shape) -> StepRows:
        return _laid_out(self._device, shape, self._ngram)

    def fill(self, rows: Sequence[Row], shape: Shape) -> Tensor:
        """The step's integers, on their way to the device; its n-grams [T, N] on the host."""
        host = self._hosts[0]
        self._hosts.reverse()
        seats = [(row.running, len(row.running.lease.block_table)) for row in rows]
        host.write(rows, seats, shape)
        size = shape.rows + buffer_size(shape, self._ngram)
        if self._there == (shape, seats):
            size -= shape.requests * shape.blocks
        self._device[:size].copy_(host.buffer[:size], non_blocking=True)
        host.copied = Milestone(self._device.device)
        self._there = shape, seats
        return host.ngrams_TN

    def fill_padding(self, shape: Shape) -> None:
        """Rows that see nothing and write nothing."""
        self.fill([], shape)


class _HostBuffer:
    """One step's integers on the host; keeps what is right already."""

    def __init__(self, size: int, spec: ModelSpec, device: torch.device, keep: int) -> None:
        self.buffer = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.copied = Milestone(torch.device("cpu"))
        self._ngram, self._image_token_id = spec.engram_max_ngram_size, spec.image_token_id
        self._keep = keep
        self._shape: Shape | None = None
        self._seats: Sequence[Seat] = []

    def write(self, rows: Sequence[Row], seats: Sequence[Seat], shape: Shape) -> None:
        self.copied.wait()
        if shape != self._shape:
            self._lay_out(shape)
        if seats != self._seats or not seats:
            self._seat(rows, seats)
        count = len(rows)
        positions = [row.position for row in rows]
        self._positions_T[:count] = self._starts_T[:count] = positions
        self._sources_T[:count] = [row.source for row in rows]
        self._tokens_T[:count] = self.ngrams_TN.numpy()[:count, 0] = [row.token for row in rows]
        if count and self._ngram > 1:
            self._look_back(rows)

    def _lay_out(self, shape: Shape) -> None:
        size = shape.rows + buffer_size(shape, self._ngram)
        self.buffer[:size] = 0
        laid_out = _laid_out(self.buffer, shape, self._ngram)
        rows = laid_out.rows
        self._sources_T = laid_out.sources_T.numpy()
        self._tokens_T, self._positions_T = rows.token_ids_T.numpy(), rows.positions_T.numpy()
        self._requests_T, self._starts_T = rows.requests_T.numpy(), rows.starts_R.numpy()
        self._slots_T, self._clips_T = rows.slots_R.numpy(), rows.clips_R.numpy()
        self._tables_TP = rows.tables_RP.numpy()
        self.ngrams_TN = rows.ngrams_TN
        rows.first_R.numpy()[:] = np.arange(shape.rows)
        self._shape, self._seats = shape, []

    def _seat(self, rows: Sequence[Row], seats: Sequence[Seat]) -> None:
        """What stays as long as requests and their blocks do, and the padding behind them."""
        count = len(rows)
        self._requests_T[:count], self._requests_T[count:] = np.arange(count), 0
        self._positions_T[count:] = self._sources_T[count:] = -1
        self._tokens_T[count:] = self._starts_T[count:] = 0
        self.ngrams_TN.numpy()[count:] = -1
        self._slots_T[:count] = [row.running.lease.slot for row in rows]
        self._clips_T[:count] = [window_start(row.running, self._keep) for row in rows]
        for number, (running, width) in enumerate(seats):
            if number >= len(self._seats) or seats[number] != self._seats[number]:
                self._tables_TP[number, :width] = running.lease.block_table
        self._seats = seats

    def _look_back(self, rows: Sequence[Row]) -> None:
        """n-grams after their first id, which may not be known yet; as model/batch.py's."""
        size = self._ngram - 1
        before_RN = np.full((len(rows), size), -1, np.int64)
        for number, row in enumerate(rows):
            ids = row.running.token_ids[max(0, row.position - size) : row.position]
            before_RN[number, : len(ids)] = ids[::-1]
        dead_RN = np.logical_or.accumulate(before_RN == self._image_token_id, axis=1)
        before_RN[dead_RN] = -1
        self.ngrams_TN.numpy()[: len(rows), 1:] = before_RN


def _laid_out(buffer: Tensor, shape: Shape, ngram: int) -> StepRows:
    integers = buffer[shape.rows : shape.rows + buffer_size(shape, ngram)]
    return StepRows(buffer[: shape.rows], rows_in(integers, shape, ngram))
