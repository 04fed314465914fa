"""A decode rank as its callers and senders see it; the test plays both, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import pytest
import torch

from cluster.messages import (
    Accepted,
    Cancel,
    Cancelled,
    Commit,
    Connect,
    Connected,
    DrainingNow,
    Failed,
    Generate,
    NoRoomNow,
    OpenPush,
    PieceDigest,
    Pushed,
    PushOpened,
    RejectedNow,
    Request,
    Reserve,
    Reserved,
    Span,
    Tokens,
    Unpacked,
    WireMessage,
)
from cluster.wire import Identity, Peers, Stream, new_incarnation
from decode_worker.worker import DecodeRank
from kv_transfer.blocks import BlockPool
from kv_transfer.digest import piece_digests
from kv_transfer.packed_cache import PackedCache
from kv_transfer.plan import pack_into_pushes, spans_final_at
from kv_transfer.slab import Slab
from kv_transfer.staging import pack_push
from model.batch import Chunk, build_batch
from model.state import state_fields
from tests.tiny import (
    SECRET,
    StateModel,
    TinyCluster,
    make_prompt,
    make_request,
    small_spec,
    tiny_config,
    until,
)

M = TypeVar("M", bound=WireMessage)


@pytest.fixture
async def cluster() -> AsyncIterator[TinyCluster]:
    async with TinyCluster(prefill=0, decode=1) as cluster:
        yield cluster
        assert await cluster.settled()


@pytest.fixture
def rank(cluster: TinyCluster) -> DecodeRank:
    return cluster.decode[0]


@pytest.fixture
async def caller(cluster: TinyCluster) -> AsyncIterator[Peers]:
    peers = Peers(Identity("caller", new_incarnation(), SECRET), cluster.config.wire)
    yield peers
    await peers.close()


@pytest.fixture
async def sender(cluster: TinyCluster) -> AsyncIterator[Peers]:
    peers = Peers(Identity("prefill", new_incarnation(), SECRET), cluster.config.wire)
    yield peers
    await peers.close()


async def expect(stream: Stream, kind: type[M]) -> M:
    async with asyncio.timeout(10):
        message = await stream.receive()
    assert isinstance(message, kind), message
    return message


class Prompt:
    """A prompt's state as a prefill rank would have made it, and how to push it by hand."""

    def __init__(self, rank: DecodeRank, request: Request) -> None:
        self.rank = rank
        self.ids = request.token_ids
        model = StateModel()
        self.slab = Slab(rank.layout, 8, 1)
        self.lease = BlockPool(8, 1, 16).lease(len(self.ids))
        batch = build_batch(
            [Chunk(self.ids, 0, len(self.ids))],
            image_token_id=model.spec.image_token_id,
            ngram=model.spec.engram_max_ngram_size,
        )
        logits = model.forward(batch, PackedCache(self.slab, [self.lease]))
        self.first_token = int(logits.argmax())
        spans = spans_final_at(rank.fields, 0, len(self.ids), True)
        self.pushes = pack_into_pushes(spans, rank.layout, rank.config.transfer.cell_bytes)
        self.pieces = tuple(piece_digests(self.slab, self.lease, rank.fields, len(self.ids)))

    async def push(self, stream: Stream, reserved: Reserved) -> None:
        """All pushes, one after another, written straight into the receive ring."""
        for seq, spans in enumerate(self.pushes):
            self.write(reserved, seq, spans)
            await stream.send(Pushed(seq=seq, spans=tuple(spans)))
            assert (await expect(stream, Unpacked)).seq == seq

    def write(self, reserved: Reserved, seq: int, spans: Sequence[Span]) -> None:
        segment = reserved.segment
        start = segment.offset + seq % segment.cells * segment.cell_bytes
        pack_push(self.slab, self.lease, spans, self.rank.ring.memory[start:][: segment.cell_bytes])

    def commit(self, pieces: Sequence[PieceDigest] | None = None) -> Commit:
        pieces = self.pieces if pieces is None else tuple(pieces)
        return Commit(length=len(self.ids), first_token=self.first_token, pieces=pieces)


async def reserve(caller: Peers, rank: DecodeRank, request: Request) -> tuple[Stream, Reserved]:
    stream = await caller.open(rank.endpoint, Reserve(request=request, attempt=1))
    return stream, await expect(stream, Reserved)


async def open_push(sender: Peers, rank: DecodeRank, reserved: Reserved, length: int) -> Stream:
    first = OpenPush(reservation=reserved.reservation, length=length)
    stream = await sender.open(rank.endpoint, first)
    await expect(stream, PushOpened)
    return stream


async def tokens_of(stream: Stream) -> list[int]:
    tokens: list[int] = []
    async for message in stream:
        assert isinstance(message, Tokens), message
        assert message.first == len(tokens) + 1
        tokens += message.token_ids
    return tokens


async def test_a_committed_prompt_is_continued_as_if_it_had_been_computed_here(
    rank: DecodeRank, caller: Peers, sender: Peers
) -> None:
    request = make_request(make_prompt(37), max_tokens=6)
    answer, reserved = await reserve(caller, rank, request)
    prompt = Prompt(rank, request)
    push = await open_push(sender, rank, reserved, 37)
    await prompt.push(push, reserved)
    await push.send(prompt.commit())
    await expect(push, Accepted)
    handed_over = [prompt.first_token, *await tokens_of(answer)]

    colocated = await caller.open(rank.endpoint, Generate(request=request, attempt=1))
    told = [message async for message in colocated]
    assert handed_over == [t for m in told if isinstance(m, Tokens) for t in m.token_ids]
    assert len(handed_over) == 6


async def test_a_reservation_takes_the_whole_need_and_gives_it_back_when_its_caller_leaves(
    rank: DecodeRank, caller: Peers
) -> None:
    request = make_request(make_prompt(20), max_tokens=45)
    stream, _ = await reserve(caller, rank, request)
    assert rank.pool.ledger().blocks.leased == 5  # 65 positions, 16 a block
    assert rank.ring.ledger().leased == 1
    await stream.close()
    await until(lambda: rank.pool.ledger().blocks.leased == 0)


async def test_no_room_is_said_at_once_and_room_that_comes_back_is_used(
    rank: DecodeRank, caller: Peers
) -> None:
    big = make_request(make_prompt(20), max_tokens=400)
    held = [(await reserve(caller, rank, big))[0] for _ in range(2)]
    stream = await caller.open(rank.endpoint, Reserve(request=big, attempt=1))
    assert (await expect(stream, NoRoomNow)).retry_after_s == 0.05
    await held[0].close()
    await until(lambda: rank.pool.ledger().blocks.free > 27)
    again, _ = await reserve(caller, rank, big)
    for stream in (again, held[1]):
        await stream.close()


async def test_a_full_receive_ring_is_no_room_too(caller: Peers) -> None:
    config = tiny_config(transfer={"ring_bytes": 2 * 16384})
    async with TinyCluster(prefill=0, decode=1, config=config) as cluster:
        (rank,) = cluster.decode
        stream, _ = await reserve(caller, rank, make_request([5, 6]))
        second = await caller.open(rank.endpoint, Reserve(request=make_request([5, 6]), attempt=1))
        await expect(second, NoRoomNow)
        assert rank.pool.ledger().blocks.leased == 1  # the refused one holds nothing
        await stream.close()
        assert await cluster.settled()


async def test_a_draining_rank_grants_nothing_new_and_honours_what_it_has_granted(
    rank: DecodeRank, caller: Peers, sender: Peers
) -> None:
    request = make_request(make_prompt(21), max_tokens=5)
    answer, reserved = await reserve(caller, rank, request)
    draining = asyncio.create_task(rank.drain(timeout_s=10))
    await until(lambda: rank.draining)
    refused = await caller.open(rank.endpoint, Reserve(request=request, attempt=1))
    await expect(refused, DrainingNow)
    whole = await caller.open(rank.endpoint, Generate(request=request, attempt=1))
    assert (await expect(whole, Failed)).error == "Draining"

    prompt = Prompt(rank, request)
    push = await open_push(sender, rank, reserved, 21)
    await prompt.push(push, reserved)
    await push.send(prompt.commit())
    assert len(await tokens_of(answer)) == 4
    await draining


async def test_a_drain_that_takes_too_long_hands_streams_back(
    rank: DecodeRank, caller: Peers
) -> None:
    answer, _ = await reserve(caller, rank, make_request(make_prompt(21)))
    await rank.drain(timeout_s=0.01)
    failed = await expect(answer, Failed)
    assert failed.error == "Draining"
    assert "decode-0/0" in failed.message


async def test_a_push_into_no_reservation_of_ours_is_rejected_never_adopted(
    rank: DecodeRank, caller: Peers, sender: Peers
) -> None:
    request = make_request(make_prompt(20))
    answer, reserved = await reserve(caller, rank, request)
    owner = await open_push(sender, rank, reserved, 20)
    for first in (
        OpenPush(reservation="another-life:1", length=20),
        OpenPush(reservation=reserved.reservation, length=20),  # it has its push already
    ):
        stream = await sender.open(rank.endpoint, first)
        await expect(stream, RejectedNow)
    await answer.close()
    await expect(owner, Cancel)
    await owner.send(Cancelled())

    answer, reserved = await reserve(caller, rank, request)
    wrong_length = OpenPush(reservation=reserved.reservation, length=19)
    assert "19" in (await expect(await sender.open(rank.endpoint, wrong_length), RejectedNow)).why
    await answer.close()
    await until(lambda: rank.ring.ledger().leased == 0)
    stale = await sender.open(rank.endpoint, OpenPush(reservation=reserved.reservation, length=20))
    await expect(stale, RejectedNow)


@pytest.mark.parametrize("field", [field.name for field in state_fields(small_spec())])
async def test_a_state_field_that_is_not_sent_is_refused_by_its_name(
    rank: DecodeRank, caller: Peers, sender: Peers, field: str
) -> None:
    """Both ways to forget it: neither sent nor declared, and declared but not sent."""
    request = make_request(make_prompt(33))  # odd: the tail has a row
    for declared in (False, True):
        prompt = Prompt(rank, request)
        prompt.pushes = [[span for span in spans if span.field != field] for spans in prompt.pushes]
        pieces = [piece for piece in prompt.pieces if declared or piece.field != field]
        answer, reserved = await reserve(caller, rank, request)
        push = await open_push(sender, rank, reserved, 33)
        await prompt.push(push, reserved)
        await push.send(prompt.commit(pieces))
        rejected = await expect(push, RejectedNow)
        assert f"{field} of layer" in rejected.why
        failed = await expect(answer, Failed)
        assert (failed.error, field in failed.message) == ("Rejected", True)
        await push.close()
        await until(lambda: rank.pool.ledger().blocks.leased == 0)


async def test_one_flipped_bit_in_any_push_is_refused(
    rank: DecodeRank, caller: Peers, sender: Peers
) -> None:
    request = make_request(make_prompt(33))
    prompt = Prompt(rank, request)
    for broken, spans in enumerate(prompt.pushes):
        answer, reserved = await reserve(caller, rank, request)
        push = await open_push(sender, rank, reserved, 33)
        for seq, good in enumerate(prompt.pushes):
            prompt.write(reserved, seq, good)
            if seq == broken:
                segment = reserved.segment
                start = segment.offset + seq % segment.cells * segment.cell_bytes
                rank.ring.memory[start + 7] ^= 1 << seq % 8
            await push.send(Pushed(seq=seq, spans=tuple(good)))
            await expect(push, Unpacked)
        await push.send(prompt.commit())
        why = (await expect(push, RejectedNow)).why
        assert f"{spans[0].field} of layer {spans[0].layer}" in why
        assert (await expect(answer, Failed)).error == "Rejected"
        await push.close()


@pytest.mark.parametrize(
    "spans",
    [
        [Span(field="invented", layer=0, start=0, stop=1)],
        [Span(field="window", layer=9, start=0, stop=1)],
        [Span(field="compressed_r1", layer=1, start=100, stop=200)],
        [Span(field="window", layer=0, start=-3, stop=2)],
    ],
)
async def test_a_push_of_what_cannot_be_is_refused(
    rank: DecodeRank, caller: Peers, sender: Peers, spans: list[Span]
) -> None:
    answer, reserved = await reserve(caller, rank, make_request(make_prompt(20)))
    push = await open_push(sender, rank, reserved, 20)
    await push.send(Pushed(seq=0, spans=tuple(spans)))
    await expect(push, RejectedNow)
    assert (await expect(answer, Failed)).error == "Rejected"
    await push.close()


async def test_memory_that_a_sender_may_still_write_into_is_quarantined_until_it_answers(
    rank: DecodeRank, caller: Peers, sender: Peers
) -> None:
    request = make_request(make_prompt(33))
    answer, reserved = await reserve(caller, rank, request)
    push = await open_push(sender, rank, reserved, 33)
    await answer.close()
    await expect(push, Cancel)
    assert rank.pool.ledger().blocks.quarantined == 3
    assert rank.ring.ledger().quarantined == 1
    prompt = Prompt(rank, request)
    before = rank.slab.blocks.clone()
    await push.send(Pushed(seq=0, spans=tuple(prompt.pushes[0])))  # it had not heard yet
    await push.send(Cancelled())
    await until(lambda: rank.pool.ledger().blocks.quarantined == 0)
    assert torch.equal(rank.slab.blocks, before)  # and nothing was unpacked any more
    assert rank.ring.ledger().free == rank.ring.ledger().total


async def test_a_sender_that_is_lost_ends_the_quarantine_and_the_reservation(
    rank: DecodeRank, caller: Peers, sender: Peers
) -> None:
    request = make_request(make_prompt(33))
    left, reserved = await reserve(caller, rank, request)
    await open_push(sender, rank, reserved, 33)
    waits, also = await reserve(caller, rank, request)
    await open_push(sender, rank, also, 33)
    await left.close()
    await until(lambda: rank.pool.ledger().blocks.quarantined == 3)
    await sender.close()
    await until(lambda: rank.pool.ledger().blocks.quarantined == 0)
    failed = await expect(waits, Failed)
    assert failed.error == "WorkerLost"


async def test_ranks_with_different_state_do_not_connect(rank: DecodeRank, sender: Peers) -> None:
    stream = await sender.open(rank.endpoint, Connect(wire_form="something else"))
    failed = await expect(stream, Failed)
    assert failed.error == "StartupError"
    assert "something else" in failed.message
    good = await sender.open(rank.endpoint, Connect(wire_form=rank.wire_form))
    assert (await expect(good, Connected)).ring_bytes == len(rank.ring.memory)
    await good.close()


async def test_answers_join_and_leave_the_batch_at_any_step(
    cluster: TinyCluster, rank: DecodeRank, caller: Peers
) -> None:
    """Colocated: prompts of different lengths come in while others decode."""
    requests = [
        make_request(make_prompt(5 + 9 * n, n), f"r{n}", max_tokens=3 + n) for n in range(6)
    ]

    async def generate(request: Request) -> list[int]:
        async with await caller.open(rank.endpoint, Generate(request=request, attempt=1)) as stream:
            return [t async for m in stream if isinstance(m, Tokens) for t in m.token_ids]

    alone = [await generate(request) for request in requests]
    steps = rank.health().steps
    together = await asyncio.gather(*(generate(request) for request in requests))
    assert together == alone
    assert [len(answer) for answer in alone] == [3, 4, 5, 6, 7, 8]
    assert rank.health().steps - steps < steps / 2  # they shared steps
