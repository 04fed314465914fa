"""State on a device holds the same rows as state on the host, under the same names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.messages import Span
from kernels.formats import fake_quant
from kv_transfer.blocks import BlockPool, Lease
from kv_transfer.device_cache import DeviceCache
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.layout import Layout
from model.dense_cache import DenseCache
from model.state import PerToken, StateField
from tests.kv_transfer.stores import FIELDS, TINY, Store, needed, random_rows

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
LENGTHS = (61, 17, 48)
everywhere = pytest.mark.parametrize("device", DEVICES, ids=str)


def state_on(
    device: torch.device, fields: tuple[StateField, ...] = TINY, slack: int = 2
) -> tuple[DeviceSlab, list[Lease]]:
    pool = BlockPool(16, 4, 16)
    slab = DeviceSlab(Layout(fields, 16, slack), 16, 4, device)
    pool.lease(20)  # so that nobody's blocks begin at the first
    return slab, [pool.lease(length) for length in LENGTHS]


@everywhere
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_rows_come_back_as_they_went_in(
    fields: tuple[StateField, ...], device: torch.device
) -> None:
    slab, leases = state_on(device, fields)
    written = [random_rows(fields, length, seed) for seed, length in enumerate(LENGTHS)]
    for lease, rows, length in zip(leases, written, LENGTHS, strict=True):
        for span in needed(fields, length):
            slab.write_rows(span, lease, rows[span.field, span.layer])
    for lease, rows, length in zip(leases, written, LENGTHS, strict=True):
        for span in needed(fields, length):
            assert torch.equal(slab.read_rows(span, lease), rows[span.field, span.layer])


@everywhere
def test_records_are_the_same_bytes_as_on_the_host(device: torch.device) -> None:
    host = Store(TINY, ring_slack=2, length=61, sequences=4)
    host.slab.blocks.zero_()
    host.slab.slots.zero_()
    slab, leases = state_on(device)
    rows = random_rows(TINY, 61, seed=5)
    for span in needed(TINY, 61):
        slab.write_rows(span, leases[0], rows[span.field, span.layer])
        host.slab.write_rows(span, leases[0], rows[span.field, span.layer])
    assert torch.equal(slab.blocks[:-2].cpu(), host.slab.blocks)
    assert torch.equal(slab.slots[:-2].cpu(), host.slab.slots)


@everywhere
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.integers(1, 25), min_size=1, max_size=4))
def test_equals_the_dense_cache_after_any_chunks(
    fields: tuple[StateField, ...], device: torch.device, seed: int, steps: list[int]
) -> None:
    slab, leases = state_on(device, fields)
    packed, dense = DeviceCache(slab, leases), DenseCache(fields, len(LENGTHS))
    generator = torch.Generator().manual_seed(seed)
    done = [0, 0, 0]
    for step in steps:
        ends = [min(length, before + step) for before, length in zip(done, LENGTHS, strict=True)]
        spans = [range(before, end) for before, end in zip(done, ends, strict=True)]
        requests = torch.tensor([r for r, span in enumerate(spans) for _ in span])
        positions = torch.tensor([position for span in spans for position in span])
        done = ends
        if not len(positions):
            continue
        for field in fields:
            rows = positions
            if isinstance(field.growth, PerToken):  # positions that complete no row write none
                whole = (positions + 1) % field.growth.ratio == 0
                rows = torch.where(whole, positions // field.growth.ratio, -1)
            for layer in field.layers[:2]:
                values = torch.randn(len(rows), field.dim, generator=generator)
                packed.write(field.name, layer, requests, rows, values.to(device))
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
            assert torch.equal(found.cpu(), dense.read(field.name, layer, requests, rows))


@everywhere
def test_of_a_chunk_longer_than_the_ring_the_last_rows_stay(device: torch.device) -> None:
    slab, leases = state_on(device, slack=0)
    cache = DeviceCache(slab, leases)
    values = torch.randn(61, 128)
    rows = torch.arange(61)
    cache.write("window", 3, torch.zeros_like(rows), rows, values.to(device))
    kept = torch.arange(45, 61)
    found = cache.read("window", 3, torch.zeros_like(kept), kept)
    assert torch.equal(found.cpu(), fake_quant(values[45:], "fp8"))


@everywhere
def test_what_no_lease_covers_reads_as_no_number_and_is_written_nowhere(
    device: torch.device,
) -> None:
    slab, leases = state_on(device)
    cache = DeviceCache(slab, leases)
    before = slab.blocks.clone()
    beyond = torch.tensor([40, 4000, -1])  # the lease of 17 positions has two blocks of 16
    owner = torch.tensor([1, 1, 1])
    cache.write("compressed_r1", 5, owner, beyond, torch.randn(3, 128).to(device))
    assert torch.equal(slab.blocks[:-1], before[:-1])  # the last record takes what is skipped
    found = cache.read("compressed_r1", 5, owner, beyond).cpu()
    assert bool(found[:2].isnan().all())
    assert torch.equal(found[2], torch.zeros(128))


@everywhere
def test_spans_outside_a_lease_and_rows_of_the_wrong_shape_are_refused(
    device: torch.device,
) -> None:
    slab, leases = state_on(device)
    with pytest.raises(ValueError, match="are not among"):
        slab.read_rows(Span(field="compressed_r1", layer=5, start=10, stop=18), leases[1])
    with pytest.raises(ValueError, match="are not the rows of"):
        slab.write_rows(
            Span(field="window", layer=0, start=0, stop=2), leases[0], torch.zeros(3, 132).byte()
        )
