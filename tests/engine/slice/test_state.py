"""Random request state is what a model could have written, and no two requests share a block."""

from __future__ import annotations

import pytest
import torch

from engine.slice.config import slice_spec
from engine.slice.state import SliceState
from kernels.formats import unpack

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def state() -> SliceState:
    spec = slice_spec(tiny=True)
    return SliceState.random(spec, CPU, requests=3, length=100, block_tokens=16)


def test_every_row_holds_numbers_of_unit_size(state: SliceState) -> None:
    for place in state.memory.layout.places.values():
        records = state.memory.blocks if place.in_blocks else state.memory.slots
        part = records[:, place.offset : place.offset + place.rows * place.row_bytes]
        packed = part.reshape(-1, place.row_bytes)
        values = unpack(packed, place.field.row_format, place.field.dim)
        assert values.square().mean(1).sqrt().sub(1).abs().max() < 0.6
        assert len(torch.unique(packed, dim=0)) == len(packed)


def test_requests_hold_blocks_of_their_own_in_no_order(state: SliceState) -> None:
    held = state.held(3, 100)
    blocks = [block for one in held for block in one.block_ids]
    assert sorted(blocks) == list(range(21))
    assert blocks != sorted(blocks)
    assert [one.slot for one in held] == [0, 1, 2]
    assert held[1].block_table.tolist() == list(held[1].block_ids)


def test_a_shorter_request_holds_fewer(state: SliceState) -> None:
    assert [len(one.block_ids) for one in state.held(2, 33)] == [3, 3]
