"""A decode rank whose blocks are written directly, as its senders see it; the test plays them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from cluster.messages import (
    Accepted,
    Cancel,
    Cancelled,
    Connect,
    Connected,
    OpenPush,
    Pushed,
    PushOpened,
    RejectedNow,
    Span,
    WireMessage,
)
from cluster.wire import Identity, Peers, Stream, new_incarnation
from decode_worker.worker import DecodeRank
from kv_transfer.chosen_transport import ChosenTransport
from kv_transfer.open_transport import open_paths
from kv_transfer.row_mover import RowMover
from prefill_worker.pair import StateThere
from tests.decode_worker.test_reservations import Prompt, expect, reserve, tokens_of
from tests.tiny import SECRET, TinyCluster, make_prompt, make_request, tiny_config, until

REQUEST = make_request(make_prompt(37), max_tokens=6)


class Sender:
    """A prefill rank without an engine: it has a prompt's state, and pushes it by hand."""

    def __init__(self, cluster: TinyCluster) -> None:
        (self.rank,) = cluster.decode
        self.peers = Peers(Identity("prefill", new_incarnation(), SECRET), cluster.config.wire)
        self.prompt = Prompt(self.rank, REQUEST)
        self.transport: ChosenTransport = open_paths("direct", "local", "prefill-0")
        self.transport.push_from(self.prompt.slab.blocks, self.prompt.slab.slots)

    async def connect(self) -> Stream:
        word = Connect(wire_form=self.rank.wire_form, metadata=self.transport.metadata())
        stream = await self.peers.open(self.rank.endpoint, word)
        told = await expect(stream, Connected)
        assert told.why_packed == ""
        self.peer = self.transport.add_peer(told.metadata)
        self.there = StateThere.of(self.rank.fields, told, self.transport.offered(self.peer))
        return stream

    async def open(self, reservation: str) -> Stream:
        word = OpenPush(reservation=reservation, length=37, direct=True)
        return await self.peers.open(self.rank.endpoint, word)

    async def push(self, stream: Stream, opened: PushOpened) -> None:
        assert self.transport.direct is not None
        mover = RowMover(self.prompt.slab, self.transport.direct.reach)
        for seq, spans in enumerate(self.prompt.pushes):
            pieces = mover.pieces(self.prompt.lease, spans, self.there.standing(opened, 37))
            self.transport.push(self.peer, pieces, 0)
            await stream.send(Pushed(seq=seq, spans=tuple(spans)))

    async def close(self) -> None:
        await self.peers.close()
        self.transport.close()


@pytest.fixture
async def cluster() -> AsyncIterator[TinyCluster]:
    config = tiny_config(transfer={"path": "direct"})
    async with TinyCluster(prefill=0, decode=1, config=config) as cluster:
        yield cluster
        assert await cluster.settled()


@pytest.fixture
def rank(cluster: TinyCluster) -> DecodeRank:
    return cluster.decode[0]


@pytest.fixture
async def sender(cluster: TinyCluster) -> AsyncIterator[Sender]:
    sender = Sender(cluster)
    yield sender
    await sender.close()


@pytest.fixture
async def caller(cluster: TinyCluster) -> AsyncIterator[Peers]:
    peers = Peers(Identity("caller", new_incarnation(), SECRET), cluster.config.wire)
    yield peers
    await peers.close()


async def test_rows_that_came_into_the_blocks_are_continued_and_no_cell_is_used(
    cluster: TinyCluster, rank: DecodeRank, caller: Peers, sender: Sender
) -> None:
    answer, reserved = await reserve(caller, rank, REQUEST)
    await sender.connect()
    push = await sender.open(reserved.reservation)
    opened = await expect(push, PushOpened)
    assert rank.ring.ledger().leased == 0
    await sender.push(push, opened)
    await push.send(sender.prompt.commit())
    await expect(push, Accepted)
    told = [sender.prompt.first_token, *await tokens_of(answer)]
    config = tiny_config(router={"colocated": True})
    async with TinyCluster(prefill=0, config=config) as other:
        assert told == await other.answer(REQUEST)


@pytest.mark.parametrize("row", [0, 20, 36])
async def test_one_row_that_did_not_come_is_rejected(
    row: int, rank: DecodeRank, caller: Peers, sender: Sender
) -> None:
    _, reserved = await reserve(caller, rank, REQUEST)
    await sender.connect()
    push = await sender.open(reserved.reservation)
    opened = await expect(push, PushOpened)
    await sender.push(push, opened)
    (lease,) = [one.lease for one in rank._receiver._reservations.values()]
    span = Span(field="compressed_r1", layer=1, start=row, stop=row + 1)
    rank.slab.write_rows(span, lease, ~rank.slab.read_rows(span, lease))
    await push.send(Pushed(seq=len(sender.prompt.pushes), spans=(span,)))
    await push.send(sender.prompt.commit())
    assert "compressed_r1 of layer 1" in (await expect(push, RejectedNow)).why
    await push.send(Cancelled())


async def test_only_a_sender_whose_end_would_be_seen_is_told_where_blocks_are(
    rank: DecodeRank, caller: Peers, sender: Sender
) -> None:
    stream, reserved = await reserve(caller, rank, REQUEST)
    push = await sender.open(reserved.reservation)
    assert "has not been offered any blocks" in (await expect(push, RejectedNow)).why
    word = Connect(wire_form=rank.wire_form, metadata=b"no transport's")
    told = await expect(await sender.peers.open(rank.endpoint, word), Connected)
    assert "no metadata" in told.why_packed or "not metadata" in told.why_packed
    await stream.close()


@pytest.mark.parametrize("caller_leaves", ["before", "after"])
async def test_blocks_of_a_sender_that_is_cut_off_are_nobodys_until_it_says_that_it_writes_no_more(
    caller_leaves: str, rank: DecodeRank, caller: Peers, sender: Sender, cluster: TinyCluster
) -> None:
    stream, reserved = await reserve(caller, rank, REQUEST)
    await sender.connect()
    push = await sender.open(reserved.reservation)
    await expect(push, PushOpened)
    if caller_leaves == "before":
        await stream.close()
        await expect(push, Cancel)
    await sender.peers.close()  # every connection of it breaks; its process lives on
    await until(lambda: rank.pool.ledger().blocks.leased == 0)
    assert rank.pool.ledger().blocks.quarantined == 3
    assert rank.pool.ledger().slots.quarantined == 1

    async def says(word: WireMessage, identity: Identity) -> None:
        peers = Peers(identity, cluster.config.wire)
        async with await peers.open(rank.endpoint, word) as said:
            assert await said.receive() is None
        await peers.close()

    last_word = Cancelled(reservation=reserved.reservation)
    await says(last_word, Identity("prefill", new_incarnation(), SECRET))  # of somebody else's
    assert rank.pool.ledger().blocks.quarantined == 3
    await says(last_word, sender.peers._identity)
    assert rank.pool.ledger().blocks.quarantined == 0
    assert rank.pool.ledger().blocks.free == rank.pool.ledger().blocks.total


async def test_a_rejected_sender_keeps_its_blocks_until_it_has_heard_it(
    rank: DecodeRank, caller: Peers, sender: Sender
) -> None:
    _, reserved = await reserve(caller, rank, REQUEST)
    await sender.connect()
    push = await sender.open(reserved.reservation)
    await expect(push, PushOpened)
    beyond = Span(field="window", layer=0, start=50, stop=70)
    await push.send(Pushed(seq=0, spans=(beyond,)))
    assert "names what cannot be" in (await expect(push, RejectedNow)).why
    await until(lambda: rank.pool.ledger().blocks.leased == 0)  # its caller has heard it first
    assert rank.pool.ledger().blocks.quarantined == 3
    await push.send(Cancelled())
    await until(lambda: rank.pool.ledger().blocks.quarantined == 0)
