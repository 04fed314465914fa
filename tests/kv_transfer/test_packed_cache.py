"""The packed cache gives back what the dense one does, out of memory full of old bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.formats import fake_quant
from kv_transfer.packed_cache import PackedCache
from model.dense_cache import DenseCache
from model.state import PerToken, StateField
from tests.kv_transfer.stores import FIELDS, TINY, Store

LENGTHS = (61, 17, 48)


def pair(
    fields: tuple[StateField, ...], lengths: tuple[int, ...] = LENGTHS, slack: int = 2
) -> tuple[PackedCache, DenseCache]:
    store = Store(fields, ring_slack=slack, length=max(lengths), sequences=len(lengths))
    leases = [store.lease(length) for length in lengths]
    return PackedCache(store.slab, leases), DenseCache(fields, len(lengths))


def chunk(starts: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
    """Requests and positions of one forward's rows."""
    requests = [number for number, count in enumerate(counts) for _ in range(count)]
    positions = [
        start + n for start, count in zip(starts, counts, strict=True) for n in range(count)
    ]
    return torch.tensor(requests, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.integers(1, 25), min_size=1, max_size=4))
def test_equals_the_dense_cache_after_any_chunks(
    fields: tuple[StateField, ...], seed: int, steps: list[int]
) -> None:
    packed, dense = pair(fields)
    generator = torch.Generator().manual_seed(seed)
    done = [0, 0, 0]
    for step in steps:
        ends = [min(length, before + step) for before, length in zip(done, LENGTHS, strict=True)]
        counts = [end - before for end, before in zip(ends, done, strict=True)]
        requests, positions = chunk(done, counts)
        done = ends
        for field in fields:
            rows = positions
            if isinstance(field.growth, PerToken):  # positions that complete no row write none
                whole = (positions + 1) % field.growth.ratio == 0
                rows = torch.where(whole, positions // field.growth.ratio, -1)
            for layer in field.layers[:2]:
                values = torch.randn(len(rows), field.dim, generator=generator)
                packed.write(field.name, layer, requests, rows, values)
                dense.write(field.name, layer, requests, rows, values)
    for field in fields:
        rows = torch.full((3, 64), -1)
        for number, length in enumerate(done):
            kept = field.growth.rows(length)
            rows[number, : len(kept)] = torch.tensor(kept, dtype=torch.int64)
        rows = rows[:, torch.randperm(64, generator=generator)]
        requests = torch.arange(3).unsqueeze(1).expand(3, 64)
        for layer in field.layers[:2]:
            found = packed.read(field.name, layer, requests, rows)
            expected = dense.read(field.name, layer, requests, rows)
            assert found.shape == (3, 64, field.dim)
            assert torch.equal(found, expected), field.name


def test_many_queries_of_the_same_rows_read_the_same_as_each_alone() -> None:
    packed, dense = pair(TINY, (61,))
    values = torch.randn(61, 128)
    rows = torch.arange(61)
    for cache in (packed, dense):
        cache.write("compressed_r1", 5, torch.zeros_like(rows), rows, values)
    asked = torch.arange(61).unsqueeze(1) - torch.arange(40)  # each and the 39 before it
    requests = torch.zeros_like(asked)
    found = packed.read("compressed_r1", 5, requests, asked)
    assert torch.equal(found, dense.read("compressed_r1", 5, requests, asked))


def test_negative_rows_are_skipped_and_read_as_zeros() -> None:
    packed, _ = pair(TINY)
    rows = torch.tensor([-1, 4, -1])
    requests = torch.tensor([0, 1, 2])
    values = torch.randn(3, 128)
    packed.write("compressed_r2", 2, requests, rows, values)
    found = packed.read("compressed_r2", 2, requests, rows)
    assert torch.equal(found[1], fake_quant(values[1:2], "fp4_e4m3")[0])
    assert torch.equal(found[[0, 2]], torch.zeros(2, 128))
    nothing = torch.empty(0, dtype=torch.int64)
    packed.write("compressed_r2", 2, nothing, nothing, torch.empty(0, 128))
    assert packed.read("compressed_r2", 2, nothing, nothing).shape == (0, 128)


def test_of_a_chunk_longer_than_the_ring_the_last_rows_stay() -> None:
    packed, dense = pair(TINY, (61, 40), slack=0)
    requests, positions = chunk([0, 0], [61, 40])
    values = torch.randn(101, 128)
    for cache in (packed, dense):
        cache.write("window", 3, requests, positions, values)
    for number, length in enumerate((61, 40)):
        kept = torch.arange(length - 16, length)
        wanted = torch.full_like(kept, number)
        found = packed.read("window", 3, wanted, kept)
        assert torch.equal(found, dense.read("window", 3, wanted, kept))


def test_of_several_open_pairs_the_last_stays() -> None:
    packed, _ = pair(TINY, (9,), slack=0)
    even = torch.tensor([0, 2, 4, 6, 8])
    values = torch.randn(5, 256)
    packed.write("tail", 4, torch.zeros_like(even), even, values)
    found = packed.read("tail", 4, torch.tensor([0]), torch.tensor([8]))
    assert torch.equal(found[0], values[4])


def test_a_row_beyond_its_lease_is_never_another_requests() -> None:
    packed, _ = pair(TINY)
    beyond = torch.tensor([40])  # the lease of 17 positions has two blocks of 16
    with pytest.raises(IndexError):
        packed.read("compressed_r1", 5, torch.tensor([1]), beyond)
    with pytest.raises(IndexError):
        packed.write("compressed_r1", 5, torch.tensor([1]), beyond, torch.zeros(1, 128))
