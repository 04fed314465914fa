"""The packed forward computes what the reference computes, and leaves the same bytes behind.

In float64, where only a mistake separates them: rounding to the formats of the state takes
the last bits away, so what is left is far below a step of any format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from model.packed import indexer
from model.packed.rows import Shape
from model.state import compressed, index_keys
from tests.model.cases import BY_NAME
from tests.model.packed.two_models import BLOCK_TOKENS, Pair
from tests.model.running import float64

EXACT = 1e-12
"""Of logits around 1; found: 2e-14."""


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64():
        yield


def furthest(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max()) if one.numel() else 0.0


def check_step(pair: Pair, sizes: Sequence[int], *, in_place: bool) -> None:
    batch, leases = pair.batch(sizes)
    pack = pair.pack_in_place if in_place else pair.pack
    assert furthest(pack(batch, leases), pair.refer(batch, leases)) < EXACT
    assert pair.same_state()
    pair.went_on(sizes)


CASES = ["narrow", "other_layers", "one_ratio", "fp8_wo_a", "images", "compact"]
# rows of each of two requests; a prompt has 40 to 48 tokens
CHUNKS = [(20, 0), (9, 7), (1, 13), (18, 28)]


@pytest.mark.parametrize("name", CASES)
def test_chunks_and_decode_steps_equal_the_reference(name: str) -> None:
    """Ragged chunks, decode rows beside them, then steps in place; odd and even positions."""
    pair = Pair(BY_NAME[name])
    pair.request(room=40)
    pair.request(shift=0 if pair.case.images else 3, room=40)
    for sizes in CHUNKS:
        check_step(pair, sizes, in_place=False)
    most = pair.slack + 1
    for sizes in ((1, 1), (most, 0), (3, 2), (1, 1)):
        check_step(pair, sizes, in_place=True)


@pytest.mark.parametrize("name", ["other_sizes", "compact_full", "mask", "short_keep", "image_ids"])
def test_a_whole_prompt_equals_the_reference(name: str) -> None:
    pair = Pair(BY_NAME[name])
    one = pair.request()
    check_step(pair, [one.case.length], in_place=False)
    check_step(pair, [1], in_place=True)


def test_a_request_goes_on_under_the_other_forward() -> None:
    """The packed forward reads what the reference wrote, and the other way round."""
    pair = Pair(BY_NAME["narrow"])
    pair.request(room=30)
    for turn, size in enumerate((19, 12, 3, 9, 1, 1, 4, 1)):
        batch, leases = pair.batch([size])
        expected = pair.refer(batch, leases)
        if turn % 2:
            found = pair.pack(batch, leases) if size > 4 else pair.pack_in_place(batch, leases)
        else:
            found = pair.refer(batch, leases, slab=1)
        assert furthest(found, expected) < EXACT
        pair.went_on([size])
    assert pair.same_state()


def test_rows_scored_in_pieces_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_SCORES", 400)  # a few rows at a time
    pair = Pair(BY_NAME["other_layers"])
    pair.request()
    pair.request(shift=5)
    check_step(pair, (40, 31), in_place=False)
    check_step(pair, (1, 1), in_place=True)


def test_padding_neither_changes_rows_nor_touches_memory() -> None:
    pair = Pair(BY_NAME["narrow"])
    pair.request()
    pair.request(shift=9)
    check_step(pair, (33, 18), in_place=False)
    batch, leases = pair.batch((1, 1))
    tight = pair.pack_in_place(batch, leases, Shape(2, 2, 4, in_place=True))
    before = [part.clone() for part in (pair.slabs[1].blocks, pair.slabs[1].slots)]
    loose = pair.pack_in_place(batch, leases, Shape(9, 5, 11, in_place=True))
    assert furthest(tight, loose) < EXACT
    assert torch.equal(before[0], pair.slabs[1].blocks)
    assert torch.equal(before[1], pair.slabs[1].slots)


def test_blocks_may_lie_anywhere() -> None:
    pair = Pair(BY_NAME["narrow"])
    with pair.pool.lease(30):
        between = pair.pool.lease(30)
    one = pair.request(room=40)
    steps = {after - before for before, after in pairwise(one.lease.block_ids)}
    assert steps != {1}, f"the blocks beside {between.block_ids} are neighbours"
    check_step(pair, (45,), in_place=False)
    check_step(pair, (1,), in_place=True)


def test_a_chunk_wholly_below_its_window_start_ends_at_the_cut() -> None:
    pair = Pair(BY_NAME["compact"])
    pair.request()
    batch, leases = pair.batch([20])
    assert pair.pack(batch, leases).shape == (0, pair.spec.vocab_size)
    pair.refer(batch, leases)
    assert pair.same_state()


def test_a_layers_rows_are_there_when_it_says_so() -> None:
    pair = Pair(BY_NAME["other_layers"])
    one = pair.request()
    told: dict[int, list[Tensor]] = {}

    def on_layer(layer: int) -> None:
        told[layer] = [rows.clone() for rows in of_layer(layer)]

    def of_layer(layer: int) -> list[Tensor]:
        ratio = pair.spec.compress_ratios[layer]
        found = []
        for name in (compressed(ratio), index_keys(ratio)):
            view = pair.view.field(name, layer)
            records = view.memory.view(-1, view.record_bytes)[list(one.lease.block_ids)]
            found.append(records[:, view.offset : view.offset + view.rows * view.row_bytes])
        return found

    pair.pack(*pair.batch([40]), on_layer=on_layer)
    assert tuple(told) == pair.spec.kv_source_layer_ids
    for layer, rows in told.items():
        assert all(map(torch.equal, rows, of_layer(layer)))
        assert rows[0][0].any()
    assert BLOCK_TOKENS < 40


def test_the_host_may_look_engram_up() -> None:
    pair = Pair(BY_NAME["images"])
    pair.request()
    batch, leases = pair.batch([30])
    own = pair.pack(batch, leases)
    assert pair.packed.looks_up_on_device
    values = pair.packed.host_engram(batch.ngrams_Tn)
    assert set(values) == set(pair.spec.engram_layer_ids)
    given = pair.pack(batch, leases, engram=values)
    assert torch.equal(own, given)
    nothing = {layer: torch.zeros_like(one) for layer, one in values.items()}
    assert furthest(pair.pack(batch, leases, engram=nothing), own) > 1e-3
