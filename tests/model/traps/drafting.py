"""Traps in the drafter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops.sparse_attention import sparse_attention
from model.attention import Attention
from model.block import Block, Residual
from model.drafter import Drafter, Drafts
from model.moe import MixtureOfExperts
from model.rows import Ints, Rows
from tests.model.cases import BY_NAME
from tests.model.running import build, float64
from tests.model.traps.registry import trap

SPEC = BY_NAME["micro"].spec
PADDED_BLOCK = 8  # rows of one draft block


@trap("micro")
def drafts_are_routed_with_the_image_bias(patch: pytest.MonkeyPatch) -> None:
    right = MixtureOfExperts.__call__

    def wrong(self: MixtureOfExperts, x: Tensor, count: int, images: Tensor | None) -> Tensor:
        drafting = count == SPEC.dspark_block_size
        return right(self, x, count, torch.ones(len(x), dtype=torch.bool) if drafting else images)

    patch.setattr(MixtureOfExperts, "__call__", wrong)


@trap("micro")
def the_context_passes_the_attention_norm(patch: pytest.MonkeyPatch) -> None:
    right = Attention.window_kv

    def wrong(self: Attention, x: Tensor, turns: Tensor) -> Tensor:
        stage = next(stage for stage in _drafter()._stages if stage.attention is self)
        return right(self, stage._attention_norm(x), turns)

    patch.setattr(Attention, "window_kv", wrong)


@trap("micro")
def the_anchor_stands_one_position_early(patch: pytest.MonkeyPatch) -> None:
    right = Drafter.__call__

    def wrong(self: Drafter, anchors: Tensor, lengths: Ints, *rest: Any) -> Drafts:
        return right(self, anchors, lengths - 1, *rest)

    patch.setattr(Drafter, "__call__", wrong)


@trap("micro")
def the_block_is_causal(patch: pytest.MonkeyPatch) -> None:

    def wrong(
        q: Tensor, ring: Tensor, mask: Tensor, sink: Tensor, block: Tensor, seen: Tensor
    ) -> Tensor:
        place = torch.arange(len(seen)).remainder(seen.shape[2]).view(-1, 1, 1)
        later = torch.arange(seen.shape[2]) > place
        return sparse_attention(q, ring, mask, sink, block, seen.masked_fill(later, -torch.inf))

    patch.setattr("model.drafter.sparse_attention", wrong)


@trap("micro")
def the_window_shifts_with_each_row(patch: pytest.MonkeyPatch) -> None:

    def wrong(q: Tensor, ring: Tensor, mask: Tensor, *rest: Tensor) -> Tensor:
        place = torch.arange(len(q)).remainder(SPEC.dspark_block_size).view(-1, 1, 1)
        gone = torch.arange(ring.shape[1]) <= place
        return sparse_attention(q, ring, mask.masked_fill(gone, -torch.inf), *rest)

    patch.setattr("model.drafter.sparse_attention", wrong)


@trap("micro")
def taps_are_taken_after_their_layers(patch: pytest.MonkeyPatch) -> None:
    close, observe = Block.close, Drafter.observe
    after: list[Tensor] = []

    def remember(self: Block, *arguments: Any) -> Residual:
        residual = close(self, *arguments)
        after.append(residual.streams_TnD)
        return residual

    def wrong(self: Drafter, taps: Tensor, rows: Rows, cache: Any) -> None:
        late = after[-len(SPEC.dspark_target_layer_ids) :]
        observe(self, torch.cat([self.tap(streams, rows) for streams in late], 1), rows, cache)

    patch.setattr(Block, "close", remember)
    patch.setattr(Drafter, "observe", wrong)


@trap("micro")
def confidence_sees_the_markov_embedding_first(patch: pytest.MonkeyPatch) -> None:
    drafter, size = _drafter(), SPEC.hidden_size
    turned = torch.cat([drafter._confidence[size:], drafter._confidence[:size]])
    patch.setattr(drafter, "_confidence", turned)


@trap("micro")
def confidence_sees_the_normed_state(patch: pytest.MonkeyPatch) -> None:
    drafter = _drafter()
    right = drafter._guess

    def wrong(x: Tensor, anchors: Tensor, choose: Any) -> Drafts:
        normed = right(drafter._norm(x), anchors, choose)
        return replace(right(x, anchors, choose), confidence=normed.confidence)

    patch.setattr(drafter, "_guess", wrong)


@trap("micro")
def the_markov_term_looks_at_the_anchor_only(patch: pytest.MonkeyPatch) -> None:
    drafter = _drafter()
    right = drafter._guess
    patch.setattr(
        drafter, "_guess", lambda x, anchors, choose: right(x, anchors, lambda *_: anchors)
    )


def _drafter() -> Drafter:
    with float64():
        return build(BY_NAME["micro"])._drafter
