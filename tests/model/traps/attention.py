"""Traps in attention, compressed rows, the indexer and prefill truncation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops.rope import rope, rotations
from kernels.ops.sparse_attention import sparse_attention
from kernels.ops.top_rows import top_rows
from model.cache import Cache
from model.compressor import Compressor, Groups
from model.indexer import Indexer
from model.layer import Layer
from model.norm import RMSNorm
from model.rows import Rows
from model.step import Step
from model.window import Window
from tests.model.cases import BY_NAME
from tests.model.traps.registry import trap


@trap("micro")
def outputs_keep_their_rotation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("model.attention.rope", lambda x, turns: x if turns.is_conj() else rope(x, turns))


@trap("micro")
def all_layers_rotate_by_one_base(patch: pytest.MonkeyPatch) -> None:
    right = Rows.turns
    patch.setattr(Rows, "turns", lambda self, ratio: right(self, 0))


@trap("micro")
def index_keys_are_made_of_rotated_latents(patch: pytest.MonkeyPatch) -> None:
    right, norm = Groups.of, RMSNorm.__call__
    turns: list[Tensor] = []

    def remember(rows: Rows, ratio: int) -> Groups:
        groups = right(rows, ratio)
        turns.append(groups.turns_N1P)
        return groups

    def wrong(self: RMSNorm, x: Tensor) -> Tensor:
        normed = norm(self, x)
        if turns and normed.shape == (len(turns[-1]), BY_NAME["micro"].spec.head_dim):
            return rope(normed.unsqueeze(1), turns[-1]).squeeze(1)
        return normed

    patch.setattr(Groups, "of", remember)
    patch.setattr(RMSNorm, "__call__", wrong)


@trap("micro")
def a_compressed_row_stands_at_its_last_position(patch: pytest.MonkeyPatch) -> None:
    right = Groups.of

    def wrong(rows: Rows, ratio: int) -> Groups:
        groups = right(rows, ratio)
        positions_T = torch.from_numpy(rows.positions_T)
        turns = rotations(positions_T[groups.last_N], rows.frequencies[True])
        return replace(groups, turns_N1P=turns)

    patch.setattr(Groups, "of", wrong)


@trap("micro")
def the_pair_is_averaged(patch: pytest.MonkeyPatch) -> None:
    def wrong(first: Tensor, first_gate: Tensor, second: Tensor, gate: Tensor) -> Tensor:
        return (first + second) / 2

    patch.setattr("model.compressor.compress", wrong)


@trap("micro")
def cached_rows_are_not_rounded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("model.layer.fake_quant", lambda values, row_format: values)


@trap("narrow")
def index_queries_are_not_rounded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("model.indexer.fake_quant", lambda values, row_format: values)


@trap("narrow")
def ties_go_to_the_higher_row(patch: pytest.MonkeyPatch) -> None:

    def wrong(scores: Tensor, count: int) -> Tensor:
        last = scores.shape[-1] - 1
        rows = top_rows(scores.flip(-1), count)
        turned = torch.where(rows < 0, last + 1, last - rows).sort(dim=-1).values
        return turned.masked_fill(turned > last, -1)

    patch.setattr("model.indexer.top_rows", wrong)


@trap("micro")
def absent_rows_are_attended_to(patch: pytest.MonkeyPatch) -> None:

    def wrong(q: Tensor, window: Tensor, mask: Tensor, sink: Tensor, *selected: Tensor) -> Tensor:
        seen = (selected[0], torch.zeros_like(selected[1])) if selected else ()
        return sparse_attention(q, window, mask, sink, *seen)

    patch.setattr("model.layer.sparse_attention", wrong)


@trap("micro")
def the_sink_takes_no_weight(patch: pytest.MonkeyPatch) -> None:

    def wrong(q: Tensor, window: Tensor, mask: Tensor, sink: Tensor, *selected: Tensor) -> Tensor:
        return sparse_attention(q, window, mask, sink - 1e9, *selected)

    patch.setattr("model.layer.sparse_attention", wrong)


@trap("narrow")
def candidates_do_not_narrow_later_layers(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Indexer, scores: Tensor, group: Any) -> Tensor:
        return torch.ones_like(scores, dtype=torch.bool)

    patch.setattr(Indexer, "_candidates", wrong)


@trap("narrow")
def the_newest_block_is_no_candidate_by_right(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tensor, "scatter", lambda self, *arguments: self)


@trap("narrow")
def the_candidate_source_itself_is_narrowed(patch: pytest.MonkeyPatch) -> None:
    right = Indexer._candidates

    def wrong(self: Indexer, scores: Tensor, group: Any) -> Tensor:
        candidates = right(self, scores, group)
        scores.masked_fill_(~candidates, -torch.inf)
        return candidates

    patch.setattr(Indexer, "_candidates", wrong)


@trap("micro")
def later_layers_share_the_cut_layers_window(patch: pytest.MonkeyPatch) -> None:
    """A variant in the field projects them all from the cut layer's input."""
    right, cut = Layer._look_back, BY_NAME["micro"].spec.cut_layer
    inputs: list[Tensor] = []

    def wrong(self: Layer, x: Tensor, step: Step) -> Any:
        if self._layer == cut:
            inputs.append(x)
        low = self._block.attention.project(x, step.rows.turns(self._ratio)).low_TL
        _, keys, mask = right(self, inputs[-1] if self._layer > cut else x, step)
        return low, keys, mask

    patch.setattr(Layer, "_look_back", wrong)


@trap("compact")
def rows_leave_before_the_compressor_saw_them(patch: pytest.MonkeyPatch) -> None:
    right = Compressor.__call__

    def wrong(self: Compressor, x: Tensor, rows: Rows, cache: Cache) -> None:
        if self._ratio == 1:
            rows, index = rows.select(rows.above_clip)
            x = x[index]
        right(self, x, rows, cache)

    patch.setattr(Compressor, "__call__", wrong)


@trap("compact_full")
def the_cut_layer_is_clipped_where_it_should_see_all(patch: pytest.MonkeyPatch) -> None:
    right = Window.of
    patch.setattr(Window, "of", lambda rows, size, clipped: right(rows, size, rows.any_clip))


@trap("compact")
def later_layers_see_below_the_window_start(patch: pytest.MonkeyPatch) -> None:
    right = Window.of

    def wrong(rows: Rows, size: int, clipped: bool) -> Window:
        return right(replace(rows, floors_R=0 * rows.floors_R), size, False)

    patch.setattr(Window, "of", wrong)
