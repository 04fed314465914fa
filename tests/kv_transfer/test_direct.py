"""Rows pushed into a peer's blocks in place: what a direct transport promises beyond the seam."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cluster.errors import TransferError
from kernels.push_table import Pieces
from kv_transfer.digest import digest_span
from kv_transfer.direct_transport import DirectTransport
from kv_transfer.layout import Layout
from kv_transfer.open_transport import open_transport
from kv_transfer.row_pieces import Standing, between
from tests.kv_transfer.receiving_rank import BLOCK_TOKENS, RING_SLACK, Elsewhere, memory_of
from tests.kv_transfer.stores import FIELDS, Store, needed, random_rows

LENGTH = 77


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("host", marks=pytest.mark.rank),
        pytest.param("nvlink", marks=pytest.mark.gpu),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Prompt:
    """A sequence of random rows in memory that a transport may push from."""

    def __init__(self, kind: str, fields: str) -> None:
        device = memory_of(kind)
        self.fields = FIELDS[fields]
        self.spans = needed(self.fields, LENGTH)
        self.store = Store(self.fields, block_tokens=16, ring_slack=1)
        self.lease = self.store.lease(LENGTH)
        self.rows = random_rows(self.fields, LENGTH, seed=7)
        self.store.fill(self.lease, self.rows, LENGTH)
        self.blocks = self.store.slab.blocks.to(device)
        self.slots = self.store.slab.slots.to(device)
        self.digests = [digest_span(self.store.slab, self.lease, span) for span in self.spans]

    def pieces(
        self, transport: DirectTransport, peer: str, receiver: Elsewhere, lease: int
    ) -> Pieces:
        blocks, slots = transport.offered(peer)[2 * list(FIELDS.values()).index(self.fields) :][:2]
        ids, slot = receiver.call("place", lease)
        layout = Layout(self.fields, BLOCK_TOKENS, RING_SLACK)
        there = Standing(layout, blocks.address, slots.address, np.array(ids), slot)
        mine = self.store.slab.layout
        here = Standing(
            mine, self.blocks.data_ptr(), self.slots.data_ptr(), self.lease.block_table,
            self.lease.slot,
        )  # fmt: skip
        return between(self.spans, here, there)


@pytest.fixture(scope="module")
def transport(kind: str) -> Iterator[DirectTransport]:
    if kind == "nvlink" and not torch.cuda.is_available():
        pytest.skip("no GPU can be seen")
    transport = open_transport(kind, "prefill-0", device=memory_of(kind))
    assert isinstance(transport, DirectTransport)
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def prompts(kind: str, transport: DirectTransport) -> dict[str, Prompt]:
    found = {fields: Prompt(kind, fields) for fields in FIELDS}
    for prompt in found.values():
        transport.register(prompt.blocks.view(-1), source_only=True)
        transport.register(prompt.slots.view(-1), source_only=True)
    return found


@pytest.fixture
def receiver(kind: str) -> Iterator[Elsewhere]:
    with Elsewhere(kind, "decode-0") as rank:
        yield rank


@pytest.mark.parametrize("fields", FIELDS)
def test_rows_stand_in_the_peers_blocks_when_a_push_returns(
    transport: DirectTransport, prompts: dict[str, Prompt], receiver: Elsewhere, fields: str
) -> None:
    prompt = prompts[fields]
    peer = transport.add_peer(receiver.call("metadata"))
    receiver.call("reserve", fields, 200)  # others' memory lies before and between
    lease, _ = receiver.call("reserve", fields, LENGTH)
    pieces = prompt.pieces(transport, peer, receiver, lease)
    found = transport.push(peer, pieces, len(prompt.spans))
    assert found == prompt.digests
    theirs = receiver.call("digests", lease, prompt.fields, LENGTH)
    assert [piece.digest for piece in theirs if piece.start < piece.stop] == found
    rows = receiver.call("rows", lease, LENGTH)
    assert rows == {key: value.numpy().tobytes() for key, value in prompt.rows.items()}


def test_a_row_that_was_not_pushed_shows_in_the_digests(
    transport: DirectTransport, prompts: dict[str, Prompt], receiver: Elsewhere
) -> None:
    prompt = prompts["tiny"]
    peer = transport.add_peer(receiver.call("metadata"))
    lease, _ = receiver.call("reserve", "tiny", LENGTH)
    pieces = prompt.pieces(transport, peer, receiver, lease)
    for lost in range(0, len(pieces.rows), 7):
        kept = Pieces(*(np.delete(column, lost) for column in pieces))
        receiver.call("release", lease)
        lease, _ = receiver.call("reserve", "tiny", LENGTH)  # the same blocks, poisoned again
        receiver.call("spoil")
        transport.push(peer, kept, len(prompt.spans))
        theirs = receiver.call("digests", lease, prompt.fields, LENGTH)
        differing = [
            number
            for number, piece in enumerate(piece for piece in theirs if piece.start < piece.stop)
            if piece.digest != prompt.digests[number]
        ]
        assert differing == [pieces.digest[lost]]


@pytest.mark.parametrize("shift", [-(2**40), 2**40])
def test_nothing_is_pushed_outside_what_was_offered(
    transport: DirectTransport, prompts: dict[str, Prompt], receiver: Elsewhere, shift: int
) -> None:
    prompt = prompts["tiny"]
    peer = transport.add_peer(receiver.call("metadata"))
    lease, _ = receiver.call("reserve", "tiny", LENGTH)
    pieces = prompt.pieces(transport, peer, receiver, lease)
    target = pieces.target.copy()
    target[3] += shift
    with pytest.raises(TransferError, match="names memory that it has not offered"):
        transport.push(peer, pieces._replace(target=target), len(prompt.spans))
    source = pieces.source.copy()
    source[3] += shift
    with pytest.raises(ValueError, match="1 pieces to push are not in registered memory"):
        transport.push(peer, pieces._replace(source=source), len(prompt.spans))


def test_a_receiver_killed_during_pushes_is_an_error_at_once_and_leaves_nothing_open(
    kind: str, transport: DirectTransport, prompts: dict[str, Prompt]
) -> None:
    prompt = prompts["real"]
    with Elsewhere(kind, "decode-7") as victim:
        peer = transport.add_peer(victim.call("metadata"))
        lease, _ = victim.call("reserve", "real", LENGTH)
        pieces = prompt.pieces(transport, peer, victim, lease)
        pushed, failed = threading.Event(), []

        def push_on() -> None:
            try:
                while True:
                    transport.push(peer, pieces, len(prompt.spans))
                    pushed.set()
            except TransferError as error:
                failed.append(error)

        thread = threading.Thread(target=push_on)
        thread.start()
        assert pushed.wait(30)
        victim.die()
        thread.join(10)
        assert not thread.is_alive()
        assert "decode-7" in str(failed[0]) or "process" in str(failed[0])
        assert transport.has_ended(peer)
        transport.remove_peer(peer)
        with pytest.raises(TransferError, match="is gone"):
            transport.push(peer, pieces, len(prompt.spans))


def test_a_writers_death_is_proven_by_its_process_not_by_its_word(
    kind: str, transport: DirectTransport
) -> None:
    """What ends the quarantine of blocks that were named to a writer."""
    with Elsewhere(kind, "prefill-9") as writer:
        peer = transport.add_peer(writer.call("metadata"))
        assert not transport.has_ended(peer)
        writer.die()
        assert transport.has_ended(peer)
        transport.remove_peer(peer)
