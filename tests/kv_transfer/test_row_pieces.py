"""Rows move by address between memories of different shape, and give the digests of digest.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cluster.messages import Span
from kernels.ops.kv_push import kv_push
from kernels.push_table import Pieces, row_formats, tabulate
from kv_transfer.blocks import Lease
from kv_transfer.digest import digest_span
from kv_transfer.row_pieces import Standing, between, landed, packed, standing
from kv_transfer.slab import Slab
from kv_transfer.staging import pack_push, push_bytes
from tests.kv_transfer.stores import FIELDS, Store, equal, needed, random_rows


def stands(slab: Slab, lease: Lease) -> Standing:
    return Standing(
        slab.layout,
        slab.blocks.data_ptr(),
        slab.slots.data_ptr(),
        np.array(lease.block_ids, dtype=np.int64),
        lease.slot,
    )


def moved(store: Store, pieces: Pieces, digests: int, *, copy: bool = True) -> list[int]:
    """Run on the CPU; the digests."""
    formats = row_formats(field.row_bytes for field in store.layout.fields)
    found = torch.zeros(digests, dtype=torch.int64)
    done = torch.zeros(1, dtype=torch.int64)
    kv_push(tabulate(pieces, formats), found, done, programs=4, copy=copy)
    assert done.item() == 4
    return [value % 2**64 for value in found.tolist()]


def digests(store: Store, lease: Lease, spans: Sequence[Span]) -> list[int]:
    return [digest_span(store.slab, lease, span) for span in spans]


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("length", [1, 17, 64, 129, 300])
def test_all_rows_arrive_in_a_memory_of_another_shape(fields: str, length: int) -> None:
    ours = Store(FIELDS[fields], block_tokens=16, ring_slack=1)
    theirs = Store(FIELDS[fields], block_tokens=48, ring_slack=6)
    spans = needed(FIELDS[fields], length)
    rows = random_rows(FIELDS[fields], length, seed=length)
    ours.lease(40)  # so that block and slot numbers differ
    source, target = ours.lease(length), theirs.lease(length)
    ours.fill(source, rows, length)
    pieces = between(spans, stands(ours.slab, source), stands(theirs.slab, target))
    found = moved(ours, pieces, len(spans))
    assert equal(theirs.rows(target, length), rows)
    assert found == digests(ours, source, spans)
    assert found == moved(
        theirs, standing(spans, stands(theirs.slab, target)), len(spans), copy=False
    )


def test_nothing_but_the_rows_is_written() -> None:
    fields = FIELDS["real"]
    ours, theirs = Store(fields, block_tokens=32), Store(fields, block_tokens=16)
    source, target = ours.lease(100), theirs.lease(100)
    ours.fill(source, random_rows(fields, 100, seed=1), 100)
    span = Span(field="index_r2", layer=8, start=3, stop=41)
    before = theirs.slab.blocks.clone(), theirs.slab.slots.clone()
    moved(ours, between([span], stands(ours.slab, source), stands(theirs.slab, target)), 1)
    changed = int((theirs.slab.blocks != before[0]).sum())
    assert 0 < changed <= 38 * 68
    theirs.slab.write_rows(span, target, torch.full((38, 68), 0xA5, dtype=torch.uint8))
    assert torch.equal(theirs.slab.blocks, before[0])
    assert torch.equal(theirs.slab.slots, before[1])


@pytest.mark.parametrize("fields", FIELDS)
def test_a_packed_push_is_the_same_bytes_as_staging_makes(fields: str) -> None:
    store = Store(FIELDS[fields], block_tokens=16, ring_slack=3)
    spans = needed(FIELDS[fields], 77)
    lease, other = store.lease(77), store.lease(77)
    rows = random_rows(FIELDS[fields], 77, seed=2)
    store.fill(lease, rows, 77)
    expected = torch.zeros(push_bytes(store.layout, spans), dtype=torch.uint8)
    pack_push(store.slab, lease, spans, expected)
    cell = torch.zeros_like(expected)
    out = packed(spans, stands(store.slab, lease), cell.data_ptr(), out=True)
    assert moved(store, out, len(spans)) == digests(store, lease, spans)
    assert torch.equal(cell, expected)
    back = packed(spans, stands(store.slab, other), cell.data_ptr(), out=False)
    found = moved(store, back, len(spans))
    assert equal(store.rows(other, 77), rows)
    assert moved(store, landed(back), len(spans), copy=False) == found


def test_no_spans_are_no_pieces() -> None:
    store = Store(FIELDS["tiny"])
    assert moved(store, standing([], stands(store.slab, store.lease(1))), 0) == []


def test_rows_of_another_size_are_refused() -> None:
    one = np.array([64], dtype=np.int64)
    with pytest.raises(ValueError, match="1 pieces have another row size"):
        tabulate(Pieces(one, one, one, one, one, row_bytes=one), row_formats([528]))
