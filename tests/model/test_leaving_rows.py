"""Rows that nothing depends on leave at the cut layer, and not a bit changes by it.

Where logits of all rows are wanted none may leave; that is what the others are compared with.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from model.batch import Chunk, build_batch
from model.drafter import Drafts
from model.spec import ModelSpec
from model.state import DRAFT_WINDOW, WINDOW
from tests.model.cases import BY_NAME, NARROW, Case
from tests.model.running import PackedRows, build

LENGTH = 150
LONG = {name: Case(name, length=LENGTH, seed=3).prompt for name in ("micro", "narrow")}


class Ran(NamedTuple):
    logits: Tensor  # of the last row
    draft: Drafts
    pieces: dict[str, bytes]


def run(name: str, sizes: tuple[int, ...], logits: Literal["last", "all"]) -> Ran:
    """On a cache that refuses to read what nobody wrote."""
    model, start = build(BY_NAME[name]), 0
    spec = model.spec
    cache = PackedRows(spec, ring=spec.sliding_window + spec.dspark_block_size)
    with torch.inference_mode():
        for size in sizes:
            chunk = Chunk(LONG[name], start, size, logits=logits)
            batch = build_batch([chunk], image_token_id=spec.image_token_id, ngram=4)
            found = model.forward(batch, cache)[-1]
            start += size
        draft = model.draft([5], [LENGTH], cache)
    return Ran(found, draft, cache.pieces(LENGTH))


@pytest.mark.parametrize("sizes", [(LENGTH,), (100, 50), (1, 90, 58, 1)], ids=str)
@pytest.mark.parametrize("name", LONG)
def test_logits_drafts_and_state_are_the_same_without_them(
    name: str, sizes: tuple[int, ...]
) -> None:
    everywhere = run(name, sizes, "all")
    some_left = run(name, sizes, "last")
    assert torch.equal(some_left.logits, everywhere.logits)
    assert torch.equal(some_left.draft.logits, everywhere.draft.logits)
    assert torch.equal(some_left.draft.confidence, everywhere.draft.confidence)
    assert some_left.pieces == everywhere.pieces


@pytest.mark.parametrize("logits", ["last", "none"])
def test_most_rows_of_a_long_chunk_leave(logits: Literal["last", "none"]) -> None:
    spec = Case("narrow", NARROW).spec
    cache = PackedRows(spec)
    model = build(BY_NAME["narrow"])
    chunk = Chunk(LONG["narrow"], 0, LENGTH, logits=logits)
    batch = build_batch([chunk], image_token_id=spec.image_token_id, ngram=4)
    seen: list[int] = []
    experts = model._layers[-1]._block._experts

    def counting(x: Tensor, count: int, images: Tensor | None) -> Tensor:
        seen.append(count)
        return experts(x, count, images)

    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model._layers[-1]._block, "_experts", counting)
        model.forward(batch, cache)
    assert seen == [needed(spec)]
    newest = list(range(LENGTH - spec.sliding_window - spec.dspark_block_size, LENGTH))
    assert sorted(cache.rows[WINDOW, spec.num_hidden_layers - 1]) == newest
    assert sorted(cache.rows[DRAFT_WINDOW, 0]) == newest
    assert sorted(cache.rows["compressed_r1", spec.cut_layer]) == list(range(LENGTH))


def needed(spec: ModelSpec) -> int:
    """Window, room to take a draft back, and the reach of the layers in between."""
    between = spec.num_hidden_layers - spec.cut_layer - 2
    return spec.sliding_window + spec.dspark_block_size + between * (spec.sliding_window - 1)
