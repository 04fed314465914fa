"""A prefill rank as its callers see it; the test is the caller, over real sockets."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from torch import Tensor

from cluster.messages import (
    Cancel,
    Failed,
    HandedOver,
    Prefill,
    Request,
    Started,
    Tokens,
)
from cluster.wire import Peers
from model.batch import ForwardBatch
from model.cache import Cache
from prefill_worker.worker import PrefillRank
from tests.prefill_worker.calls import Gated, expect, gated, place, rest_of, start
from tests.tiny import (
    StateModel,
    TinyCluster,
    make_prompt,
    make_request,
    tiny_config,
    until,
)


async def test_the_first_token_does_not_wait_for_a_place_and_the_state_waits_in_its_lease(
    prefill: PrefillRank, caller: Peers, cluster: TinyCluster
) -> None:
    request = make_request(make_prompt(70), max_tokens=6)
    stream, first = await start(caller, prefill, request)
    assert prefill.pool.ledger().blocks.leased == 5
    answer, reserved = await place(caller, stream, cluster.decode[0], request)
    handed_over = await expect(stream, HandedOver)
    assert await stream.receive() is None
    assert handed_over.reservation == reserved.reservation
    assert handed_over.path == "local/memcpy"
    assert handed_over.bytes_moved >= prefill.layout.state_bytes(70)
    assert [first, *await rest_of(answer)] == await cluster.answer(request)


class LastChunkWaits(StateModel):
    """Computes positions from 128 on only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def forward(self, batch: ForwardBatch, cache: Cache) -> Tensor:
        if int(batch.positions_T.max()) >= 128:
            assert self.go_on.wait(20)
        return super().forward(batch, cache)


async def test_state_is_pushed_while_later_chunks_are_still_computed(caller: Peers) -> None:
    model = LastChunkWaits()
    async with TinyCluster(model=model, open_transport=gated) as cluster:
        prefill, request = cluster.prefill[0], make_request(make_prompt(150), max_tokens=6)
        link = prefill.transport
        assert isinstance(link, Gated)
        stream = await caller.open(prefill.endpoint, Prefill(request=request, attempt=1))
        await expect(stream, Started)
        answer, _ = await place(caller, stream, cluster.decode[0], request)
        await until(lambda: prefill.engine.runs[0].done == 128 and link.writes > 0)
        early = link.writes
        model.go_on.set()
        assert (await expect(stream, Tokens)).first == 0
        assert (await expect(stream, HandedOver)).pushes > early
        assert len(await rest_of(answer)) == 5
        assert await cluster.settled()


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"max_tokens": 9, "stop_token_ids": ()}])
async def test_an_answer_that_ends_with_its_first_token_is_not_handed_over(
    prefill: PrefillRank, caller: Peers, sampling: dict[str, Any]
) -> None:
    prompt = make_prompt(20)
    stream, first = await start(caller, prefill, make_request(prompt, max_tokens=2))
    await stream.close()
    if "stop_token_ids" in sampling:
        sampling = sampling | {"stop_token_ids": (first,), "ignore_stop": False}
    stream = await caller.open(
        prefill.endpoint, Prefill(request=make_request(prompt, **sampling), attempt=1)
    )
    await expect(stream, Started)
    tokens = await expect(stream, Tokens)
    assert tokens.token_ids == (first,)
    assert tokens.finish == ("length" if sampling["max_tokens"] == 1 else "stop")
    assert await stream.receive() is None


async def test_a_resumed_request_goes_on_at_the_right_index(
    prefill: PrefillRank, caller: Peers, cluster: TinyCluster
) -> None:
    whole = make_request(make_prompt(40), max_tokens=9, temperature=0.8, seed=5)
    answer = await cluster.answer(whole)
    resumed = whole.resume_after(answer[:4])
    _, token = await start(caller, prefill, resumed)
    assert token == answer[4]
    assert await cluster.answer(resumed) == answer[4:]


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (make_request([]), "BadRequest"),
        (make_request([5, 2048]), "BadRequest"),
        (make_request([5, -1]), "BadRequest"),
        (make_request([5], stop_token_ids=(4000,)), "BadRequest"),
        (make_request([5], output=[6, 7], max_tokens=2), "BadRequest"),
        (make_request([5] * 505, max_tokens=8), "PromptTooLong"),
    ],
)
async def test_what_would_harm_an_engine_is_refused_before_it(
    prefill: PrefillRank, caller: Peers, request_: Request, error: str
) -> None:
    stream = await caller.open(prefill.endpoint, Prefill(request=request_, attempt=1))
    assert (await expect(stream, Failed)).error == error
    assert prefill.health().steps == 0


async def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers(caller: Peers) -> None:
    config = tiny_config(prefill={"engine": {"num_blocks": 4, "max_length": 512}})
    async with TinyCluster(prefill=1, decode=0, config=config) as cluster:
        (rank,) = cluster.prefill
        stream = await caller.open(
            rank.endpoint, Prefill(request=make_request(make_prompt(65)), attempt=1)
        )
        failed = await expect(stream, Failed)
        assert failed.error == "PromptTooLong"
        assert "65" in failed.message
        assert "64" in failed.message


async def test_prompts_without_room_wait_their_turn_and_too_many_are_refused(
    caller: Peers,
) -> None:
    engine = {"num_blocks": 8, "chunk_tokens": 32, "max_length": 512, "max_waiting": 2}
    config = tiny_config(prefill={"engine": engine})
    async with TinyCluster(prefill=1, decode=0, config=config) as cluster:
        (rank,) = cluster.prefill
        held, _ = await start(caller, rank, make_request(make_prompt(100), "held"))
        small = Prefill(request=make_request(make_prompt(10), "small"), attempt=1)
        big = Prefill(request=make_request(make_prompt(100), "big"), attempt=1)
        waits = [await caller.open(rank.endpoint, first) for first in (big, small)]
        await until(lambda: rank.load().waiting == 2)
        assert rank.load().waiting_tokens == 110
        refused = await caller.open(rank.endpoint, small)
        assert (await expect(refused, Failed)).error == "NoRoom"
        await held.close()
        await expect(waits[0], Started)  # the big one first: it came first
        await waits[0].close()
        await expect(waits[1], Started)
        await waits[1].close()
        assert await cluster.settled()


async def test_no_prompt_is_admitted_while_too_many_blocks_wait_for_a_place(
    caller: Peers,
) -> None:
    engine = {"num_blocks": 8, "chunk_tokens": 64, "max_length": 512}
    config = tiny_config(prefill={"engine": engine})
    async with TinyCluster(prefill=1, decode=1, config=config) as cluster:
        rank, request = cluster.prefill[0], make_request(make_prompt(75), "homeless")
        stream, _ = await start(caller, rank, request)  # five of eight blocks
        await until(lambda: not rank.may_admit())
        other = Prefill(request=make_request([5, 6], "other"), attempt=1)
        waits = await caller.open(rank.endpoint, other)
        await until(lambda: rank.load().waiting == 1)
        assert rank.pool.ledger().blocks.free == 3
        await place(caller, stream, cluster.decode[0], request)
        await expect(waits, Started)
        await waits.close()


async def test_a_draining_rank_refuses_and_finishes_what_it_has(
    prefill: PrefillRank, caller: Peers, cluster: TinyCluster
) -> None:
    request = make_request(make_prompt(40), max_tokens=3)
    stream, _ = await start(caller, prefill, request)
    draining = asyncio.create_task(prefill.drain(timeout_s=10))
    await until(lambda: prefill.draining)
    refused = await caller.open(prefill.endpoint, Prefill(request=request, attempt=1))
    assert (await expect(refused, Failed)).error == "Draining"
    answer, _ = await place(caller, stream, cluster.decode[0], request)
    await expect(stream, HandedOver)
    assert len(await rest_of(answer)) == 2
    await draining


# ------------------------------------------------------------------ the caller goes


async def test_leaving_the_queue_leaves_nothing(caller: Peers) -> None:
    config = tiny_config(prefill={"engine": {"num_blocks": 4, "max_length": 512}})
    async with TinyCluster(prefill=1, decode=0, config=config) as cluster:
        (rank,) = cluster.prefill
        held, _ = await start(caller, rank, make_request(make_prompt(50), "held"))
        waits = await caller.open(
            rank.endpoint, Prefill(request=make_request(make_prompt(50), "waits"), attempt=1)
        )
        await until(lambda: rank.load().waiting == 1)
        await waits.close()
        await until(lambda: rank.load().waiting == 0)
        await held.close()
        assert await cluster.settled()


async def test_leaving_in_mid_prompt_stops_it_at_the_next_step(
    prefill: PrefillRank, caller: Peers, cluster: TinyCluster
) -> None:
    request = make_request(make_prompt(480))  # fifteen chunks
    stream = await caller.open(prefill.endpoint, Prefill(request=request, attempt=1))
    await expect(stream, Started)
    await stream.send(Cancel())  # a word is as good as leaving
    assert await stream.receive() is None
    assert await cluster.settled()
    assert prefill.health().steps < 15


async def test_leaving_while_the_state_waits_for_a_place_gives_it_up(
    prefill: PrefillRank, caller: Peers, cluster: TinyCluster
) -> None:
    stream, _ = await start(caller, prefill, make_request(make_prompt(40)))
    await stream.close()
    assert await cluster.settled()


@pytest.mark.parametrize("who", ["prefill first", "decode first"])
async def test_leaving_in_mid_push_frees_no_memory_that_a_write_still_uses(
    prefill: PrefillRank, caller: Peers, cluster: TinyCluster, link: Gated, who: str
) -> None:
    request = make_request(make_prompt(70))
    stream, _ = await start(caller, prefill, request)
    link.gate.clear()
    answer, _ = await place(caller, stream, cluster.decode[0], request)
    await asyncio.to_thread(link.waiting.wait, 10)
    for leg in (stream, answer) if who == "prefill first" else (answer, stream):
        await leg.close()
    decode = cluster.decode[0]
    await until(lambda: decode.pool.ledger().blocks.quarantined == 5)
    assert prefill.pool.ledger().blocks.leased == 5  # the write reads from it
    assert decode.ring.ledger().quarantined == 1  # and may still land here
    link.gate.set()
    assert await cluster.settled()


async def test_a_request_that_the_model_fails_on_fails_alone(
    prefill: PrefillRank, caller: Peers, cluster: TinyCluster
) -> None:
    good = make_request(make_prompt(60), "good", max_tokens=4)
    expected = await cluster.answer(good)
    bad = make_request([5, 6, StateModel.POISON, 7], "bad")
    answers = [asyncio.create_task(cluster.answer(good)) for _ in range(2)]
    stream = await caller.open(prefill.endpoint, Prefill(request=bad, attempt=1))
    await expect(stream, Started)
    failed = await expect(stream, Failed)
    assert failed.error == "ClusterError"
    assert "poisoned" in failed.message
    assert await asyncio.gather(*answers) == [expected, expected]
