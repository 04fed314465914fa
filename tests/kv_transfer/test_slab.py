"""Rows in and out of a slab, and pushes in between."""

from __future__ import annotations

import pytest
import torch

from cluster.errors import ProtocolError
from cluster.messages import Span
from kv_transfer.layout import SPAN_ALIGNMENT
from kv_transfer.plan import pack_into_pushes
from kv_transfer.staging import pack_push, push_bytes, unpack_push
from model.state import StateField
from tests.kv_transfer.stores import FIELDS, POISON, TINY, Store, equal, needed, random_rows

CELL = 8192


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_neighbours_in_a_slab_keep_out_of_each_other(fields: tuple[StateField, ...]) -> None:
    store = Store(fields, block_tokens=4, ring_slack=1, length=60)
    lengths = [60, 33, 47]
    leases = [store.lease(length) for length in lengths]
    written = [random_rows(fields, length, seed) for seed, length in enumerate(lengths)]
    for lease, rows, length in zip(leases, written, lengths, strict=True):
        store.fill(lease, rows, length)
    for lease, rows, length in zip(leases, written, lengths, strict=True):
        assert equal(store.rows(lease, length), rows)


def test_writing_touches_only_the_rows_that_are_named() -> None:
    store = Store(TINY, length=64, sequences=2)
    lease = store.lease(64)
    span = Span(field="compressed_r2", layer=2, start=3, stop=9)
    store.slab.write_rows(span, lease, torch.zeros(6, 72, dtype=torch.uint8))
    assert int((store.slab.blocks != POISON).sum()) == 6 * 72
    assert int((store.slab.slots != POISON).sum()) == 0
    store.slab.write_rows(
        Span(field="window", layer=9, start=14, stop=18), lease, torch.zeros(4, 132).byte()
    )
    assert int((store.slab.blocks != POISON).sum()) == 6 * 72
    assert int((store.slab.slots != POISON).sum()) == 4 * 132


def test_a_ring_holds_the_last_rows_wherever_they_begin() -> None:
    store = Store(TINY, ring_slack=3, length=100)
    lease = store.lease(100)
    rows = torch.arange(100).byte().unsqueeze(1).expand(-1, 132).contiguous()
    for start in range(0, 100, 5):
        span = Span(field="window", layer=0, start=start, stop=start + 5)
        store.slab.write_rows(span, lease, rows[start : start + 5])
    last = Span(field="window", layer=0, start=81, stop=100)
    assert torch.equal(store.slab.read_rows(last, lease), rows[81:])


def test_rows_of_the_wrong_shape_are_refused() -> None:
    store = Store(TINY)
    span = Span(field="window", layer=0, start=0, stop=2)
    with pytest.raises(ValueError, match="are not the rows of"):
        store.slab.write_rows(span, store.lease(16), torch.zeros(3, 132).byte())


# ------------------------------------------------------------------ pushes


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 127, 128, 129, 130, 255, 256, 257])
def test_pushed_rows_arrive_in_another_slab_of_another_shape(
    fields: tuple[StateField, ...], length: int
) -> None:
    sender = Store(fields, block_tokens=16, ring_slack=1)
    receiver = Store(fields, block_tokens=32, ring_slack=6)
    source, target = sender.lease(length), receiver.lease(length + 40)
    rows = random_rows(fields, length, seed=length)
    sender.fill(source, rows, length)
    cell = torch.empty(CELL, dtype=torch.uint8)
    for push in pack_into_pushes(needed(fields, length), sender.layout, CELL):
        nbytes = pack_push(sender.slab, source, push, cell)
        unpack_push(receiver.slab, target, push, cell[:nbytes].clone())
    assert equal(receiver.rows(target, length), rows)


def test_spans_stand_one_after_another_on_whole_words() -> None:
    store = Store(TINY)
    lease = store.lease(64)
    store.fill(lease, random_rows(TINY, 64, seed=1), 64)
    spans = [
        Span(field="index_r2", layer=4, start=1, stop=4),  # 3 rows of 34 bytes
        Span(field="compressed_r1", layer=5, start=60, stop=62),
    ]
    cell = torch.full((CELL,), POISON, dtype=torch.uint8)
    assert pack_push(store.slab, lease, spans, cell) == 112 + 144
    assert 3 * 34 < 112 == 7 * SPAN_ALIGNMENT
    assert torch.equal(cell[:102].view(3, 34), store.slab.read_rows(spans[0], lease))
    assert torch.equal(cell[112:256].view(2, 72), store.slab.read_rows(spans[1], lease))
    assert int((cell[256:] != POISON).sum()) == 0


def test_a_push_larger_than_its_cell_is_our_own_mistake() -> None:
    store = Store(TINY)
    span = Span(field="window", layer=0, start=0, stop=16)
    with pytest.raises(ValueError, match="a push of 2112 bytes exceeds a cell of 2104"):
        pack_push(store.slab, store.lease(16), [span], torch.empty(2104, dtype=torch.uint8))


GOOD = ("window", 0, 0, 4)


@pytest.mark.parametrize(
    "spans",
    [
        [GOOD, ("window", 0, 98, 101)],  # beyond the lease
        [GOOD, ("window", 0, 2**62, 2**62 + 1)],
        [GOOD, ("window", 0, 60, 80)],  # more than a ring
        [GOOD, ("window", 0, 6, 6)],  # nothing
        [GOOD, ("window", 0, 7, 6)],  # less than nothing
        [GOOD, ("window", 1, -1, 1)],
        [GOOD, ("window", 10, 0, 1)],  # no such layer
        [GOOD, ("compressed_r9", 0, 0, 1)],  # no such field
        [GOOD, ("compressed_r2", 2, 49, 51)],  # 50 rows at 100 positions
        [GOOD, GOOD],  # twice
        [("window", 0, 3, 5), GOOD],  # in part
    ],
)
def test_a_peers_impossible_push_stores_nothing(spans: list[tuple[str, int, int, int]]) -> None:
    store = Store(TINY, length=112, sequences=2)
    lease = store.lease(100)
    push = [Span(field=f, layer=n, start=start, stop=stop) for f, n, start, stop in spans]
    nbytes = sum(  # as if the peer had been honest about its size
        max(span.stop - span.start, 0) * 132 for span in push if span.stop < 2**60
    )
    with pytest.raises(ProtocolError):
        unpack_push(store.slab, lease, push, torch.zeros(nbytes, dtype=torch.uint8))
    assert int((store.slab.blocks != POISON).sum()) == 0
    assert int((store.slab.slots != POISON).sum()) == 0


@pytest.mark.parametrize("nbytes", [0, 520, 536])
def test_a_push_is_as_long_as_its_spans(nbytes: int) -> None:
    store = Store(TINY)
    span = Span(field="window", layer=0, start=0, stop=4)
    with pytest.raises(ProtocolError, match=f"spans of 528 bytes were announced for {nbytes}"):
        unpack_push(store.slab, store.lease(16), [span], torch.zeros(nbytes).byte())


def test_the_size_of_an_unheard_of_push_is_the_peers_fault() -> None:
    with pytest.raises(ProtocolError, match="no field 'other'"):
        push_bytes(Store(TINY).layout, [Span(field="other", layer=0, start=0, stop=1)])
