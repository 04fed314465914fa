"""start, drain and stop of a rank in any order: it serves or it is gone, and nothing is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cluster.errors import StartupError
from cluster.messages import Address
from decode_worker.worker import DecodeRank
from kv_transfer.chosen_transport import ChosenTransport
from kv_transfer.open_transport import open_paths
from prefill_worker.worker import PrefillRank
from tests.tiny import SECRET, Rank, StateModel, tiny_config, until

KINDS = pytest.mark.parametrize("kind", [PrefillRank, DecodeRank])


async def nowhere() -> Address | None:
    return None


def rank_of(kind: type[Rank], **options: Any) -> Rank:
    options = {"model": StateModel()} | options
    return kind(config=tiny_config(), name="life/0", secret=SECRET, find_router=nowhere, **options)


@KINDS
async def test_what_never_started_can_be_drained_and_stopped(kind: type[Rank]) -> None:
    rank = rank_of(kind)
    await rank.drain(timeout_s=1.0)
    await rank.stop()
    await rank.stop()
    with pytest.raises(StartupError, match="stopped before"):
        await rank.start()


@KINDS
async def test_what_was_drained_before_it_started_takes_nothing_and_stops(
    kind: type[Rank],
) -> None:
    rank = rank_of(kind)
    await rank.drain(timeout_s=1.0)
    await rank.start()
    assert rank.member().draining
    await rank.stop()
    await rank.drain(timeout_s=1.0)
    await rank.stop()


@KINDS
async def test_a_start_that_fails_leaves_something_that_can_be_stopped(kind: type[Rank]) -> None:
    def broken(*args: Any, **options: Any) -> ChosenTransport:
        raise ValueError("no such transport")

    rank = rank_of(kind, transport=broken)
    with pytest.raises(StartupError, match="no such transport"):
        await rank.start()
    await rank.stop()


@KINDS
async def test_a_stop_does_not_wait_for_a_model_that_is_being_loaded(kind: type[Rank]) -> None:
    loaded, loading = threading.Event(), threading.Event()

    class Slow(kind):  # type: ignore[misc, valid-type]
        def _load(self) -> StateModel:
            loading.set()
            assert loaded.wait(10)
            return StateModel()

    rank = rank_of(Slow, model=None)
    starting = asyncio.create_task(rank.start())
    await until(loading.is_set)
    async with asyncio.timeout(5):
        await rank.stop()
        with pytest.raises(StartupError, match="stopped before"):
            await starting
    assert not loaded.is_set()
    loaded.set()


@KINDS
async def test_a_stop_while_the_transport_opens_closes_it(kind: type[Rank]) -> None:
    opening, opened = threading.Event(), threading.Event()
    closed: list[str] = []

    def slow(*args: Any, **options: Any) -> ChosenTransport:
        opening.set()
        assert opened.wait(10)
        transport = open_paths(*args, **options)
        close = transport.close

        def closing() -> None:
            closed.append("once")
            close()

        transport.close = closing  # type: ignore[method-assign]
        return transport

    rank = rank_of(kind, transport=slow)
    starting = asyncio.create_task(rank.start())
    await until(opening.is_set)
    stopping = asyncio.create_task(rank.stop())
    await _turn(lambda: rank.draining)
    opened.set()
    await stopping
    with pytest.raises(StartupError, match="stopped before"):
        await starting
    assert closed == ["once"]


@KINDS
async def test_two_stops_at_once_both_return_when_it_is_gone(kind: type[Rank]) -> None:
    rank = rank_of(kind)
    endpoint = await rank.start()
    await asyncio.gather(rank.stop(), rank.stop(), rank.drain(timeout_s=1.0))
    with pytest.raises(OSError):  # noqa: PT011  # whatever the system calls a closed port
        await asyncio.open_connection(endpoint.address.host, endpoint.address.port)


async def _turn(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not reached():
            await asyncio.sleep(0)
