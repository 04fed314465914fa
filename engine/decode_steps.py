"""Steps of decode rows: a row a request, tokens chosen on the device, nothing waited for.

A step's tokens stay on the device too, so that the next one can be begun before they are known on
the host. Knows not when that is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from engine.cuda_graphs import CudaCapture
from engine.decode_buffer import DecodeBuffer, Row
from engine.decode_shapes import DecodeShapes
from engine.device_copies import Arriving, to_device
from engine.graphs import Graphs, Launches, Player
from engine.packed_runner import PackedModel
from engine.sampler import UNSOUND, Draw, best_tokens, draw
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.slab import Slab
from kv_transfer.state_view import view_of
from model.packed.rows import Shape

# T = rows of a shape, R = those of a step, V = vocabulary


class Flight(Protocol):
    """A step that has been begun."""

    @property
    def rows(self) -> Sequence[Row]: ...

    @property
    def logits_RV(self) -> Tensor:
        """float32; only until the next step is begun."""
        ...

    def tokens(self) -> Sequence[int]:
        """One for each row, or UNSOUND; waits until they are there, and so is all that the step
        reads and writes."""
        ...


class Decoder(Protocol):
    """Begins decode steps. Used in the engine's thread only."""

    @property
    def may_run_ahead(self) -> bool:
        """Whether rows may have a source."""
        ...

    def launch(self, rows: Sequence[Row]) -> Flight:
        """Begins a step. A row's `source` is one of the step begun last."""
        ...


@dataclass(frozen=True)
class Launched:
    """engine.decode_steps.Flight"""

    rows: Sequence[Row]
    logits_RV: Tensor
    arriving: Arriving

    def tokens(self) -> Sequence[int]:
        return self._tokens

    @cached_property
    def _tokens(self) -> list[int]:
        found: list[int] = self.arriving.wait().tolist()
        return found


class DecodeSteps:
    """By graphs on a GPU, launch by launch elsewhere."""

    def __init__(
        self,
        model: PackedModel,
        slab: Slab | DeviceSlab,
        shapes: DecodeShapes,
        *,
        name: str,
        spelled_ids: int | None = None,
        keep: int = 0,
        graphs: bool = True,
        run_ahead: bool = True,
    ) -> None:
        """Ids from `spelled_ids` on are padding of the vocabulary. `keep` as in StepBatches.
        `graphs` and `run_ahead`: if the device has them, and the model allows it."""
        self._model, self._shapes, self._spelled_ids = model, shapes, spelled_ids
        self._run_ahead = run_ahead and model.looks_up_on_device
        self._state = view_of(slab)
        spec, device = model.spec, model.device
        largest = shapes.of(shapes.max_rows, shapes.max_blocks)
        self._buffer = DecodeBuffer(largest, spec, device, keep)
        self._logits_TV = torch.zeros(largest.rows, spec.vocab_size, device=device)
        self._tokens_T = torch.zeros(largest.rows, dtype=torch.int64, device=device)
        self._engram: dict[int, Tensor] | None = None
        if not model.looks_up_on_device:
            self._engram = {
                layer: one.new_zeros(largest.rows, one.shape[1], device=device)
                for layer, one in model.host_engram(
                    torch.zeros(1, spec.engram_max_ngram_size, dtype=torch.int64)
                ).items()
            }
        self.player: Player
        if graphs and device.type == "cuda":
            capture = CudaCapture(self._step, self._rehearsal, device)
            self.player = Graphs(self._step, capture, name)
        else:
            self.player = Launches(self._step)

    @property
    def may_run_ahead(self) -> bool:
        return self._run_ahead

    @torch.inference_mode()
    def prepare(self, blocks: int) -> None:
        """What steps need, made before the first comes: of requests with up to so many blocks."""
        self.player.prepare(self._shapes.common(blocks))

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row]) -> Launched:
        widest = max(len(row.running.lease.block_table) for row in rows)
        shape = self.player.choose(self._shapes.of(len(rows), widest))
        ngrams_TN = self._buffer.fill(rows, shape)
        if self._engram is not None:
            self._look_up(ngrams_TN, self._engram)
        self.player.play(shape)
        self._draw(rows)
        count = len(rows)
        return Launched(rows, self._logits_TV[:count], Arriving(self._tokens_T[:count]))

    def _step(self, shape: Shape) -> None:
        """All that a graph holds: from the integers in the buffer to logits and best tokens."""
        given = self._buffer.on_device(shape)
        source_T = given.sources_T
        # of an unsound source any token will do: its request ends
        made_T = self._tokens_T[source_T.clamp(min=0)].clamp(min=0)
        ids_T = torch.where(source_T < 0, given.rows.token_ids_T, made_T)
        rows = replace(
            given.rows,
            token_ids_T=ids_T,
            ngrams_TN=torch.cat([ids_T.unsqueeze(1), given.rows.ngrams_TN[:, 1:]], 1),
            engram=self._engram_of(shape),
        )
        logits_TV = self._model.forward(rows, shape, self._state)
        self._logits_TV[: shape.rows].copy_(logits_TV)
        self._tokens_T[: shape.rows].copy_(best_tokens(logits_TV, self._spelled_ids))

    def _engram_of(self, shape: Shape) -> dict[int, Tensor] | None:
        if self._engram is None:
            return None
        return {layer: one[: shape.rows] for layer, one in self._engram.items()}

    def _look_up(self, ngrams_TN: Tensor, tables: dict[int, Tensor]) -> None:
        for layer, values in self._model.host_engram(ngrams_TN).items():
            tables[layer][: len(values)].copy_(values)

    def _draw(self, rows: Sequence[Row]) -> None:
        """Tokens of rows that do not take the best, in its place."""
        drawn = [number for number, row in enumerate(rows) if row.draw is not None]
        if not drawn:
            return
        draws = [
            Draw(sampling, rows[number].position + 1)
            for number in drawn
            if (sampling := rows[number].draw) is not None
        ]
        tokens_S = draw(self._logits_TV[: len(rows)], drawn, draws, self._spelled_ids)
        at_S = to_device(drawn, torch.int64, self._tokens_T.device)
        tokens_S = tokens_S.masked_fill(self._tokens_T[at_S] == UNSOUND, UNSOUND)
        self._tokens_T.index_copy_(0, at_S, tokens_S)

    @contextmanager
    def _rehearsal(self, shape: Shape) -> Iterator[None]:
        """Rows of padding; the tokens of the step begun last are kept for the next."""
        kept_T = self._tokens_T.clone()
        self._buffer.fill_padding(shape)
        try:
            yield
        finally:
            self._tokens_T.copy_(kept_T)
