"""State goes from one rank's slab into another's, over each transport, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cluster.errors import Rejected
from cluster.messages import Span
from kv_transfer.blocks import Lease
from kv_transfer.digest import RunningDigest, check_pieces, digest_span, piece_digests
from kv_transfer.plan import pack_into_pushes, spans_final_at
from kv_transfer.staging import pack_push, unpack_push
from kv_transfer.transport import Transport
from model.state import StateField
from tests.kv_transfer.conftest import Receiver
from tests.kv_transfer.receiving_rank import CELL_BYTES
from tests.kv_transfer.stores import FIELDS, Store, needed, random_rows

LENGTHS = {
    "tiny": [1, 2, 3, 15, 16, 17, 127, 128, 129, 130, 255, 256, 257],
    "real": [1, 130, 257],  # of 3 MB each; the others go from slab to slab in test_slab.py
}
CHUNK = 50
ODD = 131  # positions: with these, tails have rows too


Key = tuple[str, int]  # field and layer


class Piece(NamedTuple):
    span: Span
    data: Tensor


class Prefill:
    """The sending half: a slab, a staging cell, and one peer."""

    def __init__(self, transport: Transport, receiver: Receiver, device: torch.device) -> None:
        self.stores = {name: Store(fields, ring_slack=1) for name, fields in FIELDS.items()}
        self.transport = transport
        self.receiver = receiver
        self.cell = torch.empty(CELL_BYTES, dtype=torch.uint8)
        self.staging = self.cell.to(device)  # itself, unless the transport is a GPU's
        transport.register(self.staging, source_only=True)
        self.peer = transport.add_peer(receiver.call("metadata"))

    def hand_over(self, model: str, lease: Lease, length: int) -> int:
        """Push chunk by chunk as a prompt would be, and compare digests; the reservation."""
        store = self.stores[model]
        reservation, segment = self.receiver.call("reserve", model, length + 20)
        digest = RunningDigest(store.slab, lease)
        seq = 0
        for done in range(0, length, CHUNK):
            now = min(done + CHUNK, length)
            spans = spans_final_at(store.layout.fields, done, now, last=now == length)
            for push in pack_into_pushes(spans, store.layout, segment.cell_bytes):
                nbytes = pack_push(store.slab, lease, push, self.cell)
                self.staging.copy_(self.cell)
                cell = segment.offset + seq % segment.cells * segment.cell_bytes
                self.transport.write(self.peer, self.staging[:nbytes], cell)
                self.receiver.call("unpack", reservation, seq, push)
                digest.add(push)
                seq += 1
        pieces = digest.pieces(store.layout.fields, length)
        check_pieces(self.receiver.call("digests", reservation, FIELDS[model], length), pieces)
        return int(reservation)


@pytest.fixture(scope="module")
def prefill(sending: Transport, receiver: Receiver, device: torch.device) -> Prefill:
    return Prefill(sending, receiver, device)


@pytest.mark.parametrize("model", FIELDS)
def test_all_declared_rows_arrive_for_every_length(prefill: Prefill, model: str) -> None:
    store = prefill.stores[model]
    for length in LENGTHS[model]:
        rows = random_rows(FIELDS[model], length, seed=length)
        with store.lease(length) as lease:
            store.fill(lease, rows, length)
            reservation = prefill.hand_over(model, lease, length)
        arrived = prefill.receiver.call("rows", reservation, length)
        assert arrived == {key: value.numpy().tobytes() for key, value in rows.items()}, length
        prefill.receiver.call("release", reservation)


def test_two_requests_at_once_do_not_mix(prefill: Prefill) -> None:
    store = prefill.stores["tiny"]
    rows = [random_rows(FIELDS["tiny"], length, seed=length) for length in (40, 41)]
    held = []
    with store.lease(40) as one, store.lease(41) as other:
        store.fill(one, rows[0], 40)
        store.fill(other, rows[1], 41)
        held = [prefill.hand_over("tiny", one, 40), prefill.hand_over("tiny", other, 41)]
    for reservation, length, expected in zip(held, (40, 41), rows, strict=True):
        arrived = prefill.receiver.call("rows", reservation, length)
        assert arrived == {key: value.numpy().tobytes() for key, value in expected.items()}
        prefill.receiver.call("release", reservation)


# ------------------------------------------------------------------ what must not pass


@pytest.fixture(scope="module", params=FIELDS)
def fields(request: pytest.FixtureRequest) -> tuple[StateField, ...]:
    return FIELDS[request.param]


@pytest.fixture(scope="module")
def store(fields: tuple[StateField, ...]) -> Store:
    return Store(fields, length=ODD, sequences=2)


@pytest.fixture(scope="module")
def pieces(store: Store) -> dict[Key, Piece]:
    """Each field of each layer of a random sequence of ODD positions, packed by itself."""
    cell = torch.empty(1 << 20, dtype=torch.uint8)
    found = {}
    with store.lease(ODD) as lease:
        store.fill(lease, random_rows(store.layout.fields, ODD, seed=1), ODD)
        for span in needed(store.layout.fields, ODD):
            nbytes = pack_push(store.slab, lease, [span], cell)
            found[span.field, span.layer] = Piece(span, cell[:nbytes].clone())
    return found


def received(store: Store, pieces: Iterable[Piece]) -> Lease:
    lease = store.lease(ODD)
    for piece in pieces:
        unpack_push(store.slab, lease, [piece.span], piece.data)
    return lease


def test_a_field_that_nobody_sends_is_never_accepted(
    store: Store, fields: tuple[StateField, ...], pieces: dict[Key, Piece]
) -> None:
    with received(store, pieces.values()) as lease:
        right = piece_digests(store.slab, lease, fields, ODD)
    declared = [(field.name, layer) for field in fields for layer in field.layers]
    assert [(piece.field, piece.layer) for piece in right] == declared == list(pieces)
    for key in declared:
        others = (piece for other, piece in pieces.items() if other != key)
        with received(store, others) as lease:
            found = piece_digests(store.slab, lease, fields, ODD)
        with pytest.raises(Rejected, match=f"{key[0]} of layer {key[1]},"):
            check_pieces(found, right)


def test_one_flipped_bit_in_any_field_is_never_accepted(
    store: Store, pieces: dict[Key, Piece]
) -> None:
    for seed, (span, data) in enumerate(pieces.values()):
        bad = data.clone()
        bad[seed * 1009 % store.layout.span_bytes(span)] ^= 1 << seed % 8
        with received(store, [Piece(span, data)]) as lease:
            right = digest_span(store.slab, lease, span)
            unpack_push(store.slab, lease, [span], bad)
            assert digest_span(store.slab, lease, span) != right


def test_a_late_write_into_the_ring_changes_nothing_that_counts(prefill: Prefill) -> None:
    store = prefill.stores["tiny"]
    rows = random_rows(FIELDS["tiny"], 20, seed=3)
    with store.lease(20) as lease:
        store.fill(lease, rows, 20)
        reservation = prefill.hand_over("tiny", lease, 20)
    before = prefill.receiver.call("digests", reservation, FIELDS["tiny"], 20)
    prefill.staging.fill_(0xEE)
    for cell in range(16):
        prefill.transport.write(prefill.peer, prefill.staging, cell * CELL_BYTES)
    assert prefill.receiver.call("peek", 15 * CELL_BYTES, 4) == b"\xee" * 4
    assert prefill.receiver.call("digests", reservation, FIELDS["tiny"], 20) == before
    prefill.receiver.call("release", reservation)


def test_the_receiver_refuses_what_was_not_reserved(prefill: Prefill) -> None:
    reservation, segment = prefill.receiver.call("reserve", "tiny", 20)
    beyond = Span(field="window", layer=0, start=30, stop=41)
    with pytest.raises(Exception, match="a push names what cannot be"):
        prefill.receiver.call("unpack", reservation, 0, [beyond])
    huge = Span(field="compressed_r1", layer=5, start=0, stop=segment.cell_bytes)
    with pytest.raises(Exception, match="does not fit a cell"):
        prefill.receiver.call("unpack", reservation, 0, [huge])
    prefill.receiver.call("release", reservation)
