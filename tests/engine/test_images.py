"""What running prompts show: encoded once, cut into chunks, kept no longer than needed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.config import parse_config
from engine.images import ImageRows, Shown
from engine.memory_plan import plan_memory
from engine.request import Running
from engine.schedule import Grant
from kv_transfer.blocks import BlockPool
from model.spec import ModelSpec
from tests.pictures import IMAGE, MODELS, file, picture_request

SMALL, LARGE = file(84, 84), file(126, 84)  # 8 and 10 positions
PROMPT = [7, IMAGE, 8, IMAGE, 9]  # positions 1 .. 8 and 10 .. 19 of 21 show them


class Encoder:
    """A position's row is (height, its place in the image); counts the images it is given."""

    def __init__(self) -> None:
        self.count = 0
        self.made: weakref.ref[Tensor] | None = None

    def __call__(self, pixels: Tensor) -> Tensor:
        self.count += 1
        height, width, _ = pixels.shape
        positions = height // 42 * (width // 42 + 1) + 2
        rows = torch.stack([torch.full((positions,), height), torch.arange(positions)], 1).float()
        self.made = weakref.ref(rows)
        return rows


def started() -> Running:
    request = picture_request(PROMPT, SMALL, LARGE)
    lease = BlockPool(num_blocks=8, num_slots=1, block_tokens=16).lease(request.longest)
    return Running(request, lease, request.token_ids)


def whole(encoder: Encoder) -> Shown:
    return ImageRows(encoder).of(started(), Grant(0, 0, 21, True))


def test_each_position_of_an_image_has_its_own_row_and_text_has_none() -> None:
    encoder = Encoder()
    shown = whole(encoder)
    assert encoder.count == 2
    assert shown.positions == {*range(1, 9), *range(10, 20)}
    assert shown.embeddings is not None
    assert shown.embeddings[1:9, 1].tolist() == list(range(8))
    assert shown.embeddings[10:20, 1].tolist() == list(range(10))
    assert not shown.embeddings[[0, 9, 20]].any()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9, 20])
def test_chunks_of_any_size_show_the_same_and_encode_each_image_once(size: int) -> None:
    encoder, running = Encoder(), started()
    length = len(running.token_ids)
    rows, parts, positions = ImageRows(encoder), [], set[int]()
    for start in range(0, length, size):
        count = min(size, length - start)
        shown = rows.of(running, Grant(0, start, count, start + count == length))
        positions |= shown.positions
        parts.append(torch.zeros(count, 2) if shown.embeddings is None else shown.embeddings)
    assert encoder.count == 2
    wanted = ImageRows(Encoder()).of(running, Grant(0, 0, length, True))
    assert positions == wanted.positions
    assert wanted.embeddings is not None
    assert torch.equal(torch.cat(parts), wanted.embeddings)


def test_rows_are_dropped_with_the_chunk_that_has_the_last_of_them() -> None:
    encoder, running = Encoder(), started()
    rows = ImageRows(encoder)
    rows.of(running, Grant(0, 0, 5, False))
    assert encoder.made is not None
    assert encoder.made() is not None
    rows.of(running, Grant(0, 5, 4, False))
    gc.collect()
    assert encoder.made() is None


def test_rows_are_dropped_with_a_request_that_leaves_in_mid_image() -> None:
    encoder, running = Encoder(), started()
    rows = ImageRows(encoder)
    rows.of(running, Grant(0, 0, 5, False))
    del running
    gc.collect()
    assert encoder.made is not None
    assert encoder.made() is None


def test_a_request_that_starts_again_shows_the_same() -> None:
    encoder, running = Encoder(), started()
    rows = ImageRows(encoder)
    rows.of(running, Grant(0, 0, 12, False))
    again = rows.of(running, Grant(0, 0, len(running.token_ids), True))
    wanted = ImageRows(Encoder()).of(running, Grant(0, 0, len(running.token_ids), True))
    assert again.embeddings is not None
    assert wanted.embeddings is not None
    assert torch.equal(again.embeddings, wanted.embeddings)


def test_a_false_key_is_found_before_any_block_goes_by_it() -> None:
    request = picture_request([IMAGE], SMALL)
    forged = request.images[0].model_copy(update={"key": bytes(16)})
    lease = BlockPool(num_blocks=8, num_slots=1, block_tokens=16).lease(request.longest)
    running = Running(request.model_copy(update={"images": (forged,)}), lease, request.token_ids)
    with pytest.raises(ValueError, match="position 0 has the key of another"):
        ImageRows(Encoder()).of(running, Grant(0, 0, 8, True))


def test_text_needs_no_encoder() -> None:
    request = picture_request([5, 6, 7])
    lease = BlockPool(num_blocks=8, num_slots=1, block_tokens=16).lease(request.longest)
    running = Running(request, lease, request.token_ids)
    assert ImageRows(None).of(running, Grant(0, 0, 3, True)) == (None, frozenset())


def test_memory_is_planned_for_the_encoder_where_it_is_loaded() -> None:
    spec = ModelSpec.load(MODELS / "deepseek-v41-flash")

    def weights(**pools: Any) -> list[int]:
        plans = plan_memory(parse_config(pools), spec, length=1024)
        return [plan.weights.get("weights: vision", 0) for plan in plans]

    encoder = 4 * 485_268_480  # parameters, computed with in float32
    assert weights() == [encoder, 0]
    assert weights(prefill={"vision": False}, decode={"vision": True}) == [0, encoder]
