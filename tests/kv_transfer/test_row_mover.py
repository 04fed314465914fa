"""Moving rows by kernel is the same, byte for byte and digest for digest, as by staging.py."""

from __future__ import annotations

import pytest
import torch

from cluster.errors import ProtocolError
from cluster.messages import Span
from kv_transfer.blocks import Lease
from kv_transfer.digest import RunningDigest, digest_span, piece_digests
from kv_transfer.host_reach import HostReach
from kv_transfer.plan import pack_into_pushes
from kv_transfer.row_mover import RowMover
from kv_transfer.staging import pack_push, push_bytes, unpack_push
from tests.kv_transfer.stores import FIELDS, POISON, Store, equal, needed, random_rows

LENGTH = 77


class Filled:
    def __init__(self, fields: str, *, block_tokens: int = 16, ring_slack: int = 3) -> None:
        self.fields = FIELDS[fields]
        self.spans = needed(self.fields, LENGTH)
        self.store = Store(self.fields, block_tokens=block_tokens, ring_slack=ring_slack)
        self.mover = RowMover(self.store.slab, HostReach())
        self.lease = self.store.lease(LENGTH)
        self.rows = random_rows(self.fields, LENGTH, seed=3)
        self.store.fill(self.lease, self.rows, LENGTH)
        self.cell = torch.full((push_bytes(self.store.layout, self.spans),), POISON).byte()

    def digests(self, lease: Lease) -> list[int]:
        return [digest_span(self.store.slab, lease, span) for span in self.spans]


@pytest.mark.parametrize("fields", FIELDS)
def test_packing_and_unpacking_agree_with_staging(fields: str) -> None:
    ours, theirs = Filled(fields), Filled(fields, block_tokens=32, ring_slack=6)
    nbytes, digests = ours.mover.pack(ours.lease, ours.spans, ours.cell)
    assert nbytes == len(ours.cell)
    assert digests == ours.digests(ours.lease)
    expected = torch.zeros_like(ours.cell)
    pack_push(ours.store.slab, ours.lease, ours.spans, expected)
    plain = ours.store.lease(LENGTH)
    unpack_push(ours.store.slab, plain, ours.spans, ours.cell)  # padding does not matter
    assert equal(ours.store.rows(plain, LENGTH), ours.rows)
    other = theirs.store.lease(LENGTH)
    assert theirs.mover.unpack(other, ours.spans, expected) == digests
    assert equal(theirs.store.rows(other, LENGTH), ours.rows)
    assert theirs.mover.digests(other, ours.spans) == digests


def test_digests_from_a_device_end_in_the_same_promise() -> None:
    one = Filled("tiny")
    running = RunningDigest(one.store.slab, one.lease)
    for spans in (one.spans[:5], one.spans[5:]):
        running.add_known(spans, one.mover.digests(one.lease, spans))
    assert running.pieces(one.fields, LENGTH) == piece_digests(
        one.store.slab, one.lease, one.fields, LENGTH
    )


def test_a_damaged_cell_shows_in_the_digests_of_the_blocks() -> None:
    one = Filled("tiny")
    _, digests = one.mover.pack(one.lease, one.spans, one.cell)
    one.cell[100] ^= 1
    found = one.mover.unpack(one.store.lease(LENGTH), one.spans, one.cell)
    assert sum(ours != theirs for ours, theirs in zip(found, digests, strict=True)) == 1


def test_what_cannot_be_is_refused_before_anything_moves() -> None:
    one = Filled("tiny")
    late = [Span(field="window", layer=0, start=LENGTH, stop=LENGTH + 1)]
    with pytest.raises(ValueError, match="are not among"):
        one.mover.pack(one.lease, late, one.cell)
    with pytest.raises(ValueError, match="are not among"):
        one.mover.digests(one.lease, late)
    with pytest.raises(ValueError, match="exceeds a cell"):
        one.mover.pack(one.lease, one.spans, one.cell[:100])
    before = one.store.slab.blocks.clone()
    with pytest.raises(ProtocolError, match="were announced"):
        one.mover.unpack(one.lease, one.spans, one.cell[:100])
    assert torch.equal(one.store.slab.blocks, before)


def test_a_request_planned_at_once_moves_push_by_push() -> None:
    ours, theirs = Filled("real"), Filled("real", block_tokens=32)
    pushes = pack_into_pushes(ours.spans, ours.store.layout, 64 << 10)
    assert len(pushes) > 3
    cells = [torch.zeros(push_bytes(ours.store.layout, push), dtype=torch.uint8) for push in pushes]
    lease = theirs.store.lease(LENGTH)
    packing = ours.mover.packing(ours.lease, list(zip(pushes, cells, strict=True)))
    unpacking = theirs.mover.unpacking(lease, list(zip(pushes, cells, strict=True)))
    for number in range(len(pushes)):
        packing.start(number)
        unpacking.start(2 * number)
        unpacking.start(2 * number + 1)
    sent = packing.digests()
    assert unpacking.digests() == sent
    assert sent == [
        digest_span(ours.store.slab, ours.lease, span) for push in pushes for span in push
    ]
    assert equal(theirs.store.rows(lease, LENGTH), ours.rows)


def test_digests_planned_early_are_of_what_stands_when_they_are_called_for() -> None:
    one = Filled("tiny")
    lease = one.store.lease(LENGTH)
    planned = one.mover.planned_digests(lease, one.spans)
    before = planned()
    one.store.fill(lease, one.rows, LENGTH)
    assert planned() == one.digests(lease) != before
