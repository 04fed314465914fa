"""A place to decode is lost, or does not fit: what becomes of a prompt's state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from cluster.messages import (
    Failed,
    HandedOver,
    PushFailed,
)
from cluster.wire import Peers, Stream
from decode_worker.worker import DecodeRank
from prefill_worker.worker import PrefillRank
from tests.prefill_worker.calls import Gated, expect, place, rest_of, start
from tests.tiny import (
    TinyCluster,
    make_prompt,
    make_request,
    tiny_config,
)


async def _lose_place(
    lose: Callable[[DecodeRank, Stream], Any],
    prefill: PrefillRank,
    caller: Peers,
    cluster: TinyCluster,
    link: Gated,
) -> None:
    """The first place is lost by `lose` in mid-push; the same state goes to another one."""
    request = make_request(make_prompt(70), max_tokens=6)
    expected = await cluster.answer(request)
    steps = prefill.health().steps
    stream, first = await start(caller, prefill, request)
    lost, other = cluster.decode
    link.gate.clear()
    link.waiting.clear()
    leg, first_place = await place(caller, stream, lost, request)
    await asyncio.to_thread(link.waiting.wait, 10)
    losing = asyncio.ensure_future(lose(lost, leg))
    link.gate.set()
    answer, reserved = await place(caller, stream, other, request)
    assert (await expect(stream, PushFailed)).reservation == first_place.reservation
    handed_over = await expect(stream, HandedOver)
    assert handed_over.reservation == reserved.reservation
    assert [first, *await rest_of(answer)] == expected
    assert prefill.health().steps == steps + 3  # nothing was computed again
    await losing


async def test_a_decode_rank_that_stops_in_mid_push_costs_no_recomputation(
    prefill: PrefillRank, caller: Peers, cluster: TinyCluster, link: Gated
) -> None:
    async def stop(rank: DecodeRank, leg: Stream) -> None:
        await rank.stop()

    await _lose_place(stop, prefill, caller, cluster, link)


async def test_a_reservation_that_its_caller_gives_up_costs_no_recomputation(
    prefill: PrefillRank, caller: Peers, cluster: TinyCluster, link: Gated
) -> None:
    async def leave(rank: DecodeRank, leg: Stream) -> None:
        await leg.close()

    await _lose_place(leave, prefill, caller, cluster, link)


async def test_a_write_that_fails_costs_no_recomputation(
    prefill: PrefillRank, caller: Peers, cluster: TinyCluster, link: Gated
) -> None:
    async def fail(rank: DecodeRank, leg: Stream) -> None:
        link.fail_next = True
        failed = await expect(leg, Failed)
        assert failed.error == "WorkerLost"  # it has lost its sender, and says so

    await _lose_place(fail, prefill, caller, cluster, link)


async def test_a_rank_that_holds_other_state_is_one_clear_error(
    prefill: PrefillRank, caller: Peers
) -> None:
    request = make_request(make_prompt(20))
    stream, _ = await start(caller, prefill, request)
    other = tiny_config(model={"seed": 1})  # the same shapes, but other weights
    async with TinyCluster(prefill=0, decode=1, config=other) as stranger:
        await place(caller, stream, stranger.decode[0], request)
        failed = await expect(stream, Failed)
        assert failed.error == "StartupError"
        assert "different models" in failed.message
